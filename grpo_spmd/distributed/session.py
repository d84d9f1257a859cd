"""The session of a rank: it joins the process group, knows its rank and mesh, and leaves again."""

from __future__ import annotations

import json
import os
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from grpo_spmd.config.schema import WatchdogConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import barrier
from grpo_spmd.distributed.machine import rank_device, refuse_unreachable, with_time_to_start
from grpo_spmd.distributed.processes import end_with_parent, free_port
from grpo_spmd.distributed.store import open_store

_DEFAULT_LIMITS = WatchdogConfig()
_MIN_COLLECTIVE_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Session:
    """What a rank knows about itself and the other ranks."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh
    """The policy is sharded over it: "shard", or "replicate" x "shard" (HSDP)."""
    is_restart: bool = False
    """torchrun started the ranks again after a failure. The same on all ranks."""
    attempt: int = 1
    """A number that no earlier start by this torchrun has had."""

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def start_session(num_replicas: int = 1, watchdog: WatchdogConfig = _DEFAULT_LIMITS) -> Session:
    """Collective. Joins the process group that torchrun describes, else a group of this rank alone.

    The doctor watches until `end_session`. Consecutive ranks share one of `num_replicas` copies of
    the policy, which divide the number of ranks.
    """
    if "RANK" not in os.environ:
        _set_single_rank()
    # Turns on torch's flight recorder, for the doctor's report of a hang.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = rank_device(local_rank)
    watchdog = with_time_to_start(watchdog, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = collective_timeout(watchdog)
    # The store comes first: through it ranks join, and the doctor works while groups are created.
    run_store, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    run_store.set_timeout(timedelta(seconds=doctor.limit_s(watchdog, "start")))
    try:
        attempt, is_restart = _join(run_store, rank, world_size)
    except dist.DistStoreError as error:
        raise RuntimeError(
            "another rank did not come within the limit of phase start "
            "(watchdog.phase_timeouts_s): see its output"
        ) from error
    run_store.set_timeout(timeout)
    store = dist.PrefixStore(f"grpo_spmd/{attempt}", run_store)
    open_store(store)
    doctor.start(dist.PrefixStore("doctor", store), rank, world_size, watchdog)
    # From here on the doctor notices that torchrun is gone, and the ranks end in their own way.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(0)
    refuse_unreachable(store, rank, world_size)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo",
        store=dist.PrefixStore("default_group", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    mesh = policy_mesh(device, num_replicas)
    return Session(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        device=device,
        mesh=mesh,
        is_restart=is_restart,
        attempt=attempt,
    )


def _set_single_rank() -> None:
    """Sets the variables that torchrun would set, which vLLM's external_launcher reads."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())


def _join(store: dist.Store, rank: int, world_size: int) -> tuple[int, bool]:
    """Collective. Returns the number of this attempt and whether there was an earlier one.

    torchrun's agent keeps one store over all restarts. Without a number of its own an attempt would
    read keys of an earlier one (addresses of dead processes). TORCHELASTIC_RESTART_COUNT is no such
    number: a node that restarts because another one failed does not count it. So rank 0 draws a
    number, and gives it to each rank that shows a sign which only this attempt can know.
    """
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank != 0:
        sign = uuid.uuid4().hex
        store.set(f"grpo_spmd/sign/{rank}", f"{sign} {num_restarts}")
        attempt, is_restart = json.loads(store.get(f"grpo_spmd/joins/{sign}"))  # waits for it
        store.delete_key(f"grpo_spmd/joins/{sign}")
        return int(attempt), bool(is_restart)
    attempt = store.add("grpo_spmd/attempts", 1)

    def read_sign(peer: int) -> list[str]:
        return store.get(f"grpo_spmd/sign/{peer}").decode().split()

    # First all signs, because rank 0's own node may not have counted the restart; then the answers.
    # A sign of an earlier attempt is answered in vain until its rank has set a new one: only the
    # owner of a sign deletes its answer.
    waiting = {peer: read_sign(peer) for peer in range(1, world_size)}
    counts = [num_restarts, *(int(count) for _, count in waiting.values())]
    is_restart = attempt > 1 or max(counts) > 0
    reply = json.dumps([attempt, is_restart])
    answered: dict[int, str] = {}
    while waiting:
        for peer in list(waiting):
            sign = read_sign(peer)[0]
            if answered.get(peer) != sign:
                store.set(f"grpo_spmd/joins/{sign}", reply)
                answered[peer] = sign
            elif not store.check([f"grpo_spmd/joins/{sign}"]):
                del waiting[peer]
        time.sleep(0.01)
    return attempt, is_restart


def collective_timeout(watchdog: WatchdogConfig) -> timedelta:
    """Returns the timeout of process groups.

    It is far beyond the limit of any phase: the doctor knows whom all wait for, and must be first.
    """
    limits_s = [watchdog.timeout_s, *map(float, watchdog.phase_timeouts_s.values())]
    return timedelta(seconds=max(_MIN_COLLECTIVE_TIMEOUT_S, 4 * max(limits_s)))


def set_collective_timeouts(watchdog: WatchdogConfig) -> None:
    """Sets `collective_timeout` for all groups that exist.

    Groups of vLLM and of meshes have torch's default, 10 minutes over NCCL.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(collective_timeout(watchdog), group)


def policy_mesh(device: torch.device, num_replicas: int) -> DeviceMesh:
    """Collective. Returns all ranks as "shard", or as "replicate" x "shard".

    Consecutive ranks hold one copy of the policy.
    """
    sizes = {"replicate": num_replicas, "shard": dist.get_world_size() // num_replicas}
    if num_replicas == 1:
        del sizes["replicate"]
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def engine_group(num_ranks: int) -> dist.ProcessGroup | None:
    """Collective. Returns the `num_ranks` consecutive ranks that share this one's engine, over
    gloo; None if the rank has its own engine."""
    return dist.new_subgroups(num_ranks, backend="gloo")[0] if num_ranks > 1 else None


def end_session() -> None:
    """Collective. Leaves the process group, all ranks together.

    The engine's shutdown may have destroyed the group already.
    """
    if dist.is_initialized():
        barrier()
    doctor.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
