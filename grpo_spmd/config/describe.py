"""Describes the config: its keys with their help texts, the recipes of `algorithm: NAME`, and the
values of a config with secrets removed.

A recipe has the values that `algorithm: NAME` gives to keys which the user has not set: those that
define the algorithm, but not those that depend on model, data and lengths (learning rate, batch
size, buffers). recipes.yaml has the recipes, each value with its source.

python -m grpo_spmd.config.describe      prints the tables of keys in configs/README.md
python -m grpo_spmd.config.describe recipes     prints the table in configs/ALGORITHMS.md
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, Union

import yaml

from grpo_spmd.config.schema import Config, RewardConfig


class KeyText(NamedTuple):
    """The texts that describe one config key."""

    name: str
    default: str  # as in YAML; "" if the key is required
    values: str  # type and bounds
    meaning: str


def describe_keys(columns: int = 80) -> str:
    """Returns the text about all keys for `--help`, in lines of at most `columns` characters."""
    lines = []
    for key in _key_texts(Config, ""):
        # Blanks around the bars let textwrap break a long list of words.
        values = key.values.replace("|", " | ")
        default = f"default {key.default}" if key.default else "required"
        head = f"{key.name}  ({values}; {default})"
        for text, indent in ((head, "  "), (key.meaning, "      ")):
            lines += textwrap.wrap(
                text,
                columns,
                initial_indent=indent,
                subsequent_indent="      ",
                break_on_hyphens=False,
                break_long_words=False,
            )
    return "\n".join(lines)


def keys_as_markdown() -> str:
    """Returns Markdown tables of all keys: first the keys without a section, then one table for
    each section."""
    lines = []
    section = None
    # The sort is stable, so it moves only the keys without a section, to the front.
    for key in sorted(_key_texts(Config, ""), key=lambda key: "." in key.name):
        heading = key.name.split(".")[0] if "." in key.name else "Without a section"
        if heading != section:
            section = heading
            lines += ["", f"### {heading}", "", "| key | default | value | meaning |"]
            lines.append("|---|---|---|---|")
        default = f"`{key.default}`" if key.default else "required"
        cells = (f"`{key.name}`", default, key.values, key.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


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
    entries = yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text(encoding="utf-8"))
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


UNIONS = (Union, types.UnionType)
_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def type_name(hint: Any) -> str:
    """Returns the description of a type and its bounds, in words for a user who writes YAML."""
    origin = typing.get_origin(hint)
    args = typing.get_args(hint)
    if origin is Literal:
        return "|".join(map(str, args))
    if origin in UNIONS:
        return " or ".join(map(type_name, args))
    if origin is Annotated:
        return type_name(args[0]) + _bounds(hint)
    names = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        type(None): "null",
        tuple: "a list" if ... in args else "a list of 2 numbers",
        dict: "a mapping",
    }
    # The last type argument of a list or a mapping is the type of its elements; add its bounds.
    return names[origin or hint] + "".join(_bounds(arg) for arg in args[-1:])


def _bounds(hint: Any) -> str:
    """Returns the bounds of a number type as text such as " >= 0 and < 1"; "" if it has none."""
    metadata = getattr(hint, "__metadata__", [None])[0]
    bounds = {sign: getattr(metadata, name, None) for name, sign in _SIGNS.items()}
    return " and".join(f" {sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


def is_section(hint: Any) -> TypeGuard[type]:
    """Returns True if the type is a dataclass: a section, or an entry of `rewards`."""
    return dataclasses.is_dataclass(hint)


@functools.cache
def help_texts(cls: type) -> dict[str, str]:
    """Returns the help text of each key of a section, which is the string below its field in the
    source code."""
    # Python does not keep a string below a field, so the source code is parsed.
    [tree] = ast.parse(inspect.getsource(cls)).body
    texts = {}
    for field, text in itertools.pairwise(typing.cast(ast.ClassDef, tree).body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return texts


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Returns the default of a key, or dataclasses.MISSING if the key is required."""
    if field.default_factory is dataclasses.MISSING:
        return field.default
    return field.default_factory()


def _key_texts(cls: type, prefix: str) -> Iterator[KeyText]:
    """Yields the texts of all keys of the section `cls`, whose dotted key is `prefix`, and of the
    sections in it."""
    hints = typing.get_type_hints(cls, include_extras=True)
    meanings = help_texts(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        name = join_key(prefix, field.name)
        if is_section(hint):
            yield from _key_texts(hint, name)
        elif name == "rewards":
            yield from _key_texts(RewardConfig, "rewards.N")
        else:
            default = default_of(field)
            if default is dataclasses.MISSING:
                default = ""
            elif not isinstance(default, str):
                default = json.dumps(default)
            yield KeyText(name, default, type_name(hint), meanings[field.name])


def join_key(prefix: str, name: str) -> str:
    """Returns the dotted key of `name` in section `prefix`, which is "" for the whole config."""
    return f"{prefix}.{name}" if prefix else name


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Returns {dotted key: value} of nested mappings and lists."""
    # An empty mapping or list counts as a value, because its key would be lost otherwise.
    if not isinstance(value, dict | list) or not value:
        return {prefix: value}
    leaves: dict[str, Any] = {}
    for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
        leaves |= flat(inner, join_key(prefix, str(name)))
    return leaves


def flatten_config(config: Config) -> dict[str, Any]:
    """Returns the values of `config_to_dict` by dotted key, as "optimizer.betas.0"."""
    return flat(config_to_dict(config))


def config_to_dict(section: Any) -> dict[str, Any]:
    """Returns a config or section as plain YAML types, in which secrets are "<redacted>"."""
    return dict(_plain(section))


# Mappings whose keys may sound like secrets although the values are none: HTTP headers with the
# names of environment variables, and teachers' names with paths or addresses.
_PLAIN_MAPPINGS = ("headers_env", "path", "url")


def _plain(value: Any, name: str = "", is_free_form: bool = False) -> Any:
    """Returns `value` as plain YAML types, with secrets replaced by "<redacted>".

    `is_free_form` is True if `name` is a key that the user invented, which may name a secret. Keys
    of the schema (max_prompt_tokens, prompt_key) only sound as if they did.
    """
    if dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        return {field.name: _plain(getattr(value, field.name), field.name) for field in fields}
    if isinstance(value, dict):
        is_free_form = name not in _PLAIN_MAPPINGS
        return {
            inner: _plain(item, f"{name}.{inner}", is_free_form) for inner, item in value.items()
        }
    if isinstance(value, tuple | list):
        return [_plain(element, name, is_free_form) for element in value]
    has_secret_name = is_free_form and SECRET_NAME.search(name)
    if isinstance(value, str) and (has_secret_name or SECRET.search(value)):
        return "<redacted>"
    return value


SECRET_NAME = re.compile(
    r"(?i)key(?!word)|token(?!iz)|secret|passw|passphrase|credential|auth(?!or(?!i[sz]))|bearer"
    r"|cookie|(?<![a-z])(pwd?|pat|jwt|dsn)(?![a-z])"
)
# Secrets that are recognized by their form, whatever their key: headers, URLs with a password, and
# access keys of well-known services.
SECRET = re.compile(
    r"(?i:\bbearer\s+[\w.~+/-]{8}|authorization\s*[:=]\s*\S|://[^/\s:@]*:[^/\s@]+@"
    r"|\b(password|passwd|pwd)\s*=\s*\S"
    r"|://\S{1,300}[?&][\w-]*(key|token|secret|signature|sig)=\S)"
    r"|\b(hf_[A-Za-z0-9]{16}|sk-[\w-]{16}|gh[pousr]_\w{20}|github_pat_\w{20}|glpat-[\w-]{16}"
    r"|xox[abprs]-[\w-]{10}|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30}|eyJ[\w-]{8,}\.[\w-]{8,}\.)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
_MAX_ARGUMENTS = 1_000
_MAX_ARGUMENT_LENGTH = 4_000
# A name before a value, as in name=, name: or "name":
_NAME = re.compile(r"""(?<![\w.-])([\w.-]++)(?:\s*=\s*|["']?\s*:\s+|["']\s*:\s*)""")
# The value after a name. If the value begins with { or [, everything that follows belongs to it.
_VALUE = re.compile(r"""[{\[].*|"[^"]*"|'[^']*'|[^\s,;&}\]]+""", re.DOTALL)


def redact(text: str) -> str:
    """Returns a message without secrets.

    The values of names like api_key are removed, unless the names are keys of the schema
    (data.prompt_key). If a secret is recognized by its form, the rest of the message is removed
    too.
    """
    pieces: list[str] = []
    end = 0
    for name in _NAME.finditer(text):
        # A name before `end` lies inside a value that has been removed.
        value = _VALUE.match(text, name.end())
        if value is not None and name.start() >= end and _is_secret(name[1], value[0]):
            pieces += [text[end : name.end()], "<redacted>"]
            end = value.end()
    text_shown = "".join([*pieces, text[end:]])
    secret = SECRET.search(text_shown)
    return f"{text_shown[: secret.start()]}<redacted>" if secret else text_shown


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line without secrets, as the run folder records it. In `--api-key VALUE`
    the secret is a separate argument."""
    arguments_shown = []
    # The number and the length of the arguments are limited, since they are written to a file.
    for previous, argument in itertools.pairwise(["", *arguments[:_MAX_ARGUMENTS]]):
        is_value = re.match(r"-[^=]*$", previous) and not argument.startswith("-")
        is_secret = is_value and _is_secret(previous, argument)
        arguments_shown.append(
            "<redacted>" if is_secret else redact(argument[:_MAX_ARGUMENT_LENGTH])
        )
    return arguments_shown


def _is_secret(name: str, value: str) -> bool:
    """Returns True if the name of a value says that it is a secret."""
    name_parts = {*name.strip("-").split(".")} - _declared_names()
    # "max_tokens 512" is a number of tokens, not a token.
    is_count = name.endswith("tokens") and re.fullmatch(r"[\d.e+-]+", value)
    return not is_count and any(map(SECRET_NAME.search, name_parts))


@functools.cache
def _declared_names() -> set[str]:
    """Returns all words between the dots of the schema's keys, which never name secrets."""
    return {name_part for key in _key_texts(Config, "") for name_part in key.name.split(".")}


if __name__ == "__main__":
    print(recipes_as_markdown() if "recipes" in sys.argv else keys_as_markdown())
