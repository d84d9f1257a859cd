"""Paths of a config: `~` is the home folder, and one that is relative is relative to the working folder. Variables
($SCRATCH) are left to the shell, which expands them on the command line: a config alone would mean another folder to
each user."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from grpo_spmd.config.schema import Config


def with_home(config: Config) -> Config:
    """`~` and `~user` at the start of each path replaced."""
    at_home, replace = os.path.expanduser, dataclasses.replace
    sets = config.data.eval
    evaluated = at_home(sets) if isinstance(sets, str) else {name: at_home(sets[name]) for name in sets}
    return replace(
        config,
        run_dir=at_home(config.run_dir),
        model=replace(config.model, path=at_home(config.model.path)),
        data=replace(config.data, train=at_home(config.data.train), eval=evaluated),
        rewards=tuple(replace(each, function=each.function and at_home(each.function)) for each in config.rewards),
        checkpoint=replace(config.checkpoint, resume=at_home(config.checkpoint.resume)),
    )


def looked_for(path: Path) -> str:
    """Of a path that is not there, in brackets, where it was looked for, if the path itself does not say so."""
    if path.exists():
        return ""
    if "$" in str(path):
        return " (variables are not expanded in a config: give it on the command line, where the shell does)"
    return "" if path.is_absolute() else f" (below the working folder, {Path.cwd()})"
