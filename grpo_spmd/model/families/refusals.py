"""Refuses models that would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at
step 0 (observe/logprob_check.py)."""

from __future__ import annotations

import re
from typing import Any

import transformers

from grpo_spmd.config.errors import ConfigError


def refuse_unsupported(hf_config: Any, path: str) -> None:
    """Raises ConfigError for what config.json shows."""
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")
    scalings = ["final_logit_softcapping", "logit_scale", "lm_head_multiplier", "output_multiplier"]
    if not hf_config.model_type.startswith("granite"):  # whose scaling Policy knows
        scalings.append("logits_scaling")
    name = next((name for name in scalings if getattr(hf_config, name, None)), None)
    if name is not None:
        raise ConfigError(f"model.path: {path} changes its logits by {name}, which the chunked logprobs do not support")
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    others = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    others |= {name for name in vars(hf_config) if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)}
    if others:
        kind = f"layers other than attention ({sorted(others)[0]})"
        raise ConfigError(f"model.path: {path} has {kind}, which packed rows do not support")


def refuse_head_bias(model: Any, path: str) -> None:
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model.path: {path} has a bias in its lm_head, which the chunked logprobs do not support")
