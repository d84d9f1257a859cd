"""vLLM's failures: its errors in the words of our config, and the engines that a failed run leaves.

Imports no torch and no vllm: `--check` predicts the CPU engine's cache with it."""

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
# "... max seq len (4096), (2.5 GiB KV cache is needed ... memory (1.2 GiB)"
_ROLLOUT_TOO_LONG = re.compile(
    r"max seq len\s+\((\d+)\),?\s+\(?([\d.]+) GiB.*?memory\s+\(([\d.]+) GiB\)", re.DOTALL
)
_running_engines: weakref.WeakSet[Any] = weakref.WeakSet()


def cpu_cache_bytes() -> int:
    """Returns the upper bound of one rank's KV cache on a CPU: 1/8 of the host over its ranks."""
    return host_bytes() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes() -> int:
    """Returns the memory of this host."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def no_room_for_cache(error: str, device: str) -> str | None:
    """Returns one line for vLLM's message about memory, None if it is about something else.

    vLLM names its own flags, and some that the trainer sets. Here they are keys of the config."""
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
    if "less than" in error:  # less memory is free than was asked for
        remedies = {
            "cuda": "lower rollout.gpu_memory_utilization, or end what else is on the GPU",
            "cpu": "lower rollout.engine.kv_cache_memory_bytes, take fewer ranks, or end what else "
            "takes memory",
        }
    else:
        remedies = {
            "cuda": "raise rollout.gpu_memory_utilization or rollout.tensor_parallel_size, or "
            "shorten the rollouts",
            "cpu": "raise rollout.engine.kv_cache_memory_bytes, take fewer ranks, or shorten the "
            "rollouts",
        }
    return f"rollout: {problem}; {remedies['cuda' if device == 'cuda' else 'cpu']}"


def refused_keys(keys: Iterable[str], error: BaseException) -> str:
    """Returns one line for any error of vLLM's start while `rollout.engine` has these keys.

    They are the likeliest reason."""
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


def note_engine(engine: Any) -> None:
    """Remembers a running vLLM engine until its shutdown or `end_engines`."""
    _running_engines.add(engine)


def forget_engine(engine: Any) -> None:
    """Forgets an engine that was shut down."""
    _running_engines.discard(engine)


def end_engines() -> None:
    """Frees what the engines of a failed run hold, so that this process can start another run.

    It ends vLLM's process groups too: the next engine would take them for its own."""
    for engine in list(_running_engines):
        engine.engine_core.shutdown()
    _running_engines.clear()
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
