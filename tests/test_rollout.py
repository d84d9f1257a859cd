"""What a rollout asks the engine for, and how its answers become groups: seeds, and who samples and scores which prompt."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_spmd.config import Config, load_config
from grpo_spmd.data_types import Completion, Prompt, RolloutGroup
from grpo_spmd.rollout import Request, rollout_groups
from tests.models import write_config

NUM_PROMPTS, GROUP_SIZE = 7, 3
PROMPTS = [Prompt(position=40 + i, row=i % 5, token_ids=[i + 1, i + 2], text="", columns={}) for i in range(NUM_PROMPTS)]


@dataclasses.dataclass
class Recorder:
    """Stands for one rank's engine: a completion repeats its request, so that a group shows what it came from."""

    engine_rank: int
    num_engines: int
    tp_rank: int

    def generate(self, requests: Sequence[Request], policy_version: int) -> list[Completion]:
        return [Completion([*request.prompt_ids, request.seed], [policy_version, 0.0, 0.0], "stop") for request in requests]


@pytest.fixture
def config(tmp_path: Any) -> Config:
    return load_config(write_config(tmp_path, tmp_path / "model", rollout={"group_size": GROUP_SIZE}, seed=5))


def sample(config: Config, step: int = 3, engines: int = 1, tensor_parallel: int = 1) -> list[RolloutGroup]:
    """The groups of all ranks, in the order of slots."""
    config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, tensor_parallel_size=tensor_parallel))
    ranks = [Recorder(engine, engines, tp_rank) for engine in range(engines) for tp_rank in range(tensor_parallel)]
    of_ranks = [rollout_groups(rank, PROMPTS, config, step) for rank in ranks]  # type: ignore[arg-type]
    return sorted((group for groups in of_ranks for group in groups), key=lambda group: group.slot)


def seeds(groups: list[RolloutGroup]) -> list[int]:
    return [completion.token_ids[-1] for group in groups for completion in group.completions]


def test_every_completion_has_a_seed_of_its_own(config: Config) -> None:
    assert len(set(seeds(sample(config)) + seeds(sample(config, step=4)))) == 2 * NUM_PROMPTS * GROUP_SIZE


def test_another_seed_of_the_config_gives_other_seeds(config: Config) -> None:
    other = dataclasses.replace(config, seed=6)
    assert not set(seeds(sample(config))) & set(seeds(sample(other)))


def test_a_seed_is_that_of_the_place_in_the_stream_and_not_of_the_row(config: Config) -> None:
    groups = sample(config)
    assert groups[0].prompt.row == groups[5].prompt.row
    assert not set(seeds(groups[:1])) & set(seeds(groups[5:6]))


@pytest.mark.parametrize(("engines", "tensor_parallel"), [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (9, 1)])
def test_every_prompt_is_sampled_once_and_stays_with_its_completions(config: Config, engines: int, tensor_parallel: int) -> None:
    groups = sample(config, engines=engines, tensor_parallel=tensor_parallel)
    assert [group.slot for group in groups] == list(range(NUM_PROMPTS))
    for group in groups:
        assert group.prompt is PROMPTS[group.slot]
        assert [completion.token_ids[:-1] for completion in group.completions] == [group.prompt.token_ids] * GROUP_SIZE
    assert seeds(groups) == seeds(sample(config))


def test_the_engine_is_asked_for_the_version_of_the_step(config: Config) -> None:
    assert {completion.logprobs[0] for group in sample(config, step=4) for completion in group.completions} == {4}
