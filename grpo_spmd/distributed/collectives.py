"""All collectives of the run except those that FSDP and vLLM make themselves, and the run's store.

Rewards, plans and token ids are sent as bytes over gloo. Nothing is pickled. All ranks must call
these functions in the same order. The key-value store, through which ranks tell each other things
without a collective, is in the process of torchrun's agent, or of rank 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.doctor import count_collective
from grpo_spmd.distributed.exit import Rank0Error

T = TypeVar("T")
# The run's store, None before start_session.
_store: dist.Store | None = None
# torch 2.13 renamed all_gather_into_tensor to all_gather_single.
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# The first byte of rank 0's reply tells what follows: a result, a ConfigError, or another error.
_RESULT = b"+"
_CONFIG_ERROR = b"?"
_ERROR = b"-"


def on_rank0(fn: Callable[[list[Any]], T], value: Any) -> T:
    """Collective. Calls `fn` on rank 0 with all ranks' values; returns its result on every rank.

    `fn` gets the values in rank order. Values and result are sent as JSON, in which floats stay
    exact, NaN too. If `fn` raises, every rank raises: a ConfigError as it is, any other error as a
    Rank0Error.
    """
    return on_rank0_bytes(lambda rows: fn([json.loads(row) for row in rows]), _encode(value))


def on_rank0_bytes(fn: Callable[[list[bytes]], T], payload: bytes) -> T:
    """Collective. Calls `fn` on rank 0 with all ranks' payloads; returns its result on each rank.

    It is `on_rank0` for payloads that are bytes already. `fn` gets them undecoded, in rank order.
    """
    payloads = gather_bytes(payload)
    reply = _run_and_send(lambda rows: [_encode(fn(rows))], payloads, _broadcast_first)
    return cast(T, json.loads(reply))


def scatter_from_rank0(fn: Callable[[list[bytes]], list[bytes]], payload: bytes) -> bytes:
    """Collective. Calls `fn` on rank 0 with all ranks' payloads; each rank gets its item of the
    result.

    `fn` gets the payloads in rank order and returns one item for each rank. Errors are raised as in
    `on_rank0`.
    """
    return _run_and_send(fn, gather_bytes(payload), _scatter_bytes)


def on_first_in_group(make: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Collective over `group`. Calls `make` on the group's first rank; all ranks get its result.

    The result is sent as JSON. Errors are raised as in `on_rank0`. If `group` is None, this rank is
    alone, and only calls `make`.
    """
    if group is None:
        return make()
    payloads = [b""] if dist.get_rank(group) == 0 else None
    reply = _run_and_send(
        lambda _: [_encode(make())],
        payloads,
        lambda replies: _broadcast_first(replies, group),
    )
    return cast(T, json.loads(reply))


def _run_and_send(
    fn: Callable[[list[bytes]], list[bytes]],
    payloads: list[bytes] | None,
    send: Callable[[list[bytes]], bytes],
) -> bytes:
    """Collective. Calls `fn` on the first rank and returns this rank's part of the replies.

    `payloads` is None on all other ranks. `send` is a collective that takes the first rank's list
    of replies and returns this rank's reply. If `fn` raised, every rank raises: a ConfigError as it
    is, any other error as a Rank0Error.
    """
    replies = [b""]
    error: Exception | None = None
    if payloads is not None:
        try:
            replies = [_RESULT + reply for reply in fn(payloads)]
        except ConfigError as config_error:
            replies = [_CONFIG_ERROR + _encode(str(config_error))] * len(payloads)
        except Exception as caught:
            # The error is sent, and every rank raises it below. If only rank 0 raised, the others
            # would report a lost connection.
            error = caught
            replies = [_ERROR + _encode(f"{type(caught).__name__}: {caught}")] * len(payloads)
    reply = send(replies)
    kind = reply[:1]
    content = reply[1:]
    if kind == _CONFIG_ERROR:
        raise ConfigError(json.loads(content))
    if kind == _ERROR:
        # The text may include a traceback: rank 0 keeps all of it, the others only its first line.
        text = json.loads(content)
        raise Rank0Error(text if error is not None else text.partition("\n")[0]) from error
    return content


def gather_bytes(payload: bytes) -> list[bytes] | None:
    """Collective. Returns every rank's payload in rank order on rank 0, and None elsewhere.

    Payloads may differ in length. They are not padded, so rank 0 holds no more than was sent.
    """
    count_collective()
    world_size = dist.get_world_size()
    is_rank0 = dist.get_rank() == 0
    if world_size == 1:
        return [payload]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)] if is_rank0 else None
    dist.gather(torch.tensor([len(payload)]), sizes, dst=0)
    if sizes is None:
        if payload:
            dist.send(_as_tensor(payload), dst=0)
        return None
    rows = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    wait_for([dist.irecv(row, src=rank) for rank, row in enumerate(rows) if rank and len(row)])
    return [payload, *(row.numpy().tobytes() for row in rows[1:])]


def all_gather_numbers(number: int) -> list[int]:
    """Collective. Returns every rank's number (at most 63 bits) in rank order on every rank."""
    count_collective()
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(value) for value in numbers]


def exchange_bytes(payloads: list[bytes]) -> list[bytes]:
    """Collective. Sends `payloads[r]` to rank r; returns what each rank sent, in rank order."""
    count_collective()
    if len(payloads) == 1:
        return payloads
    # The sizes are sent first, because the receiver must allocate its buffer.
    sent_sizes = torch.tensor([len(payload) for payload in payloads])
    sizes_tensor = torch.empty_like(sent_sizes)
    dist.all_to_all_single(sizes_tensor, sent_sizes)
    sizes = sizes_tensor.tolist()
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.all_to_all_single(received, _as_tensor(b"".join(payloads)), sizes, sent_sizes.tolist())
    return [row.numpy().tobytes() for row in received.split(sizes)]


def exchange_values(values: list[Any]) -> list[Any]:
    """Collective. Sends `values[r]` to rank r; returns what each rank sent, in rank order.

    Values are sent as msgpack, which turns tuples into lists.
    """
    payloads = exchange_bytes([msgspec.msgpack.encode(value) for value in values])
    return [msgspec.msgpack.decode(payload) for payload in payloads]


def start_all_gather(rows: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Collective. Starts an all-gather in place and returns the operations in progress.

    `rows` is [ranks of the group, n]; each rank has filled its own row, and gets the others. Call
    `wait_for` with the returned list before reading the other rows.
    """
    count_collective()
    rank = dist.get_rank(group)
    num_ranks = dist.get_world_size(group)
    works: list[dist.Work | None] = []
    if rows.is_cuda:
        works.append(_ALL_GATHER(rows.view(-1), rows[rank], group, async_op=True))
    else:
        # Point-to-point messages, because gloo's all-gather receives into a new buffer of the whole
        # size and copies from there. That takes 3 times as long and the memory of one more bucket.
        for distance in range(1, num_ranks):
            source = (rank - distance) % num_ranks
            target = (rank + distance) % num_ranks
            works.append(dist.irecv(rows[source], group=group, group_src=source))
            works.append(dist.isend(rows[rank], group=group, group_dst=target))
    return [work for work in works if work is not None]


def exchange_blocks(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`. Sends `blocks[r]` to rank r of the group; returns what each rank
    sent to this one, in rank order.

    `blocks` is [ranks of the group, ...], with the same shape on all of them.
    """
    count_collective()
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


def gather_blocks(block: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over `group`. Returns the tensors of all its ranks, [ranks of the group, ...].

    `block` is this rank's tensor. It has the same shape on all ranks.
    """
    gathered = block.new_empty(dist.get_world_size(group), block.numel())
    gathered[dist.get_rank(group)] = block.flatten()
    wait_for(start_all_gather(gathered, group))
    return gathered.view(len(gathered), *block.shape)


def wait_for(works: list[dist.Work | None] | list[dist.Work]) -> None:
    """Waits for each operation in `works` and empties the list.

    The list is emptied because a second wait for the same gloo message would never return.
    """
    while works:
        work = works.pop(0)
        if work is not None:
            work.wait()


def find_differing_ranks(payload: bytes, group: dist.ProcessGroup) -> list[int]:
    """Collective over `group`. Returns the ranks whose `payload` differs from the first rank's.

    Ranks are counted within `group`, from 0. All ranks get the same list. Only hashes are sent.
    """
    digest = _as_tensor(hashlib.sha256(payload).digest())
    digests = [torch.empty_like(digest) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, digest, group=group)
    return [rank for rank, row in enumerate(digests) if not torch.equal(row, digests[0])]


def barrier() -> None:
    """Collective. Waits for all ranks."""
    on_rank0(lambda _: None, None)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Collective. Returns True on every rank (of `group`) if the flag is set on one of them."""
    # The doctor expects that all ranks have counted the same collectives. Two groups of ranks may
    # call this a different number of times, so calls with a group are not counted.
    if group is None:
        count_collective()
    flags = torch.tensor([int(flag)])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group)
    return bool(flags)


def sum_in_place(values: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Collective. Adds up `values` over all ranks, or those of `group`."""
    dist.all_reduce(values, group=group)


def _broadcast_first(payloads: list[bytes], group: dist.ProcessGroup | None = None) -> bytes:
    """Collective. Returns the first rank's `payloads[0]` on every rank (of `group`).

    The `payloads` of all other ranks are ignored. None as `group` is all ranks.
    """
    payload = payloads[0]
    if group is None:
        count_collective()
    if dist.get_world_size(group) == 1:
        return payload
    size = torch.tensor([len(payload)])
    dist.broadcast(size, group_src=0, group=group)
    is_first = dist.get_rank(group) == 0
    buffer = _as_tensor(payload) if is_first else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, group_src=0, group=group)
    return buffer.numpy().tobytes()


def _scatter_bytes(payloads: list[bytes]) -> bytes:
    """Collective. Returns this rank's item of the `payloads` that rank 0 has, one for each rank."""
    count_collective()
    if dist.get_world_size() == 1:
        return payloads[0]
    is_rank0 = dist.get_rank() == 0
    size = torch.zeros(1, dtype=torch.int64)
    sizes = [torch.tensor([len(payload)]) for payload in payloads] if is_rank0 else None
    dist.scatter(size, sizes, src=0)
    if is_rank0:
        # The tensors must stay alive until their messages are sent.
        tensors = [_as_tensor(payload) for payload in payloads]
        wait_for([dist.isend(tensors[rank], dst=rank) for rank in range(1, len(tensors))])
        return payloads[0]
    buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(buffer, src=0)
    return buffer.numpy().tobytes()


def _encode(value: Any) -> bytes:
    """Returns a value as JSON in bytes."""
    return json.dumps(value).encode()


def _as_tensor(payload: bytes) -> Tensor:
    """Returns bytes as a uint8 tensor, which torch.distributed can send."""
    # torch.frombuffer refuses an empty buffer.
    if not payload:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


# The store.


def open_store(store: dist.Store) -> None:
    """Makes `store` the run's store. No earlier attempt of the run may have used its prefix.

    An attempt is one start of all ranks by torchrun.
    """
    global _store
    _store = store


def claim(queue: str, num_jobs: int, num_claimers: int) -> int | None:
    """Claims the next job in `queue` and returns its number; None if no job is left.

    The ranks share the queue, a counter in the run's store. The `num_jobs` jobs are numbered from 0
    on, and no two calls get the same number. Each of the `num_claimers` ranks must claim until it
    gets None. The last of these calls removes the queue, so that the store does not grow. Only then
    may its name be used again.
    """
    number = _run_store().add(queue, 1) - 1
    # The last rank that gets None.
    if number == num_jobs + num_claimers - 1:
        _run_store().delete_key(queue)
    return number if number < num_jobs else None


def count_up(counter: str, by: int = 1) -> int:
    """Adds `by` to a counter in the run's store and returns the sum.

    The counter is shared by all ranks and starts at 0. No two calls get the same sum.
    """
    return int(_run_store().add(counter, by))


def delete_counter(counter: str) -> None:
    """Removes a counter that nobody uses any more, so that the store does not grow."""
    _run_store().delete_key(counter)


def clone_store() -> dist.Store:
    """Returns the run's store over a new connection, for use in another thread.

    A call that waits blocks its connection. Over a shared connection it would block the main thread
    too.
    """
    return _run_store().clone()  # type: ignore[attr-defined, no-any-return]


def post_notice(notice: str, text: str) -> None:
    """Writes `text` to the run's store, where all ranks can read it under the name `notice`."""
    _run_store().set(notice, text)


def read_notice(notice: str) -> str | None:
    """Returns the text that some rank has posted under the name `notice`; None if none has."""
    return _run_store().get(notice).decode() if _run_store().check([notice]) else None


def _run_store() -> dist.Store:
    """Returns the run's store."""
    assert _store is not None, "start_session comes first"
    return _store
