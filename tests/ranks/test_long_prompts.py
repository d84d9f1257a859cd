"""More prompt tokens in one step of the engine than it computes at once, which ended a run on a
CPU: vLLM sets back the generator of a seeded request whose prompt was computed in pieces."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.models import make_model, write_config
from tests.support.ranks import train


def test_prompts_of_one_step_beyond_the_engines_budget(tmp_path: Path) -> None:
    """32 prompts of 200 tokens, 6,400 in all, where vLLM's budget on a CPU is 4,096."""
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    # All different: vLLM computes a prefix that several prompts share once.
    rows = [{"prompt": f"{a},{b}=" * 50} for a in range(1, 9) for b in range(1, 5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = write_config(
        tmp_path,
        model,
        data={"train": str(tmp_path / "train.jsonl"), "max_prompt_tokens": 240, "shuffle": False},
        rollout={"num_prompts_per_step": 32, "group_size": 2, "max_completion_tokens": 4},
        training={"num_steps": 1, "max_tokens_per_micro_batch": 1024},
    )
    train(1, config)
    (line,) = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["weight_sync/mismatch_abs_mean"] < 1e-5
