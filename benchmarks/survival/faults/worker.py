"""A rank of a run under faults: grpo_spmd.train as it is, in a process that dies where the harness
has planned it.

    FAULTS=FOLDER torchrun ... -m benchmarks.survival.faults.worker --config FILE run_dir=FOLDER/run
    ...
FOLDER/plan/*.json are faults, and each happens once: the first that is left is the one of this
start. FOLDER/events.jsonl gets what rank 0 finds at each start, before the training looks at
anything, and the step that the run then goes on from. The product has no hooks: its functions are
wrapped here.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_spmd import train as train_module
from grpo_spmd.checkpoint import manifest
from grpo_spmd.checkpoint import run_dir as run_dir_module

PHASES = ("weight_sync", "eval", "rollout", "reward", "logprobs", "update", "checkpoint")
# Of the background write, in its order. The last one: half of an old checkpoint's files are gone.
WRITE_POINTS = (
    "write: before the shard",
    "write: in the shard",
    "write: before the manifest",
    "write: before the rename",
    "write: after the rename",
    "write: removing an old one",
)
START = "start"
# Of a start and an end, with the seconds within which a fault strikes there.
LONG_PLACES = {
    "engine start": 2.0,
    "model build": 0.2,
    "end: before it": 0.0,
    "end: in vLLM's": 0.2,
    "end: of the session": 0.02,
}
_RANK0_POINTS = WRITE_POINTS[2:]


def has_rank(location: str, rank: int) -> bool:
    """Whether this rank ever comes there."""
    return rank == 0 or location not in _RANK0_POINTS


class PlannedError(Exception):
    """What a fault of the kind "raise" raises."""


class Trap:
    """The fault of this start, sprung at the planned time that its place is come to: {"rank",
    "where", "count", "moment", "do"}.

    "moment" is the share of the place's usual duration after which it strikes; if the place is left
    before, it strikes then. "do" is "kill", "stop", "raise", "sleep" or a shell command; those
    after the first two act as the place is entered.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        remaining = sorted((folder / "plan").glob("*.json"))
        self._path = remaining[0] if remaining else None
        self._fault: dict[str, Any] = json.loads(self._path.read_text()) if self._path else {}
        if self._fault.get("rank") != rank:
            self._fault = {}
        self._visits = 0
        self._in_step: dict[str, int] = {}
        self._usual_s: dict[tuple[str, int], float] = {}

    @property
    def where(self) -> str | None:
        return self._fault.get("where")

    @property
    def moment(self) -> float:
        return float(self._fault["moment"])

    def is_due(self, location: str) -> bool:
        """Counts the visit."""
        if location != self.where:
            return False
        self._visits += 1
        return self._visits == int(self._fault["count"])

    def strike(self) -> None:
        if not self._fault:
            return
        assert self._path is not None
        label, self._fault = self._fault["do"], {}
        self._path.rename(
            self._path.with_suffix(".struck")
        )  # another thread that comes here too finds nothing
        os.utime(self._path.with_suffix(".struck"))
        if label == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif label == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif label == "raise":
            raise PlannedError("planned")
        elif label == "sleep":
            time.sleep(10_000)
        else:
            subprocess.run(label, shell=True, check=True)

    def strike_after(self, seconds: float) -> None:
        timer = threading.Timer(seconds, self.strike)
        timer.daemon = True
        timer.start()

    @contextmanager
    def inside(self, phase: str) -> Iterator[None]:
        """Around the block of a phase, which has several a step."""
        if phase == PHASES[0]:
            self._in_step.clear()
        position = phase, self._in_step.setdefault(phase, 0)
        self._in_step[phase] += 1
        start = time.perf_counter()
        if not self.is_due(phase):
            yield
        elif self._fault["do"] not in ("kill", "stop"):
            self.strike()
            yield
        else:
            self.strike_after(self.moment * self._usual_s.get(position, 0.05))
            yield
            self.strike()
        self._usual_s[position] = time.perf_counter() - start


def main() -> None:
    # until the run starts: a fifth of a start is collecting garbage that imports do not make
    gc.disable()
    folder, rank = Path(os.environ["FAULTS"]), int(os.environ.get("RANK", "0"))
    if rank == 0:
        _tell(folder, {"event": "start", **_state_of(folder / "run")})
    trap = Trap(folder, rank)
    if trap.where == START:
        trap.strike_after(trap.moment * float(os.environ["FAULTS_START_S"]))
    os.environ["THP_MEM_ALLOC_ENABLE"] = "1"  # as the command sets it before it imports torch
    _wrap(trap, folder, rank)
    train_module.main()


def _state_of(run_dir: Path) -> dict[str, Any]:
    """What a kill has left: the newest complete checkpoint and whether it is good, and how many
    steps have a line in
    metrics.jsonl."""
    checkpoints = run_dir_module.list_checkpoints(run_dir)
    damage = None
    if checkpoints:
        try:
            manifest.verify_checkpoint(checkpoints[-1])
        except manifest.CheckpointError as error:
            damage = str(error)
    metrics, finished = run_dir / "metrics.jsonl", 0
    for line in metrics.read_bytes().splitlines() if metrics.exists() else []:
        try:
            finished = max(finished, json.loads(line)["step"])
        except ValueError:  # cut short by the kill
            continue
    return {
        "newest": run_dir_module.step_of(checkpoints[-1]) if checkpoints else None,
        "damage": damage,
        "finished": finished,
        "half_written": [path.name for path in (run_dir / "checkpoints").glob("*.tmp")],
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _tell(folder: Path, event: dict[str, Any]) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({**event, "time": time.time()}) + "\n")


def _wrap(trap: Trap, folder: Path, rank: int) -> None:
    """The places of a fault; a name that the product no longer has raises AttributeError here."""
    from grpo_spmd.checkpoint import save as checkpoint
    from grpo_spmd.observe.memory import PhaseTimer

    phase, load = PhaseTimer.__call__, checkpoint.Checkpoints.load

    @contextmanager
    def phase_with_trap(self: Any, name: str) -> Iterator[None]:
        if trap.where == START:
            trap.strike()
        with phase(self, name), trap.inside(name):
            yield

    def load_and_tell(self: Any, start: Any) -> None:
        load(self, start)
        if rank == 0:
            _tell(folder, {"event": "resumed", "step": start.step})
        gc.enable()

    PhaseTimer.__call__ = phase_with_trap  # type: ignore[method-assign]
    checkpoint.Checkpoints.load = load_and_tell  # type: ignore[method-assign]
    from grpo_spmd import parts

    _during(parts.RolloutEngine, "__init__", trap, "engine start")
    _during(parts, "build_policy", trap, "model build")
    _during(parts.Run, "close", trap, "end: before it")
    _during(parts.RolloutEngine, "shutdown", trap, "end: in vLLM's")
    _during(parts, "end_session", trap, "end: of the session")
    _around(checkpoint, "write_shard", trap, old="write: before the shard")
    _around(checkpoint, "write_manifest", trap, old="write: before the manifest")
    _around(run_dir_module, "sync_to_disk", trap, after="write: before the rename")
    _around(checkpoint, "put_in_place", trap, after="write: after the rename")
    _in_the_shard(trap)
    _in_the_removal(trap)


def _during(owner: Any, name: str, trap: Trap, location: str) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not trap.is_due(location):
            return original(*args, **kwargs)
        trap.strike_after(trap.moment * LONG_PLACES[location])
        result = original(*args, **kwargs)
        trap.strike()
        return result

    setattr(owner, name, wrapped)


def _around(module: ModuleType, name: str, trap: Trap, old: str = "", after: str = "") -> None:
    original = getattr(module, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if trap.is_due(old):
            trap.strike()
        result = original(*args, **kwargs)
        if trap.is_due(after):
            trap.strike()
        return result

    setattr(module, name, wrapped)


def _in_the_shard(trap: Trap) -> None:
    """A piece of the file is hashed when it has been written: strike after a drawn one."""
    from grpo_spmd.checkpoint import save as checkpoint
    from grpo_spmd.checkpoint import state

    original, pieces_left = checkpoint.write_shard, [0]

    class Digest:
        def __init__(self) -> None:
            self._digest = hashlib.sha256()

        def update(self, piece: Any) -> None:
            self._digest.update(piece)
            pieces_left[0] -= 1
            if pieces_left[0] == 0:
                trap.strike()

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    class Hashlib:
        @staticmethod
        def sha256(data: bytes = b"") -> Any:
            return Digest() if pieces_left[0] > 0 else hashlib.sha256(data)

    def write_shard(
        path: Path, tensors: dict[str, Any], first_rows: dict[str, int]
    ) -> dict[str, Any]:
        if trap.is_due("write: in the shard"):
            pieces_left[0] = 1 + int(
                trap.moment * (len(tensors) + 1)
            )  # its length and its header come first
        return original(path, tensors, first_rows)

    state.hashlib = Hashlib  # type: ignore[assignment]
    checkpoint.write_shard = write_shard


def _in_the_removal(trap: Trap) -> None:
    original = run_dir_module.remove

    def remove(folder: Path) -> None:
        if not folder.name.endswith(".tmp") and trap.is_due("write: removing an old one"):
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            for path in files[: 1 + int(trap.moment * (len(files) - 1))]:
                path.unlink()
            shutil.rmtree(folder / "model", ignore_errors=True)
            trap.strike()
        original(folder)

    run_dir_module.remove = remove


if __name__ == "__main__":
    sys.argv[0] = "grpo_spmd.train"
    main()
