"""The culprit of a hang or a failure, from what ranks answer."""

from __future__ import annotations

from typing import Any

from grpo_spmd.distributed.doctor import (
    Alarm,
    Answer,
    Fault,
    Position,
    fault_of,
    find_culprit,
    write_report,
)
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.proofs.logprob_check import MismatchError
from grpo_spmd.rewards.trl import RewardError


def answer(sequence: int = 9, phase: str = "update", **facts: Any) -> Answer:
    return Answer(Position(phase, 3, sequence), **facts)


def test_the_culprit_of_a_hang() -> None:
    """By the fewest phases and collectives, then by the flight recorder, then by who waits for
    nobody."""
    alarm = Alarm("timeout", 0, 60.0)
    waits = answer(waits="collective")
    assert (
        find_culprit(alarm, [waits, answer(8, "reward", waits="collective"), waits, answer()])[0]
        == 1
    )
    assert find_culprit(alarm, [waits, waits, answer(), waits])[0] == 2
    following, upcoming = (
        answer(enqueued={"world": 4, "tp": 9}),
        answer(enqueued={"world": 5}, waits="device"),
    )
    assert find_culprit(alarm, [upcoming, upcoming, following, upcoming])[0] == 2
    assert find_culprit(alarm, [waits, waits, answer(waits="device"), waits])[0] == 2
    assert "no rank can be told" in find_culprit(alarm, [waits, waits])[1]
    assert find_culprit(alarm, [waits, answer(responds=False, state="stopped"), answer(3)])[0] == 1


def test_the_culprit_among_failures() -> None:
    raised = answer(fault=Fault("raise", "ValueError: x", "Traceback"))
    follows, stopped = (
        answer(fault=Fault("follows", "RuntimeError: Connection closed")),
        answer(fault=Fault("stopped", "SIGTERM")),
    )
    gone = answer(responds=False, state="gone")
    assert find_culprit(Alarm("raise", 2), [follows, raised, raised])[0] == 2
    assert find_culprit(Alarm("follows", 0), [follows, answer(), raised])[0] == 2
    assert find_culprit(Alarm("follows", 0), [follows, answer(), gone])[0] == 2
    assert find_culprit(Alarm("stopped", 0), [stopped, stopped, gone])[0] == 2
    assert find_culprit(Alarm("follows", 1), [answer(), follows])[0] == 1  # nobody else knows more
    assert (
        find_culprit(Alarm("dead", 0), [answer(), answer(responds=False, state="unknown")])[0] == 1
    )


def test_a_report_of_a_thousand_ranks_is_still_read() -> None:
    answers = [answer(waits="collective") for _ in range(1000)]
    answers[700] = answer(8, "reward", line="reward.py:3 (score)", stacks="the stack")
    report = write_report(Alarm("timeout", 3, 60.0), answers, ["node, process 1"] * 1000)
    assert report.culprit == 700
    assert "ranks 0-699, 701-999: phase update, step 3, waits in a collective" in report.text
    assert len(report.text.splitlines()) < 10


def test_what_a_proof_found_is_one_line_without_a_traceback() -> None:
    """Where it was raised says nothing; what else is raised comes with its traceback."""
    for kind, has_traceback in ((MismatchError, False), (RuntimeError, True)):
        try:
            raise Rank0Error("said") from kind("step 0: engine and policy differ")
        except Rank0Error as error:
            fault = fault_of(error, 0)
        assert fault.headline == f"{kind.__name__}: step 0: engine and policy differ"
        assert bool(fault.traceback) == has_traceback


def test_a_report_on_a_reward_begins_and_ends_with_the_users_error() -> None:
    users = "reward 'f' raised KeyError: 'x' (mine.py:3)\nTraceback\n  File mine.py\nKeyError: 'x'"
    try:
        raise Rank0Error("said") from RewardError.about(users, "2 of 8 completions failed")
    except Rank0Error as error:
        fault = fault_of(error, 0)
    reason = "RewardError: reward 'f' raised KeyError: 'x' (mine.py:3); 2 of 8 completions failed"
    assert fault.headline == reason
    report = write_report(Alarm("raise", 0), [answer(fault=fault)], ["node"])
    headline, *traceback, last = report.text.splitlines()
    assert headline == f"rank 0 (node) failed first, in phase update, step 3: {reason}"
    # None of our frames is between.
    assert traceback == ["Traceback", "  File mine.py", "KeyError: 'x'"]
    assert last.startswith("all ranks stop with exit code 1: ")
    assert last.endswith(reason)
