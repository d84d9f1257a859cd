"""Teachers on real ranks: an update does not depend on how the work is split, and the running check
sees each planted
fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.test_partition import SECTIONS, relative_difference
from tests.support.models import make_model, write_config
from tests.support.nightly import selected_values
from tests.support.ranks import run_worker
from tests.support.workers.teacher import KINDS, LIVE, SEVERAL, VARIANTS
from tests.support.workers.update import SPLITS

Results = dict[tuple[str, str], dict[str, Any]]
ONE_ROW, FEW_ROWS, UNPACKED = SPLITS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teacher")


@pytest.fixture(scope="module")
def outputs(folder: Path, request: pytest.FixtureRequest) -> dict[int, str]:
    """By number of ranks, what the worker prints. The teacher is wider than the policy, and
    untied."""
    result = {}
    wide: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    teacher = make_model(folder / "teacher", "qwen3", tied=False, seed=1, **wide)
    policy = make_model(folder / "model", "qwen3", tied=True)
    config = write_config(folder, policy, **{**SECTIONS, "loss": {"rollout_correction": "none"}})
    for num_ranks in (1, 2):
        files = str(config), str(teacher), str(folder / f"ranks_{num_ranks}.pt")
        planted = ["faults"] * (num_ranks in selected_values(request, "planted_at"))
        result[num_ranks] = run_worker(num_ranks, "teacher", *files, *planted)
    return result


@pytest.fixture(scope="module")
def by_ranks(folder: Path, outputs: dict[int, str]) -> dict[int, Results]:
    return {
        num_ranks: torch.load(folder / f"ranks_{num_ranks}.pt", weights_only=True)
        for num_ranks in outputs
    }


@pytest.mark.parametrize("planted_at", [1, 2])
def test_planted_faults_are_seen(outputs: dict[int, str], planted_at: int) -> None:
    assert outputs[planted_at].count("17 faults seen") == planted_at, outputs[planted_at]


def test_the_splits_and_kinds_really_differ(by_ranks: dict[int, Results]) -> None:
    rows = [by_ranks[1]["full", split]["rows"] for split in SPLITS]
    assert rows[0] == 1 < rows[1] < rows[2]
    assert len({by_ranks[1][kind, ONE_ROW]["optim/grad_norm"] for kind in KINDS}) == len(KINDS)
    assert all(by_ranks[1][kind, ONE_ROW]["teacher/kl"] > 0.05 for kind in KINDS)
    assert {"teacher/a/kl", "teacher/b/kl"} < by_ranks[1][SEVERAL, ONE_ROW].keys()


def test_a_live_teacher_under_adapters_is_the_same_on_two_ranks(
    by_ranks: dict[int, Results],
) -> None:
    """Its adapters are on while it scores: two updates have moved them, and it sees other prompts,
    while the policy's base would give another divergence."""
    single, double = (by_ranks[num_ranks]["adapters", LIVE] for num_ranks in (1, 2))
    for name in ("loss", "policy", "teacher/kl", "optim/grad_norm"):
        assert double[name] == pytest.approx(single[name], rel=1e-5, abs=1e-8), name
    assert single["teacher/kl"] > 0.05


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_does_not_depend_on_the_split(
    by_ranks: dict[int, Results], kind: str, num_ranks: int
) -> None:
    """Ranks, micro-batches, packing, who sampled what, recomputation, replicas."""
    reference = by_ranks[1][kind, ONE_ROW]
    actual = {split: result for (of, split), result in by_ranks[num_ranks].items() if of == kind}
    assert len(actual) == 3 + (kind in ("sampled", "full")) * (len(VARIANTS) - (num_ranks == 1))
    for split, result in actual.items():
        assert result.keys() == reference.keys(), split
        for name in result.keys() - {"gradients", "parameters", "rows"}:
            assert result[name] == pytest.approx(reference[name], rel=1e-6, abs=1e-9), (split, name)
        for name, expected in reference["parameters"].items():
            assert relative_difference(result["parameters"][name], expected) < 1e-6, (split, name)
        for name, expected in reference["gradients"][0].items():
            assert relative_difference(result["gradients"][0][name], expected) < 5e-6, (split, name)
