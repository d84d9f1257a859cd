"""Rewards that misbehave, in real processes: the others' rewards unchanged, the counts exact,
nothing left behind."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import math
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.protocol import RewardError
from tests.support.processes import ROOT, Job
from tests.support.stub_server import stub_server

# What a completion says is what the reward does with it; every other completion is worth a number
# with all 53 bits in
# use.
BEHAVIOURS = """
import asyncio, ctypes, json, math, os, signal, subprocess, sys, time

def worth(text):
    return math.sqrt(len(text) + 0.1) * sum(map(ord, text)) / 7

def act(text):
    if text == "raise": raise KeyError("gone")
    if text == "hang": time.sleep(1000)
    if text == "spin":
        while True: pass
    if text == "ignore":
        for number in range(1, 65):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        while True: time.sleep(1)
    if text == "none": return None
    if text == "nan": return math.nan
    if text == "inf": return math.inf
    if text == "word": return "1.0"
    if text == "exit": sys.exit(0)
    if text == "_exit": os._exit(0)
    if text == "interrupt": raise KeyboardInterrupt
    if text == "segfault": ctypes.string_at(0)
    if text == "close": os.closerange(3, 1000); time.sleep(1000)
    if text == "garbage":
        for fd in range(3, 64):
            try: os.write(fd, b"\\xff" * 64)
            except OSError: pass
        time.sleep(1000)
    if text == "odd number":
        frame = b'{"values": {"__grpo_spmd_type__": "Decimal", "value": "x"}}'
        for fd in range(3, 64):
            try: os.write(fd, len(frame).to_bytes(4, "big") + frame)
            except OSError: pass
        time.sleep(1000)
    if text == "fork returns" and os.fork() == 0: pass
    if text == "fork raises" and os.fork() == 0: raise ValueError("in the child")
    if text == "fork lingers" and os.fork() == 0: time.sleep(1000)
    if text == "fork lingers and dies":
        if os.fork() == 0: time.sleep(1000)
        os._exit(3)
    if text == "daemon hangs":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        time.sleep(1000)
    if text == "print":
        print("x" * 10_000_000); print("y" * 10_000_000, file=sys.stderr)
    return worth(text)

def one(completions, **columns):
    return [act(text) for text in completions]

def two(completions, **columns):
    return [worth(text) + 1 for text in completions]

async def late(completions, **columns):
    await asyncio.sleep(0.01)
    return [act(text) for text in completions]

def ranked(completions, **columns):  # what a completion gets depends on the whole group
    order = sorted(completions)
    return [act(text) if text in ("raise", "hang") else order.index(text) / 3 for text in completions]

def short(completions, **columns):
    return [worth(text) for text in completions if text != "short"]

def grouped(completions, **columns):  # for single completions alone
    assert len(completions) == 1, "one at a time"
    return [worth(text) for text in completions]

def logs(completions, log_metric, log_extra, **columns):
    log_metric("nan", math.nan)
    log_metric("length", sum(map(len, completions)) / len(completions))
    log_extra("length", [len(text) for text in completions if text != "short"])
    return [worth(text) for text in completions]

def kept(completions, scale, **columns):
    return [scale * worth(text) for text in completions]
"""  # noqa: E501

FAILS = {
    **dict.fromkeys(["hang", "spin", "ignore", "daemon hangs"], "timeout"),
    **dict.fromkeys(
        [
            "raise",
            "nan",
            "inf",
            "word",
            "exit",
            "_exit",
            "interrupt",
            "segfault",
            "close",
            "garbage",
            "odd number",
            "fork lingers and dies",
        ],
        "error",
    ),
}


class CharacterTokenizer:
    """Token ids are code points."""

    def batch_decode(
        self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool
    ) -> list[str]:
        assert skip_special_tokens
        return ["".join(map(chr, ids)) for ids in token_ids]


def _groups(*groups: Sequence[str]) -> list[RolloutGroup]:
    return [
        RolloutGroup(
            slot,
            Prompt(slot, slot, [1], "p", {}),
            [Completion([ord(c) for c in t], [-1.0] * len(t), "stop") for t in texts],
        )
        for slot, texts in enumerate(groups)
    ]


def worth(text: str) -> float:
    return math.sqrt(len(text) + 0.1) * sum(map(ord, text)) / 7


Score = Callable[..., ScoredRollouts]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[..., RewardPool]]:
    created: list[RewardPool] = []
    (tmp_path / "mine.py").write_text(BEHAVIOURS)

    def make(
        *names: str,
        num_workers: int = 4,
        timeout_s: float = 1.0,
        args: dict[str, Any] | None = None,
    ) -> RewardPool:
        rewards = [
            RewardConfig(function=f"{tmp_path}/mine.py:{name}", args=args or {}) for name in names
        ]
        config = RewardPoolConfig(num_workers=num_workers, timeout_s=timeout_s)
        created.append(RewardPool(rewards, config, tmp_path / "run/logs/rewards_rank_0.log"))
        return created[-1]

    yield make
    for pool in created:
        pool.close()


def _descendants(pid: int) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    result = {pid}
    while more := {child for child, parent in parents.items() if parent in result} - result:
        result |= more
    return result - {pid}


def _children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if _is_alive(pid)}


def _is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has been reaped, perhaps while its file was read
        return False


def _wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 20
    while alive := _alive(pids):
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


def _wait_for_descendants(pid: int, number: int) -> set[int]:
    """The living descendants, once there are exactly so many. A killed process lives until the
    machine has had time to end it, and a helper is not there as soon as its worker is."""
    deadline = time.monotonic() + 20
    while len(alive := _alive(_descendants(pid))) != number:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)
    return alive


@pytest.mark.parametrize(("name", "num_steps"), [("one", 2), ("late", 1)])
def test_every_misbehaviour_costs_its_own_completion_alone(
    pools: Callable[..., RewardPool], name: str, num_steps: int
) -> None:
    """Twice with the same pool: what happened in the first step must not show in the second."""
    bad = [*FAILS, "none", "fork returns", "fork raises", "fork lingers", "print"]
    groups = [[f"a{i}", text, f"bc{i}", f"d{i}" * 50] for i, text in enumerate(bad)] + [
        ["fine", "too", "", "x"]
    ]
    expected_status = [
        FAILS.get(text, "not_applicable" if text == "none" else "ok")
        for group in groups
        for text in group
    ]
    pool = pools(name, "two")
    for _ in range(num_steps):
        scored = pool.score(_groups(*groups), CharacterTokenizer())
        assert scored.statuses == {name: expected_status, "two": ["ok"] * len(expected_status)}
        for text, status, value, second, total in zip(
            scored.texts,
            expected_status,
            scored.by_name[name],
            scored.by_name["two"],
            scored.rewards,
            strict=True,
        ):
            assert second == worth(text) + 1
            if status == "ok":
                assert value == worth(text), text  # to the last bit
                assert total == worth(text) + (worth(text) + 1)
            elif status == "not_applicable":
                assert (value, total) == (None, worth(text) + 1)
            else:
                assert value is not None
                assert math.isnan(value)
                assert total is None


def test_a_function_over_the_group_sees_the_group(pools: Callable[..., RewardPool]) -> None:
    pool = pools("ranked")
    scored = pool.score(_groups(["c", "a", "b", "d"], ["z", "y", "x", "w"]), CharacterTokenizer())
    assert scored.rewards == [2 / 3, 0, 1 / 3, 1, 1, 2 / 3, 1 / 3, 0]
    # A failure elsewhere changes nothing for a group that has none.
    scored = pool.score(
        _groups(["c", "a", "b", "d"], ["z", "raise", "x", "w"]), CharacterTokenizer()
    )
    assert scored.rewards[:4] == [2 / 3, 0, 1 / 3, 1]
    assert scored.statuses["ranked"] == ["ok"] * 5 + ["error", "ok", "ok"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("short", "returned 2 values for 3 completions"),
        ("logs", r"log_extra\('length'\) got 2 values for 3 completions"),
    ],
)
def test_a_list_of_the_wrong_length_stops_at_once(
    pools: Callable[..., RewardPool], name: str, reason: str
) -> None:
    pool = pools(name)
    with pytest.raises(RewardError, match=f"^reward '{name}' {reason}$"):
        pool.score(
            _groups(["a", "b", "d"], ["a", "short", "b"], ["c", "d", "e"]), CharacterTokenizer()
        )
    # A completion alone is no other matter, and a sound group is none of it.
    with pytest.raises(RewardError, match=r"(returned|got) 0 values for 1 completions"):
        pool.score(_groups(["short"]), CharacterTokenizer())
    assert pool.score(_groups(["a", "b"]), CharacterTokenizer()).rewards == [worth("a"), worth("b")]


def test_groups_that_were_called_again_are_noted(
    pools: Callable[..., RewardPool], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("grpo_spmd").propagate = True  # a run turns it off
    scored = pools("grouped", "logs").score(
        _groups(["a", "b"], ["c"], ["d", "e"]), CharacterTokenizer()
    )
    assert scored.by_name["grouped"] == [worth(text) for text in "abcde"]
    assert [
        i for i, note in sorted(scored.notes.items()) if note.get("retried") == {"grouped": "error"}
    ] == [0, 3]
    assert scored.first_error is not None
    assert "AssertionError: one at a time" in scored.first_error
    messages = [record.getMessage() for record in caplog.records]
    assert any("2 groups were called again one by one" in message for message in messages)
    assert "reward 'logs': not logged: a value of the metric 'nan': nan" in messages


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "raised KeyError: 'gone' (mine.py:8)"),
        ("exit", "raised SystemExit: 0 (mine.py:21)"),
        ("_exit", "exited with code 0"),
        ("segfault", "died of SIGSEGV"),
        ("hang", "took longer than timeout_s=0.3"),
        ("nan", "returned nan"),
        ("word", "returned '1.0', which is no number"),
        ("close", "closed the worker's connection to the pool"),
        ("fork lingers and dies", "exited with code 3"),
    ],
)
def test_the_first_error_says_what_happened(
    pools: Callable[..., RewardPool], text: str, reason: str
) -> None:
    timeout_s = 0.3 if text == "hang" else 30
    scored = pools("one", timeout_s=timeout_s).score(_groups(["a", text]), CharacterTokenizer())
    assert scored.first_error is not None
    assert scored.first_error.splitlines()[0] == f"reward 'one' {reason}"
    if text == "raise":
        assert 'mine.py", line' in scored.first_error
        assert "worker.py" not in scored.first_error


def test_failures_are_counted_in_one_warning(
    pools: Callable[..., RewardPool], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("grpo_spmd").propagate = True  # a run turns it off
    pools("one", timeout_s=2).score(
        _groups(["a", "raise", "hang"], ["word", "b", "c"]), CharacterTokenizer()
    )
    assert [record.getMessage() for record in caplog.records] == [
        "reward 'one': 3 of 6 completions failed (1 timeout, 2 error), 1 groups were "
        "called again one by one; first: reward 'one' raised KeyError: 'gone' (mine.py:8)"
    ]


def test_many_hanging_completions_take_bounded_time(pools: Callable[..., RewardPool]) -> None:
    # (4 groups + 8 completions) / 4 workers * 1.5 s = 4.5 s; one after the other 18 s
    groups = [["hang", "a", "hang", "b"] for _ in range(4)]
    start = time.monotonic()
    scored = pools("one", timeout_s=1.5).score(_groups(*groups), CharacterTokenizer())
    assert time.monotonic() - start < 15
    assert scored.statuses["one"] == ["timeout", "ok"] * 8


def test_a_function_that_always_hangs_stops_before_every_deadline_has_passed(
    pools: Callable[..., RewardPool],
) -> None:
    pool = pools("one", timeout_s=0.3)
    with pytest.raises(
        RewardError,
        match=r"reward 'one' gave no usable value for .* reward_pool\.max_error_frac=0\.3",
    ) as caught:
        pool.score(_groups(*[["hang"]] * 20), CharacterTokenizer(), num_step_completions=20)
    assert any(f"for {failed} of 20 completions" in str(caught.value) for failed in (6, 7, 8, 9))
    # The pool is still good. On a busy machine even a quick function may take longer than 0.3 s.
    rewards = (pool.score(_groups(["a"]), CharacterTokenizer()).rewards for _ in range(20))
    assert next(scored for scored in rewards if scored != [None]) == [worth("a")]


def test_what_rewards_print_is_in_a_bounded_file(
    pools: Callable[..., RewardPool], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = pools("one", timeout_s=30)
    assert not (
        tmp_path / "run"
    ).exists()  # the run folder is made late: nothing may be there before
    for _ in range(3):
        pool.score(_groups(["print"], ["print"]), CharacterTokenizer())
    log = tmp_path / "run/logs/rewards_rank_0.log"
    assert log.stat().st_size < 40e6
    pool.score(_groups(["a"]), CharacterTokenizer())
    assert log.stat().st_size <= 16 << 20
    assert capfd.readouterr() == ("", "")


def test_columns_arrive_as_they_are(tmp_path: Path) -> None:
    columns = {
        "answer": {"a": [1, None, 2.5, "\ud800"]},
        "blob": b"\x00\xff",
        "when": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
        "day": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("0.10"),
        "big": 2**80,
    }
    (tmp_path / "mine.py").write_text(
        f"import datetime\nfrom decimal import Decimal\nexpected = {columns!r}\n"
        "def reward(prompts, completions, completion_ids, missing, **columns):\n"
        "    for name in ('trainer_state', 'log_metric', 'log_extra'): columns.pop(name)\n"
        "    assert columns == {n: [v] * 2 for n, v in (expected | {'elsewhere': "
        "None}).items()}, columns\n"
        "    assert (prompts, completions, completion_ids, missing) == (['p'] * 2, ['a', 'b'], "
        "[[97], [98]], [None] * "
        "2)\n"
        "    return [1.0, 2.0]\n"
    )
    (group,) = _groups(["a", "b"])
    group.prompt.columns.update(columns, prompts="not this one")
    config = RewardConfig(function=f"{tmp_path}/mine.py:reward")
    with RewardPool(
        [config], RewardPoolConfig(num_workers=1), tmp_path / "log", columns=["answer", "elsewhere"]
    ) as pool:
        scored = pool.score([group], CharacterTokenizer())
        assert scored.first_error is None, scored.first_error
        assert scored.rewards == [1.0, 2.0]


def test_workers_have_the_ranks_environment_and_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "17")
    (tmp_path / "mine.py").write_text(
        "import os, sys\ndef reward(completions):\n    assert 'torch' not in sys.modules\n    "
        "return "
        "[float(os.environ['RANK'])]\n"
    )
    with RewardPool(
        [RewardConfig(function=f"{tmp_path}/mine.py:reward")], RewardPoolConfig(), tmp_path / "log"
    ) as pool:
        assert pool.score(_groups(["a"]), CharacterTokenizer()).rewards == [17.0]


def test_workers_have_no_secret_of_the_trainer_and_not_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server beside the function is still asked with its header."""
    for name in ("HF_TOKEN", "WANDB_API_KEY", "RM_TOKEN", "TEACHER_TOKEN", "MINE"):
        monkeypatch.setenv(name, "secret")
    (tmp_path / "mine.py").write_text(
        "import os\n"
        "def reward(completions, log_extra):\n"
        "    files = {os.readlink(f'/proc/self/fd/{fd}') for fd in os.listdir('/proc/self/fd')\n"
        "             if os.path.islink(f'/proc/self/fd/{fd}')}\n"
        "    names = [name for name, value in os.environ.items() if value == 'secret']\n"
        "    log_extra('names', [names])\n"
        "    log_extra('files', [sorted(files)])\n"
        "    return [1.0]\n"
    )
    output = tmp_path / "output"
    saved = os.dup(1)
    try:
        with output.open("w") as file, stub_server(lambda body: {"score": 2.0}) as server:
            os.dup2(file.fileno(), 1)
            rewards = [
                RewardConfig(function=f"{tmp_path}/mine.py:reward"),
                RewardConfig(name="rm", url=server.url, headers_env={"X-Key": "RM_TOKEN"}),
            ]
            with RewardPool(
                rewards, RewardPoolConfig(), tmp_path / "log", secrets={"TEACHER_TOKEN"}
            ) as pool:
                scored = pool.score(_groups(["a"]), CharacterTokenizer())
            [request] = server.asked
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert scored.rewards == [3.0]
    assert request.headers["x-key"] == "secret"
    extra = scored.notes[0]["extra"]["reward"]
    assert extra["names"] == ["MINE"]
    assert str(output) not in extra["files"]
    assert str(tmp_path / "log") in extra["files"]


def test_shipped_rewards_run_in_the_pool(tmp_path: Path) -> None:
    """math-verify sets its deadlines with SIGALRM on the main thread; weights and n/a as in the
    config."""
    rewards = [
        RewardConfig(name="math", weight=2.0),
        RewardConfig(name="format", args={"pattern": ".*4.*"}, weight=0.5),
    ]
    (group,) = _groups(["so \\boxed{4}", "so \\boxed{5}"])
    group.prompt.columns["answer"] = "4"
    with RewardPool(rewards, RewardPoolConfig(), tmp_path / "log") as pool:
        assert pool.score([group], CharacterTokenizer()).rewards == [2.5, 0.0]


def test_what_completions_say_cannot_fail_a_shipped_reward(tmp_path: Path) -> None:
    """Six completions of which each would keep math-verify, or the pattern, busy beyond the pool's
    deadline."""
    rewards = [RewardConfig(name="math"), RewardConfig(name="format", args={"pattern": "(a+)+b"})]
    (group,) = _groups(
        [
            "the answer is 9^9^9^9",
            "\\boxed{((9!)!)!}",
            "a" * 5000,
            "1 " * 30_000,
            "\\boxed{4}",
            "`" * 64_000,
        ]
    )
    group.prompt.columns["answer"] = "4"
    with RewardPool(rewards, RewardPoolConfig(timeout_s=30), tmp_path / "log") as pool:
        scored = pool.score([group], CharacterTokenizer(), num_step_completions=6)
    assert scored.statuses == {"math": ["ok"] * 6, "format": ["ok"] * 6}
    assert scored.rewards == [0.0, 0.0, 0.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_no_harm(tmp_path: Path, closed: str) -> None:
    """The pool's sockets, and the sandbox's, would get their numbers, and be replaced where
    processes start."""
    (tmp_path / "mine.py").write_text(BEHAVIOURS)
    source = (
        "import sys\nfrom pathlib import Path\n"
        "from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig\n"
        "from grpo_spmd.records import Completion, Prompt, RolloutGroup\n"
        "from grpo_spmd.rewards.pool.pool import RewardPool\n"
        "from grpo_spmd.rewards.sandbox.sandbox import Limits, passes_program_test\n"
        "class Tokenizer:\n"
        "    def batch_decode(self, ids, skip_special_tokens):\n        return [chr(own[0]) for "
        "own in ids]\n"
        "ok = passes_program_test('print(1)', '', '1', Limits(10, 1024, 'required'))\n"
        "group = RolloutGroup(0, Prompt(0, 0, [1], 'p', {}), [Completion([97], [0.0], 'stop')] * "
        "2)\n"
        f"with RewardPool([RewardConfig(function='{tmp_path}/mine.py:one')], "
        "RewardPoolConfig(num_workers=2), "
        f"Path('{tmp_path}/log')) as pool:\n"
        "    print('never seen')\n"
        "    rewards = [pool.score([group], Tokenizer()).rewards for _ in range(2)]\n"
        f"Path('{tmp_path}/out').write_text(repr((ok, rewards)))\n"
    )
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(source)} {closed}"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, timeout=60, check=False).returncode == 0
    assert (tmp_path / "out").read_text() == repr((True, [[worth("a")] * 2] * 2))


def test_workers_beyond_the_limit_of_open_files(tmp_path: Path) -> None:
    """The soft limit is raised where the hard one has room; where it has none, one line says how
    many would do."""
    (tmp_path / "mine.py").write_text(BEHAVIOURS)
    source = (
        "import sys\nfrom pathlib import Path\n"
        "from tests.faults.test_reward_pool import *\nfrom tests.faults.test_reward_pool import "
        "_groups\n"
        "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (120, int(sys.argv[1])))\n"
        f"with RewardPool([RewardConfig(function='{tmp_path}/mine.py:one')], "
        "RewardPoolConfig(num_workers=150), "
        f"Path('{tmp_path}/log')) as pool:\n"
        "    print(sum(x is not None for x in pool.score(_groups(*[['a']] * 150), "
        "CharacterTokenizer()).rewards))\n"
    )

    def output(hard: int) -> str:
        run = [sys.executable, "-c", source, str(hard)]
        done = subprocess.run(
            run, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        return (done.stdout + done.stderr).strip()

    assert output(256).endswith("150")
    assert output(200).endswith(
        "ConfigError: reward_pool.num_workers (150) needs 250 open files on each rank, and the "
        "limit of open files "
        "(ulimit -Hn) is 200: at most 100 workers fit"
    )


def test_close_ends_every_process_and_what_they_left(pools: Callable[..., RewardPool]) -> None:
    pool = pools("one")
    pool.score(_groups(["fork lingers"], ["fork lingers"], ["a"]), CharacterTokenizer())
    processes = _descendants(pool._process.pid)
    assert len(processes) >= 4
    pool.close()
    assert not _alive(processes | {pool._process.pid})


def test_helpers_of_a_killed_worker_are_killed_even_in_a_session_of_their_own(
    pools: Callable[..., RewardPool],
) -> None:
    pool = pools("one", num_workers=1, timeout_s=0.5)
    pool.score(_groups(["daemon hangs"], ["fork lingers and dies"]), CharacterTokenizer())
    deadline = time.monotonic() + 10
    while len(alive := _alive(_descendants(pool._process.pid))) > 1:
        assert time.monotonic() < deadline, alive
        time.sleep(0.02)


@pytest.mark.parametrize("when", ["idle", "scoring", "a worker's death unheard"])
def test_a_killed_rank_leaves_no_process(tmp_path: Path, when: str) -> None:
    (tmp_path / "mine.py").write_text(BEHAVIOURS)
    text = "fork lingers" if when == "idle" else "daemon hangs"
    source = (
        "import sys, time\nfrom pathlib import Path\n"
        "from tests.faults.test_reward_pool import *\nfrom tests.faults.test_reward_pool import "
        "_groups\n"
        f"pool = RewardPool([RewardConfig(function='{tmp_path}/mine.py:one')], "
        "RewardPoolConfig(timeout_s=500), "
        f"Path('{tmp_path}/log'))\n"
        f"pool.score(_groups(['a'], ['b']), CharacterTokenizer())\nprint('ready', flush=True)\n"
        f"pool.score(_groups(['{text}'], ['{text}'], ['c']), CharacterTokenizer())\nprint('idle', "
        "flush=True)\ntime.sleep(1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        for _ in range(2 if when == "idle" else 1):
            rank.stdout.readline()
        # The nursery, three workers, and a helper of each of two workers.
        processes = _wait_for_descendants(rank.pid, 6)
        # the kernel then ends the nursery's connection with an error instead of an end of file
        if when == "a worker's death unheard":
            os.kill(rank.pid, signal.SIGSTOP)
            (nursery,) = _children(rank.pid)
            hanging = [worker for worker in sorted(_children(nursery)) if _children(worker)]
            os.kill(hanging[0], signal.SIGKILL)
            _wait_until_gone({hanging[0]})
            time.sleep(0.2)
        os.kill(rank.pid, signal.SIGKILL)
        _wait_until_gone(processes)


def test_a_killed_nursery_is_an_error_and_not_a_hang(pools: Callable[..., RewardPool]) -> None:
    pool = pools("one", "two")
    pool.score(_groups(["a"], ["b"]), CharacterTokenizer())
    processes = _descendants(pool._process.pid)
    os.kill(pool._process.pid, signal.SIGKILL)
    with pytest.raises(
        RewardError, match="the process that starts the reward workers ended with code -9"
    ):
        pool.score(_groups(*[["hang"]] * 8), CharacterTokenizer())
    _wait_until_gone(processes)


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError('only the second time')",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(5)",
    ],
)
def test_a_file_that_cannot_be_imported_in_the_pool_is_an_error(
    tmp_path: Path, source: str
) -> None:
    (tmp_path / "mine.py").write_text(source)
    with RewardPool(
        [RewardConfig(function=f"{tmp_path}/mine.py:reward")], RewardPoolConfig(), tmp_path / "log"
    ) as pool:
        expected = (
            "ended with code 5"
            if "_exit" in source
            else r"cannot be imported in the reward pool: .*mine\.py:\d cannot be imported"
        )
        with pytest.raises(RewardError, match=expected):
            pool.score(_groups(["a"]), CharacterTokenizer())


def test_a_rank_without_groups_scores_nothing(pools: Callable[..., RewardPool]) -> None:
    assert pools("one").score([], CharacterTokenizer()) == ScoredRollouts()


# The debugger

DEBUGGED = """
stopped = False
def reward(completions, **columns):
    global stopped
    value = 1000
    if not stopped:
        stopped = True
        breakpoint()
    return [float(value)] * len(completions)
"""
DEBUG = """
import sys
from pathlib import Path
from tests.faults.test_reward_pool import *
from tests.faults.test_reward_pool import _groups
config = RewardPoolConfig(num_workers=2, timeout_s=0.5)
with RewardPool([RewardConfig(function=sys.argv[1])], config, Path(sys.argv[2])) as pool:
    for _ in range(2):
        print("scored", json.dumps(pool.score(_groups(["a"] * 3, ["b"] * 3), CharacterTokenizer()).rewards), flush=True)
"""  # noqa: E501


def test_a_breakpoint_stops_the_clock_and_has_a_real_terminal(tmp_path: Path) -> None:
    """Two workers reach it at the same time; each has the terminal in its turn, longer than the
    deadline, and gets
    Ctrl-C."""
    (tmp_path / "mine.py").write_text(DEBUGGED)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execv(
            sys.executable,
            [sys.executable, "-c", DEBUG, f"{tmp_path}/mine.py:reward", f"{tmp_path}/log"],
        )
    displayed = ""

    def read_until(text: str) -> str:
        nonlocal displayed
        deadline = time.monotonic() + 30
        while text not in displayed:
            assert time.monotonic() < deadline, displayed
            if select.select([terminal], [], [], 1)[0]:
                displayed += os.read(terminal, 4096).decode()
        old, _, displayed = displayed.partition(text)
        return old

    for number in (2000, 3000):
        read_until("(Pdb) ")
        time.sleep(0.8)  # beyond the deadline
        os.write(terminal, b"p len(completions) * 1000 + 7\n")
        assert "3007" in read_until("(Pdb) ")
        os.write(terminal, b"value = %d\n" % number)
        read_until("(Pdb) ")
        os.write(terminal, b"import time; time.sleep(100)\n")
        time.sleep(0.3)
        os.write(terminal, b"\x03")  # Ctrl-C reaches the debugged function, not the run
        assert "KeyboardInterrupt" in read_until("(Pdb) ")
        os.write(terminal, b"c\n")
    read_until("scored ")
    assert sorted(json.loads(read_until("\r\n"))) == [2000.0] * 3 + [3000.0] * 3
    read_until("scored ")
    assert json.loads(read_until("\r\n")) == [1000.0] * 6
    assert os.waitpid(pid, 0)[1] == 0
    os.close(terminal)


def test_leaving_the_debugger_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(DEBUGGED)
    job = Job(
        [sys.executable, "-c", DEBUG, f"{tmp_path}/mine.py:reward", f"{tmp_path}/log"],
        stdin="q\nq\n",
    )
    code, output = job.wait(60)
    assert code == 1
    assert "RewardError: the debugger was left in reward 'reward'" in output
    assert not job.survivors()
