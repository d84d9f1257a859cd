"""The policy as its own live teacher (`teacher.path: policy`): what it learns from a prompt that
says more, beside the reward and beside a teacher that is frozen.

    benchmarks/run.sh self_teacher [--json FILE]        about 8 minutes on 2 cores

A model of the countdown demo's size, with a warm start of two kinds of prompts: of "3,8=24:" it
writes right and careless equations as in the demo, and of "3*8,3,8=24:" the equation in front. So
it can use a hint, as a real model can. Each row is a run of 40 steps of 64 prompts x 8 on one rank,
with a learning rate of 2e-4 where it does not say another:

- reward: GRPO by the verifier alone.
- hint (OPSD): the verifier has weight 0, and the live teacher's prompt has the solution
  (`teacher.prompt_key`). With 1e-3, a rate that the reward bears, teacher and policy run away
  together: the row shows it.
- feedback (SDPO): as before, but the teacher's prompt has what the reward function wrote: a right
  completion of the same group where this one is wrong (`teacher.prompt_template`).
- reward and feedback: both; also with `teacher.coef` 0.1 at 1e-3, which holds.
- hint, frozen: the first model with the solution in its prompt (`teacher.path` is its folder).
- no hint: the live teacher with the policy's own prompt, which has nothing to teach.

Reward of the first step, of the last ten and at its best, the KL to the teacher and the share of
rollouts that were taught, at the start and at the end. The exit code is 1 if a row does not reach
its goal.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.support.report import Row, arguments_parser, read_lines, report
from grpo_spmd.demo import countdown
from grpo_spmd.demo.making import Example, make_model, model_config, warm_up
from tests.support.ranks import RanksJob

_ROOT = Path(__file__).resolve().parents[2]
_NUM_STEPS = 40
_SEED = 0
# Warm start: steps with correct equations alone, then with careless ones too.
_CORRECT_STEPS = 400
_CARELESS_STEPS = 150
_BATCH_SIZE = 128
FEEDBACK = '''
from grpo_spmd.demo.countdown import correct_equations

def right(completions, nums, target, log_extra, **columns):
    """1.0 for a right equation; a wrong one gets a right one of its group as feedback."""
    is_right = [text in correct_equations(*numbers, goal)
                for text, numbers, goal in zip(completions, nums, target)]
    solution = next((text for text, ok in zip(completions, is_right) if ok), None)
    log_extra("feedback", [None if ok else solution for ok in is_right])
    return [float(ok) for ok in is_right]
'''


@dataclass(frozen=True)
class Variant:
    """Overrides of a run; `goal` is the reward that its last ten steps reach, or stay below."""

    overrides: tuple[str, ...]
    weight: float
    goal: float
    is_bound: bool = False


_LIVE = "teacher.path=policy"
_FEEDBACK = "teacher.prompt_template={feedback},{prompt}"
_HINT = "teacher.prompt_key=hint"
VARIANTS: dict[str, Variant] = {
    "reward": Variant((), weight=1.0, goal=0.6),
    "reward, 1e-3": Variant(("optimizer.lr=1e-3",), weight=1.0, goal=0.9),
    "hint (OPSD)": Variant((_LIVE, _HINT), weight=0.0, goal=0.6),
    "hint (OPSD), 1e-3": Variant(
        (_LIVE, _HINT, "optimizer.lr=1e-3"), weight=0.0, goal=0.5, is_bound=True
    ),
    "feedback (SDPO)": Variant((_LIVE, _FEEDBACK), weight=0.0, goal=0.8),
    "reward and feedback": Variant((_LIVE, _FEEDBACK), weight=1.0, goal=0.8),
    "reward and feedback, coef 0.1, 1e-3": Variant(
        (_LIVE, _FEEDBACK, "teacher.coef=0.1", "optimizer.lr=1e-3"), weight=1.0, goal=0.9
    ),
    "hint, frozen": Variant(("teacher.path=MODEL", _HINT), weight=0.0, goal=0.6),
    "no hint": Variant((_LIVE, "teacher.prompt_key=empty"), weight=0.0, goal=0.4, is_bound=True),
}


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder)
        rows = [run(folder, variant) for variant in VARIANTS]
    report("self_teacher", rows, args.json)
    sys.exit(0 if all(row["reached"] for row in rows) else 1)


def fill(folder: Path) -> None:
    """Writes the model, its rows with hints, and the reward function."""
    model = folder / "model"
    model.mkdir()
    countdown.make_tokenizer(model)
    rng = random.Random(_SEED)
    tasks = countdown.solvable_tasks()

    def batch(step: int) -> list[Example]:
        examples = []
        for task in rng.choices(tasks, k=_BATCH_SIZE):
            solution = rng.choice(countdown.correct_equations(*task))
            prompt = countdown.prompt_text(*task)
            if rng.random() < 0.5:
                examples.append(countdown.make_example(f"{solution},{prompt}", solution))
                continue
            is_careless = step >= _CORRECT_STEPS and rng.random() < 0.45
            answer = countdown.random_equation(rng) if is_careless else solution
            examples.append(countdown.make_example(prompt, answer))
        return examples

    peaks = [5e-3] * _CORRECT_STEPS + [1e-3] * _CARELESS_STEPS
    rates = [peak * warm_up(step) for step, peak in enumerate(peaks)]
    make_model(model, _SEED, model_config(), batch_of=batch, learning_rates=rates)
    rows = []
    for task in tasks:
        prompt = countdown.prompt_text(*task)
        solution = countdown.correct_equations(*task)[0]
        rows.append(
            {
                "prompt": prompt,
                "nums": task[:2],
                "target": task[2],
                "hint": f"{solution},{prompt}",
                "empty": prompt,
            }
        )
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "feedback.py").write_text(FEEDBACK)


def run(folder: Path, name: str) -> Row:
    variant = VARIANTS[name]
    run_dir = Path(tempfile.mkdtemp(dir=folder), "run")
    rewards = f"[{{function: '{folder}/feedback.py:right', weight: {variant.weight}}}]"
    overrides = {
        "run_dir": str(run_dir),
        "model.path": str(folder / "model"),
        "data.train": str(folder / "train.jsonl"),
        "data.max_prompt_tokens": "16",
        "teacher": "{}",
        "teacher.loss": "full",
        "rewards": rewards,
        "optimizer.lr": "2e-4",
        "training.num_steps": str(_NUM_STEPS),
    }
    for override in variant.overrides:
        key, _, value = override.partition("=")
        overrides[key] = value.replace("MODEL", str(folder / "model"))
    if "teacher.path" not in overrides:
        del overrides["teacher.loss"]
    job = RanksJob(
        1,
        "grpo_spmd.train",
        "--config",
        str(_ROOT / "configs/demo-distill.yaml"),
        *(f"{key}={value}" for key, value in overrides.items()),
    )
    code, output = job.wait(600)
    if code:
        raise SystemExit(f"{name}: {output[-2000:]}")
    lines = [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]
    rewards_by_step = [line["reward/mean"] for line in lines]
    final = mean(rewards_by_step[-10:])
    kl = [line["teacher/kl"] for line in lines if line.get("teacher/kl") is not None]
    taught = [line["teacher/prompted_frac"] for line in lines if "teacher/prompted_frac" in line]
    row: Row = {
        "run": name,
        "seed": _SEED,
        "steps": len(lines),
        "first step": rewards_by_step[0],
        "last ten": final,
        "best": max(rewards_by_step),
        "teacher KL, start": kl[0] if kl else None,
        "teacher KL, end": kl[-1] if kl else None,
        "taught, start": taught[0] if taught else (1.0 if kl else None),
        "taught, end": taught[-1] if taught else (1.0 if kl else None),
        "reached": final <= variant.goal if variant.is_bound else final >= variant.goal,
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
