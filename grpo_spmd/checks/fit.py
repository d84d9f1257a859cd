"""Asks the planner whether a run fits its GPUs, and what its config's auto stands for.

The planner runs in a process of its own, because it replaces parts of torch while it works.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from grpo_spmd.config.describe import config_to_dict
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import decided
from grpo_spmd.config.schema import DECIDED_KEYS, Config
from grpo_spmd.distributed.processes import without_launch
from grpo_spmd.observe.cards import find_device

# A plan takes about 10 seconds of an idle core, with suggestions a minute.
_PLAN_S = 300.0


class Decision(NamedTuple):
    """Holds what stands in the place of auto, and a line about it for the log."""

    recompute: bool | Literal["selective"]
    tokens: int
    line: str
    is_certain: bool  # False: the planner cannot say, or its estimates say that it does not fit


def keep_recorded(config: Config, recorded: Mapping[str, Any]) -> Config:
    """Returns the config with the values of a checkpoint's flat config in the place of auto.

    A micro-batch that would no longer hold the longest rollout is decided anew.
    """
    recompute, tokens = (recorded.get(key, "auto") for key in DECIDED_KEYS)
    if tokens != "auto" and tokens < config.max_rollout_tokens:
        tokens = "auto"
    return decided(config, recompute=recompute, tokens=tokens)


def decide_for_device(config: Config, device_name: str, gib: float, num_ranks: int) -> Decision:
    """Returns what the planner decides for GPUs of this name and memory.

    Raises ConfigError if the run cannot fit by its counted bytes. If the planner cannot say, the
    run goes on without recomputation and with the largest micro-batch, and the line says so.
    """
    card = find_device(device_name, gib)
    # Memory alone is decided here: the speeds of an unknown card do not matter.
    name = card.name if card else f"{gib:.2f}GiB,100TFLOPS,1000GB/s"
    try:
        plan = _run_planner(config, name, num_ranks)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        values = decided(config, recompute=False, tokens=config.micro_batch_tokens)
        line = f"{_values_text(values)}: the planner cannot say whether it fits: {error}"
        return _decision(values, line, is_certain=False)
    recompute, tokens = (plan["decided"][key] for key in DECIDED_KEYS)
    values = decided(config, recompute=recompute, tokens=tokens)
    phase = plan["tightest_phase"]
    line = (
        f"{_values_text(values)}: {plan['phases'][phase]['peak_gib']:.1f} of "
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
    return _decision(values, line, is_certain=plan["fits"])


def _decision(values: Config, line: str, *, is_certain: bool) -> Decision:
    return Decision(values.model.recompute, values.micro_batch_tokens, line, is_certain)


def _values_text(config: Config) -> str:
    recompute = json.dumps(config.model.recompute).strip('"')
    return (
        f"activation_checkpointing: {recompute}, {config.micro_batch_tokens:,} tokens a micro-batch"
    )


def _run_planner(config: Config, card: str, num_ranks: int) -> dict[str, Any]:
    """Returns the plan as JSON. Raises OSError, ValueError or SubprocessError without one."""
    # No GPU, and nothing of this launch of torchrun: the planner has ranks of its own.
    environment = without_launch(os.environ) | {"CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_plan_") as folder:
        source, result = Path(folder, "config.yaml"), Path(folder, "plan.json")
        source.write_text(yaml.safe_dump(config_to_dict(config)), encoding="utf-8")
        command = [sys.executable, "-m", "grpo_spmd.plan", "--config", str(source)]
        command += ["--gpu", card, "--ranks", str(num_ranks), "--json", str(result)]
        answer = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PLAN_S,
            check=False,
        )
        if not result.exists():
            lines = answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"]
            raise ValueError(lines[-1][:300])
        return dict(json.loads(result.read_text(encoding="utf-8")))
