"""The running checks of a critic's training: its loss and gradient on synthetic rows, and its
optimizer steps.

Synthetic rows are made of shortened rollouts, as in proofs/gradient_check.py. A value head on the
policy is checked there, together with the policy, with the targets and the loss that `ValueTargets`
adds; a critic that is a model of its own is checked here, by `CriticUpdateCheck`.

"Plain" computations are those of the check: a plain forward pass uses no packing and plain
attention, and a plain loss is written out by its formula. They are compared with the trainer's.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import CriticConfig
from grpo_spmd.distributed.collectives import any_rank
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.update import MiniBatch
from grpo_spmd.model.sharding import is_first_replica
from grpo_spmd.model.values import PolicyValues, ValueModel, plain_states
from grpo_spmd.proofs.gradient_check import (
    bound_by_noise,
    check_no_gradient,
    count_loss,
    gradient_squares,
    relative_difference,
    sum_over_ranks,
)
from grpo_spmd.proofs.plain import LossTerm, use_float32, use_plain_attention, use_plain_routes
from grpo_spmd.proofs.synthetic import (
    CheckResult,
    UpdateCheckSettings,
    padded_contexts,
    plain_routes,
    short_rollouts,
)
from grpo_spmd.proofs.update_check import AdamwCheck
from grpo_spmd.records import MicroBatch, Rollout, RolloutBatch, RolloutGroup

if TYPE_CHECKING:
    from grpo_spmd.signals.critic import Critic, PolicyCritic

_log = logging.getLogger("grpo_spmd")
# Distances of the synthetic old values and returns from the trainer's values, in multiples of
# critic.clip_value. Old values nearer than 1 clip nothing. Of those farther away, on either side,
# the clipped error is the larger one for some returns and the smaller one for others.
_OLD_DISTANCES = (0.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0)
_RETURN_DISTANCES = (0.7, -0.7, 0.9)
# Distances are multiples of the clip up to this one. A larger clip_value clips no synthetic value.
_MAX_CLIP = 5.0
# After each check this many optimizer steps are recomputed.
_WINDOW = 3
# The largest allowed difference of the loss, relative to the sum of its terms' sizes. Both losses
# are computed from the trainer's values, so the rounding of the model's dtype does not matter.
_LOSS_BOUND = 1e-4
# The largest allowed difference of the whole gradient, relative to its norm. Measured: 8e-7 in
# float32, 0.014 to 0.14 in bfloat16. A larger difference is compared with bfloat16's own noise,
# which was 0.5 and more for models with key biases like Qwen2's; the loss is exact there too.
_GRADIENT_BOUNDS = {"float32": 1e-3, "bfloat16": 0.2}
# The bound of differences of values never grows beyond this, however much a model rounds. The
# values of the wrong tokens would differ by about their size, which must remain an error.
MAX_VALUE_BOUND = 0.5


def relative_size(differences: Tensor, values: Tensor) -> float:
    """Returns the mean of |differences| divided by the mean of |values|."""
    return float(differences.abs().mean() / (values.abs().mean() + 1e-6))


@contextmanager
def random_head(head: nn.Linear) -> Iterator[None]:
    """Returns a context manager within which the product of the hidden states and a fixed random
    vector is added to the head's output.

    A new head is all zeros, so that faults in the layers below it would not show in its values."""
    handle = head.register_forward_hook(
        lambda _, inputs, output: output + random_product(inputs[0])[..., None]
    )
    try:
        yield
    finally:
        handle.remove()


def random_product(states: Tensor) -> Tensor:
    """Returns the products [...] of states [..., D] with a fixed random vector."""
    width = states.shape[-1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
    return states @ vector.to(states)


class SyntheticTargets:
    """Makes value targets for synthetic rows, and computes their value loss by its formula."""

    def __init__(self, clip: float | None, coef: float) -> None:
        """`clip` is critic.clip_value (None: no clipping), `coef` the weight of the value loss."""
        self._clip = clip
        self._coef = coef
        # (values, old values, returns), float64, of each row that holds a rollout.
        self._columns: list[tuple[Tensor, Tensor, Tensor]] = []

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Sets a row's old values and returns at known distances from the trainer's values [C]."""
        clip = min(self._clip or 1.0, _MAX_CLIP)
        v = values.double()
        # Each of the 7 * 3 combinations of distances occurs once in 21 tokens.
        index = torch.arange(len(v), device=v.device)
        old = v.new_tensor(_OLD_DISTANCES)[index % len(_OLD_DISTANCES)]
        target = v.new_tensor(_RETURN_DISTANCES)[
            index // len(_OLD_DISTANCES) % len(_RETURN_DISTANCES)
        ]
        row.old_values = (v - clip * old).float()
        row.returns = (v + clip * target).float()
        if row.rollout_ids:
            self._columns.append((v, row.old_values.double(), row.returns.double()))

    def plain_loss(
        self, plain: Tensor, rollouts: Sequence[Rollout], num_tokens: int
    ) -> tuple[LossTerm, Tensor]:
        """Returns (value loss, trainer's values [n]) of the tokens of `rollouts`.

        `plain` [n] are the values by a plain forward pass, float64; the loss is differentiable with
        respect to them. `num_tokens` is the number of loss tokens over all ranks."""
        values, old, target = (torch.cat(column) for column in zip(*self._columns, strict=True))
        # v has the trainer's values and the gradient of the plain ones. If it had the plain values,
        # rounding could move a value across the clip in only one of the two losses.
        v = plain + (values - plain).detach()
        errors = (v - target) ** 2
        # PPO takes the larger of two errors. The clipped one is constant, so it has no gradient.
        if self._clip is not None:
            steps = values - old
            clipped = (old + steps.clamp(-self._clip, self._clip) - target) ** 2
            errors = torch.where((steps.abs() > self._clip) & (clipped > errors), clipped, errors)
        counts = np.concatenate([rollout.loss_mask for rollout in rollouts])
        terms = self._coef * 0.5 * errors[torch.from_numpy(counts).to(v.device)] / num_tokens
        return LossTerm(terms.sum(), float(terms.detach().abs().sum())), values


class ValueTargets(SyntheticTargets):
    """Adds the value loss of a critic that is a value head on the policy to the policy's gradient
    check (the SyntheticValues of GradientCheck)."""

    def __init__(self, critic: PolicyCritic, config: CriticConfig) -> None:
        super().__init__(config.clip_value, config.coef)
        self._critic = critic
        # The decoder's outputs in each plain pass that was made within `random_head`.
        self._states: list[Tensor] = []
        # Copies of the head's weight and bias, in whose `grad` the plain loss leaves its gradient.
        self._head: tuple[Tensor, ...] = ()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Returns an iterator over the head's (name, parameter) pairs."""
        return self._critic.model.named_parameters()

    @contextmanager
    def random_head(self) -> Iterator[None]:
        """Returns a context manager within which a fixed random product is added to the head's
        output, and the decoder's outputs in plain passes are kept."""
        model = self._critic.model
        with random_head(model.head), plain_states(model.policy) as self._states:
            yield
        self._states = []

    def plain_term(
        self, result: CheckResult, rollouts: Sequence[Rollout], num_tokens: int, bound: float
    ) -> LossTerm:
        """Collective. Returns the value loss, and compares the trainer's values with plain ones.

        To be called within `random_head`, after a plain pass over the contexts of `rollouts`, whose
        hidden states it uses. `num_tokens` is the number of loss tokens over all ranks. Forgets the
        targets of `set_targets` afterwards.
        """
        states = self._states[-1]  # [S, L, D]
        _, sampled = padded_contexts(rollouts, states.device)
        hidden = [states[number, positions - 1] for number, positions in enumerate(sampled)]
        parameters = self._critic.model.head.parameters()
        gathered = [cast(DTensor, parameter).full_tensor() for parameter in parameters]
        self._head = tuple(tensor.detach().requires_grad_() for tensor in gathered)
        weight, bias = self._head
        inputs = (torch.cat(hidden) if hidden else states[0, :1]).float()
        plain = (inputs @ weight[0] + bias + random_product(inputs)).double()
        term = LossTerm((plain * 0.0).sum(), 0.0)
        difference = 0.0
        if hidden:
            term, trainer_values = self.plain_loss(plain, rollouts, num_tokens)
            difference = relative_size(trainer_values - plain.detach(), plain.detach())
        # The targets have been used.
        self._columns = []

        @torch.no_grad()
        def measure_noise() -> float:
            """Returns how much the model's dtype rounds the values, relative to their size."""
            model = self._critic.model
            with use_float32(model.policy):
                exact = _plain_values(model, rollouts, states.device)
            return relative_size(exact - plain, plain)

        result.check_difference(
            "the value of a token, relative to the values' size,",
            "values",
            difference,
            bound_by_noise(bound, difference, measure_noise, MAX_VALUE_BOUND),
        )
        return term

    def check_head_gradient(self, result: CheckResult, bound: float) -> None:
        """Collective. Compares the head's gradient with that of the plain loss, and drops it.

        FSDP has summed the head's gradient over the ranks; `relative_difference` sums the plain
        gradients over the ranks."""
        reduced = []
        plain = []
        for parameter, leaf in zip(self._critic.model.head.parameters(), self._head, strict=True):
            assert leaf.grad is not None
            # The check made the backward pass of the plain loss with a minus sign.
            plain.append(-leaf.grad.flatten())
            local = cast(DTensor, parameter.grad)._local_tensor.flatten()
            # FSDP shards by rows, and the head has only one: one rank of each replica holds it.
            is_here = is_first_replica(cast(DTensor, parameter)) and len(local)
            reduced.append(local if is_here else torch.zeros_like(plain[-1]))
        columns = [torch.cat(tensors).double().cpu().numpy() for tensors in (reduced, plain)]
        result.check_difference(
            "the gradient of the value head, relative to its norm,",
            "gradient",
            relative_difference(columns[0], columns[1]),
            bound,
        )
        self._critic.drop_gradient()


class CriticUpdateCheck(AdamwCheck):
    """Checks a critic's training: `run` compares its loss and gradient with plain ones, and as an
    UpdateObserver it then recomputes the critic's next optimizer steps."""

    def __init__(self, critic: Critic, config: CriticConfig, settings: UpdateCheckSettings) -> None:
        """Makes the settings of the critic's AdamW, which are the policy's but for learning
        rates."""
        self._critic = critic
        self._clip = config.clip_value
        self._gradient_bound = _GRADIENT_BOUNDS[settings.dtype] * settings.bound_factor
        policy = settings.optimizer
        # The ratio of min_lr to lr is the policy's.
        ratio = config.lr / policy.lr if policy.lr else 0.0
        optimizer = dataclasses.replace(policy, lr=config.lr, min_lr=policy.min_lr * ratio)
        num_steps = settings.training.num_run_optimizer_steps
        super().__init__(critic.model, critic, optimizer, num_steps)
        self.claim = "the critic's update is not what a plain recomputation of it gives"
        # True from a check until the critic has been updated.
        self._expects_step = False

    def run(self, result: CheckResult, groups: Sequence[RolloutGroup], batch: RolloutBatch) -> None:
        """Collective. Checks loss and gradient on shortened rollouts of this rank, and makes the
        next _WINDOW optimizer steps be recomputed."""
        if self._expects_step:
            result.errors.append("the critic has made no update since the last check")
        # The loss and gradient of a value head on the policy are checked with the policy's.
        if isinstance(self._critic.model, ValueModel):
            self._check_gradient(result, groups, batch.micro_batches, self._critic.model)
        result.errors.extend(self.open(_WINDOW).errors)
        self._expects_step = any(batch.num_loss_tokens)

    def after_step(self, is_made: bool) -> None:
        """Collective. Compares weights and moments with those of the plain AdamW. See
        AdamwCheck."""
        self._expects_step = False
        super().after_step(is_made)

    def _check_gradient(
        self,
        result: CheckResult,
        groups: Sequence[RolloutGroup],
        step_rows: Sequence[MicroBatch],
        model: ValueModel,
    ) -> None:
        """Collective. Compares the trainer's loss and gradient on synthetic rows with those of
        plain forward and backward passes. Leaves no gradient behind. The synthetic rows share
        prefixes if those of the step do."""
        device = step_rows[0].input_ids.device
        is_shared = any(row.tree is not None for row in step_rows)
        critic = self._critic
        check_no_gradient(result, model.named_parameters())
        rollouts = short_rollouts(groups, has_siblings=is_shared)
        rows = [
            pack_rollouts(half, device, shares_prefixes=is_shared)
            for half in (rollouts[:3], rollouts[3:])
        ]
        num_tokens, num_sequences = (max(n, 1) for n in sum_over_ranks(count_loss(rows)))
        targets = SyntheticTargets(self._clip, 1.0)
        handle = model.register_forward_hook(
            lambda _, inputs, values: targets.set_targets(inputs[0], values.detach())
        )
        # The backward passes are within `use_plain_attention` too, because activation checkpointing
        # runs layers again in them.
        with random_head(model.head):
            loss = critic.accumulate(MiniBatch(rows, num_tokens, num_sequences))
            handle.remove()
            norm = _gradient_norm(model)

            def plain_pass(sign: float) -> tuple[Tensor, LossTerm]:
                """Adds the plain gradient, times `sign`, to the parameters' gradients. Returns the
                plain values and their loss."""
                plain = _plain_values(model, rollouts, device)
                term = LossTerm((plain * 0.0).sum(), 0.0)
                if rollouts:
                    term, _ = targets.plain_loss(plain, rollouts, num_tokens)
                (sign * term.value).backward()
                return plain, term

            with use_plain_attention(model.backbone):
                # The gradients hold the trainer's minus the plain one.
                plain, term = plain_pass(-1.0)
                difference = _gradient_norm(model) / norm
                critic.drop_gradient()

                def measure_noise() -> float:
                    """Returns how much the model's dtype rounds the gradient, relative to its
                    norm: the difference of two plain ones, one of them in float32."""
                    plain_pass(1.0)
                    with use_float32(model):
                        plain_pass(-1.0)
                    return _gradient_norm(model) / norm

                bound = bound_by_noise(self._gradient_bound, difference, measure_noise, math.inf)
                # A missing gradient would be a difference of 1, so such a bound finds no error.
                if bound >= 1.0:
                    _log.warning(
                        "the critic's gradient is not compared: in bfloat16 rounding alone "
                        "explains a difference of %.2g of its norm; its loss is",
                        bound,
                    )
                critic.drop_gradient()
        # Values that are not finite are no error here: the update reports them and skips the step.
        if any_rank(not bool(plain.isfinite().all())):
            return
        result.check_difference(
            "the value loss, relative to the size of its terms,",
            "loss",
            abs(loss - float(term.value.detach())) / max(term.size, 1e-12),
            _LOSS_BOUND if rollouts else math.inf,
        )
        result.check_difference(
            "the gradient of the critic, relative to its norm,",
            "gradient",
            difference,
            bound,
        )


def _gradient_norm(model: nn.Module) -> float:
    """Collective. Returns the norm of the model's whole gradient, and never exactly 0, since it is
    divided by."""
    squares = sum_over_ranks([sum(gradient_squares(model).values())])
    return math.sqrt(squares[0]) + 1e-30


def plain_values(model: ValueModel | PolicyValues, rows: Tensor, routes: Tensor | None) -> Tensor:
    """Collective. Returns the values [S, L] of `rows` [S, L], each of one sequence, by a plain
    forward pass. A value head on the policy reads states for which the policy replays the expert
    choices `routes`; a critic that is a model of its own makes its own expert choices."""
    if not isinstance(model, PolicyValues):
        return model.plain_values(rows)
    with use_plain_routes(model.policy.model, routes):
        return model.plain_values(rows)


def _plain_values(
    model: ValueModel | PolicyValues, rollouts: Sequence[Rollout], device: torch.device
) -> Tensor:
    """Collective. Returns the values [n] of the sampled tokens by a plain pass, float64 and with
    their autograd graph; without rollouts the values of placeholder tokens."""
    rows, sampled = padded_contexts(rollouts, device)
    values = plain_values(model, rows, plain_routes(rollouts, device))
    # A token's value is the one at the position before it, which predicts the token.
    pieces = [values[number, positions - 1] for number, positions in enumerate(sampled)]
    return torch.cat(pieces or [values[0]]).double()
