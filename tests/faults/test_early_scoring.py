"""Rewards that are called while the engine still samples: what comes of them is what comes of them
behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool, SlowRewards, waits_for_others
from grpo_spmd.rewards.protocol import RewardError
from tests.faults.test_resume import TIMED
from tests.faults.test_reward_pool import BEHAVIOURS, CharacterTokenizer, _groups
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob
from tests.support.stub_server import stub_server

TEXTS = [
    ["a", "raise", "b"],
    ["hang", "c", "none"],
    ["d", "nan"],
    ["e", "segfault", "word"],
    ["f"],
    ["g", "h", "i"],
]
NAMES = ("one", "ranked", "logs", "two")

SPANS = """
def spans(completions, **columns):
    begin = time.monotonic()
    time.sleep(0.3)
    with open(__file__.replace("mine.py", "spans"), "a") as file:
        print(begin, time.monotonic(), file=file)
    return [worth(text) for text in completions]
"""


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    (tmp_path / "mine.py").write_text(BEHAVIOURS + SPANS)
    created: list[RewardPool] = []

    def pool(*names: str, early: Sequence[int] = (), **reward_values: Any) -> RewardPool:
        """With the rewards of these indices begun early."""
        rewards = [
            RewardConfig(function=f"{tmp_path}/mine.py:{name}", **reward_values) for name in names
        ]
        created.append(
            RewardPool(rewards, RewardPoolConfig(num_workers=3, timeout_s=1.0), tmp_path / "log")
        )
        created[-1]._slow = SlowRewards([reward in early for reward in range(len(names))])
        return created[-1]

    yield pool
    for single in created:
        single.close()


def sample(pool: RewardPool, groups: Sequence[RolloutGroup], steps: int = 5) -> None:
    """As an engine does that completes them one after the other: only once the rewards are imported
    can they begin."""
    pool.score(_groups(["a"]), CharacterTokenizer())
    for group in groups:
        pool.start_early(group, CharacterTokenizer())
        for _ in range(steps):
            pool.poll()
            time.sleep(0.02)


def said(scored: ScoredRollouts) -> str:
    """All of it, NaN too; of failures, that there are some: a traceback names a process."""
    return repr(
        [
            scored.rewards,
            scored.by_name,
            scored.statuses,
            scored.texts,
            scored.reward_inputs,
            scored.notes,
        ]
    )


@pytest.mark.parametrize("early", [(0, 1, 2, 3), (1, 3)])
def test_what_was_begun_early_is_scored_as_ever(
    pools: Callable[..., RewardPool], early: Sequence[int]
) -> None:
    late, pool, groups = pools(*NAMES), pools(*NAMES, early=early), _groups(*TEXTS)
    expected = late.score(groups, CharacterTokenizer())
    assert {"error", "timeout", "ok", "not_applicable"} <= set(expected.statuses["one"])
    sample(pool, [groups[n] for n in (4, 1, 3, 0)])  # in the order of completion; two come late
    scored = pool.score(groups, CharacterTokenizer())
    assert said(scored) == said(expected)
    initial = [str(single.first_error).partition("\n")[0] for single in (scored, expected)]
    assert initial[0] == initial[1]
    # The next round begins anew, also with slots that were there before.
    again = _groups(["z", "y"], ["x"])
    sample(pool, again[1:])
    assert said(pool.score(again, CharacterTokenizer())) == said(
        late.score(again, CharacterTokenizer())
    )


def test_calls_are_made_once_and_within_their_limits(pools: Callable[..., RewardPool]) -> None:
    late, pool = pools("one", max_concurrent=1), pools("one", early=[0], max_concurrent=1)
    groups = _groups(["a", "b"], ["c", "raise"], ["d"])
    sample(pool, groups[:2], steps=20)
    scored, expected = (single.score(groups, CharacterTokenizer()) for single in (pool, late))
    assert (scored.by_name["one"][:3], scored.statuses) == (
        expected.by_name["one"][:3],
        expected.statuses,
    )
    requests = [note["logged"]["one"][".requests"] for note in scored.notes.values()]
    assert requests == [[1, 1]] * 5


def test_a_limit_holds_where_scoring_takes_over(
    pools: Callable[..., RewardPool], tmp_path: Path
) -> None:
    pool, groups = pools("spans", early=[0], max_concurrent=1), _groups(["a", "b"], ["c", "d"])
    sample(pool, groups[:1], steps=2)  # one call is under way
    assert set(pool.score(groups, CharacterTokenizer()).statuses["spans"]) == {"ok"}
    spans = [
        tuple(map(float, line.split())) for line in (tmp_path / "spans").read_text().splitlines()
    ][1:]
    assert len(spans) == 4
    assert all(sum(begin <= at < end for begin, end in spans) == 1 for at, _ in spans)


@pytest.mark.parametrize("steps", [0, 40])
def test_what_ends_a_step_ends_it_where_it_is_scored(
    pools: Callable[..., RewardPool], steps: int
) -> None:
    pool, groups = pools("short", early=[0]), _groups(["a", "b"], ["c", "short"])
    sample(pool, groups, steps)  # raises nothing
    with pytest.raises(RewardError, match="returned 1 values for 2 completions"):
        pool.score(groups, CharacterTokenizer())
    assert pool.score(groups[:1], CharacterTokenizer()).statuses == {"short": ["ok", "ok"]}


def test_a_function_that_hangs_in_every_call_ends_the_step(
    pools: Callable[..., RewardPool],
) -> None:
    pool, groups = pools("one", early=[0]), _groups(*[["hang"]] * 3)
    sample(pool, groups, 1)
    time.sleep(1.1)
    pool.poll()  # all three have timed out, and nothing is left to do
    assert not pool._current.calls
    with pytest.raises(RewardError, match="timeout"):
        pool.score(groups, CharacterTokenizer(), num_step_completions=3)


def test_a_worker_that_dies_between_two_looks_fails_for_its_own_completion(
    pools: Callable[..., RewardPool],
) -> None:
    """Nobody looks while the engine makes a long step, and all workers die in it."""
    pool, groups = pools("one", early=[0]), _groups(["a", "segfault"], ["b", "_exit"], ["c"])
    sample(pool, groups, steps=1)
    time.sleep(1.0)
    assert pool.score(groups, CharacterTokenizer()).statuses["one"] == [
        "ok",
        "error",
        "ok",
        "error",
        "ok",
    ]


def test_how_workers_died_is_heard_of_all_at_once(pools: Callable[..., RewardPool]) -> None:
    pool, groups = pools("one", early=[0]), _groups(["segfault"], ["segfault"], ["segfault"])
    sample(pool, groups, steps=0)
    for _ in range(3):  # long steps: longer than a word of how one died is waited for
        pool.poll()
        time.sleep(1.1)
    assert {reason.removeprefix("reward 'one' ") for reason in pool._current.errors(0)[0]} == {
        "died of SIGSEGV"
    }
    assert len(pool._current.errors(0)[0]) == 3


def test_a_long_step_of_the_engine_is_not_a_calls_time(tmp_path: Path) -> None:
    """A server fails once, and nobody listens for longer than its timeout_s: the call is made again
    all the same."""
    with stub_server(lambda body: 1.0, lambda body: "500") as server:  # which it says once to each
        reward = RewardConfig(name="asked", url=server.url, timeout_s=2.0, retries=1)
        with RewardPool([reward], RewardPoolConfig(num_workers=1), tmp_path / "log") as pool:
            pool._begin()  # the rewards are imported
            groups = _groups(["a"], ["b"])
            pool.start_early(groups[0], CharacterTokenizer())
            pool.poll()
            time.sleep(2.5)
            scored = pool.score(groups, CharacterTokenizer())
    assert scored.statuses["asked"] == ["ok", "ok"]
    assert [note["logged"]["asked"][".requests"][0] for note in scored.notes.values()] == [2, 2]
    assert all(note["logged"]["asked"][".s"][0] < 2.0 for note in scored.notes.values())


def test_a_free_worker_does_not_wait_for_two_steps(pools: Callable[..., RewardPool]) -> None:
    pool, groups = pools("one", early=[0]), _groups(*[["a"]] * 9)
    sample(pool, groups, steps=0)
    for remaining in (6, 3, 0):  # three workers
        pool.poll()
        assert len(pool._current.calls) == remaining
        time.sleep(0.5)
    assert pool.score(groups, CharacterTokenizer()).statuses["one"] == ["ok"] * 9


def test_a_nursery_that_was_killed_ends_the_step_where_it_is_scored(
    pools: Callable[..., RewardPool],
) -> None:
    pool, groups = pools("one", early=[0]), _groups(["a"], ["hang"])
    sample(pool, groups[:1])
    pool._process.kill()
    pool._process.wait()
    for group in groups[1:]:
        pool.start_early(group, CharacterTokenizer())
        pool.poll()  # raises nothing
    with pytest.raises(RewardError, match="ended with code -9"):
        pool.score(groups, CharacterTokenizer())


def test_which_rewards_are_slow() -> None:
    rewards = SlowRewards([True, False, False])
    assert rewards.early == {0}
    for reward, seconds, number in ((1, 0.25, 8), (1, 0.0, 8), (2, 0.02, 8)):
        rewards.add_call(reward, seconds, number)
    rewards.end_scoring()
    assert rewards.early == {0, 1}
    rewards.end_scoring()  # a rank that had no group learns nothing
    assert rewards.early == {0, 1}
    rewards.add_call(2, 0.5, 1)  # of an evaluation, where a completion is a call
    rewards.add_call(1, 0.2, 100)
    rewards.end_scoring()
    assert rewards.early == {0, 2}
    entries: list[dict[str, Any]] = [
        {"url": "http://x/"},
        {"function": "a.py:f", "max_concurrent": 1},
        {"function": "a.py:f"},
    ]
    assert [waits_for_others(RewardConfig(**entry)) for entry in entries] == [True, True, False]


REWARD = """
import time
def slow(completions, log_metric, **columns):
    time.sleep(0.05)
    log_metric("letters", sum(map(len, completions)) / 7)
    return [(sum(map(ord, text)) % 3) * 0.1 if text[:1] in "0123456789" else 0.0 for text in completions]
"""  # noqa: E501


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("scored")
    model = make_model(folder / "model", "qwen3", tied=True)
    (folder / "slow.py").write_text(REWARD)

    def make(name: str, **sections: Any) -> Path:
        (folder / name).mkdir()
        rewards = [
            {"function": f"{folder}/slow.py:slow"},
            {"name": "format", "args": {"pattern": "[0-9].*"}},
        ]
        return write_config(folder / name, model, rewards=rewards, **sections)

    return make


def scored(when: str, config: Path, *overrides: str, ranks: int = 2) -> RanksJob:
    return RanksJob(ranks, "tests.support.workers.scored_early", when, str(config), *overrides)


def begun(output: str, ranks: int = 2) -> list[int]:
    return [output.count(f"rank {rank} began early") for rank in range(ranks)]


def test_a_run_that_dies_and_is_preempted_is_what_it_is_without(make: Callable[..., Path]) -> None:
    """Two ranks, with refills, an evaluation and the rollout buffer: to the last bit. A rank is
    killed while groups are
    scored early, and later one gets SIGTERM then; nothing hangs, and no process is left."""
    sections: dict[str, Any] = {
        "rollout": {
            "dynamic_sampling": True,
            "group_size": 2,
            "num_prompts_per_step": 6,
            "schedule": "static",
        },
        "training": {"num_steps": 4},
        "checkpoint": {"every_steps": 1, "resume": "auto"},
        "eval": {"every_steps": 2, "num_samples": 1},
    }
    early, late = (make(name, **sections) for name in ("early", "late"))
    held_out = f"data.eval.held={late.parent / 'train.jsonl'}"
    in_one_go = scored("late", late, held_out)
    for when, message in (("SIGKILL", ""), ("SIGTERM", "everything is saved"), ("early", "")):
        code, output = scored(when, early, held_out).wait(240)
        assert (code != 0) == (when == "SIGKILL"), output
        assert message in output
        assert min(begun(output)) >= 1, output
    code, output = in_one_go.wait(240)
    assert code == 0, output
    assert begun(output) == [0, 0]
    assert _read(early.parent / "run", "dumps") == _read(late.parent / "run", "dumps")
    metrics = _read(late.parent / "run", "metrics")
    assert _read(early.parent / "run", "metrics") == metrics
    assert any(line.get("dynamic_sampling/rounds", 0) > 1 for line in metrics)


def test_tail_batching_scores_early_what_is_in_the_step(make: Callable[..., Path]) -> None:
    rollout = {
        "num_prompts_per_step": 4,
        "group_size": 2,
        "max_completion_tokens": 24,
        "tail_batching": 1.5,
    }
    configs = {
        when: make(f"tail {when}", rollout=rollout, training={"num_steps": 3})
        for when in ("early", "late")
    }
    jobs = {when: scored(when, config, ranks=1) for when, config in configs.items()}
    outputs = {}
    for when, job in jobs.items():
        code, outputs[when] = job.wait(240)
        assert code == 0, outputs[when]
    assert begun(outputs["early"], 1) == [
        8
    ]  # of three steps of four groups all but the first one's
    for label in ("dumps", "metrics"):
        assert _read(configs["early"].parent / "run", label) == _read(
            configs["late"].parent / "run", label
        )


def _read(run: Path, label: str) -> Any:
    if label == "dumps":  # groups that a launch before had sampled may be another rank's
        return {
            path.name: sorted(path.read_text().splitlines())
            for path in sorted((run / "rollouts").glob("*.jsonl"))
        }
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not TIMED.search(name)} for line in lines
    ]
