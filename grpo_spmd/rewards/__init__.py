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
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config import ConfigError, RewardConfig
from grpo_spmd.data_types import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.verifiers import SHIPPED


class RewardError(RuntimeError):
    """A reward function broke its contract in a way that belongs to no one sample."""


@dataclass(frozen=True)
class Reward:
    """A reward function under its metric's name, with its factor in the sum."""

    name: str
    function: Callable[..., Any]
    weight: float


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
        rewards.append(Reward(name, _with_args(function, config.args, where), config.weight))
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
    prompts, completions, completion_ids = [], [], []
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
    for reserved in ("prompts", "completions", "completion_ids"):
        columns.pop(reserved, None)

    results = asyncio.run(_call_all(rewards, prompts, completions, completion_ids, columns))
    for reward, values in zip(rewards, results, strict=True):
        scored.by_name[reward.name] = [_as_reward(value) for value in values]
    scored.rewards = [_weighted_sum([(r.weight, scored.by_name[r.name][i]) for r in rewards]) for i in range(len(prompts))]
    return scored


async def _call_all(rewards: Sequence[Reward], prompts: Any, completions: Any, completion_ids: Any, columns: Any) -> list[Any]:
    """Sync functions run one after the other on the main thread (signal-based deadlines work nowhere else), async ones together."""

    async def call(reward: Reward) -> Any:
        try:
            values = reward.function(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
            if inspect.isawaitable(values):
                values = await values
        except Exception as error:
            raise RewardError(f"reward {reward.name!r} raised {type(error).__name__}: {error}") from error
        if isinstance(values, str | dict) or not hasattr(values, "__len__"):
            raise RewardError(f"reward {reward.name!r} must return a list of numbers or None; got {type(values).__name__}")
        if len(values) != len(prompts):
            raise RewardError(f"reward {reward.name!r} must return one value a completion: {len(prompts)}; got {len(values)}")
        return values

    return await asyncio.gather(*(call(reward) for reward in rewards))


def _as_reward(value: Any) -> float | None:
    """None stays None ("does not apply"), a finite number becomes a float, everything else NaN ("unusable")."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def _weighted_sum(parts: Sequence[tuple[float, float | None]]) -> float | None:
    """The sum over the functions that apply; None where none does or where one gave something unusable."""
    applying = [(weight, value) for weight, value in parts if value is not None]
    if not applying or any(math.isnan(value) for _, value in applying):
        return None
    return sum(weight * value for weight, value in applying)


def _load_function(spec: str, where: str) -> Callable[..., Any]:
    file, colon, name = spec.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ConfigError(f'{where}.function must be "file.py:function"; got {spec!r}')
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"{where}.function: there is no file {file}")
    module_spec = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickling look their module up there
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:
        line = _line_in(error, path)
        raise ConfigError(f"{where}.function: {file}{line} cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{where}.function: {file} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _line_in(error: BaseException, path: Path) -> str:
    if isinstance(error, SyntaxError):
        return f":{error.lineno}"
    traceback, line = error.__traceback__, ""
    while traceback is not None:
        if Path(traceback.tb_frame.f_code.co_filename) == path:
            line = f":{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def _with_args(function: Callable[..., Any], args: dict[str, Any], where: str) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    unknown = [name for name in args if name not in parameters and not takes_any]
    missing = [
        name
        for name, p in parameters.items()
        if function in SHIPPED.values() and p.kind is p.KEYWORD_ONLY and p.default is p.empty and name not in args
    ]
    if unknown or missing:
        what = f"does not take {unknown[0]!r}" if unknown else f"needs {missing[0]!r}"
        raise ConfigError(f"{where}.args: {getattr(function, '__name__', 'the function')} {what}")

    def call(**columns: Any) -> Any:
        known = {**columns, **args}
        if not takes_any:  # a function without **columns gets what it names
            known = {name: value for name, value in known.items() if name in parameters}
        return function(**known)

    return call
