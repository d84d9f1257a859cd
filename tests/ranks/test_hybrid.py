"""Hybrid models (Qwen3.5: gated delta nets and attention, dense and with experts): packed rows and
the engine, beside plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import HYBRIDS, make_model, write_config
from tests.support.ranks import RanksJob, run_worker


def config_of(folder: Path, family: str, dtype: str, **rollout: Any) -> Path:
    model = make_model(folder / "model", family, tied=family == "qwen3_5_text")
    sections: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype},
        "rollout": {"temperature": 0.7, "weight_sync_bucket_mib": 1, **rollout},
        "data": {"max_prompt_tokens": 48},
    }
    return write_config(folder, model, **sections)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_packed_rows_are_those_of_transformers_sequence_by_sequence(
    tmp_path: Path, family: str, num_ranks: int
) -> None:
    """Ranks take different sequences; the state parameters are ill-conditioned in float32."""
    output = run_worker(num_ranks, "hybrid", str(config_of(tmp_path, family, "float32")))
    assert output.count("nats, gradients") == 3 * num_ranks


@pytest.mark.parametrize(
    ("family", "num_ranks", "engine_ranks"),
    [
        ("qwen3_5_text", 2, 2),
        ("qwen3_5_moe_text", 1, 1),
        pytest.param("qwen3_5_text", 2, 1, marks=pytest.mark.nightly),
        pytest.param("qwen3_5_moe_text", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_the_engine_stays_as_near_as_at_the_start_and_is_that_of_the_files(
    tmp_path: Path, family: str, num_ranks: int, engine_ranks: int
) -> None:
    config = config_of(tmp_path, family, "bfloat16", tensor_parallel_size=engine_ranks)
    output = run_worker(num_ranks, "hybrid_sync", str(config), "20", str(tmp_path))
    assert output.count("5 faults seen") == num_ranks
    output = run_worker(num_ranks, "hybrid_sync", str(config), "0", str(tmp_path))
    assert output.count("answers as the synced engine") == num_ranks


def test_float32_is_refused_where_the_engine_cannot_compute_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_5_text", "float32")
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait()
    assert code == 2, output
    assert "model.dtype: float32, and vLLM computes the recurrent layers of" in output
