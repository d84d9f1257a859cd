"""What teaches costs the passes and bytes that it should, as benchmarks/speed/signals.py counts
them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.support.ranks import run_ranks

# Passes of the step's tokens: without, and with a gradient.
PASSES = {
    "plain": (0, 1),
    "teacher, sampled": (1, 1),
    "teacher, topk": (1, 1),
    "teacher, full": (1, 1),
    "critic": (1, 2),  # its values before the update, and its own update
    "critic on the policy": (1, 1),  # the policy's pass of the update has its values too
    "reward model": (1, 1),
}


def test_passes_and_held_bytes_are_those_of_the_models(tmp_path: Path) -> None:
    file, models = tmp_path / "rows.jsonl", tmp_path / "models"
    run_ranks(
        1,
        "benchmarks.speed.signals",
        "--size",
        "tiny",
        "--json",
        str(file),
        "--folder",
        str(models),
    )
    rows = {row["signal"]: row for row in map(json.loads, file.read_text().splitlines())}
    assert {name: (row["forward"], row["trained"]) for name, row in rows.items()} == PASSES
    mib = {path.name: _numel(path / "model.safetensors") / 2**20 for path in models.iterdir()}
    decoder, plain = (
        mib["reward_model"] - _HIDDEN / 2**20,
        3 * 4 * mib["policy"],
    )  # float32 with two moments
    for name, row in rows.items():
        # Frozen models are bfloat16, as the size has it; a critic is float32 with two moments, and
        # its head has a bias.
        head = 3 * 4 * (_HIDDEN + 1) / 2**20
        critics_values = {"critic": 3 * 4 * decoder + head, "critic on the policy": head}
        rest = {"plain": 0.0, "reward model": 2 * mib["reward_model"]} | critics_values
        local = rest.get(name, 2 * mib["teacher"])
        assert row["held_mib"] == pytest.approx(plain + local, abs=1e-9), name
        assert row["waiting_mib"] == pytest.approx(local, abs=1e-9), name
        assert row["peak_mib"] > 4 * mib["policy"], name  # gradients alone
        assert row["min"] <= row["to_plain"] <= row["max"]


_HIDDEN = 128


def _numel(path: Path) -> int:
    with safe_open(path, framework="pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
