"""What teaches beside the rewards, token by token: teachers and a critic. Without any, all of this does nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.model.offload import Beside
from grpo_spmd.records import Decision, MicroBatch, RolloutBatch

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


class Head(Protocol):
    """What learns from the policy's last hidden states in the policy's own update, which its term of the loss is in."""

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Values [C] of hidden states [C, D], in the policy's forward pass."""
        ...

    def share(self, values: Tensor, row: MicroBatch, num_loss_tokens: int) -> Tensor:
        """What they add to the loss of the mini-batch, by its tokens that count over all ranks."""
        ...

    def clip(self) -> float:
        """Collective. Bound its own gradient; the norm before."""
        ...

    def end(self, is_made: bool) -> None:
        """Step, or drop the gradient, as the policy does."""
        ...


class Signals:
    """All of a run, in the order in which they are asked."""

    def __init__(
        self,
        signals: Sequence[Signal] = (),
        *,
        teacher: Signal | None = None,
        critic: Trained | None = None,
        head: Head | None = None,
        num_held_steps: int = 0,
    ) -> None:
        """`teacher`: that one of them which teaches by its distribution; `critic`: that one which a checkpoint holds;
        `head`: the same, where it is on the policy's layers; `num_held_steps`: first steps of the run, in which the
        policy stays as it is."""
        self._signals, self.teacher = list(signals), teacher
        self.critic, self.head, self._num_held_steps = critic, head, num_held_steps

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
