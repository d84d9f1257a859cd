"""Explains vLLM's errors in the words of our config, and ends the engines of a failed run.

It imports no torch and no vllm: `--check`, which must do without them, asks it beforehand whether
the CPU engine's KV cache will fit."""

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
# It matches for instance "... max seq len (4096), (2.5 GiB KV cache is needed ... memory (1.2 GiB)"
_ROLLOUT_TOO_LONG = re.compile(
    r"max seq len\s+\((\d+)\),?\s+\(?([\d.]+) GiB.*?memory\s+\(([\d.]+) GiB\)", re.DOTALL
)
running_engines: weakref.WeakSet[Any] = weakref.WeakSet()
"""vLLM's engines from their start to their shutdown, or to `end_engines`."""


def cpu_cache_bytes() -> int:
    """Returns the upper bound of one rank's KV cache on a CPU, in bytes.

    All ranks of a host together may use 1/8 of its memory."""
    return host_bytes() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes() -> int:
    """Returns the bytes of memory that this host has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def no_room_for_cache(error: str, device: str) -> str | None:
    """Returns a line for an error of vLLM about memory, None if the error is about something else.

    vLLM's messages name vLLM's own flags. The line names keys of the config in their place."""
    if not _MEMORY_ERROR.search(error):
        return None
    if sizes := _ROLLOUT_TOO_LONG.search(error):
        problem = (
            f"one rollout of {sizes[1]} tokens (data.max_prompt_tokens + "
            f"rollout.max_completion_tokens) takes {sizes[2]} GiB of KV cache, and {sizes[3]} GiB "
            "are there"
        )
    else:
        problem = f"no room for vLLM's KV cache ({error.split('. ')[0].strip()})"
    key = "gpu_memory_utilization" if device == "cuda" else "engine.kv_cache_memory_bytes"
    remedy = f"raise rollout.{key} or rollout.tensor_parallel_size, or shorten the rollouts"
    # Less memory is free than the config asks for.
    if "less than" in error:
        remedy = f"lower rollout.{key}, take fewer ranks, or end what else takes memory"
    return f"rollout: {problem}; {remedy}"


def memory_taken_in_sleep(error: str, used_bytes: tuple[int, int], pool_bytes: int) -> str | None:
    """Returns a line for vLLM's error that a sleep freed no memory, None for any other error.

    `used_bytes` are what all processes use on the device before and after the sleep, `pool_bytes`
    is the pool that it frees. vLLM (0.26 to 0.33) asserts that the device has not less free memory
    afterwards, and counts other processes too. It is no longer usable then."""
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
    """Returns a line for an error of vLLM's start while `rollout.engine` has these keys.

    The keys are the likeliest reason, since the trainer's own options are known to work."""
    # pydantic writes "1 validation error for X", then a line with the field, then a line
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
    """Ends the engines of a failed run and frees their memory. This process can then run again.

    It ends vLLM's process groups too: the next engine would take them for its own."""
    for engine in list(running_engines):
        engine.engine_core.shutdown()
    running_engines.clear()
    # Never import vllm here: if no engine was started, there is nothing to destroy.
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
