"""torchrun without its own reports: shows only the ranks' words, and returns their exit code.

python -m grpo_spmd.distributed.launch TORCHRUN_OPTIONS -m grpo_spmd.train ...      (by cli.py)

At Ctrl-C or SIGTERM torchrun ends its ranks, kills them after 30 s, and prints a traceback. Here
the signal goes to the ranks, which save and exit. The exit code is 0 if they did, 2 if they refused
what a user typed, else 1.
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
    """Runs torchrun on the arguments, and exits with the ranks' code."""
    interrupt.listen(interrupt.quit_before_training)  # while there is no rank that could answer
    startup.begin("starting the ranks")
    # Without a folder of error files, which a SIGKILL would leave behind: exit codes are enough.
    sys.exit(_run([f"--log-dir={os.devnull}", "--signals-to-handle=SIGQUIT", *sys.argv[1:]]))


def _run(arguments: list[str]) -> int:
    # torchrun sets the same, with a banner of six lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with startup.garbage_collector_off():
        from torch.distributed import run
        from torch.distributed.elastic.agent.server import local_elastic_agent
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    class Agent(local_elastic_agent.LocalElasticAgent):
        """Agent that passes signals on to its ranks, and waits for them."""

        def _start_workers(self, *args: Any, **options: Any) -> Any:
            # Ranks inherit the blocked signal. Ctrl-C stays pending until a rank can answer it.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                workers = super()._start_workers(*args, **options)
            finally:
                interrupt.listen(self._on_press)
            for number in interrupt.SIGNALS:
                # nohup ignores SIGHUP, and so must the ranks.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, self._on_signal)
            startup.end()  # rank 0 has its own lines
            return workers

        def _on_press(self, number: int) -> None:
            num_ranks = self._forward(signal.SIGINT if number < 3 else signal.SIGKILL)
            # Without ranks it waits for the other nodes.
            if number > 1 and not num_ranks:
                exit_process(1)

        def _on_signal(self, number: int, _: FrameType | None) -> None:
            if not self._forward(number):
                sys.exit(1)

        def _forward(self, number: int) -> int:
            """Sends a signal to the ranks and returns how many got it.

            No rank is started again after it.
            """
            self._remaining_restarts = 0
            num_ranks = 0
            for pid in self._pcontext.pids().values() if self._pcontext is not None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                    num_ranks += 1
            return num_ranks

    # torchrun's account of who was ended and why. The ranks' report says it better.
    logging.disable(logging.ERROR)
    api.LocalElasticAgent = Agent  # type: ignore[misc]
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for rank, code in codes.items():
            if code < 0:  # it could not say so itself
                say(f"rank {rank} was ended by {signal.Signals(-code).name}")
        return 2 if set(codes.values()) == {2} else 1
    except SignalException:
        # SIGQUIT (Ctrl and backslash) is still torchrun's: it has ended the ranks.
        return 1
    return 0


if __name__ == "__main__":
    main()
