"""Recipes: the values that `algorithm: NAME` gives to keys which the user has not set.

A recipe has the values that define the algorithm, but not those that depend on model, data and
lengths (learning rate, batch size, buffers). recipes.yaml has the recipes, each value with its
source.

python -m grpo_spmd.config.recipes      prints the table of recipes in configs/README.md
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Algorithm = Literal[
    "grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce_pp", "max_rl", "opd", "ppo"
]


@dataclass(frozen=True)
class Recipe:
    """The definition of one algorithm."""

    name: str  # the algorithm's usual name, with its paper
    values: dict[str, Any]  # the values that it sets, by dotted key
    yours: str = ""  # text: further settings of the algorithm, which depend on the user's sizes
    needs: Sequence[str] = ()  # keys that the user has to set, or the algorithm cannot run


@functools.cache
def read_recipes() -> dict[str, Recipe]:
    """Returns the recipes of recipes.yaml by the name of the algorithm. This takes 10 ms, so it is
    called only for a config that names an algorithm."""
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Recipe(**entry) for name, entry in entries.items()}


def recipes_as_markdown() -> str:
    """Returns a Markdown table of the recipes, the keys that they set, and the keys left to the
    user."""
    lines = ["| `algorithm` | is | sets | yours to set |", "|---|---|---|---|"]
    for name, recipe in read_recipes().items():
        sections: dict[str, list[str]] = {}
        for key, value in recipe.values.items():
            section, _, name_in_section = key.partition(".")
            sections.setdefault(section, []).append(
                f"{name_in_section}: {value if isinstance(value, str) else json.dumps(value)}"
            )
        settings = "; ".join(
            f"`{section}: {{{', '.join(values)}}}`" for section, values in sections.items()
        )
        lines.append(f"| `{name}` | {recipe.name} | {settings} | {recipe.yours} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(recipes_as_markdown())
