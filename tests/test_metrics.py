"""What is written, and that a tracker never stops a training."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from grpo_spmd.assemble import Decision
from grpo_spmd.config import load_config
from grpo_spmd.distributed import merge_sums
from grpo_spmd.metrics import _check_trained, _never_fatal, _start_wandb
from tests.models import write_config


def test_wandb_without_a_key_is_off_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no .netrc
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = load_config(write_config(tmp_path, tmp_path / "model", logging={"wandb": "online"}))
    with caplog.at_level(logging.WARNING, logger="grpo_spmd"):
        logging.getLogger("grpo_spmd").propagate = True
        assert _start_wandb(config) is None
    assert "W&B is off for this run" in caplog.text


def test_a_tracker_that_raises_is_given_up_and_not_fatal() -> None:
    def log(_: int) -> None:
        raise OSError("disk full")

    assert _never_fatal(log, 1) is False
    assert _never_fatal(len, [1]) is True


def test_sums_of_ranks_add_up_and_maxima_stay_maxima() -> None:
    one = {"policy": 1.0, "max:norm": 3.0, "hist:x": [1.0, 2.0], "ids:bad": [4]}
    other = {"policy": 2.5, "max:norm": 2.0, "kl": 1.0, "hist:x": [0.0, 5.0], "ids:bad": [1, 7]}
    assert merge_sums([one, {}, other]) == {"policy": 3.5, "max:norm": 3.0, "kl": 1.0, "hist:x": [1.0, 7.0], "ids:bad": [4, 1, 7]}


def test_a_token_lost_or_doubled_on_the_way_is_an_error(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tmp_path / "model", training={"num_epochs": 2, "num_steps": 1}))
    decided = Decision([], [], [], [], [], [40, 0, 2], [], 0, 0, {})
    _check_trained({"loss_tokens": 84.0, "max:skipped": 0.0}, 3, config, decided)
    _check_trained({"loss_tokens": 4.0, "max:skipped": 1.0}, 3, config, decided)  # what a skipped update would have trained is not counted
    for tokens in (83.0, 85.0):
        with pytest.raises(RuntimeError, match=rf"step 3: trained on {tokens:.0f} tokens where rank 0 had decided on 84"):
            _check_trained({"loss_tokens": tokens, "max:skipped": 0.0}, 3, config, decided)
