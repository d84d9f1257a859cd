"""A run in a process that is not its own, a script's or a notebook's: nothing in it ends the process, and what the run
has changed there is put back. Imports no torch at its top."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed import doctor, exit, interrupt

# The last one is ours: it interrupts the main thread where the doctor has ended the run, whatever it waits for.
_STOPPED = signal.SIGURG
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, _STOPPED)
# What start_session sets where torchrun has not; a later run has a port of its own.
_LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class _StoppedError(Exception):
    """The doctor has ended the run."""


@contextmanager
def embedded_run(release: Callable[[], None]) -> Iterator[None]:
    """Around a run. One of several ranks ends as the command does where it fails, all ranks together and with their
    processes, since nobody could take the others out of a collective. Alone, a failure is raised when the run is taken
    down: ConfigError and KeyboardInterrupt as they are, all else as RuntimeError with the report; `release` then ends
    what is left of its parts."""
    if threading.current_thread() is not threading.main_thread():
        rule = "grpo_spmd.run must be called in the main thread, the only one that hears signals"
        raise ConfigError(f"{rule}; this is {threading.current_thread().name}")
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    environment = {name: os.environ.get(name) for name in _LAUNCH}
    log = logging.getLogger("grpo_spmd")
    of_log = list(log.handlers), log.level, log.propagate
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            interrupt.listen()
            try:
                yield
            except BaseException as error:
                doctor.report_failure(error)  # from the start of the session on it does not return
                raise
        else:
            with _alone(release):
                yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for name, value in environment.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        for handler_of_run in set(log.handlers) - set(of_log[0]):
            with suppress(OSError, ValueError):
                handler_of_run.flush()
                handler_of_run.close()
            if isinstance(handler_of_run, exit.Terminal):
                handler_of_run.end()
        log.handlers[:], log.level, log.propagate = of_log


@contextmanager
def _alone(release: Callable[[], None]) -> Iterator[None]:
    reports, is_running = list[str](), [True]

    def tell(report: str) -> None:
        reports.append(report)
        if threading.current_thread() is not threading.main_thread():
            signal.pthread_kill(threading.main_thread().ident or 0, _STOPPED)

    def stop(number: int, frame: FrameType | None) -> None:
        if is_running:
            raise _StoppedError

    failure: BaseException | None = None
    with exit.embedded_in(tell):
        signal.signal(_STOPPED, stop)
        try:
            yield
        except BaseException as error:
            is_running.clear()
            if not isinstance(error, ConfigError | _StoppedError):
                with suppress(SystemExit):
                    doctor.report_failure(error)
            is_callers = isinstance(error, ConfigError | KeyboardInterrupt)
            failure = error if is_callers else _failure_of(error, reports)
            _forget_frames(error)
            doctor.stop()
            try:
                release()
            except Exception as more:  # of parts that are broken: it shall not hide why
                failure.add_note(
                    f"then, in taking down what was left: {type(more).__name__}: {more}"
                )
    _give_back_memory()
    if failure is not None:
        raise failure.with_traceback(None) from None


def _failure_of(error: BaseException, reports: list[str]) -> RuntimeError:
    own = "".join(traceback.format_exception(error)).rstrip()
    return RuntimeError(next((text for text in reports if text), own))


def _forget_frames(error: BaseException | None) -> None:
    """A traceback holds the policy and the engine: a notebook keeps the last one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _give_back_memory() -> None:
    gc.unfreeze()  # vLLM freezes the heap as an engine starts, and undoes it only where that ends by itself
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
