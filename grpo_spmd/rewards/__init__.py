"""The reward protocol: TRL's signature, several functions with weights, and one policy for what goes wrong.

A reward function is `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async. `prompts` and
`completions` are strings for plain prompts; for chat prompts they are message lists, a completion being
`[{"role": "assistant", "content": text}]`. Every other column of the data row arrives as a keyword list, aligned with `prompts`.

The policy for what goes wrong:

* None means "does not apply": the sample's reward is the weighted sum of the others.
* A value that cannot be a reward (NaN, infinite, not a number) belongs to one sample: that sample is left out of the group's
  statistics and of the loss, and counted. It is never taken for 0. The same holds where no function applies to a sample.
* What belongs to no one sample (an exception, a list of the wrong length) stops all ranks with the traceback.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import importlib.util
import inspect
import math
import os
import re
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config import ConfigError, RewardConfig
from grpo_spmd.data_types import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.verifiers import SHIPPED, matches_format

_ALWAYS_GIVEN = ("prompts", "completions", "completion_ids")


class RewardError(RuntimeError):
    """A reward function broke its contract in a way that belongs to no one sample."""


@dataclass(frozen=True)
class Reward:
    """A reward function under its metric's name, with its factor in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float
    needs: tuple[str, ...] = ()  # columns without which it cannot be called


def load_rewards(configs: Sequence[RewardConfig]) -> list[Reward]:
    """Find the functions that the config names.

    Raises:
        ConfigError: an unknown name, a file or function that does not exist, arguments that the function does not take, or one name twice.
    """
    rewards: list[Reward] = []
    for index, config in enumerate(configs):
        where = f"rewards.{index}"
        if config.function is not None:
            function = _load_function(config.function, where)
            name = config.name or config.function.rpartition(":")[2]
        else:
            name = str(config.name)
            if name not in SHIPPED:
                raise ConfigError(f"{where}.name: no shipped reward {name!r}; there are {', '.join(sorted(SHIPPED))}")
            function = SHIPPED[name]
        if name in {reward.name for reward in rewards}:
            raise ConfigError(f"{where}.name: {name!r} is given twice; its metrics would overwrite each other")
        rewards.append(_with_args(name, function, config, where))
    return rewards


def score_groups(rewards: Sequence[Reward], groups: Sequence[RolloutGroup], tokenizer: Any) -> ScoredRollouts:
    """Score every completion of `groups` in this process, so that `breakpoint()` in a reward function works.

    Raises:
        RewardError: a function raised or returned a list of another length; the message names it.
    """
    token_ids = [completion.token_ids for group in groups for completion in group.completions]
    texts = tokenizer.batch_decode(token_ids, skip_special_tokens=True) if token_ids else []
    scored = ScoredRollouts(texts=texts)
    if not groups:
        return scored
    prompts: list[Any] = []
    completions: list[Any] = []
    completion_ids: list[list[int]] = []
    columns: dict[str, list[Any]] = {}
    for group in groups:
        for sample, completion in enumerate(group.completions):
            text = texts[len(prompts)]
            prompts.append(group.prompt.text)
            completions.append(text if isinstance(group.prompt.text, str) else [{"role": "assistant", "content": text}])
            completion_ids.append(completion.token_ids)
            scored.rollout_ids.append(group.slot * len(group.completions) + sample)
    # Every column that any row has, so that a function's keyword lists are as long as `prompts`; a row without it holds None.
    for name in dict.fromkeys(name for group in groups for name in group.prompt.columns):
        columns[name] = [group.prompt.columns.get(name) for group in groups for _ in group.completions]
    for reserved in _ALWAYS_GIVEN:
        columns.pop(reserved, None)

    results = _call_all(rewards, {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
    for reward, values in zip(rewards, results, strict=True):
        scored.by_name[reward.name] = [_as_reward(value) for value in values]
    scored.rewards = [_weighted_sum([(r.weight, scored.by_name[r.name][i]) for r in rewards]) for i in range(len(prompts))]
    return scored


def _call_all(rewards: Sequence[Reward], keywords: dict[str, Any]) -> list[Any]:
    """Sync functions run one after the other on the main thread (signal-based deadlines work nowhere else), async ones together.

    No event loop runs around the sync ones, so that a function may call `asyncio.run` itself.
    """

    def failed(reward: Reward, error: BaseException) -> RewardError:
        return RewardError(f"reward {reward.name!r} raised {type(error).__name__}: {error}")

    async def finish(reward: Reward, values: Any) -> Any:
        try:
            return await values if inspect.isawaitable(values) else values
        except (Exception, SystemExit) as error:
            raise failed(reward, error) from error

    async def finish_all() -> list[Any]:
        return await asyncio.gather(*(finish(reward, values) for reward, values in zip(rewards, results, strict=True)))

    results: list[Any] = []
    try:
        for reward in rewards:
            try:
                results.append(reward.function(**keywords))
            except (Exception, SystemExit) as error:
                raise failed(reward, error) from error
        if any(inspect.isawaitable(values) for values in results):
            results = asyncio.run(finish_all())
    finally:
        for values in results:
            if inspect.iscoroutine(values):  # still not awaited because another function raised
                values.close()
    expected = len(keywords["prompts"])
    for reward, values in zip(rewards, results, strict=True):
        try:
            num_values = -1 if isinstance(values, str | bytes | dict | set) else len(values)
        except TypeError:
            num_values = -1
        if num_values < 0:
            raise RewardError(f"reward {reward.name!r} must return a list of numbers or None; got {type(values).__name__}")
        if num_values != expected:
            raise RewardError(f"reward {reward.name!r} must return one value a completion: {expected}; got {num_values}")
    return results


def _as_reward(value: Any) -> float | None:
    """None stays None ("does not apply"), a finite number becomes a float, everything else NaN ("unusable")."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return math.nan
    return number if math.isfinite(number) else math.nan


def _weighted_sum(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """The sum over the functions that apply; None where none does or where one gave something unusable."""
    applying = [(weight, value) for weight, value in parts if value is not None]
    if not applying or any(math.isnan(value) for _, value in applying):
        return None
    total = sum(weight * value for weight, value in applying)
    return total if math.isfinite(total) else None


def _load_function(spec: str, where: str) -> Callable[..., Any]:
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{where}.function must be "file.py:function"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{where}.function: there is no file {file}")
    loader = _UncachedLoader(f"reward_{path.stem}", os.path.abspath(path))
    module_spec = importlib.util.spec_from_file_location(loader.name, path, loader=loader)
    assert module_spec is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up there
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        line = _line_in(error, os.path.abspath(path))
        raise ConfigError(f"{where}.function: {file}{line} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where}.function: {file} has no function {name!r}")
    return function  # type: ignore[no-any-return]


class _UncachedLoader(importlib.machinery.SourceFileLoader):
    """Leaves no __pycache__ beside the user's file, and never runs an older version of it from there."""

    def get_code(self, fullname: str) -> types.CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _line_in(error: BaseException, path: str) -> str:
    if isinstance(error, SyntaxError) and error.filename == path and error.lineno:
        return f":{error.lineno}"
    traceback, line = error.__traceback__, ""
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == path:
            line = f":{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _with_args(name: str, function: Callable[..., Any], config: RewardConfig, where: str) -> Reward:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{where}.function: {config.function} has no readable signature; wrap it in a function") from None
    shown, args = getattr(function, "__name__", name), config.args
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes: list[str] = list(parameters)
    if config.function is None:  # a shipped one: its options are its keyword-only parameters, all else are columns
        takes = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        missing = [n for n in required if n in takes and n not in args]
        if missing:
            raise ConfigError(f"{where}.args: {name} needs {missing[0]!r}")
    unknown = [n for n in args if n not in takes and not (takes_any and config.function is not None)]
    if unknown:
        raise ConfigError(f"{where}.args: {name if config.function is None else shown} does not take {unknown[0]!r}")
    if function is matches_format:
        try:
            re.compile(args["pattern"])
        except (re.error, TypeError) as error:
            raise ConfigError(f"{where}.args.pattern: {args['pattern']!r} is not a regular expression: {error}") from None

    def call(**columns: Any) -> Any:
        known = {**columns, **args}
        if not takes_any:  # a function without **columns gets what it names
            known = {name: value for name, value in known.items() if name in parameters}
        return function(**known)

    return Reward(name, call, config.weight, tuple(n for n in required if n not in args and n not in _ALWAYS_GIVEN))
