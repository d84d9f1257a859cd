"""What vLLM's start needs on GPUs and not on a CPU."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.data.cache import is_of_this_host, is_own_folder

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


def keep_caches_on_node() -> None:
    """What vLLM, Triton and FlashInfer compile lies below the home folder. Where that is on another host, all nodes
    wait for its locks and ranks read small files over the network: it goes to the temporary folder then, where all
    ranks of the node find it, but for what a variable gives a place, and unless that folder is no better: on another
    host too, or mounted so that no code is loaded from it. To be called before vllm is imported; torch's Inductor keeps
    to the temporary folder by itself."""
    home, temporary = Path(os.path.expanduser("~")), Path(tempfile.gettempdir())
    defaults = {
        "VLLM_CACHE_ROOT": Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "vllm"),
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_HOME") or home, ".triton"),
        "FLASHINFER_WORKSPACE_BASE": home / ".cache" / "flashinfer",
    }
    moved = [name for name, at in defaults.items() if not (os.environ.get(name) or is_of_this_host(at))]
    if not moved or not is_of_this_host(temporary) or os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return
    folder = temporary / f"vllm-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(folder):  # code is loaded from there: one that others made, or can write to, is not taken
        _log.warning("%s is no folder that you alone can write to: this rank compiles for itself, anew", folder)
        folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    # Downloaded, not compiled: perhaps there is no network now.
    fetched = defaults["FLASHINFER_WORKSPACE_BASE"] / "cubins"
    if "FLASHINFER_WORKSPACE_BASE" in moved and fetched.is_dir():
        os.environ.setdefault("FLASHINFER_CUBIN_DIR", str(fetched))
    for name in moved:
        os.environ[name] = str(folder / "triton" if name == "TRITON_CACHE_DIR" else folder)


def warn_of_slow_seeds(vllm_config: Any, device: str) -> None:
    """Every request has its own seed, for which vLLM's V1 model runner loops over the requests in Python at each token;
    V2 has them in a tensor. V2 is the default of what vLLM supports in it (0.26: dense models; 0.32: nearly all)."""
    if device == "cuda" and not vllm_config.use_v2_model_runner:
        what = "vLLM runs its V1 model runner, which samples seeded requests one by one: generation is slower"
        _log.warning("%s; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, where this model and these options allow it", what)
