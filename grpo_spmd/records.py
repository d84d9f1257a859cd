"""The records that travel between phases.

Dimensions: P prompts of a step, G `group_size`, B = P*G rollouts; of a micro-batch S sequences, T tokens (prompts and
completions), C completion tokens; V vocabulary."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

# How an episode ended: by itself; after `environment.max_turns`; a result had no room in `environment.max_tokens`; its
# context none in the engine; its last turn was cut off; the environment failed or hung, twice; only invalid calls came.
EPISODE_STATUSES = (
    "ok", "max_turns", "max_tokens", "context_overflow", "truncated", "env_error", "env_timeout", "invalid_calls",
)  # fmt: skip
FAILED_STATUSES = ("env_error", "env_timeout")  # left out of group and loss


@dataclass(frozen=True)
class Prompt:
    """One prompt at a place of the shuffled stream: of a set of 64, `position` 69 is some `row` of the second epoch."""

    position: int  # place in the stream, counted from 0 over the whole run
    row: int  # row of the data set
    token_ids: list[int]
    text: (
        str | list[dict[str, Any]]
    )  # what a reward function gets as the prompt: a string or chat messages
    columns: dict[str, Any]  # the row's other columns, for the reward functions


@dataclass(frozen=True)
class Completion:
    """What the engine sampled for one request, or in all turns of an episode; `logprobs[i]` scores `token_ids[i]` at
    the sampling temperature."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"; "length" too for an episode that had no room to go on
    episode: Episode | None = None


@dataclass(frozen=True)
class Segment:
    """Turns of an episode that share a prefix: what the policy has before it when it samples their tokens."""

    token_ids: npt.NDArray[np.int32]
    """From the prompt on."""
    sampled: npt.NDArray[np.bool_]
    """Of each token, whether the policy sampled it; what is False was given to it."""


@dataclass(frozen=True)
class Turn:
    """What the policy sampled at one time, and what the environment thought of it."""

    num_tokens: int
    finish_reason: str
    reward: float | None = None


@dataclass(frozen=True)
class Episode:
    """A rollout of several turns. The sampled tokens of its segments, one behind the other, are its completion's."""

    status: str  # one of EPISODE_STATUSES
    segments: tuple[Segment, ...]  # none where the environment failed
    turns: tuple[Turn, ...]
    messages: list[dict[str, Any]]  # behind the prompt: what reward functions get as the completion
    rewards: dict[str, float | str | None]
    """What the environment gave, by name; None: does not apply, a string says why it is unusable."""
    calls_s: list[float]  # seconds of each call of the environment
    error: str | None = None  # of one that failed


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and its G completions, sampled with seeds that are a function of (seed, step, prompt, sample)."""

    slot: int  # place of the prompt within the step, 0 .. P-1
    prompt: Prompt
    completions: list[Completion]


@dataclass(frozen=True)
class Rollout:
    """One sequence to train on, in numbers and no text, since it crosses ranks. Token ids and logprobs are the engine's
    lists, and arrays once they have crossed: a list of a step's tokens takes long to make."""

    rollout_id: int
    """slot * G + sample."""
    advantages: float | npt.NDArray[np.float64]
    """Of each completion token; one number where it is the same for all."""
    loss_mask: bool | npt.NDArray[np.bool_]
    """True where a completion token enters the loss; one where it is the same for all. False for a rollout whose reward
    is unknown, or that was cut off with loss.mask_truncated on."""
    prompt_ids: list[int] | npt.NDArray[np.int32]
    completion_ids: list[int] | npt.NDArray[np.int32]
    rollout_logprobs: list[float] | npt.NDArray[np.float32 | np.float64]
    segments: tuple[Segment, ...] = ()
    """Of an episode. Its `completion_ids` are the tokens sampled in all of them, and `prompt_ids` say nothing more."""

    @property
    def num_tokens(self) -> int:
        if self.segments:
            return sum(len(segment.token_ids) for segment in self.segments)
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class Lesson:
    """What a teacher says of a micro-batch's completion tokens, in one of two ways."""

    coef: float
    logprobs: Tensor | None = None  # float32 [C], of the sampled tokens
    terms: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    """One: (hidden states [C, D] and head [V, D] of the policy) -> float32 [C], how far it is from the teacher."""
    by_name: dict[str, Tensor] = field(
        default_factory=dict
    )  # bool [C], whose tokens; nothing where there is one
    answered: Tensor | None = (
        None  # bool [C], of which tokens its server has said something; None: of all
    )


@dataclass
class MicroBatch:
    """Sequences of one forward-backward on one rank, packed into one row without padding; [C] fields are aligned."""

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], starts at 0 in each sequence
    sequence_lengths: list[int]  # S lengths that add up to T
    predict_index: (
        Tensor  # int64 [C], the place in the row whose hidden state predicts target_ids[c]
    )
    target_ids: Tensor  # int64 [C]
    rollout_logprobs: Tensor  # float32 [C]
    advantages: Tensor  # float32 [C]
    loss_mask: Tensor  # bool [C], True where a token counts
    sequence_index: (
        Tensor  # int64 [C], the place in rollout_ids of the rollout that the token belongs to
    )
    rollout_ids: list[int]  # without those that have no completion token
    old_logprobs: Tensor | None = None  # float32 [C]; None where the loss does not need them
    ref_logprobs: Tensor | None = None  # the same
    lesson: Lesson | None = None  # of a teacher, if there is one
    old_values: Tensor | None = (
        None  # float32 [C], by the critic before this step's updates; None: there is no critic
    )
    returns: Tensor | None = None  # float32 [C], what the critic's values are taught


@dataclass(frozen=True)
class RolloutBatch:
    """This rank's share of a step's rollouts, in the order of training: mini-batches of micro-batches, the same number
    of each on every rank."""

    mini_batches: list[list[MicroBatch]]
    num_loss_tokens: list[
        int
    ]  # over all ranks, one for each mini-batch: the denominator of its token mean
    num_loss_sequences: list[int]  # the same, of sequences with a token that counts

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]


@dataclass
class ScoredRollouts:
    """What one rank scored: lists with one entry a completion, in the order of its groups and their completions."""

    rewards: list[float | None] = field(
        default_factory=list
    )  # the weighted sum; None: no reward is known
    by_name: dict[str, list[float | None]] = field(
        default_factory=dict
    )  # None: does not apply; NaN: unusable
    # by name: "ok", "not_applicable", "error" or "timeout"
    statuses: dict[str, list[str]] = field(default_factory=dict)
    first_error: str | None = (
        None  # the first failure of the function that failed most, with its traceback
    )
    texts: list[str] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)  # what the functions were called with
    # "extra" {reward: {column: value}}; at a call's first completion "logged" {reward: {metric: [sum, number]}}, at a
    # group's "retried" {reward: how the call with it failed}
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)

    def extend(self, other: ScoredRollouts) -> None:
        """Add what a further round scored."""
        self.notes |= {len(self.rewards) + number: note for number, note in other.notes.items()}
        self.rewards += other.rewards
        self.texts += other.texts
        self.given += other.given
        self.first_error = self.first_error or other.first_error
        for name, statuses in other.statuses.items():
            self.statuses.setdefault(name, []).extend(statuses)
        for name, values in other.by_name.items():
            self.by_name.setdefault(name, []).extend(values)

    def num_statuses(self) -> dict[str, Counter[str]]:
        """How often each function gave each."""
        return {name: Counter(statuses) for name, statuses in self.statuses.items()}

    def finite_by_name(self, number: int) -> dict[str, float | None]:
        """Each function's reward of one rollout, None where it is unusable too: NaN is not JSON."""
        mine = {name: values[number] for name, values in self.by_name.items()}
        return {
            name: None if value is None or math.isnan(value) else value
            for name, value in mine.items()
        }


def rollout_seed(
    seed: int, step: int | str, position: int, sample: int, turn: int | str = 0
) -> int:
    """Sampling seed of one turn, in [0, 2**63): a function of its place in the run, never of ranks or batches. An
    evaluation has text in the place of `step`, alike at all steps, and the row in the place of `position`."""
    place = f"{seed}/{step}/{position}/{sample}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(place.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class Plan:
    """Who trains on which rollouts, and in which forward passes: plan[mini_batch][rank][micro_batch] is a list of their
    ids. Held in 4 bytes a rollout and 4 a row."""

    ids: npt.NDArray[np.int32]
    """[B] Row behind row, of each mini-batch the first rank's rows first."""
    lengths: list[npt.NDArray[np.int32]]
    """Of each mini-batch [ranks, rows of a rank], the rollouts of each row."""

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[list[list[list[int]]]]:
        return (self[mini_batch] for mini_batch in range(len(self)))

    def __getitem__(self, mini_batch: int) -> list[list[list[int]]]:
        of_rows, lengths = list(self.blocks())[mini_batch]
        ids = iter(of_rows.tolist())
        return [
            [[next(ids) for _ in range(length)] for length in rank] for rank in lengths.tolist()
        ]

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Of each mini-batch the ids and the lengths."""
        begin = 0
        for lengths in self.lengths:
            end = begin + int(lengths.sum())
            yield self.ids[begin:end], lengths
            begin = end


@dataclass(frozen=True)
class StepDecision:
    """What rank 0 decided about a step. B rollouts are in the order of their ids."""

    positions: npt.NDArray[np.int64]
    """Places in the prompt stream of the groups that are trained on; a group's slot is its index here."""
    rewards: npt.NDArray[np.float64]
    """[B] The sums with the overlong penalty taken off; NaN: unknown."""
    advantages: npt.NDArray[np.float32]
    """[B]"""
    in_loss: npt.NDArray[np.bool_]
    """[B] False: no token of the rollout enters the loss."""
    plan: Plan
    num_groups: npt.NDArray[np.int64]
    """That each rank sampled."""
    slots: npt.NDArray[np.int32]
    """Of these groups, rank behind rank, as each has them; -1: not trained on."""
    num_loss_tokens: list[int]
    num_loss_sequences: list[int]
    num_tokens: int
    num_sampled_tokens: int
    metrics: dict[str, float | None]


@dataclass(frozen=True)
class Decision:
    """What one rank needs of it. By rollout id where it is of rollouts that this rank sampled."""

    slots: dict[int, int]
    """By position, of its groups that are trained on."""
    advantages: dict[int, float]
    in_loss: dict[int, bool]
    trained_by: dict[int, int]
    """The rank."""
    rows: list[list[list[int]]]
    """rows[mini_batch][micro_batch]: ids of the rollouts that this rank trains on."""
    num_rollouts: int
    """Over all ranks, as what follows."""
    num_loss_tokens: list[int]
    """One for each mini-batch."""
    num_loss_sequences: list[int]
    """The same, of sequences with a token that counts."""
    num_tokens: int
    """Of prompts and completions that are trained on."""
    num_sampled_tokens: int
    """Completion tokens that the engines sampled, also those of dropped groups."""
    of_all: StepDecision | None = None
    """On rank 0."""

    @property
    def metrics(self) -> dict[str, float | None]:
        """On rank 0; none elsewhere."""
        return self.of_all.metrics if self.of_all is not None else {}


@dataclass
class SyncStats:
    """What one sync of the weights moved."""

    bytes: int = 0
    """That an engine was handed, padding of the shards included, but not a base that stays in it under adapters."""
    num_collectives: int = 0
    """That it took; none where one rank holds the whole policy."""
    proof_s: float = 0.0
    """Seconds of the proof, if there was one."""
    weights_id: str = ""
    """Names the weights that the engine has from it, to the bit; nothing where nobody asked for it."""
