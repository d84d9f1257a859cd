"""Named algorithms: the values that `algorithm: NAME` sets where file, command line and Python set
none.

A recipe has what defines the algorithm, not what depends on model, data and lengths (learning rate,
batch, buffers). recipes.yaml has them, each value with its source.

python -m grpo_spmd.config.recipes      prints the table of configs/README.md
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
    """A Recipe is the definition of one algorithm."""

    name: str  # as people write it, with its paper
    values: dict[str, Any]  # by dotted key
    yours: str = ""  # settings that belong to it and depend on your sizes
    needs: Sequence[str] = ()  # keys that only the user can set, and without which it cannot run


@functools.cache
def read_recipes() -> dict[str, Recipe]:
    """Returns the recipes of recipes.yaml by the name of the algorithm.

    It takes 10 ms, which a config without `algorithm` does not need.
    """
    entries = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Recipe(**entry) for name, entry in entries.items()}


def recipes_as_markdown() -> str:
    """Returns a table: the recipes, the keys that they set, and the keys left to the user."""
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
