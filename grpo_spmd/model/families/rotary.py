"""Rotary factors that transformers picks by the longest sequence of a row, fixed to what the engine computes."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_spmd.config.errors import ConfigError


@torch.no_grad()
def fix_rotary_factors(model: Any, max_rollout_tokens: int) -> None:
    """Give `model`, whose buffers are filled, the rotary factors that the engine has for rollouts of at most so many
    tokens, whatever is beside them in a row.

    longrope has short and long factors. transformers takes the long ones for a row with one position beyond the
    original ones; vLLM (0.32) takes one kind for all, by its max_model_len, which is `max_rollout_tokens`.
    dynamic grows with rows beyond max_position_embeddings in transformers, and never in vLLM.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # by the type of a layer
            changing = {kind for kind in kinds.values() if _follows_the_row(kind)}
            if changing:
                name = type(model).__name__
                raise ConfigError(
                    f"model.path: {name} has {changing.pop()} rotary factors for some of its layers alone"
                )
        elif _follows_the_row(kinds):
            if kinds == "longrope":
                frequencies, module.attention_scaling = _as_the_engine(module.config, max_rollout_tokens)
                module.inv_freq.copy_(frequencies)
            module.rope_type = "default"  # for the forward pass: factors that stay as they are


def _follows_the_row(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _as_the_engine(config: Any, max_rollout_tokens: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, and what cosine and sine are multiplied by: as vLLM's Phi3LongRoPEScaledRotaryEmbedding,
    which does not know transformers' `factor` and `attention_factor`."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"), seq_len=max_rollout_tokens)
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    ratio = config.max_position_embeddings / original
    scaling = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    given = rope.get("long_mscale" if max_rollout_tokens > original else "short_mscale")
    return frequencies, scaling if given is None else given
