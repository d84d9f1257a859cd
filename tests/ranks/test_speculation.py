"""`rollout.speculation: auto` with the real vLLM: completions of small models, whose kernels do not
round by the number of rows, are those of a run without it, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker


def generated(folder: Path, name: str, num_ranks: int, **sections: Any) -> dict[str, Any]:
    """What the worker generates with these sections of the config."""
    (folder / name).mkdir()
    config = write_config(
        folder / name,
        folder / "model",
        data={"max_prompt_tokens": 64},
        training={"max_tokens_per_micro_batch": 256},
        **sections,
    )
    out = folder / name / "out.json"
    run_worker(num_ranks, "speculation", str(config), str(out))
    result: dict[str, Any] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize(
    ("family", "num_ranks", "dtype", "num_blocks"),
    [
        ("qwen3_moe", 1, "float32", 8),
        pytest.param("qwen3", 2, "float32", 8, marks=pytest.mark.nightly),
        pytest.param("qwen3", 1, "bfloat16", 64, marks=pytest.mark.nightly),
        pytest.param("gemma3_text", 1, "float32", 64, marks=pytest.mark.nightly),
    ],
)
def test_completions_are_those_without_it(
    tmp_path: Path, family: str, num_ranks: int, dtype: str, num_blocks: int
) -> None:
    """Tokens, logprobs, finish reasons and routes of two turns over shared prompts, with requests
    that are preempted where the cache has 8 blocks (7 of them for 256 tokens)."""
    make_model(tmp_path / "model", family, tied=family != "qwen3_moe")
    model = {"path": str(tmp_path / "model"), "dtype": dtype}
    rollout = {
        "temperature": 0.7,
        "tensor_parallel_size": num_ranks,
        "max_completion_tokens": 24,
        "stop": ["7", "1="],
        "engine": {"num_gpu_blocks_override": num_blocks},
    }
    plain = generated(tmp_path, "plain", num_ranks, model=model, rollout=rollout)
    rollout["speculation"] = "auto"
    auto = generated(tmp_path, "auto", num_ranks, model=model, rollout=rollout)
    assert auto["completions"] == plain["completions"]
    assert len(plain["completions"]) == 4 * 3 * 4 * 2
    assert {reason for _, _, reason, _ in plain["completions"]} == {"stop", "length"}
    if family == "qwen3_moe":
        assert all(routes for _, logprobs, _, routes in auto["completions"] if logprobs)
    assert (min(plain["preempted"], auto["preempted"]) > 0) == (num_blocks == 8)
    # Right drafts and wrong ones.
    assert 200 < auto["accepted"] < auto["drafted"] - 50
