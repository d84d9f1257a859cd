"""benchmarks/agreement/trl_loss.py where there is no TRL: our losses against what TRL gave when it
last ran, and the
comparison itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.agreement.trl_loss import (
    TOLERANCE,
    Result,
    compare,
    gradient_difference,
    probe,
    run_ours,
)
from benchmarks.agreement.trl_loss_batch import make
from benchmarks.agreement.trl_loss_variants import Variant, variants

RECORD = sorted(Path(__file__).parents[2].glob("benchmarks/results/trl_loss_*.jsonl"))[-1]
Changed = tuple[Variant, str, Variant]


def with_one_number_doubled(variant: Variant) -> list[Changed]:
    """The variant with one number of its loss twice as large, for each number that should matter to
    it."""
    config = variant.loss_config
    names = ["kl_coef"] * bool(config.kl_coef and config.kl_in == "loss") + ["entropy_coef"] * bool(
        config.entropy_coef
    )
    names += ["dual_clip"] * (config.dual_clip is not None) + ["rollout_correction_cap"] * (
        config.rollout_correction != "none"
    )
    if not variant.on_policy:
        names += ["clip_ratio_high"] + ["clip_ratio_low"] * (config.policy != "cispo")
    return [
        (variant, name, replace(variant, loss={**variant.loss, name: 2 * getattr(config, name)}))
        for name in names
    ]


@pytest.fixture(scope="module")
def measured(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Variant], dict[str, Result], list[tuple[Changed, Result]]]:
    folder = tmp_path_factory.mktemp("trl_loss")
    batch = make(folder)
    claims = {variant.name: variant for variant in variants(batch) if not variant.reason}
    changed = [
        item
        for variant in claims.values()
        if "loss" in variant.compares
        for item in with_one_number_doubled(variant)
    ]
    results = run_ours(folder, batch, [*claims.values(), *(new for _, _, new in changed)])
    return (
        claims,
        dict(zip(claims, results, strict=False)),
        list(zip(changed, results[len(claims) :], strict=True)),
    )


def test_losses_and_gradients_are_those_that_trl_gave(measured: Any) -> None:
    claims, results, _ = measured
    rows = {
        row["variant"]: row
        for row in map(json.loads, RECORD.read_text().splitlines())
        if row["verdict"] != "differs"
    }
    assert rows.keys() == claims.keys(), (
        f"{RECORD.name} is of other variants: run benchmarks/run.sh trl_loss --json again"
    )
    for name, row in rows.items():
        if "loss" in claims[name].compares:
            assert results[name].loss == pytest.approx(
                row["loss TRL"], rel=TOLERANCE, abs=TOLERANCE
            ), name
        if "gradients" in claims[name].compares:
            assert (
                abs(probe(results[name]) - row["gradient probe TRL"])
                <= TOLERANCE * row["gradient norm TRL"]
            ), name


def test_no_number_of_a_claim_is_idle(measured: Any) -> None:
    """Clips, caps and coefficients bind on this batch, so that agreement means something."""
    _, results, changed = measured
    assert len(changed) > 50
    for (old, name, _), result in changed:
        assert gradient_difference(result, results[old.name])[0] > 10 * TOLERANCE, (
            old.name,
            name,
        )


def test_a_claim_fails_by_its_worst_parameter() -> None:
    """A small tensor of another sign, a transposed one, NaN, and another loss: none may hide behind
    the rest."""
    generator = torch.Generator().manual_seed(0)
    theirs = Result(
        0.5,
        torch.zeros(4),
        {
            "big": 1e3 * torch.randn(8, 8, generator=generator),
            "small": torch.randn(2, generator=generator),
        },
    )

    def verdict(variant: Variant, loss: float = 0.5, **gradients: torch.Tensor) -> str:
        return str(
            compare(
                variant,
                Result(loss, torch.zeros(4), theirs.gradients | gradients),
                theirs,
                [theirs],
            )["verdict"]
        )

    claim = Variant("claim", {})
    assert verdict(claim, loss=0.5 + 9e-6, big=theirs.gradients["big"] * (1 + 9e-6)) == "same"
    assert verdict(claim, small=-theirs.gradients["small"]) == "FAILED"
    assert verdict(claim, big=theirs.gradients["big"].T) == "FAILED"
    assert verdict(claim, big=torch.full((8, 8), torch.nan)) == "FAILED"
    assert verdict(claim, loss=torch.nan) == "FAILED"
    assert verdict(claim, loss=0.5 + 2e-5) == "FAILED"
    assert verdict(replace(claim, compares="gradients"), loss=3.0) == "same gradients"
    assert verdict(replace(claim, reason="on purpose"), loss=3.0) == "differs"
