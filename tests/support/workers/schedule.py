"""Worker: generations shared out by queue and by deal, on real ranks with real vLLM whose KV cache
holds few of the requests.

    python -m tests.support.workers.schedule CONFIG OUT
Rank 0 writes to OUT, for each scenario and schedule, what every rank made: [rank, slot, position,
completions].
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.data.prompts import PromptStream, TailStream
from grpo_spmd.distributed import collectives as store
from grpo_spmd.distributed.collectives import barrier, claim, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rollout.sample import ExpectedLengths, Sampler, TailBatching
from tests.support.workers.conversations import converse_later, end_while_all_wait

# for 2 engines: one of them gets nothing, one more than the other, a long queue
NUM_PROMPTS = {"none": 0, "one": 1, "odd": 7, "many": 24}
PROMPTS = [
    Prompt(position=40 + i, row=i, token_ids=[i % 90 + 1, 5, i % 7 + 20], text="", columns={})
    for i in range(max(NUM_PROMPTS.values()))
]


def main() -> None:
    config, out = load_config(sys.argv[1]), Path(sys.argv[2])
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    policy = build_policy(config.model, config.rollout.temperature, session)
    WeightSync(policy, engine, config.rollout.sync_bucket_bytes(session.device.type)).sync(0)
    sampler, busy_s = Sampler(engine, config.rollout.group_size, config.seed), []

    def sample(num_prompts: int) -> list[RolloutGroup]:
        groups, seconds = sampler.sample(PROMPTS[:num_prompts], 0, "")
        busy_s.append(seconds)
        return groups

    num_keys = store._store.num_keys() if store._store else 0
    result: dict[str, Any] = {"claims": hammer(session)}
    watched = watch_claims(engine)
    for schedule in ("static", "shared_queue"):
        use(engine, schedule)
        for name, num_prompts in NUM_PROMPTS.items():
            result[f"{name}/{schedule}"] = gather(sample(num_prompts), session)
    # One rank of the engine: two would wait for each other's sleep, and sleep longer for it.
    with slowed(
        engine,
        engine.engine_rank > 0
        and engine.engine_rank == engine.num_engines - 1
        and engine.tp_rank == 0,
    ):
        result["slow/shared_queue"] = gather(sample(len(PROMPTS)), session)
        # With nothing between the two calls the fast engine is in the second while the slow one
        # claims in the first.
        initial, second = sample(len(PROMPTS)), sample(20)
        result["first of two/shared_queue"], result["second of two/shared_queue"] = (
            gather(initial, session),
            gather(second, session),
        )
    in_turn, again, order = longest_first(engine, config)
    result["uneven/in turn"], result["uneven/again"] = (
        gather(in_turn, session),
        gather(again, session),
    )
    result["order"] = on_rank0(list, order)
    result["early"] = gather(started_early(engine, config), session)
    result["race"] = race(engine, config, session)
    result["num_claims"], result["most_waiting"] = on_rank0(
        lambda counts: [max(c) for c in zip(*counts, strict=True)], watched
    )
    result["busy_s"] = on_rank0(list, busy_s)
    result["turns"] = converse(engine)
    end_conversations_early(engine)
    result["later"] = converse_later(engine)
    end_while_all_wait(engine)
    barrier()
    result["new_keys"] = (store._store.num_keys() if store._store else 0) - num_keys
    if session.is_rank0:
        out.write_text(json.dumps(result))
    engine.shutdown()
    end_session()


JOBS = [2, 3, 1, 2]  # conversations of each


def turn(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
    """Conversations of one to three turns: each request holds what was said before it."""
    if len(turns) > (job + number) % 3:
        return None
    message = [token for completion in turns for token in (*completion.token_ids, 7)]
    return Request([job + 1, 5, *message], seed=100 * job + 10 * number + len(turns))


def converse(engine: RolloutEngine) -> list[list[int]]:
    """[job, turns of each of its conversations] over all engines. Fails unless each completion is
    what its request
    gives by itself."""
    report: list[tuple[int, int, Completion]] = []
    created = engine.generate_shared(
        JOBS, GenerationHooks(turn, lambda *finished: report.append(finished)), 0
    )
    assert list(created) == sorted(created)
    for job, conversations in created.items():
        for number, turns in enumerate(conversations):
            assert [c for j, n, c in report if (j, n) == (job, number)] == turns
            requests = [turn(job, number, turns[:i]) for i in range(len(turns) + 1)]
            assert (
                engine.generate([request for request in requests if request is not None], 0)
                == turns
            )
    local = [
        [job, *map(len, conversations)]
        for job, conversations in created.items()
        if engine.tp_rank == 0
    ]
    return on_rank0(lambda pieces: sorted(counts for piece in pieces for counts in piece), local)


def end_conversations_early(engine: RolloutEngine) -> None:
    """In the middle of conversations: nothing comes of them, and the engine can be used at once."""
    report: list[int] = []
    engine._should_abort = lambda: len(report) >= 2
    created = engine.generate_shared(
        [4] * 8,
        GenerationHooks(lambda job, number, turns: turn(2, 0, turns), lambda *_: report.append(0)),
        0,
    )
    engine._should_abort = lambda: False
    assert created == {} or len(report) < 2
    assert not engine._engine.has_unfinished_requests()
    assert len(engine.generate([Request([1], 0)], 0)) == 1


def longest_first(
    engine: RolloutEngine, config: Config
) -> tuple[list[RolloutGroup], list[RolloutGroup], tuple[list[int], list[float]]]:
    """Groups of uneven lengths, as they come and by a sampler that has seen them before; of the
    latter the slots in the
    order in which this rank's engine began them, and what was expected of each."""
    in_turn = Sampler(engine, config.rollout.group_size, config.seed)
    sampler = Sampler(engine, config.rollout.group_size, config.seed, lengths=ExpectedLengths())
    generate_shared, stops = engine.generate_shared, engine._stop_token_ids
    orders: list[tuple[list[int], list[float]]] = []

    def watched(sizes: Any, hooks: GenerationHooks, version: int, expected: Any) -> Any:
        started: list[int] = []

        def asked(job: int, number: int, turns: Sequence[Completion]) -> Any:
            if not turns and not number:
                started.append(job)
            return hooks.next_request(job, number, turns)

        orders.append((started, expected))
        return generate_shared(
            sizes, dataclasses.replace(hooks, next_request=asked), version, expected
        )

    engine.generate_shared = watched  # type: ignore[method-assign, assignment]
    engine._stop_token_ids = list(range(20))  # of 97
    (plain, _), _, (again, _) = (s.sample(PROMPTS, 0, "") for s in (in_turn, sampler, sampler))
    engine.generate_shared, engine._stop_token_ids = generate_shared, stops  # type: ignore[method-assign]
    assert orders[0][1] is None
    return plain, again, orders[2]


class Started:
    """Stands for a RewardPool: what its rewards were given while the engine sampled."""

    has_slow_rewards = True

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self.num_looks = 0

    def start_early(self, group: RolloutGroup, _: Any) -> None:
        self.groups.append(group)

    def poll(self) -> None:
        self.num_looks += 1


def started_early(
    engine: RolloutEngine, config: Config, tail: TailBatching | None = None
) -> list[RolloutGroup]:
    """A generation whose groups are scored as they get complete. Fails unless those of this rank,
    and no others, were
    begun early, each as the object that is scored; in a race where an engine is several ranks, at
    most those."""
    early, rows = Started(), PROMPTS
    if tail is not None:
        rows = [Prompt(row, row, prompt.token_ids, "", {}) for row, prompt in enumerate(PROMPTS)]
    sampler = Sampler(
        engine,
        config.rollout.group_size,
        config.seed,
        tail=tail,
        early_rewards=cast(RewardPool, early),
    )
    groups, _ = sampler.sample(rows, 0, "")
    started, full = {id(group) for group in early.groups}, {id(group) for group in groups}
    assert len(started) == len(early.groups)
    assert started <= full if tail is not None and engine.tp_size > 1 else started == full
    assert early.num_looks > 0
    return groups


def race(engine: RolloutEngine, config: Config, session: Session) -> dict[str, Any]:
    """A short round of 24 prompts for a step of 10, a long one of the 10 that wait first, and a
    short one that the last rank alone gives up. Of each: how many prompts it had, what the ranks
    made, and on each rank what waits and the
    metrics. And what all 24 are without a race."""
    rows = [Prompt(row, row, prompt.token_ids, "", {}) for row, prompt in enumerate(PROMPTS)]
    stops, engine._stop_token_ids = engine._stop_token_ids, list(range(20))  # of 97
    groups, _ = Sampler(engine, config.rollout.group_size, config.seed).sample(rows, 0, "")
    result: dict[str, Any] = {"all": gather(groups, session)}
    stream = TailStream(PromptStream(rows * 3, 0, False), 3 * len(rows), num_launched=len(rows))
    sampler = Sampler(engine, config.rollout.group_size, config.seed, tail=TailBatching(stream, 10))
    for name in ("short", "long", "given up"):
        prompts, requests = stream.take(10), [0]
        if name == "given up" and session.rank == session.world_size - 1:
            engine._should_abort = lambda: requests.append(0) or len(requests) > 3  # type: ignore[func-returns-value] # noqa: B023
        groups, _ = sampler.sample(prompts, 0, "")
        engine._should_abort = lambda: False
        assert not engine._engine.has_unfinished_requests()
        rank_values = on_rank0(list, [stream.state()["waiting"], stream.metrics()])
        result[name] = [len(prompts), gather(groups, session), rank_values]
    started_early(engine, config, TailBatching(stream, 10))
    engine._stop_token_ids = stops
    return result


def use(engine: RolloutEngine, schedule: Any) -> None:
    engine._rollout = dataclasses.replace(engine._rollout, schedule=schedule)


def hammer(session: Session) -> list[int]:
    """The numbers that all ranks claimed, at the same time, from a queue of 1000 and from a queue
    of none."""
    claimed = []
    barrier()
    while (number := claim("hammer", 1000, session.world_size)) is not None:
        claimed.append(number)
    assert claim("empty", 0, session.world_size) is None
    return sorted(
        on_rank0(lambda pieces: [number for piece in pieces for number in piece], claimed)
    )


def watch_claims(engine: RolloutEngine) -> list[int]:
    """[claims, most requests that waited after a step] from here on. Fails when an engine claims
    while requests of its
    own wait."""
    counts, fresh = [0, 0], [True]
    step, original = engine._engine.step, engine._claim

    def stepping() -> Any:
        fresh[0] = True
        outputs = step()
        counts[1] = max(counts[1], num_waiting(engine))
        return outputs

    def claiming(queue: str, num_jobs: int) -> int | None:
        assert not fresh[0] or num_waiting(engine) == 0, "claimed while requests wait"
        fresh[0] = False  # what was claimed since the last step has not been scheduled yet
        counts[0] += 1
        return original(queue, num_jobs)

    engine._engine.step, engine._claim = stepping, claiming  # type: ignore[method-assign]
    return counts


def num_waiting(engine: RolloutEngine) -> int:
    return int(engine._engine.engine_core.engine_core.scheduler.get_request_counts()[1])


@contextmanager
def slowed(engine: RolloutEngine, is_slow: bool) -> Iterator[None]:
    step = engine._engine.step

    def sleepy() -> Any:
        start = time.perf_counter()
        outputs = step()
        if is_slow:
            # several times slower, also on a machine that is busy otherwise
            time.sleep(0.01 + 5 * (time.perf_counter() - start))
        return outputs

    engine._engine.step = sleepy
    yield
    engine._engine.step = step


def gather(groups: list[RolloutGroup], session: Session) -> list[Any]:
    local = [
        [session.rank, g.slot, g.prompt.position, [dataclasses.astuple(c) for c in g.completions]]
        for g in groups
    ]
    return on_rank0(lambda pieces: [item for piece in pieces for item in piece], local)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
