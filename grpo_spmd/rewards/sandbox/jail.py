"""This module is the process in which model-written code runs: it isolates itself, then runs the
code.

    python -I -S -X utf8 jail.py SOCKET_FD

sandbox.py starts it with an empty environment and in its own session. A *wall* is one mechanism of
isolation. The code cannot take down any of these walls:

- seccomp: the process cannot create processes or sockets, signal or trace other processes, mount,
  use keys, bpf or io_uring, or change modes and owners of files. Since it can have no children,
  killing it ends everything.
- Landlock: the process can only read the Python installation and the system's libraries, and, with
  namespaces, use files in its scratch folder.
- Namespaces, where the kernel allows them: a root file system that has only these folders
  (read-only) and a scratch folder in memory of bounded size, and a network without interfaces.
  Without namespaces the code cannot write files or start threads, and stat() still tells which
  files exist outside.
- rlimits: memory, CPU time, file size, number of open files and of threads.
- No privileges: a process of root becomes another user; it has no capabilities and can gain none.

If the files or the network cannot be closed off, the process reports why and does not run the code.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import io
import json
import linecache
import operator
import os
import platform
import resource
import signal
import socket
import struct
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

# The bounds of the scratch folder, and of a file, the open files and the threads of the code.
_SCRATCH_BYTES, _SCRATCH_INODES = 64 << 20, 1024
_FILE_BYTES, _OPEN_FILES, _THREADS = 16 << 20, 64, 64
# Flags of unshare(2) (CLONE_*) and of mount(2) (MS_*).
_NEWUSER, _NEWNS, _NEWNET, _NEWIPC, _NEWUTS = 0x10000000, 0x20000, 0x40000000, 0x8000000, 0x4000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_libc = ctypes.CDLL(None, use_errno=True)

# By machine: the column of its system call numbers in the tables below, and its AUDIT_ARCH_* value.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
# lsm_list_modules, of Linux 6.8. System calls that later kernels add are refused.
_LAST_KNOWN_SYSCALL = 461
# Refused system calls: name, number on x86_64, number on aarch64 (-1: it does not exist there).
_REFUSED = """
    fork 57 -1, vfork 58 -1, execve 59 221, execveat 322 281, socket 41 198, connect 42 203, accept
    43 202, accept4 288 242, bind 49 200, listen 50 201, tkill 200 130, rt_sigqueueinfo 129 138,
    rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, pidfd_open 434 434, pidfd_getfd 438 438,
    ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, kcmp 312 272,
    process_madvise 440 440, process_mrelease 448 448, setpriority 141 140, sched_setaffinity 203
    122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274, ioprio_set 251
    30, migrate_pages 256 238, move_pages 279 239, mount 165 40, umount2 166 39, pivot_root 155 41,
    chroot 161 51, unshare 272 97, setns 308 268, open_tree 428 428, move_mount 429 429, fsopen 430
    430, fsconfig 431 431, fsmount 432 432, fspick 433 433, mount_setattr 442 442, name_to_handle_at
    303 264, open_by_handle_at 304 265, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
    io_uring_setup 425 425, io_uring_enter 426 426, io_uring_register 427 427, keyctl 250 219,
    add_key 248 217, request_key 249 218, memfd_create 319 279, memfd_secret 447 447, syslog 103
    116, personality 135 92, modify_ldt 154 -1, shmget 29 194, shmat 30 196, shmctl 31 195, semget
    64 190, msgget 68 186, mq_open 240 180, mq_unlink 241 181, chmod 90 -1, fchmod 91 52, fchmodat
    268 53, fchmodat2 452 452, chown 92 -1, fchown 93 55, lchown 94 -1, fchownat 260 54, utime 132
    -1, utimes 235 -1, utimensat 280 88, futimesat 261 -1, setxattr 188 5, lsetxattr 189 6,
    fsetxattr 190 7, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, inotify_add_watch
    254 27, fanotify_init 300 262
"""
# System calls that are allowed for some arguments: (number on x86_64, number on aarch64).
_CLONE, _CLONE3, _KILL, _TGKILL = (56, 220), (435, 435), (62, 129), (234, 131)
_PRLIMIT, _SOCKETPAIR, _FCNTL, _IOCTL, _PRCTL = (
    (302, 261),
    (53, 199),
    (72, 25),
    (16, 29),
    (157, 167),
)
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ_FILE, _LANDLOCK_READ_DIR = 1 << 2, 1 << 3
# WRITE_FILE, REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, MAKE_SYM and TRUNCATE.
_LANDLOCK_WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 14


# A classic BPF instruction: operation, jump if true, jump if false, operand. The operations are
# 0x20 (load a word), 0x15 (jump if equal), 0x25 (if greater), 0x45 (if a bit is set), 0x06
# (return).
_Instruction = tuple[int, int, int, int]


class Refused(Exception):
    """Raised if this machine cannot isolate code."""


def put_up_walls(job: dict[str, Any]) -> list[str]:
    """Isolates this process for good and returns the names of the walls.

    The job's `readable` are the absolute paths that the code may read, with everything below them.
    Its `scratch` is an empty folder, on which the new root file system is mounted where namespaces
    are allowed. Raises Refused if files or the network cannot be closed off.
    """
    readable = job["readable"]
    # PR_SET_PDEATHSIG: the process dies with its parent.
    _prctl(1, signal.SIGKILL)
    abi = max(_syscall(_LANDLOCK_CREATE, None, 0, 1), 0)
    has_own_root = _enter_namespaces(readable, job["scratch"])
    if not has_own_root and abi < 3:
        gives = f"gives neither Landlock (ABI 3, Linux 6.2; here {abi}) nor a mount namespace"
        raise Refused(f"Linux {platform.release()} {gives}, so that files cannot be closed off")
    set_limits(job)
    is_other_user = os.getuid() != 0
    if has_own_root and not is_other_user:
        # RLIMIT_NPROC does not bind root, so become a user id that nobody else has and that owns
        # nothing on this machine. A container may map low ids only: then take 65534 (nobody).
        is_other_user = any(_become(uid) for uid in (2_000_000_000 + os.getpid(), 65534))
    # Changing the user has cleared PR_SET_PDEATHSIG, so set it again.
    _prctl(1, signal.SIGKILL)
    # PR_SET_NO_NEW_PRIVS.
    _prctl(38, 1)
    if _libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)):
        raise Refused(f"cannot give up capabilities: {_error()}")
    if abi:
        _landlock(abi, readable, scratch="/tmp" if has_own_root else None)
    _seccomp(allow_threads=has_own_root and is_other_user)
    try:
        open(os.__file__, "rb").close()
    except OSError as error:
        raise Refused(f"Python's own library must be readable for all users: {error}") from None
    return ["seccomp", *(["landlock"] if abi else []), *(["namespaces"] if has_own_root else [])]


def set_limits(job: dict[str, Any]) -> None:
    """Sets the resource limits of a job, which work on every kernel.

    A write beyond the file size limit raises OSError in the code and does not kill the process,
    since Python ignores SIGXFSZ.
    """
    limits = {
        "AS": job["memory_bytes"],
        "CPU": job["cpu_s"],
        "FSIZE": _FILE_BYTES,
        "NOFILE": _OPEN_FILES,
        "CORE": 0,
        "NPROC": _THREADS,
        "MEMLOCK": 0,
    }
    for name, limit in limits.items():
        resource_id = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(resource_id)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource_id, (limit, limit))


def _enter_namespaces(readable: Sequence[str], scratch: str) -> bool:
    """Moves this process into its own mount, network, IPC and UTS namespaces, and returns True.

    Its new root file system has only `readable` and a scratch folder /tmp, which becomes the
    working folder. Returns False if the kernel or the container forbids this.
    """
    flags, uid, gid = _NEWNS | _NEWNET | _NEWIPC | _NEWUTS, os.getuid(), os.getgid()
    try:
        # A process without the privilege to unshare has it in a new user namespace.
        if uid != 0 or _libc.unshare(flags):
            if _libc.unshare(flags | _NEWUSER):
                return False
            for name, text in (
                ("setgroups", "deny"),
                ("uid_map", f"{uid} {uid} 1"),
                ("gid_map", f"{gid} {gid} 1"),
            ):
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(text)
        _mount(None, "/", None, _REC | _PRIVATE, None)
        size = f"size={_SCRATCH_BYTES},nr_inodes={_SCRATCH_INODES},mode=755"
        _mount("tmpfs", scratch, "tmpfs", _NOSUID | _NODEV, size)
        os.umask(0o022)
        for path in readable:
            target = scratch + path
            is_folder = os.path.isdir(path)
            os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
            if not is_folder:
                open(target, "w").close()
            _mount(path, target, None, _BIND | _REC, None)
            _mount(None, target, None, _BIND | _REMOUNT | _RDONLY | _NOSUID | _NODEV, None)
        os.makedirs(scratch + "/tmp", exist_ok=True)
        os.chmod(scratch + "/tmp", 0o777)
        os.chdir(scratch)
        # pivot_root(".", ".") leaves the old root mounted on top of the new one; umount2 with
        # MNT_DETACH (2) then removes it.
        number = (155, 41)[_ARCHITECTURES[platform.machine()][0]]
        if _syscall(number, b".", b".") or _libc.umount2(b".", 2):
            raise OSError(_error())
        os.chdir("/tmp")
    except (OSError, KeyError):
        # For example, a container's AppArmor profile may forbid mounting.
        return False
    return True


def _become(uid: int) -> bool:
    """Returns True if this process could change its user and group to `uid`."""
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError:
        return False
    return True


def _landlock(abi: int, readable: Sequence[str], scratch: str | None) -> None:
    """Restricts this process to reading `readable`, and to using files in `scratch` if it is given.

    `abi` is the version of Landlock in this kernel. Raises Refused if the kernel does not accept
    the rules.
    """
    # ABIs 1, 2, 3 and 5 know 13, 14, 15 and 16 rights on files. ABI 4 adds TCP bind and connect,
    # ABI 6 abstract Unix sockets and signals; each addition makes the struct longer.
    handled = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    ruleset = _syscall(_LANDLOCK_CREATE, attributes, size, 0)
    if ruleset < 0:
        raise Refused(f"cannot make a Landlock ruleset: {_error()}")
    rules = [
        (path, _LANDLOCK_READ_FILE | (_LANDLOCK_READ_DIR if os.path.isdir(path) else 0))
        for path in readable
    ]
    if scratch is not None:
        rules.append((scratch, _LANDLOCK_READ_FILE | _LANDLOCK_READ_DIR | _LANDLOCK_WRITE))
    for path, access in rules:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", access & handled, fd), 0):
            raise Refused(f"cannot add {path} to a Landlock ruleset: {_error()}")
        os.close(fd)
    if _syscall(_LANDLOCK_RESTRICT, ruleset, 0):
        raise Refused(f"cannot enter Landlock: {_error()}")
    os.close(ruleset)


def _seccomp(*, allow_threads: bool) -> None:
    """Installs a filter (a classic BPF program) that the kernel runs at every system call.

    Raises Refused if there is no filter for this machine or the kernel does not accept it.
    """
    if platform.machine() not in _ARCHITECTURES or sys.byteorder != "little":
        raise Refused(f"no system call filter is written for {platform.machine()}")
    column, architecture = _ARCHITECTURES[platform.machine()]
    # The instructions that end the filter: the call is allowed, fails with EPERM (refuse), or fails
    # with ENOSYS (unknown).
    allow, refuse, unknown = (
        (0x06, 0, 0, answer) for answer in (0x7FFF0000, 0x00050001, 0x00050026)
    )
    # Offsets of the low 32 bits of the first two arguments in struct seccomp_data.
    arg0, arg1 = 16, 24
    # The last two instructions of a rule: the first is reached if the argument has none of the
    # listed values, the second if it has one of them.
    only = (refuse, allow)
    never = (allow, refuse)
    pid = os.getpid()

    def load(offset: int) -> _Instruction:
        """Returns the instruction that loads 32 bits at an offset in struct seccomp_data."""
        return 0x20, 0, 0, offset

    # For a listed value the next rule decides; it needs the number of the call loaded again.
    only_and = (refuse, load(0))

    def rule(
        call: tuple[int, int],
        argument: int,
        values: Sequence[int],
        answers: tuple[_Instruction, _Instruction] = only,
        *,
        test: int = 0x15,
    ) -> list[_Instruction]:
        """Returns instructions that decide about `call` by one of its arguments.

        `call` has the system call's number on each architecture, `argument` is the argument's
        offset, and `answers` are the instructions for (no value fits, a value fits). `test` 0x15
        (BPF_JEQ) asks whether the argument equals one of `values`, 0x45 (BPF_JSET) whether it has
        one of these bits.
        """
        tests = [(test, len(values) - i, 0, value) for i, value in enumerate(values)]
        return [(0x15, 0, len(values) + 3, call[column]), load(argument), *tests, *answers]

    program = [
        # Kill the process if it makes a system call of another architecture.
        load(4), (0x15, 1, 0, architecture), (0x06, 0, 0, 0x80000000),
        # x32 system calls have larger numbers, so they are unknown, too.
        load(0), (0x25, 0, 1, _LAST_KNOWN_SYSCALL), unknown,
        # clone3 has its flags behind a pointer, which a filter cannot read. libc uses clone
        # instead if clone3 is unknown.
        (0x15, 0, 1, _CLONE3[column]), unknown,
        # 0x10000 is CLONE_THREAD: clone may create threads, but no processes.
        *rule(_CLONE, arg0, [0x10000] if allow_threads else [], test=0x45),
        *rule(_KILL, arg0, [pid]),
        *rule(_TGKILL, arg0, [pid]),
        *rule(_PRLIMIT, arg0, [0, pid]),
        # The code must not change PR_SET_PDEATHSIG, by which this process dies with its parent.
        *rule(_PRCTL, arg0, [1], never),
        # F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN and SIOCSPGRP can make the kernel send a signal
        # of the code's choice to any process of this user.
        *rule(_FCNTL, arg1, [8, 10, 15], never),
        *rule(_IOCTL, arg1, [0x8901, 0x8902], never),
        # asyncio needs pairs of AF_UNIX, SOCK_STREAM sockets, with or without SOCK_NONBLOCK and
        # SOCK_CLOEXEC. Datagram sockets are refused: they could send to any named socket.
        *rule(_SOCKETPAIR, arg0, [1], only_and),
        *rule(_SOCKETPAIR, arg1, [1, 0x801, 0x80001, 0x80801]),
    ]  # fmt: skip
    for call in _REFUSED.split(","):
        number = int(call.split()[1 + column])
        program += [(0x15, 0, 1, number), refuse] if number >= 0 else []
    program.append(allow)
    code = ctypes.create_string_buffer(
        b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    )
    header = ctypes.create_string_buffer(
        struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    )
    # PR_SET_SECCOMP, SECCOMP_MODE_FILTER.
    if _prctl(22, 2, ctypes.addressof(header)):
        raise Refused(f"cannot filter system calls: {_error()}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    """Calls mount(2); None stands for a null pointer. Raises OSError."""
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    if _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]):
        raise OSError(_error())


def _syscall(number: int, *arguments: Any) -> int:
    """Makes the system call with this number; returns its result, or -1 if it failed."""
    wide = (
        ctypes.c_long(argument) if isinstance(argument, int) else argument for argument in arguments
    )
    return int(_libc.syscall(ctypes.c_long(number), *wide))


def _prctl(option: int, *arguments: int) -> int:
    """Calls prctl(2), whose four further arguments are 0 if they are not given."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return int(_libc.prctl(option, *padded))


def _error() -> str:
    """Returns the text for errno after a call of libc that failed."""
    return os.strerror(ctypes.get_errno())


def _run_module(name: str, text: str) -> dict[str, Any]:
    """Runs the source `text` as a module called `name`; returns the module's dict of names."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    _run_source(text, f"<{name}>", "exec", module.__dict__)
    return module.__dict__


def _run_source(source: Any, name: str, mode: str, scope: dict[str, Any]) -> Any:
    """Runs `source`, text or a syntax tree, in a given scope, as exec and eval do.

    Returns an expression's value.
    """
    return types.FunctionType(compile(source, name, mode, dont_inherit=True), scope)()


def encode_value(value: Any) -> Any:
    """Returns a value as JSON, which sandbox.py decodes: None, bools and strings as they are, other
    plain types as [tag, content].

    Raises TypeError for other types: an object of the code's own class could claim to equal
    anything.
    """
    if value is None:
        return None
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    if isinstance(value, str):
        return "".join(value)
    if isinstance(value, bytes | bytearray):
        return ["b", bytes(value).hex()]
    if isinstance(value, dict):
        return ["d", [[encode_value(key), encode_value(item)] for key, item in value.items()]]
    for tag, kind in (("l", list), ("t", tuple), ("e", set | frozenset)):
        if isinstance(value, kind):
            return [tag, [encode_value(item) for item in value]]
    if hasattr(type(value), "__index__"):
        return ["i", hex(operator.index(value))]
    if hasattr(type(value), "__float__"):
        return ["f", float(value).hex()]
    raise TypeError(type(value).__name__)


def _run_statements(code: str, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Runs the code, then the tests' statements, which the trainer sends only after the code has
    run.

    Writes a message for each statement: its value and its secret if it raised nothing, else its
    number alone.
    """
    pristine = dict(vars(builtins))
    names = _run_module("solution", code)
    write({"loaded": True})
    statements = read()
    # A statement in mode "exec" is judged in this process. The code may have redefined `abs` or
    # `all` so that it passes, so leave out names of builtins that the code has defined.
    is_judged_here = any(statement["mode"] == "exec" for statement in statements)
    scope = {
        name: item for name, item in names.items() if not (is_judged_here and name in pristine)
    }
    scope |= {"__builtins__": pristine, "__name__": "tests"}
    for number, statement in enumerate(statements):
        try:
            value = _run_source(statement["source"], "<test>", statement["mode"], scope)
            answer = {"value": encode_value(value), "secret": statement["secret"]}
            write({"statement": number, **answer})
        except BaseException:
            write({"statement": number})
    os._exit(0)


class Head(io.StringIO):
    """A text stream that keeps the first `limit` characters and only counts the rest, so that
    endless printing does not fill the memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._room = limit
        self.num_cut = 0

    def write(self, text: str) -> int:
        """Keeps what there is room for, and returns len(text) as if all had been written."""
        head = text[: self._room]
        self._room -= super().write(head)
        self.num_cut += len(text) - len(head)
        return len(text)

    def close(self) -> None:
        """Does nothing, since the text is read after the code, which may have closed the stream."""


def _run_cells(read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Runs the code of each message that `read` returns and writes what it printed and its error.

    As in a notebook, a name that one piece of code defines is visible to the next one, and the
    value of the last expression is printed. A message has "code", "number" (which the answer
    repeats) and "limit" (in characters). Never returns: the trainer kills the process.
    """
    module = types.ModuleType("__main__")
    # Classes that the code defines get __module__ = "__main__", which must resolve to this module.
    sys.modules["__main__"] = module
    while True:
        job = read()
        out = Head(job["limit"])
        sys.stdout = sys.stderr = out
        error = _run_cell(job["code"], f"<call {job['number']}>", module.__dict__)
        # The error may be half as long as the output. Its end is kept: the last line of a traceback
        # names the exception.
        limit = job["limit"] // 2
        cut = len(error) - limit
        error = f"... [{cut:,} characters left out]\n{error[-limit:]}" if cut > 0 else error
        answer = {"printed": out.getvalue(), "num_cut": out.num_cut, "error": error}
        write({"number": job["number"], **answer})


def _run_cell(code: str, name: str, scope: dict[str, Any]) -> str:
    """Runs one piece of code and prints the value of its last expression.

    Returns the traceback as Python would print it, or "" if nothing was raised. `name` stands for
    the file name in the traceback.
    """
    try:
        body = ast.parse(code, name).body
        # Tracebacks take the lines of the code from this cache. The mtime None keeps linecache from
        # dropping the entry because there is no such file.
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        expression = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        _run_source(ast.Module(body, []), name, "exec", scope)
        if isinstance(expression, ast.Expr):
            value = _run_source(ast.Expression(expression.value), name, "eval", scope)
            if value is not None:
                print(repr(value))
    except BaseException as error:
        # SystemExit is caught too: the interpreter is kept for the next piece of code.
        try:
            frames = error.__traceback__
            # The outermost frames belong to this file; leave them out of the traceback.
            while frames is not None and frames.tb_frame.f_code.co_filename != name:
                frames = frames.tb_next
            return "".join(traceback.format_exception(type(error), error, frames, limit=20))
        except BaseException:
            # Formatting the error failed, for instance in its __str__.
            return f"{type(error).__name__}\n"
    return ""


def _main(fd: int) -> None:
    """Isolates this process, then runs the code of the job that arrives on the socket `fd`.

    The job is the first message of sandbox.Jail. If the process cannot be isolated, it reports why
    and ends without running the code.
    """
    connection = socket.socket(fileno=fd)
    lines = connection.makefile("rb")

    def read() -> Any:
        """Returns the trainer's next message."""
        return json.loads(lines.readline())

    def write(message: Any) -> None:
        """Sends a message to the trainer."""
        connection.sendall(json.dumps(message).encode() + b"\n")

    job = read()
    try:
        walls = []
        if job["isolation"] == "none":
            set_limits(job)
        else:
            walls = put_up_walls(job)
    except (Refused, OSError, ValueError) as error:
        write({"refused": str(error)})
        os._exit(1)
    write({"walls": walls})
    # Python itself may have added LC_CTYPE to the empty environment.
    os.environ.clear()
    # numpy's libraries start a thread for each core, and crash if they are not allowed to.
    os.environ.update({f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")})
    sys.path += job["site"]
    sys.argv = ["solution.py"]
    # site.py is not imported, for speed; it would have defined these two names.
    vars(builtins).update(exit=sys.exit, quit=sys.exit)
    sys.dont_write_bytecode = True
    if job["mode"] == "statements":
        _run_statements(job["code"], read, write)
    if job["mode"] == "cells":
        _run_cells(read, write)
    # A program is judged by what it prints, so its code does not get the socket to the trainer.
    lines.close()
    connection.close()
    _run_module("__main__", job["code"])


if __name__ == "__main__":
    _main(int(sys.argv[1]))
