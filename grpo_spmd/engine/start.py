"""vLLM's start: options and environment. What differs between its versions is said at the line: here, in isolation.py,
reload.py, weight_map.py and lora_adapters.py."""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
import torch.distributed as dist

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ADAPTER_RANKS, LoraConfig, ModelConfig, RolloutConfig
from grpo_spmd.distributed.collector import collector_off
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.cache_room import cpu_cache_bytes, no_room_for_cache, refused_keys
from grpo_spmd.engine.gpu import keep_caches_on_node, refuse_unshareable_segments
from grpo_spmd.model.dimensions import head_dim
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.lora import engine_target_modules

# vLLM reads these when it is imported, which only functions do. The first keeps it in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Some of its modules log before they have read the variable.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


@collector_off()  # half of its imports are made as it starts
def start_vllm(model: ModelConfig, rollout: RolloutConfig, max_rollout_tokens: int, session: Session) -> Any:
    """Collective. A vllm.LLM with dummy weights on each of `rollout.tensor_parallel_size` ranks."""
    refuse_unshareable_segments(rollout, session.device.type)
    keep_caches_on_node()
    import vllm

    # The CPU worker replaces this by a function that only warns; others of vLLM set the number.
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    _name_shared_memory_after_job(session.attempt)
    device = session.device.type
    options: dict[str, Any] = {"model": model.path, "dtype": model.dtype, "max_model_len": max_rollout_tokens}
    options |= {"load_format": "dummy", "skip_tokenizer_init": True, "disable_log_stats": True}
    options |= {"distributed_executor_backend": "external_launcher", "seed": 0}  # every request brings its own seed
    options |= {"tensor_parallel_size": rollout.tensor_parallel_size, "enable_prefix_caching": True}
    options |= {"logprobs_mode": "processed_logprobs"}  # at the temperature, as the policy's are
    options |= {"enable_sleep_mode": device == "cuda", "gpu_memory_utilization": rollout.gpu_memory_utilization}
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
        if not rollout.engine or isinstance(error, dist.DistError):  # another rank or the network failed: no bad input
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
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": room[0], "lora_target_modules": layers}
    # An older version, which knows no target modules, adapts all layers.
    return {name: value for name, value in options.items() if hasattr(EngineArgs, name)}


def _cpu_kv_cache_bytes(model: ModelConfig, rollout: RolloutConfig, max_rollout_tokens: int, world_size: int) -> int:
    """Room for a step's completions at full length: at least 64 MiB, at most 1/8 of the host's memory over its ranks.
    Without it vLLM asks for nearly all of the host's memory, on each rank."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    hf, sizes = load_config(model.path), CPUAttentionBackend.get_supported_head_sizes()
    if head_dim(hf) not in sizes:  # vLLM would find that out when it first samples
        raise ConfigError(f"model.path: {model.path} has heads of {head_dim(hf)}, and vLLM on a CPU only of {sizes}")
    heads = getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    token = 2 * hf.num_hidden_layers * heads * head_dim(hf) * (4 if model.dtype == "float32" else 2)
    engines = max(1, world_size // rollout.tensor_parallel_size)
    wanted = token * max_rollout_tokens * rollout.num_launched_prompts * rollout.group_size // engines
    return max(64 << 20, min(int(wanted), cpu_cache_bytes()))


def _name_shared_memory_after_job(attempt: int) -> None:
    """On a CPU with tensor parallelism vLLM's shared memory has the same name in all external_launcher jobs: two on one
    host, or what a killed one left, make the next fail with errno 17 (0.28 to 0.32). The text after the last ':' of the
    init method enters the name."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    own = ExecutorWithExternalLauncher._distributed_args
    original = getattr(own, "__wrapped__", own)  # not what an earlier run of this process has put there

    @functools.wraps(original)
    def distributed_args(self: Any) -> Any:
        method, rank, local_rank = original(self)
        if dist.is_initialized():  # then the method is used for nothing else
            job = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")]
            method = "env://:" + "-".join([*job, str(attempt)])
        return method, rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args
