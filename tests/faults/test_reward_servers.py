"""A hostile reward server behind real worker processes, and on a whole run of two ranks: the
others' rewards unchanged,
counts exact, limits held, no secret anywhere."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import ScoredRollouts
from grpo_spmd.rewards.pool import call_limits
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.trl import logged_in, mean_metrics
from grpo_spmd.tools.replay.__main__ import replay, report
from grpo_spmd.tools.replay.read import read_step
from tests.faults.test_reward_pool import CharacterTokenizer, _groups
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob
from tests.support.stub_server import ONCE, SECRET, StubServer, assert_no_secret, stub_server

FOR_GOOD = {
    "error": [
        "429_long",
        "nan",
        "infinite",
        "null",
        "text",
        "length",
        "deep",
        "404",
        "redirect",
        "gzip",
        "huge",
    ],
    "timeout": ["hang", "drip"],
}
STATUS = {how: status for status, ways in FOR_GOOD.items() for how in ways}


def worth(text: str) -> float:
    """With all 53 bits in use, as JSON has them."""
    return math.sqrt(len(text) + 0.1) * sum(map(ord, text)) / 7


def worth_of(body: Any) -> Any:
    return (
        {"score": worth(body["response"])}
        if "response" in body
        else [worth(text) for text in body["query"]]
    )


@pytest.fixture
def score(tmp_path: Path) -> Iterator[Callable[..., ScoredRollouts]]:
    created: list[RewardPool] = []

    def score(groups: list[list[str]], *rewards: RewardConfig) -> ScoredRollouts:
        config = RewardPoolConfig(num_workers=8, timeout_s=20)
        created.append(RewardPool(rewards, config, tmp_path / "log"))
        return created[-1].score(_groups(*groups), CharacterTokenizer())

    yield score
    for pool in created:
        pool.close()


def as_said(body: Any) -> str:
    """A completion says how it is answered, behind a number."""
    return str(body["response"]).partition(" ")[2] or "ok"


def test_every_way_to_fail_costs_its_own_completion_alone(
    score: Callable[..., ScoredRollouts],
) -> None:
    ways = [*ONCE, *STATUS, "late", "slow"]
    groups = [[f"{n} {method}", f"{n}.", f"{n}:"] for n, method in enumerate(ways)]
    with stub_server(worth_of, as_said) as server:
        scored = score(
            groups,
            RewardConfig(url=server.url, timeout_s=6.0, retries=2),
            RewardConfig(name="exact"),
        )
    status = [STATUS.get(text.partition(" ")[2], "ok") for group in groups for text in group]
    assert scored.statuses["server"] == status
    for text, method, value in zip(scored.texts, status, scored.by_name["server"], strict=True):
        assert value is not None
        assert math.isnan(value) if method != "ok" else value == worth(text), (
            text
        )  # to the last bit
    # As often as it may be asked: once for good answers, and for those that no second question can
    # mend.
    requests = Counter(item.body["response"].partition(" ")[2] for item in server.asked)
    asked_once = {"404", "redirect", "gzip", "huge", "hang", "drip", "429_long", "late", "slow"}
    asked_thrice = set(STATUS) - asked_once
    assert {method: requests[method] for method in ways} == {
        method: 1 if method in asked_once else 3 if method in asked_thrice else 2 for method in ways
    }
    metrics = mean_metrics(logged_in(scored.notes.values()))
    num_requests = len(server.asked)
    assert metrics["reward/server/retries"] == num_requests - len(scored.texts)
    # "429", "429_after", "429_date" once each, and "429_long".
    assert metrics["reward/server/http_429_frac"] == 4 / num_requests
    p50, p95 = metrics["reward/server/call_s_p50"], metrics["reward/server/call_s_p95"]
    assert p50 is not None
    assert p95 is not None
    assert 0 < p50 <= p95
    assert scored.first_error is not None
    assert scored.first_error.startswith("reward 'server' ")


def test_a_group_that_fails_is_asked_for_one_by_one(score: Callable[..., ScoredRollouts]) -> None:
    def ways(body: Any) -> str:
        return (
            "length"
            if len(body["query"]) > 1 and "p3" in body["query"][0]
            else "nan"
            if body["query"] == ["pb"]
            else "ok"
        )

    groups = [["1", "2"], ["3", "a", "b"], ["4", "b"]]
    with stub_server(worth_of, ways) as server:
        scored = score(groups, RewardConfig(url=server.url, form="openrlhf", retries=0))
    assert scored.statuses["server"] == ["ok"] * 4 + ["error", "ok", "ok"]
    assert scored.by_name["server"][:4] == [worth(f"p{text}") for text in ("1", "2", "3", "a")]
    # Three groups, and the three of the second one alone; the prompt is "p".
    assert sorted(len(item.body["query"]) for item in server.asked) == [1, 1, 1, 2, 2, 3]
    metrics = mean_metrics(logged_in(scored.notes.values()))
    assert metrics["reward/server/retries"] == 0


def test_a_server_that_comes_back_has_failed_for_nobody(
    score: Callable[..., ScoredRollouts],
) -> None:
    """Each group's request meets a server that is away, each completion's one that is there: that
    is no function which
    raises for groups alone."""
    groups = [["aa", "b"], ["ccc", "dd"]]
    with stub_server(worth_of, lambda body: "503" if len(body["query"]) > 1 else "ok") as server:
        scored = score(groups, RewardConfig(url=server.url, form="openrlhf", retries=0))
    assert scored.by_name["server"] == [worth(_query(inputs)) for inputs in scored.reward_inputs]
    assert scored.statuses["server"] == ["ok"] * 4
    assert sorted(len(item.body["query"]) for item in server.asked) == [1, 1, 1, 1, 2, 2]
    assert not any("retried" in note for note in scored.notes.values())


def _query(inputs: dict[str, Any]) -> str:
    return str(inputs["prompts"]) + str(inputs["completions"])


def test_two_ranks_together_hold_the_limits(tmp_path: Path) -> None:
    """3 at once: rank 0 has two places, rank 1 one. 1,200 a minute: 0.1 s between two of a rank's
    calls."""
    pools = []
    # Long enough that three calls meet there, however slowly a busy machine starts them.
    with stub_server(worth_of, lambda body: "slower") as server:
        for config in (
            RewardConfig(url=server.url, max_concurrent=3),
            RewardConfig(url=server.url, max_per_minute=1200),
        ):
            pool = RewardPoolConfig(num_workers=8)
            pools = [
                RewardPool([config], pool, tmp_path / f"log{n}", ranks=(n, 2)) for n in range(2)
            ]
            groups = _groups([str(n) for n in range(12)])
            ranks = [
                threading.Thread(target=item.score, args=(groups, CharacterTokenizer()))
                for item in pools
            ]
            began = time.monotonic()
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
            took_s = time.monotonic() - began
            for item in pools:
                item.close()
            if config.max_concurrent is not None:
                assert server.most_at_once == 3
            assert len(server.asked) == (24 if config.max_concurrent is not None else 48)
    assert took_s > 1.1  # eleven times 0.1 s lie between a rank's twelve calls


def test_an_async_function_is_held_to_limits(
    tmp_path: Path, score: Callable[..., ScoredRollouts]
) -> None:
    lines = (
        "import asyncio, time\nasync def judge(completions, **_):\n    began = time.monotonic()\n"
    )
    lines += "    await asyncio.sleep(30 if completions[0] == 'hang' else 0.03)\n"
    lines += (
        f"    open({str(tmp_path / 'times')!r}, 'a').write(f'{{began}} "
        f"{{time.monotonic()}}\\n')\n    return [1.0]\n"
    )
    (tmp_path / "mine.py").write_text(lines)
    reward = RewardConfig(function=f"{tmp_path}/mine.py:judge", max_concurrent=2, timeout_s=3.0)
    scored = score([["a", "b", "hang"], ["c", "d", "e"]], reward)
    assert scored.statuses["judge"] == ["ok", "ok", "timeout", "ok", "ok", "ok"]
    assert scored.first_error == "reward 'judge' took longer than timeout_s=3"
    spans = [
        tuple(map(float, line.split())) for line in (tmp_path / "times").read_text().splitlines()
    ]
    assert len(spans) == 5
    assert all(sum(begin <= at < end for begin, end in spans) <= 2 for at, _ in spans)


def test_a_server_that_is_gone_is_not_asked_for_every_completion(
    score: Callable[..., ScoredRollouts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_limits, "_PAUSE_S", 0.2)
    with stub_server(worth_of, lambda body: "404") as server:
        scored = score(
            [[str(n) for n in range(64)]], RewardConfig(url=server.url, max_concurrent=2)
        )
    assert set(scored.statuses["server"]) == {"error"}
    # 20 in a row, at the most one that was under way, and one to see.
    assert 21 <= len(server.asked) <= 22


# A whole run

WAYS = [
    "slow",
    "429",
    "slow",
    "nan",
    "500",
    "slow",
    "half",
    "slow",
    "late",
    "404",
    "slow",
    "503",
    "slow",
    "gzip",
]


class _ByTurns:
    """Each completion that was not seen before is answered in the next way, ever after."""

    def __init__(self) -> None:
        self.ways: dict[str, str] = {}

    def __call__(self, body: Any) -> str:
        text = json.dumps([body["prompt"], body["response"]])
        if text not in self.ways:
            number = len(self.ways)
            self.ways[text] = "hang" if number == 38 else WAYS[number % len(WAYS)]
        return self.ways[text]


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str, StubServer, _ByTurns]]:
    folder, ways = tmp_path_factory.mktemp("server"), _ByTurns()
    with stub_server(worth_of, ways) as server:
        url = {"url": server.url, "headers_env": {"Authorization": "OF_THE_STUB"}}
        config = write_config(
            folder,
            make_model(folder / "model", "qwen3", tied=True),
            rewards=[
                {**url, "timeout_s": 5, "retries": 2, "max_concurrent": 3},
                {"name": "format", "args": {"pattern": "[0-9].*"}},
            ],
            reward_pool={"max_error_frac": 0.7},
            data={"eval": {"held": str(folder / "train.jsonl")}},
            eval={"every_steps": 2, "num_samples": 1},
            training={"num_steps": 2},
            checkpoint={"every_steps": 1},
        )
        job = RanksJob(
            2, "grpo_spmd.train", "--config", str(config), env={"OF_THE_STUB": f"Bearer {SECRET}"}
        )
        code, output = job.wait(240)
        assert code == 0, output
        yield folder, output, server, ways


def _dumped(folder: Path, step: int) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / f"run/rollouts/step_{step:06d}.jsonl").read_text().splitlines()
    ]


def test_a_run_goes_on_with_what_the_server_scored(
    run: tuple[Path, str, StubServer, _ByTurns],
) -> None:
    folder, _, server, ways = run
    prompts = [
        json.loads(line)["prompt"] for line in (folder / "train.jsonl").read_text().splitlines()
    ]
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    seen = Counter[str]()
    for step in (1, 2):
        records = _dumped(folder, step)
        for record in records:
            way = ways.ways[json.dumps([prompts[record["row"]], record["completion"]])]
            status = STATUS.get(way, "ok")
            seen[way] += 1
            assert record["statuses"] == {"server": status, "format": "ok"}, way
            assert record["rewards"]["server"] == (
                worth(record["completion"]) if status == "ok" else None
            )
        metrics = next(line for line in lines if line["step"] == step and "reward/mean" in line)
        for status in ("error", "timeout"):
            num_failed = sum(record["statuses"]["server"] == status for record in records)
            assert metrics[f"reward/server/{status}_frac"] == num_failed / 16
        assert metrics["reward/server/call_s_p95"] >= metrics["reward/server/call_s_p50"] > 0
        assert {"reward/server/retries", "reward/server/mean", "reward/format/mean"} <= set(metrics)
    assert {"nan", "404", "429", "500", "half", "late"} <= set(seen)
    assert server.most_at_once <= 3


def test_no_file_and_no_line_has_the_secret(run: tuple[Path, str, StubServer, _ByTurns]) -> None:
    folder, output, server, _ = run
    assert_no_secret(server, output, folder / "run")


def test_a_replay_asks_no_server_unless_told(
    run: tuple[Path, str, StubServer, _ByTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, server, ways = run
    num_asked = len(server.asked)
    recorded = read_step(folder / "run", 1)
    result = replay(recorded)
    assert len(server.asked) == num_asked
    assert [r.replayed.rewards for r in result.rollouts] == [
        r.recorded.rewards for r in result.rollouts
    ]
    note = (
        "rewards are those that the run recorded: servers, which were not asked "
        "(--ask-servers), gave server"
    )
    assert f"  {note}" in report(recorded, result, 3)
    judged = [
        "rewards.0.name=server",
        "rewards.0.judge=gone.md",
        "rewards.0.judge_model=m",
        "rewards.0.args={n: 1}",
    ]
    replay(
        read_step(folder / "run", 1, judged)
    )  # a rubric that is gone matters to those alone who ask
    with pytest.raises(ConfigError, match=r"cannot read gone\.md"):
        read_step(folder / "run", 1, judged, asks_servers=True)
    assert len(server.asked) == num_asked
    monkeypatch.setenv("OF_THE_STUB", f"Bearer {SECRET}")
    ways.ways = dict.fromkeys(ways.ways, "ok")
    again = replay(read_step(folder / "run", 1, asks_servers=True))
    assert len(server.asked) == num_asked + 16
    assert [r.replayed.rewards["server"] for r in again.rollouts] == [
        worth(r.recorded.completion) for r in again.rollouts
    ]
