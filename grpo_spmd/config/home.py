"""Paths of a config: `~` is the home folder, and one that is relative is relative to the working folder. Variables
($SCRATCH) are left to the shell, which expands them on the command line: a config alone would mean another folder to
each user."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config

_OF_REWARDS = ("function", "judge", "model", "template")


def with_home(config: Config) -> Config:
    """`~` and `~user` at the start of each path replaced."""
    for name, text in (
        ("run_dir", config.run_dir),
        ("model.path", config.model.path),
        ("checkpoint.resume", config.checkpoint.resume),
        ("critic.path", config.critic.path or ""),
        *((f"teacher.path.{name}".removesuffix("."), path) for name, path in config.teacher.paths.items()),
        *((f"rewards.{n}.{key}", getattr(r, key) or "") for n, r in enumerate(config.rewards) for key in _OF_REWARDS),
    ):
        _check_path(name, text)
    at_home, replace = os.path.expanduser, dataclasses.replace
    sets = config.data.eval
    evaluated = at_home(sets) if isinstance(sets, str) else {name: at_home(sets[name]) for name in sets}
    if os.path.realpath(at_home(config.run_dir)) == os.path.realpath(at_home(config.model.path)):
        raise ConfigError(f"run_dir: {config.run_dir} is the folder of model.path; a run has a folder of its own")
    taught_by = config.teacher.path
    teachers = at_home(taught_by) if isinstance(taught_by, str) else {n: at_home(p) for n, p in taught_by.items()}
    return replace(
        config,
        teacher=replace(config.teacher, path=teachers),
        critic=replace(config.critic, path=config.critic.path and at_home(config.critic.path)),
        run_dir=at_home(config.run_dir),
        model=replace(config.model, path=at_home(config.model.path)),
        data=replace(config.data, train=at_home(config.data.train), eval=evaluated),
        rewards=tuple(
            replace(r, **{k: p and at_home(p) for k in _OF_REWARDS for p in [getattr(r, k)]}) for r in config.rewards
        ),
        checkpoint=replace(config.checkpoint, resume=at_home(config.checkpoint.resume)),
    )


def _check_path(name: str, text: str) -> None:
    """What names another place than it says, or none."""
    parts, expanded = text.split("/"), os.path.expanduser(text)
    if len(os.fsencode(text)) > _MOST_BYTES or any(len(os.fsencode(part)) > _MOST_OF_A_NAME for part in parts):
        most = f"a path has {_MOST_BYTES} bytes at the most, and a name in it {_MOST_OF_A_NAME}"
        raise ConfigError(f"{name}: {text[:40]}... is too long for a path: {most}")
    if (text[:1], text[-1:]) in _CURLY:
        raise ConfigError(f"{name}: {text} has the quotes of a text processor around it; write it without")
    if name != "run_dir":
        return
    if re.match(r"[a-zA-Z][\w+.-]*://", text):
        raise ConfigError(f"{name}: {text} is a URL, and checkpoints are written to a folder; mount it, and name that")
    if re.search(r"\$[{\w]", text):
        how = "give it on the command line, where the shell does"
        raise ConfigError(f"{name}: {text}: variables are not expanded in a config: {how}")
    if expanded.startswith("~"):
        user = parts[0].removeprefix("~")
        raise ConfigError(f"{name}: {text}: there is no user {user or 'with a home folder'}; name the folder itself")


_MOST_BYTES, _MOST_OF_A_NAME = 4000, 255
_CURLY = {("\u201c", "\u201d"), ("\u2018", "\u2019"), ("\u201e", "\u201c")}


def looked_for(path: Path) -> str:
    """Of a path that is not there, in brackets, where it was looked for, if the path itself does not say so."""
    if os.path.exists(path):
        return ""
    if "$" in str(path):
        return " (variables are not expanded in a config: give it on the command line, where the shell does)"
    if path.is_absolute():
        return ""
    try:
        return f" (below the working folder, {Path.cwd()})"
    except FileNotFoundError:
        return " (and the working folder itself is gone: cd to it again)"
