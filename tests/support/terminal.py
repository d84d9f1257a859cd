"""A command on a terminal of its own, for what a person types at it."""

from __future__ import annotations

import os
import pty
import select
import signal
import time
import uuid
from pathlib import Path

from tests.support import processes
from tests.support.processes import MARK, ROOT, marked_processes, processes_left


class TerminalJob:
    """In the foreground of a new terminal of 80 columns. `temporary` is its folder of temporary
    files."""

    def __init__(self, command: list[str], temporary: Path) -> None:
        self._mark, self.shown = uuid.uuid4().hex, ""
        processes.launches["commands on terminals"] += 1
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.chdir(ROOT)
            local = {
                "PYTHONPATH": str(ROOT),
                "COLUMNS": "80",
                "TMPDIR": str(temporary),
                MARK: self._mark,
            }
            os.execve(command[0], command, processes.environment() | local)

    def read_until(self, text: str, timeout_s: float = 120) -> None:
        """Whatever the command shows until `text` is in it; fails with that at its end or after
        `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, self.shown
            assert self._read(), self.shown

    def press_ctrl_c(self) -> None:
        os.write(self._terminal, b"\x03")

    def wait(self, timeout_s: float) -> tuple[int, list[str]]:
        """Exit code, and the lines that it showed. Fails with them where it does not end in
        time."""
        deadline = time.monotonic() + timeout_s
        while self._read() and time.monotonic() < deadline:
            pass
        if time.monotonic() >= deadline:
            for pid in marked_processes(self._mark):
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still there after {timeout_s:g} s; it has shown:\n{self.shown}")
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1]), self.shown.replace(
            "\r", ""
        ).splitlines()

    def survivors(self) -> list[int]:
        return processes_left(self._mark)

    def _read(self) -> bool:
        """Whether there may be more to come."""
        if select.select([self._terminal], [], [], 0.5)[0]:
            try:
                chunk = os.read(self._terminal, 1 << 16)
            except OSError:  # everybody has closed it
                return False
            self.shown += chunk.decode(errors="replace")
            return bool(chunk)
        return True
