"""Command lines and messages without secrets, for files that are shown around."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from grpo_spmd.config.dump import SECRET, SECRET_NAME
from grpo_spmd.config.schema import Config, RewardConfig

_LONGEST, _MOST = 4_000, 1_000  # characters of an argument, arguments
_NAMED = re.compile(r"""(?<![\w.-])([\w.-]++)(?:\s*=\s*|["']?\s*:\s+|["']\s*:\s*)""")  # name=, name: or "name":
_VALUE = re.compile(r"""[{\[].*|"[^"]*"|'[^']*'|[^\s,;&}\]]+""", re.DOTALL)  # of a mapping or a list all that follows


def redacted(text: str) -> str:
    """Without values under names like api_key, unless they are declared keys that only sound so (data.prompt_key), and
    without all that follows a secret that is known by its form."""
    parts, place = list[str](), 0
    for named in _NAMED.finditer(text):
        value = _VALUE.match(text, named.end())
        if value is not None and named.start() >= place and _is_secret(named[1], value[0]):
            parts += [text[place : named.end()], "<redacted>"]
            place = value.end()
    shown = "".join([*parts, text[place:]])
    return f"{shown[: found.start()]}<redacted>" if (found := SECRET.search(shown)) else shown


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line, over-long ones cut; the secret of `--api-key VALUE` is an argument of its own."""
    shown, before = list[str](), ""
    for argument in arguments[:_MOST]:
        is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
        shown.append("<redacted>" if is_value and _is_secret(before, argument) else redacted(argument[:_LONGEST]))
        before = argument
    return shown


def _is_secret(name: str, value: str) -> bool:
    parts = name.strip("-").split(".")
    is_named = any(SECRET_NAME.search(part) and part not in _declared() for part in parts)
    return is_named and not (name.endswith("tokens") and re.fullmatch(r"[\d.e+-]+", value))


@functools.cache
def _declared() -> set[str]:
    """Names of all keys of the config."""
    names, waiting = set[str](), [Config, RewardConfig]
    while waiting:
        section = waiting.pop()
        names |= {field.name for field in fields(section)}
        waiting += [hint for hint in get_type_hints(section).values() if isinstance(hint, type) and is_dataclass(hint)]
    return names
