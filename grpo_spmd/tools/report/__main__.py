"""The command: python -m grpo_spmd.report RUN [RUN2 ...] [--out FILE] [--follow]"""

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
from grpo_spmd.tools.report.run import RecordedRun, named_apart, read_run

_MOST_RUNS = 8
_EVERY_S, _LOOK_S, _PATIENCE_S = (
    10.0,
    1.0,
    30.0,
)  # of a page that follows: its age; of a look at files; at the state
_TIMES = 4.0  # so many times what it takes is the page's least age
_LIVE = "going", "silent", "empty"


def main() -> None:
    hold_standard_streams()
    parser = OneLineParser(
        prog="python -m grpo_spmd.report",
        description="One HTML file of a run, or of several beside each other, which a browser opens without network: "
        "verdict, curves, timeline, rollouts with their tokens, prompts, config. It reads the run folder and writes "
        "nothing else into it; the run may be going on, preempted, failed or killed.",
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
        if len(args.runs) > _MOST_RUNS:
            raise ConfigError(
                f"RUN: {len(args.runs)} runs, and a page shows {_MOST_RUNS} at most; name fewer"
            )
        out = args.out or args.runs[0] / "report.html"
        if out.is_dir():
            raise ConfigError(f"--out: {out} is a folder; name a file in it")
        if args.follow:
            _follow(args.runs, out)
        else:
            _build(args.runs, out)
    except ConfigError as error:
        refuse(error)
    except BrokenExecutor:
        say(
            "error: a process that reads the dumps was killed, likely for want of memory; try again"
        )
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(0 if args.follow else 1) from None


def _build(folders: Sequence[Path], out: Path) -> list[RecordedRun]:
    began = time.monotonic()
    runs = named_apart([read_run(folder) for folder in folders])
    try:
        build_page(runs, out)
        size = out.stat().st_size
    except OSError as error:
        where = error.filename or out
        raise ConfigError(
            f"--out: {where}: {error.strerror or error}; name a file with --out"
        ) from None
    show(f"{out}: {size / 1e6:.1f} MB, {time.monotonic() - began:.1f} s")
    return runs


def _follow(folders: Sequence[Path], out: Path) -> None:
    """Until no run goes on any more, and the page says so."""
    while True:
        began, seen = time.monotonic(), _stamps(folders)
        if not any(run.state in _LIVE for run in _build(folders, out)):
            return
        took_s = _TIMES * (time.monotonic() - began)
        soon, late = (
            began + max(_EVERY_S, took_s),
            began + max(_PATIENCE_S, took_s),
        )  # a killed run writes nothing
        while (now := time.monotonic()) < late and (now < soon or _stamps(folders) == seen):
            time.sleep(_LOOK_S)


def _stamps(folders: Sequence[Path]) -> list[tuple[int, int]]:
    found = []
    for path in (
        folder / name for folder in folders for name in ("metrics.jsonl", "launches.jsonl")
    ):
        try:
            status = os.stat(path)
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            found.append((-1, -1))
    return found


if __name__ == "__main__":
    main()
