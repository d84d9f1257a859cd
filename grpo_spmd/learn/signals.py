"""What teaches beside the rewards, token by token: teachers and a critic. Without any, all of this does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

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

    def update(self, batch: RolloutBatch) -> Reductions:
        """Train what it has to train on the batch, behind the policy. What this rank adds to the metrics."""
        ...


class Trained(Protocol):
    """What trains beside the policy, as a checkpoint holds it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def trained_parameters(self) -> dict[str, DTensor]: ...
    def state(self) -> dict[str, int]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


class Signals:
    """All of a run, in the order in which they are asked."""

    def __init__(
        self,
        signals: Sequence[Signal] = (),
        *,
        teacher: Signal | None = None,
        critic: Trained | None = None,
        num_held_steps: int = 0,
    ) -> None:
        """`teacher`: that one of them which teaches by its distribution; `critic`: that one which a checkpoint holds;
        `num_held_steps`: first steps of the run, in which the policy stays as it is."""
        self._signals, self.teacher = list(signals), teacher
        self.critic, self._num_held_steps = critic, num_held_steps

    def hold_policy(self, step: int) -> bool:
        """Whether `step` trains what teaches alone."""
        return step <= self._num_held_steps

    @property
    def beside(self) -> list[Beside]:
        return [own for signal in self._signals for own in signal.beside]

    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        """Collective, as Signal.attach."""
        for signal in self._signals:
            decision = signal.attach(batch, decision, check)
        return decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective, as Signal.update."""
        found: Reductions = {}
        for signal in self._signals:
            found |= signal.update(batch)
        return found
