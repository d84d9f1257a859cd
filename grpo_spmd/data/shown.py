"""What a prompt would show the model that nobody can have meant: the answer, JSON as text, a column that was not filled
in. Reads every row, at a microsecond each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.table import PromptRow, Rows

# A column in other notations than {name}: jinja's, str.format's fields and escapes.
_OTHERWISE = re.compile(r"\{\{\s*(\w+)\s*\}\}|\{\s+(\w+)\s*\}|\{(\w+)\s+\}|\{(\w+)(?:[.\[!:][^{}\n]*)\}")


def check_source(key: str, source: str) -> None:
    """Refuse an address: only files and the hub are read. Raises ConfigError."""
    if not re.match(r"\w+://", source):
        return
    found = re.match(r"(?:hf://|https://huggingface\.co/)datasets/([\w.-]+/[\w.-]+)", source)
    remedy = f"of the hub: hub:{found[1]}::train" if found else "download it, and give the file's path"
    raise ConfigError(f"{key}: addresses are not read; {remedy}; got {source!r}")


def check_shown(rows: Sequence[PromptRow], config: DataConfig) -> None:
    """Refuse rows whose prompt is not what it should be. Raises ConfigError, which names file:line."""
    if rows and config.prompt_template:
        _check_template(config.prompt_template, rows[0])
    if isinstance(rows, Rows):  # they were looked at when they were read
        rows = [] if rows.first_odd is None else [rows[rows.first_odd]]
    for row in rows:
        check_row(row)


def check_row(row: PromptRow) -> None:
    """Raises ConfigError."""
    if isinstance(row.prompt, str):
        _check_text(row.prompt, row.where)
    else:
        _check_messages(row.prompt, row.where)


def _check_template(template: str, row: PromptRow) -> None:
    for found in _OTHERWISE.finditer(template):
        name = next(filter(None, found.groups()))
        if name in row.columns:
            what = f"{found[0]} is not how a column is written: write {{{name}}}"
            raise ConfigError(f"data.prompt_template: {what}")


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise ConfigError(f"{where}: the prompt is nothing but white space")
    start = text.lstrip()[:2]
    if start[:1] == "[" and '"role"' in text and _is_messages(text):
        how = "make it a list in the file (json.loads)"
        raise ConfigError(f"{where}: the prompt is a JSON text of chat messages, and would be shown as such; {how}")


def _is_messages(text: str) -> bool:
    try:
        value = json.loads(text)
    except (RecursionError, ValueError):
        return False
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def _check_messages(messages: Sequence[dict[str, Any]], where: str) -> None:
    last = messages[-1]
    if last["role"] == "assistant":
        what = "the chat prompt ends with an assistant's message, so that the model would be shown the answer"
        raise ConfigError(f"{where}: {what}; take it out of the prompt, e.g. into a column of its own")
    says_something = False
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
                if kind != "text":
                    raise ConfigError(f"{where}: the prompt has a part of type {kind!r}, and only text is trained on")
                says_something = says_something or bool(str(part.get("text") or "").strip())
        elif content is not None and content.strip():
            says_something = True
    if not says_something:
        raise ConfigError(f"{where}: the messages of the prompt are nothing but white space")
    if isinstance(last.get("content"), str):
        _check_text(last["content"] or "-", where)
