"""A real run on one GPU, each phase beside its floor: the least time that the arithmetic or the
bytes of the phase could take here.

    python -m benchmarks.speed.gpu [--size 0.5b|1.5b|3b|tiny] [--steps 6] [--variants plain,offload]
    [--json FILE]
Of several sizes, as in 3b,1.5b, the first is taken that fits by the planner, else the last.
A random Qwen2 of that size is made in a temporary folder (no download), and trained by
grpo_spmd.train in a process. Its completions end at one of eight likely stop tokens, so that
their lengths are ragged: geometric, cut at the longest. Ceilings are measured on the same device
after the runs: bfloat16 products, copies in device memory, copies between pinned host memory and
the device. Where there is no GPU nothing is measured; `--device cpu --size tiny` runs it all on the
CPU, to see that it works.

Time of weight_sync includes waking the engine, that of rollout its falling asleep. Counted is the
work of the algorithm, not of this
implementation: each byte once, products of layers and lm_head (2 FLOPs a weight and token forward,
twice that backward), causal attention (2 * length^2 * heads * head_dim forward). The share of the
update's floor is the MFU against the measured ceiling; "mfu" is the run's own figure, against the
data sheet and without attention. "planned" is what `python -m grpo_spmd.plan` predicts for the run,
with every completion at full length.
"""

from __future__ import annotations

import contextlib
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.planned import planned
from benchmarks.support.report import Row, arguments_parser, read_lines, report, spread
from benchmarks.support.ways import current_rollout
from grpo_spmd.model.config_json import dimensions
from grpo_spmd.tools.plan.step_time import Work as Passes
from grpo_spmd.tools.plan.step_time import decode_bytes, decode_flops, forward_flops

_VARIANTS = {
    "plain": [],
    "offload": ["model.offload=true"],
    "recompute": ["model.activation_checkpointing=true"],
    "compile": ["model.compile=true"],
}


@dataclass(frozen=True)
class Size:
    """A model of Qwen2.5's shape, and a step that fits it."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    num_prompts: int
    max_prompt_tokens: int
    max_completion_tokens: int
    mean_tokens: int  # about the mean completion, without the cut
    max_tokens_per_micro_batch: int

    @property
    def step(self) -> str:
        return (
            f"{self.num_prompts} prompts x {GROUP_SIZE}, at most {self.max_prompt_tokens} + "
            f"{self.max_completion_tokens} tokens, "
            f"{self.max_tokens_per_micro_batch} a micro-batch, {_MINI_BATCHES} optimizer steps"
        )


SIZES = {
    "tiny": Size(128, 2, 4, 2, 256, 512, 4, 16, 24, 10, 256),
    "0.5b": Size(896, 24, 14, 2, 4864, 151936, 32, 256, 1024, 384, 16384),
    "1.5b": Size(1536, 28, 12, 2, 8960, 151936, 32, 256, 1024, 384, 16384),
    "3b": Size(2048, 36, 16, 2, 11008, 151936, 32, 256, 1024, 384, 16384),
}
GROUP_SIZE = 8
# vLLM looks each token up in the list of them, in Python.
NUM_STOP_IDS = 8
_MINI_BATCHES = 2  # so that the phase `logprobs` has something to do


@dataclass(frozen=True)
class Ceilings:
    """What this device reached: FLOP/s of a large product, bytes/s (read plus written) of a copy,
    bytes/s to and from
    pinned memory."""

    matmul_flops: float
    memory_bytes: float
    to_device_bytes: float
    to_host_bytes: float


@dataclass(frozen=True)
class Work(Passes):
    """What one step had to do on one rank that holds all of the model."""

    optimizer_steps: int
    offloaded_bytes: float  # that went to the host, and came back


def floors(work: Work, ceilings: Ceilings) -> dict[str, tuple[str, float]]:
    """{phase: (formula, seconds)} of the phases that have a floor."""
    n = work.num_parameters
    leave, back = (
        work.offloaded_bytes / ceilings.to_host_bytes,
        work.offloaded_bytes / ceilings.to_device_bytes,
    )
    moved = ["", " + offloaded/link"][work.offloaded_bytes > 0]
    rollout = max(
        decode_bytes(work) / ceilings.memory_bytes, decode_flops(work) / ceilings.matmul_flops
    )
    optimizer = work.optimizer_steps * 28 * n / ceilings.memory_bytes
    return {
        "weight_sync": (
            f"(4N read + {work.itemsize}N written)/mem{moved}",
            (4 + work.itemsize) * n / ceilings.memory_bytes + leave,
        ),
        "rollout": (
            f"max((longest*weights + KV read)/mem, 2N*sampled/matmul){moved}",
            rollout + back,
        ),
        "logprobs": ("forward/matmul", forward_flops(work) / ceilings.matmul_flops),
        "update": (
            "3*forward/matmul + steps*28N/mem",
            3 * forward_flops(work) / ceilings.matmul_flops + optimizer,
        ),
    }


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--size", default="0.5b", help=f"one or more of {', '.join(SIZES)}")
    parser.add_argument(
        "--steps",
        type=int,
        default=6,
        help="of training; the first, which compiles and warms up, is left out",
    )
    parser.add_argument("--variants", default="plain,offload", help=f"of {', '.join(_VARIANTS)}")
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: a smoke test of this file, no measurement",
    )
    parser.add_argument("--folder", type=Path, help="where the run stays; default: a temporary one")
    args = parser.parse_args()
    variants = args.variants.split(",")
    if args.steps < 2 or not set(variants) <= set(_VARIANTS):
        parser.error(f"--steps is 2 or more, and --variants are of {', '.join(_VARIANTS)}")
    names = args.size.split(",")
    if not set(names) <= set(SIZES):
        parser.error(f"--size is one or more of {', '.join(SIZES)}")
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print("gpu: no GPU: nothing measured")
        return
    device = torch.device(args.device)
    with (
        contextlib.nullcontext(args.folder)
        if args.folder
        else tempfile.TemporaryDirectory() as folder
    ):
        size_name = largest_that_fits(Path(folder), names)
        size = SIZES[size_name]
        num_parameters = make_model(Path(folder, "model"), size)
        runs = {
            name: _train(Path(folder), name, size, args.steps, on_gpu=args.device == "cuda")
            for name in variants
        }
    ceilings = measure_ceilings(
        device
    )  # only now: a context of this process on the GPU would be in the run's ledger
    name = (
        torch.cuda.get_device_name()
        if args.device == "cuda"
        else "CPU (a smoke test, not a measurement)"
    )
    ran = {"model": f"{size_name}, {num_parameters:,} parameters", "device": name}
    facts = {
        "command": shlex.join(["python", "-m", "benchmarks.speed.gpu", *sys.argv[1:]]),
        "step": size.step,
    }
    report(
        "gpu_ceilings",
        [
            {field: value / 1e9 for field, value in vars(ceilings).items()}
            | {"unit": "1e9/s"}
            | ran
            | facts
        ],
        args.json,
    )
    rows = [row for run in runs.values() for row in phase_rows(run, num_parameters, size, ceilings)]
    report("gpu", [row | ran for row in rows], args.json)
    report(
        "gpu_memory", [row | ran for run in runs.values() for row in memory_rows(run)], args.json
    )


def largest_that_fits(folder: Path, names: Sequence[str]) -> str:
    """The first size that fits on this device by the planner, or the last."""
    for name in names[:-1]:
        model = folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
        (model / "config.json").write_text(json.dumps(config | model_config(SIZES[name])))
        plan = planned(training_config(folder, f"plan_{name}", SIZES[name], 2, "bfloat16"))
        if plan.get("fits"):
            return name
    return names[-1]


@dataclass(frozen=True)
class Run:
    """What a training left behind, without its first step."""

    variant: str
    config: dict[str, Any]  # as resolved
    metrics: list[dict[str, Any]]
    lengths: list[list[tuple[int, int]]]  # a step's rollouts: prompt and completion tokens
    plan: dict[str, Any]  # the planner's, empty without one


def phase_rows(run: Run, num_parameters: int, size: Size, ceilings: Ceilings) -> list[Row]:
    """One row a phase and one for the step: medians over the steps of floor and time, each step
    beside its own
    floor."""
    sizes = dimensions(model_config(size))
    assert sizes is not None
    result: list[dict[str, tuple[str, float, float]]] = []
    for metrics, lengths in zip(run.metrics, run.lengths, strict=True):
        work = Work(
            sizes,
            num_parameters=num_parameters,
            active_parameters=num_parameters,
            head_parameters=size.vocabulary * size.hidden,
            lengths=lengths,
            itemsize=4 if run.config["model"]["dtype"] == "float32" else 2,
            optimizer_steps=_MINI_BATCHES,
            offloaded_bytes=metrics["memory/host/offloaded_gib"] * 2**30,
        )
        expected_names = floors(work, ceilings)
        phases = {
            name.removeprefix("time/").removesuffix("_s"): value
            for name, value in metrics.items()
            if name.startswith("time/")
        }
        step = sum(seconds for _, seconds in expected_names.values())
        result.append(
            {
                name: (*expected_names.get(name, ("-", 0.0)), seconds)
                for name, seconds in phases.items()
            }
        )
        result[-1]["step"] = ("sum of the above", step, metrics["time/step_s"])
    planned_s = {**run.plan.get("step_s_by_phase", {}), "step": run.plan.get("step_s", "-")}
    rows = []
    for name in sorted(result[0], key=lambda name: name == "step"):
        formulas, floor, measured = zip(*(step[name] for step in result), strict=True)
        mfu = [
            m["throughput/mfu"]
            for m in run.metrics
            if name == "update" and m.get("throughput/mfu") is not None
        ]
        rows.append(
            {
                "variant": run.variant,
                "phase": name,
                "floor": formulas[-1],
                "floor_s": statistics.median(floor),
                **spread("measured_s", measured),
                "planned_s": planned_s.get(name, "-"),
                "share": statistics.median(f / m for f, m in zip(floor, measured, strict=True))
                if any(measured) and any(floor)
                else "-",
                "mfu": statistics.median(mfu) if mfu else "-",
                "mismatch_kl": statistics.median(m["weight_sync/mismatch_kl"] for m in run.metrics)
                if name == "weight_sync"
                else "-",
            }
        )
    return rows


def memory_rows(run: Run) -> list[Row]:
    """The ledger (grpo_spmd/memory.py) of each phase, in GiB, the most over the steps; and what the
    engine's sleep
    frees and leaves."""

    def most(key: str) -> float:
        return float(max(metrics[key] for metrics in run.metrics if key in metrics))

    fields = ("peak", "allocated", "reserved", "driver_used", "other")
    phases = {
        key.split("/")[1]
        for metrics in run.metrics
        for key in metrics
        if key.startswith("memory/") and key.endswith("/peak_gib")
    }
    order = [
        phase
        for phase in (
            "weight_sync",
            "eval",
            "rollout",
            "reward",
            "logprobs",
            "update",
            "checkpoint",
        )
        if phase in phases
    ]
    nothing: Row = dict.fromkeys((*fields, "planned", "freed", "left"), "-")
    plans = run.plan.get("phases", {})
    rows = [
        {
            "variant": run.variant,
            "phase": p,
            **nothing,
            **{f: most(f"memory/{p}/{f}_gib") for f in fields},
            "planned": plans[p]["peak_gib"] if p in plans else "-",
        }
        for p in order
    ]
    sleep = {"freed": most("memory/sleep/freed_gib"), "left": most("memory/sleep/left_gib")}
    return [*rows, {"variant": run.variant, "phase": "sleep", **nothing, **sleep}]


def measure_ceilings(device: Any) -> Ceilings:
    """Best of several rounds, each long enough to hide the launch."""
    import torch

    on_gpu = device.type == "cuda"
    wide, numel = (8192, 1 << 30) if on_gpu else (512, 1 << 25)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = (torch.randn(wide, wide, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    matmul_s = _best_s(lambda: torch.mm(a, b, out=product), on_gpu)
    local, present = (torch.ones(numel, dtype=torch.uint8, device=device) for _ in range(2))
    copy_s = _best_s(lambda: present.copy_(local), on_gpu)
    host = torch.ones(numel, dtype=torch.uint8, pin_memory=on_gpu)
    to_device_s = _best_s(lambda: local.copy_(host, non_blocking=True), on_gpu)
    to_host_s = _best_s(lambda: host.copy_(local, non_blocking=True), on_gpu)
    return Ceilings(
        2 * wide**3 / matmul_s, 2 * numel / copy_s, numel / to_device_s, numel / to_host_s
    )


def _best_s(call: Callable[[], Any], on_gpu: bool, rounds: int = 5, repeat: int = 5) -> float:
    import torch

    best = float("inf")
    for _ in range(rounds + 1):  # the first, which warms up, is never the best
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / repeat)
    return best


def model_config(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def make_model(folder: Path, size: Size, *, key_bias_norm: float = 0.0) -> int:
    """A random Qwen2 whose next-token distributions are near uniform but for NUM_STOP_IDS stop
    tokens, so likely that completions have the mean length of `size`. With `key_bias_norm` the
    attention's biases are those of a trained Qwen2 whose k_proj has a bias of this norm.

    Returns its number of parameters, a tied one once.
    """
    import transformers

    from benchmarks.support.models import make_large_model, make_likely, set_attention_biases

    stop = [0, *range(size.vocabulary - NUM_STOP_IDS + 1, size.vocabulary)]

    def change(model: Any) -> None:
        if key_bias_norm:
            set_attention_biases(model, key_bias_norm)
        make_likely(model, stop, 1 / size.mean_tokens)

    config = transformers.Qwen2Config(**model_config(size))
    num_parameters = make_large_model(folder, config, change=change)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    rng = random.Random(0)
    prompts = [
        "".join(
            rng.choices(
                "0123456789+-*,=:",
                k=rng.randint(size.max_prompt_tokens // 2, size.max_prompt_tokens),
            )
        )
        for _ in range(512)
    ]
    (folder / "train.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
    )
    return num_parameters


def training_config(
    folder: Path, name: str, size: Size, steps: int, dtype: str, **sections: dict[str, Any]
) -> Path:
    """Write FOLDER/NAME.yaml for the model that `make_model` made in FOLDER/model, and the reward
    that it names; the
    run's folder is FOLDER/NAME. `sections` are laid over it, key by key."""
    config: dict[str, Any] = {
        "run_dir": str(folder / name),
        "model": {"path": str(folder / "model"), "dtype": dtype},
        "data": {
            "train": str(folder / "model/train.jsonl"),
            "max_prompt_tokens": size.max_prompt_tokens,
        },
        "rollout": {
            "num_prompts_per_step": size.num_prompts,
            "group_size": GROUP_SIZE,
            "max_completion_tokens": size.max_completion_tokens,
            "gpu_memory_utilization": 0.5,
        },
        # Random tokens have no text to judge, and all rewards alike would leave nothing to train
        # on.
        "rewards": [{"function": f"{folder}/reward.py:length"}],
        "training": {
            "num_steps": steps,
            "num_mini_batches": _MINI_BATCHES,
            "max_tokens_per_micro_batch": size.max_tokens_per_micro_batch,
        },
        "proofs": {"every_steps": 0},
    }
    for section, values in sections.items():
        config[section] = config.get(section, {}) | values
    config["rollout"] |= current_rollout()
    (folder / "reward.py").write_text(
        "def length(completion_ids, **_):\n    return [float(len(ids) % 7) for ids in "
        "completion_ids]\n"
    )
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def _train(folder: Path, variant: str, size: Size, steps: int, *, on_gpu: bool) -> Run:
    run_dir = folder / variant
    path = training_config(folder, variant, size, steps, "bfloat16" if on_gpu else "float32")
    command = [sys.executable, "-m", "grpo_spmd.train", "--config", str(path), *_VARIANTS[variant]]
    code = subprocess.run(command, stderr=subprocess.STDOUT).returncode
    if code:
        raise SystemExit(f"{shlex.join(command)} ended with exit code {code}; its output is above")
    metrics = read_lines(run_dir / "metrics.jsonl")
    lengths = [
        _lengths(run_dir / "rollouts" / f"step_{line['step']:06d}.jsonl") for line in metrics
    ]
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    plan = planned(run_dir / "config.yaml")
    return Run(variant, config, metrics[1:], lengths[1:], plan)


def _lengths(path: Path) -> list[tuple[int, int]]:
    return [
        (len(rollout["prompt_ids"]), len(rollout["completion_ids"])) for rollout in read_lines(path)
    ]


if __name__ == "__main__":
    main()
