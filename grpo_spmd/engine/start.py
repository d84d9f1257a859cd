"""Starts vLLM, undoes its changes to this process and its environment, and watches its memory.

Facts about vLLM's versions stand at the line that relies on them, here, in reload.py and in
weight_map.py.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import random
import re
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ADAPTER_RANKS, LoraConfig, ModelConfig, RolloutConfig
from grpo_spmd.data.cache import is_of_this_host, is_own_folder
from grpo_spmd.distributed.session import Session
from grpo_spmd.distributed.startup import garbage_collector_off
from grpo_spmd.engine.routes import recording_options, with_routes_if_possible
from grpo_spmd.engine.speculation import speculation_options
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import (
    checkpoint_folder,
    has_recurrent_layers,
    has_text_part,
    head_dim,
    load_config,
    num_recurrent_layers,
    state_bytes,
    text_config,
)
from grpo_spmd.model.lora import engine_target_modules
from grpo_spmd.observe.cards import cpu_cache_bytes, max_num_seqs
from grpo_spmd.observe.memory import MemoryUse, total_bytes

_log = logging.getLogger("grpo_spmd")
_GIB = 2**30
_MEMORY_ERROR = re.compile(
    r"KV\s+cache (is needed|memory)|No available memory for the cache blocks"
    r"|Available memory on node|Free memory on|kv[_-]cache[_-]memory[_-]bytes"
)
# Matches for instance "... max seq len (4096), (2.5 GiB KV cache is needed ... memory (1.2 GiB)".
_ROLLOUT_TOO_LONG = re.compile(
    r"max seq len\s+\((\d+)\),?\s+\(?([\d.]+) GiB.*?memory\s+\(([\d.]+) GiB\)", re.DOTALL
)
running_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""The vLLM engines of this process that were started and not yet shut down."""
# vLLM reads these when it is imported, which happens in functions only. The first keeps the engine
# in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Some of vLLM's modules log before they have read the variable.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


# Half of vLLM's imports happen at its start, and the garbage collector would slow them down.
@garbage_collector_off()
def start_vllm(
    model: ModelConfig,
    rollout: RolloutConfig,
    max_rollout_tokens: int,
    *,
    session: Session,
    num_sequences: float = math.inf,
) -> Any:
    """Collective. Returns a vllm.LLM with dummy weights, over `engine_ranks` ranks.

    `num_sequences` is the most that an engine gets at one time. Raises ConfigError if the config is
    the likely reason that vLLM does not start."""
    device = session.device.type
    refuse_unshareable_segments(rollout, device)
    keep_caches_on_node()
    import vllm

    contents = read_model_config(checkpoint_folder(model.path))
    is_recurrent = has_recurrent_layers(text_config(contents))
    if is_recurrent:
        _load_without_torchvision(contents.get("architectures") or ())
    # vLLM's CPU worker replaces torch.set_num_threads by a function that only warns. Other code in
    # vLLM changes the number of threads. Both are restored below.
    set_num_threads = torch.set_num_threads
    num_threads = torch.get_num_threads()
    _name_shared_memory_after_job(session.attempt)
    options: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "max_model_len": max_rollout_tokens,
        "load_format": "dummy",
        # Prompts are tokens. Only stop strings are found in text.
        "skip_tokenizer_init": not rollout.stop,
        "tokenizer_mode": "hf",
        "disable_log_stats": True,
        "distributed_executor_backend": "external_launcher",
        # Every request brings its own seed.
        "seed": 0,
        "tensor_parallel_size": rollout.engine_ranks,
        # Recurrent layers have a state for each sequence, not keys and values for each token, and
        # vLLM could cache this state only at few positions of a prompt: no prefix caching.
        "enable_prefix_caching": not is_recurrent,
        # Logprobs at the temperature, as the policy's are.
        "logprobs_mode": "processed_logprobs",
        "enable_sleep_mode": device == "cuda",
        "gpu_memory_utilization": rollout.gpu_memory_utilization,
        # The kernels for an MoE's experts. Triton's leave the matrices as they are, so that each
        # row can be compared and copied; other kernels reorder them. The option has no effect on a
        # CPU or for a dense model.
        "moe_backend": "triton" if device == "cuda" else "auto",
    }
    if model.router_replay and device == "cuda" and not is_recurrent:
        options |= recording_options(load_config(model.path), rollout.engine_ranks)
    if has_text_part(contents):
        options["language_model_only"] = True
    if model.lora.base_stays_in_engine:
        options |= _lora_options(model.path, model.lora)
    if rollout.speculation is not None:
        if device != "cpu":
            raise ConfigError(
                "rollout.speculation: auto is for engines on a CPU, and this one is on a GPU; "
                "leave it out"
            )
        options |= speculation_options()
    if device == "cpu":
        cache_bytes = _cpu_kv_cache_bytes(model, rollout, max_rollout_tokens, session.world_size)
        # A prompt is never computed in pieces: after a piece vLLM's V1 model runner sets back the
        # generator of a request that has a seed, and a CPU generator cannot be ("CPU Generator does
        # not use offset", v1/worker/gpu_model_runner.py, 0.28 to 0.32). Without pieces vLLM wants
        # room for the longest sequence in a step; its own default on a CPU is 4,096 a rank.
        step_tokens = max(4096 * rollout.engine_ranks, max_rollout_tokens)
        options |= {
            "enforce_eager": True,
            "block_size": 32,
            "kv_cache_memory_bytes": cache_bytes,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": step_tokens,
        }
    else:
        name, gib = torch.cuda.get_device_name(session.device), total_bytes(session.device) / _GIB
        options["max_num_seqs"] = max_num_seqs(name, gib, rollout.engine, num_sequences)
    try:
        make = partial(vllm.LLM, trust_remote_code=False)
        return with_routes_if_possible(make, options | rollout.engine)
    except Exception as error:
        if isinstance(error, ValueError) and (text := no_room_for_cache(str(error), device)):
            raise ConfigError(text) from None
        # DistError: another rank or the network failed, which no config causes.
        if not rollout.engine or isinstance(error, dist.DistError):
            raise
        raise ConfigError(refused_keys(rollout.engine, error)) from error
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)


def no_room_for_cache(error: str, device: str) -> str | None:
    """Returns a message for vLLM's `error` about too little memory, None for any other error.

    vLLM's messages name its own flags. The returned message names our config keys instead."""
    if not _MEMORY_ERROR.search(error):
        return None
    if sizes := _ROLLOUT_TOO_LONG.search(error):
        problem = (
            f"one rollout of {sizes[1]} tokens (data.max_prompt_tokens + "
            f"rollout.max_completion_tokens) takes {sizes[2]} GiB of KV cache, but only {sizes[3]} "
            "GiB are available"
        )
    else:
        problem = f"no room for vLLM's KV cache ({error.split('. ')[0].strip()})"
    key = "gpu_memory_utilization" if device == "cuda" else "engine.kv_cache_memory_bytes"
    remedy = f"raise rollout.{key} or rollout.tensor_parallel_size, or shorten the rollouts"
    # vLLM says that less memory is free than the config asks for: lower the request.
    if "less than" in error:
        remedy = f"lower rollout.{key}, take fewer ranks, or end what else takes memory"
    return f"rollout: {problem}; {remedy}"


def memory_taken_in_sleep(error: str, used_bytes: tuple[int, int], pool_bytes: int) -> str | None:
    """Returns a message for vLLM's error that a sleep freed no memory, None for any other error.

    `used_bytes` is the memory that all processes use on the device (before, after) the sleep, and
    `pool_bytes` the size of the pool that the sleep frees. vLLM (0.26 to 0.33) asserts that the
    device does not have less free memory after the sleep, which memory taken by another process can
    violate. The engine cannot be used after this error."""
    if "Memory usage increased after sleeping" not in error:
        return None
    used_before, used_after = (size / 2**30 for size in used_bytes)
    return (
        f"rollout: the engine's sleep gave back its pool of {pool_bytes / 2**30:.1f} GiB, and yet "
        f"the memory in use on this GPU grew from {used_before:.1f} to {used_after:.1f} GiB: "
        "another process took more in the meantime (nvidia-smi names it); end it, or keep reward "
        "functions and tools off this GPU (CUDA_VISIBLE_DEVICES)"
    )


def refused_keys(keys: Iterable[str], error: BaseException) -> str:
    """Returns a message for an error at vLLM's start while the user has set `keys` in
    `rollout.engine`.

    These keys are the likeliest cause, since the trainer's own options are known to work."""
    # Shorten pydantic's errors: "1 validation error for X", then a line with the field, then a line
    # "Value error, TEXT [type=..., input_value=...]".
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for", lines[0]):
        lines = [line for line in lines[1:] if not line.startswith("For further information")]
    text = re.sub(r"\s*\[type=.*", "", " ".join(lines)) or "no reason given"
    if len(text) > 300:
        text = text[:300] + "..."
    return (
        f"rollout.engine: vLLM did not start with {', '.join(sorted(keys))}: "
        f"{type(error).__name__}: {text}; take them out one by one"
    )


def _load_without_torchvision(architectures: Sequence[str]) -> None:
    """Loads vLLM's classes of a model where torchvision is not installed, as in a CPU set-up.

    vLLM has the classes of a family that also reads images in one module, and cannot import it
    without torchvision, which only images need (Qwen3.5, 0.32: "failed to be inspected"). Empty
    modules stand in for torchvision while the classes are imported here. They are registered as
    classes: vLLM would import a class that is registered by its name in a process of its own, where
    nothing stands in."""
    if find_spec("torchvision") is not None:
        return
    from vllm.model_executor.models import ModelRegistry

    stand_ins = {
        name: ModuleType(name)
        for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    }
    vars(stand_ins["torchvision.transforms.v2"])["functional"] = None
    sys.modules.update(stand_ins)
    try:
        for name in architectures:
            if name in ModelRegistry.models:
                ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    finally:
        for name in stand_ins:
            del sys.modules[name]


def _lora_options(path: str, lora: LoraConfig) -> dict[str, Any]:
    """Returns the options with which vLLM keeps room for one LoRA adapter, on the layers that get
    one."""
    from vllm.engine.arg_utils import EngineArgs

    options = {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in ADAPTER_RANKS if rank >= lora.rank),
        "lora_target_modules": engine_target_modules(path, lora),
    }
    # An older version, which knows no target modules, adapts all layers.
    return {name: value for name, value in options.items() if hasattr(EngineArgs, name)}


def _cpu_kv_cache_bytes(
    model: ModelConfig, rollout: RolloutConfig, max_rollout_tokens: int, world_size: int
) -> int:
    """Returns the bytes of this rank's KV cache: room for a step's completions at full length.

    It is at least 64 MiB and at most this rank's part of 1/8 of the host's memory. Without this
    option vLLM takes nearly all of the host's memory, on each rank."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    config = load_config(model.path)
    width = head_dim(config)
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    # vLLM itself finds this out only when it first samples.
    if width not in sizes:
        raise ConfigError(
            f"model.path: {model.path} has heads of {width}, and vLLM on a CPU only of {sizes}"
        )
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    contents = config.to_dict()
    if has_recurrent_layers(contents) and model.dtype != "bfloat16":
        raise ConfigError(
            f"model.dtype: {model.dtype}, and vLLM computes the recurrent layers of {model.path} "
            "on a CPU only in bfloat16"
        )
    itemsize = 4 if model.dtype == "float32" else 2
    num_layers = config.num_hidden_layers
    num_attention_layers = num_layers - num_recurrent_layers(contents, num_layers)
    # 2: a token has keys and values.
    token_bytes = 2 * num_attention_layers * heads * width * itemsize
    sequence_bytes = max_rollout_tokens * token_bytes
    sequence_bytes += num_layers * state_bytes(contents)
    num_sequences = rollout.num_launched_prompts * rollout.group_size
    num_engines = max(1, world_size // rollout.engine_ranks)
    return max(64 << 20, min(int(sequence_bytes * num_sequences // num_engines), cpu_cache_bytes()))


def _name_shared_memory_after_job(attempt: int) -> None:
    """Gives vLLM's shared memory a name that no other job has.

    On a CPU with tensor parallelism the name is the same in all external_launcher jobs. A second
    job on the host, or memory that a killed job left, makes the start fail with errno 17 (0.28 to
    0.32). vLLM builds the name from the text after the last ':' of the init method."""
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    current = ExecutorWithExternalLauncher._distributed_args
    # An earlier run of this process may have wrapped the function already.
    original = getattr(current, "__wrapped__", current)

    @functools.wraps(original)
    def distributed_args(self: Any) -> Any:
        """Calls vLLM's function, and puts this job into the init method that it returns."""
        method, rank, local_rank = original(self)
        # Once torch.distributed is initialised, vLLM uses the init method for nothing else.
        if dist.is_initialized():
            job = [os.environ.get(name, "0") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID")]
            method = "env://:" + "-".join([*job, str(attempt)])
        return method, rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args


# Variables that vLLM changes.
_TOUCHED_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")


@contextmanager
def isolated() -> Iterator[None]:
    """Restores the global random states and the environment when the block ends.

    vLLM seeds the global generators and draws from them, and the trainer's randomness must not
    depend on what vLLM generated. vLLM also sets LOCAL_WORLD_SIZE to the tensor parallel size."""
    random_state = random.getstate()
    numpy_state = np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    environment = {name: os.environ[name] for name in _TOUCHED_ENVIRONMENT if name in os.environ}
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        for name in _TOUCHED_ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(environment)


def _allocator_settings() -> str:
    """Returns the user's options of torch's allocator, from the variables that torch reads."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


@contextmanager
def allocator_settings_kept(device: torch.device) -> Iterator[None]:
    """Restores the user's options of torch's allocator when the block ends.

    The pool of vLLM's sleep mode cannot live in expandable segments. vLLM switches them off while
    it fills the pool, and on again. Up to 0.30 it reads PYTORCH_CUDA_ALLOC_CONF alone. It sets only
    this one option, and torch then resets all others to their defaults."""
    settings = _allocator_settings()
    if device.type != "cuda" or not settings:
        yield
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = settings
    yield
    torch._C._accelerator_setAllocatorSettings(settings)


def refuse_unshareable_segments(rollout: RolloutConfig, device: str) -> None:
    """Raises ConfigError if vLLM's custom all-reduce would meet expandable segments.

    In the custom all-reduce (0.26 to 0.33) the ranks of an engine share the buffers of their CUDA
    graphs by cudaIpcGetMemHandle, which fails for expandable segments. vLLM does not use it for
    other numbers of ranks, or if more than two GPUs have no NVLink, which only vLLM knows."""
    settings = _allocator_settings().replace(" ", "").lower().split(",")
    options = rollout.engine
    if (
        device == "cuda"
        and "expandable_segments:true" in settings
        and rollout.engine_ranks in (2, 4, 6, 8, 16)
        and True not in (options.get("disable_custom_all_reduce"), options.get("enforce_eager"))
    ):
        raise ConfigError(
            "PYTORCH_ALLOC_CONF: expandable_segments with rollout.tensor_parallel_size "
            f"{rollout.engine_ranks}: vLLM's custom all-reduce cannot share such memory "
            "between ranks; leave it out, or set rollout.engine.disable_custom_all_reduce=true "
            "(NCCL's, as without NVLink)"
        )


def keep_caches_on_node() -> None:
    """Moves the caches of vLLM, Triton and FlashInfer to the temporary folder if home is remote.

    In a remote home all nodes would wait for each other's locks, and ranks would read small files
    over the network. A variable that the user has set is kept. Nothing moves if the temporary
    folder is remote too, or mounted noexec. Call it before vllm is imported. Torch's Inductor uses
    the temporary folder by itself."""
    home = Path(os.path.expanduser("~"))
    temporary = Path(tempfile.gettempdir())
    defaults = {
        "VLLM_CACHE_ROOT": Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache", "vllm"),
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_HOME") or home, ".triton"),
        "FLASHINFER_WORKSPACE_BASE": home / ".cache" / "flashinfer",
    }
    moved = [
        name
        for name, path in defaults.items()
        if not (os.environ.get(name) or is_of_this_host(path))
    ]
    if not moved or not is_of_this_host(temporary) or os.statvfs(temporary).f_flag & os.ST_NOEXEC:
        return
    folder = temporary / f"vllm-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # Code is loaded from this folder: never take one that others made or can write to.
    if not is_own_folder(folder):
        _log.warning(
            "%s is no folder that you alone can write to: this rank compiles for itself, anew",
            folder,
        )
        folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    # FlashInfer's cubins are downloaded, not compiled, and there may be no network now: keep using
    # those in the home.
    cubins = defaults["FLASHINFER_WORKSPACE_BASE"] / "cubins"
    if "FLASHINFER_WORKSPACE_BASE" in moved and cubins.is_dir():
        os.environ.setdefault("FLASHINFER_CUBIN_DIR", str(cubins))
    for name in moved:
        os.environ[name] = str(folder / "triton" if name == "TRITON_CACHE_DIR" else folder)


def warn_of_slow_seeds(vllm_config: Any, device: str) -> None:
    """Warns if vLLM runs its V1 model runner, which is slow with seeds.

    Every request has its own seed. V1 loops over the requests in Python at each token. V2 has the
    seeds in a tensor, and is the default if vLLM supports it for the model (0.26: dense models;
    0.32: nearly all)."""
    if device == "cuda" and not vllm_config.use_v2_model_runner:
        _log.warning(
            "vLLM runs its V1 model runner, which samples seeded requests one by one: generation "
            "is slower; VLLM_USE_V2_MODEL_RUNNER=1 asks for V2, where this model and these options "
            "allow it"
        )


def end_engines() -> None:
    """Shuts down the engines of a failed run, so that this process can start another run.

    It also destroys vLLM's process groups, which the next engine would otherwise take for its
    own."""
    for engine in list(running_engines):
        engine.engine_core.shutdown()
    running_engines.clear()
    # Do not import vllm only for this: if no engine was started, there is nothing to destroy.
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class SleepCheck:
    """Warns if the memory that is in use after the engine's sleep grows over the run, as it does if
    something leaks."""

    def __init__(self, device: torch.device, growth_bytes: int = 0) -> None:
        """`growth_bytes` is the growth to warn of. 0 stands for 5 % of the device, and at least
        1 GiB."""
        self._is_cuda = device.type == "cuda"
        self._growth_bytes = growth_bytes or max(_GIB, total_bytes(device) // 20)
        self._smallest = math.inf
        self._warned_at = 0

    def check(self, earlier: MemoryUse, after: MemoryUse, held_bytes: int) -> dict[str, float]:
        """Warns if the memory that a sleep leaves in use has grown by more than `growth_bytes`, and
        again after each further growth of this size.

        `earlier` and `after` are the memory before and after the sleep. `held_bytes` is the memory
        of policy, reference and optimizer (HostOffload.held_bytes), which may grow: the first
        update creates the optimizer's state. Returns two metrics in GiB:
        `memory/sleep/freed_gib`, and `memory/sleep/left_gib`, the memory in use after the sleep
        less `held_bytes`."""
        # On a GPU as the driver counts, with vLLM's pool.
        used_before, used_after = (
            use.driver_used if self._is_cuda else use.allocated for use in (earlier, after)
        )
        freed_gib = (used_before - used_after) / _GIB
        left_bytes = used_after - held_bytes
        self._smallest = min(self._smallest, left_bytes)
        if left_bytes - max(self._smallest, self._warned_at) > self._growth_bytes:
            self._warned_at = left_bytes
            _log.warning(
                "memory grows: %.2f GiB in use after the engine's sleep, beyond what policy, "
                "reference and optimizer hold, where it was %.2f GiB at the least (alarm at +%.2f "
                "GiB); the sleep freed %.2f GiB. Tensors of torch: %.2f GiB (weights that the "
                "engine keeps outside its pool, or tensors of earlier steps kept alive); cached by "
                "torch: %.2f GiB (fragmentation: try PYTORCH_ALLOC_CONF=expandable_segments:True, "
                "with tensor parallelism also rollout.engine.disable_custom_all_reduce=true); "
                "outside torch: %.2f GiB (a pool not given back: try another version of vLLM; CUDA "
                "graphs, NCCL, another process)",
                left_bytes / _GIB,
                self._smallest / _GIB,
                self._growth_bytes / _GIB,
                freed_gib,
                (after.allocated - held_bytes) / _GIB,
                (after.reserved - after.allocated) / _GIB,
                after.other / _GIB,
            )
        return {"memory/sleep/freed_gib": freed_gib, "memory/sleep/left_gib": left_bytes / _GIB}
