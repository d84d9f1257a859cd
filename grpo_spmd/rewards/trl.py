"""This module has the extra arguments that TRL's trainer gives a reward function, and their
results.

A function that names them or takes **kwargs gets these arguments:
- `trainer_state`;
- `log_metric(name, value)`: the mean over a step's calls is the metric `reward/<reward>/<name>`, in
  evaluation `eval/<set>/reward/<reward>/<name>`;
- `log_extra(column, values)`, with one value for each completion, in one call or several: they are
  `extra` in the rollout dump;
- `environments`, which is None.

What cannot be logged (a value that is no finite number, a strange name, too many names) is left out
with a warning: a bad metric never makes its reward fail, nor does a bad name, which may be taken
from a completion, stop the run.
An extra column of the wrong length breaks the contract like a reward of the wrong length, and stops
the run.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CALL_COLUMNS = ("prompts", "completions", "completion_ids")
EXTRA_ARGUMENTS = ("trainer_state", "log_metric", "log_extra")
# Counts by reward, then by status or kind of failure.
Counts = Mapping[str, Mapping[str, int]]
# By reward and metric: (sums of the calls, number of values that were summed).
Logged = dict[str, dict[str, tuple[list[float], int]]]
_RESERVED_METRICS = (
    "mean", "std", "error_frac", "timeout_frac", "not_applicable_frac", "retried_frac",
    "call_s_p50", "call_s_p95", "retries",
)  # fmt: skip
_NAME = re.compile(r"\w[\w.:%@+=/ -]{0,79}")
_MAX_NAMES = 50
_MAX_CHARS = 10_000
# Sums of larger values may overflow.
_MAX_VALUE = 1e250
# The largest reward: the variance of a group, and advantages in float32, are finite below it.
MAX_REWARD = 1e30
# How errors about values of a wrong type begin and end.
NO_LIST = "must return a list of numbers or None"
NO_NUMBER = "which is no number"


class RewardError(RuntimeError):
    """Rewards fail in a way that would stay hidden if completions were just left out."""

    # The report of a failure prints the message alone: it has the user's traceback, not ours.
    says_all = True

    @classmethod
    def about(cls, first_error: str | None, rule: str) -> RewardError:
        """Returns an error that begins with the first failure's own line and ends with its
        traceback; `rule` says why it stops the run."""
        if first_error is None:
            return cls(rule)
        reason, _, details = first_error.partition("\n")
        return cls(f"{reason}; {rule}\n{details}".rstrip())


@dataclass(eq=False)
class FailedCallError(Exception):
    """A reward's call to a server failed: by the server, the network or the credentials, and not by
    a fault in the reward's code. The message is one line.

    With `may_retry` the call may be made again, after `wait_s` seconds if its server asks for that.
    `status` is the HTTP status.
    """

    message: str
    may_retry: bool = False
    wait_s: float | None = None
    status: int | None = None

    def __str__(self) -> str:
        return self.message


class BrokenContractError(Exception):
    """A reward function has a fault that no completion is to blame for: the run stops."""


@dataclass(frozen=True)
class TrainerState:
    """The progress of the run, under the names of transformers.TrainerState."""

    global_step: int = 0
    """Steps that are done: 0 at the first. Rollouts, of which each may bring several optimizer
    steps."""
    max_steps: int = 0
    epoch: float = 0.0
    """Prompts drawn before this step, over those of the data set."""


@dataclass
class CallLog:
    """The metrics and columns that one call of a reward function logs."""

    num_completions: int
    metrics: dict[str, list[float]] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    # Reasons why something was not logged; a dict keeps their order.
    left_out: dict[str, None] = field(default_factory=dict)

    def metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`."""
        number = as_number(value)
        if not _is_name(name) or name in _RESERVED_METRICS:
            self.left_out[f"the metric name {name!r:.100}"] = None
        elif isinstance(number, str) or not abs(number) < _MAX_VALUE:
            self.left_out[f"a value of the metric {name!r}: {number!s:.100}"] = None
        else:
            self.metrics.setdefault(name, []).append(number)

    def extra(self, column: str, values: Any) -> None:
        """TRL's `log_extra`."""
        if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__iter__"):
            raise BrokenContractError(
                f"log_extra({column!r:.100}) takes a list; got {type(values).__name__}"
            )
        if _is_name(column):
            self.columns.setdefault(column, []).extend(map(_as_json, values))
        else:
            self.left_out[f"the column name {column!r:.100}"] = None

    def reply(self) -> dict[str, Any]:
        """Returns the fields of the reply for the pool, without empty ones. Raises
        BrokenContractError."""
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
    """Returns `value` as a float, which may be infinite or NaN, or a string that describes
    another value."""
    if isinstance(value, str | bytes):
        return f"{repr(value)[:100]}, {NO_NUMBER}"
    try:
        return float(value)
    # A tensor of several numbers, too large an int, whatever a __float__ raises.
    except Exception as error:
        return f"a {type(value).__name__}, {NO_NUMBER} ({type(error).__name__})"


def as_reward(value: Any) -> float | str | None:
    """Returns a finite number of at most MAX_REWARD, None, or a string that says why `value` is
    unusable."""
    if value is None:
        return None
    number = as_number(value)
    if isinstance(number, str) or not math.isfinite(number):
        return f"returned {number}"
    return number if abs(number) <= MAX_REWARD else f"returned {number}, beyond {MAX_REWARD:g}"


def limit_names(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the first names in alphabetical order.

    The result is the same whether each part is cut first or the whole.
    """
    return {name: by_name[name] for name in sorted(by_name)[:_MAX_NAMES]}


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _as_json(value: Any) -> Any:
    """Returns `value` if it is short JSON, None for NaN or infinity, else the beginning of its
    text."""
    if isinstance(value, str):
        return value[:_MAX_CHARS]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        # Numbers of numpy and torch have item().
        text = json.dumps(value, allow_nan=False, default=lambda number: number.item())
        return json.loads(text) if len(text) <= _MAX_CHARS else text[:_MAX_CHARS]
    except Exception:
        # The cause may be a NaN in it, a cycle, deep nesting or any error of a user's object.
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
    """Returns `reward/<name>/retried_frac`: the fraction of groups whose call failed as a whole.

    The function is then called for each completion alone. `retried` counts groups by the kind of
    failure, `statuses` counts completions. Raises RewardError if the function raised for every
    group (of several groups), and afterwards for no completion: then no completion is the cause,
    and rewards that look at their whole group would have different values. The failures of
    `watched` rewards stop nothing.
    """
    metrics: dict[str, float] = {}
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


def unwrap_partial(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function inside of functools.partial objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def callable_name(function: Callable[..., Any]) -> str:
    """Returns a function's name: for a partial its function's name, for an object its class's
    name."""
    function = unwrap_partial(function)
    return str(getattr(function, "__name__", type(function).__name__))


# Values that reward functions logged by `log_metric`, merged over calls and ranks.


def logged_in(notes: Iterable[Mapping[str, Any]]) -> Logged:
    """Returns the values that `log_metric` has put into notes of ScoredRollouts."""
    logged: Logged = {}
    for note in notes:
        for reward, metrics in note.get("logged", {}).items():
            single = {name: ([total], number) for name, (total, number) in metrics.items()}
            merge_logged(logged, {reward: single})
    return logged


def merge_logged(into: Logged, added: Logged) -> None:
    """Joins the values of `added` to those of `into`, by reward and name.

    Lists of sums are joined, so that whoever adds them up may do it in an order that depends on no
    rank; the numbers of values are added."""
    for reward, metrics in added.items():
        merged = into.setdefault(reward, {})
        for name, (sums, number) in metrics.items():
            known_sums, known_number = merged.get(name, ([], 0))
            merged[name] = (known_sums + sums, known_number + number)


def mean_metrics(logged: Logged) -> dict[str, float | None]:
    """Returns the mean of the values logged under each name, and `call_metrics`.

    The order of the calls does not matter.
    """
    means: dict[str, float | None] = {}
    for reward, metrics in sorted(logged.items()):
        # Names with a dot in front are what call_limits.py measured.
        by_function = {name: value for name, value in metrics.items() if name[0] != "."}
        values = {
            name: math.fsum(sums) / number
            for name, (sums, number) in limit_names(by_function).items()
        }
        if ".requests" in metrics:
            values |= call_metrics(metrics)
        means |= {f"reward/{reward}/{name}": value for name, value in values.items()}
    return means


def call_metrics(metrics: Mapping[str, tuple[list[float], int]]) -> dict[str, float]:
    """Returns metrics of the measurements of pool/call_limits.py.

    They are percentiles of the calls' seconds (linear interpolation), the number of retries, and
    the fraction of requests that were answered with each HTTP error.
    """
    # The processes that score do without numpy.
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
