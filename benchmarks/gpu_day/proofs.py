"""A run in bfloat16 whose every sync is proved tensor by tensor, and every update checked: how far
engine and policy are apart, what sleep frees and leaves, and where memory was beside what the
planner said.

    python -m benchmarks.gpu_day.proofs --folder NEW [--size 0.5b|tiny] [--steps 20] [--within
    SECONDS] [--parked] [--json FILE]

Its model has biases of keys as large as Qwen2.5-7B's. With --parked it has none, and there are two
runs: one with the policy offloaded and a critic, a teacher and a reward model of its size, and one
of adapters whose base stays in the engine (`model.lora.sync: adapter`).

It fails where a proof of the run did, or where the run had not ended --within so many seconds; and
on a GPU where sleep frees less than 0.7 of what the engine may take, or where what is left after it
grows by more than 1 GiB over the run. Rows are written also then, of the steps that were made. The
planner's row says "not there" where `python -m grpo_spmd.plan` gives no answer.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_day.day import read_rows
from benchmarks.speed.gpu import SIZES, make_model, training_config
from benchmarks.support.planned import planned
from benchmarks.support.report import Row, arguments_parser, report, spread

_LEAST_FREED_FRAC, _MOST_GROWN_GIB = 0.7, 1.0
_WARM = 2  # steps whose kernels and workspaces are new: what they leave for good is no growth
_PHASES = ("weight_sync", "rollout", "reward", "logprobs", "update")
_NOT_THERE = "not there"
_KEY_BIAS_NORM = 605.0  # of Qwen2.5-7B's first layer


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, help="seconds, after which a run is killed")
    parser.add_argument(
        "--parked",
        action="store_true",
        help="offload, a critic, a teacher and a reward model; then adapters",
    )
    args = parser.parse_args()
    # Parked runs differ by what is parked; the plain one has the weights that users will load.
    key_bias_norm = 0.0 if args.parked else _KEY_BIAS_NORM
    num_parameters = make_model(
        args.folder / "model", SIZES[args.size], key_bias_norm=key_bias_norm
    )
    name = f"{args.size}, {num_parameters:,} parameters"
    if not args.parked:
        return _run(args, "run", name, {})
    model = str(args.folder / "model")
    sections: dict[str, dict[str, Any]] = {
        "model": {"offload": True},
        "advantage": {"estimator": "gae", "normalize_std": "batch"},
        "critic": {"path": model},
        "teacher": {"path": model},
    }
    function = f"{args.folder}/reward.py:length"
    reward_model = _make_reward_model(args.folder)
    rewards = f"rewards=[{{function: '{function}'}}, {{model: '{reward_model}', weight: 0.1}}]"
    parked = _run(args, "run", f"parked, {name}", sections, rewards)
    adapters = {"model": {"lora": {"rank": 16, "sync": "adapter"}}}
    return _run(args, "adapter", f"adapters, {name}", adapters) or parked


def _run(
    args: argparse.Namespace,
    name: str,
    model: str,
    sections: Mapping[str, dict[str, Any]],
    *overrides: str,
) -> int:
    """Makes the run FOLDER/NAME and reports its rows, in which its model is `model`. Returns its
    exit code, or 1 for what is wrong with its rows."""
    size = SIZES[args.size]
    # Half a step of the speed benchmark: 20 of them shall fit into their minutes, beside a proof in
    # each.
    half = {
        "num_prompts_per_step": size.num_prompts // 2,
        "max_completion_tokens": size.max_completion_tokens // 2,
    }
    plain = {"rollout": half, "proofs": {"every_steps": 1}, "checkpoint": {"every_steps": 0}}
    config = training_config(
        args.folder, name, size, args.steps, "bfloat16", **{**plain, **sections}
    )
    command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config), *overrides]
    try:
        code = subprocess.run(command, timeout=args.within).returncode
        retained = code == 0
    except subprocess.TimeoutExpired:
        print(
            f"proofs: the run was killed after {args.within:g} s; the rows are of the steps that "
            "it had made"
        )
        code, retained = 1, True  # a proof that fails ends the run
    run_dir = args.folder / name
    metrics = read_rows(run_dir / "metrics.jsonl")
    if not metrics:
        return code or 1
    plan = planned(run_dir / "config.yaml")
    import torch  # only now: a context of this process on the GPU would be in the run's ledger

    on_gpu = torch.cuda.is_available()
    ran = {"model": model, "device": torch.cuda.get_device_name() if on_gpu else "CPU"}
    fraction = yaml.safe_load((run_dir / "config.yaml").read_text())["rollout"][
        "gpu_memory_utilization"
    ]
    may_take_gib = fraction * torch.cuda.mem_get_info()[1] / 2**30 if on_gpu else None
    proofs = proof_rows(metrics, args.steps, plan.get("step_s", "-"), retained=retained)
    report("gpu_day_proofs", [row | ran for row in proofs], args.json)
    sleep, problems = sleep_row(metrics, may_take_gib)
    report("gpu_day_sleep", [sleep | ran], args.json)
    report("gpu_day_ledger", [row | ran for row in ledger_rows(metrics, plan)], args.json)
    for problem in problems:
        print(f"proofs: {problem}")
    return code or int(bool(problems))


def _make_reward_model(folder: Path) -> Path:
    """Writes a reward model with the policy's layers and a random head, and returns its folder."""
    import torch
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder / "model", num_labels=1, dtype=torch.bfloat16, trust_remote_code=False
    )
    with torch.no_grad():
        model.score.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    model.config.pad_token_id = 0
    model.save_pretrained(folder / "reward_model")
    for path in (folder / "model").glob("token*"):
        shutil.copy(path, folder / "reward_model")
    return folder / "reward_model"


def proof_rows(
    metrics: Sequence[Row], steps: int, step_s: float | str, *, retained: bool
) -> list[Row]:
    """How far engine and policy were apart on the tokens just sampled, in nats, and what looking
    cost. `step_s` is the planner's, for completions of full length."""
    rows = []
    for name, unit in (
        ("weight_sync/mismatch_abs_mean", "nats a token"),
        ("weight_sync/mismatch_abs_max", "nats"),
        ("weight_sync/mismatch_kl", "nats a token"),
        ("weight_sync/proof_s", "s"),
        ("proofs/update_check_s", "s"),
        ("time/step_s", "s"),
    ):
        values = [line[name] for line in metrics if line.get(name) is not None]
        result = (
            spread("median", values) if values else dict.fromkeys(("median", "min", "max"), "-")
        )
        rows.append(
            {
                "what": name,
                "unit": unit,
                "steps": f"{len(values)} of {steps}",
                **result,
                "planned": step_s if name == "time/step_s" else "-",
                "all proofs held": retained,
            }
        )
    return rows


def sleep_row(metrics: Sequence[Row], may_take_gib: float | None) -> tuple[Row, list[str]]:
    """What the engine's sleep frees and leaves, over the steps; and what is wrong with it.
    `may_take_gib`: None on a
    CPU, where sleep frees nothing."""
    freed, remaining = (
        [line[f"memory/sleep/{label}_gib"] for line in metrics] for label in ("freed", "left")
    )
    grown = remaining[-1] - remaining[min(_WARM, len(remaining) - 1)]
    row: Row = {
        "freed_gib": freed[-1],
        "least_freed_gib": min(freed),
        "left_gib": remaining[-1],
        "grown_gib": grown,
    }
    row |= {"engine_may_take_gib": may_take_gib or "-", "sleeps": len(freed)}
    if may_take_gib is None:
        return row, []
    minimum, problems = _LEAST_FREED_FRAC * may_take_gib, []
    if min(freed) < minimum:
        problems.append(
            f"a sleep freed {min(freed):.2f} GiB, and at least {minimum:.2f} must come back"
        )
    if grown > _MOST_GROWN_GIB:
        problems.append(
            f"what is left after a sleep grew by {grown:.2f} GiB, at most {_MOST_GROWN_GIB:g} may"
        )
    return row, problems


def ledger_rows(metrics: Sequence[Row], plan: dict[str, Any]) -> list[Row]:
    """Of each phase the most over the steps, in GiB. "on_device" is what the planner's figure
    means: the peak of the trainer's tensors and what is there beside them at the phase's end
    (engine, context, graphs). At the end of
    weight_sync the KV cache is there too, which the planner counts to the rollout."""

    def most(phase: str, *fields: str) -> float:
        return max(
            float(sum(line[f"memory/{phase}/{field}_gib"] for field in fields)) for line in metrics
        )

    rows = []
    for phase in (phase for phase in _PHASES if f"memory/{phase}/peak_gib" in metrics[0]):
        message, on_device = (
            plan.get("phases", {}).get(phase, {}).get("peak_gib"),
            most(phase, "peak", "other"),
        )
        row: Row = {
            "phase": phase,
            **{field: most(phase, field) for field in ("peak", "reserved", "driver_used")},
        }
        row |= {"on_device": on_device, "planned": _NOT_THERE if message is None else message}
        rows.append(row | {"to_planned": "-" if message is None else on_device / message})
    return rows


if __name__ == "__main__":
    sys.exit(main())
