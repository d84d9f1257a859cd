"""Nothing but time depends on who samples which prompt."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from tests.support.dumps import dumped
from tests.support.models import write_config
from tests.support.ranks import RanksJob
from tests.support.workers.conversations import JOBS as LATE_JOBS
from tests.support.workers.schedule import JOBS
from tests.support.workers.schedule import NUM_PROMPTS as NUM_PROMPTS_OF
from tests.support.workers.schedule import PROMPTS as PROMPTS_OF_ALL

NUM_PROMPTS, GROUP_SIZE = 7, 3


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


Found = dict[str, Any]
# FULL_MATRIX=1 tests/run.sh -k rollout    takes tensor parallelism as well, and needs about a
# minute more.
RANKS = {"one": (1, 1), "two": (2, 1)} | (
    {"tp2": (2, 2), "two tp2": (4, 2)} if os.environ.get("FULL_MATRIX") else {}
)
SCENARIOS = [
    f"{name}/{schedule}" for schedule in ("static", "shared_queue") for name in NUM_PROMPTS_OF
]
SHARED = [name for name in RANKS if name.startswith("two")]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Found]:
    """What the ranks of each layout made in each scenario; two layouts run at a time."""
    layout_values = {}
    for pair in (list(RANKS)[i : i + 2] for i in range(0, len(RANKS), 2)):
        jobs = {}
        for name in pair:
            (folder / name).mkdir()
            num_ranks, tensor_parallel = RANKS[name]
            engine = {
                "max_num_seqs": 16,
                "kv_cache_memory_bytes": (1 + 4) * 32 * 1024,
            }  # a block of 32 tokens is 32 KiB; vLLM keeps one
            rollout = {
                "group_size": 4,
                "max_completion_tokens": 8,
                "tensor_parallel_size": tensor_parallel,
                "engine": engine,
            }
            config = write_config(folder / name, folder / "model", rollout=rollout)
            jobs[name] = RanksJob(
                num_ranks,
                "tests.support.workers.schedule",
                str(config),
                str(folder / f"{name}.json"),
            )
        for name, job in jobs.items():
            code, output = job.wait(180)
            assert code == 0, output
            layout_values[name] = json.loads((folder / f"{name}.json").read_text())
    return layout_values


def completions(made: list[Any]) -> list[Any]:
    """[slot, position, completions] in the order of slots, whoever made them."""
    return sorted(rest for _, *rest in made)


def counts(made: list[Any], num_ranks: int = 2) -> list[int]:
    """How many groups each rank has."""
    return [sum(rank == owner for owner, *_ in made) for rank in range(num_ranks)]


@pytest.mark.parametrize("layout", RANKS)
@pytest.mark.parametrize(
    "scenario",
    [*SCENARIOS, "slow/shared_queue", "first of two/shared_queue", "second of two/shared_queue"],
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
    assert [position for _, position, _ in expected] == [
        prompt.position for prompt in PROMPTS_OF_ALL[:num_prompts]
    ]


@pytest.mark.parametrize("layout", RANKS)
def test_groups_that_are_scored_early_are_the_same(found: dict[str, Found], layout: str) -> None:
    alone = found["tp2" if RANKS[layout][1] > 1 else "one"]
    assert completions(found[layout]["early"]) == completions(alone["many/static"])


@pytest.mark.parametrize("layout", SHARED)
def test_a_short_step_is_shared_out_as_evenly_as_it_can_be(
    found: dict[str, Found], layout: str
) -> None:
    num_ranks, tensor_parallel = RANKS[layout]
    for name, expected in (("none", [0, 0]), ("one", [0, 1]), ("odd", [3, 4])):
        for schedule in ("static", "shared_queue"):
            rank_values = counts(found[layout][f"{name}/{schedule}"], num_ranks)
            engines_values = [
                sum(rank_values[i : i + tensor_parallel])
                for i in range(0, num_ranks, tensor_parallel)
            ]
            assert sorted(engines_values) == expected, (name, schedule)
            assert all(
                max(rank_values[i : i + tensor_parallel])
                - min(rank_values[i : i + tensor_parallel])
                <= 1
                for i in (0, tensor_parallel)
            )
    assert counts(found[layout]["many/static"], num_ranks) == [24 // num_ranks] * num_ranks


@pytest.mark.parametrize("layout", SHARED)
def test_a_slow_engine_takes_fewer_groups(found: dict[str, Found], layout: str) -> None:
    num_ranks, tensor_parallel = RANKS[layout]
    for scenario in ("slow/shared_queue", "first of two/shared_queue"):
        rank_values = counts(found[layout][scenario], num_ranks)
        # The slow one has the 4 that it was dealt and a few more, where the static schedule would
        # have given it 12.
        assert 4 <= sum(rank_values[-tensor_parallel:]) <= 9, rank_values


@pytest.mark.parametrize("layout", RANKS)
def test_what_took_longest_last_time_is_begun_first(found: dict[str, Found], layout: str) -> None:
    tensor_parallel = RANKS[layout][1]
    again, alone = (
        completions(found[layout]["uneven/again"]),
        found["tp2" if tensor_parallel > 1 else "one"],
    )
    assert again == completions(alone["uneven/in turn"])  # bit by bit
    took = [sum(len(token_ids) for token_ids, *_ in group) / 4 for _, _, group in again]
    assert len(set(took)) > 8
    engines_values = found[layout]["order"][::tensor_parallel]
    for started, expected in found[layout]["order"]:
        assert expected == [
            round(tokens, 1) for tokens in took
        ]  # known to every rank, whoever sampled it
        in_order = [expected[slot] for slot in started]
        assert in_order == sorted(in_order, reverse=True)
    assert sorted(slot for started, _ in engines_values for slot in started) == list(range(24))
    if (
        layout in SHARED
    ):  # each engine was dealt 4 of the 8 longest, and claimed the others as it got free
        dealt = sorted(
            engines_values[0][1][slot] for started, _ in engines_values for slot in started[:4]
        )
        assert dealt == sorted(engines_values[0][1])[-8:]


@pytest.mark.parametrize("layout", SHARED)
def test_groups_are_claimed_only_by_engines_that_can_run_them(
    found: dict[str, Found], layout: str
) -> None:
    # The worker fails where an engine claims while its requests wait; here, that they did wait.
    assert found[layout]["most_waiting"] >= 4
    assert found[layout]["num_claims"] > 4 * 8
    assert [sorted(len(seconds) for seconds in found[layout]["busy_s"])] == [
        [len(SCENARIOS) + 3] * RANKS[layout][0]
    ]


@pytest.mark.parametrize("layout", RANKS)
def test_a_request_may_be_followed_by_another(found: dict[str, Found], layout: str) -> None:
    # The worker compares each turn with its request alone, and ends conversations in their middle.
    assert found[layout]["turns"] == [
        [job, *((job + n) % 3 + 1 for n in range(size))] for job, size in enumerate(JOBS)
    ]


@pytest.mark.parametrize("layout", RANKS)
def test_answers_may_come_late_and_in_any_order(found: dict[str, Found], layout: str) -> None:
    # The worker compares each turn with its whole context alone, over two orders of answers.
    later = found[layout]["later"]
    assert later == found["tp2" if RANKS[layout][1] > 1 else "one"]["later"]  # bit by bit
    num_turns = [
        [(job + number) % 4 + 1 for number in range(size)] for job, size in enumerate(LATE_JOBS)
    ]
    assert [[len(turns) for turns in conversations] for _, conversations in later] == num_turns


@pytest.mark.parametrize("layout", RANKS)
def test_a_step_is_full_with_the_groups_that_are_complete_first(
    found: dict[str, Found], layout: str
) -> None:
    race = found[layout]["race"]
    alone = {position: group for _, position, group in completions(race["all"])}
    num_launched, short, rank_values = race["short"]
    assert num_launched == len(alone) == 24
    selected = {position: group for _, position, group in completions(short)}
    assert len(short) == len(selected) == 10
    for waiting, metrics in rank_values:  # every rank knows of the same
        assert sorted([*selected, *waiting]) == list(range(24))
        assert metrics == rank_values[0][1]
    waiting, metrics = rank_values[0]
    assert (metrics["rollout/waiting_prompts"], metrics["rollout/tail_long_round"]) == (14, 0)
    assert 0 < metrics["rollout/tail_dropped_tokens_frac"] < 1
    assert (
        1
        <= metrics["rollout/tail_launched_tokens_mean"]
        <= metrics["rollout/tail_launched_tokens_p95"]
        <= 8
    )
    # Then those that wait, all of which are waited for.
    num_launched, long, rank_values = race["long"]
    assert (num_launched, [position for _, position, _ in completions(long)]) == (10, waiting[:10])
    retained = {
        "rollout/waiting_prompts": 4,
        "rollout/tail_long_round": 1,
        "rollout/tail_dropped_tokens_frac": 0,
    }
    assert rank_values == [[waiting[10:], retained]] * RANKS[layout][0]
    selected |= {position: group for _, position, group in completions(long)}
    assert selected == {position: alone[position] for position in selected}  # bit by bit
    # One rank gave up and nobody waits for it: `Preemption.guard` ends the step.
    num_launched, _, rank_values = race["given up"]
    assert num_launched == 24
    assert all(waiting == rank_values[0][0] for waiting, _ in rank_values)


@pytest.mark.parametrize("layout", RANKS)
def test_one_engine_has_all_and_claims_nothing(found: dict[str, Found], layout: str) -> None:
    if layout not in SHARED:
        assert found[layout]["num_claims"] == 0


@pytest.mark.parametrize("layout", RANKS)
def test_claims_are_distinct_and_leave_nothing_in_the_store(
    found: dict[str, Found], layout: str
) -> None:
    assert found[layout]["claims"] == list(range(1000))
    assert found[layout]["new_keys"] <= 1  # torch's own counters


def test_a_whole_run_is_the_same_under_both_schedules(folder: Path) -> None:
    """Two steps with two rounds of generation or more each, on two ranks: every figure that is not
    a time, and every
    dumped rollout."""
    (folder / "reward.py").write_text(
        "def low(completion_ids, **columns):\n    return [float(ids[0] < 25) for ids in "
        "completion_ids]\n"
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
        jobs[schedule] = RanksJob(2, "grpo_spmd.train", "--config", str(config))
    metrics, dumps = {}, {}
    for schedule, job in jobs.items():
        code, output = job.wait(120)
        assert code == 0, output
        run = folder / schedule / "run"
        metrics[schedule] = [
            json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        dumps[schedule] = [dumped(run, step) for step in (1, 2)]
    assert dumps["static"] == dumps["shared_queue"]
    timed = ("time/", "throughput/", "memory/", "rollout/", "weight_sync/proof_s", "proofs/")
    plain = {
        name: [{k: v for k, v in m.items() if not k.startswith(timed)} for m in run_values]
        for name, run_values in metrics.items()
    }
    assert plain["static"] == plain["shared_queue"]
    for m in metrics["static"] + metrics["shared_queue"]:
        assert m["dynamic_sampling/sampled_groups"] > 9
        assert m["optim/grad_norm"] > 0
        assert 0 <= m["rollout/tail_waste_frac"] < 1
