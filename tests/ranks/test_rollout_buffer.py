"""A generation that was cut goes on from disk, bit by bit what it would have been, and samples nothing twice."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.records import Completion, Prompt
from grpo_spmd.rollout.buffer import RolloutBuffer, forget_before, steps_on_disk
from tests.support.models import make_model, write_config
from tests.support.processes import Job, torchrun
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
    jobs = {name: Job(torchrun(2, "-m", "tests.support.workers.preempt", *arguments(folder, name))) for name in LAYOUTS}
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
    victim = max((folder / "resumed/torn").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    with victim.open("r+b") as file:
        file.truncate(victim.stat().st_size - 4096)  # a page that never came to the disk
    job = Job(
        [
            *torchrun(1)[:1],
            "-m",
            "tests.support.workers.preempt",
            *arguments(folder, "one"),
            *(f"{folder}/resumed/{n}" for n in RESUMED),
        ]
    )
    code, output = job.wait(180)
    assert code == 0, output
    found_on_one: Found = json.loads((folder / "one.json").read_text())
    return found_on_one


def arguments(folder: Path, name: str) -> tuple[str, str]:
    return str(folder / name / "config.yaml"), str(folder / f"{name}.json")


def completions(step: Found) -> list[Any]:
    """[position, completions] in the order of the prompts, whoever made them."""
    return sorted(rest for _, *rest in step["made"])


def num_kept(run_dir: Path) -> list[int]:
    """Of each file, from the other end: how long the tensor of its rows is."""
    counts = []
    for path in run_dir.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            counts.append(int(file.get_tensor("rows").shape[0]))
    return counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_step_is_a_step(found: dict[str, Found], layout: str) -> None:
    made = completions(found[layout]["undisturbed"])
    assert [position for position, _ in made] == [prompt.position for prompt in PROMPTS]
    assert len({len(c[0]) for _, group in made for c in group}) > 5, (
        "completions of all lengths, so that some are done early"
    )
    assert found[layout]["undisturbed"]["sent"] == NUM_COMPLETIONS


@pytest.mark.parametrize(("layout", "cut"), CUTS_OF)
def test_a_signal_to_one_rank_ends_the_generation_on_all(found: dict[str, Found], layout: str, cut: str) -> None:
    step = found[layout][f"cut in the {cut}"]
    assert step["reason"] == CUTS[cut].name
    assert len(step["made"]) == (0 if cut == "first round" else ROUNDS[0])
    assert 0 < step["sent"] <= NUM_COMPLETIONS
    for rank, leftovers in enumerate(step["leftovers"]):
        # Where an engine came to its end by itself, vLLM drops its last requests from the model's side with the next
        # step.
        assert leftovers[: 5 if step["aborted"][rank] else 4] == [0] * (5 if step["aborted"][rank] else 4)
    assert step["aborted"][1] > 0
    if cut == "first round":  # in the second the other rank may have come to its end
        assert step["aborted"][0] > 0
    assert len(step["latency"]) == 1
    assert step["latency"][0] < 10  # the engine's step that was under way, or 8 with tensor parallelism
    assert found[layout]["new_keys"] == 0


@pytest.mark.parametrize(("layout", "cut"), CUTS_OF)
def test_it_goes_on_bit_by_bit_and_samples_nothing_twice(
    found: dict[str, Found], folder: Path, layout: str, cut: str
) -> None:
    kept = sum(num_kept(folder / layout / "run" / f"{cut}, as it was cut"))
    done_before = 0 if cut == "first round" else GROUP_SIZE * ROUNDS[0]
    assert done_before < kept < NUM_COMPLETIONS
    resumed, again = found[layout][f"{cut}, gone on"], found[layout][f"{cut}, once more"]
    assert resumed["sent"] == NUM_COMPLETIONS - kept
    assert again["sent"] == 0
    assert completions(resumed) == completions(again) == completions(found[layout]["undisturbed"])
    assert {rank for rank, *_ in again["made"]} == {0, 1}  # also what comes from disk is shared out
    assert sum(num_kept(folder / layout / "run" / cut)) == NUM_COMPLETIONS  # each once


@pytest.mark.parametrize("name", RESUMED)
def test_at_another_world_size(found: dict[str, Found], on_one_rank: Found, folder: Path, name: str) -> None:
    assert completions(on_one_rank[name]) == completions(found["two"]["undisturbed"])
    kept = num_kept(folder / "two/run/second round, as it was cut")
    used = {"other weights": 0, "torn": sum(kept) - max(kept)}.get(name, sum(kept))
    assert on_one_rank[name]["sent"] == NUM_COMPLETIONS - used


# Files alone.

PROMPT = Prompt(7, 0, [1, 2, 3], "", {})
COMPLETIONS = [Completion([5, 6 + n, 0], [-0.1, -1 / 3, -n / 7], "stop") for n in range(3)] + [
    Completion([9], [-1e-300], "length")
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    yield start_session()
    end_session()


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return load_config(write_config(tmp_path, tmp_path / "model"))


@pytest.fixture
def written(config: Config, session: Session) -> Path:
    """The one file of step 3, which holds the four completions of a prompt."""
    buffer = RolloutBuffer(config, session)
    assert buffer.find(3, "these", [PROMPT], 4) == {}
    for sample, completion in enumerate(COMPLETIONS):
        buffer.keep(PROMPT, sample, completion)
    buffer.write()
    [path] = Path(config.run_dir).rglob("*.*")
    return path


def read_back(
    config: Config, session: Session, step: int = 3, prompt: Prompt = PROMPT, weights_id: str = "these"
) -> Any:
    buffer = RolloutBuffer(config, session)
    return {place: buffer.read(kept) for place, kept in buffer.find(step, weights_id, [prompt], 4).items()}


def test_what_is_written_comes_back_bit_by_bit(written: Path, config: Config, session: Session) -> None:
    assert read_back(config, session) == {(0, sample): completion for sample, completion in enumerate(COMPLETIONS)}
    assert all(type(token) is int for token in read_back(config, session)[0, 0].token_ids)


def test_each_of_what_makes_a_completion_must_match(written: Path, config: Config, session: Session) -> None:
    def count(config: Config = config, **other: Any) -> int:
        return len(read_back(config, session, **other))

    def rollout(**values: Any) -> Config:
        return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, **values))

    # the prompt's place, its tokens, the step
    assert count(prompt=dataclasses.replace(PROMPT, position=8)) == 0
    assert count(prompt=dataclasses.replace(PROMPT, token_ids=[1, 2, 4])) == 0
    assert count(step=4) == 0
    # how it was sampled
    for other in (dataclasses.replace(config, seed=1), rollout(temperature=0.9), rollout(max_completion_tokens=13)):
        assert count(other) == 0
    assert count(dataclasses.replace(config, model=dataclasses.replace(config.model, dtype="bfloat16"))) == 0
    assert count(weights_id="others") == 0
    # what has no part in it
    faster = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=0.5))
    assert count(faster) == count() == 4


def test_damaged_files_are_found_and_left_out(
    written: Path, config: Config, session: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = written.read_bytes()
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    damages = {f"cut at {n}": good[:n] for n in (0, 7, 100, len(good) - 1)} | {
        "zeros": bytes(len(good)),
        "longer": good + b"\0",
    }
    damages |= {f"flipped at {n}": good[:n] + bytes([good[n] ^ 1]) + good[n + 1 :] for n in range(0, len(good), 37)}
    for name, damaged in damages.items():
        caplog.clear()
        written.write_bytes(damaged)
        assert read_back(config, session) == {}, name
        assert "is not used: its contents are damaged" in caplog.text, name
    written.write_bytes(good)
    written.with_name("notes.safetensors").write_text("not ours")
    written.with_suffix(".tmp").write_bytes(good[:50])
    assert len(read_back(config, session)) == 4


def test_a_disk_that_takes_nothing_is_only_a_warning(
    config: Config, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    Path(config.run_dir).mkdir()
    Path(config.run_dir, "rollout_buffer").write_text("no folder")
    buffer = RolloutBuffer(config, session)
    assert buffer.find(0, "these", [PROMPT], 4) == {}
    buffer.keep(PROMPT, 0, COMPLETIONS[0])
    buffer.write()
    assert "1 completions are not kept on disk" in caplog.text


def test_long_generations_are_written_while_they_run(
    config: Config, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_spmd.rollout.buffer._WRITE_EVERY_S", 0.0)
    buffer = RolloutBuffer(config, session)
    buffer.find(0, "these", [PROMPT], 4)
    for sample, completion in enumerate(COMPLETIONS[:3]):
        buffer.keep(PROMPT, sample, completion)
    assert len(read_back(config, session, step=0)) == 3


def test_steps_are_forgotten_once_they_are_saved(written: Path, config: Config) -> None:
    for step in (4, 12, 1_000_000):
        shutil.copytree(written.parent, written.parents[1] / f"step_{step:06d}")
    assert steps_on_disk(config.run_dir) == [3, 4, 12, 1_000_000]
    forget_before(config.run_dir, 12)
    assert steps_on_disk(config.run_dir) == [12, 1_000_000]
    forget_before(config.run_dir, 12)
    forget_before(config.run_dir + "/elsewhere", 12)
