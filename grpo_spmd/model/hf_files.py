"""Reads files of a model in Hugging Face's format: tokenizer, config, stop tokens, and which file
holds which tensor."""

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

_MAX_LINE = 300  # characters of another library's error that we quote
# The files to download: weights as safetensors, configs, tokenizers, chat templates. No programs,
# and nothing that is unpickled. Prefetch and run must ask for the same patterns: offline,
# huggingface_hub returns a cached model only if all requested files are there.
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def load_tokenizer(path: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> Any:
    """Returns the model's tokenizer. `chat_template_kwargs` are passed to its chat template at each
    call.

    Raises ConfigError if it cannot be loaded.
    """
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
