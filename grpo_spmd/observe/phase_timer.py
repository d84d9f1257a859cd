"""The phases of a step on this rank: how long they take, and how much memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from grpo_spmd.config.schema import PHASES
from grpo_spmd.distributed import doctor
from grpo_spmd.observe.memory import MemoryLedger
from grpo_spmd.observe.timeline import Span


class PhaseTimer:
    """`with phase("rollout"):` adds to `time/rollout_s` and to the ledger, which an out-of-memory error shows."""

    def __init__(self, device: torch.device, memory: MemoryLedger, first_step: int) -> None:
        self._device, self._memory, self._step = device, memory, first_step
        self._seconds: dict[str, float] = {}
        self.spans: list[Span] = []  # of this step so far
        self._step_start, self.step_unix_s = time.perf_counter(), time.time()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """The doctor knows meanwhile that this rank is in the phase, and how long it may take."""
        assert name in PHASES, name
        doctor.enter_phase(name, self._step)
        with self._memory.phase(name):
            start = time.perf_counter()
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize()  # kernels run on: without this their time would be counted in a later phase
            end = time.perf_counter()
            self._seconds[name] = self._seconds.get(name, 0.0) + end - start
        since = start - self._step_start, end - self._step_start
        self.spans.append(Span(name, *since, self._memory.last_peak_gib, None))
        doctor.enter_phase(
            f"after {name}", self._step
        )  # what comes between phases hangs too, and has its own limit

    def metrics(self) -> dict[str, float]:
        """`time/...` and `memory/...` of this rank, of this step so far."""
        seconds = {f"time/{name}_s": self._seconds.get(name, 0.0) for name in PHASES}
        return {
            "time/step_s": time.perf_counter() - self._step_start,
            **seconds,
            **self._memory.metrics(),
        }

    def end_step(self) -> None:
        self._seconds.clear()
        self.spans.clear()
        self._memory.end_step()
        self._step, self._step_start, self.step_unix_s = (
            self._step + 1,
            time.perf_counter(),
            time.time(),
        )
