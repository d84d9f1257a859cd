"""What a failed run leaves of vLLM in a process that goes on."""

from __future__ import annotations

import sys
import weakref
from typing import Any

_running: weakref.WeakSet[Any] = weakref.WeakSet()  # vLLM's engines


def note_engine(engine: Any) -> None:
    """It runs from here on, until its shutdown or `end_engines`."""
    _running.add(engine)


def forget_engine(engine: Any) -> None:
    """It was shut down."""
    _running.discard(engine)


def end_engines() -> None:
    """Free what engines hold, and end vLLM's process groups, which the next one would take for its own."""
    for engine in list(_running):
        engine.engine_core.shutdown()
    _running.clear()
    if "vllm.distributed.parallel_state" in sys.modules:
        from vllm.distributed import parallel_state

        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()
