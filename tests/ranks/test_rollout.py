"""What a rollout asks the engine for, who samples which prompt, and that nothing but time depends on it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed.rollout_tail import finish_times
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.observe.derive import tail_waste_frac
from grpo_spmd.records import Completion, Prompt, RolloutGroup
from grpo_spmd.rollout.sample import sample_groups
from tests.support.models import write_config
from tests.support.processes import Job, torchrun
from tests.support.workers.schedule import NUM_PROMPTS as NUM_PROMPTS_OF
from tests.support.workers.schedule import PROMPTS as PROMPTS_OF_ALL

NUM_PROMPTS, GROUP_SIZE = 7, 3
PROMPTS = [
    Prompt(position=40 + i, row=i % 5, token_ids=[i + 1, i + 2], text="", columns={}) for i in range(NUM_PROMPTS)
]


@dataclasses.dataclass
class Recorder:
    """Stands for one rank's engine under the static schedule: a completion repeats its request, so that a group shows
    what it came from."""

    engine_rank: int
    num_engines: int
    tp_rank: int
    _config: Config
    busy_s: list[float] = dataclasses.field(default_factory=list)
    _num_shared_calls: int = 0

    def _generate(self, batches: Any, max_in_flight: int, policy_version: int, *_: Any) -> dict[int, Completion]:
        requests: list[Request] = [request for batch in batches for request in batch]
        made = [
            Completion([*request.prompt_ids, request.seed], [policy_version, 0.0, 0.0], "stop") for request in requests
        ]
        return dict(enumerate(made))

    def _must_abort(self, num_steps: int) -> bool:
        return False

    generate_shared = RolloutEngine.generate_shared


@pytest.fixture
def config(tmp_path: Any) -> Config:
    return load_config(
        write_config(tmp_path, tmp_path / "model", rollout={"group_size": GROUP_SIZE, "schedule": "static"}, seed=5)
    )


def sample(config: Config, step: int = 3, engines: int = 1, tensor_parallel: int = 1) -> list[RolloutGroup]:
    """The groups of all ranks, in the order of slots."""
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, tensor_parallel_size=tensor_parallel)
    )
    ranks = [
        Recorder(engine, engines, tp_rank, config) for engine in range(engines) for tp_rank in range(tensor_parallel)
    ]
    of_ranks = [sample_groups(rank, PROMPTS, config, step) for rank in ranks]  # type: ignore[arg-type]
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
def test_every_prompt_is_sampled_once_and_stays_with_its_completions(
    config: Config, engines: int, tensor_parallel: int
) -> None:
    groups = sample(config, engines=engines, tensor_parallel=tensor_parallel)
    assert [group.slot for group in groups] == list(range(NUM_PROMPTS))
    for group in groups:
        assert group.prompt is PROMPTS[group.slot]
        assert [completion.token_ids[:-1] for completion in group.completions] == [group.prompt.token_ids] * GROUP_SIZE
    assert seeds(groups) == seeds(sample(config))


def test_the_engine_is_asked_for_the_version_of_the_step(config: Config) -> None:
    assert {completion.logprobs[0] for group in sample(config, step=4) for completion in group.completions} == {4}


@pytest.mark.parametrize(
    ("static", "slowness", "expected"),
    [
        (True, [1, 1], [5, 2]),  # 4 then 1, and 1 then 1
        (False, [1, 1], [4, 3]),  # after the two that are dealt the second engine takes the others
        (
            False,
            [1, 3],
            [5, 6],
        ),  # the second is free at 3 and takes the third, until 6; the first is free at 4 and takes the fourth
    ],
)
def test_the_model_of_the_benchmark_by_hand(static: bool, slowness: list[float], expected: list[float]) -> None:
    """Groups of one completion, one at a time, on two engines; a step of one request takes 8.05 ms."""
    lengths = [[4], [1], [1], [1]]
    assert [t / 0.00805 for t in finish_times(lengths, 2, 1, static, slowness)] == pytest.approx(expected)


def test_tail_waste_by_hand() -> None:
    # Two generations on 4 ranks, 1 2 3 4 s and 2 2 2 0 s: 10 + 6 busy seconds of 4 * (4 + 2)
    sums = {"busy_s/0": 10.0, "max:busy_s/0": 4.0, "busy_s/1": 6.0, "max:busy_s/1": 2.0, "max:skipped": 9.0}
    assert tail_waste_frac(sums, 4) == pytest.approx(1 - 16 / 24)
    assert tail_waste_frac({"max:skipped": 9.0}, 4) is None


# Real vLLM on real ranks. Its KV cache holds 4 requests of the 16 that it is allowed to run.

Found = dict[str, Any]
# FULL_MATRIX=1 tests/run.sh -k rollout    takes tensor parallelism as well, and needs about a minute more.
RANKS = {"one": (1, 1), "two": (2, 1)} | ({"tp2": (2, 2), "two tp2": (4, 2)} if os.environ.get("FULL_MATRIX") else {})
SCENARIOS = [f"{name}/{schedule}" for schedule in ("static", "shared_queue") for name in NUM_PROMPTS_OF]
SHARED = [name for name in RANKS if name.startswith("two")]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Found]:
    """What the ranks of each layout made in each scenario; two layouts run at a time."""
    of_layout = {}
    for pair in (list(RANKS)[i : i + 2] for i in range(0, len(RANKS), 2)):
        jobs = {}
        for name in pair:
            (folder / name).mkdir()
            num_ranks, tensor_parallel = RANKS[name]
            # a block of 32 tokens is 32 KiB; vLLM keeps one
            engine = {"max_num_seqs": 16, "kv_cache_memory_bytes": (1 + 4) * 32 * 1024}
            rollout = {
                "group_size": 4,
                "max_completion_tokens": 8,
                "tensor_parallel_size": tensor_parallel,
                "engine": engine,
            }
            config = write_config(folder / name, folder / "model", rollout=rollout)
            jobs[name] = Job(
                torchrun(num_ranks, "-m", "tests.support.workers.schedule", str(config), str(folder / f"{name}.json"))
            )
        for name, job in jobs.items():
            code, output = job.wait(180)
            assert code == 0, output
            of_layout[name] = json.loads((folder / f"{name}.json").read_text())
    return of_layout


def completions(made: list[Any]) -> list[Any]:
    """[slot, position, completions] in the order of slots, whoever made them."""
    return sorted(rest for _, *rest in made)


def counts(made: list[Any], num_ranks: int = 2) -> list[int]:
    """How many groups each rank has."""
    return [sum(rank == owner for owner, *_ in made) for rank in range(num_ranks)]


@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize(
    "scenario", [*SCENARIOS, "slow/shared_queue", "first of two/shared_queue", "second of two/shared_queue"]
)
def test_tokens_and_logprobs_do_not_depend_on_who_sampled_what(
    found: dict[str, Found], layout: str, scenario: str
) -> None:
    num_prompts = {**NUM_PROMPTS_OF, "second of two": 20}.get(scenario.split("/")[0], 24)
    # slices of a layer add up in another order, which rounds differently
    alone = found["tp2" if RANKS[layout][1] > 1 else "one"]
    expected = completions(alone["many/static"])[:num_prompts]
    assert [slot for slot, *_ in expected] == list(range(num_prompts))
    assert completions(found[layout][scenario]) == expected  # each group exactly once, bit by bit
    assert [position for _, position, _ in expected] == [prompt.position for prompt in PROMPTS_OF_ALL[:num_prompts]]


@pytest.mark.parametrize("layout", SHARED)
def test_a_short_step_is_shared_out_as_evenly_as_it_can_be(found: dict[str, Found], layout: str) -> None:
    num_ranks, tensor_parallel = RANKS[layout]
    for name, expected in (("none", [0, 0]), ("one", [0, 1]), ("odd", [3, 4])):
        for schedule in ("static", "shared_queue"):
            of_ranks = counts(found[layout][f"{name}/{schedule}"], num_ranks)
            of_engines = [sum(of_ranks[i : i + tensor_parallel]) for i in range(0, num_ranks, tensor_parallel)]
            assert sorted(of_engines) == expected, (name, schedule)
            assert all(
                max(of_ranks[i : i + tensor_parallel]) - min(of_ranks[i : i + tensor_parallel]) <= 1
                for i in (0, tensor_parallel)
            )
    assert counts(found[layout]["many/static"], num_ranks) == [24 // num_ranks] * num_ranks


@pytest.mark.parametrize("layout", SHARED)
def test_a_slow_engine_takes_fewer_groups(found: dict[str, Found], layout: str) -> None:
    num_ranks, tensor_parallel = RANKS[layout]
    for scenario in ("slow/shared_queue", "first of two/shared_queue"):
        of_ranks = counts(found[layout][scenario], num_ranks)
        # The slow one has the 4 that it was dealt and a few more, where the static schedule would have given it 12.
        assert 4 <= sum(of_ranks[-tensor_parallel:]) <= 9, of_ranks


@pytest.mark.parametrize("layout", SHARED)
def test_groups_are_claimed_only_by_engines_that_can_run_them(found: dict[str, Found], layout: str) -> None:
    # The worker fails where an engine claims while its requests wait; here, that they did wait.
    assert found[layout]["most_waiting"] >= 4
    assert found[layout]["num_claims"] > 4 * 8
    assert [sorted(len(seconds) for seconds in found[layout]["busy_s"])] == [[len(SCENARIOS) + 3] * RANKS[layout][0]]


@pytest.mark.parametrize("layout", RANKS)
def test_one_engine_has_all_and_claims_nothing(found: dict[str, Found], layout: str) -> None:
    if layout not in SHARED:
        assert found[layout]["num_claims"] == 0


@pytest.mark.parametrize("layout", RANKS)
def test_claims_are_distinct_and_leave_nothing_in_the_store(found: dict[str, Found], layout: str) -> None:
    assert found[layout]["claims"] == list(range(1000))
    assert found[layout]["new_keys"] <= 1  # torch's own counters


def test_a_whole_run_is_the_same_under_both_schedules(folder: Path) -> None:
    """Two steps with two rounds of generation or more each, on two ranks: every figure that is not a time, and every
    dumped rollout."""
    (folder / "reward.py").write_text(
        "def low(completion_ids, **columns):\n    return [float(ids[0] < 25) for ids in completion_ids]\n"
    )
    jobs = {}
    for schedule in ("static", "shared_queue"):
        (folder / schedule).mkdir()
        rollout = {
            "num_prompts_per_step": 9,
            "group_size": 4,
            "dynamic_sampling": True,
            "schedule": schedule,
            "engine": {"max_num_seqs": 4},
        }
        rewards = [{"function": f"{folder}/reward.py:low"}]
        config = write_config(folder / schedule, folder / "model", rollout=rollout, rewards=rewards)
        jobs[schedule] = Job(torchrun(2, "-m", "grpo_spmd.train", "--config", str(config)))
    metrics, dumps = {}, {}
    for schedule, job in jobs.items():
        code, output = job.wait(120)
        assert code == 0, output
        run = folder / schedule / "run"
        metrics[schedule] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        dumps[schedule] = [(run / f"rollouts/step_{step:06d}.jsonl").read_text() for step in range(2)]
    assert dumps["static"] == dumps["shared_queue"]
    timed = ("time/", "throughput/", "memory/", "rollout/", "weight_sync/proof_s")
    plain = {
        name: [{k: v for k, v in m.items() if not k.startswith(timed)} for m in of_run]
        for name, of_run in metrics.items()
    }
    assert plain["static"] == plain["shared_queue"]
    for m in metrics["static"] + metrics["shared_queue"]:
        assert m["dynamic_sampling/sampled_groups"] > 9
        assert m["optim/grad_norm"] > 0
        assert 0 <= m["rollout/tail_waste_frac"] < 1
