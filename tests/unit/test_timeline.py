"""timeline.jsonl: each rank's phases of a step, as they were, whoever reads it and whatever became
of the file."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.memory import MemoryLedger, PhaseTimer
from grpo_spmd.observe.timeline import (
    Span,
    Timeline,
    TimelineFile,
    read_timeline,
    shown_ranks,
    timed_spans,
)

SPANS = [
    Span("weight_sync", 0.0004, 0.1216, 1.9301, None),
    Span("rollout", 0.1216, 2.5, None, None),
    Span("reward", 2.5, 2.6, 1.0, None),
    Span("rollout", 2.6, 3.0, 1.0, None),
    Span("rollout", 3.0, 3.1, 1.0, None),
]
# To the ms, the engine's seconds in the rollouts that were generations: the first two.
AS_READ = [
    Span("weight_sync", 0.0, 0.122, 1.93, None),
    Span("rollout", 0.122, 2.5, None, 2.25),
    Span("reward", 2.5, 2.6, 1.0, None),
    Span("rollout", 2.6, 3.0, 1.0, 0.0),
    Span("rollout", 3.0, 3.1, 1.0, None),
]


def told(spans: list[Span], generation_s: list[float]) -> Any:
    return timed_spans(spans, generation_s)


def test_a_line_says_what_each_rank_told(tmp_path: Path) -> None:
    file = TimelineFile(tmp_path)
    file.write(1, 1795400628.74412, 2, [told(SPANS, [2.25, 0.0]), told(SPANS[:1], [])])
    file.close()
    TimelineFile(tmp_path).close()  # another launch
    text = (tmp_path / "timeline.jsonl").read_text()
    assert text.startswith("{")
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line == {
        "step": 1,
        "unix_s": 1795400628.744,
        "world_size": 2,
        "ranks": [0, 1],
        "spans": [[list(span) for span in AS_READ], [list(AS_READ[0])]],
    }
    assert read_timeline(tmp_path) == {
        1: Timeline(1, 1795400628.744, 2, [0, 1], [AS_READ, AS_READ[:1]])
    }


def test_a_ranks_part_is_small() -> None:
    assert told([], []) == []
    several = [
        Span("rollout", n, n + 1, 1.0, None) for n in range(1000)
    ]  # a step that was refilled without end
    result = [span.start_s for span in told(several, [])]
    assert result == [*range(32), *range(968, 1000)]
    assert told([Span("update", 86_400.0, 864_000.0, 1000.0, None)], []) == [
        Span("update", 86_400.0, 864_000.0, 1000.0, None)
    ]


def test_of_a_thousand_ranks_64_are_shown_and_a_line_stays_short(tmp_path: Path) -> None:
    assert shown_ranks([1.0] * 64) == list(range(64))
    busy = [1.0] * 1024
    busy[500], busy[700] = 2.0, 0.5
    ranks = shown_ranks(busy)
    assert len(ranks) == 64
    assert {0, 500, 700, 1023} < set(ranks)
    assert max(b - a for a, b in pairwise(ranks)) <= 17  # at even distances: 1023 / 61
    assert len(shown_ranks([1.0] * 65)) <= 64
    rank_values = [told(SPANS, [seconds, 0.0]) for seconds in busy]
    file = TimelineFile(tmp_path)
    file.write(7, 0.0, 1024, rank_values)
    file.close()
    assert (tmp_path / "timeline.jsonl").stat().st_size < 64 * len(SPANS) * 60
    timeline = read_timeline(tmp_path)[7]
    assert timeline.ranks == ranks
    assert timeline.world_size == 1024
    assert [spans[1].busy_s for spans in timeline.spans] == [busy[rank] for rank in ranks]


def test_the_timer_notes_each_time_in_a_phase(tmp_path: Path) -> None:
    device = torch.device("cpu")
    old = time.time()
    timer = PhaseTimer(device, MemoryLedger(device, lambda: 0, {}), 1)
    with timer("rollout"):
        pass
    retained = bytearray(300 << 20)
    retained[:: 1 << 12] = b"x" * len(retained[:: 1 << 12])  # or it would be in nobody's memory
    with timer("update"):
        pass
    del retained
    with timer("rollout"):
        time.sleep(0.02)
    assert old <= timer.step_unix_s <= time.time()
    assert [span.phase for span in timer.spans] == ["rollout", "update", "rollout"]
    ends = [moment for span in timer.spans for moment in (span.start_s, span.end_s)]
    assert ends == sorted(ends)
    assert ends[0] >= 0
    metrics = timer.metrics()
    assert metrics["time/rollout_s"] == pytest.approx(
        sum(s.end_s - s.start_s for s in timer.spans[::2]), abs=1e-9
    )
    assert metrics["time/step_s"] >= ends[-1]
    peaks = [span.peak_gib or 0.0 for span in timer.spans]
    assert metrics["memory/update/peak_gib"] == peaks[1]
    assert (
        peaks[1] > peaks[2] + 0.2
    )  # of each time in the phase; of the two rollouts the ledger keeps the larger
    assert metrics["memory/rollout/peak_gib"] == max(peaks[0], peaks[2])
    with pytest.raises(KeyError), timer("update"):
        raise KeyError
    timer.end_step()
    assert timer.spans == []
    with timer("eval"):
        pass
    assert timer.spans[0].start_s < 1.0  # since this step began, not the one before


def test_of_a_step_made_twice_the_last_line_counts_and_half_a_line_costs_only_itself(
    tmp_path: Path,
) -> None:
    path = tmp_path / "timeline.jsonl"
    initial = TimelineFile(tmp_path)
    for step in (1, 2, 3):
        initial.write(step, float(step), 1, [told(SPANS, [])])
    initial.close()
    os.truncate(path, path.stat().st_size - 20)  # killed in the middle of the third
    again = TimelineFile(tmp_path)  # goes on after step 1
    for step in (2, 3):
        again.write(step, 10.0 + step, 1, [told(SPANS[:1], [])])
    again.close()
    result = read_timeline(tmp_path)
    assert {step: timeline.unix_s for step, timeline in result.items()} == {
        1: 1.0,
        2: 12.0,
        3: 13.0,
    }
    assert result[2].spans == [AS_READ[:1]]
    assert read_timeline(tmp_path, {3, 9}) == {3: result[3]}
    assert read_timeline(tmp_path / "nowhere") == {}


def test_what_a_full_disk_refuses_waits_for_the_next_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limit, ignored = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        file = TimelineFile(tmp_path)
        file.write(1, 1.0, 1, [told(SPANS, [])])
        resource.setrlimit(
            resource.RLIMIT_FSIZE, ((tmp_path / "timeline.jsonl").stat().st_size + 50, limit[1])
        )
        file.write(2, 2.0, 1, [told(SPANS, [])])
        assert list(read_timeline(tmp_path)) == [1]
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        file.write(3, 3.0, 1, [told(SPANS, [])])
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(read_timeline(tmp_path)) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_is_no_file_is_neither_written_nor_read_nor_waited_for(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    path, elsewhere = tmp_path / "timeline.jsonl", tmp_path / "elsewhere"
    if kind == "link":
        elsewhere.write_text("mine")
        path.symlink_to(elsewhere)
    else:
        os.mkfifo(path) if kind == "fifo" else path.mkdir()
    file = TimelineFile(tmp_path)
    file.write(1, 1.0, 1, [told(SPANS, [])])
    file.close()
    assert caplog.text.count("timeline.jsonl is not written: ") == 1
    with pytest.raises(ConfigError, match=r"timeline\.jsonl is a \w+.*, and not a regular file$"):
        read_timeline(tmp_path)
    assert kind != "link" or elsewhere.read_text() == "mine"


GOOD = {
    "step": 4,
    "unix_s": 1.0,
    "world_size": 2,
    "ranks": [0],
    "spans": [[["rollout", 0.0, 1.0, None, None]]],
}
BAD: list[Any] = [
    {**GOOD, "step": True},
    {**GOOD, "step": -1},
    {**GOOD, "unix_s": "1"},
    {**GOOD, "unix_s": float("nan")},
    {**GOOD, "world_size": None},
    {**GOOD, "ranks": ["0"]},
    {**GOOD, "ranks": 7},
    {**GOOD, "spans": 7},
    {**GOOD, "spans": [7]},
    {**GOOD, "spans": [[7]]},
    {**GOOD, "spans": [["abcde"]]},
    {**GOOD, "spans": [[["rollout", 0.0, 1.0, None]]]},
    {**GOOD, "spans": [[["rollout", 0.0, float("inf"), None, None]]]},
    {**GOOD, "spans": [[["rollout", 0.0, 1.0, "x", None]]]},
    {**GOOD, "spans": [[[["rollout"], 0.0, 1.0, None, None]]]},
    {name: value for name, value in GOOD.items() if name != "spans"},
]


LINES = [
    *(json.dumps(bad).encode() for bad in BAD),
    b"",
    b"null",
    b"\xff\x00",
    b'{"step": 4, ' + b"[" * 100_000,
    b'{"step": ' + b"4" * 5000 + b", ",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_what_is_no_line_of_a_timeline_is_passed_over(tmp_path: Path, line: bytes) -> None:
    good = json.dumps({**GOOD, "step": 5}).encode()
    (tmp_path / "timeline.jsonl").write_bytes(line + b"\n" + good + b"\n" + line)
    assert list(read_timeline(tmp_path)) == [5]
    (tmp_path / "timeline.jsonl").write_bytes(json.dumps(GOOD).encode())
    assert list(read_timeline(tmp_path)) == [
        4
    ]  # so that it is the fault, and nothing else, that is passed over


def test_a_line_without_end_is_refused_and_not_held(tmp_path: Path) -> None:
    with (tmp_path / "timeline.jsonl").open("wb") as file:
        file.write(b'{"step": 1, ')
        file.truncate(1 << 26)  # a hole: nothing of it is on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\n" + json.dumps({**GOOD, "step": 5}).encode() + b"\n")
    tracemalloc.start()
    with pytest.raises(ConfigError, match="no run writes a line of 32 MiB"):
        read_timeline(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 << 25
