"""The line for a key that is not there. Loaded only when one is met."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from typing import Any

from grpo_spmd.config.aliases import known_by_last_part, known_closely, known_elsewhere
from grpo_spmd.config.coerce import REFUSED_KEYS, key_names
from grpo_spmd.config.dump import join_key
from grpo_spmd.config.schema import Config, RewardConfig

_LIKE, _LIKE_ELSEWHERE = 0.7, 0.85
_BESIDE = ("critic.",)


def unknown_key(full: str, where: str, value: Any) -> str:
    """Of the key `full` in section `where`: another trainer's name, the key that was meant, or that --help has all."""
    name = full.removeprefix(f"{where}.") if where else full
    if name in REFUSED_KEYS and where in ("", "rollout"):
        return f"{full}: {REFUSED_KEYS[name]}"
    if "." in name and (full in key_names(Config) or name.startswith("rewards.")):
        section, _, last = full.rpartition(".")
        return f"{full}: a key with a dot is for the command line; in the file write {section}: {{{last}: {value}}}"
    if said := known_elsewhere(full, value):
        return said
    if not _last_names(name) and (said := known_by_last_part(full)):
        return said
    if key := _meant(name, where, isinstance(value, dict)):
        return f"{full}: unknown key; did you mean {key}?"
    return known_closely(full) or f"{full}: unknown key; --help lists them all"


def _meant(name: str, where: str, is_section: bool) -> str | None:
    """A key of the same section with a name like it, else one of that name, or nearly, in another section."""
    known = key_names(Config)
    if where.startswith("rewards"):
        known = [join_key(where, field.name) for field in dataclasses.fields(RewardConfig)]
    sections = {key.rpartition(".")[0] for key in known}
    if not is_section:
        known = [key for key in known if key not in sections]
    inside = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == where}
    if like := _like(name, inside, _LIKE):
        return inside[like]
    by_last = {key.rpartition(".")[2]: key for key in known}
    like = name if name in by_last else _like(name, by_last, _LIKE_ELSEWHERE)
    found = keys_named(like, known)
    return found[0] if len(found) == 1 else None


def keys_named(name: str | None, known: Iterable[str]) -> list[str]:
    """Keys with this last part; where the policy and a model beside it have one, the policy's is meant."""
    found = [key for key in known if key.rpartition(".")[2] == name]
    return [key for key in found if not key.startswith(_BESIDE)] or found


def _like(name: str, names: Iterable[str], cutoff: float) -> str | None:
    """The nearest, but for one that means the opposite: max_lr is not min_lr."""
    near = difflib.get_close_matches(name, names := list(names), n=1, cutoff=cutoff)
    near = near or [known for known in names if cutoff == _LIKE and _is_cut_short(name, known)]
    return near[0] if near and _ends(near[0]) == _ends(name) else None


def _is_cut_short(one: str, other: str) -> bool:
    """temp is temperature, and lrate lr; lr_end is another thing than lr."""
    short, long = sorted((one, other), key=len)
    return long.startswith(short) and long[len(short) :].isalpha()


def _ends(name: str) -> list[str]:
    return re.findall(r"min|max|low|high", name)


def _last_names(name: str) -> list[str]:
    return [key for key in key_names(Config) if key.rpartition(".")[2] == name]
