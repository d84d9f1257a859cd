"""Files of a model in Hugging Face's format: tokenizer, config, stop tokens, tensors by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.files import (
    UntrustedError,
    read_header,
    read_index,
    read_model_config,
    read_stop_tokens,
)
from grpo_spmd.model.config_json import has_text_part

_MAX_LINE = 300  # characters of another library's error
# Weights as safetensors, configs, tokenizers, chat templates: nothing that is a program, or that
# unpickles. Prefetch and run must agree on them: without network the library gives a model out only
# if all files that are asked for are there.
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def load_tokenizer(path: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns the model's tokenizer, whose chat template always gets these variables.

    Raises ConfigError if it cannot be loaded.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception; a damaged file any other
        raise ConfigError(
            f"model.path: cannot load a tokenizer from {path}: {first_line(error)}"
        ) from None
    if chat_template_kwargs:
        # Bound here, so that no prompt, turn or judge can be rendered without them.
        tokenizer.apply_chat_template = partial(
            tokenizer.apply_chat_template, **chat_template_kwargs
        )
    return tokenizer


def load_config(path: str) -> Any:
    """Returns transformers' config of the model, or of its text part if that alone trains.

    Raises ConfigError if it cannot be loaded.
    Code of the model's folder never runs: without `trust_remote_code=False` transformers would ask
    on stdin, and a "y" there would run it."""
    try:
        folder = Path(path)
        # Sizes out of all bounds would have the library count for hours.
        if folder.is_dir():
            read_model_config(folder)
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    # OSError, ValueError, and the field checks of huggingface_hub, which are neither.
    except Exception as error:
        raise ConfigError(
            f"model.path: cannot load the config of {path}: {first_line(error)}"
        ) from None
    if has_text_part(config.to_dict()):
        config = config.get_text_config()
        config.name_or_path = path
    return config


def first_line(error: Exception) -> str:
    """Returns the first line in which an error of another library says something."""
    # pydantic's first line only counts its errors.
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

    They are those of generation_config.json, else of config.json, and the tokenizer's eos."""
    ids: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    try:
        return ids | (read_stop_tokens(checkpoint_folder(path)) or set())
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None


def checkpoint_folder(path: str, revision: str | None = None) -> Path:
    """Returns a local folder with the model's safetensors. Downloads them if `path` is a hub id."""
    return Path(path) if Path(path).is_dir() else fetch(path, revision)


def tensor_files(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor, by its name in the checkpoint."""
    try:
        index = read_index(folder)
        if index is not None:
            return index
        # Other files may lie beside this one. transformers does not read them either.
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        by_name = {name: path for path in files for name in read_header(path)}
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None
    if not by_name:
        raise ConfigError(f"model.path: {folder} holds no .safetensors file")
    return by_name


def fetch(repo: str, revision: str | None = None) -> Path:
    """Returns the folder of a hub model in the cache, with all its files. Raises ConfigError."""
    return Path(_snapshot(repo, revision=revision))


def files_at_hub(repo: str, revision: str | None = None) -> list[Any]:
    """Returns a huggingface_hub.DryRunFileInfo for each file that `fetch` would download.

    Raises ConfigError."""
    files: list[Any] = _snapshot(repo, revision=revision, dry_run=True)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ConfigError(
            f"model.path: {repo} has no .safetensors at the hub, and no other weights are read"
        )
    return files


def _snapshot(repo: str, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, allow_patterns=list(FILES), **options)
    except Exception as error:  # of the library, of its HTTP client, and OSError of a full disk
        # It raises a better message about a wrong name or the network.
        check_reachable("models", repo, "model.path")
        raise ConfigError(f"model.path: cannot fetch {repo}: {first_line(error)}") from None
