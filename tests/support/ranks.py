"""Jobs of real ranks, forked by the server of ranks (tests/support/server.py), which has imported
what they need.

For what is about torchrun itself, signals, kills or the terminal there is `Job` in
tests/support/processes.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support import processes
from tests.support.processes import ROOT


class RanksJob:
    """`python -m module arguments` on `num_ranks` ranks: under torchrun's variables where there are
    several."""

    def __init__(
        self,
        num_ranks: int,
        module: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the job
        self._socket, theirs = socket.socketpair()
        request = {
            "num_ranks": num_ranks,
            "module": module,
            "arguments": [str(argument) for argument in arguments],
            "env": {**processes.environment(), **(env or {})},
            "cwd": str(cwd),
        }
        with theirs:
            _send(json.dumps(request).encode(), [theirs.fileno(), self._output.fileno()])
        processes.launches["ranks of the server"] += num_ranks
        processes.launches["jobs of the server"] += 1

    def wait(self, timeout_s: float = 300) -> tuple[int, str]:
        """Exit code, that of the rank which failed first, and output of all ranks.

        The test fails with the output after `timeout_s`, when all processes of the job are killed,
        and where one outlives the ranks.
        """
        self._socket.settimeout(timeout_s)
        try:
            reply = self._socket.recv(1 << 20)
        except TimeoutError:
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(60)
            self._socket.recv(1)  # its end
            raise AssertionError(
                f"still running after {timeout_s} s; its output:\n{self._read()}"
            ) from None
        finally:
            output = self._read()
            self._socket.close()
        assert reply, f"the server of ranks or its supervisor has died; output:\n{output}"
        result = json.loads(reply)
        assert result["survivors"] == [], (
            f"still there after its ranks: {result['survivors']}; output:\n{output}"
        )
        return result["code"], output

    def _read(self) -> str:
        self._output.seek(0)  # the offset is the writers' too, who are gone by now
        return self._output.read().decode(errors="replace")


def run_worker(num_ranks: int, worker: str, *arguments: str, timeout_s: float = 300) -> str:
    """The output of tests/support/workers/<worker>; fails with it unless the exit code is 0."""
    return run_ranks(num_ranks, f"tests.support.workers.{worker}", *arguments, timeout_s=timeout_s)


def train(num_ranks: int, config: Path, *overrides: str, timeout_s: float = 300) -> str:
    """The output of a whole run; fails with it unless the exit code is 0."""
    return run_ranks(
        num_ranks, "grpo_spmd.train", "--config", str(config), *overrides, timeout_s=timeout_s
    )


def run_ranks(num_ranks: int, module: str, *arguments: str, timeout_s: float = 300) -> str:
    code, output = RanksJob(num_ranks, module, *arguments).wait(timeout_s)
    assert code == 0, output
    return output


# In the environment: the descriptor of a socket to a server that several copies of this repository
# share.
SHARED_SERVER = "GRPO_SPMD_TEST_SHARED_SERVER"
_server: tuple[subprocess.Popen[bytes], socket.socket] | None = None


def _send(request: bytes, fds: list[int]) -> None:
    """To the shared server, or to this process's own, which is started when there is none
    (left)."""
    global _server
    if shared := os.environ.get(SHARED_SERVER):
        with socket.socket(fileno=os.dup(int(shared))) as server:
            socket.send_fds(server, [request], fds)
        return
    if _server is None or _server[0].poll() is not None:
        local, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.server", str(theirs.fileno())]
            environment = {
                **processes.environment(),
                "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
            }
            _server = (
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                ),
                local,
            )
        processes.launches["servers of ranks"] += 1
    socket.send_fds(_server[1], [request], fds)
