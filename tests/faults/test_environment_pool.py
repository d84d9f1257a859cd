"""Environments that misbehave, in real processes: the others' episodes unchanged, the counts exact,
nothing left."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig, RewardConfig
from grpo_spmd.episodes.pool import EnvironmentPool, Failure, Reply
from grpo_spmd.rewards.trl import RewardError
from tests.faults.test_reward_pool import _alive, _wait_for_descendants, _wait_until_gone
from tests.support.processes import ROOT

# The row's `how`, and what the tool is given, say what it does.
ENVIRONMENT = '''
import asyncio, ctypes, json, os, random, signal, subprocess, sys, time

def act(how):
    if how == "raise": raise KeyError("gone")
    if how == "hang": time.sleep(1000)
    if how == "ignore":
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
    if how == "exit": sys.exit(3)
    if how == "_exit": os._exit(5)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault": ctypes.string_at(0)
    if how == "close": os.closerange(3, 1000); time.sleep(1000)
    if how == "garbage":
        for fd in range(3, 64):
            try: os.write(fd, b"\\xff" * 64)
            except OSError: pass
        time.sleep(1000)
    if how == "daemon hangs":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    if how == "fork lingers" and os.fork() == 0: time.sleep(1000)
    if how == "fork returns" and os.fork() == 0: pass
    if how == "print": print("x" * 10_000_000)
    if how == "deep": act_deep()
    if how == "set": return {1}
    if how == "block": return [{"type": "text", "text": "a", "__grpo_spmd_type__": "bytes"}]
    if how == "text": return "x" * 10_000_000
    if how == "much": return "x" * 100_000_000
    return "did " + how

def act_deep():
    return act_deep()

class World:
    def reset(self, how="", then="", **row):
        self.then, self.num = then, 0
        return act(how) if how else None

    def do(self, how: str) -> str:
        """
        Does it.

        Args:
            how: What.
        """
        self.num += 1
        return act(how)

    async def later(self, how: str) -> str:
        """
        Does it later.

        Args:
            how: What.
        """
        await asyncio.sleep(0)
        return act(how)

    def get_reward(self):
        if self.then: act(self.then)
        return self.num + 0.5

def judged(completions, environments, **columns):
    assert len(completions) == len(environments) == 1
    return [environments[0].num * 10 + len(completions[0])]
'''


def _call(*hows: str, tool: str = "do") -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": tool, "arguments": {"how": method}}}
        for method in hows
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


Pools = Callable[..., EnvironmentPool]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    (tmp_path / "world.py").write_text(ENVIRONMENT)
    created: list[EnvironmentPool] = []

    def make(
        *, rewards: bool = False, max_chars: int = 20_000_000, **options: Any
    ) -> EnvironmentPool:
        options = {
            "factory": f"{tmp_path}/world.py:World",
            "num_workers": 3,
            "call_timeout_s": 20.0,
            **options,
        }
        functions = (
            [RewardConfig(function=f"{tmp_path}/world.py:judged", weight=0.25)] if rewards else []
        )
        created.append(
            EnvironmentPool(
                EnvironmentConfig(**options), functions, tmp_path / "log", max_chars=max_chars
            )
        )
        assert created[-1].facts.kind == ("gym" if "gym" in options else "tools")
        return created[-1]

    yield make
    for pool in created:
        pool.close()


def _next(pool: EnvironmentPool, number: int = 1) -> dict[tuple[int, int], Reply | Failure]:
    """What comes next of `number` places."""
    result: dict[tuple[int, int], Reply | Failure] = {}
    deadline = time.monotonic() + 60
    while len(result) < number:
        assert time.monotonic() < deadline, result
        for position, reply in pool.poll(0.5):
            assert position not in result, (result, position, reply)
            result[position] = reply
    return result


def _played(
    pool: EnvironmentPool, position: tuple[int, int], row: dict[str, Any], *hows: str
) -> Reply | Failure:
    """The last word of an episode that is begun, calls tools and ends."""
    pool.begin(position, row, 7)
    reply = _next(pool)[position]
    for method in hows:
        if isinstance(reply, Failure):
            return reply
        pool.act(position, _call(method))
        reply = _next(pool)[position]
    if isinstance(reply, Reply):
        message = [{"role": "assistant", "content": ""}]
        pool.end(position, {"prompts": "p", "completions": message, "completion_ids": [1, 2]})
        reply = _next(pool)[position]
    if isinstance(reply, Reply):
        pool.release(position)
    return reply


def _failure(reply: Reply | Failure) -> tuple[str, str]:
    assert isinstance(reply, Failure), reply
    return reply.status, reply.error.splitlines()[0]


DIES = {
    "_exit": "exited with code 5",
    "kill": "died of SIGKILL",
    "segfault": "died of SIGSEGV",
    "close": "closed the worker's connection to the pool",
    "garbage": "closed the worker's connection to the pool",
    "exit": "raised SystemExit: 3 (world.py:12)",
}


def test_what_ends_a_process_costs_its_own_episode_alone(pools: Pools) -> None:
    """In reset, in a call and in get_reward; beside each an episode of another worker goes on as if
    nothing was."""
    pool = pools(rewards=True)
    assert list(pool.facts.weights.items()) == [("World", 1.0), ("judged", 0.25)]
    steady = (9, 9)
    pool.begin(steady, {}, 1)
    assert isinstance(_next(pool)[steady], Reply)
    for number, (method, reason) in enumerate(DIES.items()):
        result = [
            _played(pool, (number, 0), {"how": method}),
            _played(pool, (number, 1), {}, "fine", method),
            _played(pool, (number, 2), {"then": method}, "fine"),
        ]
        at = ("reset()", "tool 'do'", "its rewards")
        assert [_failure(single) for single in result] == [
            ("env_error", f"{location} {reason}") for location in at
        ]
        pool.act(steady, _call("fine", "fine"))
        reply = _next(pool)[steady]
        assert isinstance(reply, Reply)
        assert [message["content"] for message in reply.values["messages"]] == ["did fine"] * 2
    pool.end(steady, {"prompts": "p", "completions": [{}, {}], "completion_ids": [1]})
    reply = _next(pool)[steady]
    assert isinstance(reply, Reply)
    num_calls = 2 * len(DIES)  # the state is its own, and was never reset
    assert reply.values == {
        "rewards": {"World": num_calls + 0.5, "judged": num_calls * 10 + 2},
        "lost": "",
    }
    assert pool.poll(0.0) == []


@pytest.mark.parametrize("method", ["hang", "ignore", "daemon hangs"])
def test_what_hangs_is_killed_with_all_that_it_started(pools: Pools, method: str) -> None:
    pool = pools(call_timeout_s=1.5)
    reason = (
        "took longer than environment.call_timeout_s=1.5, or with all calls of its episode longer "
        "than environment.timeout_s=600"
    )
    assert _failure(_played(pool, (0, 0), {"how": method})) == ("env_timeout", f"reset() {reason}")
    assert _failure(_played(pool, (0, 0), {}, method)) == ("env_timeout", f"tool 'do' {reason}")
    _wait_for_descendants(pool._process.pid, 0)


def test_all_calls_of_an_episode_have_one_deadline_together(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\nclass Slow:\n    def reset(self, **row): pass\n    def step(self, action):\n"
        "        time.sleep(0.8)\n        return 'more', 1.0, False, {}\n"
    )
    pool = pools(factory={}, gym=f"{tmp_path}/slow.py:Slow", timeout_s=2.0)
    pool.begin((0, 0), {}, 1)
    reply = _next(pool)[0, 0]
    seconds = [reply.seconds]
    while isinstance(reply, Reply):
        time.sleep(0.3)  # the engine's time is not the environment's
        pool.act((0, 0), {"role": "assistant", "content": "go"})
        reply = _next(pool)[0, 0]
        seconds.append(reply.seconds)
    assert _failure(reply) == (
        "env_timeout",
        "step() took longer than environment.call_timeout_s=20, or with all calls of its episode "
        "longer than environment.timeout_s=2",
    )
    assert sum(seconds) > 1.9
    assert len(seconds) >= 3 or max(seconds) > 1


def test_results_that_are_large_odd_or_many(pools: Pools) -> None:
    pool = pools(max_chars=10_000_200)
    pool.begin((0, 0), {}, 1)
    _next(pool)

    def said(message: dict[str, Any]) -> dict[str, Any]:
        pool.act((0, 0), message)
        reply = _next(pool)[0, 0]
        assert isinstance(reply, Reply), reply
        return reply.values

    (large,) = said(_call("text"))["messages"]
    assert large["content"] == "x" * 10_000_000
    much = said(_call("much"))
    assert (much["messages"], much["too_long"]) == ([], 100_000_047)
    assert said(_call("set"))["messages"][0]["content"] == "{1}"
    assert "recursion" in said(_call("deep"))["messages"][0]["content"]
    for method in ("print", "fork returns", "fork lingers"):
        assert said(_call(method))["messages"][0]["content"] == f"did {method}"
    [block] = said(_call("block"))["messages"][0]["content"]
    assert block["__grpo_spmd_type__"] == "bytes"
    # A failure of the tool is for the policy to read; calls that cannot be made are counted, too.
    values = said(_call("raise", "fine"))
    assert [message["content"] for message in values["messages"]] == [
        "{'error': \"'gone'\"}",
        "did fine",
    ]
    assert (values["num_calls"], values["num_invalid"]) == (2, 0)
    # What a policy writes is text, whatever it looks like: this is how a row's dates travel.
    hostile = {"__grpo_spmd_type__": "date", "value": "x"}
    values = said(
        {"tool_calls": [{"type": "function", "function": {"name": "do", "arguments": hostile}}]}
    )
    assert (values["num_calls"], values["num_invalid"]) == (1, 1)
    assert "unexpected keyword argument '__grpo_spmd_type__'" in values["messages"][0]["content"]
    status, reason = _failure(_played(pool, (0, 1), {"how": "much"}))
    assert (status, reason[:50]) == (
        "env_error",
        "reset() raised ValueError: reset() gave 100,000,00",
    )


def test_an_answer_for_another_call_is_never_taken(pools: Pools, tmp_path: Path) -> None:
    """Planted: code that answers for its worker, with the number of an old call or of none."""
    (tmp_path / "forged.py").write_text(
        "import json, os, socket, stat, time\n"
        "def say(message):\n"
        "    payload = json.dumps(message).encode()\n"
        "    for fd in range(3, 64):\n"
        "        try:\n"
        "            if stat.S_ISSOCK(os.fstat(fd).st_mode): os.write(fd, "
        "len(payload).to_bytes(4, 'big') + payload)\n"
        "        except OSError: pass\n"
        "class Forged:\n"
        "    def reset(self, serial, **row):\n"
        "        say({'values': {'messages': 'of a sibling', 'tools': []}, 'serial': serial})\n"
        "        time.sleep(1000)\n"
        "    def step(self, action): pass\n"
    )
    pool = pools(factory={}, gym=f"{tmp_path}/forged.py:Forged")
    for number, serial in enumerate((99, 1, 2, None)):
        pool.begin((0, number), {"serial": serial}, 1)
        failure = _failure(_next(pool)[0, number])
        assert failure == ("env_error", "reset() answered another call than it was asked"), number


def test_more_episodes_than_workers_and_dropped_ones(pools: Pools) -> None:
    pool = pools(num_workers=2)
    positions = [(job, number) for job in range(3) for number in range(2)]
    for position in positions:
        pool.begin(position, {"how": "hang" if position == (0, 0) else "fine"}, 1)
    assert _next(pool).keys() == {(0, 1)}  # the others wait for a worker
    assert "reset() of episode 0/0 has run for" in pool.where()
    pool.drop((0, 0))
    pool.drop((1, 1))  # still waiting
    result: list[tuple[int, int]] = []
    pool.release((0, 1))
    while len(result) < 3:
        for position, reply in pool.poll(0.5):
            assert isinstance(reply, Reply)
            assert reply.values["messages"] == "did fine"
            result.append(position)
            pool.release(position)
    assert sorted(result) == [(1, 0), (2, 0), (2, 1)]
    assert pool.where() == ""
    # The dropped episode's worker was sent SIGKILL, and may take a while to die.
    _wait_for_descendants(pool._process.pid, 2)


def test_a_worker_that_dies_between_calls(pools: Pools) -> None:
    """An idle one costs nobody anything; one with an episode fails it at its next call, and not
    before."""
    pool = pools(num_workers=1)
    assert isinstance(_played(pool, (0, 0), {}), Reply)
    (worker,) = _wait_for_descendants(pool._process.pid, 1)
    os.kill(worker, signal.SIGKILL)
    _wait_until_gone({worker})
    time.sleep(0.1)
    pool.begin((0, 1), {}, 1)
    assert isinstance(_next(pool)[0, 1], Reply)
    (worker,) = _wait_for_descendants(pool._process.pid, 1)
    os.kill(worker, signal.SIGKILL)
    _wait_until_gone({worker})
    assert pool.poll(0.3) == []
    pool.act((0, 1), _call("fine"))
    status, reason = _failure(_next(pool)[0, 1])
    assert status == "env_error"
    early = "tool 'do' does not take a call: its process has ended, or is stopped"
    # the nursery may not have said yet
    assert reason in (early, "tool 'do' does not take a call: its process died of SIGKILL")
    pool.begin((0, 2), {}, 1)
    assert isinstance(_next(pool)[0, 2], Reply)
    (worker,) = _wait_for_descendants(pool._process.pid, 1)
    os.kill(worker, signal.SIGKILL)
    end = time.monotonic() + 30
    while pool._workers and time.monotonic() < end:
        assert pool.poll(0.1) == []
    pool.act((0, 2), _call("fine"))
    assert _failure(_next(pool)[0, 2]) == (
        "env_error",
        "tool 'do' does not take a call: its process died of SIGKILL",
    )
    assert isinstance(_played(pool, (0, 1), {}), Reply)


def test_a_dead_nursery_and_a_closed_pool(pools: Pools) -> None:
    pool = pools()
    pool.begin((0, 0), {}, 1)
    _next(pool)
    processes = _wait_for_descendants(pool._process.pid, 1)
    os.kill(pool._process.pid, signal.SIGKILL)
    with pytest.raises(
        RewardError, match="the process that starts the environment workers ended with code -9"
    ):
        _next(pool)
    _wait_until_gone(processes)
    second = pools()
    second.begin((0, 0), {"how": "daemon hangs"}, 1)
    processes = _wait_for_descendants(second._process.pid, 2)
    second.close()
    assert not _alive(processes)


def test_what_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("class NoReset:\n    def go(self): pass\ndef bare(x): pass\n")
    for options, reason in (
        ({"factory": f"{tmp_path}/bad.py:NoReset"}, "has no method reset"),
        ({"tools": (f"{tmp_path}/bad.py:bare",)}, "has no schema"),
        ({"gym": f"{tmp_path}/none.py:Env"}, "there is no file"),
    ):
        with (
            EnvironmentPool(EnvironmentConfig(**options), [], tmp_path / "log") as pool,
            pytest.raises(ConfigError) as e,
        ):
            _ = pool.facts
        assert reason in str(e.value)


DEBUG = """
import json, sys
from pathlib import Path
from grpo_spmd.config.schema import EnvironmentConfig
from grpo_spmd.episodes.pool import EnvironmentPool
options = {"factory": sys.argv[1], "num_workers": 2, "call_timeout_s": 1.0, "timeout_s": 2.0}
with EnvironmentPool(EnvironmentConfig(**options), [], Path(sys.argv[2])) as pool:
    pool.facts
    def next():
        while not (found := pool.poll(0.5)): pass
        return found[0][1]
    pool.begin((0, 0), {}, 1)
    next()
    for tool in ("stop", "stop_async"):
        pool.act((0, 0), {"tool_calls": [{"type": "function", "function": {"name": tool, "arguments": {}}}]})
        reply = next()
        print("gave", reply.values["messages"][0]["content"], flush=True)
"""  # noqa: E501


def test_a_breakpoint_in_a_tool_stops_the_clocks_and_has_the_terminal(tmp_path: Path) -> None:
    """Also in an async tool, which is in a thread of its own; longer than the deadline of a call
    and of an episode."""
    (tmp_path / "world.py").write_text(
        "class World:\n    def reset(self, **row): pass\n"
        "    def stop(self) -> int:\n        '''Stops.'''\n        value = 1\n        "
        "breakpoint()\n"
        "        return value\n"
        "    async def stop_async(self) -> int:\n        '''Stops.'''\n        return self.stop()\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(
            sys.executable,
            [sys.executable, "-c", DEBUG, f"{tmp_path}/world.py:World", f"{tmp_path}/log"],
        )
    displayed = ""
    for number in (2000, 3000):
        for text, answer in (
            ("(Pdb) ", f"value = {number}\n"),
            ("(Pdb) ", "c\n"),
            (f"gave {number}", ""),
        ):
            deadline = time.monotonic() + 60
            while text not in displayed:
                assert time.monotonic() < deadline, displayed
                if select.select([terminal], [], [], 1)[0]:
                    displayed += os.read(terminal, 4096).decode()
            displayed = displayed.partition(text)[2]
            if answer.startswith("value"):
                time.sleep(2.3)
            os.write(terminal, answer.encode())
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)
