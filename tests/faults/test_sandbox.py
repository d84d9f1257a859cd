"""Hostile code gets nothing, with and without namespaces; verdicts cannot be forged; honest code
passes; without walls
nothing runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.rewards.sandbox import sandbox
from grpo_spmd.rewards.sandbox.sandbox import (
    Jail,
    Limits,
    SandboxError,
    passes_program_test,
    passes_statements,
)
from grpo_spmd.rewards.verifiers import run_tests
from tests.faults.test_reward_pool import _descendants
from tests.support.processes import ROOT

LIMITS = Limits(time_s=10.0, memory_mib=1024, isolation="required")
SECRET = "s3cret-value-of-the-trainer"

# A machine that has no namespaces to give: no capability is left, and none can be had in a user
# namespace.
WITHOUT_NAMESPACES = [
    "unshare", "--user", "--map-root-user", "sh", "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all '
    '--inh-caps=-all "$@"', "sh",
]  # fmt: skip

# Each tries something and prints GOT where it worked. `tried` hides errors, as an attacker would.
PRELUDE = """
import ctypes, os, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def tried(name, function):
    try:
        got = function()
    except BaseException:
        return
    if got not in (None, False, -1, b"", "", [], {}):
        print("GOT", name, repr(got)[:300])
def read(path):
    with open(path, "rb") as file:
        return file.read(1000)
FACTS = {facts}
"""
HOSTILE = {
    "numpy": """
import numpy
assert (numpy.ones((200, 200)) @ numpy.ones((200, 200)))[0, 0] == 200  # honest code runs, whichever walls there are
""",  # noqa: E501
    "environment": """
tried("environ", lambda: {n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")})
for pid in ("self", str(os.getppid()), "1", str(FACTS["pid"])):
    tried("environ of " + pid, lambda: read(f"/proc/{pid}/environ"))
    tried("memory map of " + pid, lambda: read(f"/proc/{pid}/maps"))
    tried("memory of " + pid, lambda: open(f"/proc/{pid}/mem", "rb+"))
    tried("command of " + pid, lambda: read(f"/proc/{pid}/cmdline"))
    tried("files of " + pid, lambda: os.listdir(f"/proc/{pid}/fd"))
    tried("root of " + pid, lambda: os.listdir(f"/proc/{pid}/root/"))
import gc
tried("secret in memory", lambda: [o for o in gc.get_objects() if isinstance(o, dict) and FACTS["secret_name"] in o])
""",  # noqa: E501
    "files": """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "/proc/mounts", "/proc/cpuinfo",
             "/dev/sda", "/dev/mem",
             "/dev/kmsg", FACTS["data"], FACTS["code"], FACTS["data"] + "/../" + FACTS["data"]):
    tried("read " + path, lambda: read(path))
for path in ("/", "/root", "/home", "/etc", "/tmp", "/proc", "/sys", "/dev", "/dev/shm", "/var",
             "/run", os.path.dirname(FACTS["data"])):
    if path != "/tmp" or not FACTS["namespaces"]:  # there it is the scratch folder
        tried("list " + path, lambda: os.listdir(path))
def link():
    os.symlink(FACTS["data"], "link"); return read("link")
tried("symlink", link)
tried("hard link", lambda: os.link(FACTS["data"], "hard") or read("hard"))
tried("symlink to /", lambda: os.symlink("/", "top") or read("top" + FACTS["data"]))
def climb():
    os.chdir("/"); return read(FACTS["data"][1:])
tried("relative", climb)
for fd in range(0, 64):
    tried(f"folder behind fd {fd}", lambda: os.open("..", os.O_RDONLY, dir_fd=fd) and None)
    tried(f"data behind fd {fd}", lambda: os.open(FACTS["data"].lstrip("/"), os.O_RDONLY, dir_fd=fd))
""",  # noqa: E501
    "damage": """
data = FACTS["data"]
for name, attempt in {
    "write": lambda: open(data, "w"), "append": lambda: open(data, "a"),
    "truncate": lambda: os.truncate(data, 0) or True,
    "truncate by opening": lambda: os.open(data, os.O_RDONLY | os.O_TRUNC), "chmod": lambda: os.chmod(data, 0) or True,
    "chown": lambda: os.chown(data, 1, 1) or True, "utime": lambda: os.utime(data) or True,
    "xattr": lambda: os.setxattr(data, "user.x", b"1") or True,
    "beside": lambda: open(os.path.dirname(data) + "/new", "w"),
    "library": lambda: open(os.path.dirname(os.__file__) + "/evil.py", "w"),
    "library file": lambda: open(os.__file__, "r+"),
    "/tmp": lambda: open("/tmp/x", "w") if not FACTS["namespaces"] else None,
    "/dev/shm": lambda: open("/dev/shm/x", "w"),
    "mknod": lambda: os.mkfifo("pipe") or True, "mkdir": lambda: os.mkdir("/var/x") or True,
    "rename": lambda: os.rename(data, data + "2") or True, "unlink": lambda: os.unlink(data) or True,
}.items():
    tried(name, attempt)
""",  # noqa: E501
    "network": """
for family in range(0, 46):
    for kind in (1, 2, 3, 5):
        tried(f"socket {family} {kind}", lambda: socket.socket(family, kind))
tried("tcp", lambda: socket.create_connection(("127.0.0.1", FACTS["port"]), 1))
tried("dns", lambda: socket.getaddrinfo("example.com", 80))
a, b = socket.socketpair()
for s in (a, b):
    for address in (FACTS["unix"], "\\0" + FACTS["abstract"], ("127.0.0.1", FACTS["port"])):
        tried("connect a pair", lambda: s.connect(address) or True)
        tried("bind a pair", lambda: s.bind(address) or True)
        tried("send to", lambda: s.sendto(b"HELLO", address) and None)
        tried("sendmsg to", lambda: s.sendmsg([b"HELLO"], [], 0, address) and None)
tried("datagram pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM))
tried("packet pair", lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
""",
    "processes": """
def fork():
    pid = os.fork()
    if pid == 0:
        os.setsid(); time.sleep(1000)
    return pid
tried("fork", fork)
tried("forkpty", lambda: os.forkpty())
tried("vfork", lambda: libc.vfork())
tried("clone", lambda: libc.syscall(56, 17, 0, 0, 0, 0))
tried("clone3", lambda: libc.syscall(435, (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17), 88))
tried("spawn", lambda: os.posix_spawn("/bin/sh", ["sh", "-c", "true"], {}))
tried("system", lambda: os.system("echo") == 0)
tried("popen", lambda: subprocess.run([sys.executable, "-c", "1"]))
tried("exec", lambda: os.execv(sys.executable, [sys.executable, "-c", "print('GOT exec')"]))
""",
    "signals": """
for pid in (-1, 0, 1, os.getppid(), FACTS["pid"], -FACTS["pid"]):
    for number in (0, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        tried(f"kill {pid}", lambda: os.kill(pid, number) or True)
        tried(f"tkill {pid}", lambda: libc.syscall(200, pid, number) == 0)
        tried(f"tgkill {pid}", lambda: libc.syscall(234, pid, pid, number) == 0)
        tried(f"sigqueue {pid}", lambda: libc.syscall(129, pid, number, ctypes.create_string_buffer(128)) == 0)
    tried(f"pidfd {pid}", lambda: os.pidfd_open(pid))
    tried(f"prlimit {pid}", lambda: __import__("resource").prlimit(pid, 7) and pid != 0)
    tried(f"setpriority {pid}", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19) or True)
    tried(f"affinity {pid}", lambda: os.sched_setaffinity(pid, [0]) or True)
signal.raise_signal(signal.SIGURG)  # to itself it may
""",  # noqa: E501
    "tracing": """
for pid in (os.getppid(), FACTS["pid"]):
    for request in (16, 0x4206):
        tried("ptrace", lambda: libc.ptrace(request, pid, 0, 0) == 0)
    class Iov(ctypes.Structure):
        _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
    buffer = ctypes.create_string_buffer(8)
    here, there = Iov(ctypes.addressof(buffer), 8), Iov(0x400000, 8)
    tried("process_vm_readv", lambda: libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0)
    tried("pidfd_getfd", lambda: libc.syscall(438, pid, 0, 0))
""",  # noqa: E501
    "kernel": """
for name, call in {
    "unshare": lambda: libc.unshare(0x10000000) == 0, "setns": lambda: libc.setns(0, 0) == 0,
    "mount": lambda: libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0,
    "umount": lambda: libc.umount2(b"/tmp", 2) == 0,
    "chroot": lambda: os.chroot("/tmp") or True, "setuid 0": lambda: os.getuid() and (os.setuid(0) or True),
    "bpf": lambda: libc.syscall(321, 0, 0, 0),
    "perf": lambda: libc.syscall(298, ctypes.create_string_buffer(128), 0, -1, -1, 0),
    "userfaultfd": lambda: libc.syscall(323, 0),
    "io_uring": lambda: libc.syscall(425, 8, ctypes.create_string_buffer(120)),
    "keyctl": lambda: libc.syscall(250, 0, -3, 1), "add_key": lambda: libc.syscall(248, b"user", b"x", b"y", 1, -3),
    "memfd": lambda: os.memfd_create("x"), "shmget": lambda: libc.shmget(0, 4096, 0o1600),
    "msgget": lambda: libc.msgget(0, 0o1600),
    "dmesg": lambda: libc.klogctl(3, ctypes.create_string_buffer(1000), 1000) > 0,
    "handle": lambda: libc.syscall(304, -100, ctypes.create_string_buffer(128), 0),
    "x32": lambda: libc.syscall(0x40000000 + 39),
    "later calls": lambda: libc.syscall(467, -100, b"/etc/passwd", 0, 0, 0),
    "inotify": lambda: libc.inotify_add_watch(libc.inotify_init(), b"/tmp" if not FACTS["namespaces"] else b"/", 0xfff),
    "raise a limit": lambda: __import__("resource").setrlimit(7, (10**5, 10**5)) or True,
    "undo seccomp": lambda: libc.prctl(22, 0, 0, 0, 0) == 0 or libc.syscall(317, 0, 0, 0) == 0,
    "terminal": lambda: open("/dev/tty"),
}.items():
    tried(name, call)
""",  # noqa: E501
}


def outcomes(folder: Path) -> dict[str, Any]:
    """Run every hostile program next to things worth having, and report what each printed."""
    os.environ["SECRET_TOKEN"] = SECRET
    data = folder / "train.jsonl"
    data.write_text('{"tests": "the expected values"}\n')
    data.chmod(0o666)
    old = os.stat(data)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        path.bind(str(folder / "unix"))
        abstract.bind("\0" + folder.name)
        called = []
        for listener in (tcp, path, abstract):
            listener.listen()
            listener.setblocking(False)
        with Jail("", "program", LIMITS, stdin="") as jail:
            walls = jail.walls
        facts = {
            "pid": os.getpid(), "data": str(data), "code": __file__, "port": tcp.getsockname()[1],
            "unix": str(folder / "unix"),
            "abstract": folder.name, "secret_name": "SECRET_TOKEN", "namespaces": "namespaces" in walls,  # noqa: E501
        }  # fmt: skip
        result: dict[str, Any] = {"walls": walls}
        for name, code in HOSTILE.items():
            program = PRELUDE.replace("{facts}", repr(facts)) + code + "\nprint('tried it all')\n"
            with Jail(program, "program", LIMITS, stdin="") as jail:
                output = jail.output()
                result[name] = (
                    f"ended with {jail._process.returncode}" if output is None else output.decode()
                )
        for listener in (tcp, path, abstract):
            try:
                called.append(str(listener.accept()))
            except BlockingIOError:
                continue
    new = os.stat(data)
    result["called"] = called
    result["data is untouched"] = (
        data.read_text() == '{"tests": "the expected values"}\n' and old == new
    )
    result["left in the folder"] = sorted(path.name for path in folder.iterdir())
    return result


@pytest.fixture(scope="module", params=["namespaces", "no namespaces"])
def hostile(request: pytest.FixtureRequest) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="worth_having_"))
    wrapper = [] if request.param == "namespaces" else WITHOUT_NAMESPACES
    source = (
        "import json, sys, pathlib\nfrom tests.faults.test_sandbox import outcomes\n"
        "print(json.dumps(outcomes(pathlib.Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [*wrapper, sys.executable, "-c", source, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["walls"] == ["seccomp", "landlock"] + (
        ["namespaces"] if request.param == "namespaces" else []
    )
    return result


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_code_gets_nothing(hostile: dict[str, Any], name: str) -> None:
    assert hostile[name] == "tried it all\n"


def test_hostile_code_touches_nothing(hostile: dict[str, Any]) -> None:
    assert hostile["data is untouched"]
    assert hostile["called"] == []
    assert hostile["left in the folder"] == ["train.jsonl", "unix"]


def test_the_attacks_work_where_there_is_no_wall() -> None:
    """Else the tests above would pass because the attacks are broken."""
    with tempfile.TemporaryDirectory() as folder:
        facts = {
            "pid": os.getpid(),
            "data": f"{folder}/d",
            "code": __file__,
            "port": 1,
            "unix": "x",
            "abstract": "x",
            "secret_name": "x",
        }
        Path(facts["data"]).write_text("x")  # type: ignore[arg-type]
        seen = {}
        for name in ("environment", "files", "damage", "network"):
            program = (
                PRELUDE.replace("{facts}", repr(facts | {"namespaces": False})) + HOSTILE[name]
            )
            with Jail(
                program.replace("/dev/shm/x", f"{folder}/shm"),
                "program",
                Limits(10.0, 1024, "none"),
                stdin="",
            ) as jail:
                seen[name] = (jail.output() or b"").decode()
    for name, attempts in {
        "environment": ["environ of", "files of", "memory map of"],
        "files": ["read /etc/passwd", "list /root", "symlink", "relative"],
        "damage": ["write", "truncate by opening", "chmod", "beside"], "network": ["socket 2 1", "datagram pair"],  # noqa: E501
    }.items():  # fmt: skip
        for attempt in attempts:
            assert f"GOT {attempt}" in seen[name], (attempt, seen[name])


# Bounds


def _ends(code: str, time_s: float = 3.0) -> bytes | None:
    start = time.monotonic()
    with Jail(code, "program", Limits(time_s, 512, "required"), stdin="") as jail:
        output = jail.output()
        pid = jail._process.pid
    assert time.monotonic() - start < 60
    assert not Path(f"/proc/{pid}").exists()
    return output


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(1000)",
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, 1)\n    except "
        "Exception: "
        "pass\ntime.sleep(1000)",
        "import threading, time\nthreading.Thread(target=lambda: time.sleep(1000)).start()",
        "import os\nos.setsid()\nwhile True: pass",
        "input()\nwhile True: pass",
        "x = 9 ** 9 ** 9",
        "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    ],
)
def test_what_does_not_end_is_ended(code: str) -> None:
    assert _ends(code, time_s=0.5) is None


def test_the_kernel_sends_no_signal_for_the_code() -> None:
    """F_SETOWN and F_SETSIG on a pipe would send any signal to any process of the same user, past
    kill()."""
    code = """
import fcntl, os
r, w = os.pipe()
def refused(call, *arguments):
    try:
        call(*arguments)
    except PermissionError:
        return True
owners = [refused(fcntl.fcntl, r, command, 1) for command in (8, 10)]
print(owners, [refused(fcntl.ioctl, r, command, b"1234") for command in (0x8901, 0x8902)])
print(fcntl.fcntl(r, fcntl.F_GETFL) >= 0)
"""
    assert _ends(code, time_s=10) == b"[True, True] [True, True]\nTrue\n"


def test_true_cannot_be_guessed_with_own_builtins() -> None:
    code = (
        "def f(x): return -1\nabs = lambda x: 0\nall = lambda x: True\nisinstance = lambda *a: "
        "True\nis_even "
        "= lambda n: n % 2 == 0"
    )
    tests = [
        "assert (abs(f(2) - 1.4) < 1e-3) == True",
        "assert all(f(i) > 0 for i in [1, 2]) == True",
        "assert isinstance(f(1), str) == True",
        "assert is_even(4) == True",
        "assert is_even(3) == False",
    ]
    assert passes_statements(code, tests, LIMITS) == [False, False, False, True, True]


def test_an_endless_loop_is_wrong_and_not_unknown_however_many_tests_there_are() -> None:
    tests = [{"input": str(n), "output": str(n)} for n in range(6)]
    start = time.monotonic()
    endless, correct = "while True: pass", "print(input())"
    assert run_tests([endless, correct], tests=[tests, tests], partial_credit=True, time_s=4.0) == [
        0.0,
        1.0,
    ]
    late = "n = input()\nprint(n)\nwhile n == '2': pass"  # what comes after the loop is not reached
    assert run_tests([late], tests=[tests], partial_credit=True, time_s=4.0) == [2 / 6]
    assert time.monotonic() - start < 60


def test_memory_is_bounded() -> None:
    assert (
        _ends(
            "x = []\ntry:\n    while True: x.append(bytearray(10**7))\nexcept MemoryError: "
            "print(len(x) < 60)"
        )
        == b"True\n"
    )


def test_the_disk_is_bounded() -> None:
    code = """
import os
written = files = 0
try:
    for number in range(100_000):
        with open(f"f{number}", "wb") as file:
            files += 1
            while file.tell() < 10 << 20: written += file.write(b"x" * (1 << 20))
except OSError as error: pass
print(0 < written <= 64 << 20)
for number in range(files): os.unlink(f"f{number}")
try:
    for number in range(100_000): open(f"g{number}", "wb").close()
except OSError: print(number < 2000)
for file in range(number): os.unlink(f"g{file}")
try:
    with open("large", "wb") as file:
        while True: file.write(b"x" * (1 << 20))
except OSError: print(os.path.getsize("large") <= 16 << 20)
"""
    assert _ends(code, time_s=20) == b"True\nTrue\nTrue\n"


def test_threads_are_bounded_and_can_be_had() -> None:
    code = """
import threading, time
threading.stack_size(1 << 16)
started = 0
try:
    while started < 5000:
        threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        started += 1
except RuntimeError: pass
print(10 <= started <= 64)
"""
    assert _ends(code, time_s=10) == b"True\n"


def test_a_hundred_megabytes_of_output_are_not_kept() -> None:
    assert _ends("import sys\nwhile True: sys.stdout.write('x' * 100_000_000)") is None


def test_what_a_killed_process_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("grpo_code_left", "grpo_code_used", "other"):
        (tmp_path / name / "below").mkdir(parents=True)
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "grpo_code_young").mkdir()
    used = os.open(tmp_path / "grpo_code_used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    sandbox._remove_left_behind.cache_clear()
    assert passes_program_test("print(1)", "", "1", LIMITS)
    os.close(used)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "grpo_code_used",
        "grpo_code_young",
        "other",
    ]


def test_a_slow_removal_goes_on_after_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    (tmp_path / "bin").mkdir()
    slow = tmp_path / "bin" / "rm"
    slow.write_text(f'#!/bin/sh\nsleep 3\nexec {shutil.which("rm")} "$@"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert passes_program_test("import os; os.mkdir('a', 0); print(1)", "", "1", LIMITS)
    assert len(list((tmp_path / "scratch").iterdir())) == 1
    end = time.monotonic() + 30
    while list((tmp_path / "scratch").iterdir()) and time.monotonic() < end:
        time.sleep(0.1)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_the_scratch_folder_goes_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert (
        _ends(
            "open('a', 'w').write('b'); import os; os.mkdir('c'); print(open('a').read(), "
            "os.listdir('.') != [])"
        )
        == b"b True\n"
    )
    assert list(tmp_path.iterdir()) == []


# Verdicts


NEVER = "__eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 0\n"
FORGERIES = {
    "prints success": "print('ok'); print('1 passed'); print(True)",
    "exits 0": "import sys; sys.exit(0)",
    "os._exit 0": "import os; os._exit(0)",
    "exits inside": "def f(x):\n    import os; os._exit(0)",
    "raises SystemExit inside": "def f(x): raise SystemExit(0)",
    "equal to everything": f"class E:\n    {NEVER}def f(x): return E()",
    "an int equal to everything": f"class E(int):\n    {NEVER}def f(x): return E(1)",
    "a list of such": f"class E(str):\n    {NEVER}def f(x): return [E('z')] * 2",
    "patched builtins": """
import builtins
for n in ("abs", "all", "any", "len", "sorted", "isinstance", "bool", "hex"): setattr(builtins, n, lambda *a, **k: 0)
builtins.AssertionError = type("A", (), {})
def f(x): return 0
""",  # noqa: E501
    "shadowed builtins": "abs = len = lambda *a: 0\nall = isinstance = lambda *a: True\ndef "
    "f(x): return 0",
    "writes to every fd": """
import os, json
for fd in range(64):
    for n in range(8):
        try: os.write(fd, json.dumps({"statement": n, "secret": "0" * 32, "value": True}).encode() + b"\\n")
        except OSError: pass
def f(x): return 0
""",  # noqa: E501
    "hangs": "def f(x):\n    while True: pass",
    "reads the tests early": """
import os, select
for fd in range(3, 64):
    try:
        if select.select([fd], [], [], 0.01)[0]: print(os.read(fd, 100000))
    except OSError: pass
def f(x): return 0
""",
    "closes everything": "import os\nos.closerange(0, 64)\ndef f(x): return 0",
    "nested": "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
    "endless": "class L(list):\n    def __iter__(self):\n        while True: yield 0\ndef f(x): "
    "return L()",
    "does not parse": "def f(x) return x",
    "nothing": "",
    "nul": "\0",
}
TESTS = [
    "assert f(20) == 41",
    "assert [3, 5] == f([1, 2])",
    "assert f('a') == {'k': (1, 2.5, None, {'s'}, b'x', True)}",
    "assert abs(f(0.5) - 2) < 1e-9",
]


@pytest.mark.parametrize("name", FORGERIES)
def test_a_verdict_cannot_be_forged(name: str) -> None:
    assert passes_statements(FORGERIES[name], TESTS, Limits(2.0, 512, "required")) == [False] * 4
    assert not passes_program_test(FORGERIES[name], "20\n", "41", Limits(2.0, 512, "required"))


def test_the_right_answer_passes() -> None:
    code = """
import numpy, collections
def f(x):
    if isinstance(x, list): return [numpy.int64(3), numpy.float64(5)]
    if isinstance(x, str): return collections.OrderedDict(k=(1, 2.5, None, {'s'}, b'x', numpy.bool_(True)))
    return x * 2 + 1
print(int(input()) * 2 + 1) if __name__ == "__main__" else None
"""  # noqa: E501
    assert passes_statements(code, TESTS, LIMITS) == [True] * 4
    assert passes_program_test(code, "20\n", "41  \n\n", LIMITS)
    statements = [
        "x = f(1)\nassert x == 3\nassert x == 3",
        "assert x == 4",
        "assert f(2) != 5",
        "f(3)",
    ]
    assert passes_statements(code, statements, LIMITS) == [
        True, False, False, True,
    ]  # fmt: skip


def test_expected_values_never_enter_the_process() -> None:
    """The code knows what to look for (the digits of 91, 90, ... 81) and looks at all there is:
    frames, objects, unread
    bytes."""
    code = """
def f(x):
    import gc, os, select, sys
    frame = sys._getframe()
    found = []
    while frame:
        found.append(repr(frame.f_locals)); frame = frame.f_back
    found += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    for fd in range(64):
        try:
            if select.select([fd], [], [], 0)[0]: found.append(str(os.read(fd, 100000)))
        except OSError: pass
    digits = "".join(map(str, range(91, 80, -1)))
    expected = digits if any(digits in text for text in found) else "nothing"
    return [expected, any("other_" + "test" in text for text in found)]
"""
    tests = [
        "assert f(1) == ['9190898887868584838281', True]",
        "assert f(1) == ['nothing', True]",
        "assert other_test",
    ]
    assert passes_statements(code, tests, LIMITS) == [False, True, False]


def test_common_programs_run() -> None:
    deep = "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
    deep += "def main():\n    def g(n): return 0 if n == 0 else 1 + g(n - 1)\n    print(g(20000))\n"
    deep += "t = threading.Thread(target=main)\nt.start()"
    assert passes_program_test(deep, "", "20000", LIMITS)
    assert passes_program_test(
        "import asyncio\nasync def f(): print(await asyncio.sleep(0, 7))\nasyncio.run(f())",
        "",
        "7",
        LIMITS,
    )
    text = (
        "import heapq, math, re, json, random, datetime, decimal, itertools, bisect, hashlib, "
        "sqlite3, zlib, tempfile\n"
    )
    assert passes_program_test(
        text + "import sys\nfor line in sys.stdin: print(line[::-1].strip())",
        "ab\ncd\n",
        "ba\ndc",
        LIMITS,
    )
    data = (
        "from dataclasses import dataclass\nimport typing\n@dataclass\nclass A:\n    x: 'int' = "
        "1\nprint(A(), "
        "typing.get_type_hints(A))"
    )
    assert passes_program_test(data, "", "A(x=1) {'x': <class 'int'>}", LIMITS)
    assert not passes_program_test("print(1); raise ValueError", "", "1", LIMITS)
    assert passes_program_test("print(1); exit()", "", "1", LIMITS)


# The reward


def test_the_reward_scores_completions() -> None:
    correct, faulty = (
        "Sure:\n```python\ndef f(x):\n    return x + 1\n```\nDone.",
        "```python\ndef f(x):\n    return 2\n```",
    )
    tests = [["assert f(1) == 2", "assert f(2) == 3"]] * 2
    assert run_tests([correct, faulty], tests=tests) == [1.0, 0.0]
    assert run_tests([correct, faulty], tests=tests, partial_credit=True) == [1.0, 0.5]
    message = [{"role": "assistant", "content": correct}]
    assert run_tests([message, message], t=[None, []], tests_column="t") == [None, None]
    program = "```py\nprint(input() * 2)\n```"
    pairs = [{"input": "a", "output": "aa"}, {"input": "b", "output": "b"}]
    assert run_tests([program], tests=[json.dumps(pairs)], partial_credit=True) == [0.5]
    assert run_tests([program], tests=[pairs]) == [0.0]
    assert run_tests([correct], tests=["assert f(1) == 2\nassert f(3) == 4"]) == [1.0]
    with pytest.raises(ValueError, match="a test is a statement or"):
        run_tests([correct], tests=[[{"in": 1}]])
    with pytest.raises(SandboxError, match="a test is not Python"):
        run_tests([correct], tests=["assert f(1 == 2"])


def test_the_reward_in_the_pool_gives_hanging_code_zero_and_its_neighbours_theirs(
    tmp_path: Path,
) -> None:
    class Characters:
        def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
            return ["".join(map(chr, ids)) for ids in token_ids]

    texts = [
        "f = lambda x: x + 1",
        "while True: pass",
        "f = lambda x: x",
        "import os; os.kill(os.getppid(), 9); os.abort()",
    ] * 2
    prompt = Prompt(0, 0, [1], "p", {"tests": ["assert f(1) == 2"]})
    groups = [
        RolloutGroup(
            0, prompt, [Completion([*map(ord, text)], [0.0] * len(text), "stop") for text in texts]
        )
    ]
    config = RewardConfig(name="code", args={"time_s": 1.0})
    with RewardPool(
        [config], RewardPoolConfig(num_workers=2, timeout_s=60), tmp_path / "log"
    ) as pool:
        scored = pool.score(groups, Characters())
    assert scored.statuses == {"code": ["ok"] * 8}, scored.first_error
    assert scored.rewards == [1.0, 0.0, 0.0, 0.0] * 2


CLINGS = """
import ctypes, platform, threading, time
libc = ctypes.CDLL(None)
is_arm = platform.machine() == "aarch64"
for signal in (10, 0):
    libc.prctl(1, signal, 0, 0, 0)  # PR_SET_PDEATHSIG
    libc.syscall(167 if is_arm else 157, 1, signal, 0, 0, 0)
    libc.syscall(167 if is_arm else 157, ctypes.c_long(1 << 32 | 1), signal, 0, 0, 0)
for change in (libc.setuid, libc.setgid, libc.setfsuid, libc.setfsgid):  # a change of user takes it back
    for user in (0, 1, 65534):
        change(user)
{last}
time.sleep(1000)
"""  # noqa: E501
THREAD_STAYS = """
threading.Thread(target=time.sleep, args=(1000,)).start()
libc.syscall(93 if is_arm else 60, 0)  # the main thread alone ends
"""
RANK = """
import json, sys
from pathlib import Path
from tests.faults.test_sandbox import *
class Characters:
    def batch_decode(self, token_ids, skip_special_tokens):
        return ["".join(map(chr, ids)) for ids in token_ids]
texts = json.loads(sys.argv[1])
prompt = Prompt(0, 0, [1], "p", {"tests": [{"input": "", "output": "x"}]})
group = RolloutGroup(0, prompt, [Completion([*map(ord, text)], [0.0] * len(text), "stop") for text in texts])
config = RewardConfig(name="code", args={"time_s": 400.0})
with RewardPool([config], RewardPoolConfig(num_workers=2, timeout_s=500), Path(sys.argv[2])) as pool:
    pool.score([group], Characters())
"""  # noqa: E501


def test_code_does_not_outlive_a_tree_that_is_killed_at_once(tmp_path: Path) -> None:
    """Rank, nursery and workers get SIGKILL together: nobody is left to end what the code runs in,
    but the kernel."""
    texts = json.dumps([CLINGS.format(last=""), CLINGS.format(last=THREAD_STAYS)])
    rank = subprocess.Popen([sys.executable, "-c", RANK, texts, str(tmp_path / "log")], cwd=ROOT)
    tree: set[int] = {rank.pid}
    jails: set[int] = set()
    try:
        deadline = time.monotonic() + 180
        while sum(map(_runs, jails)) < 2:  # beside the one that tried whether there can be any
            assert time.monotonic() < deadline
            time.sleep(0.05)
            tree = _descendants(rank.pid)
            jails |= {pid for pid in tree if "jail.py" in _command(pid)}
        time.sleep(2)  # the code has done what it can
        tree = _descendants(rank.pid) | {rank.pid}
        assert sum(map(_runs, jails)) == 2
    finally:
        for number in (
            signal.SIGSTOP,
            signal.SIGKILL,
        ):  # so that all of them die before one of them looks
            for pid in tree - jails:
                os.kill(pid, number)
        rank.wait()
    deadline = time.monotonic() + 20
    while any(map(_runs, tree)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a thread of it does: its first one may have ended before the others."""
    try:
        return any(
            ") Z " not in path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")
        )
    except OSError:
        return False


def _command(pid: int) -> str:
    """Of any of its threads: the first one's reads empty once it has ended, which code in a jail
    may do at once."""
    try:
        return "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/cmdline"))
    except OSError:
        return ""


# One clock for all of a completion's tests


@pytest.mark.parametrize("partial_credit", [False, True])
def test_many_pairs_are_zero_and_not_unknown(partial_credit: bool) -> None:
    """40 pairs, each a while within what was once forgiven a pair: the sum of the code's own time
    is what counts."""
    pairs = [{"input": "", "output": "1"}] * 40
    code = "import time\ntime.sleep(0.9)\nprint(1)"
    start = time.monotonic()
    (score,) = run_tests([code], tests=[pairs], time_s=3.0, partial_credit=partial_credit)
    assert score == (
        pytest.approx(2.5 / 40, abs=1 / 40) if partial_credit else 0.0
    )  # 2 or 3 pairs of 0.9 s and a bit
    assert time.monotonic() - start < 30  # of 40 x 1 s
    assert run_tests(["print(1)"], tests=[pairs[:8]], time_s=2.0) == [
        1.0
    ]  # start-ups are not the code's


def test_all_pairs_end_under_the_pools_deadline(tmp_path: Path) -> None:
    """However short each is, start-ups included: right code that many pairs make too slow is 0, and
    never a timeout."""
    pairs = [{"input": "", "output": "1"}] * 400  # a minute of start-ups
    (reward,) = load_rewards(
        [RewardConfig(name="code", args={"time_s": 2.0, "partial_credit": True})], timeout_s=3.0
    )
    start = time.monotonic()
    (score,) = reward.function(
        prompts=["p"], completions=["print(1)"], completion_ids=[[1]], tests=[pairs]
    )
    assert time.monotonic() - start < 10
    assert 0 < score < 0.5
    with pytest.raises(ConfigError, match=r"code does not take '_wall_s'"):
        load_rewards([RewardConfig(name="code", args={"_wall_s": 9})])


def test_an_answer_whose_keys_collide_is_not_built() -> None:
    """Integers with one hash: a set of 100,000 of them takes minutes, and the judge is not in the
    sandbox."""
    code = "def f():\n    return {i * (2**61 - 1) for i in range(1, 2)} if False else Big()\n"
    code += (
        "class Big(set):\n    def __iter__(self):\n        return (i * (2**61 - 1) for i in "
        "range(100_000))\n"
    )
    start = time.monotonic()
    assert passes_statements(code, ["assert f() == {1, 2}"], LIMITS) == [False]
    assert time.monotonic() - start < 20


def test_output_of_many_lines_is_compared_at_once() -> None:
    assert not passes_program_test("print('x\\n' * 8_000_000)", "", "x", LIMITS)
    assert passes_program_test("print('a  \\nb\\n\\n ')", "", "a\nb", LIMITS)


# Closed where it cannot be shut


def _without(call: int, *, wrapped: bool = False) -> subprocess.CompletedProcess[str]:
    """Load the reward and run a program that would print, in a process where system call `call`
    does not exist."""
    source = f"""
import ctypes, struct
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.protocol import load_rewards
program = b"".join(struct.pack("HBBI", *i) for i in [(0x20, 0, 0, 0), (0x15, 0, 1, {call}), (6, 0, 0, 0x50026),
(6, 0, 0, 0x7fff0000)])
libc = ctypes.CDLL(None)
code = ctypes.create_string_buffer(program)
header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.c_ulong(ctypes.addressof(header))) == 0
try:
    load_rewards([RewardConfig(name="code")])
    print("loaded")
except ValueError as error:
    print(error)
from grpo_spmd.rewards.verifiers import run_tests
try:
    print(run_tests(["f = lambda x: x"], tests=["assert f(1) == 1"]))
except RuntimeError as error:
    print(error)
print(run_tests(["f = lambda x: x"], tests=["assert f(1) == 1"], isolation="none"))
"""  # noqa: E501
    command = [*(WITHOUT_NAMESPACES if wrapped else []), sys.executable, "-c", source]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_without_landlock_and_namespaces_nothing_runs_unless_asked() -> None:
    done = _without(444, wrapped=True)
    refusal, at_run, unprotected = done.stdout.splitlines()
    assert refusal.startswith(
        "rewards.0: model-written code cannot be isolated on this machine, and is not run: Linux "
    )
    assert "gives neither Landlock" in refusal
    assert refusal.endswith('; to run it unprotected, set args.isolation to "none"')
    assert "is not run" in at_run
    assert unprotected == "[1.0]"


def test_without_landlock_namespaces_are_enough() -> None:
    assert _without(444).stdout.splitlines() == ["loaded", "[1.0]", "[1.0]"]


def test_folders_deeper_than_python_goes_are_no_error_of_the_reward(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = (
        "import os\nfor _ in range(3000):\n    os.mkdir('a')\n    "
        "os.chdir('a')\nos.mkdir('b', 0)\nprint(1)"
    )
    assert passes_program_test(
        code, "", "1", Limits(time_s=10.0, memory_mib=1024, isolation="none")
    )
    deadline = time.monotonic() + 20
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not list(tmp_path.iterdir())
