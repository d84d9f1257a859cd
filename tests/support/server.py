"""The server of ranks: a process that has torch, transformers and vLLM imported, and forks one more
process for each rank of a job.

python -m tests.support.server FD      FD: a SOCK_SEQPACKET socket, see tests/support/ranks.py for
the other side

A request is JSON {"num_ranks", "module", "arguments", "env", "cwd"} with two file descriptors: a
socket that says how it went, and the file for the output. For each request a supervisor is forked,
which does what torchrun does: it has the ranks' store in a process of its own, sets the ranks'
variables, sends SIGTERM to the others when one of them fails, and says at the end {"code",
"survivors"}. Closing the socket before that kills the job.

One server can serve several copies of this repository: where GRPO_SPMD_TEST_SHARED_SERVER is set it
imports no module of ours, and a rank takes those of its own folder.

A rank is a fresh process but for what was imported, and Python's hash seed, which all ranks of one
server share.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import time
import traceback
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# Read when torch is imported. The first two grpo_spmd.train sets itself; the third leaves CUDA for
# the ranks to start; the last keeps pyarrow, which vLLM 0.26 imports, from starting a thread.
_READ_AT_IMPORT = {
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "THP_MEM_ALLOC_ENABLE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
os.environ.update(_READ_AT_IMPORT)

# With our own modules, and those that vLLM imports only when an engine starts or samples.
IMPORTED = (
    "grpo_spmd.engine.engine",
    "vllm",
    "vllm.entrypoints.llm",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.triton_utils.dispatcher",
    "grpo_spmd.learn.assemble",
    "grpo_spmd.checkpoint.save",
    "grpo_spmd.observe.log",
    "grpo_spmd.learn.update",
    "grpo_spmd.engine.weight_sync",
    "torch.distributed.elastic.multiprocessing.errors",
)
_SIGTERM_TO_SIGKILL_S = 30.0  # as torchrun has it
_LEAVE_S = 5.0  # what a job's other processes have after its ranks have gone
_POLL_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


def main() -> NoReturn:
    control = socket.socket(fileno=int(sys.argv[1]))
    old = dict(os.environ)
    for name in IMPORTED:
        if name.startswith("grpo_spmd.") and "GRPO_SPMD_TEST_SHARED_SERVER" in os.environ:
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:  # another version of vLLM; a rank imports what it needs
            print(f"tests.support.server: {error}", file=sys.stderr)
    assert len(os.listdir("/proc/self/task")) == 1, (
        "a fork copies one thread: an import has started more"
    )
    set_by_imports = {
        name: value for name, value in os.environ.items() if old.get(name) != value
    } | _READ_AT_IMPORT
    gc.collect()
    gc.freeze()  # no collection in a rank touches, and so copies, the pages of what was imported
    gc.unfreeze = lambda: (
        None
    )  # which vLLM calls at its shutdown, and then collects several times: half a second a rank
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors are waited for by nobody
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            os._exit(0)  # the tests are over
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                request = json.loads(message)
                request["env"] = set_by_imports | request["env"]
                _supervise(request, socket.socket(fileno=fds[0]), fds[1])
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        for fd in fds:
            os.close(fd)


def _supervise(request: dict[str, Any], client: socket.socket, output: int) -> NoReturn:
    os.setsid()
    ctypes.CDLL(None).prctl(
        _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
    )  # whoever loses its parent becomes a child of this process
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    environment, num_ranks = request["env"], request["num_ranks"]
    store = None
    if num_ranks > 1:
        store, port = _start_store(client)
        environment |= {
            "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": uuid.uuid4().hex,  # noqa: E501
            "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
    ranks: dict[int, int] = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            client.close()
            local = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if num_ranks > 1 else {}
            _become_rank(
                request["module"], request["arguments"], environment | local, request["cwd"]
            )
        ranks[pid] = rank
    codes = _wait_for_ranks(ranks, client)
    if store is not None:
        os.kill(store, signal.SIGKILL)
    survivors = _wait_for_the_rest() if codes else []
    while descendants := _descendants():
        for pid in descendants:
            _kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(_POLL_S)
    if codes:
        code = next((code for code in codes.values() if code != 0), 0)
        client.sendall(json.dumps({"code": code, "survivors": survivors}).encode())
    os._exit(0)


def _start_store(client: socket.socket) -> tuple[int, int]:
    """As torchrun's agent has it: it outlives the ranks. Its process and its port."""
    import torch.distributed as dist

    port_out, port_in = os.pipe()
    pid = os.fork()
    if pid == 0:
        client.close()
        store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
        os.write(port_in, str(store.port).encode())
        while True:
            signal.pause()
    return pid, int(os.read(port_out, 100))


def _become_rank(
    module: str, arguments: list[str], environment: dict[str, str], folder: str
) -> NoReturn:
    """What `python -m module arguments` does in a new process; the exit code is its."""
    code = 1
    try:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)
        sys.path[:0] = [
            folder,
            *(path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path),
        ]
        sys.argv = [module, *arguments]
        random.seed()  # from the system, as a new process has it
        if numpy := sys.modules.get("numpy"):
            numpy.random.seed()
        sys.modules.pop(
            module, None
        )  # in a new process, what is run as __main__ has not been imported
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait_for_ranks(ranks: dict[int, int], client: socket.socket) -> dict[int, int]:
    """Exit codes in the order in which the ranks ended, or nothing when the other side has given
    the job up."""
    codes: dict[int, int] = {}
    term_at = None
    while ranks:
        if select.select([client], [], [], _POLL_S)[0]:  # nothing is ever sent: it was closed
            return {}
        for pid, status in _reap():
            if pid in ranks:
                codes[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
                if term_at is None and any(codes.values()):
                    term_at = time.monotonic()
                    for second in ranks:
                        _kill(second, signal.SIGTERM)
        if term_at is not None and time.monotonic() - term_at > _SIGTERM_TO_SIGKILL_S:
            for pid in ranks:
                _kill(pid, signal.SIGKILL)
    return codes


def _wait_for_the_rest() -> list[str]:
    """The command lines of what is still there some seconds after the ranks have gone."""
    deadline = time.monotonic() + _LEAVE_S
    while (descendants := _descendants()) and time.monotonic() < deadline:
        _reap()
        time.sleep(_POLL_S)
    return [_command_line(pid) for pid in descendants]


def _reap() -> list[tuple[int, int]]:
    """(pid, status) of the children that have ended."""
    ended = list[tuple[int, int]]()
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, status))


def _descendants() -> list[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:  # gone in the meantime
            continue
        parents[int(path.parent.name)] = int(parent)
    result, ancestors = list[int](), {os.getpid()}
    while ancestors:
        ancestors = {pid for pid, parent in parents.items() if parent in ancestors}
        result += ancestors
    return result


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _kill(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


if __name__ == "__main__":
    main()
