"""Hybrid models without an engine: kernels for packed rows, and what a config.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.attention import PackedLayout, sequence_starts
from grpo_spmd.model.config_json import (
    dimensions,
    has_experts,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    num_active_parameters,
    read_model,
    refuse_by_config,
)
from grpo_spmd.model.families import build
from grpo_spmd.model.families.build import build_hf_model
from tests.support.models import make_multimodal

LENGTHS = [9, 9, 5, 70]
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}


def test_kernels_are_told_where_each_sequence_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the kernels, which take what those of CUDA take, give the same result as one
    pass for each sequence."""
    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        **_LINEAR,
    )
    layer = build_hf_model(config, "x").model.layers[0]
    states = torch.randn(1, sum(LENGTHS), 64)
    layout = PackedLayout(LENGTHS, sequence_starts(LENGTHS), "sdpa")
    expected = layer(states, None, packed_layout=layout)
    chunks, convolution = (
        modeling_qwen3_5.torch_chunk_gated_delta_rule,
        modeling_qwen3_5.causal_conv1d_fn,
    )

    def chunk_kernel(*tensors: Tensor, cu_seqlens: Tensor, **options: Any) -> tuple[Tensor, None]:
        assert cu_seqlens.dtype == torch.int64
        lengths = cu_seqlens.diff().tolist()
        by_token = {name: options.pop(name).split(lengths, 1) for name in ("g", "beta")}
        pieces = zip(*(tensor.split(lengths, 1) for tensor in tensors), strict=True)
        outputs = [
            chunks(*piece, g=by_token["g"][i], beta=by_token["beta"][i], **options)[0]
            for i, piece in enumerate(pieces)
        ]
        return torch.cat(outputs, 1), None

    def conv_kernel(states: Tensor, *args: Any, seq_idx: Tensor, **options: Any) -> Tensor:
        assert seq_idx.dtype == torch.int32
        lengths = seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
        return torch.cat([convolution(x, *args, **options) for x in states.split(lengths, 2)], 2)

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", chunk_kernel)
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", conv_kernel)
    monkeypatch.setattr(build, "_has_kernels", lambda: True)
    layout.backend = "varlen"
    actual = layer(states, None, packed_layout=layout)
    assert torch.allclose(actual, expected, atol=1e-5)


def test_a_convolution_is_no_expert() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "conv1d.weight": (512, 1, 4),
        "experts.gate_up_proj": (8, 96, 64),
    }
    assert [has_experts(shape) for shape in shapes.values()] == [False, True]
    active = num_active_parameters(shapes, {"num_experts_per_tok": 2})
    assert active == 512 * 4 + 2 * 96 * 64


def test_only_attention_layers_keep_keys_and_values() -> None:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "vocab_size": 97,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        **_LINEAR,
    }
    sizes = dimensions(config)
    assert sizes is not None
    # One layer, keys and values, two heads of 32 numbers of 2 bytes.
    assert kv_bytes_per_token(sizes, 2, 1) == 2 * 2 * 32 * 2
    # Four heads of 16 x 32 float32 and three past inputs of 2 x 2 x 16 + 4 x 32 channels in
    # bfloat16; vLLM's blocks of attention layers are as large.
    assert kv_bytes_per_sequence(sizes, 1) == 4 * (4 * 16 * 32 * 4 + 3 * 192 * 2)
    assert kv_bytes_per_sequence(sizes, 2) == kv_bytes_per_sequence(sizes, 1) // 2


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_a_multimodal_folder_counts_as_its_text_part(tmp_path: Path, family: str) -> None:
    facts = read_model(str(make_multimodal(tmp_path, family)))
    assert facts is not None
    assert facts.dimensions is not None
    assert facts.dimensions.recurrent_layers == 3
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert facts.num_parameters == sum(p.numel() for p in model.parameters())
    assert set(facts.shapes) >= {"model.embed_tokens.weight", "lm_head.weight"}
    assert not any("visual" in name for name in facts.shapes)


def test_a_quantised_multimodal_folder_and_other_kinds_are_refused() -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}}
    refuse_by_config(config, "some/model")
    with pytest.raises(ConfigError, match="quantised"):
        refuse_by_config({**config, "quantization_config": {"quant_method": "fp8"}}, "some/model")
    with pytest.raises(ConfigError, match=r"several models in it .text_config"):
        refuse_by_config({**config, "model_type": "qwen3_vl"}, "some/model")
