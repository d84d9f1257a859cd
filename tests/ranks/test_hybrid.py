"""Hybrid models (Qwen3.5: gated delta nets and attention, dense and with experts): packed rows and
the engine, beside plain transformers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from grpo_spmd.checkpoint.export import StoredTensor, export_merged, stored_tensors
from grpo_spmd.config.load import load_config
from tests.ranks.test_partition import (
    ONE_ROW,
    SECTIONS,
    SEVERAL_STEPS,
    Results,
    plain_update,
    relative_difference,
)
from tests.support.models import HYBRIDS, make_model, make_multimodal, write_config
from tests.support.nightly import selected_values
from tests.support.ranks import RanksJob, run_worker, train
from tests.support.workers.hybrid import STATE_PARAMETERS
from tests.support.workers.update import REPLICATED, with_setting


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


@pytest.mark.parametrize(
    ("family", "is_multimodal"),
    [
        ("qwen3_5_text", True),
        pytest.param("qwen3_5_text", False, marks=pytest.mark.nightly),
        pytest.param("qwen3_5_moe_text", True, marks=pytest.mark.nightly),
    ],
)
def test_adapters_train_and_their_merged_export_is_served(
    tmp_path: Path, family: str, is_multimodal: bool
) -> None:
    """Adapters on projections of gated delta nets too. The engine that loads the merged files
    answers as transformers with peft's adapters does, and not as the base."""
    make = make_multimodal if is_multimodal else partial(make_model, tied=True)
    folder = make(tmp_path / "model", family)
    sections: dict[str, Any] = {
        "model": {"path": str(folder), "dtype": "bfloat16", "lora": {"rank": 4}},
        "optimizer": {"lr": 0.05},
        "training": {"num_steps": 3},
        "proofs": {"every_steps": 1},
    }
    config = write_config(tmp_path, folder, **sections)
    output = train(2, config)
    assert "not proved" not in output
    checkpoint = tmp_path / "run/checkpoints/step_000003"
    export_merged(checkpoint, tmp_path / "merged", "float32")
    names = [load_file(path / "model.safetensors").keys() for path in (folder, tmp_path / "merged")]
    assert names[0] == names[1]
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    assert any("in_proj_qkv" in name for name in adapters)
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for path in (folder, tmp_path / "merged")
    )
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        alone = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, checkpoint)(ids).logits
        assert (
            (merged(ids).logits - adapted).abs().max() < 1e-3 < 0.1 < (adapted - alone).abs().max()
        )
    output = run_worker(1, "hybrid_served", str(config), str(tmp_path / "merged"))
    assert "answers as transformers does" in output


def test_float32_is_refused_where_the_engine_cannot_compute_it(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_5_text", "float32")
    code, output = RanksJob(1, "grpo_spmd.train", "--config", str(config)).wait()
    assert code == 2, output
    assert "model.dtype: float32, and vLLM computes the recurrent layers of" in output


@pytest.fixture(scope="module")
def updates(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, Path, dict[int, Results]]:
    folder = tmp_path_factory.mktemp("updates")
    make_model(folder / "model", "qwen3_5_text", tied=True)
    make_model(folder / "reference", "qwen3_5_text", tied=True, seed=1)
    config = write_config(folder, folder / "model", **SECTIONS)
    results = {}
    for num_ranks in (1, 2):
        files = str(config), str(folder / "reference"), str(folder / f"{num_ranks}.pt")
        run_worker(num_ranks, "update", *files, *selected_values(request, "setting"))
        results[num_ranks] = torch.load(folder / f"{num_ranks}.pt", weights_only=True)
    return folder, config, results


@pytest.mark.parametrize("setting", ["as configured", SEVERAL_STEPS])
def test_an_update_does_not_depend_on_the_split_and_is_that_of_transformers(
    updates: tuple[Path, Path, dict[int, Results]], setting: str
) -> None:
    """Ranks, replicas, micro-batches, packing, recomputation, compilation.

    AdamW divides rounding by the size of a gradient, so that two optimizer steps leave parameters
    up to 5e-6 apart. In float64, parameters so far apart have gradients that are 4e-5 apart, and
    those of the state parameters 1e-4, whose own differences explain a third of it."""
    folder, config, results = updates
    reference = results[1][setting, ONE_ROW]
    plain = plain_update(with_setting(load_config(config), setting), folder / "reference")
    others = {
        (num_ranks, split): result
        for num_ranks, by_split in results.items()
        for (of, split), result in by_split.items()
        if of == setting
    }
    assert (2, REPLICATED) in others
    assert len(others) >= 7
    bound = 1e-5 if setting == SEVERAL_STEPS else 1e-6
    for split, result in {**others, (0, "plain transformers"): plain}.items():
        looser = bound if split[0] else 10 * bound
        assert result["loss_tokens"] == reference["loss_tokens"], split
        assert result["loss"] == pytest.approx(reference["loss"], rel=looser), split
        assert result["grad_norm"] == pytest.approx(reference["grad_norm"], rel=looser), split
        for name, expected in reference["parameters"].items():
            difference = relative_difference(result["parameters"][name], expected)
            is_state = name.endswith(STATE_PARAMETERS)
            assert difference < (5 * bound if is_state else bound), (split, name, difference)
        pairs = zip(result["gradients"], reference["gradients"], strict=True)
        for number, (gradients, expected_gradients) in enumerate(pairs):
            # Before the first optimizer step all have the same parameters.
            gradient_bound, state_bound = (2e-4, 5e-4) if number else (1e-5, 1e-4)
            for name, expected in expected_gradients.items():
                difference = relative_difference(gradients[name], expected)
                is_state = name.endswith(STATE_PARAMETERS)
                limit = state_bound if is_state else gradient_bound
                assert difference < limit, (split, number, name, difference)
