"""Episodes between a scripted engine and real processes of environments: what comes of them, worked
out by hand.

The engine's side is the protocol of engine/requests.py, played by a loop; the pool, the chat format
and the tokenizer are those of the tools demo.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from grpo_spmd.config.schema import (
    AdvantageConfig,
    EnvironmentConfig,
    EvalConfig,
    LossConfig,
    RewardConfig,
    RewardPoolConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.demo.tools import make_tokenizer
from grpo_spmd.engine.requests import ConversationId, Later, Request
from grpo_spmd.episodes.chat_format import ChatFormat
from grpo_spmd.episodes.conversations import EpisodeLimits
from grpo_spmd.episodes.environments import EnvironmentScorer, Episodes
from grpo_spmd.episodes.pool import EnvironmentPool
from grpo_spmd.learn.contexts import find_episode_error
from grpo_spmd.learn.sampled_step import StepRules, _Rank0Step, episode_metrics
from grpo_spmd.learn.step_messages import decode_groups, encode_groups
from grpo_spmd.observe.rollout_record import dumped_prompt
from grpo_spmd.records import (
    Completion,
    Episode,
    Prompt,
    RolloutGroup,
    ScoredRollouts,
    Segment,
    Turn,
    rollout_seed,
)
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rewards.scorers import Scorers
from grpo_spmd.rollout.evaluate import outcomes_by_slot, summarise

ENVIRONMENTS = '''
import os, random, time

class Bench:
    def reset(self, log, how="", **row):
        self.log, self.how = log, how
        self._note("reset %d" % random.randrange(10**6))
        if how == "no reset": raise KeyError("gone")
        return row.get("begins")

    def _note(self, what):
        with open(self.log, "a") as file: file.write(what + "\\n")

    def say(self, text: str, times: int = 1) -> str:
        """
        Say it.

        Args:
            text: What.
            times: How often.
        """
        self._note("say " + text)
        num_resets = open(self.log).read().count("reset")
        if self.how == "raises": raise ConnectionError("no shop")
        if self.how == "dies once" and num_resets == 1: os._exit(3)
        if self.how == "dies": os._exit(3)
        if self.how == "hangs": time.sleep(1000)
        return text * times

    def get_reward(self) -> float:
        if self.how == "no reward": raise ValueError("none")
        return float(open(self.log).read().count("say"))

class Talk:
    """Its row has what each step gives: [observation, reward, done]."""

    def reset(self, steps, log, **row):
        self.steps, self.log = list(steps), log
        return row.get("begins")

    def step(self, action):
        with open(self.log, "a") as file: file.write(action + "\\n")
        return (*self.steps.pop(0), {})
'''
WIDE = EpisodeLimits(
    max_turns=8,
    max_tokens=10_000,
    max_turn_tokens=10_000,
    max_model_len=10_000,
    max_all_tokens=10_000,
)
Script = dict[ConversationId, Sequence[str]]


class Bed:
    """A pool and its chat format, and the loop that plays an engine."""

    def __init__(self, pool: EnvironmentPool, tokenizer: Any) -> None:
        self.pool, self.tokenizer = pool, tokenizer
        self.chat = ChatFormat(tokenizer, "append", pool.facts.tools, pool.facts.kind)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text))

    def episodes(
        self,
        row: Callable[[ConversationId], dict[str, Any]],
        limits: EpisodeLimits,
        discount: float | None,
    ) -> Episodes:
        def task(position: ConversationId) -> tuple[Prompt, Callable[..., int]]:
            chat = [{"role": "user", "content": "go"}]
            return Prompt(7, 3, [1], chat, row(position)), partial(
                rollout_seed, 5, 2, 7, position[1]
            )

        return Episodes(
            pool=self.pool,
            chat=self.chat,
            limits=limits,
            task=task,
            evaluation=EvalConfig(temperature=0.7, top_p=0.8),
            discount=discount,
        )

    def play(
        self,
        says: Script,
        row: Callable[[ConversationId], dict[str, Any]],
        limits: EpisodeLimits = WIDE,
        *,
        discount: float | None = None,
        num_turns: int = 10_000,
    ) -> tuple[dict[ConversationId, Completion], list[tuple[ConversationId, Request]]]:
        """What comes of each place, whose n-th turn is the n-th text of `says` however long a try
        of it took, and all
        that was requested. After `num_turns` the generation is stopped."""
        communicates, requests = (
            self.episodes(row, limits, discount),
            list[tuple[ConversationId, Request]](),
        )
        turns: dict[ConversationId, list[Completion]] = {position: [] for position in says}
        is_open, deadline = set(says), time.monotonic() + 120
        for position in says:
            assert isinstance(communicates.next_request(*position, []), Later)
        while is_open and len(requests) < num_turns:
            assert time.monotonic() < deadline, f"{is_open} are still open; {self.pool.where()}"
            for position, request in communicates.ready(0.2):
                if request is None:
                    is_open.remove(position)
                    continue
                number = next(
                    n for n in range(20) if rollout_seed(5, 2, 7, position[1], n) == request.seed
                )
                requests.append((position, request))
                turns[position].append(
                    self.sampled(says[position][number], number, request.max_tokens)
                )
                assert isinstance(communicates.next_request(*position, turns[position]), Later)
        communicates.close()
        return communicates.completions, requests

    def sampled(self, text: str, number: int, max_tokens: int | None) -> Completion:
        assert max_tokens is not None
        assert max_tokens >= 1, "an engine samples at least a token"
        full = self.ids(text)
        ids = full[:max_tokens]
        return Completion(
            ids,
            [-(number + 1.0) - i / 256 for i in range(len(ids))],
            "stop" if ids == full else "length",
        )


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "environments.py"
    path.write_text(ENVIRONMENTS)
    return path


@pytest.fixture(scope="module")
def tools(file: Path, tokenizer: Any) -> Iterator[Bed]:
    config = EnvironmentConfig(factory=f"{file}:Bench", num_workers=3, call_timeout_s=4)
    with EnvironmentPool(config, (), file.with_suffix(".log"), max_chars=200_000) as pool:
        yield Bed(pool, tokenizer)


@pytest.fixture(scope="module")
def gym(file: Path, tokenizer: Any) -> Iterator[Bed]:
    config = EnvironmentConfig(gym=f"{file}:Talk", num_workers=3)
    with EnvironmentPool(config, (), file.with_suffix(".gym.log")) as pool:
        yield Bed(pool, tokenizer)


def call(text: str, times: int = 1, name: str = "say") -> str:
    return (
        f'<tool_call>{{"name": "{name}", "arguments": {{"text": "{text}", "times": '
        f"{times}}}}}</tool_call>"
    )


def row_of(log: Path | str, **columns: Any) -> Callable[[ConversationId], dict[str, Any]]:
    return lambda position: {"log": str(log), **columns}


def only(found: dict[ConversationId, Completion]) -> tuple[Completion, Episode]:
    (completion,) = found.values()
    assert completion.episode is not None
    assert find_episode_error(completion.token_ids, completion.episode) is None
    return completion, completion.episode


def said(path: Path) -> list[str]:
    """What was executed."""
    return (
        [line[4:] for line in path.read_text().splitlines() if line.startswith("say ")]
        if path.exists()
        else []
    )


PROMPT, ANSWER = "<|user|>go<|end|><|assistant|>", "fine<|end|>"
TWO = call("ab") + call("c", 3) + "<|end|>"
TOLD = "<|tool|>ab<|end|><|tool|>ccc<|end|><|assistant|>"
ONE, RESULT = call("ab") + "<|end|>", "<|tool|>ab<|end|><|assistant|>"


def test_an_episode_is_token_by_token_what_was_given_and_sampled(
    tools: Bed, tmp_path: Path
) -> None:
    """Two calls side by side, one more, and an answer."""
    ids, log = tools.ids, tmp_path / "log"
    result, requests = tools.play({(0, 1): [TWO, ONE, ANSWER]}, row_of(log))
    completion, episode = only(result)
    pieces = [PROMPT, TWO, TOLD, ONE, RESULT, ANSWER]
    lengths = [len(ids(piece)) for piece in pieces]
    # Bytes without merges: the tokens of a text are those of its parts, one behind the other.
    (segment,) = episode.segments
    assert segment.token_ids.tolist() == ids("".join(pieces))
    assert segment.sampled.tolist() == np.repeat([False, True] * 3, lengths).tolist()
    assert completion.token_ids == ids(TWO + ONE + ANSWER)
    turns = [tools.sampled(text, number, 10_000) for number, text in enumerate((TWO, ONE, ANSWER))]
    assert completion.logprobs == [value for turn in turns for value in turn.logprobs]
    assert episode.turns == tuple(Turn(length, "stop") for length in lengths[1::2])
    contexts = [ids("".join(pieces[: 2 * n + 1])) for n in range(3)]
    rooms = [
        10_000 - len(context) for context in contexts
    ]  # the narrowest limit is that of the whole context
    seeds = [rollout_seed(5, 2, 7, 1, turn) for turn in range(3)]
    wanted = [
        Request(*item, is_rollout=False, top_p=0.8)
        for item in zip(contexts, seeds, [0.7] * 3, rooms, strict=True)
    ]
    assert requests == [((0, 1), request) for request in wanted]
    assert [message["role"] for message in episode.messages] == [
        "assistant",
        "tool",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [message["content"] for message in episode.messages] == [
        "",
        "ab",
        "ccc",
        "",
        "ab",
        "fine",
    ]
    assert (episode.status, completion.finish_reason, episode.rewards) == (
        "ok",
        "stop",
        {"Bench": 3.0},
    )
    assert said(log) == ["ab", "c", "ab"]
    assert len(episode.calls_s) == 4  # reset, two turns' calls, get_reward


@pytest.mark.parametrize("limit", ["max_tokens", "max_model_len", "max_all_tokens"])
def test_every_limit_of_tokens_at_its_edge_and_one_past_it(
    tools: Bed, tmp_path: Path, limit: str
) -> None:
    num_prompt, num_call, num_result, num_answer = (
        len(tools.ids(text)) for text in (PROMPT, ONE, RESULT, ANSWER)
    )
    old = 0 if limit == "max_tokens" else num_prompt
    inputs = num_call + num_result
    full = "max_tokens" if limit == "max_tokens" else "context_overflow"
    cases = [  # room behind the prompt; how it ends, tokens sampled, whether the tool ran
        (inputs + num_answer, "ok", num_call + num_answer, True),
        (inputs + num_answer - 1, "truncated", num_call + num_answer - 1, True),
        (inputs + 1, "truncated", num_call + 1, True),
        (inputs, full, num_call, True),  # a context without room for a token is not asked for
        (inputs - 1, full, num_call, True),
        (num_call, full, num_call, True),
        (
            num_call - 1,
            "truncated",
            num_call - 1,
            False,
        ),  # all but the token that ends the turn: not to be run
        (1, "truncated", 1, False),
        (0, full, 0, False),
    ]
    for room, status, num_sampled, ran in (
        cases[:-1] if limit == "max_tokens" else cases
    ):  # the config has it at 1
        log = tmp_path / f"{room}"
        limits = replace(WIDE, **{limit: old + room})
        completion, episode = only(tools.play({(0, 0): [ONE, ANSWER]}, row_of(log), limits)[0])
        result = episode.status, len(completion.token_ids), said(log) == ["ab"]
        assert result == (status, num_sampled, ran), (limit, room)
        num_context = sum(len(segment.token_ids) for segment in episode.segments)
        assert num_context <= old + room + (num_prompt if limit == "max_tokens" else 0)
        assert completion.finish_reason == ("stop" if status == "ok" else "length")
        # What had no room is in no segment, and no message of it is shown to rewards.
        has_result = any(message["role"] == "tool" for message in episode.messages)
        assert has_result == (room > inputs)
        assert num_context == (num_sampled and num_prompt + num_sampled + has_result * num_result)
        assert episode.rewards == {"Bench": float(ran) if num_sampled else None}


def test_the_limit_of_turns_and_of_a_turns_tokens(tools: Bed, tmp_path: Path) -> None:
    num_call = len(tools.ids(ONE))
    for number, (limits, status, calls, num_turns) in enumerate([
        (replace(WIDE, max_turns=3), "ok", ["ab", "ab"], 3),
        (replace(WIDE, max_turns=2), "max_turns", ["ab", "ab"], 2),
        (replace(WIDE, max_turns=1), "max_turns", ["ab"], 1),
        (replace(WIDE, max_turn_tokens=num_call), "ok", ["ab", "ab"], 3),
        (replace(WIDE, max_turn_tokens=num_call - 1), "truncated", [], 1),
    ]):  # fmt: skip
        log = tmp_path / str(number)
        completion, episode = only(tools.play({(0, 0): [ONE, ONE, ANSWER]}, row_of(log), limits)[0])
        assert (episode.status, said(log), len(episode.turns)) == (status, calls, num_turns)
        assert completion.finish_reason == ("length" if status == "truncated" else "stop")


def test_a_failure_is_tried_again_from_the_start_and_then_left_out(
    tools: Bed, tmp_path: Path
) -> None:
    hows = ["", "dies once", "dies", "no reset", "no reward", "hangs"]
    says: Script = {(job, 0): [ONE, ANSWER] for job in range(len(hows))}
    logs = [tmp_path / str(job) for job in range(len(hows))]
    result, requested = tools.play(
        says, lambda position: {"log": str(logs[position[0]]), "how": hows[position[0]]}
    )
    episodes = {method: result[job, 0].episode for job, method in enumerate(hows)}
    full, again = episodes[""], episodes["dies once"]
    assert full is not None
    assert again is not None
    assert (again.status, again.turns, again.messages) == ("ok", full.turns, full.messages)
    assert again.segments[0].token_ids.tolist() == full.segments[0].token_ids.tolist()
    assert result[1, 0].token_ids == result[0, 0].token_ids
    assert result[1, 0].logprobs == result[0, 0].logprobs
    requests = [
        [request for position, request in requested if position == (job, 0)]
        for job in range(len(hows))
    ]
    assert requests[1] == [
        requests[0][0],
        *requests[0],
    ]  # the first try's turn, and all of it again
    for job, path in enumerate(logs):
        resets = [line for line in path.read_text().splitlines() if line.startswith("reset")]
        assert len(resets) == (1 if job == 0 else 2)
        assert len({*resets}) == 1, "a try has the seeds of the one before"
    statuses = {method: "env_timeout" if method == "hangs" else "env_error" for method in hows[2:]}
    for method, status in statuses.items():
        failed, number = episodes[method], hows.index(method)
        assert failed is not None
        assert failed.status == status, method
        assert failed == Episode(status, (), (), [], {}, failed.calls_s, failed.error)
        assert (
            result[number, 0].token_ids,
            result[number, 0].logprobs,
            result[number, 0].finish_reason,
        ) == (
            [],
            [],
            "stop",
        )
        assert failed.error is not None
        assert failed.error.startswith("environment (row 3, sample 0): ")


def test_what_is_no_call_is_not_run_and_ends_the_episode_where_nothing_else_comes(
    tools: Bed, tmp_path: Path
) -> None:
    none, unknown = "<tool_call>{nothing</tool_call><|end|>", call("x", name="sing") + "<|end|>"
    unfit = '<tool_call>{"name": "say", "arguments": {"loud": 1}}</tool_call><|end|>'
    half = call("ab") + "<tool_call>{half</tool_call><|end|>"
    for number, (says, status, calls, num_turns) in enumerate([
        ([none, ANSWER], "invalid_calls", [], 1),
        ([half, ANSWER], "ok", ["ab"], 2),
        ([unknown, unfit, unknown, ANSWER], "invalid_calls", [], 3),
        ([unknown, unfit, ONE, unknown, unfit, ANSWER], "ok", ["ab"], 6),
    ]):  # fmt: skip
        log = tmp_path / str(number)
        _, episode = only(tools.play({(0, 0): says}, row_of(log))[0])
        assert (episode.status, said(log), len(episode.turns)) == (status, calls, num_turns), number


def test_a_result_that_cannot_fit_is_not_even_tokenized(
    tools: Bed, tmp_path: Path, monkeypatch: Any
) -> None:
    suffixes: list[int] = []
    real = tools.chat.next_ids

    def next_ids(*args: Any) -> Any:
        suffixes.append(1)
        return real(*args)

    monkeypatch.setattr(tools.chat, "next_ids", next_ids)
    limits = replace(WIDE, max_tokens=600)
    for times, status, num_tried in (
        (100, "ok", 1),
        (700, "max_tokens", 1),
        (150_000, "max_tokens", 0),
        (300_000, "max_tokens", 0),
    ):
        suffixes.clear()
        log = tmp_path / str(times)
        says: Script = {(0, 0): [call("x", times) + "<|end|>", ANSWER]}
        _, episode = only(tools.play(says, row_of(log), limits)[0])
        assert (episode.status, len(suffixes), len(episode.turns)) == (
            status,
            num_tried,
            1 + (status == "ok"),
        ), times


def test_what_an_environment_adds_to_the_prompt_counts_as_prompt(
    tools: Bed, tmp_path: Path
) -> None:
    row = {"log": str(tmp_path / "log"), "begins": ", now"}
    limits = replace(WIDE, max_tokens=len(tools.ids(ANSWER)))
    _, episode = only(tools.play({(0, 0): [ANSWER]}, row_of(**row), limits)[0])
    prompt = tools.ids("<|user|>go, now<|end|><|assistant|>")
    assert episode.segments[0].token_ids.tolist() == prompt + tools.ids(ANSWER)
    assert (episode.status, episode.segments[0].sampled.sum()) == ("ok", len(tools.ids(ANSWER)))


def test_a_generation_that_was_stopped_leaves_nothing_to_the_next(
    tools: Bed, tmp_path: Path
) -> None:
    """The same places again, while some of the old ones were at a call, at a reset, in the engine
    or in the queue."""
    for stop_after in (0, 1, 3, 6):
        says: Script = {
            (job, n): [call(f"{job}{n}") + "<|end|>", ANSWER] for job in range(3) for n in range(2)
        }

        def row(position: ConversationId, stop_after: int = stop_after) -> dict[str, Any]:
            return {"log": str(tmp_path / f"{stop_after} {position}")}

        tools.play(says, row, num_turns=stop_after)
        result, _ = tools.play(says, lambda position: {"log": row(position)["log"] + " again"})
        for position, completion in result.items():
            assert completion.episode is not None
            assert completion.episode.status == "ok"
            assert completion.episode.messages[1]["content"] == f"{position[0]}{position[1]}"
            assert said(tmp_path / f"{stop_after} {position} again") == [
                f"{position[0]}{position[1]}"
            ]
        assert len(result) == 6


def test_rewards_of_turns_are_summed_or_discounted(gym: Bed, tmp_path: Path) -> None:
    steps = [["a", 1.0, False], ["b", None, False], ["c", 4.0, True]]
    for discount, wanted in (
        (None, 5.0),
        (1.0, 5.0),
        (0.5, 2.0),
        (0.0, 1.0),
    ):  # 1 + 4 * discount ** 2
        row: dict[str, Any] = {"log": str(tmp_path / "log"), "steps": steps}
        _, episode = only(
            gym.play(
                {(0, 0): ["1<|end|>", "2<|end|>", "3<|end|>"]}, row_of(**row), discount=discount
            )[0]
        )
        assert (episode.rewards, episode.status) == ({"environment": wanted}, "ok")
        assert [turn.reward for turn in episode.turns] == [1.0, None, 4.0]
        assert [message["content"] for message in episode.messages] == ["1", "a", "2", "b", "3"]
    row["steps"] = [["a", None, True]]
    _, episode = only(gym.play({(0, 0): ["1<|end|>"]}, row_of(**row))[0])
    assert episode.rewards == {"environment": 0.0}  # it had a turn, which earned nothing


def test_an_episode_that_was_cut_off_counts_as_0_and_is_not_left_out(
    gym: Bed, tmp_path: Path
) -> None:
    """Longer is better, unfinished is worth nothing: the cut-off turn never reaches step(), which
    would reward the others with 0.1 a character. Left out of its group, it would cost nothing."""

    def row(position: ConversationId) -> dict[str, Any]:
        length = 2 + 2 * position[1]
        return {"log": str(tmp_path / "log"), "steps": [["", length / 10, True]]}

    says: Script = {(0, n): [(2 + 2 * n) * "1" + "<|end|>"] for n in range(3)}
    says[0, 3] = ["1" * 99]
    limits = replace(WIDE, max_turn_tokens=20)
    result, _ = gym.play(says, row, limits)
    completions = [result[0, n] for n in range(4)]
    group = RolloutGroup(0, Prompt(0, 0, [1], "x", {}), completions)
    rewards = Scorers(_scored, {"environment": 1.0}, [EnvironmentScorer(["environment"])])(
        [group]
    ).rewards
    assert [c.finish_reason for c in completions] == ["stop"] * 3 + ["length"]
    assert rewards == [0.2, 0.4, 0.6, 0.0]
    assert sum(filter(None, rewards)) / 4 == pytest.approx(0.3)  # the mean that is true of all four


def test_unfinished_episodes_lower_advantages_means_and_the_best_metric(
    gym: Bed, tmp_path: Path
) -> None:
    """The reward comes with the end alone; two of four episodes do not come to it. The mean of
    those that do would rise while the policy gets worse."""
    limits = replace(WIDE, max_turns=2, max_turn_tokens=len(gym.ids("ab<|end|>")))
    go_on, short, long = ["go on", None, False], ["", 0.25, True], ["", 0.75, True]
    steps = [[short], [go_on, long], [], [go_on, go_on]]
    says = [["a<|end|>"], ["a<|end|>", "b<|end|>"], ["too long<|end|>"], ["a<|end|>", "b<|end|>"]]
    score = Scorers(_scored, {"environment": 1.0}, [EnvironmentScorer(["environment"])])

    def play(kinds: Sequence[int]) -> tuple[RolloutGroup, ScoredRollouts]:
        """Returns a group of episodes of these kinds, and its rewards."""
        script: Script = {(0, n): says[kind] for n, kind in enumerate(kinds)}
        log = str(tmp_path / "log")
        result, _ = gym.play(script, lambda at: {"log": log, "steps": steps[kinds[at[1]]]}, limits)
        group = RolloutGroup(0, Prompt(0, 3, [1], "go", {}), [result[at] for at in script])
        return group, score([group])

    group, scored = play([0, 1, 2, 3])
    statuses = [completion.episode.status for completion in group.completions if completion.episode]
    assert statuses == ["ok", "ok", "truncated", "max_turns"]
    assert scored.rewards == [0.25, 0.75, 0.0, 0.0]
    rules = StepRules(
        RolloutConfig(num_prompts_per_step=1, group_size=4),
        AdvantageConfig(estimator="grpo", normalize_std="group"),
        LossConfig(mask_truncated=False),
        TrainingConfig(num_mini_batches=1),
        max_error_frac=0.3,
        num_ranks=1,
    )
    rank0_step = _Rank0Step(rules)
    rank0_step.add_round([encode_groups([group], scored, 4)], 1)
    decision = rank0_step.decide()
    # Mean 0.25; deviation sqrt((0 + 0.5^2 + 2 * 0.25^2) / 3) = 0.3536.
    assert decision.advantages.tolist() == pytest.approx([0, 2**0.5, -(0.5**0.5), -(0.5**0.5)])
    assert decision.in_loss.all()
    assert decision.metrics["reward/mean"] == 0.25
    assert decision.metrics["reward/unscored_frac"] == 0

    def eval_mean(kinds: Sequence[int]) -> float | None:
        group, scored = play(kinds)
        single = [RolloutGroup(n, group.prompt, [one]) for n, one in enumerate(group.completions)]
        return summarise([*outcomes_by_slot(single, scored).values()], 4)["mean"]

    # Of its survivors alone the second policy would have 0.75, the first 0.5:
    # checkpoint.best_metric would keep the one that hardly ever finishes.
    assert (eval_mean([0, 1, 2, 3]), eval_mean([1, 2, 2, 3])) == (0.25, 0.1875)


def test_a_tool_that_raises_is_counted_and_said_once(
    file: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two calls of a tool that raises and one with an argument that does not fit, which is the
    policy's mistake; and an answer without a call."""
    config = EnvironmentConfig(factory=f"{file}:Bench", num_workers=1)
    wrong = call("ab").replace('"times"', '"often"') + "<|end|>"
    with EnvironmentPool(config, (), tmp_path / "log") as pool:
        result, _ = Bed(pool, tokenizer).play(
            {(0, 0): [TWO, wrong, ANSWER], (0, 1): [ANSWER]},
            row_of(tmp_path / "said", how="raises"),
        )
    episodes = [result[0, n].episode for n in range(2)]
    assert [(e.num_tool_calls, e.num_tool_errors) for e in episodes if e] == [(3, 2), (0, 0)]
    # Once, although it failed twice; with the user's line.
    (record,) = [r for r in caplog.records if r.name == "grpo_spmd" and r.levelname == "WARNING"]
    raised = "tool 'say' raised ConnectionError: no shop (environments.py:"
    assert record.getMessage().startswith(raised)
    log = (tmp_path / "log").read_text()
    assert log.count(raised) == 1
    assert "Traceback (most recent call last):" in log
    # 3 calls in 2 episodes, of which 2 failed.
    groups = [RolloutGroup(0, Prompt(0, 0, [1], "x", {}), [result[0, n] for n in range(2)])]
    values: list[float | None] = [1.0, 0.0]
    scored = ScoredRollouts(values, {"r": values}, {"r": ["ok"] * 2})
    sampled = decode_groups([encode_groups(groups, scored, 2)], 2)
    metrics = episode_metrics(
        sampled.rows, sampled.counts.calls_s, sampled.counts.tools, num_ranks=1
    )
    assert metrics["environment/tool_calls_mean"] == 1.5
    assert metrics["environment/tool_error_frac"] == pytest.approx(2 / 3)


def test_a_task_from_reset_is_in_the_prompts_of_rewards_as_in_trl(
    file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """TRL 1.16 appends what reset() returns to the last user message, and its reward functions get
    that prompt (grpo_trainer.py:2398 and 2753). This one asks for the word of the task; of the two
    episodes, with other tasks, one says it."""
    (tmp_path / "obey.py").write_text(
        "def obeyed(prompts, completions, **_):\n"
        "    tasks = [prompt[-1]['content'].partition('Say ')[2] for prompt in prompts]\n"
        "    words = [completion[0]['content'] for completion in completions]\n"
        "    return [float(word == task) for word, task in zip(words, tasks)]\n"
        "def looks(prompts, completions, environments, **_):\n"
        "    return obeyed(prompts, completions)\n"
    )
    looks = RewardConfig(function=f"{tmp_path}/obey.py:looks")
    config = EnvironmentConfig(factory=f"{file}:Bench", num_workers=1)
    with EnvironmentPool(config, (looks,), tmp_path / "log") as pool:
        result, requests = Bed(pool, tokenizer).play(
            {(0, 0): ["yes<|end|>"], (0, 1): ["yes<|end|>"]},
            lambda place: {
                "log": str(tmp_path / "log"),
                "begins": (" Say yes", " Say no")[place[1]],
            },
        )
    completions = [result[0, n] for n in range(2)]
    prompt = Prompt(7, 3, [1], [{"role": "user", "content": "go"}], {})
    seen = [prompt.text_before(completion) for completion in completions]
    assert seen == [[{"role": "user", "content": f"go Say {word}"}] for word in ("yes", "no")]
    # The policy's tokens are of this prompt.
    texts = [tokenizer.decode(request.prompt_ids) for _, request in sorted(requests)]
    assert texts == [f"<|user|>go Say {word}<|end|><|assistant|>" for word in ("yes", "no")]
    group = RolloutGroup(0, prompt, completions)
    called = RewardConfig(function=f"{tmp_path}/obey.py:obeyed")
    with RewardPool([called], RewardPoolConfig(num_workers=1), tmp_path / "rewards") as rewards:
        scored = rewards.score([group], tokenizer)
    assert scored.by_name["obeyed"] == [1.0, 0.0]
    # So do a reward in the environment's process, and the dump.
    assert [c.episode.rewards["looks"] for c in completions if c.episode] == [1.0, 0.0]
    assert [inputs["prompts"] for inputs in scored.reward_inputs] == seen
    assert [dumped_prompt(prompt, completion) for completion in completions] == seen


def test_an_action_is_text_also_where_it_looks_like_a_call(gym: Bed, tmp_path: Path) -> None:
    log = tmp_path / "log"
    says = [call("ab") + "<|end|>", "<tool_call>{half<|end|>", "so <tool_call></tool_call><|end|>"]
    steps = [["go on", 0.0, False], ["go on", 0.0, False], ["", 1.0, True]]
    _, episode = only(gym.play({(0, 0): says}, row_of(log, steps=steps))[0])
    assert log.read_text().splitlines() == [text.removesuffix("<|end|>") for text in says]
    assert (episode.status, len(episode.turns)) == ("ok", 3)


@pytest.mark.parametrize("observation", [
    None, [], {"role": "user", "content": 0}, {"role": "user", "content": "x", "tool_calls": 5},
    {"role": "user", "content": {"a": 1}}, [{"role": "user", "content": "\ud800"}, {"role": 3, "content": ""}],  # noqa: E501
])  # fmt: skip
def test_an_observation_that_is_none_fails_its_episode_alone(
    gym: Bed, tmp_path: Path, observation: Any
) -> None:
    rows = [[[observation, 1.0, False]], [["a", 1.0, True]]]
    says: Script = {(0, n): ["1<|end|>", "2<|end|>"] for n in range(2)}
    result, _ = gym.play(
        says, lambda position: {"log": str(tmp_path / "log"), "steps": rows[position[1]]}
    )
    statuses = [result[0, n].episode.status for n in range(2)]  # type: ignore[union-attr]
    assert statuses == ["env_error", "ok"]


@pytest.mark.parametrize("begins", ["\ud800", [{"role": "user", "content": "\ud800x"}]])
def test_whatever_reset_gives_the_run_goes_on(gym: Bed, tmp_path: Path, begins: Any) -> None:
    row = {"log": str(tmp_path / "log"), "steps": [["a", 1.0, True]], "begins": begins}
    result, _ = gym.play({(0, 0): ["1<|end|>"]}, row_of(**row))
    episode = result[0, 0].episode
    assert episode is not None
    assert (episode.status, len(episode.turns)) == ("ok", 1)


def _scored(groups: Sequence[RolloutGroup], **more: Any) -> ScoredRollouts:
    """As a reward pool of two functions: the length, and nothing for odd ones; with notes on the
    first of a group."""
    lengths = [len(completion.token_ids) for group in groups for completion in group.completions]
    if not lengths:
        return ScoredRollouts()
    odd = [None if length % 2 else 1.0 for length in lengths]
    return ScoredRollouts(
        [0.0] * len(lengths), {"odd": odd, "length": [*map(float, lengths)]},
        {"odd": ["ok" if value else "not_applicable" for value in odd], "length": ["ok"] * len(lengths)},  # noqa: E501
        "reward 'odd' raised", [f"text {length}" for length in lengths], [{"n": length} for length in lengths],  # noqa: E501
        {i: {"extra": {"length": length}} for i, length in enumerate(lengths)},
    )  # fmt: skip


def _of(length: int, status: str = "ok", reward: Any = None) -> Completion:
    if not length:
        return Completion(
            [], [], "stop", Episode(status, (), (), [], {"given": 9.0}, [], "environment: gone")
        )
    segment = Segment(np.arange(length + 1, dtype=np.int32), np.arange(length + 1) > 0)
    episode = Episode(status, (segment,), (Turn(length, "stop"),), [], {"given": reward}, [])
    return Completion([*range(1, length + 1)], [0.0] * length, "stop", episode)


def test_scores_keep_their_places_beside_failed_episodes() -> None:
    prompt = Prompt(0, 0, [1], "x", {})
    groups = [
        RolloutGroup(0, prompt, [_of(0, "env_error"), _of(2, reward=0.5)]),
        RolloutGroup(
            1, prompt, [_of(0, "env_timeout"), _of(0, "context_overflow")]
        ),  # none of it has a turn
        RolloutGroup(2, prompt, [_of(3, reward="is nan"), _of(5, reward=None)]),
    ]
    scores = Scorers(
        _scored, {"length": 1.0, "given": 10.0, "odd": 100.0}, [EnvironmentScorer(["given"])]
    )
    result = scores(groups)
    # length + 10 * given + 100 * odd; what is unusable makes the sum unknown, what does not apply
    # is left out of it
    assert result.rewards == [None, 107.0, None, None, None, 5.0]
    assert list(result.by_name) == list(result.statuses) == ["length", "given", "odd"]
    assert result.by_name["length"] == [None, 2.0, None, None, 3.0, 5.0]
    assert result.by_name["odd"] == [None, 1.0, None, None, None, None]
    inputs = result.by_name["given"]
    assert repr(inputs) == "[None, 0.5, None, None, nan, None]"
    assert result.statuses["given"] == [
        "not_applicable",
        "ok",
        "not_applicable",
        "not_applicable",
        "error",
        "not_applicable",
    ]
    assert result.texts == ["", "text 2", "", "", "text 3", "text 5"]
    assert result.reward_inputs == [{}, {"n": 2}, {}, {}, {"n": 3}, {"n": 5}]
    assert result.notes == {
        i: {"extra": {"length": length}} for i, length in ((1, 2), (4, 3), (5, 5))
    }
    assert result.first_error == "environment: gone\nreward 'odd' raised"


def test_without_any_reward_all_are_0_for_a_teacher_teaches_alone() -> None:
    group = RolloutGroup(0, Prompt(0, 0, [1], "x", {}), [_of(0, "env_error"), _of(2)])
    assert Scorers(_scored, {}, [EnvironmentScorer([])])([group]).rewards == [0.0, 0.0]


def test_where_all_episodes_failed_every_reward_is_named_and_none_known() -> None:
    """Ranks tell rank 0 their rewards by name, and rounds of a step are put behind each other."""
    scores = Scorers(
        _scored, {"odd": 1.0, "length": 1.0, "given": 1.0}, [EnvironmentScorer(["given"])]
    )
    group = RolloutGroup(0, Prompt(0, 0, [1], "x", {}), [_of(0, "env_error"), _of(0, "env_error")])
    result = scores([group])
    assert result.by_name == {name: [None, None] for name in ("odd", "length", "given")}
    assert result.num_statuses() == {
        name: {"not_applicable": 2} for name in ("odd", "length", "given")
    }
    assert result.rewards == [None, None]
    assert scores([]) == ScoredRollouts()
