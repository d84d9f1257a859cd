"""Command lines with `section.key=value` overrides; every mistake is one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence

from grpo_spmd.config.coerce import find_remedy, key_names, unknown_key
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
        try:
            _check_words(words, takes_value)
            args = self.parse_intermixed_args(words)
            _check_repeated_keys(words, args.overrides)
        except ConfigError as error:
            refuse(error)
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


def _check_repeated_keys(words: Sequence[str], overrides: Sequence[str]) -> None:
    """Raises ConfigError for a key with two values: nobody can know which one was meant."""
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        raise ConfigError(
            "--config is given twice; a run has one file, whose values overrides replace: "
            "section.key=value"
        )
    values: dict[str, str] = {}
    for override in overrides:
        name, _, value = override.partition("=")
        if values.setdefault(name, value) != value and name not in _REPEATABLE_KEYS:
            raise ConfigError(f"{name} is given twice, with two values; leave one out")


def _check_words(words: Sequence[str], takes_value: Mapping[str, bool]) -> None:
    """Raises ConfigError for a word that is no option, no value of an option and no override."""
    # Words are taken from the front; an option takes its value with it.
    remaining_words = list(words)
    while remaining_words:
        name, equals, text = remaining_words.pop(0).partition("=")
        next_word = remaining_words[0] if remaining_words else ""
        option = re.fullmatch(r"--?([A-Za-z][\w.-]*)", name)
        # Anything but an option or another override.
        is_value = next_word and not re.match(r"-{1,2}[A-Za-z]|[A-Za-z_][\w.]*=", next_word)
        if name in takes_value:
            if takes_value[name] and not equals:
                del remaining_words[:1]
        elif option:
            # A similar option counts more than a fixed remedy.
            similar = difflib.get_close_matches(name, takes_value, n=1, cutoff=0.8)
            remedy = find_remedy("--", option[1].replace("-", "_"))
            if similar:
                remedy = f"did you mean {similar[0]}?"
            if remedy:
                raise ConfigError(f"{name}: no such option; {remedy}")
            value = text if equals else next_word if is_value else "value"
            raise ConfigError(_advise(option[1], value, "an override has no dashes"))
        elif is_value and not text and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            # "key = value", "key =value", "key= value" or "key value"
            value = "".join(remaining_words[:2]) if next_word == "=" else next_word
            raise ConfigError(_advise(name, value.lstrip("="), "no spaces around the equals sign"))


def _advise(name: str, value: str, rule: str) -> str:
    """Returns the error with the override that was probably meant."""
    if name in key_names(Config) or name.startswith("rewards."):
        return f"{name}: {rule}: {shlex.quote(f'{name}={value}')}"
    error = unknown_key(name, name.rpartition(".")[0], value)
    return f"{error}; {rule}: section.key=value"
