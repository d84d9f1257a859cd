"""The critic, which estimates the value of each token of a step, for PPO.

It is either a model of its own, which is trained in an update of its own (`Critic`), or a value
head on the policy's last hidden states, which is trained in the policy's update (`PolicyCritic`).
With a value head one forward pass gives logprobs and values, and one backward pass is made for the
sum of both losses, as in TRL's PPO.

The tokens' advantages are computed from values and rewards by generalized advantage estimation
(GAE). PPO is as in Schulman et al. 2017, with a separate lambda for the value targets (VC-PPO, Yuan
et al. 2025). The second half of the file is the running check, which recomputes values, returns and
advantages. A "row" is a micro-batch, and C is the number of its completion tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from grpo_spmd.config.schema import Config, CriticConfig
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.reductions import Max, Mean, Reductions, merge
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.advantages import (
    explained_variance,
    gae_advantages,
    length_lambda,
    value_loss,
    variance,
    whitening,
)
from grpo_spmd.learn.contexts import RowContext, row_contexts
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.step_messages import revise_decision
from grpo_spmd.learn.update import (
    Learner,
    MiniBatch,
    StopCheck,
    UpdateObserver,
    ValueHead,
    counted_mini_batches,
)
from grpo_spmd.model.offload import OffloadableModel, copy_to_device
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import reshard
from grpo_spmd.model.values import PolicyValues, ValueModel, build_value_model
from grpo_spmd.proofs.gradient_check import bound_by_noise, join_ranks, sum_over_ranks
from grpo_spmd.proofs.plain import padded_routes, plain_kl, use_float32, use_plain_attention
from grpo_spmd.proofs.schedule import rows_to_check
from grpo_spmd.proofs.synthetic import CheckResult, UpdateCheckSettings
from grpo_spmd.records import Completion, Decision, MicroBatch, RolloutBatch
from grpo_spmd.signals.value_proofs import (
    MAX_VALUE_BOUND,
    CriticUpdateCheck,
    ValueTargets,
    plain_values,
    random_head,
    relative_size,
)

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Estimate:
    """Advantages and returns of the tokens of one micro-batch, float64."""

    advantages: Numbers
    """[C] Not whitened."""
    returns: Numbers
    """[C]"""
    sums: Numbers
    """[9] The number of tokens in the loss mask; then for each of A, V, R and R - V (A: advantages,
    V: values, R: returns) its sum over these tokens and its sum of squares."""


class Critic(Learner):
    """A critic that is a model of its own.

    It computes the tokens' advantages before the policy's update (`attach`), and is trained on the
    same rollouts after it (`update`). Every rank makes the same calls."""

    def __init__(self, model: ValueModel | PolicyValues, config: Config) -> None:
        """Builds the critic's optimizer."""
        optimizer = config.optimizer
        lr = config.critic.lr
        # The ratio of min_lr to lr is the policy's.
        min_lr = optimizer.min_lr / optimizer.lr * lr if optimizer.lr else 0.0
        super().__init__(
            model, dataclasses.replace(optimizer, lr=lr, min_lr=min_lr), config.training
        )
        self.model = model
        self._config = config.critic
        self._loss = config.loss
        # is_on_policy: the critic is a value head on the policy, and its loss is added to the
        # policy's with a weight. The loss of a critic that is its own model stands alone.
        self._coef = config.critic.coef if config.critic.is_on_policy else 1.0
        # "batch" scales the advantages of a step to mean 0 and variance 1 ("whitens" them).
        self._whitens = config.advantage.normalize_std == "batch"
        # The metrics of the current mini-batch.
        self._metrics: Reductions = {}
        self._observer = UpdateObserver()

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """The critic's model with its optimizer."""
        return [(self.model, self.optimizer)]

    @property
    def value_head(self) -> ValueHead | None:
        """None: this critic is trained in an update of its own, not in the policy's."""
        return None

    @property
    def warmup_steps(self) -> int:
        """The number of steps at the start of the run in which only the critic is trained."""
        return self._config.warmup_steps

    @property
    def value_targets(self) -> ValueTargets | None:
        """None: the policy's gradient check has no value loss, since no value head is trained with
        the policy."""
        return None

    def check(self, settings: UpdateCheckSettings) -> CriticCheck:
        """Returns the running check of this critic, which from now on observes its updates."""
        updates = CriticUpdateCheck(self, self._config, settings)
        self._observer = updates
        return CriticCheck(self.model, self._config, settings, updates)

    def trained_parameters(self) -> dict[str, DTensor]:
        """Returns the sharded parameters by their names in a checkpoint."""
        return {name: cast(DTensor, parameter) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def attach(
        self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck, *_: object
    ) -> Decision:
        """Collective. Writes values, returns and advantages into the micro-batches.

        Before the call, `advantages` of a micro-batch holds rewards, each at the token for which it
        was given; the call replaces them. The returned decision has each rollout's advantage, which
        is the mean over its tokens, and the critic's metrics. `stop_check` is called before each
        forward pass, and may end the step by raising. The last arguments are not used.
        """
        rows = batch.micro_batches
        try:
            for row in rows:
                stop_check(False)
                row.old_values = self.model(row)
        finally:
            # FSDP frees the gathered parameters in a backward pass, and there was none.
            reshard(self.model)
        estimates = [self._estimate(row) for row in rows]
        # Whitening needs sums over the tokens of all ranks, so it is a second loop over the rows.
        mean, factor, decision = self._whiten(rows, estimates, decision)
        for row, estimate in zip(rows, estimates, strict=True):
            device = row.advantages.device
            whitened = torch.from_numpy((estimate.advantages - mean) * factor).float()
            row.advantages = torch.where(row.loss_mask, copy_to_device(whitened, device), 0.0)
            row.returns = copy_to_device(torch.from_numpy(estimate.returns).float(), device)
        return decision

    def _estimate(self, row: MicroBatch) -> _Estimate:
        """Returns the advantages and returns of a row's tokens by GAE, from values and rewards."""
        config = self._config
        # `attach` replaces the rewards in this field by advantages later.
        rewards = row.advantages.double()
        # The KL penalty is subtracted from the reward of each token.
        if self._loss.kl_in == "reward":
            assert row.old_logprobs is not None
            assert row.ref_logprobs is not None
            kl = kl_estimate(row.old_logprobs, row.ref_logprobs, self._loss.kl_estimator)
            rewards = rewards - self._loss.kl_coef * kl.double()
        assert row.old_values is not None
        token_rewards = rewards.cpu().numpy()
        values = row.old_values.double().cpu().numpy()
        # The tokens of a rollout are consecutive, so their counts are enough to separate them.
        lengths = np.bincount(row.sequence_index.cpu().numpy())
        lam: Numbers | float
        if config.lam_policy == "length":
            lam = length_lambda(lengths, config.length_alpha)
        else:
            lam = config.lam_policy
        advantages = gae_advantages(token_rewards, values, lengths, config.gamma, lam)
        # Advantages use lam_policy, and value targets use lam (VC-PPO).
        returns = gae_advantages(token_rewards, values, lengths, config.gamma, config.lam) + values
        mask = row.loss_mask.cpu().numpy()
        sums = []
        for column in (advantages, values, returns, returns - values):
            counted = column[mask]
            sums += [counted.sum(), (counted**2).sum()]
        return _Estimate(advantages, returns, np.array([mask.sum(), *sums], np.float64))

    def _whiten(
        self, rows: list[MicroBatch], estimates: list[_Estimate], decision: Decision
    ) -> tuple[float, float, Decision]:
        """Collective. Returns (mean, factor, decision).

        If A are the advantages of all ranks' tokens, (A - mean) * factor are the whitened ones;
        without whitening mean is 0 and factor is 1. The decision has the rollouts' mean advantages,
        scaled in the same way, and metrics."""

        def whiten(by_rank: list[Any]) -> list[Any]:
            """Returns [mean, factor, rollouts' advantages, metrics]. Runs on rank 0.

            `by_rank` has for each rank its (sums as in _Estimate, [(rollout id, mean)])."""
            totals = [sum(column) for column in zip(*(sums for sums, _ in by_rank), strict=True)]
            count, a, a_squares, v, _, r, r_squares, error, error_squares = totals
            mean, factor = whitening(count, a, a_squares) if self._whitens else (0.0, 1.0)
            # A rollout without a token in the loss mask has no mean; its advantage becomes 0.
            means = np.full(decision.num_rollouts, math.nan)
            for i, rollout_mean in chain.from_iterable(
                means_of_rank for _, means_of_rank in by_rank
            ):
                means[i] = rollout_mean
            advantages = np.nan_to_num((means - mean) * factor).astype(np.float32)
            metrics = {
                "critic/value_mean": v / count if count else None,
                "critic/explained_variance": explained_variance(
                    count, (r, r_squares), (error, error_squares)
                ),
                "critic/advantage_std": math.sqrt(variance(count, a, a_squares)) if count else None,
            }
            return [mean, factor, advantages.tolist(), metrics]

        sums = np.sum([estimate.sums for estimate in estimates], axis=0).tolist()
        local_means = [
            pair
            for row, estimate in zip(rows, estimates, strict=True)
            for pair in _rollout_means(row, estimate.advantages)
        ]
        mean, factor, advantages, metrics = on_rank0(whiten, [sums, local_means])
        return mean, factor, revise_decision(decision, metrics, advantages)

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. Trains the critic with one optimizer step for each mini-batch of each epoch,
        like the policy. Returns metrics.

        The loss is a mean over tokens, whatever loss.aggregation is. A mini-batch whose loss or
        gradient is not finite on some rank is skipped. Raises FloatingPointError after
        training.max_nonfinite_in_a_row skipped mini-batches in a row.
        """
        return self._totals(
            [
                self._step(mini_batch)
                for _ in range(self._training.num_epochs)
                for mini_batch in counted_mini_batches(batch)
            ]
        )

    def _totals(self, steps: Sequence[Reductions]) -> Reductions:
        """Returns the metrics of an update. `steps` has those of each optimizer step, {} for a
        skipped one."""
        num_skipped = sum(not metrics for metrics in steps)
        totals = merge([self.no_update(), *steps])
        return totals | {"critic/skipped_updates": Max(float(num_skipped))}

    @staticmethod
    def no_update() -> Reductions:
        """Returns the metrics of an update without any optimizer step."""
        return {
            "critic/loss": Mean(),
            "critic/clip_frac": Mean(),
            "critic/skipped_updates": Max(0.0),
            "critic/grad_norm": Max(),
            "critic/lr": Max(),
        }

    def _step(self, mini_batch: MiniBatch) -> Reductions:
        """Collective. Makes one optimizer step. Returns its metrics, {} if it was skipped.

        If loss or gradient is not finite on some rank, all ranks skip the step. Raises
        FloatingPointError after training.max_nonfinite_in_a_row skipped steps in a row.
        """
        self._observer.before_backward(mini_batch)
        local_loss = self.accumulate(mini_batch)
        grad_norm = self.clip_gradient()
        is_finite = math.isfinite(grad_norm) and math.isfinite(local_loss)
        metrics = self.end_step(not any_rank(not is_finite))
        max_skipped = self._training.max_nonfinite_in_a_row
        if self._skipped_in_a_row >= max_skipped:
            raise FloatingPointError(
                f"{max_skipped} updates of the critic in a row had a loss or gradient that is not "
                "finite (training.max_nonfinite_in_a_row)"
            )
        return metrics

    def accumulate(self, mini_batch: MiniBatch) -> float:
        """Collective. Adds the gradient of a mini-batch to the parameters' gradients. Returns the
        part of the loss that this rank's rows contribute. Waits for the device once."""
        losses = []
        for row in mini_batch.micro_batches:
            loss = self.loss_term(self.model(row), row, mini_batch.num_loss_tokens)
            loss.backward()
            losses.append(loss.detach())
        return float(torch.stack(losses).sum())

    def loss_term(self, values: Tensor, row: MicroBatch, num_loss_tokens: int) -> Tensor:
        """Returns what a row's `values` [C] contribute to the loss of its mini-batch, and records
        metrics. `num_loss_tokens` is the mini-batch's number of loss tokens over all ranks."""
        assert row.old_values is not None
        assert row.returns is not None
        loss, num_clipped = value_loss(
            values, row.old_values, row.returns, row.loss_mask, self._config.clip_value
        )
        count = row.loss_mask.sum()
        metrics: Reductions = {
            "critic/loss": Mean(loss.detach(), count),
            "critic/clip_frac": Mean(num_clipped, count),
        }
        self._metrics = merge([self._metrics, metrics])
        return self._coef * loss / num_loss_tokens

    def clip_gradient(self) -> float:
        """Collective. Clips the critic's gradient to optimizer.max_grad_norm, separately from the
        policy's. Returns the norm before clipping."""
        self._observer.after_backward()
        grad_norm = super().clip_gradient()
        self._metrics["critic/grad_norm"] = Max(grad_norm)
        return grad_norm

    def end_step(self, is_made: bool) -> Reductions:
        """Makes the optimizer step, or with `is_made` False drops the gradient.

        Returns the metrics of the mini-batch since its first `loss_term`, {} without a step."""
        learning_rate = self.finish_step(is_made)
        self._observer.after_step(is_made)
        metrics = {name: reduction.on_host() for name, reduction in self._metrics.items()}
        self._metrics = {}
        return metrics | {"critic/lr": Max(learning_rate)} if is_made else {}

    def drop_gradient(self) -> None:
        """Drops the gradient and the metrics of the mini-batch."""
        self.optimizer.zero_grad(set_to_none=True)
        self._metrics = {}


def _rollout_means(row: MicroBatch, advantages: Numbers) -> list[tuple[int, float]]:
    """Returns (id, mean advantage over its loss tokens) of each rollout that has loss tokens."""
    mask = row.loss_mask.cpu().numpy()
    index = row.sequence_index.cpu().numpy()
    counts = np.bincount(index, mask).tolist()
    totals = np.bincount(index, np.where(mask, advantages, 0.0)).tolist()
    # Not strict: a row without rollouts has one placeholder token, but no id.
    columns = zip(row.rollout_ids, totals, counts, strict=False)
    return [(i, total / count) for i, total, count in columns if count]


class PolicyCritic(Critic):
    """A critic that is only a value head on the policy, and is trained in the policy's update (the
    ValueHead of PolicyUpdater).

    During critic.warmup_steps the policy is not updated. Then the head is trained alone, on the
    policy's detached hidden states.
    """

    model: PolicyValues

    def __init__(self, model: PolicyValues, config: Config) -> None:
        """Builds the optimizer of the head alone."""
        super().__init__(model, config)
        # The metrics of each optimizer step of the head within the policy's update of this step; {}
        # for a skipped one.
        self._steps: list[Reductions] = []

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """The head with its optimizer.

        This is not `self.model`: the policy's update calls the head alone, and offloading guards
        the forward pass of the module that it is given."""
        return [(self.model.head, self.optimizer)]

    @property
    def value_head(self) -> PolicyCritic:
        """This critic itself, which is trained in the policy's update."""
        return self

    @property
    def value_targets(self) -> ValueTargets:
        """New value targets for the synthetic rows of the policy's gradient check."""
        return ValueTargets(self, self._config)

    def attach(
        self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck, *_: object
    ) -> Decision:
        """Collective. Writes values, returns and advantages into the micro-batches; see
        Critic.attach."""
        # A new step begins, in which the policy has not been updated yet.
        self._steps = []
        return super().attach(batch, decision, stop_check)

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Returns the values [C] of the policy's hidden states [C, D].

        The policy calls it within its forward pass; `head` is the weight of its lm_head (see
        ValueHead.term)."""
        return self.model.term(hidden, head)

    def end_mini_batch(self, is_made: bool) -> None:
        """Makes the head's optimizer step, or with `is_made` False drops its gradient, as the
        policy's update did with its own."""
        self._steps.append(self.end_step(is_made))

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. Returns the metrics of this step's update. If the policy's update has not
        trained the head, which is so during the warm-up, this call trains it."""
        if self._steps:
            return self._totals(self._steps)
        try:
            return super().update(batch)
        finally:
            # FSDP frees the policy's gathered parameters in its backward pass, and the gradient
            # of the head alone does not reach the policy.
            self.model.reshard()


def open_critic(config: Config, policy: Policy, session: Session) -> Critic:
    """Collective. Builds the model of critic.path, or with `critic.path: policy` a value head on
    the policy. Raises ConfigError for a model that cannot be a critic."""
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


# The running check recomputes some values by a plain forward pass, and all returns and advantages
# from the values and from the rewards that the sampling ranks know. To be independent of what it
# checks, it uses nothing of learn/advantages.py.

# A plain forward pass covers at most 4 sequences of a rank's first row, and of each up to 32 tokens
# from the first sampled token on. Sequences with more than 2048 prompt tokens are left out, since
# the memory of plain attention grows with the square of the length.
_NUM_SEQUENCES, _NUM_TOKENS, _MAX_PROMPT_TOKENS = 4, 32, 2048
# Differences of this size are rounding: advantages and returns are stored in float32.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4

# (number of a rollout's sampled tokens, [(index of a token, its reward)]). Tokens without a reward
# are left out of the list.
_TokenRewards = tuple[int, list[tuple[int, float]]]


class CriticCheck:
    """Recomputes values, returns and advantages of a step, and compares them with the
    micro-batches."""

    def __init__(
        self,
        model: ValueModel | PolicyValues,
        config: CriticConfig,
        settings: UpdateCheckSettings,
        updates: CriticUpdateCheck,
    ) -> None:
        """`updates` checks the critic's gradient in this step, and its optimizer steps in this step
        and the next ones."""
        self._updates = updates
        self._model = model
        self._config = config
        self._loss = settings.loss
        self._whitens = settings.advantage.normalize_std == "batch"
        self._bound = settings.score_bound

    def __call__(
        self,
        sampled: SampledStep,
        batch: RolloutBatch,
        decision: Decision,
        rewards: Mapping[int, float],
    ) -> CheckResult:
        """Collective. Runs the check. `rewards` has, by rollout id, the rewards of the rollouts
        that this rank sampled and any rank trains on; NaN: unknown."""
        # Every part of the check is collective, so no rank may leave one out.
        result = CheckResult()
        rows = batch.micro_batches
        self._check_values(result, rows)
        by_turn = sampled.rules.discount is not None
        sampled_rewards = [
            (i, _place_rewards(completion, rewards[i], by_turn))
            for group in sampled.groups
            # Not strict: a group that is not trained on has no rollout ids.
            for i, completion in zip(decision.rollout_ids(group), group.completions, strict=False)
        ]
        token_rewards = dict(join_ranks(sampled_rewards))
        advantages = [self._recompute(result, row, token_rewards) for row in rows]
        masks = [row.loss_mask.cpu().numpy() for row in rows]
        counted = np.concatenate([a[mask] for a, mask in zip(advantages, masks, strict=True)])
        count, total = sum_over_ranks([len(counted), float(counted.sum())])
        mean = total / max(count, 1)
        (squares,) = sum_over_ranks([float(((counted - mean) ** 2).sum())])
        deviation = math.sqrt(squares / max(count - 1, 1) + 1e-8)
        if not self._whitens:
            mean = 0.0
            deviation = 1.0
        for row, plain, mask in zip(rows, advantages, masks, strict=True):
            _check_tokens(
                result,
                "a token has the advantage {:.6g}, and gae gives {:.6g}",
                row.advantages.cpu().numpy(),
                np.where(mask, (plain - mean) / deviation, 0.0),
            )
        self._updates.run(result, sampled.groups, batch)
        return result

    @torch.no_grad()
    def _check_values(self, result: CheckResult, rows: Sequence[MicroBatch]) -> None:
        """Collective. Compares `old_values` of some rows with a second pass of the model, and then
        the model with a plain forward pass over some sequences of the first row.

        In the second comparison a random term is added to the head's output: a head that is still
        all zeros would hide a fault in the layers below it."""
        for row in rows_to_check(rows):
            assert row.old_values is not None
            again = self._model(row)
            result.check_difference(
                "a value that the advantages are computed from, relative to its size,",
                "values",
                relative_size(row.old_values - again, again),
                self._bound,
            )
        row = rows[0]
        contexts = [c for c in row_contexts(row) if c.sampled_at[0] <= _MAX_PROMPT_TOKENS]
        contexts = [_cut(context) for context in contexts[:_NUM_SEQUENCES]]
        # A rank without a context makes the pass with one token, because the pass is collective.
        ids = [row.input_ids.new_tensor(context.token_ids) for context in contexts]
        padded = pad_sequence(ids or [row.input_ids[:1]], batch_first=True)
        routes = padded_routes(contexts, padded.shape[1], padded.device)

        def plain_pass() -> Tensor:
            """Returns the plain values of the compared tokens; without a context of the
            placeholder."""
            values = plain_values(self._model, padded, routes)
            # A token's value is the one at the position before it, which predicts the token.
            pieces = [values[n, context.sampled_at - 1] for n, context in enumerate(contexts)]
            return torch.cat(pieces or [values[0]])

        def measure_noise() -> float:
            """Returns how much the model's dtype rounds the values, relative to their size."""
            model = self._model
            with use_float32(model.policy if isinstance(model, PolicyValues) else model):
                return relative_size(plain_pass() - expected, expected)

        difference = 0.0
        with random_head(self._model.head):
            by_trainer = self._model(row)
            with use_plain_attention(self._model.backbone):
                expected = plain_pass()
                if contexts:
                    by_trainer = by_trainer[np.concatenate([c.tokens for c in contexts])]
                    difference = relative_size(by_trainer - expected, expected)
                bound = bound_by_noise(self._bound, difference, measure_noise, MAX_VALUE_BOUND)
        reshard(self._model)
        result.check_difference(
            "a value compared with that of a plain forward pass, relative to its size,",
            "values",
            difference,
            bound,
        )

    def _recompute(
        self, result: CheckResult, row: MicroBatch, token_rewards: Mapping[int, _TokenRewards]
    ) -> Numbers:
        """Returns a row's advantages [C], not whitened, recomputed from `old_values` and
        `token_rewards`; compares the recomputed returns with `row.returns`."""
        assert row.old_values is not None
        assert row.returns is not None
        config = self._config
        # The values are taken as they are, since _check_values compares them.
        values, returns = (x.double().cpu().numpy() for x in (row.old_values, row.returns))
        index = row.sequence_index.cpu().numpy()
        penalties = np.zeros(len(values))
        # The KL penalty is subtracted from the reward of each token.
        if self._loss.kl_in == "reward":
            old = cast(Tensor, row.old_logprobs)
            kl = plain_kl(old, cast(Tensor, row.ref_logprobs), self._loss.kl_estimator)
            penalties = self._loss.kl_coef * kl.double().cpu().numpy()
        advantages = np.zeros(len(values))
        for number, i in enumerate(row.rollout_ids):
            tokens = np.flatnonzero(index == number)
            num_tokens, rewards_by_token = token_rewards[i]
            if len(tokens) != num_tokens:
                result.errors.append(f"rollout {i} has other tokens than were sampled")
                continue
            rewards = -penalties[tokens]
            for t, reward in rewards_by_token:
                rewards[t] += reward
            # lam_policy: length (VAPO); it is replaced below for a lam_policy that is a number.
            lam = max(0.0, 1.0 - 1.0 / (config.length_alpha * num_tokens))
            if config.lam_policy != "length":
                lam = config.lam_policy
            _check_tokens(
                result,
                f"a value target is {{:.6g}}, but by the returns of rollout {i} it is {{:.6g}}",
                returns[tokens],
                lambda_returns(rewards, values[tokens], config.gamma, config.lam),
            )
            policy_returns = lambda_returns(rewards, values[tokens], config.gamma, lam)
            advantages[tokens] = policy_returns - values[tokens]
        return advantages


def _cut(context: RowContext) -> RowContext:
    """Returns the context up to the last token that is compared, _NUM_TOKENS from the first sampled
    token on."""
    end = int(context.sampled_at[0]) - 1 + _NUM_TOKENS
    is_compared = context.sampled_at <= end
    return dataclasses.replace(
        context,
        token_ids=context.token_ids[:end],
        sampled_at=context.sampled_at[is_compared],
        tokens=context.tokens[is_compared],
    )


def lambda_returns(rewards: Numbers, values: Numbers, gamma: float, lam: float) -> Numbers:
    """Returns the lambda-returns [n] of a rollout's n tokens.

    They are G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), where r are the `rewards` and V
    the `values`. After the last token V and G are 0."""
    returns: list[float] = []
    next_value = 0.0
    next_return = 0.0
    # From the last token to the first.
    for reward, value in zip(rewards[::-1].tolist(), values[::-1].tolist(), strict=True):
        next_return = reward + gamma * ((1.0 - lam) * next_value + lam * next_return)
        next_value = value
        returns.append(next_return)
    return np.array(returns[::-1], np.float64)


def _check_tokens(result: CheckResult, text: str, attached: Numbers, expected: Numbers) -> None:
    """Adds an error for the first token at which `attached` [n] and `expected` [n] differ by more
    than rounding, or one is NaN. `text` has a placeholder for each of the two numbers."""
    size = np.maximum(np.abs(attached), np.abs(expected))
    is_right = np.abs(attached - expected) <= np.maximum(_RELATIVE * size, _ABSOLUTE)
    for c in np.flatnonzero(~is_right)[:1]:
        result.errors.append(text.format(attached[c], expected[c]))


def _place_rewards(completion: Completion, reward: float, by_turn: bool) -> _TokenRewards:
    """Returns the rewards of a rollout's tokens. An unknown `reward` (NaN) counts as 0.

    The whole reward is given at the last token. With `by_turn` (environment.discount) each turn's
    own reward is given at the turn's last token, and the rest at the rollout's last token."""
    num_tokens = len(completion.token_ids)
    rewards: dict[int, float] = {}
    position = -1
    for turn in completion.episode.turns if by_turn and completion.episode is not None else ():
        position += turn.num_tokens
        if turn.num_tokens and turn.reward:
            rewards[position] = turn.reward
    if num_tokens:
        remainder = (0.0 if math.isnan(reward) else reward) - math.fsum(rewards.values())
        rewards[num_tokens - 1] = rewards.get(num_tokens - 1, 0.0) + remainder
    return num_tokens, list(rewards.items())
