"""Rows as token ids, and a shuffled cursor over them that knows nothing of ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.rows import PromptRow, check_enough_rows
from grpo_spmd.records import Prompt


def build_prompts(
    rows: Sequence[PromptRow], tokenizer: Any, config: DataConfig, per_step: int, eval_set: str | None = None
) -> list[Prompt]:
    """Tokenize every row: strings as they are, messages through the chat template with a generation prompt.

    The `position` of a prompt is its row number until the stream deals it out. Raises ConfigError for a prompt that is
    too long, messages without a chat template, or too few prompts for a step (in a set of `data.eval`: none).
    """
    prompts = []
    for number, row in enumerate(rows):
        with panics_named(row.where):
            token_ids = _tokenized(row, tokenizer, config)
        if not token_ids:
            raise ConfigError(f"{row.where}: the prompt has no tokens")
        if len(token_ids) <= config.max_prompt_tokens:
            prompts.append(Prompt(number, number, token_ids, row.prompt, row.columns))
        elif config.on_long_prompt == "error":
            raise ConfigError(too_long(row, len(token_ids), config))
    check_enough_rows(len(prompts), config, per_step, num_dropped=len(rows) - len(prompts), eval_set=eval_set)
    return prompts


@contextmanager
def panics_named(where: str) -> Iterator[None]:
    """The library's Rust gives up an expression that backtracks without end by an error that is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"model.path: its tokenizer fails on a prompt from {where} on: {error}") from None


def _tokenized(row: PromptRow, tokenizer: Any, config: DataConfig) -> list[int]:
    if isinstance(row.prompt, str):
        return list(tokenizer(row.prompt)["input_ids"])
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(no_template(row.where, config))
    try:
        text = tokenizer.apply_chat_template(row.prompt, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may refuse with any error, e.g. roles in an order that it does not know
        raise ConfigError(refused_by_template(row.where, f"{type(error).__name__}: {error}")) from None
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


def no_template(where: str, config: DataConfig) -> str:
    key = "data.as_chat" if config.as_chat else "data.system_prompt" if config.system_prompt else None
    because = f" ({key} makes plain text one)" if key else ""
    what = f"the prompt is chat messages{because}, but the tokenizer of model.path has no chat template"
    remedy = "take an instruct model, put a chat_template.jinja into its folder, or give plain text"
    return f"{where}: {what}; {remedy} (data.prompt_template)"


def refused_by_template(where: str, error: str) -> str:
    return f"{where}: the chat template refused the messages: {error}"


def too_long(row: PromptRow, num_tokens: int, config: DataConfig) -> str:
    what = f"the prompt has {num_tokens} tokens, over data.max_prompt_tokens={config.max_prompt_tokens}"
    return f"{row.where}: {what}; raise that, or set data.on_long_prompt: drop"
