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
_programs: list[subprocess.Popen[str]] = []
# Held while a program is started: a checkup that ends meanwhile, in another thread, waits and ends
# that program too.
_starting = threading.Lock()


@dataclass(frozen=True)
class Result:
    """A Result is one line of the checkup. A line that is not ok has a remedy."""

    name: str
    level: Level
    finding: str
    remedy: str = ""
    facts: dict[str, str] = field(default_factory=dict)  # must be the same on all ranks

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.remedy, f"no remedy for {self.name}: {self.finding}"


def ok(name: str, finding: str, facts: dict[str, str] | None = None) -> Result:
    return Result(name, "ok", finding, "", facts or {})


def warning(name: str, finding: str, remedy: str, facts: dict[str, str] | None = None) -> Result:
    return Result(name, "warning", finding, remedy, facts or {})


def bad(name: str, finding: str, remedy: str, facts: dict[str, str] | None = None) -> Result:
    return Result(name, "bad", finding, remedy, facts or {})


def rated(
    name: str, finding: str, remedy: str, *, value: float, needed: float = 0.0, wanted: float
) -> Result:
    """Returns a bad line if the value is below what is needed, a warning below what is wanted."""
    if value >= max(needed, wanted):
        return ok(name, finding)
    return (bad if value < needed else warning)(name, finding, remedy)


@dataclass(frozen=True)
class Target:
    """Describes the machine that is checked, and the run for which it is checked."""

    # Files of /proc, /sys and /dev are read below it, so that tests can plant them.
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

        `environ` may set them for the program.

        Raises OSError if there is no such program, and subprocess.TimeoutExpired.
        """
        env = without_launch(self.environ)
        # The program still learns how many ranks the run would have.
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
    """Ends the programs of checks that still run."""
    # Not given back: nothing is started any more, until the process exits.
    _starting.acquire()
    for program in _programs:
        program.kill()


@dataclass(frozen=True)
class Check:
    name: str
    group: str
    look: Callable[[Target], Iterable[Result]]
    deadline_s: float = 5.0
    # Who looks: every rank, the first rank of each machine, or rank 0 alone.
    scope: Literal["rank", "machine", "run"] = "machine"


def run_check(check: Check, target: Target) -> list[Result]:
    """Returns what the check finds until its deadline. A check that raises or hangs is a line.

    A check that hangs leaves its thread behind: the caller must end with exit_process.
    """
    results: list[Result] = []
    try:
        within(check.deadline_s, lambda: results.extend(check.look(target)))
    except KeyboardInterrupt:  # a signal to this process
        raise
    except BaseException as error:  # whatever it is: a line
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if isinstance(error, TimeoutError | subprocess.TimeoutExpired):
            text = f"no answer within {getattr(error, 'timeout', check.deadline_s):g} s"
        remedy = "look at what it reads or starts; the other lines stand"
        line = warning(check.name, f"could not be looked at: {text}", remedy)
        # A late thread may still append to the list.
        return [*results, line]
    return results


class Page:
    """Prints results in groups and writes them to a JSON Lines file."""

    def __init__(self, json_file: Path | None = None, terminal: Terminal | None = None) -> None:
        """Raises ConfigError if `json_file` cannot be written."""
        self.counts: Counter[str] = Counter()
        self._terminal, self._group = terminal or Terminal(), ""
        try:
            self._json = json_file.open("w", encoding="utf-8") if json_file else None
        except OSError as error:
            raise ConfigError(f"--json: cannot write {json_file}: {error.strerror}") from None

    def add(self, group: str, result: Result) -> None:
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
        """Shows the verdict, and returns the exit code: 2 if a line is bad, else 0."""
        num_bad, warnings, num_ok = (self.counts[level] for level in reversed(LEVELS))
        verdict = "not fit" if num_bad else "fit"
        counts = f"{num_bad} bad, {plural(warnings, 'warning')}, {num_ok} ok"
        show(f"\n{verdict}: {counts}, {seconds:.1f} s")
        self._write(verdict=verdict, bad=num_bad, warnings=warnings, ok=num_ok)
        return 2 if num_bad else 0

    def _write(self, **fields: Any) -> None:
        if self._json is not None:
            print(json.dumps(fields), file=self._json, flush=True)


def join_items(items: Iterable[object], limit: int = 6) -> str:
    """Returns the items with commas, and how many more there are than `limit`."""
    texts = [str(item) for item in items]
    remark = f" and {len(texts) - limit} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + remark


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
