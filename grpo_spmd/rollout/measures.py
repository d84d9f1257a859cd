"""What an evaluation measures of held-out completions: their mean reward, pass@k and maj@n.

A completion is *right* where the first entry of `rewards` gives it more than 0.5: put the verifier first, and what
shapes the training (format, length) after it. One of unknown reward (None, NaN, timeout) counts as not right.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.answers import final_answer


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
    for group, text, reward, verdict in zip(groups, scored.texts, scored.rewards, verifier, strict=True):
        [completion], is_known = group.completions, verdict is not None and not math.isnan(verdict)
        right, unscored = is_known and verdict is not None and verdict > 0.5, reward is None or not is_known
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
        **{f"pass_at_{k}": mean([pass_at_k(num_samples, num_right, k) for num_right in nums_right]) for k in ks},
        f"maj_at_{num_samples}": mean([majority([o.answer for o in p], [o.right for o in p]) for p in prompts]),
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
    winners = [is_right for answer, is_right in zip(answers, right, strict=True) if votes[answer] == most]
    return sum(winners) / len(winners)
