"""A run in bfloat16 whose every sync is proved tensor by tensor, and every update checked: how far
engine and policy are apart, what sleep frees and leaves, and where memory was beside what the
planner said.

    python -m benchmarks.gpu_day.proofs --folder NEW [--size 0.5b|tiny] [--steps 20] [--within
    SECONDS] [--parked] [--json FILE]

Its model has biases of keys as large as Qwen2.5-7B's. With --parked it has none, the policy is
offloaded, and a critic, a teacher and a reward model of its size are there too.

It fails where a proof of the run did, or where the run had not ended --within so many seconds; and
on a GPU where sleep frees less than 0.7 of what the engine may take, or where what is left after it
grows by more than 1 GiB over the run. Rows are written also then, of the steps that were made. The
planner's row says "not there" where `python -m grpo_spmd.plan` gives no answer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_day.day import read_rows
from benchmarks.speed.gpu import SIZES, make_model, training_config
from benchmarks.support.report import Row, arguments_parser, report, spread

_LEAST_FREED_FRAC, _MOST_GROWN_GIB = 0.7, 1.0
_WARM = 2  # steps whose kernels and workspaces are new: what they leave for good is no growth
_PHASES = ("weight_sync", "rollout", "reward", "logprobs", "update")
_NOT_THERE = "not there"
_KEY_BIAS_NORM = 605.0  # of Qwen2.5-7B's first layer
_PLAN_S = 40


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="0.5b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, help="seconds, after which the run is killed")
    parser.add_argument(
        "--parked", action="store_true", help="offload, a critic, a teacher and a reward model"
    )
    args = parser.parse_args()
    size = SIZES[args.size]
    # Parked runs differ by what is parked; the plain one has the weights that users will load.
    key_bias_norm = 0.0 if args.parked else _KEY_BIAS_NORM
    num_parameters = make_model(args.folder / "model", size, key_bias_norm=key_bias_norm)
    # Half a step of the speed benchmark: 20 of them shall fit into their minutes, beside a proof in
    # each.
    half = {
        "num_prompts_per_step": size.num_prompts // 2,
        "max_completion_tokens": size.max_completion_tokens // 2,
    }
    sections: dict[str, dict[str, Any]] = {
        "rollout": half,
        "proofs": {"every_steps": 1},
        "checkpoint": {"every_steps": 0},
    }
    if args.parked:
        sections |= {
            "model": {"offload": True},
            "advantage": {"estimator": "gae", "normalize_std": "batch"},
            "critic": {"path": str(args.folder / "model")},
            "teacher": {"path": str(args.folder / "model")},
        }
    config = training_config(args.folder, "run", size, args.steps, "bfloat16", **sections)
    command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(config)]
    if args.parked:
        model = _make_reward_model(args.folder)
        function = f"{args.folder}/reward.py:length"
        command.append(f"rewards=[{{function: '{function}'}}, {{model: '{model}', weight: 0.1}}]")
    try:
        code = subprocess.run(command, timeout=args.within).returncode
        retained = code == 0
    except subprocess.TimeoutExpired:
        print(
            f"proofs: the run was killed after {args.within:g} s; the rows are of the steps that "
            "it had made"
        )
        code, retained = 1, True  # a proof that fails ends the run
    metrics = read_rows(args.folder / "run/metrics.jsonl")
    if not metrics:
        return code or 1
    import torch  # only now: a context of this process on the GPU would be in the run's ledger

    on_gpu = torch.cuda.is_available()
    name = args.size + (" parked" if args.parked else "")
    ran = {"model": f"{name}, {num_parameters:,} parameters"}
    ran |= {"device": torch.cuda.get_device_name() if on_gpu else "CPU"}
    fraction = yaml.safe_load((args.folder / "run/config.yaml").read_text())["rollout"][
        "gpu_memory_utilization"
    ]
    may_take_gib = fraction * torch.cuda.mem_get_info()[1] / 2**30 if on_gpu else None
    report(
        "gpu_day_proofs",
        [row | ran for row in proof_rows(metrics, args.steps, retained=retained)],
        args.json,
    )
    sleep, problems = sleep_row(metrics, may_take_gib)
    report("gpu_day_sleep", [sleep | ran], args.json)
    plan = planned(args.folder / "run/config.yaml", args.folder / "plan.json")
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


def proof_rows(metrics: Sequence[Row], steps: int, *, retained: bool) -> list[Row]:
    """How far engine and policy were apart on the tokens just sampled, in nats, and what looking
    cost."""
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


def planned(config: Path, answer: Path) -> dict[str, Any]:
    """The planner's answer for this run on this device, by its command alone; empty where it gives
    none."""
    command = [
        sys.executable,
        "-m",
        "grpo_spmd.plan",
        "--config",
        str(config),
        "--gpu",
        _card(),
        "--ranks",
        "1",
    ]
    try:
        done = subprocess.run(
            [*command, "--json", str(answer)], capture_output=True, text=True, timeout=_PLAN_S
        )
    except subprocess.TimeoutExpired:
        print(f"proofs: the planner gave no answer within {_PLAN_S} s")
        return {}
    if (
        done.returncode not in (0, 1) or not answer.is_file()
    ):  # 1: it answers that the run does not fit
        print(
            f"proofs: the planner gave no answer (exit code {done.returncode}): "
            f"{done.stderr.strip()[-300:]}"
        )
        return {}
    return dict(json.loads(answer.read_text()))


def _card() -> str:
    """This device as the planner knows it: by name, or by its memory beside made-up speeds, which
    only its estimate of
    time uses; on a CPU some card, to see that it answers."""
    import torch

    if not torch.cuda.is_available():
        return "24GiB,1TFLOPS,20GB/s"
    name, gib = (
        torch.cuda.get_device_name(),
        torch.cuda.get_device_properties(0).total_memory / 2**30,
    )
    expected_names = {"H200": "H200-141GB", "H100": "H100-80GB"}
    return next(
        (card for piece, card in expected_names.items() if piece in name),
        f"{gib:.1f}GiB,1TFLOPS,1GB/s",
    )


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
