"""Causes that the metrics of a run give away: each names its evidence and the key to change.

A cause takes the place of its symptoms (`Finding.explains`), so that one trouble is told once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from grpo_spmd.diagnosis.curves import find_range, matching_metrics, metric_curve
from grpo_spmd.diagnosis.results import Finding
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.diagnosis.symptoms import fallen_rewards, reward_spread, setting

# What a leap of the policy changes at once: a metric, and the ratio or the difference that counts.
_LEAPS_BY_RATIO = {"loss/entropy": 2.0, "completion/tokens_mean": 2.0, "optim/grad_norm": 10.0}
_LEAPS_BY_RISE = {"completion/truncated_frac": 0.3, "reward/zero_std_groups_frac": 0.3}
_MAX_LR = 1e-3  # of AdamW on tiny models; large ones, and LoRA, train at less
_MIN_STEPS_AFTER = 4  # the first update
_MIN_STEPS_TO_LEARN = 20
_ALIKE_FRAC = 0.999
_SLOW_FRAC = 0.4  # of a step's time
_SLOW_CALL_FRAC = 0.5  # of the time that a step samples
_MIN_SAMPLING_S = 1.0  # a step that samples for less is a tiny model's
# Only a step away from the sampling policy is clipped, so about half of the tokens at the most.
_CLIPPED_FRAC = 0.3
_TEACHES_NAT = 1e-5  # a KL below it is rounding


def _judge_learning_rate(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    """Yields a learning rate that is too high: the first updates have changed the policy at once,
    and not for the better."""
    lr = setting(run, "optimizer.lr", 0.0)
    updates = metric_curve(run.steps, "optim/updates")
    update_steps = updates.steps[updates.values > 0]
    if not lr or not len(update_steps):
        return
    # The metrics of the step with the first update were sampled before it.
    begin = int(update_steps[0]) + 1
    num_after = max(_MIN_STEPS_AFTER, len(run.steps) // 10)

    def levels(metric: str) -> tuple[float, float]:
        curve = metric_curve(run.steps, metric)
        late_values = curve.values[curve.steps >= begin][:num_after]
        # A few completions of a few steps prove nothing.
        if len(late_values) < _MIN_STEPS_AFTER:
            return math.nan, math.nan
        return float(np.mean(curve.values[curve.steps < begin])), float(np.median(late_values))

    initial, later = levels("reward/mean")
    spread = metric_curve(run.steps, "reward/std").values[:1].sum()
    if later >= initial + 0.1 * spread:
        return
    leaps = {"reward/mean": (initial, later)} if later <= initial - 0.25 * spread < initial else {}
    for metric, ratio in _LEAPS_BY_RATIO.items():
        initial, later = levels(metric)
        if max(initial, later) >= ratio * min(initial, later) > 0:
            leaps[metric] = (initial, later)
    for metric, rise in _LEAPS_BY_RISE.items():
        initial, later = levels(metric)
        if later >= initial + rise:
            leaps[metric] = (initial, later)
    if len(leaps) >= 2:
        changes = ", ".join(f"{name} {old:.3g} -> {new:.3g}" for name, (old, new) in leaps.items())
        yield Finding(
            "bad",
            "the learning rate is too high",
            f"The first updates changed {changes}: try optimizer.lr={min(lr / 10, _MAX_LR):g} "
            f"(it is {lr:g}), or optimizer.warmup_steps.",
            step=begin,
            metric="reward/mean",
            explains=("reward/mean", "optim/skipped_updates", *_LEAPS_BY_RATIO, *_LEAPS_BY_RISE),
        )


def _judge_learning_rate_of_zero(
    run: RecordedRun, symptoms: Sequence[Finding]
) -> Iterator[Finding]:
    lr = metric_curve(run.steps, "optim/lr")
    steps = find_range(lr.steps, lr.values == 0)
    if steps is not None and steps.is_open and len(lr) > 1 and steps.last - steps.first >= 3:
        yield Finding(
            "bad",
            "the learning rate is 0",
            "Nothing is learned: optimizer.lr, optimizer.min_lr, or optimizer.schedule ends before "
            "training.num_steps.",
            step=steps.first,
            metric=lr.key,
        )


def _judge_reward_hacking(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    """Yields each named reward that falls while the weighted sum rises."""
    reward = metric_curve(run.steps, "reward/mean")
    gain = reward.end - reward.start
    if gain < max(0.1 * reward_spread(run), 3 * reward.noise, 1e-9):
        return
    names = matching_metrics(run.steps, r"reward/(.+)/mean")
    gains = {
        name: curve.end - curve.start
        for name in names
        for curve in [metric_curve(run.steps, f"reward/{name}/mean")]
    }
    for fallen in fallen_rewards(run):
        name = fallen.key.removeprefix("reward/").removesuffix("/mean")
        riser = max(gains, key=lambda key: gains[key])
        steps = fallen.moved()
        yield Finding(
            "bad",
            f"{name} falls while the reward rises",
            f"Reward hacking: {name} went from {fallen.start:.3g} to {fallen.end:.3g} and "
            f"reward/mean from {reward.start:.3g} to {reward.end:.3g}, mostly by {riser}. Read the "
            f"best completions (show --best 3), give {name} a larger weight, or bound {riser}.",
            step=steps.first if steps is not None else None,
            metric=fallen.key,
        )


def _judge_constant_reward(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    """Yields a reward that is the same number for every completion of the run."""
    spread = metric_curve(run.steps, "reward/std")
    mean = metric_curve(run.steps, "reward/mean")
    if len(spread) >= 3 and not spread.values.any() and np.ptp(mean.values) == 0:
        yield Finding(
            "bad",
            "the reward never differs",
            f"It was {mean.end:.3g} for every completion of {len(mean)} steps, so nothing is "
            "learned from it. Either the task is out of reach (an easier one first), or the reward "
            "function does not see what it looks for: read completions (show --worst 3).",
            step=int(mean.steps[0]),
            metric="reward/std",
            explains=("reward/zero_std_groups_frac", "optim/grad_norm"),
        )


def _judge_groups_far_from_solved(
    run: RecordedRun, symptoms: Sequence[Finding]
) -> Iterator[Finding]:
    """Yields groups that are alike though completions of different prompts are not."""
    alike_frac = metric_curve(run.steps, "reward/zero_std_groups_frac")
    spread = metric_curve(run.steps, "reward/std")
    if (
        len(alike_frac) < 3
        or spread.end <= 0
        or run.steps[-1].keys() & {"teacher/kl", "critic/loss"}
    ):
        return
    steps = find_range(alike_frac.steps, alike_frac.values >= _ALIKE_FRAC)
    if steps is not None and steps.is_open:
        yield Finding(
            "bad",
            "each prompt's rewards are all alike",
            f"Prompts differ ({spread.end:.2g} standard deviation in a step) and the completions "
            "of a prompt never do, so every advantage is 0: the reward depends on the prompt "
            "alone, rollout.temperature is too low, or the prompts are too hard or too easy.",
            step=steps.first,
            metric=alike_frac.key,
            explains=(alike_frac.key, "optim/grad_norm", "loss/entropy"),
        )


def _judge_teacher(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    kl = metric_curve(run.steps, "teacher/kl")
    if len(kl) < 3:
        return
    if np.abs(kl.values).max() <= _TEACHES_NAT:
        yield Finding(
            "warning",
            "the teacher teaches nothing",
            f"teacher/kl is at most {np.abs(kl.values).max():.1g} nats since the start: teacher "
            "and policy have the same weights and prompt (teacher.path, teacher.prompt_key).",
            step=int(kl.steps[0]),
            metric=kl.key,
        )
    elif len(kl) >= _MIN_STEPS_TO_LEARN and kl.end - kl.start > 3 * kl.noise:
        yield Finding(
            "warning",
            "the policy moves away from its teacher",
            f"teacher/kl was {kl.start:.3g} nats at the start and is {kl.end:.3g} now: a larger "
            "teacher.coef, a lower optimizer.lr, or rewards that ask for something else.",
            step=kl.moved().first if kl.moved() else None,  # type: ignore[union-attr]
            metric=kl.key,
        )


def _judge_critic(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    explained = metric_curve(run.steps, "critic/explained_variance")
    loss = metric_curve(run.steps, "critic/loss")
    # Where the reward is hard to foresee, a critic that has learned explains little too.
    has_learned = loss.end < 0.8 * loss.start
    if len(explained) >= _MIN_STEPS_TO_LEARN and explained.end <= 0.05 and not has_learned:
        yield Finding(
            "warning",
            "the critic explains nothing",
            f"critic/explained_variance is {explained.end:.2g} after {len(explained)} steps (1 is "
            f"best, 0 a constant), and critic/loss went from {loss.start:.2g} to {loss.end:.2g}: "
            "advantages are no better than rewards. A larger critic.lr, more critic.warmup_steps, "
            "or advantage.estimator=grpo.",
            step=int(explained.steps[0]),
            metric=explained.key,
        )


def _judge_slow_phases(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    """Yields environments and checkpoints that most of a step waits for."""
    step_s = metric_curve(run.steps, "time/step_s")
    if len(step_s) < 3 or step_s.end <= 0:
        return
    checkpoint_frac = metric_curve(run.steps, "time/checkpoint_s").values.sum()
    checkpoint_frac /= step_s.values.sum()
    if checkpoint_frac >= _SLOW_FRAC and step_s.end >= 1:
        yield Finding(
            "warning",
            "steps wait for checkpoints",
            f"Checkpoints take {checkpoint_frac:.0%} of the time: a larger checkpoint.every_steps, "
            "or a faster disk for run_dir.",
            metric="time/checkpoint_s",
        )
    sampling_s = metric_curve(run.steps, "time/rollout_s").end
    call_s = metric_curve(run.steps, "environment/call_s_p95")
    # A quick call is no bottleneck, however much of a tiny model's step it takes.
    if len(call_s) < 3 or sampling_s < _MIN_SAMPLING_S:
        return
    num_workers = setting(run, "environment.num_workers", 16)
    # Only the first rank of an engine has environments, and the metric is a mean over all ranks.
    engine_ranks = setting(run, "rollout.tensor_parallel_size", 1)
    calls_s = engine_ranks * metric_curve(run.steps, "environment/calls_s_per_rank").end
    busy_frac = calls_s / num_workers / sampling_s
    # An agent's one call is its whole episode.
    has_agent = run.config.get("environment.agent") is not None
    turns = 2.0 if has_agent else metric_curve(run.steps, "episode/turns_mean").end
    waiting_frac = call_s.end * max(1.0, turns - 1) / sampling_s
    slowest = f"The slowest twentieth of its calls takes {call_s.end:.3g} s or more"
    text = ""
    if busy_frac >= _SLOW_CALL_FRAC:
        text = (
            f"Its {num_workers:.0f} workers a rank are busy for {busy_frac:.0%} of the time that a "
            f"step samples, and episodes wait for a free one. {slowest}. More "
            "environment.num_workers, or quicker calls."
        )
    elif waiting_frac >= _SLOW_CALL_FRAC and call_s.end >= 0.2:
        text = (
            f"{slowest}, and an episode waits for {min(waiting_frac, 1):.0%} of the time that a "
            "step samples. Quicker calls, or a lower environment.call_timeout_s."
        )
    if text:
        yield Finding(
            "warning",
            "the environment or a tool is slow",
            text,
            step=int(call_s.steps[0]),
            metric=call_s.key,
            explains=("rollout/tail_waste_frac",),
        )


def _judge_off_policy(run: RecordedRun, symptoms: Sequence[Finding]) -> Iterator[Finding]:
    clipped = metric_curve(run.steps, "loss/clip_frac")
    steps = find_range(clipped.steps, clipped.values >= _CLIPPED_FRAC)
    if steps is not None and steps.is_open:
        yield Finding(
            "warning",
            "many tokens are clipped",
            f"loss/clip_frac is {clipped.end:.0%}: the policy has left the one that sampled before "
            "a step's updates are done. Fewer training.num_epochs or num_mini_batches, a lower "
            "optimizer.lr, or wider loss.clip_ratio_low and clip_ratio_high.",
            step=steps.first,
            metric=clipped.key,
        )


Cause = Callable[[RecordedRun, Sequence[Finding]], Iterator[Finding]]
CAUSES: tuple[Cause, ...] = (
    _judge_learning_rate,
    _judge_learning_rate_of_zero,
    _judge_reward_hacking,
    _judge_constant_reward,
    _judge_groups_far_from_solved,
    _judge_teacher,
    _judge_critic,
    _judge_slow_phases,
    _judge_off_policy,
)
