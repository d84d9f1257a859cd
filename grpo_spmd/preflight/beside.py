"""Where a model beside the policy is: a reward model's folder, or a critic's."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.preflight.model_facts import local_folder

_HUB_NAME = r"[A-Za-z0-9][\w.-]*/[\w.-]+"


def folder_of(path: str, key: str, *, to_run: bool, revision: str | None = None) -> Path | None:
    """None for a name of the hub that is not in the cache yet, which is only asked for, and only `to_run`. Raises
    ConfigError under `key`."""
    if Path(path).is_dir():
        return Path(path)
    if not re.fullmatch(_HUB_NAME, path) or Path(Path(path).parts[0]).exists():
        what = f"there is no folder {path}{looked_for(Path(path))}, and it is no hub id (organisation/name)"
        raise ConfigError(f"{key}: {what}")
    cached = local_folder(path, revision)
    if cached is not None and any(cached.glob("*.safetensors")):
        return cached
    if to_run:
        check_reachable("models", path, key)
    return None
