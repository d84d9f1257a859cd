"""GPUs as nvidia-smi describes them, without torch; and what --check, planner and sandbox say."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from grpo_spmd.config.load import gpus_are_hidden
from grpo_spmd.observe.cards import CARDS, Card
from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation
from grpo_spmd.tools.checkup.results import Result, Target, bad, join_items, ok, plural, warning

Gpu = dict[str, str]  # nvidia-smi's fields by name
CHECK_S = 120.0
PLAN_S = 120.0
_SMI_S = 8.0
# An older driver refuses a query with a field that it does not know, so there are two queries.
_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used")
_ECC = "ecc.errors.uncorrected.volatile.total"
_NEWER_FIELDS = ("compute_cap", _ECC, "mig.mode.current", "compute_mode", "pci.bus_id")
# Oldest drivers for CUDA's major versions (CUDA Toolkit release notes, minor version
# compatibility).
_DRIVERS = {"11": 450, "12": 525, "13": 580}
_USED_MIB = 1024
_LINK_ROW = re.compile(r"\s*GPU\d+\s+(X|NV|PIX|PXB|PHB|NODE|SYS)")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X")
_CORRECT = "correct it in the config, or by section.key=value"


def query_gpus(target: Target) -> list[Gpu] | None:
    """One dict for each GPU; None without nvidia-smi. Raises OSError with its error message."""
    gpus: list[Gpu] = []
    for fields in (_FIELDS, _NEWER_FIELDS):
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        answer = target.run(query, _SMI_S)
        if answer is None:
            return None
        if answer.returncode:
            if gpus:
                return gpus
            lines = (answer.stdout.strip() or answer.stderr.strip()).splitlines() or ["no reason"]
            raise OSError(f"nvidia-smi: {lines[0][:200]}")
        rows = csv.reader(answer.stdout.splitlines(), skipinitialspace=True)
        dicts = [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]
        if not gpus:
            gpus = dicts
        elif len(gpus) == len(dicts):
            gpus = [gpu | newer for gpu, newer in zip(gpus, dicts, strict=True)]
    return gpus


def check_gpus(target: Target) -> Iterator[Result]:
    if not target.num_gpus:
        reason = "hidden by CUDA_VISIBLE_DEVICES" if gpus_are_hidden() else "none"
        yield ok("GPUs", f"{reason}: ranks train on the CPU", {"GPUs": reason})
        return
    try:
        gpus = query_gpus(target)
    except OSError as error:
        yield bad(
            "GPUs",
            f"{target.num_gpus} are there, and the driver does not answer: {error}",
            "restart the machine, or install the driver again; dmesg | grep -i nvrm",
        )
        return
    if not gpus:
        yield warning(
            "GPUs",
            f"{target.num_gpus}, and no nvidia-smi that tells more",
            "install the driver's tools",
        )
        return
    # Mixed cards work, at the pace of the slowest.
    kinds = Counter(f"{gpu['name']}, {_number(gpu['memory.total']) / 1024:.0f} GiB" for gpu in gpus)
    finding = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    driver = gpus[0]["driver_version"]
    facts = {"GPUs": finding, "driver": driver}
    if len(kinds) > 1:
        yield warning(
            "GPUs",
            f"{finding}: all ranks wait for the slowest",
            "name those of one kind in CUDA_VISIBLE_DEVICES",
            facts,
        )
    else:
        yield ok("GPUs", finding, facts)
    yield _check_driver(driver, torch_cuda())
    yield from _check_states(target, gpus)
    yield _check_used_memory(target, gpus)


def torch_cuda() -> str:
    """CUDA version that torch was built for; "" for the CPU, or without torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^cuda\b.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return version[1] if version else ""


def _check_driver(driver: str, cuda: str) -> Result:
    oldest, major = _DRIVERS.get(cuda.partition(".")[0]), driver.partition(".")[0]
    if oldest is None or not major.isdecimal():
        return ok("driver", driver)
    if int(major) >= oldest:
        return ok("driver", f"{driver}, new enough for torch's CUDA {cuda}")
    usable = [f"{version}.x" for version, number in _DRIVERS.items() if int(major) >= number]
    newest = usable[-1] if usable else "that it knows"
    return warning(
        "driver",
        f"{driver}, and torch's CUDA {cuda} asks for {oldest} or later (or cuda-compat)",
        f"update the driver, or install a torch for CUDA {newest}",
    )


def _check_states(target: Target, gpus: Sequence[Gpu]) -> Iterator[Result]:
    capabilities = [gpu.get("compute_cap", "") for gpu in gpus]
    # bfloat16 needs 8.0.
    old = [text for text in capabilities if re.fullmatch(r"[1-7]\.\d", text)]
    if old:
        yield warning(
            "capability",
            f"compute capability {old[0]} has no bfloat16",
            "model.dtype: float32, or GPUs of 8.0 (A100) or later",
        )
    elif capabilities[0]:
        yield ok("capability", capabilities[0])
    failing = join_items(gpu["index"] for gpu in gpus if _number(gpu.get(_ECC, "")) > 0)
    if failing:
        yield bad(
            "ECC",
            f"uncorrected memory errors on GPU {failing}",
            "nvidia-smi -q -d ECC; drain the node, reset the GPU, replace it",
        )
    divided = join_items(g["index"] for g in gpus if g.get("mig.mode.current") == "Enabled")
    if divided:
        make = bad if target.local_ranks > 1 else warning
        yield make(
            "MIG",
            f"MIG is on, on GPU {divided}: NCCL joins no two instances of a GPU",
            "nvidia-smi -mig 0, by whoever administers it",
        )
    closed = join_items(gpu["index"] for gpu in gpus if gpu.get("compute_mode") == "Prohibited")
    if closed:
        yield bad("GPUs", f"compute mode is Prohibited on GPU {closed}", "nvidia-smi -c DEFAULT")


def _check_used_memory(target: Target, gpus: Sequence[Gpu]) -> Result:
    """Memory that other processes hold. The engine takes a fraction of all memory, used or not."""
    used_mib = {gpu["index"]: _number(gpu["memory.used"]) for gpu in gpus}
    used = [f"GPU {i}: {mib / 1024:.1f} GiB" for i, mib in used_mib.items() if mib > _USED_MIB]
    if not used:
        return ok("GPU memory", f"free on all {len(gpus)}")
    query = ["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv,noheader"]
    answer = target.run(query, _SMI_S)
    has_answer = answer is not None and not answer.returncode
    owners = answer.stdout.strip().splitlines() if answer and has_answer else []
    finding = f"others hold {join_items(used)}"
    remedy = "end what holds it (nvidia-smi shows it)"
    if owners:
        finding += f" ({join_items(owners, 3)})"
        remedy = f"end {len(owners)} process{'es' * (len(owners) > 1)} (nvidia-smi shows them)"
    # vLLM takes its fraction of all memory, and fails if others hold the rest.
    fraction = target.config.rollout.gpu_memory_utilization if target.config else 0.0
    over = [
        gpu["index"]
        for gpu in gpus
        if used_mib[gpu["index"]] > (1 - fraction) * _number(gpu["memory.total"])
    ]
    if fraction and over:
        return bad(
            "GPU memory",
            f"{finding}: rollout.gpu_memory_utilization {fraction:g} does not fit beside it on "
            f"GPU {join_items(over)}",
            remedy,
        )
    return warning("GPU memory", finding, remedy)


def check_topology(target: Target) -> Iterator[Result]:
    """How the GPUs of this machine are linked."""
    if target.num_gpus < 2:
        return
    answer = target.run(["nvidia-smi", "topo", "-m"], _SMI_S)
    if answer is None or answer.returncode:
        yield warning("topology", "nvidia-smi topo -m says nothing", "look at it by hand")
        return
    pairs = parse_topology(answer.stdout)
    kinds = Counter(pairs.values())
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    finding = f"{counts} of {plural(len(pairs), 'pair')}"
    # NODE and SYS cross the CPU's interconnect.
    far = join_items(f"{a}-{b}" for (a, b), kind in pairs.items() if kind in ("SYS", "NODE"))
    if not far:
        yield ok("topology", finding)
    elif any(kind.startswith("NV") for kind in kinds):
        yield warning(
            "topology",
            f"{finding}: some pairs have no NVLink ({far})",
            "nvidia-smi nvlink -s; a link may be down: dmesg | grep -i nvlink",
        )
    else:
        remedy = "what this machine has; model.num_replicas saves traffic of small models"
        finding += ": by PCIe and between sockets, without NVLink"
        yield warning("topology", finding, remedy)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Kind of link by pair of GPUs, from `nvidia-smi topo -m`. Network cards are skipped."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [line.split() for line in plain.splitlines() if _LINK_ROW.match(line)]
    links: dict[tuple[int, int], str] = {}
    for name, *kinds in rows:
        gpu = int(name[3:])
        for peer, kind in enumerate(kinds[: len(rows)]):
            if peer > gpu and _LINK.fullmatch(kind):
                links[gpu, peer] = kind
    return links


def card_of(name: str, mib: float) -> Card | None:
    """The planner's card for a driver's name of it and its memory."""
    for card in CARDS.values():
        is_named = card.name.partition("-")[0] in name.replace(" ", "")
        if is_named and abs(card.gib - mib / 1024) < 0.15 * card.gib:
            return card
    return None


def _number(text: str) -> float:
    """0 for "[N/A]" and other text that is no number."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else 0.0


# The config. --check and the planner run users' code and torch: each gets a process.


def check_config(target: Target) -> Iterator[Result]:
    """What --check says about model, data, rewards and run folder."""
    if target.config is None:
        return
    command = [sys.executable, "-m", "grpo_spmd.train", "--check", *target.arguments]
    answer = target.run(command, CHECK_S)
    assert answer is not None, sys.executable
    lines = answer.stderr.strip().splitlines()
    errors = []
    # Warnings pass; the last line is the error, if the code is not 0.
    for line in lines:
        kind, _, text = line.partition(": ")
        finding, _, remedy = text.partition("; ")
        if kind == "warning":
            yield warning("--check", finding, remedy or _CORRECT)
        elif kind == "error":
            errors.append(bad("--check", finding, remedy or _CORRECT))
    if not answer.returncode:
        ranks = plural(target.num_ranks, "rank")
        yield ok("--check", f"model, data, rewards and run folder, for {ranks}")
    elif errors:
        yield errors[0]
    else:
        finding = lines[-1][:300] if lines else f"exit code {answer.returncode} without a word"
        yield bad("--check", finding, "python -m grpo_spmd.train --check ... says more")


def check_plan(target: Target) -> Iterator[Result]:
    """Whether the planner says that the run fits these GPUs, if it knows them."""
    gpus = query_gpus(target) if target.config is not None and target.num_gpus else None
    if not gpus:
        return
    card = card_of(gpus[0]["name"], _number(gpus[0]["memory.total"]))
    if card is None:
        yield ok(
            "planner",
            f"the planner has no {gpus[0]['name']} of this size in its table: python -m "
            "grpo_spmd.plan --gpu 80GiB,989TFLOPS,3350GB/s ...",
        )
        return
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_") as folder:
        file = Path(folder, "plan.json")
        command_line = [sys.executable, "-m", "grpo_spmd.plan", *target.arguments]
        command_line += ["--gpu", card.name, "--ranks", str(target.num_ranks), "--json", str(file)]
        answer = target.run(command_line, PLAN_S)
        assert answer is not None, sys.executable
        if not file.exists():
            lines = answer.stderr.strip().splitlines() or ["nothing"]
            yield warning(
                "planner",
                f"says {lines[-1].removeprefix('error: ')[:300]}",
                "python -m grpo_spmd.plan ..., by hand",
            )
            return
        plan = json.loads(file.read_text(encoding="utf-8"))
    margin = f"{plan['margin_gib']:.1f} GiB, least in phase {plan['tightest_phase']}"
    machine = f"({card.name}, {target.num_ranks} ranks); a prediction"
    if plan["fits"]:
        yield ok("planner", f"fits with a margin of {margin} {machine}")
    else:
        yield bad(
            "planner",
            f"does not fit: margin {margin} {machine}",
            f"python -m grpo_spmd.plan --suggest --gpu {card.name} --ranks {target.num_ranks} "
            "--config ...",
        )


def check_sandbox(target: Target) -> Iterator[Result]:
    """Whether model-written code can be isolated here: the reward `code`, the tool `python`."""
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
    rest = "" if "namespaces" in walls else " (no scratch folder, no threads)"
    yield ok("sandbox", f"model-written code can be shut in: {', '.join(walls)}{rest}")
