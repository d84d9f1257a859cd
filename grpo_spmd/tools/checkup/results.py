"""Runs checks and prints their results.

A *Result* is one line of the checkup. A *Target* is the machine that checks look at. A *fact* is a
value that must be the same on all ranks."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.errors import ConfigError, within
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.processes import without_launch
from grpo_spmd.files import show
from grpo_spmd.tools.terminal import Terminal

Level = Literal["ok", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "bad")
_NAME_COLUMNS = 14
_MAX_FILE_BYTES = 1 << 20
# The programs (child processes) that checks have started; end_programs() kills those that run.
_programs: list[subprocess.Popen[str]] = []
# Held while a program is started, so that end_programs() in another thread cannot miss it.
_starting = threading.Lock()


@dataclass(frozen=True)
class Result:
    """One line of the checkup. A line that is not ok has a remedy."""

    name: str
    level: Level
    finding: str
    remedy: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # values to be compared across ranks

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.remedy, f"no remedy for {self.name}: {self.finding}"


def ok(name: str, finding: str, facts: dict[str, str] | None = None) -> Result:
    """Returns a line that says that all is well."""
    return Result(name, "ok", finding, "", facts or {})


def warning(name: str, finding: str, remedy: str, facts: dict[str, str] | None = None) -> Result:
    """Returns a line about something that may harm a run, such as its speed."""
    return Result(name, "warning", finding, remedy, facts or {})


def bad(name: str, finding: str, remedy: str, facts: dict[str, str] | None = None) -> Result:
    """Returns a line about something for which the machine is not fit for a run."""
    return Result(name, "bad", finding, remedy, facts or {})


def rated(
    name: str, finding: str, remedy: str, *, value: float, needed: float = 0.0, wanted: float
) -> Result:
    """Returns a line: bad if `value` is below `needed`, a warning below `wanted`, else ok."""
    if value >= max(needed, wanted):
        return ok(name, finding)
    return (bad if value < needed else warning)(name, finding, remedy)


@dataclass(frozen=True)
class Target:
    """The machine that is checked, and the run for which it is checked."""

    # Files of /proc, /sys and /dev are read below this folder, so that tests can make them up.
    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    num_ranks: int = 1
    local_ranks: int = 1  # of this machine
    num_gpus: int = 0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    is_launched: bool = False  # torchrun or srun has started the ranks
    config: Config | None = None
    arguments: Sequence[str] = ()  # --config FILE and the overrides
    run_dir: Path = Path()
    deadline_s: float = 60.0  # for the ranks that measure all-reduces

    @property
    def ranks_text(self) -> str:
        """The number of ranks of this machine, such as "8 ranks"."""
        return plural(self.local_ranks, "rank")

    def read(self, *paths: str) -> str:
        """Returns the text of the first file below the root that can be read; "" if none can."""
        for path in paths:
            path = path.lstrip("/")
            with (
                suppress(OSError),
                open(self.root / path, encoding="utf-8", errors="replace") as file,
            ):
                return file.read(_MAX_FILE_BYTES).strip()
        return ""

    def run(
        self, command: Sequence[str], timeout_s: float, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program without the variables that make this process a rank (RANK, ...).

        `environ` has variables to set for the program. Raises OSError if there is no such program,
        and subprocess.TimeoutExpired if it was killed after `timeout_s`.
        """
        env = without_launch(self.environ)
        # --check and the planner read how many ranks the run would have.
        if self.num_ranks > 1:
            env["WORLD_SIZE"] = str(self.num_ranks)
            env["LOCAL_WORLD_SIZE"] = str(self.local_ranks)
        with _starting:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**env, **(environ or {})},
            )
            _programs.append(program)
        with program:
            try:
                outputs = program.communicate(timeout=timeout_s)
            finally:
                program.kill()
        return subprocess.CompletedProcess(command, program.returncode, *outputs)


def end_programs() -> None:
    """Kills the programs that checks have started. Called just before the process exits."""
    # Never released, so that no check can start another program.
    _starting.acquire()
    for program in _programs:
        program.kill()


@dataclass(frozen=True)
class Check:
    """A check: its name, its group on the page and the function that yields its results."""

    name: str
    group: str
    function: Callable[[Target], Iterable[Result]]
    deadline_s: float = 5.0
    # Which ranks run it: every rank, the first rank of each machine, or only rank 0.
    scope: Literal["rank", "machine", "run"] = "machine"


def run_check(check: Check, target: Target) -> list[Result]:
    """Returns the results that a check has yielded at its deadline.

    If the check raises or hangs, a warning that says so is the last result. A check that hangs
    leaves its thread behind: the caller must end the process by exit_process.
    """
    results: list[Result] = []
    try:
        within(check.deadline_s, lambda: results.extend(check.function(target)))
    except KeyboardInterrupt:  # a signal to this process
        raise
    except BaseException as error:  # no fault of one check may hide the results of the others
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
            text = f"no answer within {getattr(error, 'timeout', check.deadline_s):g} s"
        remedy = "look at what it reads or starts; the other lines are not affected"
        line = warning(check.name, f"could not be checked: {text}", remedy)
        # A copy, since a thread that is late may still append to the list.
        return [*results, line]
    return results


class Page:
    """Prints results in groups and writes them to a JSON Lines file."""

    def __init__(self, json_file: Path | None = None, terminal: Terminal | None = None) -> None:
        """Opens `json_file`, if it is given, for the results.

        Raises ConfigError if it cannot be written."""
        self.counts: Counter[str] = Counter()
        self._terminal, self._group = terminal or Terminal(), ""
        try:
            self._json = json_file.open("w", encoding="utf-8") if json_file else None
        except OSError as error:
            raise ConfigError(f"--json: cannot write {json_file}: {error.strerror}") from None

    def add(self, group: str, result: Result) -> None:
        """Prints a result, below the title of its group, and writes it to the file."""
        if group != self._group:
            show(("\n" if self._group else "") + group)
            self._group = group
        level = result.level
        self.counts[level] += 1
        label = f"  {level:7}  {result.name:{_NAME_COLUMNS}} "
        indent = " " * len(label)
        lines = [*self._terminal.words(result.finding, label, indent)]
        lines[0].stylize(level, 2, 9)
        if result.remedy:
            lines += self._terminal.words(result.remedy, f"{indent}-> ", f"{indent}   ")
        self._terminal.write(lines)
        self._write(
            group=group,
            name=result.name,
            level=level,
            found=result.finding,
            remedy=result.remedy,
        )

    def close(self, seconds: float) -> int:
        """Prints the verdict, and returns the exit code: 2 if a line is bad, else 0."""
        num_bad, warnings, num_ok = (self.counts[level] for level in reversed(LEVELS))
        verdict = "not fit" if num_bad else "fit"
        counts = f"{num_bad} bad, {plural(warnings, 'warning')}, {num_ok} ok"
        show(f"\n{verdict}: {counts}, {seconds:.1f} s")
        self._write(verdict=verdict, bad=num_bad, warnings=warnings, ok=num_ok)
        return 2 if num_bad else 0

    def _write(self, **fields: Any) -> None:
        """Writes a line to the JSON Lines file, if there is one."""
        if self._json is not None:
            print(json.dumps(fields), file=self._json, flush=True)


def join_items(items: Iterable[object], limit: int = 6) -> str:
    """Returns the first `limit` items, separated by commas, and the number of further items."""
    texts = [str(item) for item in items]
    remark = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + remark


def plural(count: int, noun: str) -> str:
    """Returns the count and the noun, such as "1 rank" or "2 ranks"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
