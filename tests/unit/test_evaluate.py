"""Evaluation: its numbers against independent ones."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_spmd.config.schema import EvalConfig, RolloutConfig
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import EngineStateError, GenerationHooks, Request, policy_request
from grpo_spmd.episodes import environments as episode_environments
from grpo_spmd.episodes.environments import Environments
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.verifiers import final_answer
from grpo_spmd.rollout import evaluate
from grpo_spmd.rollout.evaluate import (
    Evaluator,
    Outcome,
    check_sampling,
    majority,
    outcomes_by_slot,
    pass_at_k,
    summarise,
)
from grpo_spmd.rollout.sample import generate

# The estimators


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        samples = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(samples, k))
            assert pass_at_k(num_samples, num_right, k) == pytest.approx(
                sum(map(any, subsets)) / len(subsets), abs=1e-12
            )


def test_pass_at_k_of_many_samples_is_a_number() -> None:
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)  # binomials of 1500 digits


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        ("aab", "110", 1.0),
        ("aab", "001", 0.0),  # the minority was right
        ("ab", "10", 0.5),  # a tie of two
        ("aabbc", "11001", 0.5),  # a tie of two pairs; c has fewer votes
        ("abcd", "1000", 0.25),  # all differ
        (
            "aaab",
            "1001",
            1 / 3,
        ),  # one answer that the verifier judges both ways, or that timed out twice
        ("a", "1", 1.0),
    ],
)
def test_majority_by_hand(answers: str, correct: str, expected: float) -> None:
    assert majority(list(answers), [r == "1" for r in correct]) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so \\boxed{ 42 } it is", "42"),
        ("\\boxed{1} no, \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed {x_{1}}", "x_{1}"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x }", "\\left\\{ x"),  # an escaped bracket opens nothing
        ("} \\boxed{3}", "3"),
        ("\\boxed{7} and then \\boxed{8", "7"),  # cut off: the last whole one
        ("\\boxed{5} #### 6", "5"),
        ("#### 6 \n#### 7 ", "7"),
        ("<answer>1</answer> #### 8", "8"),
        ("<answer> 1 </answer> or <answer>\n2\n</answer>", "2"),
        ("<answer>1</answer> <answer>2", "1"),
        ("1</answer>", "1</answer>"),
        ("  just text\n", "just text"),
        ("\\boxed{", "\\boxed{"),
        ("", ""),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "}", "<answer>", "</answer>", "####", "\\"])
def test_final_answer_of_a_model_that_repeats_itself_is_found_in_time(piece: str) -> None:
    start = time.perf_counter()
    final_answer(piece * 100_000)
    assert time.perf_counter() - start < 5


def outcome(
    answer: str,
    reward: float | None,
    correct: bool,
    num_tokens: int = 10,
    truncated: bool = False,
    unscored: bool = False,
) -> Outcome:
    return Outcome(reward, correct, unscored or reward is None, truncated, num_tokens, answer)


def test_metrics_of_a_set_by_hand() -> None:
    easy = [
        outcome("4", 1.0, True),
        outcome("4", 1.1, True),
        outcome("5", 0.0, False, num_tokens=40, truncated=True),
    ]
    # 7 was said twice; one of the two timed out. 8 would be right.
    hard = [outcome("7", None, False), outcome("7", 0.0, False), outcome("8", 1.0, True)]
    assert summarise([*easy, *hard], 3) == pytest.approx(
        {
            "mean": 3.1 / 5,
            "pass_at_1": (2 / 3 + 1 / 3) / 2,
            "pass_at_2": (1 + 2 / 3) / 2,
            "pass_at_3": 1.0,
            "maj_at_3": (1 + 0) / 2,
            "truncated_frac": 1 / 6,
            "unscored_frac": 1 / 6,
            "tokens_mean": 90 / 6,
            "num_prompts": 2,
        }
    )


def test_a_set_without_any_reward_has_no_mean_and_nothing_right() -> None:
    metrics = summarise([outcome("a", None, False)] * 4, 4)
    assert metrics["mean"] is None
    assert [metrics[name] for name in ("pass_at_1", "pass_at_2", "pass_at_4", "maj_at_4")] == [
        0,
        0,
        0,
        0,
    ]
    assert metrics["unscored_frac"] == 1


@pytest.mark.parametrize(
    ("num_samples", "ks"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])]
)
def test_k_doubles_up_to_the_number_of_samples(num_samples: int, ks: list[int]) -> None:
    metrics = summarise([outcome("a", 1.0, True)] * num_samples, num_samples)
    assert [name for name in metrics if name.startswith("pass")] == [f"pass_at_{k}" for k in ks]
    assert f"maj_at_{num_samples}" in metrics


def test_answers_are_counted_by_what_they_are() -> None:
    """A digest that is the same for all answers would make each of them the most common one."""
    texts = ["so \\boxed{1}", "\\boxed{2}", "\\boxed{1}", "\\boxed{1}"]
    verdicts: list[float | None] = [0.0, 1.0, 0.0, 0.0]
    scored = ScoredRollouts(rewards=verdicts, by_name={"r": verdicts}, texts=texts)
    prompt = Prompt(0, 0, [1], "p", {})
    groups = [RolloutGroup(slot, prompt, [Completion([5], [0.0], "stop")]) for slot in range(4)]
    outcomes = outcomes_by_slot(groups, scored)
    answers = [outcomes[slot].answer for slot in range(4)]
    assert answers[0] == answers[2] == answers[3] != answers[1]
    # The most common answer, 1, is wrong.
    assert summarise([*outcomes.values()], 4)["maj_at_4"] == 0.0


# The temperature


class Engine(RolloutEngine):
    """One that answers each request at once, over a vLLM that takes requests and does nothing."""

    def __init__(self) -> None:
        self._rollout = RolloutConfig(temperature=1.0)
        self._stop_token_ids: list[int] = []
        self._adapters = None
        self._sampling: set[tuple[float, float]] = set()
        # What vLLM was asked for: None is no logprobs, 0 the sampled token's.
        self.logprobs: list[int | None] = []
        self._engine: Any = SimpleNamespace(add_request=self._take)
        self.tp_rank, self.tp_size = 0, 1

    def _take(self, request_id: str, prompt: Any, params: Any, **_: Any) -> None:
        assert params.max_tokens == self._rollout.max_completion_tokens
        self.logprobs.append(params.logprobs)

    def reset_prefix_cache(self) -> None:
        pass

    def generate_shared(self, sizes: Sequence[int], hooks: Any, *_: Any) -> Any:
        answer = Completion([5], [-0.1], "stop")
        result: dict[int, list[list[Completion]]] = {}
        for job, size in enumerate(sizes):
            result[job] = [[answer]] * size
            for number in range(size):
                request = hooks.next_request(job, number, [])
                assert isinstance(request, Request)
                self._add_requests([(f"{job}-{number}", request)])
        return result


class Episodes:
    """Episodes of one turn, whose environments have nothing to say."""

    def __init__(self, task: Any, evaluation: EvalConfig | None, **_: Any) -> None:
        self.task, self.evaluation = task, evaluation
        self.completions: dict[tuple[int, int], Completion] = {}

    def next_request(self, job: int, number: int, turns: Sequence[Completion]) -> Request:
        prompt, seed = self.task((job, number))
        self.completions[job, number] = Completion([5], [-0.1], "stop")
        return policy_request(prompt.token_ids, seed(-1), self.evaluation)

    def close(self) -> None:
        pass


def score(groups: Sequence[RolloutGroup], **_: Any) -> ScoredRollouts:
    ones: list[float | None] = [1.0] * len(groups)
    return ScoredRollouts(
        rewards=ones, by_name={"r": ones}, texts=["5"] * len(groups), reward_inputs=[{}] * len(ones)
    )


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Evaluator:
    """At temperature 0.6 and top_p 0.9 where the training has 1 and 1; of episodes if the parameter
    says so."""
    kinds = SimpleNamespace(FINAL_ONLY=0)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setitem(
        sys.modules,
        "vllm.sampling_params",
        SimpleNamespace(RequestOutputKind=kinds),
    )
    monkeypatch.setattr(evaluate, "on_rank0", lambda fn, report: fn([report]))
    monkeypatch.setattr(episode_environments, "Episodes", Episodes)
    environments: Any = None
    if request.param == "episodes":
        environments = Environments.__new__(Environments)
        environments._pool = environments._chat = environments._limits = object()
        environments._endpoint, environments._config = None, SimpleNamespace(discount=None)
    prompts = [Prompt(row, row, [1, 2], "p", {}) for row in range(3)]
    config = EvalConfig(every_steps=1, temperature=0.6, top_p=0.9, num_samples=2)
    return Evaluator(
        {"e": prompts}, Engine(), score, config, 0, 0.5, None, environments=environments
    )


@pytest.mark.parametrize("evaluator", ["completions", "episodes"], indirect=True)
def test_an_evaluation_is_sampled_at_its_temperature_and_another_one_is_seen(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert evaluator.evaluate(0)["eval/e/mean"] == 1.0
    # What was sampled for training in between does not count.
    hooks = GenerationHooks(lambda *_: Request([1], 0))
    evaluator.engine.generate_shared([1], hooks, 1)
    assert evaluator.evaluate(1)["eval/e/mean"] == 1.0
    generate = evaluate.generate
    # None stands for the training's temperature.
    for wrong, text in (
        (None, r"at temperature 1 and top_p 1, and eval.temperature is 0.6, eval.top_p 0.9"),
        (dataclasses.replace(evaluator.config, top_p=1.0), "at temperature 0.6 and top_p 1,"),
    ):
        monkeypatch.setattr(
            evaluate,
            "generate",
            lambda *a, wrong=wrong, **k: generate(*a, **{**k, "evaluation": wrong}),
        )
        with pytest.raises(EngineStateError, match=text):
            evaluator.evaluate(2)


@pytest.mark.parametrize("evaluator", ["completions"], indirect=True)
def test_an_evaluation_asks_for_no_logprobs_and_a_rollout_does(evaluator: Evaluator) -> None:
    engine: Any = evaluator.engine
    evaluator.evaluate(0)
    assert engine.logprobs == [None] * 6
    generate(engine, None, [1, 2], task=evaluator._task, policy_version=1)
    assert engine.logprobs[6:] == [0] * 3


def test_vllms_lowest_temperature_is_no_other_one() -> None:
    check_sampling([(0.01, 1.0)], EvalConfig(temperature=0.002))
    # vLLM sets top_p to 1 where it takes the likeliest token.
    check_sampling([(0.0, 1.0)], EvalConfig(temperature=0.0, top_p=0.5))
    check_sampling([], EvalConfig(temperature=0.0))
    with pytest.raises(EngineStateError):
        check_sampling([(0.0, 1.0), (0.6, 1.0)], EvalConfig(temperature=0.0))
