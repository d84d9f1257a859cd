"""Rollout dumps on disk: text or gzip, whole or absent, and which of them stay."""

from __future__ import annotations

import gzip
import logging
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.observe.metrics_file import read_lines
from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.observe.run_folder import RunFolder, dump_path

LINES = [b'{"a": 1}', '{"b": "häh\u2028"}'.encode(), b'{"c": "\\n"}']
TEXT = b"".join(line + b"\n" for line in LINES)


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[None]:
    """Of one rank; tests/ranks/test_dump.py has several."""
    _SESSION.append(start_session())
    yield
    end_session()
    _SESSION.clear()


_SESSION: list[Session] = []


def files(run_dir: Path, compression: str = "none", keep: int | None = None) -> RolloutWriter:
    options = LoggingConfig(rollouts_compression=compression, rollouts_keep=keep)  # type: ignore[arg-type]
    return RolloutWriter(run_dir, options, _SESSION[0])


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "rollouts").iterdir())


def test_text_is_the_lines_and_gzip_is_what_others_unpack(tmp_path: Path) -> None:
    files(tmp_path).write_step(12, iter(LINES))
    files(tmp_path, "gzip").write("eval_held_step_000012", iter(LINES))
    assert names(tmp_path) == ["eval_held_step_000012.jsonl.gz", "step_000012.jsonl"]
    assert dump_path(tmp_path, 12).read_bytes() == TEXT
    files(tmp_path, "gzip").write_step(12, iter(LINES))
    path = dump_path(tmp_path, 12)
    assert path.name == "step_000012.jsonl.gz"
    assert gzip.decompress(path.read_bytes()) == TEXT
    assert (zcat := shutil.which("zcat")) is not None
    assert subprocess.run([zcat, path], capture_output=True, check=True, timeout=20).stdout == TEXT
    assert [line.text for line in read_lines(path)] == LINES
    assert [
        line.text for line in read_lines(tmp_path / "rollouts/eval_held_step_000012.jsonl.gz")
    ] == LINES
    packed = path.read_bytes()
    files(tmp_path, "gzip").write_step(12, iter(LINES))
    assert path.read_bytes() == packed  # no time in it
    files(tmp_path).write_step(
        12, iter(LINES[:1])
    )  # the other form of a step that is run again goes
    assert names(tmp_path) == ["eval_held_step_000012.jsonl.gz", "step_000012.jsonl"]
    assert [line.text for line in read_lines(dump_path(tmp_path, 12))] == LINES[:1]
    assert RunFolder(tmp_path).dumped_steps == [12]


def test_of_two_forms_that_a_kill_left_the_newer_is_read(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    for newer, older in ((".jsonl", ".jsonl.gz"), (".jsonl.gz", ".jsonl")):
        for age, ending in enumerate((newer, older)):
            path = tmp_path / f"rollouts/step_000003{ending}"
            path.write_bytes(b"x")
            os.utime(path, (1e9 - age, 1e9 - age))
        assert dump_path(tmp_path, 3).name == f"step_000003{newer}"
    (tmp_path / "rollouts/step_000004.jsonl.tmp").write_bytes(b"half" * 1000)
    assert dump_path(tmp_path, 4).name == "step_000004.jsonl"
    assert RunFolder(tmp_path).dumped_steps == [3]
    files(tmp_path).write_step(4, LINES)
    assert (
        dump_path(tmp_path, 4).read_bytes() == TEXT
    )  # without the end of what a killed process had begun


def test_what_killed_processes_had_begun_goes_but_not_what_another_node_may_be_at(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    remaining = [
        "step_000007.jsonl",
        "eval_held_step_000002.jsonl.gz",
        "step_000001.node_1.jsonl",
        "step_000002.node_3.jsonl.gz",
    ]
    for name in (*remaining, "step_000009.jsonl.bak", "notes"):
        (folder / f"{name}.tmp").touch()
    (folder / "step_000008.jsonl.tmp").mkdir()
    two_nodes = files(tmp_path)
    two_nodes._nodes = [range(1), range(1, 2)]
    two_nodes._finish("step_000003", folder / "step_000003.jsonl.tmp", [0, 0])
    rest = ["notes.tmp", "step_000008.jsonl.tmp", "step_000009.jsonl.bak.tmp"]
    assert names(tmp_path) == [rest[0], "step_000001.node_1.jsonl.tmp", *rest[1:]]
    files(tmp_path).write_step(3, LINES)  # there is no other node
    assert names(tmp_path) == [rest[0], "step_000003.jsonl", *rest[1:]]


def test_the_newest_stay_and_nothing_else_goes(tmp_path: Path) -> None:
    keeps_all = files(tmp_path)
    for step in (1, 2, 3):
        keeps_all.write_step(step, LINES)
    for name in ("eval_held_step_000001.jsonl", "step_000001.jsonl.bak", "notes.txt"):
        (tmp_path / "rollouts" / name).write_text("x")
    rest = ["eval_held_step_000001.jsonl", "notes.txt", "step_000001.jsonl.bak"]
    keeps_two = files(tmp_path, "gzip", keep=2)
    keeps_two.write("eval_held_step_000004", LINES)
    keeps_two.write_step(4, LINES)
    assert RunFolder(tmp_path).dumped_steps == [3, 4]
    # A run that goes on after step 1: what it writes stays, and the files of steps to come wait for
    # their turn.
    files(tmp_path, keep=2).write_step(2, LINES)
    assert RunFolder(tmp_path).dumped_steps == [2, 3, 4]
    files(tmp_path, keep=2).write_step(3, LINES)
    assert RunFolder(tmp_path).dumped_steps == [2, 3, 4]
    files(tmp_path, keep=1).write_step(1_000_000, LINES)  # seven digits: by number, not by name
    assert names(tmp_path) == [
        *rest[:1],
        "eval_held_step_000004.jsonl.gz",
        "notes.txt",
        *rest[2:],
        "step_1000000.jsonl",
    ]


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_full_disk_costs_the_file_alone(
    compression: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
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
    assert (
        names(tmp_path) == []
    )  # neither half of the new one nor the old one, which says something else
    assert "is not written: File too large (on rank 0)" in caplog.text
    written.write_step(3, LINES)
    assert RunFolder(tmp_path).dumped_steps == [3]


def test_what_is_in_the_way_is_a_warning_and_nobody_elses_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts/step_000001.jsonl.tmp").mkdir()
    (tmp_path / "rollouts/step_000002.jsonl").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "rollouts/step_000003.jsonl.tmp").symlink_to(tmp_path / "precious")
    written = files(tmp_path)
    for step in (1, 2, 3):
        written.write_step(step, LINES)
    assert "step_000001.jsonl is not written: Is a directory (on rank 0)" in caplog.text
    assert "step_000002.jsonl is not written: Is a directory" in caplog.text
    assert len(caplog.records) == 2
    assert (tmp_path / "precious").read_text() == "kept"
    assert dump_path(tmp_path, 3).read_bytes() == TEXT
    (tmp_path / "elsewhere").write_text("no folder")
    files(tmp_path / "elsewhere").write_step(1, LINES)
    assert (
        "elsewhere/rollouts/step_000001.jsonl is not written: Not a directory (on rank 0)"
        in caplog.text
    )


def _record(rollout_id: int | None, of: int | None = 8) -> bytes:
    number = 9 if rollout_id is None else rollout_id
    row, sample = divmod(number, 2)
    record = RolloutRecord(
        rollout_id,
        row,
        10 + row,
        sample,
        "p",
        {},
        "c",
        1.0,
        {},
        {},
        0.5,
        "stop",
        [1],
        [2],
        [0.5],
        of,
    )
    return to_line(record) + b"\n"


def test_the_parts_of_nodes_are_one_dump_to_a_reader(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    plain, packed = (
        tmp_path / "rollouts/step_000001.jsonl",
        tmp_path / "rollouts/step_000001.node_10.jsonl.gz",
    )
    second = tmp_path / "rollouts/step_000001.node_2.jsonl"
    plain.write_bytes(_record(7) + _record(0))
    packed.write_bytes(gzip.compress(_record(3) + _record(2)) + gzip.compress(_record(1)))
    second.write_bytes(_record(4) + _record(6) + _record(5))
    for alternative in (
        "step_000001.node_0.jsonl",
        "step_000001.node_02.jsonl",
        "step_000001.node_.jsonl",
        "eval_a.jsonl",
    ):
        (tmp_path / "rollouts" / alternative).write_bytes(b"of somebody else\n")
    assert list(RunFolder(tmp_path).rollout_files[1].items()) == [
        (0, plain),
        (2, second),
        (10, packed),
    ]
    assert RunFolder(tmp_path).dumped_steps == [1]
    assert [r.rollout_id for r in RunFolder(tmp_path).complete_rollouts(1)] == list(range(8))


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ({0: [0, 1, 2, 4, 5, 6, 7]}, r"1 rollouts are missing, among them the ids \[3\]; each"),
        ({0: [0, 1], 3: [6, 7]}, r".* and 1 more: 4 rollouts .* the ids \[2, 3, 4, 5\]; each"),
        ({1: [4, 5, 6, 7]}, r"4 rollouts are missing, .* the ids \[0, 1, 2, 3\]; each"),
        # whose ids have no gap
        ({0: [0, 1, 2, 3]}, r"4 rollouts are missing, .* the ids \[4, 5, 6, 7\]; each"),
        # of which nothing tells the ids
        ({0: [0, 1, None]}, r"5 rollouts are missing, .* the ids \[\]; each node"),
        ({0: [0], 1: [10**15]}, r"\d+ rollouts are missing, .* \[1, 2, 3, 4, 5, 6, \.\.\.\]; each"),
        ({0: range(8), 1: [5]}, r"9 rollouts of a step that had 8, or some of them twice; is one"),
        ({0: range(7), 1: [5]}, r"8 rollouts of a step that had 8, or some of them twice; is one"),
        ({0: range(8), 1: [8]}, r"9 rollouts of a step that had 8, .*; is one of these files of"),
    ],
)  # fmt: skip
def test_rollouts_that_are_missing_or_there_twice_are_named_in_a_line(
    pieces: dict[int, list[int | None]], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "rollouts").mkdir()
    for node, ids in pieces.items():
        path = tmp_path / f"rollouts/step_000001{f'.node_{node}' if node else ''}.jsonl"
        path.write_bytes(b"".join(map(_record, ids)))
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/rollouts/.*{expected}") as refused:
        RunFolder(tmp_path).complete_rollouts(1)
    assert "\n" not in str(refused.value)


def test_parts_of_two_steps_and_dumps_of_earlier_versions(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    initial, second = (
        tmp_path / "rollouts/step_000001.jsonl",
        tmp_path / "rollouts/step_000001.node_1.jsonl",
    )
    initial.write_bytes(_record(0, of=2))
    second.write_bytes(_record(1, of=4))
    with pytest.raises(
        ConfigError,
        match=r"2 rollouts of a step that had 4, .*; is one of these files of another run",
    ):
        RunFolder(tmp_path).complete_rollouts(1)
    second.unlink()
    initial.write_bytes(
        _record(0, of=None) + _record(2, of=None) + _record(1, of=None)
    )  # they have only ids
    assert len(RunFolder(tmp_path).complete_rollouts(1)) == 3
    initial.write_bytes(_record(0, of=None) + _record(2, of=None))
    with pytest.raises(ConfigError, match=r"1 rollouts are missing, among them the ids \[1\];"):
        RunFolder(tmp_path).complete_rollouts(1)
    initial.write_bytes(_record(None, of=None))  # a step that was refused has no ids
    assert len(RunFolder(tmp_path).complete_rollouts(1)) == 1


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda data: data[:-9], "Compressed file ended before the end-of-stream marker"),
        (lambda data: data[:12] + b"\xff\xff\xff" + data[15:], "Error -3 while decompressing data"),
        (lambda data: b"PK" + data[2:], "Not a gzipped file"),
        (lambda data: data[:-8] + b"\0\0\0\0" + data[-4:], "CRC check failed"),
    ],
)
def test_a_damaged_gzip_is_one_line(
    damage: Callable[[bytes], bytes], expected: str, tmp_path: Path
) -> None:
    path = tmp_path / "step_000001.jsonl.gz"
    path.write_bytes(damage(gzip.compress(TEXT)))
    with pytest.raises(ConfigError, match=rf"^{path}: not a whole gzip file: {expected}"):
        list(read_lines(path))


def test_what_is_no_file_is_or_not_there_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step_000001.jsonl")
    with pytest.raises(ConfigError, match="or a device, and not a regular file"):
        list(read_lines(tmp_path / "step_000001.jsonl"))
    with pytest.raises(ConfigError, match=r"nothing\.jsonl: cannot be read: No such file"):
        list(read_lines(tmp_path / "nothing.jsonl"))
