"""Metric keys from the step's raw numbers, and the console line."""

from __future__ import annotations

import math
from typing import Any

from grpo_spmd.config.schema import PHASES, LossConfig
from grpo_spmd.learn.losses import ratio_percentiles

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


def loss_metrics(sums: dict[str, Any], config: LossConfig) -> dict[str, float | None]:
    """The keys that come of the sums of a step's update, over all ranks."""
    tokens, updates, measured_tokens = sums["loss_tokens"], sums["max:updates"], sums.get("mismatch_tokens", 0.0)
    kl_coef = config.kl_coef if config.kl_in == "loss" else 0.0
    out = {
        "loss/total": _mean(sums["policy"] + kl_coef * sums["kl"] - config.entropy_coef * sums["entropy"], updates),
        "loss/policy": _mean(sums["policy"], updates),
        "loss/kl": _mean(sums["kl"], updates),
        "loss/entropy": _mean(sums["entropy"], updates),
        "loss/clip_frac": _mean(sums["clipped"], tokens),
        "optim/grad_norm": sums.get("max:grad_norm"),
        "optim/lr": sums.get("max:lr"),
        "optim/updates": sums["max:updates"],
        "optim/skipped_updates": sums["max:skipped"],
        "weight_sync/mismatch_kl": _mean(sums.get("mismatch_kl"), measured_tokens),
        "weight_sync/mismatch_abs_mean": _mean(sums.get("mismatch_abs"), measured_tokens),
        "weight_sync/mismatch_abs_max": sums.get("max:mismatch_abs"),
    }
    percents = (1, 50, 99)
    for percent, ratio in zip(percents, ratio_percentiles(sums.get("hist:mismatch", []), percents), strict=True):
        out[f"rollout_correction/ratio_p{percent:02d}"] = ratio
    if config.rollout_correction != "none":
        out["rollout_correction/weight_mean"] = _mean(sums["correction"], tokens)
        out["rollout_correction/capped_frac"] = _mean(sums["capped"], tokens)
    return out


def tail_waste_frac(sums: dict[str, Any], world_size: int) -> float | None:
    """The share of rank-seconds of the step's generations in which a rank had come to its end and waited for the
    slowest."""
    busy = sum(seconds for name, seconds in sums.items() if name.startswith("busy_s/"))
    until_slowest = world_size * sum(seconds for name, seconds in sums.items() if name.startswith("max:busy_s/"))
    return 1 - busy / until_slowest if until_slowest else None


def busy_sums(generation_s: list[float]) -> dict[str, float]:
    """This rank's seconds of each generation of a step, for `merge_sums`."""
    return {f"{kind}busy_s/{call}": s for call, s in enumerate(generation_s) for kind in ("", "max:")}


def _mean(total: float | None, count: float) -> float | None:
    """None where a step measured nothing (all its updates were skipped, or it kept no group): a 0 would look like a
    measurement."""
    return None if total is None or not count else total / count


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
