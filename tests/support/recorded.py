"""Runs that are recorded once a suite, for all pytest processes, and read by several files. Nobody
writes into them."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.models import make_model, write_config
from tests.support.ranks import train

# A reward that fails on some rows and does not apply to others, as one for TRL: it is told of the
# run, and logs.
ODD_REWARD = """
def odd(completions, nums, trainer_state, log_metric, log_extra, api_key=None, **columns):
    if nums[0] == [2, 2]:
        raise ValueError("two twos")
    log_metric("digits", sum(c.isdigit() for text in completions for c in text))
    log_metric("progress", trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch)
    log_extra("length", [len(text) for text in completions])
    return [None if own[0] == 1 else float(sum(c.isdigit() for c in text) % 2) for text, own in zip(completions, nums)]
"""  # noqa: E501


def record_once(factory: pytest.TempPathFactory, record: Callable[[Path], None]) -> Path:
    """The folder that `record` has filled, in this pytest process or another one."""
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / record.__name__
    with open(base / f"{record.__name__}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            record(folder)
            (folder / "done").touch()
    return folder


def plain_config(folder: Path, model: Path) -> Path:
    """One process, three steps of two updates each, a reference, an evaluation."""
    return write_config(
        folder,
        model,
        data={
            "train": str(folder / "train.jsonl"),
            "eval": {"held": str(folder / "train.jsonl")},
            "max_prompt_tokens": 16,
        },
        eval={"every_steps": 2, "num_samples": 1},
        loss={"kl_coef": 0.01},
        training={"num_steps": 3, "num_mini_batches": 2, "max_tokens_per_micro_batch": 64},
    )


def plain(folder: Path) -> None:
    train(1, plain_config(folder, make_model(folder / "model", "qwen3", tied=True)), timeout_s=180)


def elaborate(folder: Path) -> None:
    """Three steps on two ranks with all that makes a replay hard: two optimizer steps a rollout (so
    that the second depends on the optimizer's moments), a reference, dynamic sampling, a reward
    that fails on some rows and does not
    apply to others."""
    (folder / "my_reward.py").write_text(ODD_REWARD)
    config = write_config(
        folder,
        make_model(folder / "model", "qwen3", tied=True),
        rewards=[
            {"name": "format", "args": {"pattern": "[0-9].*"}},
            {"function": f"{folder}/my_reward.py:odd", "weight": 0.5},
        ],
        rollout={"dynamic_sampling": True, "temperature": 0.9},
        training={"num_steps": 3, "num_mini_batches": 2},
        loss={"kl_coef": 0.1},
        advantage={"overlong_buffer_tokens": 4, "overlong_penalty": 0.25},
        checkpoint={"every_steps": 1, "keep": 9},
    )
    train(2, config, timeout_s=500)
