"""Evaluation in training on held-out sets: avg@n, pass@k and maj@n of each, all ranks sharing the completions.

A completion is *right* where the first entry of `rewards` gives it more than 0.5: put the verifier first, and what
shapes the training (format, length) after it. Where its reward is unknown (None, NaN, timeout) it counts as not right;
its share is `unscored_frac`.

The completions of an evaluation are a function of (seed, set, row, sample) and the weights: each evaluation of a run
draws the same random numbers, so that two of them differ by what the policy has learned and less by luck.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.observe.rollout_dump import write_lines_in_order
from grpo_spmd.observe.rollout_record import EvalRecord, to_line
from grpo_spmd.records import Prompt, RolloutGroup, ScoredRollouts, rollout_seed
from grpo_spmd.rewards.answers import final_answer
from grpo_spmd.rewards.protocol import check_error_rate

_log = logging.getLogger("grpo_spmd")

HeldOut = Mapping[str, Sequence[Prompt]]  # the prompts of each set, equal on all ranks
Score = Callable[..., ScoredRollouts]  # of `RewardPool.score`, but for the tokenizer


class Outcome(NamedTuple):
    """What a held-out completion came to."""

    reward: float | None  # the weighted sum; None: unknown
    right: bool
    unscored: bool  # its reward, or that of the verifier, is unknown
    truncated: bool
    num_tokens: int
    answer: str  # a digest of the final answer: equal where the answers are


class Evaluator:
    """Evaluates the policy on the held-out sets."""

    def __init__(
        self,
        held_out: HeldOut,
        engine: RolloutEngine,
        score: Score,
        config: EvalConfig,
        seed: int,
        max_error_frac: float,
        dump_folder: Path | None,
    ) -> None:
        """
        Args:
            score: scores groups on this rank alone; here each group is one completion, its slot the completion's number
                over all sets.
            max_error_frac: `reward_pool.max_error_frac`.
            dump_folder: gets eval_<set>_step_<step>.jsonl; None: nothing is dumped.
        """
        self._held_out, self._engine, self._score, self._config = held_out, engine, score, config
        self._seed, self._max_error_frac, self._dump_folder = seed, max_error_frac, dump_folder
        self._wanted = [
            (name, prompt, sample)
            for name, prompts in held_out.items()
            for prompt in prompts
            for sample in range(config.num_samples)
        ]

    def evaluate_if_due(self, step: int) -> dict[str, float | None]:
        """Collective. What `evaluate` returns at each `eval.every_steps`-th step, counted from 0; nothing at others."""
        every = self._config.every_steps
        return {} if every == 0 or step % every else self.evaluate(step)

    def evaluate(self, step: int) -> dict[str, float | None]:
        """Collective. Sample and score `eval.num_samples` completions of every held-out prompt with the weights of
        `step`.

        Completions, not prompts, are shared out over the engines, so that one prompt with 64 samples keeps all of them
        busy; a rank that gets none takes part all the same. The engine is left as it was found: what training samples
        next does not depend on this.

        Returns:
            `eval/<set>/...` for every set, equal on all ranks and whatever their number.

        Raises:
            Rank0Error: on every rank, where a reward fails for `reward_pool.max_error_frac` of the completions.
        """
        engine = self._engine
        completions = engine.generate_shared([1] * len(self._wanted), self._request, policy_version=step)
        # A training prompt whose prefix is computed already is computed in other pieces, which rounds differently.
        engine.reset_prefix_cache()
        groups = [RolloutGroup(number, self._wanted[number][1], [only]) for number, [only] in completions.items()]
        groups = groups[engine.tp_rank :: engine.tp_size]
        scored = self._score(groups, num_step_completions=len(self._wanted))
        outcomes = _outcomes(groups, scored)
        mine = {"outcomes": outcomes, "statuses": scored.statuses, "first_error": scored.first_error}
        metrics = on_rank0(self._summarise_all, mine)
        if self._dump_folder is not None:
            self._dump(self._dump_folder, step, groups, outcomes, scored)
        for name in self._held_out:
            prefix = f"eval/{name}/"
            shown = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
            shown.pop("num_prompts")
            values = "  ".join(f"{key} {math.nan if value is None else value:.4g}" for key, value in shown.items())
            _log.info("eval after %d steps, %s: %s", step, name, values)
        return metrics

    def _request(self, number: int, _: int) -> Request:
        name, prompt, sample = self._wanted[number]
        seed = rollout_seed(self._seed, f"eval/{name}", prompt.row, sample)
        return Request(prompt.token_ids, seed, self._config.temperature)

    def _summarise_all(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """Rank 0: what all ranks scored, to metrics."""
        # A verifier that fails throughout must not pass for a policy that is never right.
        statuses, first_errors = [part["statuses"] for part in parts], [part["first_error"] for part in parts]
        check_error_rate(statuses, first_errors, self._max_error_frac)
        num_samples = self._config.num_samples
        sizes = {name: len(prompts) * num_samples for name, prompts in self._held_out.items()}
        return _summarise_all([part["outcomes"] for part in parts], sizes, num_samples)

    def _dump(
        self,
        folder: Path,
        step: int,
        groups: Sequence[RolloutGroup],
        outcomes: Mapping[int, Outcome],
        scored: ScoredRollouts,
    ) -> None:
        for name in self._held_out:
            lines = {}
            for i, group in enumerate(groups):
                set_name, _, sample = self._wanted[group.slot]
                if set_name == name:
                    lines[group.slot] = _dump_line(group, sample, outcomes[group.slot], scored, i)
            write_lines_in_order(folder / f"eval_{name}_step_{step:06d}.jsonl", lines)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that k of the samples, drawn without putting back, hold a right one: unbiased (Chen et al. 2021,
    arXiv:2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """How often the most common answer's completions are right; of answers that are equally common, the mean."""
    votes = Counter(answers)
    most = max(votes.values())
    winners = [is_right for answer, is_right in zip(answers, right, strict=True) if votes[answer] == most]
    return sum(winners) / len(winners)


def summarise(prompts: Sequence[Sequence[Outcome]]) -> dict[str, float | None]:
    """The metrics of one set from the outcomes of each prompt's n completions: `mean`, `pass_at_<k>`, `maj_at_<n>` and
    what they rest on.

    k is 1, 2, 4, ... below n, and n. Rewards that are unknown are left out of `mean`; it is None where none is known.
    """
    num_samples = len(prompts[0])
    everything = [outcome for prompt in prompts for outcome in prompt]
    rewards = [outcome.reward for outcome in everything if outcome.reward is not None]
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "mean": mean(rewards) if rewards else None,
        **{
            f"pass_at_{k}": mean([pass_at_k(num_samples, sum(o.right for o in prompt), k) for prompt in prompts])
            for k in ks
        },
        f"maj_at_{num_samples}": mean(
            [majority([o.answer for o in prompt], [o.right for o in prompt]) for prompt in prompts]
        ),
        "truncated_frac": mean([o.truncated for o in everything]),
        "unscored_frac": mean([o.unscored for o in everything]),
        "tokens_mean": mean([o.num_tokens for o in everything]),
        "num_prompts": len(prompts),
    }


def _outcomes(groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> dict[int, Outcome]:
    verifier = next(iter(scored.by_name.values()), [])  # the first entry of `rewards`
    outcomes = {}
    for group, text, reward, verdict in zip(groups, scored.texts, scored.rewards, verifier, strict=True):
        known = verdict is not None and not math.isnan(verdict)
        completion = group.completions[0]
        outcomes[group.slot] = Outcome(
            reward=reward,
            right=known and verdict is not None and verdict > 0.5,
            unscored=reward is None or not known,
            truncated=completion.finish_reason == "length",
            num_tokens=len(completion.token_ids),
            answer=hashlib.blake2b(final_answer(text).encode(), digest_size=16).hexdigest(),
        )
    return outcomes


def _summarise_all(
    parts: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], num_samples: int
) -> dict[str, float | None]:
    """Rank 0: the outcomes of all ranks, by the completion's number (text in JSON), to metrics. Each must have come
    exactly once."""
    merged = {int(number): Outcome(*fields) for part in parts for number, fields in part.items()}
    reported = sum(map(len, parts))
    assert reported == len(merged) == sum(sizes.values()), (reported, len(merged), sizes)
    metrics: dict[str, float | None] = {}
    start = 0
    for name, size in sizes.items():
        prompts = [
            [merged[i] for i in range(first, first + num_samples)] for first in range(start, start + size, num_samples)
        ]
        metrics |= {f"eval/{name}/{key}": value for key, value in summarise(prompts).items()}
        start += size
    return metrics


def _dump_line(group: RolloutGroup, sample: int, outcome: Outcome, scored: ScoredRollouts, number: int) -> str:
    record = EvalRecord(
        row=group.prompt.row,
        sample=sample,
        prompt=group.prompt.text,
        completion=scored.texts[number],
        answer=final_answer(scored.texts[number]),
        right=outcome.right,
        reward=outcome.reward,
        rewards=scored.finite_by_name(number),
        finish_reason=group.completions[0].finish_reason,
    )
    return to_line(record)
