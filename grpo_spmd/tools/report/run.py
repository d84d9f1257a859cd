"""What a run left in its folder, and what became of the run.

The folder may be half written, from an earlier version, or made by somebody else. Nothing in it is
written, locked or waited for. Imports no torch.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.run_dir import list_checkpoints, step_of
from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import YAML_ERRORS, StrictLoader
from grpo_spmd.files import UntrustedError, open_regular, read_json
from grpo_spmd.observe.metrics_file import is_evaluation
from grpo_spmd.observe.run_folder import RunFolder

REPORT_FILES = ("failure.txt", "hang.txt")
# Lines of metrics in memory and all their values, of 100 bytes each. From a longer run every second
# step is kept, every fourth and so on.
_MAX_STEPS = 24_000
_MAX_VALUES = 3_000_000
_MAX_METRICS = 1_000
_MAX_NAME_CHARS = 200
_MAX_CONFIG_BYTES = 1 << 20
_MAX_VALUE_CHARS = 4_000
_MAX_REPORT_CHARS = 100_000
_REPORT_TAIL_BYTES = 1 << 24  # of a report's file, which keeps earlier reports
_MAX_LAUNCHES = 1_000
# A run without a new line is "silent" after this time: before its first step; later, or so many
# times the longest of the recent steps or of all steps.
_FIRST_STEP_S = 1800.0
_LATER_STEP_S = 300.0
_RECENT_FACTOR = 10.0
_NUM_RECENT = 20
_LONGEST_FACTOR = 3.0
_CLOCK_SKEW_S = 5.0  # between a file's time and the clock of another host
_EXIT_S = 30.0  # that a process may hold the folder after it wrote the end of its launch


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder records it. Metrics are finite numbers or None."""

    folder: Path
    name: str  # last part of the folder's path; `name_apart` makes several runs' names differ
    config: dict[str, Any]  # flat, as in config.yaml; {} if that cannot be read
    launches: list[dict[str, Any]]
    steps: list[dict[str, Any]]  # metrics by ascending step; the last line of each step
    evaluations: list[dict[str, Any]]  # the same for evaluations
    state: str  # "done", "going", "preempted", "failed", "killed", "silent" or "empty"
    why: str  # the state in one line
    reports: dict[str, str]  # by file name, from the newest launch
    dumped_steps: list[int]  # without those of an earlier attempt
    checkpoints: list[int]
    num_steps: int | None  # training.num_steps

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def dtype(self) -> str:
        """The number format of the model, which bounds how far engine and policy may differ."""
        return "float32" if self.config.get("model.dtype") == "float32" else "bfloat16"

    @cached_property
    def files(self) -> RunFolder:
        """The readers of the run's dumps. Lists the folder once."""
        return RunFolder(self.folder)


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder. Raises ConfigError if it holds no run, or cannot be read."""
    try:
        return _RunReader(folder).read()
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}"
        raise ConfigError(f"{problem}; a run folder is what run_dir named") from None


def name_apart(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Returns the runs with different names, with the folder above or a number if needed."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.folder.resolve().parent.name}/{run.name}" for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.name} ({number})" for number, run in enumerate(runs, start=1)]
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


class _RunReader:
    """Reads one run folder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; name one that a run's run_dir named")
        names = ("metrics.jsonl", "config.yaml", "launches.jsonl")
        if not any(os.path.lexists(folder / name) for name in names):
            missing = "config.yaml, metrics.jsonl or launches.jsonl"
            raise ConfigError(f"{folder} holds no {missing}, so it is no run folder")
        self._folder = folder
        self._files = RunFolder(folder)
        self._config = _read_config(folder / "config.yaml")
        self._launches = self._files.launches()[-_MAX_LAUNCHES:]
        self._launch = self._launches[-1] if self._launches else {}
        self._start_s = _unix_s(self._launch.get("start"))
        self._steps, self._evaluations = _read_metrics(self._files)
        self._last_line_s = _written_s(self._steps)  # None in runs of earlier versions
        num_steps = self._config.get("training.num_steps")
        # A browser computes with doubles, which hold whole numbers up to 2**53.
        is_count = type(num_steps) is int and 0 < num_steps < 2**53
        self._num_steps = num_steps if is_count else None
        self._reports = self._read_reports()

    def read(self) -> RecordedRun:
        state, reason = self._find_state()
        return RecordedRun(
            folder=self._folder,
            name=self._folder.resolve().name or str(self._folder),
            config=self._config,
            launches=self._launches,
            steps=self._steps,
            evaluations=self._evaluations,
            state=state,
            why=" ".join(reason.split())[:_MAX_VALUE_CHARS],
            reports=self._reports,
            dumped_steps=self._list_dumped_steps(),
            checkpoints=[step_of(path) for path in list_checkpoints(self._folder)],
            num_steps=self._num_steps,
        )

    def _read_reports(self) -> dict[str, str]:
        """Returns the reports of the newest launch; earlier launches wrote into the same files."""
        reports: dict[str, str] = {}
        if self._launch.get("outcome") in ("done", "preempted"):
            return reports
        oldest_s = self._start_s if self._start_s is not None else self._last_line_s
        for name in REPORT_FILES:
            path = self._folder / "logs" / name
            with suppress(OSError, UntrustedError), open_regular(path) as file:
                status = os.fstat(file.fileno())
                # An older file is a report on an earlier launch.
                is_old = oldest_s is not None and status.st_mtime < oldest_s - _CLOCK_SKEW_S
                if not status.st_size or is_old:
                    continue
                file.seek(max(0, status.st_size - _REPORT_TAIL_BYTES))
                text = file.read(_REPORT_TAIL_BYTES).decode("utf-8", "replace")
                begin = text.rfind("\n=== 2") + 1  # a report begins with its year
                reports[name] = text[begin : begin + _MAX_REPORT_CHARS].rstrip()
        return reports

    def _list_dumped_steps(self) -> list[int]:
        """Returns the dumped steps without those of an earlier attempt.

        A run that resumes from an older checkpoint leaves the dumps of later steps until it makes
        these steps again.
        """
        dumped_steps = self._files.dumped_steps
        if not self._steps:
            return dumped_steps
        newest_step = self._steps[-1]["step"] + 1  # a step's dump comes before its line
        if self._start_s is not None and newest_step in dumped_steps:
            with suppress(OSError):
                paths = self._files.rollout_files[newest_step].values()
                written_s = max(path.stat().st_mtime for path in paths)
                newest_step -= written_s < self._start_s - _CLOCK_SKEW_S
        return [step for step in dumped_steps if step <= newest_step]

    def _find_state(self) -> tuple[str, str]:
        """Returns the state and its reason in one line."""
        progress = f"after step {self._steps[-1]['step'] if self._steps else 0}"
        if self._num_steps:
            progress += f" of {self._num_steps}"
        outcome = self._launch.get("outcome")
        if outcome == "done":
            return "done", f"done {progress}"
        is_held = _is_locked(self._folder / "logs" / "launch")
        if outcome in ("preempted", "failed", "killed"):
            reason = self._launch.get("why")
            suffix = f": {reason}" if isinstance(reason, str) and reason else ""
            end_s = _unix_s(self._launch.get("end"))
            if is_held and (end_s is None or time.time() - end_s > _EXIT_S):
                return (
                    "going",
                    f"starting again {progress}; the launch before was {outcome}{suffix}",
                )
            return str(outcome), f"{outcome} {progress}{suffix}"
        # No outcome: the launch goes on, hangs, or was killed without a word.
        times = [self._last_line_s, _written_s(self._evaluations), self._start_s]
        known_times = [seconds for seconds in times if seconds is not None]
        quiet_s = max(0.0, time.time() - max(known_times)) if known_times else math.inf
        is_quiet = quiet_s > self._max_quiet_s()
        silence = f", nothing written for {_format_seconds(quiet_s)}" if known_times else ""
        if is_held:
            if is_quiet and known_times:
                return "silent", f"holds its folder {progress}{silence}"
            return "going", f"going {progress}"
        if not self._launches:
            return self._find_early_state(progress, is_quiet)
        host = self._launch.get("host")
        # Only on the run's own machine a missing lock proves that nothing holds it.
        if host == socket.gethostname() and os.path.exists("/proc/locks"):
            reason = "it left no word of its end, and no process holds its folder"
            return "killed", f"killed {progress}: {reason}"
        machine = f"on {_shorten(host)}"
        if not is_quiet:
            return "going", f"going {progress} ({machine})"
        reason = f"it hangs or was killed ({machine}, not on this machine)"
        return "silent", f"silent {progress}{silence}; {reason}"

    def _max_quiet_s(self) -> float:
        """Returns the seconds without a line after which a run is no longer called going."""
        is_first_step = self._last_line_s is None or (
            self._start_s is not None and self._last_line_s < self._start_s
        )
        if is_first_step:
            timeout_s = self._config.get("watchdog.timeout_s")
            if isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9:
                return float(timeout_s)
            return _FIRST_STEP_S
        durations = [step.get("time/step_s") or 0.0 for step in self._steps]
        recent_s = _RECENT_FACTOR * max(durations[-_NUM_RECENT:])
        # An evaluation at every 100th step may take many times as long as the last steps did.
        return max(_LATER_STEP_S, recent_s, _LONGEST_FACTOR * max(durations))

    def _find_early_state(self, progress: str, is_quiet: bool) -> tuple[str, str]:
        """Returns the state of a folder without launches.jsonl, from versions before 0.1."""
        with suppress(OSError, ConfigError):
            reason = read_json(self._folder / "preempted.json").get("reason")
            return "preempted", f"preempted {progress}: {_shorten(reason)}"
        last_step = self._steps[-1]["step"] if self._steps else 0
        if self._num_steps is not None and self._steps and last_step >= self._num_steps:
            return "done", f"done {progress}"
        if self._reports:
            lines = next(iter(self._reports.values())).split("\n")
            reason = next((line for line in lines if not line.startswith("===")), "")
            return "failed", f"failed {progress}: {_shorten(reason)}"
        if not self._steps:
            return "empty", "nothing tells of a step yet"
        if not is_quiet:
            return "going", f"going {progress}"
        return "killed", f"killed {progress}: it left no word of its end"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        with open_regular(path) as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        # A config is a few kB; the YAML reader takes seconds for a megabyte.
        if len(text) > _MAX_CONFIG_BYTES:
            return {}
        tree = StrictLoader(text.decode("utf-8")).get_single_data()
        values = flat(tree) if isinstance(tree, dict) else {}
        return {key: _to_json_value(value) for key, value in values.items()}
    except (OSError, UntrustedError, *YAML_ERRORS):
        return {}


def _to_json_value(value: Any) -> Any:
    """Returns a value of YAML as JSON has it; dates and infinite numbers become text."""
    if value is None or type(value) in (bool, list, dict):
        return value
    is_number = (type(value) is int and abs(value) < 2**53) or (
        type(value) is float and math.isfinite(value)
    )
    return value if is_number else str(value)[:_MAX_VALUE_CHARS]


def _read_metrics(files: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the lines of steps and of evaluations."""
    steps = _ThinnedLines()
    evaluations = _ThinnedLines()
    # A metric's name is the same object in all lines, which halves the memory.
    names: dict[str, str] = {}
    for line in files.metrics():
        step = line.metrics["step"]
        # Other steps are no run's: a browser could not compute with them.
        if 0 <= step < 2**53:
            kind = evaluations if is_evaluation(line.metrics) else steps
            kind.add(step, _finite_numbers(line.metrics, names), max(100, len(names)))
    return steps.ordered(), evaluations.ordered()


class _ThinnedLines:
    """Metrics by step, of which every second one is dropped whenever there are too many."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, Any]] = {}
        self._stride = 1
        self._newest = -1

    def add(self, step: int, values: dict[str, Any], num_names: int) -> None:
        if self._newest % self._stride and self._newest != step:
            self._lines.pop(self._newest, None)  # it was kept only because it was the newest
        self._newest = step
        self._lines[step] = {"step": step, **values}
        # Halving keeps the points at even distances, whatever the run's length will be.
        if len(self._lines) > min(_MAX_STEPS, _MAX_VALUES // num_names):
            self._stride *= 2
            self._lines = {
                old_step: line
                for old_step, line in self._lines.items()
                if old_step % self._stride == 0 or old_step == step
            }

    def ordered(self) -> list[dict[str, Any]]:
        return [self._lines[step] for step in sorted(self._lines)]


def _finite_numbers(metrics: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the numbers of a line, and None for those that are not finite.

    `names` collects the names of all lines; their number is bounded.
    """
    numbers: dict[str, float | int | None] = {}
    for name, value in metrics.items():
        is_number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if name == "step" or len(name) > _MAX_NAME_CHARS or not (is_number or value is None):
            continue
        if name in names or len(names) < _MAX_METRICS:
            is_finite = value is not None and math.isfinite(value)
            numbers[names.setdefault(name, name)] = value if is_finite else None
    return numbers


def _is_locked(path: Path) -> bool:
    """Returns True if a process of this machine holds the run folder, whose lock is on `path`.

    Reads the kernel's list of locks: to try the lock would keep it from a run that starts now.
    """
    with suppress(OSError):
        status = os.stat(path, follow_symlinks=False)
        for line in Path("/proc/locks").read_text().splitlines():
            # 1: FLOCK ADVISORY WRITE pid major:minor:inode start end
            fields = line.split()
            is_lock = len(fields) >= 6 and fields[1] == "FLOCK"
            if not is_lock or not fields[5].endswith(f":{status.st_ino}"):
                continue
            # Another device may have the same inode number, so look at the process's open files.
            with suppress(PermissionError):
                descriptors = Path("/proc", fields[4], "fd").iterdir()
                return any(_is_same_file(descriptor, status) for descriptor in descriptors)
            return True  # another user's process: the number must do
    return False


def _is_same_file(path: Path, status: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(path.stat(), status)
    return False


def _written_s(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns when the last line was written, in seconds since 1970."""
    return lines[-1].get("time/unix_s") if lines else None


def _unix_s(text: Any) -> float | None:
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _format_seconds(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _shorten(value: Any) -> str:
    return str(value)[:200]
