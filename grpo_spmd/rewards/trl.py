"""What TRL's trainer gives a reward function beside the data's columns, and what comes of it.

To functions that name them or take **kwargs: `trainer_state`; `log_metric(name, value)`, whose mean over a step's calls
is the metric `reward/<reward>/<name>`, in evaluation `eval/<set>/reward/<reward>/<name>`; and `log_extra(column,
values)`, one value a completion in one call or several, which are `extra` in the rollout dump. `environments` is None.

What cannot be logged (a value that is no finite number, a strange name, a name too many) is left out with a warning: a
metric costs no reward, and a name that comes out of a completion stops no run. An extra column of the wrong length is
a broken contract like a reward of the wrong length, and stops it.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spmd.config.errors import ConfigError

CALL_COLUMNS = ("prompts", "completions", "completion_ids")
_IN_KWARGS = ("trainer_state", "log_metric", "log_extra")
Counts = Mapping[str, Mapping[str, int]]  # by reward
# Our own metrics of a reward.
_OWN = ("mean", "std", "error_frac", "timeout_frac", "not_applicable_frac", "retried_frac",
        "call_s_p50", "call_s_p95", "retries")  # fmt: skip
_NAME = re.compile(r"\w[\w.:%@+=/ -]{0,79}")
_MOST_NAMES, _MOST_CHARS = 50, 10_000
_LARGEST = 1e250  # sums of what is larger may overflow


class RewardError(RuntimeError):
    """Rewards fail in a way that leaving completions out would hide."""


class FailedCallError(Exception):
    """A call failed for a reason outside of it, said in one line. `may_retry`: it may be made again, after `wait_s`
    seconds where its server asks for that; `status`: of HTTP."""

    def __init__(
        self,
        why: str,
        *,
        may_retry: bool = False,
        wait_s: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(why)
        self.may_retry, self.wait_s, self.status = may_retry, wait_s, status


class BrokenContractError(Exception):
    """A reward function has a fault that no completion is to blame for: the run stops."""


@dataclass(frozen=True)
class TrainerState:
    """Where the run is when it scores, under the names of transformers.TrainerState."""

    global_step: int = 0
    """Steps that are done: 0 at the first. Rollouts, of which each may bring several optimizer steps."""
    max_steps: int = 0
    epoch: float = 0.0
    """Prompts drawn before this step, over those of the data set."""


class CallLog:
    """What one call of a reward function logs."""

    def __init__(self, num_completions: int) -> None:
        self._num_completions = num_completions
        self._metrics: dict[str, list[float]] = {}
        self._extra: dict[str, list[Any]] = {}
        self._left_out: dict[str, None] = {}  # reasons, in order

    def metric(self, name: str, value: Any) -> None:
        """TRL's `log_metric`."""
        number = as_number(value)
        if not _is_name(name) or name in _OWN:
            self._left_out[f"the metric name {name!r:.100}"] = None
        elif isinstance(number, str) or not abs(number) < _LARGEST:
            self._left_out[f"a value of the metric {name!r}: {number!s:.100}"] = None
        else:
            self._metrics.setdefault(name, []).append(number)

    def extra(self, column: str, values: Any) -> None:
        """TRL's `log_extra`."""
        if isinstance(values, str | bytes | dict | set) or not hasattr(values, "__iter__"):
            raise BrokenContractError(
                f"log_extra({column!r:.100}) takes a list; got {type(values).__name__}"
            )
        if _is_name(column):
            self._extra.setdefault(column, []).extend(map(_as_json, values))
        else:
            self._left_out[f"the column name {column!r:.100}"] = None

    def reply(self) -> dict[str, Any]:
        """For the pool, without what is empty. Raises BrokenContractError."""
        for column, values in self._extra.items():
            if len(values) != self._num_completions:
                found = f"{len(values)} values for {self._num_completions} completions"
                raise BrokenContractError(f"log_extra({column!r}) got {found}")
        kept = first_names(self._metrics), first_names(self._extra)
        for what, all_names, names in zip(
            ("metrics", "columns"), (self._metrics, self._extra), kept, strict=True
        ):
            if len(all_names) > len(names):
                self._left_out[f"{len(all_names) - len(names)} {what} beyond {_MOST_NAMES}"] = None
        sums = {name: [math.fsum(values), len(values)] for name, values in kept[0].items()}
        reply = {"metrics": sums, "extra": kept[1], "left_out": list(self._left_out)[:3]}
        return {name: value for name, value in reply.items() if value}


def as_number(value: Any) -> float | str:
    """`value` as a float, perhaps not finite; else what it is."""
    if isinstance(value, str | bytes):
        return f"{repr(value)[:100]}, which is no number"
    try:
        return float(value)
    except (
        Exception
    ) as error:  # a tensor of several numbers, too large an int, whatever a __float__ raises
        return f"a {type(value).__name__}, which is no number ({type(error).__name__})"


def first_names(of_call: Mapping[str, Any]) -> dict[str, Any]:
    """The first names by the alphabet, and no more: the same whether the parts are cut first or the whole."""
    return {name: of_call[name] for name in sorted(of_call)[:_MOST_NAMES]}


def _is_name(name: Any) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def _as_json(value: Any) -> Any:
    """`value` if JSON has it and it is not long, else the beginning of its text."""
    if isinstance(value, str):
        return value[:_MOST_CHARS]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        text = json.dumps(
            value, allow_nan=False, default=lambda other: other.item()
        )  # numpy's and torch's numbers
        return json.loads(text) if len(text) <= _MOST_CHARS else text[:_MOST_CHARS]
    except Exception:  # NaN, a circle, a depth, no .item(): whatever a user's object raises
        try:
            return str(value)[:_MOST_CHARS]
        except Exception as error:
            return f"a {type(value).__name__} without a text ({type(error).__name__})"


def retried_fracs(
    statuses: Counts, retried: Counts, num_groups: int, first_errors: Sequence[str | None]
) -> dict[str, float]:
    """Metrics `reward/<name>/retried_frac`, the share of the groups that a function was called for again, completion by
    completion: `retried` counts them by how the call failed, `statuses` completions. RewardError where it raised for
    every group, of several, and then for no completion: nothing that a completion says is the cause, and rewards that
    look at their group would be others.
    """
    metrics: dict[str, float] = {}
    for name, counts in statuses.items():
        how = retried.get(name, {})
        num_retried, has_failed = sum(how.values()), counts.get("error") or counts.get("timeout")
        if num_retried == num_groups > 1 and how.get("error") == num_groups and not has_failed:
            first = next((error for error in first_errors if error), "not recorded")
            what = f"failed for each of the {num_groups} groups that it was called with, and for no completion alone"
            raise RewardError(f"reward {name!r} {what}. The first failure:\n{first}")
        metrics[f"reward/{name}/retried_frac"] = num_retried / num_groups
    return metrics


def taken(parameters: Mapping[str, inspect.Parameter]) -> tuple[str, ...]:
    """What of this a function takes. Nobody has environments yet: None, where a function cannot be called without."""
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = parameters.get("environments")
    names = [name for name in _IN_KWARGS if takes_any or name in parameters]
    return (
        *names,
        *(
            ["environments"]
            if needed is not None and needed.default is inspect.Parameter.empty
            else []
        ),
    )


def values_of(taken: Collection[str], state: TrainerState, log: CallLog) -> dict[str, Any]:
    known = {
        "trainer_state": state,
        "log_metric": log.metric,
        "log_extra": log.extra,
        "environments": None,
    }
    return {name: known[name] for name in taken}


def check_args(where: str, shown: str, args: Iterable[str], options: Collection[str]) -> None:
    """Refuse what is no option of the function, also where it has **kwargs: a misspelt one would do nothing."""
    for name in args:
        if name in (*CALL_COLUMNS, *_IN_KWARGS, "environments"):
            raise ConfigError(f"{where}.args: {name!r} is given by the trainer; take it out")
        if name not in options:
            close = difflib.get_close_matches(name, options, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{where}.args: {shown} does not take {name!r}{hint}")


def callable_name(function: Callable[..., Any]) -> str:
    """A function's name; of a partial, that of what it calls; of an object, that of its class."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


# What reward functions logged by `log_metric` (trl.py), brought together over calls and ranks.


# By reward and metric: the sums of the calls, and how many values they are of.
Logged = dict[str, dict[str, tuple[list[float], int]]]


def logged_in(notes: Iterable[Mapping[str, Any]]) -> Logged:
    """What notes of ScoredRollouts say of `log_metric`."""
    found: Logged = {}
    for note in notes:
        of_call = {
            r: {n: ([pair[0]], pair[1]) for n, pair in m.items()}
            for r, m in note.get("logged", {}).items()
        }
        merge_logged(found, of_call)
    return found


def merge_logged(into: Logged, more: Logged) -> None:
    for reward, metrics in more.items():
        mine = into.setdefault(reward, {})
        for name, (sums, number) in metrics.items():
            known, count = mine.get(name, ([], 0))
            known.extend(sums)
            mine[name] = known, count + number


def mean_metrics(logged: Logged) -> dict[str, float | None]:
    """The mean of what was logged under each name, whatever the order of the calls; and `call_metrics`."""
    found: dict[str, float | None] = {}
    for reward, metrics in sorted(logged.items()):
        own = {name: value for name, value in metrics.items() if not name.startswith(".")}
        found |= {
            f"reward/{reward}/{n}": math.fsum(sums) / number
            for n, (sums, number) in first_names(own).items()
        }
        if len(own) < len(metrics):
            found |= {
                f"reward/{reward}/{name}": value for name, value in call_metrics(metrics).items()
            }
    return found


def call_metrics(metrics: Mapping[str, tuple[list[float], int]]) -> dict[str, float | None]:
    """Of what pool/call_limits.py measured of calls: percentiles of their seconds, by the straight line; how many
    requests were made again; the share of requests that each status but 2xx answered."""
    seconds, (made, num_calls) = sorted(metrics[".s"][0]), metrics[".requests"]
    found: dict[str, float | None] = {}
    for percent in (50, 95):
        place = (len(seconds) - 1) * percent / 100
        low, high = seconds[math.floor(place)], seconds[math.ceil(place)]
        found[f"call_s_p{percent}"] = low + (high - low) * (place % 1)
    found["retries"] = math.fsum(made) - num_calls
    statuses = {
        name[1:]: math.fsum(sums)
        for name, (sums, _) in sorted(metrics.items())
        if name.startswith(".http_")
    }
    return found | {f"{name}_frac": number / math.fsum(made) for name, number in statuses.items()}
