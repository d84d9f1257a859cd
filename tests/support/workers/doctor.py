"""A small loop with the phases of a real one, real collectives and an FSDP update; one rank does in
step 1 what its order says.

Argument, under torchrun: an order, JSON {"do", "rank", "phase", "folder", "limit_s", "once",
"reader"}; `do` is a name of FAULTS, `once` a file that says that it was done, `reader` what is
wrong with who reads the output: it is "stalled" or "gone", or the output is "closed". Or a list of
orders: each gets two ranks, forked from here (so that torch is imported once), a store that
outlives them, and SIGTERM when the first of them has ended, as torchrun does. Prints what became of
them as JSON.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pdb
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import PHASES, WatchdogConfig
from grpo_spmd.distributed import doctor
from grpo_spmd.distributed.collectives import any_rank, barrier, exchange_bytes, on_rank0
from grpo_spmd.distributed.session import (
    Session,
    end_session,
    set_collective_timeouts,
    start_session,
)
from tests.support.processes import full_pipe


def fail() -> None:
    raise KeyError("no such column")


def refuse() -> None:
    raise ConfigError("data.train: this node lacks the file")


def fall_asleep() -> None:
    time.sleep(600)


def keep_the_gil() -> None:
    """A C call that never gives the interpreter's lock back."""
    max(itertools.repeat(0))


def talk() -> None:
    """More than a pipe holds: with the lock of stdout held, where nobody reads."""
    print("x" * 1_000_000, flush=True)


def debug() -> None:
    """Two limits long at pdb's prompt, then on."""
    commands, typed = os.pipe()
    threading.Timer(6.0, lambda: os.write(typed, b"c\n")).start()
    pdb.Pdb(stdin=os.fdopen(commands), stdout=io.StringIO(), nosigint=True).set_trace()


FAULTS: dict[str, Callable[[], None]] = {
    "pass": lambda: None,
    "raise": fail,
    "refuse": refuse,
    "sleep": fall_asleep,
    "talk": talk,
    "work": lambda: time.sleep(9),
    "gil": keep_the_gil,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(0),
    "debug": debug,
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
}


class Loop:
    def __init__(self, session: Session, order: dict[str, str]) -> None:
        self.session, self.order = session, order
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=session.mesh)
        self.step = 0
        self.done = order["do"] == "pass"

    def misbehave(self, phase: str) -> Any:
        once = "once" not in self.order or not Path(self.order["once"]).exists()
        if (
            self.step == 1
            and phase == self.order["phase"]
            and str(self.session.rank) == self.order["rank"]
            and not self.done
            and once
        ):
            self.done = True
            Path(self.order["folder"], "when").write_text(str(time.time()))
            if "once" in self.order:
                Path(self.order["once"]).touch()
            FAULTS[self.order["do"]]()

    def run(self, phase: str) -> None:
        doctor.enter_phase(phase, self.step)
        if phase == "update":
            # inside FSDP's backward
            handle = self.model[1].register_full_backward_hook(lambda *_: self.misbehave(phase))
            self.model(torch.ones(4, 8)).sum().backward()
            handle.remove()
        elif phase == "reward":
            on_rank0(
                lambda _: self.misbehave(phase), None
            )  # rank 0: while the others wait for what it computes
            self.misbehave(phase)
        elif (
            self.order["do"] == "work" and phase == self.order["phase"]
        ):  # as a generation: no collective ends it
            self.misbehave(phase)
            doctor.enter_phase(f"after {phase}", self.step)
            return
        else:
            self.misbehave(phase)
            exchange_bytes([b"x"] * self.session.world_size)
        barrier()
        doctor.enter_phase(f"after {phase}", self.step)


def main(order: dict[str, str]) -> None:
    limits = dict.fromkeys(PHASES, 1800.0)
    if order["do"] == "work":
        limits = dict.fromkeys(PHASES, float(order["limit_s"])) | {order["phase"]: 60.0}
    elif "limit_s" in order:  # of this phase alone: on a busy machine any of them may take seconds
        limits[order["phase"]] = float(order["limit_s"])
    watchdog = WatchdogConfig(timeout_s=1800.0, phase_timeouts_s=limits)
    session = start_session(watchdog=watchdog)
    set_collective_timeouts(watchdog)
    if not order.get("default_sigterm"):
        signal.signal(signal.SIGTERM, lambda *_: None)  # as preemption.py: a flag
    loop = Loop(session, order)
    doctor.write_reports_to(Path(order["folder"]))
    for loop.step in range(2):
        for phase in PHASES:
            loop.run(phase)
    assert not any_rank(False)
    message = f"rank {session.rank} done, restart {session.is_restart}"
    print(f"{message}\n", end="", flush=True)  # one write: the ranks share a file
    end_session()


def run_as_torchrun(order: dict[str, str]) -> dict[str, object]:
    """In a process of its own: a store, two ranks, SIGTERM to the other when one ends."""
    folder = Path(order["folder"])
    folder.mkdir()
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if "reader" in order:
        reader, output = full_pipe()
        if order["reader"] != "stalled":
            os.close(reader)
    os.dup2(output, 1)
    os.dup2(output, 2)
    port_out, port_in = os.pipe()
    store_pid = os.fork()
    if store_pid == 0:
        store = torch.distributed.TCPStore(
            "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
        )
        os.write(port_in, str(store.port).encode())
        time.sleep(600)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=os.read(port_out, 100).decode(),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    ranks = {}
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                TORCHELASTIC_ERROR_FILE=str(folder / f"error_{rank}.json"),
            )
            if order.get("reader") == "closed":
                os.closerange(0, 3)
            with doctor.exit_with_outcome():
                main(order)
        ranks[pid] = rank
    codes = [0, 0]
    while ranks:
        pid, status = os.wait()
        if pid in ranks:
            codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            for second in ranks:
                os.kill(second, signal.SIGTERM)
    ended = time.time()
    os.kill(store_pid, signal.SIGKILL)
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    return {"codes": codes, "seconds": ended - float(texts.get("when", ended)), **texts}


def run_many(orders: list[dict[str, str]], at_once: int = 10) -> None:
    waiting, running = list(orders), set[int]()
    while waiting or running:
        if waiting and len(running) < at_once:
            order = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                as_torchrun = run_as_torchrun(order)
                Path(order["folder"], "found.json").write_text(json.dumps(as_torchrun))
                os._exit(0)
            running.add(pid)
        else:
            running.remove(os.wait()[0])
    print(
        json.dumps(
            [json.loads(Path(order["folder"], "found.json").read_text()) for order in orders]
        )
    )


if __name__ == "__main__":
    argument = json.loads(sys.argv[1])
    if isinstance(argument, list):
        run_many(argument)
    else:
        Path(argument["folder"]).mkdir(exist_ok=True)
        with doctor.exit_with_outcome():
            main(argument)
