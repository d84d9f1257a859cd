"""Files of a model in Hugging Face's format: tokenizer, stop tokens, tensors by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from safetensors import safe_open

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.files import UntrustedError, read_index, read_model_config, read_stop_tokens


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer. Raises ConfigError where it cannot be loaded."""
    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises bare Exception; a damaged file any other
        raise ConfigError(
            f"model.path: cannot load a tokenizer from {path}: {_first_line(error)}"
        ) from None


def load_config(path: str) -> Any:
    """The model's config, never by code of its folder: where `trust_remote_code` is left out, transformers asks on
    stdin, and a "y" there runs that code. Raises ConfigError where it cannot be loaded."""
    try:
        if (folder := Path(path)).is_dir():
            read_model_config(
                folder
            )  # sizes out of all bounds would have the library count for hours
        return transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (
        Exception
    ) as error:  # OSError, ValueError, and the field checks of huggingface_hub, which are neither
        raise ConfigError(
            f"model.path: cannot load the config of {path}: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])


def stop_token_ids(path: str, tokenizer: Any) -> set[int]:
    """Token ids that end a completion: of generation_config.json, else of config.json, and the tokenizer's eos."""
    found: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    try:
        return found | (read_stop_tokens(checkpoint_folder(path)) or set())
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None


def checkpoint_folder(path: str, revision: str | None = None) -> Path:
    """A local folder with the model's safetensors; downloads them where `path` is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    return fetch(path, revision)


def tensor_files(folder: Path) -> dict[str, Path]:
    try:
        if (index := read_index(folder)) is not None:
            return index
    except (UntrustedError, OSError) as error:
        raise ConfigError(f"model.path: {error}") from None
    single = (
        folder / "model.safetensors"
    )  # beside it others may lie, which transformers reads as little
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {folder} holds no .safetensors file")
    where: dict[str, Path] = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            where |= dict.fromkeys(file.keys(), path)
    return where


# A model of the Hugging Face hub: which of its files are fetched. No torch.


# Weights as safetensors, configs, tokenizers, chat templates: nothing that is a program, or that unpickles. Who fetches
# early and who runs must agree on them: without network the library gives a model out only where all files that are
# asked for are there.
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def fetch(repo: str, revision: str | None = None) -> Path:
    """The model's folder in the cache, once its files are there. Raises ConfigError."""
    return Path(_snapshot(repo, revision=revision))


def files_at_hub(repo: str, revision: str | None = None) -> list[Any]:
    """A huggingface_hub.DryRunFileInfo for each file that `fetch` would bring. Raises ConfigError."""
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
        check_reachable(
            "models", repo, "model.path"
        )  # it knows better what is wrong with a name, or with the network
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"model.path: cannot fetch {repo}: {first}") from None
