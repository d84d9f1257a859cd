"""The critic: a model that gives each token of a step a value, and learns in an update of its own.

The advantages of the tokens follow from values and rewards (generalized advantage estimation, GAE).
PPO is as in Schulman et al. 2017, with a separate lambda for the value targets (VC-PPO, Yuan et al.
2025). The second half of the file is the running check, which computes values, returns and
advantages again. A "row" is a micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import (
    CriticConfig,
    LossConfig,
    OptimizerConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.reductions import Max, Mean, Reductions, merge
from grpo_spmd.learn.advantages import (
    explained_variance,
    gae_advantages,
    length_lambda,
    value_loss,
    whitening,
)
from grpo_spmd.learn.contexts import row_contexts
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.step_messages import revise_decision, split_sampled, trained_ids
from grpo_spmd.learn.update import Learner, StopCheck, ValueHead
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.values import PolicyValues, ValueModel
from grpo_spmd.proofs.gradient_check import (
    CheckResult,
    SignalProofs,
    UpdateCheckSettings,
    eager_attention,
    sum_over_ranks,
)
from grpo_spmd.records import Completion, Decision, MicroBatch, RolloutBatch, StepDecision

Numbers = npt.NDArray[np.float64]
# The length of `_Estimate.sums`.
_NUM_SUMS = 8


@dataclass(frozen=True)
class _Estimate:
    """Advantages and returns of the tokens of one micro-batch, float64."""

    advantages: Numbers
    """[C] Not whitened."""
    returns: Numbers
    """[C]"""
    sums: Numbers
    """[8] Sums over the tokens that count: their number; A and A^2 of advantages; V of values; R
    and R^2 of returns; R - V and its square."""


class Critic(Learner):
    """The critic is a signal: it gives each token an advantage before the policy's update, and
    learns from the same rollouts after the update."""

    def __init__(
        self,
        model: ValueModel | PolicyValues,
        config: CriticConfig,
        normalize_std: str,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
    ) -> None:
        """Builds the critic's optimizer. `normalize_std` "batch" whitens the advantages of a step
        (mean 0, variance 1); "none" leaves them as they are."""
        # The schedule's floor is the same share of the learning rate as the policy's.
        min_lr = optimizer.min_lr / optimizer.lr * config.lr if optimizer.lr else 0.0
        super().__init__(
            model, dataclasses.replace(optimizer, lr=config.lr, min_lr=min_lr), training
        )
        self.model = model
        self._config = config
        self._loss = loss
        self._coef = config.coef if config.is_on_policy else 1.0
        self._whitens = normalize_std == "batch"
        # The metrics of the mini-batch that is running.
        self._metrics: Reductions = {}

    @property
    def offloadable_models(self) -> list[OffloadableModel]:
        """The signal's own models, with their optimizers."""
        return [(self.model, self.optimizer)]

    @property
    def value_head(self) -> ValueHead | None:
        """None: this critic learns in an update of its own."""
        return None

    @property
    def warmup_steps(self) -> int:
        """The number of first steps of the run in which only the critic learns."""
        return self._config.warmup_steps

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        """Returns the running check of this signal."""
        return SignalProofs([CriticCheck(self.model, self._config, settings)])

    def trained_parameters(self) -> dict[str, DTensor]:
        """Returns the sharded parameters by their names in a checkpoint."""
        return {name: cast(DTensor, parameter) for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. Writes values, returns and advantages into the micro-batches.

        Before the call `advantages` of the micro-batches are rewards, each at the token that it was
        given for. The returned decision has the mean advantage of each rollout's tokens.
        """
        rows = batch.micro_batches
        try:
            for row in rows:
                stop_check(False)
                row.old_values = self.model(row)
        finally:
            # There was no backward pass that gives the gathered parameters back.
            cast(FSDPModule, self.model).reshard()
        estimates = [self._estimate(row) for row in rows]
        # Whitening needs sums over the tokens of all ranks, so it is a second pass over the rows.
        mean, factor, decision = self._whiten(rows, estimates, decision)
        for row, estimate in zip(rows, estimates, strict=True):
            device = row.advantages.device
            advantages = torch.from_numpy((estimate.advantages - mean) * factor)
            row.advantages = torch.where(row.loss_mask, advantages.to(device, torch.float32), 0.0)
            row.returns = torch.from_numpy(estimate.returns).to(device, torch.float32)
        return decision

    def _estimate(self, row: MicroBatch) -> _Estimate:
        """Returns the advantages and returns of a row from its values and rewards."""
        config = self._config
        rewards = row.advantages.double()
        # The KL penalty is subtracted token by token.
        if self._loss.kl_in == "reward":
            assert row.old_logprobs is not None
            assert row.ref_logprobs is not None
            kl = kl_estimate(row.old_logprobs, row.ref_logprobs, self._loss.kl_estimator)
            rewards = rewards - self._loss.kl_coef * kl.double()
        assert row.old_values is not None
        token_rewards = rewards.cpu().numpy()
        values = row.old_values.double().cpu().numpy()
        # The tokens of a rollout are consecutive.
        lengths = np.bincount(row.sequence_index.cpu().numpy())
        lam: Numbers | float
        if config.lam_policy == "length":
            lam = length_lambda(lengths, config.length_alpha)
        else:
            lam = config.lam_policy
        advantages = gae_advantages(token_rewards, values, lengths, config.gamma, lam)
        # Advantages and value targets have a lambda each (VC-PPO).
        returns = gae_advantages(token_rewards, values, lengths, config.gamma, config.lam) + values
        mask = row.loss_mask.cpu().numpy()
        a = advantages[mask]
        r = returns[mask]
        errors = r - values[mask]
        sums = [len(a), a.sum(), (a**2).sum(), values[mask].sum()]
        sums += [r.sum(), (r**2).sum(), errors.sum(), (errors**2).sum()]
        return _Estimate(advantages, returns, np.array(sums, np.float64))

    def _whiten(
        self, rows: list[MicroBatch], estimates: list[_Estimate], decision: Decision
    ) -> tuple[float, float, Decision]:
        """Collective. Returns (mean, factor, decision).

        (A - mean) * factor whitens the advantages A over the tokens of all ranks. The decision has
        the rollouts' mean advantages, whitened too."""
        pairs = zip(rows, estimates, strict=True)
        means = {i: mean for row, e in pairs for i, mean in _rollout_means(row, e.advantages)}
        trained = [i for rows_of_rank in decision.rows for row in rows_of_rank for i in row]
        # Rollouts without a token that counts have no mean; rank 0 reads NaN as 0.
        local_means = np.array([means.get(i, math.nan) for i in trained], np.float64)
        local_sums = sum((estimate.sums for estimate in estimates), np.zeros(_NUM_SUMS))

        def revise(step: StepDecision, messages: list[bytes]) -> tuple[StepDecision, list[bytes]]:
            # A message is 8 sums, then the means of the rollouts that the rank trains on.
            rank_values = [np.frombuffer(message, np.float64) for message in messages]
            totals = sum(
                (values[:_NUM_SUMS] for values in rank_values), np.zeros(_NUM_SUMS)
            ).tolist()
            count, a, a_squares, v, r, r_squares, error, error_squares = totals
            mean, factor = whitening(count, a, a_squares) if self._whitens else (0.0, 1.0)
            rollout_means = np.full(len(step.rewards), math.nan)
            rollout_means[trained_ids(step)[0]] = np.concatenate(
                [values[_NUM_SUMS:] for values in rank_values]
            )
            advantages = np.nan_to_num((rollout_means - mean) * factor).astype(np.float32)
            variance = max(0.0, a_squares / count - (a / count) ** 2) if count else None
            metrics = {
                "critic/value_mean": v / count if count else None,
                "critic/explained_variance": explained_variance(
                    count, (r, r_squares), (error, error_squares)
                ),
                "critic/advantage_std": None if variance is None else math.sqrt(variance),
            }
            # Every rank needs the same mean and factor, and the means of what it sampled.
            header = np.array([mean, factor]).tobytes()
            replies = [header + rank_bytes for rank_bytes in split_sampled(step, advantages)]
            revised = dataclasses.replace(
                step, advantages=advantages, metrics=step.metrics | metrics
            )
            return revised, replies

        message = np.concatenate([local_sums, local_means]).tobytes()
        reply, rank0_decision = revise_decision(decision, message, revise)
        mean, factor = np.frombuffer(reply, np.float64, 2).tolist()
        values = np.frombuffer(reply, np.float32, offset=16).tolist()
        decision = dataclasses.replace(
            decision,
            advantages=dict(zip(decision.advantages, values, strict=True)),
            rank0_decision=rank0_decision,
        )
        return mean, factor, decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. Makes one optimizer step for each mini-batch of each epoch, as the policy
        does.

        The loss is a mean over tokens, whatever the policy's aggregation is. A mini-batch whose
        loss or gradient is not finite on some rank changes nothing. Raises FloatingPointError after
        training.max_nonfinite_in_a_row of them.
        """
        totals = self.no_update()
        num_skipped = 0
        for _ in range(self._training.num_epochs):
            for mini_batch, num_loss_tokens in zip(
                batch.mini_batches, batch.num_loss_tokens, strict=True
            ):
                # All ranks agree on this.
                if not num_loss_tokens:
                    continue
                metrics = self._step(mini_batch, num_loss_tokens)
                num_skipped += not metrics
                totals = merge([totals, metrics])
        return totals | {"critic/skipped_updates": Max(float(num_skipped))}

    @staticmethod
    def no_update() -> Reductions:
        """Returns the metrics of a rank that made no update."""
        return {
            "critic/loss": Mean(),
            "critic/clip_frac": Mean(),
            "critic/skipped_updates": Max(0.0),
            "critic/grad_norm": Max(),
            "critic/lr": Max(),
        }

    def _step(self, mini_batch: list[MicroBatch], num_loss_tokens: int) -> Reductions:
        """Collective. Makes one optimizer step. Returns its metrics, {} if it was skipped.

        If a loss or gradient is not finite on any rank, all ranks skip the step. Raises
        FloatingPointError after training.max_nonfinite_in_a_row skipped steps in a row.
        """
        for row in mini_batch:
            self.loss_term(self.model(row), row, num_loss_tokens).backward()
        grad_norm = self.clip_gradient()
        # One synchronisation with the device per mini-batch.
        local_loss = cast(Mean, self._metrics["critic/loss"].on_host()).total
        is_finite = math.isfinite(grad_norm) and math.isfinite(cast(float, local_loss))
        metrics = self.end_step(not any_rank(not is_finite))
        max_skipped = self._training.max_nonfinite_in_a_row
        if self._skipped_in_a_row >= max_skipped:
            reason = "updates of the critic in a row had a loss or gradient that is not finite"
            raise FloatingPointError(f"{max_skipped} {reason} (training.max_nonfinite_in_a_row)")
        return metrics

    def loss_term(self, values: Tensor, row: MicroBatch, num_loss_tokens: int) -> Tensor:
        """Returns what the values [C] of a row add to the loss of its mini-batch. `num_loss_tokens`
        counts over all ranks."""
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
        """Collective. Clips the gradient to optimizer.max_grad_norm, apart from the policy's.
        Returns its norm before clipping."""
        grad_norm = super().clip_gradient()
        self._metrics["critic/grad_norm"] = Max(grad_norm)
        return grad_norm

    def end_step(self, is_made: bool) -> Reductions:
        """Makes the optimizer step, or drops the gradient. Returns the metrics of the mini-batch;
        {} if it was skipped."""
        learning_rate = self.finish_step(is_made)
        metrics = {name: reduction.on_host() for name, reduction in self._metrics.items()}
        self._metrics = {}
        return metrics | {"critic/lr": Max(learning_rate)} if is_made else {}

    def drop_gradient(self) -> None:
        """Drops the gradient and the metrics of the mini-batch."""
        self.optimizer.zero_grad(set_to_none=True)
        self._metrics = {}


def _rollout_means(row: MicroBatch, advantages: Numbers) -> list[tuple[int, float]]:
    """Returns the mean advantage of each rollout's tokens that count, by its id; NaN if none
    counts."""
    mask = row.loss_mask.cpu().numpy()
    index = row.sequence_index.cpu().numpy()
    size = max(len(row.rollout_ids), 1)
    counts = np.bincount(index, mask, size)
    # 0 / 0: no token counts.
    with np.errstate(invalid="ignore"):
        means = np.bincount(index, np.where(mask, advantages, 0.0), size) / counts
    return list(zip(row.rollout_ids, means.tolist(), strict=False))


# The running check: values by a plain forward pass, and returns and advantages from them and from
# the rewards that the sampling ranks know. It uses nothing of learn/advantages.py.

# The values of some tokens of a rank's first row are computed again: at most so many sequences, so
# many tokens from the first sampled one on, and no prompt that is longer, since plain attention
# takes memory by the square of the length.
_NUM_SEQUENCES, _NUM_TOKENS, _MAX_PROMPT_TOKENS = 4, 32, 2048
# Bounds of the mean |difference| of values, relative to the mean |value|.
_VALUE_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
# Bounds of the rounding of a float32 sum over a completion.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4


@dataclass(frozen=True)
class _PlainRow:
    """The recomputed and the attached advantages of one row's tokens [C]."""

    advantages: Numbers
    """The recomputed advantages, not whitened."""
    mask: npt.NDArray[np.bool_]
    """True where a token counts."""
    attached: Numbers
    """The advantages that the row holds."""


# Number of sampled tokens of a rollout, [(index of a token, its reward)]. Tokens without a reward
# are left out.
_TokenRewards = tuple[int, list[tuple[int, float]]]
# By rollout id.
_Rewards = dict[int, _TokenRewards]


class CriticCheck:
    """Recomputes values, returns and advantages of a step, and compares them with the
    micro-batches."""

    def __init__(
        self, model: ValueModel | PolicyValues, config: CriticConfig, settings: UpdateCheckSettings
    ) -> None:
        self._model = model
        self._config = config
        self._loss = settings.loss
        self._whitens = settings.advantage.normalize_std == "batch"
        self._bound = _VALUE_BOUNDS[settings.dtype]

    def __call__(
        self,
        sampled: SampledStep,
        batch: RolloutBatch,
        decision: Decision,
        rewards: Mapping[int, float],
    ) -> CheckResult:
        """Collective. Runs the check. `rewards` has, by rollout id, the rollouts that this rank
        sampled and some rank trains on; NaN: unknown."""
        # All parts of the check are collective: every rank makes all of them.
        result = CheckResult()
        self._check_values(result, batch.micro_batches[0])
        token_rewards = self._fetch_rewards(sampled, decision, rewards)
        rows = [self._recompute(result, row, token_rewards) for row in batch.micro_batches]
        counted = np.concatenate([np.zeros(0), *(row.advantages[row.mask] for row in rows)])
        count, total = sum_over_ranks([len(counted), float(counted.sum())])
        mean = total / max(count, 1)
        (squares,) = sum_over_ranks([float(((counted - mean) ** 2).sum())])
        deviation = math.sqrt(squares / max(count - 1, 1) + 1e-8)
        if not self._whitens:
            mean = 0.0
            deviation = 1.0
        for row in rows:
            expected = np.where(row.mask, (row.advantages - mean) / deviation, 0.0)
            for c in _find_differences(row.attached, expected)[:1]:
                reason = f"and gae gives {expected[c]:.6g}"
                result.errors.append(f"a token has the advantage {row.attached[c]:.6g}, {reason}")
        return result

    def _check_values(self, result: CheckResult, row: MicroBatch) -> None:
        """Collective. Compares the values that the row holds with values by the model, and values
        by the model with values by a plain forward pass over some sequences.

        In the second comparison the head adds a random term: a head of zeros would hide a fault."""
        # Of each sequence up to some tokens after the prompt.
        contexts = []
        for context in row_contexts(row)[:_NUM_SEQUENCES]:
            num_prompt = int(context.sampled_at[0])
            num_tokens = num_prompt - 1 + _NUM_TOKENS if num_prompt <= _MAX_PROMPT_TOKENS else 0
            contexts.append((context, context.token_ids[:num_tokens]))
        # Without a rollout the pass is made for the other ranks.
        width = max([1, *(len(token_ids) for _, token_ids in contexts)])
        ids = row.input_ids.new_zeros(max(len(contexts), 1), width)
        for number, (_, token_ids) in enumerate(contexts):
            ids[number, : len(token_ids)] = row.input_ids.new_tensor(token_ids)
        with torch.no_grad():
            again = self._model(row)
            with random_head(self._model.head):
                by_trainer = self._model(row)
                with eager_attention(self._model.backbone):
                    by_plain_pass = self._model.plain_values(ids)
        cast(FSDPModule, self._model).reshard()
        assert row.old_values is not None
        size = float(again.abs().mean()) + 1e-6
        result.check_difference(
            "a value that the advantages are made of, of its size,",
            "values",
            float((row.old_values - again).abs().mean()) / size,
            self._bound,
        )
        plain: list[float] = []
        trainer: list[float] = []
        for number, (context, token_ids) in enumerate(contexts):
            # The value of a token is that of the position that predicts it.
            is_inside = context.sampled_at <= len(token_ids)
            plain += by_plain_pass[number, context.sampled_at[is_inside] - 1].tolist()
            trainer += by_trainer[context.tokens[is_inside]].tolist()
        if trainer:
            difference = math.fsum(abs(a - b) for a, b in zip(trainer, plain, strict=True))
            size = math.fsum(map(abs, plain)) + 1e-6
            result.check_difference(
                "a value beside that of a plain forward pass, of its size,",
                "values",
                difference / size,
                self._bound,
            )

    def _recompute(
        self, result: CheckResult, row: MicroBatch, token_rewards: _Rewards
    ) -> _PlainRow:
        """Recomputes the returns and advantages of a row from the values that it holds."""
        assert row.old_values is not None
        assert row.returns is not None
        # The values are taken as they are; _check_values has compared them.
        columns = (row.old_values, row.returns, row.advantages)
        values, returns, attached = (column.double().cpu().numpy() for column in columns)
        mask = row.loss_mask.cpu().numpy()
        index = row.sequence_index.cpu().numpy()
        ids = row.rollout_ids
        lengths = np.bincount(index, minlength=len(ids))
        mismatched = [i for i, n in zip(ids, lengths, strict=False) if n != token_rewards[i][0]]
        if mismatched:
            result.errors.append(f"rollouts {mismatched[:5]} have other tokens than were sampled")
        if mismatched or not ids:
            return _PlainRow(np.zeros_like(attached), np.zeros_like(mask), np.zeros_like(attached))
        # One line per rollout, which ends in the last column.
        width = int(lengths.max())
        first_column = width - lengths
        # column[c] is the column of token c in the line of its rollout.
        column = np.empty_like(index)
        order = np.argsort(index, kind="stable")
        column[order] = np.concatenate([np.arange(start, width) for start in first_column])
        rewards = np.zeros((len(ids), width))
        for line, i in enumerate(ids):
            for index_in_rollout, reward in token_rewards[i][1]:
                rewards[line, first_column[line] + index_in_rollout] = reward
        rewards[index, column] -= self._kl_penalty(row)
        v = np.zeros((len(ids), width))
        v[index, column] = values
        config = self._config
        lam = np.full(len(ids), config.lam)
        # VAPO's lambda depends on the length of the completion.
        if config.lam_policy == "length":
            lam_policy = np.maximum(0.0, 1.0 - 1.0 / (config.length_alpha * lengths))
        else:
            lam_policy = np.full(len(ids), config.lam_policy)
        expected = lambda_returns(rewards, v, config.gamma, lam)[index, column]
        policy_returns = lambda_returns(rewards, v, config.gamma, lam_policy)[index, column]
        for c in _find_differences(returns, expected)[:1]:
            reason = f"and the returns of rollout {ids[index[c]]} say {expected[c]:.6g}"
            result.errors.append(f"a value is taught {returns[c]:.6g}, {reason}")
        return _PlainRow(policy_returns - values, mask, attached)

    def _kl_penalty(self, row: MicroBatch) -> Numbers:
        """Returns what is subtracted from the reward of each token [C]."""
        if self._loss.kl_in != "reward":
            return np.zeros(len(row.target_ids))
        p = cast(Tensor, row.old_logprobs)
        ref = cast(Tensor, row.ref_logprobs)
        terms = {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}
        penalty = self._loss.kl_coef * terms[self._loss.kl_estimator].double()
        return cast(Numbers, penalty.cpu().numpy())

    def _fetch_rewards(
        self, sampled: SampledStep, decision: Decision, rewards: Mapping[int, float]
    ) -> _Rewards:
        """Collective. Returns the rewards of all rollouts, from the ranks that sampled them."""
        sampled_rewards: _Rewards = {}
        size = sampled.rules.rollout.group_size
        by_turn = sampled.rules.discount is not None
        for group in sampled.groups:
            slot = decision.slots.get(group.prompt.position)
            if slot is None:
                continue
            for i, completion in enumerate(group.completions, start=slot * size):
                reward = 0.0 if math.isnan(rewards[i]) else rewards[i]
                sampled_rewards[i] = _place_rewards(completion, reward, by_turn)
        pairs = list(sampled_rewards.items())
        return dict(on_rank0(lambda by_rank: list(chain.from_iterable(by_rank)), pairs))


def lambda_returns(rewards: Numbers, values: Numbers, gamma: float, lam: Numbers) -> Numbers:
    """Returns G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}) for `rewards` r and `values` V
    [n, L].

    Values and returns after the last column are 0. `lam` [n] has one number per line."""
    returns = np.zeros_like(rewards)
    next_value = np.zeros(len(rewards))
    next_return = np.zeros(len(rewards))
    # Backwards in time; lines that end earlier are aligned at the last column.
    for t in reversed(range(rewards.shape[1])):
        next_return = rewards[:, t] + gamma * ((1.0 - lam) * next_value + lam * next_return)
        next_value = values[:, t]
        returns[:, t] = next_return
    return returns


def _find_differences(attached: Numbers, expected: Numbers) -> npt.NDArray[np.intp]:
    """Returns the indices where the arrays differ by more than rounding. NaN differs."""
    size = np.maximum(np.abs(attached), np.abs(expected))
    bound = np.maximum(_RELATIVE * size, _ABSOLUTE)
    return np.flatnonzero(~(np.abs(attached - expected) <= bound))


def _place_rewards(completion: Completion, reward: float, by_turn: bool) -> _TokenRewards:
    """Returns the rewards of a rollout: the whole reward is at the last token.

    With `by_turn` each turn's reward is at the turn's last token, and the remainder of the whole
    reward at the last token of all."""
    num_tokens = len(completion.token_ids)
    rewards: dict[int, float] = {}
    if by_turn and completion.episode is not None:
        position = -1
        for turn in completion.episode.turns:
            position += turn.num_tokens
            if turn.num_tokens and turn.reward:
                rewards[position] = turn.reward
    if num_tokens:
        remainder = rewards.get(num_tokens - 1, 0.0) + reward - math.fsum(rewards.values())
        rewards[num_tokens - 1] = remainder
    return num_tokens, list(rewards.items())


@contextmanager
def random_head(head: nn.Linear) -> Iterator[None]:
    """Returns a context manager. Within it the head adds a product with a fixed random vector: a
    new head is zero, and would show no fault."""

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + random_product(inputs[0])[..., None]

    handle = head.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def random_product(states: Tensor) -> Tensor:
    """Returns the products [...] of states [..., D] with a fixed random vector."""
    width = states.shape[-1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
    return states @ vector.to(states)
