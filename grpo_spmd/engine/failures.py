"""Explains vLLM's errors in terms of our config keys, and shuts down the engines of a failed run.

It imports neither torch nor vllm, because `--check` runs without them and asks this module for the
largest KV cache that the CPU engine may take."""

from __future__ import annotations

import os
import re
import sys
import weakref
from collections.abc import Iterable
from typing import Any

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


def cpu_cache_bytes() -> int:
    """Returns the largest size of one rank's KV cache on a CPU, in bytes.

    All ranks of a host together may use 1/8 of its memory."""
    return host_bytes() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes() -> int:
    """Returns the size of this host's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
    before, after = (size / 2**30 for size in used_bytes)
    return (
        f"rollout: the engine's sleep gave back its pool of {pool_bytes / 2**30:.1f} GiB, and yet "
        f"the memory in use on this GPU grew from {before:.1f} to {after:.1f} GiB: another process "
        "took more in the meantime (nvidia-smi names it); end it, or keep reward functions and "
        "tools off this GPU (CUDA_VISIBLE_DEVICES)"
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
