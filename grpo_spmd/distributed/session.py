"""The session of a rank: joins the process group, knows rank, device and mesh, and leaves again."""

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
from grpo_spmd.distributed.collectives import barrier, open_store
from grpo_spmd.distributed.machine import rank_device, refuse_unreachable, with_time_to_start
from grpo_spmd.distributed.processes import end_with_parent, free_port

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
    """The mesh for sharding the policy: "shard", or "replicate" x "shard" (HSDP)."""
    sequence_group: dist.ProcessGroup | None = None
    """The ranks that share each micro-batch with this one. None: every rank has its own."""
    is_restart: bool = False
    """Whether torchrun started the ranks again after a failure. The same on all ranks."""
    attempt: int = 1
    """The number of this start of the ranks. No earlier start by the same torchrun had it."""

    @property
    def is_rank0(self) -> bool:
        """Whether this is rank 0, which decides for all ranks and writes most files."""
        return self.rank == 0

    @property
    def sequence_ranks(self) -> int:
        """The number of ranks that share a micro-batch."""
        return 1 if self.sequence_group is None else dist.get_world_size(self.sequence_group)


def start_session(
    num_replicas: int = 1,
    watchdog: WatchdogConfig = _DEFAULT_LIMITS,
    sequence_ranks: int = 1,
) -> Session:
    """Collective. Joins the process group that torchrun's variables describe.

    Without torchrun it is a group of this rank alone. The doctor watches this rank from here on
    until `end_session`. `num_replicas`, the number of copies of the policy, must divide the number
    of ranks; consecutive ranks share a copy. `sequence_ranks` consecutive ranks share each
    micro-batch, and must be on one node.
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
    # The store is opened first: ranks join through it, and the doctor needs it to watch the
    # creation of process groups.
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
    # The kernel need no longer kill this rank when torchrun ends: from here on the doctor notices
    # that, and ends the ranks with a report.
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
        sequence_group=sequence_group(device, sequence_ranks),
        is_restart=is_restart,
        attempt=attempt,
    )


def _set_single_rank() -> None:
    """Sets torchrun's variables for a single rank, because vLLM's external_launcher reads them."""
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(free_port())


def _join(store: dist.Store, rank: int, world_size: int) -> tuple[int, bool]:
    """Collective. Returns the number of this attempt and whether there was an earlier one.

    An attempt is one start of all ranks. torchrun's agent keeps one store over all restarts, so
    each attempt needs a number of its own for its keys: otherwise it would read those of an earlier
    attempt (addresses of dead processes). TORCHELASTIC_RESTART_COUNT cannot be that number, because
    a node that restarts only because another one failed does not count the restart. So rank 0 draws
    the number and hands it to the other ranks.

    Each other rank sets a new random token as "grpo_spmd/token/RANK", waits for rank 0's reply at
    "grpo_spmd/joins/TOKEN", and deletes the reply. A deleted reply shows rank 0 that the rank has
    read it. The store may still hold tokens of an earlier attempt. Rank 0 replies to these too, but
    nobody deletes those replies. So rank 0 keeps reading the tokens until each rank has set its new
    one and deleted the reply to it.
    """
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if rank != 0:
        token = uuid.uuid4().hex
        store.set(f"grpo_spmd/token/{rank}", f"{token} {num_restarts}")
        # get() waits until the key is set.
        attempt, is_restart = json.loads(store.get(f"grpo_spmd/joins/{token}"))
        store.delete_key(f"grpo_spmd/joins/{token}")
        return int(attempt), bool(is_restart)
    attempt = store.add("grpo_spmd/attempts", 1)

    def read_token(peer: int) -> list[str]:
        """Returns the peer's token and its number of restarts, both as text."""
        return store.get(f"grpo_spmd/token/{peer}").decode().split()

    # Every rank is asked for its number of restarts before any gets a reply, because rank 0's own
    # node may not have counted the restart.
    waiting = {peer: read_token(peer) for peer in range(1, world_size)}
    counts = [num_restarts, *(int(count) for _, count in waiting.values())]
    is_restart = attempt > 1 or max(counts) > 0
    reply = json.dumps([attempt, is_restart])
    replied: dict[int, str] = {}
    while waiting:
        for peer in list(waiting):
            token = read_token(peer)[0]
            if replied.get(peer) != token:
                store.set(f"grpo_spmd/joins/{token}", reply)
                replied[peer] = token
            elif not store.check([f"grpo_spmd/joins/{token}"]):
                # The peer has read the reply and deleted it.
                del waiting[peer]
        time.sleep(0.01)
    return attempt, is_restart


def collective_timeout(watchdog: WatchdogConfig) -> timedelta:
    """Returns the timeout for collectives of all process groups.

    It is far beyond the limit of any phase, so that the doctor ends a hang before torch does: the
    doctor knows for which rank all wait.
    """
    limits_s = [watchdog.timeout_s, *map(float, watchdog.phase_timeouts_s.values())]
    return timedelta(seconds=max(_MIN_COLLECTIVE_TIMEOUT_S, 4 * max(limits_s)))


def set_collective_timeouts(watchdog: WatchdogConfig) -> None:
    """Sets the timeout of all process groups that exist to `collective_timeout`.

    Groups that vLLM and device meshes have created have torch's default, 10 minutes over NCCL.
    """
    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(collective_timeout(watchdog), group)


def policy_mesh(device: torch.device, num_replicas: int) -> DeviceMesh:
    """Collective. Returns the mesh of all ranks: "shard", or "replicate" x "shard" (HSDP).

    Consecutive ranks hold one copy of the policy, of which there are `num_replicas`.
    """
    sizes = {"replicate": num_replicas, "shard": dist.get_world_size() // num_replicas}
    if num_replicas == 1:
        del sizes["replicate"]
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sequence_group(device: torch.device, num_ranks: int) -> dist.ProcessGroup | None:
    """Collective. Returns the `num_ranks` consecutive ranks that share micro-batches with this one:
    the dimension "sequence" of a mesh of its own. Returns None if each rank has its own."""
    if num_ranks == 1:
        return None
    sizes = (dist.get_world_size() // num_ranks, num_ranks)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("row", "sequence"))
    return mesh.get_group("sequence")


def engine_group(num_ranks: int) -> dist.ProcessGroup | None:
    """Collective. Returns a gloo group of the ranks that share this rank's engine.

    These are `num_ranks` consecutive ranks. Returns None if the rank has an engine of its own."""
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
