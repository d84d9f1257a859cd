"""A failure anywhere ends all ranks with the first traceback and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.models import make_model, write_config
from tests.ranks import Job, torchrun

REWARD = """
import os
import time
calls = 0
def reward(completions, **columns):
    global calls
    calls += 1
    {body}
    return [float(len(c)) for c in completions]
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def start(tmp_path: Path, model: Path, body: str, num_ranks: int = 2, **sections: object) -> Job:
    (tmp_path / "reward.py").write_text(REWARD.format(body=body))
    rewards = [{"function": f"{tmp_path}/reward.py:reward"}]
    config = write_config(tmp_path, model, rewards=rewards, **sections)
    return Job(torchrun(num_ranks, "-m", "grpo_spmd.train", "--config", str(config)))


def test_a_raise_in_one_ranks_reward_ends_all_with_its_traceback(tmp_path: Path, model: Path) -> None:
    job = start(tmp_path, model, 'if os.environ["RANK"] == "1" and calls == 2: raise KeyError("no such column")')
    code, output = job.wait(120)
    assert code == 1
    assert "reward 'reward' raised KeyError: 'no such column'" in output
    assert f'{tmp_path}/reward.py", line' in output
    assert "rank 1: failed first" in output
    assert "rank 0: failed first" not in output  # rank 0 says that it only followed, unless torchrun ends it before it can
    assert not job.survivors()


def test_a_reward_that_calls_exit_is_a_failure(tmp_path: Path, model: Path) -> None:
    code, output = start(tmp_path, model, "raise SystemExit(0)", num_ranks=1).wait(120)
    assert code == 1
    assert "reward 'reward' raised SystemExit: 0" in output


def test_what_only_the_engine_refuses_leaves_nothing_behind(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, rollout={"engine": {"max_num_seqs": "many"}})
    code, output = Job([sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]).wait(120)
    assert code == 2
    assert "error: rollout.engine: vllm.LLM refused ['max_num_seqs']" in output.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_a_reward_that_scores_nothing_stops_all_ranks_and_says_why(tmp_path: Path, model: Path) -> None:
    job = start(tmp_path, model, "return [float('nan')] * len(completions)")
    code, output = job.wait(120)
    assert code == 1
    assert "none of the 16 completions of this step has a usable reward" in output
    assert "rank 1: failed first" not in output
    assert not job.survivors()


def test_unusable_rewards_are_counted_and_left_out(tmp_path: Path, model: Path) -> None:
    job = start(tmp_path, model, "return [float('nan'), None, 'high'] + [float(len(c)) for c in completions[3:]]", num_ranks=1)
    code, output = job.wait(120)
    assert code == 0, output
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        assert metrics["reward/unscored_frac"] == 3 / 16
        assert metrics["reward/reward/invalid_frac"] == 2 / 16
        assert metrics["reward/reward/not_applicable_frac"] == 1 / 16
        assert metrics["reward/mean"] > 0


def test_ctrl_c_ends_all_ranks(tmp_path: Path, model: Path) -> None:
    job = start(tmp_path, model, "time.sleep(0.2)", training={"num_steps": 10_000})
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        assert time.monotonic() < deadline
        assert job.process.poll() is None, job.wait()[1]
        time.sleep(0.2)
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    code, output = job.wait(20)
    assert code != 0
    assert not job.survivors()
    assert output.count("Traceback (most recent call last)") <= 1, output  # torchrun's own


def test_a_killed_rank_ends_the_others(tmp_path: Path, model: Path) -> None:
    job = start(tmp_path, model, 'if os.environ["RANK"] == "0" and calls == 2: os.kill(os.getpid(), 9)')
    code, output = job.wait(120)
    assert code == 1
    assert "SIGKILL" in output
    assert not job.survivors()


def test_a_data_error_seen_only_with_the_tokenizer_is_one_line_and_exit_code_2(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, data={"as_chat": True})
    code, output = Job([sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]).wait(120)
    assert code == 2
    assert [line for line in output.splitlines() if line.strip()] == [
        f"error: {tmp_path}/train.jsonl:1: the prompt is chat messages, but the tokenizer of model.path has no chat template"
    ]
    assert not (tmp_path / "run").exists()
