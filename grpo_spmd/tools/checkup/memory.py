"""Memory, cores and limits of this machine against its ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from grpo_spmd.checks.memory import engine_weights, state_of
from grpo_spmd.model.config_json import read_model
from grpo_spmd.tools.checkup.results import Level, Place, Result, plural, size_of

_GIB = 1 << 30
_MIB = 1 << 20
# NCCL's segments for ranks of a node without direct access to each other's GPU, about 10 MB a channel, and vLLM's.
_SHM_LEAST, _SHM_WANTED = 64 * _MIB, 256 * _MIB  # of a rank
# A rank with torch and vLLM loaded and a tiny model: 0.8 GiB on a CPU, as measured; CUDA's libraries take more.
_RANK_LEAST, _RANK_WANTED, _GPU_RANK_WANTED = 1.0 * _GIB, 1.5 * _GIB, 4 * _GIB
_UNLIMITED = 1 << 60


def look_at_shm(place: Place) -> Iterator[Result]:
    folder = place.root / "dev/shm"
    least, wanted = (size * place.local_ranks for size in (_SHM_LEAST, _SHM_WANTED))
    enlarge = "docker run --shm-size 64g; Kubernetes: an emptyDir of medium Memory; mount -o remount,size=64g /dev/shm"
    if not folder.is_dir():
        yield Result(
            "/dev/shm", "bad", "there is no such folder: NCCL and vLLM share memory there", enlarge
        )
        return
    stat = os.statvfs(folder)
    total, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    found = f"{size_of(free)} free of {size_of(total)}, {plural(place.local_ranks, 'rank')} here"
    if not os.access(folder, os.W_OK):
        yield Result(
            "/dev/shm", "bad", f"no permission to write there ({found})", "chmod 1777 /dev/shm"
        )
        return
    level: Level = "bad" if free < least else "warning" if free < wanted else "ok"
    if level == "ok":
        yield Result("/dev/shm", "ok", found)
    elif total >= wanted:
        yield Result(
            "/dev/shm",
            level,
            f"{found}: files of others fill it",
            "ls -l /dev/shm; remove what nobody uses",
        )
    else:
        short = (
            f"{found}: less than {size_of(_SHM_LEAST if level == 'bad' else _SHM_WANTED)} a rank"
        )
        yield Result("/dev/shm", level, short, enlarge)


def look_at_memory(place: Place) -> Iterator[Result]:
    host = _meminfo(place)
    total, available = host["MemTotal"], host["MemAvailable"]
    limit, used = _memory_limit(place)
    bound = ""
    if limit < total:
        total, available = limit, min(available, limit - used)
        bound = " (the cgroup's limit)"
    needed, how = _needed(place)
    found = f"{size_of(available)} free of {size_of(total)}{bound}, for {plural(place.local_ranks, 'rank')}"
    if needed is not None:
        found += f", which need about {size_of(needed)} ({how})"
    fewer = "fewer ranks here, a larger --mem or memory limit, or end what else is running"
    least = needed if needed is not None else place.local_ranks * _RANK_LEAST
    if available < least:
        yield Result("memory", "bad", found, fewer)
    elif available < place.local_ranks * (
        wanted := _GPU_RANK_WANTED if place.num_gpus else _RANK_WANTED
    ):
        yield Result("memory", "warning", f"{found}: under {size_of(wanted)} a rank", fewer)
    else:
        yield Result("memory", "ok", found)
    if place.read("/proc/sys/vm/overcommit_memory").strip() == "2":
        what = "vm.overcommit_memory is 2: CUDA and torch reserve more addresses than they use"
        yield Result("overcommit", "warning", what, "sysctl vm.overcommit_memory=0")


def look_at_swap(place: Place) -> Iterator[Result]:
    host = _meminfo(place)
    total = host.get("SwapTotal", 0)
    used = total - host.get("SwapFree", 0)
    if not total:
        yield Result("swap", "ok", "none")
    elif used > 0.1 * total and used > _GIB:
        what = f"{size_of(used)} of {size_of(total)} in use: ranks that are swapped out make all others wait"
        yield Result("swap", "warning", what, "end what else is running; swapoff -a")
    else:
        yield Result("swap", "ok", f"{size_of(used)} of {size_of(total)} in use")


def _needed(place: Place) -> tuple[float | None, str]:
    """Bytes of host memory of this machine's ranks by the config, where the model's sizes are known."""
    config = place.config
    if config is None or (model := read_model(config.model.path)) is None:
        return None, ""
    state = state_of(config, model, place.num_ranks)
    sizes = {"a process": _RANK_LEAST, "the checkpoint's copy": 12 * state.trained}
    if place.num_gpus:
        sizes["offloaded"] = state.offloaded(config.model.offload)
        if config.rollout.sleep_level_with(config.model.lora) == 1:
            sizes["the engine's weights, asleep"] = engine_weights(config, model)
    else:
        sizes["state and gradients"] = state.num_bytes + state.gradients
        sizes["the engine's weights"] = engine_weights(config, model)
    each = sum(sizes.values())
    parts = " + ".join(
        f"{name} {size_of(size)}" for name, size in sizes.items() if size > 0.01 * each
    )
    return place.local_ranks * each, f"each: {parts}"


def _meminfo(place: Place) -> dict[str, int]:
    """Bytes."""
    found = re.findall(r"^(\w+): +(\d+) kB", place.read("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in found}


def _cgroup_files(
    place: Place, controller: str, name_2: str, name_1: str
) -> Iterator[tuple[str, str]]:
    """(folder, text) of a control file of this process's cgroup and of those above it, of version 2 and 1: a limit may
    be on any. In a container the path is often that of the host, of which only the end, or nothing, is mounted."""
    for line in place.read("/proc/self/cgroup").splitlines():
        _, kinds, path = [*line.split(":", 2), "", ""][:3]
        if kinds == "":
            bases, name = ("sys/fs/cgroup", "sys/fs/cgroup/unified"), name_2
        elif controller in kinds.split(","):
            bases, name = (f"sys/fs/cgroup/{kinds}", f"sys/fs/cgroup/{controller}"), name_1
        else:
            continue
        for base in dict.fromkeys(bases):
            own = PurePosixPath(base, path.lstrip("/"))
            for folder in (own, *own.parents):
                if folder.is_relative_to(base) and (text := place.read(f"{folder}/{name}").strip()):
                    yield str(folder), text


def _memory_limit(place: Place) -> tuple[int, int]:
    """The least limit, and what is used of it, in bytes; pages of files, which can be let go, are not counted."""
    limit, used = _UNLIMITED, 0
    for folder, text in _cgroup_files(place, "memory", "memory.max", "memory.limit_in_bytes"):
        if text.isdecimal() and int(text) < limit:
            limit = int(text)
            now = place.read(f"{folder}/memory.current") or place.read(
                f"{folder}/memory.usage_in_bytes"
            )
            stat = dict(
                re.findall(r"^(\w+) (\d+)$", place.read(f"{folder}/memory.stat"), re.MULTILINE)
            )
            files = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
            used = max(0, (int(now) if now.strip().isdecimal() else 0) - files)
    return limit, used


def cpu_quota(place: Place) -> float | None:
    """Cores that the cgroup allows; None without a limit."""
    quotas: list[float] = []
    for folder, text in _cgroup_files(place, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        period = period or place.read(f"{folder}/cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def look_at_cores(place: Place) -> Iterator[Result]:
    quota = cpu_quota(place)
    cores = place.cores if quota is None else min(place.cores, quota)
    nodes = len([*(place.root / "sys/devices/system/node").glob("node[0-9]*")])
    whose = f"{place.cores} cores" + (
        f", of which the cgroup allows {quota:g}" if cores < place.cores else ""
    )
    whose += f", {nodes} NUMA nodes" if nodes > 1 else ""
    set_to = place.environ.get("OMP_NUM_THREADS", "")
    ranks, threads = place.local_ranks, int(set_to) if set_to.isdecimal() else 1
    found = (
        f"{whose}; {plural(ranks, 'rank')} x {plural(threads, 'thread')} (OMP_NUM_THREADS={set_to})"
    )
    best = max(1, int(cores // ranks))
    if set_to and (not set_to.isdecimal() or threads < 1):
        yield Result(
            "threads",
            "bad",
            f"OMP_NUM_THREADS={set_to!r} is no number from 1 on",
            "export OMP_NUM_THREADS=1",
        )
    elif not set_to:
        note = "OMP_NUM_THREADS is not set, which torchrun and grpo-spmd make 1"
        level: Level = "ok" if ranks <= cores else "warning"
        yield Result(
            "threads",
            level,
            f"{whose}; {plural(ranks, 'rank')}; {note}",
            "" if level == "ok" else "fewer ranks",
        )
    elif threads > 1 and ranks * threads > cores:
        what = f"{found}: threads wait for each other on too few cores"
        yield Result("threads", "bad", what, f"export OMP_NUM_THREADS={best}")
    elif ranks > cores:
        yield Result(
            "threads",
            "warning",
            f"{found}: more ranks than cores",
            "fewer ranks, or a larger share of cores",
        )
    else:
        yield Result("threads", "ok", found)
    if (
        "[never]" in place.read("/sys/kernel/mm/transparent_hugepage/enabled")
        and not place.num_gpus
    ):
        what = "transparent huge pages are off: page faults are a large part of a weight sync on the CPU"
        yield Result(
            "huge pages",
            "warning",
            what,
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )


def look_at_limits(place: Place) -> Iterator[Result]:
    """ulimit, as /proc says it of this process: (soft, hard), None without a limit."""
    pattern = re.compile(r"^Max (.+?) {2,}(\d+|unlimited) +(\d+|unlimited)", re.MULTILINE)
    numbers: dict[str, tuple[int | None, ...]] = {
        name: tuple(None if text == "unlimited" else int(text) for text in both)
        for name, *both in pattern.findall(place.read("/proc/self/limits"))
    }
    if not numbers:
        raise OSError("/proc/self/limits is not to be read")
    lines = [*_wrong_limits(place, numbers)]
    yield from lines
    if not lines:
        soft = {
            name: numbers.get(name, (None,))[0]
            for name in ("open files", "processes", "locked memory")
        }
        texts = {
            name: "unlimited" if limit is None else f"{limit:,}" for name, limit in soft.items()
        }
        if (locked := soft["locked memory"]) is not None:
            texts["locked memory"] = size_of(locked)
        shown = (f"{name} {text}" for name, text in texts.items())
        yield Result("ulimit", "ok", ", ".join(shown))


def _wrong_limits(place: Place, numbers: dict[str, tuple[int | None, ...]]) -> Iterator[Result]:
    def soft(name: str) -> int:
        limit = numbers.get(name, (None, None))[0]
        return _UNLIMITED if limit is None else limit

    hard = numbers.get("open files", (None, None))[1]
    raise_it = f"ulimit -n {min(65536, hard or 65536)}; systemd: LimitNOFILE; docker run --ulimit nofile=65536"
    if (files := soft("open files")) < 4096:
        level: Level = "bad" if files < 256 else "warning"
        what = f"{files:,} open files: sockets of ranks, files of safetensors and workers' pipes need more"
        yield Result("ulimit -n", level, what, raise_it)
    if (processes := soft("processes")) < 1024 * place.local_ranks:
        level = "bad" if processes < 128 * place.local_ranks else "warning"
        what = f"{processes:,} processes and threads of this user, for {plural(place.local_ranks, 'rank')}"
        yield Result(
            "ulimit -u", level, what, "ulimit -u unlimited; slurm: PropagateResourceLimits"
        )
    if (locked := soft("locked memory")) < 64 * _GIB and any(
        (place.root / "sys/class/infiniband").glob("*")
    ):
        what = f"{size_of(locked)} of locked memory, and this machine has InfiniBand, which registers more"
        yield Result(
            "ulimit -l", "bad", what, "ulimit -l unlimited; docker run --ulimit memlock=-1"
        )
    if (largest := soft("file size")) < _UNLIMITED:
        yield Result(
            "ulimit -f",
            "bad",
            f"files of {size_of(largest)} at most: checkpoints grow",
            "ulimit -f unlimited",
        )
    if (addresses := soft("address space")) < _UNLIMITED:
        what = f"{size_of(addresses)} of address space: CUDA and torch reserve more than they use"
        yield Result(
            "ulimit -v", "bad" if place.num_gpus else "warning", what, "ulimit -v unlimited"
        )
    piped = place.read("/proc/sys/kernel/core_pattern").startswith("|")
    if soft("core file size") > _GIB and not piped and place.num_gpus:
        what = "core dumps are on: a rank that crashes writes all of its memory into the working folder"
        yield Result("ulimit -c", "warning", what, "ulimit -c 0")
