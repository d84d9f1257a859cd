"""Families that vLLM fuses, renames or runs by transformers' own code train at rounding, and their
weight sync is
proved whole; what cannot be is refused in one line. benchmarks/run.sh families tries all that both
libraries know."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, train


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (
            "smollm3",
            {},
        ),  # as OLMo has, no class in vLLM: HF's, which it would change for the policy too
        ("olmo2", {}),
        ("olmo3", {"sliding_window": 8}),
        (
            "glm4",
            {},
        ),  # gate_up is fused in the checkpoint, and vLLM calls its halves by other names
        ("phi3", {}),
        (
            "gpt_neox",
            {"num_key_value_heads": 4},
        ),  # another name for the head on disk, and for all layers in vLLM
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_family_trains_at_rounding_and_its_sync_is_proved_whole(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    folder = make_model(tmp_path / "model", family, tied=False, **changes)
    output = train(1, write_config(tmp_path, folder))
    proved = re.search(r"weight-sync proof: .* s, (\d+) tensors by bytes, (\d+) by probe", output)
    assert proved is not None, output
    assert "not proved" not in output
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        assert sum(map(int, proved.groups())) == len(file.keys())
    steps = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(steps) == 2
    for step in steps:
        assert step["weight_sync/mismatch_abs_mean"] < 3e-6, step
        assert step["weight_sync/mismatch_abs_max"] < 3e-5, step


@pytest.mark.parametrize(
    ("family", "changes", "expected"),
    [
        # vLLM's Qwen3 has no such bias: it was trained, and never sampled from.
        (
            "qwen3",
            {"attention_bias": True},
            r"has model\.layers\.0\.self_attn\.o_proj\.bias and 1 more, which vLLM's",
        ),
        ("qwen3", {"head_dim": 24}, "has heads of 24, and vLLM on a CPU only of "),
    ],
)
def test_what_the_engine_lacks_is_refused_in_one_line(
    tmp_path: Path, family: str, changes: dict[str, Any], expected: str
) -> None:
    folder = make_model(tmp_path / "model", family, tied=True, **changes)
    code, output = RanksJob(
        1, "grpo_spmd.train", "--config", str(write_config(tmp_path, folder))
    ).wait()
    assert code == 2, output
    assert "Traceback" not in output
    assert re.search(rf"^error: model\.path: .*{expected}", output, re.MULTILINE), output
    assert not (tmp_path / "run").exists()
