"""Command lines with overrides: what people write otherwise elsewhere costs one line that says how it is written."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shlex
import sys
import typing
from collections.abc import Iterator, Sequence

from grpo_spmd.config.coerce import key_names
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.schema import Config


class OneLineParser(argparse.ArgumentParser):
    """A mistake is one line and exit code 2, no page of usage."""

    def error(self, message: str) -> typing.NoReturn:
        refuse(ConfigError(f"{message}; --help says more"))


class OverridesParser(OneLineParser):
    """Options anywhere between `section.key=value` words."""

    def parse(self, words: Sequence[str] | None = None) -> argparse.Namespace:
        words = sys.argv[1:] if words is None else words
        takes_value = {
            name: action.nargs != 0 for name, action in self._option_string_actions.items()
        }
        if found := next(_misspelt(words, takes_value), None):
            refuse(ConfigError(found))
        args = self.parse_intermixed_args(words)
        if found := next(_given_twice(words, args.overrides), None):
            refuse(ConfigError(found))
        return args


def number_of_ranks(given: int | None = None) -> int:
    """`given`, else WORLD_SIZE, else 1. ConfigError where what torchrun sets is not a number."""
    for name, least in (("WORLD_SIZE", 1), ("LOCAL_WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0)):
        text = os.environ.get(name)
        if text is not None and not (text.isdecimal() and int(text) >= least):
            rule = f"must be a whole number from {least} on; got {text!r}"
            raise ConfigError(
                f"{name} {rule}; torchrun sets it: unset {name}, or start by torchrun"
            )
    return given or int(os.environ.get("WORLD_SIZE", "1"))


def _given_twice(words: Sequence[str], overrides: Sequence[str]) -> Iterator[str]:
    """Of two values for one key neither is surely the one that was meant. Launch scripts put a run_dir and a resume of
    their own before or after what was typed, so that of these the last counts."""
    if sum(word.partition("=")[0] == "--config" for word in words) > 1:
        yield "--config is given twice; a run has one file, whose values overrides replace: section.key=value"
    given: dict[str, str] = {}
    for name, _, value in (override.partition("=") for override in overrides):
        if given.setdefault(name, value) != value and name not in ("run_dir", "checkpoint.resume"):
            yield f"{name} is given twice, with two values; leave one out"


def _misspelt(words: Sequence[str], takes_value: dict[str, bool]) -> Iterator[str]:
    """What is wrong with each word that is neither an option, the value of one, nor an override."""
    left = list(words)
    while left:
        word = left.pop(0)
        option, equals, text = word.partition("=")
        if word in takes_value or option in takes_value:
            if takes_value.get(option) and not equals and left:
                left.pop(0)
        elif found := re.fullmatch(r"--?([A-Za-z][\w.-]*)", option):
            value = text if equals else _taken(left)
            close = difflib.get_close_matches(option, takes_value, n=1, cutoff=0.8)
            instead = (
                f"did you mean {close[0]}?" if close else _OTHERWISE.get(found[1].replace("-", "_"))
            )
            yield f"{option}: no such option; {instead}" if instead else _advice(found[1], value)
        elif (
            not text
            and re.fullmatch(r"[A-Za-z_][\w.]*", option)
            and (left[:1] == ["="] or _is_value(left))
        ):
            is_spaced = left[0].startswith("=")
            value = (left.pop(0)[1:] or _taken(left)) if is_spaced else _taken(left)
            yield _advice(option, value, "no spaces around the equals sign")


def _is_value(left: Sequence[str]) -> bool:
    """The next word can only belong to this one."""
    return bool(left) and (
        left[0].startswith("=") or not re.match(r"-{1,2}[A-Za-z]|[A-Za-z_][\w.]*=", left[0])
    )


def _taken(left: list[str]) -> str | None:
    return left.pop(0) if _is_value(left) else None


_OTHERWISE = {
    "c": "--config x.yaml",
    **dict.fromkeys(("cfg", "conf", "config_file", "config_name", "config_path"), "--config x.yaml"),
    **dict.fromkeys(("nproc", "nproc_per_node", "num_processes"), "grpo-spmd train --nproc N, or torchrun's "
        "--nproc-per-node N before -m"),
    "nnodes": "grpo-spmd train --nnodes N, or torchrun's --nnodes N before -m",
    "version": "python -c 'import grpo_spmd; print(grpo_spmd.__version__)'",
    **dict.fromkeys(("bench", "profile"), "benchmarks/README.md has the commands that measure"),
}  # fmt: skip


def _advice(name: str, value: str | None, rule: str = "an override has no dashes") -> str:
    """The key by our name, with the value where it means the same there."""
    from grpo_spmd.config.aliases import known_elsewhere, same_here
    from grpo_spmd.config.coerce import keys_named

    known, said, key = key_names(Config), known_elsewhere(name), name
    if name in known or name.startswith("rewards."):
        said = None
    elif said is None:
        last = name.replace("-", "_").rpartition(".")[2]
        ours = keys_named(last, known)
        if len(ours) != 1 and "." not in name:
            return f"{name}: neither an option nor a key; --help lists both"
        key = ours[0] if len(ours) == 1 else name.replace("-", "_")
    else:
        keys = {
            key
            for found in re.findall(r"here ([\w., ]+?)(?= \(|;|$)", said)
            for key in found.split(", ")
        }
        key, value = (
            (keys.pop() if len(keys) == 1 else "section.key"),
            value if same_here(name) else None,
        )
        if "nothing here" in said:
            return said
    example = shlex.quote(f"{key}={'value' if value is None else value}")
    return f"{said or name}{'; ' if said else ': '}{rule}: {example}"
