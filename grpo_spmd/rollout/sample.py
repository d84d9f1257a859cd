"""G completions for each prompt of a step: seeds, who scores what, and what need not be sampled again."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.data.prompts import PromptStream, TailStream, check_enough_to_launch
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.store import count_up, delete_counter
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import ConversationId, EpisodeTask, GenerationHooks, Request
from grpo_spmd.records import Completion, Prompt, RolloutGroup, rollout_seed
from grpo_spmd.rollout.buffer import RolloutBuffer

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments
    from grpo_spmd.rewards.pool.pool import RewardPool


class Sampler:
    """Samples groups with the engine; `buffer` keeps what is finished, and has what a run that was stopped had. With
    `lengths` the groups expected to take longest are begun first, with `tail` a short round ends when the step is full.
    With `environments` a completion is an episode, which the first rank of its engine has. With `early` slow
    rewards are called for a group as soon as it is complete."""

    def __init__(
        self,
        engine: RolloutEngine,
        group_size: int,
        seed: int,
        buffer: RolloutBuffer | None = None,
        lengths: ExpectedLengths | None = None,
        tail: TailBatching | None = None,
        environments: Environments | None = None,
        early: EarlyScoring | None = None,
    ) -> None:
        self._engine, self._group_size, self._seed = engine, group_size, seed
        self._buffer, self._lengths, self._tail, self._environments = (
            buffer,
            lengths,
            tail,
            environments,
        )
        self._early = early if environments is None else None

    def sample(
        self, prompts: Sequence[Prompt], step: int, weights_id: str
    ) -> tuple[list[RolloutGroup], float]:
        """Collective. The groups that this rank scores, in the order of slots, and its seconds of generation.
        Prompts, equal on all ranks, go to engines by `rollout.schedule`, the groups of one engine to its ranks in turn:
        each is on exactly one rank, which may have none. `step` stands for the policy and the random numbers,
        `weights_id` for the weights that the engine holds (SyncStats). A generation that is ended early keeps what was
        finished; its groups are not complete, and `Preemption.guard` ends the step."""
        engine, buffer, all_samples = self._engine, self._buffer, range(self._group_size)
        kept = (
            buffer.find(step, weights_id, prompts, self._group_size) if buffer is not None else {}
        )
        missing = {
            slot: [n for n in all_samples if (slot, n) not in kept] for slot in range(len(prompts))
        }
        jobs = [slot for slot, samples in missing.items() if samples]
        expected = None
        if self._lengths is not None:
            finished = {
                slot: [kept[slot, n][2] for n in all_samples if (slot, n) in kept] for slot in jobs
            }
            of_prompts = self._lengths.of(prompts, finished)
            expected = [of_prompts[slot] for slot in jobs]
        race = None
        if self._tail is not None:
            of_kept = [(slot, place[2]) for (slot, _), place in kept.items()]
            race = self._tail.begin(missing, of_kept, is_first=engine.tp_rank == 0)

        def task(place: ConversationId) -> EpisodeTask:
            prompt, sample = prompts[jobs[place[0]]], missing[jobs[place[0]]][place[1]]
            place_of = self._seed, step - 1, prompt.position, sample  # by the steps before it
            return prompt, partial(rollout_seed, *place_of)

        def request(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
            if turns:
                return None
            prompt, seed = task((job, number))
            return Request(prompt.token_ids, seed())

        def keep(job: int, number: int, completion: Completion) -> None:
            if buffer is not None and engine.tp_rank == 0:  # all ranks of an engine have the same
                buffer.keep(prompts[jobs[job]], missing[jobs[job]][number], completion)
            is_in_step = race is None or race.finish(job, len(completion.token_ids))
            own.finish(job, number, completion, is_in_step=is_in_step)

        def whole(slot: int, new: Sequence[Completion]) -> RolloutGroup:
            old, fresh = {n: kept[slot, n] for n in all_samples if (slot, n) in kept}, iter(new)
            completions = [
                buffer.read(old[n]) if buffer and n in old else next(fresh) for n in all_samples
            ]
            return RolloutGroup(slot, prompts[slot], completions)

        # Ranks of an engine share its groups; episodes are its first one's, which has their environments.
        sharing = engine.tp_size if self._environments is None else 1
        sizes = [len(missing[slot]) for slot in jobs]
        own = Groups(
            sizes, lambda job, new: whole(jobs[job], new), engine.tp_rank, sharing, self._early
        )
        start = time.perf_counter()
        try:
            if self._environments is None:
                hooks = GenerationHooks(
                    request, on_completion=keep, early_stop=race, before_step=own.meanwhile
                )
                sampled = engine.generate_shared(sizes, hooks, step, expected)
            else:
                sampled = self._environments.generate(
                    engine, sizes, task, step, finished=keep, expected=expected
                )
        finally:
            if buffer is not None:
                buffer.write()
        seconds = time.perf_counter() - start
        used = (
            self._tail.settle(race, prompts)
            if self._tail is not None and race is not None
            else set(missing)
        )
        complete = [slot for slot, samples in missing.items() if not samples and slot in used]
        rank, num_ranks = (
            engine.engine_rank * sharing + engine.tp_rank,
            engine.num_engines * sharing,
        )
        of_rank = {
            slot: whole(slot, []) for slot in complete[rank::num_ranks] if engine.tp_rank < sharing
        }
        for job in [job for job in sampled if jobs[job] in used and own.is_own(job)]:
            of_rank[jobs[job]] = own.group(job, [completion for [completion] in sampled[job]])
        groups = [group for _, group in sorted(of_rank.items())]
        if self._lengths is not None:
            dropped = [prompt for slot, prompt in enumerate(prompts) if slot not in used]
            self._lengths.note(groups, dropped[rank::num_ranks])
        return groups, seconds


# Scoring that overlaps generation: slow rewards are called for a group as soon as it is complete, while others are
# sampled. Their processes work beside the engine, which is held up for a group's decoding and for microseconds between
# two steps. What comes of a group does not depend on when it is scored. Evaluations and episodes are scored behind the
# engine.


class EarlyScoring:
    """Of a run, on this rank."""

    def __init__(self, rewards: RewardPool, tokenizer: Any) -> None:
        self._rewards, self._tokenizer = rewards, tokenizer

    @property
    def is_on(self) -> bool:
        """Whether some reward is slow now."""
        return self._rewards.starts_early

    def start(self, group: RolloutGroup) -> None:
        self._rewards.start_early(group, self._tokenizer)

    def go_on(self) -> None:
        self._rewards.go_on()


class Groups:
    """Of one generation, on one rank of an engine: its ranks take turns with the groups as these get complete, which
    they do in the same order on all of them."""

    def __init__(
        self,
        sizes: Sequence[int],
        whole: Callable[[int, Sequence[Completion]], RolloutGroup],
        tp_rank: int,
        num_sharing: int,
        early: EarlyScoring | None,
    ) -> None:
        """`sizes`: the completions to sample of each job; `whole(job, these in their order)` makes its group."""
        self._num_left, self._whole, self._tp_rank, self._num_sharing = (
            list(sizes),
            whole,
            tp_rank,
            num_sharing,
        )
        self._early = early if early is not None and early.is_on else None
        self._turns: dict[int, int] = {}  # of complete jobs
        self._done: list[dict[int, Completion]] = [{} for _ in sizes]  # by number within the job
        self._begun: dict[int, RolloutGroup] = {}

    def finish(self, job: int, number: int, completion: Completion, *, is_in_step: bool) -> None:
        """A completion is there; `is_in_step`: if its group is complete now, the step is known to have it."""
        self._num_left[job] -= 1
        self._done[job][number] = completion
        if not self._num_left[job]:
            self._turns[job] = len(self._turns) % self._num_sharing
            if self._early is not None and is_in_step and self.is_own(job):
                self._begun[job] = self._whole(
                    job, [self._done[job][n] for n in sorted(self._done[job])]
                )
                self._early.start(self._begun[job])

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """To be called between two steps of the engine."""
        return None if self._early is None else self._early.go_on

    def is_own(self, job: int) -> bool:
        return self._turns.get(job, 0) == self._tp_rank

    def group(self, job: int, completions: Sequence[Completion]) -> RolloutGroup:
        """Of all its new completions; where scoring has begun, the very object that the rewards were given."""
        return self._begun.get(job) or self._whole(job, completions)


# How long completions may become, so that the longest are begun first. No token depends on it.


class ExpectedLengths:
    """What a prompt's completions took when it was last sampled in this launch, an epoch ago. Rank 0 remembers 4 bytes
    a row of the data; a run that goes on begins with none, which costs time and changes nothing else."""

    def __init__(self) -> None:
        self._of_row = array("f")  # mean tokens; NaN: not sampled yet
        self._recent_mean = 0.0  # of the groups that were noted last
        self._to_note: list[
            tuple[int, float, int]
        ] = []  # of this rank's groups row, mean and most tokens
        self._to_guess: list[int] = []  # rows of groups that were dropped

    def note(self, groups: Sequence[RolloutGroup], dropped: Sequence[Prompt] = ()) -> None:
        """What this rank has of the groups that were sampled; told to rank 0 with the next `of`. `dropped`: prompts
        whose groups ran beside those of all ranks and were not done, so that they may be no shorter than the longest.
        """
        lengths = [
            [len(completion.token_ids) for completion in group.completions] for group in groups
        ]
        noted = zip(groups, lengths, strict=True)
        self._to_note += [(group.prompt.row, sum(own) / len(own), max(own)) for group, own in noted]
        self._to_guess += [prompt.row for prompt in dropped]

    def of(self, prompts: Sequence[Prompt], finished: Mapping[int, Sequence[int]]) -> list[float]:
        """Collective. Tokens that a completion of each prompt may have, equal on all ranks: as many as last time, else
        the mean of the prompts before it. `finished`, equal on all ranks: by the prompt's place in `prompts`, the
        tokens of its completions that are there already. What is missing ran beside them and was not done, so that it
        may be no shorter than the longest of them."""
        told, self._to_note, self._to_guess = (self._to_note, self._to_guess), [], []
        expected: list[float] = on_rank0(lambda of_ranks: self._look_up(of_ranks, prompts), told)
        return [
            max(finished[slot]) if finished.get(slot) else tokens
            for slot, tokens in enumerate(expected)
        ]

    def _look_up(
        self,
        of_ranks: Sequence[tuple[Sequence[tuple[int, float, int]], Sequence[int]]],
        prompts: Sequence[Prompt],
    ) -> list[float]:
        noted = [group for groups, _ in of_ranks for group in groups]
        new = [(row, mean) for row, mean, _ in noted]
        if noted:
            self._recent_mean = sum(mean for _, mean in new) / len(new)
            longest = max(most for *_, most in noted)
            new += [(row, longest) for _, dropped in of_ranks for row in dropped]
        for row, tokens in new:
            if row >= len(self._of_row):
                self._of_row.extend([math.nan] * (row + 1 - len(self._of_row)))
            self._of_row[row] = tokens
        found = (self._of_row[p.row] if p.row < len(self._of_row) else math.nan for p in prompts)
        return [round(self._recent_mean if math.isnan(tokens) else tokens, 1) for tokens in found]


# Tail batching: a step is full with the groups that are complete first, and the prompts of the others wait for a step
# of their own. On-policy: what was dropped is sampled anew, by the policy of the step that trains on it.


class TailRace:
    """One short round, as this rank's engine sees it. Engines count complete groups in the run's store; the number that
    a group brings the count to is its place, so that all know the order and nobody waits to learn it."""

    def __init__(
        self, counter: str, num_wanted: int, complete: Sequence[int], slots: Sequence[int], sizes: Sequence[int],
        kept: Sequence[tuple[int, int]], is_first: bool,
    ) -> None:  # fmt: skip
        """`complete`: slots with nothing left to sample, which come first; of the jobs in order `slots`, and `sizes`,
        their completions to sample; `kept`: (slot, tokens) of completions that need not be sampled. `is_first`: this
        rank speaks for its engine."""
        self.counter, self.complete, self.kept = counter, complete[:num_wanted], kept
        self._num_to_come, self._is_first = num_wanted - len(self.complete), is_first
        self._slots, self._num_left = slots, list(sizes)
        self._places: list[
            tuple[int, int]
        ] = []  # of this engine's complete groups, and their slots
        self._tokens: list[tuple[int, int]] = []  # of its completions, with their slots
        self._dropped: list[int] = []  # tokens of what was begun and not finished

    def finish(self, job: int, num_tokens: int) -> bool:
        """A completion of `job` is done. Whether with it the group is complete, and known to be in the step."""
        self._num_left[job] -= 1
        if self._is_first:
            self._tokens.append((self._slots[job], num_tokens))
            if not self._num_left[job]:
                self._places.append((count_up(self.counter), self._slots[job]))
                return self._places[-1][0] <= self._num_to_come
        return False

    def is_over(self) -> bool:
        """Whether enough groups are complete, on all engines together."""
        return self._num_to_come <= 0 or count_up(self.counter, 0) >= self._num_to_come

    def drop(self, num_tokens: Sequence[int]) -> None:
        """Of each request that the engine drops, the tokens that it has."""
        if self._is_first:
            self._dropped += [tokens for tokens in num_tokens if tokens]

    def told(self) -> dict[str, Any]:
        return {"places": self._places, "tokens": self._tokens, "dropped": self._dropped}

    def judge(self, parts: Sequence[dict[str, Any]]) -> tuple[list[int], dict[str, float]]:
        """On rank 0: the slots that the step is made of, and the round's metrics."""
        delete_counter(self.counter)  # all ranks have stopped asking
        places = sorted(tuple(place) for part in parts for place in part["places"])
        taken = {*self.complete, *(slot for _, slot in places[: self._num_to_come])}
        finished = [*self.kept, *(tuple(tokens) for part in parts for tokens in part["tokens"])]
        launched = [tokens for _, tokens in finished] + [
            tokens for part in parts for tokens in part["dropped"]
        ]
        trained = sum(tokens for slot, tokens in finished if slot in taken)
        launched = launched or [0]  # the run was stopped at once
        return sorted(taken), {
            "rollout/tail_dropped_tokens_frac": 1 - trained / max(sum(launched), 1),
            "rollout/tail_launched_tokens_mean": sum(launched) / len(launched),
            "rollout/tail_launched_tokens_p95": float(np.percentile(launched, 95)),
        }


class TailBatching:
    """Holds the races of a run."""

    def __init__(self, stream: TailStream, num_prompts: int) -> None:
        """`num_prompts`: what a step is made of."""
        self._stream, self._num_prompts, self._num_races = stream, num_prompts, 0

    def begin(
        self, missing: dict[int, list[int]], kept: Sequence[tuple[int, int]], is_first: bool
    ) -> TailRace | None:
        """The race of a round with the samples `missing` of each slot, equal on all ranks; None where none is left."""
        if len(missing) <= self._num_prompts:
            return None
        self._num_races += 1
        complete = [slot for slot, samples in missing.items() if not samples]
        jobs = {slot: len(samples) for slot, samples in missing.items() if samples}
        counter = f"complete/{self._num_races}"
        return TailRace(
            counter, self._num_prompts, complete, list(jobs), list(jobs.values()), kept, is_first
        )

    def settle(self, race: TailRace, prompts: Sequence[Prompt]) -> set[int]:
        """Collective. The slots that the step is made of; the prompts of the others wait."""
        slots, metrics = on_rank0(race.judge, race.told())
        taken = set(slots)
        self._stream.leave(
            [prompt for slot, prompt in enumerate(prompts) if slot not in taken], metrics
        )
        return taken


def open_tail(
    fresh: PromptStream, num_rows: int, rollout: RolloutConfig, waiting: Sequence[int]
) -> tuple[TailStream, TailBatching]:
    """For a run that goes on with `waiting` prompts. Raises ConfigError."""
    check_enough_to_launch(num_rows, rollout)
    stream = TailStream(fresh, num_rows, rollout.num_launched_prompts, waiting)
    return stream, TailBatching(stream, rollout.num_prompts_per_step)
