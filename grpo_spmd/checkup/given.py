"""What --check and the planner say of the config, each in a process of its own: they run users' code, and torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grpo_spmd.checkup.devices import ask_smi, card_of
from grpo_spmd.checkup.results import Place, Result, plural

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
    refused = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), None)
    if code == 0:
        yield Result("--check", "ok", f"model, data, rewards and run folder, for {plural(place.num_ranks, 'rank')}")
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
        yield Result("planner", "ok", f"{what}: python -m grpo_spmd.plan --gpu 80GiB,989TFLOPS,3350GB/s ...")
        return
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_") as folder:
        file, ranks = Path(folder, "plan.json"), str(place.num_ranks)
        command = ["-m", "grpo_spmd.plan", *place.words, "--gpu", card.name, "--ranks", ranks, "--json", str(file)]
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
    what = (
        f"{plan['margin_gib']:.1f} GiB, least in phase {plan['tightest_phase']} ({card.name}, {place.num_ranks} ranks)"
    )
    if plan["fits"]:
        yield Result("planner", "ok", f"fits with a margin of {what}; a prediction")
    else:
        remedy = f"python -m grpo_spmd.plan --suggest --gpu {card.name} --ranks {ranks} --config ..."
        yield Result("planner", "bad", f"does not fit: margin {what}; a prediction", remedy)


def look_at_isolation(place: Place) -> Iterator[Result]:
    """Whether model-written code can be shut in here: the reward `code`, the tool `python`."""
    from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation

    named = [reward.name for reward in place.config.rewards if reward.is_shipped] if place.config else []
    tools = [str(tool) for tool in place.config.environment.tools] if place.config else []
    is_needed = "code" in named or "python" in tools
    try:
        walls = check_isolation()
    except (SandboxError, OSError, subprocess.SubprocessError) as error:
        remedy = "Linux 5.13 or later with Landlock, or a container that allows user namespaces"
        yield Result("sandbox", "bad" if is_needed else "warning", str(error), remedy)
        return
    found = f"model-written code can be shut in: {', '.join(walls)}"
    yield Result("sandbox", "ok", found + ("" if "namespaces" in walls else " (no scratch folder, no threads)"))
