"""The process that makes report.html beside a run: what it may not do is hurt the run, or outlive
it. Real processes;
modules that misbehave take the report's place."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from grpo_spmd.observe import followers as module
from grpo_spmd.observe.followers import ReportProcess
from tests.support.processes import Job, processes_left

FACTS = """
import json, os, pathlib, resource, sys, threading
limits = [resource.getrlimit(getattr(resource, "RLIMIT_" + which))[0] for which in ("AS", "FSIZE", "CORE")]
files = sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + name))
facts = {"argv": sys.argv[1:], "nice": os.nice(0), "limits": limits, "files": files,
         "group": os.getpgid(0) == os.getpid(), "env": dict(os.environ), "stdin": os.readlink("/proc/self/fd/0"),
         "threads": threading.active_count(),
         "oom": pathlib.Path("/proc/self/oom_score_adj").read_text().strip()}
with open(sys.argv[1] + "/facts.jsonl", "a") as file:
    file.write(json.dumps(facts) + "\\n")
print("said")
"""  # noqa: E501
SLOW = """
import sys, time
with open(sys.argv[1] + "/slow.txt", "a", buffering=1) as file:
    print("begin", file=file)
    time.sleep(0.4)
    print("end", file=file)
"""
HANGS = """
import os, pathlib, signal, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[1], "pid").write_text(str(os.getpid()))
time.sleep(600)
"""
RUN = """
import pathlib, sys, time
from grpo_spmd.observe.followers import ReportProcess
report = ReportProcess(pathlib.Path(sys.argv[1]), 1, sys.argv[2])
report.line_written(1, False)
print("on", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "modules").mkdir()
    texts = {
        "facts": FACTS,
        "slow": SLOW,
        "hangs": HANGS,
        "crashes": "raise SystemExit(3)",
        "eats": "x = bytearray(1 << 33)",
    }
    texts["writes"] = (
        "import sys\nwith open(sys.argv[1] + '/big', 'wb') as file:\n while file.write(bytes(1 "
        "<< 24)): pass"
    )
    for name, text in texts.items():
        (tmp_path / f"modules/report_that_{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setattr(module._log, "propagate", True)


def children() -> list[int]:
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]


def wait_for(path: Path, text: str = "") -> str:
    deadline = time.monotonic() + 60
    while text not in (result := path.read_text() if path.exists() else "") or not result:
        assert time.monotonic() < deadline, path
        time.sleep(0.01)
    return result


def test_it_has_nothing_of_the_run_and_the_last_one_is_made_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "TORCHELASTIC_RUN_ID",
        "CUDA_VISIBLE_DEVICES",
    ):
        monkeypatch.setenv(name, "7")
    retained, old = os.open(os.devnull, os.O_RDONLY), children()
    os.set_inheritable(retained, True)
    report = ReportProcess(tmp_path, 10, "report_that_facts")
    for step in range(1, 20):
        report.line_written(step, False)
    wait_for(tmp_path / "facts.jsonl", "\n")
    deadline = time.monotonic() + 20
    while children() != old and time.monotonic() < deadline:  # it is reaped while the run goes on
        time.sleep(0.02)
    assert children() == old
    report.end(has_ended=True)
    report.finish(60)
    os.close(retained)
    lines = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    assert [facts["nice"] for facts in lines] == [19, 5]
    for facts in lines:
        assert facts["argv"] == [str(tmp_path)]
        assert facts["group"]
        assert facts["oom"] == "1000"
        assert facts["limits"] == [module.MAX_MEMORY, module.MAX_FILE, 0]
        assert facts["files"] == [0, 1, 2]
        assert facts["stdin"] == os.devnull
        assert facts["threads"] == 1
        assert facts["env"]["CUDA_VISIBLE_DEVICES"] == ""
        assert facts["env"]["OMP_NUM_THREADS"] == "1"
        assert {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"} & facts[
            "env"
        ].keys() == set()
    assert (tmp_path / "logs/report.log").read_text() == "said\n"
    assert os.nice(0) < 19
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != module.MAX_MEMORY


def test_there_are_never_two_and_a_slow_one_is_not_queued(tmp_path: Path) -> None:
    report = ReportProcess(tmp_path, 1, "report_that_slow")
    for step in range(1, 100):
        report.line_written(step, False)
        time.sleep(0.01)
    report.end(has_ended=True)
    report.finish(60)
    words = (tmp_path / "slow.txt").read_text().split()
    ends = [i for i, word in enumerate(words) if word == "end"]
    assert words[-2:] == ["begin", "end"]
    # what was under way at the end was killed; else each begins when the one before has ended
    assert all(words[i - 1] == "begin" for i in ends)
    assert words.count("begin") - words.count("end") <= 1
    assert 2 <= words.count("begin") < 20


def test_one_that_hangs_is_killed_and_the_next_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MAX_S", 1.0)
    monkeypatch.setattr(module, "_LAST_MAX_S", 1.0)
    old, pids = children(), set[str]()
    report = ReportProcess(tmp_path, 1, "report_that_hangs")
    deadline = time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < deadline:
        report.line_written(1, False)
        with_pid = tmp_path / "pid"
        pids |= {with_pid.read_text()} - {""} if with_pid.exists() else set()
        time.sleep(0.02)
    assert len(pids) == 2
    report.end(has_ended=True)
    report.finish(30)
    assert children() == old
    assert caplog.text.count("report.html is not made (it took more than 1 s)") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("crashes", "exit code 3"),
        ("is_not_there", "exit code 1"),
        ("eats", "exit code 1"),
        ("writes", "exit code 1"),
    ],
)
def test_one_that_fails_costs_one_warning(
    name: str, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = children()
    report = ReportProcess(tmp_path, 1, f"report_that_{name}")
    for _ in range(2):
        report.line_written(1, False)
        time.sleep(0.5)
    report.end(has_ended=True)
    report.finish(60)
    assert caplog.text.count(f"report.html is not made ({says})") == 1
    assert children() == old
    assert {"eats": "MemoryError", "writes": "File too large"}.get(name, "") in (
        tmp_path / "logs/report.log"
    ).read_text()


def test_a_preempted_run_makes_no_last_one_and_waits_for_none(tmp_path: Path) -> None:
    old = children()
    report = ReportProcess(tmp_path, 1, "report_that_hangs")
    report.line_written(1, False)
    wait_for(tmp_path / "pid")
    report.end(has_ended=False)
    report.finish(5)
    assert children() == old
    (tmp_path / "pid").unlink()
    time.sleep(0.3)
    assert not (tmp_path / "pid").exists()


def test_a_folder_that_cannot_be_written_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "logs").write_text("a file")
    report = ReportProcess(tmp_path, 1, "report_that_facts")
    report.line_written(1, False)
    report.finish(10)
    assert "no report is made any more" in caplog.text


@pytest.mark.parametrize("delay_s", [None, 0.0, 0.005, 0.015, 0.03, 0.06])
def test_sigkill_of_the_run_ends_it(delay_s: float | None, tmp_path: Path) -> None:
    """At any moment: before it has asked the kernel for that, and after (None: when it surely
    runs)."""
    job = Job([sys.executable, "-c", RUN, str(tmp_path), "report_that_hangs"])
    assert job.process.stdout is not None
    assert job.process.stdout.readline() == "on\n"
    if delay_s is None:
        wait_for(tmp_path / "pid")
        assert len(job.running()) == 2
    else:
        time.sleep(delay_s)
    os.kill(job.process.pid, signal.SIGKILL)
    job.process.wait(60)
    assert processes_left(job.mark, patience_s=30) == []
