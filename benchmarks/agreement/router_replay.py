"""How far policy and engine of a mixture of experts differ with the policy's own routes, and with
the engine's replayed.

    benchmarks/run.sh router_replay [--json FILE]        about 2 minutes on 2 cores

A random Qwen3-MoE of 16 experts, four for a token, of 6 and 12 layers, samples 24 completions of 48
tokens with the real vLLM. A row has |policy - engine| of a sampled token's logprob in nats. "own":
the policy takes its own routes; "replay": the engine's; "neighbour": planted, those of the token
before. "sets that differ" are the route sets (a token in a layer) that the policy by itself would
take otherwise, "tokens that differ" the tokens with such a set in any layer. Exit code 1 where a
replay in bfloat16 does not at least halve mean and maximum, or changes float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, arguments_parser, report

CASES = (("float32", 6), ("bfloat16", 6), ("bfloat16", 12))
NUM_PROMPTS, PROMPT_TOKENS, COMPLETION_TOKENS, VOCABULARY = 24, 44, 48, 128


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--case", nargs=2, metavar=("DTYPE", "LAYERS"), help="one, as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case[0], int(args.case[1]))))
        return
    rows: list[Row] = []
    for dtype, num_layers in CASES:
        # Each engine in a process of its own.
        command = [sys.executable, "-m", __spec__.name, "--case", dtype, str(num_layers)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    report("router_replay", rows, args.json)
    missed = [row for row in rows if row["goal"] == "missed"]
    sys.exit(f"a replay did not bring policy and engine together: {missed}" if missed else 0)


def make_model(folder: Path, num_layers: int) -> None:
    """Writes a model whose routers are not undecided, with the demo's tokenizer."""
    import torch
    import transformers

    from grpo_spmd.demo.countdown import make_tokenizer

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    model = transformers.Qwen3MoeForCausalLM(config).float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    make_tokenizer(folder)


def measure(dtype: Any, num_layers: int) -> list[Row]:
    """Rows of one model."""
    import torch

    from grpo_spmd.config.schema import ModelConfig, RolloutConfig
    from grpo_spmd.distributed.session import end_session, start_session
    from grpo_spmd.engine.engine import RolloutEngine
    from grpo_spmd.engine.requests import Request
    from grpo_spmd.engine.weight_sync import WeightSync
    from grpo_spmd.learn.assemble import pack_rollouts
    from grpo_spmd.learn.contexts import completion_contexts
    from grpo_spmd.model.policy import build_policy
    from grpo_spmd.records import Rollout

    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), num_layers)
        session = start_session()
        model = ModelConfig(path=folder, dtype=dtype)
        rollout = RolloutConfig(max_completion_tokens=COMPLETION_TOKENS)
        max_tokens = PROMPT_TOKENS + COMPLETION_TOKENS
        engine = RolloutEngine(model, rollout, max_tokens, session, [])
        policy = build_policy(model, 1.0, session, replays_routes=engine.records_routes)
        WeightSync(policy, engine, 1 << 24).sync(1)
        prompts = [[5, 6, 7, 8 + i, *range(10, PROMPT_TOKENS + 6)] for i in range(NUM_PROMPTS)]
        completions = engine.generate(
            [Request(prompt, seed) for seed, prompt in enumerate(prompts)], 1
        )
        rollouts = []
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            contexts = tuple(completion_contexts(prompt, completion))
            rollouts.append(
                Rollout(
                    number, 1.0, True, prompt, completion.token_ids, completion.logprobs, contexts
                )
            )
        row = pack_rollouts(rollouts, torch.device("cpu"))
        routes = row.routes
        assert routes is not None
        recorded = routes.experts
        rows: list[Row] = []
        for mode in ("own", "replay", "neighbour"):
            routes.is_replayed = mode != "own"
            routes.experts = recorded.roll(1, 0) if mode == "neighbour" else recorded
            with torch.no_grad():
                logprobs, _ = policy(row)
            size = (logprobs - row.rollout_logprobs).abs()
            rows.append(
                {
                    "model": f"{dtype}, {num_layers} layers",
                    "routes": mode,
                    "mean": float(size.mean()),
                    "p99": float(size.quantile(0.99)),
                    "max": float(size.max()),
                }
            )
        num_read = int(routes.is_recorded.sum())
        num_different = sum(int(count) for count in routes.differences.values())
        rows[0]["sets that differ"] = num_different / (num_read * num_layers)
        rows[1]["bytes a token"] = recorded[0].numel() * recorded.element_size()
        own_row, replay_row = rows[:2]
        if dtype == "float32":
            is_met = replay_row["max"] < 1e-4
        else:
            is_met = all(replay_row[name] < own_row[name] / 2 for name in ("mean", "max"))
        replay_row["goal"] = "met" if is_met else "missed"
        for entry in rows:
            entry.setdefault("goal", "-")
        engine.shutdown()
        end_session()
    return rows


if __name__ == "__main__":
    main()
