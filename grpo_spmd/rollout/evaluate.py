"""This module evaluates the policy on held-out sets during training, distributed over all ranks.

All evaluations of a run draw the same random numbers, which depend on (seed, set, row, sample). So
a difference between two evaluations is due to learning more than to chance. A completion is
*correct* if the first entry of `rewards` gives it more than 0.5: put the verifier first, and
rewards that shape the training (format, length) after it. A completion whose reward is unknown
(None, NaN, timeout) counts as incorrect. An *outcome* is the record of one completion's measured
values.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from statistics import multimode
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import ConversationId, EngineStateError, EpisodeTask
from grpo_spmd.observe.rollout_record import (
    EvalRecord,
    bounded_values,
    dumped_prompt,
    to_line,
)
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.records import Prompt, RolloutGroup, ScoredRollouts, rollout_seed
from grpo_spmd.rewards.protocol import check_error_rate
from grpo_spmd.rewards.scorers import Score
from grpo_spmd.rewards.trl import logged_in, mean_metrics
from grpo_spmd.rewards.verifiers import final_answer
from grpo_spmd.rollout.sample import generate

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments


_log = logging.getLogger("grpo_spmd")
# The lowest temperature above 0 at which vLLM samples; it raises lower ones to this.
_MIN_TEMPERATURE = 0.01
# The prompts of each set, equal on all ranks.
HeldOut = Mapping[str, Sequence[Prompt]]
Metrics = dict[str, float | None]


class Outcome(NamedTuple):
    """The measured values of one completion in an evaluation. Ranks send outcomes as JSON."""

    # The weighted sum of the rewards; None if it is unknown.
    reward: float | None
    correct: bool
    # True if the sum of its rewards, or the reward of the verifier, is unknown.
    unscored: bool
    truncated: bool
    num_tokens: int
    # A digest of the final answer; equal answers have equal digests.
    answer: str


@dataclass
class Evaluator:
    """Evaluates the policy on every held-out set: samples completions for its prompts, scores them,
    and computes the metrics."""

    held_out: HeldOut
    engine: RolloutEngine
    score: Score
    """Scores this rank's groups. In an evaluation a group has a single completion, and its slot is
    the completion's index among those of all sets."""
    config: EvalConfig
    seed: int
    max_error_frac: float
    """The fraction of failed rewards at which an evaluation stops the run
    (`reward_pool.max_error_frac`)."""
    writer: RolloutWriter | None
    """Writes eval_<set>_step_<step>.jsonl; None if completions are not dumped."""
    environments: Environments | None = None
    watched_rewards: Collection[str] = ()
    """The names of rewards that are only watched (weight 0), whose failures never stop the run."""

    def __post_init__(self) -> None:
        # By slot: (set, the prompt's index in the set, the sample's number).
        self._samples = [
            (name, index, sample)
            for name, prompts in self.held_out.items()
            for index in range(len(prompts))
            for sample in range(self.config.num_samples)
        ]

    def evaluate_if_due(self, step: int) -> Metrics:
        """Collective. Returns the metrics of `evaluate`, or nothing if no evaluation is due.

        An evaluation is due before the training and after every `eval.every_steps` steps.
        """
        every = self.config.every_steps
        return {} if every == 0 or step % every else self.evaluate(step)

    def evaluate(self, step: int) -> Metrics:
        """Collective. Returns `eval/<set>/...` for every set, equal on all ranks and for any number
        of ranks.

        The policy after `step` steps samples `eval.num_samples` completions for every prompt.
        Completions, not prompts, are distributed, so that one prompt with 64 samples keeps all
        engines busy. What the training samples later does not depend on evaluations. Raises
        Rank0Error on every rank if a reward fails for `reward_pool.max_error_frac` of the
        completions.
        """
        # Forget at which temperatures the engine sampled before this evaluation.
        self.engine.take_sampling()
        # The engine already has the weights for the next step, so its version is step + 1.
        groups = self._sample(step + 1)
        sampling = self.engine.take_sampling()
        scored = self.score(groups, num_step_completions=len(self._samples))
        outcomes = outcomes_by_slot(groups, scored)
        statuses = scored.num_statuses()
        if self.environments is not None:
            statuses |= self.environments.statuses(groups)
        report = {
            "outcomes": [
                (group.slot, outcomes[group.slot], scored.notes.get(number, {}).get("logged", {}))
                for number, group in enumerate(groups)
            ],
            "statuses": statuses,
            "first_error": scored.first_error,
            "sampling": sampling,
        }
        by_set: dict[str, Metrics] = on_rank0(self._summarise_sets, report)
        for name, metrics in by_set.items():
            if self.writer is not None:
                lines = self._lines(name, groups, outcomes, scored=scored)
                self.writer.write(f"eval_{name}_step_{step:06d}", lines)
            values = "  ".join(
                f"{key} {math.nan if value is None else value:.4g}"
                for key, value in metrics.items()
                if key != "num_prompts"
            )
            _log.info("eval after step %d, %s: %s", step, name, values)
        return {
            f"eval/{name}/{key}": value
            for name, metrics in by_set.items()
            for key, value in metrics.items()
        }

    def _sample(self, policy_version: int) -> list[RolloutGroup]:
        """Collective. Samples all completions of the evaluation, and returns those that this rank
        scores, each as a group of one."""
        engine = self.engine
        conversations = generate(
            engine,
            self.environments,
            [1] * len(self._samples),
            task=self._task,
            policy_version=policy_version,
            evaluation=self.config,
        )
        # A later training prompt with a cached prefix would be computed in chunks of other sizes,
        # which rounds differently.
        engine.reset_prefix_cache()
        groups = [
            RolloutGroup(slot, self._prompt(slot), turns) for slot, [turns] in conversations.items()
        ]
        # Ranks of an engine all have its completions, but only the first one has its episodes.
        return groups[engine.tp_rank :: engine.tp_size] if self.environments is None else groups

    def _task(self, conversation: ConversationId) -> EpisodeTask:
        """Returns the prompt of a conversation, and the function for the seeds of its turns.

        A conversation is (slot, 0), as each completion of an evaluation is a job of its own.
        """
        slot = conversation[0]
        name, _, sample = self._samples[slot]
        prompt = self._prompt(slot)
        return prompt, partial(rollout_seed, self.seed, f"eval/{name}", prompt.row, sample)

    def _prompt(self, slot: int) -> Prompt:
        """Returns the prompt of a slot, the index of a completion among those of all sets."""
        name, index, _ = self._samples[slot]
        # The prompts may lie in a file, so only one is read.
        return self.held_out[name][index]

    def _summarise_sets(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, Metrics]:
        """Returns the metrics of each set from the reports of all ranks; runs on rank 0.

        `evaluate` makes the reports. Each completion is in exactly one report.
        """
        check_sampling((pair for report in reports for pair in report["sampling"]), self.config)
        # A verifier that always fails must not look like a policy that is never correct.
        check_error_rate(
            [report["statuses"] for report in reports],
            [report["first_error"] for report in reports],
            self.max_error_frac,
            watched=self.watched_rewards,
        )
        rows = [row for report in reports for row in report["outcomes"]]
        rows.sort(key=lambda row: row[0])
        assert [slot for slot, *_ in rows] == list(range(len(self._samples))), len(rows)
        in_order = iter(rows)
        metrics: dict[str, Metrics] = {}
        for name, prompts in self.held_out.items():
            rows_of_set = list(islice(in_order, len(prompts) * self.config.num_samples))
            outcomes = [Outcome(*outcome) for _, outcome, _ in rows_of_set]
            logged = logged_in({"logged": logged} for *_, logged in rows_of_set)
            metrics[name] = summarise(outcomes, self.config.num_samples) | mean_metrics(logged)
        return metrics

    def _lines(
        self,
        set_name: str,
        groups: Sequence[RolloutGroup],
        outcomes: Mapping[int, Outcome],
        scored: ScoredRollouts,
    ) -> Iterator[bytes]:
        """Yields the dump's lines for this rank's completions of a set, by row and sample."""
        for i in sorted(range(len(groups)), key=lambda i: groups[i].slot):
            group = groups[i]
            name, _, sample = self._samples[group.slot]
            if name == set_name:
                outcome = outcomes[group.slot]
                yield to_line(
                    EvalRecord(
                        group.prompt.row,
                        sample,
                        dumped_prompt(group.prompt, group.completions[0]),
                        bounded_values(group.prompt.columns),
                        scored.texts[i],
                        final_answer(scored.texts[i]),
                        outcome.correct,
                        outcome.reward,
                        scored.finite_by_name(i),
                        group.completions[0].finish_reason,
                        scored.notes.get(i, {}).get("extra", {}),
                    )
                )


def check_sampling(sampling: Iterable[Sequence[float]], expected: EvalConfig) -> None:
    """Raises EngineStateError if the engine sampled an evaluation at another temperature or top_p
    than `expected` says. Nothing in the metrics would show that.

    `sampling` has the pairs (temperature, top_p) at which the engine sampled.
    """
    for temperature, top_p in sampling:
        # vLLM raises temperatures between 0 and 0.01 to 0.01.
        is_right = abs(temperature - expected.temperature) <= _MIN_TEMPERATURE
        if not is_right or (temperature > 0 and top_p != expected.top_p):
            raise EngineStateError(
                f"an evaluation was sampled at temperature {temperature:g} and top_p {top_p:g}, "
                f"and eval.temperature is {expected.temperature:g}, eval.top_p "
                f"{expected.top_p:g}: a fault of this program, please report it"
            )


def outcomes_by_slot(groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> dict[int, Outcome]:
    """Returns the outcome (the measured values) of each group's single completion, by slot."""
    # The verdict on a completion is its value of the first entry of `rewards`.
    verdicts = next(iter(scored.by_name.values()), [])
    outcomes = {}
    for group, text, reward, verdict in zip(
        groups, scored.texts, scored.rewards, verdicts, strict=True
    ):
        [completion] = group.completions
        verdict = math.nan if verdict is None else verdict
        outcomes[group.slot] = Outcome(
            reward=reward,
            # The comparison is False for NaN.
            correct=verdict > 0.5,
            unscored=reward is None or math.isnan(verdict),
            truncated=completion.finish_reason == "length",
            num_tokens=len(completion.token_ids),
            answer=hashlib.blake2b(final_answer(text).encode(), digest_size=16).hexdigest(),
        )
    return outcomes


def summarise(outcomes: Sequence[Outcome], num_samples: int) -> Metrics:
    """Returns the metrics of one set from the outcomes of its completions.

    Each prompt has `num_samples` successive outcomes. The k of `pass_at_<k>` are the powers of 2
    below `num_samples`, and `num_samples`. `mean` leaves out unknown rewards; it is None if all are
    unknown.
    """
    prompts = [outcomes[i : i + num_samples] for i in range(0, len(outcomes), num_samples)]
    rewards = [outcome.reward for outcome in outcomes if outcome.reward is not None]
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples]
    nums_correct = [sum(outcome.correct for outcome in prompt) for prompt in prompts]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    metrics: Metrics = {"mean": mean(rewards) if rewards else None}
    for k in ks:
        metrics[f"pass_at_{k}"] = mean([pass_at_k(num_samples, n, k) for n in nums_correct])
    # By prompt: the fraction of correct completions among those with the most common answer.
    votes = [majority([o.answer for o in p], [o.correct for o in p]) for p in prompts]
    return metrics | {
        f"maj_at_{num_samples}": mean(votes),
        "truncated_frac": mean([outcome.truncated for outcome in outcomes]),
        "unscored_frac": mean([outcome.unscored for outcome in outcomes]),
        "tokens_mean": mean([outcome.num_tokens for outcome in outcomes]),
        "num_prompts": len(prompts),
    }


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Returns the probability that k samples, drawn without replacement, contain a correct one.

    This is the unbiased estimator of Chen et al. 2021, arXiv:2107.03374.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str], correct: Sequence[bool]) -> float:
    """Returns the fraction of correct completions among those with the most common answer.

    If several answers are equally common, the completions with any of them count.
    """
    modes = multimode(answers)
    winners = [
        is_correct for answer, is_correct in zip(answers, correct, strict=True) if answer in modes
    ]
    return sum(winners) / len(winners)
