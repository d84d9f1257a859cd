"""Updates the policy on the rollouts of a step, and computes the logprobs that the update needs.

A mini-batch is the rollouts of one optimizer step; a rank goes over it in micro-batches, whose
gradients add up. "Synced" means that the policy has exactly the weights with which the engine
sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import LossConfig, OptimizerConfig, TrainingConfig
from grpo_spmd.distributed.collectives import any_rank, sum_in_place
from grpo_spmd.distributed.reductions import (
    Histogram,
    Ids,
    Max,
    Mean,
    Reductions,
    Sum,
    merge,
    without_counts,
)
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.losses import (
    TILT_SUMS,
    LossInputs,
    aggregation_weights,
    mismatch_sums,
    policy_loss,
    rollout_correction,
    taught_loss,
)
from grpo_spmd.model.optimizer import build_optimizer, resume_schedule
from grpo_spmd.model.policy import Policy, Scores
from grpo_spmd.model.sharding import reshard
from grpo_spmd.records import MicroBatch, RolloutBatch

# Collective. Returns the reference model's logprobs and entropies of a micro-batch.
Reference = Callable[[MicroBatch], Scores]
# Collective. Called between micro-batches, until the policy changes; it may end the step by raising
# on all ranks together. The argument is True at the last call, when the policy is about to change.
StopCheck = Callable[[bool], None]
# Receives a micro-batch with the policy's logprobs and entropy [C].
KeepScores = Callable[[MicroBatch, Tensor, Tensor], None]
# A micro-batch with a mask [C] of the tokens that count and have a score that is not finite.
NonfiniteTokens = tuple[MicroBatch, Tensor]


class MiniBatch(NamedTuple):
    """The micro-batches of one optimizer step on this rank."""

    micro_batches: list[MicroBatch]
    num_loss_tokens: int
    """The tokens that count in the loss, over all ranks."""
    num_loss_sequences: int
    """The rollouts with at least one such token, over all ranks."""


class UpdateObserver:
    """The base class of observers of a policy update, whose methods do nothing. Every method is
    collective: all ranks must call it."""

    def before_backward(self, mini_batch: MiniBatch) -> None:
        """Called before the first backward pass of a mini-batch."""

    def after_backward(self) -> None:
        """Called when the gradients of the whole mini-batch are complete, before clipping."""

    def after_step(self, is_made: bool) -> None:
        """Called after the optimizer step. `is_made` is False if the step was skipped."""


class ValueHead(Protocol):
    """A critic whose head reads the policy's last hidden states and learns in the policy's
    update."""

    def term(self, hidden: Tensor, head: Tensor) -> Tensor:
        """Collective. Returns the values [C] of hidden states [C, D]. The policy calls it within
        its forward pass; `head` is the weight of the policy's output embedding."""

    def loss_term(self, values: Tensor, micro_batch: MicroBatch, num_loss_tokens: int) -> Tensor:
        """Returns what the values [C] add to the loss. `num_loss_tokens` counts over all ranks."""

    def clip_gradient(self) -> float:
        """Collective. Clips the head's own gradient. Returns its norm before clipping."""

    def end_mini_batch(self, is_made: bool) -> None:
        """Makes the head's optimizer step, or drops its gradient, as the policy does."""


_NO_OBSERVER = UpdateObserver()


@torch.no_grad()
def attach_logprobs(
    policy: Policy,
    reference: Reference | None,
    batch: RolloutBatch,
    loss: LossConfig,
    num_optimizer_steps: int,
    stop_check: StopCheck | None = None,
    keep_scores: KeepScores | None = None,
) -> Reductions:
    """Collective. Sets `old_logprobs` and `ref_logprobs` of every micro-batch if the loss needs
    them, and `routes.loads` if the loss has a load-balance term.

    With one optimizer step per training step, the policy has not changed when the update computes
    its logprobs: these are the old logprobs too, and no pass is made for them here. If `stop_check`
    raises, the policy has not changed. `keep_scores` receives the policy's scores if they are
    computed here. Returns the metrics of `compare_routes`, or {} if the policy does not replay the
    engine's routes.
    """
    uses_engine = loss.old_logprobs == "engine"
    needs_old = (num_optimizer_steps > 1 or loss.kl_in == "reward") and not uses_engine
    route_metrics: Reductions = {}
    try:
        if policy.replays_routes:
            if loss.router_aux_coef:
                attach_loads(policy, batch.mini_batches, loss.router_aux_coef)
            route_metrics = compare_routes(policy, batch.routed_sample)
        for micro_batch in batch.micro_batches:
            if stop_check is not None and (needs_old or reference is not None):
                stop_check(False)
            if uses_engine:
                micro_batch.old_logprobs = micro_batch.rollout_logprobs
            elif needs_old:
                micro_batch.old_logprobs, entropy = policy(micro_batch)
                if keep_scores is not None and policy.counts_rows:
                    keep_scores(micro_batch, micro_batch.old_logprobs, entropy)
            if reference is not None:
                micro_batch.ref_logprobs, _ = reference(micro_batch)
    finally:
        # FSDP keeps the root module's parameters gathered until a backward pass, which a step in
        # which no token counts does not make.
        reshard(policy)
    return route_metrics


# The load-balance loss of a mixture of experts. In a layer of E experts it is E * sum_e f_e P_e:
# f_e is the share of tokens that took expert e, and P_e the router's mean probability of e (Fedus
# et al. 2021, "Switch Transformers"). With k experts per token the loss is k if the experts are in
# balance, as in transformers. transformers takes both f and P from one forward pass, so that the
# loss depends on how rollouts are split into micro-batches. Here f is taken from the engine's
# routes of the whole mini-batch on all ranks, which are known before the update, so that the loss
# is a sum over tokens like every other term.


def attach_loads(policy: Policy, mini_batches: Sequence[Sequence[MicroBatch]], coef: float) -> None:
    """Collective. Sets `routes.loads` of each row: the derivative of the loss term by a token's
    probability of each expert, [layers, E].

    The term is coef * (the mean, over layers with a router, of the load-balance loss of the row's
    mini-batch). `routes` are the experts that the engine's routers chose for each token. The term
    counts the tokens that the engine has read: all but the last one of a sequence."""
    num_layers = policy.model.config.num_hidden_layers
    num_experts = policy.num_experts
    device = next(policy.parameters()).device
    # For each mini-batch: the tokens of each layer's experts, and in the last column all tokens.
    size = num_layers * num_experts
    counts = torch.zeros(len(mini_batches), size + 1, dtype=torch.float64, device=device)
    for row_counts, mini_batch in zip(counts, mini_batches, strict=True):
        for routes in filter(None, (row.routes for row in mini_batch)):
            first = num_experts * torch.arange(num_layers, device=device)[:, None]
            experts = routes.experts.long() + first
            weights = routes.is_recorded.double()
            row_counts.index_add_(
                0, experts.flatten(), weights[:, None, None].expand_as(experts).flatten()
            )
            row_counts[size] += weights.sum()
    sum_in_place(counts)
    scale = coef * num_experts / max(policy.num_routers, 1)
    for row_counts, mini_batch in zip(counts, mini_batches, strict=True):
        num_tokens = row_counts[size].clamp(min=1)
        # The derivative of f_e P_e by the probability of one token is f_e / num_tokens.
        loads = scale * row_counts[:size].view(num_layers, num_experts) / num_tokens**2
        for routes in filter(None, (row.routes for row in mini_batch)):
            routes.loads = loads.float()


@torch.no_grad()
def compare_routes(policy: Policy, sample: MicroBatch | None) -> Reductions:
    """Collective. Runs the policy on a few rollouts, lets its routers choose the experts by
    themselves, and returns metrics of how it then differs from the engine.

    They are the share of expert sets (one for each token and layer) that are not the engine's, and
    the mean and largest |difference| of logprobs, in nats. `sample` has the rollouts. None: this
    rank has no rollouts with routes, and only takes part in the forward pass."""
    if sample is None:
        sample = pack_rollouts([], next(policy.parameters()).device)
    routes = sample.routes
    if routes is not None:
        routes.is_replayed = False
    logprobs, _ = policy(sample)
    # A rank without rollouts only takes part in the forward pass.
    mask = sample.loss_mask if routes is not None else torch.zeros_like(sample.loss_mask)
    difference = torch.where(mask, logprobs - sample.rollout_logprobs, 0.0).double().abs()
    num_different = sum(routes.differences.values(), torch.zeros(())) if routes is not None else 0.0
    num_sets = 0.0 if routes is None else routes.is_recorded.sum() * len(routes.differences)
    metrics: Reductions = {
        "engine/router_disagreement_frac": Mean(num_different, num_sets),
        "engine/own_routes_mismatch_abs_mean": Mean(difference.sum(), mask.sum()),
        "engine/own_routes_mismatch_abs_max": Max(difference.max()),
    }
    return {name: reduction.on_host() for name, reduction in metrics.items()}


def counted_mini_batches(batch: RolloutBatch) -> list[MiniBatch]:
    """Returns the mini-batches in which at least one token counts in the loss, on any rank. All
    ranks return equally many.

    A mini-batch without such a token is left out: it would have no gradient, but momentum and
    weight decay would still change the model."""
    columns = zip(batch.mini_batches, batch.num_loss_tokens, batch.num_loss_sequences, strict=True)
    mini_batches = [MiniBatch(*column) for column in columns]
    return [mini_batch for mini_batch in mini_batches if mini_batch.num_loss_tokens]


class Learner:
    """A model that is trained (policy or critic), with its optimizer, learning rate schedule and
    the counts of its optimizer steps."""

    def __init__(
        self, model: nn.Module, optimizer: OptimizerConfig, training: TrainingConfig
    ) -> None:
        """Builds the optimizer of the model's trainable parameters, and its schedule."""
        self._trained_model = model
        self._max_grad_norm = optimizer.max_grad_norm
        self._training = training
        self.optimizer, self._schedule = build_optimizer(
            model, optimizer, training.num_run_optimizer_steps
        )
        self._num_updates = 0
        self._skipped_in_a_row = 0

    def state(self) -> dict[str, int]:
        """Returns what a checkpoint stores besides parameters and moments. The schedule follows
        from `num_updates`."""
        return {"num_updates": self._num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state()` returned in an earlier process."""
        self._num_updates = state["num_updates"]
        self._skipped_in_a_row = state["skipped_in_a_row"]
        resume_schedule(self.optimizer, self._schedule, self._num_updates)

    def clip_gradient(self) -> float:
        """Collective. Clips the gradient to optimizer.max_grad_norm. Returns its norm before
        clipping."""
        norm = torch.nn.utils.clip_grad_norm_(self._trained_model.parameters(), self._max_grad_norm)
        # The norm is sharded as the gradients are.
        return float(cast(DTensor, norm).full_tensor())

    def finish_step(self, is_made: bool) -> float:
        """Makes the optimizer step, or only drops the gradient if `is_made` is False. Returns the
        learning rate of the step."""
        learning_rate = float(self._schedule.get_last_lr()[0])
        # The schedule counts updates that were made, not mini-batches.
        if is_made:
            self._num_updates += 1
            self._skipped_in_a_row = 0
            self.optimizer.step()
            self._schedule.step()
        else:
            self._skipped_in_a_row += 1
        self.optimizer.zero_grad(set_to_none=True)
        return learning_rate


class PolicyUpdater(Learner):
    """The policy as a Learner: its updates on the rollouts of a step, and their metrics."""

    def __init__(
        self,
        policy: Policy,
        optimizer: OptimizerConfig,
        loss: LossConfig,
        training: TrainingConfig,
        max_completion_tokens: int,
        value_head: ValueHead | None = None,
    ) -> None:
        """`max_completion_tokens` is the denominator of `loss.aggregation: constant`."""
        super().__init__(policy, optimizer, training)
        self._policy = policy
        self._loss = loss
        self._max_completion_tokens = max_completion_tokens
        self._value_head = value_head

    def update(
        self,
        batch: RolloutBatch,
        observer: UpdateObserver = _NO_OBSERVER,
        stop_check: StopCheck | None = None,
        keep_scores: KeepScores | None = None,
    ) -> Reductions:
        """Collective. Makes one optimizer step for each mini-batch of each epoch. Returns this
        rank's metrics.

        Gradients are sums over ranks of token sums divided by one global denominator, so they do
        not depend on how the rollouts were split over ranks and micro-batches. If the loss or
        gradient of a mini-batch is not finite on any rank, all ranks skip its optimizer step: the
        metric "skipped_in_a_row" counts it, and the metric "nonfinite_rollouts" lists the rollouts
        with a logprob or entropy that is not finite. The gradient norm is the one before clipping.

        If `stop_check` raises, the policy has not changed. `keep_scores` receives the scores that
        were computed with the weights that the engine sampled with.
        """
        totals = no_update(self._loss) | _count_forwarded(batch)
        num_updates = 0
        num_skipped = 0
        for epoch in range(self._training.num_epochs):
            for mini_batch in counted_mini_batches(batch):
                # True while the logprobs that are compared with the engine's are those of the
                # weights that the engine holds. With old_logprobs "policy" the old logprobs are
                # compared: all were computed before the first update, so this is true throughout
                # the first epoch. With "engine" the logprobs of the update's own passes are
                # compared: this is true only until the first update.
                is_synced = not num_updates or (epoch == 0 and self._loss.old_logprobs == "policy")
                is_first = not num_updates and not num_skipped
                metrics, is_made = self._step(
                    mini_batch,
                    is_synced=is_synced,
                    observer=observer,
                    stop_check=stop_check if is_first else None,
                    keep_scores=keep_scores,
                )
                observer.after_step(is_made)
                num_updates += is_made
                num_skipped += not is_made
                totals = merge([totals, metrics])
        if not self._policy.counts_rows:
            totals = without_counts(totals)
        return totals | {
            "optim/updates": Max(float(num_updates)),
            "optim/skipped_updates": Max(float(num_skipped)),
        }

    @torch.no_grad()
    def measure(
        self,
        batch: RolloutBatch,
        _: UpdateObserver = _NO_OBSERVER,
        stop_check: StopCheck | None = None,
        keep_scores: KeepScores | None = None,
    ) -> Reductions:
        """Collective. Returns the metrics of `update` over one epoch, without changing the policy.

        It takes the place of `update` while a critic warms up, when the policy is frozen. The
        metric "measured" is the number of mini-batches with a token that counts."""
        totals = no_update(self._loss) | _count_forwarded(batch)
        num_measured = 0

        def check(_: bool) -> None:
            """Calls `stop_check`, if there is one, always with False."""
            # Unlike in an update, the policy does not change after the last micro-batch.
            if stop_check is not None:
                stop_check(False)

        try:
            for mini_batch in counted_mini_batches(batch):
                num_measured += 1
                metrics, _suspects = self.accumulate(
                    mini_batch, is_synced=True, stop_check=check, keep_scores=keep_scores
                )
                totals = merge([totals, *metrics])
        finally:
            # No backward pass has freed the gathered parameters of the root module.
            reshard(self._policy)
        on_host = {name: reduction.on_host() for name, reduction in totals.items()}
        if not self._policy.counts_rows:
            on_host = without_counts(on_host)
        return on_host | {"measured": Max(float(num_measured))}

    def accumulate(
        self,
        mini_batch: MiniBatch,
        is_synced: bool,
        stop_check: StopCheck | None = None,
        keep_scores: KeepScores | None = None,
    ) -> tuple[list[Reductions], list[NonfiniteTokens]]:
        """Collective. Adds the gradient of a mini-batch to the parameters' gradients.

        Returns two lists with an entry for each micro-batch: its metrics, and its tokens with a
        logprob or other score that is not finite."""
        totals: list[Reductions] = []
        suspects: list[NonfiniteTokens] = []
        micro_batches, num_loss_tokens, num_loss_sequences = mini_batch
        for micro_batch in micro_batches:
            metrics, nonfinite = self.backward(
                micro_batch, num_loss_tokens, num_loss_sequences, is_synced, keep_scores
            )
            totals.append(metrics)
            # The rollouts of these tokens are looked up later: doing it here would wait for the
            # GPU.
            suspects.append((micro_batch, nonfinite))
            if stop_check is not None:
                stop_check(micro_batch is micro_batches[-1])
        return totals, suspects

    def _step(
        self,
        mini_batch: MiniBatch,
        *,
        is_synced: bool,
        observer: UpdateObserver,
        stop_check: StopCheck | None,
        keep_scores: KeepScores | None,
    ) -> tuple[Reductions, bool]:
        """Collective. Makes one optimizer step on a mini-batch. Returns (its metrics, True if the
        step was made and False if it was skipped)."""
        observer.before_backward(mini_batch)
        parts, suspects = self.accumulate(mini_batch, is_synced, stop_check, keep_scores)
        observer.after_backward()
        metrics = merge(parts)
        grad_norm = self.clip_gradient()
        head_norm = self._value_head.clip_gradient() if self._value_head is not None else 0.0
        # All ranks must agree, or their parameters would differ from here on.
        is_finite = math.isfinite(grad_norm + head_norm) and math.isfinite(metrics["loss"].value)
        is_skipped = any_rank(not is_finite)
        if self._value_head is not None:
            self._value_head.end_mini_batch(not is_skipped)
        learning_rate = self.finish_step(not is_skipped)
        if is_skipped:
            skipped: Reductions = {
                "skipped_in_a_row": Max(self._skipped_in_a_row),
                "nonfinite_rollouts": Ids(_rollouts_of(suspects)),
            }
            return skipped, False
        metrics = {name: reduction.on_host() for name, reduction in metrics.items()}
        metrics["optim/grad_norm"] = Max(grad_norm)
        metrics["optim/lr"] = Max(learning_rate)
        return metrics, True

    def backward(
        self,
        micro_batch: MicroBatch,
        num_loss_tokens: int,
        num_loss_sequences: int,
        is_synced: bool,
        keep_scores: KeepScores | None = None,
    ) -> tuple[Reductions, Tensor]:
        """Collective. Adds the gradient of one micro-batch to the parameters' gradients; under
        torch.no_grad it only computes the metrics.

        Returns the metrics, and a mask [C] of the tokens that count and have a score that is not
        finite. If `is_synced` is True, the logprobs of policy and engine were computed with the
        same weights, and the metrics compare them.
        """
        loss = self._loss
        mask = micro_batch.loss_mask
        rollout_logprobs = micro_batch.rollout_logprobs
        signal = micro_batch.teacher_signal
        # Under torch.no_grad the critic is left out.
        value_head = self._value_head if torch.is_grad_enabled() else None
        terms = []
        if signal is not None and signal.divergence is not None:
            terms.append(signal.divergence)
        if value_head is not None:
            terms.append(value_head.term)
        logprobs, entropy, *extra = self._policy(micro_batch, *terms)
        values = extra.pop() if value_head is not None else None
        # Without an earlier pass the current policy is the old one: the ratio is exactly 1, and its
        # gradient is that of the logprob.
        old_logprobs = micro_batch.old_logprobs
        if old_logprobs is None:
            old_logprobs = logprobs.detach()
        inputs = LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=old_logprobs,
            ref_logprobs=micro_batch.ref_logprobs,
            advantages=micro_batch.advantages,
            loss_mask=mask,
            sequence_index=micro_batch.sequence_index,
            weights=aggregation_weights(
                loss.aggregation,
                mask,
                micro_batch.sequence_index,
                num_loss_tokens=num_loss_tokens,
                num_loss_sequences=num_loss_sequences,
                max_completion_tokens=self._max_completion_tokens,
            ),
            correction=rollout_correction(
                loss.rollout_correction,
                loss.rollout_correction_cap,
                old_logprobs,
                rollout_logprobs=rollout_logprobs,
                mask=mask,
                index=micro_batch.sequence_index,
            ),
        )
        if signal is None:
            total, metrics = policy_loss(inputs, loss)
        else:
            total, metrics = taught_loss(inputs, loss, signal, *extra)
        if value_head is not None and values is not None:
            value_term = value_head.loss_term(values, micro_batch, num_loss_tokens)
            total = total + value_term
            metrics |= {"loss": Sum(total.detach()), "value": Sum(value_term.detach())}
        # The routers add the gradient of their load-balance loss themselves (model/routing.py).
        if micro_batch.routes is not None and micro_batch.routes.balance_losses:
            balance = torch.stack([*micro_batch.routes.balance_losses.values()]).sum()
            metrics |= {"loss": Sum(total.detach() + balance), "router_aux": Sum(balance)}
        if torch.is_grad_enabled():
            total.backward()
        if is_synced:
            synced_logprobs = logprobs if loss.old_logprobs == "engine" else old_logprobs
            metrics |= mismatch_sums(synced_logprobs, rollout_logprobs, mask, entropy)
            if keep_scores is not None and self._policy.counts_rows:
                keep_scores(micro_batch, synced_logprobs, entropy)
        scores = [logprobs, entropy, old_logprobs, micro_batch.ref_logprobs, rollout_logprobs]
        scores += [*extra, values, None if signal is None else signal.logprobs]
        finite = torch.stack([score.isfinite() for score in scores if score is not None]).all(0)
        return metrics, mask & ~finite


def _rollouts_of(suspects: list[NonfiniteTokens]) -> list[int]:
    """Returns the ids of the rollouts that the marked tokens belong to. Waits for the device."""
    return [
        micro_batch.rollout_ids[index]
        for micro_batch, nonfinite in suspects
        for index in micro_batch.sequence_index[nonfinite].unique().tolist()
    ]


def _count_forwarded(batch: RolloutBatch) -> Reductions:
    """Returns, as a metric, the fraction of the rollouts' tokens that a forward pass reads: less
    than 1 if rows read shared prefixes only once."""
    # A row without rollouts has a placeholder.
    rows = [row for row in batch.micro_batches if row.rollout_ids]
    num_read = sum(len(row.input_ids if row.tree is None else row.tree.tokens) for row in rows)
    num_tokens = sum(sum(row.sequence_lengths) for row in rows)
    return {"batching/forwarded_tokens_frac": Mean(num_read, num_tokens)}


def no_update(loss: LossConfig) -> Reductions:
    """Returns all metrics of an update with empty values, for a rank that makes no update at all.
    The metrics of updates are merged into these."""
    sums = ["loss", "policy", "kl", "entropy", "loss_tokens", *TILT_SUMS]
    means = ["loss/clip_frac", "weight_sync/mismatch_kl", "weight_sync/mismatch_abs_mean"]
    if loss.rollout_correction != "none":
        means += ["rollout_correction/weight_mean", "rollout_correction/capped_frac"]
    largest = ["weight_sync/mismatch_abs_max", "optim/grad_norm", "optim/lr"]
    counts = ["optim/updates", "optim/skipped_updates", "skipped_in_a_row"]
    return {
        **dict.fromkeys(sums, Sum()),
        **dict.fromkeys(means, Mean()),
        **dict.fromkeys(largest, Max()),
        **dict.fromkeys(counts, Max(0.0)),
        "mismatch_ratios": Histogram(),
        "nonfinite_rollouts": Ids(),
    }
