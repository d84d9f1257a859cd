"""The attention of the plain recomputation: transformers' own in float32, and no loss of digits in
bfloat16 where transformers' eager attention has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from grpo_spmd.proofs.plain import use_plain_attention
from tests.support.models import make_model


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma2", "olmo3", "gpt_neox", "phi3"])
def test_it_is_transformers_attention_in_float32(tmp_path: Path, family: str) -> None:
    """Shared KV heads, soft caps, windows, partial rotary embeddings; logits and gradients."""
    folder = make_model(tmp_path, family, tied=False)
    ids = torch.arange(1, 49).reshape(2, 24)
    results = []
    for is_plain in (False, True):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        if is_plain:
            with use_plain_attention(model):
                logits = model(ids).logits
                logits.square().mean().backward()
            assert model.config._attn_implementation == "eager"
        else:
            logits = model(ids).logits
            logits.square().mean().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for plain, eager in zip(*reversed(results), strict=True):
        assert torch.allclose(plain, eager, rtol=1e-4, atol=1e-5)


def test_key_biases_of_hundreds_are_no_difference_to_sdpa(tmp_path: Path) -> None:
    """As in Qwen2.5-7B, whose first layer's have a norm of 605, in bfloat16: the trainer's SDPA
    and the plain attention both keep scores in float32; transformers' eager attention does not."""
    folder = make_model(tmp_path, "qwen2", tied=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = torch.randn(layer.self_attn.k_proj.bias.shape, generator=generator)
            layer.self_attn.k_proj.bias.copy_(bias * (605 / bias.norm()))
    ids = torch.arange(1, 49).reshape(2, 24)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            log_p: torch.Tensor = model(ids).logits.float().log_softmax(-1)
        return log_p

    model.set_attn_implementation("sdpa")
    trainer = logprobs()
    with use_plain_attention(model):
        plain = logprobs()
    model.set_attn_implementation("eager")
    eager = logprobs()
    plain_difference = float((plain - trainer).abs().mean())
    eager_difference = float((eager - trainer).abs().mean())
    assert plain_difference < eager_difference / 4, (plain_difference, eager_difference)
