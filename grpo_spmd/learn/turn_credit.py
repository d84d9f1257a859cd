"""Credit of turns: each is judged by the rewards from it on, where `environment.discount` asks for it. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from grpo_spmd.records import Completion, Episode

Credit = float | npt.NDArray[np.float64]  # of all tokens of a completion, or of each


def returns_to_go(episode: Episode, discount: float) -> list[float]:
    """Of each turn its own reward, and the later ones discounted to it; a turn without a reward counts 0."""
    returns, later = list[float](), 0.0
    for turn in reversed(episode.turns):
        later = (turn.reward or 0.0) + discount * later
        returns.append(later)
    return returns[::-1]


def turn_advantages(
    advantages: Sequence[float], rewards: Sequence[float | None], episodes: Sequence[Episode | None], discount: float
) -> list[Credit]:
    """The advantages of each token of a group's completions, from those of the group's whole returns.

    An estimator makes advantages of rewards by a line, A = (reward - baseline) / scale. A turn's are on the same line:
    its return to go takes the place of the whole return, and the group's mean of returns from that turn on (0 for who
    had ended) that of the mean of whole returns, so that the turns are as centred as the episodes are.
    """
    known = [i for i, reward in enumerate(rewards) if reward is not None and math.isfinite(reward)]
    slope = _slope([rewards[i] or 0.0 for i in known], [advantages[i] for i in known])
    returns = [returns_to_go(episode, discount) if episode is not None else [] for episode in episodes]
    longest = max(map(len, returns), default=0)
    # What a return from turn t on has over the whole one.
    over = np.array(
        [[(own[t] if t < len(own) else 0.0) - (own or [0.0])[0] for t in range(longest)] for own in returns]
    )
    centred = over - over[known].mean(0) if known and longest else over
    found: list[Credit] = []
    for i, (advantage, episode) in enumerate(zip(advantages, episodes, strict=True)):
        if episode is None or i not in known or not episode.turns:
            found.append(advantage)
            continue
        of_turns = advantage + slope * centred[i, : len(episode.turns)]
        found.append(np.repeat(of_turns, [turn.num_tokens for turn in episode.turns]))
    return found


def credited_tokens(
    advantages: Sequence[float],
    rewards: Sequence[float | None],
    completions: Sequence[Completion],
    discount: float | None,
    estimator: str,
) -> Sequence[Credit]:
    """What the tokens of a group's completions are credited with; for gae `advantages` are still rewards."""
    if estimator == "gae":
        pairs = zip(advantages, completions, strict=True)
        return [token_rewards(reward, completion, discount is not None) for reward, completion in pairs]
    if discount is None:
        return advantages
    return turn_advantages(advantages, rewards, [completion.episode for completion in completions], discount)


def token_rewards(reward: float, completion: Completion, by_turn: bool) -> npt.NDArray[np.float64]:
    """What gae puts at each sampled token: the rollout's reward at the last one; `by_turn`: each turn's own at its
    end, and at the last what the rollout has beside them."""
    rewards = np.zeros(len(completion.token_ids))
    turns = completion.episode.turns if by_turn and completion.episode is not None else ()
    end = 0
    for turn in turns:
        end += turn.num_tokens
        if turn.num_tokens and turn.reward is not None:
            rewards[end - 1] += turn.reward
    if len(rewards):
        rewards[-1] += reward - rewards.sum()
    return rewards


def _slope(rewards: Sequence[float], advantages: Sequence[float]) -> float:
    """1 / scale; 0 where the rewards are alike, so that there is nothing to learn."""
    center = sum(rewards) / max(len(rewards), 1)
    spread = sum((reward - center) ** 2 for reward in rewards)
    products = sum((reward - center) * a for reward, a in zip(rewards, advantages, strict=True))
    return products / spread if spread > 1e-12 else 0.0
