"""The rollout phase."""

from __future__ import annotations

import time
from collections.abc import Sequence

from grpo_spmd.config.schema import Config
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.records import Completion, Prompt, RolloutGroup, rollout_seed
from grpo_spmd.rollout.buffer import RolloutBuffer


def sample_groups(
    engine: RolloutEngine, prompts: Sequence[Prompt], config: Config, step: int, buffer: RolloutBuffer | None = None
) -> list[RolloutGroup]:
    """Collective. G completions for each of the step's prompts; returns the groups that this rank scores, in the order
    of slots.

    Prompts go to engines by `rollout.schedule`, and the groups of one engine to its ranks in turn; every group is on
    exactly one rank, and some may have none. What the buffer has is not sampled again, and what is sampled goes into
    it. A generation that is ended early (see `RolloutEngine.generate_shared`) keeps what was finished; its groups are
    not complete, and `Preemption.guard` ends the step.

    Args:
        prompts: equal on all ranks.
        step: which policy is sampled, and which random numbers are used.
    """
    group_size, tensor_parallel = config.rollout.group_size, config.rollout.tensor_parallel_size
    kept = buffer.find(step, engine.weights_id, prompts, group_size) if buffer is not None else {}
    missing = {slot: [n for n in range(group_size) if (slot, n) not in kept] for slot in range(len(prompts))}
    jobs = [slot for slot, samples in missing.items() if samples]

    def request(job: int, number: int) -> Request:
        slot = jobs[job]
        return Request(
            prompts[slot].token_ids, rollout_seed(config.seed, step, prompts[slot].position, missing[slot][number])
        )

    def keep(job: int, number: int, completion: Completion) -> None:
        if buffer is not None and engine.tp_rank == 0:  # all ranks of an engine have the same
            buffer.keep(prompts[jobs[job]], missing[jobs[job]][number], completion)

    start = time.perf_counter()
    try:
        sampled = engine.generate_shared([len(missing[slot]) for slot in jobs], request, step, keep)
    finally:
        if buffer is not None:
            buffer.write()
    engine.busy_s.append(time.perf_counter() - start)
    complete = [slot for slot, samples in missing.items() if not samples]
    num_ranks = engine.num_engines * tensor_parallel
    of_rank: dict[int, list[Completion]] = {
        slot: [] for slot in complete[engine.engine_rank * tensor_parallel + engine.tp_rank :: num_ranks]
    } | {jobs[job]: sampled[job] for job in list(sampled)[engine.tp_rank :: tensor_parallel]}
    groups = []
    for slot, new in sorted(of_rank.items()):
        fresh = iter(new)
        completions = [
            buffer.read(kept[slot, n]) if buffer and (slot, n) in kept else next(fresh) for n in range(group_size)
        ]
        groups.append(RolloutGroup(slot, prompts[slot], completions))
    return groups
