"""Whether the check of the update holds in bfloat16 on weights like those of trained models, and
how near to its bounds it comes.

python -m benchmarks.agreement.trained_weights [CASE...] [--steps N] [--json FILE]

Random weights round little. Trained ones have what this adds to them: key biases of hundreds (605
is the norm in the first layer of Qwen2.5-7B, llama.cpp issue 21385), a few dimensions of the
residual stream with massive activations, sharp attention, a large vocabulary's head tied to the
embedding, soft caps. Each case trains for 20 steps on one rank with a reward that varies, so that
no gradient is 0, and its update is checked at every fourth step. A row has the worst of these
checks: differences from the plain recomputation, the noise that was measured (which a run measures
only where a difference is beyond its format's bound), and the bound that held. Exit code 1 where a
run ended with an alarm, or had a gradient of 0.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.support.models import make_model
from benchmarks.support.report import Row, arguments_parser, report
from tests.support.models import write_config
from tests.support.ranks import RanksJob

CHECK_EVERY = 4
# Without a tokenizer's end a random model never stops: the reward looks at the ids themselves.
REWARD = """
def even(completion_ids, **_):
    return [sum(i % 2 == 0 for i in ids) / max(len(ids), 1) for ids in completion_ids]
"""
_HEADS, _KEY_HEADS, _HEAD_DIM = 4, 2, 64


@dataclass(frozen=True)
class Case:
    """A model with random weights, and what makes them like trained ones."""

    num_layers: int
    key_bias_norm: float = 0.0
    outliers: float = 0.0
    """The scale of rows of the second layer that write to three dimensions of the residual
    stream."""
    sharpness: float = 1.0
    """Factor on the weights of queries and keys."""
    family: str = "qwen2"
    tied: bool = True


CASES: dict[str, Case] = {
    **{
        f"Qwen2, {layers} layers, key bias {norm}": Case(layers, key_bias_norm=norm)
        for layers in (12, 28, 64)
        for norm in (0, 100, 300, 605)
    },
    **{f"Qwen2, {layers} layers, outliers": Case(layers, outliers=1.0) for layers in (12, 28, 64)},
    "Qwen2, 28 layers, outliers, key bias 605": Case(28, key_bias_norm=605, outliers=1.0),
    "Qwen2, 28 layers, sharp attention": Case(28, sharpness=2.0),
    "Qwen2, 28 layers, untied head": Case(28, tied=False),
    "Gemma 2, 12 layers, soft caps": Case(12, family="gemma2"),
    "Gemma 2, 28 layers, soft caps": Case(28, family="gemma2"),
}


def make_case(folder: Path, case: Case) -> None:
    """Writes the model of a case, and the demo's tokenizer."""
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": case.num_layers,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_HEADS,
        "head_dim": _HEAD_DIM,
        "max_position_embeddings": 512,
        "tie_word_embeddings": case.tied,
        "initializer_range": 0.06,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if case.family == "qwen2":
        sizes.pop("head_dim")
    config = transformers.AutoConfig.for_model(case.family, **sizes)

    def change(model: Any) -> None:
        generator = torch.Generator().manual_seed(1)
        layers = model.model.layers
        for number, layer in enumerate(layers):
            attention = layer.self_attn
            for linear in (attention.q_proj, attention.k_proj):
                linear.weight.mul_(case.sharpness)
            if case.key_bias_norm:
                is_end = number in (0, len(layers) - 1)
                # In Qwen2.5-7B the biases between the first and the last layer are of about 22.
                norm = case.key_bias_norm * (1.0 if is_end else 22 / 605)
                attention.k_proj.bias.copy_(_slow_bias(_KEY_HEADS, norm, generator))
                attention.q_proj.bias.copy_(_slow_bias(_HEADS, 30.0, generator))
            if case.outliers:
                for linear, scale in (
                    (attention.k_proj, 3.0),
                    (attention.q_proj, 0.5),
                    (attention.v_proj, 0.1),
                ):
                    noise = torch.randn(linear.bias.shape, generator=generator)
                    linear.bias.add_(noise * scale * case.outliers)
        if case.outliers:
            layers[1].mlp.down_proj.weight[:3] *= 30 * case.outliers

    make_model(folder, config, change=change)


def _slow_bias(num_heads: int, norm: float, generator: torch.Generator) -> torch.Tensor:
    """Returns a bias [num_heads * 64] of a norm, in the dimensions that the rotary embedding turns
    slowly, where trained models have theirs."""
    bias = torch.zeros(num_heads, _HEAD_DIM)
    slow = [28, 29, 30, 31, 60, 61, 62, 63]
    bias[:, slow] = torch.randn(num_heads, len(slow), generator=generator)
    bias *= norm / float(bias.norm())
    return bias.flatten()


def measure(name: str, folder: Path, num_steps: int) -> Row:
    """Returns the row of one case. Without an alarm "alarm" is empty."""
    folder.mkdir()
    make_case(folder / "model", CASES[name])
    (folder / "reward.py").write_text(REWARD)
    config = write_config(
        folder,
        folder / "model",
        model={"path": str(folder / "model"), "dtype": "bfloat16"},
        rollout={"num_prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 12},
        rewards=[{"function": f"{folder}/reward.py:even"}],
        optimizer={"lr": 1e-4},
        proofs={"every_steps": CHECK_EVERY},
        training={"num_steps": num_steps, "max_tokens_per_micro_batch": 512},
    )
    job = RanksJob(1, "benchmarks.agreement.trained_weights_worker", "--config", str(config))
    code, output = job.wait(900)
    metrics = folder / "run" / "metrics.jsonl"
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if code == 0 else []
    checks = [json.loads(text) for text in re.findall(r"^noise: (\{.*\})$", output, re.MULTILINE)]
    worst: dict[str, float] = max(checks, key=lambda check: check["excess"], default={})
    alarm = re.search(r"\w*Error: .*", output)
    return {
        "model": name,
        "steps": len(steps),
        "checks": len(checks),
        "smallest gradient norm": min((line["optim/grad_norm"] for line in steps), default=0.0),
        "logprobs off by": max((check["scores"] for check in checks), default=0.0),
        "their noise": max((check["score noise"] for check in checks), default=0.0),
        "gradient off by": worst.get("gradient", 0.0),
        "its noise": worst.get("gradient noise", 0.0),
        "its bound": worst.get("bound", 0.0),
        "whole gradient off by": max((check["whole"] for check in checks), default=0.0),
        "largest difference / noise": max((check["ratio"] for check in checks), default=0.0),
        "mismatch": max((line["weight_sync/mismatch_abs_mean"] for line in steps), default=0.0),
        "alarm": "" if code == 0 else (alarm[0] if alarm else output)[:300],
    }


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="words of names; default: all")
    parser.add_argument("--steps", type=int, default=20, help="of each training; default: 20")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows: list[Row] = []
    names = [name for name in CASES if not args.cases or any(words in name for words in args.cases)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, name in enumerate(names):
                rows.append(measure(name, Path(folder, str(number)), args.steps))
                print(*rows[-1].values(), sep="  ", flush=True)
    finally:  # also what there is when somebody has seen enough
        report("trained_weights", rows, args.json)
    faulty = [row["model"] for row in rows if row["alarm"] or not row["smallest gradient norm"]]
    if faulty:
        sys.exit(f"a run had an alarm, or a gradient of 0: {', '.join(faulty)}")


if __name__ == "__main__":
    main()
