"""The demos of what teaches beside a rule learn what their configs say: a student from its teacher
alone, PPO, a reward
model and a judge, each by the true rule, worked out here again from the dump of completions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers

from grpo_spmd.demo.countdown import make_demo, make_reward_model, make_teacher, make_tokenizer
from grpo_spmd.distributed import startup
from tests.support.dumps import dumped
from tests.support.processes import ROOT
from tests.support.ranks import RanksJob

# Steps, of 80 that a demo has, and prompts of each, of 64 (the judge's has 32): enough, with a
# margin.
STEPS = {"ppo": 30, "judge": 26, "distill": 60, "rm": 30}
PROMPTS = {"ppo": 32, "judge": 32, "distill": 64, "rm": 32}
GOALS = {
    "ppo": 0.9,
    "judge": 0.85,
    "rm": 0.85,
}  # means of the last ten steps; the student's is its teacher's


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One student for all demos, as each of them makes it."""
    folder = tmp_path_factory.mktemp("demos") / "made"
    make_demo(folder, seed=0)
    return folder


def start(made: Path, name: str, *overrides: str) -> RanksJob:
    size = [f"training.num_steps={STEPS[name]}", f"rollout.num_prompts_per_step={PROMPTS[name]}"]
    paths = [
        f"model.path={made / 'model'}",
        f"data.train={made / 'train.jsonl'}",
        f"run_dir={made / name}",
    ]
    return RanksJob(
        1,
        "grpo_spmd.train",
        "--config",
        str(ROOT / f"configs/demo-{name}.yaml"),
        *paths,
        *size,
        *overrides,
    )


@contextmanager
def judge() -> Iterator[str]:
    """Its address, as launch/demo.sh has it."""
    command = [sys.executable, "-m", "grpo_spmd.demo", "judge"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def runs(made: Path) -> dict[str, Path]:
    """Two at a time, on a rank each; the first two while the other two's models are made."""
    with judge() as url:
        jobs = {"ppo": start(made, "ppo", f"critic.path={made / 'model'}")}
        jobs["judge"] = start(made, "judge", f"rewards.0.url={url}")
        for name in ("teacher", "reward_model"):
            (made / name).mkdir()
        make_teacher(made / "teacher", seed=0)
        make_tokenizer(made / "reward_model")
        make_reward_model(made / "reward_model", made / "model", seed=0)
        startup.end()  # which the whole demo's maker does, or its lines come into other tests
        finish(jobs)
    jobs = {"distill": start(made, "distill", f"teacher.path={made / 'teacher'}")}
    jobs["rm"] = start(made, "rm", f"rewards.0.model={made / 'reward_model'}")
    finish(jobs)
    return {name: made / name for name in STEPS}


def finish(jobs: dict[str, RanksJob]) -> None:
    for name, job in jobs.items():
        code, output = job.wait(400)
        assert code == 0, f"{name}: {output}"


def is_right(prompt: str, message: str) -> bool:
    """Both numbers once, one operation, the right value. (Digits and one sign: safe to
    evaluate.)"""
    numbers, _, target = prompt.removesuffix(":").partition("=")
    text, _, result = message.partition("=")
    is_legal = (
        len(text) == 3 and text[1] in "+-*" and sorted(text[::2]) == sorted(numbers.split(","))
    )
    return bool(is_legal and eval(text) == int(target) and result in ("", target))


def right(run: Path, *steps: int) -> float:
    """The share of these steps' completions that are right."""
    records = list(chain.from_iterable(dumped(run, step) for step in steps))
    assert len(records) == 8 * PROMPTS[run.name] * len(steps)
    return sum(is_right(r["prompt"], r["completion"]) for r in records) / len(records)


def last_ten(run: Path, num_steps: int) -> float:
    return right(run, *range(num_steps - 9, num_steps + 1))


@pytest.mark.parametrize("name", GOALS)
def test_it_goes_from_the_warm_start_to_its_goal(runs: dict[str, Path], name: str) -> None:
    assert 0.15 <= right(runs[name], 1) <= 0.45
    assert last_ten(runs[name], STEPS[name]) >= GOALS[name]


def test_a_student_reaches_its_teacher_by_distillation_alone(
    runs: dict[str, Path], made: Path
) -> None:
    assert right(runs["distill"], 1) < 0.4
    teacher = sampled(made / "teacher", made / "train.jsonl")
    assert teacher > 0.93
    assert last_ten(runs["distill"], STEPS["distill"]) >= teacher - 0.02
    metrics = [
        json.loads(line) for line in (runs["distill"] / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(line["loss/policy"] == 0 for line in metrics)  # no reward counts


def sampled(folder: Path, rows: Path) -> float:
    """How often a model is right at temperature 1, by transformers' own sampling, eight tries a
    prompt."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [json.loads(line)["prompt"] for line in rows.read_text().splitlines()]
    result = list[bool]()
    torch.manual_seed(0)
    for length in {len(prompt) for prompt in prompts}:  # a character is a token
        same = [prompt for prompt in prompts if len(prompt) == length]
        ids = torch.tensor([tokenizer(prompt).input_ids for prompt in same]).repeat_interleave(8, 0)
        method = {
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 8,
        }
        message = model.generate(ids, attention_mask=torch.ones_like(ids), **method)[:, length:]
        texts = tokenizer.batch_decode(message, skip_special_tokens=True)
        result += [is_right(same[position // 8], text) for position, text in enumerate(texts)]
    return sum(result) / len(result)
