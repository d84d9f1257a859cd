"""Tail batching: no prompt may be lost, doubled or left for ever, whichever are slow, and whenever
the run stops."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.checkpoint.run_dir import Start
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import RolloutConfig
from grpo_spmd.data.prompts import PromptStream, TailStream, check_enough_to_launch
from grpo_spmd.files import TRAINER, UntrustedError, check_fields
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rollout import sample
from grpo_spmd.rollout.sample import ExpectedLengths, TailBatching, TailRace, open_tail
from tests.support.models import write_config


def stream_of(
    num_rows: int, num_launched: int, position: int = 0, waiting: list[int] | None = None
) -> TailStream:
    prompts = [Prompt(row, row, [row + 1], "", {}) for row in range(num_rows)]
    return TailStream(
        PromptStream(prompts, 3, True, position), num_rows, num_launched, waiting or []
    )


class Runs:
    """The steps of a run in which chance says who is slow, and which may be stopped and started
    again at any time."""

    def __init__(
        self, rng: random.Random, num_rows: int, num_prompts: int, num_launched: int
    ) -> None:
        self.rng, self.num_rows, self.num_prompts, self.num_launched = (
            rng,
            num_rows,
            num_prompts,
            num_launched,
        )
        self.stream = stream_of(num_rows, num_launched)
        self.trained: list[list[Prompt]] = []

    def step(self) -> list[Prompt]:
        """What it takes; then it is made, and trained on, or the run is stopped in its middle and
        makes it again."""
        started = self.stream.position, self.stream.state()
        dealt = self.stream.take(self.num_prompts)
        selected = dealt
        if len(dealt) > self.num_prompts:
            selected = self.rng.sample(dealt, self.num_prompts)
            self.stream.leave([prompt for prompt in dealt if prompt not in selected], {})
        if (
            self.rng.random() < 0.3
        ):  # preempted, or killed: the checkpoint is of the step's start, or of its end
            if self.rng.random() < 0.5:
                self.start(*started)
                assert self.stream.take(self.num_prompts) == dealt
                self.start(*started)
                return self.step()
            self.start(self.stream.position, self.stream.state())
        self.trained.append(selected)
        return dealt

    def start(self, position: int, state: dict[str, Any]) -> None:
        start = Start(trainer={"position": position, **state})
        self.stream = stream_of(self.num_rows, self.num_launched, start.position, start.waiting)


def test_a_dropped_prompt_is_expected_to_be_as_long_as_the_longest_that_it_ran_beside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def prompt(row: int) -> Prompt:
        return Prompt(row, row, [1], "", {})

    def group(row: int, *lengths: int) -> RolloutGroup:
        completions = [Completion([1] * length, [0.0] * length, "stop") for length in lengths]
        return RolloutGroup(0, prompt(row), completions)

    second = ExpectedLengths(), [group(4, 1, 3)], [prompt(3)]  # of a rank whose one group was short
    report = list[Any]()
    monkeypatch.setattr(sample, "on_rank0", lambda fn, value: fn([*report, value]))
    prompts, lengths = [prompt(row) for row in range(6)], ExpectedLengths()
    second[0].record(*second[1:])
    report.append(second[0]._report)
    lengths.record([group(0, 2, 4), group(1, 9, 1)], [prompts[2]])
    # Means of 3, 5 and 2, and 9 where it was not done; of a prompt that nobody sampled the mean of
    # the three.
    assert lengths.estimate(prompts, []) == [3.0, 5.0, 9.0, 9.0, 2.0, 3.3]
    report.clear()
    lengths.record([], [prompts[3]])  # beside nothing that is known
    assert lengths.estimate(prompts, []) == [3.0, 5.0, 9.0, 9.0, 2.0, 3.3]


@pytest.mark.parametrize("seed", range(60))
def test_each_prompt_once_an_epoch_whoever_is_slow(seed: int) -> None:
    rng = random.Random(seed)
    num_prompts = rng.randrange(1, 9)
    num_launched = num_prompts + rng.randrange(2 * num_prompts + 1)
    run = Runs(rng, num_launched + rng.randrange(40), num_prompts, num_launched)
    num_rounds = Counter[int]()
    while len(run.trained) * num_prompts < 3 * run.num_rows:
        num_rounds[len(run.step())] += 1
        assert len(run.trained[-1]) == num_prompts
        done = len(run.trained) * num_prompts
        assert run.stream.epoch == pytest.approx(done / run.num_rows)
        assert (
            run.stream.metrics()["rollout/waiting_prompts"]
            == run.stream.position - done
            < num_prompts + num_launched
        )
    positions = [prompt.position for step in run.trained for prompt in step]
    assert len(set(positions)) == len(positions)
    # As without tail batching: all of three epochs, and of the fourth what fills the last step.
    assert sorted(positions) == list(range(len(positions)))
    for epoch in range(3):
        epoch_values = [
            p.row for step in run.trained for p in step if p.position // run.num_rows == epoch
        ]
        assert sorted(epoch_values) == list(range(run.num_rows))
    # The prompt at a place is the one that the plain stream has there.
    plain = PromptStream(
        [Prompt(row, row, [row + 1], "", {}) for row in range(run.num_rows)], 3, True
    )
    assert sorted(
        (p for step in run.trained for p in step), key=lambda p: p.position
    ) == plain.take(len(positions))
    if num_launched > num_prompts and run.num_rows > 4 * num_launched:
        assert (
            num_rounds[num_launched] > num_rounds[num_prompts] / 4
        )  # that there were short rounds at all


def test_rounds_by_hand() -> None:
    # 10 rows, steps of 2 out of 3. The last of a short round is slow each time.
    stream, rounds = stream_of(10, 3), []
    for _ in range(6):
        dealt = stream.take(2)
        rounds.append([prompt.position for prompt in dealt])
        if len(dealt) > 2:
            stream.leave(dealt[2:], {"rollout/tail_dropped_tokens_frac": 0.25})
    # Two wait after two rounds, and have one of their own; 6 7 8 leave one row, which 8 joins; then
    # the second epoch.
    assert rounds == [[0, 1, 2], [3, 4, 5], [2, 5], [6, 7, 8], [8, 9], [10, 11, 12]]
    assert (stream.position, stream.state(), stream.epoch) == (13, {"waiting": [12]}, 1.2)
    displayed = {
        "rollout/waiting_prompts": 1,
        "rollout/tail_long_round": 0,
        "rollout/tail_dropped_tokens_frac": 0.25,
    }
    assert stream.metrics() == displayed


def test_without_it_a_stream_has_nothing_to_tell() -> None:
    stream = PromptStream([Prompt(0, 0, [1], "", {})], 0, True)
    assert (stream.state(), stream.metrics(), Start().waiting) == ({}, {}, [])


def test_what_waits_is_dealt_first_where_tail_batching_was_turned_off() -> None:
    stream = stream_of(10, 2, position=7, waiting=[1, 3, 6])
    assert [[p.position for p in stream.take(2)] for _ in range(4)] == [
        [1, 3],
        [6, 7],
        [8, 9],
        [10, 11],
    ]


def test_the_state_of_a_steps_beginning_is_not_changed_by_the_step() -> None:
    stream = stream_of(10, 4)
    old = stream.state()
    stream.leave(stream.take(2)[2:], {})
    assert (old, stream.state()) == ({"waiting": []}, {"waiting": [2, 3]})


@pytest.mark.parametrize("waiting", [[3, 1], [1, 1], [7], [2, 9]])
def test_places_that_no_run_left_behind_are_refused(waiting: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.resume: trainer\.json: waiting"):
        stream_of(10, 4, position=7, waiting=waiting)


@pytest.mark.parametrize("waiting", [3, [1.5], ["1"], [-1], [None], {"0": 1}])
def test_a_checkpoint_that_names_no_places_is_damaged(waiting: Any) -> None:
    types = {"waiting": TRAINER["waiting"]}
    with pytest.raises(UntrustedError, match="waiting"):
        check_fields({"waiting": waiting}, types, "trainer.json")
    check_fields({"waiting": [0, 7]}, types, "trainer.json")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Stands for the run's store."""
    result: dict[str, int] = {}

    def count_up(counter: str, by: int = 1) -> int:
        result[counter] = result.get(counter, 0) + by
        return result[counter]

    monkeypatch.setattr(sample, "count_up", count_up)
    monkeypatch.setattr(sample, "delete_counter", lambda counter: result.pop(counter, None))
    monkeypatch.setattr(sample, "on_rank0", lambda decide, report: decide([report]))
    return result


def test_a_race_of_two_engines_by_hand(counts: dict[str, int]) -> None:
    # Six prompts with two completions each, of which three make a step. Slot 1 was finished before
    # the run was stopped,
    # and one completion of slot 4.
    missing = {0: [0, 1], 1: [], 2: [0, 1], 3: [0, 1], 4: [1], 5: [0, 1]}
    batching = TailBatching(stream_of(9, 6), 3)
    races = [
        batching.begin(missing, [(1, 5), (1, 7), (4, 2)], is_first) for is_first in (True, False)
    ]
    assert all(isinstance(race, TailRace) for race in races)
    initial, same_engine = races
    second = TailBatching(stream_of(9, 6), 3).begin(missing, [(1, 5), (1, 7), (4, 2)], True)
    assert initial is not None
    assert same_engine is not None
    assert second is not None
    # the first engine has the slots 0 2 5, the other 3 4
    for slot, tokens in ((0, 10), (5, 20)):
        initial.finish(slot, tokens)
        same_engine.finish(slot, tokens)
    assert not initial.is_over()
    second.finish(4, 4)  # slot 4 is complete: the second, of three
    assert not second.is_over()
    assert counts == {"complete/1": 1}
    initial.finish(5, 30)  # slot 5: the third
    assert initial.is_over()
    assert second.is_over()
    second.finish(3, 6)
    second.finish(3, 8)  # slot 3 came too late
    initial.drop([3, 0, 1])
    slots, metrics = initial.decide([initial.report(), same_engine.report(), second.report()])
    assert slots == [1, 4, 5]
    # Trained: 5 7, 2 4, 20 30. Finished in vain: 10, 6 8. Begun: 3 1. What had no token yet was not
    # begun.
    sampled = [5, 7, 2, 4, 20, 30, 10, 6, 8, 3, 1]
    assert metrics["rollout/tail_dropped_tokens_frac"] == pytest.approx(1 - 68 / 96)
    assert metrics["rollout/tail_launched_tokens_mean"] == pytest.approx(96 / len(sampled))
    assert metrics["rollout/tail_launched_tokens_p95"] == pytest.approx(25)  # halfway from 20 to 30
    assert counts == {}  # the store does not grow


def test_a_race_that_was_over_before_it_began(counts: dict[str, int]) -> None:
    stream = stream_of(9, 4)
    batching, prompts = TailBatching(stream, 2), stream.take(2)
    race = batching.begin({0: [0], 1: [], 2: [], 3: []}, [(1, 5), (2, 7), (3, 9)], True)
    assert race is not None
    assert race.is_over()
    assert batching.settle(race, prompts) == {1, 2}
    assert stream.state() == {"waiting": [0, 3]}
    # Two prompts are all that the step needs: they are waited for.
    assert batching.begin({0: [0], 1: [0]}, [], True) is None
    # Stopped before anything was sampled.
    race = batching.begin({0: [0], 1: [0], 2: [0]}, [], True)
    assert race is not None
    assert race.decide([race.report()])[0] == []


def test_how_many_are_launched() -> None:
    for prompts, factor, launched in (
        (100, 1.1, 110),
        (64, 1.25, 80),
        (3, 1.5, 5),
        (4, 1.0, 4),
        (10, 1.0001, 11),
    ):
        assert (
            RolloutConfig(num_prompts_per_step=prompts, tail_batching=factor).num_launched_prompts
            == launched
        )


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    rollout: dict[str, Any] = {"num_prompts_per_step": 4, "tail_batching": 1.5}
    assert (
        load_config(write_config(tmp_path, tmp_path, rollout=rollout)).rollout.num_launched_prompts
        == 6
    )
    for faulty, label in (
        ({"tail_batching": 0.5}, r"rollout\.tail_batching must be >= 1"),
        (
            {"dynamic_sampling": True},
            r"rollout\.dynamic_sampling is true and rollout\.tail_batching is",
        ),
    ):
        with pytest.raises(ConfigError, match=label):
            load_config(write_config(tmp_path, tmp_path, rollout=rollout | faulty))
    config = RolloutConfig(num_prompts_per_step=4, tail_batching=1.5)
    check_enough_to_launch(6, config)
    fresh = PromptStream([Prompt(row, row, [1], "", {}) for row in range(5)], 0, False)
    with pytest.raises(ConfigError, match=r"launches 6 prompts, and data\.train has 5 usable"):
        open_tail(fresh, 5, config, [])
