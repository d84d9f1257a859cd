"""The synthetic rows of the gradient check, and what both of its sides compute their loss from.

A synthetic row is a micro-batch made of short pieces of this rank's own rollouts. Its old,
reference and engine logprobs are set at known distances from the policy's, so that ratios fall on
both sides of every bound: with the true logprobs nothing is clipped in a first update.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from grpo_spmd.config.schema import (
    AdvantageConfig,
    DataConfig,
    EnvironmentConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TeacherConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import on_first_in_group
from grpo_spmd.learn.assemble import episode_rollout
from grpo_spmd.learn.contexts import completion_contexts, rollout_contexts, shorten_segments
from grpo_spmd.model.logprobs import TeacherDivergence, TopTeacher, WholeTeacher, top_outcomes
from grpo_spmd.model.policy import DTYPES, Policy
from grpo_spmd.proofs.plain import LossTerm, padded_routes
from grpo_spmd.records import MicroBatch, Rollout, RolloutGroup, Segment, TeacherSignal

Numbers = npt.NDArray[np.float64]
# On each rank the check uses at most this many rollouts, tokens of a prompt (or of what an
# environment gave between turns), and sampled tokens of a rollout, so that it costs next to
# nothing.
_NUM_SEQUENCES = 6
_PROMPT_TOKENS = 16
_COMPLETION_TOKENS = 12
# Synthetic log ratios stay far below 20, above which the loss ignores them. A config may have
# bounds like 1e9.
_MAX_LOG_RATIO = 5.0
# By number format, the bound of the mean difference of a logprob or an entropy, in nats, and of a
# critic's value, relative to its size. Rounding gave 6e-7 and 0.013 nats.
SCORE_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}


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


class SyntheticValues(Protocol):
    """The interface of what makes value targets for the synthetic rows, if a critic's head learns
    in the policy's update. ValueTargets implements it."""

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


class TrainerPass:
    """Records the trainer's scores of the synthetic rows, and gives the rows synthetic logprobs.

    `hook` is a forward hook of the policy: it sets the row's old, engine and reference logprobs
    from the policy's logprobs of this very pass. They do not come from a separate pass without
    gradients, because a compiled model rounds that differently."""

    def __init__(
        self, rollouts: Sequence[Rollout], loss: LossConfig, values: SyntheticValues | None
    ) -> None:
        """`values` makes value targets; None: no critic learns in the policy's update."""
        self._rollouts = rollouts
        self._loss = loss
        self._values = values
        # For each row with a rollout its columns [tokens] by name, float64.
        self._columns: list[dict[str, Tensor]] = []

    def hook(self, _: nn.Module, inputs: tuple[MicroBatch], output: tuple[Tensor, ...]) -> None:
        """Runs after each forward pass of the policy over a row, which is `inputs[0]`.

        `output` is logprobs and entropy [C], then what further terms of the loss need: the
        divergence from a teacher, and last the critic's values."""
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


# The width of the hidden states of a RandomTeacher.
_HIDDEN_SIZE = 8


class RandomTeacher:
    """A teacher for the synthetic rows, with a plain version of its term in the loss.

    With teacher.loss: sampled, its scores are logprobs that the check fills in; else they are
    random distributions from a fixed seed. `divergence` computes its term of the loss by the
    formula, for comparison with the trainer's.
    """

    def __init__(
        self, config: TeacherConfig, policy: Policy, settings: UpdateCheckSettings
    ) -> None:
        """Draws the teacher's lm_head; its vocabulary is the policy's."""
        self.coef = config.coef
        self._config = config
        self._temperature = settings.rollout.temperature
        self._dtype = DTYPES[settings.dtype]
        self._generator = torch.Generator().manual_seed(0)
        self._policy_logits = policy.logits
        self._head = self._draw(policy.model.get_output_embeddings().weight.shape[0])
        # For each row that holds a rollout: the logprobs [n, V], and with topk the ids [n, K] of
        # the most probable tokens.
        self._log_p: list[Tensor] = []
        self._top_ids: list[Tensor] = []

    @property
    def is_sampled(self) -> bool:
        """True if this teacher gives logprobs of the sampled tokens, False if distributions."""
        return self._config.loss == "sampled"

    def teach(self, row: MicroBatch) -> None:
        """Attaches the teacher's signal to a row, and keeps its distributions for `divergence`."""
        if self.is_sampled:
            row.teacher_signal = TeacherSignal(self.coef, torch.zeros_like(row.rollout_logprobs))
            return
        device = row.input_ids.device
        hidden = self._draw(len(row.target_ids)).to(device)
        head = self._head.to(device)
        scores: WholeTeacher | TopTeacher = WholeTeacher(hidden, head, self._temperature, None)
        if self._config.loss == "topk":
            ids, logprobs = top_outcomes(
                hidden,
                head,
                self._config.top_k,
                temperature=self._temperature,
                chunk=self._policy_logits.chunk,
            )
            scores = TopTeacher(ids, logprobs)
        divergence = TeacherDivergence([(None, scores)], self._config.beta, self._policy_logits)
        row.teacher_signal = TeacherSignal(self.coef, divergence=divergence)
        # A row without rollouts has a placeholder token, which the plain computation lacks.
        if row.rollout_ids:
            self._log_p.append((hidden @ head.T).double().div(self._temperature).log_softmax(-1))
            self._top_ids += [scores.ids] if isinstance(scores, TopTeacher) else []

    def divergence(self, log_p: Tensor) -> Tensor:
        """Returns the divergence [n], float64, between the teacher and the policy at all tokens of
        all rows, where `log_p` [n, V] are the policy's logprobs.

        It is written out by its formula, and its gradient is autograd's."""
        beta = self._config.beta
        s = log_p.double()
        t = torch.cat([log_p[:0].double(), *self._log_p])
        if self._top_ids:
            ids = torch.cat(self._top_ids)
            s = _top_and_rest(s, ids)
            t = _top_and_rest(t, ids)
        if beta == 0.0:
            return (t.exp() * (t - s)).sum(-1)
        if beta == 1.0:
            return (s.exp() * (s - t)).sum(-1)
        m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
        return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)

    def _draw(self, num_rows: int) -> Tensor:
        """Returns random numbers [num_rows, _HIDDEN_SIZE], the next ones of the fixed seed."""
        return torch.randn(num_rows, _HIDDEN_SIZE, generator=self._generator).to(self._dtype)


def _top_and_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Returns the logprobs [n, K + 1] of the tokens `ids` [n, K], and last of all other tokens
    together."""
    # The rest is summed over the other tokens, because 1 minus the sum of the top tokens'
    # probabilities would lose digits by cancellation.
    rest = log_p.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)


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
    """Returns the routes [S, L, layers, k] of the rows of `padded_contexts`: the k experts that the
    engine chose for each token; None if none were recorded."""
    contexts = rollout_contexts(rollouts)
    num_tokens = max((len(context.token_ids) for context in contexts), default=0)
    return padded_routes(contexts, num_tokens, device)


def short_rollouts(groups: Sequence[RolloutGroup], *, has_siblings: bool = False) -> list[Rollout]:
    """Returns up to 6 of this rank's rollouts, shortened, with synthetic advantages that are
    positive and negative in turn.

    Every third rollout has one masked token, so that a fault of the loss mask would show. With
    `has_siblings` they are three completions of each of two prompts, which share prefixes."""
    return _synthetic_rollouts(_short_segments(groups, has_siblings=has_siblings))


def trial_rollouts(
    groups: Sequence[RolloutGroup], policy: Policy, has_siblings: bool
) -> list[Rollout]:
    """Collective over the policy's sequence group, if it has one. Returns the rollouts of a trial
    update: shortened copies of this rank's real ones (see `short_rollouts`).

    The ranks of a sequence group compute parts of the same packed row, so all of them get the
    rollouts of the group's first rank; `has_siblings`, which lets rollouts share prefixes, is not
    used there."""
    if policy.sequence_group is None:
        return short_rollouts(groups, has_siblings=has_siblings)

    def encode() -> list[Any]:
        """Returns the first rank's segments as lists, which can be sent to the other ranks."""
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
    """Returns the shortened segments of up to 6 of this rank's rollouts.

    A segment is one sequence of the policy's forward pass: a prompt with its completion, or turns
    of an episode in one context. With `has_siblings` the rollouts are three completions of each of
    two prompts."""
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
