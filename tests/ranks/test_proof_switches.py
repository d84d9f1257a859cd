"""A run with all of its running proofs off, as the keys of section `proofs` say."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_spmd.proofs.schedule import weakened_proofs
from tests.support.models import make_model, write_config
from tests.support.ranks import train

_SWITCHES = ("weights", "logprobs", "update", "signals")
_TIMES = ("weight_sync/proof_s", "proofs/update_check_s")


def test_a_run_without_proofs_is_the_run_with_them(tmp_path: Path) -> None:
    """It says at its start what nothing looks at, nothing does, and no other number changes.

    Without the proof of weights all of them go through vLLM's loader, at each of three syncs."""
    model = make_model(tmp_path / "model", "qwen3", tied=True)
    runs = {}
    for name, is_on in (("on", True), ("off", False)):
        (tmp_path / name).mkdir()
        config = write_config(
            tmp_path / name,
            model,
            advantage={"estimator": "gae", "normalize_std": "batch"},
            critic={"path": str(model)},
            proofs={"every_steps": 1, **dict.fromkeys(_SWITCHES, is_on)},
            training={"num_steps": 3},
        )
        output = train(1, config)
        lines = (tmp_path / name / "run/metrics.jsonl").read_text().splitlines()
        runs[name] = (output, [json.loads(line) for line in lines])
    sentences = [*weakened_proofs({f"proofs.{name}": False for name in _SWITCHES})]
    assert len(sentences) == len(_SWITCHES)
    for sentence in sentences:
        assert sentence not in runs["on"][0]
        assert sentence in runs["off"][0]
    assert "weight-sync proof" not in runs["off"][0]
    for with_proofs, without in zip(runs["on"][1], runs["off"][1], strict=True):
        assert all(with_proofs[name] > 0 for name in _TIMES)
        assert not any(without.get(name) for name in _TIMES)
        for name, value in without.items():
            if name.startswith(("loss/", "optim/", "reward/", "critic/")):
                assert value == with_proofs[name], name
