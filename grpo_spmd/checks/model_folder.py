"""Early checks of a model folder: config.json, headers of safetensors, the tokenizer's files.

The files come from other people: they are read with bounds, and nothing in them is executed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.checks.data import load_tokenizer_file
from grpo_spmd.checks.memory import engine_tokens, kv_itemsize
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.files import (
    UntrustedError,
    read_header,
    read_index,
    read_json,
    read_model_config,
    read_stop_tokens,
)
from grpo_spmd.model.config_json import (
    Shapes,
    dimensions,
    has_recurrent_layers,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    local_folder,
    refuse_by_config,
    shapes_from_config,
    shapes_from_headers,
    text_config,
)
from grpo_spmd.observe.cards import cpu_cache_bytes, host_bytes
from grpo_spmd.records import Fields

_COPY_AGAIN = "copy or download it again"
_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_HUB_ADDRESS = r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)"
_TOKENIZER_FILES = ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "tekken*")
# Model types that transformers lists as causal LMs, but that cannot attend to packed rows: encoders
# with a head, and recurrent models.
_ENCODERS = (
    r"(.*-)?(bert|bert-generation|big_bird|camembert|data2vec-text|electra|ernie|rembert|"
    r"(.*)?roberta(-.*)?|xmod)"
)
# Keys without which the shapes of these families cannot be computed; config.json may omit them.
_DEFAULT_SIZES = {
    "mistral": ("num_key_value_heads",),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
_RECURRENT = r".*mamba.*|rwkv|xlstm|recurrent_gemma"


def check_model(config: Config, *, to_run: bool = True) -> Path | None:
    """Returns the folder of `model.path` after checking it. Raises ConfigError.

    Returns None for a hub id that is not in the cache yet. `to_run`: the run is about to start, so
    the hub is asked whether such a model exists, and limits of vLLM on this machine are checked.
    """
    path = config.model.path
    folder = find_model_folder(path, "model.path", to_run=to_run)
    if folder is None:
        return None
    try:
        model, shapes = _read_model_files(folder, path)
    except (UntrustedError, OSError) as error:
        problem = str(error)
        if isinstance(error, OSError):
            problem = f"cannot read {error.filename}: {error.strerror}"
        remedy = "" if "; " in problem else f"; {_COPY_AGAIN}"
        raise ConfigError(f"model.path: {problem}{remedy}") from None
    # Without these files transformers would make up a tokenizer.
    if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {folder} holds no tokenizer; copy tokenizer.json and "
            f"tokenizer_config.json of its base model there, or {_COPY_AGAIN}"
        )
    check_model_sizes(config, model)
    # A rejected draft would stay in the recurrent state.
    if config.rollout.speculation and has_recurrent_layers(model):
        raise ConfigError(
            f"rollout.speculation: {path} has recurrent layers, whose state cannot take back a "
            "draft; leave it out"
        )
    if to_run:
        _check_cpu_engine(config, model)
    expected_shapes = shapes_from_config(model)
    # If config.json leaves out one of these keys, the shapes are not known and not compared.
    defaults = _DEFAULT_SIZES.get(str(model["model_type"]), ())
    if all(isinstance(model.get(name), int) for name in defaults):
        _check_shapes(folder, shapes, expected_shapes)
    # If the family's shapes are not known, a bias of lm_head is noticed only here.
    if "lm_head.bias" in shapes and not expected_shapes:
        raise ConfigError(
            f"model.path: {path} has a bias in its lm_head, which the chunked logprobs do not "
            "support"
        )
    _check_lora(config.model.lora, shapes)
    _check_tokenizer(folder, _embedding_rows(shapes, model))
    return folder


def _read_model_files(folder: Path, path: str) -> tuple[Fields, Shapes]:
    """Returns config.json and the shapes of all tensors.

    Raises UntrustedError, OSError or ConfigError.
    """
    # Reading a fifo could wait for ever, and reading a device may never end.
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UntrustedError(f"{file} is neither a file nor a folder")
    contents = read_model_config(folder)
    refuse_by_config(contents, path)
    model = text_config(contents)
    _check_type(str(model["model_type"]), path)
    read_stop_tokens(folder)
    shapes = _read_shapes(folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            read_json(folder / name, follow=True)
    return model, shapes


def num_embeddings(folder: Path) -> int | None:
    """Returns how many tokens the model in `folder` has embeddings for; None if it is not known.

    `check_model` must have passed the folder before."""
    return _embedding_rows(_read_shapes(folder), text_config(read_model_config(folder)))


def _check_type(model_type: str, path: str) -> None:
    """Raises ConfigError if no causal LM of this `model_type` can be trained."""
    for pattern, problem in (
        (_ENCODERS, "an encoder, of which no text is sampled"),
        (_RECURRENT, "recurrent"),
    ):
        if re.fullmatch(pattern, model_type):
            raise ConfigError(
                f"model.path: {path} is {problem} (model_type {model_type}); only causal "
                "attention trains"
            )
    # transformers' own list of causal LMs, read as text: importing it takes seconds.
    text = read_package_file("transformers", "models/auto/modeling_auto.py")
    mapping = re.search(
        r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)\n\)", text, re.DOTALL
    )
    if mapping and f'("{model_type}",' not in mapping[1]:
        version = importlib.metadata.version("transformers")
        raise ConfigError(
            f"model.path: {path}: transformers {version} has no causal LM of model_type "
            f"{model_type}; a newer transformers may, if it is not another kind of model"
        )


def read_package_file(package: str, path: str) -> str:
    """Returns the text of a file of an installed package; "" if there is none."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return ""
    file = Path(spec.origin).parent / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


def _check_cpu_engine(config: Config, model: Fields) -> None:
    """Raises ConfigError for what vLLM's build for the CPU cannot do, if that build is installed.

    The build lacks some head sizes, and its KV cache cannot be larger than the host's memory.
    """
    if importlib.util.find_spec("vllm") is None or version_of("vllm") is not None:
        return
    text = read_package_file("vllm", "v1/attention/backends/cpu_attn.py")
    source = re.search(r"def get_supported_head_sizes\(.*?return \[([\d,\s]+)\]", text, re.DOTALL)
    head_sizes = [int(size) for size in re.findall(r"\d+", source[1])] if source else []
    sizes = dimensions(model)
    if sizes is not None and head_sizes and sizes.head_dim not in head_sizes:
        raise ConfigError(
            f"model.path: {config.model.path} has heads of {sizes.head_dim}, and vLLM on a CPU "
            f"only of {head_sizes}; train it on a GPU"
        )
    cache_bytes = config.rollout.engine.get("kv_cache_memory_bytes")
    if isinstance(cache_bytes, int) and cache_bytes > host_bytes():
        raise ConfigError(
            f"rollout.engine.kv_cache_memory_bytes: {cache_bytes:,} is more than this host has "
            f"({host_bytes():,}); it counts for each rank"
        )
    needed, limit = _rollout_cache_bytes(config, model), max(64 << 20, cpu_cache_bytes())
    if needed > limit and cache_bytes is None:
        raise ConfigError(
            f"rollout.max_completion_tokens: one rollout of {engine_tokens(config)} tokens "
            f"takes {needed >> 20:,} MiB of KV cache, and on a CPU an engine gets "
            f"{limit >> 20:,} MiB, 1/8 of the host's memory over its ranks; shorten the "
            "rollouts, take fewer ranks, or set rollout.engine.kv_cache_memory_bytes"
        )


def _read_shapes(folder: Path) -> Shapes:
    """Returns the shapes of all tensors by the files' headers, after comparing these with the
    index.

    Raises UntrustedError or OSError.
    """
    index = read_index(folder)
    files = sorted({*folder.glob("*.safetensors"), *(index or {}).values()})
    if not files:
        formats = (".bin", ".pth", ".gguf")
        names = sorted(path.name for path in folder.iterdir() if path.suffix in formats)
        remedy = _COPY_AGAIN
        if names:
            remedy = (
                f"{names[0]} is of another format, which is not read here: take the model's "
                "checkpoint in transformers' format, from the hub id without GGUF, or load it with "
                "transformers once, where you trust it, and write it by save_pretrained"
            )
        raise UntrustedError(f"{folder} holds no .safetensors file; {remedy}")
    headers = {file: read_header(file) for file in files}
    # A mixture of two downloads would load without an error.
    for name, file in (index or {}).items():
        if name not in headers[file]:
            holder = next((path.name for path, header in headers.items() if name in header), None)
            hint = f"it is in {holder}" if holder else "no file has it"
            raise UntrustedError(
                f"{folder}: the index has {name} in {file.name}, whose header lacks it "
                f"({hint}): files of two downloads; {_COPY_AGAIN}"
            )
    # The tensors that the policy reads, which may be in fewer files.
    shapes = shapes_from_headers(folder, tied=False)
    for header in headers.values():
        for name, entry in header.items():
            # Quantised weights cannot train.
            is_quantised = name.endswith(".weight") and re.match("F8|F4|F6|I|U", entry["dtype"])
            if name in shapes and is_quantised:
                raise UntrustedError(
                    f"{folder} holds {name} as {entry['dtype']}: it is quantised; train the "
                    "checkpoint in bfloat16 or float32 instead"
                )
    return shapes


def _check_shapes(folder: Path, shapes: Shapes, expected_shapes: Shapes) -> None:
    """Raises ConfigError if a tensor is missing, or has another shape than by config.json.

    The policy would refuse the same model, but only after the engine has started.
    """
    for name, shape in expected_shapes.items():
        if name not in shapes:
            raise ConfigError(
                f"model.path: {folder} has no tensor {name}; its files begin with "
                f"{min(shapes, default='')}"
            )
        if shapes[name] != shape:
            raise ConfigError(
                f"model.path: {name} in {folder} has shape {list(shapes[name])}, and "
                f"config.json asks for {list(shape)}: weights and config are of two models"
            )


def _check_lora(lora: LoraConfig, shapes: Shapes) -> None:
    """Raises ConfigError if an entry of `target_modules` names no linear layer of the model."""
    if not lora.rank or lora.target_modules == "all-linear":
        return
    # Only matrices in a numbered layer get adapters.
    layers = [
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if len(shape) == 2 and re.search(r"\.\d+\.", name)
    ]
    for target in lora.target_modules if layers else ():
        if not any(f".{name}".endswith(f".{target}") for name in layers):
            available = dict.fromkeys(name.rpartition(".")[2] for name in layers)
            raise ConfigError(
                f"model.lora.target_modules: {target!r} names no linear layer of the model; it "
                f"has {', '.join(available)}, and all-linear takes all"
            )


def _embedding_rows(shapes: Shapes, model: Fields) -> int | None:
    """Returns the number of rows of the input embedding, by the tensors' shapes or else by
    config.json (`model`); None if neither has it."""
    for name, shape in shapes.items():
        if re.search(r"(embed_tokens|wte|embed_in)\.weight$", name):
            return shape[0]
    size = model.get("vocab_size")
    return size if isinstance(size, int) else None


def _check_tokenizer(folder: Path, embeddings: int | None) -> None:
    """Raises ConfigError if a token of the vocabulary has no embedding.

    Added tokens are not checked, since they need an embedding only if a prompt contains them. Llama
    2's padding token, which was added to 32,000 others, is in no prompt."""
    file = folder / "tokenizer.json"
    if embeddings is None or not file.is_file():
        return
    size = load_tokenizer_file(file).get_vocab_size(with_added_tokens=False)
    if size > embeddings:
        raise ConfigError(
            f"model.path: its tokenizer has {size} tokens, and its embedding {embeddings} "
            f"rows: tokenizer.json is another model's; {_COPY_AGAIN}"
        )


def check_model_sizes(config: Config, model: Mapping[str, Any]) -> None:
    """Raises ConfigError if the model's sizes do not fit the config. `model` is config.json.

    rollout.tensor_parallel_size must divide the attention heads, and divide the KV heads or be a
    multiple of them. Sizes that config.json lacks are not checked.
    """
    max_tokens, positions = config.max_rollout_tokens, model.get("max_position_embeddings")
    # Beyond its positions a model raises no error, but gives nonsense.
    if isinstance(positions, int) and max_tokens > positions:
        prompt = config.data.max_prompt_tokens
        has_limit = config.environment.is_on and config.environment.max_tokens
        key = "environment.max_tokens" if has_limit else "rollout.max_completion_tokens"
        raise ConfigError(
            f"data.max_prompt_tokens ({prompt}) + {key} ({max_tokens - prompt}) "
            f"= {max_tokens}, but the model has {positions} positions; lower one of them"
        )
    size, heads = config.rollout.engine_ranks, model.get("num_attention_heads")
    rule = f"rollout.tensor_parallel_size ({size}) must divide the model's"
    # vLLM splits the heads over an engine's ranks, and repeats KV heads if there are fewer.
    if isinstance(heads, int) and heads % size:
        raise ConfigError(f"{rule} {heads} attention heads")
    kv_heads = model.get("num_key_value_heads")
    if isinstance(kv_heads, int) and max(kv_heads, size) % min(kv_heads, size):
        raise ConfigError(f"{rule} {kv_heads} key-value heads, or be a multiple of them")
    _check_slices(config, model)
    cache_bytes = config.rollout.engine.get("kv_cache_memory_bytes")
    needed = _rollout_cache_bytes(config, model)
    if isinstance(cache_bytes, int) and cache_bytes < needed:
        raise ConfigError(
            f"rollout.engine.kv_cache_memory_bytes: {cache_bytes:,} hold no rollout of "
            f"{engine_tokens(config)} tokens, which takes {needed:,}; raise it, or shorten the "
            "rollouts"
        )


def _check_slices(config: Config, model: Mapping[str, Any]) -> None:
    """Raises ConfigError if ranks cannot share the model's micro-batches, each computing a slice of
    the tokens (model.sequence_parallel_size)."""
    size, heads = config.model.sequence_parallel_size, model.get("num_attention_heads")
    if size == 1:
        return
    key = f"model.sequence_parallel_size ({size})"
    if isinstance(heads, int) and heads % size:
        raise ConfigError(f"{key} must divide the model's {heads} attention heads")
    if has_recurrent_layers(model):
        raise ConfigError(f"{key}: recurrent layers do not run on slices of a row; set it to 1")
    if config.model.router_replay and model.get("num_experts_per_tok"):
        raise ConfigError(
            f"{key}: routes are not replayed on slices of a row; set it to 1, or "
            "model.router_replay: false"
        )


def _rollout_cache_bytes(config: Config, model: Mapping[str, Any]) -> int:
    """Returns the bytes of KV cache on a rank for the engine's longest text; 0 if unknown."""
    sizes = dimensions(model)
    # With a sliding window the cache needs less than the whole text.
    if sizes is None or isinstance(model.get("sliding_window"), int):
        return 0
    ranks = config.rollout.engine_ranks
    token = kv_bytes_per_token(sizes, kv_itemsize(config), ranks)
    return token * engine_tokens(config) + kv_bytes_per_sequence(sizes, ranks)


def version_of(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


# Where a model is


def find_model_folder(
    path: str, key: str, *, to_run: bool, revision: str | None = None
) -> Path | None:
    """Returns the folder of a model, by its path or hub id. Raises ConfigError, which names `key`.

    Returns None for a hub id that is not in the cache yet. `to_run`: the run is about to start, so
    the hub is asked whether such a model exists."""
    folder = Path(path)
    if not folder.is_dir():
        # A path whose first folder exists is meant as a path, not as a hub id.
        if not re.fullmatch(_HUB_NAME, path) or Path(folder.parts[0]).exists():
            raise ConfigError(f"{key}: {_explain_no_folder(path)}")
        cached = local_folder(path, revision)
        if cached is None or not _has_weights(cached):
            if to_run:
                check_reachable("models", path, key)
            return None
        folder = cached
    try:
        (folder / "config.json").stat()
    except OSError as error:
        raise ConfigError(
            f"{key}: cannot read {error.filename}: "
            f"{error.strerror}{_explain_no_config(folder, key)}"
        ) from None
    return folder


def folder_with_config(path: str, key: str, revision: str | None = None) -> Path:
    """Returns the folder of a model of which only config.json is needed. Raises ConfigError."""
    folder = local_folder(path, revision)
    if folder is None or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{key}: there is no config.json of {path} here; hf download {path} config.json"
        )
    return folder


def _explain_no_folder(path: str) -> str:
    """Returns why `path` is neither a folder nor a hub id, and what to give instead."""
    folder = Path(path)
    hub_address = re.match(_HUB_ADDRESS, path)
    if hub_address:
        return f"{path} is an address; give the hub id alone: {hub_address[1]}"
    if "://" in path:
        return (
            f"{path} is an address, and only folders and hub ids (organisation/name) are read; "
            "copy it to this host"
        )
    if folder.is_file():
        is_config = folder.name == "config.json"
        hint = f"give its folder ({folder.parent})" if is_config else "a model is a folder"
        return f"there is no folder {path}: it is a file; {hint}"
    return (
        f"there is no folder {folder}{path_remark(folder)}, and it is no hub id (organisation/name)"
    )


# What a folder without config.json may be: a pattern of a file in it, and what to do. {0} is the
# last file that matches.
_OTHER_FOLDERS = (
    (
        "checkpoints/step_*",
        "it is a run's folder: `python -m grpo_spmd.export {0} OUT` writes the folder of its "
        "newest model (of adapters with --merge)",
    ),
    (
        "manifest.json",
        "it is a run's checkpoint: `python -m grpo_spmd.export {0.parent} OUT` writes a model's "
        "folder (of adapters with --merge)",
    ),
    (
        "adapter_config.json",
        "it is an adapter: `python -m grpo_spmd.export --merge` puts it into its base model",
    ),
    ("*/config.json", "{0.parent} has one"),
)


def _explain_no_config(folder: Path, key: str) -> str:
    """Returns what a folder without config.json is, if that can be seen, and the remedy."""
    if cached := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.name):
        hub_id = f"{cached[1]}/{cached[2]}"
        return f"; it is a folder of the hub's cache: {key}={hub_id} finds what is in it"
    for pattern, remedy in _OTHER_FOLDERS:
        if matches := sorted(folder.glob(pattern)):
            return f"; {remedy.format(matches[-1])}"
    return "; a model's folder has one: save_pretrained or `hf download` wrote it"


def _has_weights(folder: Path) -> bool:
    """Returns True if the cache has the whole model, not only the files that the planner needs."""
    try:
        files = [*(read_index(folder) or {}).values()] or list(folder.glob("*.safetensors"))
    except (UntrustedError, OSError):
        # check_model will say what is wrong.
        return True
    return bool(files) and all(file.is_file() for file in files)
