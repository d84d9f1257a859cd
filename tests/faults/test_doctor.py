"""Who failed first, or who sleeps while the others wait, is named with its phase; and all ranks are
gone within seconds
of it."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.schema import PHASES
from tests.support.nightly import selected_values
from tests.support.processes import Job, full_pipe

LIMIT_S = 3.0
# the most until all are gone: a few on an idle machine, and the doctor waits for answers on a busy
# one
SECONDS = 20.0


@dataclass(frozen=True)
class Fault:
    """What one of two ranks does in a phase, and what is wrong with who should read the output."""

    do: str
    phase: str
    rank: int
    reader: str = ""

    def __str__(self) -> str:
        return f"{self.rank} {self.phase} {self.do} {self.reader}".strip()


RAISES = [Fault("raise", phase, rank) for phase in PHASES for rank in (0, 1)]
SLEEPS = [
    *(Fault("sleep", phase, number % 2) for number, phase in enumerate(PHASES)),
    Fault("sleep", "update", 0),
]
UNREAD = [
    Fault("raise", "update", 1, "stalled"),
    Fault("raise", "rollout", 0, "gone"),
    Fault("raise", "eval", 0, "closed"),
    Fault("sleep", "rollout", 0, "stalled"),
    Fault("sleep", "logprobs", 1, "gone"),
    Fault("sleep", "eval", 1, "closed"),
    Fault("talk", "reward", 1, "stalled"),
    Fault("refuse", "start", 0, "stalled"),
    Fault("stop", "checkpoint", 0, "stalled"),
]


def planted(*faults: Fault) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=str)


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Fault, dict[str, Any]]:
    """What became of the faults of the selected tests, ten at a time."""
    folder = tmp_path_factory.mktemp("doctor")
    faults: list[Fault] = selected_values(request, "fault")
    orders = []
    for fault in faults:
        order = {
            "do": fault.do,
            "phase": fault.phase if fault.phase != "start" else "weight_sync",
            "rank": str(fault.rank),
            "folder": str(folder / str(fault)),
        }
        if fault.do in ("sleep", "stop", "gil", "debug", "work", "talk"):
            order["limit_s"] = str(LIMIT_S)
        if fault.reader:
            order["reader"] = fault.reader
        orders.append(order)
    code, output = Job(
        [sys.executable, "-m", "tests.support.workers.doctor", json.dumps(orders)]
    ).wait(500)
    assert code == 0, output
    return dict(zip(faults, json.loads(output.splitlines()[-1]), strict=True))


@planted(*RAISES)
def test_a_raise_ends_all_ranks_with_its_traceback(found: dict[Fault, Any], fault: Fault) -> None:
    run, phase, rank = found[fault], fault.phase, fault.rank
    assert run["codes"] == [1, 1], run
    assert run["seconds"] < SECONDS
    output = run["output"]
    assert f"rank {rank} (" in output.splitlines()[0]
    assert (
        f"failed first, in phase {phase}, step 1: KeyError: 'no such column'"
        in output.splitlines()[0]
    )
    assert output.count("Traceback (most recent call last)") == 1, output
    assert 'raise KeyError("no such column")' in output
    assert f"rank {1 - rank}: phase {phase}, step 1" in output
    # Above the traceback, and in the last line.
    assert output.count("failed first") == 2
    assert output.splitlines()[-1].startswith(
        f"all ranks stop with exit code 1: rank {rank} failed first, in phase {phase}, step 1: "
    )
    assert output.strip() in run["failure.txt"]
    assert "hang.txt" not in run
    # torchrun shows the earliest as the root cause
    rank_values = [json.loads(run[f"error_{r}.json"])["message"] for r in range(2)]
    assert 'raise KeyError("no such column")' in rank_values[rank]["message"]
    assert int(rank_values[rank]["extraInfo"]["timestamp"]) <= int(
        rank_values[1 - rank]["extraInfo"]["timestamp"]
    )


@planted(*SLEEPS)
def test_the_rank_that_sleeps_is_named_not_the_one_that_waits(
    found: dict[Fault, Any], fault: Fault
) -> None:
    run, phase, rank = found[fault], fault.phase, fault.rank
    assert run["codes"] == [1, 1], run
    assert run["seconds"] < LIMIT_S + SECONDS
    initial, hang = run["output"].splitlines()[0], run["hang.txt"]
    assert initial.startswith(f"rank {rank} ("), run["output"]
    assert f"hangs in phase {phase}, step 1, at " in initial
    assert "(fall_asleep), and the others wait for it" in initial
    assert f"rank {1 - rank}: phase {phase}, step 1, waits in a collective" in run["output"]
    assert run["output"].count("hangs in") == 1
    sections = hang.split("--- rank ")[1:]
    assert [section[0] for section in sections] == ["0", "1"]
    assert "time.sleep(600)" in sections[rank]
    assert "time.sleep(600)" not in sections[1 - rank]
    assert "collectives enqueued" in sections[rank]  # torch's flight recorder


@planted(Fault("stop", "rollout", 1), Fault("stop", "update", 0))
def test_a_stopped_rank_is_named_and_does_not_stay(found: dict[Fault, Any], fault: Fault) -> None:
    run, phase, rank = found[fault], fault.phase, fault.rank
    assert run["codes"][1 - rank] == 1
    assert run["codes"][rank] == -9  # a stopped process cannot leave by itself
    assert run["seconds"] < LIMIT_S + SECONDS
    initial = run["output"].splitlines()[0]
    assert initial.startswith(f"rank {rank} ("), run["output"]
    assert f"went silent in phase {phase}, step 1: its process is stopped" in initial


@planted(Fault("gil", "reward", 1))
def test_a_rank_stuck_in_c_is_named_with_its_stack(found: dict[Fault, Any], fault: Fault) -> None:
    run = found[fault]
    assert run["codes"] == [1, -9]
    assert run["seconds"] < LIMIT_S + SECONDS
    assert (
        "went silent in phase reward, step 1: its process is there, but its Python does not run"
        in run["output"].splitlines()[0]
    )
    assert "in keep_the_gil" in run["hang.txt"]


@planted(Fault("kill", "rollout", 1), Fault("kill", "logprobs", 0), Fault("exit", "eval", 1))
def test_a_rank_that_is_gone_is_named_by_the_others(found: dict[Fault, Any], fault: Fault) -> None:
    run, phase, rank = found[fault], fault.phase, fault.rank
    assert run["codes"][rank] == (-9 if fault.do == "kill" else 0)
    assert run["codes"][1 - rank] == 1
    assert run["seconds"] < SECONDS
    initial = run["output"].splitlines()[0]
    assert initial.startswith(f"rank {rank} (")
    assert f"went silent in phase {phase}, step 1: its process is gone" in initial
    assert "Traceback" not in run["output"]  # the survivor's lost connection explains nothing


@planted(*UNREAD)
def test_the_end_waits_for_nobody_who_reads_it(found: dict[Fault, Any], fault: Fault) -> None:
    """A full pipe that nobody reads, one without a reader, and no output at all: the files say what
    there is to say."""
    run, do, phase, rank = found[fault], fault.do, fault.phase, fault.rank
    code = 2 if do == "refuse" else 1
    assert run["codes"][1 - rank] == code, run
    assert run["codes"][rank] == (-9 if do == "stop" else code)
    assert run["seconds"] < SECONDS + (LIMIT_S if do in ("sleep", "stop", "talk") else 0)
    if do == "refuse":
        return
    says = {
        "raise": f"failed first, in phase {phase}, step 1: KeyError: 'no such column'",
        "stop": f"went silent in phase {phase}, step 1: its process is stopped",
    }.get(do, f"hangs in phase {phase}, step 1, at ")
    assert says in run["failure.txt"].splitlines()[1]
    assert run["failure.txt"].splitlines()[1].startswith(f"rank {rank} (")
    assert run["failure.txt"].splitlines()[-1].startswith("all ranks stop with exit code 1")
    assert ("hang.txt" in run) == (do != "raise")
    if do != "raise":
        assert [section[0] for section in run["hang.txt"].split("--- rank ")[1:]] == ["0", "1"]
    for number, was in enumerate(code for code in run["codes"]):
        assert was == -9 or json.loads(run[f"error_{number}.json"])["message"]["message"]


@planted(Fault("refuse", "start", 1))
def test_bad_data_on_one_rank_is_one_line_and_exit_code_2(
    found: dict[Fault, Any], fault: Fault
) -> None:
    run = found[fault]
    assert run["codes"] == [2, 2]
    assert run["output"].startswith(
        "error: data.train: this node lacks the file (said by rank 1 on "
    )
    assert len(run["output"].splitlines()) == 1


@planted(Fault("interrupt", "update", 0))
def test_ctrl_c_is_no_traceback(found: dict[Fault, Any], fault: Fault) -> None:
    run = found[fault]
    assert run["codes"] == [1, 1]
    assert "stopped by Ctrl-C" in run["output"]
    assert "Traceback" not in run["output"]


@planted(Fault("debug", "logprobs", 1))
def test_a_debugger_on_one_rank_stops_the_clocks_of_all(
    found: dict[Fault, Any], fault: Fault
) -> None:
    run = found[fault]
    assert run["codes"] == [0, 0], run
    assert run["seconds"] > LIMIT_S + 2


@planted(Fault("work", "rollout", 1))
def test_waiting_for_a_phase_that_may_take_long_is_no_hang(
    found: dict[Fault, Any], fault: Fault
) -> None:
    """Rank 0 has come to a phase of 3 s while rank 1 is busy for 9 s in the one before, which may
    take 60 s."""
    run = found[fault]
    assert run["codes"] == [0, 0], run
    assert run["seconds"] > 2 * LIMIT_S


@planted(Fault("pass", "", 0))
def test_without_a_fault_nothing_is_said(found: dict[Fault, Any], fault: Fault) -> None:
    run = found[fault]
    assert run["codes"] == [0, 0]
    message = [
        line for line in run["output"].splitlines() if "ProcessGroup.hpp" not in line
    ]  # torch warns at the end
    assert sorted(message) == [f"rank {rank} done, restart False" for rank in range(2)]
    assert "failure.txt" not in run


def test_torchrun_finds_the_error_of_a_rank_that_has_no_doctor_yet(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    script = (
        "from grpo_spmd.distributed.doctor import exit_with_outcome\n"
        "with exit_with_outcome():\n    raise KeyError('no such column')"
    )
    job = Job([sys.executable, "-c", script], env={"TORCHELASTIC_ERROR_FILE": str(file)})
    code, output = job.wait(60)
    assert code == 1, output
    message = json.loads(file.read_text())["message"]
    assert "KeyError: 'no such column'" in message["message"]
    assert abs(int(message["extraInfo"]["timestamp"]) - file.stat().st_mtime) < 60


ENDS = {
    "stopped at the end, killed": (
        "with ending.bounded_teardown(): os.kill(os.getpid(), signal.SIGSTOP)",
        -9,
    ),
    "hangs at the end, a success": ("with ending.bounded_teardown(): time.sleep(600)", 0),
    "fails at the end": ("with ending.bounded_teardown(): raise SystemExit(3)", 3),
    "in time": ("with ending.killed_after(1): pass\ntime.sleep(1.5)", 0),
}


@pytest.mark.parametrize("case", ENDS)
def test_the_end_itself_has_an_end(case: str) -> None:
    body, code = ENDS[case]
    shorter = "ending._END_S = 1.0; ending._FLUSH_S = 0.5"
    script = (
        "import os, signal, time\nfrom grpo_spmd.distributed import exit as "
        f"ending\n{shorter}\n{body}"
    )
    assert Job([sys.executable, "-c", script]).wait(60)[0] == code


@pytest.mark.parametrize("reader", ["stalled", "gone", "closed"])
def test_log_lines_do_not_wait_for_who_reads_them(reader: str, tmp_path: Path) -> None:
    """Nor does the word about a mistake in the config, which comes at the end here."""
    script = """
import logging, sys
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.distributed.exit import Terminal
log = logging.getLogger("grpo_spmd")
log.handlers[:] = [Terminal(sys.stdout), logging.FileHandler(sys.argv[1])]
for number in range(3000):
    log.warning("line %d", number)
refuse(ConfigError("no such key"))"""
    read, write = full_pipe()
    if reader != "stalled":
        os.close(read)
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"] if reader == "closed" else []
    job = Job([*closed, sys.executable, "-c", script, str(tmp_path / "log")], stdout=write)
    assert job.wait(60)[0] == 2
    assert (tmp_path / "log").read_text().splitlines() == [
        f"line {number}" for number in range(3000)
    ]


def start_on(hosts: list[list[str]], order: dict[str, str], **options: str) -> list[Job]:
    """One rank a host, over torchrun's c10d rendezvous on the first."""
    jobs = []
    for number, host in enumerate(hosts):
        address = f"10.77.0.{number + 1}"
        flags = {
            "nnodes": "2",
            "nproc-per-node": "1",
            "rdzv-backend": "c10d",
            "rdzv-endpoint": "10.77.0.1:29400",
            "rdzv-id": "doctor",
        }
        flags |= {"rdzv-conf": f"is_host={number == 0}", "local-addr": address} | options
        command = [
            *host,
            sys.executable,
            "-m",
            "torch.distributed.run",
            *(f"--{name}={value}" for name, value in flags.items()),
        ]
        env = {
            "GLOO_SOCKET_IFNAME": host[-1],
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # a host's name leads to no address here
        jobs.append(
            Job([*command, "-m", "tests.support.workers.doctor", json.dumps(order)], env=env)
        )
    return jobs


def test_a_raise_on_one_host_ends_the_other(tmp_path: Path, two_hosts: list[list[str]]) -> None:
    order = {"do": "raise", "rank": "1", "phase": "update", "folder": str(tmp_path)}
    outcomes = [job.wait(60) for job in start_on(two_hosts, order)]
    assert time.time() - float((tmp_path / "when").read_text()) < 10
    assert [code for code, _ in outcomes] == [1, 1]
    report = (tmp_path / "failure.txt").read_text()
    assert "failed first, in phase update, step 1: KeyError: 'no such column'" in report
    assert report.count("=== ") == 1
    assert "rank 0: phase update, step 1, waits in a collective" in report
    assert "KeyError: 'no such column'" in outcomes[0][1]  # on the host that has not failed


def test_both_hosts_start_again_and_come_to_the_end(
    tmp_path: Path, two_hosts: list[list[str]]
) -> None:
    """The host that has not failed does not count the restart (TORCHELASTIC_RESTART_COUNT), and the
    store is the one of
    before."""
    order = {
        "do": "raise",
        "rank": "1",
        "phase": "update",
        "folder": str(tmp_path),
        "once": str(tmp_path / "done"),
    }
    outcomes = [job.wait(90) for job in start_on(two_hosts, order, **{"max-restarts": "1"})]
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert sorted("done, restart True" in output for _, output in outcomes) == [True, True], (
        outcomes
    )
    assert (tmp_path / "failure.txt").read_text().count("=== ") == 1
