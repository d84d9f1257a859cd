"""Tail batching in whole runs: which groups a step takes depends on time, and nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_spmd.tools.replay.read import read_step
from tests.support.models import write_config
from tests.support.ranks import train

NUM_ROWS, NUM_PROMPTS = 10, 4


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """Two epochs on two ranks, stopped after the first step, when two prompts wait, and begun
    again."""
    rows = [{"prompt": f"{n}+1=", "target": n + 1, "answer": str(n)} for n in range(NUM_ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = folder / "reward.py"
    reward.write_text(
        "def r(completion_ids, **_):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
    rollout = {
        "num_prompts_per_step": NUM_PROMPTS,
        "group_size": 3,
        "max_completion_tokens": 40,
        "tail_batching": 1.5,
    }
    config = write_config(
        folder,
        folder / "model",
        rollout=rollout,
        checkpoint={"every_steps": 1},
        training={"num_steps": 1, "max_tokens_per_micro_batch": 64},
        rewards=[{"function": f"{reward}:r"}],
    )
    train(2, config)
    train(2, config, "training.num_steps=5", "checkpoint.resume=auto")
    return folder / "run"


def positions(run: Path, step: int) -> dict[int, int]:
    """Of the groups that were trained on, and their rows."""
    groups = read_step(run, step).rollouts
    assert all({r.position for r in group} == {group[0].position} for group in groups)
    return {group[0].position: group[0].row for group in groups}


def test_each_prompt_is_trained_on_once_an_epoch(run: Path) -> None:
    steps = [positions(run, step) for step in range(1, 6)]
    assert [len(step) for step in steps] == [NUM_PROMPTS] * 5
    assert sorted(position for step in steps for position in step) == list(range(2 * NUM_ROWS))
    for initial in (0, NUM_ROWS):
        rows = [step[p] for step in steps for p in step if initial <= p < initial + NUM_ROWS]
        assert sorted(rows) == list(range(NUM_ROWS))
    # Six of ten are launched first, of which two wait. Four are left of the epoch, where no short
    # round fits: these two
    # and two of the four are next, and the last two come with the next epoch's first.
    assert set(steps[0]) <= set(range(6))
    assert set(steps[1]) == {*range(6), 6, 7} - set(steps[0])
    assert set(steps[2]) == {8, 9, 10, 11}


def test_the_metrics_say_who_waits_and_what_was_thrown_away(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    # 12 to 17 are launched in the fourth step; 18 and 19 end the epoch with the two of them that
    # waited.
    assert [line["rollout/waiting_prompts"] for line in lines] == [2, 0, 0, 2, 0]
    assert [line["progress/epoch"] for line in lines] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert [line["rollout/tail_long_round"] for line in lines] == [0] * 5
    for number, line in enumerate(lines):
        launched = {name for name in line if name.startswith("rollout/tail_launched")}
        assert len(launched) == (2 if number in (0, 3) else 0)
        assert 0 <= line["rollout/tail_dropped_tokens_frac"] < 1
        assert number in (0, 3) or line["rollout/tail_dropped_tokens_frac"] == 0
        # Each token is of the policy that trains on it: rounding alone is between engine and
        # policy.
        assert line["weight_sync/mismatch_abs_max"] < 1e-4


def test_the_checkpoint_knows_who_waits(run: Path) -> None:
    trainer = json.loads((run / "checkpoints/step_000004/trainer.json").read_text())
    trained = {position for step in range(1, 5) for position in positions(run, step)}
    assert trainer["position"] == 18
    assert trainer["waiting"] == sorted(set(range(18)) - trained)
    assert len(trainer["waiting"]) == 2
