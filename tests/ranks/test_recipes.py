"""Every recipe without a model beside the policy trains: the same rollouts on two ranks give, under
each, what plain
transformers gives with the same keys, and another update than the other recipes give."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.config.describe import read_recipes
from grpo_spmd.config.load import load_config
from tests.ranks.test_partition import SECTIONS, plain_update, relative_difference
from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker

ALONE = [name for name, recipe in read_recipes().items() if not recipe.needs]
Found = dict[str, dict[str, Any]]
# Two optimizer steps, far enough apart that clipping has something to bind on.
OURS = {
    **{section: SECTIONS[section] for section in ("data", "rollout")},
    "optimizer": {**SECTIONS["optimizer"], "lr": 1e-3},
    "training": {**SECTIONS["training"], "num_mini_batches": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipes")
    make_model(folder / "model", "qwen3", tied=True)
    make_model(folder / "reference", "qwen3", tied=True, seed=1)
    write_config(folder, folder / "model", **OURS)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    arguments = folder / "config.yaml", folder / "reference", folder / "found.pt"
    run_worker(2, "recipes", *map(str, arguments))
    results: Found = torch.load(folder / "found.pt", weights_only=True)
    return results


def test_every_recipe_makes_an_update_of_its_own(found: Found) -> None:
    assert list(found) == ALONE
    for name, result in found.items():
        assert result["updates"] == 2, name
        assert math.isfinite(result["loss"]), name
        assert 0 < result["grad_norm"] < math.inf, name
    for single, second in itertools.combinations(found, 2):
        moved = relative_difference(
            found[single]["gradients"][0]["model.embed_tokens.weight"],
            found[second]["gradients"][0]["model.embed_tokens.weight"],
        )
        assert moved > 1e-3, (single, second)


@pytest.mark.parametrize("name", ALONE)
def test_a_recipe_is_what_plain_transformers_makes_of_its_keys(
    found: Found, folder: Path, name: str
) -> None:
    plain = plain_update(
        load_config(folder / "config.yaml", [f"algorithm={name}"]), folder / "reference"
    )
    assert found[name]["loss_tokens"] == plain["loss_tokens"]
    assert found[name]["loss"] == pytest.approx(plain["loss"], rel=1e-4, abs=1e-6)
    assert found[name]["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
    for name_of, expected in plain["parameters"].items():
        assert relative_difference(found[name]["parameters"][name_of], expected) < 1e-5, name_of


def test_the_reference_pulls_where_a_recipe_has_one(found: Found) -> None:
    penalised = {
        name for name, result in found.items() if "reward/kl_penalty_mean" in result["metrics"]
    }
    assert penalised == {"rloo", "reinforce_pp"}
