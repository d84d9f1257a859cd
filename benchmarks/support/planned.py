"""What the planner predicts for a run on this device, to stand beside what the run measured."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from grpo_spmd.checks.fit import card_name, run_planner
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config

# Without a GPU some card, to see that the planner answers.
_NO_GPU = "24GiB,1TFLOPS,20GB/s"


def planned(config: Path, limit_s: float = 40.0) -> dict[str, Any]:
    """The plan of a config on one rank, as JSON; empty where the planner gives none, which is
    printed."""
    try:
        return run_planner(load_config(config), _card(), 1, limit_s=limit_s)
    except (ConfigError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"the planner gave no answer about {config}: {error}")
        return {}


def _card() -> str:
    """By the driver: a context of this process would be in the memory of the run."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or shutil.which("nvidia-smi") is None:
        return _NO_GPU
    command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    if not lines:
        return _NO_GPU
    name, mib = lines[0].rsplit(",", 1)
    return card_name(name, float(mib) / 1024)
