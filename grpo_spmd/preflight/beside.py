"""Where a model is: the policy's, a reward model's, or a critic's; and what is there instead, where it is not."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.preflight.model_facts import local_folder
from grpo_spmd.untrusted import UntrustedError, read_index

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
    if found := re.match(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", path):
        return f"{path} is an address; give the hub id alone: {found[1]}"
    if "://" in path:
        return f"{path} is an address, and only folders and hub ids (organisation/name) are read; copy it to this host"
    if folder.is_file():
        hint = f"give its folder ({folder.parent})" if folder.name == "config.json" else "a model is a folder"
        return f"there is no folder {path}: it is a file; {hint}"
    return f"there is no folder {folder}{looked_for(folder)}, and it is no hub id (organisation/name)"


def _instead(folder: Path, key: str) -> str:
    """Where config.json is not there: what the folder is, if that shows."""
    if found := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", folder.name):
        return f"; it is a folder of the hub's cache: {key}={found[1]}/{found[2]} finds what is in it"
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
