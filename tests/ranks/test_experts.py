"""Mixtures of experts: the engine, the gradient and the files, beside plain transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from grpo_spmd.checkpoint.export import StoredTensor, export_merged, stored_tensors
from grpo_spmd.engine.weight_map import EngineTensor, engine_tensors
from grpo_spmd.engine.weight_proof import _expert_fingerprints, matches
from grpo_spmd.model.config_json import is_constant
from tests.support.models import make_model, write_config
from tests.support.ranks import RanksJob, run_worker, train


def config_of(folder: Path, family: str, engine_ranks: int = 1, **overrides: Any) -> Path:
    model = make_model(folder / "model", family, tied=family == "qwen3_moe", **overrides)
    rollout = {
        "temperature": 0.7,
        "tensor_parallel_size": engine_ranks,
        "weight_sync_bucket_mib": 1,
    }
    return write_config(folder, model, rollout=rollout, data={"max_prompt_tokens": 48})


@pytest.mark.parametrize(
    ("family", "num_ranks", "engine_ranks"),
    [
        ("qwen3_moe", 2, 2),
        ("mixtral", 1, 1),
        ("glm4_moe", 1, 1),
        pytest.param("qwen2_moe", 2, 2, marks=pytest.mark.nightly),
        pytest.param("olmoe", 2, 1, marks=pytest.mark.nightly),
        pytest.param("granitemoe", 2, 1, marks=pytest.mark.nightly),
    ],
)
def test_engine_equals_transformers_after_each_update(
    tmp_path: Path, family: str, num_ranks: int, engine_ranks: int
) -> None:
    config = config_of(tmp_path, family, engine_ranks)
    output = run_worker(num_ranks, "sync", str(config), "8")
    assert output.count("worst") == num_ranks


@pytest.mark.parametrize(
    ("family", "num_ranks", "engine_ranks"),
    [
        ("granitemoe", 2, 1),
        ("qwen2_moe", 1, 1),
        ("glm4_moe", 2, 2),
        pytest.param("qwen3_moe", 2, 2, marks=pytest.mark.nightly),
        pytest.param("mixtral", 2, 2, marks=pytest.mark.nightly),
        pytest.param("olmoe", 2, 2, marks=pytest.mark.nightly),
    ],
)
def test_the_gradient_is_that_of_transformers_and_wrong_experts_are_seen(
    tmp_path: Path, family: str, num_ranks: int, engine_ranks: int
) -> None:
    """Ranks take different sequences; an expert may get no token on one of them."""
    output = run_worker(num_ranks, "experts", str(config_of(tmp_path, family, engine_ranks)))
    num_faults = 6 if family == "glm4_moe" else 5
    assert output.count(f"{num_faults} faults seen") == num_ranks


@pytest.mark.parametrize(
    ("family", "dtype", "optimizer"),
    [("qwen3_moe", "float32", "adamw"), ("glm4_moe", "bfloat16", "adamw_8bit")],
)
def test_a_run_is_resumed_to_the_bit_and_its_export_has_the_weights_by_expert(
    tmp_path: Path, family: str, dtype: str, optimizer: str
) -> None:
    """On 2 ranks, each with 3 of 6 experts; the files have the names of the model's own, and the
    routers' constants unrounded."""
    config = config_of(tmp_path, family)
    options = (
        "checkpoint.every_steps=2",
        "optimizer.lr=1e-3",
        f"optimizer.name={optimizer}",
        f"model.dtype={dtype}",
    )
    for run in ("whole", "stopped"):
        steps = "4" if run == "whole" else "2"
        train(2, config, *options, f"run_dir={tmp_path / run}", f"training.num_steps={steps}")
    resume = f"run_dir={tmp_path / 'stopped'}", "training.num_steps=4", "checkpoint.resume=auto"
    train(2, config, *options, *resume)
    losses = [
        [json.loads(line)["loss/policy"] for line in (tmp_path / run / "metrics.jsonl").open()]
        for run in ("whole", "stopped")
    ]
    assert losses[0] == losses[1]
    exported = [
        load_file(tmp_path / run / "checkpoints/step_000004/model.safetensors")
        for run in ("whole", "stopped")
    ]
    original = load_file(tmp_path / "model/model.safetensors")
    assert exported[0].keys() == original.keys()
    for name in filter(is_constant, original):
        assert torch.equal(exported[0][name], original[name]), name
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    folder = tmp_path / "whole/checkpoints/step_000004"
    trainer = json.loads((folder / "trainer.json").read_text())
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtypes[dtype])
    stored: dict[str, StoredTensor] = stored_tensors(folder, trainer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, stored[name].read(dtype)), name


def test_adapters_merged_into_experts_are_those_of_peft(tmp_path: Path) -> None:
    """Mixtral's router and experts have other names on disk, and no adapters."""
    config = config_of(tmp_path, "mixtral")
    train(1, config, "model.lora.rank=4", "training.num_steps=1")
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    export_merged(checkpoint, tmp_path / "merged", "float32")
    base, merged = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("model", "merged")
    )
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        alone = base(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, checkpoint)(ids).logits
        difference = (merged(ids).logits - adapted).abs().max()
    assert difference < 1e-4 < (adapted - alone).abs().max()


def test_experts_that_ranks_would_have_to_pad_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, "qwen3_moe", num_experts=3)
    _, output = RanksJob(2, "grpo_spmd.train", "--config", str(config)).wait()
    assert "has 3 experts a layer, which 2 ranks would hold as 4; set model.num_replicas" in output


class _Experts(nn.Module):
    """vLLM's experts of one rank of an engine, where Triton's kernels take them as they are."""

    def __init__(self, gate_up: Tensor, down: Tensor, rank: int, num_ranks: int) -> None:
        super().__init__()
        gate, up = (half.chunk(num_ranks, dim=1)[rank] for half in gate_up.chunk(2, dim=1))
        self.w13_weight = nn.Parameter(torch.cat([gate, up], dim=1))
        self.w2_weight = nn.Parameter(down.chunk(num_ranks, dim=2)[rank].contiguous())
        parallel = type("Parallel", (), {"tp_rank": rank, "tp_size": num_ranks})
        self.moe_config = type(
            "Config", (), {"moe_parallel_config": parallel, "num_experts": len(gate_up)}
        )
        backend = type("Backend", (), {"name": "TRITON"})
        self.quant_method = type("Method", (), {"unquantized_backend": backend})


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_the_map_of_plain_experts_says_which_rows_an_engine_rank_holds(
    rank: int, num_ranks: int
) -> None:
    gate_up, down = torch.randn(3, 16, 5), torch.randn(3, 5, 8)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].experts = _Experts(gate_up, down, rank, num_ranks)
    names = ["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"]
    tensors: list[EngineTensor] = engine_tensors(model, names, {})
    whole = dict(zip(names, (gate_up.flatten(0, 1), down.flatten(0, 1)), strict=True))
    for tensor in tensors:
        assert tensor.values is not None
        rows = tensor.values.flatten(0, 1)
        num_rows = 0
        for part in tensor.parts:
            expected = whole[part.name][part.hf_start : part.hf_start + part.num_rows]
            expected = expected.chunk(tensor.num_column_slices, dim=1)[tensor.column_slice]
            assert torch.equal(rows[part.start : part.start + part.num_rows], expected)
            num_rows += part.num_rows
        assert num_rows == len(rows)
    assert [tensor.parts[0].name for tensor in tensors] == names


def test_the_fingerprints_of_an_expert_allow_rounding_and_no_more() -> None:
    """Against float64; slices of the intermediate dimension add up."""
    torch.manual_seed(0)
    # Small enough that no gate is shut, behind which nothing would show.
    gate_up, down, probe = 0.1 * torch.randn(64, 32), torch.randn(32, 32), torch.randn(32)
    silu = nn.functional.silu

    def output(gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = (gate_up.double() @ probe.double()).chunk(2)
        return down.double() @ (silu(gate) * up)

    options: dict[str, Any] = {"activation": silu, "is_rounded": False}
    whole = _expert_fingerprints(gate_up, down, probe, num_slices=1, **options)
    halves = _expert_fingerprints(gate_up, down, probe, num_slices=2, **options)
    values = halves.contiguous().view(torch.float32).view(32, 2, 2)[..., 0].sum(1)
    expected = output(gate_up, down)
    assert torch.allclose(values.double(), expected, atol=1e-4)
    assert matches(expected, whole, probe, torch.float32).all()
    moved = gate_up.clone()
    moved[40] *= 1.001
    assert matches(output(moved, down), whole, probe, torch.float32).float().mean() < 0.5
    rounded = _expert_fingerprints(
        gate_up, down, probe, num_slices=1, activation=silu, is_rounded=True
    )
    gate, up = (gate_up @ probe).bfloat16().chunk(2)
    states = (silu(gate.float()).bfloat16() * up).float()
    assert matches((down @ states).bfloat16(), rounded, probe, torch.bfloat16).all()
    swapped = output(torch.cat(gate_up.chunk(2)[::-1]), down)
    assert not matches(swapped, rounded, probe, torch.bfloat16).all()
