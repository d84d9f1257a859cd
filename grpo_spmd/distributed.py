"""The process-group session, rank facts, and every collective the project uses outside FSDP and vLLM.

Numbers for control (rewards, plans, token ids) travel as bytes over gloo on the CPU: they are small, and no pickle is involved.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_spmd import doctor
from grpo_spmd.config import ConfigError, WatchdogConfig
from grpo_spmd.doctor import Rank0Error as Rank0Error
from grpo_spmd.doctor import count_collective
from grpo_spmd.doctor import exit_with_outcome as exit_with_outcome

T = TypeVar("T")
_ALL_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # renamed in torch 2.13


@dataclass(frozen=True)
class Session:
    """Facts of this rank in the run, and the mesh over which the policy is sharded: "shard", or "replicate" x "shard" (HSDP)."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    engine_group: dist.ProcessGroup | None  # the ranks that share this one's engine, over gloo; None where it has an engine of its own
    is_restart: bool = False  # torchrun started the ranks again after a failure; alike on all ranks
    attempt: int = 1  # a number that no earlier start by this torchrun has had

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


_store: dist.Store | None = None


def start_session(num_replicas: int = 1, tensor_parallel_size: int = 1, watchdog: WatchdogConfig | None = None) -> Session:
    """Collective. Join the process group that torchrun describes, or a group of one where there is no torchrun.

    The doctor watches from here until `end_session`.

    Args:
        num_replicas: copies of the policy; consecutive ranks share one. Divides the number of ranks.
        tensor_parallel_size: consecutive ranks that share an engine. Divides it too.
        watchdog: the limits of phases.
    """
    global _store
    watchdog = watchdog or WatchdogConfig()
    if "RANK" not in os.environ:  # debug mode: vLLM's external_launcher wants the same variables that torchrun would set
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")  # the flight recorder, for the doctor's report of a hang
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    timeout = collective_timeout(watchdog)
    of_run, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    of_run.set_timeout(timedelta(seconds=doctor.limit_s(watchdog, "start")))
    try:
        attempt, is_restart = _join(of_run, rank, world_size)
    except dist.DistStoreError as error:
        raise RuntimeError(
            "another rank did not come within the limit of phase start (watchdog.phase_timeouts_s): see its output"
        ) from error
    of_run.set_timeout(timeout)
    _store = dist.PrefixStore(f"grpo_spmd/{attempt}", of_run)
    doctor.start(dist.PrefixStore("doctor", _store), rank, world_size, watchdog)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
        store=dist.PrefixStore("default_group", _store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    mesh = policy_mesh(device, num_replicas)
    engine_group = dist.new_subgroups(tensor_parallel_size, backend="gloo")[0] if tensor_parallel_size > 1 else None
    return Session(rank, world_size, local_rank, device, mesh, engine_group, is_restart, attempt)


def _join(store: dist.Store, rank: int, world_size: int) -> tuple[int, bool]:
    """Collective. A number that no earlier attempt of this run has had, alike on all ranks; and whether there was an earlier one.

    torchrun's agent keeps one store over all restarts, so that without a number in their names a new attempt would read the keys of the old
    one, addresses of dead processes among them. TORCHELASTIC_RESTART_COUNT is not that number: a node that restarts because another one has
    failed does not count it. So rank 0 draws one, and gives it to whoever shows a sign that only this attempt can know.
    """
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank != 0:
        sign = uuid.uuid4().hex
        store.set(f"grpo_spmd/sign/{rank}", f"{sign} {num_restarts}")
        attempt, is_restart = json.loads(store.get(f"grpo_spmd/joins/{sign}"))  # waits for it
        store.delete_key(f"grpo_spmd/joins/{sign}")
        return int(attempt), bool(is_restart)
    attempt = store.add("grpo_spmd/attempts", 1)
    # First all signs, to learn of restarts that rank 0's own node has not counted; then the answers. A sign of an earlier attempt is
    # answered in vain, until its rank has come with a new one: only its owner deletes the answer.
    signs = {other: store.get(f"grpo_spmd/sign/{other}").decode().split() for other in range(1, world_size)}
    is_restart = attempt > 1 or max([num_restarts, *(int(count) for _, count in signs.values())]) > 0
    reply, answered = json.dumps([attempt, is_restart]), dict[int, str]()
    while signs:
        for other in list(signs):
            sign = store.get(f"grpo_spmd/sign/{other}").decode().split()[0]
            if answered.get(other) != sign:
                store.set(f"grpo_spmd/joins/{sign}", reply)
                answered[other] = sign
            elif not store.check([f"grpo_spmd/joins/{sign}"]):
                del signs[other]
        time.sleep(0.01)
    return attempt, is_restart


def collective_timeout(watchdog: WatchdogConfig) -> timedelta:
    """Of process groups: far beyond any phase's limit, so that the doctor, who knows which rank the others wait for, speaks first."""
    return timedelta(seconds=max(3600.0, 4 * max([watchdog.timeout_s, *map(float, watchdog.phase_timeouts_s.values())])))


def set_collective_timeouts(watchdog: WatchdogConfig) -> None:
    """`collective_timeout` for all groups that exist: those that vLLM and device meshes made have torch's default, 10 minutes over NCCL."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(collective_timeout(watchdog), group)


def policy_mesh(device: torch.device, num_replicas: int) -> DeviceMesh:
    """Collective. All ranks as "shard", or as "replicate" x "shard" (HSDP), consecutive ranks holding one copy of the policy."""
    world_size = dist.get_world_size()
    if num_replicas == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (num_replicas, world_size // num_replicas), mesh_dim_names=("replicate", "shard"))


def end_session() -> None:
    """Collective. Leave the process group, all ranks together (the engine's shutdown may have done so already)."""
    if dist.is_initialized():
        barrier()
    doctor.stop()
    if dist.is_initialized():
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def on_rank0(fn: Callable[[list[Any]], T], value: Any) -> T:
    """Collective. Gather every rank's `value`, call `fn(values in rank order)` on rank 0, give its result to every rank.

    Values and result must survive JSON; floats do so exactly, NaN included.

    Raises:
        Rank0Error: on every rank, if `fn` raised on rank 0; a ConfigError stays one.
    """
    values = gather_bytes(_encode(value))
    reply = b""
    error: Exception | None = None
    if values is not None:
        try:
            reply = b"+" + _encode(fn([json.loads(v) for v in values]))
        except ConfigError as refused:
            reply = b"?" + _encode(str(refused))
        except Exception as caught:  # handed to every rank below: a rank 0 that just left would look like a lost connection
            error = caught
            reply = b"-" + _encode(f"{type(caught).__name__}: {caught}")
    reply = _broadcast_bytes(reply)
    if reply[:1] == b"?":
        raise ConfigError(json.loads(reply[1:]))
    if reply[:1] == b"-":
        # The whole text, which may hold a traceback, on rank 0 alone: it would be printed once a rank.
        text = json.loads(reply[1:])
        raise Rank0Error(text if error is not None else text.partition("\n")[0]) from error
    result: T = json.loads(reply[1:])
    return result


def gather_bytes(payload: bytes) -> list[bytes] | None:
    """Collective. Every rank's payload in rank order on rank 0; None elsewhere."""
    count_collective()
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return [payload]
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(sizes, torch.tensor([len(payload)]))
    width = max(int(size) for size in sizes)
    mine = torch.zeros(width, dtype=torch.uint8)
    mine[: len(payload)] = _as_tensor(payload)
    out = [torch.empty(width, dtype=torch.uint8) for _ in range(world_size)] if rank == 0 else None
    dist.gather(mine, out, dst=0)
    if out is None:
        return None
    return [tensor[: int(size)].numpy().tobytes() for tensor, size in zip(out, sizes, strict=True)]


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
    """Collective. Over `group`: bring all ranks' rows into `rows` [ranks, n], in place; this rank has written its own already.

    Returns what `wait_for` waits for, before `rows` is read or written.
    """
    count_collective()
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rows.is_cuda:
        work = _ALL_GATHER(rows.view(-1), rows[rank], group, async_op=True)
        return [work] if work is not None else []
    # gloo's own all-gather receives into a new buffer of the whole size and copies it over: 3 times the time, and a bucket more.
    works = []
    for distance in range(1, ranks):
        source, target = (rank - distance) % ranks, (rank + distance) % ranks
        works += [dist.irecv(rows[source], group=group, group_src=source), dist.isend(rows[rank], group=group, group_dst=target)]
    return [work for work in works if work is not None]


def wait_for(works: list[dist.Work]) -> None:
    """Wait for each of `works`, and empty the list: gloo never returns from a second wait for the same message."""
    while works:
        works.pop(0).wait()


def ranks_that_differ(payload: bytes, group: dist.ProcessGroup) -> list[int]:
    """Collective. Over `group`: its ranks, numbered from 0, whose `payload` is not that of its first; alike on all of them.

    Only digests of 32 bytes travel.
    """
    mine = _as_tensor(hashlib.sha256(payload).digest())
    digests = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(digests, mine, group=group)
    return [rank for rank, digest in enumerate(digests) if not torch.equal(digest, digests[0])]


def barrier() -> None:
    """Collective. Wait for all ranks."""
    on_rank0(lambda _: None, None)


def any_rank(flag: bool) -> bool:
    """Collective. True on every rank if it is on one."""
    count_collective()
    found = torch.tensor([int(flag)])
    if dist.get_world_size() > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)


def claim(queue: str, num_jobs: int, num_claimers: int) -> int | None:
    """The first of the numbers 0 .. `num_jobs` - 1 that nobody has claimed yet, or None when all are taken. Waits for nobody.

    Each of the `num_claimers` ranks must claim until it gets its None: the last None removes the queue from the run's store, which would
    otherwise grow with every step. `queue` must name nothing that some rank may still claim from.
    """
    assert _store is not None, "start_session comes first"
    number = _store.add(queue, 1) - 1
    if number == num_jobs + num_claimers - 1:
        _store.delete_key(queue)
    return number if number < num_jobs else None


def own_store() -> dist.Store:
    """The run's store over a connection of its own, for a thread: on a shared one a call that waits would make the main thread wait."""
    assert _store is not None, "start_session comes first"
    clone: dist.Store = _store.clone()  # type: ignore[attr-defined]
    return clone


def post(notice: str, text: str) -> None:
    """Show `text` to all ranks under the name `notice`, in the run's store. Waits for nobody."""
    assert _store is not None, "start_session comes first"
    _store.set(notice, text)


def posted(notice: str) -> str | None:
    """What some rank has posted under this name, or None. Waits for nobody."""
    assert _store is not None, "start_session comes first"
    return _store.get(notice).decode() if _store.check([notice]) else None


def merge_sums(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Bring together dictionaries of sums that ranks collected; a key missing on a rank counts as nothing.

    Numbers add up; keys "max:..." take the maximum, "hist:..." add up element by element, "ids:..." are put one after the other.
    """
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.startswith("max:"):
                merged[name] = max(merged[name], value)
            elif name.startswith("hist:"):
                merged[name] = [a + b for a, b in zip(merged[name], value, strict=True)]
            else:
                merged[name] = merged[name] + value
    return merged


def _broadcast_bytes(payload: bytes) -> bytes:
    count_collective()
    if dist.get_world_size() == 1:
        return payload
    size = torch.tensor([len(payload)])
    dist.broadcast(size, src=0)
    buffer = _as_tensor(payload) if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()


def _as_tensor(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
