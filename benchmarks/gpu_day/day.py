"""The driver: steps one after another, each a tree of processes with a limit. What is done is
remembered on disk, so that the same command goes on after its end, or after a kill. Imports no
torch: a context of this process on the GPU
would be in every ledger, and it must start in no time."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.gpu_day.page import page
from benchmarks.support.report import COMMIT, Row
from benchmarks.support.tree import MARK, kill_tree
from benchmarks.support.ways import way_environment

ROOT = Path(__file__).resolve().parents[2]
SKIPPED = 77  # exit code of a step that has nothing to do here; its last line says why
ENDED = ("done", "skipped", "failed", "limit")  # what has one of these is not begun again
_MOST_STARTS = 2  # of a step whose driver is killed each time
_MOST_LOG_BYTES = 15 << 20
_TAIL_LINES = 15
_KEPT = (
    "*.log",
    "logs/*",
    "metrics.jsonl",
    "config.yaml",
)  # of a step's folder, and so in the archive
_FILES = ("state.json", "rows.jsonl", "page.txt", "logs.tar.gz")


@dataclass(frozen=True)
class Step:
    """One piece of evidence. In `command`, which follows the interpreter, {json} is the file for
    its rows, {folder} a
    folder of its own that is new."""

    name: str
    shows: str
    command: tuple[str, ...]
    limit_s: float


class DayError(Exception):
    """One line for whoever started it; exit code 2."""


class Day:
    """`scratch` holds everything, and outlives the commands where the machine does; `out` gets
    copies of the results after each step, `_FILES`, which are small and lie in no folder. `before`:
    folders that may hold the results of an earlier machine. Raises DayError: another driver is at
    work there, or the results are of another
    form."""

    def __init__(
        self,
        steps: Sequence[Step],
        scratch: Path,
        out: Path,
        form: str,
        commit: str,
        old: Sequence[Path] = (),
    ) -> None:
        self._steps, self._scratch, self._out, self._commit = steps, scratch, out, commit
        for folder in (scratch / "logs", scratch / "rows", scratch / "steps", out):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = (scratch / "lock").open(
            "w"
        )  # a child does not inherit it, so that a kill frees it
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DayError(
                f"another gpu_day is at work in {scratch}; wait for it, or name another --scratch"
            ) from None
        result = next(
            (folder for folder in (scratch, *old) if (folder / "state.json").is_file()), None
        )
        self._state: dict[str, Any] = {"form": form, "commit": commit, "commands": [], "steps": {}}
        self._rows: list[Row] = []
        if result is not None:
            self._state = json.loads((result / "state.json").read_text())
            self._rows = read_rows(result / "rows.jsonl")
        if self._state["form"] != form:
            was = self._state["form"]
            raise DayError(
                f"{result} holds a day of form {was!r}, and this one is {form!r}; name other "
                "folders"
            )

    def run(self, minutes: float, again: Sequence[str] = ()) -> int:
        """Exit code: 0 every step is done or skipped, 1 one failed or came to its limit, 3 there is
        more to do. A step
        is begun only where its whole limit fits into `minutes`. `again`: steps to forget, and so to
        make again."""
        began, end = time.time(), time.monotonic() + 60 * minutes
        expected_names = self._state["steps"]
        for name in self._known_names(again):
            expected_names.pop(name, None)
        self._end_what_was_left()
        to_make = [
            step
            for step in self._steps
            if expected_names.get(step.name, {}).get("status") not in ENDED
        ]
        self._refuse_too_short(minutes, to_make)
        old = [
            f"{step.name} ({expected_names[step.name]['status']})"
            for step in self._steps
            if step not in to_make
        ]
        if old:
            _say(f"ended in an earlier command: {', '.join(old)}")
        command: dict[str, Any] = {"began": _stamp(), "seconds": 0.0, "steps": []}
        self._state["commands"].append(command)
        with _signals_raise():
            for step in to_make:
                if step.limit_s > end - time.monotonic():
                    break
                command["steps"].append(step.name)
                self._make(step)
                command["seconds"] = round(time.time() - began, 1)
                self._publish()
        self._publish()
        waiting = [step.name for step in to_make[len(command["steps"]) :]]
        if waiting:
            _say(
                f"{minutes:g} minutes are over; the same command goes on with {', '.join(waiting)}"
            )
        statuses = [
            expected_names[step.name]["status"]
            for step in self._steps
            if step.name in expected_names
        ]
        return 3 if waiting else int(any(status in ("failed", "limit") for status in statuses))

    def _known_names(self, names: Sequence[str]) -> Sequence[str]:
        present = [step.name for step in self._steps]
        if unknown := sorted(set(names) - set(present)):
            raise DayError(f"--again {unknown[0]}: no such step; there are {', '.join(present)}")
        return names

    def _refuse_too_short(self, minutes: float, to_make: Sequence[Step]) -> None:
        max_length = max(to_make, key=lambda step: step.limit_s, default=None)
        if max_length is not None and 60 * minutes < max_length.limit_s:
            minimum = f"the limit of step {max_length.name}, {max_length.limit_s / 60:g} minutes"
            raise DayError(
                f"--minutes {minutes:g} is less than {minimum}, so that it would never begin; "
                "give more"
            )

    def _end_what_was_left(self) -> None:
        """A driver that was killed left its step running, which would be in the next one's
        measurements."""
        for name, expected_names in self._state["steps"].items():
            if expected_names["status"] == "running":
                try:
                    count = kill_tree(expected_names["mark"])
                except RuntimeError as error:  # they would be in every measurement to come
                    raise DayError(
                        f"step {name} of an earlier command: {error}; only a new machine helps"
                    ) from None
                is_last = expected_names["starts"] >= _MOST_STARTS
                expected_names["status"] = "failed" if is_last else "interrupted"
                expected_names["said"] = (
                    f"the driver was killed in it {expected_names['starts']} times"
                    if is_last
                    else "-"
                )
                _say(f"{name}: its driver was killed; ended {count} processes of it")

    def _make(self, step: Step) -> None:
        """Run one step to its end or its limit, and take its rows."""
        folder, log = (
            self._scratch / "steps" / step.name,
            self._scratch / "logs" / f"{step.name}.log",
        )
        rows = self._scratch / "rows" / f"{step.name}.jsonl"
        _remove(folder)
        folder.mkdir()
        rows.unlink(missing_ok=True)
        starts = self._state["steps"].get(step.name, {}).get("starts", 0) + 1
        expected_names = {
            "status": "running",
            "starts": starts,
            "mark": uuid.uuid4().hex,
            "began": _stamp(),
        }
        self._state["steps"][step.name] = expected_names
        self._write_state()
        _say(f"{step.name}: {step.shows} (limit {step.limit_s:.0f} s)")
        command = [
            piece.replace("{json}", str(rows)).replace("{folder}", str(folder))
            for piece in step.command
        ]
        start, ended_by_limit = time.monotonic(), False
        with log.open("ab") as file:
            file.write(
                f"--- {step.name}, start {starts}, {_stamp()}: {' '.join(command)}\n".encode()
            )
            file.flush()
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self._environment(expected_names["mark"], folder),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # a Ctrl-C is for the driver, which ends the whole tree
            )
            try:
                process.wait(step.limit_s)
            except subprocess.TimeoutExpired:
                ended_by_limit = True
            finally:
                seconds = time.monotonic() - start
                remaining, immortal = self._end_tree(expected_names["mark"], process)
        code = -signal.SIGKILL if process.returncode is None else process.returncode
        expected_names |= self._outcome(code, ended_by_limit, remaining, log) | {
            "seconds": round(seconds, 1)
        }
        if immortal:
            expected_names |= {"status": "failed", "said": immortal}
        self._take_rows(step, expected_names["status"], rows)
        _remove(folder, but=_KEPT)  # models and checkpoints take the next step's room
        _say(
            f"{step.name}: {expected_names['status']} after {seconds:.1f} s: "
            f"{expected_names['said']}"
        )

    @staticmethod
    def _end_tree(mark: str, process: subprocess.Popen[bytes]) -> tuple[int, str]:
        """How many were left of the step, and what is to be said of those that a SIGKILL does not
        end."""
        try:
            remaining = kill_tree(mark)
        except RuntimeError as error:
            return 0, str(error)
        process.wait()
        return remaining, ""

    def _way(self) -> str:
        """The way of starting the engine that the smoke step found, else the default."""
        passed = [
            row["way"]
            for row in self._rows
            if row["benchmark"] == "gpu_day_smoke" and row["passed"]
        ]
        return str(passed[-1]) if passed else "default"

    def _environment(self, mark: str, folder: Path) -> dict[str, str]:
        local = {
            MARK: mark,
            COMMIT: self._commit,
            "TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            # vLLM names its runner, attention backend and memory of graphs at this level alone.
            "VLLM_LOGGING_LEVEL": "INFO",
            **way_environment(self._way()),
            "HF_HUB_OFFLINE": "1",
        }
        # What one step compiled the next one need not: torch would put it into the temporary
        # folder, which is a step's.
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(self._scratch / "cache")}
        local["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        )
        if self._state["form"] == "dry":
            local["CUDA_VISIBLE_DEVICES"] = ""
        return {"OMP_NUM_THREADS": "1", **cache, **os.environ, **local}

    def _outcome(
        self, code: int, ended_by_limit: bool, remaining: int, log: Path
    ) -> dict[str, Any]:
        """Status, exit code and what the step said last; of one that was not done a little more."""
        message = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        status = "limit" if ended_by_limit else {0: "done", SKIPPED: "skipped"}.get(code, "failed")
        more = f"killed at its limit with {remaining} processes; " if ended_by_limit else ""
        more += f"exit code {code}; " if status == "failed" else ""
        more += f"left {remaining} processes behind; " if remaining and not ended_by_limit else ""
        tail = (
            [line[:300] for line in message[-_TAIL_LINES:]] if status in ("failed", "limit") else []
        )
        return {"status": status, "code": code, "said": (more + message[-1])[:500], "tail": tail}

    def _take_rows(self, step: Step, status: str, path: Path) -> None:
        """In place of those of an earlier start. Rows of a step that failed are kept, and say
        so."""
        local = {"step": step.name, "status": status, "form": self._state["form"]}
        new = [local | row for row in read_rows(path)]
        names = [item.name for item in self._steps]
        rows = [row for row in self._rows if row["step"] != step.name] + new
        self._rows = sorted(
            rows, key=lambda row: names.index(row["step"]) if row["step"] in names else len(names)
        )

    def _write_state(self) -> None:
        _write(self._scratch / "state.json", json.dumps(self._state, indent=1).encode())

    def _publish(self) -> None:
        """Results into scratch, then copies into `out`, each whole or as it was before."""
        self._write_state()
        _write(
            self._scratch / "rows.jsonl",
            "".join(json.dumps(row) + "\n" for row in self._rows).encode(),
        )
        _write(self._scratch / "page.txt", page(self._steps, self._state, self._rows).encode())
        _write(self._scratch / "logs.tar.gz", _archive(self._scratch))
        for name in _FILES if self._out != self._scratch else ():
            _write(self._out / name, (self._scratch / name).read_bytes())


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that need not be there, without a last one that a kill tore."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _archive(scratch: Path) -> bytes:
    """Logs of the steps, and of their runs with metrics and configs; the end of what is very
    long."""
    buffer, remaining = io.BytesIO(), _MOST_LOG_BYTES
    retained = [
        path for pattern in _KEPT for path in scratch.glob(f"*/**/{pattern}") if path.is_file()
    ]
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path in sorted(set(retained)):
            data = path.read_bytes()[-remaining:] if remaining else b""
            remaining -= len(data)
            info = tarfile.TarInfo(str(path.relative_to(scratch)))
            info.size, info.mtime = len(data), int(path.stat().st_mtime)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def _remove(folder: Path, but: Sequence[str] = ()) -> None:
    """All files below a folder but those whose path ends like one of these patterns, and the
    folders left empty."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what lies in a folder comes before it
        if path.is_symlink() or not path.is_dir():
            if not any(path.match(pattern) for pattern in but):
                path.unlink()
        elif not any(path.iterdir()):
            path.rmdir()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _write(path: Path, data: bytes) -> None:
    """Whole, or not at all: a kill may come at any time."""
    piece = path.with_name(path.name + ".part")
    piece.write_bytes(data)
    os.replace(piece, path)


def _stamp() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _say(text: str) -> None:
    print(f"gpu_day: {text}", flush=True)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP end the driver as Ctrl-C does: with its step."""

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    old: Mapping[int, Any] = {
        number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
