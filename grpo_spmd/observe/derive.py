"""Metric keys from the step's raw numbers, and the console line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_spmd.config.schema import PHASES, LossConfig
from grpo_spmd.distributed.reductions import Reductions, metric_values
from grpo_spmd.learn.losses import ratio_percentiles, total_loss

# Dense bf16 peak, FLOP/s, by a part of the device's name (vendor data sheets).
PEAK_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}


def loss_metrics(sums: Reductions, config: LossConfig) -> dict[str, float | None]:
    """The metrics of a step's update, from what all ranks' updates came to."""
    updates = sums["optim/updates"].value
    policy, kl, entropy = (sums[name].value for name in ("policy", "kl", "entropy"))
    terms = {"total": total_loss(policy, kl, entropy, config), "policy": policy, "kl": kl, "entropy": entropy}
    metrics = {f"loss/{name}": total / updates if updates else None for name, total in terms.items()}
    ratios = ratio_percentiles(sums["mismatch_ratios"].value, (1, 50, 99))
    names = ("p01", "p50", "p99")
    return (
        metrics
        | metric_values(sums)
        | {f"rollout_correction/ratio_{name}": ratio for name, ratio in zip(names, ratios, strict=True)}
    )


def tail_waste_frac(busy_s: Sequence[Sequence[float]]) -> float | None:
    """The share of rank-seconds of the step's generations, `busy_s[rank][generation]`, in which a rank had come to its
    end and waited for the slowest."""
    generations = list(zip(*busy_s, strict=True))
    until_slowest = len(busy_s) * sum(map(max, generations))
    return 1 - sum(map(sum, generations)) / until_slowest if until_slowest else None


def console_line(m: dict[str, float | None], num_steps: int) -> str:
    def value(name: str) -> float:
        number = m.get(name)
        return math.nan if number is None else number

    def shown(name: str, form: str) -> str:
        number = m.get(name)
        return "-" if number is None else format(number, form)

    phases = " ".join(f"{name} {value(f'time/{name}_s'):.2f}" for name in PHASES if value(f"time/{name}_s") >= 0.005)
    return (
        f"step {int(value('step')) + 1}/{num_steps}  reward {value('reward/mean'):.3f}  tokens "
        f"{value('completion/tokens_mean'):.1f}"
        f"  loss {shown('loss/total', '+.4f')}  grad {shown('optim/grad_norm', '.2f')}  entropy "
        f"{shown('loss/entropy', '.2f')}"
        f"  mismatch_kl {shown('weight_sync/mismatch_kl', '.0e')}  {value('time/step_s'):.2f} s ({phases})"
    )
