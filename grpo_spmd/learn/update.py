"""One policy update over a step's rollouts, and the logprobs that it needs beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import LossConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.collectives import any_rank
from grpo_spmd.distributed.reductions import Histogram, Ids, Max, Mean, Reductions, Sum, merge
from grpo_spmd.learn import losses
from grpo_spmd.learn.losses import (
    LossInputs,
    aggregation_weights,
    mismatch_sums,
    policy_loss,
    rollout_correction,
)
from grpo_spmd.learn.signals import Head
from grpo_spmd.model.optimizer import build_optimizer, go_on_at
from grpo_spmd.model.policy import Policy, Scores
from grpo_spmd.records import MicroBatch, RolloutBatch

Reference = Callable[[MicroBatch], Scores]
Check = Callable[
    [bool], None
]  # collective, between micro-batches; True: from here on the policy changes
Keep = Callable[
    [MicroBatch, Tensor, Tensor], None
]  # what the policy's logprobs and entropy [C] are kept with
Suspects = list[
    tuple[MicroBatch, Tensor]
]  # which places [C] count and have a score that is not finite


class Watch(Protocol):
    """What looks on while an update is made; each call is collective."""

    def begin(
        self, mini_batch: list[MicroBatch], num_loss_tokens: int, num_loss_sequences: int
    ) -> None: ...
    def gradients(self) -> None: ...  # those of the whole mini-batch, not clipped yet
    def end(self, is_made: bool) -> None: ...


@torch.no_grad()
def attach_logprobs(
    policy: Policy,
    reference: Reference | None,
    batch: RolloutBatch,
    loss: LossConfig,
    num_optimizer_steps: int,
    check: Check | None = None,
    keep: Keep | None = None,
) -> None:
    """Collective. Fill `old_logprobs` and `ref_logprobs` of every micro-batch where the loss needs them. With one
    optimizer step a rollout the old ones are those of the update itself: no pass is made for them. What `check` raises
    on all ranks alike, asked before each micro-batch, leaves the policy as it was. `keep` gets the policy's scores."""
    needs_old = (
        num_optimizer_steps > 1 or loss.kl_in == "reward"
    ) and loss.old_logprobs != "engine"
    try:
        for micro_batch in batch.micro_batches:
            if check is not None and (needs_old or reference is not None):
                check(False)
            if loss.old_logprobs == "engine":
                micro_batch.old_logprobs = micro_batch.rollout_logprobs
            elif needs_old:
                micro_batch.old_logprobs, entropy = policy(micro_batch)
                if keep is not None:
                    keep(micro_batch, micro_batch.old_logprobs, entropy)
            if reference is not None:
                micro_batch.ref_logprobs, _ = reference(micro_batch)
    finally:
        # FSDP leaves the root gathered until a backward pass, and a step in which no token counts has none.
        cast(FSDPModule, policy).reshard()


class PolicyUpdater:
    """The policy with its optimizer and schedule; counts the updates that were skipped in a row."""

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        training: TrainingConfig,
        max_completion_tokens: int,
        head: Head | None = None,
    ) -> None:
        """`max_completion_tokens` is the denominator of `loss.aggregation: constant`; `head`: what learns with it."""
        self._policy, self._loss, self._max_grad_norm = policy, loss, optimizer.max_grad_norm
        self._num_epochs, self._max_completion_tokens = training.num_epochs, max_completion_tokens
        self.optimizer, self._schedule = build_optimizer(
            policy, optimizer, training.num_run_optimizer_steps
        )
        self._num_updates = self._skipped_in_a_row = 0
        self._head = head
        self._check: Check | None = None
        self._keep: Keep | None = None

    def state(self) -> dict[str, int]:
        """What a checkpoint must hold beside the optimizer's moments; the schedule follows from `num_updates`."""
        return {"num_updates": self._num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]
        go_on_at(self.optimizer, self._schedule, self._num_updates)

    def update(
        self,
        batch: RolloutBatch,
        watch: Watch | None = None,
        check: Check | None = None,
        keep: Keep | None = None,
    ) -> Reductions:
        """Collective. One optimizer step for each mini-batch of each epoch; returns what this rank adds to the metrics.

        Gradients are sums over ranks of token sums over one global denominator, so they do not depend on how rollouts
        were split over ranks and micro-batches. A mini-batch whose loss or gradient is not finite on any rank changes
        nothing on all ranks: "skipped_in_a_row" counts it, and "nonfinite_rollouts" has its rollouts with a logprob or
        entropy that is not finite. The gradient norm is that before clipping. What `check` raises on all ranks alike
        leaves the policy as it was. `keep` gets what is known of the policy that the engine held.
        """
        sums, self._keep = no_update(self._loss), keep
        num_updates = num_skipped = 0
        for epoch in range(self._num_epochs):
            for number, mini_batch in enumerate(batch.mini_batches):
                if batch.num_loss_tokens[number] == 0:  # on all ranks alike
                    continue  # momentum and weight decay would move the policy on no evidence at all
                # Old logprobs of the policy were taken before the first update. Those of the engine say nothing about
                # the policy: then only what comes before the first update is of the weights that the engine holds.
                is_synced = not num_updates or (epoch == 0 and self._loss.old_logprobs == "policy")
                denominators = batch.num_loss_tokens[number], batch.num_loss_sequences[number]
                self._check = None if num_updates or num_skipped else check
                of_step, is_made = self._step(mini_batch, *denominators, is_synced, watch)
                if watch is not None:
                    watch.end(is_made)
                num_updates, num_skipped = num_updates + is_made, num_skipped + (not is_made)
                sums = merge([sums, of_step])
        self._keep = None
        return sums | {
            "optim/updates": Max(float(num_updates)),
            "optim/skipped_updates": Max(float(num_skipped)),
        }

    def measure(
        self,
        batch: RolloutBatch,
        _: Watch | None = None,
        check: Check | None = None,
        keep: Keep | None = None,
    ) -> Reductions:
        """Collective. What `update` measures, over one epoch, of a policy that stays as it is."""
        pass

        self._keep = keep
        sums = measured(self._policy, self.backward, no_update(self._loss), batch, check)
        self._keep = None
        return sums

    def accumulate(
        self,
        mini_batch: list[MicroBatch],
        num_loss_tokens: int,
        num_loss_sequences: int,
        is_synced: bool,
    ) -> tuple[Reductions, Suspects]:
        """Collective. Adds the gradient of a mini-batch, whose metrics and suspects it returns."""
        sums: Reductions = {}
        suspects: Suspects = []
        for micro_batch in mini_batch:
            of_batch, bad_tokens = self.backward(
                micro_batch, num_loss_tokens, num_loss_sequences, is_synced
            )
            sums = merge([sums, of_batch])
            suspects.append(
                (micro_batch, bad_tokens)
            )  # to pick them out here would wait for the GPU
            if self._check is not None:
                self._check(micro_batch is mini_batch[-1])
        return sums, suspects

    def _step(
        self,
        mini_batch: list[MicroBatch],
        num_tokens: int,
        num_sequences: int,
        is_synced: bool,
        watch: Watch | None,
    ) -> tuple[Reductions, bool]:
        """One optimizer step: what it adds to the metrics, and whether it was made."""
        if watch is not None:
            watch.begin(mini_batch, num_tokens, num_sequences)
        sums, suspects = self.accumulate(mini_batch, num_tokens, num_sequences, is_synced)
        self._check = None
        if watch is not None:
            watch.gradients()
        sharded_norm = torch.nn.utils.clip_grad_norm_(
            self._policy.parameters(), self._max_grad_norm
        )
        assert isinstance(sharded_norm, DTensor)
        grad_norm = float(sharded_norm.full_tensor())
        head_norm = self._head.clip() if self._head is not None else 0.0
        is_bad = any_rank(
            not (math.isfinite(grad_norm + head_norm) and math.isfinite(sums["loss"].value))
        )
        if self._head is not None:
            self._head.end(not is_bad)
        if is_bad:
            self.optimizer.zero_grad(set_to_none=True)
            self._skipped_in_a_row += 1
            ids = [
                m.rollout_ids[i]
                for m, bad in suspects
                for i in m.sequence_index[bad].unique().tolist()
            ]
            return {
                "skipped_in_a_row": Max(self._skipped_in_a_row),
                "nonfinite_rollouts": Ids(ids),
            }, False
        self._num_updates, self._skipped_in_a_row = self._num_updates + 1, 0
        sums = {name: reduction.on_host() for name, reduction in sums.items()}
        sums |= {
            "optim/grad_norm": Max(grad_norm),
            "optim/lr": Max(float(self._schedule.get_last_lr()[0])),
        }
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return sums, True

    def backward(
        self,
        micro_batch: MicroBatch,
        num_loss_tokens: int,
        num_loss_sequences: int,
        is_synced: bool,
    ) -> tuple[Reductions, Tensor]:
        """Adds this micro-batch's gradient. What it adds to the metrics, and which places [C] count and have a score
        that is not finite. `is_synced`: the engine's logprobs are of the weights that it compares."""
        loss, mask, rollout_logprobs = (
            self._loss,
            micro_batch.loss_mask,
            micro_batch.rollout_logprobs,
        )
        lesson, head = (
            micro_batch.lesson,
            self._head if torch.is_grad_enabled() else None,
        )  # else it is measured alone
        terms = (
            *(lesson.terms if lesson is not None else ()),
            *((head.term,) if head is not None else ()),
        )
        logprobs, entropy, *apart = self._policy(micro_batch, *terms)
        values = apart.pop() if head is not None else None
        # Without an earlier pass the old policy is this one: the ratio is exactly 1, its gradient the logprob's.
        old_logprobs = (
            logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        )
        places, mode, cap = (
            (mask, micro_batch.sequence_index),
            loss.rollout_correction,
            loss.rollout_correction_cap,
        )
        denominators = num_loss_tokens, num_loss_sequences, self._max_completion_tokens
        weights = aggregation_weights(loss.aggregation, *places, *denominators)
        correction = rollout_correction(mode, cap, old_logprobs, rollout_logprobs, *places)
        scores = logprobs, entropy, old_logprobs, micro_batch.ref_logprobs
        inputs = LossInputs(*scores, micro_batch.advantages, *places, weights, correction)
        if lesson is None:
            share, sums = policy_loss(inputs, loss)
        else:
            from grpo_spmd.learn.losses import taught_loss

            share, sums = taught_loss(inputs, loss, lesson, *apart)
        if head is not None and values is not None:
            of_values = head.share(values, micro_batch, num_loss_tokens)
            share = share + of_values
            sums |= {"loss": Sum(share.detach()), "value": Sum(of_values.detach())}
        if torch.is_grad_enabled():  # else the policy is only measured
            share.backward()
        if is_synced:
            before = logprobs if loss.old_logprobs == "engine" else old_logprobs
            sums |= mismatch_sums(before, rollout_logprobs, mask, entropy)
            if self._keep is not None:
                self._keep(micro_batch, before, entropy)
        judged = *scores, rollout_logprobs, *apart, values, lesson and lesson.logprobs
        finite = torch.stack([score.isfinite() for score in judged if score is not None]).all(0)
        return sums, mask & ~finite


def no_update(loss: LossConfig) -> Reductions:
    """What a rank adds to the metrics where it made no update at all."""
    means = ["loss/clip_frac", "weight_sync/mismatch_kl", "weight_sync/mismatch_abs_mean"]
    if loss.rollout_correction != "none":
        means += ["rollout_correction/weight_mean", "rollout_correction/capped_frac"]
    return {
        **dict.fromkeys(
            ("loss", "policy", "kl", "entropy", "loss_tokens", *losses.TILT_SUMS), Sum()
        ),
        **dict.fromkeys(means, Mean()),
        **dict.fromkeys(("weight_sync/mismatch_abs_max", "optim/grad_norm", "optim/lr"), Max()),
        **dict.fromkeys(("optim/updates", "optim/skipped_updates", "skipped_in_a_row"), Max(0.0)),
        "mismatch_ratios": Histogram(),
        "nonfinite_rollouts": Ids(),
    }


# A pass over a step's rollouts that measures the policy and leaves it as it is, while a critic warms up.


@torch.no_grad()
def measured(
    policy: nn.Module,
    score: Callable[..., tuple[Reductions, Tensor]],
    sums: Reductions,
    batch: RolloutBatch,
    check: Callable[[bool], None] | None,
) -> Reductions:
    """Collective. `sums` with what `score` finds of each micro-batch; "measured": the mini-batches that count."""
    num_measured = 0
    try:
        for number, mini_batch in enumerate(batch.mini_batches):
            if not batch.num_loss_tokens[number]:
                continue
            num_measured += 1
            counts = batch.num_loss_tokens[number], batch.num_loss_sequences[number]
            for micro_batch in mini_batch:
                if check is not None:
                    check(False)
                sums = merge([sums, score(micro_batch, *counts, True)[0]])
    finally:
        cast(FSDPModule, policy).reshard()
    return {name: each.on_host() for name, each in sums.items()} | {
        "measured": Max(float(num_measured))
    }
