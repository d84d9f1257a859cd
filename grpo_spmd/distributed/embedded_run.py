"""A run inside a process that is not its own: a script's or a notebook's.

Nothing in it ends the process, and what the run changes there is restored. Imports no torch at its
top.
"""

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
from grpo_spmd.distributed.processes import LAUNCH_VARIABLES

# Our own signal. After the doctor has ended the run, its thread sends it to the main thread, to
# interrupt whatever that thread waits for.
_STOP_SIGNAL = signal.SIGURG
_SIGNALS = (signal.SIGINT, *interrupt.SIGNALS, _STOP_SIGNAL)


class _StoppedError(Exception):
    """Raised in the main thread after the doctor has ended the run."""


@contextmanager
def embedded_run(release: Callable[[], None]) -> Iterator[None]:
    """Runs the block, a training, in the caller's process, which goes on after it.

    With several ranks a failure ends the processes of all ranks, as in the training command: ranks
    that wait in a collective could not be interrupted otherwise. With one rank the failure is
    raised once the run is taken down: ConfigError and KeyboardInterrupt as they are, everything
    else as a RuntimeError with the doctor's report. `release` ends what a failed run leaves behind.
    """
    if threading.current_thread() is not threading.main_thread():
        name = threading.current_thread().name
        raise ConfigError(
            "grpo_spmd.run must be called in the main thread, the only one that hears signals; "
            f"this is {name}"
        )
    with _restored_process():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            interrupt.listen()
            try:
                yield
            except BaseException as error:
                # Does not return once the session has started.
                doctor.report_failure(error)
                raise
        else:
            with _single_rank(release):
                yield


@contextmanager
def _restored_process() -> Iterator[None]:
    """Restores signal handlers, environment variables and our logger after the block."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # start_session sets these variables, but a later run must choose its own port.
    environment = {name: os.environ[name] for name in LAUNCH_VARIABLES if name in os.environ}
    log = logging.getLogger("grpo_spmd")
    log_handlers = list(log.handlers)
    log_level = log.level
    propagates = log.propagate
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name in LAUNCH_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(environment)
        # Handlers that the run has added: its log file and its terminal.
        for run_handler in set(log.handlers) - set(log_handlers):
            with suppress(OSError, ValueError):
                run_handler.flush()
                run_handler.close()
            if isinstance(run_handler, exit.Terminal):
                run_handler.end()
        log.handlers[:] = log_handlers
        log.level = log_level
        log.propagate = propagates


@contextmanager
def _single_rank(release: Callable[[], None]) -> Iterator[None]:
    """Runs the block as a run of one rank. A failure is raised after everything was taken down.

    It is raised as one exception. `release` ends what a failed run leaves behind.
    """
    reports: list[str] = []
    main_thread = threading.main_thread()
    is_running = True

    def take_report(report: str) -> None:
        """Keeps the report on a failure, in the place of ending the process."""
        reports.append(report)
        # Called in the doctor's thread: interrupt the main thread, which may be stuck anywhere.
        if threading.current_thread() is not main_thread:
            signal.pthread_kill(main_thread.ident or 0, _STOP_SIGNAL)

    def stop(number: int, frame: FrameType | None) -> None:
        """Handles _STOP_SIGNAL: raises _StoppedError in the block, wherever it is."""
        if is_running:
            raise _StoppedError

    failure: BaseException | None = None
    with exit.embedded_in(take_report):
        signal.signal(_STOP_SIGNAL, stop)
        try:
            yield
        except BaseException as error:
            is_running = False
            if not isinstance(error, ConfigError | _StoppedError):
                with suppress(SystemExit):
                    doctor.report_failure(error)
            failure = error
            if not isinstance(error, ConfigError | KeyboardInterrupt):
                text = "".join(traceback.format_exception(error)).rstrip()
                failure = RuntimeError(next(filter(None, reports), text))
            _forget_frames(error)
            doctor.stop()
            try:
                release()
            except Exception as release_error:
                # The parts of a failed run may be broken. Their errors must not hide the first one.
                text = f"{type(release_error).__name__}: {release_error}"
                failure.add_note(f"then, in taking down what was left: {text}")
    _free_memory()
    if failure is not None:
        raise failure.with_traceback(None) from None


def _forget_frames(error: BaseException | None) -> None:
    """Clears the tracebacks of an error and of its causes, and the frames in them.

    The frames hold policy and engine, and a notebook keeps the last traceback.
    """
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _free_memory() -> None:
    """Frees objects that nothing refers to any more, and torch's cached GPU memory."""
    # vLLM freezes all objects when an engine starts, and unfreezes them only after a normal end.
    gc.unfreeze()
    gc.collect()
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
