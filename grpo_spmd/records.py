"""This module has the records that the phases of a step pass to each other.

A rollout is one completion of one prompt; a group is all rollouts of one prompt. A rollout of
several turns with an environment is an episode. A slot is the index of a group among those that a
step trains on; a rollout's id is slot * G + sample, its index in the group. Sampling and training
are distributed over ranks independently, so a rollout may be trained on by another rank than the
one that sampled it.

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

# Not imported at run time, since commands that start without torch use these records, too.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

# A chat message, in the form that chat templates take.
Message = dict[str, Any]
# Routes of a mixture of experts: [tokens, layers, k], the numbers of the k experts that each layer
# took for a token; 0 in a layer without experts.
Routes: TypeAlias = "npt.NDArray[np.uint8 | np.uint16]"
# Values by name, which can be sent as JSON.
Fields = dict[str, Any]
# How an episode ended.
EPISODE_STATUSES = (
    # By itself.
    "ok",
    # After `environment.max_turns` turns.
    "max_turns",
    # The next messages do not fit into `environment.max_tokens`.
    "max_tokens",
    # The next messages do not fit into the engine's context.
    "context_overflow",
    # The last turn was cut off.
    "truncated",
    # The environment raised, in both attempts.
    "env_error",
    # The environment took too long, in both attempts.
    "env_timeout",
    # The last turn, or several turns in a row, had only invalid tool calls.
    "invalid_calls",
)
# Episodes with these statuses are left out of their group and of the loss.
FAILED_STATUSES = ("env_error", "env_timeout")


@dataclass(frozen=True)
class Prompt:
    """One prompt of the shuffled prompt stream."""

    position: int
    """Index in the prompt stream, counted from 0 over the whole run. For a data set of 64 rows,
    position 69 is in the second epoch."""
    row: int
    """Index of the row in the data set."""
    token_ids: list[int]
    """The prompt's tokens, as the engine gets them."""
    text: str | list[Message]
    """The prompt of the row: a string or chat messages."""
    columns: Fields
    """The other columns of the row, for the reward functions."""

    def text_before(self, completion: Completion) -> str | list[Message]:
        """Returns the text or messages before a completion, for reward functions and displays.

        An episode records the messages with which it began, its opening: they take the place of the
        row's prompt, since an environment's reset() may have added the task itself, and an agent (a
        program that calls the policy) may have begun with other messages.
        """
        return self.with_opening(completion.episode.opening if completion.episode else [])

    def with_opening(self, opening: list[Message]) -> str | list[Message]:
        """Returns the messages `opening`, or the row's prompt if they are empty or just that prompt
        as a user's message."""
        is_row = not opening or opening == [{"role": "user", "content": self.text}]
        return self.text if is_row else opening


@dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled for one prompt, or in all turns of one episode."""

    token_ids: list[int]
    """The sampled tokens."""
    logprobs: list[float]
    """`logprobs[i]` is the engine's logprob of `token_ids[i]` at the sampling temperature."""
    finish_reason: str
    """"stop" or "length". An episode that had no room for another turn has "length", too."""
    episode: Episode | None = None
    """The episode, if the policy talked to an environment."""
    # An array cannot say whether it equals another one.
    routes: Routes | None = field(default=None, compare=False)
    """The experts that the engine's routers chose, for the prompt and all sampled tokens but the
    last, which the engine never read. None: they were not recorded, or are in the episode's
    segments."""


@dataclass(frozen=True)
class Segment:
    """Consecutive turns of an episode that form one sequence of the policy's forward pass.

    The prompt of each later turn begins with the prompt and completion of the turn before it. A
    turn whose prompt begins otherwise is in another segment.
    """

    token_ids: npt.NDArray[np.int32]
    """All tokens of the sequence, the prompt included."""
    sampled: npt.NDArray[np.bool_]
    """For each token: True if the policy sampled it, False if the prompt or the environment gave
    it."""
    routes: Routes | None = None
    """The experts that the engine chose, for all tokens but the last. None: not recorded."""


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
    """A rollout of several turns with an environment.

    `Completion.token_ids` are the sampled tokens of all its segments, concatenated.
    """

    status: str
    """One of EPISODE_STATUSES."""
    segments: tuple[Segment, ...] = ()
    """The sequences to train on. Empty for an episode that failed."""
    turns: tuple[Turn, ...] = ()
    """The turns in the order in which they were sampled."""
    messages: list[Message] = field(default_factory=list)
    """The chat messages after `opening`. Reward functions get them as the completion."""
    rewards: dict[str, float | str | None] = field(default_factory=dict)
    """The environment's rewards by name. None: the reward does not apply. A string: the reward
    cannot be used, and the string says why."""
    calls_s: list[float] = field(default_factory=list)
    """Seconds of each call to the environment."""
    error: str | None = None
    """The error of an episode that failed."""
    opening: list[Message] = field(default_factory=list)
    """The chat messages before the policy's first turn. Empty for an episode that failed."""
    num_tool_calls: int | None = None
    """Number of the policy's tool calls. None: the environment has no tools, or it failed."""
    num_tool_errors: int = 0
    """Number of these calls in which the tool raised for another reason than its arguments."""


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt and its G completions, as a rank has sampled them.

    Their sampling seeds are those of `rollout_seed`.
    """

    slot: int
    """Index of the prompt within the step, 0 .. P-1."""
    prompt: Prompt
    """The prompt of all completions."""
    completions: list[Completion]
    """The G completions, in the order of their samples."""


@dataclass(frozen=True)
class Rollout:
    """One rollout as numbers without text, as the rank that sampled it sends it to the rank that
    trains on it.

    Token ids and logprobs are the engine's lists on the sending rank, and arrays on the receiving
    rank, since making lists of all tokens of a step would take long.
    """

    rollout_id: int
    """slot * G + sample."""
    advantages: float | npt.NDArray[np.float64]
    """One number for all completion tokens, or one for each."""
    loss_mask: bool | npt.NDArray[np.bool_]
    """True where a completion token counts in the loss; one value for all tokens, or one for each.
    All are False if the reward is unknown, or if the completion was cut off and
    `loss.mask_truncated` is on."""
    prompt_ids: list[int] | npt.NDArray[np.int32]
    """The tokens of the prompt."""
    completion_ids: list[int] | npt.NDArray[np.int32]
    """The sampled tokens."""
    rollout_logprobs: list[float] | npt.NDArray[np.float32 | np.float64]
    """The engine's logprobs of `completion_ids`."""
    segments: tuple[Segment, ...] = ()
    """The segments of an episode. Together they have all of `prompt_ids` and `completion_ids`."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy's forward pass reads for this rollout."""
        if self.segments:
            return sum(len(segment.token_ids) for segment in self.segments)
        return len(self.prompt_ids) + len(self.completion_ids)


@dataclass(frozen=True)
class TeacherSignal:
    """The teachers' scores of the completion tokens of one micro-batch.

    A teacher is a model whose distributions the policy is trained towards. The signal has either
    `logprobs` or `divergence`.
    """

    coef: float
    """Weight of the teacher's term, from `teacher.coef`."""
    logprobs: Tensor | None = None
    """float32 [C]: the teacher's logprob of each sampled token."""
    divergence: Callable[[Tensor, Tensor], Tensor] | None = None
    """A function of the policy's hidden states [C, D] and head [V, D]. It returns float32 [C]: at
    each token the divergence between the policy's and the teacher's distributions."""
    masks_by_teacher: dict[str, Tensor] = field(default_factory=dict)
    """bool [C] for each teacher: the tokens that it scored. Empty if there is only one teacher."""
    answered_mask: Tensor | None = None
    """bool [C]: True for the tokens for which the teacher's server sent an answer. None: all."""


@dataclass
class RowRoutes:
    """The experts that the engine's routers chose for the tokens of a micro-batch.

    The policy's forward pass uses ("replays") them, so that it computes what the engine sampled
    from. `loads` and `balance_losses` are for the load-balance loss. E is the number of experts of
    a layer.
    """

    experts: Tensor
    """[T, layers, k], as in Routes. The last token of a sequence has the routes of the one before
    it: the engine never read it, and it predicts nothing."""
    is_recorded: Tensor
    """bool [T]. False for the last token of each sequence."""
    is_replayed: bool = True
    """False: the policy uses the experts of its own router, and counts in `differences` where they
    differ from the engine's."""
    loads: Tensor | None = None
    """float32 [layers, E]: the derivative of the mini-batch's load-balance loss by a token's
    probability of an expert. None: the loss has no such term."""
    balance_losses: dict[int, Tensor] = field(default_factory=dict)
    """What the micro-batch adds to the load-balance loss, by layer; written by the policy's forward
    pass."""
    differences: dict[int, Tensor] = field(default_factory=dict)
    """By layer, the number of tokens for which the policy's own router chooses another set of
    experts than the engine's; written by the policy's forward pass."""


@dataclass(frozen=True)
class PrefixTree:
    """The sequences of a micro-batch as trees, in which each shared prefix is computed only once.

    A node is a span of tokens; a sequence is the nodes on a way that begins at a root. The models
    read the N tokens of the M nodes, node after node, in the place of the T tokens of the
    sequences. A token attends to the nodes before its own on the way from the root, and to the
    tokens before it in its own node.
    """

    tokens: Tensor
    """int64 [N]. For each token of the nodes its index in the row (the concatenated sequences), in
    the first sequence that has it."""
    index: Tensor
    """int64 [T]. For each token of the row its index among the nodes' tokens."""
    lengths: list[int]
    """The lengths of the M nodes. Their sum is N."""
    paths: list[tuple[int, ...]]
    """For each node the numbers of the nodes before it on the way from the root."""
    starts: Tensor
    """int32 [M + 1]. The index of each node's first token, and N."""
    keys: Tensor
    """int64 [K]. Node after node, the indices of the tokens on the way from the root to the end of
    the node, whose keys its tokens attend to."""
    key_starts: Tensor
    """int32 [M + 1]. The index in `keys` of each node's first one, and K."""


@dataclass
class MicroBatch:
    """The sequences of one forward and backward pass on one rank.

    They are concatenated to one row without padding; other modules call a micro-batch a row, too.
    The entries of all [C] fields are for the same C completion tokens.
    """

    # The row that the policy reads.
    input_ids: Tensor
    """int64 [T]"""
    position_ids: Tensor
    """int64 [T]. Starts at 0 in each sequence."""
    sequence_lengths: list[int]
    """The lengths of the S sequences. Their sum is T."""
    sequence_starts: Tensor
    """int32 [S + 1]. The index of each sequence's first token, and T."""
    # The sampled tokens, with the results of sampling and scoring.
    predict_index: Tensor
    """int64 [C]. Index in the row of the token whose hidden state predicts `target_ids[c]`."""
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
    slice_predictions: list[int] = field(default_factory=list)
    """With sequence parallelism each rank that shares the row has an equal slice of its T tokens.
    For each slice: how many of the C tokens are predicted there. They add up to C."""
    # Filled between assembly and update, by attach_logprobs, the teachers and the critic.
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
    """The experts that the engine chose for the tokens. None: the policy uses its own router's."""
    tree: PrefixTree | None = None
    """The shared prefixes and the rest of the row, which the models read in its place. None: they
    read the row itself."""


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of a step that this rank trains on, in the order of training.

    All ranks have the same number of mini-batches, and of micro-batches in each mini-batch.
    """

    mini_batches: list[list[MicroBatch]]
    """One list of micro-batches for each optimizer step of an epoch."""
    num_loss_tokens: list[int]
    """For each mini-batch the number of tokens that count in the loss, over all ranks. It is the
    denominator of a mean over tokens."""
    num_loss_sequences: list[int]
    """For each mini-batch the number of rollouts with at least one such token, over all ranks."""
    routed_sample: MicroBatch | None = None
    """A few of the rollouts, to compare the experts that the policy's own routers choose with the
    engine's. None: the engine records no experts."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches of all mini-batches."""
        return [micro_batch for mini_batch in self.mini_batches for micro_batch in mini_batch]


@dataclass
class ScoredRollouts:
    """The rewards that one rank computed for the completions that it sampled.

    Lists have one entry for each completion, in the order of the rank's groups.
    """

    rewards: list[float | None] = field(default_factory=list)
    """The weighted sum of the completion's rewards. None: unknown (scorers.weighted_sum)."""
    by_name: dict[str, list[float | None]] = field(default_factory=dict)
    """By name of a reward: its values. None: it does not apply. NaN: it cannot be used."""
    statuses: dict[str, list[str]] = field(default_factory=dict)
    """By name of a reward: "ok", "not_applicable", "error" or "timeout" (protocol.py)."""
    first_error: str | None = None
    """The first failure of the function that failed most, with its traceback."""
    texts: list[str] = field(default_factory=list)
    """The decoded completions."""
    reward_inputs: list[dict[str, Any]] = field(default_factory=list)
    """The keyword arguments with which reward functions were called for this completion."""
    notes: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By index of a completion, its notes by kind. "extra" is what rewards logged for it: {reward:
    {column: value}}. At the first completion of a call, "logged" is {reward: {metric: [sum,
    count]}}. At the first completion of a group, "retried" is {reward: the status of the failed
    call for the group}."""

    def extend(self, later: ScoredRollouts) -> None:
        """Appends the completions of a later round of the same step.

        With dynamic sampling a step has several rounds: dropped groups are replaced.
        """
        # The notes come first, since their indices are shifted by the number of completions so far.
        self.notes |= {len(self.rewards) + number: note for number, note in later.notes.items()}
        self.rewards += later.rewards
        self.texts += later.texts
        self.reward_inputs += later.reward_inputs
        self.first_error = self.first_error or later.first_error
        for name, statuses in later.statuses.items():
            # A round without completions has no statuses, so the name may be new.
            self.statuses.setdefault(name, []).extend(statuses)
        for name, values in later.by_name.items():
            self.by_name.setdefault(name, []).extend(values)

    def num_statuses(self) -> dict[str, Counter[str]]:
        """Returns the number of completions with each status, by reward."""
        return {name: Counter(statuses) for name, statuses in self.statuses.items()}

    def finite_by_name(self, number: int) -> dict[str, float | None]:
        """Returns the value of each reward for the completion with index `number`.

        NaN becomes None, since JSON has no NaN.
        """
        values = {name: column[number] for name, column in self.by_name.items()}
        return {
            name: None if value is None or math.isnan(value) else value
            for name, value in values.items()
        }


def rollout_seed(
    seed: int, step: int | str, position: int, sample: int, turn: int | str = 0
) -> int:
    """Returns the sampling seed of one turn, in [0, 2**63).

    It depends only on these arguments, never on ranks or batches. `seed` is the run's, `step` the
    number of finished steps, `position` the prompt's index in the prompt stream, `sample` the index
    in the group, `turn` the turn's number (-1: the environment's reset) or, for an agent, its key.
    An evaluation passes a string as `step`, the same in all steps, and the row as `position`.
    """
    # Turn 0 is not hashed, so that a completion without turns has the seed of a first turn.
    coordinates = f"{seed}/{step}/{position}/{sample}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(coordinates.encode(), digest_size=8).digest()
    # 63 bits: vLLM takes the seed as a signed 64-bit integer.
    return int.from_bytes(digest, "big") >> 1


@dataclass(frozen=True)
class BatchPlan:
    """The plan of which rank trains on which rollouts, and in which forward passes.

    `plan[mini_batch][rank][micro_batch]` is a list of rollout ids, called a row. The plan is stored
    in arrays, which take 4 bytes for each rollout and 4 for each row.
    """

    ids: npt.NDArray[np.int32]
    """[B] Rollout ids of all rows, concatenated. In each mini-batch the rows of rank 0 come first,
    then those of rank 1, and so on."""
    lengths: list[npt.NDArray[np.int32]]
    """For each mini-batch [ranks, rows per rank]: the number of rollouts in each row."""

    def __iter__(self) -> Iterator[list[list[list[int]]]]:
        """Yields the rows of each mini-batch, as `__getitem__` returns them."""
        for block_ids, lengths in self.blocks():
            # The ids are in the order of ranks and rows, so each row takes the next ones.
            ids = iter(block_ids.tolist())
            yield [
                [[next(ids) for _ in range(length)] for length in rank] for rank in lengths.tolist()
            ]

    def __getitem__(self, mini_batch: int) -> list[list[list[int]]]:
        """Returns the rows of a mini-batch as [rank][micro_batch], each a list of rollout ids."""
        return list(self)[mini_batch]

    def blocks(self) -> Iterator[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]:
        """Yields (rollout ids, lengths [ranks, rows per rank]) for each mini-batch."""
        begin = 0
        for lengths in self.lengths:
            end = begin + int(lengths.sum())
            yield self.ids[begin:end], lengths
            begin = end


@dataclass(frozen=True)
class StepDecision:
    """All that rank 0 decides about a step. Each rank gets its part, a Decision.

    Fields with [B] have one entry for each of the step's B rollouts, in the order of their ids.
    """

    # One entry for each group that is trained on.
    positions: npt.NDArray[np.int64]
    """[P] Positions in the prompt stream of the groups to train on. The index in this array is the
    group's slot."""
    # One entry for each rollout of these groups.
    rewards: npt.NDArray[np.float64]
    """[B] Weighted sums minus the overlong penalty. NaN: unknown."""
    advantages: npt.NDArray[np.float32]
    """[B]"""
    in_loss: npt.NDArray[np.bool_]
    """[B] False: no token of the rollout counts in the loss."""
    plan: BatchPlan
    """The plan of the ranks' forward passes."""
    # These two fields map each rank's groups to slots.
    num_groups: npt.NDArray[np.int64]
    """[ranks] The number of groups that each rank sampled, including those that are dropped."""
    slots: npt.NDArray[np.int32]
    """The slots of all sampled groups: first those of rank 0 in that rank's order, then those of
    rank 1, and so on. -1: the group is not trained on."""
    num_loss_tokens: list[int]
    """For each mini-batch the number of tokens that count in the loss."""
    num_loss_sequences: list[int]
    """For each mini-batch the number of rollouts with at least one such token."""
    num_tokens: int
    """Number of tokens to train on, prompts and completions together."""
    num_sampled_tokens: int
    """Number of completion tokens that the engines sampled, including those of dropped groups."""
    metrics: dict[str, float | None]
    """The metrics of the step that rank 0 computed."""
    shares_prefixes: bool = False
    """True if the models compute a prefix that several sequences of a row share only once."""
    advantage_slope: float | None = None
    """How much an advantage grows if the reward grows by 1, if this is the same for all groups.
    None: it differs from group to group."""


@dataclass(frozen=True)
class Decision:
    """The part of a StepDecision that rank 0 sends to one rank.

    Dicts by rollout id are for the rollouts that this rank sampled and that are trained on, by this
    rank or another.
    """

    slots: dict[int, int]
    """Slots by position in the prompt stream, for this rank's groups that are trained on."""
    advantages: dict[int, float]
    """Advantages by rollout id."""
    in_loss: dict[int, bool]
    """By rollout id: False if no token of the rollout counts in the loss."""
    trained_by: dict[int, int]
    """By rollout id: the rank that trains on the rollout, the first of those that share its row."""
    rows: list[list[list[int]]]
    """`rows[mini_batch][micro_batch]`: ids of the rollouts that this rank trains on."""
    num_rollouts: int
    """The number of rollouts to train on, over all ranks."""
    # The next four fields are as in StepDecision, over all ranks.
    num_loss_tokens: list[int]
    """For each mini-batch the number of tokens that count in the loss."""
    num_loss_sequences: list[int]
    """For each mini-batch the number of rollouts with at least one such token."""
    num_tokens: int
    """Number of tokens to train on, prompts and completions together."""
    num_sampled_tokens: int
    """Number of completion tokens that the engines sampled, including those of dropped groups."""
    rank0_decision: StepDecision | None = None
    """The whole decision, on rank 0 only."""
    advantage_slope: float | None = None
    """As in StepDecision."""
    shares_prefixes: bool = False
    """As in StepDecision."""

    def rollout_ids(self, group: RolloutGroup) -> range:
        """Returns the ids of a group's rollouts, or no ids if the group is not trained on."""
        slot = self.slots.get(group.prompt.position)
        size = len(group.completions)
        return range(0) if slot is None else range(slot * size, (slot + 1) * size)

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics on rank 0; empty on the other ranks."""
        return self.rank0_decision.metrics if self.rank0_decision is not None else {}


@dataclass
class SyncStats:
    """The statistics of one weight sync, which copies the policy's weights into the engines."""

    bytes: int = 0
    """Bytes that one engine received, including the padding of shards. If only LoRA adapters are
    sent, the base model in the engine is not counted."""
    num_collectives: int = 0
    """Number of collectives in the sync. 0 if one rank holds the whole policy."""
    proof_s: float = 0.0
    """Seconds that the weight proof took; 0 if it did not run."""
    weights_id: str = ""
    """Digest of the synced weights. Empty if the sync was not asked for it."""
