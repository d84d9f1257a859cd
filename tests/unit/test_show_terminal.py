"""What reaches a terminal, byte by byte: its colours and nothing else that acts; and how a terminal
is left."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
import traceback
import unicodedata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from grpo_spmd.tools.show.__main__ import main
from tests.support.processes import ROOT, environment
from tests.support.shown_run import metrics_of, rollout_of, write_lines, write_run, write_scored_run

HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b5m\r over \x08\x7f\x00 \u202etxt.exe\u2066 "
    "\ud800 \u200b\u2028 \x85 \x0c end"
)
LONG = "x" * 100_000
WIDE = "\u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u2764\ufe0f " * 40
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


class TerminalOf:
    """The command on a terminal of its own; `is_fork`: as a copy of this process, which need not
    import it again."""

    def __init__(
        self, words: list[str], columns: int = 80, rows: int = 24, is_fork: bool = False, **env: str
    ) -> None:
        self.written = b""
        local = {
            name: value
            for name, value in environment().items()
            if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        local = {
            name: value for name, value in local.items() if not name.startswith(("LC_", "LANG"))
        }
        local |= {"PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8"} | env
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
            if is_fork:
                _become(words, local)
            os.execve(sys.executable, [sys.executable, "-m", "grpo_spmd.show", *words], local)

    def read_until(self, text: bytes | None, timeout_s: float = 60) -> None:
        """All that it writes until `text` is in it; None: until it ends."""
        deadline = time.monotonic() + timeout_s
        while text is None or text not in self.written:
            assert time.monotonic() < deadline, self.written
            if select.select([self._terminal], [], [], 0.2)[0]:
                try:
                    self.written += os.read(self._terminal, 1 << 16)
                except OSError:  # its end
                    assert text is None, self.written
                    return

    def type(self, text: bytes) -> None:
        os.write(self._terminal, text)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def wait(self) -> int:
        try:
            self.read_until(None)
        except AssertionError:
            os.kill(self.pid, signal.SIGKILL)
            raise
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _become(words: list[str], env: dict[str, str]) -> NoReturn:
    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["show", *words]
        sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        main()
        sys.stdout.flush()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def on_terminal(*words: str, columns: int = 80, **env: str) -> bytes:
    terminal = TerminalOf(list(words), columns, 24, True, **env)
    assert terminal.wait() == 0, terminal.written
    return terminal.written


def columns_of(line: str) -> int:
    """As a terminal that joins nothing draws it, by the tables of Unicode."""
    return sum(
        0
        if unicodedata.category(char) in ("Mn", "Me", "Cf")
        else 1 + (unicodedata.east_asian_width(char) in "WF")
        for char in line
    )


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whatever of a folder is text says what a terminal must not do."""
    name = HOSTILE.replace("\x00", "").replace("\ud800", "").replace("/", "")
    messages: list[Any] = [
        {
            "role": HOSTILE,
            "name": HOSTILE,
            "content": HOSTILE,
            "tool_calls": [{"function": {"name": HOSTILE}}],
        }
    ]
    messages += [
        {"role": "tool", "content": [{"type": "text", "text": HOSTILE}]},
        {"role": "tool", "content": {"a": HOSTILE}},
    ]
    deep = json.loads("[" * 900 + "]" * 900)
    turns = [{"segment": 0, "sampled": True, "token_ids": [3, 4, 0], "finish_reason": HOSTILE}]
    episode_values: dict[str, Any] = {"status": HOSTILE, "turns": turns, "messages": messages}
    episode_values |= {"environment": {"rewards": {}, "calls_s": [], "error": HOSTILE}}
    named: dict[str, Any] = {
        "rewards": {HOSTILE: 0.5},
        "statuses": {HOSTILE: HOSTILE},
        "columns": {HOSTILE: HOSTILE, "wide": WIDE},
    }
    named |= {
        "extra": {HOSTILE: {HOSTILE: HOSTILE}},
        "finish_reason": HOSTILE,
        "prompt": HOSTILE + LONG,
    }
    rollouts = [
        rollout_of(0, 0, 0.0, HOSTILE, **named),
        rollout_of(
            0,
            1,
            0.1,
            LONG + HOSTILE,
            prompt=[{"role": deep, "content": deep, "tool_calls": [deep, 7]}, 7, HOSTILE],
        ),
        rollout_of(1, 0, 0.2, HOSTILE, prompt=WIDE, **episode_values),
        rollout_of(1, 1, 0.3, WIDE + LONG + HOSTILE, prompt=WIDE),
        rollout_of(2, 0, 1e308, "\u0301" * 5_000, prompt="\u0301" * 500),
        rollout_of(3, 0, 1e299, "\u2764\ufe0f" * 5_000),
        rollout_of(3, 1, -1e299, "a\t" * 500, rewards={"right": 10**400}),
        rollout_of(2, 1, None, "\n" * 5_000, advantage=1e308),
    ]
    metrics = [
        metrics_of(
            step,
            **{f"reward/{HOSTILE}/mean": 0.1, f"{HOSTILE}/x": 1, f"memory/{HOSTILE}/peak_gib": 1},
        )
        for step in (1, 2)
    ]
    metrics += [{"step": 2, f"eval/{HOSTILE}/mean": 0.5}]
    launch = {
        "outcome": "failed",
        "why": HOSTILE,
        "start": HOSTILE,
        "world_size": 10**30,
        "devices": {HOSTILE: 1},
    }
    config = "model:\n  path: " + json.dumps(HOSTILE.replace("\ud800", "")) + "\n"
    run = write_run(tmp_path_factory.mktemp("show") / name, metrics, {2: rollouts}, launch, config)
    (run / "logs").mkdir()
    (run / "logs" / "failure.txt").write_text(HOSTILE, errors="surrogatepass")
    write_lines(run / "rollouts" / "step_000001.jsonl", [{HOSTILE: HOSTILE}])
    return run


PAGES = [
    (),
    ("--step", "2"),
    ("--worst", "9"),
    ("--best", "9", "--full"),
    ("--prompt", "11"),
    ("--prompt", "10"),
    ("--grep", "owned"),
]


@pytest.mark.parametrize("words", PAGES)
@pytest.mark.parametrize("columns", [60, 80])
def test_nothing_of_a_text_reaches_a_terminal_raw(
    hostile: Path, words: tuple[str, ...], columns: int
) -> None:
    written = on_terminal(str(hostile), *words, columns=columns)
    plain = COLOUR.sub(b"", written)
    assert plain != written  # it has colours
    text = plain.decode("utf-8")  # whole characters
    for line in text.split("\r\n"):
        result = {
            char
            for char in line
            if unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        }
        assert result <= {"\u200d"}, ascii(line)
        assert columns_of(line) <= columns, ascii(line)
    if words[:1] != ("--prompt",):
        assert "\\x1b]0;owned\\x07" in text
        assert "Traceback" not in text


@pytest.mark.parametrize("words", PAGES)
def test_a_terminal_that_knows_no_utf8_gets_none(hostile: Path, words: tuple[str, ...]) -> None:
    assert on_terminal(str(hostile), *words, LC_ALL="C").isascii()


def test_no_colours_where_they_are_not_wanted(hostile: Path) -> None:
    assert b"\x1b" not in on_terminal(str(hostile), "--worst", "9", NO_COLOR="1")
    assert b"\x1b" not in on_terminal(str(hostile), "--worst", "9", TERM="dumb")
    assert b"\x1b" in on_terminal(str(hostile), "--worst", "9", NO_COLOR="")


def test_tokens_have_the_colour_of_their_difference(tmp_path: Path) -> None:
    """0.5 nats in float32 are beyond all, 0.001 ten times the bound."""
    run = write_scored_run(tmp_path / "run")
    written = on_terminal(str(run), "--worst", "1")
    assert b"    a\x1b[1;37;41mb\x1b[0m\x1b[1;31m<end>\x1b[0m\r\n" in written
    assert (
        b"tokens in yellow: policy and engine 1.0e-4 nats apart or more; in red: 0.001"
        in COLOUR.sub(b"", written)
    )
    written = COLOUR.sub(b"", on_terminal(str(run), "--best", "1"))
    assert b"    ab<end>\r\n" in written
    assert b"tokens in yellow: policy and engine 1.0e-4 nats apart or more" in written
    assert b"    ab<end>\r\n" in on_terminal(str(run), "--best", "1", NO_COLOR="1")


def _piped(*words: str) -> subprocess.CompletedProcess[bytes]:
    env = environment() | {"PYTHONPATH": str(ROOT), "TERM": "xterm"}
    command = [sys.executable, "-m", "grpo_spmd.show", *words]
    return subprocess.run(command, capture_output=True, env=env, timeout=60, check=False)


def test_a_pipe_gets_plain_text(hostile: Path) -> None:
    done = _piped(str(hostile), "--worst", "9")
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout
    assert max(map(columns_of, done.stdout.decode().splitlines())) <= 80


@pytest.mark.parametrize("words", [(), ("--best", "9", "--full"), ("--grep", "e", "--full")])
def test_a_reader_that_has_seen_enough_is_no_error(hostile: Path, words: tuple[str, ...]) -> None:
    """| head: a pipe that nobody reads any more, from the first byte on."""
    read, write = os.pipe()
    os.close(read)
    env = environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "grpo_spmd.show", str(hostile), *words]
    done = subprocess.run(
        command, stdout=write, stderr=subprocess.PIPE, env=env, timeout=60, check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_line(hostile: Path) -> None:
    with open("/dev/full", "wb") as full:
        env = environment() | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "grpo_spmd.show", str(hostile)]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=env, timeout=60, check=False
        )
    assert done.returncode == 2
    assert done.stderr == b"error: stdout: No space left on device\n"


@pytest.fixture
def going(tmp_path: Path) -> Path:
    launch = {"outcome": None, "end": None, "host": "another"}
    current = time.time()
    return write_run(
        tmp_path / "run",
        [metrics_of(step, **{"time/unix_s": current}) for step in (1, 2)],
        launch=launch,
    )


def _append(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_of(step, **{"time/unix_s": time.time()})) + "\n")


def test_following_draws_again_and_ends_with_the_run(going: Path) -> None:
    terminal = TerminalOf([str(going), "--follow"], rows=60)
    terminal.read_until(b"step 1..2")
    terminal.read_until(b"more:")
    _append(going, 3)
    terminal.read_until(b"step 1..3")
    terminal.resize(100, 12)
    terminal.read_until(b"lines more on a higher terminal")
    launch = json.loads((going / "launches.jsonl").read_text())
    write_lines(
        going / "launches.jsonl", [launch | {"outcome": "done", "end": "2026-01-02T03:14:05.000Z"}]
    )
    _append(going, 4)
    assert terminal.wait() == 0
    final = terminal.written.rpartition(b"\x1b[H\x1b[J")[2]
    assert b"done after step 4" in final
    assert b"more:" in final  # the whole page stays
    allowed = re.sub(rb"\x1b\[(H|J|K)", b"", COLOUR.sub(b"", terminal.written))
    assert b"\x1b" not in allowed


def test_ctrl_c_ends_following(going: Path) -> None:
    terminal = TerminalOf([str(going), "--follow"])
    terminal.read_until(b"step 1..2")
    terminal.type(b"\x03")
    assert terminal.wait() == 0
    assert b"Traceback" not in terminal.written


def test_following_through_a_pipe_is_a_line_a_step(going: Path, tmp_path: Path) -> None:
    env = environment() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "grpo_spmd.show", str(going), "--follow"]
    with (tmp_path / "out").open("w") as out:
        child = subprocess.Popen(command, stdout=out, env=env)
    try:
        _wait_for(tmp_path / "out", "more:")
        _append(going, 3)
        _wait_for(tmp_path / "out", "step 3/20")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 0
    finally:
        child.kill()
        child.wait()
    page, line = (tmp_path / "out").read_text().rsplit("\n", 2)[:2]
    assert "step 2/20" in page
    assert line.split()[:3] == ["step", "3/20", "0.030"]


def _wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.1)


def test_the_console_script_knows_it() -> None:
    command = [sys.executable, "-m", "grpo_spmd.cli", "show", "--help"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment() | {"COLUMNS": "80"},
        check=True,
        cwd=ROOT,
    )
    assert "--grep TEXT" in done.stdout
    assert "--worst K" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
