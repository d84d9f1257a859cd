"""What config.json and the headers of safetensors files say of a model."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.model.dimensions import Dimensions, dimensions
from grpo_spmd.untrusted import read_header, read_index, read_model_config

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
        return sum(math.prod(shape) for name, shape in self.shapes.items() if not re.search(r"\.layers\.\d+\.", name))

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
    shapes: Shapes = {"model.embed_tokens.weight": (sizes.vocabulary, hidden), "model.norm.weight": (hidden,)}
    attention_bias, mlp_bias = family == "qwen2" or config.get("attention_bias"), config.get("mlp_bias")
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
            shapes |= {f"{layer}.{name}.weight": (rows, columns)} | ({f"{layer}.{name}.bias": (rows,)} if bias else {})
        shapes |= {f"{layer}.{name}.weight": (size,) for name, size in norms.items()}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (sizes.vocabulary, hidden)
    return shapes
