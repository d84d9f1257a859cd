"""Command lines with `section.key=value` overrides; every mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterator, Sequence

from grpo_spmd.config.aliases import equivalent_key, translate_key
from grpo_spmd.config.coerce import find_remedy, key_names, keys_named
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.schema import Config

# Launch scripts put these before or after what was typed. The last one counts.
_REPEATABLE_KEYS = ("run_dir", "checkpoint.resume")


class OneLineParser(argparse.ArgumentParser):
    """Argument parser whose errors are one line and exit code 2, without a page of usage."""

    def error(self, message: str) -> typing.NoReturn:
        refuse(ConfigError(f"{message}; --help says more"))


class OverridesParser(OneLineParser):
    """Parser for options and `section.key=value` words in any order."""

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        words = sys.argv[1:] if words is None else words
        takes_value = {
            name: action.nargs != 0 for name, action in self._option_string_actions.items()
        }
        for error in _misspelt_words(words, takes_value):
            refuse(ConfigError(error))
        args = self.parse_intermixed_args(words)
        for error in _repeated_keys(words, args.overrides):
            refuse(ConfigError(error))
        return args


def number_of_ranks(num_ranks: int | None = None) -> int:
    """Returns `num_ranks`, else WORLD_SIZE, else 1. Raises ConfigError if what torchrun sets is no
    number."""
    # torchrun sets all four; one that is left from elsewhere may be anything.
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK"):
        text = os.environ.get(name)
        low = 1 if name.endswith("SIZE") else 0
        if text is not None and not (text.isdecimal() and int(text) >= low):
            raise ConfigError(
                f"{name} must be a whole number from {low} on; got {text!r}; "
                f"torchrun sets it: unset {name}, or start by torchrun"
            )
    return num_ranks or int(os.environ.get("WORLD_SIZE", "1"))


def _repeated_keys(words: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Yields an error for each key with two values: nobody can know which one was meant."""
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        rule = "a run has one file, whose values overrides replace: section.key=value"
        yield f"--config is given twice; {rule}"
    values: dict[str, str] = {}
    for override in overrides:
        name, _, value = override.partition("=")
        if values.setdefault(name, value) != value and name not in _REPEATABLE_KEYS:
            yield f"{name} is given twice, with two values; leave one out"


def _misspelt_words(words: Sequence[str], takes_value: dict[str, bool]) -> Iterator[str]:
    """Yields an error for each word that is no option, no value of an option and no override."""
    # Words are taken from the front; an option takes its value with it.
    remaining_words = list(words)
    while remaining_words:
        word = remaining_words.pop(0)
        name, equals, text = word.partition("=")
        option = re.fullmatch(r"--?([A-Za-z][\w.-]*)", name)
        is_key = not text and re.fullmatch(r"[A-Za-z_][\w.]*", name)
        if word in takes_value or name in takes_value:
            if takes_value.get(name) and not equals and remaining_words:
                remaining_words.pop(0)
        elif option:
            value = text if equals else _pop_value(remaining_words)
            # A similar option counts more than a fixed remedy.
            similar = difflib.get_close_matches(name, takes_value, n=1, cutoff=0.8)
            remedy = find_remedy("--", option[1].replace("-", "_"))
            if similar:
                remedy = f"did you mean {similar[0]}?"
            rule = f"{name}: no such option; {remedy}"
            yield rule if remedy else _advise(option[1], value, "an override has no dashes")
        elif is_key and (remaining_words[:1] == ["="] or _is_value(remaining_words)):
            # "key = value", "key =value", "key= value" or "key value"
            value = remaining_words.pop(0)[1:] if remaining_words[0].startswith("=") else ""
            value = value or _pop_value(remaining_words)
            yield _advise(name, value, "no spaces around the equals sign")


def _is_value(words: Sequence[str]) -> bool:
    """Returns True if the first of `words` can only be the value of the word before it."""
    if not words:
        return False
    is_option_or_override = re.match(r"-{1,2}[A-Za-z]|[A-Za-z_][\w.]*=", words[0])
    return words[0].startswith("=") or not is_option_or_override


def _pop_value(words: list[str]) -> str | None:
    """Removes the first of `words` if it is a value, and returns it; else returns None."""
    return words.pop(0) if _is_value(words) else None


def _advise(name: str, value: str | None, rule: str) -> str:
    """Returns the error with the override that was probably meant, under our key's name."""
    all_keys = key_names(Config)
    key = name
    translation = None
    if name not in all_keys and not name.startswith("rewards."):
        translation = translate_key(name)
        if translation is None:
            key = name.replace("-", "_")
            same_name = keys_named(key.rpartition(".")[2], all_keys)
            if len(same_name) == 1:
                key = same_name[0]
            elif "." not in name:
                return f"{name}: neither an option nor a key; --help lists both"
    if translation is not None:
        if "nothing here" in translation:
            return translation
        # The line names our keys: "here optimizer.lr (...)". The value is copied only where it
        # means the same.
        lists = re.findall(r"here ([\w., ]+?)(?= \(|;|$)", translation)
        keys = {key for names in lists for key in names.split(", ")}
        key = keys.pop() if len(keys) == 1 else "section.key"
        value = value if equivalent_key(name) else None
    example = shlex.quote(f"{key}={'value' if value is None else value}")
    return f"{translation}; {rule}: {example}" if translation else f"{name}: {rule}: {example}"
