"""Finds our config keys for the keys of other trainers, by the table in aliases.tsv.

The table is read only when a config has an unknown key.
"""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path
from typing import NamedTuple

from grpo_spmd.config.describe import flat

# Last parts of other trainers' keys that are ambiguous without the section before them.
_AMBIGUOUS_NAME = re.compile(r"name|path|enable|interval|type|len|dataset|env|freq|offline|steps")


class Alias(NamedTuple):
    """One row of the table: the names of a setting in another trainer, and our keys for it."""

    trainer: str
    names: list[str]
    keys: list[str]  # our keys; empty if we have no such setting
    note: str  # how our setting differs; may be empty

    def __str__(self) -> str:
        target = f"here {', '.join(self.keys)}" if self.keys else "nothing here"
        return f"{target} ({self.note})" if self.note else target


@functools.cache
def read_table(name: str) -> list[list[str]]:
    """Returns the rows of a .tsv file of this folder; lines that begin with # are comments."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


@functools.cache
def read_aliases() -> list[Alias]:
    """Returns all rows of the table, in its order."""
    return [
        Alias(trainer, names.split(", "), keys.split(", ") if keys else [], note)
        for trainer, names, keys, note in read_table("aliases.tsv")
    ]


def translate_key(key: str, value: object = None) -> str | None:
    """Returns the error message for an unknown key that another trainer has, with our key for it.

    If `value` is a section, a key inside it may be the one that is found. Returns None if no
    trainer has the key."""
    # Keys inside the section come before the section, and longer suffixes before shorter ones,
    # because they are less ambiguous.
    for name in (*flat(value, key), key):
        for suffix in _suffixes(name):
            if line := _error_line(name, _find_aliases(suffix)):
                return line
    return None


def translate_last_part(key: str) -> str | None:
    """As `translate_key`, for a key without a section that is the last part of a key of another
    trainer: "train_files" is verl's data.train_files."""
    if "." in key or _AMBIGUOUS_NAME.fullmatch(key):
        return None
    return _error_line(key, _find_aliases(key.replace("-", "_"), by_last_part=True))


def translate_misspelt_key(key: str) -> str | None:
    """As `translate_key`, for a misspelt key of another trainer, such as "num_generation"."""
    last_name = key.rpartition(".")[2].replace("-", "_")
    names = {name for alias in read_aliases() for name in alias.names}
    for name in difflib.get_close_matches(last_name, names, n=1, cutoff=0.9):
        if line := translate_key(name):
            return f"{key}: unknown key; did you mean {line.replace(': unknown key', '', 1)}?"
    return None


def _suffixes(name: str) -> list[str]:
    """Returns the dotted name, then the name without its first section, without its first two, ...

    The name is normalized: no dash in front, "_" for "-", and no list index at the end.
    """
    names = re.sub(r"^-|(\.\d+)+$", "", name).replace("-", "_").split(".")
    return [".".join(names[start:]) for start in range(len(names))]


def find_alias(trainer: str, name: str) -> Alias | None:
    """Returns the trainer's row in the table that has `name`, or else the longest suffix of it."""
    for suffix in _suffixes(name):
        for alias in _find_aliases(suffix):
            if alias.trainer == trainer:
                return alias
    return None


def _find_aliases(name: str, *, by_last_part: bool = False) -> list[Alias]:
    """Returns for each trainer the first row that has this name, if there is one."""
    aliases: dict[str, Alias] = {}
    for alias in read_aliases():
        names = [n.rpartition(".")[2] for n in alias.names] if by_last_part else alias.names
        if name in names:
            aliases.setdefault(alias.trainer, alias)
    return list(aliases.values())


def _error_line(key: str, aliases: list[Alias]) -> str | None:
    """Returns the error message for an unknown key, None if `aliases` is empty. Trainers with the
    same translation share a clause."""
    trainers: dict[str, list[str]] = {}
    for alias in aliases:
        trainers.setdefault(str(alias), []).append(f"{alias.trainer}'s")
    clauses = [f"{' and '.join(names)} name: {target}" for target, names in trainers.items()]
    return f"{key}: unknown key, {'; '.join(clauses)}" if clauses else None
