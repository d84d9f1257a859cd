"""Refuses models that would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at
step 0 (proofs/logprob_check.py)."""

from __future__ import annotations

import re
from typing import Any

import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.families.config_json import refuse_by_config
from grpo_spmd.model.hf_files import load_config


def refuse_unsupported(hf_config: Any, path: str, *, is_policy: bool = True) -> None:
    """Raises ConfigError for what config.json shows. Of another model than a policy any head will do."""
    refuse_by_config(hf_config.to_dict() | ({} if is_policy else {"architectures": None}), path)
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")


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


def trainable_config(path: str, longest: int, *, is_policy: bool = True) -> Any:
    """Of the model of `path`, for rollouts of `longest` tokens, with dropout off: it would make the policy differ from
    the engine that sampled. Raises ConfigError."""
    hf_config = load_config(path)
    refuse_unsupported(hf_config, path, is_policy=is_policy)
    refuse_window(hf_config, path, longest)
    for name, value in vars(hf_config).items():
        if isinstance(value, int | float) and re.search("dropout|pdrop|layerdrop", name):
            setattr(hf_config, name, 0.0)
    return hf_config
