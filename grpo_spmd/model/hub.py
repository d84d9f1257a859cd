"""A model of the Hugging Face hub: which of its files are fetched. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.hub import check_reachable

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
        raise ConfigError(f"model.path: {repo} has no .safetensors at the hub, and no other weights are read")
    return files


def _snapshot(repo: str, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(repo, allow_patterns=list(FILES), **options)
    except Exception as error:  # of the library, of its HTTP client, and OSError of a full disk
        check_reachable("models", repo, "model.path")  # it knows better what is wrong with a name, or with the network
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ConfigError(f"model.path: cannot fetch {repo}: {first}") from None
