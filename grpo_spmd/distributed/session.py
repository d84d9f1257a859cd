"""The session of a rank: joining the process group, its facts and mesh, leaving it again."""

from __future__ import annotations

import json
import os
import socket
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
from grpo_spmd.distributed.store import open_store

_LIMITS = WatchdogConfig()


@dataclass(frozen=True)
class Session:
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mesh: DeviceMesh  # over which the policy is sharded: "shard", or "replicate" x "shard" (HSDP)
    engine_group: (
        dist.ProcessGroup | None
    )  # the ranks that share this one's engine, over gloo; None: it has its own
    is_restart: bool = (
        False  # torchrun started the ranks again after a failure; the same on all ranks
    )
    attempt: int = 1  # a number that no earlier start by this torchrun has had

    @property
    def is_rank0(self) -> bool:
        return self.rank == 0


def start_session(
    num_replicas: int = 1, tensor_parallel_size: int = 1, watchdog: WatchdogConfig = _LIMITS
) -> Session:
    """Collective. Join the process group that torchrun describes, or without torchrun one of this rank; the doctor
    watches until `end_session`. Consecutive ranks share one of `num_replicas` copies of the policy,
    `tensor_parallel_size` of them an engine; both divide the number of ranks."""
    if (
        "RANK" not in os.environ
    ):  # debug mode: vLLM's external_launcher wants the variables that torchrun would set
        os.environ.update(
            RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1"
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
    os.environ.setdefault(
        "TORCH_FR_BUFFER_SIZE", "1000"
    )  # the flight recorder, for the doctor's report of a hang
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device, watchdog = rank_device(local_rank), with_time_to_start(watchdog, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = collective_timeout(watchdog)
    of_run, _, _ = next(iter(dist.rendezvous("env://", timeout=timeout)))
    of_run.set_timeout(timedelta(seconds=doctor.limit_s(watchdog, "start")))
    try:
        attempt, is_restart = _join(of_run, rank, world_size)
    except dist.DistStoreError as error:
        why = "another rank did not come within the limit of phase start (watchdog.phase_timeouts_s): see its output"
        raise RuntimeError(why) from error
    of_run.set_timeout(timeout)
    store = dist.PrefixStore(f"grpo_spmd/{attempt}", of_run)
    open_store(store)
    doctor.start(dist.PrefixStore("doctor", store), rank, world_size, watchdog)
    refuse_unreachable(store, rank, world_size)
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    own = dist.PrefixStore("default_group", store)
    dist.init_process_group(backends, store=own, rank=rank, world_size=world_size, timeout=timeout)
    mesh = policy_mesh(device, num_replicas)
    engine_group = (
        dist.new_subgroups(tensor_parallel_size, backend="gloo")[0]
        if tensor_parallel_size > 1
        else None
    )
    return Session(rank, world_size, local_rank, device, mesh, engine_group, is_restart, attempt)


def _join(store: dist.Store, rank: int, world_size: int) -> tuple[int, bool]:
    """Collective. A number that no earlier attempt of this run has had, and whether there was one; equal on all ranks.
    torchrun's agent keeps one store over all restarts: unnumbered, an attempt would read keys of an old one (addresses
    of dead processes). TORCHELASTIC_RESTART_COUNT is no such number: a node that restarts since another failed does not
    count it. So rank 0 draws one, and gives it to whoever shows a sign that only this attempt can know."""
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank != 0:
        sign = uuid.uuid4().hex
        store.set(f"grpo_spmd/sign/{rank}", f"{sign} {num_restarts}")
        attempt, is_restart = json.loads(store.get(f"grpo_spmd/joins/{sign}"))  # waits for it
        store.delete_key(f"grpo_spmd/joins/{sign}")
        return int(attempt), bool(is_restart)
    attempt = store.add("grpo_spmd/attempts", 1)
    # First all signs, to learn of restarts that rank 0's own node has not counted; then the answers. A sign of an
    # earlier attempt is answered in vain, until its rank has come with a new one: only its owner deletes the answer.
    signs = {
        other: store.get(f"grpo_spmd/sign/{other}").decode().split()
        for other in range(1, world_size)
    }
    is_restart = (
        attempt > 1 or max([num_restarts, *(int(count) for _, count in signs.values())]) > 0
    )
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
    """Of process groups: far beyond any phase's, so that the doctor, who knows whom all wait for, speaks first."""
    longest_s = max([watchdog.timeout_s, *map(float, watchdog.phase_timeouts_s.values())])
    return timedelta(seconds=max(3600.0, 4 * longest_s))


def set_collective_timeouts(watchdog: WatchdogConfig) -> None:
    """`collective_timeout` for all groups that exist: vLLM's and meshes' have torch's default, 10 minutes over NCCL."""
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(collective_timeout(watchdog), group)


def policy_mesh(device: torch.device, num_replicas: int) -> DeviceMesh:
    """Collective. All ranks as "shard", or as "replicate" x "shard", where consecutive ranks hold one copy."""
    sizes = {"replicate": num_replicas, "shard": dist.get_world_size() // num_replicas}
    if num_replicas == 1:
        del sizes["replicate"]
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def end_session() -> None:
    """Collective. Leave the process group, all together (the engine's shutdown may have done so already)."""
    if dist.is_initialized():
        barrier()
    doctor.stop()
    if dist.is_initialized():
        dist.destroy_process_group()
