"""What vLLM's start needs on GPUs and not on a CPU."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RolloutConfig

_log = logging.getLogger("grpo_spmd")
_CUSTOM_ALL_REDUCE_RANKS = (2, 4, 6, 8, 16)


def allocator_settings() -> str:
    """The user's options of torch's allocator, where torch looks for them."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


@contextmanager
def allocator_settings_kept(device: torch.device) -> Iterator[None]:
    """Keep the user's options of torch's allocator: vLLM switches expandable segments off while it fills the pool of
    its sleep mode, which cannot live in them, and on again. Up to 0.30 it looks for them in PYTORCH_CUDA_ALLOC_CONF
    alone, not in PYTORCH_ALLOC_CONF, and sets nothing but that one option; torch resets all others to their defaults.
    """
    given = allocator_settings()
    if device.type != "cuda" or not given:
        yield
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    yield
    torch._C._accelerator_setAllocatorSettings(given)


def refuse_unshareable_segments(rollout: RolloutConfig, device: str) -> None:
    """Raises ConfigError: for its custom all-reduce vLLM (0.26 to 0.33) has the ranks of an engine hand each other the
    buffers of their CUDA graphs by cudaIpcGetMemHandle, which expandable segments do not have. It does without for
    other numbers of ranks, and where more than two GPUs have no NVLink, which only it knows."""
    settings = allocator_settings().replace(" ", "").lower().split(",")
    without = rollout.engine.get("disable_custom_all_reduce"), rollout.engine.get("enforce_eager")
    is_on = "expandable_segments:true" in settings and rollout.tensor_parallel_size in _CUSTOM_ALL_REDUCE_RANKS
    is_on = is_on and True not in without
    if is_on and device == "cuda":
        what = f"expandable_segments with rollout.tensor_parallel_size {rollout.tensor_parallel_size}"
        why = "vLLM's custom all-reduce cannot share such memory between ranks"
        remedy = "leave it out, or set rollout.engine.disable_custom_all_reduce=true (NCCL's, as without NVLink)"
        raise ConfigError(f"PYTORCH_ALLOC_CONF: {what}: {why}; {remedy}")


def keep_caches_on_node(world_size: int) -> None:
    """With several nodes, vLLM's caches of compiled code go to a disk of the node, unless VLLM_CACHE_ROOT says where:
    each rank writes a folder of its own, by default below the home folder, which nodes share. To be called before vllm
    is imported."""
    if world_size == int(os.environ.get("LOCAL_WORLD_SIZE", world_size)) or os.environ.get("VLLM_CACHE_ROOT"):
        return
    folder = Path(tempfile.gettempdir(), f"vllm-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        found = folder.lstat()  # code is loaded from there: one that others made, or can write to, is not taken
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    os.environ["VLLM_CACHE_ROOT"] = str(folder)


def warn_of_slow_seeds(vllm_config: Any, device: str) -> None:
    """Every request has its own seed, for which vLLM's V1 model runner loops over the requests in Python at each token;
    V2 has them in a tensor. V2 is the default of what vLLM supports in it (0.26: dense models; 0.32: nearly all)."""
    if device == "cuda" and not vllm_config.use_v2_model_runner:
        what = "vLLM runs its V1 model runner, which samples seeded requests one by one: generation is slower"
        _log.warning("%s; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, where this model and these options allow it", what)
