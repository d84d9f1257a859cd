"""What teaches beside the rewards, token by token: teachers and a critic. Without any, all of this does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.model.offload import Beside
from grpo_spmd.records import Decision, RolloutBatch

Check = Callable[[bool], None]  # collective, between micro-batches, as in update.py


class Signal(Protocol):
    """A teacher, or the critic. Each call is collective."""

    @property
    def beside(self) -> Sequence[Beside]:
        """Its models of its own with their optimizers, which wait in host memory while the engine is awake."""
        ...

    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        """Before the step's first update: put what it has to say of each token into the micro-batches. The decision is
        the same, with what it adds to rank 0's metrics."""
        ...

    def update(self, batch: RolloutBatch, check: Check) -> Reductions:
        """Train what it has to train on the batch, before the policy is. What this rank adds to the metrics."""
        ...


class Signals:
    """All of a run, in the order in which they are asked."""

    def __init__(self, signals: Sequence[Signal] = (), *, teacher: Signal | None = None) -> None:
        """`teacher`: that one of them which teaches by its distribution."""
        self._signals, self.teacher = list(signals), teacher

    @property
    def beside(self) -> list[Beside]:
        return [own for signal in self._signals for own in signal.beside]

    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        """Collective, as Signal.attach."""
        for signal in self._signals:
            decision = signal.attach(batch, decision, check)
        return decision

    def update(self, batch: RolloutBatch, check: Check) -> Reductions:
        """Collective, as Signal.update."""
        found: Reductions = {}
        for signal in self._signals:
            found |= signal.update(batch, check)
        return found
