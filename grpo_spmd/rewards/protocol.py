"""The reward protocol: TRL's signature, several functions with weights, and what failures mean.

A reward function is `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`,
sync or async; it may also be an object with __call__ or a functools.partial. `prompts` and
`completions` are lists of strings, or of message lists if prompts are chats; a completion then is
`[{"role": "assistant", "content": text}]`. The other columns of the data set are passed as keyword
arguments, as lists aligned with `prompts`. trl.py describes the further arguments that TRL's
trainer passes. A worker process (pool.py) calls the function for one group at a time, or for a
single completion in evaluation, so that its result does not depend on how groups are distributed
over ranks. Each worker has its own copy of the module's state.

The status of a completion, for each function (`ScoredRollouts.statuses`):
* "ok": the function returned a finite number.
* "not_applicable": it returned None. The completion's reward is the weighted sum of the other
  functions.
* "error": it raised, exited, crashed, or returned NaN, infinity or text.
* "timeout": it took longer than `reward_pool.timeout_s` and was killed, together with the processes
  that it had started.

If the call for a group fails, the function is called again for each of its completions alone, each
time with the whole `timeout_s`. A completion whose own call fails has the status "error" or
"timeout". Such a completion, and one to which no function applies, is counted and left out of its
group's statistics and of the loss; its reward is never taken to be 0.

If a function fails for at least `reward_pool.max_error_frac` of a step's completions, all ranks
stop and show the function's traceback. They stop at once if no completion can be the cause: the
function returned a list of the wrong length, or it raised for every group and then for none of the
completions alone. A function of weight 0, beside functions with other weights, is only watched: its
values and failures affect nothing but its own metrics.
"""

from __future__ import annotations

import difflib
import inspect
import math
import os
import re
import typing
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.records import Fields
from grpo_spmd.rewards.named import (
    PYTHON_MARK,
    Modules,
    load_named,
    registered_function,
)
from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation
from grpo_spmd.rewards.trl import (
    CALL_COLUMNS,
    EXTRA_ARGUMENTS,
    Function,
    RewardError,
    callable_name,
    unwrap_partial,
)
from grpo_spmd.rewards.verifiers import SHIPPED, run_tests


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """What a rank knows about a reward whose function exists only in the worker processes."""

    # The name in metrics.
    name: str
    # The weight in the sum of rewards.
    weight: float
    # The columns of the data set that the function requires.
    needs: Sequence[str] = ()
    # The names of TRL's extra arguments that the function takes (trl.py).
    takes: Sequence[str] = ()
    # If True, the function is called for one completion at a time, each time with the whole
    # timeout.
    one_at_a_time: bool = False


@dataclass(frozen=True, kw_only=True)
class Reward(RewardFacts):
    """A reward with its function, which a worker process calls."""

    function: Function
    # If True, the function takes `environments`, and is called in the environments' processes.
    looks_at_environments: bool = False


def load_rewards(
    configs: Sequence[RewardConfig],
    timeout_s: float = math.inf,
    modules: Modules | None = None,
    *,
    variables: Mapping[str, str] = os.environ,
) -> list[Reward]:
    """Returns the rewards that the pool computes: functions and servers, but neither reward models
    nor judges that the run's own engine serves.

    `timeout_s` is the time after which the caller ends a call; `modules` is as in load_named;
    `variables` are the environment variables from which `headers_env` takes values.
    Raises ConfigError for a function that does not exist, wrong arguments, or a repeated name.
    """
    rewards = []
    names: set[str] = set()
    for index, config in enumerate(configs):
        entry = f"rewards.{index}"
        name = config.metric_name
        if name in names:
            raise ConfigError(
                f"{entry}.name: {name!r} is given twice; its metrics would overwrite each other"
            )
        names.add(name)
        # Other rewards are computed by rollout/reward_models.py.
        if config.uses_pool:
            if config.url is None:
                rewards.append(_load_function(config, entry, timeout_s, modules))
            else:
                rewards.append(_load_server(config, entry, variables))
    return rewards


def _load_server(config: RewardConfig, entry: str, variables: Mapping[str, str]) -> Reward:
    """Returns a reward whose function sends requests to the server of `config.url`."""
    # Imported here, so that a run without reward servers loads neither ssl nor an HTTP client.
    from grpo_spmd.rewards.servers import ServerFunction

    function = ServerFunction(config, entry, variables)
    return Reward(
        name=config.metric_name,
        weight=config.weight,
        needs=function.form.needs,
        one_at_a_time=function.form.one_at_a_time,
        function=function,
    )


def _load_function(
    config: RewardConfig, entry: str, timeout_s: float, modules: Modules | None
) -> Reward:
    """Returns a shipped reward, one from the user's file, or one given to grpo_spmd.run."""
    name = config.metric_name
    spec = config.function
    if spec is None:
        if name not in SHIPPED:
            rule = f"no shipped reward {name!r}; there are {', '.join(sorted(SHIPPED))}"
            raise ConfigError(f"{entry}.name: {rule}")
        function = SHIPPED[name]
    elif spec.startswith(PYTHON_MARK):
        function = registered_function(spec, entry)
    else:
        function = load_named(spec, f"{entry}.function", "function", modules)
        if inspect.isclass(function):
            file, _, class_name = spec.rpartition(":")
            rule = f"{class_name} is a class; make an object of it in {file}, and name that"
            raise ConfigError(f"{entry}.function: {rule}")
    return _with_args(name, function, config, entry=entry, timeout_s=timeout_s)


def watched_rewards(weights: Mapping[str, float]) -> frozenset[str]:
    """Returns the names of the rewards that are only watched: those of weight 0, if another reward
    has a weight.

    They enter no sum, and their failures do not stop the run. If all weights are 0, none is only
    watched: the policy learns from a teacher alone, and the rewards measure its progress.
    """
    return frozenset(
        name for name, weight in weights.items() if not weight and any(weights.values())
    )


def check_error_rate(
    statuses: Sequence[Mapping[str, Mapping[str, int]]],
    first_errors: Sequence[str | None],
    max_error_frac: float,
    *,
    watched: Collection[str] = (),
) -> dict[str, float]:
    """Returns `reward/<name>/error_frac`, `.../timeout_frac` and `.../not_applicable_frac`.

    These are fractions of the step's completions with that status. `statuses` and `first_errors`
    have every rank's `num_statuses` and `first_error` of `ScoredRollouts`; a rank that scored
    nothing has no statuses. Raises RewardError if the fraction of "error" and "timeout" together is
    at least `max_error_frac` for a function that is not in `watched`.
    """
    metrics = {}
    for name in dict.fromkeys(name for by_name in statuses for name in by_name):
        counts = Counter[str]()
        for by_name in statuses:
            counts.update(by_name.get(name, {}))
        num_completions = max(counts.total(), 1)
        num_failed = counts["error"] + counts["timeout"]
        has_too_many = num_failed and num_failed / num_completions >= max_error_frac
        if has_too_many and name not in watched:
            errors = [error for error in first_errors if error]
            # Begin with an error of this function, if any rank reported one.
            errors.sort(key=lambda error: not error.startswith(f"reward {name!r}"))
            raise RewardError.about(
                [*errors, None][0],
                f"reward {name!r} gave no usable value for {num_failed} of {num_completions} "
                f"completions ({counts['error']} error, {counts['timeout']} timeout): "
                f"{num_failed / num_completions:.3g} is not under "
                f"reward_pool.max_error_frac={max_error_frac:g}",
            )
        for status in ("error", "timeout", "not_applicable"):
            metrics[f"reward/{name}/{status}_frac"] = counts[status] / num_completions
    return metrics


def _with_args(
    name: str, function: Function, config: RewardConfig, entry: str, timeout_s: float
) -> Reward:
    """Returns a Reward that calls `function` with the columns that it takes and the config's
    `args`.

    `entry` names the reward in messages ("rewards.0"). Raises ConfigError if the function does not
    take the arguments that a reward is called with, or not these `args`.
    """
    args = config.args
    is_shipped = config.function is None
    label = name if is_shipped else callable_name(function)
    parameters = _callable_parameters(function, f"{entry}.function: {label}")
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        n: p
        for n, p in parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and n[0] != "_"
    }
    required = [n for n, p in named.items() if p.default is p.empty]
    takes = []
    columns = []
    if is_shipped:
        # The keyword-only parameters of a shipped reward are its options, all others are columns.
        options = [n for n, p in named.items() if p.kind is p.KEYWORD_ONLY]
        _check_args(f"{entry}.args", label, args, options)
        missing = [n for n in required if n in options and n not in args]
        if missing:
            raise ConfigError(f"{entry}.args: {name} needs {missing[0]!r}")
        _check_values(f"{entry}.args", args, function)
        # An option such as `column` names a column, or "column.key" for a value inside it.
        columns = [n for n in options if n.endswith("column")]
    else:
        _check_args(f"{entry}.args", label, args, named)
        takes = [n for n in EXTRA_ARGUMENTS if takes_any or n in parameters]
        # `environments` is passed only if it is required: in the reward pool it is always None.
        takes += [n for n in required if n == "environments"]
    needs = [n for n in required if n not in (*args, *CALL_COLUMNS, *takes)]
    needs += [args.get(n, named[n].default).partition(".")[0] for n in columns]
    if function is run_tests:
        try:
            if args.get("isolation") != "none":
                check_isolation()
        except SandboxError as error:
            rule = f'{error}; to run it unprotected, set args.isolation to "none"'
            raise ConfigError(f"{entry}: {rule}") from None
        args = {**args, "_wall_s": timeout_s - 1}

    def call(**columns: Any) -> Any:
        """Calls `function` with the config's `args` and, unless it takes **, only its columns."""
        keywords = {**columns, **args}
        if not takes_any:
            keywords = {n: value for n, value in keywords.items() if n in parameters}
        return function(**keywords)

    looks_at_environments = "environments" in parameters
    if looks_at_environments and config.is_measured:
        raise ConfigError(
            f"{entry}: {label} takes environments, so it is called in their processes, "
            "where no limits of calls apply; take timeout_s and max_* out"
        )
    return Reward(
        name=name,
        weight=config.weight,
        needs=tuple(needs),
        takes=tuple(takes),
        # Each run of model-written code may use up its time limit; one call for a whole group would
        # need the sum of these limits. And call limits count each completion as a call.
        one_at_a_time=function is run_tests or bool(config.max_concurrent or config.max_per_minute),
        function=call,
        looks_at_environments=looks_at_environments,
    )


def _callable_parameters(function: Function, label: str) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a reward function.

    Raises ConfigError if it cannot be called by keywords alone, takes neither `completions` nor
    `completion_ids`, or is a generator.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{label} has no readable signature; wrap it in a function") from None
    has_positional = any(
        p.kind is p.POSITIONAL_ONLY and p.default is p.empty for p in parameters.values()
    )
    sees_completions = any(
        p.kind is p.VAR_KEYWORD
        or (n in ("completions", "completion_ids") and p.kind is not p.POSITIONAL_ONLY)
        for n, p in parameters.items()
    )
    function = unwrap_partial(function)
    body = function if inspect.isroutine(function) else type(function).__call__
    is_generator = inspect.isgeneratorfunction(body) or inspect.isasyncgenfunction(body)
    if has_positional or is_generator or not sees_completions:
        raise ConfigError(
            f"{label} must take completions or completion_ids by name, nothing by position alone, "
            "and return, not yield; write fn(prompts, completions, completion_ids, **columns), "
            "which returns a list of numbers or None"
        )
    return parameters


def _check_args(key: str, label: str, args: Collection[str], options: Collection[str]) -> None:
    """Raises ConfigError for a name in the config's `args` that is not one of the function's
    `options`, or that the trainer itself passes.

    This holds for a function with **kwargs too: a misspelt option would have no effect.
    """
    for name in args:
        if name in (*CALL_COLUMNS, *EXTRA_ARGUMENTS, "environments"):
            raise ConfigError(f"{key}: {name!r} is given by the trainer; take it out")
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{key}: {label} does not take {name!r}{hint}")


def _check_values(key: str, args: Fields, function: Function) -> None:
    """Raises ConfigError for an option of a shipped reward whose value has the wrong type."""
    hints = typing.get_type_hints(function, include_extras=True)
    for name, value in args.items():
        try:
            msgspec.convert(value, hints[name])
            if name == "pattern":
                re.compile(value)
        except (msgspec.ValidationError, re.error) as error:
            rule = "is not a regular expression: " if isinstance(error, re.error) else ""
            raise ConfigError(f"{key}.{name} ({value!r}): {rule}{error}") from None
