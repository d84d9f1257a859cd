"""torchrun without its own reports: what ranks say is all that is shown, and their exit code is the launcher's.

python -m grpo_spmd.distributed.launch TORCHRUN_OPTIONS -m grpo_spmd.train ...      (by cli.py)

torchrun ends its ranks at Ctrl-C or SIGTERM, kills them after 30 s, and prints a traceback. Here the signal goes to the
ranks, who save and leave: 0 where they did, 2 where they refused what a user typed, else 1.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from types import FrameType
from typing import Any

from grpo_spmd.config.errors import say
from grpo_spmd.distributed import interrupt, startup
from grpo_spmd.distributed.exit import exit_process
from grpo_spmd.distributed.startup import garbage_collector_off

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def main() -> None:
    folder = tempfile.mkdtemp(prefix="grpo_spmd_")  # of error files; torchrun leaves its own behind

    def quit_alone(number: int) -> None:
        """At Ctrl-C, where there is no rank that could answer it."""
        shutil.rmtree(folder, ignore_errors=True)
        interrupt.quit_before_training(number)

    interrupt.listen(quit_alone)
    startup.begin("starting the ranks")
    code = 1
    try:
        code = _run([f"--log-dir={folder}", "--signals-to-handle=SIGQUIT", *sys.argv[1:]], folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(code)


def _run(arguments: list[str], folder: str) -> int:
    os.environ.setdefault(
        "OMP_NUM_THREADS", "1"
    )  # torchrun sets the same, with a banner of six lines
    with garbage_collector_off():
        from torch.distributed import run
        from torch.distributed.elastic.agent.server import local_elastic_agent
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    class Agent(local_elastic_agent.LocalElasticAgent):
        """Gives its ranks the signals that it gets, and waits."""

        def _start_workers(self, *args: Any, **options: Any) -> Any:
            # A rank takes Ctrl-C over from its parent as soon as it can answer it: until then it is pending.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                started = super()._start_workers(*args, **options)
            finally:
                interrupt.listen(self._on_press)
            for number in _FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                    signal.signal(number, self._on_signal)
            startup.end()  # rank 0 has one of its own
            return started

        def _on_press(self, number: int) -> None:
            num_there = self._forward(signal.SIGINT if number < 3 else signal.SIGKILL)
            if number > 1 and not num_there:  # it waits for the other nodes
                shutil.rmtree(folder, ignore_errors=True)
                exit_process(1)

        def _on_signal(self, number: int, _: FrameType | None) -> None:
            if not self._forward(number):
                sys.exit(1)

        def _forward(self, number: int) -> int:
            """How many ranks are there to take it. No rank is started again after it."""
            self._remaining_restarts, num_there = 0, 0
            for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    num_there += 1
            return num_there

    logging.disable(
        logging.ERROR
    )  # its account of who was ended and why: the ranks' report says it better
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        failed = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in failed.items():
            if code < 0:  # it could not say so itself
                say(f"rank {rank} was ended by {signal.Signals(-code).name}")
        return 2 if set(failed.values()) == {2} else 1
    except (
        SignalException
    ):  # SIGQUIT (Ctrl and backslash), which torchrun still takes: it has ended the ranks
        return 1
    return 0


if __name__ == "__main__":
    main()
