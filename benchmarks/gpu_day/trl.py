"""A whole step beside TRL's GRPOTrainer with colocated vLLM, one after the other on the same
device: the same model, prompts, sampling, loss and optimizer as in benchmarks/speed/step_vs_trl.py,
which has shown on a CPU that both compute the same. On a GPU both sides have float32 masters and
bfloat16 compute, TRL without recomputation (on by default) and with its engine awake all the time
(its default); ours sleeps. Rows come as soon as a side has ended.

    python -m benchmarks.gpu_day.trl --folder NEW [--size 0.5b|tiny] [--json FILE]

Skipped where there is no TRL: neither beside vLLM in this interpreter, nor in .venv-trl, which
`benchmarks/run.sh step_vs_trl` makes where there is a package index.
"""

from __future__ import annotations

import importlib.util
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.day import SKIPPED
from benchmarks.speed.gpu import GROUP_SIZE, SIZES, Size, make_model
from benchmarks.speed.step_vs_trl import Ours, Task, Trl, figures
from benchmarks.support.planned import planned
from benchmarks.support.report import Row, arguments_parser, report

_STEPS = 3  # the first, which compiles and warms up, is left out
_MICRO_BATCHES = (
    8,
    16,
)  # TRL's default, and one that fills a GPU better; the logits of 32, in float32, do not fit
_PHASES = ("step", "generation", "sync", "reward", "logprobs", "update")


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    args = parser.parse_args()
    python = trl_interpreter()
    if python is None:
        print("skipped: TRL is not there, neither beside vLLM nor in .venv-trl")
        return SKIPPED
    import torch

    size, folder, on_gpu = SIZES[args.size], args.folder, torch.cuda.is_available()
    num_parameters = make_model(folder / "model", size)
    shutil.copy(folder / "model/train.jsonl", folder / "train.jsonl")
    lengths = (size.max_completion_tokens, size.max_prompt_tokens)
    # The rate is so small that lengths stay what they are on both sides.
    task = Task(size.num_prompts, GROUP_SIZE, _STEPS, 1e-8, *lengths)
    ran: Row = {"model": f"{args.size}, {num_parameters:,} parameters"}
    ran["rollouts"] = task.num_rollouts
    ours = _ours(folder, task, size, on_gpu)
    ran["planned_step_s"] = planned(folder / "ours.yaml").get("step_s", "-")
    report("gpu_day_trl", [_row("ours", "-", ours, ours) | ran], args.json)
    ran["planned_step_s"] = "-"  # the planner's is of our step
    for micro_batch in _MICRO_BATCHES if on_gpu else _MICRO_BATCHES[:1]:
        theirs = _theirs(folder, task, python, micro_batch, on_gpu)
        report("gpu_day_trl", [_row("TRL", micro_batch, theirs, ours) | ran], args.json)
    return 0


def trl_interpreter() -> str | None:
    """One that has TRL and our vLLM; it is not made here."""
    if importlib.util.find_spec("trl") is not None:
        return sys.executable
    local = Path(".venv-trl/bin/python")
    return str(local) if local.exists() else None


def _ours(folder: Path, task: Task, size: Size, on_gpu: bool) -> list[Row]:
    """Steps without the first, by the names of TRL's side."""
    model = {"dtype": "bfloat16" if on_gpu else "float32"}
    training = {"max_tokens_per_micro_batch": size.max_tokens_per_micro_batch}
    side = Ours(folder, "ours", task, model=model, training=training, proofs={"every_steps": 0})
    try:
        return [figures(metrics) for metrics in side.wait(task.num_steps)][1:]
    finally:
        side.end()


def _theirs(folder: Path, task: Task, python: str, micro_batch: int, on_gpu: bool) -> list[Row]:
    arguments: dict[str, Any] = (
        {"use_cpu": False, "bf16": True, "vllm_gpu_memory_utilization": 0.4} if on_gpu else {}
    )
    side = Trl(folder, f"trl_{micro_batch}", task, python, micro_batch, **arguments)
    try:
        return side.turn(task.num_steps)[1:]
    finally:
        side.end()


def _row(side: str, micro_batch: int | str, steps: Sequence[Row], ours: Sequence[Row]) -> Row:
    """Medians of a side's phases in seconds, and how many times ours its step and update take."""

    def median(of: Sequence[Row], name: str) -> float:
        return float(statistics.median(step.get(name, 0.0) for step in of))

    row: Row = {"side": side, "micro_batch": micro_batch}
    row |= {f"{phase}_s": median(steps, f"{phase}_s") for phase in _PHASES}
    row |= {
        f"{phase}_to_ours": median(steps, f"{phase}_s") / median(ours, f"{phase}_s")
        for phase in ("step", "update")
    }
    return row | {
        "tokens_mean": median(steps, "tokens_mean"),
        "reward_mean": median(steps, "reward_mean"),
    }


if __name__ == "__main__":
    sys.exit(main())
