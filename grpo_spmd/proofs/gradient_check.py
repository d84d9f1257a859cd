"""Compares loss and gradient of a few synthetic micro-batches with a plain recomputation.

A synthetic row is a micro-batch made of short pieces of this rank's own rollouts. Its old,
reference and engine logprobs are set at known distances from the policy's, so that ratios fall on
both sides of every bound: with the true logprobs nothing is clipped in a first update.

The plain side is transformers' own forward pass with the attention of plain.py, one row
per sequence, full logits, log_softmax in float32, and its loss. The trainer's side
is the very code of the update (PolicyUpdater.accumulate). The plain gradient is subtracted from the
trainer's, so that `.grad` holds the difference. At the end all gradients are dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence

from grpo_spmd.config.schema import (
    AdvantageConfig,
    DataConfig,
    EnvironmentConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import any_rank, on_first_in_group, on_rank0
from grpo_spmd.distributed.reductions import merge
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.contexts import completion_contexts, rollout_contexts, shorten_segments
from grpo_spmd.learn.router_loss import attach_loads
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import MiniBatch, PolicyUpdater, Reference
from grpo_spmd.model.families.build import decoder_layers
from grpo_spmd.model.lora import adapters_at_zero
from grpo_spmd.model.policy import DTYPES, Policy
from grpo_spmd.model.sharding import first_row, is_first_replica, reshard
from grpo_spmd.proofs.plain import (
    LossTerm,
    padded_routes,
    plain_terms,
    use_float32,
    use_plain_attention,
    use_plain_routes,
)
from grpo_spmd.records import (
    Decision,
    MicroBatch,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    Segment,
)

_log = logging.getLogger("grpo_spmd")
Numbers = npt.NDArray[np.float64]
# On each rank the check uses at most this many rollouts, given tokens of a prompt or between turns,
# and sampled tokens of a rollout, so that it costs next to nothing.
_NUM_SEQUENCES = 6
_PROMPT_TOKENS = 16
_COMPLETION_TOKENS = 12
# The number of random products that _Sketch compares.
_NUM_SKETCHES = 8
# The number of errors that a message names; the others are only counted.
_MAX_NAMED = 4
# Synthetic log ratios stay far below 20, above which the loss ignores them. A config may have
# bounds like 1e9.
_MAX_LOG_RATIO = 5.0


# By number format, the bound of the mean difference of a logprob or an entropy, in nats, and of a
# critic's value, relative to its size. Rounding gave 6e-7 and 0.013 nats.
SCORE_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}


class _Bounds(NamedTuple):
    """The bounds of the other differences, for one number format."""

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


@dataclass
class CheckResult:
    """The errors and differences that one check found on this rank."""

    errors: list[str] = field(default_factory=list)
    """One sentence for each difference that is too large."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The largest difference of each kind."""

    def check_difference(self, subject: str, key: str, difference: float, bound: float) -> None:
        """Records a difference under the metric `key`, and an error if the difference is above
        `bound` or NaN. The error's sentence is "`subject` is off by ..."."""
        self.metrics[key] = max(self.metrics.get(key, 0.0), difference)
        # Written so that NaN, which compares as False, is an error.
        if not difference <= bound:
            self.errors.append(f"{subject} is off by {difference:.3g} (bound {bound:.3g})")


def widen_by_noise(bound: float, noise: float, largest: float = math.inf) -> float:
    """Returns the bound of a difference in a number format whose rounding alone gives `noise`: the
    larger one of `bound` and what this noise explains, where the latter is at most `largest`."""
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


def describe_errors(errors_by_rank: Iterable[Sequence[str]]) -> str:
    """Returns the first errors in one line, each with the ranks that found it; "" without any."""
    # Ranks often find the same error: each text is written once.
    ranks_by_error: dict[str, list[str]] = {}
    for rank, errors in enumerate(errors_by_rank):
        for error in dict.fromkeys(errors):
            ranks_by_error.setdefault(error, []).append(str(rank))
    texts = [f"rank {', '.join(ranks)}: {error}" for error, ranks in ranks_by_error.items()]
    if len(texts) > _MAX_NAMED:
        texts[_MAX_NAMED:] = [f"and {len(texts) - _MAX_NAMED} more"]
    return "; ".join(texts)


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
    """Adds an error to `result` if one of these (name, parameter) pairs holds a gradient."""
    stray = next((name for name, parameter in parameters if parameter.grad is not None), None)
    if stray is not None:
        result.errors.append(f"a gradient was left from the last update: that of {stray}")


def gradient_squares(model: nn.Module) -> dict[str, float]:
    """Returns, for each trained parameter by name, the sum of squares of this rank's part of its
    gradient.

    It is 0 for a parameter without gradient, and on ranks that hold a replica of a part that
    another rank counts."""
    squares = {name: 0.0 for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and is_first_replica(cast(DTensor, parameter)):
            local = cast(DTensor, parameter.grad)._local_tensor
            squares[name] = float(torch.linalg.vector_norm(local, dtype=torch.float64)) ** 2
    return squares


def count_loss(mini_batch: Sequence[MicroBatch]) -> tuple[int, int]:
    """Returns (number of tokens, number of rollouts) of this rank that count in the loss."""
    return (
        sum(int(row.loss_mask.sum()) for row in mini_batch),
        sum(len(row.sequence_index[row.loss_mask].unique()) for row in mini_batch),
    )


class SyntheticTeacher(Protocol):
    """A teacher for the synthetic rows, with a plain version of its term in the loss."""

    coef: float
    """The weight of the term in the loss."""

    @property
    def is_sampled(self) -> bool:
        """True if the teacher gives logprobs of the sampled tokens, False if it gives
        distributions."""

    def teach(self, row: MicroBatch) -> None:
        """Attach the teacher's signal to a row."""

    def divergence(self, log_p: Tensor) -> Tensor:
        """Returns the plain divergence [n] from the teacher, float64 with its graph. `log_p` [n, V]
        are the policy's logprobs of the vocabulary at all n sampled tokens of the rows."""


class SyntheticValues(Protocol):
    """Makes value targets for the synthetic rows, if a critic's head learns in the policy's
    update."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of the critic's head."""

    def random_head(self) -> AbstractContextManager[None]:
        """Return a context manager. Within it the values contain a fixed random projection of the
        hidden states: a head of zeros would not show a fault."""

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Give a row old values and returns at known distances from the trainer's values [C]."""

    def plain_term(
        self, result: CheckResult, rollouts: Sequence[Rollout], num_tokens: int, bound: float
    ) -> LossTerm:
        """Collective. Returns the plain value loss. Compares the trainer's values with plain ones,
        within `bound`. `num_tokens` is the number of tokens that count, over all ranks."""

    def check_head_gradient(self, result: CheckResult, bound: float) -> None:
        """Collective. Compares the head's gradient with the plain one, and drops it."""


# Collective. Checks what one signal (a teacher or the critic) wrote into the batch of a step. The
# last argument has the rewards of the rollouts that this rank sampled, by rollout id.
SignalCheck = Callable[[SampledStep, RolloutBatch, Decision, dict[int, float]], CheckResult]


@dataclass(frozen=True)
class SignalProofs:
    """What teachers and critic contribute to the update check."""

    checks: Sequence[SignalCheck] = ()
    """Checks of what a signal wrote into the micro-batches."""
    make_teacher: Callable[[], SyntheticTeacher] | None = None
    """Makes a teacher for the synthetic rows of the gradient check. None: the run has none."""
    values: SyntheticValues | None = None
    """Makes value targets for these rows. None: no critic learns in the policy's update."""


@dataclass(frozen=True)
class UpdateCheckSettings:
    """The settings of the run that the plain recomputation needs."""

    every_steps: int
    """`proofs.every_steps`. 0: only in the first and the third step."""
    is_on: bool
    """`proofs.update`. False: nothing is checked."""
    checks_signals: bool
    """`proofs.signals`. False: what teachers and critic gave is not checked."""
    bound_factor: float
    """`proofs.bound_factor`: multiplies the bounds of scores and gradients."""
    model_path: str
    dtype: str
    """`model.dtype`, the compute dtype."""
    stop_ids: frozenset[int]
    """Tokens at which the engine stops: the ends of completions and turns."""
    data: DataConfig
    rollout: RolloutConfig
    advantage: AdvantageConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    training: TrainingConfig
    reward_weights: Sequence[float]
    """The weights of all rewards, in their order."""
    warmup_steps: int = 0
    """`critic.warmup_steps` of a run with a critic: the number of first steps in which only the
    critic learns."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The kind of episodes, and how the rewards of their turns are added."""

    @property
    def score_bound(self) -> float:
        """The bound of SCORE_BOUNDS for this run."""
        return SCORE_BOUNDS[self.dtype] * self.bound_factor


class _TrainerPass:
    """Records the trainer's scores of the synthetic rows, and sets the rows' synthetic logprobs.

    `hook` is a forward hook of the policy: it sets the row's old, engine and reference logprobs
    from the policy's logprobs of this very pass. They do not come from a separate pass without
    gradients, because a compiled model rounds that differently."""

    def __init__(
        self, rollouts: Sequence[Rollout], loss: LossConfig, values: SyntheticValues | None
    ) -> None:
        self._rollouts = rollouts
        self._loss = loss
        self._values = values
        # For each row with a rollout its columns [tokens] by name, float64.
        self._columns: list[dict[str, Tensor]] = []

    def hook(self, _: nn.Module, inputs: tuple[MicroBatch], output: tuple[Tensor, ...]) -> None:
        """Runs after each forward pass. `output` is logprobs and entropy [C], then what the terms
        return: the divergence from a teacher, and last the critic's values."""
        batch = inputs[0]
        logprobs, entropy, *terms = [tensor.detach().double() for tensor in output]
        if self._values is not None:
            self._values.set_targets(batch, terms.pop())
        # A row without rollouts has one placeholder token, which does not count.
        if not batch.rollout_ids:
            batch.ref_logprobs = batch.rollout_logprobs if self._loss.kl_coef else None
            return
        rollouts = [self._rollouts[i] for i in batch.rollout_ids]
        synthetic = _synthetic_logprobs(rollouts, logprobs, self._loss)
        # In place: the updater holds this tensor already.
        batch.rollout_logprobs.copy_(synthetic["engine"])
        batch.old_logprobs = synthetic["old"]
        batch.ref_logprobs = synthetic["ref"] if self._loss.kl_coef else None
        if batch.teacher_signal is not None and batch.teacher_signal.logprobs is not None:
            batch.teacher_signal.logprobs.copy_(synthetic["ref"])
        columns = {name: column.double() for name, column in synthetic.items()}
        columns |= {"logprobs": logprobs, "entropy": entropy}
        self._columns.append(columns | dict(zip(["divergence"], terms, strict=False)))

    def columns(self) -> dict[str, Tensor]:
        """Returns the columns of all rows by name, each [tokens], float64; {} without a rollout.

        "logprobs" and "entropy" are the policy's, "old", "engine" and "ref" the synthetic logprobs;
        with a teacher that gives distributions there is also "divergence"."""
        names = self._columns[0] if self._columns else ()
        return {name: torch.cat([columns[name] for columns in self._columns]) for name in names}


class GradientCheck:
    """Compares the trainer's loss and gradient on synthetic rows with the plain ones."""

    def __init__(
        self,
        policy: Policy,
        updater: PolicyUpdater,
        settings: UpdateCheckSettings,
        signals: SignalProofs,
    ) -> None:
        self._policy = policy
        self._updater = updater
        self._loss = settings.loss
        self._rollout = settings.rollout
        self._make_teacher = signals.make_teacher
        self._values = signals.values
        bounds = _BOUNDS[settings.dtype]
        self._bounds = bounds._replace(gradient=bounds.gradient * settings.bound_factor)
        # The largest relative rounding of a number in the compute dtype.
        self._rounding = torch.finfo(DTYPES[settings.dtype]).eps / 2
        self._score_bound_of_dtype = SCORE_BOUNDS[settings.dtype]
        self._min_score_bound = settings.score_bound
        self.score_bound = self._min_score_bound
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
        """Does the work of `run` while the critic's head, if there is one, is random."""
        result = CheckResult()
        policy = self._policy
        values = self._values
        rollouts = _trial_rollouts(groups, policy, shares_prefixes)
        rows = [rollouts[:3], rollouts[3:]] if accumulates else [rollouts]
        values_parameters = [] if values is None else values.named_parameters()
        check_no_gradient(result, chain(policy.named_parameters(), values_parameters))
        batches = [
            pack_rollouts(row, device, policy.sequence_ranks, shares_prefixes=shares_prefixes)
            for row in rows
        ]
        if policy.replays_routes and self._loss.router_aux_coef:
            attach_loads(policy, [batches], self._loss.router_aux_coef)
        counted = batches if policy.counts_rows else []
        num_tokens, num_sequences = (max(n, 1) for n in sum_over_ranks(count_loss(counted)))
        teacher = self._make_teacher() if self._make_teacher is not None else None
        if teacher is not None:
            for batch in batches:
                teacher.teach(batch)
        # 1. The trainer's pass. Its gradient stays in the parameters.
        trainer = _TrainerPass(rollouts, self._loss, values)
        handle = policy.register_forward_hook(trainer.hook)
        mini_batch = MiniBatch(batches, num_tokens, num_sequences)
        parts, _ = self._updater.accumulate(mini_batch, is_synced=True)
        totals = merge(parts)
        handle.remove()
        trainer_squares = gradient_squares(policy)
        # 2. The plain pass, whose gradient is subtracted from that. The backward pass is within
        # plain attention too, since activation checkpointing may run layers again.
        sketch = _Sketch(policy)
        columns = trainer.columns()
        # One rank of a sequence group makes the plain pass over the rows that all of them trained
        # on; the others go on as ranks without rollouts.
        if not policy.counts_rows:
            rollouts, columns = [], {}
        counts = (num_tokens, num_sequences)
        routes = plain_routes(rollouts, device)
        with (
            use_plain_attention(policy.model),
            use_plain_routes(policy.model, routes) as router_logits,
            sketch.watching(),
        ):
            sketch_of_trainer = sketch.of_gradient()
            plain = _plain_scores(policy, rollouts, self._rollout.temperature, device)
            self._widen_bounds(plain.mean_max_logit)
            differences = _score_differences(columns, plain, teacher)
            terms = self._plain_terms(rollouts, columns, plain, teacher, counts=counts)
            if policy.replays_routes and self._loss.router_aux_coef:
                balance = self._plain_balance(rollouts, router_logits)
                terms["router_aux"] = balance
                loss = terms["loss"]
                # The total has the plain gradient of this term but the trainer's value: the value
                # is compared by itself, with a wider bound, since routers round in bfloat16.
                total = loss.value + balance.value - balance.value.detach()
                if "router_aux" in totals:
                    total = total + float(totals["router_aux"].value)
                terms["loss"] = LossTerm(total, loss.size + balance.size)
            if values is not None:
                value = values.plain_term(result, rollouts, num_tokens, self._min_score_bound)
                loss = terms["loss"]
                terms["loss"] = LossTerm(loss.value + value.value, loss.size + value.size)
                terms["value"] = value
            # Subtracts the plain gradient: `.grad` then holds the difference.
            (-terms["loss"].value - plain.zero).backward()
        # The entropy is compared token by token below, so its sum has no bound.
        term_bounds = {"entropy": math.inf, "router_aux": self.score_bound}
        for name, term in terms.items():
            if rollouts and name in totals and (name != "kl" or self._loss.kl_coef):
                difference = abs(float(totals[name].value) - float(term.value.detach()))
                result.check_difference(
                    f"the term {name!r} of the loss, relative to the sum of its |summands|,",
                    "loss",
                    difference / max(term.size, 1e-12),
                    bound=term_bounds.get(name, self._bounds.term),
                )
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
        noise = dict.fromkeys(relative, 0.0)
        if self._is_rounded and any_rank(self._is_beyond_bounds(differences, relative)):
            score_noise, noise = self._measure_noise(
                rollouts, columns, teacher, counts=counts, squares=trainer_squares, device=device
            )
            self.score_bound = widen_by_noise(self.score_bound, score_noise, MAX_SCORE_BOUND)
        for subject, difference in differences.items():
            result.check_difference(
                f"{subject}, in nats on average,", "logprobs", difference, self.score_bound
            )
        self._judge_gradients(result, relative, noise)
        self._updater.optimizer.zero_grad(set_to_none=True)
        if values is not None:
            # The head's gradient has the whole gradient's bound: both round with the same states.
            values.check_head_gradient(result, self._bounds_of_gradients(noise)[WHOLE])
        # If the policy's logprobs are not finite, nothing is reported here: the update reports it
        # and skips the step.
        is_nonfinite = not bool(plain.logprobs.isfinite().all())
        return CheckResult() if any_rank(is_nonfinite) else result

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
        """Collective. Compares the reference's logprobs of the tokens of `run` with plain ones.

        `reference` is the function that the trainer calls. `model` is the model whose weights it
        uses; in the plain pass the LoRA adapters of this model, if it has any, are 0."""
        rollouts = _trial_rollouts(groups, self._policy, shares_prefixes)
        row = pack_rollouts(
            rollouts, device, self._policy.sequence_ranks, shares_prefixes=shares_prefixes
        )

        def plain_pass() -> Tensor:
            without_adapters = adapters_at_zero(model.model) if model.lora.rank else nullcontext()
            routes = use_plain_routes(model.model, plain_routes(rollouts, device))
            with use_plain_attention(model.model), routes, without_adapters:
                scores = _plain_scores(model, rollouts, self._rollout.temperature, device)
            return scores.logprobs

        def measure_noise() -> float:
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
        # Logprobs that are not finite are no error here: the update reports them, and skips the
        # step.
        if rollouts and plain.isfinite().all():
            result.check_difference(
                "the reference's logprob of a token, in nats on average,",
                "logprobs",
                difference,
                bound,
            )

    def _is_beyond_bounds(self, differences: dict[str, float], relative: dict[str, float]) -> bool:
        """Returns whether any difference of scores or gradients is above its bound before noise is
        considered, or NaN."""
        is_within = all(value <= self.score_bound for value in differences.values()) and all(
            value <= self._gradient_bound for value in relative.values()
        )
        return not is_within

    def _widen_bounds(self, mean_max_logit: float) -> None:
        """Widens the bounds of scores and gradients for large logits, whose rounding is larger.

        `mean_max_logit` is the mean over tokens of the largest |logit| / temperature."""
        largest_rounding = mean_max_logit * self._rounding
        self.score_bound = max(self._min_score_bound, largest_rounding)
        self.repeated_score_bound = max(self._score_bound_of_dtype, largest_rounding) / 10
        gradient_bound = self._bounds.gradient * self.score_bound / self._min_score_bound
        self._gradient_bound = max(self._bounds.gradient, min(0.5, gradient_bound))

    def _plain_terms(
        self,
        rollouts: Sequence[Rollout],
        columns: dict[str, Tensor],
        plain: _PlainScores,
        teacher: SyntheticTeacher | None,
        *,
        counts: tuple[int, int],
    ) -> dict[str, LossTerm]:
        """Returns the terms of the plain loss, from scores that have the values of the trainer's
        pass and the graph of the plain pass.

        The synthetic logprobs are set at distances from the trainer's values. With the plain pass's
        own values, rounding might clip a token on one side only. `counts` are (tokens, sequences)
        that count, over all ranks."""
        columns = dict(columns)
        if rollouts:
            for name, tensor in _plain_columns(columns, plain, teacher).items():
                columns[name] = tensor + (columns[name] - tensor).detach()
            if teacher is not None and teacher.is_sampled:
                columns["teacher_penalty"] = teacher.coef * (columns["old"] - columns["ref"])
            if not self._loss.kl_coef:
                del columns["ref"]
        return plain_terms(
            rollouts,
            columns,
            self._loss,
            num_tokens=counts[0],
            num_sequences=counts[1],
            max_completion_tokens=self._rollout.max_completion_tokens,
            teacher_coef=teacher.coef if teacher is not None else 0.0,
        )

    def _plain_balance(
        self, rollouts: Sequence[Rollout], router_logits: dict[int, Tensor]
    ) -> LossTerm:
        """Collective. Returns this rank's part of the load-balance loss, from the routes of its
        rollouts and the plain routers' logits [S * L, E] by layer."""
        policy = self._policy
        contexts = rollout_contexts(rollouts)
        layers = range(policy.model.config.num_hidden_layers)
        counts = [[0] * policy.num_experts for _ in layers]
        for context in contexts:
            assert context.routes is not None
            for layer in layers:
                for expert in context.routes[:, layer].flatten().tolist():
                    counts[layer][expert] += 1
        # The engine has read all tokens of a sequence but its last.
        lengths = [len(context.token_ids) - 1 for context in contexts]
        flat = [*chain.from_iterable(counts), sum(lengths)]
        *sums, num_tokens = np.array(sum_over_ranks(flat), np.float64)
        fractions = np.reshape(sums, (len(layers), -1)) / max(num_tokens, 1.0)
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
        self,
        rollouts: Sequence[Rollout],
        columns: dict[str, Tensor],
        teacher: SyntheticTeacher | None,
        *,
        counts: tuple[int, int],
        squares: dict[str, float],
        device: torch.device,
    ) -> tuple[float, dict[str, float]]:
        """Collective. Returns how much the number format itself rounds: the mean difference of a
        logprob in nats, and the difference of each gradient relative to its norm.

        Both are differences between two plain passes over the same weights, one in the compute
        dtype and one in float32 arithmetic. `squares` are those of the trainer's gradient. A
        critic's term is left out."""
        policy = self._policy
        self._updater.optimizer.zero_grad(set_to_none=True)
        temperature = self._rollout.temperature
        logprobs = []
        routes = plain_routes(rollouts, device)
        with (
            use_plain_attention(policy.model),
            use_plain_routes(policy.model, routes) as router_logits,
        ):
            for arithmetic, sign in ((nullcontext(), 1.0), (use_float32(policy), -1.0)):
                with arithmetic:
                    plain = _plain_scores(policy, rollouts, temperature, device)
                    terms = self._plain_terms(rollouts, columns, plain, teacher, counts=counts)
                    loss = terms["loss"].value + plain.zero
                    if policy.replays_routes and self._loss.router_aux_coef:
                        loss = loss + self._plain_balance(rollouts, router_logits).value
                    (sign * loss).backward()
                    logprobs.append(plain.logprobs.detach())
        noise = mean_difference(logprobs[0], logprobs[1])
        return max(join_ranks([noise])), _relative_norms(squares, gradient_squares(policy))

    def _bounds_of_gradients(self, noise: dict[str, float]) -> dict[str, float]:
        """Returns, by name, the bound of the difference of each tensor's gradient and of WHOLE."""
        return {
            name: widen_by_noise(self._gradient_bound, value, _MAX_GRADIENT_BOUND)
            for name, value in noise.items()
        }

    def _judge_gradients(
        self, result: CheckResult, relative: dict[str, float], noise: dict[str, float]
    ) -> None:
        """Compares the relative difference of each tensor's gradient, and of the whole gradient,
        with its bound, which `noise` may widen. Records only the worst one.

        In bfloat16, if a single tensor is slightly above its bound, this is only a warning."""
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


def _plain_columns(
    columns: dict[str, Tensor], plain: _PlainScores, teacher: SyntheticTeacher | None
) -> dict[str, Tensor]:
    """Returns the plain counterparts of the trainer's columns [tokens] that have a gradient in the
    loss."""
    tensors = {"logprobs": plain.logprobs, "entropy": plain.entropy}
    if teacher is not None and not teacher.is_sampled:
        tensors["divergence"] = teacher.divergence(torch.cat(plain.all_logprobs))
    return tensors


def _score_differences(
    columns: dict[str, Tensor], plain: _PlainScores, teacher: SyntheticTeacher | None
) -> dict[str, float]:
    """Returns the mean differences of the trainer's scores from the plain ones, in nats; {} without
    a rollout. The keys are the subjects of error messages."""
    subjects = {
        "logprobs": "the logprob of a token",
        "entropy": "the entropy at a token",
        "divergence": "the divergence from a teacher at a token",
    }
    if not columns:
        return {}
    return {
        subjects[name]: float((columns[name] - tensor).detach().abs().mean())
        for name, tensor in _plain_columns(columns, plain, teacher).items()
    }


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

    They are computed in two ways: from the gradient that FSDP has summed over ranks, and, without
    FSDP, from the layer's inputs and output gradients on this rank."""

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
        """Returns a context manager. Within it each forward and backward pass adds this rank's
        products to `of_tokens`."""

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            """Runs after the layer's forward pass, and hooks its backward pass."""
            # dL/dW is the sum over tokens of (gradient of the output) x (input).
            input_products = inputs[0].detach().flatten(0, -2).double() @ self._right.T

            def backward(grad: Tensor) -> None:
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


def _synthetic_logprobs(
    rollouts: Sequence[Rollout], base: Tensor, loss: LossConfig
) -> dict[str, Tensor]:
    """Returns the synthetic logprobs "old", "engine" and "ref" [tokens], float32, at known
    distances from `base`, the policy's logprobs."""
    # Log ratios of policy and old policy, inside and beyond each bound of clipping.
    low = math.log(max(1 - loss.clip_ratio_low, 0.3))
    high = min(math.log(1 + loss.clip_ratio_high), _MAX_LOG_RATIO)
    dual = min(math.log(loss.dual_clip or 4.0), _MAX_LOG_RATIO)
    ratios = np.array([0.0, high / 2, high + 0.3, low / 2, low - 0.3, max(high, dual) + 0.3])
    cap = min(math.log(loss.rollout_correction_cap), _MAX_LOG_RATIO)
    # Log ratios of policy and engine on both sides of the cap of the rollout correction.
    factors = np.array([0.0, 0.5 * cap, cap + 0.3, -0.5 * cap, -cap - 0.3])
    # With the engine's logprobs as the old ones there is no mismatch to correct.
    if loss.old_logprobs == "engine":
        factors *= 0.0
    offsets: list[Numbers] = []
    for rollout in rollouts:
        number = rollout.rollout_id
        length = len(rollout.completion_ids)
        t = np.arange(length)
        # Even rollouts have positive advantages, odd ones negative. Each pair begins two ratios
        # further on, so that both signs meet every ratio.
        indices = (2 * (number // 2) + t) % len(ratios)
        # gspo has one ratio per sequence: choose ratios beyond a bound.
        if loss.policy == "gspo":
            indices = np.full(length, [2, 4, 5][number // 2])
        mismatch = factors[(number + t) % len(factors)]
        if loss.rollout_correction == "sequence_tis":
            mismatch = np.full(length, factors[number % len(factors)] / length)
        old = -ratios[indices]
        ref = np.array([-0.4, 0.3, 0.7])[(number + t) % 3]
        offsets.append(np.stack([old, old - mismatch, ref]))
    columns = base + torch.from_numpy(np.concatenate(offsets, axis=1)).to(base.device)
    return dict(zip(("old", "engine", "ref"), columns.float(), strict=True))


class _PlainScores(NamedTuple):
    """The scores of a plain forward pass, with their graph."""

    logprobs: Tensor
    """[tokens], float64."""
    entropy: Tensor
    """[tokens], float64."""
    zero: Tensor
    """A 0 that depends on the whole model, so that its backward pass reaches every parameter."""
    mean_max_logit: float
    """Mean over tokens of the largest |logit|."""
    all_logprobs: list[Tensor]
    """For each context the logprobs [n, V] of the whole vocabulary at its n sampled tokens."""


def padded_contexts(
    rollouts: Sequence[Rollout], device: torch.device
) -> tuple[Tensor, list[Tensor]]:
    """Returns (token ids [S, L] with one context per row, the positions of the sampled tokens of
    each row).

    A rollout of several contexts has several rows. Rows are padded on the right, where padding does
    not change the scores of a causal model. Without rollouts there is one row of two tokens, so
    that the rank can take part in a pass."""
    contexts = rollout_contexts(rollouts)
    ids = [torch.from_numpy(context.token_ids).long() for context in contexts]
    rows = pad_sequence(ids or [torch.zeros(2, dtype=torch.int64)], batch_first=True)
    sampled = [torch.from_numpy(np.flatnonzero(context.sampled)).to(device) for context in contexts]
    return rows.to(device), sampled


def plain_routes(rollouts: Sequence[Rollout], device: torch.device) -> Tensor | None:
    """Returns the routes of the rows of `padded_contexts`; None if none were recorded."""
    contexts = rollout_contexts(rollouts)
    num_tokens = max((len(context.token_ids) for context in contexts), default=0)
    return padded_routes(contexts, num_tokens, device)


def _plain_scores(
    policy: Policy, rollouts: Sequence[Rollout], temperature: float, device: torch.device
) -> _PlainScores:
    """Collective. Returns the scores of rollouts by transformers' own forward pass, with their
    graph."""
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


def short_rollouts(groups: Sequence[RolloutGroup], *, has_siblings: bool = False) -> list[Rollout]:
    """Returns up to 6 of this rank's rollouts, shortened, with synthetic advantages that are
    positive and negative in turn.

    Every third rollout has one masked token, so that a fault of the loss mask would show. With
    `has_siblings` they are three completions of each of two prompts, which share prefixes."""
    return _synthetic_rollouts(_short_segments(groups, has_siblings=has_siblings))


def _trial_rollouts(
    groups: Sequence[RolloutGroup], policy: Policy, has_siblings: bool
) -> list[Rollout]:
    """Collective over the policy's sequence group, if it has one. Returns the `short_rollouts` of
    the group's first rank, since all of its ranks run the same row."""
    if policy.sequence_group is None:
        return short_rollouts(groups, has_siblings=has_siblings)

    def encode() -> list[Any]:
        return [
            [[segment.token_ids.tolist(), segment.sampled.tolist()] for segment in segments]
            for segments in _short_segments(groups)
        ]

    return _synthetic_rollouts(
        tuple(Segment(np.array(ids, np.int32), np.array(sampled)) for ids, sampled in segments)
        for segments in on_first_in_group(encode, policy.sequence_group)
    )


def _short_segments(
    groups: Sequence[RolloutGroup], *, has_siblings: bool = False
) -> list[tuple[Segment, ...]]:
    """Returns the shortened segments of up to 6 of this rank's rollouts. `has_siblings` as in
    `short_rollouts`."""
    num_groups, num_completions = (2, 3) if has_siblings else (_NUM_SEQUENCES, None)
    pairs = [
        (completion_contexts(group.prompt.token_ids, completion), completion.episode)
        for group in groups[:num_groups]
        for completion in [c for c in group.completions if c.token_ids][:num_completions]
    ]
    step = max(1, len(pairs) // _NUM_SEQUENCES)
    # The first token of a prompt stays: without it a model may produce nonsense.
    return [
        shorten_segments(
            contexts,
            _PROMPT_TOKENS,
            _COMPLETION_TOKENS,
            max_stretch=_COMPLETION_TOKENS // (1 if episode is None else 2),
        )
        for contexts, episode in pairs[::step][:_NUM_SEQUENCES]
    ]


def _synthetic_rollouts(all_segments: Iterable[tuple[Segment, ...]]) -> list[Rollout]:
    """Returns rollouts of these segments, with synthetic advantages and masks."""
    rollouts = []
    for number, segments in enumerate(all_segments):
        num_tokens = sum(int(segment.sampled.sum()) for segment in segments)
        mask = np.ones(num_tokens, np.bool_)
        if number % 3 == 1 and num_tokens > 1:
            mask[num_tokens // 2] = False
        advantage = (0.7 + 0.1 * number) * (1 if number % 2 == 0 else -1)
        rollouts.append(episode_rollout(number, advantage, mask, segments, [0.0] * num_tokens))
    return rollouts
