"""The records that the phases of a step hand to each other.

A rollout is one completion of one prompt; a group is the rollouts of one prompt. A rollout of
several turns with an environment is an episode. A slot is the index of a group among those that a
step trains on; the rollout id is slot * G + sample. Sampling and training are dealt to ranks
independently: a rollout may be trained on by another rank than the one that sampled it.

Dimensions: P prompts in a step, G = `group_size`, B = P*G rollouts. In one micro-batch: S
sequences, T tokens (prompts and completions together), C completion tokens. V is the size of the
vocabulary, D the width of hidden states.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

# Commands that start without torch read these records too.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

# A chat message, in the form that chat templates take.
Message = dict[str, Any]
# Routes of a mixture of experts: [tokens, layers, k], the numbers of the k experts that each layer
# took for a token; 0 in a layer without experts.
Routes: TypeAlias = "npt.NDArray[np.uint8 | np.uint16]"
# Named values, which may go through JSON.
Fields = dict[str, Any]
# The statuses say how an episode ended. In their order: by itself; after `environment.max_turns`; a
# result had no room in `environment.max_tokens`; the context had no room in the engine; the last
# turn was cut off; the environment raised, or hung, at both tries; the policy made invalid tool
# calls only.
EPISODE_STATUSES = (
    "ok",
    "max_turns",
    "max_tokens",
    "context_overflow",
    "truncated",
    "env_error",
    "env_timeout",
    "invalid_calls",
)
# Episodes with these statuses are left out of their group and of the loss.
FAILED_STATUSES = ("env_error", "env_timeout")


@dataclass(frozen=True)
class Prompt:
    """One prompt of the shuffled prompt stream."""

    position: int
    """Index in the prompt stream, counted from 0 over the whole run. In a data set of 64 rows,
    position 69 is some row of the second epoch."""
    row: int
    """Index of the row in the data set."""
    token_ids: list[int]
    """The prompt as the engine gets it."""
    text: str | list[Message]
    """The prompt of the row: a string or chat messages."""
    columns: Fields
    """The other columns of the row, for the reward functions."""

    def text_before(self, completion: Completion) -> str | list[Message]:
        """Returns what the policy had before its completion, as whoever scores or shows it gets it.

        An environment's reset() may have added messages (often the task itself), and an agent may
        have begun with messages of its own.
        """
        return self.with_opening(completion.episode.opening if completion.episode else [])

    def with_opening(self, opening: list[Message]) -> str | list[Message]:
        """Returns the first messages of an episode, or the row's prompt if they say no more."""
        is_row = not opening or opening == [{"role": "user", "content": self.text}]
        return self.text if is_row else opening


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled for one request, or in all turns of one episode."""

    token_ids: list[int]
    """The sampled tokens."""
    logprobs: list[float]
    """`logprobs[i]` is the engine's logprob of `token_ids[i]` at the sampling temperature."""
    finish_reason: str
    """"stop" or "length". An episode that had no room for another turn has "length" too."""
    episode: Episode | None = None
    """The episode, if the policy talked to an environment."""
    # An array cannot say whether it equals another one.
    routes: Routes | None = field(default=None, compare=False)
    """The engine's routes of the prompt and of all sampled tokens but the last, which it never
    read. None: they were not recorded, or are in the episode's segments."""


@dataclass(frozen=True)
class Segment:
    """Consecutive turns of an episode, each of whose prompts extends the tokens of the turn before:
    one sequence of the policy's forward pass."""

    token_ids: npt.NDArray[np.int32]
    """All tokens of the sequence, the prompt included."""
    sampled: npt.NDArray[np.bool_]
    """For each token: True if the policy sampled it, False if the prompt or the environment gave
    it."""
    routes: Routes | None = None
    """The engine's routes of all tokens but the last. None: they were not recorded."""


@dataclass(frozen=True)
class Turn:
    """One request to the engine within an episode."""

    num_tokens: int
    """Number of sampled tokens."""
    finish_reason: str
    """"stop" or "length"."""
    reward: float | None = None
    """The environment's reward for this turn, if it gave one."""


@dataclass(frozen=True)
class Episode:
    """A rollout of several turns. The sampled tokens of its segments, concatenated, are its
    completion's tokens."""

    status: str
    """One of EPISODE_STATUSES."""
    segments: tuple[Segment, ...] = ()
    """The sequences to train on. Empty if the environment failed."""
    turns: tuple[Turn, ...] = ()
    """The turns in the order in which they were sampled."""
    messages: list[Message] = field(default_factory=list)
    """The chat messages after `opening`. Reward functions get them as the completion."""
    rewards: dict[str, float | str | None] = field(default_factory=dict)
    """The environment's rewards by name. None: the reward does not apply. A string: the reward is
    unusable, and the string says why."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each call to the environment."""
    error: str | None = None
    """The error of an environment that failed."""
    opening: list[Message] = field(default_factory=list)
    """The chat messages that the policy had before its first turn. Empty if it had none."""
    num_tool_calls: int | None = None
    """The calls that the policy's tools got. None: they are not tools, or the environment
    failed."""
    num_tool_errors: int = 0
    """The calls in which a tool raised, and not because of the policy's arguments."""


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and its G completions. See `rollout_seed` for the seeds of the completions."""

    slot: int
    """Index of the prompt within the step, 0 .. P-1."""
    prompt: Prompt
    """The prompt of all completions."""
    completions: list[Completion]
    """The G completions, in the order of their samples."""


@dataclass(frozen=True)
class Rollout:
    """One rollout as numbers, without text, so that it can be sent from the rank that sampled it to
    the rank that trains on it.

    Token ids and logprobs are the engine's lists on the sending rank and arrays on the receiving
    one: to make lists of all tokens of a step would take long.
    """

    rollout_id: int
    """slot * G + sample."""
    advantages: float | npt.NDArray[np.float64]
    """One number for all completion tokens, or one for each."""
    loss_mask: bool | npt.NDArray[np.bool_]
    """True where a completion token counts in the loss; one value for all tokens, or one for each.
    False if the reward is unknown, or if the completion was cut off and `loss.mask_truncated` is
    on."""
    prompt_ids: list[int] | npt.NDArray[np.int32]
    """Tokens of the prompt."""
    completion_ids: list[int] | npt.NDArray[np.int32]
    """Sampled tokens."""
    rollout_logprobs: list[float] | npt.NDArray[np.float32 | np.float64]
    """The engine's logprobs of `completion_ids`."""
    segments: tuple[Segment, ...] = ()
    """The segments of an episode. They contain all of `prompt_ids` and `completion_ids`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy's forward pass reads."""
        if self.segments:
            return sum(len(segment.token_ids) for segment in self.segments)
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TeacherSignal:
    """The teachers' scores of the completion tokens of one micro-batch: either logprobs or a
    divergence, never both."""

    coef: float
    """Weight of the teacher's term, from `teacher.coef`."""
    logprobs: Tensor | None = None
    """float32 [C]: the teacher's logprob of each sampled token."""
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None
    """Maps hidden states [C, D] and head [V, D] of the policy to float32 [C]: the divergence from
    the teacher's distribution at each token."""
    masks_by_teacher: dict[str, Tensor] = field(default_factory=dict)
    """bool [C] for each teacher: the tokens that it scored. Empty if there is only one teacher."""
    answered_mask: Tensor | None = None
    """bool [C]: tokens for which the teacher's server sent an answer. None: all of them."""


@dataclass
class RowRoutes:
    """The routes of a micro-batch, which the policy replays, and its part of the load-balance loss.

    E is the number of experts of a layer."""

    experts: Tensor
    """[T, layers, k], as in Routes. The last token of a sequence has the routes of the one before
    it: the engine never read it, and it predicts nothing."""
    is_recorded: Tensor
    """bool [T]. False for the last token of each sequence."""
    is_replayed: bool = True
    """False: the policy takes its own routes, and counts in `differences` where they differ."""
    loads: Tensor | None = None
    """float32 [layers, E]: the derivative of the mini-batch's load-balance loss by a token's
    probability of an expert. None: the loss has no such term."""
    balance_losses: dict[int, Tensor] = field(default_factory=dict)
    """What the row adds to that loss, by layer; written by the policy's forward pass."""
    differences: dict[int, Tensor] = field(default_factory=dict)
    """The tokens for which the policy's own router takes another set of experts, by layer."""


@dataclass
class MicroBatch:
    """The sequences of one forward and backward pass on one rank, one after the other in one row
    without padding ("row" for short in other modules).

    All [C] fields are aligned with each other.
    """

    # The row: what the policy reads.
    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T]. Starts at 0 in each sequence."""
    sequence_lengths: list[int]
    """S lengths whose sum is T."""
    sequence_starts: Tensor
    """int32 [S + 1]. The first token of each sequence, and T."""
    # The sampled tokens, and what the sampling and scoring ranks said about them.
    predict_index: Tensor
    """int64 [C]. The hidden state at this position of the row predicts `target_ids[c]`."""
    target_ids: Tensor
    """int64 [C]. The sampled tokens."""
    rollout_logprobs: Tensor
    """float32 [C]. The engine's logprobs."""
    advantages: Tensor
    """float32 [C]"""
    loss_mask: Tensor
    """bool [C]. True where a token counts in the loss."""
    sequence_index: Tensor
    """int64 [C]. Index in `rollout_ids` of the token's rollout."""
    rollout_ids: list[int]
    """The rollouts of the row that have at least one completion token."""
    # Written after assembly, before the update: by attach_logprobs, teachers and critic.
    old_logprobs: Tensor | None = None
    """float32 [C]. The policy's logprobs before the update. None: the loss does not need them."""
    ref_logprobs: Tensor | None = None
    """float32 [C]. The reference model's logprobs. None: the loss does not need them."""
    teacher_signal: TeacherSignal | None = None
    """The teachers' signal. None: the run has no teacher."""
    old_values: Tensor | None = None
    """float32 [C]. The critic's values before the update. None: the run has no critic."""
    returns: Tensor | None = None
    """float32 [C]. The regression targets of the critic's values."""
    routes: RowRoutes | None = None
    """The engine's routes. None: the policy takes its own."""


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of a step that this rank trains on, in the order of training.

    Every rank has the same number of mini-batches, and the same number of micro-batches in each.
    """

    mini_batches: list[list[MicroBatch]]
    """One list of micro-batches for each optimizer step of an epoch."""
    num_loss_tokens: list[int]
    """For each mini-batch the tokens that count in the loss, over all ranks: the denominator of its
    token mean."""
    num_loss_sequences: list[int]
    """For each mini-batch the rollouts with at least one token that counts, over all ranks."""
    routed_sample: MicroBatch | None = None
    """A few of the rollouts, to compare the policy's own routes with the engine's. None: the
    engine records none."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all mini-batches."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]


@dataclass
class ScoredRollouts:
    """The rewards that one rank computed: lists with one entry per completion, in the order of its
    groups."""

    rewards: list[float | None] = field(default_factory=list)
    """The weighted sum over the reward functions. None: no reward is known."""
    by_name: dict[str, list[float | None]] = field(default_factory=dict)
    """The reward of each function. None: does not apply. NaN: unusable."""
    statuses: dict[str, list[str]] = field(default_factory=dict)
    """For each function "ok", "not_applicable", "error" or "timeout"."""
    first_error: str | None = None
    """The first failure of the function that failed most, with its traceback."""
    texts: list[str] = field(default_factory=list)
    """The decoded completions."""
    reward_inputs: list[dict[str, Any]] = field(default_factory=list)
    """The arguments that the functions were called with."""
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Notes by the index of a completion: "extra" {reward: {column: value}}; at the first
    completion of a call "logged" {reward: {metric: [sum, count]}}; at the first completion of a
    group "retried" {reward: how the first call failed}."""

    def extend(self, later: ScoredRollouts) -> None:
        """Append the completions of another round."""
        # First the notes: their keys need the number of completions before this round.
        self.notes |= {len(self.rewards) + number: note for number, note in later.notes.items()}
        self.rewards += later.rewards
        self.texts += later.texts
        self.reward_inputs += later.reward_inputs
        self.first_error = self.first_error or later.first_error
        for name, statuses in later.statuses.items():
            # A function may have been called in one of the rounds only.
            self.statuses.setdefault(name, []).extend(statuses)
        for name, values in later.by_name.items():
            self.by_name.setdefault(name, []).extend(values)

    def num_statuses(self) -> dict[str, Counter[str]]:
        """Number of completions with each status, by function."""
        return {name: Counter(statuses) for name, statuses in self.statuses.items()}

    def finite_by_name(self, number: int) -> dict[str, float | None]:
        """The reward of each function for one completion. Unusable rewards are None, because NaN is
        not JSON."""
        values = {name: column[number] for name, column in self.by_name.items()}
        return {
            name: None if value is None or math.isnan(value) else value
            for name, value in values.items()
        }


def rollout_seed(
    seed: int, step: int | str, position: int, sample: int, turn: int | str = 0
) -> int:
    """Returns the sampling seed of one turn, in [0, 2**63).

    It depends only on these coordinates, never on ranks or batches. `step` is the number of
    finished steps, `position` the prompt's index in the prompt stream, `turn` the turn's number
    (-1: the environment's start) or, for an agent, its key. An evaluation passes a text as `step`,
    the same at all steps, and the row as `position`.
    """
    # Turn 0 is left out, so that a completion has the seed of an episode's first turn.
    coordinates = f"{seed}/{step}/{position}/{sample}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(coordinates.encode(), digest_size=8).digest()
    # 63 bits: vLLM takes the seed as a signed 64-bit integer.
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class BatchPlan:
    """The plan says which rank trains on which rollouts, and in which forward passes.

    `plan[mini_batch][rank][micro_batch]` is a list of rollout ids. A row is such a list. The plan
    takes 4 bytes per rollout and 4 per row.
    """

    ids: npt.NDArray[np.int32]
    """[B] Rollout ids, row after row. In each mini-batch the rows of rank 0 come first, then the
    rows of rank 1."""
    lengths: list[npt.NDArray[np.int32]]
    """For each mini-batch [ranks, rows per rank]: the number of rollouts in each row."""

    def __iter__(self) -> Iterator[list[list[list[int]]]]:
        for block_ids, lengths in self.blocks():
            # The ids of all ranks' rows follow each other: one iterator deals them out.
            ids = iter(block_ids.tolist())
            yield [
                [[next(ids) for _ in range(length)] for length in rank] for rank in lengths.tolist()
            ]

    def __getitem__(self, mini_batch: int) -> list[list[list[int]]]:
        return list(self)[mini_batch]

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Yields (rollout ids, lengths [ranks, rows per rank]) of each mini-batch."""
        begin = 0
        for lengths in self.lengths:
            end = begin + int(lengths.sum())
            yield self.ids[begin:end], lengths
            begin = end


@dataclass(frozen=True)
class StepDecision:
    """Everything that rank 0 decides about a step. [B] fields are in the order of rollout ids."""

    # One entry per group that is trained on.
    positions: npt.NDArray[np.int64]
    """[P] Positions in the prompt stream of the groups to train on. The index in this array is the
    group's slot."""
    # One entry per rollout of these groups.
    rewards: npt.NDArray[np.float64]
    """[B] Weighted sums minus the overlong penalty. NaN: unknown."""
    advantages: npt.NDArray[np.float32]
    """[B]"""
    in_loss: npt.NDArray[np.bool_]
    """[B] False: no token of the rollout counts in the loss."""
    plan: BatchPlan
    """The plan of the ranks' forward passes."""
    # The two together map a rank's groups, dropped ones included, to slots.
    num_groups: npt.NDArray[np.int64]
    """[ranks] The number of groups that each rank sampled."""
    slots: npt.NDArray[np.int32]
    """The slots of all sampled groups, rank after rank, in the order in which the rank holds them.
    -1: not trained on."""
    num_loss_tokens: list[int]
    """For each mini-batch the tokens that count in the loss."""
    num_loss_sequences: list[int]
    """For each mini-batch the rollouts with at least one token that counts."""
    num_tokens: int
    """Tokens to train on, prompts and completions together."""
    num_sampled_tokens: int
    """Completion tokens that the engines sampled, those of dropped groups included."""
    metrics: dict[str, float | None]
    """The metrics of the step that rank 0 computed."""
    advantage_slope: float | None = None
    """What a reward of one more adds to an advantage, in all groups alike. None: each group has its
    own."""


@dataclass(frozen=True)
class Decision:
    """The part of a StepDecision that one rank needs. Dicts by rollout id have the rollouts that
    this rank sampled and some rank trains on."""

    slots: dict[int, int]
    """Slots by position in the prompt stream, for this rank's groups that are trained on."""
    advantages: dict[int, float]
    """Advantages by rollout id."""
    in_loss: dict[int, bool]
    """By rollout id: False if no token of the rollout counts in the loss."""
    trained_by: dict[int, int]
    """By rollout id: the rank that trains on the rollout."""
    rows: list[list[list[int]]]
    """`rows[mini_batch][micro_batch]`: ids of the rollouts that this rank trains on."""
    num_rollouts: int
    """The number of rollouts to train on, over all ranks."""
    # The next four counts are over all ranks too.
    num_loss_tokens: list[int]
    """The tokens of each mini-batch that count in the loss."""
    num_loss_sequences: list[int]
    """The rollouts of each mini-batch with at least one token that counts."""
    num_tokens: int
    """Tokens to train on, prompts and completions together."""
    num_sampled_tokens: int
    """Completion tokens that the engines sampled, those of dropped groups included."""
    rank0_decision: StepDecision | None = None
    """The whole decision, on rank 0 only."""
    advantage_slope: float | None = None
    """As in StepDecision."""

    def rollout_ids(self, group: RolloutGroup) -> range:
        """Returns the ids of a group's rollouts; none if it is not trained on."""
        slot = self.slots.get(group.prompt.position)
        size = len(group.completions)
        return range(0) if slot is None else range(slot * size, (slot + 1) * size)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics on rank 0; empty on the other ranks."""
        return self.rank0_decision.metrics if self.rank0_decision is not None else {}


@dataclass
class SyncStats:
    """The statistics of one weight sync."""

    bytes: int = 0
    """Bytes handed to one engine, padding of the shards included. A base model that stays in the
    engine under LoRA adapters does not count."""
    num_collectives: int = 0
    """Collectives that the sync took. 0 if one rank holds the whole policy."""
    proof_s: float = 0.0
    """Seconds of the weight proof, if it ran."""
    weights_id: str = ""
    """Digest of the synced weights. Empty if nobody asked for it."""
