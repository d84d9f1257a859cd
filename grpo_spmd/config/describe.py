"""Every config key in words: for --help, and as Markdown for configs/README.md.

python -m grpo_spmd.config.describe      prints the Markdown
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_type_hints

from grpo_spmd.config.schema import Config, RewardConfig

_LONGEST_WORD = 50
_KeyText = tuple[
    str, str, str, str
]  # name; default as YAML has it, "" if required; type and bounds; meaning


def describe_keys(columns: int = 80) -> str:
    """Every config key for `--help`, in lines of at most `columns`: its name with what it may be, its meaning below."""
    lines = []
    for name, default, values, meaning in _keys(Config, ""):
        if len(values) > _LONGEST_WORD:  # which no line would be broken in
            values = values.replace("|", " | ")
        head = f"{name}  ({values}; {f'default {default}' if default else 'required'})"
        for text, first in ((head, "  "), (meaning, "      ")):
            lines += textwrap.wrap(
                text, columns, initial_indent=first, subsequent_indent="      ",
                break_on_hyphens=False, break_long_words=False,
            )  # fmt: skip
    return "\n".join(lines)


def keys_as_markdown() -> str:
    """Every config key as Markdown: a table of the keys without a section, then one for each section."""
    lines, section = [], None
    for name, default, values, meaning in sorted(_keys(Config, ""), key=lambda key: "." in key[0]):
        of = name.split(".")[0] if "." in name else "Without a section"
        if of != section:
            section = of
            lines += [
                "",
                f"### {of}",
                "",
                "| key | default | value | meaning |",
                "|---|---|---|---|",
            ]
        cells = (f"`{name}`", f"`{default}`" if default else "required", values, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines[1:])


def type_name(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "|".join(map(str, typing.get_args(hint)))
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in typing.get_args(hint))
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null",
             tuple: "a list", dict: "a mapping"}  # fmt: skip
    return names[origin or hint]


def _keys(cls: type, where: str) -> Iterator[_KeyText]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint, full = hints[field.name], join_key(where, field.name)
        if dataclasses.is_dataclass(hint):
            yield from _keys(typing.cast(type, hint), full)
        elif full == "rewards":
            yield from _keys(RewardConfig, "rewards.N")
        else:
            kind, null, _ = type_name(hint).partition(" or null")
            bounds = "".join(
                f" and {sign} {bound:g}" for sign, bound in field.metadata["bounds"].items()
            )
            values = kind + bounds.replace(" and", "", 1) + null
            value = (
                field.default
                if field.default_factory is dataclasses.MISSING
                else field.default_factory()
            )
            default = (
                ""
                if field.metadata["required"]
                else value
                if isinstance(value, str)
                else json.dumps(value)
            )
            yield full, default, values, field.metadata["doc"]


# The resolved config as plain values, with secrets replaced.


def flatten_config(config: Config) -> dict[str, Any]:
    """`config_to_dict` as {dotted key: value}, list items by their number: "optimizer.betas.0", "rewards.0.name"."""
    return flat(config_to_dict(config))


def config_to_dict(section: Any) -> dict[str, Any]:
    """A config or section as plain YAML types; strings under names like api_key or password become "<redacted>"."""
    return dict(_plain(section))


def _plain(value: Any, name: str = "", free_form: bool = False) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name), field.name)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        is_free = name not in (
            "headers_env",
            "path",
            "url",
        )  # names of variables, which say nothing; models of teachers
        return {
            inner: _plain(item, f"{name}.{inner}", free_form=is_free)
            for inner, item in value.items()
        }
    if isinstance(value, tuple | list):
        return [_plain(item, name, free_form) for item in value]
    # Only keys of free-form mappings are judged by name; declared ones (max_prompt_tokens, prompt_key) merely sound so.
    if isinstance(value, str) and (
        (free_form and SECRET_NAME.search(name)) or SECRET.search(value)
    ):
        return "<redacted>"
    return value


SECRET_NAME = re.compile(
    r"(?i)key(?!word)|token(?!iz)|secret|passw|passphrase|credential|auth(?!or(?!i[sz]))|bearer|cookie"
    r"|(?<![a-z])(pwd?|pat|jwt|dsn)(?![a-z])"
)
# By their form, whatever the key: a header, a URL with a password, and what services give out.
SECRET = re.compile(
    r"(?i:\bbearer\s+[\w.~+/-]{8}|authorization\s*[:=]\s*\S|://[^/\s:@]*:[^/\s@]+@|\b(password|passwd|pwd)\s*=\s*\S"
    r"|://\S{1,300}[?&][\w-]*(key|token|secret|signature|sig)=\S)"
    r"|\b(hf_[A-Za-z0-9]{16}|sk-[\w-]{16}|gh[pousr]_\w{20}|github_pat_\w{20}|glpat-[\w-]{16}|xox[abprs]-[\w-]{10}"
    r"|A[KS]IA[0-9A-Z]{16}|AIza[\w-]{30}|eyJ[\w-]{8,}\.[\w-]{8,}\.)|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def flat(value: Any, where: str = "") -> dict[str, Any]:
    """{dotted key: value} of what a tree of mappings and lists holds; an empty one is a value itself."""
    if not isinstance(value, dict | list) or not value:
        return {where: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        full: leaf
        for name, inner in items
        for full, leaf in flat(inner, join_key(where, str(name))).items()
    }


def join_key(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


# Command lines and messages without secrets, for files that are shown around.


_LONGEST, _MOST = 4_000, 1_000  # characters of an argument, arguments
_NAMED = re.compile(
    r"""(?<![\w.-])([\w.-]++)(?:\s*=\s*|["']?\s*:\s+|["']\s*:\s*)"""
)  # name=, name: or "name":
_VALUE = re.compile(
    r"""[{\[].*|"[^"]*"|'[^']*'|[^\s,;&}\]]+""", re.DOTALL
)  # of a mapping or a list all that follows


def redact(text: str) -> str:
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


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line, over-long ones cut; the secret of `--api-key VALUE` is an argument of its own."""
    shown, before = list[str](), ""
    for argument in arguments[:_MOST]:
        is_value = before.startswith("-") and "=" not in before and not argument.startswith("-")
        shown.append(
            "<redacted>"
            if is_value and _is_secret(before, argument)
            else redact(argument[:_LONGEST])
        )
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
        waiting += [
            hint
            for hint in get_type_hints(section).values()
            if isinstance(hint, type) and is_dataclass(hint)
        ]
    return names


if __name__ == "__main__":
    print(keys_as_markdown())
