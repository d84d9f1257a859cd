"""This module samples G completions (`rollout.group_size`) for each prompt of a step.

It decides the random seeds, which rank scores which group, and what need not be sampled again after
a restart. A *slot* is the index of a prompt in the step. A *job* is a slot that still has
completions to generate, and a *round* is one call of `Sampler.sample`. Slow rewards are called
while other groups are still being sampled (`early_rewards`), the groups with the longest expected
completions begin first (ExpectedLengths), and tail batching starts more prompts than the step
trains on and keeps the groups that are complete first (TailBatching).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_spmd.config.schema import EvalConfig, RolloutConfig
from grpo_spmd.data.prompts import PromptStream, TailStream, check_enough_to_launch
from grpo_spmd.distributed.collectives import count_up, delete_counter, on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import (
    ConversationId,
    EpisodeTask,
    GenerationHooks,
    Request,
    policy_request,
)
from grpo_spmd.records import Completion, Prompt, RolloutGroup, rollout_seed
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rollout.buffer import RolloutBuffer, Slot, StoredCompletion

# Episodes are off by default; then their modules are not even imported.
if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments


@dataclass(frozen=True)
class Sampler:
    """Samples the groups of completions of each step, with the engines of all ranks together."""

    engine: RolloutEngine
    group_size: int
    seed: int
    buffer: RolloutBuffer | None = None
    """Keeps finished completions on disk, and has the completions of an interrupted run."""
    lengths: ExpectedLengths | None = None
    """If set, the groups that are expected to take longest begin first."""
    tail: TailBatching | None = None
    """If set, more prompts are started than the step trains on, and a round ends as soon as enough
    groups are complete."""
    environments: Environments | None = None
    """If set, a completion is an episode: several turns between the policy and an environment. The
    first rank of an engine runs all episodes of the engine."""
    early_rewards: RewardPool | None = None
    """If set, slow rewards are called for a group as soon as it is complete (never for episodes).

    The reward processes run beside the engine, which is only delayed while a group is decoded, and
    by microseconds between two of its steps. The scores of a group do not depend on when it is
    scored."""
    tokenizer: Any = None
    """Decodes the groups that are scored early."""

    def sample(
        self, prompts: Sequence[Prompt], step: int, weights_id: str
    ) -> tuple[list[RolloutGroup], float]:
        """Collective. Returns (groups, seconds): the groups that this rank scores, in the order of
        slots, and the seconds of generation.

        The prompts are equal on all ranks. They go to engines by `rollout.schedule`, and the groups
        of one engine to its ranks in turn: each group is on exactly one rank, and a rank may have
        none. `step` determines the random numbers; `weights_id` names the weights that the engine
        holds (SyncStats). If the generation is aborted, the finished completions are kept on disk.
        The groups are then incomplete, and `Preemption.guard` ends the step.
        """
        buffer = self.buffer
        stored = buffer.find(step, weights_id, prompts, self.group_size) if buffer else {}
        sampling = _Round(self, prompts, step, stored)
        stored_lengths = [(slot, entry.num_tokens) for (slot, _), entry in stored.items()]
        # The expected tokens of a completion, by job.
        expected = None
        if self.lengths is not None:
            by_slot = self.lengths.estimate(prompts, stored_lengths)
            expected = [by_slot[slot] for slot in sampling.jobs]
        if self.tail is not None:
            # The first rank of each engine reports the engine's complete groups.
            is_first = self.engine.tp_rank == 0
            sampling.race = self.tail.begin(sampling.missing, stored_lengths, is_first)
        start = time.perf_counter()
        try:
            conversations = generate(
                self.engine,
                self.environments,
                [len(sampling.missing[slot]) for slot in sampling.jobs],
                task=sampling.task,
                policy_version=step,
                expected=expected,
                on_completion=sampling.finish,
                early_stop=sampling.race,
                before_step=None if sampling.early is None else sampling.early.poll,
            )
        # An aborted generation must not lose the completions that were finished.
        finally:
            if buffer:
                buffer.write()
        seconds = time.perf_counter() - start
        # The step trains on all slots, unless tail batching has dropped some of them.
        slots = set(sampling.missing)
        if self.tail is not None and sampling.race is not None:
            slots = self.tail.settle(sampling.race, prompts)
        groups = sampling.groups(conversations, slots)
        if self.lengths is not None:
            dropped = [prompt for slot, prompt in enumerate(prompts) if slot not in slots]
            # The ranks share out the dropped prompts, since rank 0 gets the records of all ranks.
            self.lengths.record(groups, dropped[sampling.rank :: sampling.num_ranks])
        return groups, seconds


def generate(
    engine: RolloutEngine,
    environments: Environments | None,
    sizes: Sequence[int],
    *,
    task: Callable[[ConversationId], EpisodeTask],
    policy_version: int,
    evaluation: EvalConfig | None = None,
    expected: Sequence[float] | None = None,
    **hooks: Any,
) -> dict[int, list[list[Completion]]]:
    """Collective. Samples one completion for each conversation. Returns, for each job of this
    engine, a list with one list [completion] for each of the job's conversations.

    Job j has `sizes[j]` conversations, which one engine samples. With environments a completion is
    an episode, and only the first rank of an engine gets the engine's episodes. `task` returns the
    prompt of a conversation and the function for its seeds. `evaluation` has the settings of an
    evaluation; None for rollouts. `expected` has the expected tokens of one completion by job,
    equal on all ranks; None if they are unknown. `hooks` are further fields of GenerationHooks, of
    which only `on_completion` is used for episodes.
    """
    if environments is not None:
        return environments.generate(
            engine,
            sizes,
            task,
            policy_version,
            evaluation=evaluation,
            finished=hooks.get("on_completion"),
            expected=expected,
        )

    def next_request(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
        """Returns the request for the only turn of a conversation, or None once it is sampled.

        The engine calls it. `number` is the conversation's number within the job.
        """
        if turns:
            return None
        prompt, seed = task((job, number))
        return policy_request(prompt.token_ids, seed(), evaluation)

    request_hooks = GenerationHooks(next_request, **hooks)
    return engine.generate_shared(sizes, request_hooks, policy_version, expected)


class _Round:
    """The state of one call of `Sampler.sample`: which samples are missing, and what was sampled.

    A slot is the index of a prompt in the step, and a job is a slot with samples to generate. The
    ranks of an engine take its groups in turn as the groups become complete. The order in which
    groups become complete is the same on all ranks of the engine.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Prompt],
        step: int,
        stored: Mapping[Slot, StoredCompletion],
    ) -> None:
        """`stored` has, by (slot, sample), the completions that an interrupted run has left on
        disk; all others are sampled in this round."""
        engine = sampler.engine
        self._seed = sampler.seed
        self._buffer = sampler.buffer
        self._samples = range(sampler.group_size)
        self._prompts = prompts
        self._step = step
        self._stored = stored
        # By slot: the numbers of the samples that must be generated.
        self.missing = {
            slot: [sample for sample in self._samples if (slot, sample) not in stored]
            for slot in range(len(prompts))
        }
        # The slot of each job.
        self.jobs = [slot for slot, samples in self.missing.items() if samples]
        # Ranks of an engine share its groups. Episodes all belong to the engine's first rank, which
        # has their environments.
        self._num_sharing = engine.tp_size if sampler.environments is None else 1
        self._tp_rank = engine.tp_rank
        self.rank = engine.engine_rank * self._num_sharing + engine.tp_rank
        self.num_ranks = engine.num_engines * self._num_sharing
        # Decides with tail batching when the round may end; None if every group is waited for.
        self.race: TailRace | None = None
        rewards = sampler.early_rewards if sampler.environments is None else None
        # The pool that scores complete groups while others are sampled; None if no reward is slow.
        self.early = rewards if rewards is not None and rewards.has_slow_rewards else None
        self._tokenizer = sampler.tokenizer
        self._sampled: dict[Slot, Completion] = {}
        # By complete slot: the rank of the engine (tp_rank) that scores its group.
        self._scoring_ranks: dict[int, int] = {}
        # By slot: groups whose scoring has begun.
        self._begun: dict[int, RolloutGroup] = {}

    def task(self, conversation: ConversationId) -> EpisodeTask:
        """Returns (prompt, seed function): the prompt of a conversation, and the seed of its n-th
        turn."""
        slot = self.jobs[conversation[0]]
        prompt = self._prompts[slot]
        sample = self.missing[slot][conversation[1]]
        # The seed depends on the number of finished steps, which is 0 in step 1.
        return prompt, partial(rollout_seed, self._seed, self._step - 1, prompt.position, sample)

    def finish(self, job: int, number: int, completion: Completion) -> None:
        """Stores a finished completion; once its group is complete, begins to score the group.

        The engine calls it on all of its ranks, in the same order. `number` is the completion's
        number within the job.
        """
        slot = self.jobs[job]
        sample = self.missing[slot][number]
        # All ranks of an engine have the same completions, so only one writes them.
        if self._buffer is not None and self._tp_rank == 0:
            self._buffer.keep(self._prompts[slot], sample, completion)
        # With tail batching a complete group may still be dropped.
        is_in_step = self.race is None or self.race.finish(slot, len(completion.token_ids))
        self._sampled[slot, sample] = completion
        if not all((slot, missing) in self._sampled for missing in self.missing[slot]):
            return
        self._scoring_ranks[slot] = len(self._scoring_ranks) % self._num_sharing
        if self.early is not None and is_in_step and self._is_scored_here(slot):
            self._begun[slot] = self._build_group(slot)
            self.early.start_early(self._begun[slot], self._tokenizer)

    def groups(self, jobs: Iterable[int], slots: set[int]) -> list[RolloutGroup]:
        """Returns the groups that this rank scores, in the order of their slots.

        `jobs` are the jobs that this engine has finished. `slots` are the slots that belong to the
        step: with tail batching more prompts are started than a step trains on.
        """
        scored: list[int] = []
        # A group whose samples were all stored has no job. Such groups are distributed over the
        # ranks.
        complete = [slot for slot, samples in self.missing.items() if not samples and slot in slots]
        if self._tp_rank < self._num_sharing:
            scored += complete[self.rank :: self.num_ranks]
        finished = slots.intersection(self.jobs[job] for job in jobs)
        scored += filter(self._is_scored_here, finished)
        # A group whose scoring has begun must be the same object again (RewardPool.start_early).
        return [self._begun.get(slot) or self._build_group(slot) for slot in sorted(scored)]

    def _is_scored_here(self, slot: int) -> bool:
        """Returns True if this rank, among those of its engine, scores the group of a slot."""
        return self._scoring_ranks.get(slot, 0) == self._tp_rank

    def _build_group(self, slot: int) -> RolloutGroup:
        """Returns the group of a slot: its stored completions and those sampled in this round, in
        the order of their sample numbers."""
        completions = [
            self._buffer.read(self._stored[slot, sample])
            if self._buffer is not None and (slot, sample) in self._stored
            else self._sampled[slot, sample]
            for sample in self._samples
        ]
        return RolloutGroup(slot, self._prompts[slot], completions)


class ExpectedLengths:
    """Estimates the lengths of completions, so that the longest begin first.

    The sampled tokens do not depend on the estimates. The estimate for a prompt is the mean length
    of its completions when it was last sampled in this launch, an epoch ago. Rank 0 keeps this mean
    for each row of the data that was sampled. A resumed run begins without estimates, which costs
    time and changes nothing else.
    """

    def __init__(self) -> None:
        # Mean tokens by row of the data, on rank 0.
        self._means: dict[int, float] = {}
        # The mean tokens of the groups recorded in the previous round.
        self._recent_mean = 0.0
        # What rank 0 gets with the next estimate: this rank's groups as (row, mean, maximum of
        # tokens). A dropped row has no mean.
        self._report: list[tuple[int, float | None, int]] = []

    def record(self, groups: Sequence[RolloutGroup], dropped: Sequence[Prompt] = ()) -> None:
        """Notes the lengths of this rank's groups; rank 0 gets them with the next `estimate`.

        `dropped` are prompts whose groups tail batching has dropped. They were not finished when
        the other groups were, so they are counted as being as long as the longest of these.
        """
        for group in groups:
            lengths = [len(completion.token_ids) for completion in group.completions]
            mean = sum(lengths) / len(lengths)
            self._report.append((group.prompt.row, mean, max(lengths)))
        self._report += [(prompt.row, None, 0) for prompt in dropped]

    def estimate(
        self, prompts: Sequence[Prompt], stored_lengths: Iterable[tuple[int, int]]
    ) -> list[float]:
        """Collective. Returns for each prompt the expected tokens of a completion, equal on all
        ranks.

        The estimate is the mean length when the prompt was last sampled or, for a new prompt, the
        mean over the previous round. `stored_lengths`, equal on all ranks, has (index in `prompts`,
        tokens) for each stored completion. If a prompt has any, the estimate is the longest of
        them: its missing completions had run as long and were not finished.
        """
        report = self._report
        self._report = []
        means: list[float] = on_rank0(lambda reports: self._look_up(reports, prompts), report)
        # The longest of a prompt's lengths comes last, so it is the one that the dict keeps.
        longest_stored = dict(sorted(stored_lengths))
        return [longest_stored.get(slot, tokens) for slot, tokens in enumerate(means)]

    def _look_up(
        self,
        reports: Sequence[Sequence[tuple[int, float | None, int]]],
        prompts: Sequence[Prompt],
    ) -> list[float]:
        """Records the ranks' reports, and returns for each prompt the mean tokens of a completion
        when it was last sampled. Runs on rank 0."""
        entries = [entry for report in reports for entry in report]
        means = [(row, mean) for row, mean, _ in entries if mean is not None]
        if means:
            self._recent_mean = sum(mean for _, mean in means) / len(means)
            # A dropped row counts as long as the longest group of its round.
            max_length = max(maximum for *_, maximum in entries)
            means += [(row, max_length) for row, mean, _ in entries if mean is None]
        self._means.update(means)
        return [round(self._means.get(prompt.row, self._recent_mean), 1) for prompt in prompts]


class TailRace:
    """One round of tail batching, which ends as soon as enough groups are complete on all engines
    together. Each rank has the view of its own engine.

    The round has started more prompts than its step trains on. The groups that are complete first
    make up the step; the others are dropped, and their prompts are sampled again in a later step.
    Engines count complete groups in the run's key-value store: when a group is complete, its engine
    raises the count by one. The new count is the group's place in the order of completion over all
    engines, so an engine knows it without waiting for the others.
    """

    def __init__(
        self,
        counter: str,
        num_wanted: int,
        missing: Mapping[int, Sequence[int]],
        stored_lengths: Sequence[tuple[int, int]],
        is_first: bool,
    ) -> None:
        """`counter` is the key of the count in the store, and `num_wanted` the number of groups
        that the step needs. `missing` has the samples to generate by slot; a slot without any is
        complete from the start, so it comes first in the order of completion.

        `stored_lengths` has (slot, number of tokens) for each completion that need not be sampled.
        `is_first` is True on the first rank of an engine, which reports for the engine.
        """
        self._counter = counter
        self._complete = [slot for slot, samples in missing.items() if not samples][:num_wanted]
        # The number of groups that must become complete before the round may end.
        self._num_to_come = num_wanted - len(self._complete)
        self._stored_lengths = stored_lengths
        self._is_first = is_first
        self._num_unfinished = {slot: len(samples) for slot, samples in missing.items()}
        # This engine's complete groups as (count, slot).
        self._order: list[tuple[int, int]] = []
        # (slot, tokens) of this engine's completions. The slot is None for a dropped request.
        self._lengths: list[tuple[int | None, int]] = []

    def finish(self, slot: int, num_tokens: int) -> bool:
        """Records that a completion of the group in `slot` has ended.

        Returns True if the group is now complete and was among the first over all engines, so that
        the step trains on it.
        """
        self._num_unfinished[slot] -= 1
        # One rank of an engine counts for all of its ranks.
        if not self._is_first:
            return False
        self._lengths.append((slot, num_tokens))
        if self._num_unfinished[slot]:
            return False
        count = count_up(self._counter)
        self._order.append((count, slot))
        return count <= self._num_to_come

    def is_over(self) -> bool:
        """Returns True if enough groups are complete, on all engines together, to fill the step."""
        return self._num_to_come <= 0 or count_up(self._counter, 0) >= self._num_to_come

    def drop(self, num_tokens: Sequence[int]) -> None:
        """Records the number of sampled tokens of each request that the engine drops.

        The engine calls it when the round ends before these requests are finished.
        """
        if self._is_first:
            self._lengths += [(None, tokens) for tokens in num_tokens if tokens]

    def report(self) -> tuple[list[Any], list[Any]]:
        """Returns (order, lengths), this rank's report for `decide`.

        They are this engine's complete groups as (count, slot), and its completions as (slot,
        tokens), where the slot of a dropped request is None. Both are empty unless this is the
        engine's first rank.
        """
        return self._order, self._lengths

    def decide(self, reports: Sequence[Any]) -> tuple[list[int], dict[str, float]]:
        """Returns (slots, metrics): the slots of the step, and the round's metrics. Runs on
        rank 0; `reports` has the reports of all ranks."""
        # Every rank has stopped reading the counter before it reports.
        delete_counter(self._counter)
        # Sorting by count gives the order of completion over all engines.
        order = sorted(entry for counts, _ in reports for entry in counts)
        slots = {*self._complete, *(slot for _, slot in order[: self._num_to_come])}
        lengths = [*self._stored_lengths, *(entry for _, sizes in reports for entry in sizes)]
        # Nothing at all was launched if the run was stopped at once; [0] avoids an empty mean.
        launched = [tokens for _, tokens in lengths] or [0]
        num_trained = sum(tokens for slot, tokens in lengths if slot in slots)
        return sorted(slots), {
            "rollout/tail_dropped_tokens_frac": 1 - num_trained / max(sum(launched), 1),
            "rollout/tail_launched_tokens_mean": sum(launched) / len(launched),
            "rollout/tail_launched_tokens_p95": float(np.percentile(launched, 95)),
        }


@dataclass
class TailBatching:
    """Fills each step with the groups that are complete first. The other prompts wait for a later
    step.

    Training stays on-policy: a dropped prompt is sampled again, by the policy of the step that
    trains on it.
    """

    stream: TailStream
    num_prompts: int
    """The number of prompts of a step."""
    num_races: int = 0
    """The number of rounds begun so far, from which each round's counter gets its own key."""

    def begin(
        self,
        missing: Mapping[int, Sequence[int]],
        stored_lengths: Sequence[tuple[int, int]],
        is_first: bool,
    ) -> TailRace | None:
        """Returns a TailRace, in which the groups that are complete first make the step.

        Returns None if `missing` has no more prompts than the step needs. The arguments are
        those of TailRace.
        """
        if len(missing) <= self.num_prompts:
            return None
        self.num_races += 1
        return TailRace(
            f"complete/{self.num_races}",
            self.num_prompts,
            missing,
            stored_lengths=stored_lengths,
            is_first=is_first,
        )

    def settle(self, race: TailRace, prompts: Sequence[Prompt]) -> set[int]:
        """Collective. Returns the slots of the step, and puts off the prompts of other slots."""
        chosen, metrics = on_rank0(race.decide, race.report())
        slots = set(chosen)
        waiting = [prompt for slot, prompt in enumerate(prompts) if slot not in slots]
        self.stream.leave(waiting, metrics)
        return slots


def open_tail(
    fresh: PromptStream, num_rows: int, rollout: RolloutConfig, waiting: Sequence[int]
) -> tuple[TailStream, TailBatching]:
    """Returns (stream, batching) for a run with tail batching: the stream gives the prompts of each
    step, and the batching decides which of their groups the step trains on.

    `waiting` has the positions in the stream of prompts that an earlier launch began and did not
    train on. Raises ConfigError if the data has fewer rows than one generation launches.
    """
    check_enough_to_launch(num_rows, rollout)
    stream = TailStream(fresh, num_rows, rollout.num_launched_prompts, waiting)
    return stream, TailBatching(stream, rollout.num_prompts_per_step)
