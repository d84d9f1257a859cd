"""Asks the planner whether a run fits its GPUs, and which values to use where the config says auto.

The planner runs in a process of its own, because it replaces parts of torch while it works. That
process runs this module first, which makes it end with the rank that asks.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import decided, decided_values
from grpo_spmd.config.schema import DECIDED_KEYS, ENGINE_RANKS_KEY, MICRO_BATCH_KEY, Config
from grpo_spmd.distributed.processes import end_with_parent, without_launch
from grpo_spmd.observe.cards import find_device
from grpo_spmd.records import Fields

# A plan takes about 10 seconds of an idle core, with suggestions a minute.
_PLAN_S = 300.0


class Decision(NamedTuple):
    """The values to use in the place of auto, and a line about them for the log."""

    values: Fields  # by key
    line: str
    is_certain: bool  # False: the planner cannot say, or its estimates say that it does not fit


def ranks_of_a_node() -> int:
    """Returns how many ranks of this launch are on each node; 1 if the launcher does not say."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def keep_recorded(config: Config, recorded: Mapping[str, Any]) -> Config:
    """Returns the config with the values that a checkpoint recorded in the place of auto.

    `recorded` is the checkpoint's flat config. Two values are left to be decided anew if they do
    not fit any more: a micro-batch that cannot hold the longest rollout, and an engine whose number
    of ranks does not divide the ranks of a node.
    """
    values = {key: recorded[key] for key in DECIDED_KEYS if recorded.get(key, "auto") != "auto"}
    if values.get(MICRO_BATCH_KEY, math.inf) < config.max_rollout_tokens:
        del values[MICRO_BATCH_KEY]
    if ranks_of_a_node() % values.get(ENGINE_RANKS_KEY, 1):
        del values[ENGINE_RANKS_KEY]
    return decided(config, values)


def decide_for_device(config: Config, device_name: str, gib: float, num_ranks: int) -> Decision:
    """Returns what the planner decides for GPUs of this name and memory.

    Raises ConfigError if the bytes that the planner counts exactly do not fit. If the planner
    fails, the values are its first choices, and the line says that it is not known whether they
    fit.
    """
    try:
        plan = run_planner(config, card_name(device_name, gib), num_ranks)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        values = decided_values(config)
        line = f"{values_text(values)}: the planner cannot say whether it fits: {error}"
        return Decision(values, line, is_certain=False)
    phase = plan["tightest_phase"]
    line = (
        f"{values_text(plan['decided'])}: {plan['phases'][phase]['peak_gib']:.1f} of "
        f"{plan['gpu']['gib']:.1f} GiB in {phase}, by the planner (margin "
        f"{plan['margin_gib']:.1f} GiB)"
    )
    fitting = [item for item in plan["suggestions"] if item["fits"]]
    remedy = "more ranks or a larger card would"
    if fitting:
        remedy = f"it would fit with {' '.join(fitting[0]['overrides'])}"
        if fitting[0]["changes_training"]:
            remedy += ", which trains adapters alone"
    if plan["cannot_fit"]:
        raise ConfigError(f"the run cannot fit this GPU: {line}; {remedy}")
    if not plan["fits"]:
        line += f"; by its estimates the run does not fit: {remedy}"
    return Decision(plan["decided"], line, is_certain=plan["fits"])


def values_text(values: Fields) -> str:
    """Returns the values of DECIDED_KEYS as one line of text."""
    pairs = (f"{key.partition('.')[2]}: {json.dumps(value)}" for key, value in values.items())
    return ", ".join(pairs).replace('"', "")


def card_name(device_name: str, gib: float) -> str:
    """Returns the name of a device, or its figures, as the planner's --gpu takes them."""
    card = find_device(device_name, gib)
    # The question is only about memory, so the speeds of an unknown card can be made up.
    return card.name if card else f"{gib:.2f}GiB,100TFLOPS,1000GB/s"


def run_planner(config: Config, card: str, num_ranks: int, *, limit_s: float = _PLAN_S) -> Fields:
    """Returns the plan as JSON. Raises OSError, ValueError or SubprocessError if there is none."""
    # The planner gets no GPU and no variables of this launch by torchrun: it plans for other ranks.
    environment = without_launch(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_plan_") as folder:
        source, result = Path(folder, "config.yaml"), Path(folder, "plan.json")
        source.write_text(yaml.safe_dump(config_to_dict(config)), encoding="utf-8")
        command = [sys.executable, "-m", __name__, str(os.getpid()), "--config", str(source)]
        command += ["--gpu", card, "--ranks", str(num_ranks), "--json", str(result)]
        command += ["--ranks-per-node", str(ranks_of_a_node())]
        answer = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        if not result.exists():
            lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            raise ValueError(lines[-1][:300])
        return dict(json.loads(result.read_text(encoding="utf-8")))


if __name__ == "__main__":
    # If the run is killed, nothing else would end this process.
    end_with_parent(signal.SIGKILL, int(sys.argv.pop(1)))
    runpy.run_module("grpo_spmd.plan", run_name="__main__", alter_sys=True)
