"""Imported by every interpreter of a command that `start` measures, since this folder is on its
PYTHONPATH: notes when
the milestones of a rank begin and end. It knows the names that a rank goes through, and touches
nothing else."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

FILE = "GRPO_SPMD_START_PROBE"  # a variable: where the lines go
# Module to the names in it that are timed, once it has been imported.
_TIMED = {
    "torch": (),
    "grpo_spmd.parts": ("start_session", "RolloutEngine"),
    "grpo_spmd.loop": ("_train_step",),
    "vllm.v1.engine.llm_engine": (),
}


def note(label: str) -> None:
    seen = {
        "what": label,
        "t": time.monotonic(),
        "cpu": time.process_time(),
        "rank": os.environ.get("RANK", "0"),
    }
    line = json.dumps(seen | {"pid": os.getpid()}) + "\n"
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def _timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call, updated=())
    def noted(*args: Any, **options: Any) -> Any:
        note(f"{name} begins")
        result = call(*args, **options)
        note(f"{name} ends")
        return result

    return noted


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (
            name not in _TIMED
            or (spec := PathFinder.find_spec(name, path, target)) is None
            or spec.loader is None
        ):
            return None
        execute = spec.loader.exec_module

        def exec_module(
            module: ModuleType,
        ) -> None:  # not above: others look for a module that they do not import
            note(f"{name} begins")
            execute(module)
            for timed in _TIMED[name]:
                setattr(module, timed, _timed(timed, getattr(module, timed)))
            note(f"{name} ends")

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get(FILE):
    note("python begins")
    sys.meta_path.insert(0, _Finder)
