"""The reward protocol: TRL's signature, several functions with weights, and one policy for what goes wrong.

A reward function is `fn(prompts, completions, completion_ids, **columns) -> list[float | None]`, sync or async; an
object with __call__ and a partial are functions too. trl.py has what else TRL's trainer gives it.
`prompts` and `completions` are strings; for chat prompts, message lists, a completion being `[{"role": "assistant",
"content": text}]`. The data set's other columns arrive as keyword lists, aligned with `prompts`. A worker process
(pool.py) calls it for one group at a time, in evaluation for a single completion, so that its result does not depend on
how groups are spread over ranks. Module state is each worker's own.

What comes of a completion, for each function (`ScoredRollouts.statuses`):
* "ok": a finite number.
* "not_applicable": None. The completion's reward is the weighted sum of the other functions.
* "error": the function raised, exited, crashed, or returned NaN, infinity or text.
* "timeout": it took longer than `reward_pool.timeout_s` and was killed, with the processes it had started.

Where the call for a group fails, each completion is tried in a call of its own, with the whole deadline: what fails
then is that completion's failure. A completion with an "error" or a "timeout", or to which no function applies, is left
out of its group's statistics and of the loss, and counted; it is never taken for 0. Where a function fails for
`reward_pool.max_error_frac` of a step's completions, all ranks stop, with the function's traceback. So they do at once
where no completion is to blame: it returned a list of the wrong length, or raised for every group that it was called
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
from grpo_spmd.rewards.named import MARK, Modules, check_callable, given_function, load_named
from grpo_spmd.rewards.sandbox.sandbox import SandboxError, check_isolation
from grpo_spmd.rewards.trl import CALL_COLUMNS, RewardError, callable_name, check_args, taken
from grpo_spmd.rewards.verifiers import SHIPPED, matches_format, run_tests


@dataclass(frozen=True, kw_only=True)
class RewardFacts:
    """What the pool knows of a reward, whose function lives in other processes."""

    name: str  # its metric's
    weight: float  # its factor in the sum
    needs: Sequence[str] = ()  # columns without which it cannot be called
    takes: Sequence[str] = ()  # of what trl.py gives
    one_at_a_time: bool = False  # each completion is a call of its own, with the whole deadline


@dataclass(frozen=True, kw_only=True)
class Reward(RewardFacts):
    function: Callable[..., Any]
    looks_at_environments: bool = False  # and is called where they are


def load_rewards(
    configs: Sequence[RewardConfig], timeout_s: float = math.inf, modules: Modules | None = None
) -> list[Reward]:
    """The functions that the config names; models, and the run's own engine, are none. ConfigError for one that is not
    there, wrong arguments, or a name twice. `timeout_s`: after which whoever calls them would end a call; `modules` as
    in load_named."""
    rewards: list[Reward] = []
    names: set[str] = set()
    for index, config in enumerate(configs):
        where, name = f"rewards.{index}", config.metric_name
        if name in names:
            raise ConfigError(
                f"{where}.name: {name!r} is given twice; its metrics would overwrite each other"
            )
        names.add(name)
        if (
            not config.uses_pool
        ):  # rollout/reward_models.py or rollout/engine_judge.py scores with it
            continue
        if config.url is not None:
            from grpo_spmd.rewards.remote.servers import server_reward

            rewards.append(server_reward(config, where))
            continue
        if config.function is not None:
            is_given, spec = config.function.startswith(MARK), config.function
            function = (
                given_function(spec, where) if is_given else _load_function(spec, where, modules)
            )
        elif name in SHIPPED:
            function = SHIPPED[name]
        else:
            raise ConfigError(
                f"{where}.name: no shipped reward {name!r}; there are {', '.join(sorted(SHIPPED))}"
            )
        rewards.append(_with_args(name, function, config, where, timeout_s))
    return rewards


def check_error_rate(
    statuses: Sequence[Mapping[str, Mapping[str, int]]],
    first_errors: Sequence[str | None],
    max_error_frac: float,
) -> dict[str, float]:
    """Metrics `reward/<name>/error_frac`, `.../timeout_frac`, `.../not_applicable_frac`, as shares of the completions.

    Takes `num_statuses` and `first_error` of every rank's `ScoredRollouts`; a rank that scored nothing has no statuses.
    Raises RewardError where "error" and "timeout" together reach `max_error_frac` for some function.
    """
    metrics: dict[str, float] = {}
    for name in dict.fromkeys(name for part in statuses for name in part):
        counts = sum((Counter(part.get(name, {})) for part in statuses), Counter[str]())
        num_completions = max(counts.total(), 1)
        failed = counts["error"] + counts["timeout"]
        if failed and failed / num_completions >= max_error_frac:
            errors = [error for error in first_errors if error]
            own = [error for error in errors if error.startswith(f"reward {name!r}")]
            first = [*own, *errors, "not recorded"][0]
            raise RewardError(
                f"reward {name!r} gave no usable value for {failed} of {num_completions} completions "
                f"({counts['error']} error, {counts['timeout']} timeout): {failed / num_completions:.3g} is not under "
                f"reward_pool.max_error_frac={max_error_frac:g}. The first failure:\n{first}"
            )
        for status in ("error", "timeout", "not_applicable"):
            metrics[f"reward/{name}/{status}_frac"] = counts[status] / num_completions
    return metrics


def _load_function(spec: str, where: str, modules: Modules | None) -> Callable[..., Any]:
    function = load_named(spec, f"{where}.function", "function", modules)
    if inspect.isclass(function):
        file, _, name = spec.rpartition(":")
        raise ConfigError(
            f"{where}.function: {name} is a class; make an object of it in {file}, and name that"
        )
    return function


def _with_args(
    name: str, function: Callable[..., Any], config: RewardConfig, where: str, timeout_s: float
) -> Reward:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        what = f"{config.function} has no readable signature"
        raise ConfigError(f"{where}.function: {what}; wrap it in a function") from None
    args, is_shipped = config.args, config.function is None
    check_callable(where, callable_name(function), function)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = [
        n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    required = [n for n in options if parameters[n].default is inspect.Parameter.empty]
    if is_shipped:  # its options are its keyword-only parameters, all else are columns
        options = [
            n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and not n.startswith("_")
        ]
        if missing := [n for n in required if n in options and n not in args]:
            raise ConfigError(f"{where}.args: {name} needs {missing[0]!r}")
    check_args(where, name if is_shipped else callable_name(function), args, options)
    trl = () if is_shipped else taken(parameters)
    if function is matches_format:
        try:
            re.compile(args["pattern"])
        except (re.error, TypeError) as error:
            what = f"{args['pattern']!r} is not a regular expression"
            raise ConfigError(f"{where}.args.pattern: {what}: {error}") from None
    needs = tuple(n for n in required if n not in (*args, *CALL_COLUMNS, *trl))
    if function is run_tests:
        _check_sandbox(args, where)
        needs = (args.get("tests_column", "tests"),)
        args = {**args, "_wall_s": timeout_s - 1}

    def call(**columns: Any) -> Any:
        known = {**columns, **args}
        return function(
            **(known if takes_any else {name: known[name] for name in known if name in parameters})
        )

    # Each run of model-written code may take its whole time: a call for the group would need the sum of them.
    alone = function is run_tests
    looks = "environments" in parameters
    if looks and config.is_measured:
        why = "takes environments, and is called where they are, beside limits of calls"
        raise ConfigError(f"{where}: {callable_name(function)} {why}; take timeout_s and max_* out")
    alone |= (
        config.max_concurrent is not None or config.max_per_minute is not None
    )  # which count completions
    return Reward(
        name=name, weight=config.weight, needs=needs, takes=trl, one_at_a_time=alone, function=call,
        looks_at_environments=looks,
    )  # fmt: skip


def _check_sandbox(args: Mapping[str, Any], where: str) -> None:
    for key in ("time_s", "memory_mib"):
        value = args.get(key, 1)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < math.inf
        ):
            raise ConfigError(f"{where}.args.{key} must be a positive number; got {value!r}")
    for key, kind in (("tests_column", str), ("partial_credit", bool)):
        if not isinstance(args.get(key, kind()), kind):
            raise ConfigError(f"{where}.args.{key} must be a {kind.__name__}; got {args[key]!r}")
    if args.get("isolation", "required") not in ("required", "none"):
        raise ConfigError(
            f'{where}.args.isolation must be "required" or "none"; got {args["isolation"]!r}'
        )
    if args.get("isolation") != "none":
        try:
            check_isolation()
        except SandboxError as error:
            raise ConfigError(
                f'{where}: {error}; to run it unprotected, set args.isolation to "none"'
            ) from None
