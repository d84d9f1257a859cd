"""What rank 0 finds in a step's episodes: how they ended, and whether their environments work. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from grpo_spmd.learn.facts import Records
from grpo_spmd.records import EPISODE_STATUSES, FAILED_STATUSES
from grpo_spmd.rewards.protocol import RewardError


def statuses_of(facts: Records) -> npt.NDArray[np.int64] | None:
    """[len(EPISODE_STATUSES)] How many rollouts ended in each; None where they are no episodes."""
    if "status" not in (facts.dtype.names or ()):
        return None
    return np.bincount(facts["status"].ravel(), minlength=len(EPISODE_STATUSES))


def check_environment_errors(facts: Records, first_errors: Sequence[str], max_error_frac: float) -> None:
    """Raises RewardError where environments failed, twice each, for `max_error_frac` of the episodes of a round."""
    if (counts := statuses_of(facts)) is None:
        return
    failed = {status: int(counts[EPISODE_STATUSES.index(status)]) for status in FAILED_STATUSES}
    num_failed, num_episodes = sum(failed.values()), int(counts.sum())
    if num_failed and num_failed / num_episodes >= max_error_frac:
        how = ", ".join(f"{number} {status}" for status, number in failed.items())
        first = next((error for error in first_errors if error.startswith("environment")), "not recorded")
        raise RewardError(
            f"the environment failed in {num_failed} of {num_episodes} episodes ({how}), each tried twice: "
            f"{num_failed / num_episodes:.3g} is not under reward_pool.max_error_frac={max_error_frac:g}. "
            f"The first failure:\n{first}"
        )


def episode_metrics(facts: Records, calls_s: Sequence[npt.NDArray[np.float32]]) -> dict[str, float | None]:
    """`episode/...` and `environment/...`; none where rollouts are no episodes."""
    if (counts := statuses_of(facts)) is None:
        return {}
    num_episodes = int(counts.sum())
    metrics: dict[str, float | None] = {
        f"episode/{name}_mean": int(facts[name].sum(dtype=np.int64)) / num_episodes for name in ("turns", "segments")
    }
    metrics |= {f"episode/{name}_frac": int(n) / num_episodes for name, n in zip(EPISODE_STATUSES, counts, strict=True)}
    given = facts["tokens"].astype(np.int64) - facts["completion_tokens"]
    metrics["episode/given_tokens_mean"] = int(given.sum()) / num_episodes
    seconds = np.concatenate([*calls_s, np.empty(0, np.float32)])
    for percentile in (50, 95):
        value = float(np.percentile(seconds, percentile)) if len(seconds) else None
        metrics[f"environment/call_s_p{percentile}"] = value
    return metrics
