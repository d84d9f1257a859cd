"""G completions for each prompt of a step: seeds, who scores what, and what need not be sampled again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Place, Request, Task
from grpo_spmd.records import Completion, Prompt, RolloutGroup, rollout_seed
from grpo_spmd.rollout.buffer import RolloutBuffer
from grpo_spmd.rollout.early_scoring import EarlyScoring, Groups
from grpo_spmd.rollout.expected import ExpectedLengths

if TYPE_CHECKING:  # off by default, and then not even imported
    from grpo_spmd.rollout.environments.environments import Environments
    from grpo_spmd.rollout.tail import TailBatching


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
        self._buffer, self._lengths, self._tail, self._environments = buffer, lengths, tail, environments
        self._early = early if environments is None else None

    def sample(self, prompts: Sequence[Prompt], step: int, weights_id: str) -> tuple[list[RolloutGroup], float]:
        """Collective. The groups that this rank scores, in the order of slots, and its seconds of generation.
        Prompts, equal on all ranks, go to engines by `rollout.schedule`, the groups of one engine to its ranks in turn:
        each is on exactly one rank, which may have none. `step` stands for the policy and the random numbers,
        `weights_id` for the weights that the engine holds (SyncStats). A generation that is ended early keeps what was
        finished; its groups are not complete, and `Preemption.guard` ends the step."""
        engine, buffer, all_samples = self._engine, self._buffer, range(self._group_size)
        kept = buffer.find(step, weights_id, prompts, self._group_size) if buffer is not None else {}
        missing = {slot: [n for n in all_samples if (slot, n) not in kept] for slot in range(len(prompts))}
        jobs = [slot for slot, samples in missing.items() if samples]
        expected = None
        if self._lengths is not None:
            finished = {slot: [kept[slot, n][2] for n in all_samples if (slot, n) in kept] for slot in jobs}
            of_prompts = self._lengths.of(prompts, finished)
            expected = [of_prompts[slot] for slot in jobs]
        race = None
        if self._tail is not None:
            of_kept = [(slot, place[2]) for (slot, _), place in kept.items()]
            race = self._tail.begin(missing, of_kept, is_first=engine.tp_rank == 0)

        def task(place: Place) -> Task:
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
            completions = [buffer.read(old[n]) if buffer and n in old else next(fresh) for n in all_samples]
            return RolloutGroup(slot, prompts[slot], completions)

        # Ranks of an engine share its groups; episodes are its first one's, which has their environments.
        sharing = engine.tp_size if self._environments is None else 1
        sizes = [len(missing[slot]) for slot in jobs]
        own = Groups(sizes, lambda job, new: whole(jobs[job], new), engine.tp_rank, sharing, self._early)
        start = time.perf_counter()
        try:
            if self._environments is None:
                scheduled = step, keep, expected, race
                sampled = engine.generate_shared(sizes, request, *scheduled, meanwhile=own.meanwhile)
            else:
                sampled = self._environments.generate(engine, sizes, task, step, finished=keep, expected=expected)
        finally:
            if buffer is not None:
                buffer.write()
        seconds = time.perf_counter() - start
        used = self._tail.settle(race, prompts) if self._tail is not None and race is not None else set(missing)
        complete = [slot for slot, samples in missing.items() if not samples and slot in used]
        rank, num_ranks = engine.engine_rank * sharing + engine.tp_rank, engine.num_engines * sharing
        of_rank = {slot: whole(slot, []) for slot in complete[rank::num_ranks] if engine.tp_rank < sharing}
        for job in [job for job in sampled if jobs[job] in used and own.is_own(job)]:
            of_rank[jobs[job]] = own.group(job, [completion for [completion] in sampled[job]])
        groups = [group for _, group in sorted(of_rank.items())]
        if self._lengths is not None:
            dropped = [prompt for slot, prompt in enumerate(prompts) if slot not in used]
            self._lengths.note(groups, dropped[rank::num_ranks])
        return groups, seconds
