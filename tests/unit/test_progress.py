"""Counts and clock of a run that goes on, beside one that was never stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_spmd.config.schema import LossConfig, TrainingConfig
from grpo_spmd.files import TRAINER, UntrustedError, check_fields
from grpo_spmd.observe.log import MetricsLog, Progress

STEPS = [(8, 100, 0.5), (8, 90, 1.0), (24, 310, 2.5), (8, 70, 3.0)]  # completions, tokens, epoch


def test_counts_go_on_where_the_checkpoint_has_them() -> None:
    full = Progress({}, 0)
    expected = [full.count(*step) for step in STEPS]
    assert [item["progress/completions"] for item in expected] == [8, 16, 40, 48]
    assert [item["progress/tokens"] for item in expected] == [100, 190, 500, 570]
    assert [item["progress/epoch"] for item in expected] == [0.5, 1.0, 2.5, 3.0]
    initial = Progress({}, 0)
    for step in STEPS[:2]:
        initial.count(*step)
    saved = json.loads(json.dumps({"step": 2, **initial.state()}))
    initial.count(*STEPS[2])  # a step that is lost with its process
    check_fields(saved, TRAINER, "trainer.json")
    resumed = Progress(saved, 2)
    assert [resumed.count(*step) for step in STEPS[2:]] == expected[2:]


def test_a_checkpoint_that_did_not_count_leaves_them_out_and_makes_none_too_small() -> None:
    resumed = Progress({"step": 2}, 2)
    assert resumed.count(*STEPS[2]) == {"progress/epoch": 2.5}
    assert resumed.state() == {}


@pytest.mark.parametrize("name", ["num_completions", "num_tokens"])
def test_a_count_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(UntrustedError, match=f"trainer.json: {name}: .* >= 0; got -1"):
        check_fields({name: -1}, TRAINER, "trainer.json")


def a_log(run_dir: Path, earlier: str) -> MetricsLog:
    """The log of a launch that began 50 s ago, in a run that has these lines already."""
    (run_dir / "metrics.jsonl").write_text(earlier)
    rank0: Any = SimpleNamespace(is_rank0=True)
    return MetricsLog(
        run_dir,
        0,
        time.monotonic() - 50,
        session=rank0,
        timer=rank0,
        logprob_check=rank0,
        loss=LossConfig(),
        training=TrainingConfig(),
        followers=None,
    )


@pytest.mark.parametrize(
    ("earlier", "expected"),
    [("", 50), ('{"step": 3, "time/wall_s": 1000.0}\n', 1050), ('{"step": 3}\n', 50)],
)
def test_the_clock_adds_this_launch_to_the_last_line(
    earlier: str, expected: float, tmp_path: Path
) -> None:
    log = a_log(tmp_path, earlier)
    log.write_evaluation(4, {"eval/made/mean": 0.5})
    log.close()
    result = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["time/wall_s"] == pytest.approx(expected, abs=10)
    assert result["time/unix_s"] == pytest.approx(time.time(), abs=10)


@pytest.mark.parametrize(
    ("num_earlier", "expected"),
    [
        (0, "done: 2 steps in 0 min 0"),
        (2, "done: 4 steps, the last 2 of them in 0 min 0"),
    ],
)
def test_the_last_line_has_the_time_of_this_launchs_own_steps(
    num_earlier: int, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither that of its start-up, 50 s, nor that of the launches before."""
    caplog.set_level("INFO", "grpo_spmd")
    line = {"reward/mean": 0.5, "time/wall_s": 1000.0}
    earlier = [json.dumps({"step": step + 1, **line}) + "\n" for step in range(num_earlier)]
    log = a_log(tmp_path, "".join(earlier))
    log._rewards += [0.5, 1.0]
    log.end_run()
    log.close()
    assert expected in caplog.text
    assert "reward/mean 0.500 at the first step, " in caplog.text
