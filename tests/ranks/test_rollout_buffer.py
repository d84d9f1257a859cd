"""A generation that was cut goes on from disk, bit by bit what it would have been, and samples
nothing twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, run_worker
from tests.support.workers.preempt import CUTS, PROMPTS, ROUNDS

GROUP_SIZE = 4
NUM_COMPLETIONS = GROUP_SIZE * len(PROMPTS)
LAYOUTS = {"two": 1, "tp2": 2}  # two ranks each
CUTS_OF = [("two", "first round"), ("two", "second round"), ("tp2", "first round")]
RESUMED = ["as it was", "other weights", "torn"]

Found = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buffer")
    make_model(folder / "model", "qwen3", tied=True)
    for name, tensor_parallel in {**LAYOUTS, "one": 1}.items():
        (folder / name).mkdir()
        (folder / "train.jsonl").write_text('{"prompt": "1"}\n' * 4)
        write_config(
            folder / name,
            folder / "model",
            data={"max_prompt_tokens": 64, "train": str(folder / "train.jsonl")},
            rollout={
                "group_size": GROUP_SIZE,
                "max_completion_tokens": 32,
                "tensor_parallel_size": tensor_parallel,
                "engine": {"max_num_seqs": 8},
            },
            training={"max_tokens_per_micro_batch": 128},
        )
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Found]:
    """What the ranks of each layout made, undisturbed, cut, and gone on."""
    jobs = {
        name: RanksJob(2, "tests.support.workers.preempt", *arguments(folder, name))
        for name in LAYOUTS
    }
    for job in jobs.values():
        code, output = job.wait(180)
        assert code == 0, output
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in jobs}


@pytest.fixture(scope="module")
def on_one_rank(folder: Path, found: dict[str, Found]) -> Found:
    """What one rank makes of what two had kept when they were cut."""
    cut = folder / "two/run/second round, as it was cut"
    for name in RESUMED:
        shutil.copytree(cut, folder / "resumed" / name)
    victim = max((folder / "resumed/torn").rglob("*.msgpack"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size // 2)  # pages that never came to the disk
    run_worker(
        1,
        "preempt",
        *arguments(folder, "one"),
        *(f"{folder}/resumed/{n}" for n in RESUMED),
        timeout_s=180,
    )
    found_on_one: Found = json.loads((folder / "one.json").read_text())
    return found_on_one


def arguments(folder: Path, name: str) -> tuple[str, str]:
    return str(folder / name / "config.yaml"), str(folder / f"{name}.json")


def completions(step: Found) -> list[Any]:
    """[position, completions] in the order of the prompts, whoever made them."""
    return sorted(rest for _, *rest in step["made"])


def num_kept(run_dir: Path) -> list[int]:
    """The number of records in each file."""
    return [
        len(msgspec.msgpack.decode(path.read_bytes())["records"])
        for path in run_dir.rglob("*.msgpack")
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_a_step(found: dict[str, Found], layout: str) -> None:
    created = completions(found[layout]["undisturbed"])
    assert [position for position, _ in created] == [prompt.position for prompt in PROMPTS]
    assert len({len(c[0]) for _, group in created for c in group}) > 5, (
        "completions of all lengths, so that some are done early"
    )
    assert found[layout]["undisturbed"]["sent"] == NUM_COMPLETIONS


@pytest.mark.parametrize(("layout", "cut"), CUTS_OF)
def test_a_signal_to_one_rank_ends_the_generation_on_all(
    found: dict[str, Found], layout: str, cut: str
) -> None:
    step = found[layout][f"cut in the {cut}"]
    assert step["reason"] == CUTS[cut].name
    assert len(step["made"]) == (0 if cut == "first round" else ROUNDS[0])
    assert 0 < step["sent"] <= NUM_COMPLETIONS
    for rank, leftovers in enumerate(step["leftovers"]):
        # Where an engine came to its end by itself, vLLM drops its last requests from the model's
        # side with the next
        # step.
        assert leftovers[: 5 if step["aborted"][rank] else 4] == [0] * (
            5 if step["aborted"][rank] else 4
        )
    assert step["aborted"][1] > 0
    if cut == "first round":  # in the second the other rank may have come to its end
        assert step["aborted"][0] > 0
    assert len(step["latency"]) == 1
    assert (
        step["latency"][0] < 10
    )  # the engine's step that was under way, or 8 with tensor parallelism
    assert found[layout]["new_keys"] == 0


@pytest.mark.parametrize(("layout", "cut"), CUTS_OF)
def test_it_goes_on_bit_by_bit_and_samples_nothing_twice(
    found: dict[str, Found], folder: Path, layout: str, cut: str
) -> None:
    retained = sum(num_kept(folder / layout / "run" / f"{cut}, as it was cut"))
    done_before = 0 if cut == "first round" else GROUP_SIZE * ROUNDS[0]
    assert done_before < retained < NUM_COMPLETIONS
    resumed, again = found[layout][f"{cut}, gone on"], found[layout][f"{cut}, once more"]
    assert resumed["sent"] == NUM_COMPLETIONS - retained
    assert again["sent"] == 0
    assert completions(resumed) == completions(again) == completions(found[layout]["undisturbed"])
    assert {rank for rank, *_ in again["made"]} == {0, 1}  # also what comes from disk is shared out
    assert sum(num_kept(folder / layout / "run" / cut)) == NUM_COMPLETIONS  # each once


@pytest.mark.parametrize("name", RESUMED)
def test_at_another_world_size(
    found: dict[str, Found], on_one_rank: Found, folder: Path, name: str
) -> None:
    assert completions(on_one_rank[name]) == completions(found["two"]["undisturbed"])
    retained = num_kept(folder / "two/run/second round, as it was cut")
    used = {"other weights": 0, "torn": sum(retained) - max(retained)}.get(name, sum(retained))
    assert on_one_rank[name]["sent"] == NUM_COMPLETIONS - used
