"""The reward protocol, its policy for what goes wrong, and every shipped verifier."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig, RewardPoolConfig
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.pool.worker import call_reward
from grpo_spmd.rewards.protocol import Reward, load_rewards, weighted_sum
from grpo_spmd.rewards.verifiers import SHIPPED, last_number


class CharacterTokenizer:
    """Token ids are code points."""

    def batch_decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return ["".join(map(chr, ids)) for ids in token_ids]


def _group(slot: int, prompt: str | list[dict[str, Any]], texts: Sequence[str], **columns: Any) -> RolloutGroup:
    completions = [Completion([ord(c) for c in text], [-1.0] * len(text), "stop") for text in texts]
    return RolloutGroup(slot, Prompt(slot, slot, [1], prompt, columns), completions)


SPY = """
import json, pathlib, threading
def spy(prompts, completions, completion_ids, **columns):
    got = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, "columns": columns}
    with open(pathlib.Path(__file__).with_name("got.jsonl"), "a") as file:
        file.write(json.dumps(got) + "\\n")
    assert threading.current_thread() is threading.main_thread()  # signal-based deadlines work nowhere else
    return [float(len(ids)) for ids in completion_ids]

def part(completions, **columns):
    return [None if "none" in c else float("nan") if "nan" in c else 3.0 for c in completions]
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RewardPool, Path]]:
    folder = tmp_path_factory.mktemp("pool")
    (folder / "mine.py").write_text(SPY)
    weights = {"spy": 2.0, "part": -0.5}
    rewards = [RewardConfig(function=f"{folder}/mine.py:{name}", weight=weight) for name, weight in weights.items()]
    with RewardPool(rewards, RewardPoolConfig(num_workers=1), folder / "log", columns=["a", "b"]) as pool:
        yield pool, folder / "got.jsonl"


def _spy(pool: tuple[RewardPool, Path], *groups: RolloutGroup) -> tuple[ScoredRollouts, list[dict[str, Any]]]:
    """What came out, and what the function got, call by call."""
    pool[1].unlink(missing_ok=True)
    scored = pool[0].score(groups, CharacterTokenizer())
    return scored, [json.loads(line) for line in pool[1].read_text().splitlines()]


def _call(function: Callable[..., Any], num_completions: int = 1) -> dict[str, Any]:
    return call_reward(Reward("f", function, 1.0), {"prompts": ["p"] * num_completions})


def _returning(values: Any) -> Callable[..., Any]:
    return lambda **_: values


def _load(tmp_path: Path, source: str, name: str = "reward", args: dict[str, Any] | None = None) -> Reward:
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    (reward,) = load_rewards([RewardConfig(function=f"{tmp_path}/mine.py:{name}", args=args or {})])
    return reward


def _shipped(name: str, completion: str, args: dict[str, Any] | None = None, **columns: Any) -> float | None:
    """What the shipped reward gives one completion, once as text and once as a chat message: both must agree."""
    (reward,) = load_rewards([RewardConfig(name=name, args=args or {})])
    lists = {column: [value] for column, value in columns.items()}
    (plain,) = reward.function(prompts=[""], completions=[completion], completion_ids=[[]], **lists)
    message = [{"role": "assistant", "content": completion}]
    (chat,) = reward.function(prompts=[[]], completions=[message], completion_ids=[[]], **lists)
    assert plain == chat
    assert plain is None or isinstance(plain, float)
    return plain


# The protocol


def test_function_gets_what_trl_gives_it_a_group_at_a_time(pool: tuple[RewardPool, Path]) -> None:
    _, calls = _spy(pool, _group(0, "p", ["a", "bc"], a=1, b="x"), _group(1, "q", ["d", ""], a=2, b="y"))
    assert calls == [
        {
            "prompts": ["p", "p"],
            "completions": ["a", "bc"],
            "completion_ids": [[97], [98, 99]],
            "columns": {"a": [1, 1], "b": ["x", "x"]},
        },
        {
            "prompts": ["q", "q"],
            "completions": ["d", ""],
            "completion_ids": [[100], []],
            "columns": {"a": [2, 2], "b": ["y", "y"]},
        },
    ]


def test_chat_prompt_makes_chat_completions(pool: tuple[RewardPool, Path]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    _, (call,) = _spy(pool, _group(0, messages, ["yo"]))
    assert call["prompts"] == [messages]
    assert call["completions"] == [[{"role": "assistant", "content": "yo"}]]


def test_column_that_some_rows_lack_is_none_there(pool: tuple[RewardPool, Path]) -> None:
    """Whichever rows this rank happens to hold: the pool knows the data set's columns."""
    _, calls = _spy(pool, _group(0, "p", ["x", "y"], a=1), _group(1, "q", ["x", "y"], b=2))
    assert [call["columns"] for call in calls] == [{"a": [1, 1], "b": [None, None]}, {"a": [None, None], "b": [2, 2]}]


def test_column_named_like_an_argument_does_not_replace_it(pool: tuple[RewardPool, Path]) -> None:
    _, (call,) = _spy(pool, _group(0, "p", ["mine"], completions="the data's"))
    assert call["completions"] == ["mine"]


def test_scores_are_in_the_order_of_groups_and_their_completions(pool: tuple[RewardPool, Path]) -> None:
    scored, _ = _spy(pool, _group(3, "p", ["a", "b"]), _group(1, "q", ["c", "d"]))
    assert scored.texts == ["a", "b", "c", "d"]


def test_reward_is_the_weighted_sum_of_what_applies(pool: tuple[RewardPool, Path]) -> None:
    scored, _ = _spy(pool, _group(0, "p", ["a", "ab", "none", "nan"]))
    assert scored.rewards == [2.0 - 1.5, 4.0 - 1.5, 8.0, None]
    assert scored.by_name["spy"] == [1.0, 2.0, 4.0, 3.0]
    assert scored.by_name["part"][:3] == [3.0, 3.0, None]
    assert scored.statuses == {"spy": ["ok"] * 4, "part": ["ok", "ok", "not_applicable", "error"]}


def test_no_function_that_applies_is_an_unknown_reward_and_no_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SPY)
    with RewardPool(
        [RewardConfig(function=f"{tmp_path}/mine.py:part")], RewardPoolConfig(num_workers=1), tmp_path / "log"
    ) as own:
        scored = own.score([_group(0, "p", ["none", "a"])], CharacterTokenizer())
    assert (scored.rewards, scored.first_error) == ([None, 3.0], None)


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
    [math.nan, math.inf, -math.inf, "1.0", b"1", [1.0], {}, object(), _Strange(), 10**400, torch.tensor([1.0, 2.0])],
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
    assert _call(_returning(values), 2) == {"failed": f"must return one value a completion: 2; got {len(values)}"}


@pytest.mark.parametrize("values", [None, 1.0, "ab", b"ab", {"a": 1.0, "b": 2.0}, {1.0, 2.0}, torch.tensor(1.0)])
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
    assert failed.startswith("raised KeyError: 'gone'\nTraceback (most recent call last)")
    assert __file__ in failed


def test_a_long_error_is_cut() -> None:
    def reward(**_: Any) -> list[float]:
        raise ValueError("x" * 1_000_000)

    assert len(_call(reward)["failed"]) < 5000


# Loading


def test_function_without_columns_gets_what_it_names(tmp_path: Path) -> None:
    reward = _load(
        tmp_path, "def reward(completions, answer):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    assert reward.function(prompts=["p"] * 2, completions=["x", "y"], answer=["y"] * 2, other=[1] * 2) == [0.0, 1.0]


def test_args_reach_the_function(tmp_path: Path) -> None:
    reward = _load(
        tmp_path,
        "def reward(completions, scale, **columns):\n    return [scale] * len(completions)\n",
        args={"scale": 2.5},
    )
    assert reward.function(prompts=["p"], completions=["x"], completion_ids=[[1]]) == [2.5]


def test_reward_is_named_after_its_function_unless_the_config_says_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def fn(**_):\n    return []\n", encoding="utf-8")
    spec = f"{tmp_path}/mine.py:fn"
    configs = [RewardConfig(function=spec), RewardConfig(function=spec, name="other", weight=0.5)]
    assert [(r.name, r.weight) for r in load_rewards(configs)] == [("fn", 1.0), ("other", 0.5)]


def test_columns_that_a_function_cannot_do_without_are_known(tmp_path: Path) -> None:
    source = (
        "def reward(prompts, completions, completion_ids, answer, scale, level=3, *, hint, **columns):\n    return []\n"
    )
    assert _load(tmp_path, source, args={"scale": 1}).needs == ("answer", "hint")


@pytest.mark.parametrize(
    ("name", "needs"),
    [("gsm8k", ("answer",)), ("countdown", ("nums", "target")), ("math", ("answer",)), ("exact", ("answer",))],
)
def test_columns_that_a_shipped_reward_cannot_do_without_are_known(name: str, needs: tuple[str, ...]) -> None:
    assert load_rewards([RewardConfig(name=name)])[0].needs == needs


def test_edited_file_is_loaded_anew(tmp_path: Path) -> None:
    before = _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    after = _load(tmp_path, "def reward(**_):\n    return [2.0]\n")  # as many bytes, within the same second
    assert (before.function(), after.function()) == ([1.0], [2.0])


def test_loading_leaves_no_cache_beside_the_file(tmp_path: Path) -> None:
    _load(tmp_path, "def reward(**_):\n    return [1.0]\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.py"]


def test_import_error_names_the_line_also_for_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n\nimport no_such_module_here\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"rewards\.0\.function: mine\.py:3 cannot be imported: ModuleNotFoundError"):
        load_rewards([RewardConfig(function="mine.py:reward")])


def test_one_name_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards\.1\.name: 'exact' is given twice"):
        load_rewards([RewardConfig(name="exact"), RewardConfig(name="exact")])


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_unknown_argument_of_a_shipped_reward_is_refused(name: str) -> None:
    args = {"pattern": "x", "no_such": 1} if name == "format" else {"no_such": 1}
    with pytest.raises(ConfigError, match=rf"rewards\.0\.args: {name} does not take 'no_such'"):
        load_rewards([RewardConfig(name=name, args=args)])


# exact, format, gsm8k


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("Paris", "Paris", 1.0),
        ("  Paris \n", "Paris", 1.0),
        ("paris", "Paris", 0.0),
        ("42", 42, 1.0),
        ("", "", 1.0),
        ("x", None, None),
    ],
)
def test_exact(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("exact", completion, answer=answer) == score


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>a\nb</think><answer>1</answer>", 1.0),
        ("so: <think>a</think><answer>1</answer>", 0.0),
        ("<think>a</think><answer>1</answer> end", 0.0),
        ("", 0.0),
    ],
)
def test_format_matches_the_whole_completion(completion: str, score: float) -> None:
    assert _shipped("format", completion, args={"pattern": "<think>.*</think><answer>.*</answer>"}) == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", Fraction(7)),
        ("#### 1,234", Fraction(1234)),
        ("$1,234.50 in all", Fraction("1234.5")),
        ("it is -3", Fraction(-3)),
        ("-$20", Fraction(-20)),
        ("\u7b54\u6848\u662f18", Fraction(18)),  # Chinese puts no space before a number
        ("_18_", Fraction(18)),
        ("x18", None),
        ("5-3", Fraction(3)),
        ("**18** dollars", Fraction(18)),
        ("\\boxed{0.25}", Fraction(1, 4)),
        ("007", Fraction(7)),
        ("none at all", None),
        ("", None),
        ("step x2", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, number: Fraction | None) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("the answer is 42", "6 * 7\n#### 42", 1.0),
        ("the answer is 42.0", "#### 42", 1.0),
        ("42, no, 43", "#### 42", 0.0),
        ("no idea", "#### 42", 0.0),
        ("1,000", "#### 1000", 1.0),
        ("3", 3, 1.0),
        ("3", "no number here", None),
        ("3", None, None),
        ("1" * 100_000, "#### 1", 0.0),  # a model that repeats itself is wrong and stops nothing
    ],
)
def test_gsm8k(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("gsm8k", completion, answer=answer) == score


# countdown


@pytest.mark.parametrize(
    ("equation", "nums", "target", "score"),
    [
        ("3*8", [3, 8], 24, 1.0),
        ("8 * 3", [3, 8], 24, 1.0),
        ("3*8=24", [3, 8], 24, 1.0),
        ("(1+2)*(3+4)", [4, 3, 2, 1], 21, 1.0),
        ("3/2*4", [2, 3, 4], 6, 1.0),  # by way of a fraction
        ("1/3+2/3", [1, 2, 3, 3], 1, 1.0),  # in floating point too, but 1/49*49 is not
        ("1/49*49", [1, 49, 49], 1, 1.0),
        ("3+3", [3, 3], 6, 1.0),
        ("3*8", [3, 8], 25, 0.0),
        ("3*8", [3, 8, 1], 24, 0.0),  # leaves one out
        ("3*3+8-8", [3, 8], 9, 0.0),  # uses one twice
        ("4*6", [3, 8], 24, 0.0),  # other numbers
        ("24", [3, 8], 24, 0.0),
        ("38", [3, 8], 38, 0.0),  # digits glued together
        ("24=3*8", [3, 8], 24, 0.0),
        ("3*8=1", [3, 8], 24, 0.0),  # says that it reaches something else
        ("-3+8", [3, 8], 5, 1.0),  # a sign, as TinyZero's eval accepts it
        ("--3+8", [3, 8], 11, 1.0),
        ("+3+8", [3, 8], 11, 0.0),  # no plus sign
        ("+3+5", [3, 5], 8, 0.0),
        ("8--3", [3, 8], 11, 1.0),
        ("03*8", [3, 8], 24, 0.0),  # a leading zero
        ("3**8", [3, 8], 6561, 0.0),
        ("8//3", [3, 8], 2, 0.0),
        ("8%3", [3, 8], 2, 0.0),
        ("3*8.0", [3, 8], 24, 0.0),
        ("3(8)", [3, 8], 24, 0.0),
        ("3*8)", [3, 8], 24, 0.0),
        ("3 8", [3, 8], 24, 0.0),
        ("3/(8-8)", [3, 8, 8], 0, 0.0),
        ("", [3, 8], 24, 0.0),
        ("()", [3, 8], 24, 0.0),
        ("=24", [3, 8], 24, 0.0),
        ("3*8 # 24", [3, 8], 24, 0.0),
        ("\uff13*8", [3, 8], 24, 0.0),
    ],
)
def test_countdown(equation: str, nums: list[int], target: int, score: float) -> None:
    assert _shipped("countdown", equation, args={"answer_tag": None}, nums=nums, target=target) == score


@pytest.mark.parametrize(
    "hostile",
    [
        "9**9**9",
        "9**9**9**9",
        "__import__('os').system('false')",
        "().__class__",
        "lambda: 1",
        "[1]*10**9",
        "(" * 120 + "1" + ")" * 120,
        "(" * 5000,
        "1+" * 5000 + "1",
        "9" * 200_000,
        "9" * 250 + "*" + "9" * 5,
        "\0",
        "\ud800",
        "1\n+1",
        "1 if 1 else 1",
        "((((1))))*" * 20,
    ],
)
def test_countdown_scores_hostile_strings_zero(hostile: str) -> None:
    assert _shipped("countdown", hostile, args={"answer_tag": None}, nums=[9, 9, 9], target=27) == 0.0


def test_countdown_reads_nested_brackets() -> None:
    assert (
        _shipped("countdown", "(" * 30 + "3" + ")" * 30 + "*8", args={"answer_tag": None}, nums=[3, 8], target=24)
        == 1.0
    )


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<think>3+8</think> <answer> 3*8 </answer>", 1.0),
        ("<answer>3+8</answer> no: <answer>\n3*8\n</answer> done", 1.0),  # the last one counts
        ("<answer>3*8</answer><answer>3+8</answer>", 0.0),
        ("3*8", 0.0),
        ("<answer>3*8", 0.0),
        ("</answer>3*8<answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>" * 20_000, 0.0),
    ],
)
def test_countdown_reads_the_last_answer_tag(completion: str, score: float) -> None:
    assert _shipped("countdown", completion, nums=[3, 8], target=24) == score


def test_countdown_answer_tag_is_no_regular_expression() -> None:
    assert _shipped("countdown", "<a+>3*8</a+>", args={"answer_tag": "a+"}, nums=[3, 8], target=24) == 1.0


@pytest.mark.parametrize("columns", [{"nums": None, "target": 24}, {"nums": [3, 8], "target": None}])
def test_countdown_without_a_task_does_not_apply(columns: dict[str, Any]) -> None:
    assert _shipped("countdown", "<answer>3*8</answer>", **columns) is None


def test_countdown_reads_numbers_given_as_text() -> None:
    assert _shipped("countdown", "<answer>3*8</answer>", nums=["3", "8"], target="24") == 1.0


# math


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("so \\boxed{\\dfrac{2}{4}}", "1/2", 1.0),
        ("$\\frac{3}{4}$", "\\frac{1}{2}", 0.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2}", "x^3", 0.0),
        ("The answer is 42.", 42, 1.0),
        ("The answer is 41.", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("\\boxed{\\frac{1}{", "42", 0.0),
        ("42", "", None),
        ("42", None, None),
    ],
)
def test_math(completion: str, answer: Any, score: float | None) -> None:
    assert _shipped("math", completion, answer=answer) == score


def test_math_off_the_main_thread_raises() -> None:
    caught: list[BaseException] = []

    def score() -> None:
        try:
            SHIPPED["math"](["42"], answer=["42"])
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


def test_math_that_runs_out_of_time_is_unknown_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify
    from math_verify.errors import TimeoutException

    def verify(*_: Any, **__: Any) -> bool:
        raise TimeoutException

    monkeypatch.setattr(math_verify, "verify", verify)
    (score,) = SHIPPED["math"](["\\boxed{42}"], answer=["42"])
    assert math.isnan(score)
