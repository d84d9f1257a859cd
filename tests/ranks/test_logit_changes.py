"""Models that change attention logits, final logits or rotary factors: policy and engine compute
the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model, write_config
from tests.support.ranks import train

# Windows of 8 tokens, and rollouts of 28; Phi-3's original positions are 16, and its long_mscale
# only vLLM knows.
CHANGES: dict[str, dict[str, Any]] = {"gemma2": {}, "gemma3_text": {}, "phi3": {"long_mscale": 1.2}}


@pytest.mark.parametrize("family", CHANGES)
def test_policy_and_engine_agree_on_caps_windows_and_long_rotary_factors(
    tmp_path: Path, family: str
) -> None:
    model = make_model(tmp_path / "model", family, tied=family != "phi3")
    described = json.loads((model / "config.json").read_text())
    if CHANGES[family]:
        described["rope_parameters"].update(CHANGES[family])
        (model / "config.json").write_text(json.dumps(described))
    config = write_config(tmp_path, model, rollout={"temperature": 0.7}, proofs={"every_steps": 1})
    output = train(1, config)
    assert output.count("weight-sync proof:") == 1
    assert "not proved" not in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 2
    assert max(step["weight_sync/mismatch_abs_max"] for step in steps) < 1e-5
