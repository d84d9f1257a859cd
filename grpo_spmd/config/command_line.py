"""Parses command lines with `section.key=value` overrides. Every mistake is reported in one line,
with exit code 2."""

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

# Launch scripts add these keys to the overrides that the user typed. The last value counts.
_REPEATABLE_KEYS = ("run_dir", "checkpoint.resume")


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports errors in one line with exit code 2, without the usage."""

    def error(self, message: str) -> typing.NoReturn:
        """Ends the process with the message. argparse calls this for every mistake."""
        refuse(ConfigError(f"{message}; --help says more"))


class OverridesParser(OneLineParser):
    """A parser of options and `section.key=value` overrides in any order. The overrides come after
    the other positional arguments."""

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        """Returns the parsed arguments of `words`, by default those of this process. Ends the
        process if they have a mistake."""
        words = sys.argv[1:] if words is None else words
        overrides_help = "values that replace those of the config"
        self.add_argument("overrides", nargs="*", metavar="section.key=value", help=overrides_help)
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
    """Returns `num_ranks`; if it is None, the variable WORLD_SIZE; if that is not set, 1. Raises
    ConfigError if a variable that torchrun sets is not a number."""
    # torchrun sets all four. Without torchrun one may be left in the environment with any value.
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
    """Raises ConfigError if --config is given twice, or a key twice with different values."""
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
    """Raises ConfigError for a word that is neither an option, nor the value of an option, nor an
    override."""
    # Words are removed from the front of the list, an option together with its value.
    remaining_words = list(words)
    while remaining_words:
        name, equals, text = remaining_words.pop(0).partition("=")
        next_word = remaining_words[0] if remaining_words else ""
        option = re.fullmatch(r"--?([A-Za-z][\w.-]*)", name)
        # The next word is a value if it is neither an option nor an override.
        is_value = next_word and not re.match(r"-{1,2}[A-Za-z]|[A-Za-z_][\w.]*=", next_word)
        if name in takes_value:
            if takes_value[name] and not equals:
                del remaining_words[:1]
        elif option:
            # The name of a similar option is better advice than the remedy in the table.
            similar = difflib.get_close_matches(name, takes_value, n=1, cutoff=0.8)
            remedy = find_remedy("--", option[1].replace("-", "_"))
            if similar:
                remedy = f"did you mean {similar[0]}?"
            if remedy:
                raise ConfigError(f"{name}: no such option; {remedy}")
            value = text if equals else next_word if is_value else "value"
            raise ConfigError(_advise(option[1], value, "an override has no dashes"))
        elif is_value and not text and re.fullmatch(r"[A-Za-z_][\w.]*", name):
            # The user typed "key = value", "key =value", "key= value" or "key value".
            value = "".join(remaining_words[:2]) if next_word == "=" else next_word
            raise ConfigError(_advise(name, value.lstrip("="), "no spaces around the equals sign"))


def _advise(name: str, value: str, rule: str) -> str:
    """Returns an error message with the override that was probably meant. `rule` is the rule that
    the words break."""
    if name in key_names(Config) or name.startswith("rewards."):
        return f"{name}: {rule}: {shlex.quote(f'{name}={value}')}"
    error = unknown_key(name, name.rpartition(".")[0], value)
    return f"{error}; {rule}: section.key=value"
