"""Prompts before torch and transformers are there: a chat template, and lengths of the rows that may be too long.

`build_prompts` decides about every row with the model's tokenizer class; here its files are read by the tokenizers
library and jinja2 alone, and what cannot be told that way is left to it.
"""

from __future__ import annotations

import functools
import heapq
import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import digest_of, versions_of
from grpo_spmd.data.rows import PromptRow, overview_of
from grpo_spmd.data.tokens import no_template, panics_named, refused_by_template, too_long
from grpo_spmd.files import open_regular, read_json

Messages = list[dict[str, Any]]
_MOST_CHARACTERS = 600_000  # that a check tokenizes: half a second
_SOME = 100  # rows whose tokens are looked at, however short


def check_prompts_early(
    rows: Sequence[PromptRow], config: DataConfig, folder: Path, num_embeddings: int | None = None
) -> None:
    """Refuse messages without a chat template, and prompts that are too long or hold a token without an embedding
    (`num_embeddings`: rows of the model's). Of many rows the longest by characters are read, and each n-th of the rest.
    Raises ConfigError, which names file:line."""
    first_chat, render = overview_of(rows).first_chat, None
    if first_chat is not None:
        settings = tokenizer_settings(folder)
        template = None if settings is None else template_of(folder, settings)
        if settings is not None and template is None and not any(folder.glob("*chat_template*")):
            raise ConfigError(no_template(rows[first_chat].where, config))
        if settings is None or template is None or (render := renderer(template, settings)) is None:
            return
    file = folder / "tokenizer.json"
    if not rows or not file.is_file():
        return
    tokenizer = load_tokenizer_file(file)
    tokenizer.add_special_tokens(
        list(_special_tokens(tokenizer_settings(folder) or {}).values())
    )  # as transformers
    said, written = set[str](), set[str]()
    for number, row in enumerate(sample(rows)):
        if (text := row.prompt if isinstance(row.prompt, str) else _rendered(row, render)) is None:
            return
        if number < _SOME and not isinstance(row.prompt, str):
            said.add(str([message.get("content") for message in row.prompt]))
            written.add(text)
        if (
            number >= _SOME and len(text.encode()) + 8 <= config.max_prompt_tokens
        ):  # a token is a byte at least
            continue
        with panics_named(row.where):
            ids = tokenizer.encode(text, add_special_tokens=isinstance(row.prompt, str)).ids
        if len(ids) > config.max_prompt_tokens and config.on_long_prompt == "error":
            raise ConfigError(too_long(row, len(ids), config))
        if num_embeddings is not None and (largest := max(ids, default=0)) >= num_embeddings:
            token = tokenizer.id_to_token(largest)
            what = f"the prompt has the token {token!r} ({largest}), and the model embeds {num_embeddings}"
            raise ConfigError(f"{row.where}: {what}: its tokenizer is another model's")
    if len(said) > len(written) == 1:
        what = f"its chat template makes one and the same prompt of different messages ({min(written)[:40]!r})"
        raise ConfigError(
            f"model.path: {what}: it lacks {{{{ message['content'] }}}}, or is another model's"
        )


def inputs_of(folder: Path, config: DataConfig) -> list[Any]:
    """What `check_prompts_early` decides by, beside the rows and `num_embeddings`."""
    of_tokenizer = ("tokenizer.json", "tokenizer_config.json", "*chat_template*")
    files = {
        path.name: digest_of(path)
        for form in of_tokenizer
        for path in folder.glob(form)
        if path.is_file()
    }
    return [
        files,
        versions_of("tokenizers", "jinja2"),
        config.max_prompt_tokens,
        config.on_long_prompt,
    ]


def load_tokenizer_file(file: Path) -> Any:
    """tokenizer.json by the tokenizers library. Raises ConfigError where it cannot be read."""
    return _load_once(file, file.resolve(), file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _load_once(file: Path, *_: Any) -> Any:
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"model.path: cannot read {file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()  # as when the run tokenizes: to 512 tokens, say, each prompt would be too long
    return tokenizer


def sample(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """All rows where they are few; else the longest by characters, within half of the budget, and of the others each
    n-th, within the rest. In the order of the file."""
    sizes, half = overview_of(rows).sizes, _MOST_CHARACTERS // 2
    if (total := sum(sizes)) <= _MOST_CHARACTERS:
        return list(rows)
    most = (
        half * len(rows) // total + 2
    )  # the longest are longer than the average, so that no more of them fit in
    taken, left = [0], half
    for index in heapq.nlargest(most, range(len(rows)), key=sizes.__getitem__):
        if (left := left - sizes[index]) < 0:
            break
        taken.append(index)
    every = -(-total // half)
    return [rows[index] for index in sorted({*taken, *range(0, len(rows), every)})]


class TemplateRefusal(Exception):
    """What a template says by raise_exception."""


def tokenizer_settings(folder: Path) -> dict[str, Any] | None:
    """tokenizer_config.json; {} where there is none, None where it cannot be read."""
    try:
        return read_json(folder / "tokenizer_config.json", follow=True)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        return None


def template_of(folder: Path, settings: dict[str, Any]) -> str | None:
    """The template that the model's tokenizer has by default; of several, the one of that name."""
    found: Any = settings.get("chat_template")
    if (file := folder / "chat_template.jinja").is_file():
        with open_regular(file, follow=True) as opened:
            found = opened.read(1 << 20).decode("utf-8", errors="replace")
    if isinstance(found, list):
        found = {
            entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)
        }.get("default")
    return found if isinstance(found, str) else None


def renderer(
    template: str, settings: dict[str, Any], *, opens_turn: bool = True
) -> Callable[[Messages], str] | None:
    """The template as transformers compiles it; None where only transformers could. `opens_turn`: with a generation
    prompt. Raises ConfigError, of model.path."""
    try:
        import jinja2.ext
        import jinja2.sandbox
    except ImportError:
        return None

    def refuse(message: str) -> None:
        raise TemplateRefusal(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(
        value, **{"ensure_ascii": False, **how}
    )
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        if "generation" in template:  # a tag of transformers' own
            return None
        raise ConfigError(f"model.path: its chat template does not compile: {error}") from None
    special = _special_tokens(settings)

    def render(messages: Messages) -> str:
        given = {
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": opens_turn,
        }
        return compiled.render(**special | given)

    return render


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """By their names in a template, such as bos_token."""
    named = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in settings.items()
    }
    return {
        name: value
        for name, value in named.items()
        if name.endswith("_token") and isinstance(value, str)
    }


def _rendered(row: PromptRow, render: Callable[[Messages], str] | None) -> str | None:
    assert render is not None
    assert not isinstance(row.prompt, str)
    try:
        return render(row.prompt)
    except TemplateRefusal as error:
        raise ConfigError(refused_by_template(row.where, f"TemplateError: {error}")) from None
    except Exception:  # a template may fail in any way; transformers' error says which
        return None
