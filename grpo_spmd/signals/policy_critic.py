"""The critic whose head is on the policy's own layers: it learns in the policy's update, where one forward pass gives
logprobs and values and one backward pass has both losses, as TRL's PPO with a value head has it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import Config, CriticConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Max, Reductions, merge
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.contexts import contexts_of
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import is_first_replica
from grpo_spmd.model.values import PolicyValues, plain_states
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.proofs.update_check import SignalProofs, UpdateCheckSettings
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch
from grpo_spmd.signals.critic import Critic, random_head, random_product


class PolicyCritic(Critic):
    """Also the `Head` of a PolicyUpdater. In a step whose update it was not part of, the head learns alone, from states
    that have no gradient: the warm-up."""

    model: PolicyValues

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._in_update: Reductions | None = None
        self._num_skipped = 0

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        return [(self.model.head, self.optimizer)]  # what the policy's own pass enters too

    @property
    def value_head(self) -> PolicyCritic:
        return self

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        targets = ValueTargets(self, self._config, settings.dtype)
        return SignalProofs([self._check(settings)], values=targets)

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        self._in_update, self._num_skipped = None, 0
        return super().attach(batch, decision, stop_check)

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Values [C]."""
        return self.model.term(hidden, head)

    def end_mini_batch(self, is_made: bool) -> None:
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


_VALUE_BOUNDS = {
    "float32": 1e-4,
    "bfloat16": 0.05,
}  # mean |difference| of a value, of the values' size
# Old values and returns lie at these distances from the values, in bounds of the clip: on both sides of it, each where
# the clipped error is the larger one, and where it is not.
_FROM_OLD, _TO_RETURN = (0.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0), (0.7, -0.7, 0.9)
_NUM_SKETCHES = 8
_LARGEST = 5.0  # of a bound, beyond which nothing is clipped here


class ValueTargets:
    def __init__(self, critic: PolicyCritic, config: CriticConfig, dtype: str) -> None:
        self._critic, self._clip, self._coef, self.bound = (
            critic,
            config.clip_value,
            config.coef,
            _VALUE_BOUNDS[dtype],
        )
        self._states: list[Tensor] = []
        self._head: tuple[Tensor, ...] = ()
        self._values: list[
            Tensor
        ] = []  # of rows with a rollout, as old values and returns, float64
        self._old: list[Tensor] = []
        self._returns: list[Tensor] = []

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._critic.model.named_parameters()

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Old values and returns of a row, from the values [C] that the trainer has just found."""
        step, n = min(self._clip or 1.0, _LARGEST), range(len(values))
        v = values.detach().double()
        old = v - v.new_tensor([step * _FROM_OLD[k % len(_FROM_OLD)] for k in n])
        row.old_values = old.float()
        row.returns = (
            v + v.new_tensor([step * _TO_RETURN[k // len(_FROM_OLD) % len(_TO_RETURN)] for k in n])
        ).float()
        if row.rollout_ids:
            for kept, column in (
                (self._values, v),
                (self._old, row.old_values),
                (self._returns, row.returns),
            ):
                kept.append(column.double())

    def plain_loss(
        self, rollouts: Sequence[Rollout], counts: Tensor, num_tokens: int
    ) -> tuple[Tensor, float, float]:
        """Collective. The value loss [] by the last pass within `lively`, a plain one over the rollouts' contexts, with
        its graph; the sum of its terms' sizes; and how far the trainer's values are off, of their size. `counts` [n]
        of all tokens. Empties what `give` has kept."""
        states, places = self._states[-1], list[Tensor]()  # [S, L, D]
        for number, context in enumerate(
            c for r in rollouts for c in contexts_of(r.prompt_ids, r.completion_ids, r.segments)
        ):
            where = torch.from_numpy(np.flatnonzero(context.sampled)).to(states.device)
            places.append(states[number, where - 1])
        head = (
            cast(DTensor, parameter).full_tensor()
            for parameter in self._critic.model.head.parameters()
        )
        self._head = weight, bias = tuple(tensor.detach().requires_grad_() for tensor in head)
        hidden = torch.cat(places) if places else states[0, :1]
        plain = (hidden.float() @ weight[0] + bias + random_product(hidden.float())).double()
        if not places:
            return (plain * 0.0).sum(), 0.0, 0.0
        by_trainer, old, target = (
            torch.cat(each) for each in (self._values, self._old, self._returns)
        )
        self._values, self._old, self._returns = [], [], []
        off = float(
            (by_trainer - plain.detach()).abs().mean() / (plain.detach().abs().mean() + 1e-6)
        )
        v, total, size = plain + (by_trainer - plain).detach(), (plain * 0.0).sum(), 0.0
        for k in torch.nonzero(counts)[:, 0].tolist():
            error = (v[k] - target[k]) ** 2
            if self._clip is not None:
                moved = float(v[k].detach() - old[k])
                bounded = old[k] + max(-self._clip, min(self._clip, moved))
                other = (bounded - target[k]) ** 2  # which has no gradient where it is bounded
                if abs(moved) > self._clip and other > error:
                    error = other
            term = self._coef * 0.5 * error / num_tokens
            total, size = total + term, size + abs(float(term.detach()))
        return total, size, off

    def check_head_gradient(self, found: CheckResult, bound: float) -> None:
        """Collective. The head's gradient by the trainer, summed over ranks by FSDP, beside what the plain pass of each
        rank has left, summed by us: eight products of each with random vectors. Leaves none."""
        draw, reduced, plain = (
            torch.Generator().manual_seed(0),
            [0.0] * _NUM_SKETCHES,
            [0.0] * _NUM_SKETCHES,
        )
        for parameter, whole in zip(self._critic.model.head.parameters(), self._head, strict=True):
            vectors = torch.randn(
                _NUM_SKETCHES, whole.numel(), generator=draw, dtype=torch.float64
            ).to(whole.device)
            sharded, of_tokens = cast(DTensor, parameter.grad), whole.grad
            assert of_tokens is not None
            plain = [
                a - b
                for a, b in zip(
                    plain, (vectors @ of_tokens.flatten().double()).tolist(), strict=True
                )
            ]
            if is_first_replica(cast(DTensor, parameter)) and len(
                own := sharded._local_tensor
            ):  # one row: one rank's
                reduced = [
                    a + b
                    for a, b in zip(
                        reduced, (vectors @ own.flatten().double()).tolist(), strict=True
                    )
                ]

        def judge(parts: list[list[list[float]]]) -> float:
            by_fsdp, by_us = (
                [sum(each) for each in zip(*of, strict=True)] for of in zip(*parts, strict=True)
            )
            off = math.sqrt(sum((a - b) ** 2 for a, b in zip(by_fsdp, by_us, strict=True)))
            return off / (math.sqrt(sum(b * b for b in by_us)) + 1e-30)

        off = on_rank0(judge, [reduced, plain])
        found.check_difference(
            "the gradient of the value head, of its norm,", "gradient", off, bound
        )
        self._critic.forget()

    @contextmanager
    def random_head(self) -> Iterator[None]:
        model = self._critic.model
        with random_head(model.head), plain_states(model.policy) as self._states:
            yield
        self._states = []


def open_policy_critic(config: Config, policy: Policy, session: Session) -> PolicyCritic:
    """Collective. Adds a value head to the policy's layers."""
    return PolicyCritic(
        PolicyValues(policy, session),
        config.critic,
        config.advantage.normalize_std,
        config.loss,
        config.optimizer,
        config.training,
    )
