"""Metric keys from a step's raw numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.distributed.reductions import Reductions, metric_values
from grpo_spmd.learn.losses import ratio_percentiles, total_loss
from grpo_spmd.observe.cards import peak_tflops
from grpo_spmd.records import Decision

Metrics = dict[str, float | None]


def loss_metrics(sums: Reductions, loss: LossConfig) -> Metrics:
    """Of what all ranks' updates of a step came to."""
    policy, kl, entropy, updates = (
        sums[name].value for name in ("policy", "kl", "entropy", "optim/updates")
    )
    if "measured" in sums:  # and not updated
        updates = sums["measured"].value
    terms = {
        "total": total_loss(policy, kl, entropy, loss),
        "policy": policy,
        "kl": kl,
        "entropy": entropy,
    }
    for name in ("teacher", "value"):  # terms of the loss too
        if name in sums:
            terms[name] = sums[name].value
            terms["total"] += terms[name]
    metrics: Metrics = {
        f"loss/{name}": total / updates if updates else None for name, total in terms.items()
    }
    percents = 1, 50, 99
    ratios = zip(percents, ratio_percentiles(sums["mismatch_ratios"].value, percents), strict=True)
    return (
        metrics
        | metric_values(sums)
        | {f"rollout_correction/ratio_p{n:02d}": ratio for n, ratio in ratios}
    )


def tail_waste_frac(generation_s: Sequence[Sequence[float]]) -> float | None:
    """The share of the rank-seconds of `generation_s[rank][generation]` in which ranks waited for the slowest."""
    generations = list(zip(*generation_s, strict=True))
    until_slowest = len(generation_s) * sum(map(max, generations))
    return 1 - sum(map(sum, generations)) / until_slowest if until_slowest else None


def throughput(decision: Decision, times: Mapping[str, float | None], world_size: int) -> Metrics:
    """`times` has `time/..._s`, of the slowest rank."""
    step_s, rollout_s = times["time/step_s"] or 0.0, times["time/rollout_s"] or 0.0
    return {
        "rollout/tokens_per_s": decision.num_sampled_tokens / max(rollout_s, 1e-9),
        "throughput/samples_per_s": decision.num_rollouts / step_s,
        "throughput/tokens_per_s_per_rank": decision.num_tokens / step_s / world_size,
    }


def mfu(
    num_parameters: int, num_tokens: int, update_s: float, world_size: int, device_name: str
) -> float | None:
    """The share of the device's peak that the update had; None where we do not know the peak. A lower bound: forward
    and backward of a dense model take 6 FLOPs a parameter and token, and attention is left out."""
    flops = 6.0 * num_parameters * num_tokens / max(update_s, 1e-9) / world_size
    peak = peak_tflops(device_name)
    return None if peak is None else flops / (peak * 1e12)
