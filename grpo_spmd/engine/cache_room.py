"""vLLM's refusals at its start in the keys of a config: it names its own flags, and some that the trainer decides."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

_ABOUT_MEMORY = re.compile(
    r"KV\s+cache (is needed|memory)|No available memory for the cache blocks|Available memory on node|Free memory on"
    r"|kv[_-]cache[_-]memory[_-]bytes"
)
_LONGEST = "data.max_prompt_tokens + rollout.max_completion_tokens"


def cpu_cache_bytes() -> int:
    """The most that one rank's engine on a CPU takes: 1/8 of the host's memory over its ranks."""
    return host_bytes() // 8 // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def no_room_for_cache(error: str, device: str) -> str | None:
    """One line for vLLM's message about memory; None where it is about something else."""
    if not _ABOUT_MEMORY.search(error):
        return None
    if found := re.search(
        r"max seq len\s+\((\d+)\),?\s+\(?([\d.]+) GiB.*?memory\s+\(([\d.]+) GiB\)", error, re.DOTALL
    ):
        longest, needed, there = found.groups()
        what = f"one rollout of {longest} tokens ({_LONGEST}) takes {needed} GiB of KV cache, and {there} GiB are there"
    else:
        what = f"no room for vLLM's KV cache ({error.split('. ')[0].strip()})"
    if "less than" in error:  # what is free is less than what is asked for
        gpu = "lower rollout.gpu_memory_utilization, or end what else is on the GPU"
        cpu = "lower rollout.engine.kv_cache_memory_bytes, take fewer ranks, or end what else takes memory"
    else:
        gpu = "raise rollout.gpu_memory_utilization or rollout.tensor_parallel_size, or shorten the rollouts"
        cpu = (
            "raise rollout.engine.kv_cache_memory_bytes, take fewer ranks, or shorten the rollouts"
        )
    return f"rollout: {what}; {gpu if device == 'cuda' else cpu}"


def refused_keys(keys: Iterable[str], error: BaseException) -> str:
    """One line for any error of vLLM's start where `rollout.engine` has keys: they are the likeliest reason."""
    # pydantic: "1 validation error for X", the field and "Value error, WHAT [type=..., input_value=...]" on their lines
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and re.match(r"\d+ validation errors? for", lines[0]):
        lines = [line for line in lines[1:] if not line.startswith("For further information")]
    text = re.sub(r"\s*\[type=.*", "", " ".join(lines)) or "no reason given"
    said = f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
    return f"rollout.engine: vLLM did not start with {', '.join(sorted(keys))}: {said}; take them out one by one"
