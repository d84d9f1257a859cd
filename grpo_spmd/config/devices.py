"""Which kind of device this process will train on, without torch, and the defaults that follow it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import Config

_CPU_TOKENS = 2048  # of a micro-batch: what a pass over more writes, the kernel has to find pages for again each time


_WSL_DEVICE, _WSL_CUDA = Path("/dev/dxg"), Path("/usr/lib/wsl/lib/libcuda.so.1")  # the device is any maker's


def num_gpus() -> int:
    """NVIDIA's devices that this process may open, whether torch can use them or not; 0 also where no driver is loaded,
    and in a container or a job that was given none (/proc/driver/nvidia would show it those of the machine). 1 under
    Windows (WSL 2) with NVIDIA's driver, which shows one device for all."""
    shown = sum(_can_be_opened(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    return shown or int(_WSL_CUDA.exists() and _can_be_opened(_WSL_DEVICE))


def _can_be_opened(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR))
    except OSError:
        return False
    return True


def gpus_are_hidden() -> bool:
    """On purpose: CUDA takes no device from the first name on that is none (Slurm writes NoDevFiles)."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip().lower()
    return first in ("", "-1", "nodevfiles", "none", "void")


def trains_on_cpu() -> bool:
    """Whether a rank that starts here will find no GPU, or has a torch that can use none."""
    return gpus_are_hidden() or not num_gpus() or is_built_for_cpu(find_spec("torch"))


def is_built_for_cpu(torch: ModuleSpec | None) -> bool:
    """What torch would say of itself; it takes seconds to ask."""
    if torch is None or torch.origin is None:
        return False
    try:
        said = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*= *None\s*$", said, re.MULTILINE) is not None


def fitted_to_cpu(config: Config, tree: Mapping[str, Any]) -> Config:
    """`config` with the defaults of a CPU for what `tree`, which it was made from, does not say: micro-batches of 2,048
    tokens, or of the two longest rollouts where they are longer, and never of more than the default elsewhere."""
    training = config.training
    if "max_tokens_per_micro_batch" in (tree.get("training") or {}):
        return config
    tokens = min(training.max_tokens_per_micro_batch, max(_CPU_TOKENS, 2 * config.max_rollout_tokens))
    return dataclasses.replace(config, training=dataclasses.replace(training, max_tokens_per_micro_batch=tokens))
