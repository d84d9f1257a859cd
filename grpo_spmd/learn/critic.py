"""The critic of a run: values of a step's tokens, advantages of them (GAE), and its own update. PPO as Schulman et al.
2017 have it, with a lambda of its own for what the values are taught (VC-PPO, Yuan et al. 2025)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import CriticConfig, LossConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.collectives import any_rank, scatter_from_rank0
from grpo_spmd.distributed.reductions import Max, Mean, Reductions, merge
from grpo_spmd.learn.advantages import (
    advantages_of_tokens,
    explained_variance,
    length_lambda,
    value_loss,
    whitening,
)
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.sampled_step import cut, of_sampled, of_trained
from grpo_spmd.learn.signals import Check
from grpo_spmd.model.offload import Beside
from grpo_spmd.model.optimizer import build_optimizer, go_on_at
from grpo_spmd.model.values import PolicyValues, ValueModel
from grpo_spmd.records import Decision, MicroBatch, RolloutBatch, StepDecision

_NUM_SUMS = 8  # of `_Estimate.sums`


@dataclasses.dataclass(frozen=True)
class _Estimate:
    """Of one micro-batch, float64."""

    advantages: npt.NDArray[np.float64]  # [C], not whitened
    returns: npt.NDArray[np.float64]  # [C]
    sums: npt.NDArray[
        np.float64
    ]  # over tokens that count: their number, A and A^2, V, R and R^2, R - V and its square


class Critic:
    """A Signal: gives each token its advantage before the policy's update, and learns from the same rollouts behind
    it."""

    def __init__(
        self,
        model: ValueModel | PolicyValues,
        config: CriticConfig,
        normalize_std: str,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
    ) -> None:
        """`normalize_std`: "batch" whitens the advantages of a step, "none" leaves them."""
        self.model, self._config, self._loss, self._training = model, config, loss, training
        self._coef = config.coef if config.is_on_policy else 1.0
        self._found: Reductions = {}  # of the mini-batch under way
        self._whitens, self._max_grad_norm = normalize_std == "batch", optimizer.max_grad_norm
        floor = optimizer.min_lr / optimizer.lr * config.lr if optimizer.lr else 0.0
        own = dataclasses.replace(optimizer, lr=config.lr, min_lr=floor)
        self.optimizer, self._schedule = build_optimizer(
            model, own, training.num_run_optimizer_steps
        )
        self._num_updates = self._skipped_in_a_row = 0

    @property
    def beside(self) -> list[Beside]:
        return [(self.model, self.optimizer)]

    def trained_parameters(self) -> dict[str, DTensor]:
        return {name: cast(DTensor, parameter) for name, parameter in self.model.named_parameters()}

    def state(self) -> dict[str, int]:
        """What a checkpoint must hold beside parameters and moments."""
        return {"num_updates": self._num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]
        go_on_at(self.optimizer, self._schedule, self._num_updates)

    @torch.no_grad()
    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        """Collective. Put values, returns and advantages into the micro-batches, whose advantages were rewards until
        now, each at the token that it was given for. The decision has of each rollout the mean of its tokens'."""
        rows = batch.micro_batches
        try:
            for row in rows:
                check(False)
                row.old_values = self.model(row)
        finally:
            cast(FSDPModule, self.model).reshard()
        estimates = [self._estimate(row) for row in rows]
        mean, factor, decision = self._whiten(rows, estimates, decision)
        for row, estimate in zip(rows, estimates, strict=True):
            device, mask = row.advantages.device, row.loss_mask
            advantages = torch.from_numpy((estimate.advantages - mean) * factor).to(
                device, torch.float32
            )
            row.advantages = torch.where(mask, advantages, 0.0)
            row.returns = torch.from_numpy(estimate.returns).to(device, torch.float32)
        return decision

    def _estimate(self, row: MicroBatch) -> _Estimate:
        config, rewards = self._config, row.advantages.double()
        if self._loss.kl_in == "reward":
            assert row.old_logprobs is not None
            assert row.ref_logprobs is not None
            kl = kl_estimate(row.old_logprobs, row.ref_logprobs, self._loss.kl_estimator)
            rewards = rewards - self._loss.kl_coef * kl.double()
        assert row.old_values is not None
        lengths = _lengths(row)
        given = rewards.cpu().numpy(), row.old_values.double().cpu().numpy(), lengths
        lam = (
            length_lambda(lengths, config.length_alpha)
            if config.lam_policy == "length"
            else config.lam_policy
        )
        advantages = advantages_of_tokens(*given, config.gamma, lam)
        values, returns = (
            given[1],
            advantages_of_tokens(*given, config.gamma, config.lam) + given[1],
        )
        mask = row.loss_mask.cpu().numpy()
        a, v, r = advantages[mask], values[mask], returns[mask]
        sums = (
            len(a),
            a.sum(),
            (a**2).sum(),
            v.sum(),
            r.sum(),
            (r**2).sum(),
            (r - v).sum(),
            ((r - v) ** 2).sum(),
        )
        return _Estimate(advantages, returns, np.array(sums, np.float64))

    def _whiten(
        self, rows: list[MicroBatch], estimates: list[_Estimate], decision: Decision
    ) -> tuple[float, float, Decision]:
        """Collective. What is taken off the advantages, and what they are multiplied by, over all ranks' tokens; the
        decision with the rollouts' means."""
        trained = [i for rows_of_rank in decision.rows for row in rows_of_rank for i in row]
        means = {i: mean for pair in zip(rows, estimates, strict=True) for i, mean in _means(*pair)}
        own = np.array([means.get(i, math.nan) for i in trained], np.float64)
        sums, of_all = sum((each.sums for each in estimates), np.zeros(_NUM_SUMS)), decision.of_all
        decided: list[StepDecision] = []  # on rank 0

        def decide(parts: list[bytes]) -> list[bytes]:
            assert of_all is not None
            told = [np.frombuffer(part, np.float64) for part in parts]
            count, a, a_squares, v, *others = sum(
                (each[:_NUM_SUMS] for each in told), np.zeros(_NUM_SUMS)
            ).tolist()
            mean, factor = whitening(count, a, a_squares) if self._whitens else (0.0, 1.0)
            of_rollouts = np.full(len(of_all.rewards), math.nan)
            of_rollouts[of_trained(of_all)[0]] = np.concatenate([each[_NUM_SUMS:] for each in told])
            advantages = np.nan_to_num((of_rollouts - mean) * factor).astype(np.float32)
            metrics = {
                "critic/value_mean": v / count if count else None,
                "critic/explained_variance": explained_variance(
                    count, tuple(others[:2]), tuple(others[2:])
                ),
                "critic/advantage_std": math.sqrt(max(0.0, a_squares / count - (a / count) ** 2))
                if count
                else None,
            }
            decided.append(
                dataclasses.replace(of_all, advantages=advantages, metrics=of_all.metrics | metrics)
            )
            header = np.array([mean, factor]).tobytes()
            return [header + part for part in cut(*of_sampled(of_all, advantages))]

        share = scatter_from_rank0(decide, np.concatenate([sums, own]).tobytes())
        mean, factor = np.frombuffer(share, np.float64, 2).tolist()
        values = np.frombuffer(share, np.float32, offset=16).tolist()
        advantages = dict(zip(decision.advantages, values, strict=True))
        changed = dataclasses.replace(
            decision, advantages=advantages, of_all=next(iter(decided), None)
        )
        return mean, factor, changed

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. One optimizer step for each mini-batch of each epoch, as the policy makes them: the loss is a
        mean over tokens, whatever that of the policy is. One whose loss or gradient is not finite on some rank changes
        nothing. Raises FloatingPointError after training.max_nonfinite_in_a_row of them."""
        sums, num_skipped = self.no_update(), 0
        for _ in range(self._training.num_epochs):
            for mini_batch, num_tokens in zip(
                batch.mini_batches, batch.num_loss_tokens, strict=True
            ):
                if num_tokens:  # on all ranks alike
                    found = self._step(mini_batch, num_tokens)
                    num_skipped += not found
                    sums = merge([sums, found])
        return sums | {"critic/skipped_updates": Max(float(num_skipped))}

    @staticmethod
    def no_update() -> Reductions:
        """What a rank adds to the metrics where no update was made."""
        sums: Reductions = {
            "critic/loss": Mean(),
            "critic/clip_frac": Mean(),
            "critic/skipped_updates": Max(0.0),
        }
        return sums | {"critic/grad_norm": Max(), "critic/lr": Max()}

    def _step(self, mini_batch: list[MicroBatch], num_tokens: int) -> Reductions:
        """Nothing where the step was not made."""
        for row in mini_batch:
            self.share(self.model(row), row, num_tokens).backward()
        grad_norm = self.clip()
        loss_here = cast(Mean, self._found["critic/loss"].on_host()).total
        is_made = not any_rank(
            not (math.isfinite(grad_norm) and math.isfinite(cast(float, loss_here)))
        )
        sums = self.stepped(is_made)
        if self._skipped_in_a_row >= (most := self._training.max_nonfinite_in_a_row):
            what = "updates of the critic in a row had a loss or gradient that is not finite"
            raise FloatingPointError(f"{most} {what} (training.max_nonfinite_in_a_row)")
        return sums

    def share(self, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        """What these values [C] of a row add to the loss of its mini-batch, of `num_tokens` over all ranks."""
        assert row.old_values is not None
        assert row.returns is not None
        loss, clipped = value_loss(
            values, row.old_values, row.returns, row.loss_mask, self._config.clip_value
        )
        count = row.loss_mask.sum()
        found: Reductions = {
            "critic/loss": Mean(loss.detach(), count),
            "critic/clip_frac": Mean(clipped, count),
        }
        self._found = merge([self._found, found])
        return self._coef * loss / num_tokens

    def clip(self) -> float:
        """Collective. Bound the gradient by optimizer.max_grad_norm, apart from the policy's; its norm before."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        grad_norm = float(cast(DTensor, norm).full_tensor())
        self._found["critic/grad_norm"] = Max(grad_norm)
        return grad_norm

    def stepped(self, is_made: bool) -> Reductions:
        """Make the optimizer step, or drop the gradient. What the mini-batch adds to the metrics, if it was made."""
        sums = (
            {name: reduction.on_host() for name, reduction in self._found.items()}
            if is_made
            else {}
        )
        if is_made:
            sums["critic/lr"] = Max(float(self._schedule.get_last_lr()[0]))
            self.optimizer.step()
            self._schedule.step()
        self.forget()
        self._num_updates += is_made
        self._skipped_in_a_row = 0 if is_made else self._skipped_in_a_row + 1
        return sums

    def forget(self) -> None:
        """Drop the gradient, and what was found of it."""
        self.optimizer.zero_grad(set_to_none=True)
        self._found = {}


def _lengths(row: MicroBatch) -> npt.NDArray[np.int64]:
    """Sampled tokens of each rollout; they lie one behind the other."""
    return np.bincount(row.sequence_index.cpu().numpy())


def _means(row: MicroBatch, estimate: _Estimate) -> list[tuple[int, float]]:
    """Of the advantages of each rollout's tokens; only of those that count."""
    mask, index = row.loss_mask.cpu().numpy(), row.sequence_index.cpu().numpy()
    size = max(len(row.rollout_ids), 1)
    counts = np.bincount(index, mask, size)
    with np.errstate(invalid="ignore"):  # 0 / 0: none counts
        means = np.bincount(index, np.where(mask, estimate.advantages, 0.0), size) / counts
    return list(zip(row.rollout_ids, means.tolist(), strict=False))
