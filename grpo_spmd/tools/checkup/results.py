"""What a check finds, where it looks, and how it is run: one that raises or hangs is a line, never the end."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from grpo_spmd.config.schema import Config

Level = Literal["ok", "warning", "bad"]
LEVELS: tuple[Level, ...] = ("ok", "warning", "bad")
_MOST_CHARACTERS = 1 << 20
_OF_A_RANK = {
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
}


@dataclass(frozen=True)
class Result:
    """One line."""

    name: str
    level: Level
    found: str
    remedy: str = ""
    alike: dict[str, str] = field(
        default_factory=dict
    )  # facts that must be the same on all ranks, by name

    def __post_init__(self) -> None:
        assert self.level == "ok" or self.remedy, f"no remedy for {self.name}: {self.found}"


@dataclass(frozen=True)
class Place:
    """Where checks look, and for how many ranks."""

    root: Path = Path(
        "/"
    )  # /proc, /sys and /dev are looked at below it, so that tests can plant what is there
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    num_ranks: int = 1
    local_ranks: int = 1  # of this machine
    num_gpus: int = 0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    is_launched: bool = False  # ranks are there already, by torchrun or srun
    config: Config | None = None
    words: Sequence[str] = ()  # of the command line: --config FILE and the overrides
    run_dir: Path = Path()

    def read(self, path: str) -> str:
        """The text of a file below the root; "" where it is not there, or is not ours to read."""
        try:
            with open(self.root / path.lstrip("/"), encoding="utf-8", errors="replace") as file:
                return file.read(_MOST_CHARACTERS)
        except OSError:
            return ""

    def ask(self, command: Sequence[str], timeout_s: float) -> tuple[int, str, str] | None:
        """Exit code, output and errors of a program that is no rank; None where there is no such program. Raises
        subprocess.TimeoutExpired."""
        own = {name: value for name, value in self.environ.items() if name not in _OF_A_RANK}
        if self.num_ranks > 1:
            own |= {"WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.local_ranks)}
        options: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace"}
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, env=own, timeout=timeout_s, **options
            )
        except (FileNotFoundError, PermissionError):
            return None
        return done.returncode, done.stdout, done.stderr


@dataclass(frozen=True)
class Check:
    name: str
    group: str
    look: Callable[[Place], Iterable[Result]]
    deadline_s: float = 5.0
    of: Literal["rank", "machine", "run"] = (
        "machine"  # who looks: each rank, one of each machine, rank 0
    )


def run_check(check: Check, place: Place) -> list[Result]:
    """What it finds until its deadline. A thread that hangs beyond it is left behind: whoever calls leaves the process
    by distributed.ending."""
    found: list[Result] = []
    raised: list[BaseException] = []

    def look() -> None:
        try:
            for result in check.look(place):
                found.append(result)
        except BaseException as error:  # whatever it is: a line
            raised.append(error)

    thread = threading.Thread(target=look, name=f"checkup: {check.name}", daemon=True)
    thread.start()
    thread.join(check.deadline_s)
    is_stuck, results = thread.is_alive(), [*found]
    if is_stuck or (raised and isinstance(raised[0], subprocess.TimeoutExpired)):
        what = f"could not be looked at: no answer within {check.deadline_s:g} s"
        results.append(
            Result(
                check.name,
                "warning",
                what,
                "look at what it reads or starts: something there hangs",
            )
        )
    elif raised:
        said = " ".join(str(raised[0]).split())[:300]
        what = f"could not be looked at: {type(raised[0]).__name__}: {said}"
        results.append(
            Result(check.name, "warning", what, "look at what it names; the other lines stand")
        )
    return results


def size_of(num_bytes: float) -> str:
    """In the unit that leaves few digits."""
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{0 if num_bytes >= 10 * scale else 1}f} {unit}"
    return f"{num_bytes:.0f} B"


def listed(items: Iterable[object], most: int = 6) -> str:
    texts = [str(item) for item in items]
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
