"""Evaluation in training on held-out sets, all ranks sharing the completions.

Each evaluation of a run draws the same random numbers, those of (seed, set, row, sample): two of them differ by what
the policy has learned and less by luck.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import ConversationId, EpisodeTask, GenerationHooks, Request
from grpo_spmd.observe.rollout_record import EvalRecord, bounded_values, to_line
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts, rollout_seed
from grpo_spmd.rewards.protocol import check_error_rate
from grpo_spmd.rewards.trl import logged_in, mean_metrics
from grpo_spmd.rewards.verifiers import final_answer

if TYPE_CHECKING:
    from grpo_spmd.episodes.environments import Environments


_log = logging.getLogger("grpo_spmd")
HeldOut = Mapping[str, Sequence[Prompt]]  # the prompts of each set, equal on all ranks
Score = Callable[..., ScoredRollouts]  # of `RewardPool.score`, but for the tokenizer


class Evaluator:
    def __init__(
        self,
        held_out: HeldOut,
        engine: RolloutEngine,
        score: Score,
        config: EvalConfig,
        seed: int,
        max_error_frac: float,
        writer: RolloutWriter | None,
        environments: Environments | None = None,
    ) -> None:
        """`score` scores on this rank alone; here a group is one completion, its slot the number over all sets.
        `max_error_frac`: of `reward_pool`. `writer` makes eval_<set>_step_<step>.jsonl; None: no dump."""
        self._held_out, self._engine, self._score, self._config = held_out, engine, score, config
        self._seed, self._max_error_frac, self._writer = seed, max_error_frac, writer
        self._environments = environments
        samples = range(config.num_samples)
        self._wanted = [
            (name, place, n)
            for name in held_out
            for place in range(len(held_out[name]))
            for n in samples
        ]

    def evaluate_if_due(self, step: int) -> dict[str, float | None]:
        """Collective. `evaluate` before the training and after each `eval.every_steps`-th step; else nothing."""
        every = self._config.every_steps
        return {} if every == 0 or step % every else self.evaluate(step)

    def evaluate(self, step: int) -> dict[str, float | None]:
        """Collective. `eval/<set>/...` for every set, equal on all ranks and whatever their number, from
        `eval.num_samples` completions of every prompt, sampled by the policy after `step` steps.
        Completions, not prompts, are shared out, so that one prompt with 64 samples keeps all engines busy. What
        training samples next does not depend on this. Raises Rank0Error on every rank where a reward fails for
        `reward_pool.max_error_frac` of the completions."""
        engine = self._engine
        version = step + 1  # the weights are there for the next step
        sizes = [1] * len(self._wanted)
        if self._environments is None:
            made = engine.generate_shared(sizes, GenerationHooks(self._request), version)
        else:
            temperature = self._config.temperature
            made = self._environments.generate(
                engine, sizes, self._task, version, temperature=temperature
            )
        # A training prompt that finds its prefix computed is computed in other pieces, which rounds differently.
        engine.reset_prefix_cache()
        groups = [
            RolloutGroup(number, self._prompt(number), turns) for number, [turns] in made.items()
        ]
        if self._environments is None:  # else the first rank of an engine has them all
            groups = groups[engine.tp_rank :: engine.tp_size]
        scored = self._score(groups, num_step_completions=len(self._wanted))
        found = outcomes(groups, scored)
        notes = {
            groups[i].slot: {"logged": note["logged"]}
            for i, note in scored.notes.items()
            if "logged" in note
        }
        statuses = scored.num_statuses()
        if self._environments is not None:
            statuses |= self._environments.statuses(groups)
        mine = {
            "outcomes": found,
            "statuses": statuses,
            "first_error": scored.first_error,
            "notes": notes,
        }
        metrics: dict[str, dict[str, float | None]] = on_rank0(self._summarise_sets, mine)
        for name, of_set in metrics.items():
            if self._writer is not None:
                self._writer.write(
                    f"eval_{name}_step_{step:06d}", self._lines(name, groups, found, scored)
                )
            shown = {
                key: math.nan if value is None else value
                for key, value in of_set.items()
                if key != "num_prompts"
            }
            values = "  ".join(f"{key} {value:.4g}" for key, value in shown.items())
            _log.info("eval after step %d, %s: %s", step, name, values)
        return {
            f"eval/{name}/{key}": value
            for name, of_set in metrics.items()
            for key, value in of_set.items()
        }

    def _request(self, number: int, _: int, turns: Sequence[Completion]) -> Request | None:
        if turns:
            return None
        prompt, seed = self._task((number, 0))
        return Request(prompt.token_ids, seed(), self._config.temperature)

    def _task(self, place: ConversationId) -> EpisodeTask:
        (name, _, sample), prompt = self._wanted[place[0]], self._prompt(place[0])
        return prompt, partial(rollout_seed, self._seed, f"eval/{name}", prompt.row, sample)

    def _prompt(self, number: int) -> Prompt:
        return self._held_out[self._wanted[number][0]][
            self._wanted[number][1]
        ]  # perhaps out of a file

    def _summarise_sets(
        self, parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, dict[str, float | None]]:
        """On rank 0, the metrics of each set from what all ranks scored: each completion exactly once."""
        # A verifier that fails throughout must not pass for a policy that is never right.
        statuses, first_errors = (
            [part[name] for part in parts] for name in ("statuses", "first_error")
        )
        check_error_rate(statuses, first_errors, self._max_error_frac)
        reported = [
            (int(number), Outcome(*o)) for part in parts for number, o in part["outcomes"].items()
        ]  # from JSON
        by_number = dict(reported)
        assert len(reported) == len(by_number) == len(self._wanted), (
            len(reported),
            len(by_number),
            len(self._wanted),
        )
        in_order, samples = (
            (by_number[number] for number in range(len(self._wanted))),
            range(self._config.num_samples),
        )
        notes = [
            (self._wanted[int(number)][0], note)
            for part in parts
            for number, note in part["notes"].items()
        ]
        return {
            name: summarise([[next(in_order) for _ in samples] for _ in range(len(prompts))])
            | mean_metrics(logged_in(note for of_set, note in notes if of_set == name))
            for name, prompts in self._held_out.items()
        }

    def _lines(
        self,
        set_name: str,
        groups: Sequence[RolloutGroup],
        found: Mapping[int, Outcome],
        scored: ScoredRollouts,
    ) -> Iterator[bytes]:
        """What is dumped of this rank's completions of a set, by row and sample."""
        for i in sorted(range(len(groups)), key=lambda i: groups[i].slot):
            group, prompt, (name, _, sample) = (
                groups[i],
                groups[i].prompt,
                self._wanted[groups[i].slot],
            )
            if name == set_name:
                outcome, finish_reason = found[group.slot], group.completions[0].finish_reason
                judged = outcome.right, outcome.reward, scored.finite_by_name(i)
                said = (
                    prompt.text,
                    bounded_values(prompt.columns),
                    scored.texts[i],
                    final_answer(scored.texts[i]),
                )
                extra = scored.notes.get(i, {}).get("extra", {})
                yield to_line(EvalRecord(prompt.row, sample, *said, *judged, finish_reason, extra))


# What an evaluation measures of held-out completions: their mean reward, pass@k and maj@n.
#
# A completion is *right* where the first entry of `rewards` gives it more than 0.5: put the verifier first, and what
# shapes the training (format, length) after it. One of unknown reward (None, NaN, timeout) counts as not right.


class Outcome(NamedTuple):
    reward: float | None  # the weighted sum; None: unknown
    right: bool
    unscored: bool  # its reward, or that of the verifier, is unknown
    truncated: bool
    num_tokens: int
    answer: str  # a digest of the final answer: equal where the answers are


def outcomes(groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> dict[int, Outcome]:
    """By slot, of groups of one completion."""
    verifier = next(iter(scored.by_name.values()), [])  # the first entry of `rewards`
    found = {}
    for group, text, reward, verdict in zip(
        groups, scored.texts, scored.rewards, verifier, strict=True
    ):
        [completion], is_known = group.completions, verdict is not None and not math.isnan(verdict)
        right, unscored = (
            is_known and verdict is not None and verdict > 0.5,
            reward is None or not is_known,
        )
        truncated, num_tokens = completion.finish_reason == "length", len(completion.token_ids)
        answer = hashlib.blake2b(final_answer(text).encode(), digest_size=16).hexdigest()
        found[group.slot] = Outcome(reward, right, unscored, truncated, num_tokens, answer)
    return found


def summarise(prompts: Sequence[Sequence[Outcome]]) -> dict[str, float | None]:
    """The metrics of one set from the outcomes of each prompt's n completions. The k of `pass_at_<k>` is 1, 2, 4, ...
    below n, and n. `mean` leaves out rewards that are unknown; None where none is known."""
    num_samples = len(prompts[0])
    everything = [outcome for prompt in prompts for outcome in prompt]
    rewards = [outcome.reward for outcome in everything if outcome.reward is not None]
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples] + [num_samples]
    nums_right = [sum(outcome.right for outcome in prompt) for prompt in prompts]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return {
        "mean": mean(rewards) if rewards else None,
        **{
            f"pass_at_{k}": mean([pass_at_k(num_samples, num_right, k) for num_right in nums_right])
            for k in ks
        },
        f"maj_at_{num_samples}": mean(
            [majority([o.answer for o in p], [o.right for o in p]) for p in prompts]
        ),
        "truncated_frac": mean([outcome.truncated for outcome in everything]),
        "unscored_frac": mean([outcome.unscored for outcome in everything]),
        "tokens_mean": mean([outcome.num_tokens for outcome in everything]),
        "num_prompts": len(prompts),
    }


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that k of the samples, none drawn twice, hold a right one (Chen et al. 2021, arXiv:2107.03374)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """How often the completions of the most common answer are right, or of all answers that are equally common."""
    votes = Counter(answers)
    most = max(votes.values())
    winners = [
        is_right for answer, is_right in zip(answers, right, strict=True) if votes[answer] == most
    ]
    return sum(winners) / len(winners)
