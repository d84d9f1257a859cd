"""Checks this machine without torch: GPUs, the config, packages, memory, threads and limits.

Each `check_...` function yields Results (results.py), which are lines of the checkup. GPUs are
checked as nvidia-smi describes them. `--check` and the planner run users' code and torch, so each
runs in a process of its own. Installed packages are compared with the ranges that this project and
vLLM require, by their metadata alone: nothing is imported. Memory, cores and limits of the machine
are compared with what its ranks need.
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import math
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from grpo_spmd import __version__
from grpo_spmd.checks.machine import VLLM
from grpo_spmd.checks.memory import (
    engine_backup,
    engine_weights,
    size_text,
    state_of,
)
from grpo_spmd.checks.model_folder import read_package_file, version_of
from grpo_spmd.config.load import gpus_are_hidden
from grpo_spmd.model.config_json import read_model
from grpo_spmd.observe.cards import find_device
from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation
from grpo_spmd.tools.checkup.results import (
    Result,
    Target,
    bad,
    join_items,
    ok,
    plural,
    rated,
    warning,
)

# The fields of one GPU in nvidia-smi, by name.
Gpu = dict[str, str]
# Seconds after which --check, the planner and nvidia-smi are killed.
CHECK_S = 120.0
PLAN_S = 120.0
_SMI_S = 8.0
# Every driver that runs CUDA 12 knows these fields.
_FIELDS = (
    "index", "name", "driver_version", "memory.total", "memory.used", "compute_cap",
    "ecc.errors.uncorrected.volatile.total", "mig.mode.current", "compute_mode",
)  # fmt: skip
# The oldest drivers for CUDA's major versions (CUDA Toolkit release notes, minor version
# compatibility).
_DRIVERS = {"12": 525, "13": 580}
# Less GPU memory in use than this is not reported.
_USED_MIB = 1024
# A row of `nvidia-smi topo -m`: a GPU, and its kind of link to each GPU.
_LINK_ROW = re.compile(r"\s*GPU\d+\s+(X|NV|PIX|PXB|PHB|NODE|SYS)")
_CORRECT = "correct it in the config, or by section.key=value"
_PACKAGE = Path(__file__).resolve().parents[2]
# Packages that get a line of their own on the page, as vLLM does.
_OWN_LINES = ("torch", "transformers")
_REMEDY = "launch/setup.sh installs the tested set"
_GIB = 1 << 30
_MIB = 1 << 20
# Shared memory of a rank: NCCL's segments for ranks of a node without direct access to each other's
# GPU, about 10 MB a channel, and vLLM's.
_SHM_NEEDED = 64 * _MIB
_SHM_WANTED = 256 * _MIB
# Memory of a rank with torch and vLLM loaded and a tiny model: 0.8 GiB on a CPU, as measured.
# CUDA's libraries take more.
_RANK_NEEDED = 1.0 * _GIB
_RANK_WANTED = 1.5 * _GIB
_GPU_RANK_WANTED = 4.0 * _GIB
# Stands for "no limit" in comparisons.
_UNLIMITED = 1 << 60


# GPUs


def _nvidia_smi(target: Target, *options: str) -> str:
    """Returns what nvidia-smi prints with these options.

    Raises OSError if it is not installed or fails, and subprocess.TimeoutExpired if it hangs."""
    answer = target.run(["nvidia-smi", *options], _SMI_S)
    if answer.returncode:
        lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or ["no reason"]
        raise OSError(f"nvidia-smi: {lines[0][:200]}")
    return answer.stdout


def query_gpus(target: Target) -> list[Gpu]:
    """Returns for each GPU the values of _FIELDS by name.

    Raises OSError if nvidia-smi fails or lists no GPU."""
    query = f"--query-gpu={','.join(_FIELDS)}"
    text = _nvidia_smi(target, query, "--format=csv,noheader,nounits")
    rows = csv.DictReader(text.splitlines(), _FIELDS, skipinitialspace=True)
    gpus = [row for row in rows if row["compute_mode"]]
    if not gpus:
        raise OSError("nvidia-smi lists no GPU")
    return gpus


def check_gpus(target: Target) -> Iterator[Result]:
    """Checks that the driver answers and is new enough, and that the GPUs are healthy and free."""
    if not target.num_gpus:
        reason = "hidden by CUDA_VISIBLE_DEVICES" if gpus_are_hidden() else "none"
        yield ok("GPUs", f"{reason}: ranks train on the CPU", {"GPUs": reason})
        return
    try:
        gpus = query_gpus(target)
    except OSError as error:
        # Without nvidia-smi on this machine nothing is known: the driver may still work.
        make = warning if isinstance(error, FileNotFoundError) else bad
        yield make(
            "GPUs",
            f"{target.num_gpus} are there, but the driver does not answer: {error}",
            "install the driver and its tools again, or restart the machine; dmesg | grep -i nvrm",
        )
        return
    # Mixed cards work, at the pace of the slowest.
    kinds = Counter(f"{gpu['name']}, {_number(gpu['memory.total']) / 1024:.0f} GiB" for gpu in gpus)
    finding = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    driver = gpus[0]["driver_version"]
    facts = {"GPUs": finding, "driver": driver}
    remedy = "all ranks wait for the slowest: name those of one kind in CUDA_VISIBLE_DEVICES"
    yield warning("GPUs", finding, remedy, facts) if len(kinds) > 1 else ok("GPUs", finding, facts)
    cuda = torch_build()[1]
    # A version that cannot be read counts as new enough. If the table lacks this CUDA, any does.
    yield rated(
        "driver",
        driver,
        f"torch's CUDA {cuda} asks for a driver of {_DRIVERS.get(cuda[:2])} or later, or for "
        "cuda-compat; or install a torch for an older CUDA",
        value=_number(driver.partition(".")[0]) or math.inf,
        wanted=_DRIVERS.get(cuda[:2], 0),
    )
    yield from _check_states(target, gpus)
    yield _check_used_memory(target, gpus)


def torch_build() -> tuple[str, str]:
    """Returns the version of torch's files, and of the CUDA that they were built for.

    The first is "" if there is no torch, the second if it was built for the CPU.
    """
    text = read_package_file("torch", "version.py")
    version = re.search(r"^__version__ *= *['\"]([^'\"+]+)", text, re.MULTILINE)
    cuda = re.search(r"^cuda\b.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return version[1] if version else "", cuda[1] if cuda else ""


def _check_states(target: Target, gpus: Sequence[Gpu]) -> Iterator[Result]:
    """Checks capability, memory errors, MIG mode and compute mode; yields lines about problems.

    There is a row for each possible problem in the table below. A GPU has the problem if its value
    of the field `state` matches `pattern`.
    """
    for name, make, state, pattern, finding, remedy in (
        (
            "capability",
            warning,
            "compute_cap",
            r"[1-7]\.\d",
            "compute capability below 8.0, which has no bfloat16",
            "model.dtype: float32, or GPUs of 8.0 (A100) or later",
        ),
        (
            "ECC",
            bad,
            "ecc.errors.uncorrected.volatile.total",
            r"[1-9]\d*",
            "uncorrected memory errors",
            "nvidia-smi -q -d ECC; drain the node, reset the GPU, replace it",
        ),
        # NCCL cannot connect two instances of one GPU, so MIG is bad only with several ranks.
        (
            "MIG",
            bad if target.local_ranks > 1 else warning,
            "mig.mode.current",
            "Enabled",
            "MIG is on, and NCCL cannot connect two instances of one GPU",
            "nvidia-smi -mig 0, by whoever administers it",
        ),
        (
            "GPUs",
            bad,
            "compute_mode",
            "Prohibited",
            "compute mode is Prohibited",
            "nvidia-smi -c DEFAULT",
        ),
    ):
        indices = join_items(gpu["index"] for gpu in gpus if re.fullmatch(pattern, gpu[state]))
        if indices:
            yield make(name, f"{finding}, on GPU {indices}", remedy)


def _check_used_memory(target: Target, gpus: Sequence[Gpu]) -> Result:
    """Returns a line about the GPU memory that other processes hold.

    It is bad if the engine does not fit beside them, and a warning if they hold less."""
    used_mib = {gpu["index"]: _number(gpu["memory.used"]) for gpu in gpus}
    used = [f"GPU {i}: {mib / 1024:.1f} GiB" for i, mib in used_mib.items() if mib > _USED_MIB]
    if not used:
        return ok("GPU memory", f"free on all {len(gpus)}")
    query = "--query-compute-apps=pid,used_memory,name"
    owners = _nvidia_smi(target, query, "--format=csv,noheader").strip().splitlines()
    finding = (
        f"other processes hold {join_items(used)} ({join_items(owners, 3) or 'unknown processes'})"
    )
    # vLLM takes a fraction of the GPU's total memory, and fails if so much is not free.
    fraction = target.config.rollout.gpu_memory_utilization if target.config else 0.0
    is_too_much = any(
        used_mib[gpu["index"]] > (1 - fraction) * _number(gpu["memory.total"]) for gpu in gpus
    )
    if is_too_much:
        finding += f": rollout.gpu_memory_utilization {fraction:g} does not fit beside them"
    make = bad if is_too_much else warning
    return make("GPU memory", finding, "end what holds it (nvidia-smi shows it)")


def check_topology(target: Target) -> Iterator[Result]:
    """Checks how the GPUs of this machine are linked; links between CPU sockets are slow."""
    if target.num_gpus < 2:
        return
    # nvidia-smi underlines the table's title row with escape codes.
    plain = re.sub(r"\x1b\[[\d;]*m", "", _nvidia_smi(target, "topo", "-m"))
    rows = [line.split() for line in plain.splitlines() if _LINK_ROW.match(line)]
    # The kind of link of each pair "a-b" of GPUs with a < b. Further columns are network cards.
    pairs = {
        f"{name[3:]}-{peer}": kind
        for name, *kinds in rows
        for peer, kind in enumerate(kinds[: len(rows)])
        if peer > int(name[3:])
    }
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(pairs.values()).most_common())
    finding = f"{counts} of {plural(len(pairs), 'pair')}"
    # NODE and SYS cross the CPU's interconnect.
    far = join_items(pair for pair, kind in pairs.items() if kind in ("SYS", "NODE"))
    if far:
        yield warning(
            "topology",
            f"{finding}; between sockets, without NVLink: {far}",
            "nvidia-smi nvlink -s; dmesg | grep -i nvlink: a link may be down. If the machine has "
            "no more, model.num_replicas saves traffic of small models",
        )
    else:
        yield ok("topology", finding)


def _number(text: str) -> float:
    """Returns the number in `text`; 0 for "[N/A]" and other text that is no number."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else 0.0


# The config


def check_config(target: Target) -> Iterator[Result]:
    """Runs --check. Yields its warnings, and its error or a line that says it has passed."""
    if target.config is None:
        return
    command = [sys.executable, "-m", "grpo_spmd.train", "--check", *target.arguments]
    answer = target.run(command, CHECK_S)
    # Each line is "KIND: FINDING; REMEDY". A warning leaves the exit code 0.
    problems = re.findall(r"^(warning|error): (.*)$", answer.stderr, re.MULTILINE)
    for kind, text in problems:
        finding, _, remedy = text.partition("; ")
        make = bad if kind == "error" else warning
        yield make("--check", finding, remedy or _CORRECT)
    if not answer.returncode:
        ranks = plural(target.num_ranks, "rank")
        yield ok("--check", f"model, data, rewards and run folder, for {ranks}")
    elif "error" not in dict(problems):
        lines = [f"exit code {answer.returncode}", *answer.stderr.strip().splitlines()]
        yield bad("--check", lines[-1][:300], "python -m grpo_spmd.train --check ... says more")


def check_plan(target: Target) -> Iterator[Result]:
    """Runs the planner (grpo_spmd.plan) to check whether the run fits into these GPUs' memory."""
    if target.config is None or not target.num_gpus:
        return
    gpus = query_gpus(target)
    card = find_device(gpus[0]["name"], _number(gpus[0]["memory.total"]) / 1024)
    if card is None:
        yield ok(
            "planner",
            f"the planner has no {gpus[0]['name']} of this size in its table: python -m "
            "grpo_spmd.plan --gpu 80GiB,989TFLOPS,3350GB/s ...",
        )
        return
    options = ["--gpu", card.name, "--ranks", str(target.num_ranks)]
    answer = target.run(
        [sys.executable, "-m", "grpo_spmd.plan", *target.arguments, *options], PLAN_S
    )
    # The first two lines of a plan have the verdict and the margin. A long path wraps them.
    plan = re.sub(r"\n +", " ", answer.stdout).splitlines()[:2]
    if not plan:
        lines = answer.stderr.strip().splitlines() or ["error: no plan"]
        yield warning("planner", lines[-1][:300], "python -m grpo_spmd.plan ..., by hand")
    elif answer.returncode:
        remedy = f"python -m grpo_spmd.plan --suggest {' '.join(options)} --config ..."
        yield bad("planner", "; ".join(plan), remedy)
    else:
        yield ok("planner", "; ".join(plan))


def check_sandbox(target: Target) -> Iterator[Result]:
    """Checks whether code that a model wrote can be isolated on this machine.

    The reward `code` and the tool `python` run such code. If the config has neither, a problem is
    only a warning.
    """
    config = target.config
    is_needed = config is not None and (
        any(reward.is_shipped and reward.name == "code" for reward in config.rewards)
        or "python" in config.environment.tools
    )
    try:
        walls = check_isolation()
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        make = bad if is_needed else warning
        yield make(
            "sandbox",
            str(error),
            "Linux 5.13 or later with Landlock, or a container that allows user namespaces",
        )
        return
    # Without namespaces the sandboxed code can do less.
    limits = "" if "namespaces" in walls else " (no scratch folder, no threads)"
    yield ok("sandbox", f"model-written code can be isolated: {', '.join(walls)}{limits}")


# Installed packages


def read_requirements(package: Path = _PACKAGE) -> tuple[str, list[str]]:
    """Returns (range of Python versions, packages) that this project requires.

    The packages are PEP 508 texts; those of an extra have the extra as a marker. They come from the
    checkout's pyproject.toml, or else from the metadata of the installed package.
    """
    file = package.with_name("pyproject.toml")
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        if project["name"] == "grpo_spmd":
            extras = project["optional-dependencies"].items()
            optional = [f'{text}; extra == "{name}"' for name, texts in extras for text in texts]
            return project["requires-python"], [*project["dependencies"], *optional]
    metadata = importlib.metadata.metadata("grpo_spmd")
    return metadata["Requires-Python"] or "", importlib.metadata.requires("grpo_spmd") or []


def check_python(_: Target) -> Iterator[Result]:
    """Checks the version of Python.

    A digest of this project's code is among the line's facts, which are compared across ranks."""
    required, version = read_requirements()[0], platform.python_version()
    # Ranks with different digests run different code.
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    finding = f"{version} ({sys.prefix})"
    facts = {"Python": version, "grpo_spmd": f"{__version__} {digest.hexdigest()[:12]}"}
    if SpecifierSet(required).contains(version, prereleases=True):
        yield ok("python", finding, facts)
    else:
        finding += f", but {required} is required"
        yield bad("python", finding, "PYTHON=python3.12 launch/setup.sh", facts)


def check_packages(target: Target) -> Iterator[Result]:
    """Checks that required packages are installed in the required versions."""
    # The installed packages that contain vLLM; exactly one is right.
    engines = [name for name in VLLM if version_of(name)]
    # (who requires it, requirement)
    requirements = [("grpo_spmd", Requirement(text)) for text in read_requirements()[1]]
    for engine in engines[:1]:
        source = f"{engine} {version_of(engine)}"
        needed = map(Requirement, importlib.metadata.requires(engine) or ())
        # vLLM's kernels are compiled against one version of torch.
        requirements += [(source, package) for package in needed if package.name in _OWN_LINES]
    versions: dict[str, str] = {}
    problems: dict[str, str] = {}
    for source, requirement in requirements:
        name, marker, version = requirement.name, requirement.marker, version_of(requirement.name)
        is_extra = "extra" in str(marker)
        # A package of an extra need not be installed.
        if is_extra and version is None:
            continue
        versions[name] = version or "missing"
        is_for_others = marker is not None and not is_extra and not marker.evaluate()
        # vLLM that was built from source has the version 0.1.dev, whatever it really is.
        from_source = name in VLLM and re.match(r"0\.\d+\.?\d*\.?dev", version or "")
        fits = version and requirement.specifier.contains(version, prereleases=True)
        if not (fits or is_for_others or from_source):
            required = requirement.specifier or "any version"
            problems.setdefault(name, f"{name} {versions[name]}, but {source} requires {required}")
    for name in (*_OWN_LINES, *engines[:1]):
        facts = {name: versions.pop(name)}
        if name in problems:
            yield bad(name, problems.pop(name), _REMEDY, facts)
        else:
            yield ok(name, facts[name], facts)
    # Both packages install the module vllm, which samples the completions.
    if len(engines) != 1:
        yield bad(
            "vllm",
            f"{len(engines)} of {' and '.join(VLLM)} are installed, but exactly one is required",
            f"pip uninstall {' '.join(VLLM)}, then launch/setup.sh",
        )
    if problems:
        yield bad("packages", "; ".join(problems.values()), _REMEDY, versions)
    else:
        yield ok("packages", f"{len(versions)} others within their ranges", versions)


def check_build(target: Target) -> Iterator[Result]:
    """Checks that torch's files match its metadata, and that torch is built for this machine.

    If a version was installed over another, the files may be of one and the metadata of the other.
    """
    name = "torch's build"
    version, cuda = torch_build()
    installed = version_of("torch")
    build = f"for CUDA {cuda}" if cuda else "for the CPU"
    if not version:
        yield bad(name, "there is no torch to import", _REMEDY)
    elif installed and version != installed.partition("+")[0]:
        folder = importlib.metadata.distribution("torch").locate_file("")
        yield bad(
            name,
            f"its files are {version}, but the metadata that Python finds first says {installed}: "
            "two installs are mixed",
            f"look at {folder} and PYTHONPATH; or set up again: launch/setup.sh",
        )
    elif bool(cuda) != bool(target.num_gpus):
        # A build for GPUs may be meant for another machine.
        make = warning if cuda else bad
        yield make(
            name,
            f"{build}, but this machine has {plural(target.num_gpus, 'GPU')}: ranks would train on "
            "the CPU",
            "launch/setup.sh gpu, and a driver that works (nvidia-smi), or CUDA_VISIBLE_DEVICES=",
        )
    else:
        yield ok(name, build)


def check_tested_set(_: Target) -> Iterator[Result]:
    """Yields how many packages have the versions with which this project is tested (a lock file).

    Other versions are no reason for a warning if they are within the ranges (check_packages).
    """
    lock = _PACKAGE.parent / "launch" / f"constraints-{'gpu' if version_of('vllm') else 'cpu'}.txt"
    if not lock.is_file():
        return
    pinned = re.findall(r"^([\w.-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE)
    # A package that is not installed (version None) belongs to an extra.
    differing = [
        f"{name} {version_of(name)} instead of {wanted}"
        for name, wanted in pinned
        if version_of(name) not in (None, wanted)
    ]
    num_same = sum(version_of(name) == wanted for name, wanted in pinned)
    difference = f"; others: {join_items(differing, 4)}" if differing else ""
    yield ok("tested set", f"{num_same} of {len(pinned)} packages are as tested{difference}")


# Memory, cores and limits


def check_shared_memory(target: Target) -> Iterator[Result]:
    """Checks the free space in /dev/shm, in which processes of NCCL and vLLM share memory."""
    folder = target.root / "dev/shm"
    remedy = (
        "remove files that nobody uses (ls -l /dev/shm), chmod 1777 /dev/shm, docker run "
        "--shm-size 64g, in Kubernetes an emptyDir of medium Memory, or mount -o remount,size=64g"
    )
    if not os.access(folder, os.W_OK):
        yield bad("/dev/shm", "not there or not writable: NCCL and vLLM share memory there", remedy)
        return
    disk = shutil.disk_usage(folder)
    yield rated(
        "/dev/shm",
        f"{size_text(disk.free)} free of {size_text(disk.total)}, {target.ranks_text} here",
        f"{size_text(_SHM_WANTED)} per rank are recommended: {remedy}",
        # All ranks of the machine share the folder.
        value=disk.free / target.local_ranks,
        needed=_SHM_NEEDED,
        wanted=_SHM_WANTED,
    )


def check_memory(target: Target) -> Iterator[Result]:
    """Checks whether this machine, or its container, has the host memory that its ranks need."""
    host = _read_meminfo(target)
    total = host["MemTotal"]
    available = host["MemAvailable"]
    note = ""
    # The cgroup of a container or a job may allow less than the host has.
    limit, used = _memory_limit(target)
    if limit < total:
        total = limit
        available = min(available, limit - used)
        note = " (the cgroup's limit)"
    finding = f"{size_text(available)} free of {size_text(total)}{note}, for {target.ranks_text}"
    sizes = _rank_memory(target)
    needed = sum(sizes.values())
    # Terms below 1 % are not listed, to keep the line short.
    terms = [f"{name} {size_text(size)}" for name, size in sizes.items() if size > 0.01 * needed]
    finding += f", which need about {size_text(target.local_ranks * needed)}"
    finding += f" (each: {' + '.join(terms)})"
    # What is needed has no reserve, so a minimum is recommended as well.
    wanted = _GPU_RANK_WANTED if target.num_gpus else _RANK_WANTED
    yield rated(
        "memory",
        finding,
        f"{size_text(max(needed, wanted))} per rank are recommended: fewer ranks here, a larger "
        "--mem or memory limit, or end what else is running",
        value=available / target.local_ranks,
        needed=needed,
        wanted=wanted,
    )
    if target.read("/proc/sys/vm/overcommit_memory") == "2":
        yield warning(
            "overcommit",
            "vm.overcommit_memory is 2: CUDA and torch reserve more addresses than they use",
            "sysctl vm.overcommit_memory=0",
        )


def check_swap(target: Target) -> Iterator[Result]:
    """Checks that the machine is not swapping."""
    host = _read_meminfo(target)
    total = host.get("SwapTotal", 0)
    used = total - host.get("SwapFree", 0)
    finding = f"{size_text(used)} of {size_text(total)} in use" if total else "none"
    if used <= max(0.1 * total, _GIB):
        yield ok("swap", finding)
        return
    remedy = "ranks that are swapped out make all others wait: end what else is running; swapoff -a"
    yield warning("swap", finding, remedy)


def _rank_memory(target: Target) -> dict[str, float]:
    """Returns the bytes of host memory that a rank needs, by purpose.

    Without a config whose model is on this machine, it is only the memory of a process with torch
    and vLLM.
    """
    config = target.config
    model = read_model(config.model.path) if config else None
    sizes = {"a process": _RANK_NEEDED}
    if config is None or model is None:
        return sizes
    state, weights = state_of(config, model, target.num_ranks), engine_weights(config, model)
    sizes["the checkpoint's copy"] = state.saved
    # Without GPUs, trainer and engine are in host memory all the time.
    if not target.num_gpus:
        sizes["state and gradients"] = state.num_bytes + state.gradients
        sizes["the engine's weights"] = weights
        return sizes
    sizes["offloaded"] = state.offloaded(config.model.offload)
    sizes["the engine's weights, asleep"] = engine_backup(config, model)
    return sizes


def _read_meminfo(target: Target) -> dict[str, int]:
    """Returns the bytes of each entry of /proc/meminfo, by name."""
    lines = re.findall(r"^(\w+): +(\d+) kB", target.read("/proc/meminfo"), re.MULTILINE)
    return {name: int(kib) << 10 for name, kib in lines}


def _cgroups(target: Target) -> Iterator[str]:
    """Yields the folders of this process's cgroups and of their parents.

    A cgroup limits the memory and cores of a container or a job, and so does each parent."""
    for line in target.read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        # In a container the path may be the host's, which does not exist here. Then the last
        # parent, ".", is the container's own cgroup.
        cgroup = PurePosixPath(path.lstrip("/"))
        # Version 2 has one hierarchy for all controllers, whose names are left empty.
        for controller in controllers.split(","):
            for folder in (cgroup, *cgroup.parents):
                yield f"sys/fs/cgroup/{controller}/{folder}"


def _memory_limit(target: Target) -> tuple[int, int]:
    """Returns (limit, used bytes) of the cgroup with the smallest memory limit.

    If no cgroup has a limit, it is _UNLIMITED. Cached file pages that are not in active use do not
    count as used: the kernel can drop them. In each pair of files below the first is of cgroup
    version 2, the second of version 1.
    """
    limits = [(_UNLIMITED, "")]
    for folder in _cgroups(target):
        text = target.read(f"{folder}/memory.max", f"{folder}/memory.limit_in_bytes")
        if text.isdecimal():
            limits.append((int(text), folder))
    limit, folder = min(limits)
    used = target.read(f"{folder}/memory.current", f"{folder}/memory.usage_in_bytes")
    stat = dict(re.findall(r"^(\w+) (\d+)$", target.read(f"{folder}/memory.stat"), re.MULTILINE))
    cached = int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)
    return limit, max(0, int(used or 0) - cached)


def cpu_quota(target: Target) -> float | None:
    """Returns the number of cores that the cgroups allow, or None if they set no limit."""
    quotas: list[float] = []
    for folder in _cgroups(target):
        text = target.read(f"{folder}/cpu.max", f"{folder}/cpu.cfs_quota_us")
        period = target.read(f"{folder}/cpu.cfs_period_us")
        limit = re.match(r"(\d+) ([1-9]\d*)", f"{text} {period}")
        if limit:
            quotas.append(int(limit[1]) / int(limit[2]))
    return min(quotas, default=None)


def check_threads(target: Target) -> Iterator[Result]:
    """Checks that ranks and their threads do not outnumber the cores."""
    quota, ranks = cpu_quota(target), target.local_ranks
    cores = target.cores if quota is None else min(target.cores, quota)
    text = target.environ.get("OMP_NUM_THREADS", "1")
    threads = int(text) if text.isdecimal() else 0
    num_nodes = len([*(target.root / "sys/devices/system/node").glob("node[0-9]*")])
    finding = f"{cores:g} of {target.cores} cores, {plural(num_nodes, 'NUMA node')}; "
    finding += f"{target.ranks_text} x {plural(threads, 'thread')} (OMP_NUM_THREADS)"
    # One thread per rank is the usual setting; more threads than cores slow each other down.
    if threads < 1 or (threads > 1 and ranks * threads > cores):
        remedy = f"export OMP_NUM_THREADS={max(1, int(cores // ranks))}"
        yield bad("threads", f"{finding}: more than the cores, or no number", remedy)
    else:
        remedy = "more ranks than cores: fewer ranks, or a larger share of cores"
        yield rated("threads", finding, remedy, value=cores, wanted=ranks)
    huge_pages = target.read("/sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in huge_pages and not target.num_gpus:
        yield warning(
            "huge pages",
            "transparent huge pages are off: page faults are a large part of a CPU weight sync",
            "echo madvise >/sys/kernel/mm/transparent_hugepage/enabled",
        )


def check_limits(target: Target) -> Iterator[Result]:
    """Checks the limits of this process, as ulimit shows them, and whether core dumps are on.

    Yields a line for each problem, or one line if there is none."""
    ranks = target.local_ranks
    # RDMA registers its buffers as locked memory.
    has_infiniband = any((target.root / "sys/class/infiniband").glob("*"))
    locked = 64 * _GIB if has_infiniband else 0
    # CUDA reserves far more addresses than it uses, so with GPUs any limit is too low.
    addresses = _UNLIMITED if target.num_gpus else 0
    results = []
    # A limit below `needed` is bad, and one below `wanted` is a warning.
    for flag, limit, noun, needed, wanted, remedy in (
        ("n", "NOFILE", "open files", 256, 4096, "docker run --ulimit nofile=65536"),
        ("u", "NPROC", "processes", 128 * ranks, 1024 * ranks, "slurm: PropagateResourceLimits"),
        ("l", "MEMLOCK", "locked memory", locked, locked, "docker run --ulimit memlock=-1"),
        ("f", "FSIZE", "file size", _UNLIMITED, _UNLIMITED, "checkpoints are large"),
        ("v", "AS", "address space", addresses, _UNLIMITED, "CUDA and torch reserve terabytes"),
    ):
        value = resource.getrlimit(getattr(resource, f"RLIMIT_{limit}"))[0]
        text = f"{value:,}" if limit in ("NOFILE", "NPROC") else size_text(value)
        if value == resource.RLIM_INFINITY:
            value, text = _UNLIMITED, "unlimited"
        result = rated(
            f"ulimit -{flag}",
            f"{noun} {text}",
            f"ulimit -{flag} unlimited; {remedy}",
            value=value,
            needed=needed,
            wanted=wanted,
        )
        results.append(result)
    problems = [result for result in results if result.level != "ok"]
    # With "|" in the core pattern, dumps go to a program, not into the working folder.
    is_piped = target.read("/proc/sys/kernel/core_pattern").startswith("|")
    max_core = resource.getrlimit(resource.RLIMIT_CORE)[0]
    is_large = max_core == resource.RLIM_INFINITY or max_core > _GIB
    if is_large and not is_piped and target.num_gpus:
        finding = (
            "core dumps are on: a rank that crashes writes all of its memory into the working "
        )
        problems.append(warning("ulimit -c", finding + "folder", "ulimit -c 0"))
    yield from problems or [ok("ulimit", ", ".join(result.finding for result in results))]
