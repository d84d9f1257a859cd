"""vLLM's start: options and environment. What differs between its versions is said at the line: here, in isolation.py,
reload.py, weight_map.py and lora_adapters.py."""

from __future__ import annotations

import functools
import logging
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ADAPTER_RANKS, LoraConfig, ModelConfig, RolloutConfig
from grpo_spmd.data.cache import is_of_this_host, is_own_folder
from grpo_spmd.distributed.session import Session
from grpo_spmd.distributed.startup import garbage_collector_off
from grpo_spmd.engine.failures import cpu_cache_bytes, no_room_for_cache, refused_keys
from grpo_spmd.model.config_json import head_dim
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.lora import engine_target_modules
from grpo_spmd.observe.memory import MemoryUse, total_bytes

# vLLM reads these when it is imported, which only functions do. The first keeps it in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Some of its modules log before they have read the variable.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@garbage_collector_off()  # half of its imports are made as it starts
def start_vllm(
    model: ModelConfig, rollout: RolloutConfig, max_rollout_tokens: int, session: Session
) -> Any:
    """Collective. A vllm.LLM with dummy weights on each of `rollout.tensor_parallel_size` ranks."""
    refuse_unshareable_segments(rollout, session.device.type)
    keep_caches_on_node()
    import vllm

    # The CPU worker replaces this by a function that only warns; others of vLLM set the number.
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    _name_shared_memory_after_job(session.attempt)
    device = session.device.type
    options: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": max_rollout_tokens,
    }
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True}
    options |= {
        "distributed_executor_backend": "external_launcher",
        "seed": 0,
    }  # every request brings its own seed
    options |= {"tensor_parallel_size": rollout.tensor_parallel_size, "enable_prefix_caching": True}
    options |= {"logprobs_mode": "processed_logprobs"}  # at the temperature, as the policy's are
    options |= {
        "enable_sleep_mode": device == "cuda",
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
    }
    if model.lora.base_stays_in_engine:
        options |= _lora_options(model.path, model.lora)
    if device == "cpu":
        cache_bytes = _cpu_kv_cache_bytes(model, rollout, max_rollout_tokens, session.world_size)
        options |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": cache_bytes}
    try:
        return vllm.LLM(trust_remote_code=False, **options | rollout.engine)
    except Exception as error:
        if isinstance(error, ValueError) and (said := no_room_for_cache(str(error), device)):
            raise ConfigError(said) from None
        if not rollout.engine or isinstance(
            error, dist.DistError
        ):  # another rank or the network failed: no bad input
            raise
        raise ConfigError(refused_keys(rollout.engine, error)) from error
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def _lora_options(path: str, lora: LoraConfig) -> dict[str, Any]:
    """Room for one adapter of this rank, on the layers that get one."""
    room = [rank for rank in ADAPTER_RANKS if rank >= lora.rank]
    from vllm.engine.arg_utils import EngineArgs

    layers = engine_target_modules(path, lora)
    options = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room[0],
        "lora_target_modules": layers,
    }
    # An older version, which knows no target modules, adapts all layers.
    return {name: value for name, value in options.items() if hasattr(EngineArgs, name)}


def _cpu_kv_cache_bytes(
    model: ModelConfig, rollout: RolloutConfig, max_rollout_tokens: int, world_size: int
) -> int:
    """Room for a step's completions at full length: at least 64 MiB, at most 1/8 of the host's memory over its ranks.
    Without it vLLM asks for nearly all of the host's memory, on each rank."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    hf, sizes = load_config(model.path), CPUAttentionBackend.get_supported_head_sizes()
    if head_dim(hf) not in sizes:  # vLLM would find that out when it first samples
        raise ConfigError(
            f"model.path: {model.path} has heads of {head_dim(hf)}, and vLLM on a CPU only of {sizes}"
        )
    heads = getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    token = 2 * hf.num_hidden_layers * heads * head_dim(hf) * (4 if model.dtype == "float32" else 2)
    engines = max(1, world_size // rollout.tensor_parallel_size)
    wanted = (
        token * max_rollout_tokens * rollout.num_launched_prompts * rollout.group_size // engines
    )
    return max(64 << 20, min(int(wanted), cpu_cache_bytes()))


def _name_shared_memory_after_job(attempt: int) -> None:
    """On a CPU with tensor parallelism vLLM's shared memory has the same name in all external_launcher jobs: two on one
    host, or what a killed one left, make the next fail with errno 17 (0.28 to 0.32). The text after the last ':' of the
    init method enters the name."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    own = ExecutorWithExternalLauncher._distributed_args
    original = getattr(
        own, "__wrapped__", own
    )  # not what an earlier run of this process has put there

    @functools.wraps(original)
    def distributed_args(self: Any) -> Any:
        method, rank, local_rank = original(self)
        if dist.is_initialized():  # then the method is used for nothing else
            job = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")]
            method = "env://:" + "-".join([*job, str(attempt)])
        return method, rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args


# What vLLM does to the process around it, undone.


_TOUCHED_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")


@contextmanager
def isolated() -> Iterator[None]:
    """Put back the global random states, which vLLM reseeds and draws from, so that the trainer's randomness does not
    depend on what was generated; and the environment, where LOCAL_WORLD_SIZE would be the TP size."""
    random_state, numpy_state, torch_state = (
        random.getstate(),
        np.random.get_state(),
        torch.get_rng_state(),
    )
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    environment = {name: os.environ[name] for name in _TOUCHED_ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        for name in _TOUCHED_ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(environment)


# What vLLM's start needs on GPUs and not on a CPU.


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
    is_on = (
        "expandable_segments:true" in settings
        and rollout.tensor_parallel_size in _CUSTOM_ALL_REDUCE_RANKS
    )
    is_on = is_on and True not in without
    if is_on and device == "cuda":
        what = (
            f"expandable_segments with rollout.tensor_parallel_size {rollout.tensor_parallel_size}"
        )
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
    moved = [
        name for name, at in defaults.items() if not (os.environ.get(name) or is_of_this_host(at))
    ]
    if not moved or not is_of_this_host(temporary) or os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return
    folder = temporary / f"vllm-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_own_folder(
        folder
    ):  # code is loaded from there: one that others made, or can write to, is not taken
        _log.warning(
            "%s is no folder that you alone can write to: this rank compiles for itself, anew",
            folder,
        )
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
        _log.warning(
            "%s; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, where this model and these options allow it",
            what,
        )


# The engine gives back what it took: what is left in use after its sleep must not grow over the run.


_GIB = 2**30


class SleepCheck:
    def __init__(
        self, device: torch.device, growth_bytes: int | None = None, tp_size: int = 1
    ) -> None:
        """`growth_bytes`: of what growth to warn; None: 5 % of the device, at least 1 GiB."""
        self._device, self._tp_size = device, tp_size
        self._growth = (
            max(_GIB, total_bytes(device) // 20) if growth_bytes is None else growth_bytes
        )
        self._least: int | None = None
        self._alarmed = 0

    def check(self, before: MemoryUse, after: MemoryUse, held_bytes: int) -> dict[str, float]:
        """Warn where one sleep leaves too much, and again for each further growth as large. Returns
        `memory/sleep/freed_gib`, and `memory/sleep/left_gib`: in use after it, less `held_bytes`.
        `held_bytes` is what policy, reference and optimizer hold (HostOffload.held_bytes), which changes for good
        reasons, as when the first update makes the optimizer's state."""
        freed, left = self._used(before) - self._used(after), self._used(after) - held_bytes
        self._least = left if self._least is None else min(self._least, left)
        if left - max(self._least, self._alarmed) > self._growth:
            self._alarmed = left
            text = (
                "memory grows: %.2f GiB in use after the engine's sleep, beyond what policy, reference and optimizer "
                "hold, where it was %.2f GiB at the least (alarm at +%.2f GiB); the sleep freed %.2f GiB. %s"
            )
            sizes = (size / _GIB for size in (left, self._least, self._growth, freed))
            _log.warning(text, *sizes, self._parts(after, held_bytes))
        return {"memory/sleep/freed_gib": freed / _GIB, "memory/sleep/left_gib": left / _GIB}

    def _used(self, use: MemoryUse) -> int:
        return use.driver_used if self._device.type == "cuda" else use.allocated

    def _parts(self, after: MemoryUse, held_bytes: int) -> str:
        if self._device.type != "cuda":
            return "Likely something keeps tensors or texts of earlier steps alive"
        own, cached = (
            (after.allocated - held_bytes) / _GIB,
            (after.reserved - after.allocated) / _GIB,
        )
        with_tp = " with rollout.engine.disable_custom_all_reduce=true" if self._tp_size > 1 else ""
        return (
            f"Tensors of torch: {own:.2f} GiB (weights that the engine keeps outside its pool, or tensors of earlier "
            f"steps kept alive); cached by torch: {cached:.2f} GiB (fragmentation: try PYTORCH_ALLOC_CONF="
            f"expandable_segments:True{with_tp}); outside torch: {after.other / _GIB:.2f} GiB (a pool not given back: "
            "try another version of vLLM; CUDA graphs, NCCL, another process)"
        )
