"""The command `python -m grpo_spmd.report RUN [RUN2 ...]`: one HTML file about these runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.tools.report.build import build_page
from grpo_spmd.tools.report.run import RecordedRun, name_apart, read_run

_MAX_RUNS = 8
# --follow: the least age of the page; the interval of looks at the files; the interval of looks at
# the state, because a killed run writes nothing.
_MIN_AGE_S = 10.0
_POLL_S = 1.0
_STATE_S = 30.0
_AGE_FACTOR = 4.0  # the page is also at least so many times as old as it takes to build
_RUNNING_STATES = ("going", "silent", "empty")


def main() -> None:
    hold_standard_streams()
    parser = OneLineParser(
        prog="python -m grpo_spmd.report",
        description="One HTML file of a run, or of several beside each other, which a browser "
        "opens without network: verdict, curves, timeline, rollouts with their tokens, prompts, "
        "config. It reads the run folder and writes nothing else into it; the run may be running, "
        "preempted, failed or killed.",
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or a copy of it")
    add("--out", type=Path, metavar="FILE", help="the file (default: report.html in the first RUN)")
    add(
        "--follow",
        action="store_true",
        help="write it again while the run goes on, every 10 s or more",
    )
    args = parser.parse_args()
    try:
        if len(args.runs) > _MAX_RUNS:
            problem = f"{len(args.runs)} runs, and a page shows {_MAX_RUNS} at most"
            raise ConfigError(f"RUN: {problem}; name fewer")
        out = args.out or args.runs[0] / "report.html"
        # Said before the dumps are read, which may take long.
        if out.is_dir():
            raise ConfigError(f"--out: {out} is a folder; name a file in it")
        if args.follow:
            _follow(args.runs, out)
        else:
            _build(args.runs, out)
    except ConfigError as error:
        refuse(error)
    except BrokenExecutor:
        problem = "a process that reads the dumps was killed, likely for want of memory"
        say(f"error: {problem}; try again")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(0 if args.follow else 1) from None


def _build(folders: Sequence[Path], out: Path) -> list[RecordedRun]:
    begin = time.monotonic()
    runs = name_apart([read_run(folder) for folder in folders])
    try:
        build_page(runs, out)
        size = out.stat().st_size
    except OSError as error:
        problem = f"{error.filename or out}: {error.strerror or error}"
        raise ConfigError(f"--out: {problem}; name a file with --out") from None
    show(f"{out}: {size / 1e6:.1f} MB, {time.monotonic() - begin:.1f} s")
    return runs


def _follow(folders: Sequence[Path], out: Path) -> None:
    """Builds the page again and again until no run goes on any more."""
    while True:
        begin = time.monotonic()
        built_from = _file_stamps(folders)
        if not any(run.state in _RUNNING_STATES for run in _build(folders, out)):
            return
        # A page must not take most of a core of the machine that trains.
        age_s = _AGE_FACTOR * (time.monotonic() - begin)
        earliest = begin + max(_MIN_AGE_S, age_s)
        latest = begin + max(_STATE_S, age_s)
        while time.monotonic() < earliest or (
            time.monotonic() < latest and _file_stamps(folders) == built_from
        ):
            time.sleep(_POLL_S)


def _file_stamps(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Returns size and time of the files that change while a run goes on."""
    stamps = []
    for folder in folders:
        for name in ("metrics.jsonl", "launches.jsonl"):
            try:
                status = os.stat(folder / name)
                stamps.append((status.st_size, status.st_mtime_ns))
            except OSError:
                stamps.append((-1, -1))
    return stamps


if __name__ == "__main__":
    main()
