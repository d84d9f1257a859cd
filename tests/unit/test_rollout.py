"""What a rollout asks the engine for, and who samples which prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks.speed.rollout_replay import play, play_epoch
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RolloutConfig
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import ConversationId, GenerationHooks, Request
from grpo_spmd.observe.log import tail_waste_frac
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rollout.sample import Sampler
from tests.support.models import write_config

NUM_PROMPTS, GROUP_SIZE = 7, 3
PROMPTS = [
    Prompt(position=40 + i, row=i % 5, token_ids=[i + 1, i + 2], text="", columns={})
    for i in range(NUM_PROMPTS)
]


@dataclasses.dataclass
class Recorder:
    """Stands for one rank's engine under the static schedule: a completion repeats its request, so
    that a group shows
    what it came from."""

    engine_rank: int
    num_engines: int
    tp_rank: int
    tp_size: int
    _rollout: RolloutConfig
    _num_shared_calls: int = 0

    def _generate(
        self,
        batches: Any,
        max_in_flight: int,
        policy_version: int,
        hooks: GenerationHooks,
        must_abort: Any,
    ) -> dict[ConversationId, list[Completion]]:
        positions: list[ConversationId] = [position for batch in batches for position in batch]
        created: dict[ConversationId, list[Completion]] = {}
        for position in positions:
            turns = created.setdefault(position, [])
            while isinstance(request := hooks.next_request(*position, turns), Request):
                message = [*request.prompt_ids, request.seed or 0]
                turns.append(Completion(message, [policy_version, 0.0, 0.0], "stop"))
                assert hooks.on_completion is not None
                hooks.on_completion(*position, turns[-1])
        return created

    def _must_abort(self, num_steps: int) -> bool:
        return False

    generate_shared = RolloutEngine.generate_shared


@pytest.fixture
def config(tmp_path: Any) -> Config:
    return load_config(
        write_config(
            tmp_path,
            tmp_path / "model",
            rollout={"group_size": GROUP_SIZE, "schedule": "static"},
            seed=5,
        )
    )


def sample(
    config: Config, step: int = 3, engines: int = 1, tensor_parallel: int = 1
) -> list[RolloutGroup]:
    """The groups of all ranks, in the order of slots."""
    ranks = [
        Recorder(engine, engines, tp_rank, tensor_parallel, config.rollout)
        for engine in range(engines)
        for tp_rank in range(tensor_parallel)
    ]
    created: list[RolloutGroup] = []
    for rank in ranks:
        groups, _ = Sampler(rank, GROUP_SIZE, config.seed).sample(PROMPTS, step, "")  # type: ignore[arg-type]
        created += groups
    return sorted(created, key=lambda group: group.slot)


def seeds(groups: list[RolloutGroup]) -> list[int]:
    return [completion.token_ids[-1] for group in groups for completion in group.completions]


def test_every_completion_has_a_seed_of_its_own(config: Config) -> None:
    assert (
        len(set(seeds(sample(config)) + seeds(sample(config, step=4))))
        == 2 * NUM_PROMPTS * GROUP_SIZE
    )


def test_another_seed_of_the_config_gives_other_seeds(config: Config) -> None:
    second = dataclasses.replace(config, seed=6)
    assert not set(seeds(sample(config))) & set(seeds(sample(second)))


def test_a_seed_is_that_of_the_place_in_the_stream_and_not_of_the_row(config: Config) -> None:
    groups = sample(config)
    assert groups[0].prompt.row == groups[5].prompt.row
    assert not set(seeds(groups[:1])) & set(seeds(groups[5:6]))


@pytest.mark.parametrize(
    ("engines", "tensor_parallel"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (9, 1)]
)
def test_every_prompt_is_sampled_once_and_stays_with_its_completions(
    config: Config, engines: int, tensor_parallel: int
) -> None:
    groups = sample(config, engines=engines, tensor_parallel=tensor_parallel)
    assert [group.slot for group in groups] == list(range(NUM_PROMPTS))
    for group in groups:
        assert group.prompt is PROMPTS[group.slot]
        assert [completion.token_ids[:-1] for completion in group.completions] == [
            group.prompt.token_ids
        ] * GROUP_SIZE
    assert seeds(groups) == seeds(sample(config))


def test_the_engine_is_asked_for_the_version_of_the_step(config: Config) -> None:
    assert {
        completion.logprobs[0]
        for group in sample(config, step=4)
        for completion in group.completions
    } == {4}


@pytest.mark.parametrize(
    ("static", "slowness", "expected"),
    [
        (True, [1, 1], [5, 2]),  # 4 then 1, and 1 then 1
        (False, [1, 1], [4, 3]),  # after the two that are dealt the second engine takes the others
        (
            False,
            [1, 3],
            [5, 6],
            # the second is free at 3 and takes the third, until 6; the first is free at 4 and takes
            # the
            # fourth
        ),
    ],
)
def test_the_model_of_the_benchmark_by_hand(
    static: bool, slowness: list[float], expected: list[float]
) -> None:
    """Groups of one completion, one at a time, on two engines; a step of one request takes 8.05
    ms."""
    lengths = [[4], [1], [1], [1]]
    assert [s / 0.00805 for s in play(lengths, 1, slowness, static).done_s] == pytest.approx(
        expected
    )


def test_the_model_begins_with_the_longest_and_ends_when_enough_are_complete() -> None:
    # Dealt 4 and 3; then 2 at 3, until 5, and 1 at 4, until 5.
    played = play([[1], [2], [3], [4]], 1, [1, 1], expected=[1, 2, 3, 4])
    assert [s / 0.00805 for s in played.done_s] == pytest.approx([5, 5])
    assert (played.complete[:2], played.num_tokens) == ([2, 3], 10)
    # Three are complete at 3: 1, 1 and 1 on the second engine; of 4 three tokens are thrown away.
    played = play([[4], [1], [1], [1]], 1, [1, 1], enough=3)
    assert played.complete == [1, 2, 3]
    assert played.num_tokens == pytest.approx(6)
    assert [s / 0.00805 for s in played.done_s] == pytest.approx([3, 3])


def test_the_model_of_tail_batching_trains_on_each_prompt_once() -> None:
    shape = 4, 6, 2, 2, 4, 0.5, 8000
    without, epoch = play_epoch(3, *shape, 1.0), play_epoch(3, *shape, 1.5)
    assert without.short_mean is None
    assert without.dropped_frac == pytest.approx(0)
    assert epoch.short_mean is not None
    assert epoch.short_mean < epoch.mean  # short first
    assert 0 < epoch.dropped_frac < 1


def test_tail_waste_by_hand() -> None:
    # Two generations on 4 ranks, 1 2 3 4 s and 2 2 2 0 s: 10 + 6 busy seconds of 4 * (4 + 2)
    assert tail_waste_frac([[1.0, 2.0], [2.0, 2.0], [3.0, 2.0], [4.0, 0.0]]) == pytest.approx(
        1 - 16 / 24
    )
    assert tail_waste_frac([[], []]) is None
