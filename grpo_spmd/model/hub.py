"""A model of the Hugging Face hub: which of its files are fetched, and the hub's refusals in one line. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError

# Weights as safetensors, configs, tokenizers, chat templates: nothing that is a program, or that unpickles. Who fetches
# early and who runs must agree on them: without network the library gives a model out only where all files that are
# asked for are there.
FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def fetch(repo: str) -> Path:
    """The model's folder in the cache, once its files are there. Raises ConfigError."""
    return Path(_snapshot(repo))


def files_at_hub(repo: str) -> list[Any]:
    """A huggingface_hub.DryRunFileInfo for each file that `fetch` would bring. Raises ConfigError."""
    files: list[Any] = _snapshot(repo, dry_run=True)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise ConfigError(f"model.path: {repo} has no .safetensors at the hub, and no other weights are read")
    return files


def check_data_set(repo: str, key: str) -> None:
    """Raises ConfigError, which names the `key`, where the hub does not answer, or knows no such data set: at once,
    where the library that loads it would try for half a minute."""
    from huggingface_hub import dataset_info

    try:
        dataset_info(repo)
    except Exception as error:
        raise ConfigError(f"{key}: cannot fetch {repo}: {_in_one_line(error)}") from None


def _snapshot(repo: str, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, allow_patterns=list(FILES), **options)
    except Exception as error:  # of the library, of its HTTP client, and OSError of a full disk
        raise ConfigError(f"model.path: cannot fetch {repo}: {_in_one_line(error)}") from None


def _in_one_line(error: Exception) -> str:
    from huggingface_hub import constants, errors

    wrapped = isinstance(error, errors.DryRunError | errors.LocalEntryNotFoundError | errors.IncompleteSnapshotError)
    cause = error.__cause__ if wrapped else error
    elsewhere = "python -m grpo_spmd.prefetch fetches it where there is network"
    if isinstance(cause, errors.GatedRepoError):
        return "it is gated: ask for access on its page, then `hf auth login`, or set HF_TOKEN"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return "the hub knows nothing of that name, or it is private: `hf auth login`, or set HF_TOKEN"
    if cause is None or isinstance(cause, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and the cache (HF_HOME) has not all of it; {elsewhere}"
    first = next(iter(str(cause).splitlines()), "") or type(cause).__name__
    if isinstance(cause, errors.HfHubHTTPError | OSError | ValueError):  # a name that cannot be, a full disk
        return first
    return f"{constants.ENDPOINT} does not answer ({first}); {elsewhere}"
