"""Compares loss and gradient of a few synthetic micro-batches with a plain recomputation.

A synthetic row is a micro-batch made of short pieces of this rank's own rollouts. Its old,
reference and engine logprobs are set at known distances from the policy's, so that ratios fall on
both sides of every bound: with the true logprobs nothing is clipped in a first update.

The plain side is transformers' own forward pass with the attention of plain_forward.py, one row
per sequence, full logits, log_softmax in float32, and the loss of plain_loss.py. The trainer's side
is the very code of the update (PolicyUpdater.accumulate). The plain gradient is subtracted from the
trainer's: what is left in `.grad` is the difference. No gradient is left behind.
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
from grpo_spmd.distributed.collectives import any_rank, on_rank0
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
from grpo_spmd.proofs.plain_forward import (
    padded_routes,
    use_float32,
    use_plain_attention,
    use_plain_routes,
)
from grpo_spmd.proofs.plain_loss import LossTerm, plain_terms
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch, RolloutGroup

_log = logging.getLogger("grpo_spmd")
Numbers = npt.NDArray[np.float64]
# Upper bounds for one rank, so that the check costs next to nothing.
_NUM_SEQUENCES = 6
_PROMPT_TOKENS = 16
_COMPLETION_TOKENS = 12
_NUM_SKETCHES = 8
# The number of errors that a message names; the others are only counted.
_MAX_NAMED = 4
# Synthetic log ratios stay far below 20, above which the loss ignores them. A config may have
# bounds like 1e9.
_MAX_LOG_RATIO = 5.0


# The mean difference that rounding explains, by number format: of a logprob or an entropy, in nats,
# and of a value, relative to its size. Measured: 6e-7 and 0.013 nats.
SCORE_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}


class _Bounds(NamedTuple):
    """The largest other differences that rounding explains, for one number format."""

    term: float
    """The difference of a term of the loss, relative to the sum of its summands' sizes."""
    gradient: float
    """The difference of a tensor's gradient, relative to the gradient's norm."""
    reduction: float
    """The difference of a gradient's sum over ranks, relative to the gradient's norm."""


# Measured on models of 2 and 24 layers, in the order of the fields: 2e-8, 1.4e-6, 2e-7 in float32;
# 2e-8, 0.026, 0.002 in bfloat16.
_BOUNDS = {
    "float32": _Bounds(1e-4, 1e-3, 1e-4),
    "bfloat16": _Bounds(1e-4, 0.2, 0.05),
}


# A difference may be this many times bfloat16's own, which `_measure_noise` measures. Two passes
# that round independently differ by 1.4 times the noise of one; at most 1.8 was measured, on models
# of 12 to 64 layers with key biases and outliers as trained ones have them.
_NOISE_FACTOR = 2.0
# However much a model rounds, a fault must show: a wrong sign makes a gradient's difference 2.
_MAX_GRADIENT_BOUND = 0.7
MAX_SCORE_BOUND = 0.3
# One lone tensor may be this many times above its bound before it stops the run, but never above
# _MAX_GRADIENT_BOUND: without its gradient a tensor's difference is 1.
_LONE_EXCESS = 2.0
# The name of the whole gradient beside those of tensors.
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
        `bound` or NaN. `subject` is the subject of the error's sentence."""
        self.metrics[key] = max(self.metrics.get(key, 0.0), difference)
        # Written so that NaN, which compares as False, is an error.
        if not difference <= bound:
            self.errors.append(f"{subject} is off by {difference:.3g} (bound {bound:.3g})")


def widen_by_noise(bound: float, noise: float, largest: float = math.inf) -> float:
    """Returns the bound of a difference in a number format that rounds by `noise`: `bound`, or what
    the noise explains, up to `largest`."""
    return max(bound, min(_NOISE_FACTOR * noise, largest))


def bound_by_noise(
    bound: float,
    difference: float,
    measure_noise: Callable[[], float],
    largest: float = MAX_SCORE_BOUND,
) -> float:
    """Collective. Returns the bound of a difference: `bound`, or where a rank's difference is
    beyond it what this rank's noise explains, up to `largest`.

    `measure_noise` makes plain passes in float32 arithmetic, which every rank makes then. In
    float32 they differ by nothing."""
    # Written so that NaN, which compares as False, is beyond.
    if not any_rank(not difference <= bound):
        return bound
    return widen_by_noise(bound, measure_noise(), largest)


def mean_difference(scores: Tensor, others: Tensor) -> float:
    """Returns the mean |difference| of scores [n], 0 without any."""
    return float((scores - others).abs().mean()) if len(scores) else 0.0


def describe_errors(errors_by_rank: Iterable[Sequence[str]]) -> str:
    """Returns the first errors of all ranks in one line, each with its ranks; "" without any."""
    # Ranks often find the same error: each text is said once.
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
    """Collective. Returns the norm of (reduced - plain) over the norm of plain. Both [n] are first
    summed over ranks."""
    sums = np.array(sum_over_ranks([*reduced.tolist(), *plain.tolist()])).reshape(2, -1)
    return float(np.linalg.norm(sums[0] - sums[1]) / (np.linalg.norm(sums[1]) + 1e-30))


def check_no_gradient(result: CheckResult, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Adds an error if one of these named parameters holds a gradient."""
    stray = next((name for name, parameter in parameters if parameter.grad is not None), None)
    if stray is not None:
        result.errors.append(f"a gradient was left from the last update: that of {stray}")


def gradient_squares(model: nn.Module) -> dict[str, float]:
    """Returns the sum of squares of this rank's part of the gradient, by the name of the trained
    parameter.

    It is 0 for a replica's copy, which would count twice, and for a parameter without gradient."""
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
    """A teacher for the synthetic rows. Its term in the loss is also written out plainly."""

    coef: float
    """The weight of the term in the loss."""

    @property
    def is_sampled(self) -> bool:
        """True if the teacher gives logprobs of the sampled tokens, False if it gives
        distributions."""

    def teach(self, row: MicroBatch) -> None:
        """Attach the teacher's signal to a row."""

    def divergence(self, log_p: Tensor) -> Tensor:
        """Returns the divergence [n], float64, of the policy's logprobs [n, V] of all rows, with
        its graph."""


class SyntheticValues(Protocol):
    """Makes value targets for the synthetic rows, if a critic's head learns in the policy's
    update."""

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of the critic's head."""

    def random_head(self) -> AbstractContextManager[None]:
        """Return a context manager. Within it the head adds a fixed random product: a head of zeros
        would show no fault."""

    def set_targets(self, row: MicroBatch, values: Tensor) -> None:
        """Give a row old values and returns at known distances from the trainer's values [C]."""

    def plain_term(
        self, result: CheckResult, rollouts: Sequence[Rollout], num_tokens: int, bound: float
    ) -> LossTerm:
        """Collective. Returns the value loss, and compares the trainer's values with plain ones.
        `num_tokens` is the number of tokens that count over all ranks."""

    def check_head_gradient(self, result: CheckResult, bound: float) -> None:
        """Collective. Compares the head's gradient with the plain one, and drops it."""


# Collective. Checks what one signal wrote into the batch of a step. The last argument has the
# rewards of the rollouts that this rank sampled, by rollout id.
SignalCheck = Callable[[SampledStep, RolloutBatch, Decision, dict[int, float]], CheckResult]


@dataclass(frozen=True)
class SignalProofs:
    """The contribution of teachers and critic to the update check."""

    checks: Sequence[SignalCheck] = ()
    """Checks of what a signal wrote into the micro-batches."""
    make_teacher: Callable[[], SyntheticTeacher] | None = None
    """Makes a teacher for the synthetic rows of the gradient check. None: the run has none."""
    values: SyntheticValues | None = None
    """Makes value targets for these rows. None: no critic learns in the policy's update."""


@dataclass(frozen=True)
class UpdateCheckSettings:
    """The settings of the run that the recomputation follows."""

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
    """`critic.warmup_steps` of a run with a critic: in so many first steps the critic learns
    alone."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """The kind of episodes, and how the rewards of their turns are added."""

    @property
    def score_bound(self) -> float:
        """The bound of SCORE_BOUNDS for this run."""
        return SCORE_BOUNDS[self.dtype] * self.bound_factor


class _TrainerPass:
    """Records the trainer's scores of the synthetic rows, and sets their other logprobs from them.

    `hook` is a forward hook of the policy: it sets the row's old, engine and reference logprobs
    from the policy's logprobs of this very pass. They do not come from a separate pass without
    gradients, because a compiled model rounds that differently."""

    def __init__(
        self, rollouts: Sequence[Rollout], loss: LossConfig, values: SyntheticValues | None
    ) -> None:
        self._rollouts = rollouts
        self._loss = loss
        self._values = values
        # Of each row with a rollout, float64.
        self._columns: list[dict[str, Tensor]] = []

    def hook(self, _: nn.Module, inputs: tuple[MicroBatch], output: tuple[Tensor, ...]) -> None:
        """Runs after each forward pass. `output` is logprobs and entropy [C], then what the terms
        return: the divergence from a teacher, and last the critic's values."""
        batch = inputs[0]
        logprobs, entropy, *terms = [tensor.detach().double() for tensor in output]
        if self._values is not None:
            self._values.set_targets(batch, terms.pop())
        # A row without rollouts has one token that counts nothing.
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
        """Returns the logprobs "logprobs", "old", "engine" and "ref", "entropy", and from a teacher
        "divergence", each [tokens] over all rows, float64; nothing without a rollout."""
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
        self._rounding = torch.finfo(DTYPES[settings.dtype]).eps / 2
        self._score_bound_of_dtype = SCORE_BOUNDS[settings.dtype]
        self._min_score_bound = settings.score_bound
        self.score_bound = self._min_score_bound
        # Of a score by the same function on the same row, where only the order of a reduction may
        # differ: neither the model's noise nor proofs.bound_factor widens it.
        self.repeated_score_bound = 0.0
        self._gradient_bound = self._bounds.gradient
        self._is_rounded = settings.dtype != "float32"

    def run(
        self, groups: Sequence[RolloutGroup], device: torch.device, *, accumulates: bool
    ) -> CheckResult:
        """Collective. Compares loss and gradient on this rank's own rollouts, and leaves no
        gradient behind.

        A rank without rollouts takes part with tokens that do not count. Sums over ranks are
        compared on rank 0, and every rank gets the same error. With `accumulates` the gradient is
        accumulated over two micro-batches instead of one, which costs one more pass."""
        with self._values.random_head() if self._values is not None else nullcontext():
            return self._run(groups, device, accumulates)

    def _run(
        self, groups: Sequence[RolloutGroup], device: torch.device, accumulates: bool
    ) -> CheckResult:
        """Does the work of `run`, within the random head."""
        result = CheckResult()
        policy = self._policy
        values = self._values
        rollouts = short_rollouts(groups)
        rows = [rollouts[:3], rollouts[3:]] if accumulates else [rollouts]
        values_parameters = [] if values is None else values.named_parameters()
        check_no_gradient(result, chain(policy.named_parameters(), values_parameters))
        batches = [pack_rollouts(row, device) for row in rows]
        if policy.replays_routes and self._loss.router_aux_coef:
            attach_loads(policy, [batches], self._loss.router_aux_coef)
        num_tokens, num_sequences = (max(n, 1) for n in sum_over_ranks(count_loss(batches)))
        teacher = self._make_teacher() if self._make_teacher is not None else None
        if teacher is not None:
            for batch in batches:
                teacher.teach(batch)
        # 1. The trainer's pass leaves its gradient in the parameters.
        trainer = _TrainerPass(rollouts, self._loss, values)
        handle = policy.register_forward_hook(trainer.hook)
        mini_batch = MiniBatch(batches, num_tokens, num_sequences)
        parts, _ = self._updater.accumulate(mini_batch, is_synced=True)
        totals = merge(parts)
        handle.remove()
        trainer_squares = gradient_squares(policy)
        # 2. The plain pass subtracts its gradient from that. Activation checkpointing may run
        # layers again in the backward pass, which therefore is within plain attention too.
        sketch = _Sketch(policy)
        columns = trainer.columns()
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
                # With the trainer's value: in bfloat16 the routers' probabilities are rounded.
                total = loss.value + balance.value - balance.value.detach()
                if "router_aux" in totals:
                    total = total + float(totals["router_aux"].value)
                terms["loss"] = LossTerm(total, loss.size + balance.size)
            if values is not None:
                value = values.plain_term(result, rollouts, num_tokens, self._min_score_bound)
                loss = terms["loss"]
                terms["loss"] = LossTerm(loss.value + value.value, loss.size + value.size)
                terms["value"] = value
            # Subtracts the plain gradient: what is left is the difference.
            (-terms["loss"].value - plain.zero).backward()
        term_bounds = {"entropy": math.inf, "router_aux": self.score_bound}
        for name, term in terms.items():
            # The entropy was compared token by token already.
            if rollouts and name in totals and (name != "kl" or self._loss.kl_coef):
                difference = abs(float(totals[name].value) - float(term.value.detach()))
                result.check_difference(
                    f"the term {name!r} of the loss, of the size of what it sums,",
                    "loss",
                    difference / max(term.size, 1e-12),
                    bound=term_bounds.get(name, self._bounds.term),
                )
        # 3. The comparisons, which are collective: every rank makes all of them.
        relative = _relative_norms(trainer_squares, gradient_squares(policy))
        # FSDP's sum of the plain gradient over ranks, and a sum made here from each rank's tokens.
        plain_reduced = sketch_of_trainer - sketch.of_gradient()
        result.check_difference(
            "the sum over ranks of a gradient, of its norm,",
            "reduction",
            relative_difference(plain_reduced, sketch.of_tokens),
            self._bounds.reduction,
        )
        # 4. What is beyond a bound is judged by how much this model rounds in this number format.
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
            # The head's gradient is made of the same states, which round as the whole gradient's.
            values.check_head_gradient(result, self._bounds_of_gradients(noise)[WHOLE])
        # A policy that is not finite is for the update to report, which then skips the step.
        is_nonfinite = not bool(plain.logprobs.isfinite().all())
        return CheckResult() if any_rank(is_nonfinite) else result

    def compare_reference(
        self,
        result: CheckResult,
        reference: Reference,
        model: Policy,
        groups: Sequence[RolloutGroup],
        device: torch.device,
    ) -> None:
        """Collective. Compares the reference's logprobs of the tokens of `run` with plain ones.

        `reference` is the function that the trainer calls, `model` has the weights; adapters of the
        model count as 0."""
        rollouts = short_rollouts(groups)

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
            logprobs, _ = reference(pack_rollouts(rollouts, device))
            plain = plain_pass()
            difference = mean_difference(logprobs, plain) if rollouts else 0.0
            bound = bound_by_noise(self.score_bound, difference, measure_noise)
        for policy in (self._policy, model):
            reshard(policy)
        # A model that is not finite is no error here: the update reports it, and skips the step.
        if rollouts and plain.isfinite().all():
            result.check_difference(
                "the reference's logprob of a token, in nats on average,",
                "logprobs",
                difference,
                bound,
            )

    def _is_beyond_bounds(self, differences: dict[str, float], relative: dict[str, float]) -> bool:
        """Returns whether a difference of scores or gradients is above its format's bound, or
        NaN."""
        is_within = all(value <= self.score_bound for value in differences.values()) and all(
            value <= self._gradient_bound for value in relative.values()
        )
        return not is_within

    def _widen_bounds(self, mean_max_logit: float) -> None:
        """Widens the bounds for large logits, which are rounded by more than small ones.

        `mean_max_logit` is the mean of the largest |logit| / temperature of a token."""
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
        """Returns the terms of the plain loss: the trainer's values with the plain graph.

        The synthetic logprobs are set from the trainer's values: with those of the plain pass,
        rounding would clip a token on one side only. `counts` are tokens and sequences."""
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

        The plain pass is made once more as it was, and once with float32 arithmetic over the same
        weights. `squares` are those of the trainer's gradient. A critic's term is left out."""
        policy = self._policy
        self._updater.optimizer.zero_grad(set_to_none=True)
        temperature = self._rollout.temperature
        logprobs = []
        routes = plain_routes(rollouts, device)
        with use_plain_attention(policy.model), use_plain_routes(policy.model, routes):
            for arithmetic, sign in ((nullcontext(), 1.0), (use_float32(policy), -1.0)):
                with arithmetic:
                    plain = _plain_scores(policy, rollouts, temperature, device)
                    terms = self._plain_terms(rollouts, columns, plain, teacher, counts=counts)
                    (sign * (terms["loss"].value + plain.zero)).backward()
                    logprobs.append(plain.logprobs.detach())
        noise = mean_difference(logprobs[0], logprobs[1])
        return max(join_ranks([noise])), _relative_norms(squares, gradient_squares(policy))

    def _bounds_of_gradients(self, noise: dict[str, float]) -> dict[str, float]:
        """Returns the bound of each tensor's difference, and of the whole gradient's."""
        return {
            name: widen_by_noise(self._gradient_bound, value, _MAX_GRADIENT_BOUND)
            for name, value in noise.items()
        }

    def _judge_gradients(
        self, result: CheckResult, relative: dict[str, float], noise: dict[str, float]
    ) -> None:
        """Compares each tensor's difference, and that of the whole gradient, with its bound: the
        number format's own, or what is explained by the noise.

        In bfloat16 one lone tensor slightly above its bound is only warned of."""
        bounds = self._bounds_of_gradients(noise)
        # A NaN counts as the largest difference.
        excess = {
            name: value / bounds[name] if math.isfinite(value) else math.inf
            for name, value in relative.items()
        }
        worst = max(excess, key=lambda name: excess[name])
        num_above = sum(value > 1.0 for name, value in excess.items() if name != WHOLE)
        subject = f"the gradient of {worst}, of its norm,"
        lone_bound = min(_LONE_EXCESS * bounds[worst], _MAX_GRADIENT_BOUND)
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
    """Returns the plain side of the trainer's columns [tokens] that the loss has a graph of."""
    tensors = {"logprobs": plain.logprobs, "entropy": plain.entropy}
    if teacher is not None and not teacher.is_sampled:
        tensors["divergence"] = teacher.divergence(torch.cat(plain.all_logprobs))
    return tensors


def _score_differences(
    columns: dict[str, Tensor], plain: _PlainScores, teacher: SyntheticTeacher | None
) -> dict[str, float]:
    """Returns the mean differences of the trainer's scores from the plain ones, in nats, by the
    subject of a sentence; nothing without a rollout."""
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
    """Collective. Returns the norm of each tensor's difference over the tensor's own norm plus 1 %
    of the whole gradient's norm, and under WHOLE that of the whole gradient."""
    sums = sum_over_ranks(squares.values())
    differences = sum_over_ranks(difference_squares.values())
    full_norm = math.sqrt(sum(sums)) + 1e-30
    relative = {
        name: math.sqrt(difference) / (math.sqrt(square) + 0.01 * full_norm)
        for name, square, difference in zip(squares, sums, differences, strict=True)
    }
    return relative | {WHOLE: math.sqrt(sum(differences)) / full_norm}


class _Sketch:
    """Holds products of one linear layer's gradient with random vectors: u^T (dL/dW) v.

    They are computed in two ways: from the gradient that FSDP has summed over ranks, and from the
    layer's inputs and output gradients on this rank, which FSDP never sees."""

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
        """Returns the products of this rank's rows of the summed gradient; 0 for a replica."""
        if self._weight.grad is None or not is_first_replica(self._weight):
            return np.zeros(_NUM_SKETCHES)
        rows = cast(DTensor, self._weight.grad)._local_tensor.double()
        start = first_row(self._weight)
        row_vectors = self._left[:, start : start + len(rows)]
        products: Tensor = (row_vectors * (rows @ self._right.T).T).sum(1)
        return products.cpu().numpy()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Returns a context manager. Within it forward and backward passes add to `of_tokens`."""

        def forward(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            # dL/dW is the sum over tokens of (gradient of the output) x (input).
            input_products = inputs[0].detach().flatten(0, -2).double() @ self._right.T

            def backward(grad: Tensor) -> None:
                grad_products = grad.flatten(0, -2).double() @ self._left.T
                # Subtracted, since the pass is that of the negative loss.
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
    """Returns "old", "engine" and "ref" logprobs [tokens], float32, at known distances from `base`,
    the policy's logprobs."""
    # Log ratios inside and beyond each bound of clipping.
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
    steps: list[Numbers] = []
    for rollout in rollouts:
        number = rollout.rollout_id
        length = len(rollout.completion_ids)
        t = np.arange(length)
        # Even rollouts have positive advantages, odd ones negative. Each pair begins two ratios
        # further on, so that both signs meet every ratio.
        indices = (2 * (number // 2) + t) % len(ratios)
        # gspo has one ratio per sequence: each is beyond a bound.
        if loss.policy == "gspo":
            indices = np.full(length, [2, 4, 5][number // 2])
        mismatch = factors[(number + t) % len(factors)]
        if loss.rollout_correction == "sequence_tis":
            mismatch = np.full(length, factors[number % len(factors)] / length)
        old = -ratios[indices]
        ref = np.array([-0.4, 0.3, 0.7])[(number + t) % 3]
        steps.append(np.stack([old, old - mismatch, ref]))
    columns = base + torch.from_numpy(np.concatenate(steps, axis=1)).to(base.device)
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
    """Returns the token ids [S, L] of one row per context, and of each the sampled positions.

    A rollout of several contexts has several rows. Rows are padded on the right, which a causal
    model does not see. Without rollouts there are two tokens, so that a rank can take part in a
    pass."""
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
    """Collective. Scores rollouts with transformers' own forward pass."""
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


def short_rollouts(groups: Sequence[RolloutGroup]) -> list[Rollout]:
    """Returns up to 6 of this rank's rollouts, shortened, with positive and negative advantages by
    turns.

    Every third rollout has one masked token, so that masks show in the loss."""
    pairs = [
        (completion_contexts(group.prompt.token_ids, completion), completion.episode)
        for group in groups[:_NUM_SEQUENCES]
        for completion in group.completions
        if completion.token_ids
    ]
    step = max(1, len(pairs) // _NUM_SEQUENCES)
    rollouts = []
    for number, (contexts, episode) in enumerate(pairs[::step][:_NUM_SEQUENCES]):
        # The first token of a prompt stays: without it a model may produce nonsense.
        segments = shorten_segments(
            contexts,
            _PROMPT_TOKENS,
            _COMPLETION_TOKENS,
            max_stretch=_COMPLETION_TOKENS // (1 if episode is None else 2),
        )
        num_tokens = sum(int(segment.sampled.sum()) for segment in segments)
        mask = np.ones(num_tokens, np.bool_)
        if number % 3 == 1 and num_tokens > 1:
            mask[num_tokens // 2] = False
        advantage = (0.7 + 0.1 * number) * (1 if number % 2 == 0 else -1)
        rollouts.append(episode_rollout(number, advantage, mask, segments, [0.0] * num_tokens))
    return rollouts
