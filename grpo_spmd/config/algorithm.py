"""The recipe of `algorithm: NAME` put below what a config says, and said where its values show."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from grpo_spmd.config.dump import flat
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.recipes import RECIPES
from grpo_spmd.config.schema import Config

FROM_RECIPE = "from algorithm:"  # begins the source of a value that a recipe gave


def recipe_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the algorithm that a config's tree names, by dotted key; {} where it names none. Raises
    ConfigError."""
    name = tree.get("algorithm")
    if isinstance(name, Mapping):  # verl's section
        from grpo_spmd.config.unknown_key import unknown_key

        raise ConfigError(unknown_key("algorithm", "", name))
    if name is None or str(name).strip().lower() in ("none", "null"):
        return {}
    if isinstance(name, str) and name in RECIPES:
        return RECIPES[name].values
    import difflib

    plain = {_plain(known): known for known in RECIPES}
    close = difflib.get_close_matches(_plain(str(name)), plain, n=1, cutoff=0.6)
    meant = f"; did you mean {plain[close[0]]}?" if close else ""
    raise ConfigError(f"algorithm must be one of {', '.join(RECIPES)}; got {name!r}{meant}")


def _plain(name: str) -> str:
    """REINFORCE++, reinforce_plus_plus and reinforce_pp are one."""
    spelt = name.lower().replace("++", "pp").replace("plus_plus", "pp").replace("plusplus", "pp")
    return re.sub(r"[^a-z0-9]", "", spelt)


def with_recipe(tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with the recipe's values below its own; `tree` itself stays as it is."""
    filled = dict(tree)
    for key, value in recipe.items():
        section, _, name = key.partition(".")
        there = filled.get(section)
        there = {} if there in (None, "None", "null") else there
        if isinstance(there, Mapping):  # else it is refused as no section
            filled[section] = {name: value} | dict(there)
    return filled


def check_needs(config: Config) -> None:
    """Raises ConfigError where the algorithm needs a key that is not set."""
    for key in RECIPES[config.algorithm].needs if config.algorithm is not None else ():
        section, _, name = key.partition(".")
        if not getattr(getattr(config, section), name) and not (section == "teacher" and config.teacher.is_on):
            raise ConfigError(f"algorithm: {config.algorithm} needs {key}; set it to a model's folder or hub id")


def of_recipe(error: str, tree: Mapping[str, Any], recipe: Mapping[str, Any]) -> str:
    """What is added to a rule's line that names keys which nobody wrote: the algorithm sets them."""
    given = flat(dict(tree))
    named = [key for key in recipe if key not in given and re.search(rf"\b{re.escape(key)}\b", error)]
    values = ", ".join(f"{key}: {json.dumps(recipe[key])}" for key in named)
    return f" (algorithm: {tree['algorithm']} sets {values})" if named else ""


def source_of(key: str, value: Any, source: str, tree: Mapping[str, Any]) -> str:
    """Where a value of the config that `tree` makes came from; `source`: where it was given, or "default"."""
    if key not in (recipe := recipe_of(tree)):
        return source
    origin = f"{FROM_RECIPE} {tree['algorithm']}"
    if source == "default":
        return origin
    return source if recipe[key] == value else f"{source}, in place of {json.dumps(recipe[key])} {origin}"
