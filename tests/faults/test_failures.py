"""A failure anywhere ends all ranks with the first traceback and leaves no process behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.dumps import dumped
from tests.support.models import make_model, write_config
from tests.support.processes import Job, torchrun
from tests.support.ranks import RanksJob

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


def make_config(tmp_path: Path, model: Path, body: str, **sections: object) -> Path:
    (tmp_path / "reward.py").write_text(REWARD.format(body=body))
    return write_config(
        tmp_path, model, rewards=[{"function": f"{tmp_path}/reward.py:reward"}], **sections
    )


def start(tmp_path: Path, model: Path, body: str, **sections: object) -> Job:
    return Job(
        torchrun(
            2,
            "-m",
            "grpo_spmd.train",
            "--config",
            str(make_config(tmp_path, model, body, **sections)),
        )
    )


def run(
    tmp_path: Path, model: Path, body: str, num_ranks: int = 2, **sections: object
) -> tuple[int, str]:
    """Where nothing is said of torchrun: on the server's ranks."""
    return RanksJob(
        num_ranks,
        "grpo_spmd.train",
        "--config",
        str(make_config(tmp_path, model, body, **sections)),
    ).wait(120)


def test_a_reward_that_always_raises_on_one_rank_ends_all_with_its_traceback(
    tmp_path: Path, model: Path
) -> None:
    """Half of the step's completions are without a reward, which is over reward_pool.max_error_frac
    (0.3)."""
    job = start(tmp_path, model, 'if os.environ["RANK"] == "1": raise KeyError("no such column")')
    code, output = job.wait(120)
    assert code == 1
    assert (
        "reward 'reward' gave no usable value for 8 of 16 completions (8 error, 0 timeout)"
        in output
    )
    assert "reward_pool.max_error_frac=0.3" in output
    assert "reward 'reward' raised KeyError: 'no such column'" in output
    assert f'{tmp_path}/reward.py", line' in output
    # in the first line, in full, and in the last line; then torchrun's summary
    assert output.split("Root Cause")[0].count("KeyError: 'no such column'") <= 5, output
    assert "KeyError: 'no such column' (reward.py:" in output
    assert "rewards/pool/worker.py" not in output
    rollouts = dumped(tmp_path / "run", 1)
    assert sorted(r["statuses"]["reward"] for r in rollouts) == ["error"] * 8 + ["ok"] * 8
    assert not job.survivors()


def test_a_verifier_that_fails_in_evaluation_is_not_a_policy_that_is_never_right(
    tmp_path: Path, model: Path
) -> None:
    """Evaluation scores one completion a call; training, groups of four."""
    body = 'if len(completions) == 1: raise ValueError("needs its group")'
    sections = {
        "data": {
            "eval": str(tmp_path / "train.jsonl"),
            "max_prompt_tokens": 16,
            "train": str(tmp_path / "train.jsonl"),
        }
    }
    code, output = run(
        tmp_path, model, body, num_ranks=1, eval={"every_steps": 1, "num_samples": 2}, **sections
    )
    assert code == 1
    assert (
        "reward 'reward' gave no usable value for 64 of 64 completions (64 error, 0 timeout)"
        in output
    )
    assert "pass_at_1" not in output


def test_a_reward_that_fails_now_and_then_stops_nothing(tmp_path: Path, model: Path) -> None:
    """On one rank of two a function raises, exits, kills itself or hangs: counted, left out, and
    the run comes to its
    end."""
    body = """if os.environ["RANK"] == "1" and calls == 1:
        if completions: os._exit(3)
    if len(completions) == 1 and os.environ["RANK"] == "1" and columns["target"][0] % 2:
        import sys; sys.exit("odd")"""
    config = {"max_error_frac": 0.99, "timeout_s": 5}
    code, output = run(tmp_path, model, body, reward_pool=config)
    assert code == 0, output
    metrics = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert all(
        m["reward/reward/error_frac"] + m["reward/reward/timeout_frac"] == m["reward/unscored_frac"]
        for m in metrics
    )
    assert any(m["reward/reward/error_frac"] > 0 for m in metrics)
    assert "completions failed" in output


def test_a_reward_that_calls_exit_is_a_failure(tmp_path: Path, model: Path) -> None:
    code, output = run(tmp_path, model, "raise SystemExit(0)", num_ranks=1)
    assert code == 1
    assert "reward 'reward' raised SystemExit: 0" in output


def test_what_only_the_engine_refuses_leaves_nothing_behind(tmp_path: Path, model: Path) -> None:
    config = write_config(tmp_path, model, rollout={"engine": {"attention_backend": "FOO"}})
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait(120)
    assert code == 2
    assert (
        "error: rollout.engine: vLLM did not start with attention_backend: "
        in output.splitlines()[-1]
    )
    assert not (tmp_path / "run").exists()


def test_a_reward_that_never_applies_stops_all_ranks_and_says_why(
    tmp_path: Path, model: Path
) -> None:
    code, output = run(tmp_path, model, "return [None] * len(completions)")
    assert code == 1
    assert "none of the 16 completions of this step has a usable reward" in output
    assert "failed first, in phase reward, step 1" in output
    # The message is whole, and our own frames would say nothing.
    assert "Traceback" not in output


def test_unusable_rewards_are_counted_and_left_out(tmp_path: Path, model: Path) -> None:
    body = (
        "return [float(len(c)) for c in completions[1:]] + [[float('nan'), None, 'high', "
        "2.0][columns['nums'][0][0] % 4]]"
    )
    code, output = run(tmp_path, model, body, num_ranks=1, reward_pool={"max_error_frac": 0.5})
    assert code == 0, output
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        prompts = [p["prompt"] for p in dumped(tmp_path / "run", metrics["step"])][::4]
        kinds = [
            int(prompt.split(",")[0]) % 4 for prompt in prompts
        ]  # what the last completion of each group got
        assert metrics["reward/unscored_frac"] == sum(kind < 3 for kind in kinds) / 16
        assert metrics["reward/reward/error_frac"] == sum(kind in (0, 2) for kind in kinds) / 16
        assert metrics["reward/reward/timeout_frac"] == 0
        assert metrics["reward/reward/not_applicable_frac"] == kinds.count(1) / 16
        assert metrics["reward/mean"] > 0


def test_a_killed_rank_ends_the_others(tmp_path: Path, model: Path) -> None:
    # a worker's parent's parent
    rank = 'int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1])'
    job = start(tmp_path, model, f'if os.environ["RANK"] == "0" and calls == 2: os.kill({rank}, 9)')
    code, output = job.wait(120)
    assert code == 1
    assert "SIGKILL" in output
    initial = next(line for line in output.splitlines() if "went silent" in line)
    assert re.match(
        r"rank 0 \(.*\) went silent in phase (reward|rollout), step \d: its process is gone",
        initial,
    ), output
    assert initial in (tmp_path / "run/logs/failure.txt").read_text()
    # a survivor's lost connection explains nothing
    assert "Traceback" not in output.split("torch/distributed/elastic")[0]
    assert not job.survivors()


def test_a_data_error_that_the_tokenizer_shows_is_one_line_and_exit_code_2(
    tmp_path: Path, model: Path
) -> None:
    config = write_config(tmp_path, model, data={"as_chat": True})
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait(120)
    assert code == 2
    [line] = [line for line in output.splitlines() if line.strip()]
    assert line.startswith(
        f"error: {tmp_path}/train.jsonl:1: the prompt is chat messages (data.as_chat"
    )
    assert "has no chat template" in line
    assert not (tmp_path / "run").exists()
