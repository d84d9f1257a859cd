"""Every collective outside FSDP and vLLM. Rewards, plans and token ids go as bytes over gloo, without pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.doctor import count_collective
from grpo_spmd.distributed.exit import Rank0Error

T = TypeVar("T")
_ALL_GATHER = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)  # renamed in torch 2.13


def on_rank0(fn: Callable[[list[Any]], T], value: Any) -> T:
    """Collective. Give every rank the result of `fn(values in rank order)` on rank 0; all must survive JSON, floats do
    exactly, NaN too. What `fn` raises becomes a Rank0Error on every rank; a ConfigError stays one."""
    return on_rank0_bytes(lambda parts: fn([json.loads(part) for part in parts]), _encode(value))


def on_rank0_bytes(fn: Callable[[list[bytes]], T], payload: bytes) -> T:
    """Collective. `on_rank0` of what ranks have made bytes of themselves; the result must survive JSON."""
    payloads = gather_bytes(payload)
    said = _answer(
        lambda payloads: [_encode(fn(payloads))], payloads, lambda reply: _broadcast_bytes(reply[0])
    )
    return cast(T, json.loads(said))


def scatter_from_rank0(fn: Callable[[list[bytes]], list[bytes]], payload: bytes) -> bytes:
    """Collective. Give each rank its own of what `fn(payloads in rank order)` returns on rank 0, in rank order. Errors
    as by `on_rank0`."""
    return _answer(fn, gather_bytes(payload), _scatter_bytes)


def _answer(
    fn: Callable[[list[bytes]], list[bytes]],
    payloads: list[bytes] | None,
    send: Callable[[list[bytes]], bytes],
) -> bytes:
    """Collective. This rank's of what the rank with `payloads` makes of them, or its error."""
    replies = [b""]
    error: Exception | None = None
    if payloads is not None:
        try:
            replies = [b"+" + reply for reply in fn(payloads)]
        except ConfigError as refused:
            replies = [b"?" + _encode(str(refused))] * len(payloads)
        except Exception as caught:  # every rank gets it below: a rank 0 that just left would look like a lost peer
            error = caught
            replies = [b"-" + _encode(f"{type(caught).__name__}: {caught}")] * len(payloads)
    reply = send(replies)
    kind, said = reply[:1], reply[1:]
    if kind == b"?":
        raise ConfigError(json.loads(said))
    if (
        kind == b"-"
    ):  # the whole text, which may hold a traceback, on rank 0 alone: it would be printed once a rank
        text = json.loads(said)
        raise Rank0Error(text if error is not None else text.partition("\n")[0]) from error
    return said


def gather_bytes(payload: bytes) -> list[bytes] | None:
    """Collective. Every rank's payload in rank order on rank 0; None elsewhere. Nobody pads: what rank 0 holds is what
    was sent, however uneven."""
    count_collective()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return [payload]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)] if rank == 0 else None
    dist.gather(torch.tensor([len(payload)]), sizes, dst=0)
    if sizes is None:
        if payload:
            dist.send(_as_tensor(payload), dst=0)
        return None
    out = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    wait_for(
        [
            work
            for r, row in enumerate(out)
            if r and len(row) and (work := dist.irecv(row, src=r)) is not None
        ]
    )
    return [payload, *(row.numpy().tobytes() for row in out[1:])]


def all_gather_numbers(number: int) -> list[int]:
    """Collective. Every rank's number, of at most 63 bits, in rank order on every rank."""
    count_collective()
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def exchange_bytes(payloads: list[bytes]) -> list[bytes]:
    """Collective. Send `payloads[r]` to rank r; returns what each rank sent here, in rank order."""
    count_collective()
    if len(payloads) == 1:
        return payloads
    sent = torch.tensor([len(p) for p in payloads])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    out = torch.empty(int(received.sum()), dtype=torch.uint8)
    dist.all_to_all_single(out, _as_tensor(b"".join(payloads)), received.tolist(), sent.tolist())
    return [part.numpy().tobytes() for part in out.split(received.tolist())]


def start_all_gather(rows: Tensor, group: dist.ProcessGroup) -> list[dist.Work]:
    """Collective. Over `group`: bring all into `rows` [ranks, n], where each wrote its own. Use it after `wait_for`."""
    count_collective()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rows.is_cuda:
        work = _ALL_GATHER(rows.view(-1), rows[rank], group, async_op=True)
        return [work] if work is not None else []
    # gloo's own all-gather receives into a new buffer of the whole size and copies it: 3 times the time, a bucket more.
    works = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        works.append(dist.irecv(rows[source], group=group, group_src=source))
        works.append(dist.isend(rows[rank], group=group, group_dst=target))
    return [work for work in works if work is not None]


def wait_for(works: list[dist.Work]) -> None:
    """Wait for each of `works`, and empty the list: gloo never returns from a second wait for the same message."""
    while works:
        works.pop(0).wait()


def find_differing_ranks(payload: bytes, group: dist.ProcessGroup) -> list[int]:
    """Collective. The ranks of `group`, from 0, whose `payload` is not that of its first; the same list on all."""
    mine = _as_tensor(hashlib.sha256(payload).digest())
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    return [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]


def barrier() -> None:
    """Collective. Wait for all ranks."""
    on_rank0(lambda _: None, None)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Collective. True on every rank, of `group` if it is given, if it is on one."""
    if group is None:  # groups need not come here equally often, so theirs are not counted
        count_collective()
    found = torch.tensor([int(flag)])
    if dist.get_world_size(group) > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
    return bool(found)


def sum_in_place(values: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Collective. Over `group`, or all ranks."""
    dist.all_reduce(values, group=group)


def on_first_in_group(make: Callable[[], T], group: dist.ProcessGroup) -> T:
    """Collective over `group`. What `make` returns on its first rank; it must survive JSON. Errors as by `on_rank0`."""
    payloads = [b""] if dist.get_rank(group) == 0 else None
    said = _answer(
        lambda _: [_encode(make())], payloads, lambda reply: _broadcast_bytes(reply[0], group)
    )
    return cast(T, json.loads(said))


def _broadcast_bytes(payload: bytes, group: dist.ProcessGroup | None = None) -> bytes:
    if group is None:
        count_collective()
    if dist.get_world_size(group) == 1:
        return payload
    size = torch.tensor([len(payload)])
    dist.broadcast(size, group_src=0, group=group)
    buffer = (
        _as_tensor(payload)
        if dist.get_rank(group) == 0
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(buffer, group_src=0, group=group)
    return buffer.numpy().tobytes()


def _scatter_bytes(payloads: list[bytes]) -> bytes:
    """`payloads`, on rank 0: one for each rank."""
    count_collective()
    if dist.get_world_size() == 1:
        return payloads[0]
    size, is_rank0 = torch.zeros(1, dtype=torch.int64), dist.get_rank() == 0
    dist.scatter(
        size, [torch.tensor([len(payload)]) for payload in payloads] if is_rank0 else None, src=0
    )
    if is_rank0:
        sent = [(to, _as_tensor(payload)) for to, payload in enumerate(payloads) if to]
        wait_for([work for to, part in sent if (work := dist.isend(part, dst=to)) is not None])
        return payloads[0]
    buffer = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(buffer, src=0)
    return buffer.numpy().tobytes()


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _as_tensor(payload: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.empty(0, dtype=torch.uint8)
    )
