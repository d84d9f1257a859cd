"""What a terminal shows: columns that fit, the time that is left, and alarms in words."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import struct
import termios
from typing import Any

import pytest

from grpo_spmd.config.schema import DataConfig, LoraConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.distributed.exit import Terminal
from grpo_spmd.observe import console
from grpo_spmd.observe.console import Console, banner

QUIET = {
    "reward/mean": 0.287,
    "reward/std": 0.452,
    "reward/zero_std_groups_frac": 0.25,
    "completion/tokens_mean": 4.04,
    "completion/truncated_frac": 0.125,
    "loss/total": 0.0018,
    "loss/entropy": 1.034,
    "optim/grad_norm": 0.4567,
    "optim/updates": 1,
    "optim/skipped_updates": 0,
    "weight_sync/mismatch_kl": 5e-14,
    "time/step_s": 0.777,
    "time/rollout_s": 0.25,
    "time/update_s": 0.31,
}
LARGE = QUIET | {
    "reward/mean": -12.3456,
    "completion/tokens_mean": 131072.0,
    "completion/truncated_frac": 1.0,
    "loss/total": -123456.0,
    "optim/grad_norm": 123456.0,
    "time/step_s": 99999.0,
}
UNKNOWN = QUIET | dict.fromkeys(
    ("reward/mean", "loss/total", "optim/grad_norm", "weight_sync/mismatch_kl")
)


def shown(metrics: dict[str, Any], step: int = 12, num_steps: int = 80) -> list[str]:
    return list(Console(num_steps).lines({"step": step, **metrics}))


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_a_line_by_hand() -> None:
    header, line = shown(QUIET)
    assert header.split() == [
        "reward",
        "spread",
        "tokens",
        "cut",
        "loss",
        "grad",
        "mismatch",
        "time",
        "left",
    ]
    assert line.split() == [
        "step",
        "12/80",
        "0.287",
        "0.452",
        "4.0",
        "12%",
        "+0.0018",
        "0.457",
        "5e-14",
        "0.78s",
        "-",
    ]


@pytest.mark.parametrize(
    ("title", "metric"), [("teacher", "teacher/kl"), ("critic", "critic/explained_variance")]
)
def test_a_teacher_or_a_critic_stands_in_the_place_of_the_loss(title: str, metric: str) -> None:
    header, line = shown(QUIET | {"reward/mean": 0.0, metric: 0.25}, 99999, 99999)
    assert header.split()[3:6] == ["cut", title, "grad"]
    assert float(line.split()[6]) == 0.25
    assert max(len(header), len(line)) <= 80


@pytest.mark.parametrize("num_steps", [1, 80, 9999, 99999])
@pytest.mark.parametrize("columns", [80, 90, 132, 250])
def test_columns_are_fixed_and_fit(
    num_steps: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    a_console = Console(num_steps)
    lines = [
        line for m in (QUIET, LARGE, UNKNOWN) for line in a_console.lines({"step": num_steps, **m})
    ]
    header = lines[0]
    ends = [header.index(title) + len(title) for title in header.split()]
    for line in lines:
        assert len(line) <= columns
        padded = line.ljust(len(header) + 1)
        assert all(padded[end - 1] != " " and padded[end] == " " for end in ends), line
    assert ("entropy" in header) == (columns > 80 or num_steps == 1)
    assert ("update 0.31s  rollout 0.25s" in lines[1]) == (columns > 120)


def test_rewards_and_phases_stand_at_the_end_where_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two = QUIET | {"reward/math/mean": 0.25, "reward/format/mean": None, "time/eval_s": 0.001}
    for columns, end in (
        (170, "  math 0.250  format -  update 0.31s  rollout 0.25s"),
        (120, "  math 0.250  format -  update 0.31s"),
        (100, "  math 0.250"),
        (85, ""),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert shown(two)[1].partition("0.78s     -")[2] == end
    monkeypatch.setenv("COLUMNS", "170")
    assert shown(QUIET | {"reward/math/mean": 0.25})[1].endswith(
        "     -  update 0.31s  rollout 0.25s"
    )


def test_the_header_comes_again_and_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    a_console = Console(100)
    lines = [list(a_console.lines({"step": step, **QUIET})) for step in range(1, 21)]
    assert [len(step_values) for step_values in lines] == [2] + [1] * 19
    monkeypatch.setenv("COLUMNS", "100")
    header, line = a_console.lines({"step": 21, **QUIET})
    assert "entropy" in header
    assert "1.034" in line


@pytest.mark.parametrize(
    ("step_s", "remaining"),
    [(0.5, "34s"), (10, "11min"), (100, "1.9h"), (1000, "18.9h"), (20000, "16d"), (0.1, "6.80s")],
)
def test_the_time_that_is_left(
    step_s: float, remaining: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """68 of 80 steps, at the mean of the last ones; the first, which took an hour, is not among
    them."""
    clock = iter([3600 + step_s * step for step in range(12)])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    a_console = Console(80)
    for step in range(1, 13):
        *_, line = a_console.lines({"step": step, **QUIET})
    assert line.split()[-1] == remaining


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reward/zero_std_groups_frac": 1.0}, "in every group all rewards are alike (mean 0.287)"),
        (
            {"completion/truncated_frac": 1.0},
            "every completion was cut off at rollout.max_completion_tokens",
        ),
        ({"reward/unscored_frac": 0.25}, "25% of the completions have no reward and are left out"),
        ({"optim/grad_norm": 0.0}, "the gradient is 0"),
        ({"loss/entropy": 0.002}, "the policy's entropy is 0.002 nats a token"),
        ({"optim/updates": 0, "optim/grad_norm": None, "loss/entropy": None}, "no update was made"),
        (
            {"critic/skipped_updates": 2, "critic/loss": 0.1},
            "2 updates of the critic were given up",
        ),
        (  # all those of a step of its warm-up
            {
                "optim/updates": 0,
                "optim/grad_norm": None,
                "critic/skipped_updates": 1,
                "critic/loss": None,
            },
            "1 updates of the critic were given up",
        ),
    ],
)
def test_alarms_are_given_once_in_words(changed: dict[str, float | None], message: str) -> None:
    a_console = Console(80)
    assert list(a_console.warnings({"step": 3, **QUIET})) == []
    [text] = a_console.warnings({"step": 4, **QUIET, **changed})
    assert text.startswith(f"step 4: {message}")
    assert list(a_console.warnings({"step": 5, **QUIET, **changed})) == []


def test_no_alarm_of_what_was_not_measured() -> None:
    """A skipped update has a warning of its own, and a step without a reward std nothing to say
    about groups."""
    skipped = QUIET | {
        "optim/updates": 0,
        "optim/skipped_updates": 1,
        "optim/grad_norm": None,
        "loss/entropy": None,
    }
    assert list(Console(80).warnings({"step": 3, **skipped})) == []
    assert (
        list(Console(80).warnings({"step": 3, **skipped, "critic/skipped_updates": 1})) == []
    )  # of path: policy


@pytest.mark.parametrize("taught_by", ["teacher/kl", "critic/loss"])
def test_groups_all_alike_are_no_alarm_where_they_teach(taught_by: str) -> None:
    line = {"step": 3, **QUIET, "reward/zero_std_groups_frac": 1.0, taught_by: 0.1}
    assert list(Console(80).warnings(line)) == []


def test_the_banner() -> None:
    rewards = [RewardConfig(name="math"), RewardConfig(function="a/b.py:short", weight=0.1)]
    model = ModelConfig(path="Qwen/Qwen3-0.6B", lora=LoraConfig(rank=8))
    rollout = RolloutConfig(num_prompts_per_step=16, group_size=8, max_completion_tokens=1024)
    lines = list(banner(model, DataConfig(train="train.jsonl"), rollout, rewards, 80))
    assert lines == [
        "model: Qwen/Qwen3-0.6B, bfloat16, LoRA of rank 8",
        "data: train.jsonl",
        "rewards: math, short x 0.1",
        "80 steps of 16 prompts x 8 completions: at most 131,072 sampled tokens each",
    ]
    without = list(banner(model, DataConfig(train="train.jsonl"), rollout, [], 80))
    assert without == [*lines[:2], lines[3]]


def through_terminal(stream: Any, *messages: str) -> None:
    handler = Terminal(stream)
    for message in messages:
        handler.emit(logging.makeLogRecord({"msg": message}))
    handler.flush()


def test_long_lines_are_wrapped_in_a_terminal_and_whole_in_a_pipe() -> None:
    long = "a long warning " * 12 + "/a/path/that/is/longer/than/a/line/of/a/terminal/" + "x" * 60
    pipe = io.StringIO()
    through_terminal(pipe, long, "short  with  spaces")
    assert pipe.getvalue() == f"{long}\nshort  with  spaces\n"
    ours, theirs = pty.openpty()
    os.environ.pop("COLUMNS")
    with open(theirs, "w", closefd=False) as stream:
        os.set_blocking(ours, True)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
        through_terminal(stream, long, "short  with  spaces")
        displayed = b""
        while not displayed.endswith(b"short  with  spaces\r\n"):
            displayed += os.read(ours, 65536)
    lines = displayed.decode().replace("\r\n", "\n").splitlines()
    os.close(theirs)
    os.close(ours)
    assert " ".join(line.strip() for line in lines[:-1]) == long
    assert lines[-1] == "short  with  spaces"
    assert [len(line) > 80 for line in lines] == [
        False,
        False,
        False,
        True,
        False,
    ]  # a path stays whole
