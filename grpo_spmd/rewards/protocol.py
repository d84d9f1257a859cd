"""The reward protocol: TRL's signature, several functions with weights, and what failures mean.

A reward function is `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`,
sync or async; an object with __call__ and a partial are functions too. trl.py has what else TRL's
trainer gives it. `prompts` and `completions` are strings; for chat prompts, message lists, a
completion being `[{"role": "assistant", "content": text}]`. The data set's other columns arrive as
keyword lists, aligned with `prompts`. A worker process (pool.py) calls it for one group at a time,
in evaluation for a single completion, so that its result does not depend on how groups are spread
over ranks. Module state is each worker's own.

The status of a completion, for each function (`ScoredRollouts.statuses`):
* "ok": a finite number.
* "not_applicable": None. The completion's reward is the weighted sum of the other functions.
* "error": the function raised, exited, crashed, or returned NaN, infinity or text.
* "timeout": it took longer than `reward_pool.timeout_s` and was killed, with the processes it had
started.

Where the call for a group fails, each completion is tried in a call of its own, with the whole
deadline: what fails then is that completion's failure. A completion with an "error" or a "timeout",
or to which no function applies, is left out of its group's statistics and of the loss, and counted;
it is never taken for 0. Where a function fails for `reward_pool.max_error_frac` of a step's
completions, all ranks stop, with the function's traceback. So they do at once where no completion
is to blame: it returned a list of the wrong length, or raised for every group that it was called
with, and for none of their completions alone.
"""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.named import (
    PYTHON_MARK,
    Modules,
    check_callable,
    load_named,
    registered_function,
)
from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation
from grpo_spmd.rewards.trl import (
    CALL_COLUMNS,
    RewardError,
    callable_name,
    check_args,
    trl_arguments,
)
from grpo_spmd.rewards.verifiers import SHIPPED, matches_format, run_tests


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """The facts that the pool knows about a reward, whose function lives in other processes."""

    # The name in metrics.
    name: str
    # The weight in the sum of rewards.
    weight: float
    # The columns without which the function cannot be called.
    needs: Sequence[str] = ()
    # The names of TRL's extra arguments that it takes (trl.py).
    takes: Sequence[str] = ()
    # If True, each completion is a call of its own, with the whole deadline.
    one_at_a_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Reward(RewardFacts):
    """A reward with its function."""

    function: Callable[..., Any]
    # If True, it is called in the environments' processes.
    looks_at_environments: bool = False


def load_rewards(
    configs: Sequence[RewardConfig], timeout_s: float = math.inf, modules: Modules | None = None
) -> list[Reward]:
    """Returns the functions that the config names, except reward models and the engine's judges.

    `timeout_s` is the time after which the caller ends a call; `modules` is as in load_named.
    Raises ConfigError for a function that does not exist, wrong arguments, or a repeated name.
    """
    rewards: list[Reward] = []
    names: set[str] = set()
    for index, config in enumerate(configs):
        entry = f"rewards.{index}"
        name = config.metric_name
        if name in names:
            raise ConfigError(
                f"{entry}.name: {name!r} is given twice; its metrics would overwrite each other"
            )
        names.add(name)
        # Else rollout/reward_models.py or rollout/engine_judge.py scores.
        if config.uses_pool:
            rewards.append(_load_reward(config, entry, timeout_s, modules))
    return rewards


def _load_reward(
    config: RewardConfig, entry: str, timeout_s: float, modules: Modules | None
) -> Reward:
    name = config.metric_name
    if config.url is not None:
        # A run without servers imports neither ssl nor a client.
        from grpo_spmd.rewards.remote.servers import ServerFunction

        asks = ServerFunction(config, entry)
        return Reward(
            name=name,
            weight=config.weight,
            needs=asks.form.needs,
            one_at_a_time=asks.form.one_at_a_time,
            function=asks,
        )
    if config.function is not None:
        function = _load_function(config.function, entry, modules)
    elif name in SHIPPED:
        function = SHIPPED[name]
    else:
        raise ConfigError(
            f"{entry}.name: no shipped reward {name!r}; there are {', '.join(sorted(SHIPPED))}"
        )
    return _with_args(name, function, config, entry=entry, timeout_s=timeout_s)


def check_error_rate(
    statuses: Sequence[Mapping[str, Mapping[str, int]]],
    first_errors: Sequence[str | None],
    max_error_frac: float,
) -> dict[str, float]:
    """Returns `reward/<name>/error_frac`, `.../timeout_frac` and `.../not_applicable_frac`.

    These are fractions of the completions. The arguments are `num_statuses` and `first_error` of
    every rank's `ScoredRollouts`; a rank that scored nothing has no statuses. Raises RewardError
    where "error" and "timeout" together reach `max_error_frac` for some function.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for by_name in statuses for name in by_name):
        counts = sum((Counter(by_name.get(name, {})) for by_name in statuses), Counter[str]())
        num_completions = max(counts.total(), 1)
        num_failed = counts["error"] + counts["timeout"]
        if num_failed and num_failed / num_completions >= max_error_frac:
            errors = [error for error in first_errors if error]
            # An error of this very function, if there is one.
            errors.sort(key=lambda error: not error.startswith(f"reward {name!r}"))
            raise RewardError(
                f"reward {name!r} gave no usable value for {num_failed} of {num_completions} "
                f"completions ({counts['error']} error, {counts['timeout']} timeout): "
                f"{num_failed / num_completions:.3g} is not under "
                f"reward_pool.max_error_frac={max_error_frac:g}. "
                f"The first failure:\n{[*errors, 'not recorded'][0]}"
            )
        for status in ("error", "timeout", "not_applicable"):
            metrics[f"reward/{name}/{status}_frac"] = counts[status] / num_completions
    return metrics


def _load_function(spec: str, entry: str, modules: Modules | None) -> Callable[..., Any]:
    if spec.startswith(PYTHON_MARK):
        return registered_function(spec, entry)
    function = load_named(spec, f"{entry}.function", "function", modules)
    if inspect.isclass(function):
        file, _, name = spec.rpartition(":")
        raise ConfigError(
            f"{entry}.function: {name} is a class; make an object of it in {file}, and name that"
        )
    return function


def _with_args(
    name: str, function: Callable[..., Any], config: RewardConfig, entry: str, timeout_s: float
) -> Reward:
    """Returns the reward of a Python function. Raises ConfigError if it cannot be called this
    way."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(
            f"{entry}.function: {config.function} has no readable signature; wrap it in a function"
        ) from None
    label = callable_name(function)
    check_callable(entry, label, function)
    args = config.args
    named = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    required = [n for n in named if parameters[n].default is inspect.Parameter.empty]
    options = named
    trl: tuple[str, ...] = ()
    if config.function is None:
        # The options of a shipped reward are its keyword-only parameters, all others are columns.
        label = name
        options = [
            n for n in named if parameters[n].kind is inspect.Parameter.KEYWORD_ONLY and n[0] != "_"
        ]
        missing = [n for n in required if n in options and n not in args]
        if missing:
            raise ConfigError(f"{entry}.args: {name} needs {missing[0]!r}")
    else:
        trl = trl_arguments(parameters)
    check_args(entry, label, args, options)
    needs = tuple(n for n in required if n not in (*args, *CALL_COLUMNS, *trl))
    if function is matches_format:
        _check_pattern(args["pattern"], entry)
    elif function is run_tests:
        _check_sandbox(args, entry)
        needs = (args.get("tests_column", "tests"),)
        args = {**args, "_wall_s": timeout_s - 1}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def call(**columns: Any) -> Any:
        keywords = {**columns, **args}
        if not takes_any:
            keywords = {n: value for n, value in keywords.items() if n in parameters}
        return function(**keywords)

    looks_at_environments = "environments" in parameters
    if looks_at_environments and config.is_measured:
        raise ConfigError(
            f"{entry}: {callable_name(function)} takes environments, and is called where they are, "
            "beside limits of calls; take timeout_s and max_* out"
        )
    # Each run of model-written code may take its whole time: a call for the group would need the
    # sum of them. And limits of calls count completions.
    has_limits = config.max_concurrent is not None or config.max_per_minute is not None
    return Reward(
        name=name,
        weight=config.weight,
        needs=needs,
        takes=trl,
        one_at_a_time=function is run_tests or has_limits,
        function=call,
        looks_at_environments=looks_at_environments,
    )


def _check_pattern(pattern: Any, entry: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{entry}.args.pattern: {pattern!r} is not a regular expression: {error}"
        ) from None


def _check_sandbox(args: Mapping[str, Any], entry: str) -> None:
    """Raises ConfigError for wrong options of `code`, and where code cannot be isolated."""
    for key in ("time_s", "memory_mib"):
        value = args.get(key, 1)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ConfigError(f"{entry}.args.{key} must be a positive number; got {value!r}")
    for key, kind in (("tests_column", str), ("partial_credit", bool)):
        if not isinstance(args.get(key, kind()), kind):
            raise ConfigError(f"{entry}.args.{key} must be a {kind.__name__}; got {args[key]!r}")
    isolation = args.get("isolation", "required")
    if isolation not in ("required", "none"):
        raise ConfigError(f'{entry}.args.isolation must be "required" or "none"; got {isolation!r}')
    if isolation == "required":
        try:
            check_isolation()
        except SandboxError as error:
            raise ConfigError(
                f'{entry}: {error}; to run it unprotected, set args.isolation to "none"'
            ) from None
