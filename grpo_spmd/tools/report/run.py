"""What a run left in its folder, and what became of it. The folder may be half written, of an earlier version, or made
by somebody else; nothing in it is written, locked or waited for. Imports no torch."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.run_dir import list_checkpoints, step_of
from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import YAML_ERRORS, StrictLoader
from grpo_spmd.files import UntrustedError, open_regular, read_json
from grpo_spmd.observe.launches import read_launches
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics
from grpo_spmd.observe.run_folder import RunFolder

REPORTS = "failure.txt", "hang.txt"
# Of metrics in memory, 100 bytes each value; of a longer run every second step, every fourth and so on.
_MOST_LINES, _MOST_VALUES = 24_000, 3_000_000
_MOST_READ, _MOST_BYTES, _BLOCK = (
    1 << 20,
    1 << 32,
    1 << 20,
)  # lines and bytes of metrics.jsonl; read at a time
_MOST_METRICS, _LONGEST_NAME = 1_000, 200  # of all lines; characters
_LONGEST_CONFIG, _LONGEST_VALUE = 1 << 20, 4_000  # bytes; characters
_LONGEST_REPORT, _REPORT_TAIL = (
    100_000,
    1 << 24,
)  # characters of a report; bytes of its file, which keeps earlier ones
_MOST_LAUNCHES = 1_000
# Seconds without a line after which a run is no longer called going: of a first step, of later ones (or so many times
# the longest of the last ones). A mtime and the clock of another host may differ by _SKEW_S.
_FIRST_S, _LEAST_S, _TIMES, _NUM_RECENT, _SKEW_S = 1800.0, 300.0, 10.0, 20, 5.0
_TIMES_LONGEST = 3.0  # of the longest step of all
_LEAVING_S = 30.0  # that a process may hold the folder after it wrote how its launch ended


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells of it. Metrics are finite numbers or None."""

    folder: Path
    name: str  # last part of the folder's path; `named_apart` makes those of several runs differ
    config: dict[
        str, Any
    ]  # flat, as config.yaml has it, with secrets redacted; {} where that cannot be read
    launches: list[dict[str, Any]]
    steps: list[dict[str, Any]]  # lines of steps, ascending; of a step that was made twice the last
    evaluations: list[dict[str, Any]]  # the same of evaluations
    state: str  # "done", "going", "preempted", "failed", "killed", "silent" (begun, and writes no more) or "empty"
    why: str  # that in one line
    reports: dict[str, str]  # of the newest launch, by file: failure.txt, hang.txt
    dumped_steps: list[int]  # but for those of an earlier attempt
    checkpoints: list[int]
    num_steps: int | None  # training.num_steps

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


def read_run(folder: Path) -> RecordedRun:
    """Raises ConfigError where `folder` holds no run, or cannot be read."""
    try:
        return _read_run(folder)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}; a run folder is what run_dir named"
        ) from None


def named_apart(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Each with a name of its own: two folders called `run` are named with the folder above, else by a number."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.name} ({number})" for number, run in enumerate(runs, start=1)]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _read_run(folder: Path) -> RecordedRun:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that a run's run_dir named")
    if not any(
        os.path.lexists(folder / name)
        for name in ("metrics.jsonl", "config.yaml", "launches.jsonl")
    ):
        raise ConfigError(
            f"{folder} holds no config.yaml, metrics.jsonl or launches.jsonl, so it is no run folder"
        )
    config = _read_config(folder / "config.yaml")
    launches = read_launches(folder)[-_MOST_LAUNCHES:]
    steps, evaluations = _read_metrics(folder / "metrics.jsonl")
    num_steps = config.get("training.num_steps")
    num_steps = num_steps if type(num_steps) is int and 0 < num_steps < 2**53 else None
    reports = _read_reports(folder, launches, steps)
    state, why = _state(
        folder, launches, steps, evaluations, reports, num_steps, config.get("watchdog.timeout_s")
    )
    return RecordedRun(
        folder=folder,
        name=folder.resolve().name or str(folder),
        config=config,
        launches=launches,
        steps=steps,
        evaluations=evaluations,
        state=state,
        why=" ".join(why.split())[:_LONGEST_VALUE],
        reports=reports,
        dumped_steps=_own_dumps(folder, launches, steps),
        checkpoints=[step_of(path) for path in list_checkpoints(folder)],
        num_steps=num_steps,
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            text = file.read(_LONGEST_CONFIG + 1)
        tree = (
            StrictLoader(text.decode("utf-8")).get_single_data()
            if len(text) <= _LONGEST_CONFIG
            else None
        )
        return (
            {key: _plain(value) for key, value in flat(tree).items()}
            if isinstance(tree, dict)
            else {}
        )
    except (OSError, UntrustedError, *YAML_ERRORS):
        return {}


def _plain(value: Any) -> Any:
    """A value of YAML as JSON has it: dates are text, what is not finite too."""
    if (
        value is None
        or type(value) in (bool, list, dict)
        or (type(value) is int and abs(value) < 2**53)
    ):
        return value
    return value if type(value) is float and math.isfinite(value) else str(value)[:_LONGEST_VALUE]


def _read_metrics(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines of steps and of evaluations. A metric's name is the same object in all lines: half of the memory."""
    _check_length(path)
    found: tuple[dict[int, dict[str, Any]], ...] = {}, {}
    strides, newest, names = [1, 1], [-1, -1], dict[str, str]()
    for line in read_metrics(path):
        kind, step = int(is_evaluation(line.metrics)), line.metrics["step"]
        if not 0 <= step < 2**53:
            continue
        of_kind = found[kind]
        if newest[kind] % strides[kind] and newest[kind] != step:
            of_kind.pop(newest[kind], None)  # it was only kept for being the last
        newest[kind] = step
        of_kind[step] = {"step": step, **_numbers(line.metrics, names)}
        if len(of_kind) > min(_MOST_LINES, _MOST_VALUES // max(100, len(names))):
            strides[kind] *= 2
            for other in [other for other in of_kind if other % strides[kind] and other != step]:
                del of_kind[other]
    steps, evaluations = ([of_kind[step] for step in sorted(of_kind)] for of_kind in found)
    return steps, evaluations


def _check_length(path: Path) -> None:
    """Raises ConfigError for a file that takes minutes to read: no run of months writes as many lines."""
    if not os.path.lexists(path):
        return
    num_lines = num_bytes = 0
    with open_regular(path) as file:
        while num_bytes <= _MOST_BYTES and num_lines <= _MOST_READ and (block := file.read(_BLOCK)):
            num_lines, num_bytes = num_lines + block.count(b"\n"), num_bytes + len(block)
    if num_bytes > _MOST_BYTES or num_lines > _MOST_READ:
        most = f"{_MOST_READ:,} lines or {_MOST_BYTES >> 30} GiB"
        raise ConfigError(
            f"{path} has more than {most}, as no run writes; keep its last lines alone"
        )


def _numbers(metrics: Mapping[str, Any], names: dict[str, str]) -> dict[str, float | int | None]:
    """The finite numbers of a line, and None for others; `names`: those of all lines so far."""
    kept: dict[str, float | int | None] = {}
    for name, value in metrics.items():
        is_number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if name == "step" or len(name) > _LONGEST_NAME or not (is_number or value is None):
            continue
        if name in names or len(names) < _MOST_METRICS:
            kept[names.setdefault(name, name)] = (
                value if value is not None and math.isfinite(value) else None
            )
    return kept


def _read_reports(
    folder: Path, launches: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """The doctor's last words, as far as they are the newest launch's: it appends to files that earlier ones began."""
    found = {}
    began = _unix_s(launches[-1].get("start")) if launches else None
    if launches and launches[-1].get("outcome") in ("done", "preempted"):
        return {}
    for name in REPORTS:
        with suppress(OSError, UntrustedError), open_regular(folder / "logs" / name) as file:
            status = os.fstat(file.fileno())
            last_line_s = began if began is not None else _time_of(steps)
            if not status.st_size or (
                last_line_s is not None and status.st_mtime < last_line_s - _SKEW_S
            ):
                continue
            file.seek(max(0, status.st_size - _REPORT_TAIL))
            text = file.read(_REPORT_TAIL).decode("utf-8", "replace")
            start = text.rfind("\n=== 2") + 1  # the year of a report's first line
            found[name] = text[start : start + _LONGEST_REPORT].rstrip()
    return found


def _own_dumps(
    folder: Path, launches: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]
) -> list[int]:
    """A run that goes on from an older checkpoint leaves the dumps of the steps behind it until it makes these again:
    nothing else tells of that attempt any more."""
    files = RunFolder(folder).rollout_files
    there = list(files)
    if not steps:
        return there
    begun = steps[-1]["step"] + 1  # its dump comes before its line
    first = _unix_s(launches[-1].get("start")) if launches else None
    if first is not None and begun in there:
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in files[begun].values())
            begun -= newest < first - _SKEW_S
    return [step for step in there if step <= begun]


def _state(
    folder: Path,
    launches: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    reports: Mapping[str, str],
    num_steps: int | None,
    timeout_s: Any,
) -> tuple[str, str]:
    launch = launches[-1] if launches else {}
    last = int(steps[-1]["step"]) if steps else 0
    after = f"after step {last}" + (f" of {num_steps}" if num_steps else "")
    outcome, why = launch.get("outcome"), launch.get("why")
    said = f": {why}" if isinstance(why, str) and why else ""
    is_held = _is_held(folder / "logs" / "launch")
    if outcome == "done":
        return "done", f"done {after}"
    if outcome in ("preempted", "failed", "killed"):
        end = _unix_s(launch.get("end"))
        if is_held and (end is None or time.time() - end > _LEAVING_S):
            return "going", f"starting again {after}; the launch before was {outcome}{said}"
        return str(outcome), f"{outcome} {after}{said}"
    first = _unix_s(launch.get("start"))
    signs = [sign for sign in (_time_of(steps), _time_of(evaluations), first) if sign is not None]
    quiet_s = max(0.0, time.time() - max(signs)) if signs else math.inf
    is_first = _time_of(steps) is None or (first is not None and (_time_of(steps) or 0.0) < first)
    limit_s = (
        float(timeout_s) if type(timeout_s) in (int, float) and 0 < timeout_s < 1e9 else _FIRST_S
    )
    if not is_first:
        took_s = [step.get("time/step_s") or 0.0 for step in steps]
        # an evaluation of every 100th step may be many times as long as the last steps were
        limit_s = max(_LEAST_S, _TIMES * max(took_s[-_NUM_RECENT:]), _TIMES_LONGEST * max(took_s))
    ago = f"{after}, nothing written for {_shown_s(quiet_s)}" if signs else after
    if is_held:
        return (
            ("going", f"going {after}")
            if quiet_s <= limit_s or not signs
            else ("silent", f"holds its folder {ago}")
        )
    if not launches:
        return _state_of_earlier(folder, steps, reports, num_steps, after, quiet_s <= limit_s)
    if launch.get("host") == socket.gethostname() and os.path.exists("/proc/locks"):
        return (
            "killed",
            f"killed {after}: it left no word of its end, and no process holds its folder",
        )
    if quiet_s <= limit_s:
        return "going", f"going {after} (on {_short(launch.get('host'))})"
    return (
        "silent",
        f"silent {ago}; it hangs or was killed (on {_short(launch.get('host'))}, not on this machine)",
    )


def _state_of_earlier(
    folder: Path,
    steps: Sequence[Mapping[str, Any]],
    reports: Mapping[str, str],
    num_steps: int | None,
    after: str,
    is_recent: bool,
) -> tuple[str, str]:
    """Of a folder without launches.jsonl, as versions before 0.1 left it."""
    with suppress(OSError, ConfigError):
        reason = read_json(folder / "preempted.json").get("reason")
        return "preempted", f"preempted {after}: {_short(reason)}"
    if num_steps is not None and steps and steps[-1]["step"] >= num_steps:
        return "done", f"done {after}"
    if reports:
        lines = next(iter(reports.values())).split("\n")
        return (
            "failed",
            f"failed {after}: {_short(next((line for line in lines if line[:3] != '==='), ''))}",
        )
    if not steps:
        return "empty", "nothing tells of a step yet"
    return (
        ("going", f"going {after}")
        if is_recent
        else ("killed", f"killed {after}: it left no word of its end")
    )


def _is_held(path: Path) -> bool:
    """Whether a process of this machine holds the run folder, whose lock is on `path`. The kernel's list is read, since
    trying the lock would keep it from a run that starts in that moment."""
    with suppress(OSError):
        own = os.stat(path, follow_symlinks=False)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()  # 1: FLOCK ADVISORY WRITE pid major:minor:inode start end
            if len(fields) < 6 or fields[1] != "FLOCK" or not fields[5].endswith(f":{own.st_ino}"):
                continue
            with suppress(PermissionError):  # of another user: the number must do
                return any(
                    _is_same(entry, own) for entry in Path("/proc", fields[4], "fd").iterdir()
                )
            return True
    return False


def _is_same(path: Path, own: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), own)
    return False


def _time_of(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """When the last line was written, seconds since 1970; None in runs of earlier versions."""
    return lines[-1].get("time/unix_s") if lines else None


def _unix_s(text: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _shown_s(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _short(value: Any) -> str:
    return str(value)[:200]
