"""The critic whose head is on the policy's own layers: it learns in the policy's update, where one forward pass gives
logprobs and values and one backward pass has both losses, as TRL's PPO with a value head has it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from grpo_spmd.distributed.reductions import Max, Reductions, merge
from grpo_spmd.learn.critic import Critic
from grpo_spmd.learn.signals import Check
from grpo_spmd.model.offload import Beside
from grpo_spmd.model.values import PolicyValues
from grpo_spmd.records import Decision, RolloutBatch


class PolicyCritic(Critic):
    """Also the `Head` of a PolicyUpdater. In a step whose update it was not part of, the head learns alone, from states
    that have no gradient: the warm-up."""

    model: PolicyValues

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._in_update: Reductions | None = None
        self._num_skipped = 0

    @property
    def beside(self) -> list[Beside]:
        return [(self.model.head, self.optimizer)]  # what the policy's own pass enters too

    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        self._in_update, self._num_skipped = None, 0
        return super().attach(batch, decision, check)

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Values [C]."""
        return self.model.term(hidden, head)

    def end(self, is_made: bool) -> None:
        """The policy's update of a mini-batch was made, or was skipped: so is the head's."""
        self._in_update = merge([self._in_update or {}, self.stepped(is_made)])
        self._num_skipped += not is_made

    def update(self, batch: RolloutBatch) -> Reductions:
        if self._in_update is None:
            try:
                return super().update(batch)
            finally:
                self.model.reshard()  # as held.py: no backward pass has come down the policy
        return (
            self.no_update()
            | self._in_update
            | {"critic/skipped_updates": Max(float(self._num_skipped))}
        )
