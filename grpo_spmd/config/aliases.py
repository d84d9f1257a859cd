"""Translates config keys of other trainers into ours. aliases.tsv has the table.

The table is read only when an unknown key is met.
"""

from __future__ import annotations

import difflib
import functools
import re
from pathlib import Path
from typing import NamedTuple

from grpo_spmd.config.describe import flat

# Last parts of their names that say too little without the section before them.
_AMBIGUOUS_NAME = re.compile(r"name|path|enable|interval|type|len|dataset|env|freq|offline|steps")


class Alias(NamedTuple):
    """An Alias is one row of the table: names in another trainer, and our keys for them."""

    trainer: str
    names: list[str]
    keys: list[str]  # ours; empty: there is no such setting here
    note: str  # what differs; may be empty

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
    """Returns the error line for an unknown key, or for a key inside the section `value`, that some
    trainer knows; None if no trainer knows it."""
    # A key inside the section says more than the section; a longer suffix more than a shorter one.
    for name in (*flat(value, key), key):
        for suffix in _suffixes(name):
            if line := _error_line(name, _find_aliases(suffix)):
                return line
    return None


def translate_last_part(key: str) -> str | None:
    """Does the same for a key without a section, by the last part of their names: "train_files" is
    verl's data.train_files."""
    if "." in key or _AMBIGUOUS_NAME.fullmatch(key):
        return None
    return _error_line(key, _find_aliases(key.replace("-", "_"), by_last_part=True))


def translate_misspelt_key(key: str) -> str | None:
    """Does the same for a key that is nearly one of their names (num_generation)."""
    last_name = key.rpartition(".")[2].replace("-", "_")
    names = {name for alias in read_aliases() for name in alias.names}
    for name in difflib.get_close_matches(last_name, names, n=1, cutoff=0.9):
        if line := translate_key(name):
            return f"{key}: unknown key; did you mean {line.replace(': unknown key', '', 1)}?"
    return None


def _suffixes(name: str) -> list[str]:
    """Returns the dotted name, and its ends without the first section, the first two, ...

    They are written as ours are: no dash in front, "_" for "-", and no index at the end.
    """
    names = re.sub(r"^-|(\.\d+)+$", "", name).replace("-", "_").split(".")
    return [".".join(names[start:]) for start in range(len(names))]


def find_alias(trainer: str, name: str) -> Alias | None:
    """Returns the row of a trainer that has this name, or the longest end of it."""
    for suffix in _suffixes(name):
        for alias in _find_aliases(suffix):
            if alias.trainer == trainer:
                return alias
    return None


def _find_aliases(name: str, *, by_last_part: bool = False) -> list[Alias]:
    """Returns the first row of each trainer that has this name."""
    aliases: dict[str, Alias] = {}
    for alias in read_aliases():
        names = [n.rpartition(".")[2] for n in alias.names] if by_last_part else alias.names
        if name in names:
            aliases.setdefault(alias.trainer, alias)
    return list(aliases.values())


def _error_line(key: str, aliases: list[Alias]) -> str | None:
    """Returns one line for all trainers; those that mean the same share a clause."""
    trainers: dict[str, list[str]] = {}
    for alias in aliases:
        trainers.setdefault(str(alias), []).append(f"{alias.trainer}'s")
    clauses = [f"{' and '.join(names)} name: {target}" for target, names in trainers.items()]
    return f"{key}: unknown key, {'; '.join(clauses)}" if clauses else None
