"""Ranks that share their rows (model.sequence_parallel_size) compute the loss, gradient and update
of plain transformers, and the running proofs see what is planted there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_spmd.config.load import load_config
from tests.ranks.test_partition import SECTIONS, SEVERAL_STEPS, compare_updates, plain_update
from tests.ranks.test_partition import relative_difference as difference
from tests.support.models import make_model, write_config
from tests.support.ranks import run_worker
from tests.support.workers.sequence_parallel import ROWS, WAYS
from tests.support.workers.update import SETTINGS, with_setting

ONE_ROW = next(iter(ROWS))


def check_updates(folder: Path, num_ranks: int, sizes: str, settings: list[str]) -> None:
    """Compares the updates of ranks that share rows with those of ranks that do not, and with plain
    transformers: within 1e-6 of the loss, and of each tensor 5e-6."""
    for name, seed in (("model", 0), ("reference", 1)):
        make_model(folder / name, "qwen3", tied=True, seed=seed)
    config_file = write_config(folder, folder / "model", **SECTIONS)
    out = folder / "updates.pt"
    arguments = (str(config_file), str(folder / "reference"), str(out), sizes, *settings)
    run_worker(num_ranks, "sequence_parallel", *arguments)
    results = torch.load(out, weights_only=True)
    config = load_config(config_file)
    for setting in settings:
        reference = results[1, setting, ONE_ROW]
        assert reference["rows"] == 1
        updates = {
            f"{size}, {way}": result
            for (size, case, way), result in results.items()
            if case == setting
        }
        variants = len(WAYS) * (len(settings) > 1 and setting == settings[0])
        assert len(updates) == len(sizes.split(",")) * (len(ROWS) + variants)
        compare_updates(updates, reference, setting)
        plain = plain_update(with_setting(config, setting), folder / "reference")
        bound = 1e-5 if setting == SEVERAL_STEPS else 1e-6
        for way, result in updates.items():
            assert result["loss"] == pytest.approx(plain["loss"], rel=bound), way
            for actual, expected in zip(result["gradients"], plain["gradients"], strict=True):
                for name, value in actual.items():
                    assert difference(value, expected[name]) < 5 * bound, (way, name)
            for name, value in result["parameters"].items():
                assert difference(value, plain["parameters"][name]) < bound, (way, name)


def test_the_update_of_two_ranks_that_share_rows_is_that_of_plain_transformers(
    tmp_path: Path,
) -> None:
    check_updates(tmp_path, 2, "1,2", ["as configured"])


@pytest.mark.nightly
@pytest.mark.parametrize(("num_ranks", "sizes"), [(2, "1,2"), (4, "1,2,4")])
def test_no_size_setting_or_way_changes_the_update(
    tmp_path: Path, num_ranks: int, sizes: str
) -> None:
    """Ragged rows, a group that was cut off as a whole, every loss; recomputation, compilation and
    two replicas. With 4 ranks the 2 KV heads are repeated."""
    check_updates(tmp_path, num_ranks, sizes, list(SETTINGS))


@pytest.mark.nightly
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_update_check_passes_shared_rows_and_sees_faults_in_them(
    tmp_path: Path, num_ranks: int
) -> None:
    """Episodes with forks and adapters pass; a slice that is shifted by a token, positions that are
    lost, KV heads in another order and a gradient that counts twice are seen."""
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    sections = {**SECTIONS, "data": {"max_prompt_tokens": 16}}
    config = write_config(tmp_path, folder, **sections)
    output = run_worker(num_ranks, "sequence_parallel", str(config), "proofs")
    assert output.count("4 faults seen") == num_ranks
