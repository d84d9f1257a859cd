"""Nobody waits in front of a silent terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_spmd.distributed import startup

After = Callable[[float], list[str]]


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[After]:
    """What is said in the next so many seconds of a clock of our own, at which the thread looks
    each half second."""
    clock = [100.0]

    class Thread:
        def __init__(self, **_: Any) -> None: ...
        def start(self) -> None: ...

    def look(seconds: float) -> list[str]:
        for _ in range(int(2 * seconds)):
            clock[0] += 0.5
            startup._heartbeat.print_if_due()
        return capsys.readouterr().out.splitlines()

    monkeypatch.setattr(startup.threading, "Thread", Thread)
    monkeypatch.setattr(startup.time, "monotonic", lambda: clock[0])
    yield look
    startup.end()


def test_it_says_what_takes_long_until_the_first_step(after: After) -> None:
    startup.begin("importing")
    assert after(2.5) == []
    assert after(1) == ["importing ... 3 s"]
    startup.note(", 3 of 9")
    assert after(6) == []
    assert after(11) == [
        "importing, 3 of 9 ... 10 s",
        "importing, 3 of 9 ... 17 s",
    ]  # now it is 20.5 s
    startup.follow("starting vLLM: 2 engines")
    assert after(6.5) == []
    assert after(1) == ["starting vLLM ... 7 s"]
    startup.follow("policy: 0.1 M parameters")
    assert after(7) == ["preparing ... 7 s"]
    startup.follow("step 1/80  reward 0.3")
    assert after(60) == []
    startup.follow("starting over")  # it has ended
    assert after(60) == []


def test_what_begins_is_said_no_later_for_having_begun(after: After) -> None:
    """Short phases, one after the other, are silent no longer than a long one."""
    message = []
    for number in range(6):
        startup.begin(f"part {number}")
        message += after(4)
    assert message == [
        "part 0 ... 3 s",
        "part 2 ... 2 s",
        "part 4 ... 1 s",
        "part 5 ... 4 s",
    ]  # at 3, 10, 17 and 24 s


def test_only_rank_0_speaks(after: After, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    startup.begin("importing")
    assert after(60) == []
