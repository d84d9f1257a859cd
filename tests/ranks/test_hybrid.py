"""Hybrid models (Qwen3.5: gated delta nets and attention, dense and with experts): packed rows and
the engine, beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_spmd.checkpoint.export import StoredTensor, stored_tensors
from tests.support.models import HYBRIDS, make_model, make_multimodal, write_config
from tests.support.ranks import RanksJob, run_worker, train


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


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", pytest.param("qwen3_5_moe_text", marks=pytest.mark.nightly)]
)
def test_the_text_part_of_a_multimodal_folder_trains_and_is_exported_with_its_other_parts(
    tmp_path: Path, family: str
) -> None:
    folder = make_multimodal(tmp_path / "model", family)
    config = write_config(tmp_path, folder, model={"path": str(folder), "dtype": "bfloat16"})
    output = train(2, config, "training.num_steps=2", "proofs.every_steps=1")
    assert "not proved" not in output
    exported = tmp_path / "run/checkpoints/step_000002"
    before, after = (load_file(path / "model.safetensors") for path in (folder, exported))
    assert before.keys() == after.keys()
    unchanged = {name for name in before if torch.equal(before[name].bfloat16(), after[name])}
    others = {name for name in before if "visual" in name}
    assert others <= unchanged
    # A norm may be too coarse in bfloat16 to show a step.
    assert len(unchanged - others) < len(before) / 4
    trainer = json.loads((exported / "trainer.json").read_text())
    stored: dict[str, StoredTensor] = stored_tensors(exported, trainer)
    text, whole = (
        kind.from_pretrained(exported, dtype=torch.bfloat16)
        for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText)
    )
    for name, parameter in text.named_parameters():
        assert torch.equal(parameter, stored[name].read("bfloat16")), name
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(text(ids).logits, whole(ids).logits)


def test_float32_is_refused_where_the_engine_cannot_compute_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_5_text", "float32")
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait()
    assert code == 2, output
    assert "model.dtype: float32, and vLLM computes the recurrent layers of" in output
