"""The planner (`python -m grpo_spmd.plan`) beside what can be known without a GPU.

    python -m benchmarks.agreement.plan [--part cpu,published,states] [--sizes 0.1b,0.5b]
    [--variants plain,lora]
        [--json FILE]

cpu: the first of so many ranks on the CPU, with real tensors, FSDP2, AdamW and weight sync; the
other ranks are not there, and collectives bring nothing. Its live bytes by torch's own account of
its allocator (profiler, every allocation and free) beside the prediction: the state of a rank, and
the most that is live while it scores, updates and gathers its weights. Each must be within 3 %, or
the exit code is 1.

published: memory that others measured on GPUs with FSDP2, beside a dry run of the same model, batch
and recomputation by the planner's own means, with their loss (full logits). The difference is
printed, and judged by nobody: their code is not ours. "active" is live tensors; "reserved" what the
allocator took for them.

predictions: what nobody has measured. The four GPU configs of configs/ and two larger models on
cards of the data sheet. configs/README.md has this table.

defaults: what the planner decides for released models where the config names a model, lengths and a
number of rollouts alone. configs/README.md has this table too.

states: what a rank holds of released models between and in updates by the shapes of their tensors
alone, with either optimizer, also of hybrids, whose passes no dry run knows. It is exact.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from benchmarks.agreement import plan_published
from benchmarks.support.models import make_model
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.checks.memory import moment_bytes, shard_numel
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import OptimizerConfig
from grpo_spmd.model.config_json import read_model
from grpo_spmd.observe.cards import find_card
from grpo_spmd.tools.plan.phases import facts_from_config, make_plan
from grpo_spmd.tools.plan.step_time import Case
from tests.support.real_memory import predicted

_MIB, _WITHIN = 2**20, 0.03
_SMALL: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
_QWEN_0_5B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
_SIZES = {
    "0.1b": transformers.Qwen3Config(**_SMALL),
    "0.5b": transformers.Qwen2Config(**_QWEN_0_5B),
}
_RECOMPUTE = "model.activation_checkpointing=true"
_RUNS: list[tuple[str, int, str]] = [
    ("0.1b", 1, ""),
    ("0.1b", 2, ""),
    ("0.1b", 8, _RECOMPUTE),
    ("0.1b", 2, "model.activation_checkpointing=selective"),
    ("0.1b", 2, "model.lora.rank=16"),
    ("0.1b", 2, f"model.lora.rank=16 model.dtype=bfloat16 {_RECOMPUTE}"),
    ("0.1b", 4, "model.num_replicas=2"),
    ("0.1b", 2, "model.offload=true loss.kl_coef=0.1"),
    ("0.1b", 2, "model.dtype=bfloat16 loss.entropy_coef=0.01"),
    ("0.5b", 2, ""),
    ("0.5b", 2, f"{_RECOMPUTE} rollout.weight_sync_bucket_mib=256"),  # as on a GPU
]


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--part", default="cpu,published,predictions,defaults,phases,states")
    parser.add_argument("--sizes", default="0.1b,0.5b", help="of the part cpu")
    parser.add_argument(
        "--variants", default="", help="of the part cpu: those in whose overrides one of these is"
    )
    args = parser.parse_args()
    off: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        if "cpu" in args.part:
            rows = list(_cpu_rows(Path(folder), args.sizes.split(","), args.variants.split(",")))
            report("plan_cpu", rows, args.json)
            off = [abs(row["off_percent"]) / 100 for row in rows]
            print(
                f"the largest difference is {100 * max(off):.2f} %, and {100 * _WITHIN:g} % are "
                "allowed"
            )
        if "published" in args.part:
            report("plan_published", plan_published.rows(Path(folder)), args.json)
        if "predictions" in args.part:
            report("plan_predictions", list(_predictions(Path(folder))), args.json)
        if "defaults" in args.part:
            report("plan_defaults", list(_defaults(Path(folder))), args.json)
        if "states" in args.part:
            report("plan_states", list(_states(Path(folder))), args.json)
        if "phases" in args.part:
            report("plan_phases", list(_phases(Path(folder))), args.json)
    sys.exit(int(any(item > _WITHIN for item in off)))


def _cpu_rows(folder: Path, sizes: list[str], variants: list[str]) -> Iterator[Row]:
    for size in sizes:
        make_model(folder / size, _SIZES[size])
        config = {
            "run_dir": str(folder / "run"),
            "model": {"path": str(folder / size), "dtype": "float32"},
            "data": {"train": "none.jsonl", "max_prompt_tokens": 64},
            "rollout": {"num_prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 192},
            "rewards": [{"name": "format", "args": {"pattern": "x"}}],
            # so large that every run has several micro-batches, as `measured` makes two
            "training": {"max_tokens_per_micro_batch": 1024 if size == "0.1b" else 512},
            # scored, so that the prediction has that pass too
            "loss": {"kl_coef": 0.1},
        }
        path = folder / f"{size}.yaml"
        path.write_text(yaml.safe_dump(config))
        for size_values, ranks, overrides in _RUNS:
            if size_values == size and any(piece in (overrides or "plain") for piece in variants):
                yield from _compared(size, path, ranks, overrides)


def _compared(size: str, path: Path, ranks: int, overrides: str) -> Iterator[Row]:
    (result,) = measure(
        0, "benchmarks.agreement.plan_worker", str(ranks), str(path), *overrides.split()
    )
    expected = predicted(load_config(path, overrides.split()), ranks)
    for label, retained in result.items():
        if retained or expected[label]:
            yield {
                "model": size,
                "ranks": ranks,
                "variant": overrides or "plain",
                "bytes": label,
                "predicted_mib": expected[label] / _MIB,
                "measured_mib": retained / _MIB,
                "off_percent": 100 * (expected[label] / retained - 1),
            }


@dataclass(frozen=True)
class _Case:
    name: str
    config: (
        str | dict[str, Any]
    )  # a file of configs/, or sections beside those that every run needs
    model: dict[str, Any]  # config.json
    card: str
    ranks: int
    overrides: tuple[str, ...] = ()


def qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, *, tied: bool
) -> dict[str, Any]:
    """config.json of a Qwen2.5, by the sizes that its model card gives."""
    config: dict[str, Any] = transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
    ).to_dict()
    return config


def qwen3(hidden: int, layers: int, heads: int, intermediate: int) -> dict[str, Any]:
    """config.json of an untied Qwen3, by the sizes that its model card gives."""
    config: dict[str, Any] = transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        tie_word_embeddings=False,
        max_position_embeddings=40_960,
    ).to_dict()
    return config


# By its model card: 128 experts, of which a token takes 8.
_QWEN3_30B_A3B: dict[str, Any] = transformers.Qwen3MoeConfig(
    vocab_size=151_936,
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    tie_word_embeddings=False,
    max_position_embeddings=40_960,
).to_dict()
_QWEN_1_5B = qwen2(1536, 28, 12, 2, 8960, tied=True)
_LARGE: dict[str, Any] = {
    "model": {"activation_checkpointing": True},
    "data": {"train": "none.jsonl", "max_prompt_tokens": 1024},
    "rollout": {"num_prompts_per_step": 128, "group_size": 8, "max_completion_tokens": 4096},
    "training": {"max_tokens_per_micro_batch": 16384, "num_mini_batches": 2},
}
_LARGER: dict[str, Any] = _LARGE | {
    "model": {"activation_checkpointing": True, "offload": "optimizer"},
    "rollout": _LARGE["rollout"] | {"tensor_parallel_size": 4},
}
CASES = (
    _Case(
        "qwen2.5-0.5b-debug",
        "qwen2.5-0.5b-debug",
        qwen2(896, 24, 14, 2, 4864, tied=True),
        "RTX4090-24GB",
        1,
    ),
    _Case("qwen2.5-1.5b-gsm8k", "qwen2.5-1.5b-gsm8k", _QWEN_1_5B, "A100-40GB", 8),
    _Case("qwen2.5-1.5b-gsm8k", "qwen2.5-1.5b-gsm8k", _QWEN_1_5B, "H100-80GB", 8),
    _Case("qwen2.5-1.5b-gsm8k-lora", "qwen2.5-1.5b-gsm8k-lora", _QWEN_1_5B, "RTX4090-24GB", 1),
    _Case("qwen2.5-1.5b-gsm8k-lora", "qwen2.5-1.5b-gsm8k-lora", _QWEN_1_5B, "A100-40GB", 1),
    _Case(
        "tinyzero-countdown",
        "tinyzero-countdown",
        qwen2(2048, 36, 16, 2, 11008, tied=True),
        "A100-80GB",
        8,
    ),
    _Case("Qwen3-8B", _LARGE, qwen3(4096, 36, 32, 12288), "H100-80GB", 8),
    _Case("Qwen3-32B", _LARGER, qwen3(5120, 64, 64, 25600), "H100-80GB", 16),
)
_DEFAULT: dict[str, Any] = {key: _LARGE[key] for key in ("data", "rollout")}
DEFAULTS = (
    _Case("Qwen2.5-0.5B", _DEFAULT, CASES[0].model, "RTX4090-24GB", 1),
    _Case("Qwen2.5-7B", _DEFAULT, qwen2(3584, 28, 28, 4, 18944, tied=False), "H100-80GB", 8),
    _Case("Qwen3-8B", _DEFAULT, qwen3(4096, 36, 32, 12288), "H100-80GB", 8),
    _Case("Qwen2.5-32B", _DEFAULT, qwen2(5120, 64, 40, 8, 27648, tied=False), "H100-80GB", 16),
    _Case("Qwen3-32B", _DEFAULT, qwen3(5120, 64, 64, 25600), "H100-80GB", 16),
    *(
        _Case(
            f"qwen3-30b-a3b-math, {optimizer}, offload: {offload}",
            "qwen3-30b-a3b-math",
            _QWEN3_30B_A3B,
            "H100-80GB",
            8,
            (f"optimizer.name={optimizer}", f"model.offload={offload}"),
        )
        for optimizer in ("adamw", "adamw_8bit")
        for offload in ("false", "optimizer", "true")
    ),
)


# By transformers' defaults, which it names after these models, and the 2B by its model card.
_QWEN3_5_2B: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
STATES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3.5-2B": (CONFIG_MAPPING["qwen3_5_text"](**_QWEN3_5_2B).to_dict(), 1),
    "Qwen3.5-9B": (CONFIG_MAPPING["qwen3_5_text"]().to_dict(), 8),
    "Qwen3-30B-A3B": (_QWEN3_30B_A3B, 8),
    "Qwen3.5-35B-A3B": (CONFIG_MAPPING["qwen3_5_moe_text"]().to_dict(), 8),
}


def _states(folder: Path) -> Iterator[Row]:
    for name, (model, num_ranks) in STATES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(model))
        facts = facts_from_config(folder / name)
        shard = shard_numel(facts.shapes, num_ranks)
        row: Row = {
            "model": name,
            "ranks": num_ranks,
            "parameters": facts.num_parameters,
            "active": facts.num_active_parameters,
            "weights_gib": 4 * shard / 2**30,
            "gradients_gib": 4 * shard / 2**30,
        }
        for optimizer in ("adamw", "adamw_8bit"):
            config = OptimizerConfig(name=optimizer)
            moments = moment_bytes(facts.shapes, num_ranks, config)
            row[f"{optimizer}_gib"] = moments / 2**30
            row[f"{optimizer}_bytes"] = moments / shard
        yield row


def _predictions(folder: Path) -> Iterator[Row]:
    for number, case in enumerate(CASES):
        model = folder / f"case_{number}" / case.name
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(case.model))
        path = Path("configs", f"{case.config}.yaml")
        if isinstance(case.config, dict):
            path = folder / f"case_{number}.yaml"
            needed = {"run_dir": "none", "rewards": [{"name": "gsm8k"}]}
            path.write_text(
                yaml.safe_dump(
                    needed | case.config | {"model": {**case.config["model"], "path": "none"}}
                )
            )
        config = load_config(path, [f"model.path={model}"])
        facts, start = read_model(str(model)), time.perf_counter()
        assert facts is not None
        plan = make_plan(Case(config, facts, find_card(case.card), case.ranks), model)
        yield {
            "config": case.name,
            "on": f"{case.ranks} x {case.card}",
            "fits": plan.fits,
            "margin_gib": plan.margin_gib,
            "tightest": plan.tightest,
            **{
                f"{phase}_gib": plan.peak_gib(phase)
                for phase in ("weight_sync", "rollout", "update")
            },
            "kv_sequences": f"{min(plan.kv_cache.full_length, plan.kv_cache.sequences)} of "
            f"{plan.kv_cache.sequences}",
            "step_s": plan.step_s,
            "took_s": time.perf_counter() - start,
        }


def _phases(folder: Path) -> Iterator[Row]:
    """What fills one rank in each phase, as the command predicts it for Qwen3-8B on 8 H100."""
    case = next(case for case in CASES if case.name == "Qwen3-8B")
    plan = _by_the_command(folder / "phases", case)
    for phase, memory in plan["phases"].items():
        for name, gib in memory["live_gib"].items():
            yield {
                "config": case.name,
                "on": f"{case.ranks} x {case.card}",
                "gpu_gib": plan["gpu"]["gib"],
                "phase": phase,
                "holds": name,
                "gib": gib,
            }


def _defaults(folder: Path) -> Iterator[Row]:
    for number, case in enumerate(DEFAULTS):
        plan = _by_the_command(folder / f"defaults_{number}", case)
        cache = plan["kv_cache"]
        yield {
            "model": case.name,
            "on": f"{case.ranks} x {case.card}",
            "fits": plan["fits"],
            **plan["decided"],
            "margin_gib": plan["margin_gib"],
            "tightest": plan["tightest_phase"],
            "kv_sequences": f"{min(cache['full_length_at_once'], cache['sequences'])} of "
            f"{cache['sequences']}",
            "step_s": plan["step_s"],
        }


def _by_the_command(folder: Path, case: _Case) -> dict[str, Any]:
    """The answer of `python -m grpo_spmd.plan`, as JSON."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(case.model))
    config, result = Path("configs", f"{case.config}.yaml"), folder / "plan.json"
    if isinstance(case.config, dict):
        config = folder / "config.yaml"
        needed = {"run_dir": "none", "rewards": [{"name": "gsm8k"}]}
        config.write_text(yaml.safe_dump(needed | case.config))
    command = [sys.executable, "-m", "grpo_spmd.plan", "--config", str(config)]
    command += [f"model.path={folder}", *case.overrides]
    command += ["--gpu", case.card, "--ranks", str(case.ranks), "--json", str(result)]
    # Exit code 1: the run does not fit.
    subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
    return dict(json.loads(result.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
