"""Real evaluations on one and two ranks and with tensor parallelism."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from grpo_spmd.rewards.verifiers import final_answer
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, run_worker

# Whole evaluations. Sets of 1, 3 and 7 prompts are fewer than, or no multiple of, two ranks. The
# prompts are longer
# than a block of the prefix cache and occur in training too; that an evaluation leaves no cache
# behind is seen by
# tests/support/workers/evaluate.py.

SETS = {"e1": 1, "e3": 3, "e7": 7}
NUM_SAMPLES, NUM_STEPS = 4, 3
# By the first token: None, NaN, or right or wrong; the second reward has 0.1 for digits, so that
# "right" is not "reward
# > 0".
REWARD = """
def score(completion_ids, **columns):
    first = [ids[0] for ids in completion_ids]
    return [None if id % 7 == 0 else float("nan") if id % 7 == 1 else float(id % 2) for id in first]
"""
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate")
    make_model(folder / "model", "qwen3", tied=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [
        json.dumps({"prompt": f"{'1,2,3,4,5,6,7,8,9+' * 2}{a},{b}=", "answer": f"gold {a}{b}"})
        + "\n"
        for a in range(1, 5)
        for b in range(1, 5)
    ]
    (folder / "train.jsonl").write_text("".join(rows))
    for name, size in SETS.items():
        (folder / f"{name}.jsonl").write_text("".join(rows[:size]))
    return folder


def config_file(folder: Path, name: str, *, evaluates: bool = True, **sections: Any) -> Path:
    (folder / name).mkdir()
    evaluated = {
        "eval": {set_name: str(folder / f"{set_name}.jsonl") for set_name in SETS if evaluates}
    }
    return write_config(
        folder / name,
        folder / "model",
        data={"train": str(folder / "train.jsonl"), "max_prompt_tokens": 48, **evaluated},
        rewards=[
            {"function": f"{folder}/reward.py:score", "name": "verifier"},
            {"name": "format", "args": {"pattern": "[0-9].*"}, "weight": 0.1},
        ],
        **{
            "training": {"num_steps": NUM_STEPS, "max_tokens_per_micro_batch": 256},
            "eval": {
                "every_steps": 2 if evaluates else 0,
                "num_samples": NUM_SAMPLES,
                "temperature": 0.9,
            },
            **sections,
        },
    )


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, Path]:
    """The run folders of two trainings in one process each, with and without evaluation, that run
    at the same time."""
    files = {"on": config_file(folder, "on"), "off": config_file(folder, "off", evaluates=False)}
    jobs = {
        name: RanksJob(1, "grpo_spmd.train", "--config", str(file)) for name, file in files.items()
    }
    for name, job in jobs.items():
        code, output = job.wait(120)
        assert code == 0, output
        (folder / name / "output.txt").write_text(output)
    return {name: folder / name / "run" for name in jobs}


# FULL_MATRIX=1 tests/run.sh -k evaluat    takes tensor parallelism as well: another 20 to 40 s.
_ENGINES = (
    {1: "two engines", 2: "tensor parallel 2"}
    if os.environ.get("FULL_MATRIX")
    else {1: "two engines"}
)


@pytest.fixture(scope="module", params=list(_ENGINES), ids=list(_ENGINES.values()))
def evaluated(folder: Path, request: pytest.FixtureRequest) -> Path:
    """The folder of evaluations on two ranks."""
    run_dir = folder / f"two_ranks_tp{request.param}"
    config = config_file(
        folder,
        f"tp{request.param}",
        rollout={"max_completion_tokens": 12, "tensor_parallel_size": request.param},
    )
    output = run_worker(2, "evaluate", str(config), str(run_dir), timeout_s=120)
    sizes = [json.loads(numbers) for numbers in re.findall(r"scored (\[.*\])", output)]
    # Shared alike, completion by completion; every completion scored on exactly one rank.
    assert [sorted(pieces) for pieces in zip(*sizes, strict=True)] == [
        [22, 22],
        [22, 22],
        [5, 6],
        [5, 6],
        [0, 1],
    ]
    return run_dir


def read(run_dir: Path, name: str) -> Rows:
    """In the order of the set, whichever rank wrote what."""
    rows = [json.loads(line) for line in (run_dir / "rollouts" / name).read_text().splitlines()]
    return sorted(rows, key=lambda row: (row.get("position", row["row"]), row["sample"]))


def eval_metrics(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key.startswith("eval/")}


def read_metrics(run_dir: Path) -> Rows:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_training_samples_the_same_completions_with_and_without_evaluation(
    trained: dict[str, Path],
) -> None:
    for step in range(1, NUM_STEPS + 1):
        on, off = (read(trained[name], f"step_{step:06d}.jsonl") for name in ("on", "off"))
        assert on == off  # token ids, logprobs, rewards and advantages, to the last bit
    assert not list((trained["off"] / "rollouts").glob("eval*"))
    off_lines, on_lines = read_metrics(trained["off"]), read_metrics(trained["on"])
    for off_line, on_line in zip(
        off_lines, (line for line in on_lines if not eval_metrics(line)), strict=True
    ):
        for key in ("loss/policy", "optim/grad_norm", "reward/mean", "weight_sync/mismatch_kl"):
            assert on_line[key] == off_line[key], key


def test_metrics_have_an_evaluation_every_second_step_and_after_the_last(
    trained: dict[str, Path],
) -> None:
    lines = read_metrics(trained["on"])
    policies_values = [0, 2, 3]  # each behind the line of its step
    assert [(line["step"], bool(eval_metrics(line))) for line in lines] == sorted(
        [(step, False) for step in (1, 2, 3)] + [(step, True) for step in policies_values]
    )
    assert [line["step"] for line in lines if eval_metrics(line)] == policies_values
    per_set = [
        "mean",
        "pass_at_1",
        "pass_at_2",
        "pass_at_4",
        "maj_at_4",
        "truncated_frac",
        "unscored_frac",
        "tokens_mean",
        "num_prompts",
    ]
    for line in (lines[0], lines[3], lines[5]):
        assert sorted(eval_metrics(line)) == sorted(
            f"eval/{name}/{key}" for name in SETS for key in per_set
        )
    assert (
        lines[1]["time/eval_s"] > 0.001 > lines[2]["time/eval_s"]
    )  # it is a phase of the next step
    assert [
        len(read_metrics(trained["off"])),
        bool(eval_metrics(read_metrics(trained["off"])[0])),
    ] == [
        NUM_STEPS,
        False,
    ]
    output = (trained["on"].parent / "output.txt").read_text()
    assert [output.count(f"eval after step {step}, e7: mean ") for step in range(4)] == [1, 0, 1, 1]


def test_the_last_evaluation_measures_the_policy_after_the_last_update(
    trained: dict[str, Path],
) -> None:
    """The evaluations differ although they draw the same random numbers (see the worker): each saw
    other weights."""
    steps = [
        [row["completion"] for row in read(trained["on"], f"eval_e7_step_{step:06d}.jsonl")]
        for step in (0, 2, 3)
    ]
    assert steps[0] != steps[1] != steps[2]


def test_two_ranks_and_tensor_parallelism_evaluate_exactly_as_one_rank(
    trained: dict[str, Path], evaluated: Path
) -> None:
    sampled, _ = json.loads((evaluated / "metrics.json").read_text())
    assert sampled == eval_metrics(read_metrics(trained["on"])[0])
    for name in SETS:
        assert read(evaluated, f"eval_{name}_step_000000.jsonl") == read(
            trained["on"], f"eval_{name}_step_000000.jsonl"
        )


def test_metrics_follow_from_the_dump(trained: dict[str, Path]) -> None:
    """Worked out anew from what was dumped, pass@k over all subsets."""
    metrics = read_metrics(trained["on"])[0]
    seen: set[float | None] = set()
    for name, size in SETS.items():
        rows = read(trained["on"], f"eval_{name}_step_000000.jsonl")
        assert [(row["row"], row["sample"]) for row in rows] == list(
            itertools.product(range(size), range(NUM_SAMPLES))
        )
        prompts = [rows[i : i + NUM_SAMPLES] for i in range(0, len(rows), NUM_SAMPLES)]
        seen |= {row["rewards"]["verifier"] for row in rows}
        for row in rows:
            assert row["right"] == (row["rewards"]["verifier"] == 1.0)
            a, b = row["prompt"][-4], row["prompt"][-2]
            assert row["columns"] == {
                "answer": f"gold {a}{b}"
            }  # the data's; the model's is another field
            assert row["final_answer"] == final_answer(row["completion"])
        for k in (1, 2, 4):
            result = [
                [any(row["right"] for row in some) for some in itertools.combinations(prompt, k)]
                for prompt in prompts
            ]
            expected = sum(sum(f) / len(f) for f in result) / size
            assert metrics[f"eval/{name}/pass_at_{k}"] == pytest.approx(expected)
        expected_names = [row["reward"] for row in rows if row["reward"] is not None]
        assert metrics[f"eval/{name}/mean"] == pytest.approx(
            sum(expected_names) / len(expected_names)
        )
        unknown = sum(row["rewards"]["verifier"] is None for row in rows)
        assert metrics[f"eval/{name}/unscored_frac"] == pytest.approx(unknown / len(rows))
        cut = sum(row["finish_reason"] == "length" for row in rows)
        assert metrics[f"eval/{name}/truncated_frac"] == pytest.approx(cut / len(rows))
    assert seen == {None, 0.0, 1.0}


def test_samples_of_a_prompt_and_of_sets_differ(trained: dict[str, Path]) -> None:
    """e1, e3 and e7 begin with the same prompt: seeds must know the sample and the set."""
    initial = [
        tuple(
            r["completion"]
            for r in read(trained["on"], f"eval_{name}_step_000000.jsonl")[:NUM_SAMPLES]
        )
        for name in SETS
    ]
    assert len(set(initial)) == 3
    assert all(len(set(completions)) > 1 for completions in initial)


def test_greedy_evaluation_is_the_argmax_of_plain_transformers(
    folder: Path, evaluated: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    _, metrics = json.loads((evaluated / "metrics.json").read_text())
    for name, size in SETS.items():
        rows = read(evaluated, f"eval_{name}_step_000001.jsonl")
        assert len(rows) == size
        lengths = []
        for row in rows:
            prompt = tokenizer(row["prompt"], return_tensors="pt")["input_ids"]
            ids = prompt
            while ids.shape[1] < prompt.shape[1] + 12 and not (
                ids.shape[1] > prompt.shape[1] and ids[0, -1] == tokenizer.eos_token_id
            ):
                with torch.no_grad():
                    ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            completion = ids[0, prompt.shape[1] :]
            lengths.append(len(completion))
            assert row["completion"] == tokenizer.decode(completion, skip_special_tokens=True)
        assert metrics[f"eval/{name}/tokens_mean"] == pytest.approx(math.fsum(lengths) / size)


def eval_alone(num_ranks: int, policy: Path, config: Path, *overrides: str) -> Any:
    """The metrics that `grpo-spmd eval` writes, which are those that it prints."""
    file = config.parent / "evaluated.json"
    arguments = [str(policy), "--config", str(config), f"--json={file}", *overrides]
    code, output = RanksJob(num_ranks, "grpo_spmd.eval", *arguments).wait(240)
    assert code == 0, output
    metrics = json.loads(file.read_text())
    file.unlink()
    for name, value in metrics.items():
        assert re.search(rf"^{re.escape(name)} +{value:.6g}$", output, re.MULTILINE), name
    return metrics


def state_of(run_dir: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*")}


def test_a_checkpoint_or_a_model_alone_has_the_figures_of_its_run(
    folder: Path, trained: dict[str, Path], tmp_path: Path
) -> None:
    run_dir = trained["on"]
    config = tmp_path / "config.yaml"
    config.write_bytes((run_dir / "config.yaml").read_bytes())
    before = state_of(run_dir)
    checkpoint = run_dir / "checkpoints" / f"step_{NUM_STEPS:06d}"
    initial, *_, final = filter(None, map(eval_metrics, read_metrics(run_dir)))
    # To the last bit, on another number of ranks.
    assert eval_alone(2, checkpoint, config) == {"step": NUM_STEPS, **final}
    assert state_of(run_dir) == before
    assert eval_alone(1, folder / "model", config) == {"step": 0, **initial}
    assert initial != final


def test_adapters_alone_have_the_figures_of_their_run(folder: Path, tmp_path: Path) -> None:
    config = config_file(
        folder,
        "adapters",
        model={"lora": {"rank": 4, "sync": "adapter"}},
        optimizer={"lr": 0.05},
        training={"num_steps": 2, "max_tokens_per_micro_batch": 256},
    )
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait(240)
    assert code == 0, output
    run_dir = folder / "adapters" / "run"
    initial, *_, final = filter(None, map(eval_metrics, read_metrics(run_dir)))
    checkpoint = run_dir / "checkpoints" / "step_000002"
    assert eval_alone(1, checkpoint, config) == {"step": 2, **final}
    assert initial != final
    # Another scale of the same adapters is another model.
    refused = [str(checkpoint), "--config", str(config), "model.lora.alpha=8"]
    code, output = RanksJob(1, "grpo_spmd.eval", *refused).wait(60)
    assert code == 2, output
    assert "model.lora.alpha (8.0) was 32.0 in the run that wrote" in output
    other = make_model(tmp_path / "other", "qwen3", tied=True, seed=5)
    refused = [str(checkpoint), "--config", str(config), f"model.path={other}"]
    code, output = RanksJob(1, "grpo_spmd.eval", *refused).wait(60)
    assert code == 2, output
    assert "is not the model that" in output


@pytest.mark.parametrize(
    ("policy", "override", "error"),
    [
        ("run", "eval.num_samples=1", "belongs to a run; give one of its checkpoints"),
        ("nowhere", "eval.num_samples=1", "CHECKPOINT: there is no folder"),
        ("model", "data.eval={}", "eval.every_steps needs held-out sets"),
        ("damaged", "eval.num_samples=1", "damaged"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_before_torch(
    folder: Path, trained: dict[str, Path], policy: str, override: str, error: str, tmp_path: Path
) -> None:
    run_dir = trained["on"]
    checkpoint = tmp_path / f"step_{NUM_STEPS:06d}"
    shutil.copytree(run_dir / "checkpoints" / checkpoint.name, checkpoint)
    [shard, *_] = (checkpoint / "state").glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    names = {
        "run": run_dir,
        "nowhere": tmp_path / "nowhere",
        "model": folder / "model",
        "damaged": checkpoint,
    }
    arguments = [str(names[policy]), "--config", str(run_dir / "config.yaml"), override]
    code, output = RanksJob(1, "grpo_spmd.eval", *arguments).wait(60)
    assert code == 2, output
    assert error in output
    assert len(output.splitlines()) == 1, output
