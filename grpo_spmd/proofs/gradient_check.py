"""Compares loss and gradient of a few synthetic micro-batches with a plain recomputation.

The rows are those of synthetic.py. The plain side is transformers' own forward pass with the
attention of plain.py, one row per sequence, full logits, log_softmax in float32, and the loss of
plain.py. The trainer's side is the very code of the update (PolicyUpdater.accumulate). The plain
gradient is subtracted from the trainer's, so that `.grad` holds the difference. At the end all
gradients are dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import TeacherConfig
from grpo_spmd.distributed.collectives import any_rank, on_rank0
from grpo_spmd.distributed.reductions import Reductions, merge
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.contexts import rollout_contexts
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import MiniBatch, PolicyUpdater, Reference, attach_loads
from grpo_spmd.model.families.build import decoder_layers
from grpo_spmd.model.lora import adapters_at_zero
from grpo_spmd.model.policy import DTYPES, Policy
from grpo_spmd.model.sharding import first_row, is_first_replica, reshard
from grpo_spmd.proofs.plain import (
    LossTerm,
    plain_terms,
    use_float32,
    use_plain_attention,
    use_plain_routes,
)
from grpo_spmd.proofs.synthetic import (
    SCORE_BOUNDS,
    CheckResult,
    Numbers,
    RandomTeacher,
    SyntheticValues,
    TrainerPass,
    UpdateCheckSettings,
    padded_contexts,
    plain_routes,
    trial_rollouts,
)
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch, RolloutGroup

_log = logging.getLogger("grpo_spmd")
# The number of random products that _Sketch compares.
_NUM_SKETCHES = 8
# The number of errors that a message names; the others are only counted.
_MAX_NAMED = 4


class _Bounds(NamedTuple):
    """The bounds of differences other than those of scores, for one number format."""

    term: float
    """For a term of the loss, relative to the sum of the absolute values of its summands."""
    gradient: float
    """For the gradient of a tensor, relative to the gradient's norm."""
    reduction: float
    """For the sum of a gradient over ranks, relative to the gradient's norm."""


# Rounding gave, on models of 2 and 24 layers and in the order of the fields: 2e-8, 1.4e-6, 2e-7 in
# float32; 2e-8, 0.026, 0.002 in bfloat16.
_BOUNDS = {
    "float32": _Bounds(1e-4, 1e-3, 1e-4),
    "bfloat16": _Bounds(1e-4, 0.2, 0.05),
}


# A difference may be this many times the noise of bfloat16, which `_measure_noise` measures. Two
# passes that round independently differ by 1.4 times the noise of one; at most 1.8 was measured, on
# models of 12 to 64 layers with key biases and outliers like those of trained models.
_NOISE_FACTOR = 2.0
# The largest bounds that noise may lead to: however much a model rounds, a fault must show. A wrong
# sign gives a gradient a relative difference of 2.
_MAX_GRADIENT_BOUND = 0.7
MAX_SCORE_BOUND = 0.3
# If the gradient of only one tensor is beyond its bound, the run stops only beyond this many times
# the bound, or beyond _MAX_GRADIENT_BOUND: a missing gradient gives a relative difference of 1.
_LONE_EXCESS = 2.0
# The key of the whole gradient in dicts by tensor name.
WHOLE = "the whole model"


def widen_by_noise(bound: float, noise: float, largest: float = math.inf) -> float:
    """Returns the larger one of `bound` and what rounding explains, the latter at most `largest`.

    `noise` is the difference that rounding alone was measured to give."""
    return max(bound, min(_NOISE_FACTOR * noise, largest))


def bound_by_noise(
    bound: float,
    difference: float,
    measure_noise: Callable[[], float],
    largest: float = MAX_SCORE_BOUND,
) -> float:
    """Collective. Returns the bound of this rank's `difference`: `bound`, or, if any rank's
    difference is beyond that, `bound` widened by this rank's noise (see widen_by_noise).

    `measure_noise` is collective: it compares plain passes with and without float32 arithmetic. If
    one rank needs it, every rank calls it. The noise of a float32 model is 0."""
    # Written so that NaN, which compares as False, is beyond.
    if not any_rank(not difference <= bound):
        return bound
    return widen_by_noise(bound, measure_noise(), largest)


def mean_difference(scores: Tensor, others: Tensor) -> float:
    """Returns the mean |difference| of two tensors of scores [n], or 0 if n is 0."""
    return float((scores - others).abs().mean()) if len(scores) else 0.0


class UpdateCheckError(RuntimeError):
    """Raised if the trainer's numbers differ from those of a plain recomputation."""

    # The report of a failure prints the whole message.
    says_all = True


def raise_if_wrong(results: Sequence[CheckResult], claim: str) -> dict[str, float]:
    """Collective. Raises Rank0Error on every rank if any rank has an error; else returns, for each
    metric, the largest value over all ranks. The error's message is `claim` and the first errors,
    each with the ranks that found it."""
    errors = [text for result in results for text in result.errors]
    metrics = [pair for result in results for pair in result.metrics.items()]

    def combine(by_rank: list[Any]) -> dict[str, float]:
        """Returns the largest value of each metric. Runs on rank 0."""
        # Ranks often find the same error: each text is written once.
        ranks_by_error: dict[str, list[str]] = {}
        largest: dict[str, float] = {}
        for rank, (errors_of_rank, metrics_of_rank) in enumerate(by_rank):
            for error in dict.fromkeys(errors_of_rank):
                ranks_by_error.setdefault(error, []).append(str(rank))
            for key, value in metrics_of_rank:
                largest[key] = max(value, largest.get(key, 0.0))
        texts = [f"rank {', '.join(ranks)}: {error}" for error, ranks in ranks_by_error.items()]
        if len(texts) > _MAX_NAMED:
            texts[_MAX_NAMED:] = [f"and {len(texts) - _MAX_NAMED} more"]
        if texts:
            raise UpdateCheckError(f"{claim}: {'; '.join(texts)}")
        return largest

    return on_rank0(combine, [errors, metrics])


def sum_over_ranks(numbers: Iterable[float]) -> list[Any]:
    """Collective. Returns the sum of each number over all ranks, on every rank."""
    return on_rank0(
        lambda by_rank: [sum(column) for column in zip(*by_rank, strict=True)], list(numbers)
    )


def join_ranks(values: list[Any]) -> list[Any]:
    """Collective. Returns the values of all ranks, rank after rank, on every rank."""
    return on_rank0(lambda by_rank: list(chain.from_iterable(by_rank)), values)


def relative_difference(reduced: Numbers, plain: Numbers) -> float:
    """Collective. Returns the norm of (reduced - plain) divided by the norm of plain, after both
    arrays [n] were summed over ranks."""
    sums = np.array(sum_over_ranks([*reduced.tolist(), *plain.tolist()])).reshape(2, -1)
    return float(np.linalg.norm(sums[0] - sums[1]) / (np.linalg.norm(sums[1]) + 1e-30))


def check_no_gradient(result: CheckResult, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Adds an error to `result` if one of these (name, parameter) pairs holds a gradient already.

    A gradient that an earlier update left would be added to the next one."""
    stray = next((name for name, parameter in parameters if parameter.grad is not None), None)
    if stray is not None:
        result.errors.append(f"a gradient was left from the last update: that of {stray}")


def gradient_squares(model: nn.Module) -> dict[str, float]:
    """Returns, for each trained parameter by name, the sum of squares of this rank's part of its
    gradient.

    The sum is 0 for a parameter without gradient. It is also 0 on a rank that holds a replica
    (HSDP) of a part that another rank counts, so that sums over ranks count each part once."""
    squares = {name: 0.0 for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and is_first_replica(cast(DTensor, parameter)):
            local = cast(DTensor, parameter.grad)._local_tensor
            squares[name] = float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2
    return squares


def count_loss(mini_batch: Sequence[MicroBatch]) -> tuple[int, int]:
    """Returns (number of tokens, number of rollouts) of this rank's micro-batches that count in the
    loss."""
    return (
        sum(int(row.loss_mask.sum()) for row in mini_batch),
        sum(len(row.sequence_index[row.loss_mask].unique()) for row in mini_batch),
    )


# Collective. Checks what one signal (a teacher or the critic) wrote into the batch of a step. The
# last argument has the rewards of the rollouts that this rank sampled, by rollout id.
SignalCheck = Callable[[SampledStep, RolloutBatch, Decision, dict[int, float]], CheckResult]


@dataclass(frozen=True)
class SignalProofs:
    """What teachers and critic contribute to the update check."""

    checks: Sequence[SignalCheck] = ()
    """Checks of what a signal wrote into the micro-batches."""
    teacher: TeacherConfig | None = None
    """None: the run has no teacher."""
    values: SyntheticValues | None = None
    """Makes value targets for synthetic rows. None: no critic learns in the policy's update."""


@dataclass(frozen=True)
class _Trial:
    """The synthetic micro-batches ("rows") of one check, after the trainer's pass over them.

    If ranks share a row (`model.sequence_parallel_size`), only the first of them has its rollouts
    here, so that they count once."""

    rollouts: Sequence[Rollout]
    columns: dict[str, Tensor]
    """The trainer's scores, as TrainerPass.columns returns them."""
    teacher: RandomTeacher | None
    """None: the run has no teacher."""
    num_tokens: int
    """The tokens that count in the loss, over all ranks; `num_sequences` counts their rollouts."""
    num_sequences: int
    device: torch.device


class GradientCheck:
    """Compares the trainer's loss and gradient on synthetic rows with the plain ones.

    `run` also sets the bounds of scores with which UpdateCheck's later checks compare."""

    def __init__(
        self,
        policy: Policy,
        updater: PolicyUpdater,
        settings: UpdateCheckSettings,
        signals: SignalProofs,
    ) -> None:
        """`updater` makes the pass that is checked; `signals` describes the terms of the loss that
        teachers and critic add."""
        self._policy = policy
        self._updater = updater
        self._settings = settings
        self._loss = settings.loss
        self._teacher = signals.teacher
        self._values = signals.values
        bounds = _BOUNDS[settings.dtype]
        self._bounds = bounds._replace(gradient=bounds.gradient * settings.bound_factor)
        self.score_bound = settings.score_bound
        # The bound for a score that one function computes twice for one row, where only the order
        # of a reduction may differ: neither noise nor proofs.bound_factor widens it.
        self.repeated_score_bound = 0.0
        self._gradient_bound = self._bounds.gradient
        self._is_rounded = settings.dtype != "float32"

    def run(
        self,
        groups: Sequence[RolloutGroup],
        device: torch.device,
        *,
        accumulates: bool,
        shares_prefixes: bool = False,
    ) -> CheckResult:
        """Collective. Compares the trainer's loss and gradient with plain ones, on short pieces of
        this rank's rollouts, and leaves no gradient behind.

        A rank without rollouts takes part with tokens that do not count. Gradients are summed over
        ranks before they are compared, so that every rank gets the same error. `accumulates`: the
        gradient is accumulated over two micro-batches instead of one, which costs one more pass.
        The rows share prefixes if those of the step do (`shares_prefixes`)."""
        with self._values.random_head() if self._values is not None else nullcontext():
            return self._run(groups, device, accumulates, shares_prefixes=shares_prefixes)

    def _run(
        self,
        groups: Sequence[RolloutGroup],
        device: torch.device,
        accumulates: bool,
        *,
        shares_prefixes: bool,
    ) -> CheckResult:
        """Collective. Does the work of `run`, while a critic's head on the policy gives random
        values: a new head is all zeros, which would hide faults."""
        result = CheckResult()
        policy = self._policy
        values = self._values
        rollouts = trial_rollouts(groups, policy, shares_prefixes)
        rows = [rollouts[:3], rollouts[3:]] if accumulates else [rollouts]
        values_parameters = [] if values is None else values.named_parameters()
        check_no_gradient(result, chain(policy.named_parameters(), values_parameters))
        batches = [
            pack_rollouts(row, device, policy.sequence_ranks, shares_prefixes=shares_prefixes)
            for row in rows
        ]
        if self._has_balance:
            attach_loads(policy, [batches], self._loss.router_aux_coef)
        counted = batches if policy.counts_rows else []
        counts = [max(n, 1) for n in sum_over_ranks(count_loss(counted))]
        teacher = None
        if self._teacher is not None:
            teacher = RandomTeacher(self._teacher, policy, self._settings)
            for batch in batches:
                teacher.teach(batch)
        # 1. The trainer's pass. Its gradient stays in the parameters.
        trainer = TrainerPass(rollouts, self._loss, values)
        handle = policy.register_forward_hook(trainer.hook)
        parts, _ = self._updater.accumulate(MiniBatch(batches, *counts), is_synced=True)
        handle.remove()
        trainer_squares = gradient_squares(policy)
        # One rank of a sequence group makes the plain pass over the rows that all of them trained
        # on; the others go on as ranks without rollouts.
        is_counted = policy.counts_rows
        trial = _Trial(
            rollouts if is_counted else [],
            trainer.columns() if is_counted else {},
            teacher,
            num_tokens=counts[0],
            num_sequences=counts[1],
            device=device,
        )
        # 2. The plain pass, whose gradient is subtracted from that.
        sketch = _Sketch(policy)
        sketch_of_trainer = sketch.of_gradient()
        with sketch.watching():
            plain, terms = self._plain_pass(trial, -1.0, result)
        self._widen_bounds(plain.mean_max_logit)
        if trial.rollouts:
            self._compare_terms(result, merge(parts), terms)
        # 3. The comparisons, which are collective: every rank makes all of them.
        relative = _relative_norms(trainer_squares, gradient_squares(policy))
        # The plain gradient as FSDP has summed it over ranks is compared with the sum of what each
        # rank computed from its own tokens.
        plain_reduced = sketch_of_trainer - sketch.of_gradient()
        result.check_difference(
            "the sum over ranks of a gradient, relative to its norm,",
            "reduction",
            relative_difference(plain_reduced, sketch.of_tokens),
            self._bounds.reduction,
        )
        # 4. If something is beyond its bound, measure how much this model rounds in this number
        # format, and widen the bounds by that.
        differences = {
            name: float((trial.columns[name] - tensor).detach().abs().mean())
            for name, tensor in _plain_columns(trial, plain).items()
        }
        noise = dict.fromkeys(relative, 0.0)
        if self._is_rounded and any_rank(self._is_beyond_bounds(differences, relative)):
            score_noise, noise = self._measure_noise(trial, trainer_squares)
            self.score_bound = widen_by_noise(self.score_bound, score_noise, MAX_SCORE_BOUND)
        for name, difference in differences.items():
            subject = f"{_SUBJECTS[name]}, in nats on average,"
            result.check_difference(subject, "logprobs", difference, self.score_bound)
        self._judge_gradients(result, relative, noise)
        self._updater.optimizer.zero_grad(set_to_none=True)
        if values is not None:
            # The head's gradient has the whole gradient's bound: both round with the same states.
            values.check_head_gradient(result, self._bounds_of_gradients(noise)[WHOLE])
        # If the policy's logprobs are not finite, nothing is reported here: the update reports them
        # and skips the step.
        is_nonfinite = not bool(plain.logprobs.isfinite().all())
        return CheckResult() if any_rank(is_nonfinite) else result

    @property
    def _has_balance(self) -> bool:
        """True if the loss has a load-balance term for the experts."""
        return self._policy.replays_routes and self._loss.router_aux_coef > 0

    def _plain_pass(
        self,
        trial: _Trial,
        sign: float,
        result: CheckResult | None = None,
        *,
        in_float32: bool = False,
    ) -> tuple[_PlainScores, dict[str, LossTerm]]:
        """Collective. Adds the gradient of the plain loss, times `sign`, to the parameters'
        gradients. Returns the plain scores and the terms of the loss.

        With `result` the values of a critic's head are compared too, and their loss is one of the
        terms. Without it (None), when noise is measured, the critic is left out."""
        policy = self._policy
        routes = plain_routes(trial.rollouts, trial.device)
        # The backward pass is within plain attention too, since activation checkpointing may run
        # layers again. The plain routers compute in float32 too, if asked for.
        with (
            use_plain_attention(policy.model),
            use_plain_routes(policy.model, routes) as router_logits,
            use_float32(policy) if in_float32 else nullcontext(),
        ):
            plain = _plain_scores(
                policy, trial.rollouts, self._settings.rollout.temperature, trial.device
            )
            terms = self._plain_terms(trial, plain)
            loss = terms["loss"].value + plain.zero
            if self._has_balance:
                terms["router_aux"] = self._plain_balance(trial.rollouts, router_logits)
                loss = loss + terms["router_aux"].value
            if self._values is not None and result is not None:
                terms["value"] = self._values.plain_term(
                    result, trial.rollouts, trial.num_tokens, self._settings.score_bound
                )
                loss = loss + terms["value"].value
            (sign * loss).backward()
        return plain, terms

    def _compare_terms(
        self, result: CheckResult, totals: Reductions, terms: dict[str, LossTerm]
    ) -> None:
        """Compares the terms of the trainer's loss with the plain ones, by name.

        `totals` are the metrics of the trainer's pass, which have this rank's sum of each term."""
        sums = {name: float(totals[name].value) for name in terms if name in totals}
        plain = {name: float(term.value.detach()) for name, term in terms.items()}
        sizes = {name: term.size for name, term in terms.items()}
        # The trainer's "loss" has two terms more, "router_aux" and "value". Routers round in
        # bfloat16: their term is compared by itself only, so here the trainer's value is added.
        plain["loss"] += sums.get("router_aux", 0.0) + plain.get("value", 0.0)
        sizes["loss"] += sizes.get("router_aux", 0.0) + sizes.get("value", 0.0)
        if not self._loss.kl_coef:
            sums.pop("kl", None)
        # The entropy is compared token by token, so its sum has no bound.
        bounds = {"entropy": math.inf, "router_aux": self.score_bound}
        for name, value in sums.items():
            difference = abs(value - plain[name])
            result.check_difference(
                f"the term {name!r} of the loss, relative to the sum of its |summands|,",
                "loss",
                difference / max(sizes[name], 1e-12),
                bounds.get(name, self._bounds.term),
            )

    def compare_reference(
        self,
        result: CheckResult,
        reference: Reference,
        model: Policy,
        groups: Sequence[RolloutGroup],
        device: torch.device,
        *,
        shares_prefixes: bool = False,
    ) -> None:
        """Collective. Compares the reference model's logprobs with plain ones, on the shortened
        rollouts that `run` uses.

        `reference` is the function that the trainer calls. `model` is the model whose weights it
        uses; in the plain pass the LoRA adapters of this model, if it has any, are 0."""
        rollouts = trial_rollouts(groups, self._policy, shares_prefixes)
        row = pack_rollouts(
            rollouts, device, self._policy.sequence_ranks, shares_prefixes=shares_prefixes
        )

        def plain_pass() -> Tensor:
            """Returns the reference's logprobs [tokens] by a plain forward pass."""
            without_adapters = adapters_at_zero(model.model) if model.lora.rank else nullcontext()
            routes = use_plain_routes(model.model, plain_routes(rollouts, device))
            with use_plain_attention(model.model), routes, without_adapters:
                temperature = self._settings.rollout.temperature
                return _plain_scores(model, rollouts, temperature, device).logprobs

        def measure_noise() -> float:
            """Returns how much the model's dtype rounds a logprob, in nats on average."""
            with use_float32(model):
                return mean_difference(plain_pass(), plain)

        with torch.no_grad():
            logprobs, _ = reference(row)
            if not model.counts_rows:
                rollouts = []
            plain = plain_pass()
            difference = mean_difference(logprobs, plain) if rollouts else 0.0
            bound = bound_by_noise(self.score_bound, difference, measure_noise)
        for policy in (self._policy, model):
            reshard(policy)
        # Logprobs that are not finite are no error here: the update reports them and skips the
        # step.
        if rollouts and plain.isfinite().all():
            result.check_difference(
                "the reference's logprob of a token, in nats on average,",
                "logprobs",
                difference,
                bound,
            )

    def _is_beyond_bounds(self, differences: dict[str, float], relative: dict[str, float]) -> bool:
        """Returns whether any difference of scores or gradients is NaN, or above its bound as it is
        before measured noise widens it."""
        is_within = all(value <= self.score_bound for value in differences.values()) and all(
            value <= self._gradient_bound for value in relative.values()
        )
        return not is_within

    def _widen_bounds(self, mean_max_logit: float) -> None:
        """Widens the bounds of scores and gradients for large logits, whose rounding is larger.

        `mean_max_logit` is the mean over tokens of the largest |logit| / temperature."""
        dtype = self._settings.dtype
        min_bound = self._settings.score_bound
        # eps / 2 is the largest relative rounding of a number in the compute dtype.
        largest_rounding = mean_max_logit * torch.finfo(DTYPES[dtype]).eps / 2
        self.score_bound = max(min_bound, largest_rounding)
        self.repeated_score_bound = max(SCORE_BOUNDS[dtype], largest_rounding) / 10
        gradient_bound = self._bounds.gradient * self.score_bound / min_bound
        self._gradient_bound = max(self._bounds.gradient, min(0.5, gradient_bound))

    def _plain_terms(self, trial: _Trial, plain: _PlainScores) -> dict[str, LossTerm]:
        """Returns the terms of the plain loss, from scores that have the values of the trainer's
        pass and the graph of the plain pass.

        The synthetic logprobs are set at distances from the trainer's values. With the plain pass's
        own values, rounding might clip a token on one side only."""
        columns = dict(trial.columns)
        teacher = trial.teacher
        for name, tensor in _plain_columns(trial, plain).items():
            columns[name] = tensor + (columns[name] - tensor).detach()
        if columns and teacher is not None and teacher.is_sampled:
            columns["teacher_penalty"] = teacher.coef * (columns["old"] - columns["ref"])
        if not self._loss.kl_coef:
            columns.pop("ref", None)
        return plain_terms(
            trial.rollouts,
            columns,
            self._loss,
            num_tokens=trial.num_tokens,
            num_sequences=trial.num_sequences,
            max_completion_tokens=self._settings.rollout.max_completion_tokens,
            teacher_coef=teacher.coef if teacher is not None else 0.0,
        )

    def _plain_balance(
        self, rollouts: Sequence[Rollout], router_logits: dict[int, Tensor]
    ) -> LossTerm:
        """Collective. Returns this rank's part of the experts' load-balance loss.

        It is computed from the routes of the rollouts (the experts that the engine chose for each
        token) and from the plain routers' logits [S * L, E] by layer: S sequences of L tokens."""
        policy = self._policy
        contexts = rollout_contexts(rollouts)
        counts = np.zeros((policy.model.config.num_hidden_layers, policy.num_experts))
        for context in contexts:
            assert context.routes is not None
            for layer, counts_of_layer in enumerate(counts):
                np.add.at(counts_of_layer, context.routes[:, layer], 1)
        # The engine has read, and so routed, all tokens of a sequence but its last.
        lengths = [len(context.token_ids) - 1 for context in contexts]
        *sums, num_tokens = sum_over_ranks([*counts.flatten().tolist(), sum(lengths)])
        fractions = np.reshape(sums, counts.shape) / max(num_tokens, 1.0)
        value = torch.zeros((), dtype=torch.float64)
        for layer, logits in router_logits.items():
            rows = logits.double().softmax(-1).unflatten(0, (len(lengths), -1))
            means = sum(row[:length].sum(0) for row, length in zip(rows, lengths, strict=True))
            fraction = torch.from_numpy(fractions[layer]).to(logits.device)
            value = value.to(logits.device) + (fraction * means).sum() / max(num_tokens, 1.0)
        scale = policy.num_experts / policy.num_routers
        value = self._loss.router_aux_coef * scale * value
        return LossTerm(value, float(value.detach()))

    def _measure_noise(
        self, trial: _Trial, squares: dict[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Collective. Returns how much the number format itself rounds: the mean difference of a
        logprob in nats, and the difference of each gradient relative to its norm.

        Both are differences between two plain passes over the same weights, one in the compute
        dtype and one in float32 arithmetic. `squares` are those of the trainer's gradient. A
        critic's term is left out."""
        self._updater.optimizer.zero_grad(set_to_none=True)
        rounded, _ = self._plain_pass(trial, 1.0)
        exact, _ = self._plain_pass(trial, -1.0, in_float32=True)
        noise = mean_difference(rounded.logprobs.detach(), exact.logprobs.detach())
        return max(join_ranks([noise])), _relative_norms(squares, gradient_squares(self._policy))

    def _bounds_of_gradients(self, noise: dict[str, float]) -> dict[str, float]:
        """Returns, by name, the bound of the difference of each tensor's gradient and of WHOLE.

        `noise` has what rounding alone gives, by the same names; 0 where it was not measured."""
        return {
            name: widen_by_noise(self._gradient_bound, value, _MAX_GRADIENT_BOUND)
            for name, value in noise.items()
        }

    def _judge_gradients(
        self, result: CheckResult, relative: dict[str, float], noise: dict[str, float]
    ) -> None:
        """Compares the relative difference of each tensor's gradient, and of the whole gradient,
        with its bound, which `noise` may widen.

        Only the largest difference, relative to its bound, is recorded. In bfloat16 a single tensor
        that is slightly above its bound gives only a warning."""
        bounds = self._bounds_of_gradients(noise)
        # A NaN counts as the largest difference.
        excess = {
            name: value / bounds[name] if math.isfinite(value) else math.inf
            for name, value in relative.items()
        }
        worst = max(excess, key=lambda name: excess[name])
        num_above = sum(value > 1.0 for name, value in excess.items() if name != WHOLE)
        subject = f"the gradient of {worst}, relative to its norm,"
        lone_bound = min(_LONE_EXCESS * bounds[worst], _MAX_GRADIENT_BOUND)
        # A lone tensor exceeds its bound, by little, while the whole gradient does not.
        is_lone = num_above == 1 and excess[WHOLE] <= 1.0 and relative[worst] <= lone_bound
        if self._is_rounded and is_lone:
            _log.warning(
                "%s is off by %.3g (bound %.3g), alone and by little: likely bfloat16's rounding",
                subject,
                relative[worst],
                bounds[worst],
            )
            result.metrics["gradient"] = relative[worst]
            return
        result.check_difference(subject, "gradient", relative[worst], bounds[worst])


# The subjects of error messages about the columns that have a gradient in the loss.
_SUBJECTS = {
    "logprobs": "the logprob of a token",
    "entropy": "the entropy at a token",
    "divergence": "the divergence from a teacher at a token",
}


def _plain_columns(trial: _Trial, plain: _PlainScores) -> dict[str, Tensor]:
    """Returns the plain counterparts of the trainer's columns [tokens] that have a gradient in the
    loss; {} without a rollout."""
    if not trial.columns:
        return {}
    tensors = {"logprobs": plain.logprobs, "entropy": plain.entropy}
    if trial.teacher is not None and not trial.teacher.is_sampled:
        tensors["divergence"] = trial.teacher.divergence(torch.cat(plain.all_logprobs))
    return tensors


def _relative_norms(
    squares: dict[str, float], difference_squares: dict[str, float]
) -> dict[str, float]:
    """Collective. Returns the relative difference of each tensor's gradient by name, and that of
    the whole gradient under WHOLE. The arguments are sums of squares on this rank, of gradients and
    of their differences.

    A tensor's difference is relative to the norm of its gradient plus 1 % of the whole gradient's
    norm."""
    sums = sum_over_ranks(squares.values())
    differences = sum_over_ranks(difference_squares.values())
    full_norm = math.sqrt(sum(sums)) + 1e-30
    relative = {
        name: math.sqrt(difference) / (math.sqrt(square) + 0.01 * full_norm)
        for name, square, difference in zip(squares, sums, differences, strict=True)
    }
    return relative | {WHOLE: math.sqrt(sum(differences)) / full_norm}


class _Sketch:
    """Computes products of one linear layer's weight gradient with random vectors: u^T (dL/dW) v.

    They show whether FSDP has summed the gradient over ranks rightly. They are computed in two
    ways: from the gradient that FSDP has summed over ranks, and, without FSDP, from the layer's
    inputs and output gradients on this rank."""

    def __init__(self, policy: Policy) -> None:
        modules = decoder_layers(policy.model).modules()
        self._layer = next(
            module
            for module in modules
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        )
        # Products from this rank's own tokens, added up by `watching`.
        self.of_tokens: Numbers = np.zeros(_NUM_SKETCHES)
        self._weight = cast(DTensor, self._layer.weight)
        generator = torch.Generator().manual_seed(0)
        # The weight is a DTensor: its shape is that of the whole tensor.
        self._left, self._right = (
            torch.randn(_NUM_SKETCHES, size, generator=generator).to(
                self._weight.device, torch.float64
            )
            for size in self._weight.shape
        )

    def of_gradient(self) -> Numbers:
        """Returns the part of the products that comes from this rank's rows of the summed gradient;
        0 if this rank holds a replica of rows that another rank counts."""
        if self._weight.grad is None or not is_first_replica(self._weight):
            return np.zeros(_NUM_SKETCHES)
        rows = cast(DTensor, self._weight.grad)._local_tensor.double()
        start = first_row(self._weight)
        row_vectors = self._left[:, start : start + len(rows)]
        products: Tensor = (row_vectors * (rows @ self._right.T).T).sum(1)
        return products.cpu().numpy()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager, in which each backward pass adds to `of_tokens`.

        With the random vectors u and v of each pair, the product u^T (dL/dW) v is summed there
        token by token in float64, from the layer's inputs and the gradients of its outputs on this
        rank. It is compared with the same product of the gradient that the optimizer gets."""

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            """Runs after the layer's forward pass, and hooks its backward pass."""
            # dL/dW is the sum over tokens of (gradient of the output) x (input).
            input_products = inputs[0].detach().flatten(0, -2).double() @ self._right.T

            def backward(grad: Tensor) -> None:
                """Runs in the backward pass with the gradient of the layer's output."""
                grad_products = grad.flatten(0, -2).double() @ self._left.T
                # Subtracted, since the backward pass is that of the negative loss.
                self.of_tokens -= (grad_products * input_products).sum(0).cpu().numpy()

            if output.requires_grad:
                output.register_hook(backward)

        handle = self._layer.register_forward_hook(forward)
        try:
            yield
        finally:
            handle.remove()


class _PlainScores(NamedTuple):
    """The scores that a plain forward pass gives the sampled tokens, with their autograd graph."""

    logprobs: Tensor
    """[tokens], float64."""
    entropy: Tensor
    """[tokens], float64."""
    zero: Tensor
    """A 0 that depends on the whole model, so that its backward pass reaches every parameter."""
    mean_max_logit: float
    """Mean over tokens of the largest |logit| / temperature."""
    all_logprobs: list[Tensor]
    """For each context the logprobs [n, V] of the whole vocabulary at its n sampled tokens."""


def _plain_scores(
    policy: Policy, rollouts: Sequence[Rollout], temperature: float, device: torch.device
) -> _PlainScores:
    """Collective. Returns the scores of the rollouts' sampled tokens by transformers' own forward
    pass, with their autograd graph."""
    rows, sampled = padded_contexts(rollouts, device)
    logits = policy.plain_logits(rows).float() / temperature
    zero = (logits.sum() * 0.0).double()
    logprobs = [zero[None][:0]]
    entropy = [zero[None][:0]]
    all_logprobs = []
    for number, positions in enumerate(sampled):
        # The logits at one position predict the next token.
        log_p = logits[number, positions - 1].log_softmax(-1)
        if len(positions):
            all_logprobs.append(log_p)
        targets = rows[number, positions]
        logprobs.append(log_p.gather(-1, targets[:, None])[:, 0].double())
        entropy.append(-(log_p.exp() * log_p).sum(-1).double())
    mean_max_logit = float(logits.detach().abs().amax(-1).mean())
    return _PlainScores(torch.cat(logprobs), torch.cat(entropy), zero, mean_max_logit, all_logprobs)
