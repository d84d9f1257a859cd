"""Prompts as token ids: tokenized in batches and checked in the same pass, kept in the node's cache, looked up one by
one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import Entry, EntryWriter, load_or_make, versions_of
from grpo_spmd.data.rows import CachedRows, PromptRow, check_enough_rows
from grpo_spmd.distributed import startup
from grpo_spmd.records import Prompt

_BATCH = 1024
_OF_TRANSFORMERS = (
    "transformers.tokenization_utils"  # its modules whose classes every tokenizer inherits from
)


class Prompts(Sequence[Prompt]):
    """The rows that are not too long. The `position` of a prompt is its row number until the stream deals it out."""

    def __init__(self, rows: Sequence[PromptRow], entry: Entry) -> None:
        self._rows, self._token_ids = rows, entry.blob.cast("i")
        self._ends, self._numbers = entry.array("ends"), entry.array("numbers")
        self.digests: tuple[str, str] = entry.facts["tokens"], entry.facts["rows"]
        """`digests_of` them."""

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[number] for number in range(len(self))[index]]
        place = range(len(self))[index]
        number = self._numbers[place]
        token_ids = self._token_ids[
            self._ends[place - 1] if place else 0 : self._ends[place]
        ].tolist()
        row = self._rows[number]
        return Prompt(number, number, token_ids, row.prompt, row.columns)


class _Digests:
    """SHA-256 of the tokens of prompts in their order, and of their rows' columns, with `whole` beside their tokens."""

    def __init__(self, whole: bool) -> None:
        self._whole, self._of_tokens, self._of_rows = whole, hashlib.sha256(), hashlib.sha256()
        self._tokens, self._rows = list[bytes](), list[str]()  # that wait
        self._encode = json.JSONEncoder(
            sort_keys=True, default=str
        ).encode  # json.dumps makes one each time

    def add(self, number: int, columns: dict[str, Any], token_ids: bytes) -> None:
        """`token_ids`: as int32."""
        self._tokens += (len(token_ids) // 4).to_bytes(4, sys.byteorder), token_ids
        row = [number, columns, array("i", token_ids).tolist() if self._whole else None]
        self._rows.append(self._encode(row))
        if len(self._rows) == _BATCH:
            self._flush()

    def _flush(self) -> None:
        self._of_tokens.update(array("q", array("i", b"".join(self._tokens))))
        self._of_rows.update("".join(self._rows).encode())
        self._tokens.clear()
        self._rows.clear()

    def both(self) -> tuple[str, str]:
        self._flush()
        return self._of_tokens.hexdigest(), self._of_rows.hexdigest()


def digests_of(prompts: Sequence[Prompt], *, whole: bool) -> tuple[str, str]:
    """What checkpoints know the data by: SHA-256 of the tokens, and of the rows' columns, with `whole` (in a set of
    `data.eval`) of their tokens too."""
    if isinstance(prompts, Prompts):
        return prompts.digests
    found = _Digests(whole)
    for prompt in prompts:
        found.add(prompt.row, prompt.columns, array("i", prompt.token_ids).tobytes())
    return found.both()


def build_prompts(
    rows: Sequence[PromptRow],
    tokenizer: Any,
    config: DataConfig,
    per_step: int,
    eval_set: str | None = None,
) -> Prompts:
    """Tokenize every row: strings as they are, messages through the chat template with a generation prompt. Once on a
    node, and not again while data, tokenizer and limits are the same.

    Raises ConfigError for a prompt that is too long, messages without a chat template, or too few prompts for a step
    (in a set of `data.eval`: none).
    """
    is_held_out, inputs = eval_set is not None, None

    def make(maker: EntryWriter) -> None:
        ends, numbers, digests = array("q"), array("q"), _Digests(is_held_out)
        end = 0
        for number, row, token_ids in _tokenized(rows, tokenizer, config):
            if (num_tokens := len(token_ids) // 4) > config.max_prompt_tokens:
                if config.on_long_prompt == "error":
                    raise ConfigError(too_long(row, num_tokens, config))
                continue
            if not num_tokens:
                raise ConfigError(f"{row.where}: the prompt has no tokens")
            digests.add(number, row.columns, token_ids)
            maker.add(token_ids)
            end += num_tokens
            ends.append(end)
            numbers.append(number)
        maker.arrays.update(ends=ends, numbers=numbers)
        maker.facts["tokens"], maker.facts["rows"] = digests.both()

    size, of = 0, ""
    if isinstance(rows, CachedRows) and rows.inputs is not None:
        of_tokenizer, size, of = _inputs_of(tokenizer), rows.num_bytes, rows.prefix
        limits = [config.max_prompt_tokens, config.on_long_prompt, is_held_out]
        inputs = None if of_tokenizer is None else [rows.inputs, of_tokenizer, limits]
    prompts = Prompts(rows, load_or_make("tokens", inputs, size, make, of))
    check_enough_rows(
        len(prompts), config, per_step, num_dropped=len(rows) - len(prompts), eval_set=eval_set
    )
    return prompts


def _inputs_of(tokenizer: Any) -> list[Any] | None:
    """What its tokens are a function of; None for one in Python, of which nothing says that."""
    backend, template = (
        getattr(tokenizer, "backend_tokenizer", None),
        getattr(tokenizer, "chat_template", None),
    )
    if backend is None:
        return None
    cls, special = (
        type(tokenizer),
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
    )
    # Without what is before it, truncation and padding: a first use sets them, and they decide nothing here.
    content = hashlib.sha256(backend.to_str().partition('"added_tokens"')[2].encode()).hexdigest()
    splits = bool(getattr(tokenizer, "split_special_tokens", False))
    # A template may write the date: its prompts are of one day.
    today = time.strftime("%Y-%m-%d") if "strftime_now" in str(template) else ""
    versions = versions_of("transformers", "tokenizers", "jinja2")
    return [
        f"{cls.__module__}.{cls.__qualname__}",
        content,
        template,
        special,
        splits,
        today,
        versions,
    ]


def _tokenized(
    rows: Sequence[PromptRow], tokenizer: Any, config: DataConfig
) -> Iterator[tuple[int, PromptRow, bytes]]:
    """Each row's number, and its tokens as int32. Raises ConfigError for the first row, in their order, that has
    none."""
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        found: Iterable[bytes]
        try:
            found = _tokens_of_batch(batch, tokenizer)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            # Which one it was, and in which order.
            found = (array("i", _tokens_of_one(row, tokenizer, config)).tobytes() for row in batch)
        yield from zip(range(start, start + len(batch)), batch, found, strict=True)
        startup.note(f", {start + len(batch):,} of {len(rows):,} prompts tokenized")
    startup.note("")


def _tokens_of_batch(batch: Sequence[PromptRow], tokenizer: Any) -> list[bytes]:
    """As int32. Raises whatever a template or the tokenizer raises for one of them."""
    texts = {number: row.prompt for number, row in enumerate(batch) if isinstance(row.prompt, str)}
    found = (
        dict(zip(texts, _encoded([*texts.values()], tokenizer, True), strict=True)) if texts else {}
    )
    if others := [number for number in range(len(batch)) if number not in texts]:
        messages = [batch[number].prompt for number in others]
        rendered = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        found |= zip(
            others, _encoded(rendered, tokenizer, False), strict=True
        )  # the template has written them
    return [found[number] for number in range(len(batch))]


def _encoded(texts: list[str], tokenizer: Any, with_special_tokens: bool) -> list[bytes]:
    """As `tokenizer(text)` encodes each, as int32. Where that is transformers' own way, and not a model's, straight in
    the library below, without masks and offsets."""
    ways = (
        getattr(type(tokenizer), name, None)
        for name in ("__call__", "_encode_plus", "tokenize", "encode")
    )
    is_plain = all(str(getattr(way, "__module__", "")).startswith(_OF_TRANSFORMERS) for way in ways)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    with _one_thread():
        first = list(
            tokenizer(texts[0], add_special_tokens=with_special_tokens)["input_ids"]
        )  # sets the backend up
        if is_plain and (encode := getattr(backend, "encode_batch_fast", None)) is not None:
            ids = [
                encoding.ids for encoding in encode(texts, add_special_tokens=with_special_tokens)
            ]
            if ids[0] == first:
                return _packed(ids)
        return _packed(tokenizer(texts, add_special_tokens=with_special_tokens)["input_ids"])


def _packed(ids: Iterable[Sequence[int]]) -> list[bytes]:
    return [array("i", each).tobytes() for each in ids]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Unless the user says otherwise: the library's threads would stay, and make each later fork warn of them."""
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


def _tokens_of_one(row: PromptRow, tokenizer: Any, config: DataConfig) -> list[int]:
    with panics_named(row.where):
        if isinstance(row.prompt, str):
            return list(tokenizer(row.prompt)["input_ids"])
        if getattr(tokenizer, "chat_template", None) is None:
            raise ConfigError(no_template(row.where, config))
        try:
            text = tokenizer.apply_chat_template(
                row.prompt, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may refuse with any error, e.g. roles in an order that it does not know
            raise ConfigError(
                refused_by_template(row.where, f"{type(error).__name__}: {error}")
            ) from None
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@contextmanager
def panics_named(where: str) -> Iterator[None]:
    """The library's Rust gives up an expression that backtracks without end by an error that is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"model.path: its tokenizer fails on a prompt from {where} on: {error}"
        ) from None


def no_template(where: str, config: DataConfig) -> str:
    key = (
        "data.as_chat" if config.as_chat else "data.system_prompt" if config.system_prompt else None
    )
    because = f" ({key} makes plain text one)" if key else ""
    what = f"the prompt is chat messages{because}, but the tokenizer of model.path has no chat template"
    remedy = "take an instruct model, put a chat_template.jinja into its folder, or give plain text"
    return f"{where}: {what}; {remedy} (data.prompt_template)"


def refused_by_template(where: str, error: str) -> str:
    return f"{where}: the chat template refused the messages: {error}"


def too_long(row: PromptRow, num_tokens: int, config: DataConfig) -> str:
    what = f"the prompt has {num_tokens} tokens, over data.max_prompt_tokens={config.max_prompt_tokens}"
    return f"{row.where}: {what}; raise that, or set data.on_long_prompt: drop"
