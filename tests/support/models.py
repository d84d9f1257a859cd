"""Tiny random models of real architectures, made here, so that no test downloads anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from grpo_spmd.demo.countdown import make_tokenizer

FAMILIES = ("qwen2", "qwen3", "llama", "granite")
EXPERTS = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "granitemoe", "glm4_moe")
HYBRIDS = ("qwen3_5_text", "qwen3_5_moe_text")
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Three gated delta nets to one attention layer; vLLM's kernels for a CPU need heads of 64.
_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
# What sets these apart, where it bites: windows and caps are small, scales away from 1.
_LAYERS = ["sliding_attention", "full_attention"]
_APART: dict[str, dict[str, Any]] = {
    "gemma2": {
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
    },
    "gemma3_text": {"query_pre_attn_scalar": 24, "sliding_window": 8, "layer_types": _LAYERS},
    "qwen3_moe": {**_EXPERTS, "num_experts": 6, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts_per_tok": 2, "num_experts": 6},
    "mixtral": {"num_experts_per_tok": 2, "num_local_experts": 6, "sliding_window": None},
    "granitemoe": {"num_experts_per_tok": 2, "num_local_experts": 6},
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,  # the first layer has no experts
        "routed_scaling_factor": 1.5,
        "use_qk_norm": True,
    },
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe_text": {
        **_HYBRID,
        **_EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 40,
    },
    "cohere2": {"logit_scale": 0.3, "sliding_window": 8, "layer_types": _LAYERS},
    "phi3": {  # longrope, with long factors from 17 positions on, on three quarters of a head
        "original_max_position_embeddings": 16,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1 + 0.1 * i for i in range(12)],
            "long_factor": [2 + 0.5 * i for i in range(12)],
        },
    },
}


def make_model(
    folder: Path,
    family: str,
    *,
    tied: bool,
    seed: int = 0,
    kind: Any = transformers.AutoModelForCausalLM,
    **overrides: Any,
) -> Path:
    """A two-layer model with odd sizes (rows that no number of ranks divides), biases where the
    family has them, and a
    tokenizer. `kind`: the auto class that makes it of the config."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        # larger than usual: near-uniform distributions would hide a wrong weight
        "initializer_range": 0.1,
        **overrides,
    }
    if family not in (
        *("qwen3", "llama", "mistral", "glm4", "gemma2", "gemma3_text", "qwen3_moe", "glm4_moe"),
        *HYBRIDS,
    ):
        del sizes["head_dim"]
        sizes["hidden_size"] = 128  # from which most take the size of a head
    if family == "granite":  # the scalings that set it apart, away from 1
        sizes |= {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.7,
        }
    sizes = {**sizes, **_APART.get(family, {}), **overrides}
    config = CONFIG_MAPPING[family](**sizes)
    model = kind.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        constants = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
        for name, parameter in [*model.named_parameters(), *constants]:
            if parameter.ndim == 1:  # norms at 1 and biases at 0 would hide one that was not loaded
                parameter.add_(
                    0.1
                    * torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(len(name))
                    )
                )
    model.save_pretrained(folder)
    return folder


def make_multimodal(folder: Path, family: str, seed: int = 0) -> Path:
    """A model of text and images whose text part is `family`, a hybrid, as Qwen3.5 is released."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    text = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 256,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.1,
        **_APART[family],
    }
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 128,
        "out_hidden_size": 64,
        "num_position_embeddings": 64,
    }
    config = CONFIG_MAPPING[family.removesuffix("_text")](
        text_config=text, vision_config=vision, image_token_id=90, video_token_id=91
    )
    kind = transformers.AutoModelForImageTextToText
    kind.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def write_config(folder: Path, model: Path, /, **sections: Any) -> Path:
    """A small, complete config over `model` and the demo's kind of data; `sections` are merged over
    it."""
    data = folder / "train.jsonl"
    if not data.exists():
        rows = [
            {"prompt": f"{a},{b}={a + b}:", "nums": [a, b], "target": a + b, "answer": f"{a}+{b}"}
            for a in range(1, 9)
            for b in range(1, 5)
        ]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tree: dict[str, Any] = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": str(data), "max_prompt_tokens": 16},
        "rollout": {"num_prompts_per_step": 4, "group_size": 4, "max_completion_tokens": 12},
        "rewards": [{"name": "format", "args": {"pattern": "[0-9].*"}}],
        "optimizer": {"lr": 1e-2},
        "training": {"num_steps": 2, "max_tokens_per_micro_batch": 64},
    }
    for section, value in sections.items():
        if isinstance(value, dict):
            tree[section] = {**tree.get(section, {}), **value}
        else:
            tree[section] = value
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def make_reward_model(
    folder: Path, family: str, *, num_labels: int = 1, seed: int = 0, **overrides: Any
) -> Path:
    """As make_model, with a head for sequence classification."""
    kind = transformers.AutoModelForSequenceClassification
    return make_model(
        folder, family, tied=False, seed=seed, kind=kind, num_labels=num_labels, **overrides
    )
