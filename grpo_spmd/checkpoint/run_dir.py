"""The run folder: who holds it, which launch has begun the run in it, and what a start leaves in it."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.manifest import (
    checkpoint_path,
    list_checkpoints,
    put_in_place,
    remove,
    set_aside,
    step_of,
    temporary_path,
)
from grpo_spmd.config.errors import ConfigError

_log = logging.getLogger("grpo_spmd")
_LAUNCH = Path("logs", "launch")
_locked: set[Path] = set()


@dataclass(frozen=True)
class Start:
    """Where a run starts: from nothing, or from a checkpoint that every rank has found good."""

    step: int = 0
    folder: Path | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    goes_on: bool = False  # with the run that its folder holds, if it holds one
    is_over: bool = False  # that run had come to its end

    @property
    def position(self) -> int:
        """In the prompt stream."""
        return int(self.trainer.get("position", 0))


def is_same_launch(run_dir: str | Path) -> bool:
    """Whether this very launch by torchrun has begun the run. If it has also started the ranks again (--max-restarts),
    the run goes on."""
    try:
        return _launch_id() != "" and (Path(run_dir) / _LAUNCH).read_text(encoding="utf-8") == _launch_id()
    except OSError:  # the first attempt did not come that far, or was refused because the folder is another run's
        return False


def refuse_in_use(run_dir: Path) -> None:
    """Raises ConfigError where a run has been in the folder."""
    for name in ("metrics.jsonl", "config.yaml", *(f"checkpoints/{path.name}" for path in list_checkpoints(run_dir))):
        if (run_dir / name).exists():
            raise ConfigError(
                f"run_dir: {run_dir} holds a {name} already, and nothing is written over; set checkpoint.resume: auto to go on "
                "with that run, choose another folder, or move it away"
            )


def lock_run_dir(run_dir: str | Path) -> None:
    """On rank 0: hold the folder for as long as this process lives.

    Raises:
        ConfigError: another process holds it: two jobs that go on with one run would overwrite each other's
            checkpoints.
    """
    path = Path(run_dir).resolve() / _LAUNCH
    if path in _locked:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # never closed: the lock ends with the process, however it ends
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"run_dir: another process is running in {run_dir}; end that one first, or choose another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    _locked.add(path)


def begin_in(run_dir: Path, start: Start) -> None:
    """On rank 0, when nothing can be refused any more: make the folder one in which `start` is the newest checkpoint,
    and this launch's.

    Raises:
        ConfigError: another run is in it.
    """
    lock_run_dir(run_dir)
    if not start.goes_on:
        refuse_in_use(run_dir)
    for half in (run_dir / "checkpoints").glob("step_*.tmp"):
        remove(half)
    for beyond in list_checkpoints(run_dir):
        if step_of(beyond) > start.step:
            _log.warning("%s is set aside: the run goes on from step %d", beyond, start.step)
            set_aside(beyond)
    # From here on a restart takes the newest checkpoint, whatever `checkpoint.resume` says; and what it names where
    # there is none.
    note_launch(run_dir, _launch_id())
    own = checkpoint_path(run_dir, start.step)
    if start.folder is not None and start.folder.resolve() != own.resolve():
        # One of another run, say. A failure before this run's first save must come back to it, and not to the
        # beginning.
        temporary = temporary_path(own)
        shutil.copytree(start.folder, temporary, copy_function=_link_or_copy)
        put_in_place(temporary, own)


def note_launch(run_dir: Path, launch_id: str) -> None:
    """On rank 0, which holds the folder: say which launch the run in it is of."""
    (run_dir / _LAUNCH).write_text(launch_id, encoding="utf-8")  # in place: another file would not be locked


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a checkpoint's files are never changed
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _launch_id() -> str:
    """The same in all attempts of one launch and on all of its nodes, and not likely in another; "" without
    torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id != "none":  # torchrun's default, of every launch without --standalone or --rdzv-id
        return run_id
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # the store of torchrun's first agent
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        return f"{os.uname().nodename} {os.getppid()} {Path(f'/proc/{os.getppid()}/stat').read_text().rpartition(')')[2].split()[19]}"
    except OSError:  # no /proc
        return f"{os.uname().nodename} {os.getppid()}"


def is_inside(checkpoint: str | Path, run_dir: str | Path) -> bool:
    """Whether it is one of this run folder's checkpoints."""
    return Path(checkpoint).resolve().parent.parent == Path(run_dir).resolve()
