"""Whether it learns: the demo under each algorithm, and TinyZero's countdown with three to four
numbers. Two ranks each, real vLLM.

    benchmarks/run.sh learning [--only WORDS ...] [--json FILE]     about 50 minutes on 2 cores
A row a variant: reward at the first step, mean of the first and of the last ten steps, whether the
goal was reached. --only takes those whose names hold one of these.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean

from benchmarks.support.report import Row, arguments_parser, read_lines, report
from grpo_spmd.demo.countdown import fill_experts_demo, fill_hybrid_demo, make_demo
from grpo_spmd.demo.making import make_folder
from tests.support.processes import torchrun

_ROOT = Path(__file__).resolve().parents[2]
_GOAL, _IMPROVEMENT = 0.9, 1.5
# One optimizer step a rollout would leave the ratio at 1 and the clip bounds untouched: the
# variants of the ratio get
# four.
_REUSE = ("training.num_mini_batches=2", "training.num_epochs=2", "optimizer.lr=5e-4")
VARIANTS: dict[str, tuple[str, ...]] = {
    "grpo (as shipped)": (),
    "dynamic sampling": ("rollout.dynamic_sampling=true",),
    "gspo": (
        "loss.policy=gspo",
        "loss.aggregation=sequence",
        "loss.clip_ratio_low=0.05",
        "loss.clip_ratio_high=0.05",
        "loss.rollout_correction=sequence_tis",
        *_REUSE,
    ),
    "cispo": ("loss.policy=cispo", "loss.clip_ratio_low=1", *_REUSE),
    "dr. grpo": ("advantage.estimator=dr_grpo", "loss.aggregation=constant"),
    "k3 KL in the loss": ("loss.kl_coef=0.001", "loss.kl_estimator=k3"),
    "k1 KL in the reward, rloo": (
        "loss.kl_coef=0.01",
        "loss.kl_estimator=k1",
        "loss.kl_in=reward",
        "advantage.estimator=rloo",
    ),
    "reinforce++": ("advantage.estimator=reinforce_pp",),
    **{
        f"8-bit moments, seed {seed}": ("optimizer.name=adamw_8bit", f"seed={seed}")
        for seed in range(3)
    },
    "4 updates a rollout": _REUSE,
    "4 updates, engine's logprobs": (
        "loss.old_logprobs=engine",
        "loss.rollout_correction=none",
        *_REUSE,
    ),
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, run in _runs().items():
            if any(words in name for words in args.only):
                rows.append(run(Path(folder), name))
                # Row by row, since all of them take long.
                report("learning", rows[-1:], args.json)
    sys.exit(0 if all(row["reached"] for row in rows) else 1)


def _runs() -> dict[str, Callable[[Path, str], Row]]:
    """{variant: what trains it in a folder and returns its row}."""
    runs = {
        name: partial(_demo, "2", "demo.yaml", overrides=overrides)
        for name, overrides in VARIANTS.items()
    }
    own_routes, rounded = "model.router_replay=false", "model.dtype=bfloat16"
    variants: list[tuple[str, str, tuple[str, ...]]] = [
        ("mixture of experts", "experts", ()),
        ("hybrid", "hybrid", ()),
        ("experts without replay", "experts", (own_routes,)),
        # In float32 engine and policy take the same routes anyway.
        ("experts in bfloat16", "experts", (rounded,)),
        ("experts in bfloat16 without replay", "experts", (rounded, own_routes)),
    ]
    for seed in range(3):
        for name, created, overrides in variants:
            runs[f"{name}, seed {seed}"] = partial(
                _demo,
                created,
                f"demo-{created}.yaml",
                overrides=(*overrides, f"seed={seed}"),
            )
    return {**runs, "countdown of 3 to 4 numbers": _long_countdown}


def _demo(created: str, config: str, folder: Path, name: str, *, overrides: Sequence[str]) -> Row:
    """Makes the model of a demo, unless it is there already, and trains it."""
    if created == "2":
        make_demo(folder / created, seed=0)
    else:
        fill = {"experts": fill_experts_demo, "hybrid": fill_hybrid_demo}[created]
        make_folder(folder / created, {}, partial(fill, seed=0))
    rewards = _train(folder, created, config, overrides)
    return _row(name, rewards, f"last ten >= {_GOAL}", mean(rewards[-10:]) >= _GOAL)


def _long_countdown(folder: Path, name: str) -> Row:
    make_demo(folder / "3-4", seed=0, numbers="3-4")
    rewards = _train(folder, "3-4", "countdown-3to4.yaml", ())
    is_better = mean(rewards[-10:]) >= _IMPROVEMENT * mean(rewards[:10])
    return _row(name, rewards, f"last ten >= {_IMPROVEMENT} x first ten", is_better)


def _train(folder: Path, model: str, config: str, overrides: Sequence[str]) -> list[float]:
    created, run_dir = folder / model, Path(tempfile.mkdtemp(dir=folder), "run")
    paths = (
        f"model.path={created / 'model'}",
        f"data.train={created / 'train.jsonl'}",
        f"run_dir={run_dir}",
    )
    command = torchrun(
        2, "-m", "grpo_spmd.train", "--config", str(_ROOT / "configs" / config), *paths
    )
    done = subprocess.run(
        [*command, "logging.rollouts_every_steps=0", *overrides],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    return [line["reward/mean"] for line in read_lines(run_dir / "metrics.jsonl")]


def _row(name: str, rewards: list[float], goal: str, reached: bool) -> Row:
    initial = {"first step": rewards[0], "first ten": mean(rewards[:10])}
    return {
        "variant": name,
        "steps": len(rewards),
        **initial,
        "last ten": mean(rewards[-10:]),
        "goal": goal,
        "reached": reached,
    }


if __name__ == "__main__":
    main()
