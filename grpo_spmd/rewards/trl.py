"""This module has the extra arguments that TRL's trainer passes to a reward function, and collects
what the function logs through them.

A function that has a parameter of that name, or takes **kwargs, gets these arguments:
- `trainer_state`: a TrainerState.
- `log_metric(name, value)`: logs a value. The mean over a step's calls becomes the metric
  `reward/<reward>/<name>`, in evaluation `eval/<set>/reward/<reward>/<name>`.
- `log_extra(column, values)`: stores one value for each completion, in one call or several, as
  `extra` in the rollout dump.
- `environments`: None. (Only a function that requires it gets it.)

What cannot be logged (a value that is not a finite number, an invalid name, too many names) is left
out with a warning. It never makes the reward fail or the run stop, since a bad name may come from a
completion. An extra column of the wrong length, however, is a fault of the function and stops the
run, as a list of rewards of the wrong length does.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_spmd.records import Fields

CALL_COLUMNS = ("prompts", "completions", "completion_ids")
EXTRA_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
# A function of the user, or another callable.
Function = Callable[..., Any]
# Counts by reward, then by status or kind of failure.
Counts = Mapping[str, Mapping[str, int]]
# By reward and metric: (the sum of each call's values, the number of values in all calls).
Logged = dict[str, dict[str, tuple[list[float], int]]]
# Metrics of each reward that the trainer itself writes; a function may not log these names.
_RESERVED_METRICS = (
    "mean", "std", "error_frac", "timeout_frac", "not_applicable_frac", "retried_frac",
    "call_s_p50", "call_s_p95", "retries",
)  # fmt: skip
_NAME = re.compile(r"\w[\w.:%@+=/ -]{0,79}")
# The most names of metrics, or of columns, and the most characters of a value that are logged.
_MAX_NAMES = 50
_MAX_CHARS = 10_000
# The largest absolute value of a metric: sums of larger values could overflow.
_MAX_VALUE = 1e250
# The largest absolute value of a reward: up to it, the variance of a group and advantages in
# float32 are finite.
MAX_REWARD = 1e30
# Parts of the messages about values of a wrong type.
NO_LIST = "must return a list of numbers or None"
NO_NUMBER = "which is no number"


class RewardError(RuntimeError):
    """Raised if rewards fail in a way that would stay hidden if completions were just left out."""

    # A failure report prints only the message, which has the traceback of the user's function; our
    # own traceback would say nothing more.
    says_all = True

    @classmethod
    def about(cls, first_error: str | None, rule: str) -> RewardError:
        """Returns an error that begins with the first line of `first_error`, goes on with `rule`,
        which says why the run stops, and ends with the other lines of `first_error` (a traceback).
        """
        if first_error is None:
            return cls(rule)
        reason, _, details = first_error.partition("\n")
        return cls(f"{reason}; {rule}\n{details}".rstrip())


@dataclass(eq=False)
class FailedCallError(Exception):
    """Raised if a reward's call to a server failed because of the server, the network or the
    credentials, rather than a fault in the reward's code. The message is one line.

    If `may_retry`, the call may be repeated, after `wait_s` seconds if the server has asked for a
    pause. `status` is the HTTP status of the response, if there was one.
    """

    message: str
    may_retry: bool = False
    wait_s: float | None = None
    status: int | None = None

    def __str__(self) -> str:
        return self.message


class BrokenContractError(Exception):
    """Raised for a fault of a reward function that no completion can have caused. The run stops."""


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run, with the names of transformers.TrainerState."""

    global_step: int = 0
    """Number of steps done, so 0 in the first. A step is a rollout phase, which may be followed by
    several optimizer steps."""
    max_steps: int = 0
    epoch: float = 0.0
    """Number of prompts drawn before this step, divided by the number of rows of the data set."""


@dataclass
class CallLog:
    """The metrics and columns that a reward function logs during one call."""

    num_completions: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    # Descriptions of what could not be logged, as the keys of a dict: each once, in order.
    left_out: dict[str, None] = field(default_factory=dict)

    def metric(self, name: str, value: Any) -> None:
        """Logs a value; passed to reward functions as TRL's `log_metric`."""
        number = as_number(value)
        if not _is_name(name) or name in _RESERVED_METRICS:
            self.left_out[f"the metric name {name!r:.100}"] = None
        elif isinstance(number, str) or not abs(number) < _MAX_VALUE:
            self.left_out[f"a value of the metric {name!r}: {number!s:.100}"] = None
        else:
            self.metrics.setdefault(name, []).append(number)

    def extra(self, column: str, values: Any) -> None:
        """Logs values for completions; passed to reward functions as TRL's `log_extra`.

        Raises BrokenContractError if `values` is not a list or other sequence of values.
        """
        if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__iter__"):
            raise BrokenContractError(
                f"log_extra({column!r:.100}) takes a list; got {type(values).__name__}"
            )
        if _is_name(column):
            self.columns.setdefault(column, []).extend(map(_as_json, values))
        else:
            self.left_out[f"the column name {column!r:.100}"] = None

    def reply(self) -> Fields:
        """Returns the log as fields of the worker's reply to the pool, leaving out empty ones.

        Raises BrokenContractError if a column does not have one value for each completion.
        """
        for column, values in self.columns.items():
            if len(values) != self.num_completions:
                raise BrokenContractError(
                    f"log_extra({column!r}) got {len(values)} values "
                    f"for {self.num_completions} completions"
                )
        for kind, names in (("metrics", self.metrics), ("columns", self.columns)):
            if len(names) > _MAX_NAMES:
                self.left_out[f"{len(names) - _MAX_NAMES} {kind} beyond {_MAX_NAMES}"] = None
        reply = {
            "metrics": {
                name: [math.fsum(values), len(values)]
                for name, values in limit_names(self.metrics).items()
            },
            "extra": limit_names(self.columns),
            "left_out": list(self.left_out)[:3],
        }
        return {name: value for name, value in reply.items() if value}


def as_number(value: Any) -> float | str:
    """Returns `value` as a float, which may be infinite or NaN.

    Returns a string that describes `value` if it is not a number.
    """
    if isinstance(value, str | bytes):
        return f"{repr(value)[:100]}, {NO_NUMBER}"
    try:
        return float(value)
    # For instance a tensor of several numbers, an int that is too large, or an error in the user's
    # __float__.
    except Exception as error:
        return f"a {type(value).__name__}, {NO_NUMBER} ({type(error).__name__})"


def as_reward(value: Any) -> float | str | None:
    """Returns the reward that a function returned as a finite float, or None if it returned None.

    Returns a string that says what is wrong if `value` cannot be used as a reward.
    """
    if value is None:
        return None
    number = as_number(value)
    if isinstance(number, str) or not math.isfinite(number):
        return f"returned {number}"
    return number if abs(number) <= MAX_REWARD else f"returned {number}, beyond {MAX_REWARD:g}"


def limit_names(by_name: Mapping[str, Any]) -> Fields:
    """Returns at most _MAX_NAMES entries of `by_name`, those whose names come first in the
    alphabet.

    Because of that order, limiting the merged entries of several calls gives the same result
    whether or not each call's entries were limited before.
    """
    return {name: by_name[name] for name in sorted(by_name)[:_MAX_NAMES]}


def _is_name(name: Any) -> bool:
    """Returns True if `name` may be the name of a metric or column (_NAME)."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _as_json(value: Any) -> Any:
    """Returns `value` if it is short enough as JSON, None for NaN or infinity, and otherwise the
    beginning of its text."""
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        # numpy scalars and torch tensors of one number have item().
        text = json.dumps(value, allow_nan=False, default=lambda number: number.item())
        return json.loads(text) if len(text) <= _MAX_CHARS else text[:_MAX_CHARS]
    except Exception:
        # For instance a NaN inside a list, a cycle, deep nesting, or an error in a user's class.
        try:
            return str(value)[:_MAX_CHARS]
        except Exception as error:
            return f"a {type(value).__name__} without a text ({type(error).__name__})"


def retried_fracs(
    statuses: Counts,
    retried: Counts,
    num_groups: int,
    first_errors: Sequence[str | None],
    *,
    watched: Collection[str] = (),
) -> dict[str, float]:
    """Returns `reward/<name>/retried_frac`: the fraction of groups for which the function's call
    failed, so that it was called again for each completion alone.

    `retried` counts these groups by the kind of failure; `statuses` counts completions by status.
    Raises RewardError if there are several groups and the function raised for each of them, but
    then for no completion alone: no completion is the cause, and if the function compares the
    completions of a group, the values that it returned for single ones are wrong. The failures of
    `watched` rewards do not stop the run.
    """
    metrics = {}
    for name, counts in statuses.items():
        failures = retried.get(name, {})
        num_retried = sum(failures.values())
        has_failed = counts.get("error") or counts.get("timeout")
        needs_groups = num_retried == num_groups > 1 and failures.get("error") == num_groups
        if needs_groups and not has_failed and name not in watched:
            raise RewardError.about(
                next((error for error in first_errors if error), None),
                f"reward {name!r} failed for each of the {num_groups} groups that it was called "
                "with, and for no completion alone",
            )
        metrics[f"reward/{name}/retried_frac"] = num_retried / num_groups
    return metrics


def unwrap_partial(function: Function) -> Function:
    """Returns the function inside nested functools.partial objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def callable_name(function: Function) -> str:
    """Returns a function's name, for a partial that of its function, for an object that of its
    class."""
    function = unwrap_partial(function)
    return str(getattr(function, "__name__", type(function).__name__))


# The functions below merge what reward functions logged with `log_metric`, over calls and ranks.


def logged_in(notes: Iterable[Fields]) -> Logged:
    """Returns the values logged with `log_metric` in the given `notes` of ScoredRollouts."""
    logged: Logged = {}
    for note in notes:
        for reward, metrics in note.get("logged", {}).items():
            single = {name: ([total], number) for name, (total, number) in metrics.items()}
            merge_logged(logged, {reward: single})
    return logged


def merge_logged(into: Logged, added: Logged) -> None:
    """Adds the values of `added` to `into`, by reward and name.

    The numbers of values are added. The lists of sums are concatenated rather than added, so that
    the final sum (math.fsum) does not depend on the order of calls and ranks."""
    for reward, metrics in added.items():
        merged = into.setdefault(reward, {})
        for name, (sums, number) in metrics.items():
            known_sums, known_number = merged.get(name, ([], 0))
            merged[name] = (known_sums + sums, known_number + number)


def mean_metrics(logged: Logged) -> dict[str, float | None]:
    """Returns `reward/<reward>/<name>`, the mean of the values that a reward logged under a name,
    and the `call_metrics` of rewards whose calls are measured.
    """
    means: dict[str, float | None] = {}
    for reward, metrics in sorted(logged.items()):
        # Names that begin with a dot are measurements of call_limits.py.
        from_function = {name: value for name, value in metrics.items() if name[0] != "."}
        values = {
            name: math.fsum(sums) / number
            for name, (sums, number) in limit_names(from_function).items()
        }
        if ".requests" in metrics:
            values |= call_metrics(metrics)
        means |= {f"reward/{reward}/{name}": value for name, value in values.items()}
    return means


def call_metrics(metrics: Mapping[str, tuple[list[float], int]]) -> dict[str, float]:
    """Returns a reward's metrics of its calls, from the measurements of pool/call_limits.py.

    They are percentiles of the seconds of a call (linear interpolation), the number of retries, and
    for each HTTP error the fraction of requests that got it.
    """
    # Imported here, since the reward workers import this module and do without numpy.
    import numpy as np

    p50, p95 = np.percentile(metrics[".s"][0], (50, 95)).tolist()
    requests, num_calls = metrics[".requests"]
    num_requests = math.fsum(requests)
    fractions = {
        f"{name[1:]}_frac": math.fsum(sums) / num_requests
        for name, (sums, _) in sorted(metrics.items())
        if name.startswith(".http_")
    }
    return {
        "call_s_p50": p50,
        "call_s_p95": p95,
        "retries": num_requests - num_calls,
        **fractions,
    }
