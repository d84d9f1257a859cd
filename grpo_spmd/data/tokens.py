"""This module turns prompts into token ids.

Prompts are tokenized in batches, checked in the same pass, and kept in the node's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import Entry, EntryWriter, load_or_make, versions_of
from grpo_spmd.data.rows import CachedRows, PromptRow, check_enough_rows
from grpo_spmd.distributed import startup
from grpo_spmd.records import Prompt

# The number of rows that are tokenized together.
_BATCH = 1024
# The modules of transformers whose classes every tokenizer inherits from.
_TRANSFORMERS_BASE = "transformers.tokenization_utils"
# The token ids of one prompt as int32.
Tokens: TypeAlias = "array[int]"


class Prompts(Sequence[Prompt]):
    """The prompts of a data set that are not too long, with their tokens, from a cache entry.

    An index counts these prompts. `Prompt.row` counts all rows of the data set. `Prompt.position`
    is the row, too, until PromptStream replaces it by the position in the stream.
    """

    def __init__(self, rows: Sequence[PromptRow], entry: Entry) -> None:
        self._rows = rows
        self._token_ids = entry.blob.cast("i")
        # The tokens of prompt i are those from bounds[i] to bounds[i + 1].
        self._bounds = entry.arrays["bounds"]
        # The row number of each prompt.
        self._numbers = entry.arrays["numbers"]
        self.digests: tuple[str, str] = (entry.facts["tokens"], entry.facts["rows"])
        """The result of `digests_of` for these prompts."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        """Returns the Prompt at an index, or the list of those in a slice."""
        i = range(len(self))[index]
        if not isinstance(i, int):
            return [self[j] for j in i]
        number = self._numbers[i]
        token_ids = self._token_ids[self._bounds[i] : self._bounds[i + 1]].tolist()
        row = self._rows[number]
        return Prompt(
            position=number,
            row=number,
            token_ids=token_ids,
            text=row.prompt,
            columns=row.columns,
        )


def _digest(
    rows: Iterable[tuple[int, dict[str, Any], Sequence[int]]], *, with_tokens: bool
) -> tuple[str, str]:
    """Returns the digests of `digests_of` for rows given as (row number, columns, tokens)."""
    token_digest = hashlib.sha256()
    row_digest = hashlib.sha256()
    # One encoder is used for all rows; json.dumps would create one for each.
    encode = json.JSONEncoder(sort_keys=True, default=str).encode
    for number, columns, token_ids in rows:
        token_digest.update(array("q", [len(token_ids), *token_ids]))
        row = [number, columns, list(token_ids) if with_tokens else None]
        row_digest.update(encode(row).encode())
    return token_digest.hexdigest(), row_digest.hexdigest()


def digests_of(prompts: Sequence[Prompt], *, with_tokens: bool) -> tuple[str, str]:
    """Returns (SHA-256 of the tokens, SHA-256 of the rows' columns), by which a checkpoint
    recognizes its data.

    If `with_tokens` (for a set of `data.eval`), the second digest includes the tokens.
    """
    if isinstance(prompts, Prompts):
        return prompts.digests
    rows = ((prompt.row, prompt.columns, prompt.token_ids) for prompt in prompts)
    return _digest(rows, with_tokens=with_tokens)


def build_prompts(
    rows: Sequence[PromptRow],
    tokenizer: Any,
    config: DataConfig,
    per_step: int,
    eval_set: str | None = None,
) -> Prompts:
    """Returns the prompts of all rows, tokenized unless the node's cache has them for the same
    data, tokenizer and limits.

    Strings are encoded as they are, messages through the chat template with a generation prompt.
    Prompts over data.max_prompt_tokens are dropped, or raise ConfigError if data.on_long_prompt is
    "error". Raises ConfigError, too, for messages without a chat template, and if there are fewer
    prompts than `per_step` (for a set of `data.eval`: none).
    """
    is_eval = eval_set is not None

    def make(writer: EntryWriter) -> None:
        """Writes a cache entry with the tokens of all prompts that are not too long.

        Called by load_or_make if the cache does not have the entry. Raises ConfigError for a prompt
        without tokens and, if data.on_long_prompt is "error", for one that is too long.
        """
        # The tokens of prompt i are those from bounds[i] to bounds[i + 1].
        bounds = array("q", [0])
        numbers = array("q")

        def write() -> Iterator[tuple[int, dict[str, Any], Tokens]]:
            """Adds the tokens of each prompt to the entry; yields (row number, columns, tokens)."""
            for number, row, token_ids in _tokenize(rows, tokenizer):
                if len(token_ids) > config.max_prompt_tokens:
                    if config.on_long_prompt == "error":
                        raise ConfigError(too_long(row, len(token_ids), config))
                    continue
                if not token_ids:
                    raise ConfigError(f"{row.where}: the prompt has no tokens")
                writer.add(token_ids)
                bounds.append(bounds[-1] + len(token_ids))
                numbers.append(number)
                yield number, row.columns, token_ids

        # _digest reads `write()` to its end, which writes the entry. The digests are stored in it,
        # so that saving a checkpoint need not read all prompts.
        digests = _digest(write(), with_tokens=is_eval)
        writer.facts["tokens"], writer.facts["rows"] = digests
        writer.arrays.update(bounds=bounds, numbers=numbers)

    inputs = None
    num_bytes = 0
    source = ""
    if isinstance(rows, CachedRows) and rows.inputs is not None:
        num_bytes = rows.num_bytes
        source = rows.prefix
        tokenizer_inputs = _tokenizer_inputs(tokenizer)
        if tokenizer_inputs is not None:
            limits = [config.max_prompt_tokens, config.on_long_prompt, is_eval]
            inputs = [rows.inputs, tokenizer_inputs, limits, config.chat_template_kwargs]
    prompts = Prompts(rows, load_or_make("tokens", inputs, num_bytes, make, source))
    num_dropped = len(rows) - len(prompts)
    check_enough_rows(len(prompts), config, per_step, num_dropped=num_dropped, eval_set=eval_set)
    return prompts


def _tokenizer_inputs(tokenizer: Any) -> list[Any] | None:
    """Returns everything that determines a tokenizer's tokens, as a part of the cache key.

    Returns None for a tokenizer written in Python, whose tokens may depend on anything.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    template = getattr(tokenizer, "chat_template", None)
    # Take the JSON from the added tokens on. Before them are truncation and padding, which the
    # tokenizer's first use changes and which do not matter here.
    content = backend.to_str().partition('"added_tokens"')[2]
    tokenizer_class = type(tokenizer)
    return [
        f"{tokenizer_class.__module__}.{tokenizer_class.__qualname__}",
        hashlib.sha256(content.encode()).hexdigest(),
        template,
        {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        bool(getattr(tokenizer, "split_special_tokens", False)),
        # A template may insert the date; its prompts are then valid for one day.
        time.strftime("%Y-%m-%d") if "strftime_now" in str(template) else "",
        versions_of("transformers", "tokenizers", "jinja2"),
    ]


def _tokenize(rows: Sequence[PromptRow], tokenizer: Any) -> Iterator[tuple[int, PromptRow, Tokens]]:
    """Yields (row number, row, tokens) for all rows.

    Raises ConfigError for the first row that cannot be tokenized.
    """
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        tokens: Iterable[Tokens]
        try:
            tokens = tokenize_batch(batch, tokenizer)
        except BaseException as error:
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            # Tokenize the rows one by one, to name the first that fails.
            tokens = (_tokenize_row(row, tokenizer) for row in batch)
        yield from zip(range(start, start + len(batch)), batch, tokens, strict=True)
        startup.note(f", {start + len(batch):,} of {len(rows):,} prompts tokenized")
    startup.note("")


def tokenize_batch(batch: Sequence[PromptRow], tokenizer: Any) -> list[Tokens]:
    """Returns the tokens of each row. Raises whatever the chat template or the tokenizer raises."""
    tokens: dict[int, Tokens] = {}
    texts = {i: row.prompt for i, row in enumerate(batch) if isinstance(row.prompt, str)}
    if texts:
        encoded = _encode(list(texts.values()), tokenizer, add_special_tokens=True)
        tokens.update(zip(texts, encoded, strict=True))
    chats = {i: row.prompt for i, row in enumerate(batch) if i not in texts}
    if chats:
        rendered = tokenizer.apply_chat_template(
            list(chats.values()), tokenize=False, add_generation_prompt=True
        )
        # The template has already inserted the special tokens.
        encoded = _encode(rendered, tokenizer, add_special_tokens=False)
        tokens.update(zip(chats, encoded, strict=True))
    return [tokens[i] for i in range(len(batch))]


def _encode(texts: list[str], tokenizer: Any, *, add_special_tokens: bool) -> list[Tokens]:
    """Returns the tokens of each text, the same as `tokenizer(text)`.

    If the tokenizer's class does not override how transformers encodes, the Rust library is called
    directly, which is faster because it computes no masks and offsets.
    """
    names = ("__call__", "_encode_plus", "tokenize", "encode")
    methods = [getattr(type(tokenizer), name, None) for name in names]
    is_plain = all(
        str(getattr(method, "__module__", "")).startswith(_TRANSFORMERS_BASE) for method in methods
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    encode_batch = getattr(backend, "encode_batch_fast", None)
    with _one_thread():
        # The first call sets the backend's truncation and padding. It is also compared below.
        first_ids = list(tokenizer(texts[0], add_special_tokens=add_special_tokens)["input_ids"])
        if is_plain and encode_batch is not None:
            encodings = encode_batch(texts, add_special_tokens=add_special_tokens)
            if encodings[0].ids == first_ids:
                return [array("i", encoding.ids) for encoding in encodings]
        encoded = tokenizer(texts, add_special_tokens=add_special_tokens)
        return [array("i", ids) for ids in encoded["input_ids"]]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Turns off the threads of the Rust library within the block, unless the user has set
    TOKENIZERS_PARALLELISM.

    The threads would stay alive, and each later fork would warn of them.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


def _tokenize_row(row: PromptRow, tokenizer: Any) -> Tokens:
    """Returns the tokens of one row. Raises ConfigError, which names the row, if that fails."""
    is_chat = not isinstance(row.prompt, str)
    if is_chat and getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(no_template(row.where))
    with panics_named(row.where):
        try:
            return tokenize_batch([row], tokenizer)[0]
        # A template may refuse messages with any error, e.g. for the order of their roles.
        except Exception as error:
            if not is_chat:
                raise
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(refused_by_template(row.where, reason)) from None


@contextmanager
def panics_named(location: str) -> Iterator[None]:
    """Turns a panic of the Rust library into a ConfigError that names `location`.

    The library panics if a regular expression backtracks too often. PanicException derives from
    BaseException, not from Exception.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(
            f"model.path: its tokenizer fails on a prompt from {location} on: {error}"
        ) from None


def no_template(location: str) -> str:
    """Returns the text of the error for a prompt of chat messages if there is no chat template."""
    return (
        f"{location}: the prompt is chat messages (data.as_chat and data.system_prompt make plain "
        "text some), but the tokenizer of model.path has no chat template; take an instruct model, "
        "put a chat_template.jinja into its folder, or give plain text (data.prompt_template)"
    )


def refused_by_template(location: str, error: str) -> str:
    """Returns the text of the error for messages that a chat template refuses."""
    return f"{location}: the chat template refused the messages: {error}"


def too_long(row: PromptRow, num_tokens: int, config: DataConfig) -> str:
    """Returns the text of the error for a prompt with more tokens than data.max_prompt_tokens."""
    return (
        f"{row.where}: the prompt has {num_tokens} tokens, over "
        f"data.max_prompt_tokens={config.max_prompt_tokens}; raise that, or set "
        "data.on_long_prompt: drop"
    )
