"""This module manages a run folder: its checkpoints, its lock, and to which run it belongs.

A process *holds* a folder while it has the lock on the file logs/launch, the *launch note*. The
note has the id of the launch of torchrun that began the run, or continued it last. A checkpoint is
*set aside* when its folder is renamed to NAME.aside, so that no later start uses it. Imports no
torch.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DECIDED_KEYS
from grpo_spmd.distributed.processes import read_stat
from grpo_spmd.files import open_regular, sync_path, sync_to_disk
from grpo_spmd.records import Fields

_log = logging.getLogger("grpo_spmd")
_LAUNCH = Path("logs", "launch")
_locked: dict[Path, int] = {}
"""The open descriptor of each lock file that this process has locked."""
# These keys must not change within a run: they determine the order or the form of its prompts, its
# random numbers, or the shapes of its trained tensors and their moments.
_FIXED_KEYS = (
    "seed",
    "data.shuffle",
    "data.chat_template_kwargs",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.target_modules",
    "optimizer.name",
)


@dataclass(frozen=True)
class Start:
    """Where a run starts: at step 0, or at a checkpoint that the ranks have verified."""

    step: int = 0
    """The number of finished steps."""
    folder: Path | None = None
    """The checkpoint to start from."""
    trainer: Fields = field(default_factory=dict)
    """The checkpoint's trainer.json."""
    goes_on: bool = False
    """True if this launch continues the run that is in its folder, if there is one; False if it
    begins a new run."""
    is_over: bool = False
    """True if the run in the folder has finished all its steps and its last evaluation."""

    @property
    def position(self) -> int:
        """The next index in the prompt stream."""
        return int(self.trainer.get("position", 0))

    @property
    def waiting(self) -> list[int]:
        """The indices in the prompt stream of earlier prompts that tail batching has deferred.

        Tail batching starts more prompts than a step trains on, and defers the slowest."""
        return list(self.trainer.get("waiting", []))


class Candidates(NamedTuple):
    """The checkpoints from which a run may start."""

    folders: list[str]
    """The newest checkpoint is first, and is used if it is not damaged."""
    goes_on: bool
    """As in Start: True if this launch continues the run in its folder."""
    is_named: bool = False
    """True if the only candidate is the checkpoint that checkpoint.resume names."""


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step` finished steps, which need not exist."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def temporary_path(checkpoint: Path) -> Path:
    """Returns the folder in which a checkpoint is written until it is complete."""
    return checkpoint.with_name(checkpoint.name + ".tmp")


def put_in_place(temporary: Path, folder: Path) -> None:
    """Syncs a complete checkpoint to the disk, and renames it to `folder`.

    If there is a checkpoint of that name already, because a run made these steps before, that
    checkpoint is set aside.
    """
    sync_to_disk(temporary)
    if folder.exists():
        set_aside(folder)
    temporary.rename(folder)
    sync_path(folder.parent)


def set_aside(checkpoint: Path) -> None:
    """Renames a checkpoint to NAME.aside, so that no later start uses it.

    An earlier NAME.aside is removed.
    """
    aside = checkpoint.with_name(checkpoint.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def remove_old(run_dir: str | Path, keep: int, best_step: int | None) -> None:
    """Removes all checkpoints except for the newest `keep` and the one of `best_step`, if there is
    a best one (checkpoint.best_metric).

    A failure is logged as a warning and does not stop the run.
    """
    for checkpoint in list_checkpoints(run_dir)[:-keep]:
        if step_of(checkpoint) != best_step:
            remove(checkpoint)


def remove(folder: Path) -> None:
    """Removes a folder with all files. A failure is logged as a warning and raises nothing."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("could not remove %s: %s", folder, error.strerror)


def is_inside(checkpoint: str | Path, run_dir: str | Path) -> bool:
    """Returns whether a checkpoint is in the checkpoints/ folder of `run_dir`."""
    return Path(checkpoint).resolve().parent.parent == Path(run_dir).resolve()


def check_same_run(checkpoint: Path, trainer: Fields, config: Fields) -> list[str]:
    """Returns one text for each key of `config` that has changed since the checkpoint was written.

    `config` is the whole config as {"section.key": value}, and `trainer` the checkpoint's
    trainer.json. Raises ConfigError for a change of a key that must not change within a run.
    """
    recorded = trainer["config"]
    # Compared by repr: 1, 1.0 and True are equal, but not the same value of a key.
    changed = [
        key
        for key in sorted(recorded.keys() | config.keys())
        if repr(recorded.get(key)) != repr(config.get(key))
        # `auto` keeps what was decided when the run began.
        and not (key in DECIDED_KEYS and config.get(key) == "auto")
        # A checkpoint of an earlier version may lack a mapping, or the name of the optimizer. The
        # default is no change.
        and not (config.get(key) in ({}, "adamw") and key not in recorded)
    ]
    for key in changed:
        is_fixed = any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED_KEYS)
        # Changing to another critic is allowed; adding or removing one is not.
        adds_or_removes = key == "critic.path" and None in (recorded.get(key), config.get(key))
        if is_fixed or adds_or_removes:
            raise ConfigError(
                f"{key} ({config.get(key)}) was {recorded.get(key)} in the run that wrote "
                f"{checkpoint}, "
                "and cannot change within a run; set it back, or start a new run_dir"
            )
    return [
        f"{key} {recorded.get(key)} -> {config.get(key)}"
        for key in changed
        if not key.startswith(("checkpoint.", "run_dir"))
        # Secrets are redacted, so they can neither be compared nor shown.
        and "<redacted>" not in (recorded.get(key), config.get(key))
    ]


def is_same_launch(run_dir: str | Path) -> bool:
    """Returns whether the folder's launch note has the id of this launch of torchrun.

    On a restart of the ranks this means that an earlier attempt of this launch began the run, or
    continued it, so that it must be continued now.
    """
    try:
        with open_regular(Path(run_dir) / _LAUNCH) as file:
            return file.read(4096).decode() == _launch_id() != ""
    # Without a note the earlier attempt failed before it wrote one, or was refused because another
    # run is in the folder.
    except (OSError, ValueError):
        return False


def find_candidates(run_dir: Path, resume: str, is_restart: bool) -> Candidates:
    """Returns the checkpoints from which the run may start, the newest first. Runs on rank 0.

    `resume` is checkpoint.resume; `is_restart` says whether torchrun has restarted the ranks. Locks
    the folder if the launch continues a run in it. Raises ConfigError if there is another run in
    the folder, or if another process holds it.
    """
    if not is_restart and is_same_launch(run_dir):
        # An earlier launch had the same id. The note is cleared, so that a restart of this launch
        # does not take that launch's note for its own.
        _lock(run_dir)
        _write_launch_id(run_dir, "")
    # True if an earlier attempt of this launch has begun the run, where `resume` says.
    has_begun = is_restart and is_same_launch(run_dir)
    is_named = resume not in ("auto", "never")
    # Then the run's own checkpoints are newer than the one that `resume` names, from which the run
    # began.
    if has_begun and list_checkpoints(run_dir):
        is_named = False
    goes_on = has_begun or resume == "auto" or (is_named and is_inside(resume, run_dir))
    if not goes_on:
        refuse_in_use(run_dir)
    if (run_dir if goes_on else run_dir / _LAUNCH).exists():
        _lock(run_dir)
    if is_named:
        return Candidates([resume], goes_on, is_named=True)
    # Listed only now, under the lock: until then another process may have saved checkpoints.
    checkpoints = list_checkpoints(run_dir) if goes_on else []
    return Candidates([str(folder) for folder in reversed(checkpoints)], goes_on)


def begin_in(run_dir: Path, start: Start) -> None:
    """Prepares the folder for a run that begins at `start`.

    If `start` is a checkpoint, it is the newest one in the folder afterwards: later ones are set
    aside, and a checkpoint of another folder is copied. Only rank 0 calls this, after all checks
    that could refuse the run. Raises ConfigError if another run is in the folder, or if another
    process holds it.
    """
    _lock(run_dir)
    if not start.goes_on:
        refuse_in_use(run_dir)
        set_attempt_aside(run_dir)
    for unfinished in (run_dir / "checkpoints").glob("step_*.tmp"):
        remove(unfinished)
    for checkpoint in list_checkpoints(run_dir):
        if step_of(checkpoint) > start.step:
            _log.warning("%s is set aside: the run goes on after step %d", checkpoint, start.step)
            set_aside(checkpoint)
    # From now on a restart by torchrun uses the newest checkpoint in the folder or, if there is
    # none, what checkpoint.resume says.
    _write_launch_id(run_dir, _launch_id())
    newest = checkpoint_path(run_dir, start.step)
    if start.folder is not None and start.folder.resolve() != newest.resolve():
        # The start may be another run's checkpoint. It is copied into this folder, so that a
        # restart before the first save starts there again, and not at step 0.
        temporary = temporary_path(newest)
        shutil.copytree(start.folder, temporary, copy_function=_link_or_copy)
        put_in_place(temporary, newest)


def let_go(run_dir: Path) -> None:
    """Releases the lock on the folder, for a process that goes on after its run has ended."""
    descriptor = _locked.pop(run_dir.resolve() / _LAUNCH, None)
    if descriptor is not None:
        os.close(descriptor)


def _lock(run_dir: Path) -> None:
    """Locks the folder until `let_go`, or until this process ends.

    Two runs in one folder would overwrite each other's checkpoints. Raises ConfigError if another
    process holds the folder.
    """
    path = run_dir.resolve() / _LAUNCH
    if path in _locked:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        raise ConfigError(f"run_dir: {path} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"run_dir: another process is running in {run_dir}; "
            "end that one first, or choose another folder"
        ) from None
    # Some file systems have no locks. Then the run goes on without this protection.
    except OSError:
        pass
    _locked[path] = descriptor


def _write_launch_id(run_dir: Path, launch_id: str) -> None:
    """Writes the id of a launch into the folder's launch note, which this process has locked."""
    # Written in place, because a new file of that name would not be locked.
    (run_dir / _LAUNCH).write_text(launch_id, encoding="utf-8")


def _launch_id() -> str:
    """Returns an id that is the same for all attempts and nodes of one launch; "" without torchrun.

    An attempt is one start of the ranks: torchrun restarts ranks that failed.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    # Every launch without --standalone or --rdzv-id has torchrun's default id, "none".
    if run_id != "none":
        return run_id
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:
        # On several nodes: the address of the store that torchrun's first agent serves.
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    # On one node: host, pid and start time of torchrun's own process, the parent of this one.
    return f"{os.uname().nodename} {os.getppid()} {read_stat(os.getppid())[1]}".rstrip()


def _link_or_copy(source: str, target: str) -> None:
    """Makes `target` a hard link to a checkpoint's file, or a copy where links do not work."""
    try:
        # Both checkpoints may share a file, since a checkpoint's files are never changed.
        os.link(source, target)
    # The target is on another file system, or on one without hard links.
    except OSError:
        shutil.copyfile(source, target)


def step_of(checkpoint: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Returns the folders of all complete checkpoints, good or damaged, in the order of steps.

    Unfinished ones (NAME.tmp) and those that were set aside (NAME.aside) are not among them.
    """
    folder = Path(run_dir) / "checkpoints"
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)]
    return sorted(paths, key=step_of)


def refuse_in_use(run_dir: Path) -> None:
    """Raises ConfigError if there is a run in the folder, which a new run would overwrite.

    A run that failed before the end of its first step does not count.
    """
    metrics = run_dir / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size
    has_failed = (run_dir / "logs" / "rank_0.log").exists() and not has_metrics
    names = [] if has_failed else ["metrics.jsonl", "config.yaml"]
    names += [f"checkpoints/{path.name}" for path in list_checkpoints(run_dir)]
    for name in names:
        if (run_dir / name).exists():
            raise ConfigError(
                f"run_dir: {run_dir} holds a {name} already, and nothing is written over; "
                "set checkpoint.resume: auto to go on with that run, choose another folder, "
                "or move it away"
            )


def set_attempt_aside(run_dir: Path) -> None:
    """Moves the files of a run that failed within its first step into a new folder failed_N.

    Its logs stay where they are, and the new run appends to them.
    """
    names = (
        "config.yaml",
        "rollouts",
        "rollout_buffer",
        "timeline.jsonl",
        "token_scores",
        "tokenizer.json",
    )
    paths = [run_dir / name for name in names if (run_dir / name).exists()]
    if paths:
        folders = (run_dir / f"failed_{number}" for number in itertools.count(1))
        folder = next(folder for folder in folders if not folder.exists())
        folder.mkdir()
        for path in paths:
            path.rename(folder / path.name)
