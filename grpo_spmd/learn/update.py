"""One policy update over a step's rollouts, and the logprobs that it needs beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import any_rank
from grpo_spmd.distributed.reductions import Ids, Max, Mean, Reductions, Sum, merge
from grpo_spmd.learn.losses import aggregation_weights, mismatch_sums, no_mismatch, policy_loss, rollout_correction
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, Scores
from grpo_spmd.records import MicroBatch, RolloutBatch


@torch.no_grad()
def attach_logprobs(
    policy: Policy, reference: Callable[[MicroBatch], Scores] | None, batch: RolloutBatch, config: Config
) -> None:
    """Collective. Fill `old_logprobs` and `ref_logprobs` of every micro-batch where the loss needs them.

    With one optimizer step a rollout the policy that trains is the one that sampled, so that old logprobs are the ones
    of the update itself and no pass is made for them.
    """
    needs_old = config.training.num_optimizer_steps > 1 or config.loss.kl_in == "reward"
    for micro_batch in _micro_batches(batch):
        if config.loss.old_logprobs == "engine":
            micro_batch.old_logprobs = micro_batch.rollout_logprobs
        elif needs_old:
            micro_batch.old_logprobs, _ = policy(micro_batch)
        if reference is not None:
            micro_batch.ref_logprobs, _ = reference(micro_batch)
    # FSDP leaves the root gathered until a backward pass, and a step in which no token counts has none before the next
    # weight sync.
    cast(FSDPModule, policy).reshard()


class PolicyUpdater:
    """The policy with its optimizer and schedule; counts the updates that were skipped in a row."""

    def __init__(self, policy: Policy, config: Config) -> None:
        self._policy, self._config = policy, config
        self._optimizer, self._schedule = build_optimizer(policy, config.optimizer)
        self._num_updates = self._skipped_in_a_row = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def state(self) -> dict[str, int]:
        """What a checkpoint must hold beside the optimizer's moments; the schedule follows from the number of
        updates."""
        return {"num_updates": self._num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self._num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]
        schedule = cast(torch.optim.lr_scheduler.LambdaLR, self._schedule)
        rates = [base * schedule.lr_lambdas[0](self._num_updates) for base in schedule.base_lrs]
        schedule.load_state_dict({**schedule.state_dict(), "last_epoch": self._num_updates, "_last_lr": rates})
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def update(self, batch: RolloutBatch) -> Reductions:
        """Collective. One optimizer step for each mini-batch of each epoch; returns what this rank adds to the metrics.

        Gradients are sums over ranks of token sums over one global denominator, so they do not depend on how rollouts
        were split over ranks and micro-batches. A mini-batch whose loss or gradient is not finite on any rank changes
        nothing on all ranks.

        Returns:
            Under metric keys what needs no more than merging: gradient norm (before clipping), learning rate, updates
            made and skipped, shares of tokens, what `mismatch_sums` says. "policy", "kl", "entropy": the loss's terms,
            summed over optimizer steps; "loss_tokens": tokens trained on; "skipped_in_a_row"; "nonfinite_rollouts":
            those of skipped updates with a logprob or entropy that was not finite.
        """
        sums = no_update(self._config.loss.rollout_correction != "none")
        num_updates = num_skipped = 0
        for epoch in range(self._config.training.num_epochs):
            for number, mini_batch in enumerate(batch.mini_batches):
                if batch.num_loss_tokens[number] == 0:
                    # on all ranks alike: momentum and weight decay would move the policy on no evidence at all
                    continue
                # Old logprobs of the policy were taken before the first update. Those of the engine say nothing about
                # the policy: then only what is computed before the first update was made comes from the weights that
                # the engine holds.
                unmoved = not num_updates or (epoch == 0 and self._config.loss.old_logprobs == "policy")
                more = self._step(mini_batch, batch.num_loss_tokens[number], batch.num_loss_sequences[number], unmoved)
                num_updates, num_skipped = num_updates + ("optim/lr" in more), num_skipped + ("optim/lr" not in more)
                sums = merge([sums, more])
        return sums | {"optim/updates": Max(float(num_updates)), "optim/skipped_updates": Max(float(num_skipped))}

    def _step(
        self, mini_batch: list[MicroBatch], num_loss_tokens: int, num_loss_sequences: int, unmoved: bool
    ) -> Reductions:
        own: Reductions = {}
        suspects: list[tuple[MicroBatch, Tensor]] = []
        for micro_batch in mini_batch:
            more, bad_tokens = self.backward(micro_batch, num_loss_tokens, num_loss_sequences, unmoved)
            own = merge([own, more])
            suspects.append((micro_batch, bad_tokens))  # to pick them out here would wait for the GPU
        sharded_norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), self._config.optimizer.max_grad_norm)
        assert isinstance(sharded_norm, DTensor)
        grad_norm = float(sharded_norm.full_tensor())
        if any_rank(not (math.isfinite(grad_norm) and math.isfinite(own["loss"].value))):
            self._optimizer.zero_grad(set_to_none=True)
            self._skipped_in_a_row += 1
            places = [(batch, batch.sequence_index[bad].unique().tolist()) for batch, bad in suspects]
            ids = [batch.rollout_ids[place] for batch, of_batch in places for place in of_batch]
            return {"skipped_in_a_row": Max(self._skipped_in_a_row), "nonfinite_rollouts": Ids(ids)}
        self._num_updates, self._skipped_in_a_row = self._num_updates + 1, 0
        lr = float(self._schedule.get_last_lr()[0])
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad(set_to_none=True)
        on_host = {name: reduction.on_host() for name, reduction in own.items()}
        return on_host | {"optim/grad_norm": Max(grad_norm), "optim/lr": Max(lr)}

    def backward(
        self, micro_batch: MicroBatch, num_loss_tokens: int, num_loss_sequences: int, unmoved: bool
    ) -> tuple[Reductions, Tensor]:
        """Adds this micro-batch's gradient. Returns its sums ("loss" among them), and the places [C] that count and have a score that is
        not finite."""
        config, mask = self._config.loss, micro_batch.loss_mask
        logprobs, entropy = self._policy(micro_batch)
        # Without an earlier pass the old policy is this one: the ratio is exactly 1 and its gradient is that of the
        # logprob.
        old_logprobs = logprobs.detach() if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        correction = None
        if config.rollout_correction != "none":
            correction = rollout_correction(
                config.rollout_correction,
                config.rollout_correction_cap,
                old_logprobs,
                micro_batch.rollout_logprobs,
                mask,
                micro_batch.sequence_index,
            )
        loss, sums = policy_loss(
            logprobs,
            entropy,
            old_logprobs,
            micro_batch.ref_logprobs,
            micro_batch.advantages,
            mask,
            aggregation_weights(
                config.aggregation,
                mask,
                micro_batch.sequence_index,
                num_loss_tokens=num_loss_tokens,
                num_loss_sequences=num_loss_sequences,
                max_completion_tokens=self._config.rollout.max_completion_tokens,
            ),
            micro_batch.sequence_index,
            correction,
            policy=config.policy,
            clip_ratio_low=config.clip_ratio_low,
            clip_ratio_high=config.clip_ratio_high,
            dual_clip=config.dual_clip,
            kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
        )
        loss.backward()
        num_tokens = mask.sum()
        sums |= {"loss": Sum(loss.detach()), "loss_tokens": Sum(num_tokens)}
        if correction is not None:
            weight = torch.where(mask, correction, 0.0).double().sum()
            capped = (mask & ((correction >= config.rollout_correction_cap) | (correction == 0))).sum()
            sums["rollout_correction/weight_mean"] = Mean(weight, num_tokens)
            sums["rollout_correction/capped_frac"] = Mean(capped, num_tokens)
        if unmoved:
            before = logprobs if config.old_logprobs == "engine" else old_logprobs
            sums |= mismatch_sums(before, micro_batch.rollout_logprobs, mask)
        scores = (logprobs, entropy, old_logprobs, micro_batch.rollout_logprobs, micro_batch.ref_logprobs)
        finite = torch.stack([score.isfinite() for score in scores if score is not None]).all(0)
        return sums, mask & ~finite


def no_update(has_correction: bool) -> Reductions:
    """What a rank adds to the metrics where it made no update at all."""
    means = ["loss/clip_frac"]
    if has_correction:
        means += ["rollout_correction/weight_mean", "rollout_correction/capped_frac"]
    return {
        **dict.fromkeys(("policy", "kl", "entropy", "loss_tokens"), Sum()),
        **dict.fromkeys(means, Mean()),
        **dict.fromkeys(("optim/grad_norm", "optim/lr"), Max()),
        **dict.fromkeys(("optim/updates", "optim/skipped_updates", "skipped_in_a_row"), Max(0.0)),
        **no_mismatch(),
        "nonfinite_rollouts": Ids([]),
    }


def _micro_batches(batch: RolloutBatch) -> list[MicroBatch]:
    return [micro_batch for mini_batch in batch.mini_batches for micro_batch in mini_batch]
