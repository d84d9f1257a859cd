"""Rollout dumps on disk: text or gzip, whole or absent, and which of them stay."""

from __future__ import annotations

import gzip
import logging
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.rollout_files import RolloutFiles, dumped_steps, rollouts_file
from grpo_spmd.observe.rollout_reader import read_lines_of

LINES = [b'{"a": 1}', '{"b": "häh\u2028"}'.encode(), b'{"c": "\\n"}']
TEXT = b"".join(line + b"\n" for line in LINES)


def files(run_dir: Path, compression: str = "none", keep: int | None = None) -> RolloutFiles:
    return RolloutFiles(run_dir, LoggingConfig(rollouts_compression=compression, rollouts_keep=keep))  # type: ignore[arg-type]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "rollouts").iterdir())


def test_text_is_the_lines_and_gzip_is_what_others_unpack(tmp_path: Path) -> None:
    files(tmp_path).write_step(12, iter(LINES))
    files(tmp_path, "gzip").write("eval_held_step_000012", iter(LINES))
    assert names(tmp_path) == ["eval_held_step_000012.jsonl.gz", "step_000012.jsonl"]
    assert rollouts_file(tmp_path, 12).read_bytes() == TEXT
    files(tmp_path, "gzip").write_step(12, iter(LINES))
    path = rollouts_file(tmp_path, 12)
    assert path.name == "step_000012.jsonl.gz"
    assert gzip.decompress(path.read_bytes()) == TEXT
    assert (zcat := shutil.which("zcat")) is not None
    assert subprocess.run([zcat, path], capture_output=True, check=True, timeout=20).stdout == TEXT
    assert list(read_lines_of(path)) == LINES
    assert list(read_lines_of(tmp_path / "rollouts/eval_held_step_000012.jsonl.gz")) == LINES
    packed = path.read_bytes()
    files(tmp_path, "gzip").write_step(12, iter(LINES))
    assert path.read_bytes() == packed  # no time in it
    files(tmp_path).write_step(12, iter(LINES[:1]))  # the other form of a step that is run again goes
    assert names(tmp_path) == ["eval_held_step_000012.jsonl.gz", "step_000012.jsonl"]
    assert list(read_lines_of(rollouts_file(tmp_path, 12))) == LINES[:1]
    assert dumped_steps(tmp_path) == [12]


def test_of_two_forms_that_a_kill_left_the_newer_is_read(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for newer, older in ((".jsonl", ".jsonl.gz"), (".jsonl.gz", ".jsonl")):
        for age, ending in enumerate((newer, older)):
            path = tmp_path / f"rollouts/step_000003{ending}"
            path.write_bytes(b"x")
            os.utime(path, (1e9 - age, 1e9 - age))
        assert rollouts_file(tmp_path, 3).name == f"step_000003{newer}"
    (tmp_path / "rollouts/step_000004.jsonl.tmp").write_bytes(b"half")
    assert rollouts_file(tmp_path, 4).name == "step_000004.jsonl"
    assert dumped_steps(tmp_path) == [3]


def test_the_newest_stay_and_nothing_else_goes(tmp_path: Path) -> None:
    keeps_all = files(tmp_path)
    for step in (1, 2, 3):
        keeps_all.write_step(step, LINES)
    for name in ("eval_held_step_000001.jsonl", "step_000001.jsonl.bak", "notes.txt"):
        (tmp_path / "rollouts" / name).write_text("x")
    others = ["eval_held_step_000001.jsonl", "notes.txt", "step_000001.jsonl.bak"]
    keeps_two = files(tmp_path, "gzip", keep=2)
    keeps_two.write("eval_held_step_000004", LINES)
    keeps_two.write_step(4, LINES)
    assert dumped_steps(tmp_path) == [3, 4]
    # A run that goes on after step 1: what it writes stays, and the files of steps to come wait for their turn.
    files(tmp_path, keep=2).write_step(2, LINES)
    assert dumped_steps(tmp_path) == [2, 3, 4]
    files(tmp_path, keep=2).write_step(3, LINES)
    assert dumped_steps(tmp_path) == [2, 3, 4]
    files(tmp_path, keep=1).write_step(1_000_000, LINES)  # seven digits: by number, not by name
    assert names(tmp_path) == [
        *others[:1],
        "eval_held_step_000004.jsonl.gz",
        "notes.txt",
        *others[2:],
        "step_1000000.jsonl",
    ]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_full_disk_costs_the_file_alone(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    written = files(tmp_path, compression, keep=1)
    for step in (1, 2):
        written.write_step(step, LINES)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limit[1]))
        written.write_step(2, [os.urandom(5000).hex().encode()])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert names(tmp_path) == []  # neither half of the new one nor the old one, which says something else
    assert "is not written: File too large" in caplog.text
    written.write_step(3, LINES)
    assert dumped_steps(tmp_path) == [3]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-9], "Compressed file ended before the end-of-stream marker"),
        (lambda data: data[:12] + b"\xff\xff\xff" + data[15:], "Error -3 while decompressing data"),
        (lambda data: b"PK" + data[2:], "Not a gzipped file"),
        (lambda data: data[:-8] + b"\0\0\0\0" + data[-4:], "CRC check failed"),
    ],
)
def test_a_damaged_gzip_is_one_line(damage: Callable[[bytes], bytes], expected: str, tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl.gz"
    path.write_bytes(damage(gzip.compress(TEXT)))
    with pytest.raises(ConfigError, match=rf"^{path}: not a whole gzip file: {expected}"):
        list(read_lines_of(path))


def test_what_is_no_file_is_refused_and_what_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_000001.jsonl")
    with pytest.raises(ConfigError, match="is a fifo, and not a regular file"):
        list(read_lines_of(tmp_path / "step_000001.jsonl"))
    with pytest.raises(FileNotFoundError):
        list(read_lines_of(tmp_path / "nothing.jsonl"))
