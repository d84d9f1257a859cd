"""How launched ranks talk over torch's store, with a deadline for each wait; clocks and the shared
run folder of several nodes."""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.tools.checkup.disk import nearest_folder, scratch_in
from grpo_spmd.tools.checkup.file_trial import lock_and_append
from grpo_spmd.tools.checkup.launch import Launch
from grpo_spmd.tools.checkup.merge import Findings, format_ranks, name_ranks
from grpo_spmd.tools.checkup.results import Result, Target, bad, join_items, ok, warning

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.02
_CLOCK_ROUNDS = 5
_SKEW_S = 0.5
_CLOCK_S = 10.0
_TURN_S = 120.0  # until rank 0 comes to a node's clock
_NUM_LINES = 20


class Exchange:
    """Values that ranks post under a key, for rank 0 to gather; rank 0's are for all to hear.

    Polls, because a wait inside the store would not notice signals.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int) -> None:
        self.store, self.rank, self.num_ranks = store, rank, num_ranks

    def post(self, key: str, value: Any) -> None:
        self.store.set(f"{key}/{self.rank}", json.dumps(value))

    def gather(
        self, key: str, seconds: float, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Values of the ranks that have posted within `seconds`."""
        deadline = time.monotonic() + seconds
        values: dict[int, Any] = {}
        for rank in range(self.num_ranks) if ranks is None else ranks:
            name = f"{key}/{rank}"
            # After the deadline each rank is still asked once.
            while not (is_there := self.store.check([name])) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
            if is_there:
                values[rank] = json.loads(self.store.get(name))
        return values

    def hear(self, key: str, seconds: float) -> Any:
        """What rank 0 has posted. Raises TimeoutError."""
        values = self.gather(key, seconds, [0])
        if not values:
            raise TimeoutError(f"rank 0 said nothing of {key!r} within {seconds:g} s")
        return values[0]


# Clocks


def answer_clock(store: dist.Store, rank: int, clock: Callable[[], float] = time.time) -> None:
    """Tell rank 0 this node's time. Raises RuntimeError if rank 0 does not ask."""
    for number in range(_CLOCK_ROUNDS):
        limit = timedelta(seconds=_CLOCK_S if number else _TURN_S)
        store.wait([f"clock/{rank}/{number}/ask"], limit)
        store.set(f"clock/{rank}/{number}/answer", repr(clock()))


def measure_clocks(
    store: dist.Store, ranks: Sequence[int], clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Skew against rank 0's clock and its uncertainty, in seconds, for each rank that answers."""
    skews: dict[int, tuple[float, float]] = {}
    for rank in ranks:
        rounds: list[tuple[float, float]] = []
        with suppress(RuntimeError):
            for number in range(_CLOCK_ROUNDS):
                key = f"clock/{rank}/{number}"
                start = clock()
                store.set(f"{key}/ask", "")
                store.wait([f"{key}/answer"], timedelta(seconds=_CLOCK_S))
                end = clock()
                # The answer was given at some time between start and end.
                answer = float(store.get(f"{key}/answer"))
                rounds.append((answer - (start + end) / 2, (end - start) / 2))
            skews[rank] = min(rounds, key=lambda measured: measured[1])
    return skews


def check_clocks(store: dist.Store, leaders: Sequence[int], findings: Findings) -> Iterator[Result]:
    """By rank 0: compares the clocks of all nodes. `leaders`: the first ranks of other nodes."""
    if not leaders:
        return
    skews = measure_clocks(store, leaders)
    silent = [rank for rank in leaders if rank not in skews]
    if silent:
        yield warning(
            "clocks",
            f"{name_ranks(silent, findings)} did not answer within {_CLOCK_S:g} s",
            "see its output",
        )
    off = [
        f"{findings[rank].host} {skew:+.1f} s"
        for rank, (skew, uncertainty) in skews.items()
        if abs(skew) - uncertainty > _SKEW_S
    ]
    if off:
        yield warning(
            "clocks",
            f"against {findings[0].host}: {join_items(off, 4)}: times of logs, dumps and locks "
            "do not agree",
            "chronyc tracking; systemctl restart chronyd",
        )
    elif skews:
        bound = max(abs(skew) + uncertainty for skew, uncertainty in skews.values())
        yield ok("clocks", f"of {len(skews) + 1} nodes agree within {1e3 * bound:.2g} ms")


# The run folder


def _line_of(rank: int) -> str:
    return f"rank {rank}{'.' * 100}"


def try_folder(folder: str, rank: int) -> str:
    """Try rank 0's scratch folder from this node: "unseen", or the answer of lock_and_append."""
    if not (Path(folder) / "lock").exists():
        return "unseen"
    try:
        return lock_and_append(folder, _line_of(rank), _NUM_LINES)
    except OSError as error:
        return str(error)


def check_shared_folder(
    exchange: Exchange,
    target: Target,
    leaders: Sequence[int],
    findings: Findings,
    seconds: float,
) -> Iterator[Result]:
    """By rank 0: whether the other nodes see the same run_dir, its locks and appended lines."""
    name, folder = "shared run_dir", nearest_folder(target.run_dir)
    try:
        with scratch_in(folder) as scratch, open(scratch / "lock", "w") as lock:
            (scratch / "appended").touch()
            with suppress(OSError):
                # Held until the others have tried it.
                fcntl.flock(lock, fcntl.LOCK_EX)
            exchange.post("folder", str(scratch))
            answers = exchange.gather("folder", seconds, leaders)
            lines = (scratch / "appended").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        # The others wait for this answer.
        exchange.post("folder", None)
        yield bad(name, f"rank 0 cannot write in {folder}: {error.strerror}", "see run_dir above")
        return
    blind = [rank for rank in leaders if answers.get(rank, "unseen") == "unseen"]
    if blind:
        verb = "does" if len(blind) == 1 else "do"
        yield bad(
            name,
            f"{name_ranks(blind, findings)} {verb} not see what rank 0 writes in {folder}",
            "a run_dir on a file system that all nodes mount at the same path",
        )
        return
    expected = {_line_of(rank) for rank in leaders}
    num_lines = _NUM_LINES * len(leaders)
    lost = num_lines - sum(line in expected for line in lines)
    if lost:
        yield warning(
            name,
            f"{lost} of {num_lines} lines that nodes appended to one file are lost or mixed",
            "nodes write files of their own; keep other jobs out of run_dir",
        )
    unlocked = [rank for rank, answer in answers.items() if answer != "held"]
    if unlocked:
        yield warning(
            name,
            f"{name_ranks(unlocked, findings)} does not see rank 0's lock: two jobs in one "
            "run_dir would not notice",
            "mount it with locks (NFS: without nolock; Lustre: -o flock)",
        )
    if not lost and not unlocked:
        yield ok(name, f"all {len(leaders) + 1} nodes see it, its locks and its appended lines")


def missing_ranks_result(missing: Sequence[int], seconds: float, launch: Launch) -> Result:
    nodes = sorted({rank // max(1, launch.local_ranks) for rank in missing})
    finding = format_ranks(missing)
    if launch.num_ranks > launch.local_ranks:
        finding += f" (node {join_items(nodes)}, counted from 0)"
    return bad(
        "ranks",
        f"{finding} did not come within {seconds:g} s",
        "see its output; does its host reach MASTER_ADDR:MASTER_PORT? --deadline waits longer",
    )
