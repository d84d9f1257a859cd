"""What a person should look at in a run, and how far its running checks are from their bounds.

A finding is about a range of steps, never about one step's luck, and tells at which step it began.
Pure: from metrics in memory to texts. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from grpo_spmd.observe.console import alarms
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.run import RecordedRun

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.int64]
Level = Literal["ok", "warning", "bad"]
Metrics = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl

_LEVELS: tuple[Level, ...] = ("bad", "warning", "ok")  # the worst first
_MIN_STEPS = 3  # in a row, more or less, before something is more than a hiccup
_MAX_LEVEL_STEPS = 20
_NEAR_BOUND = 0.5  # of a bound
_SPIKE = 10.0  # times the gradients before it
# Shares of completions, groups, episodes or time from which on there is something to say.
_FAILED_FRAC = 0.01
_ALIKE_FRAC = 0.8
_CUT_FRAC = 0.5
_WASTE_FRAC = 0.3
_UNSCORED_FRAC = 0.05
_BAD_UNSCORED_FRAC = 0.25
_MIN_GROWTH_GIB = 0.5
# With these a policy or a critic learns from groups whose rewards are alike, too.
_OTHER_SIGNALS = {"teacher/kl", "critic/loss"}
_MISMATCH_MEAN = "weight_sync/mismatch_abs_mean"
_MISMATCH_MAX = "weight_sync/mismatch_abs_max"
_END_STATES = {"failed": "failed", "killed": "was killed", "silent": "writes nothing any more"}


@dataclass(frozen=True)
class Finding:
    """Something to look at in a run."""

    level: Level
    title: str
    text: str
    step: int | None  # where it began
    metric: str | None  # the curve that shows it


@dataclass(frozen=True)
class Check:
    """One of the run's own checks: its result so far, and the bound at which it stops the run."""

    name: str
    level: Level
    value: str
    bound: str
    text: str


@dataclass(frozen=True)
class Curve:
    """A metric at the steps where it is known: at least one value, ascending steps."""

    key: str
    steps: Steps
    values: Floats

    @property
    def window(self) -> int:
        """Number of steps that make up a level: a tenth of the curve."""
        return min(max(len(self.values) // 10, min(3, len(self.values))), _MAX_LEVEL_STEPS)

    @property
    def start(self) -> float:
        """The level at the beginning."""
        return float(np.median(self.values[: self.window]))

    @property
    def end(self) -> float:
        """The level at the end."""
        return float(np.median(self.values[-self.window :]))

    @property
    def smoothed(self) -> Floats:
        """Means over `window` values around each value."""
        # Cumulative sums make all windows at once.
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        half = self.window // 2
        indices = np.arange(len(self.values))
        low = np.maximum(indices - half, 0)
        high = np.minimum(indices + half + 1, len(self.values))
        means: Floats = (sums[high] - sums[low]) / (high - low)
        return means

    def mean_over(self, steps: StepRange) -> float:
        is_inside = (self.steps >= steps.first) & (self.steps <= steps.last)
        return float(np.mean(self.values[is_inside]))

    def above(self, bound: float) -> StepRange | None:
        """Returns the steps at which the metric is at `bound` or above."""
        return find_range(self.steps, self.values >= bound)

    def moved(self, start: float, end: float, frac: float = 0.25) -> StepRange | None:
        """Returns the steps since which the metric is `frac` of the way from `start` to `end`."""
        bound = start + frac * (end - start)
        return find_range(self.steps, self.values >= bound if end > start else self.values <= bound)


@dataclass(frozen=True)
class StepRange:
    """Steps at nearly all of which a condition held."""

    first: int
    last: int
    is_open: bool  # up to the end of the curve

    def __str__(self) -> str:
        end = f"from step {self.first} to {self.last}"
        return f"since step {self.first}" if self.is_open else end


def metric_curve(lines: Metrics, key: str) -> Curve | None:
    """Returns None if no line has the metric."""
    points = [(line["step"], float(line[key])) for line in lines if line.get(key) is not None]
    if not points:
        return None
    steps, values = zip(*points, strict=True)
    return Curve(key, np.array(steps, np.int64), np.array(values))


def find_range(
    steps: Steps, holds: npt.NDArray[np.bool_], min_steps: int = _MIN_STEPS
) -> StepRange | None:
    """Returns the steps at which `holds` is mostly true.

    That is the end of the curve with the largest majority of true over false, or else such a range
    in the middle. Returns None for fewer than `min_steps` (or than all, in a short curve).
    """
    # A majority, so that single steps against it do not end the range.
    score = np.where(holds, 1, -1)
    needed = min(min_steps, len(score))
    end_sums = np.cumsum(score[::-1])[::-1]
    best = int(end_sums.max(initial=0))
    if best >= needed > 0:
        begin = int(np.flatnonzero(end_sums == best)[-1])  # the shorter one of equal ends
        return StepRange(int(steps[begin]), int(steps[-1]), is_open=True)
    # The range with the largest sum (Kadane's algorithm).
    sums = np.concatenate([[0], np.cumsum(score)])
    gains = sums[1:] - np.minimum.accumulate(sums[:-1])
    if len(gains) and gains.max() >= max(needed, _MIN_STEPS):
        end = int(np.argmax(gains))
        earlier_sums = sums[: end + 1]
        begin = int(np.flatnonzero(earlier_sums == earlier_sums.min())[-1])
        return StepRange(int(steps[begin]), int(steps[end]), is_open=False)
    return None


def find_spikes(curve: Curve, factor: float, num_before: int = 20, min_before: int = 5) -> Steps:
    """Returns the steps with a value of more than `factor` times the median before them."""
    values = curve.values
    spikes = [
        int(curve.steps[index])
        # The first filter is cheap; medians of all windows would not be.
        for index in np.flatnonzero(values > factor * np.median(values))
        if index >= min_before
        and values[index] > factor * np.median(values[max(0, index - num_before) : index])
    ]
    return np.array(spikes, np.int64)


def list_findings(run: RecordedRun) -> list[Finding]:
    """Returns the findings, the worst first; one that all is well if nothing is wrong."""
    # The figures in other people's folders may be beyond all bounds.
    with np.errstate(all="ignore"):
        findings = [finding for rule in _RULES for finding in rule(run)]
        if all(finding.level == "ok" for finding in findings):
            findings += _findings_from_checks(run)
    if run.steps and all(finding.level == "ok" for finding in findings):
        text = f"{len(run.steps)} steps: rewards, lengths, entropy, gradients, memory and the "
        text += "checks show no trouble."
        findings.append(Finding("ok", "nothing stands out", text, None, None))
    return sorted(findings, key=lambda finding: _LEVELS.index(finding.level))


def list_checks(run: RecordedRun) -> list[Check]:
    """Returns the checks that the run has made, with their margins."""
    with np.errstate(all="ignore"):
        checks = [check for rule in _CHECK_RULES for check in rule(run)]
    return [check for check in checks if check.value]


def _findings_from_checks(run: RecordedRun) -> Iterator[Finding]:
    """Yields checks near their bound, so that a verdict of praise does not stand beside them."""
    for check in list_checks(run):
        if check.level != "ok":
            title = f"the check of {check.name} is not far from its bound"
            text = f"{check.value}; its bound is {check.bound}: {check.text}."
            yield Finding(check.level, title, text, None, None)


def _find_end_state(run: RecordedRun) -> Iterator[Finding]:
    if run.state in _END_STATES:
        title = f"the run {_END_STATES[run.state]}"
        yield Finding("bad", title, run.why, run.last_step or None, None)


def _find_alike_groups(run: RecordedRun) -> Iterator[Finding]:
    # A teacher or a critic teaches from alike rewards too, so these steps do not count.
    steps = [line for line in run.steps if not line.keys() & _OTHER_SIGNALS]
    alike_frac = metric_curve(steps, "reward/zero_std_groups_frac")
    steps_above = alike_frac.above(_ALIKE_FRAC) if alike_frac is not None else None
    if alike_frac is None or steps_above is None:
        return
    summary = (
        f"{alike_frac.mean_over(steps_above):.0%} of the groups have rewards that are all alike "
    )
    summary += f"{steps_above}, and teach nothing"
    reward = metric_curve(run.steps, "reward/mean")
    if reward is not None and steps_above.is_open and _is_solved(run, reward):
        text = f"{summary}: the reward has risen from {reward.start:.3g} to {reward.end:.3g}, "
        text += "and what is left is little."
        title = "the prompts are nearly solved"
        yield Finding("ok", title, text, steps_above.first, alike_frac.key)
        return
    text = f"{summary}. The task is too hard, too easy, or the reward never differs: see the "
    text += "completions, other prompts, a larger rollout.group_size, or rollout.dynamic_sampling."
    level: Level = "bad" if steps_above.is_open and alike_frac.end >= 0.95 else "warning"
    yield Finding(level, "groups are alike", text, steps_above.first, alike_frac.key)


def _find_reward_fall(run: RecordedRun) -> Iterator[Finding]:
    reward = metric_curve(run.steps, "reward/mean")
    if reward is None or len(reward.values) < max(6, 2 * reward.window):
        return
    smoothed = reward.smoothed
    # The peak is looked for before the last window, which is the present level.
    top = int(np.argmax(smoothed[: -reward.window]))
    peak = float(smoothed[top])
    drop = peak - reward.end
    climb = peak - float(smoothed[: top + 1].min())
    spread = _reward_spread(run)
    noise = float(np.std(reward.values - smoothed)) * (2 / reward.window) ** 0.5
    # A fall counts if it is a quarter of the climb before it and of the spread within a step, and
    # beyond the curve's own noise.
    if drop < max(0.25 * climb, 0.25 * spread, 4 * noise, 1e-9):
        return
    falling = Curve(reward.key, reward.steps[top:], reward.values[top:])
    steps = falling.moved(peak, reward.end)
    if steps is not None and steps.is_open:
        text = f"It was {peak:.3g} about step {reward.steps[top]}, and is {reward.end:.3g} now."
        level: Level = "bad" if drop >= 0.5 * max(climb, spread) else "warning"
        text += _describe_changes(run, steps)
        yield Finding(level, "the reward falls", text, steps.first, reward.key)


def _describe_changes(run: RecordedRun, steps: StepRange) -> str:
    """Returns which other metrics changed by half or more at the same time."""
    changes = []
    for key in (
        "completion/tokens_mean",
        "loss/entropy",
        "optim/grad_norm",
        "completion/truncated_frac",
        _MISMATCH_MEAN,
    ):
        curve = metric_curve(run.steps, key)
        is_before = curve.steps < steps.first if curve is not None else np.zeros(0, np.bool_)
        if curve is None or is_before.all() or not is_before.any():
            continue
        early = np.mean(curve.values[is_before][-20:])
        late = np.mean(curve.values[~is_before])
        # A ratio, since the metrics have different units; tiny values are noise.
        is_changed = max(early, late) > 1.5 * min(early, late)
        if is_changed and max(abs(early), abs(late)) > 1e-9:
            changes.append(f"{key} {early:.3g} -> {late:.3g}")
    return f" With it changed {', '.join(changes)}." if changes else ""


def _find_high(run: RecordedRun, key: str, frac: float) -> tuple[Curve, StepRange] | None:
    """Returns a metric and the steps at which it is at `frac` or above."""
    curve = metric_curve(run.steps, key)
    steps = find_range(curve.steps, curve.values >= frac) if curve is not None else None
    return (curve, steps) if curve is not None and steps is not None else None


def _find_unscored(run: RecordedRun) -> Iterator[Finding]:
    high = _find_high(run, "reward/unscored_frac", _UNSCORED_FRAC)
    if high is None:
        return
    unscored, steps = high
    text = f"{unscored.mean_over(steps):.0%} of the completions have no reward {steps}: they enter "
    text += "no mean, and nothing is learned from them. A reward gave nothing, or the environment "
    text += "failed: see their statuses."
    # A trouble that is over is a warning, however large it was.
    is_bad = steps.is_open and unscored.end >= _BAD_UNSCORED_FRAC
    level: Level = "bad" if is_bad else "warning"
    yield Finding(level, "completions have no reward", text, steps.first, unscored.key)


def _find_reward_errors(run: RecordedRun) -> Iterator[Finding]:
    for name in _matching_metrics(run.steps, r"reward/(.+)/error_frac"):
        keys = [f"reward/{name}/error_frac", f"reward/{name}/timeout_frac"]
        yield from _find_failures(run, f"reward {name}", keys)


def _find_episode_errors(run: RecordedRun) -> Iterator[Finding]:
    keys = ["episode/env_error_frac", "episode/env_timeout_frac"]
    yield from _find_failures(run, "the environment", keys)
    for status, cause in (
        ("context_overflow", "the context's end"),
        ("max_turns", "max_turns"),
        ("invalid_calls", "calls that nobody could read"),
    ):
        high = _find_high(run, f"episode/{status}_frac", _CUT_FRAC)
        if high is not None:
            curve, steps = high
            text = f"{curve.mean_over(steps):.0%} of the episodes end so {steps}."
            yield Finding("warning", f"episodes end by {cause}", text, steps.first, curve.key)


def _find_failures(run: RecordedRun, subject: str, keys: Sequence[str]) -> Iterator[Finding]:
    curves = [metric_curve(run.steps, key) for key in keys]
    worst = max(
        (curve for curve in curves if curve is not None),
        key=lambda curve: float(curve.values.max()),
        default=None,
    )
    if worst is None or worst.values.max() < _FAILED_FRAC:
        return
    peak = float(worst.values.max())
    peak_step = worst.steps[np.argmax(worst.values)]
    bound = _setting(run, "reward_pool.max_error_frac", 0.3)
    failed_steps = worst.steps[worst.values >= _FAILED_FRAC]
    num_failed = f"{len(failed_steps)} of {len(worst.values)} steps"
    text = f"{peak:.1%} of the completions of step {peak_step} at the most, in {num_failed} "
    text += f"{_FAILED_FRAC:.0%} or more; at {bound:.0%} the run stops."
    title = f"{subject} {'times out' if 'timeout' in worst.key else 'fails'}"
    level: Level = "bad" if peak >= _NEAR_BOUND * bound else "warning"
    yield Finding(level, title, text, int(failed_steps[0]), worst.key)


def _find_truncation(run: RecordedRun) -> Iterator[Finding]:
    cut = metric_curve(run.steps, "completion/truncated_frac")
    if cut is None:
        return
    steps = cut.above(_CUT_FRAC)
    # A clear rise counts before it reaches half of the completions.
    if steps is None and cut.end >= cut.start + 0.2:
        steps = cut.moved(cut.start, cut.end)
    if steps is None:
        return
    limit = run.config.get("rollout.max_completion_tokens")
    text = f"{cut.mean_over(steps):.0%} of the completions are cut off {steps}, "
    text += f"{cut.values[0]:.0%} at the start. Their ends, and answers, are missing: "
    text += f"rollout.max_completion_tokens={limit}, or a penalty for length."
    level: Level = "bad" if steps.is_open and cut.end >= 0.9 else "warning"
    yield Finding(level, "completions are cut off", text, steps.first, cut.key)


def _find_length_change(run: RecordedRun) -> Iterator[Finding]:
    tokens = metric_curve(run.steps, "completion/tokens_mean")
    reward = metric_curve(run.steps, "reward/mean")
    if tokens is None or reward is None or tokens.start <= 0 or len(tokens.values) < 6:
        return
    ratio = tokens.end / tokens.start
    gain = reward.end - reward.start
    threshold = 0.25 * _reward_spread(run)
    # Longer completions are no trouble if the reward rises with them.
    is_explosion = ratio >= 3 and gain < threshold
    is_collapse = ratio <= 1 / 3 and gain < -threshold
    steps = tokens.moved(tokens.start, tokens.end)
    if (is_explosion or is_collapse) and steps is not None:
        text = f"{tokens.start:.0f} tokens at the start, {tokens.end:.0f} now, and the reward went "
        text += f"from {reward.start:.3g} to {reward.end:.3g}."
        title = f"lengths {'explode' if is_explosion else 'collapse'}"
        yield Finding("warning", title, text, steps.first, tokens.key)


def _find_entropy_change(run: RecordedRun) -> Iterator[Finding]:
    entropy = metric_curve(run.steps, "loss/entropy")
    if entropy is None:
        return
    reward = metric_curve(run.steps, "reward/mean")
    is_solved = reward is not None and _is_solved(run, reward)
    alarm = _find_alarm(run, "entropy")
    if alarm is not None:
        steps, text = alarm
        level: Level = "ok" if is_solved else "bad"
        yield Finding(level, "the entropy is gone", text, steps.first, entropy.key)
        return
    if len(entropy.values) < 6 or entropy.start <= 0 or is_solved:
        return
    ratio = entropy.end / entropy.start
    # Entropy falls in a healthy run too, so only a large change counts.
    is_collapse = ratio <= 0.1
    is_explosion = ratio >= 3 and entropy.end >= 1
    half_way = entropy.moved(entropy.start, entropy.end, frac=0.5)
    if (is_collapse or is_explosion) and half_way is not None:
        text = f"{entropy.start:.3g} nats a token at the start, {entropy.end:.3g} now. A lower "
        text += "optimizer.lr, a higher loss.clip_ratio_high or loss.kl_coef slow that down."
        title = f"the entropy {'collapses' if is_collapse else 'explodes'}"
        yield Finding("warning", title, text, half_way.first, entropy.key)


def _find_gradient_trouble(run: RecordedRun) -> Iterator[Finding]:
    skipped = metric_curve(run.steps, "optim/skipped_updates")
    if skipped is not None and skipped.values.any():
        indices = np.flatnonzero(skipped.values)
        text = (
            f"{skipped.values.sum():.0f} updates in {len(indices)} steps, since loss or gradient "
        )
        text += "was not finite."
        # One skipped update is bad luck, unless it is the newest.
        is_bad = len(indices) > 1 or indices[0] == len(skipped.values) - 1
        level: Level = "bad" if is_bad else "warning"
        first_step = int(skipped.steps[indices[0]])
        yield Finding(level, "updates are skipped", text, first_step, skipped.key)
    norm = metric_curve(run.steps, "optim/grad_norm")
    if norm is None:
        return
    bound = _setting(run, "optimizer.max_grad_norm", 1.0)
    spikes = find_spikes(norm, _SPIKE)
    # Below the bound the gradient is not even clipped.
    spikes = spikes[np.isin(spikes, norm.steps[norm.values > bound])]
    if len(spikes):
        listed = ", ".join(map(str, spikes[:5])) + ", ..." * (len(spikes) > 5)
        text = f"More than {_SPIKE:.0f} times those before, and above "
        text += f"optimizer.max_grad_norm={bound:g}, at step {listed}."
        yield Finding("warning", "the gradient spikes", text, int(spikes[0]), norm.key)
    for name, title in (("update", "no update is made"), ("gradient", "the gradient is 0")):
        alarm = _find_alarm(run, name)
        if alarm is not None:
            steps, text = alarm
            yield Finding("bad", title, text, steps.first, norm.key)


def _find_mismatch(run: RecordedRun) -> Iterator[Finding]:
    for key in (_MISMATCH_MEAN, _MISMATCH_MAX):
        curve = metric_curve(run.steps, key)
        if curve is None:
            continue
        bounds = _mismatch_bounds(run, curve)
        bound = _mismatch_bound(run, key, is_first=False)
        fracs = curve.values / bounds
        steps = find_range(curve.steps, fracs >= _NEAR_BOUND)
        text = f"{curve.end:.3g} nats now, {curve.start:.3g} at the start; at {bound:.3g} the run "
        text += "stops"
        # The run itself stops at its bound, so a value beyond it was recorded last.
        if fracs.max() >= 1:
            worst = int(curve.steps[np.argmax(fracs)])
            steps = steps or StepRange(worst, worst, is_open=False)
            text = f"It differs by {curve.values.max():.3g} nats, and the bound is {bound:.3g} "
            text += f"({steps})."
            yield Finding("bad", "engine and policy differ", text, steps.first, key)
        elif steps is not None:
            title = "engine and policy near their bound"
            yield Finding("warning", title, f"{text} ({steps}).", steps.first, key)
        elif key == _MISMATCH_MEAN and curve.end >= max(3 * curve.start, 0.1 * bound):
            drift = curve.moved(curve.start, curve.end)
            if drift is not None:
                title = "engine and policy drift apart"
                yield Finding("warning", title, f"{text}.", drift.first, key)


def _find_memory_growth(run: RecordedRun) -> Iterator[Finding]:
    growths: list[tuple[float, Curve]] = []
    # Memory that stays in use, not peaks, which follow the lengths. The first steps take what they
    # need once, so a leak must still grow in the second half.
    for key in _matching_metrics(run.steps, r"(memory/(?:sleep/left|\w+/allocated)_gib)"):
        curve = metric_curve(run.steps[2:], key)
        if curve is None or len(curve.values) < 20:
            continue
        # The level at the beginning of the second half.
        middle = float(np.median(curve.values[len(curve.values) // 2 :][: curve.window]))
        growth = curve.end - curve.start
        is_large = growth >= max(_MIN_GROWTH_GIB, 0.1 * abs(curve.start))
        if is_large and curve.end - middle >= 0.25 * growth:
            growths.append((growth, curve))
    if growths:
        growth, curve = max(growths, key=lambda entry: entry[0])
        steps = curve.moved(curve.start, curve.end)
        rate = growth / max(1, curve.steps[-1] - curve.steps[0]) * 1000
        text = f"{curve.key}: {curve.start:.2f} GiB at the start, {curve.end:.2f} now, "
        text += f"{rate:.2g} GiB in 1,000 steps."
        first_step = steps.first if steps is not None else int(curve.steps[0])
        yield Finding("warning", "memory grows", text, first_step, curve.key)


def _find_tail_waste(run: RecordedRun) -> Iterator[Finding]:
    waste = metric_curve(run.steps, "rollout/tail_waste_frac")
    if waste is None:
        return
    steps = find_range(waste.steps, waste.smoothed >= _WASTE_FRAC, min_steps=5)
    if steps is not None:
        text = f"{waste.mean_over(steps):.0%} of the ranks' time in rollout is spent waiting for "
        text += f"the slowest {steps}: rollout.tail_batching, or a bound on lengths."
        title = "ranks wait for the slowest completion"
        yield Finding("warning", title, text, steps.first, waste.key)


def _find_evaluation_fall(run: RecordedRun) -> Iterator[Finding]:
    """Yields evaluations whose last two are well below the best, while the reward still rose."""
    reward = metric_curve(run.steps, "reward/mean")
    for name in _matching_metrics(run.evaluations, r"eval/(.+)/mean"):
        scores = metric_curve(run.evaluations, f"eval/{name}/mean")
        if scores is None or reward is None or len(scores.values) < 4:
            continue
        top = int(np.argmax(scores.values[:-2]))
        best = float(scores.values[top])
        drop = best - float(scores.values[-2:].max())
        sizes = metric_curve(run.evaluations, f"eval/{name}/num_prompts")
        # Two standard errors of a share of prompts, at most.
        noise = 2 * (0.25 / sizes.end) ** 0.5 if sizes is not None and sizes.end > 0 else 0.0
        # The reward when the evaluation was at its best.
        is_before = reward.steps <= max(scores.steps[top], reward.steps[0])
        gain = reward.end - float(np.mean(reward.values[is_before][-reward.window :]))
        if drop >= max(0.05 * abs(best), noise, 1e-9) and gain >= 0.1 * _reward_spread(run):
            text = f"{best:.3g} after step {scores.steps[top]}, {scores.values[-1]:.3g} now, while "
            text += (
                f"the training reward rose by {gain:.2g}: it learns what only holds for its own "
            )
            text += "prompts. checkpoint.best_metric keeps a best."
            first_step = int(scores.steps[top + 1])
            yield Finding("warning", f"evaluation {name} falls", text, first_step, scores.key)


_RULES: tuple[Callable[[RecordedRun], Iterator[Finding]], ...] = (
    _find_end_state,
    _find_reward_fall,
    _find_alike_groups,
    _find_unscored,
    _find_reward_errors,
    _find_episode_errors,
    _find_truncation,
    _find_length_change,
    _find_entropy_change,
    _find_gradient_trouble,
    _find_mismatch,
    _find_memory_growth,
    _find_evaluation_fall,
    _find_tail_waste,
)


def _check_proofs(run: RecordedRun) -> Iterator[Check]:
    interval = run.config.get("proofs.every_steps")
    bound = f"at the start and every {interval} steps" if interval else "at the start"
    for name, key, failure, text in (
        (
            "weight sync",
            "weight_sync/proof_s",
            r"does not hold the policy's weights|hold different weights",
            "each engine holds the policy's weights, tensor by tensor",
        ),
        (
            "update",
            "proofs/update_check_s",
            r"plain recomputation|plain one",
            "loss, gradient, AdamW, advantages, masks, data and rewards as a plain recomputation "
            "has them",
        ),
    ):
        steps = [line["step"] for line in run.steps if (line.get(key) or 0.0) > 0]
        if _failed_with(run, failure):
            yield Check(name, "bad", "broken", bound, run.why)
        elif steps:
            value = f"held {len(steps)} times, last at step {steps[-1]}"
            yield Check(name, "ok", value, bound, text)


def _check_logprobs(run: RecordedRun) -> Iterator[Check]:
    for name, key in (("logprobs, mean", _MISMATCH_MEAN), ("logprobs, largest", _MISMATCH_MAX)):
        curve = metric_curve(run.steps, key)
        if curve is None:
            continue
        bounds = _mismatch_bounds(run, curve)
        # With proofs.max_mismatch only the mean has a bound.
        if key == _MISMATCH_MAX and math.isinf(_mismatch_bound(run, key, is_first=False)):
            continue
        fracs = curve.values / bounds
        worst = int(np.argmax(fracs))
        level: Level = "warning" if fracs[worst] >= _NEAR_BOUND else "ok"
        if fracs[worst] >= 1:
            level = "bad"
        value = f"{curve.values[worst]:.3g} at step {curve.steps[worst]}"
        text = "|policy - engine| on the tokens just sampled, nats a token, at each step"
        yield Check(name, level, value, f"{bounds[worst]:.3g}", text)


def _check_steps(run: RecordedRun) -> Iterator[Check]:
    if not run.steps:
        return
    is_broken = _failed_with(run, r"trained on \d+ tokens where rank 0 had decided")
    yield Check(
        name="partition of tokens",
        level="bad" if is_broken else "ok",
        value="broken" if is_broken else f"held at {len(run.steps)} steps",
        bound="at each step",
        text="each token that rank 0 counted was trained on once, on whichever rank",
    )
    skipped = metric_curve(run.steps, "optim/skipped_updates")
    if skipped is not None:
        num_skipped = float(skipped.values.sum())
        limit = run.config.get("training.max_nonfinite_in_a_row", 3)
        yield Check(
            name="finite updates",
            level="warning" if num_skipped else "ok",
            value=f"{num_skipped:.6g} skipped",
            bound=f"fewer than {limit} in a row",
            text="updates that were not made, since loss or gradient was not finite",
        )


def _check_errors(run: RecordedRun) -> Iterator[Check]:
    bound = _setting(run, "reward_pool.max_error_frac", 0.3)
    names = _matching_metrics(run.steps, r"reward/(.+)/error_frac")
    prefixes = {f"reward {name}": f"reward/{name}/" for name in names}
    if _matching_metrics(run.steps, r"(episode/env_error_frac)"):
        prefixes["environment"] = "episode/env_"
    for name, prefix in prefixes.items():
        # Errors and timeouts together are what the run compares with its bound.
        fracs = [
            (line.get(f"{prefix}error_frac") or 0.0) + (line.get(f"{prefix}timeout_frac") or 0.0)
            for line in run.steps
        ]
        worst = int(np.argmax(fracs))
        level: Level = "warning" if fracs[worst] >= _FAILED_FRAC else "ok"
        if fracs[worst] >= _NEAR_BOUND * bound:
            level = "bad"
        value = f"{fracs[worst]:.2%}"
        if fracs[worst]:
            value += f" at step {run.steps[worst]['step']}"
        text = "share of a step's completions that failed or timed out"
        yield Check(name, level, value, f"{bound:.0%}", text)


_CHECK_RULES: tuple[Callable[[RecordedRun], Iterator[Check]], ...] = (
    _check_proofs,
    _check_logprobs,
    _check_steps,
    _check_errors,
)


def _failed_with(run: RecordedRun, pattern: str) -> bool:
    return run.state == "failed" and re.search(pattern, run.why) is not None


def _mismatch_bound(run: RecordedRun, key: str, *, is_first: bool) -> float:
    """Returns the bound of a mismatch metric; later steps' bounds depend on the first step."""
    dtype = "float32" if run.config.get("model.dtype") == "float32" else "bfloat16"
    # The first step has a bound of its own: there is no scale before it.
    first_mean = None if is_first or not run.steps else run.steps[0].get(_MISMATCH_MEAN)
    limit = _setting(run, "proofs.max_mismatch", 0.0) or None
    return bounds_of(dtype, limit, first_mean)[key == _MISMATCH_MAX]


def _mismatch_bounds(run: RecordedRun, curve: Curve) -> Floats:
    """Returns the bound of a mismatch metric at each step of its curve."""
    bounds = np.full(len(curve.values), _mismatch_bound(run, curve.key, is_first=False))
    bounds[0] = _mismatch_bound(run, curve.key, is_first=True)
    return bounds


def _is_solved(run: RecordedRun, reward: Curve) -> bool:
    """Returns True if the reward has risen, is at its best, and hardly differs within a step."""
    std = metric_curve(run.steps, "reward/std")
    if std is None or std.end > 0.5 * std.start:
        return False
    has_risen = reward.end - reward.start >= 0.5 * std.start > 0
    return has_risen and reward.end >= 0.9 * float(reward.smoothed.max())


def _reward_spread(run: RecordedRun) -> float:
    """Returns the standard deviation of the rewards within a step; the median over the steps."""
    std = metric_curve(run.steps, "reward/std")
    return 0.0 if std is None else float(np.median(std.values))


def _find_alarm(run: RecordedRun, name: str) -> tuple[StepRange, str] | None:
    """Returns the steps at which the run's console gives that alarm, and its newest text."""
    keys = {"optim/updates", "optim/skipped_updates"}  # that alarms need
    lines = [line for line in run.steps if keys <= line.keys()]
    texts = [dict(alarms(line)).get(name, "") for line in lines]
    steps = np.array([line["step"] for line in lines], np.int64)
    alarmed = find_range(steps, np.array([bool(text) for text in texts], np.bool_))
    if alarmed is None:
        return None
    return alarmed, f"{[text for text in texts if text][-1]}."


def _matching_metrics(lines: Metrics, pattern: str) -> list[str]:
    """Returns the first group of `pattern` in each metric's name, in their order."""
    # The newest lines name all metrics, and a long run has very many lines.
    keys = dict.fromkeys(key for line in lines[-200:] for key in line)
    matches = (re.fullmatch(pattern, key) for key in keys)
    return [match[1] for match in matches if match is not None]


def _setting(run: RecordedRun, key: str, default: float) -> float:
    value = run.config.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else default
