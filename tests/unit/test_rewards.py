"""The reward protocol, and its policy for what goes wrong."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable, Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.learn.step_messages import decode_groups, encode_groups
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.worker import call_reward
from grpo_spmd.rewards.protocol import Reward, load_rewards
from grpo_spmd.rewards.scorers import weighted_sum
from grpo_spmd.rewards.trl import (
    RewardError,
    TrainerState,
    limit_names,
    logged_in,
    mean_metrics,
    retried_fracs,
)
from grpo_spmd.rewards.verifiers import SHIPPED


def _call(function: Callable[..., Any], num_completions: int = 1) -> dict[str, Any]:
    return call_reward(
        Reward(name="f", weight=1.0, function=function), {"prompts": ["p"] * num_completions}
    )


def _returning(values: Any) -> Callable[..., Any]:
    return lambda **_: values


def _load(
    tmp_path: Path, source: str, name: str = "reward", args: dict[str, Any] | None = None
) -> Reward:
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    (reward,) = load_rewards([RewardConfig(function=f"{tmp_path}/mine.py:{name}", args=args or {})])
    return reward


def test_sum_that_overflows_makes_that_sample_unknown() -> None:
    assert weighted_sum([(10.0, 1e308)]) is None


def test_async_function_is_awaited() -> None:
    async def reward(prompts: Any) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(p)) for p in prompts]

    assert _call(reward, 2) == {"values": [1.0, 1.0]}


def test_sync_function_may_run_its_own_event_loop() -> None:
    async def ask_a_judge() -> float:
        await asyncio.sleep(0)
        return 0.75

    assert _call(lambda **_: [asyncio.run(ask_a_judge())]) == {"values": [0.75]}


# What goes wrong (tests/faults/test_reward_pool.py has what only a process can do)


class _Strange:
    def __float__(self) -> float:
        raise SystemError("no")


@pytest.mark.parametrize(
    "value",
    [
        math.nan,
        math.inf,
        -math.inf,
        "1.0",
        b"1",
        [1.0],
        {},
        object(),
        _Strange(),
        10**400,
        torch.tensor([1.0, 2.0]),
    ],
)
def test_unusable_value_is_said_and_leaves_the_others(value: Any) -> None:
    unusable, usable = _call(_returning([value, 1.0]), 2)["values"]
    assert unusable.startswith("returned")
    assert usable == 1.0


@pytest.mark.parametrize(
    "values",
    [[1, True, Fraction(1, 2)], (1.0, 1.0, 0.5), torch.tensor([1.0, 1.0, 0.5])],
    ids=["list", "tuple", "tensor"],
)
def test_number_types_become_floats(values: Any) -> None:
    got = _call(_returning(values), 3)["values"]
    assert got == [1.0, 1.0, 0.5]
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 3])
def test_wrong_length_is_said_with_both_numbers(values: list[float]) -> None:
    assert _call(_returning(values), 2) == {
        "broken": f"returned {len(values)} values for 2 completions"
    }


@pytest.mark.parametrize(
    "values", [None, 1.0, "ab", b"ab", {"a": 1.0, "b": 2.0}, {1.0, 2.0}, torch.tensor(1.0)]
)
def test_result_that_is_no_list_is_said_with_its_type(values: Any) -> None:
    assert _call(_returning(values), 2)["failed"].startswith(
        f"must return a list of numbers or None; got {type(values).__name__}"
    )


@pytest.mark.parametrize("is_async", [False, True])
def test_exception_is_said_with_its_traceback(is_async: bool) -> None:
    def sync_reward(**_: Any) -> list[float]:
        raise KeyError("gone")

    async def async_reward(**_: Any) -> list[float]:
        raise KeyError("gone")

    failed = _call(async_reward if is_async else sync_reward)["failed"]
    first, second, *_ = failed.splitlines()
    assert re.fullmatch(r"raised KeyError: 'gone' \(test_rewards\.py:\d+\)", first)
    assert second == "Traceback (most recent call last):"
    assert __file__ in failed


def test_a_long_error_is_cut() -> None:
    def reward(**_: Any) -> list[float]:
        raise ValueError("x" * 1_000_000)

    assert len(_call(reward)["failed"]) < 5000


# Loading


def test_function_without_columns_gets_what_it_names(tmp_path: Path) -> None:
    reward = _load(
        tmp_path,
        "def reward(completions, answer):\n    return [float(c == a) for c, a in "
        "zip(completions, answer)]\n",
    )
    assert reward.function(
        prompts=["p"] * 2, completions=["x", "y"], answer=["y"] * 2, other=[1] * 2
    ) == [0.0, 1.0]


def test_args_reach_the_function(tmp_path: Path) -> None:
    reward = _load(
        tmp_path,
        "def reward(completions, scale, **columns):\n    return [scale] * len(completions)\n",
        args={"scale": 2.5},
    )
    assert reward.function(prompts=["p"], completions=["x"], completion_ids=[[1]]) == [2.5]


def test_reward_is_named_after_its_function_unless_the_config_says_otherwise(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text("def fn(**_):\n    return []\n", encoding="utf-8")
    spec = f"{tmp_path}/mine.py:fn"
    configs = [RewardConfig(function=spec), RewardConfig(function=spec, name="other", weight=0.5)]
    assert [(r.name, r.weight) for r in load_rewards(configs)] == [("fn", 1.0), ("other", 0.5)]


def test_columns_that_a_function_cannot_do_without_are_known(tmp_path: Path) -> None:
    source = (
        "def reward(prompts, completions, completion_ids, answer, scale, level=3, *, hint, "
        "**columns):\n    return []\n"
    )
    assert _load(tmp_path, source, args={"scale": 1}).needs == ("answer", "hint")


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("gsm8k", ("answer",)),
        ("countdown", ("nums", "target")),
        ("math", ("answer",)),
        ("exact", ("answer",)),
    ],
)
def test_columns_that_a_shipped_reward_cannot_do_without_are_known(
    name: str, needs: tuple[str, ...]
) -> None:
    assert load_rewards([RewardConfig(name=name)])[0].needs == needs


def test_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    old = _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    new = _load(
        tmp_path, "def reward(**_):\n    return [2.0]\n"
    )  # as many bytes, within the same second
    assert (old.function(), new.function()) == ([1.0], [2.0])


def test_loading_leaves_no_cache_beside_the_file(tmp_path: Path) -> None:
    _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_import_error_names_the_line_also_for_a_relative_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n\nimport no_such_module_here\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"rewards\.0\.function: mine\.py:3 cannot be imported: ModuleNotFoundError",
    ):
        load_rewards([RewardConfig(function="mine.py:reward")])


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.1\.name: 'exact' is given twice"):
        load_rewards([RewardConfig(name="exact"), RewardConfig(name="exact")])


# What TRL's trainer gives


def _log(log_with: Callable[..., Any], num_completions: int = 2) -> dict[str, Any]:
    """What the pool is told of a call that logs and returns zeros."""

    def reward(log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
        log_with(log_metric, log_extra)
        return [0.0] * num_completions

    selected = ("trainer_state", "log_metric", "log_extra")
    result = Reward(name="f", weight=1.0, function=reward, takes=selected)
    return call_reward(result, {"prompts": ["p"] * num_completions})


@pytest.mark.parametrize(
    ("signature", "takes", "needs"),
    [
        (
            "completions, trainer_state, log_metric, log_extra",
            ("trainer_state", "log_metric", "log_extra"),
            (),
        ),
        ("completions, answer, log_metric=None", ("log_metric",), ("answer",)),
        ("completions, **kwargs", ("trainer_state", "log_metric", "log_extra"), ()),
        ("completions, answer", (), ("answer",)),
        ("completions, environments", ("environments",), ()),  # nobody has any yet
        ("completions, environments=()", (), ()),
    ],
)
def test_a_function_gets_what_it_takes_of_trl(
    tmp_path: Path, signature: str, takes: tuple[str, ...], needs: tuple[str, ...]
) -> None:
    loaded = _load(tmp_path, f"def reward({signature}):\n    return [0.0]\n")
    assert (loaded.takes, loaded.needs) == (takes, needs)


def test_the_state_says_where_the_run_is(tmp_path: Path) -> None:
    source = """
class Shaped:
    async def __call__(self, completions, trainer_state, environments, **kwargs):
        assert kwargs["trainer_state"] if "trainer_state" in kwargs else environments is None
        return [trainer_state.global_step + trainer_state.epoch + trainer_state.max_steps] * len(completions)
shaped = Shaped()
"""  # noqa: E501
    keywords = {
        "prompts": ["p"],
        "completions": ["x"],
        "completion_ids": [[1]],
        "trainer_state": ["a column"],
    }
    state = TrainerState(global_step=3, max_steps=100, epoch=0.25)
    assert call_reward(_load(tmp_path, source, "shaped"), keywords, state) == {"values": [103.25]}


def test_partials_and_objects_are_functions_and_classes_are_refused(tmp_path: Path) -> None:
    source = """
import functools
def scaled(completions, scale, offset=0.0, **columns):
    return [scale * len(c) + offset for c in completions]
double = functools.partial(scaled, scale=2.0)
class Length:
    def __call__(self, completions):
        return [float(len(c)) for c in completions]
length = Length()
"""
    keywords = {"prompts": ["p"], "completions": ["abc"], "completion_ids": [[1]], "other": [1]}
    assert call_reward(_load(tmp_path, source, "double", {"offset": 0.5}), keywords)["values"] == [
        6.5
    ]
    assert call_reward(_load(tmp_path, source, "length"), keywords)["values"] == [3.0]
    with pytest.raises(
        ConfigError,
        match=r"rewards\.0\.function: Length is a class; make an object of it in .*mine\.py",
    ):
        _load(tmp_path, source, "Length")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scael", r"rewards\.0\.args: reward does not take 'scael'; did you mean 'scale'\?"),
        ("other", r"rewards\.0\.args: reward does not take 'other'$"),
        ("completions", r"rewards\.0\.args: 'completions' is given by the trainer; take it out"),
        (
            "trainer_state",
            r"rewards\.0\.args: 'trainer_state' is given by the trainer; take it out",
        ),
    ],
)
def test_an_unknown_argument_is_refused_also_beside_kwargs(
    tmp_path: Path, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        _load(
            tmp_path,
            "def reward(completions, scale=1.0, **kwargs):\n    return []\n",
            args={name: 1},
        )


def test_what_is_logged_comes_back_with_the_scores() -> None:
    def log(metric: Any, extra: Any) -> None:
        for value in (1, torch.tensor(0.5), Fraction(1, 4)):
            metric("accuracy", value)
        extra("answer", ["4", torch.tensor(2)])
        for piece in ({"a": [1, None]}, math.nan):  # TRL extends: a value at a time is a list too
            extra("parts", [piece])

    assert _log(log) == {
        "values": [0.0, 0.0],
        "metrics": {"accuracy": [1.75, 3]},
        "extra": {"answer": ["4", 2], "parts": [{"a": [1, None]}, None]},
    }


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, "1.0", None, [1.0, 2.0], torch.ones(2), 10**400, 1e300]
)
def test_a_metric_that_is_no_finite_number_is_left_out_and_said(value: Any) -> None:
    log = _log(lambda metric, extra: [metric("m", value), metric("n", 1.0)])
    assert log["metrics"] == {"n": [1.0, 1]}
    assert log["left_out"][0].startswith("a value of the metric 'm': ")


@pytest.mark.parametrize(
    "name",
    ["", "a\nb", "\0", "x" * 81, "/etc", "\u202eab", 3, None, "mean", "error_frac", "a" * 10**6],
)
def test_a_strange_name_is_left_out_and_said(name: Any) -> None:
    log = _log(lambda metric, extra: [metric(name, 1.0), extra("\0", [1, 2])])
    assert "metrics" not in log
    assert "extra" not in log
    assert max(map(len, log["left_out"])) < 150


def _means(calls: list[dict[str, Any]]) -> dict[str, float | None]:
    return mean_metrics(logged_in(calls))


def test_names_are_bounded_alike_however_they_are_cut() -> None:
    """A function that logs a name for each answer: the first 50 by the alphabet, of a call as of a
    step."""
    names = [f"answer {i:04}" for i in range(1000)]
    log = _log(lambda metric, extra: [metric(name, 1.0) for name in reversed(names)])
    assert list(log["metrics"]) == names[:50]
    assert log["left_out"] == ["950 metrics beyond 50"]
    calls = [{"logged": {"f": {name: [i, 1] for name in names[i::7]}}} for i in range(7)]
    cut = [{"logged": {"f": limit_names(call["logged"]["f"])}} for call in calls]
    assert _means(cut) == _means(calls[::-1])
    assert len(_means(calls)) == 50


def test_a_metrics_mean_does_not_depend_on_the_order_of_calls() -> None:
    calls = [{"logged": {"f": {"m": [value, 1]}}} for value in (1e16, 1.0, -1e16, 0.1, 3.0)]
    assert _means(calls) == _means(calls[::-1]) == {"reward/f/m": pytest.approx(4.1 / 5, rel=1e-15)}
    assert _means(
        [
            {"logged": {"f": {"m": [3.0, 3]}}},
            {"retried": {"f": "error"}},
            {"logged": {"f": {"m": [0.0, 1]}}},
        ]
    ) == {
        "reward/f/m": 0.75  # over calls of log_metric, not over groups
    }


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ([1], "log_extra('answer') got 1 values for 2 completions"),
        ([1, 2, 3], "log_extra('answer') got 3 values for 2 completions"),
        ("ab", "log_extra('answer') takes a list; got str"),
        (7, "log_extra('answer') takes a list; got int"),
    ],
)
def test_an_extra_column_of_the_wrong_length_breaks_the_contract(values: Any, reason: str) -> None:
    assert _log(lambda metric, extra: extra("answer", values)) == {"broken": reason}


def test_what_is_logged_of_a_completion_is_bounded() -> None:
    circle: list[Any] = []
    circle.append(circle)
    texts = _log(lambda metric, extra: extra("answer", ["x" * 10**6, circle]))["extra"]["answer"]
    assert texts == ["x" * 10_000, "[[...]]"]


# Groups that were called again


def _facts(statuses: list[str], retried: str | None, first_error: str | None = None) -> bytes:
    """What a rank tells of one group of two completions."""
    group = RolloutGroup(0, Prompt(0, 0, [1], "", {}), [Completion([2], [-1.0], "stop")] * 2)
    notes = {0: {"retried": {"f": retried}}} if retried else {}
    scored = ScoredRollouts([0.0] * 2, {"f": [0.0] * 2}, {"f": statuses}, first_error, notes=notes)
    return encode_groups([group], scored, 2)


def _retried_fracs(facts: list[bytes], watched: Collection[str] = ()) -> dict[str, float]:
    counts = decode_groups(facts, 2).counts
    return retried_fracs(
        counts.status_counts, counts.retried, len(facts), counts.first_errors, watched=watched
    )


FINE = ["ok", "ok"]


@pytest.mark.parametrize(
    ("groups", "fraction"),
    [
        ([_facts(FINE, None), _facts(FINE, None)], 0.0),
        ([_facts(FINE, "error"), _facts(FINE, None)], 0.5),
        (
            [_facts(FINE, "error"), _facts(["ok", "error"], "error")],
            1.0,
        ),  # a completion is to blame
        (
            [_facts(FINE, "timeout"), _facts(FINE, "timeout")],
            1.0,
        ),  # slow, as completions may make it
        ([_facts(FINE, "error")], 1.0),  # a single group: it may have been bad luck
    ],
)
def test_groups_that_were_called_again_are_counted(groups: list[bytes], fraction: float) -> None:
    assert _retried_fracs(groups) == {"reward/f/retried_frac": fraction}


def test_a_function_that_fails_with_every_group_and_no_completion_stops_the_run() -> None:
    with pytest.raises(RewardError) as caught:
        _retried_fracs([_facts(FINE, "error"), _facts(FINE, "error", "reward 'f' raised KeyError")])
    assert str(caught.value) == (
        "reward 'f' raised KeyError; reward 'f' failed for each of the 2 groups that it was called "
        "with, and for no completion alone"
    )
    # A reward that is only watched stops nothing.
    watched = _retried_fracs([_facts(FINE, "error"), _facts(FINE, "error")], watched={"f"})
    assert watched == {"reward/f/retried_frac": 1.0}


def test_a_failure_names_the_users_line_and_shows_no_frame_of_ours(tmp_path: Path) -> None:
    source = (
        "import json\n"
        "def look(row):\n"
        "    return json.loads(row)\n"
        "def reward(completions, **_):\n"
        "    return [look('{' + 5_000 * 'x' + 'END')]\n"
        "async def late(completions, **_):\n"
        "    try:\n"
        "        return [{}['answer']]\n"
        "    except KeyError as error:\n"
        "        raise ValueError('no\\nanswer ' + 4_000 * 'y' + 'END') from error\n"
    )
    inputs = {"prompts": ["p"], "completions": ["c"]}
    failure = call_reward(_load(tmp_path, source), inputs)["failed"]
    first, _, report = failure.partition("\n")
    # The user's own innermost line, below which the standard library raised.
    assert first.startswith("raised json.decoder.JSONDecodeError: Expecting property name")
    assert first.endswith(" (mine.py:3)")
    frames = [line for line in report.splitlines() if line.startswith("  File ")]
    assert "mine.py" in frames[0]
    assert not any("grpo_spmd/" in frame for frame in frames)
    # Two exceptions, of an async function; a long message is cut in its middle.
    failure = call_reward(_load(tmp_path, source, "late"), inputs)["failed"]
    first, _, report = failure.partition("\n")
    assert first.startswith("raised ValueError: no answer yyy")
    assert first.endswith("yEND (mine.py:10)")
    assert len(failure) < 5_000
    assert "KeyError: 'answer'" in report
    assert report.rstrip().endswith("END")
    files = {line.split('"')[1] for line in report.splitlines() if line.startswith("  File ")}
    assert files == {f"{tmp_path}/mine.py"}


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_failure_in_an_installed_package_names_the_users_line(
    tmp_path: Path, folder: str
) -> None:
    package = tmp_path / folder
    package.mkdir()
    (package / "lib.py").write_text("def fail():\n    raise ValueError('from below')\n")
    source = (
        "import runpy\n"
        f"fail = runpy.run_path({str(package / 'lib.py')!r})['fail']\n"
        "def reward(completions, **_):\n"
        "    return fail()\n"
    )
    failure = call_reward(_load(tmp_path, source), {"prompts": ["p"], "completions": ["c"]})
    first = failure["failed"].partition("\n")[0]
    assert first == "raised ValueError: from below (mine.py:4)"


def test_a_note_of_an_exception_does_not_stand_for_its_message(tmp_path: Path) -> None:
    source = (
        "def reward(completions, **_):\n"
        "    error = ValueError('the message')\n"
        "    error.add_note('a note\\nof two lines')\n"
        "    raise error\n"
    )
    inputs = {"prompts": ["p"], "completions": ["c"]}
    first, _, report = call_reward(_load(tmp_path, source), inputs)["failed"].partition("\n")
    assert first == "raised ValueError: the message (mine.py:4)"
    assert "a note\nof two lines" in report


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_unknown_argument_of_a_shipped_reward_is_refused(name: str) -> None:
    args = {"pattern": "x", "no_such": 1} if name == "format" else {"no_such": 1}
    with pytest.raises(ConfigError, match=rf"rewards\.0\.args: {name} does not take 'no_such'"):
        load_rewards([RewardConfig(name=name, args=args)])
