"""What is written, and what a full disk leaves of it."""

from __future__ import annotations

import json
import logging
import resource
import signal
from pathlib import Path

import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import merge_sums
from grpo_spmd.observe.log import _check_trained
from grpo_spmd.observe.metrics_file import LineFile
from grpo_spmd.records import Decision
from tests.support.models import write_config


def test_what_a_full_disk_refuses_is_written_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A real ENOSPC needs a file system of one's own; a limit on the size of this process's files gives OSError after a
    part as well."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = [json.dumps({"step": step, "x": "y" * 50}) for step in range(4)]
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        file = LineFile(path)
        file.write(lines[0])
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))  # takes a part of the second line
        file.write(lines[1])
        assert path.read_text() == f"{{}}\n{lines[0]}\n"
        file.write(lines[2])
        assert path.read_text() == f"{{}}\n{lines[0]}\n"
        assert "File too large; 2 lines wait in memory" in caplog.text
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        file.write(lines[3])
        assert path.read_text().splitlines() == ["{}", *lines]
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
        file.write("lost")
        file.close()
        assert "lacks its last 1 lines" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)


def test_sums_of_ranks_add_up_and_maxima_stay_maxima() -> None:
    one = {"policy": 1.0, "max:norm": 3.0, "hist:x": [1.0, 2.0], "ids:bad": [4]}
    other = {"policy": 2.5, "max:norm": 2.0, "kl": 1.0, "hist:x": [0.0, 5.0], "ids:bad": [1, 7]}
    assert merge_sums([one, {}, other]) == {
        "policy": 3.5,
        "max:norm": 3.0,
        "kl": 1.0,
        "hist:x": [1.0, 7.0],
        "ids:bad": [4, 1, 7],
    }


def test_a_token_lost_or_doubled_on_the_way_is_an_error(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, tmp_path / "model", training={"num_epochs": 2, "num_steps": 1}))
    decided = Decision([], [], [], [], [], [40, 0, 2], [], 0, 0, {})
    _check_trained({"loss_tokens": 84.0, "max:skipped": 0.0}, 3, config, decided)
    # what a skipped update would have trained is not counted
    _check_trained({"loss_tokens": 4.0, "max:skipped": 1.0}, 3, config, decided)
    for tokens in (83.0, 85.0):
        with pytest.raises(
            RuntimeError, match=rf"step 3: trained on {tokens:.0f} tokens where rank 0 had decided on 84"
        ):
            _check_trained({"loss_tokens": tokens, "max:skipped": 0.0}, 3, config, decided)
