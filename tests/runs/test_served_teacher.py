"""A whole run taught by a hostile server: it goes on, what was not answered is counted to the last
rollout, nothing has
the secret; it goes on to the bit, is replayed, and stops where too much is missing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.tools.replay.__main__ import replay
from grpo_spmd.tools.replay.read import read_step
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob
from tests.support.stub_server import SECRET, StubServer, assert_no_secret, stub_server
from tests.support.stub_vllm import answers

ENV = {"OF_THE_STUB": f"Bearer {SECRET}"}
WAYS = [
    "ok",
    "429",
    "slow",
    "500",
    "ok",
    "404",
    "half",
    "slow",
    "drop",
    "ok",
    "gzip",
    "503",
    "slow",
    "text",
    "late",
]
FOR_GOOD = ("404", "gzip", "text")


def is_rollout(body: Any) -> bool:
    """Not asked before the run begins: a probe begins with a token twice."""
    return body is not None and body["prompt"][0] != body["prompt"][1]


class _ByTurns:
    """Each context that was not seen before is answered in the next way, ever after."""

    def __init__(self) -> None:
        self.ways: dict[tuple[int, ...], str] = {}

    def __call__(self, body: Any) -> str:
        if not is_rollout(body):
            return "ok"
        return self.ways.setdefault(tuple(body["prompt"]), WAYS[len(self.ways) % len(WAYS)])


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Path, str, StubServer, _ByTurns]]:
    folder, ways = tmp_path_factory.mktemp("served"), _ByTurns()
    make_model(folder / "teacher", "qwen3", tied=True, seed=1)
    with stub_server(answers(folder / "teacher"), ways) as server:
        url = server.url.replace("/score", "/v1/completions")
        teacher = {
            "url": url,
            "headers_env": {"Authorization": "OF_THE_STUB"},
            "retries": 1,
            "max_concurrent": 3,
        }
        config = write_config(
            folder,
            make_model(folder / "model", "qwen3", tied=True),
            teacher={**teacher, "loss": "topk", "top_k": 9, "timeout_s": 10},
            reward_pool={"max_error_frac": 0.9},
            training={"num_steps": 2},
            checkpoint={"every_steps": 1, "keep": 9},
        )
        code, output = RanksJob(2, "grpo_spmd.train", "--config", str(config), env=ENV).wait(240)
        assert code == 0, output
        yield folder, output, server, ways


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_was_not_answered_is_counted_and_nothing_has_the_secret(
    run: tuple[Path, str, StubServer, _ByTurns],
) -> None:
    folder, output, server, ways = run
    for line in metrics_of(folder / "run"):
        records = [
            record for group in read_step(folder / "run", line["step"]).rollouts for record in group
        ]
        records_values = [
            ways.ways[*record.prompt_ids, *record.completion_ids] for record in records
        ]
        assert len(records_values) == 16
        assert (
            line["teacher/unanswered_frac"] == sum(way in FOR_GOOD for way in records_values) / 16
        )
        assert 0 < line["teacher/unanswered_frac"] < 0.9
        assert line["teacher/call_s_p95"] >= line["teacher/call_s_p50"] > 0
        assert line["teacher/retries"] > 0
        assert line["teacher/kl"] > 0
    assert server.most_at_once <= 3
    assert (
        "of 16 rollouts have no answer, and are taught nothing; the first: the server answered"
        in output
    )
    assert_no_secret(server, output, folder / "run")


def test_it_goes_on_to_the_bit_and_is_replayed(
    run: tuple[Path, str, StubServer, _ByTurns], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, server, _ = run
    resume = [
        f"run_dir={folder}/resumed",
        f"checkpoint.resume={folder}/run/checkpoints/step_000001",
    ]
    job = RanksJob(2, "grpo_spmd.train", "--config", str(folder / "config.yaml"), *resume, env=ENV)
    code, output = job.wait(240)
    assert code == 0, output
    (again,), was = metrics_of(folder / "resumed"), metrics_of(folder / "run")[1]
    names = {n for n in was if n.startswith(("reward/", "completion/", "loss/", "optim/"))}
    names |= {"teacher/kl", "teacher/unanswered_frac", "loss/teacher"}
    assert {name: again[name] for name in names} == {name: was[name] for name in names}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # replay sets it, and pytest puts it back
    num_asked = len(server.asked)
    assert any(
        "not asked (--ask-servers)" in note for note in replay(read_step(folder / "run", 2)).notes
    )
    assert len(server.asked) == num_asked
    monkeypatch.setenv("OF_THE_STUB", ENV["OF_THE_STUB"])
    result = replay(read_step(folder / "run", 2, asks_servers=True))
    for name in ("loss/total", "loss/teacher", "teacher/kl", "optim/grad_norm"):
        recorded, current = result.metrics[name]
        assert current == pytest.approx(recorded, rel=1e-5), name


def test_too_much_that_is_missing_stops_the_run(
    run: tuple[Path, str, StubServer, _ByTurns],
) -> None:
    folder = run[0]
    with stub_server(
        answers(folder / "teacher"), lambda body: "404" if is_rollout(body) else "ok"
    ) as server:
        url = server.url.replace("/score", "/v1/completions")
        more = [f"teacher.url={url}", "reward_pool.max_error_frac=0.5", f"run_dir={folder}/stopped"]
        job = RanksJob(
            1, "grpo_spmd.train", "--config", str(folder / "config.yaml"), *more, env=ENV
        )
        code, output = job.wait(240)
    assert code == 1, output
    reason = "16 of 16 rollouts have no answer: 1 is not under reward_pool.max_error_frac=0.5"
    assert reason in output
    # Why, before it.
    assert "the teacher's server answered 404" in output.partition(reason)[0]
    assert SECRET not in output
