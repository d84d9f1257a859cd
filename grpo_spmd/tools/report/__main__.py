"""The command `python -m grpo_spmd.report RUN [RUN2 ...]`: one HTML file about these runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import BrokenExecutor
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.diagnosis.run import RecordedRun, name_apart, read_run
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.tools.follow import changes, file_sizes
from grpo_spmd.tools.report.build import build_page
from grpo_spmd.tools.report.page import PAGE_START

_MAX_RUNS = 8
_MIN_AGE_S = 10.0  # with --follow, the age at which a page is written again at the earliest
_RUNNING_STATES = {"running", "silent", "empty"}


def main() -> None:
    """Writes the page of the runs that the arguments name, with --follow again and again."""
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
        # Refused before the dumps are read, which may take long.
        _refuse_other_files(out)
        # Without --follow the loop ends after its first pass.
        for _ in changes(lambda: file_sizes(args.runs), _MIN_AGE_S):
            states = {run.state for run in _build(args.runs, out)}
            if not args.follow or not states & _RUNNING_STATES:
                return
    except ConfigError as error:
        refuse(error)
    except BrokenExecutor:
        problem = "a process that reads the dumps was killed, likely because memory ran out"
        say(f"error: {problem}; try again")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(0 if args.follow else 1) from None


def _refuse_other_files(out: Path) -> None:
    """Raises ConfigError if `out` exists and is no page, since it would be replaced.

    It may be a folder, a device such as /dev/null, or one of the run's files.
    """
    try:
        if out.is_dir():
            raise ConfigError(f"--out: {out} is a folder; name a file in it")
        if out.exists() and not (out.is_file() and _is_page(out)):
            raise ConfigError(f"--out: {out} is no page, and would be replaced; name another file")
    except OSError as error:
        raise ConfigError(f"--out: {error.filename or out}: {error.strerror}") from None


def _is_page(path: Path) -> bool:
    """Returns True if the file begins as every page does."""
    with path.open("rb") as file:
        return file.read(len(PAGE_START)) == PAGE_START


def _build(folders: Sequence[Path], out: Path) -> list[RecordedRun]:
    """Writes the page of the runs in `folders` once, prints its size, and returns the runs."""
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


if __name__ == "__main__":
    main()
