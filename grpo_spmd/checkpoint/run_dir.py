"""The run folder: its checkpoints, which run is in it, who holds it, and what a start leaves in it. Without torch."""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.processes import read_stat
from grpo_spmd.files import UntrustedError, open_regular, sync_path, sync_to_disk

_log = logging.getLogger("grpo_spmd")
_LAUNCH = Path("logs", "launch")
_locked: dict[Path, int] = {}  # and the descriptor of each
# What makes another run of it: the order of its prompts, its random numbers, the shape of what trains.
_FIXED_KEYS = (
    "seed",
    "data.shuffle",
    "model.lora.rank",
    "model.lora.alpha",
    "model.lora.target_modules",
)


@dataclass(frozen=True)
class Start:
    """Where a run starts: from nothing, or from a checkpoint that every rank has found good."""

    step: int = 0  # the last that is finished
    folder: Path | None = None  # the checkpoint
    trainer: dict[str, Any] = field(default_factory=dict)  # its trainer.json
    goes_on: bool = False  # with the run that its folder holds, if it holds one
    is_over: bool = False  # that run had come to its end

    @property
    def position(self) -> int:
        return int(self.trainer.get("position", 0))  # in the prompt stream

    @property
    def waiting(self) -> list[int]:
        return list(
            self.trainer.get("waiting", [])
        )  # places before it, of prompts that tail batching has left behind


@dataclass(frozen=True)
class Candidates:
    """The checkpoints that a run may start from, the best first."""

    folders: list[str]
    goes_on: bool  # as in Start
    is_named: bool = False  # checkpoint.resume names the only one


def checkpoint_path(run_dir: str | Path, step: int) -> Path:
    """Where the checkpoint after `step` finished steps is, or will be."""
    return Path(run_dir) / "checkpoints" / f"step_{step:06d}"


def temporary_path(checkpoint: Path) -> Path:
    """Where it is written until it is complete."""
    return checkpoint.with_name(checkpoint.name + ".tmp")


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give a complete folder its name, durably. One that has it, of steps that were run a second time, is set aside."""
    sync_to_disk(temporary)
    if folder.exists():
        set_aside(folder)
    temporary.rename(folder)
    sync_path(folder.parent)


def set_aside(checkpoint: Path) -> None:
    """Rename it, so that no later start takes it; replaces what was set aside before under this name."""
    aside = checkpoint.with_name(checkpoint.name + ".aside")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)


def remove_old(run_dir: str | Path, keep: int, best: int | None) -> None:
    """Leave the newest `keep` checkpoints, and that of step `best`. What cannot be removed is only worth a warning."""
    for old in list_checkpoints(run_dir)[:-keep]:
        if step_of(old) != best:
            remove(old)


def remove(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning("could not remove %s: %s", folder, error.strerror)


def is_inside(checkpoint: str | Path, run_dir: str | Path) -> bool:
    return Path(checkpoint).resolve().parent.parent == Path(run_dir).resolve()


def check_same_run(checkpoint: Path, trainer: dict[str, Any], config: dict[str, Any]) -> list[str]:
    """What of the flat `config` has changed since `trainer`, of `checkpoint`, was written, and may; one text a key.
    Raises ConfigError for a key that must stay as it was."""
    before = trainer["config"]
    changed = [
        key
        for key in sorted(before.keys() | config.keys())
        if repr(before.get(key)) != repr(config.get(key))
    ]
    for key in changed:
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in _FIXED_KEYS):
            was = f"{key} ({config.get(key)}) was {before.get(key)} in the run that wrote {checkpoint}"
            raise ConfigError(
                f"{was}, and cannot change on the way; set it back, or start a new run_dir"
            )
    if (has := config.get("critic.path") is not None) != (before.get("critic.path") is not None):
        rule = "and a critic cannot come or go on the way; set critic.path back, or start a new run_dir"
        raise ConfigError(
            f"{checkpoint} was written {'without' if has else 'with'} a critic, {rule}"
        )
    own = ("checkpoint.", "run_dir")
    changed = [
        key for key in changed if "<redacted>" not in (before.get(key), config.get(key))
    ]  # nor show a secret
    return [
        f"{key} {before.get(key)} -> {config.get(key)}"
        for key in changed
        if not key.startswith(own)
    ]


def is_same_launch(run_dir: str | Path) -> bool:
    """Whether this very launch by torchrun has begun the run: where it restarts the ranks, the run goes on."""
    try:
        with open_regular(Path(run_dir) / _LAUNCH) as file:
            return _launch_id() != "" and file.read(4096) == _launch_id().encode()
    except (OSError, UntrustedError):
        return False  # the first attempt did not come that far, or was refused because the folder is another run's


def find_candidates(run_dir: Path, resume: str, is_restart: bool) -> Candidates:
    """On rank 0: hold the folder, where a run goes on in it, and say which checkpoints may be its start. Raises
    ConfigError: the folder is another run's, or another process holds it."""
    if not is_restart and is_same_launch(run_dir):
        # An earlier launch had the same id: its note must not speak for this one's restarts.
        _lock(run_dir)
        _note_launch(run_dir, "")
    again = is_restart and is_same_launch(
        run_dir
    )  # then the run has begun, from wherever `resume` said
    is_named = resume not in ("auto", "never") and not (again and list_checkpoints(run_dir))
    goes_on = again or resume == "auto" or (is_named and is_inside(resume, run_dir))
    if not goes_on:
        refuse_in_use(run_dir)
    if run_dir.exists() if goes_on else (run_dir / _LAUNCH).exists():
        _lock(run_dir)
    if is_named:
        return Candidates([resume], goes_on, True)
    return Candidates(
        [str(folder) for folder in list_checkpoints(run_dir)[::-1]] if goes_on else [], goes_on
    )


def begin_in(run_dir: Path, start: Start) -> None:
    """On rank 0, when nothing else can be refused: the folder is this launch's, `start` its newest checkpoint. Raises
    ConfigError: another run is in it."""
    _lock(run_dir)
    if not start.goes_on:
        refuse_in_use(run_dir)
        set_attempt_aside(run_dir)
    for half in (run_dir / "checkpoints").glob("step_*.tmp"):
        remove(half)
    for beyond in list_checkpoints(run_dir):
        if step_of(beyond) > start.step:
            _log.warning("%s is set aside: the run goes on after step %d", beyond, start.step)
            set_aside(beyond)
    # From here on a restart takes the newest checkpoint; where there is none, what checkpoint.resume says.
    _note_launch(run_dir, _launch_id())
    own = checkpoint_path(run_dir, start.step)
    if start.folder is not None and start.folder.resolve() != own.resolve():
        # Of another run, say: a failure before this run's first save must come back to it, and not to the beginning.
        put_in_place(
            shutil.copytree(start.folder, temporary_path(own), copy_function=_link_or_copy), own
        )


def let_go(run_dir: Path) -> None:
    """What this process holds of the folder, when its run has ended and the process goes on."""
    if (descriptor := _locked.pop(run_dir.resolve() / _LAUNCH, None)) is not None:
        os.close(descriptor)


def _lock(run_dir: Path) -> None:
    """Hold the folder until `let_go`, or for as long as this process lives: two jobs in it would overwrite each other's
    checkpoints. Raises ConfigError where another process holds it."""
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
        text = f"run_dir: another process is running in {run_dir}; end that one first, or choose another folder"
        raise ConfigError(text) from None
    except OSError:  # a file system without locks
        pass
    _locked[path] = descriptor


def _note_launch(run_dir: Path, launch_id: str) -> None:
    (run_dir / _LAUNCH).write_text(
        launch_id, encoding="utf-8"
    )  # in place: another file would not be locked


def _launch_id() -> str:
    """The same in all attempts of one launch and on all of its nodes, hardly in another; "" without torchrun."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id != "none":  # torchrun's default, of every launch without --standalone or --rdzv-id
        return run_id
    if int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1:  # the store of torchrun's first agent
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return f"{os.uname().nodename} {os.getppid()} {read_stat(os.getppid())[1]}".rstrip()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)  # a checkpoint's files are never changed
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


# Whether a run folder is in use: by its checkpoints, and by what an attempt left that failed. Without torch.


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders that were completed, good or bad, in the order of steps: not those whose names end in .tmp or .aside."""
    folder = Path(run_dir) / "checkpoints"
    found = (
        [path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)]
        if folder.is_dir()
        else []
    )
    return sorted(found, key=step_of)


def refuse_in_use(run_dir: Path) -> None:
    """Raises ConfigError where a run has been in the folder; not for one that failed before its first step's end."""
    metrics = run_dir / "metrics.jsonl"
    has_failed = (run_dir / "logs" / "rank_0.log").exists() and not (
        metrics.exists() and metrics.stat().st_size
    )
    names = () if has_failed else ("metrics.jsonl", "config.yaml")
    for name in (*names, *(f"checkpoints/{path.name}" for path in list_checkpoints(run_dir))):
        if (run_dir / name).exists():
            remedy = "set checkpoint.resume: auto to go on with that run, choose another folder, or move it away"
            raise ConfigError(
                f"run_dir: {run_dir} holds a {name} already, and nothing is written over; {remedy}"
            )


def set_attempt_aside(run_dir: Path) -> None:
    """Keep what an attempt left that failed before its first step's end; its logs stay, and are written on."""
    names = (
        "config.yaml",
        "rollouts",
        "rollout_buffer",
        "timeline.jsonl",
        "token_scores",
        "tokenizer.json",
    )
    left = [path for name in names if (path := run_dir / name).exists()]
    if left:
        number = next(n for n in itertools.count(1) if not (run_dir / f"failed_{n}").exists())
        (run_dir / f"failed_{number}").mkdir()
        for path in left:
            path.rename(run_dir / f"failed_{number}" / path.name)
