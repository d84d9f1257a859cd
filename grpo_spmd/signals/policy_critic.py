"""A critic whose value head reads the policy's own last hidden states and learns in the policy's
update.

One forward pass gives logprobs and values, one backward pass has both losses, as in TRL's PPO with
a value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import Config, CriticConfig
from grpo_spmd.distributed.reductions import Max, Reductions, merge
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.contexts import rollout_contexts
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import is_first_replica
from grpo_spmd.model.values import PolicyValues, build_value_model, plain_states
from grpo_spmd.proofs.gradient_check import (
    CheckResult,
    SignalProofs,
    UpdateCheckSettings,
    relative_difference,
)
from grpo_spmd.proofs.plain_loss import LossTerm
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch
from grpo_spmd.signals.critic import (
    Critic,
    CriticCheck,
    random_head,
    random_product,
    relative_size,
)


class PolicyCritic(Critic):
    """A critic that is also the ValueHead of a PolicyUpdater.

    During the warm-up the policy is not updated: then the head learns alone, from hidden states
    without a gradient.
    """

    model: PolicyValues

    def __init__(self, model: PolicyValues, config: Config) -> None:
        super().__init__(model, config)
        # The metrics of the policy's update, if the head was part of it.
        self._update_metrics: Reductions | None = None
        self._num_skipped = 0

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """The head as a module of its own: the policy's forward pass enters it too."""
        return [(self.model.head, self.optimizer)]

    @property
    def value_head(self) -> PolicyCritic:
        """This critic learns in the policy's update."""
        return self

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """Returns the running check of this signal."""
        check = CriticCheck(self.model, self._config, settings)
        return SignalProofs([check], values=ValueTargets(self, self._config))

    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. Writes values, returns and advantages into the micro-batches; see
        Critic.attach."""
        # A new step: the policy's update has not been made yet.
        self._update_metrics = None
        self._num_skipped = 0
        return super().attach(batch, decision, stop_check)

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Returns values [C] of the policy's hidden states [C, D]; see
        ValueHead.term."""
        return self.model.term(hidden, head)

    def end_mini_batch(self, is_made: bool) -> None:
        """Makes the head's optimizer step or drops its gradient, as the policy did."""
        self._update_metrics = merge([self._update_metrics or {}, self.end_step(is_made)])
        self._num_skipped += not is_made

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. Returns the metrics of the update that was made with the policy; without one
        the head learns alone."""
        if self._update_metrics is None:
            try:
                return super().update(batch)
            finally:
                # No backward pass has reached the policy, which would give its gathered parameters
                # back.
                self.model.reshard()
        skipped = {"critic/skipped_updates": Max(float(self._num_skipped))}
        return self.no_update() | self._update_metrics | skipped


def open_critic_model(config: Config, policy: Policy, session: Session) -> Critic:
    """Collective. Builds the model of critic.path, or a value head on the policy's layers. Raises
    ConfigError for a model that cannot be a critic."""
    if config.critic.is_on_policy:
        return PolicyCritic(PolicyValues(policy, session), config)
    model = build_value_model(
        config.critic.path or "",
        config.model,
        session,
        max_rollout_tokens=config.max_rollout_tokens,
        num_tokens=policy.model.get_input_embeddings().weight.shape[0],
    )
    return Critic(model, config)


# Distances of old values and returns from the values, in multiples of the clip. They are on both
# sides of the clip, and on each side the clipped error is sometimes the larger one, sometimes not.
_OLD_DISTANCES = (0.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0)
_RETURN_DISTANCES = (0.7, -0.7, 0.9)
# With a larger clip nothing is clipped on synthetic rows.
_MAX_CLIP = 5.0


class ValueTargets:
    """Makes value targets for the synthetic rows of the gradient check, and computes their loss
    plainly (the SyntheticValues of GradientCheck)."""

    def __init__(self, critic: PolicyCritic, config: CriticConfig) -> None:
        self._critic = critic
        self._clip = config.clip_value
        self._coef = config.coef
        # The decoder's outputs of each plain pass within `random_head`.
        self._states: list[Tensor] = []
        # Weight and bias of the head as leaves of the plain loss.
        self._head: tuple[Tensor, ...] = ()
        # Values, old values and returns of the rows that hold a rollout, float64.
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator over (name, parameter) of the head."""
        return self._critic.model.named_parameters()

    @contextmanager
    def random_head(self) -> Iterator[None]:
        """Returns a context manager. Within it the head adds a fixed random product, and the
        decoder's outputs of plain passes are kept."""
        model = self._critic.model
        with random_head(model.head), plain_states(model.policy) as self._states:
            yield
        self._states = []

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Gives a row old values and returns at known distances from the trainer's values [C]."""
        clip = min(self._clip or 1.0, _MAX_CLIP)
        v = values.double()
        # Each combination of the distances occurs every 21 tokens.
        index = torch.arange(len(v), device=v.device)
        old = v.new_tensor(_OLD_DISTANCES)[index % len(_OLD_DISTANCES)]
        target = v.new_tensor(_RETURN_DISTANCES)[
            index // len(_OLD_DISTANCES) % len(_RETURN_DISTANCES)
        ]
        row.old_values = (v - clip * old).float()
        row.returns = (v + clip * target).float()
        if row.rollout_ids:
            self._columns.append((v, row.old_values.double(), row.returns.double()))

    def plain_term(
        self, result: CheckResult, rollouts: Sequence[Rollout], num_tokens: int, bound: float
    ) -> LossTerm:
        """Collective. Returns the value loss, and compares the trainer's values with plain ones.

        The states are those of the last plain pass within `random_head`, which was over the
        contexts of `rollouts`. `num_tokens` is the number of tokens that count over all ranks. The
        targets of `set_targets` are used once.
        """
        states = self._states[-1]  # [S, L, D]
        hidden: list[Tensor] = []
        for number, context in enumerate(rollout_contexts(rollouts)):
            sampled = torch.from_numpy(np.flatnonzero(context.sampled)).to(states.device)
            hidden.append(states[number, sampled - 1])
        parameters = self._critic.model.head.parameters()
        gathered = [cast(DTensor, parameter).full_tensor() for parameter in parameters]
        self._head = tuple(tensor.detach().requires_grad_() for tensor in gathered)
        weight, bias = self._head
        inputs = (torch.cat(hidden) if hidden else states[0, :1]).float()
        plain = (inputs @ weight[0] + bias + random_product(inputs)).double()
        if not hidden:
            return LossTerm((plain * 0.0).sum(), 0.0)
        values, old, target = (torch.cat(column) for column in zip(*self._columns, strict=True))
        self._columns = []
        # The trainer's values with the plain gradient: else rounding would clip here what it does
        # not clip there.
        v = plain + (values - plain).detach()
        errors = (v - target) ** 2
        # PPO takes the larger of two errors. The clipped one is a constant.
        if self._clip is not None:
            steps = values - old
            clipped = (old + steps.clamp(-self._clip, self._clip) - target) ** 2
            errors = torch.where((steps.abs() > self._clip) & (clipped > errors), clipped, errors)
        counts = np.concatenate([rollout.loss_mask for rollout in rollouts])
        terms = self._coef * 0.5 * errors[torch.from_numpy(counts).to(v.device)] / num_tokens
        result.check_difference(
            "the value of a token, of the values' size,",
            "values",
            relative_size(values - plain.detach(), plain.detach()),
            bound,
        )
        return LossTerm(terms.sum(), float(terms.detach().abs().sum()))

    def check_head_gradient(self, result: CheckResult, bound: float) -> None:
        """Collective. Compares the head's gradient, which FSDP summed over ranks, with the plain
        gradients, summed here. Drops the gradient."""
        reduced = []
        plain = []
        for parameter, leaf in zip(self._critic.model.head.parameters(), self._head, strict=True):
            assert leaf.grad is not None
            # The plain loss is subtracted in the backward pass.
            plain.append(-leaf.grad.flatten())
            local = cast(DTensor, parameter.grad)._local_tensor.flatten()
            # The head has one row, which one rank of each replica holds.
            is_here = is_first_replica(cast(DTensor, parameter)) and len(local)
            reduced.append(local if is_here else torch.zeros_like(plain[-1]))
        columns = [torch.cat(tensors).double().cpu().numpy() for tensors in (reduced, plain)]
        result.check_difference(
            "the gradient of the value head, of its norm,",
            "gradient",
            relative_difference(columns[0], columns[1]),
            bound,
        )
        self._critic.drop_gradient()
