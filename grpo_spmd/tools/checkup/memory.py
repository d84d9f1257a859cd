"""Memory, cores and limits of this machine, compared with what its ranks need."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Iterator
from pathlib import PurePosixPath

from grpo_spmd.checks.memory import TRAINED_ITEMSIZE, engine_weights, state_of
from grpo_spmd.model.config_json import read_model
from grpo_spmd.tools.checkup.results import Result, Target, bad, ok, plural, size_text, warning

_GIB = 1 << 30
_MIB = 1 << 20
# Per rank: NCCL's segments for ranks of a node without direct access to each other's GPU, about
# 10 MB a channel, and vLLM's.
_SHM_NEEDED = 64 * _MIB
_SHM_WANTED = 256 * _MIB
# A rank with torch and vLLM loaded and a tiny model: 0.8 GiB on a CPU, as measured. CUDA's
# libraries take more.
_RANK_NEEDED = 1.0 * _GIB
_RANK_WANTED = 1.5 * _GIB
_GPU_RANK_WANTED = 4.0 * _GIB
_UNLIMITED = 1 << 60


def check_shared_memory(target: Target) -> Iterator[Result]:
    folder, name = target.root / "dev/shm", "/dev/shm"
    enlarge = (
        "docker run --shm-size 64g; Kubernetes: an emptyDir of medium Memory; "
        "mount -o remount,size=64g /dev/shm"
    )
    if not folder.is_dir():
        yield bad(name, "there is no such folder: NCCL and vLLM share memory there", enlarge)
        return
    disk = shutil.disk_usage(folder)
    finding = f"{size_text(disk.free)} free of {size_text(disk.total)}, {target.ranks_text} here"
    if not os.access(folder, os.W_OK):
        yield bad(name, f"no permission to write there ({finding})", "chmod 1777 /dev/shm")
        return
    # Ranks share the folder.
    free_each = disk.free / target.local_ranks
    if free_each >= _SHM_WANTED:
        yield ok(name, finding)
        return
    is_bad = free_each < _SHM_NEEDED
    make = bad if is_bad else warning
    if disk.total >= _SHM_WANTED * target.local_ranks:
        yield make(
            name, f"{finding}: files of others fill it", "ls -l /dev/shm; remove what nobody uses"
        )
    else:
        limit = size_text(_SHM_NEEDED if is_bad else _SHM_WANTED)
        yield make(name, f"{finding}: less than {limit} a rank", enlarge)


def check_memory(target: Target) -> Iterator[Result]:
    host = _read_meminfo(target)
    total, available, note = host["MemTotal"], host["MemAvailable"], ""
    # A container or a job may have less than the host.
    limit, used = _memory_limit(target)
    if limit < total:
        total, available, note = limit, min(available, limit - used), " (the cgroup's limit)"
    finding = f"{size_text(available)} free of {size_text(total)}{note}, for {target.ranks_text}"
    sizes = _rank_memory(target)
    if sizes:
        rank_bytes = sum(sizes.values())
        terms = [f"{name} {size_text(n)}" for name, n in sizes.items() if n > 0.01 * rank_bytes]
        finding += f", which need about {size_text(target.local_ranks * rank_bytes)}"
        finding += f" (each: {' + '.join(terms)})"
    needed = sum(sizes.values()) if sizes else _RANK_NEEDED
    # Enough to start is not yet comfortable.
    wanted = _GPU_RANK_WANTED if target.num_gpus else _RANK_WANTED
    remedy = "fewer ranks here, a larger --mem or memory limit, or end what else is running"
    if available < target.local_ranks * needed:
        yield bad("memory", finding, remedy)
    elif available < target.local_ranks * wanted:
        yield warning("memory", f"{finding}: under {size_text(wanted)} a rank", remedy)
    else:
        yield ok("memory", finding)
    if target.read("/proc/sys/vm/overcommit_memory").strip() == "2":
        yield warning(
            "overcommit",
            "vm.overcommit_memory is 2: CUDA and torch reserve more addresses than they use",
            "sysctl vm.overcommit_memory=0",
        )


def check_swap(target: Target) -> Iterator[Result]:
    host = _read_meminfo(target)
    total = host.get("SwapTotal", 0)
    used = total - host.get("SwapFree", 0)
    finding = f"{size_text(used)} of {size_text(total)} in use" if total else "none"
    if used > 0.1 * total and used > _GIB:
        finding += ": ranks that are swapped out make all others wait"
        yield warning("swap", finding, "end what else is running; swapoff -a")
    else:
        yield ok("swap", finding)


def _rank_memory(target: Target) -> dict[str, float]:
    """Bytes of host memory that a rank needs by the config; {} if the model is not here."""
    config = target.config
    model = read_model(config.model.path) if config else None
    if config is None or model is None:
        return {}
    state, weights = state_of(config, model, target.num_ranks), engine_weights(config, model)
    sizes = {"a process": _RANK_NEEDED, "the checkpoint's copy": TRAINED_ITEMSIZE * state.trained}
    if not target.num_gpus:
        sizes["state and gradients"] = state.num_bytes + state.gradients
        sizes["the engine's weights"] = weights
        return sizes
    sizes["offloaded"] = state.offloaded(config.model.offload)
    if config.rollout.sleep_level_with(config.model.lora) == 1:
        sizes["the engine's weights, asleep"] = weights
    return sizes


def _read_meminfo(target: Target) -> dict[str, int]:
    """Bytes by name."""
    lines = re.findall(r"^(\w+): +(\d+) kB", target.read("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in lines}


def _cgroup_files(
    target: Target, controller: str, name_v2: str, name_v1: str
) -> Iterator[tuple[str, str]]:
    """Yields (folder, text) of a control file, of cgroup version 2 or 1, for this process's
    cgroup and all above it: any of them may set a limit."""
    for line in target.read("/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            bases, name = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], name_v2
        elif controller in controllers.split(","):
            bases, name = [f"sys/fs/cgroup/{controllers}", f"sys/fs/cgroup/{controller}"], name_v1
        else:
            continue
        for base in dict.fromkeys(bases):
            # In a container the path may be the host's, of which only the end is mounted.
            cgroup = PurePosixPath(base, path.lstrip("/"))
            for folder in (cgroup, *cgroup.parents):
                text = target.read(f"{folder}/{name}").strip()
                if text and folder.is_relative_to(base):
                    yield str(folder), text


def _memory_limit(target: Target) -> tuple[int, int]:
    """The smallest memory limit of the cgroups, and how much of it is used. Cached pages of files
    do not count as used: the kernel can drop them."""
    limits = [
        (int(text), folder)
        for folder, text in _cgroup_files(target, "memory", "memory.max", "memory.limit_in_bytes")
        if text.isdecimal()
    ]
    if not limits:
        return _UNLIMITED, 0
    limit, folder = min(limits)
    text = target.read(f"{folder}/memory.current") or target.read(f"{folder}/memory.usage_in_bytes")
    stat = dict(re.findall(r"^(\w+) (\d+)$", target.read(f"{folder}/memory.stat"), re.MULTILINE))
    cached = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    return limit, max(0, int(text or 0) - cached)


def cpu_quota(target: Target) -> float | None:
    """Cores that the cgroups allow; None without a limit."""
    quotas: list[float] = []
    for folder, text in _cgroup_files(target, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        period = period or target.read(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def check_threads(target: Target) -> Iterator[Result]:
    quota, ranks = cpu_quota(target), target.local_ranks
    cores = target.cores if quota is None else min(target.cores, quota)
    finding = f"{target.cores} cores"
    if cores < target.cores:
        finding += f", of which the cgroup allows {cores:g}"
    num_nodes = len([*(target.root / "sys/devices/system/node").glob("node[0-9]*")])
    finding += f", {num_nodes} NUMA nodes" if num_nodes > 1 else ""
    finding += f"; {target.ranks_text}"
    text = target.environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdecimal() else 0
    if text:
        finding += f" x {plural(threads, 'thread')} (OMP_NUM_THREADS={text})"
    else:
        finding += "; OMP_NUM_THREADS is not set, which torchrun and grpo-spmd make 1"
    if text and threads < 1:
        finding = f"OMP_NUM_THREADS={text!r} is no number from 1 on"
        yield bad("threads", finding, "export OMP_NUM_THREADS=1")
    # One thread a rank is the usual setting; more only helps on free cores.
    elif threads > 1 and ranks * threads > cores:
        yield bad(
            "threads",
            f"{finding}: threads wait for each other on too few cores",
            f"export OMP_NUM_THREADS={max(1, int(cores // ranks))}",
        )
    elif ranks > cores:
        yield warning(
            "threads",
            f"{finding}: more ranks than cores",
            "fewer ranks, or a larger share of cores",
        )
    else:
        yield ok("threads", finding)
    huge_pages = target.read("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in huge_pages and not target.num_gpus:
        yield warning(
            "huge pages",
            "transparent huge pages are off: page faults are a large part of a CPU weight sync",
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )


def check_limits(target: Target) -> Iterator[Result]:
    """The limits of this process, as ulimit shows them."""
    results = [*_exceeded_limits(target)]
    yield from results
    if not results:
        limits = {
            "open files": f"{_soft_limit('NOFILE'):,}",
            "processes": f"{_soft_limit('NPROC'):,}",
            "locked memory": size_text(_soft_limit("MEMLOCK")),
        }
        unlimited = {f"{_UNLIMITED:,}", size_text(_UNLIMITED)}
        texts = (
            f"{name} {'unlimited' if text in unlimited else text}" for name, text in limits.items()
        )
        yield ok("ulimit", ", ".join(texts))


def _soft_limit(name: str) -> int:
    soft = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
    return _UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _exceeded_limits(target: Target) -> Iterator[Result]:
    files, processes = _soft_limit("NOFILE"), _soft_limit("NPROC")
    if files < 4096:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raised = 65536 if hard == resource.RLIM_INFINITY else min(65536, hard)
        make = bad if files < 256 else warning
        yield make(
            "ulimit -n",
            f"{files:,} open files: sockets of ranks, files of safetensors and workers' pipes "
            "need more",
            f"ulimit -n {raised}; systemd: LimitNOFILE; docker run --ulimit nofile=65536",
        )
    if processes < 1024 * target.local_ranks:
        make = bad if processes < 128 * target.local_ranks else warning
        yield make(
            "ulimit -u",
            f"{processes:,} processes and threads of this user, for {target.ranks_text}",
            "ulimit -u unlimited; slurm: PropagateResourceLimits",
        )
    locked = _soft_limit("MEMLOCK")
    # RDMA registers its buffers as locked memory.
    has_infiniband = any((target.root / "sys/class/infiniband").glob("*"))
    if locked < 64 * _GIB and has_infiniband:
        yield bad(
            "ulimit -l",
            f"{size_text(locked)} of locked memory, and this machine has InfiniBand, which "
            "registers more",
            "ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    file_size, addresses = _soft_limit("FSIZE"), _soft_limit("AS")
    if file_size < _UNLIMITED:
        yield bad(
            "ulimit -f",
            f"files of {size_text(file_size)} at most: checkpoints grow",
            "ulimit -f unlimited",
        )
    if addresses < _UNLIMITED:
        make = bad if target.num_gpus else warning
        yield make(
            "ulimit -v",
            f"{size_text(addresses)} of address space: CUDA and torch reserve more than they use",
            "ulimit -v unlimited",
        )
    # A core pattern with a pipe leads to a collector, not to the working folder.
    is_piped = target.read("/proc/sys/kernel/core_pattern").startswith("|")
    if _soft_limit("CORE") > _GIB and not is_piped and target.num_gpus:
        yield warning(
            "ulimit -c",
            "core dumps are on: a rank that crashes writes all of its memory into the working "
            "folder",
            "ulimit -c 0",
        )
