"""GPUs as the driver tells of them (nvidia-smi), without torch: how many, how new, how free, how linked."""

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
from grpo_spmd.tools.checkup.results import Level, Place, Result, listed, plural

# An older driver refuses a question with a field that it does not know: these are asked first alone.
_FIELDS = ("index", "name", "driver_version", "memory.total", "memory.used")
_MORE = (
    "compute_cap",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "compute_mode",
    "pci.bus_id",
)
_SMI_S = 8.0
# The least drivers of CUDA's major versions (CUDA Toolkit release notes, minor version compatibility).
_DRIVERS = {"11": 450, "12": 525, "13": 580}
_TAKEN_MIB = 1024
_LINKS = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS|X")


def ask_smi(place: Place) -> list[dict[str, str]] | None:
    """One dict a GPU; None where there is no nvidia-smi. Raises OSError with what it said."""
    gpus: list[dict[str, str]] = []
    for fields in (_FIELDS, _MORE):
        query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        if (answer := place.ask(query, _SMI_S)) is None:
            return None
        code, output, errors = answer
        if code and not gpus:
            said = (output.strip() or errors.strip()).splitlines() or ["no reason"]
            raise OSError(f"nvidia-smi: {said[0][:200]}")
        rows = [] if code else [*csv.reader(output.splitlines(), skipinitialspace=True)]
        read = [dict(zip(fields, row, strict=False)) for row in rows if len(row) == len(fields)]
        gpus = (
            [known | more for known, more in zip(gpus, read, strict=True)]
            if len(gpus) == len(read)
            else gpus or read
        )
    return gpus


def look_at_gpus(place: Place) -> Iterator[Result]:
    if not place.num_gpus:
        hidden = "hidden by CUDA_VISIBLE_DEVICES" if gpus_are_hidden() else "none"
        yield Result("GPUs", "ok", f"{hidden}: ranks train on the CPU", alike={"GPUs": hidden})
        return
    try:
        gpus = ask_smi(place)
    except OSError as error:
        remedy = "restart the machine, or install the driver again; dmesg | grep -i nvrm"
        yield Result(
            "GPUs",
            "bad",
            f"{place.num_gpus} are there, and the driver does not answer: {error}",
            remedy,
        )
        return
    if gpus is None:
        yield Result(
            "GPUs",
            "warning",
            f"{place.num_gpus}, and no nvidia-smi that tells more",
            "install the driver's tools",
        )
        return
    names = Counter(f"{gpu['name']}, {_number(gpu['memory.total']) / 1024:.0f} GiB" for gpu in gpus)
    found = "; ".join(f"{count} x {name}" for name, count in names.items())
    alike = {"GPUs": found, "driver": gpus[0]["driver_version"] if gpus else ""}
    if len(names) > 1:
        yield Result(
            "GPUs",
            "warning",
            f"{found}: all ranks wait for the slowest",
            "name those of one kind in CUDA_VISIBLE_DEVICES",
            alike,
        )
    else:
        yield Result("GPUs", "ok", found, alike=alike)
    if gpus:
        yield _driver(gpus[0]["driver_version"], torch_cuda())
    yield from _states(place, gpus)
    yield from _taken(place, gpus)


def torch_cuda() -> str:
    """The version of CUDA that torch was built for; "" for the CPU, or where there is no torch."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    found = re.search(r"^cuda\b.*= *['\"]([\d.]+)", text, re.MULTILINE)
    return found[1] if found else ""


def _driver(driver: str, cuda: str) -> Result:
    least = _DRIVERS.get(cuda.partition(".")[0])
    major = driver.partition(".")[0]
    if not cuda or least is None or not major.isdecimal():
        return Result("driver", "ok", driver)
    if int(major) < least:
        what = f"{driver}, and torch's CUDA {cuda} asks for {least} or later (or cuda-compat)"
        return Result(
            "driver",
            "warning",
            what,
            f"update the driver, or install a torch for CUDA {_newest(int(major))}",
        )
    return Result("driver", "ok", f"{driver}, new enough for torch's CUDA {cuda}")


def _newest(driver: int) -> str:
    fitting = [cuda for cuda, least in _DRIVERS.items() if driver >= least]
    return f"{fitting[-1]}.x" if fitting else "that it knows"


def _states(place: Place, gpus: Sequence[dict[str, str]]) -> Iterator[Result]:
    old = [gpu for gpu in gpus if re.fullmatch(r"[1-7]\.\d", gpu.get("compute_cap", ""))]
    if old:
        what = f"compute capability {old[0]['compute_cap']} has no bfloat16"
        yield Result(
            "capability", "warning", what, "model.dtype: float32, or GPUs of 8.0 (A100) or later"
        )
    elif gpus and gpus[0].get("compute_cap"):
        yield Result("capability", "ok", gpus[0]["compute_cap"])
    if failing := [
        gpu["index"]
        for gpu in gpus
        if _number(gpu.get("ecc.errors.uncorrected.volatile.total", "")) > 0
    ]:
        what = f"uncorrected memory errors on GPU {listed(failing)}"
        yield Result(
            "ECC", "bad", what, "nvidia-smi -q -d ECC; drain the node, reset the GPU, replace it"
        )
    if divided := [gpu["index"] for gpu in gpus if gpu.get("mig.mode.current") == "Enabled"]:
        level: Level = "bad" if place.local_ranks > 1 else "warning"
        what = f"MIG is on, on GPU {listed(divided)}: NCCL joins no two instances of a GPU"
        yield Result("MIG", level, what, "nvidia-smi -mig 0, by whoever administers it")
    if closed := [gpu["index"] for gpu in gpus if gpu.get("compute_mode") == "Prohibited"]:
        yield Result(
            "GPUs",
            "bad",
            f"compute mode is Prohibited on GPU {listed(closed)}",
            "nvidia-smi -c DEFAULT",
        )


def _taken(place: Place, gpus: Sequence[dict[str, str]]) -> Iterator[Result]:
    """Memory that others hold: the engine takes a share of all there is, whoever has it."""
    taken = {
        gpu["index"]: _number(gpu["memory.used"])
        for gpu in gpus
        if _number(gpu["memory.used"]) > _TAKEN_MIB
    }
    if not taken:
        yield Result("GPU memory", "ok", f"free on all {len(gpus)}")
        return
    answer = place.ask(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory,name", "--format=csv,noheader"], _SMI_S
    )
    who = [line.strip() for line in answer[1].splitlines()] if answer and not answer[0] else []
    used = listed(f"GPU {index}: {mib / 1024:.1f} GiB" for index, mib in taken.items())
    share = place.config.rollout.gpu_memory_utilization if place.config else 0.0
    over = [
        gpu["index"]
        for gpu in gpus
        if _number(gpu["memory.used"]) > (1 - share) * _number(gpu["memory.total"])
    ]
    found = f"others hold {used}" + (f" ({listed(who, 3)})" if who else "")
    end_it = f"end {plural(len(who), 'process') if who else 'what holds it'} (nvidia-smi shows them)".replace(
        "processs", "processes"
    )
    if share and over:
        what = f"{found}: rollout.gpu_memory_utilization {share:g} does not fit beside it on GPU {listed(over)}"
        yield Result("GPU memory", "bad", what, end_it)
    else:
        yield Result("GPU memory", "warning", found, end_it)


def look_at_links(place: Place) -> Iterator[Result]:
    """How the GPUs of this machine reach each other, by nvidia-smi topo -m."""
    if place.num_gpus < 2:
        return
    answer = place.ask(["nvidia-smi", "topo", "-m"], _SMI_S)
    if answer is None or answer[0]:
        yield Result("topology", "warning", "nvidia-smi topo -m says nothing", "look at it by hand")
        return
    pairs = parse_topology(answer[1])
    kinds = Counter(pairs.values())
    shown = (
        ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        + f" of {plural(len(pairs), 'pair')}"
    )
    far = sorted({kind for kind in kinds if kind in ("SYS", "NODE")})
    if far and any(kind.startswith("NV") for kind in kinds):
        who = listed(f"{a}-{b}" for (a, b), kind in pairs.items() if kind in far)
        what = f"{shown}: some pairs have no NVLink ({who})"
        yield Result(
            "topology",
            "warning",
            what,
            "nvidia-smi nvlink -s; a link may be down: dmesg | grep -i nvlink",
        )
    elif far:
        what = f"{shown}: by PCIe and between sockets, without NVLink"
        yield Result(
            "topology",
            "warning",
            what,
            "what this machine has; model.num_replicas saves traffic of small models",
        )
    else:
        yield Result("topology", "ok", shown)


def parse_topology(text: str) -> dict[tuple[int, int], str]:
    """Of each pair of GPUs the kind of its link. Colours and cards for the network are passed over."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    rows = [
        line.split()
        for line in plain.splitlines()
        if re.match(r"\s*GPU\d+\s+(X|NV|PIX|PXB|PHB|NODE|SYS)", line)
    ]
    found: dict[tuple[int, int], str] = {}
    for row in rows:
        own = int(row[0][3:])
        for other, kind in enumerate(row[1 : 1 + len(rows)]):
            if other > own and _LINKS.fullmatch(kind):
                found[own, other] = kind
    return found


def card_of(name: str, mib: float) -> Card | None:
    """The planner's card, by what the driver calls it and its memory."""
    fitting = [
        card for card in CARDS.values() if card.name.partition("-")[0] in name.replace(" ", "")
    ]
    close = [card for card in fitting if abs(card.gib - mib / 1024) < 0.15 * card.gib]
    return close[0] if close else None


def _number(text: str) -> float:
    """0 for "[N/A]" and what else is no number."""
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text.strip()) else 0.0


# What --check and the planner say of the config, each in a process of its own: they run users' code, and torch.


CHECK_S, PLAN_S = 120.0, 120.0
_CORRECT = "correct it in the config, or by section.key=value"


def look_at_config(place: Place) -> Iterator[Result]:
    """Model, data, rewards, run folder: all that is refused before torch is imported."""
    if place.config is None:
        return
    answer = place.ask([sys.executable, "-m", "grpo_spmd.train", "--check", *place.words], CHECK_S)
    assert answer is not None, sys.executable
    code, _, errors = answer
    lines = errors.strip().splitlines()
    for line in lines:
        if line.startswith("warning: "):
            what, _, remedy = line.removeprefix("warning: ").partition("; ")
            yield Result("--check", "warning", what, remedy or _CORRECT)
    refused = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None
    )
    if code == 0:
        yield Result(
            "--check",
            "ok",
            f"model, data, rewards and run folder, for {plural(place.num_ranks, 'rank')}",
        )
    elif refused is not None:
        what, _, remedy = refused.partition("; ")
        yield Result("--check", "bad", what, remedy or _CORRECT)
    else:
        what = lines[-1][:300] if lines else f"exit code {code} without a word"
        yield Result("--check", "bad", what, "python -m grpo_spmd.train --check ... says more")


def look_at_plan(place: Place) -> Iterator[Result]:
    """Whether it fits these GPUs, where there are some that the planner knows."""
    gpus = ask_smi(place) if place.config is not None and place.num_gpus else None
    if not gpus:
        return
    card = card_of(gpus[0]["name"], float(gpus[0]["memory.total"]))
    if card is None:
        what = f"the planner has no {gpus[0]['name']} of this size in its table"
        yield Result(
            "planner", "ok", f"{what}: python -m grpo_spmd.plan --gpu 80GiB,989TFLOPS,3350GB/s ..."
        )
        return
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_") as folder:
        file, ranks = Path(folder, "plan.json"), str(place.num_ranks)
        command = [
            "-m",
            "grpo_spmd.plan",
            *place.words,
            "--gpu",
            card.name,
            "--ranks",
            ranks,
            "--json",
            str(file),
        ]
        answer = place.ask([sys.executable, *command], PLAN_S)
        assert answer is not None, sys.executable
        if not file.exists():
            said = answer[2].strip().splitlines()[-1:] or ["nothing"]
            yield Result(
                "planner",
                "warning",
                f"says {said[0].removeprefix('error: ')[:300]}",
                "python -m grpo_spmd.plan ..., by hand",
            )
            return
        plan = json.loads(file.read_text(encoding="utf-8"))
    what = f"{plan['margin_gib']:.1f} GiB, least in phase {plan['tightest_phase']} ({card.name}, {place.num_ranks} ranks)"
    if plan["fits"]:
        yield Result("planner", "ok", f"fits with a margin of {what}; a prediction")
    else:
        remedy = (
            f"python -m grpo_spmd.plan --suggest --gpu {card.name} --ranks {ranks} --config ..."
        )
        yield Result("planner", "bad", f"does not fit: margin {what}; a prediction", remedy)


def look_at_isolation(place: Place) -> Iterator[Result]:
    """Whether model-written code can be shut in here: the reward `code`, the tool `python`."""
    from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation

    named = (
        [reward.name for reward in place.config.rewards if reward.is_shipped]
        if place.config
        else []
    )
    tools = [str(tool) for tool in place.config.environment.tools] if place.config else []
    is_needed = "code" in named or "python" in tools
    try:
        walls = check_isolation()
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        remedy = "Linux 5.13 or later with Landlock, or a container that allows user namespaces"
        yield Result("sandbox", "bad" if is_needed else "warning", str(error), remedy)
        return
    found = f"model-written code can be shut in: {', '.join(walls)}"
    yield Result(
        "sandbox",
        "ok",
        found + ("" if "namespaces" in walls else " (no scratch folder, no threads)"),
    )
