"""Metrics that are computed from a step's raw numbers, and those that count over the whole run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.reductions import Reductions, metric_values
from grpo_spmd.learn.losses import ratio_percentiles, total_loss
from grpo_spmd.observe.cards import peak_tflops
from grpo_spmd.records import Decision

Metrics = dict[str, float | None]
_PERCENTS = (1, 50, 99)


def loss_metrics(sums: Reductions, loss: LossConfig) -> Metrics:
    """Returns the loss metrics of a step from the merged sums of all ranks' updates."""
    # "measured" counts batches of a policy that was evaluated but not updated
    num_batches = sums["measured" if "measured" in sums else "optim/updates"].value
    terms = {name: sums[name].value for name in ("policy", "kl", "entropy")}
    terms = {"total": total_loss(terms["policy"], terms["kl"], terms["entropy"], loss), **terms}
    for name in ("teacher", "value"):  # further terms of the loss
        if name in sums:
            terms[name] = sums[name].value
            terms["total"] += terms[name]
    metrics: Metrics = {
        f"loss/{name}": total / num_batches if num_batches else None
        for name, total in terms.items()
    }
    ratios = ratio_percentiles(sums["mismatch_ratios"].value, _PERCENTS)
    percentiles = {
        f"rollout_correction/ratio_p{percent:02d}": ratio
        for percent, ratio in zip(_PERCENTS, ratios, strict=True)
    }
    return metrics | metric_values(sums) | percentiles


def tail_waste_frac(generation_s: Sequence[Sequence[float]]) -> float | None:
    """Returns the fraction of rank-seconds in which ranks waited for the slowest rank.

    `generation_s[rank][i]` is the time of the step's i-th generation on that rank.
    """
    generations = list(zip(*generation_s, strict=True))
    until_slowest = len(generation_s) * sum(map(max, generations))
    return 1 - sum(map(sum, generations)) / until_slowest if until_slowest else None


def throughput(decision: Decision, times: Mapping[str, float | None], world_size: int) -> Metrics:
    """Returns tokens and samples per second; `times` has `time/..._s` of the slowest rank."""
    step_s = times["time/step_s"] or 0.0
    rollout_s = times["time/rollout_s"] or 0.0
    return {
        "rollout/tokens_per_s": decision.num_sampled_tokens / max(rollout_s, 1e-9),
        "throughput/samples_per_s": decision.num_rollouts / step_s,
        "throughput/tokens_per_s_per_rank": decision.num_tokens / step_s / world_size,
    }


def mfu(
    num_parameters: int, num_tokens: int, update_s: float, world_size: int, device_name: str
) -> float | None:
    """Returns the update's fraction of the device's peak; None for an unknown device.

    A lower bound: forward and backward of a dense model take 6 FLOPs per parameter and token,
    without attention.
    """
    flops = 6.0 * num_parameters * num_tokens / max(update_s, 1e-9) / world_size
    peak = peak_tflops(device_name)
    return None if peak is None else flops / (peak * 1e12)


class Progress:
    """Counts what the run has sampled, equally on all ranks.

    A checkpoint keeps the counts, so that a resumed run has the figures of one that was never
    stopped.
    """

    def __init__(self, trainer: Mapping[str, Any], step: int) -> None:
        """`trainer` is that of the checkpoint after `step` steps.

        A checkpoint of a version that did not count leaves the counts out, rather than too small.
        """
        self._counts: dict[str, int] = {
            name: trainer.get(name, 0)
            for name in ("num_completions", "num_tokens")
            if name in trainer or not step
        }

    def count(self, num_completions: int, num_tokens: int, epoch: float) -> dict[str, float]:
        """Adds what a step has sampled and returns the metrics; `epoch` is the passes over the data
        so far."""
        metrics = {"progress/epoch": epoch}
        for name, number in (("num_completions", num_completions), ("num_tokens", num_tokens)):
            if name in self._counts:
                self._counts[name] += number
                metrics[f"progress/{name.removeprefix('num_')}"] = self._counts[name]
        return metrics

    def state(self) -> dict[str, int]:
        """Returns the counts for a checkpoint."""
        return dict(self._counts)


class WallClock:
    """Measures how long the run has been going, over all its launches.

    The time between two launches, and of steps that had to be made again, does not count.
    """

    def __init__(self, began: float, newest: Mapping[str, Any]) -> None:
        """`began`: start of this launch on the monotonic clock; `newest`: the last line of
        metrics.jsonl."""
        self._began = began
        self._before_s = float(newest.get("time/wall_s") or 0.0)

    def metrics(self) -> dict[str, float | None]:
        return {
            "time/wall_s": self._before_s + time.monotonic() - self._began,
            "time/unix_s": time.time(),
        }
