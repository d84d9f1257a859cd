"""Runs torchrun without its own reports: shows only the ranks' output, returns their exit code.

python -m grpo_spmd.distributed.launch TORCHRUN_OPTIONS -m grpo_spmd.train ...      (by cli.py)

At Ctrl-C or SIGTERM torchrun itself would end its ranks, kill them after 30 s, and print a
traceback. Here the signal is passed on to the ranks, which save and exit. The exit code is 0 if all
ranks succeeded, 2 if they refused the user's config or command line, else 1.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Any

from grpo_spmd.config.errors import say
from grpo_spmd.distributed import interrupt, startup
from grpo_spmd.distributed.exit import exit_process


def main() -> None:
    """Runs torchrun with the command line's arguments, and exits with the ranks' exit code."""
    interrupt.listen(interrupt.quit_before_training)  # until there are ranks that handle Ctrl-C
    startup.begin("starting the ranks")
    # Exit codes are enough: without --log-dir a SIGKILL would leave a folder of error files behind.
    sys.exit(_run([f"--log-dir={os.devnull}", "--signals-to-handle=SIGQUIT", *sys.argv[1:]]))


def _run(arguments: list[str]) -> int:
    """Runs torchrun with `arguments` and returns the exit code for the ranks' outcome."""
    # torchrun would set the same value, and print a banner of six lines about it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with startup.garbage_collector_off():
        from torch.distributed import run
        from torch.distributed.elastic.agent.server import local_elastic_agent
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    class Agent(local_elastic_agent.LocalElasticAgent):
        """torchrun's agent, which here passes signals on to its ranks and waits until they exit."""

        def _start_workers(self, *args: Any, **options: Any) -> Any:
            """Starts the ranks, and installs our signal handlers in this process."""
            # Ranks inherit that SIGINT is blocked: Ctrl-C stays pending until a rank can handle it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                workers = super()._start_workers(*args, **options)
            finally:
                interrupt.listen(self._on_press)
            for number in interrupt.SIGNALS:
                # Under nohup SIGHUP is ignored, and must not reach the ranks either.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
            startup.end()  # rank 0 prints its own progress lines
            return workers

        def _on_press(self, number: int) -> None:
            """Passes Ctrl-C on to the ranks; from the third press on it kills them."""
            num_ranks = self._forward(signal.SIGINT if number < 3 else signal.SIGKILL)
            # An agent that has no ranks yet is waiting for the other nodes.
            if number > 1 and not num_ranks:
                exit_process(1)

        def _on_signal(self, number: int, _: FrameType | None) -> None:
            """Passes a signal on to the ranks. Exits with code 1 if there are none yet."""
            if not self._forward(number):
                sys.exit(1)

        def _forward(self, number: int) -> int:
            """Sends the signal `number` to this node's ranks and returns how many got it.

            After that, ranks that fail are not restarted.
            """
            self._remaining_restarts = 0
            num_ranks = 0
            for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    num_ranks += 1
            return num_ranks

    # Silence torchrun's account of which rank it ended and why: the ranks' own report says more.
    logging.disable(logging.ERROR)
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0:  # a signal ended it, so it could not report that itself
                say(f"rank {rank} was ended by {signal.Signals(-code).name}")
        return 2 if set(codes.values()) == {2} else 1
    except SignalException:
        # torchrun still handles SIGQUIT (Ctrl and backslash) itself: it has ended the ranks.
        return 1
    return 0


if __name__ == "__main__":
    main()
