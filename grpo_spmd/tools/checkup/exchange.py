"""How ranks that torchrun or srun started bring together what they found: over a store, each wait with a deadline."""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.command_line import number_of_ranks
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools.checkup.disk import nearest, scratch_in
from grpo_spmd.tools.checkup.results import Place, Result, listed
from grpo_spmd.tools.checkup.together import Rank, as_ranges, named

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.02
_ROUNDS, _SKEW_S, _CLOCK_S, _TURN_S = 5, 0.5, 10.0, 120.0
_LINE = "of rank {rank}" + "." * 100


@dataclass(frozen=True)
class Ranks:
    """Of one launch; `serves_store`: rank 0, where no agent of torchrun keeps the store."""

    rank: int
    num_ranks: int
    local_rank: int
    local_ranks: int
    environ: Mapping[str, str]
    serves_store: bool


def launched(environ: Mapping[str, str]) -> Ranks | None:
    """By torchrun or srun; None where this process is alone. Raises ConfigError."""
    if "RANK" in environ:
        size = number_of_ranks()
        if size == 1:
            return None
        if not environ.get("MASTER_ADDR") or not environ.get("MASTER_PORT", "").isdecimal():
            raise ConfigError(
                "RANK is set, and MASTER_ADDR or MASTER_PORT is not; torchrun sets all: unset RANK alone"
            )
        local = int(environ.get("LOCAL_RANK", "0")), int(environ.get("LOCAL_WORLD_SIZE", str(size)))
        has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        rank = int(environ["RANK"])
        return Ranks(rank, size, *local, environ, serves_store=rank == 0 and not has_agent)
    text = environ.get("SLURM_STEP_NUM_TASKS", "1")
    if (
        not text.isdecimal() or int(text) < 2
    ):  # a batch script has no step; SLURM_NTASKS is there all the same
        return None
    rank, node = int(environ.get("SLURM_PROCID", "0")), int(environ.get("SLURM_NODEID", "0"))
    tasks = [
        int(count)
        for count, times in re.findall(
            r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", text)
        )
        for _ in range(int(times or 1))
    ]
    job = int(environ.get("SLURM_JOB_ID", "0")) + int(environ.get("SLURM_STEP_ID", "0"))
    own = {
        "MASTER_ADDR": first_host(
            environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        ),
        "MASTER_PORT": str(20000 + job % 20000),
        "WORLD_SIZE": text,
    }
    own |= {name: environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if environ.get(name)}
    local_ranks = tasks[node] if node < len(tasks) else 1
    local_rank = int(environ.get("SLURM_LOCALID", "0"))
    return Ranks(
        rank, int(text), local_rank, local_ranks, {**environ, **own}, serves_store=rank == 0
    )


def first_host(nodes: str) -> str:
    """Of Slurm's list: "node[03-05,9],login1" is node03."""
    found = re.match(r"([^,\[]*)(?:\[(\d+)[^\]]*\])?([^,]*)", nodes)
    return "".join(part or "" for part in found.groups()) if found and nodes else "127.0.0.1"


class Exchange:
    """What each rank says under a name, for rank 0 to gather; what rank 0 says, for all to hear."""

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks

    def post(self, what: str, value: Any) -> None:
        self.store.set(f"{what}/{self.rank}", json.dumps(value))

    def gather(
        self, what: str, seconds: float, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Of the ranks that have spoken by then, in order; the others are not in it."""
        missing = {*(range(self.num_ranks) if ranks is None else ranks)}
        found: dict[int, Any] = {}
        deadline = time.monotonic() + seconds
        while missing:
            is_last = time.monotonic() > deadline
            for rank in sorted(missing):
                if self.store.check([f"{what}/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"{what}/{rank}"))
                elif not is_last:
                    break  # one question a turn while it is not there
            missing -= found.keys()
            if is_last:
                break
            if missing:
                time.sleep(_POLL_S)
        return dict(sorted(found.items()))

    def say(self, what: str, value: Any) -> None:
        self.store.set(f"said/{what}", json.dumps(value))

    def hear(self, what: str, seconds: float) -> Any:
        """What rank 0 said. Raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while not self.store.check([f"said/{what}"]):
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank 0 said nothing of {what!r} within {seconds:g} s")
            time.sleep(_POLL_S)
        return json.loads(self.store.get(f"said/{what}"))


def ask_clock(store: dist.Store, rank: int, clock: Callable[[], float] = time.time) -> None:
    """Of one rank a node, while rank 0 is in `clocks_of`: its clock less rank 0's, and how far that may be off."""
    best = (0.0, float("inf"))
    for number in range(_ROUNDS):
        _awaited(store, f"clock/turn/{rank}", _TURN_S)  # so that its own waiting is not counted
        before = clock()
        store.set(f"clock/ask/{rank}/{number}", "")
        there = float(_awaited(store, f"clock/answer/{rank}/{number}"))
        after = clock()
        best = min(
            best, ((before + after) / 2 - there, (after - before) / 2), key=lambda each: each[1]
        )
    store.set(f"clock/{rank}", json.dumps(best))


def _awaited(store: dist.Store, key: str, seconds: float = _CLOCK_S) -> bytes:
    """Raises RuntimeError where nobody sets it in time."""
    store.wait([key], timedelta(seconds=seconds))
    return bytes(store.get(key))


def clocks_of(
    store: dist.Store, ranks: Sequence[int], clock: Callable[[], float] = time.time
) -> dict[int, list[float]]:
    """Of each of `ranks` (skew, uncertainty), in seconds, by rank 0; those that do not answer are not in it."""
    found: dict[int, list[float]] = {}
    for rank in ranks:
        store.set(f"clock/turn/{rank}", "")
        with suppress(RuntimeError):
            for number in range(_ROUNDS):
                _awaited(store, f"clock/ask/{rank}/{number}")
                store.set(f"clock/answer/{rank}/{number}", repr(clock()))
            found[rank] = json.loads(_awaited(store, f"clock/{rank}"))
    return found


def of_clocks(
    store: dist.Store, leaders: Sequence[int], of: Mapping[int, Rank]
) -> Iterator[Result]:
    """By rank 0: one line for the clocks of all nodes, where there are several."""
    if not leaders:
        return
    skews = clocks_of(store, leaders)
    if silent := [rank for rank in leaders if rank not in skews]:
        yield Result(
            "clocks",
            "warning",
            f"{named(silent, of)} did not answer within {_CLOCK_S:g} s",
            "see its output",
        )
    off = {
        rank: skew
        for rank, (skew, uncertainty) in skews.items()
        if abs(skew) - uncertainty > _SKEW_S
    }
    if off:
        shown = listed((f"{of[rank].host} {skew:+.1f} s" for rank, skew in off.items()), 4)
        what = f"against {of[0].host}: {shown}: times of logs, dumps and locks do not agree"
        yield Result("clocks", "warning", what, "chronyc tracking; systemctl restart chronyd")
    elif skews:
        largest = max(abs(skew) + uncertainty for skew, uncertainty in skews.values())
        yield Result(
            "clocks", "ok", f"of {len(skews) + 1} nodes agree within {1e3 * largest:.2g} ms"
        )


def try_folder(folder: str, rank: int) -> dict[str, Any]:
    """What this node sees of rank 0's folder in run_dir: the file in it, the lock on it, and a line appended to it."""
    own = Path(folder)
    seen = {"seen": (own / "of_rank_0").exists()}
    if not seen["seen"]:
        return seen
    try:
        with open(own / "of_rank_0") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        seen["locked"] = False
    except OSError:
        seen["locked"] = True
    with suppress(OSError):
        descriptor = os.open(own / "appended", os.O_WRONLY | os.O_APPEND)
        for _ in range(20):
            os.write(descriptor, (_LINE.format(rank=rank) + "\n").encode())
        os.close(descriptor)
    return seen


def shared_folder(
    exchange: Exchange, place: Place, leaders: Sequence[int], of: Mapping[int, Rank], seconds: float
) -> Iterator[Result]:
    """By rank 0: whether the other nodes see its run_dir, and the same one."""
    there = nearest(place.run_dir)
    try:
        with scratch_in(there) as folder, open(folder / "of_rank_0", "w") as lock:
            (folder / "appended").touch()
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            exchange.say("folder", str(folder))
            saw = exchange.gather("folder", seconds, leaders)
            lines = (folder / "appended").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        exchange.say("folder", None)
        yield Result(
            "shared run_dir",
            "bad",
            f"rank 0 cannot write in {there}: {error.strerror}",
            "see run_dir above",
        )
        return
    silent = [rank for rank in leaders if rank not in saw]
    blind = [rank for rank, seen in saw.items() if not seen["seen"]]
    if silent or blind:
        who = f"{named(blind or silent, of)} {'does' if len(blind or silent) == 1 else 'do'} not see what rank 0 writes"
        what = f"{who} in {there}"
        yield Result(
            "shared run_dir",
            "bad",
            what,
            "a run_dir on a file system that all nodes mount at the same path",
        )
        return
    lost = 20 * len(saw) - sum(line in {_LINE.format(rank=rank) for rank in saw} for line in lines)
    if lost:
        what = f"{lost} of {20 * len(saw)} lines that nodes appended to one file are lost or mixed"
        yield Result(
            "shared run_dir",
            "warning",
            what,
            "nodes write files of their own; keep other jobs out of run_dir",
        )
    unlocked = [rank for rank, seen in saw.items() if not seen["locked"]]
    if unlocked:
        what = f"{named(unlocked, of)} does not see rank 0's lock: two jobs in one run_dir would not notice"
        yield Result(
            "shared run_dir",
            "warning",
            what,
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
        )
    if not lost and not unlocked:
        yield Result(
            "shared run_dir",
            "ok",
            f"all {len(saw) + 1} nodes see it, its locks and its appended lines",
        )


def of_missing(missing: Sequence[int], seconds: float, ranks: Ranks) -> Result:
    nodes = sorted({rank // max(1, ranks.local_ranks) for rank in missing})
    where = (
        f" (node {listed(nodes)}, counted from 0)" if ranks.num_ranks > ranks.local_ranks else ""
    )
    what = f"{as_ranges(missing)}{where} did not come within {seconds:g} s"
    return Result(
        "ranks",
        "bad",
        what,
        "see its output; does its host reach MASTER_ADDR:MASTER_PORT? --deadline waits longer",
    )
