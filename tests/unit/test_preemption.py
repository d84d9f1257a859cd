"""When the run has to stop: by the clock, worked by hand, and by a signal to this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_spmd.distributed import collectives as store
from grpo_spmd.distributed import preemption as module
from grpo_spmd.distributed import processes
from grpo_spmd.distributed.interrupt import SIGNALS
from grpo_spmd.distributed.preemption import (
    Preempted,
    Preemption,
    remove_marker,
    write_marker,
)
from grpo_spmd.distributed.processes import parse_time_left
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.records import ScoredRollouts


@pytest.fixture(autouse=True)
def own_signals() -> Iterator[None]:
    old = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def session() -> Iterator[None]:
    start_session()
    yield
    end_session()


@pytest.fixture(autouse=True)
def no_notice() -> None:
    if store._store is not None:
        store._store.delete_key("preempted")


class Clock:
    """The run was launched at 0 of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(processes, "seconds_since_launch", lambda: self.now)


def runs(
    preemption: Preemption,
    clock: Clock,
    seconds: float,
    scoring: float = 0.0,
    rest: float = 0.0,
    save_s: float = 0.0,
) -> None:
    """One step, of which `scoring` comes after the generation, and `rest` is update and what
    follows."""

    def score() -> ScoredRollouts:
        clock.now += scoring
        return ScoredRollouts()

    preemption.begin_step(save_s)
    clock.now += seconds - scoring - rest
    preemption.guard(score)()
    preemption.check_before_update()
    clock.now += rest


def test_a_closed_terminal_is_a_signal_but_not_under_nohup(session: None) -> None:
    for old, is_taken in ((signal.SIG_DFL, True), (signal.SIG_IGN, False)):
        signal.signal(signal.SIGHUP, old)
        Preemption(None).begin_step()
        assert (signal.getsignal(signal.SIGHUP) != old) == is_taken
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)


# The clock


def test_no_step_is_begun_that_cannot_finish(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """400 s, of which 10 s are kept back; a start-up step of 100 s, then 50, 60 and 40 s; saves of
    20 s."""
    clock = Clock(monkeypatch)
    preemption = Preemption(400)
    for seconds in (100, 50, 60, 40):
        runs(preemption, clock, seconds)
    preemption.begin_step()
    # 390 - 297.9 = 92.1 s are left, and 1.2 * 60 + 20 = 92 are needed; the step before took 47.9 s
    clock.now = 297.9
    preemption.begin_step(20)
    clock.now = 298.1
    with pytest.raises(Preempted) as stopped:
        preemption.begin_step(20)
    assert str(stopped.value) == "deadline: 92 s left, a step takes 60 s and a save 20 s"


def test_the_first_step_counts_only_while_it_is_the_only_one(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    preemption = Preemption(240)  # 230, and 12 s for a save that nobody has measured
    runs(preemption, clock, 100)
    with pytest.raises(
        Preempted, match=r"deadline: 130 s left, a step takes 100 s and a save 12 s"
    ):
        preemption.begin_step()  # 132 s are needed
    clock.now = 0.0
    preemption = Preemption(243)
    runs(preemption, clock, 100)
    runs(preemption, clock, 30)
    preemption.begin_step()  # 103 s are left, and 1.2 * 30 + 12 needed


def test_the_update_is_begun_only_if_it_can_finish(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 s less 10; steps of 40 s with an update of 10 s, saves of 5 s: before an update 17 s are
    needed."""
    clock = Clock(monkeypatch)
    preemption = Preemption(200)
    for _ in range(3):
        runs(preemption, clock, 40, rest=10, save_s=5)
    preemption.begin_step(5)  # at 120: 70 s left, 53 needed
    assert not preemption.should_abort()
    clock.now = 172.9
    assert not preemption.should_abort()
    preemption.check_before_update()
    clock.now = 173.1  # a generation that took longer than any before
    assert preemption.should_abort()

    def score() -> ScoredRollouts:
        raise AssertionError("nothing is scored for a step that is given up")

    with pytest.raises(
        Preempted, match="deadline: 17 s left, the rest of the step takes 10 s and a save 5 s"
    ):
        preemption.guard(score)()
    with pytest.raises(Preempted):
        preemption.check_before_update()


def test_scoring_is_not_begun_that_leaves_no_time_for_the_update(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 s less 10; steps of 40 s with 8 s of scoring and an update of 10 s, saves of 5 s: 26.6 s
    are needed before,
    17 s after it."""
    clock = Clock(monkeypatch)
    preemption = Preemption(200)
    for _ in range(3):
        runs(preemption, clock, 40, scoring=8, rest=10, save_s=5)
    preemption.begin_step(5)
    clock.now = 163.3
    assert not preemption.should_abort()

    def score() -> ScoredRollouts:
        clock.now = 172.9  # longer than ever, and yet the update can be made
        return ScoredRollouts(texts=["a"])

    assert preemption.guard(score)().texts == ["a"]
    preemption.check_before_update()
    clock.now = 163.5
    assert preemption.should_abort()


def test_without_a_deadline_only_signals_stop(
    session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    preemption = Preemption(None)
    for _ in range(5):
        runs(preemption, clock, 1e6)
    assert preemption.guard(lambda: ScoredRollouts(texts=["a"]))().texts == ["a"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04\n", 93784),
        ("10-00:00:00", 864000),
        ("23:59:59\n", 86399),
        ("1:00:00", 3600),
        ("59:01", 3541),
        ("0:07\n", 7),
        ("UNLIMITED\n", None),
        ("INVALID", None),
        ("NOT_SET", None),
        ("", None),
        ("0:10\n0:20\n", None),
        ("-1:00", None),
        ("7", None),
    ],
)
def test_what_squeue_says(text: str, seconds: int | None) -> None:
    assert parse_time_left(text) == seconds


# Signals


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_flag(session: None, number: signal.Signals) -> None:
    preemption = Preemption(None)
    preemption.begin_step()
    signal.signal(number, signal.default_int_handler)  # somebody's own
    preemption.begin_step()
    assert not preemption.should_abort()
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), SIGNALS[0])
    assert preemption.should_abort()
    for position in (
        preemption.begin_step,
        preemption.check_before_update,
        preemption.guard(ScoredRollouts),
    ):
        with pytest.raises(Preempted) as stopped:
            position()
        assert str(stopped.value) == number.name


def test_a_failure_of_scoring_after_a_signal_is_the_signals(session: None) -> None:
    preemption = Preemption(None)
    preemption.begin_step()

    def score(number: int | None) -> ScoredRollouts:
        if number is not None:
            os.kill(os.getpid(), number)
        raise RuntimeError("the reward's processes have gone")

    with pytest.raises(RuntimeError, match="processes have gone"):
        preemption.guard(score)(None)
    with pytest.raises(Preempted, match="SIGUSR1"):
        preemption.guard(score)(signal.SIGUSR1)


def test_the_marker_comes_and_goes(session: None, tmp_path: Path) -> None:
    remove_marker(tmp_path)
    write_marker(tmp_path, 12, "SIGTERM")
    assert [path.name for path in tmp_path.iterdir()] == ["preempted.json"]
    assert json.loads(Path(tmp_path, "preempted.json").read_text()) == {
        "step": 12,
        "reason": "SIGTERM",
        "saved": True,
    }
    remove_marker(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_an_update_between_its_micro_batches(session: None) -> None:
    preemption = Preemption(None)
    preemption.begin_step()
    preemption.check_before_update()
    preemption.check_in_update(False)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Preempted, match=r"^SIGTERM$"):
        preemption.check_in_update(False)


def test_a_signal_ends_scoring_and_the_ranks_agree_on_it(session: None) -> None:
    """Of this rank, or of another one: it has read_notice a notice."""
    for is_own in (True, False):
        preemption = Preemption(None)
        preemption.begin_step()
        preemption.check_scoring()

        def score(preemption: Preemption = preemption, is_own: bool = is_own) -> ScoredRollouts:
            if is_own:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                store.post_notice("preempted", "SIGUSR1")
                preemption._next_poll = 0.0
            preemption.check_scoring()
            raise AssertionError("it scores on")

        with pytest.raises(Preempted, match=r"^SIGTERM$" if is_own else r"^SIGUSR1$"):
            preemption.guard(score)()
        assert store.read_notice("preempted") is not None
        store._run_store().delete_key("preempted")
