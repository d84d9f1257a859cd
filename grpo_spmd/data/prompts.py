"""Rows as token ids, and a shuffled cursor over them that knows nothing of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.rows import PromptRow, check_enough_rows
from grpo_spmd.records import Prompt
from grpo_spmd.untrusted import read_json


def check_template_early(rows: Sequence[PromptRow], model_path: str) -> None:
    """With a local model, refuse messages without a chat template before torch is imported; `build_prompts` decides."""
    folder = Path(model_path)
    where = next((row.where for row in rows if not isinstance(row.prompt, str)), None)
    if where is None or not folder.is_dir() or any(folder.glob("*chat_template*")):
        return
    try:
        settings = read_json(folder / "tokenizer_config.json", follow=True)
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError):
        return
    if settings.get("chat_template") is None:
        raise ConfigError(_no_template(where))


def check_lengths_early(rows: Sequence[PromptRow], config: DataConfig, model_path: str) -> None:
    """The same for over-long prompts of plain text and a local tokenizer.json, without the model's tokenizer class."""
    file, texts = Path(model_path) / "tokenizer.json", [row.prompt for row in rows if isinstance(row.prompt, str)]
    if config.on_long_prompt != "error" or not file.is_file() or len(texts) < len(rows):
        return
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"model.path: cannot read {file}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()  # as when the run tokenizes: to 512 tokens, say, each prompt would be too long
    with _panics_named(rows[0].where):
        encodings = tokenizer.encode_batch(texts)
    for row, encoding in zip(rows, encodings, strict=True):
        if len(encoding.ids) > config.max_prompt_tokens:
            raise ConfigError(_too_long(row, len(encoding.ids), config))


def build_prompts(
    rows: Sequence[PromptRow], tokenizer: Any, config: DataConfig, per_step: int, eval_set: str | None = None
) -> list[Prompt]:
    """Tokenize every row: strings as they are, messages through the chat template with a generation prompt.

    The `position` of a prompt is its row number until the stream deals it out. Raises ConfigError for a prompt that is
    too long, messages without a chat template, or too few prompts for a step (in a set of `data.eval`: none).
    """
    prompts = []
    for number, row in enumerate(rows):
        with _panics_named(row.where):
            token_ids = _tokenized(row, tokenizer)
        if not token_ids:
            raise ConfigError(f"{row.where}: the prompt has no tokens")
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(number, number, token_ids, row.prompt, row.columns))
        elif config.on_long_prompt == "error":
            raise ConfigError(_too_long(row, len(token_ids), config))
    check_enough_rows(len(prompts), config, per_step, num_dropped=len(rows) - len(prompts), eval_set=eval_set)
    return prompts


@contextmanager
def _panics_named(where: str) -> Iterator[None]:
    """The library's Rust gives up an expression that backtracks without end by an error that is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"model.path: its tokenizer fails on a prompt from {where} on: {error}") from None


def _tokenized(row: PromptRow, tokenizer: Any) -> list[int]:
    if isinstance(row.prompt, str):
        return list(tokenizer(row.prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(_no_template(row.where))
    try:
        text = tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may refuse with any error, e.g. roles in an order that it does not know
        refusal = f"the chat template refused the messages: {type(error).__name__}: {error}"
        raise ConfigError(f"{row.where}: {refusal}") from None
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])  # the template has written them


class PromptStream:
    """Endless shuffled prompts, each exactly once an epoch: a function of (seed, position), whatever the world size."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool, position: int = 0) -> None:
        self._prompts, self._seed, self._shuffle = prompts, seed, shuffle
        self._order: tuple[int, list[int]] = (-1, [])
        self.position = position  # of the next prompt

    @property
    def epoch(self) -> float:
        """Prompts that were drawn, over those of the data set."""
        return self.position / len(self._prompts)

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; every rank must take as many."""
        start, self.position = self.position, self.position + num_prompts
        return [self._at(position) for position in range(start, self.position)]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        prompt = self._prompts[self._order[1][offset]]
        return Prompt(position, prompt.row, prompt.token_ids, prompt.text, prompt.columns)


def _no_template(where: str) -> str:
    return f"{where}: the prompt is chat messages, but the tokenizer of model.path has no chat template"


def _too_long(row: PromptRow, num_tokens: int, config: DataConfig) -> str:
    what = f"the prompt has {num_tokens} tokens, over data.max_prompt_tokens={config.max_prompt_tokens}"
    return f"{row.where}: {what}; raise that, or set data.on_long_prompt: drop"
