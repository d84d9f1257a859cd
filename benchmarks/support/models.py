"""The random models that benchmarks measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from grpo_spmd.demo.countdown import make_tokenizer

_NUM_PROBED_TOKENS = 64
# Norms of Qwen2.5-7B's biases: of the inner layers' keys over those of the first, and of queries.
_INNER_KEY_FRAC, _QUERY_NORM = 22 / 605, 30.0


def make_model(
    folder: Path,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], None] | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Write a model of a transformers config with random weights, which `change` may edit, and the
    demo's tokenizer.
    Returns the model."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False
    )
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_large_model(
    folder: Path,
    config: Any,
    *,
    seed: int = 0,
    change: Callable[[Any], None] | None = None,
) -> int:
    """The same in bfloat16, for sizes whose weights torch would draw on one thread, and twice: half
    a minute at 1.5B. Normal ones as the config says, drawn on all cores; gains are ones, biases
    zeros; `change` may edit them. Returns the number of parameters, a tied one once."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    model.to_empty(device="cpu")
    model.tie_weights()
    # No file has the buffers (the frequencies of rotary embeddings): `to_empty` has left anything
    # there, and `change` may run the model.
    for name, module in list(model.named_modules()):
        if next(module.buffers(recurse=False), None) is not None:
            model.set_submodule(name, type(module)(config))
    std = config.initializer_range

    def draw(number: int, name: str, weight: torch.Tensor) -> None:
        if weight.ndim == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            drawn = np.random.default_rng([seed, number]).standard_normal(weight.shape, np.float32)
            weight.copy_(torch.from_numpy(drawn).mul_(std))

    with ThreadPoolExecutor() as threads:
        drawing = [
            threads.submit(draw, number, name, weight.detach())
            for number, (name, weight) in enumerate(model.named_parameters())
        ]
        for item in drawing:
            item.result()
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder)
    return int(model.num_parameters())


def make_likely(model: Any, ids: Sequence[int], probability: float) -> None:
    """Make these tokens together about so likely everywhere, in a random tied Qwen2.

    Coordinate 0 of the residual stream is 1 at each token: no layer reads or writes it. The final
    norm makes it 1 / rms, and the rows of `ids` in the tied head turn that into a higher logit. To
    have the probability p among V tokens, n tokens need logits higher by log(p / (1 - p) * (V - n)
    / n).
    """
    base, vocabulary = model.model, model.config.vocab_size
    embedding = base.embed_tokens.weight
    embedding[:, 0] = 1.0
    for layer in base.layers:
        layer.input_layernorm.weight[0] = layer.post_attention_layernorm.weight[0] = 0.0
        layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0.0
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(vocabulary, (1, _NUM_PROBED_TOKENS), generator=generator)
    carried = float(base(input_ids).last_hidden_state[0, :, 0].float().mean())
    odds = probability / (1 - probability)
    embedding[list(ids), 0] += math.log(odds * (vocabulary - len(ids)) / len(ids)) / carried


def set_attention_biases(model: Any, key_norm: float) -> None:
    """Give a random Qwen2 the attention biases of a trained one: of norm `key_norm` in k_proj of
    the outer layers (605 in the first one of Qwen2.5-7B), less between, in the dimensions that the
    rotary embedding turns slowest."""
    layers = model.model.layers
    generator = torch.Generator().manual_seed(1)
    for number, layer in enumerate(layers):
        attention = layer.self_attn
        is_outer = number in (0, len(layers) - 1)
        inner_norm = key_norm * _INNER_KEY_FRAC
        norms = {"k_proj": key_norm if is_outer else inner_norm, "q_proj": _QUERY_NORM}
        for name, norm in norms.items():
            weight = getattr(attention, name).bias
            heads = torch.zeros(len(weight) // attention.head_dim, 2, attention.head_dim // 2)
            slowest = heads[:, :, -(attention.head_dim // 16) :]
            slowest.normal_(generator=generator)
            weight.copy_(heads.flatten() * (norm / heads.norm()))
