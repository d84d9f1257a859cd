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
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.run_dir import list_checkpoints, step_of
from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.config.load import YAML_ERRORS, StrictLoader
from grpo_spmd.diagnosis.curves import Curve, metric_curve
from grpo_spmd.files import UntrustedError, open_regular, read_json
from grpo_spmd.observe.metrics_file import is_evaluation
from grpo_spmd.observe.run_folder import ReadErrors, RunFolder

REPORT_FILES = ("failure.txt", "hang.txt")
# The most lines of metrics, and values in them (of 100 bytes each), that are kept in memory. From a
# longer run every second step is kept, or every fourth and so on.
_MAX_STEPS = 24_000
_MAX_VALUES = 3_000_000
_MAX_METRICS = 1_000
_MAX_NAME_CHARS = 200
_MAX_FINITE = 1.7e308  # larger whole numbers are no floats
_MAX_CONFIG_BYTES = 1 << 20
_MAX_VALUE_CHARS = 4_000
_MAX_REPORT_CHARS = 100_000
_MAX_LOG_BYTES = 1 << 20
_REPORT_TAIL_BYTES = 1 << 24  # of a report's file, which keeps earlier reports
_MAX_LAUNCHES = 1_000
# A run that has written no line for so long is "silent". Before its first step that is the config's
# watchdog.timeout_s, or _FIRST_STEP_S. Later it is the largest of _LATER_STEP_S, of _RECENT_FACTOR
# times the longest of the last _NUM_RECENT steps, and of _LONGEST_FACTOR times the longest of all.
_FIRST_STEP_S = 1800.0
_LATER_STEP_S = 300.0
_RECENT_FACTOR = 10.0
_NUM_RECENT = 20
_LONGEST_FACTOR = 3.0
_NUM_READ_STEPS = 3  # the number of steps whose rollouts are read to look for a cause
_MAX_ROLLOUTS = 4_096  # of a step
_ROLLOUT_FIELDS = (
    "rollout_id", "row", "position", "sample", "prompt", "columns", "completion", "reward",
    "completion_ids", "finish_reason",
)  # fmt: skip
_CLOCK_SKEW_S = 5.0  # between a file's time and the clock of another host
_EXIT_S = 30.0  # that a process may hold the folder after it wrote the end of its launch


@dataclass
class RecordedRun:
    """A run as its folder records it. Metrics are finite numbers or None."""

    folder: Path
    name: str  # the last two parts of the folder's path, which is often RUN/run
    config: dict[str, Any]  # flat, as in config.yaml; {} if that cannot be read
    launches: list[dict[str, Any]]
    steps: list[dict[str, Any]]  # metrics by ascending step; the last line of each step
    evaluations: list[dict[str, Any]]  # the same for evaluations
    checkpoints: list[int]
    num_steps: int | None  # training.num_steps
    reports: dict[str, str] = field(default_factory=dict)  # by file name, from the newest launch
    dumped_steps: list[int] = field(default_factory=list)  # without those of an earlier attempt
    state: str = "empty"  # or "done", "running", "preempted", "failed", "killed", "silent"
    why: str = ""  # the state in one line

    @property
    def launch(self) -> dict[str, Any]:
        """The newest launch; {} if none is recorded."""
        return self.launches[-1] if self.launches else {}

    @property
    def subject(self) -> str:
        """The model and its data in a few words, e.g. "Qwen3-0.6B on gsm8k"; "" if unknown."""
        values = [self.config.get(key) for key in ("model.path", "data.train")]
        return " on ".join(Path(str(value)).name for value in values if value)

    @property
    def last_step(self) -> int:
        """The newest step with a line of metrics; 0 before the first one."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def dtype(self) -> str:
        """The dtype of the model, on which the bound of the logprobs' difference depends."""
        return "float32" if self.config.get("model.dtype") == "float32" else "bfloat16"

    @cached_property
    def log(self) -> str:
        """The beginning of rank 0's log; "" if it cannot be read."""
        with (
            suppress(OSError, UntrustedError),
            open_regular(self.folder / "logs/rank_0.log") as file,
        ):
            return file.read(_MAX_LOG_BYTES).decode("utf-8", "replace")
        return ""

    @cached_property
    def files(self) -> RunFolder:
        """The readers of the run's dumps. Lists the folder once."""
        return RunFolder(self.folder)

    def curve(self, metric: str) -> Curve:
        """Returns a metric at the steps where it is known."""
        return metric_curve(self.steps, metric)

    @cached_property
    def initial_rollouts(self) -> list[Any]:
        """The rollouts of the first dumped step, with only the fields that causes.py needs."""
        return self._rollouts(self.dumped_steps[:1])

    @cached_property
    def newest_rollouts(self) -> list[Any]:
        """The rollouts of the last three dumped steps, with the same fields."""
        return self._rollouts(self.dumped_steps[-_NUM_READ_STEPS:])

    def rollouts_around(self, step: int) -> list[Any]:
        """Returns the rollouts of the three dumped steps nearest to `step`, with these fields."""
        steps = sorted(self.dumped_steps, key=lambda dumped_step: abs(dumped_step - step))
        return self._rollouts(steps[:_NUM_READ_STEPS])

    def _rollouts(self, steps: Sequence[int]) -> list[Any]:
        """Returns the rollouts in the dumps of `steps`. Lines that cannot be read are skipped."""
        rollouts: list[Any] = []
        for step in steps:
            records = self.files.rollouts(step, _ROLLOUT_FIELDS, ReadErrors())
            rollouts += [record for _, record in islice(records, _MAX_ROLLOUTS)]
        return rollouts


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder. Raises ConfigError if it holds no run, or cannot be read."""
    try:
        return _read_run(folder)
    except OSError as error:
        problem = f"{folder}: {error.strerror or error}"
        raise ConfigError(f"{problem}; a run folder is what run_dir named") from None


def name_apart(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Returns the runs with names that differ: if some are equal, each name gets a number."""
    if len({run.name for run in runs}) == len(runs):
        return list(runs)
    return [replace(run, name=f"{run.name} ({number})") for number, run in enumerate(runs, start=1)]


def _read_run(folder: Path) -> RecordedRun:
    """Reads a run folder; see `read_run`, which turns OSError into ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; name one that a run's run_dir named")
    names = ("metrics.jsonl", "config.yaml", "launches.jsonl")
    if not any(os.path.lexists(folder / name) for name in names):
        raise ConfigError(f"{folder} holds no {' or '.join(names)}, so it is no run folder")
    files = RunFolder(folder)
    config = _read_config(folder / "config.yaml")
    num_steps = config.get("training.num_steps")
    # A browser computes with doubles, which hold whole numbers up to 2**53.
    is_count = type(num_steps) is int and 0 < num_steps < 2**53
    steps, evaluations = _read_metrics(files)
    run = RecordedRun(
        folder=folder,
        name="/".join(folder.resolve().parts[1:][-2:]) or str(folder),
        config=config,
        launches=files.launches()[-_MAX_LAUNCHES:],
        steps=steps,
        evaluations=evaluations,
        checkpoints=[step_of(path) for path in list_checkpoints(folder)],
        num_steps=num_steps if is_count else None,
    )
    run.reports = _read_reports(run)
    run.dumped_steps = _list_dumped_steps(run)
    run.state, detail = _find_state(run)
    total = f" of {run.num_steps}" if run.num_steps else ""
    reason = f"{run.state} after step {run.last_step}{total}{detail}"
    run.why = cut_middle(" ".join(reason.split()), _MAX_VALUE_CHARS)
    return run


def _read_reports(run: RecordedRun) -> dict[str, str]:
    """Returns the newest launch's reports on a failure, by file name (REPORT_FILES).

    Earlier launches wrote into the same files; their reports are left out.
    """
    reports: dict[str, str] = {}
    if run.launch.get("outcome") in ("done", "preempted"):
        return reports
    start_s = _unix_s(run.launch.get("start"))
    oldest_s = start_s if start_s is not None else _written_s(run.steps)
    for name in REPORT_FILES:
        path = run.folder / "logs" / name
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


def _list_dumped_steps(run: RecordedRun) -> list[int]:
    """Returns the dumped steps without those of an earlier attempt.

    A run that resumes from an older checkpoint leaves the dumps of later steps until it makes
    these steps again.
    """
    dumped_steps = run.files.dumped_steps
    if not run.steps:
        return dumped_steps
    newest_step = run.last_step + 1  # a step's dump comes before its line
    start_s = _unix_s(run.launch.get("start"))
    if start_s is not None and newest_step in dumped_steps:
        with suppress(OSError):
            paths = run.files.rollout_files[newest_step].values()
            written_s = max(path.stat().st_mtime for path in paths)
            # That dump is of an earlier attempt if it is older than this launch.
            if written_s < start_s - _CLOCK_SKEW_S:
                newest_step -= 1
    return [step for step in dumped_steps if step <= newest_step]


def _find_state(run: RecordedRun) -> tuple[str, str]:
    """Returns (state, text): a state as in RecordedRun.state, and the text that follows it.

    E.g. "failed" and ": rank 1 raised" for "failed after step 40 of 100: rank 1 raised".
    """
    launch = run.launch
    outcome = launch.get("outcome")
    reason = launch.get("why")
    if not run.launches:
        outcome, reason = _find_early_outcome(run)
    suffix = f": {reason}" if isinstance(reason, str) and reason else ""
    if outcome == "done":
        return "done", ""
    is_held = _is_locked(run.folder / "logs" / "launch")
    if outcome in ("preempted", "failed", "killed"):
        end_s = _unix_s(launch.get("end"))
        if is_held and (end_s is None or time.time() - end_s > _EXIT_S):
            return "running", f"; it starts again, and the launch before was {outcome}{suffix}"
        return str(outcome), suffix
    # No outcome: the launch goes on, hangs, or was killed without a word.
    times = [_written_s(run.steps), _written_s(run.evaluations), _unix_s(launch.get("start"))]
    known_times = [seconds for seconds in times if seconds is not None]
    quiet_s = max(0.0, time.time() - max(known_times)) if known_times else math.inf
    is_quiet = quiet_s > _max_quiet_s(run)
    silence = f", nothing written for {_format_seconds(quiet_s)}" if known_times else ""
    if is_held and is_quiet and known_times:
        return "silent", f"{silence}; it holds its folder"
    if is_held:
        return "running", ""
    if not run.launches and not run.steps:
        return "empty", ": nothing tells of a step yet"
    if not run.launches:
        return ("killed", ": it left no word of its end") if is_quiet else ("running", "")
    host = str(launch.get("host"))[:200]
    # Only on the run's own machine a missing lock proves that nothing holds it.
    if host == socket.gethostname() and os.path.exists("/proc/locks"):
        return "killed", ": it left no word of its end, and no process holds its folder"
    if is_quiet:
        return "silent", f"{silence}; it hangs or was killed on {host}"
    return "running", f" (on {host})"


def _max_quiet_s(run: RecordedRun) -> float:
    """Returns how many seconds a run may write no line before its state is "silent"."""
    start_s = _unix_s(run.launch.get("start"))
    last_line_s = _written_s(run.steps)  # None in runs of earlier versions
    if last_line_s is None or (start_s is not None and last_line_s < start_s):
        timeout_s = run.config.get("watchdog.timeout_s")
        if isinstance(timeout_s, int | float) and 0 < timeout_s < 1e9:
            return float(timeout_s)
        return _FIRST_STEP_S
    durations = [step.get("time/step_s") or 0.0 for step in run.steps]
    recent_s = _RECENT_FACTOR * max(durations[-_NUM_RECENT:])
    # An evaluation at every 100th step may take many times as long as the last steps did.
    return max(_LATER_STEP_S, recent_s, _LONGEST_FACTOR * max(durations))


def _find_early_outcome(run: RecordedRun) -> tuple[str | None, str]:
    """Returns outcome and reason of a folder without launches.jsonl, from versions before 0.1."""
    with suppress(OSError, ConfigError):
        return "preempted", str(read_json(run.folder / "preempted.json").get("reason"))
    if run.steps and run.num_steps is not None and run.last_step >= run.num_steps:
        return "done", ""
    for report in run.reports.values():
        lines = (line for line in report.split("\n") if not line.startswith("==="))
        return "failed", next(lines, "")
    return None, ""


def _read_config(path: Path) -> dict[str, Any]:
    """Returns the values of config.yaml by dotted key; {} if it cannot be read or is too large."""
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
    """Returns a value of a YAML file as one that JSON has.

    Dates, infinite numbers and whole numbers beyond 2**53 become text.
    """
    if value is None or type(value) in (bool, list, dict):
        return value
    is_number = (type(value) is int and abs(value) < 2**53) or (
        type(value) is float and math.isfinite(value)
    )
    return value if is_number else str(value)[:_MAX_VALUE_CHARS]


def _read_metrics(files: RunFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Returns the lines of metrics.jsonl: those of steps, and those of evaluations."""
    steps = _ThinnedLines()
    evaluations = _ThinnedLines()
    # A metric's name is the same object in all lines, which halves the memory.
    names: dict[str, str] = {}
    for line in files.metrics():
        step = line.values["step"]
        # Other steps are no run's: a browser could not compute with them.
        if 0 <= step < 2**53:
            kind = evaluations if is_evaluation(line.values) else steps
            kind.add({"step": step, **_finite_numbers(line.values, names)}, max(100, len(names)))
    return steps.ordered(), evaluations.ordered()


class _ThinnedLines:
    """Lines of metrics by step, of which half are dropped whenever there are too many."""

    def __init__(self) -> None:
        self._lines: dict[int, dict[str, Any]] = {}
        self._stride = 1
        self._newest: dict[str, Any] = {}

    def add(self, line: dict[str, Any], num_names: int) -> None:
        """Adds a line. The more metrics a line has (`num_names`), the fewer lines are kept."""
        self._newest = line
        if line["step"] % self._stride == 0:
            self._lines[line["step"]] = line
        # Halving keeps the points at even distances, whatever the run's length will be.
        if len(self._lines) > min(_MAX_STEPS, _MAX_VALUES // num_names):
            self._stride *= 2
            self._lines = {
                step: line for step, line in self._lines.items() if step % self._stride == 0
            }

    def ordered(self) -> list[dict[str, Any]]:
        """Returns the lines that were kept, by ascending step, and the newest line in any case."""
        lines = self._lines | {line["step"]: line for line in [self._newest] if line}
        return [lines[step] for step in sorted(lines)]


def _finite_numbers(metrics: Mapping[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Returns the metrics of a line by name, with None for numbers that are not finite.

    `names` maps each name to the one string object that all lines share, and gets the new names. A
    new name is dropped if there are _MAX_METRICS already, or if it is too long.
    """
    numbers: dict[str, float | int | None] = {}
    for name, value in metrics.items():
        is_metric = name != "step" and (value is None or type(value) in (int, float))
        has_room = name in names or (len(names) < _MAX_METRICS and len(name) <= _MAX_NAME_CHARS)
        if is_metric and has_room:
            # NaN is not smaller than anything.
            is_finite = value is not None and abs(value) < _MAX_FINITE
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
                return any(file.exists() and file.samefile(path) for file in descriptors)
            return True  # another user's process: the number must do
    return False


def _written_s(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns when the last line was written, in seconds since 1970."""
    return lines[-1].get("time/unix_s") if lines else None


def _unix_s(text: Any) -> float | None:
    """Returns an ISO time as seconds since 1970; None if it is not such a text."""
    with suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()
    return None


def _format_seconds(seconds: float) -> str:
    """Returns a duration in seconds, minutes or hours, such as "45 s"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
