"""Symptoms: what a person should look at in the metrics of a run, and the run's own checks.

A finding is about a range of steps, never about one step's luck, and tells at which step it began.
Pure: from metrics in memory to texts. Imports no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from grpo_spmd.config.errors import cut_middle
from grpo_spmd.diagnosis.curves import (
    Check,
    Curve,
    Finding,
    Level,
    StepRange,
    find_range,
    matching_metrics,
    metric_curve,
)
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.console import alarms
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.proofs.schedule import weakened_proofs
from grpo_spmd.rewards.protocol import watched_rewards

_NEAR_BOUND = 0.5  # of a bound: from there on a value is near it
_SPIKE = 10.0  # a spike is more than this many times the median of the gradients before it
_NUM_BEFORE_SPIKE = 20  # the most steps before a spike that it is compared with
_MIN_BEFORE_SPIKE = 5  # with fewer steps before it, nothing is a spike
_MAX_REASON_CHARS = 300
_FAILED_TOOLS_FRAC = 0.2  # of tool calls: fewer are usual, as a policy tries out arguments
_RETRIED_FRAC = 0.2  # of completions: so many retries take time
_MOST_TOOLS_FRAC = 0.5  # of tool calls: if so many fail, the policy cannot learn to use tools
_FAILED_FRAC = 0.01  # of completions: from there on there is something to say
_MIN_GROWTH_GIB = 0.25  # in the second half of a run: less is no leak
_MEMORY_CAUSES = {
    "memory/host/workers_gib": " A reward function, a tool or an environment keeps what it should "
    "drop, in a list, a cache or a connection that outlives the call."
}
# With these a policy or a critic learns from groups whose rewards are alike, too.
OTHER_SIGNALS = {"teacher/kl", "critic/loss"}
_MISMATCH_MEAN = "weight_sync/mismatch_abs_mean"
# Metrics that may explain why the reward falls.
_EXPLANATIONS = (
    "completion/tokens_mean",
    "loss/entropy",
    "optim/grad_norm",
    "completion/truncated_frac",
    _MISMATCH_MEAN,
)
# The states of a run that are findings, with the words of their titles.
_END_STATES = {"failed": "failed", "killed": "was killed", "silent": "writes nothing any more"}


class HighShare(NamedTuple):
    """A rule: a metric that is a fraction is a finding if it reaches `bound`, or has risen much."""

    metric: str
    bound: float
    title: str
    text: str  # what it means, and what helps
    bad_from: float = math.inf  # a share of this size at the end of the run is bad
    min_rise: float = math.inf  # a rise by so much counts before it reaches the bound


_ALIKE_GROUPS = "reward/zero_std_groups_frac"
_HIGH_SHARES = (
    HighShare(
        _ALIKE_GROUPS,
        0.8,
        "groups are alike",
        text="All rewards of such a group are alike and teach nothing: the task is too hard, too "
        "easy, or the reward never differs. See the completions, other prompts, a larger "
        "rollout.group_size, or rollout.dynamic_sampling.",
        bad_from=0.95,
    ),
    HighShare(
        "reward/unscored_frac",
        0.05,
        "completions have no reward",
        text="They enter no mean, and nothing is learned from them. A reward gave nothing, or the "
        "environment failed: see their statuses.",
        bad_from=0.25,
    ),
    HighShare(
        "completion/truncated_frac",
        0.5,
        "completions are cut off",
        text="Their ends, and answers, are missing: rollout.max_completion_tokens, or a penalty "
        "for length.",
        bad_from=0.9,
        min_rise=0.2,
    ),
    *(
        HighShare(
            f"episode/{status}_frac", 0.5, f"episodes end by {cause}", text="See their last turns."
        )
        for status, cause in (
            ("context_overflow", "the context's end"),
            ("max_turns", "max_turns"),
            ("invalid_calls", "calls that nobody could read"),
        )
    ),
    HighShare(
        "rollout/tail_waste_frac",
        0.3,
        "ranks wait for the slowest completion",
        text="They wait instead of sampling: rollout.tail_batching, or a bound on lengths.",
    ),
)
# By the kind of the console's alarm: the finding's title and its metric.
_ALARMS = {
    "entropy": ("the entropy is gone", "loss/entropy"),
    "update": ("no update is made", "optim/grad_norm"),
    "gradient": ("the gradient is 0", "optim/grad_norm"),
}


class Proof(NamedTuple):
    """A check that a run makes at some of its steps, and how its failure is worded."""

    name: str
    metric: str  # above 0 at the steps where it was made
    failure: str  # a pattern
    text: str


_PROOFS = (
    Proof(
        "weight sync",
        "weight_sync/proof_s",
        r"does not hold the policy's weights|hold different weights",
        "each engine holds the policy's weights, tensor by tensor",
    ),
    Proof(
        "update",
        "proofs/update_check_s",
        r"plain recomputation|plain one",
        "loss, gradient, AdamW, advantages, masks, data and rewards as a plain recomputation has "
        "them",
    ),
    Proof(
        "tokens trained on",
        "step",
        r"trained on \d+ tokens where rank 0 had decided",
        "each token that rank 0 counted was trained on once, on whichever rank",
    ),
)


def _level(value: float, warning_from: float, bad_from: float) -> Level:
    """Returns the level of a value, of which larger ones are worse, by its two bounds."""
    if value >= bad_from:
        return "bad"
    return "warning" if value >= warning_from else "ok"


def _judge_end_state(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the run failed, was killed, or writes nothing any more."""
    if run.state in _END_STATES:
        title = f"the run {_END_STATES[run.state]}"
        yield Finding("bad", title, run.why, step=run.last_step or None)


def _judge_proofs(run: RecordedRun) -> Iterator[Finding | Check]:
    """Yields a finding for each proof that is off or relaxed, and a check for each that was made.

    A proof is a check that the run makes of itself, such as that of the synced weights (`_PROOFS`).
    """
    for sentence in weakened_proofs(run.config):
        title, _, consequence = sentence.partition(": ")
        yield Finding("warning", title, f"{consequence}.")
    interval = run.config.get("proofs.every_steps")
    bound = f"at the start and every {interval} steps" if interval else "at the start"
    for proof in _PROOFS:
        steps = [line["step"] for line in run.steps if (line.get(proof.metric) or 0.0) > 0]
        is_broken = run.state == "failed" and re.search(proof.failure, run.why) is not None
        if is_broken or steps:
            yield Check(
                proof.name,
                "bad" if is_broken else "ok",
                "broken" if is_broken else f"passed {len(steps)} times, last at step {steps[-1]}",
                bound="at each step" if proof.metric == "step" else bound,
                text=run.why if is_broken else proof.text,
            )


def _judge_shares(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding for each share of `_HIGH_SHARES` that is above its bound or has risen by its
    `min_rise`."""
    for rule in _HIGH_SHARES:
        curve = run.curve(rule.metric)
        steps = find_range(curve.steps, curve.values >= rule.bound)
        if steps is None and curve.gain >= rule.min_rise:
            steps = curve.moved()
        if steps is None:
            continue
        title = rule.title
        is_inside = (curve.steps >= steps.first) & (curve.steps <= steps.last)
        text = f"{np.mean(curve.values[is_inside]):.0%} {steps}, {curve.values[0]:.0%} at the "
        text += f"start. {rule.text}"
        # A trouble that is over is a warning, however large it was.
        level: Level = "bad" if steps.is_open and curve.end >= rule.bad_from else "warning"
        if rule.metric == _ALIKE_GROUPS and run.steps[-1].keys() & OTHER_SIGNALS:
            # With a teacher or a critic, a group whose rewards are all equal teaches too.
            continue
        if rule.metric == _ALIKE_GROUPS and is_solved(run):
            level = "ok"
            title = "the prompts are nearly solved"
            text = "The reward has risen, so most groups are alike, and little is left to learn."
        yield Finding(level, title, text, step=steps.first, metric=rule.metric)


def _judge_reward(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the reward has fallen from its peak and has not come back."""
    reward = run.curve("reward/mean")
    if len(reward) < max(6, 2 * reward.window):
        return
    smoothed = reward.smoothed
    # The peak must lie before the last window: those steps make up the present level.
    top = int(np.argmax(smoothed[: -reward.window]))
    peak = float(smoothed[top])
    drop = peak - reward.end
    climb = peak - float(smoothed[: top + 1].min())
    spread = reward_spread(run)
    # A fall counts if it is a quarter of the climb before it and of the spread within a step, and
    # beyond the curve's own noise.
    if drop < max(0.25 * climb, 0.25 * spread, 4 * reward.noise, 1e-9):
        return
    steps = find_range(reward.steps[top:], reward.values[top:] <= peak - 0.25 * drop)
    if steps is not None and steps.is_open:
        yield Finding(
            "bad" if drop >= 0.5 * max(climb, spread) else "warning",
            "the reward falls",
            f"It was {peak:.3g} about step {reward.steps[top]}, and is {reward.end:.3g} now."
            f"{_describe_changes(run, steps.first)}",
            step=steps.first,
            metric=reward.key,
        )


def _describe_changes(run: RecordedRun, first_step: int) -> str:
    """Returns a sentence about other metrics that changed by half or more at the same time.

    It compares the 20 steps before `first_step` with all steps from it on. "" if nothing changed so
    much.
    """
    changes = []
    for key in _EXPLANATIONS:
        curve = run.curve(key)
        early_values = curve.values[curve.steps < first_step][-20:]
        late_values = curve.values[curve.steps >= first_step]
        if len(early_values) and len(late_values):
            early, late = np.mean(early_values), np.mean(late_values)
            # A ratio, since the metrics have different units; tiny values are noise.
            is_changed = max(early, late) > 1.5 * min(early, late)
            if is_changed and max(abs(early), abs(late)) > 1e-9:
                changes.append(f"{key} {early:.3g} -> {late:.3g}")
    return f" At the same time changed {', '.join(changes)}." if changes else ""


def _judge_tools(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if many calls of the environment's tools raise.

    A tool that raises costs no episode its reward, and so shows nowhere else.
    """
    curve = run.curve("environment/tool_error_frac")
    failed_steps = curve.steps[curve.values >= _FAILED_TOOLS_FRAC]
    if len(failed_steps):
        yield Finding(
            _level(curve.end, 0.0, _MOST_TOOLS_FRAC),
            "tool calls fail",
            f"{curve.values.max():.0%} of a step's calls raise at the most, and the policy is "
            "given the error in place of a result; the traceback is in logs/environments_rank_N.log"
            f".{_logged_reason(run, '(.+); the policy is given the error')}",
            step=int(failed_steps[0]),
            metric=curve.key,
        )


def _logged_reason(run: RecordedRun, pattern: str) -> str:
    """Returns the first warning in rank 0's log that matches, as a sentence "First reason: ...".

    `pattern` has one group, which is the reason. Returns "" if nothing matches.
    """
    match = re.search(rf" WARNING {pattern}", run.log)
    return f" First reason: {cut_middle(match[1], _MAX_REASON_CHARS)}." if match else ""


def _watched_subjects(run: RecordedRun) -> frozenset[str]:
    """Returns "reward NAME" for each reward that is only watched: its failures stop no run."""
    weights = {
        f"reward {name}": run.config.get(key.replace(".name", ".weight"), 1.0)
        for key, name in run.config.items()
        if re.fullmatch(r"rewards\.\d+\.name", key)
    }
    return watched_rewards(weights)


def _judge_failures(run: RecordedRun) -> Iterator[Finding | Check]:
    """Yields findings and checks about rewards, and the environment, that failed or timed out."""
    bound = setting(run, "reward_pool.max_error_frac", 0.3)
    names = matching_metrics(run.steps, r"reward/(.+)/error_frac")
    prefixes = {f"reward {name}": f"reward/{name}/" for name in names}
    prefixes["the environment"] = "episode/env_"
    watched = _watched_subjects(run)
    for subject, prefix in prefixes.items():
        for kind, verb in (("error", "fails"), ("timeout", "times out")):
            curve = run.curve(f"{prefix}{kind}_frac")
            failed_steps = curve.steps[curve.values >= _FAILED_FRAC]
            if len(failed_steps):
                peak = curve.values.max()
                is_watched = subject in watched
                end = "it is only watched" if is_watched else f"at {bound:.0%} the run stops"
                # A call that hangs is waited for, and one that fails is made again.
                effects = ("time/reward_s",) if kind == "timeout" or peak >= _RETRIED_FRAC else ()
                if kind == "timeout":
                    end += "; more workers do not end a call that hangs, so look at what it waits "
                    end += "for, or set a lower timeout_s"
                yield Finding(
                    "warning" if is_watched else _level(peak, 0.0, _NEAR_BOUND * bound),
                    f"{subject} {verb}",
                    f"{peak:.1%} of a step's completions at the most, {_FAILED_FRAC:.0%} or more "
                    f"at {len(failed_steps)} of {len(curve)} steps; {end}."
                    + _logged_reason(run, rf"{subject.replace(' ', ' .')}.: .*; first: (.+)"),
                    step=int(failed_steps[0]),
                    metric=curve.key,
                    explains=effects,
                )
        # Errors and timeouts together are what the run compares with its bound.
        fracs = [
            (line.get(f"{prefix}error_frac") or 0.0) + (line.get(f"{prefix}timeout_frac") or 0.0)
            for line in run.steps
        ]
        if len(run.curve(f"{prefix}error_frac")) and subject not in watched:
            worst = int(np.argmax(fracs))
            yield Check(
                subject,
                _level(fracs[worst], _FAILED_FRAC, _NEAR_BOUND * bound),
                value=f"{fracs[worst]:.2%} at step {run.steps[worst]['step']}",
                bound=f"{bound:.0%}",
                text="share of a step's completions that failed or timed out",
            )


def _judge_lengths(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the completions' length triples or falls to a third, to no benefit.

    Longer completions are a finding if the reward has not risen with them, shorter ones if it has
    fallen.
    """
    tokens = run.curve("completion/tokens_mean")
    reward = run.curve("reward/mean")
    steps = tokens.moved()
    if steps is None or tokens.start <= 0 or len(tokens) < 6:
        return
    ratio = tokens.end / tokens.start
    threshold = 0.25 * reward_spread(run)
    # Longer completions are no trouble if the reward rises with them.
    is_explosion = ratio >= 3 and reward.gain < threshold
    if is_explosion or (ratio <= 1 / 3 and reward.gain < -threshold):
        yield Finding(
            "warning",
            "lengths explode" if is_explosion else "lengths collapse",
            f"{tokens.start:.0f} tokens at the start, {tokens.end:.0f} now, and the reward went "
            f"from {reward.start:.3g} to {reward.end:.3g}.",
            step=steps.first,
            metric=tokens.key,
        )


def _judge_alarms(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding for each kind of the console's alarms that most steps of a range gave.

    Its text is that of the newest such alarm.
    """
    # Lines without these metrics are evaluations, for which `alarms` is not made.
    keys = {"optim/updates", "optim/skipped_updates"}
    lines = [line for line in run.steps if keys <= line.keys()]
    texts = [dict(alarms(line)) for line in lines]
    line_steps = np.array([line["step"] for line in lines], np.int64)
    for kind, (title, metric) in _ALARMS.items():
        steps = find_range(line_steps, np.array([kind in text for text in texts], np.bool_))
        if steps is not None:
            newest = [text[kind] for text in texts if kind in text][-1]
            yield Finding(
                "ok" if kind == "entropy" and is_solved(run) else "bad",
                title,
                f"{newest}.",
                step=steps.first,
                metric=metric,
            )


def _judge_entropy(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the entropy has fallen to a tenth, or has risen to three times.

    A run that has learned, or whose entropy `_judge_alarms` reports already, gets no finding.
    """
    entropy = run.curve("loss/entropy")
    half_way = entropy.moved(0.5)
    if half_way is None or len(entropy) < 6 or entropy.start <= 0 or has_learned(run):
        return
    ratio = entropy.end / entropy.start
    # Entropy falls in a healthy run too, so only a large change counts.
    is_collapse = ratio <= 0.1
    is_known = any(finding.metric == entropy.key for finding in _judge_alarms(run))
    if (is_collapse or (ratio >= 3 and entropy.end >= 1)) and not is_known:
        yield Finding(
            "warning",
            "the entropy collapses" if is_collapse else "the entropy explodes",
            f"{entropy.start:.3g} nats a token at the start, {entropy.end:.3g} now. A lower "
            "optimizer.lr, a higher loss.clip_ratio_high or loss.kl_coef slow that down.",
            step=half_way.first,
            metric=entropy.key,
        )


def _judge_skipped_updates(run: RecordedRun) -> Iterator[Finding | Check]:
    """Yields a check, and a finding if the run skipped updates whose gradient was not finite."""
    skipped = run.curve("optim/skipped_updates")
    if not len(skipped):
        return
    indices = np.flatnonzero(skipped.values)
    is_newest = skipped.values[-1] > 0
    num_skipped = f"{skipped.values.sum():.6g}"
    yield Check(
        "finite updates",
        "warning" if len(indices) else "ok",
        value=f"{num_skipped} skipped",
        bound=f"fewer than {run.config.get('training.max_nonfinite_in_a_row', 3)} in a row",
        text="updates that were not made, since loss or gradient was not finite",
    )
    if len(indices):
        yield Finding(
            # One skipped update is bad luck, unless it is the newest.
            "bad" if len(indices) > 1 or is_newest else "warning",
            "updates are skipped",
            f"{num_skipped} updates in {len(indices)} steps: loss or gradient was not finite.",
            step=int(skipped.steps[indices[0]]),
            metric=skipped.key,
        )


def _judge_gradient(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the gradient's norm was over ten times the median of the steps before."""
    norm = run.curve("optim/grad_norm")
    bound = setting(run, "optimizer.max_grad_norm", 1.0)
    if not len(norm):
        return
    # Below the bound the gradient is not even clipped. This filter is cheap; medians of the values
    # before each step would not be.
    large = norm.values > max(bound, _SPIKE * float(np.median(norm.values)))
    spikes = []
    for index in np.flatnonzero(large):
        recent = norm.values[max(0, index - _NUM_BEFORE_SPIKE) : index]
        if len(recent) >= _MIN_BEFORE_SPIKE and norm.values[index] > _SPIKE * np.median(recent):
            spikes.append(int(norm.steps[index]))
    if spikes:
        yield Finding(
            "warning",
            "the gradient spikes",
            f"More than {_SPIKE:.0f} times those before, and above optimizer.max_grad_norm="
            f"{bound:g}, at {len(spikes)} steps, the last of them {spikes[-1]}.",
            step=spikes[0],
            metric=norm.key,
        )


def _judge_mismatch(run: RecordedRun) -> Iterator[Finding | Check]:
    """Yields checks and findings about the difference of the engine's and policy's logprobs.

    For the mean and for the largest difference it yields a check with the bound at which the run
    stops, and a finding if the difference came near the bound, exceeded it, or grows.
    """
    limit = setting(run, "proofs.max_mismatch", 0.0) or None
    scale = run.steps[0].get(_MISMATCH_MEAN) if run.steps else None
    for index, name in enumerate(("mean", "largest")):
        curve = run.curve((_MISMATCH_MEAN, "weight_sync/mismatch_abs_max")[index])
        bounds = np.full(len(curve), bounds_of(run.dtype, limit, scale)[index])
        # The first step has a bound of its own: there is no scale before it.
        bounds[:1] = bounds_of(run.dtype, limit, None)[index]
        # With proofs.max_mismatch only the mean has a bound.
        if not np.isfinite(bounds).any():
            continue
        fracs = curve.values / bounds
        worst = int(np.argmax(fracs))
        worst_step = int(curve.steps[worst])
        yield Check(
            f"logprobs, {name}",
            _level(fracs[worst], _NEAR_BOUND, 1.0),
            value=f"{curve.values[worst]:.3g} at step {worst_step}",
            bound=f"{bounds[worst]:.3g}",
            text="|policy - engine| on the tokens just sampled, nats a token, at each step",
        )
        level: Level = "warning"
        title = "engine and policy near their bound"
        steps = find_range(curve.steps, fracs >= _NEAR_BOUND)
        if fracs[worst] >= 1:
            level = "bad"
            title = "engine and policy differ"
            steps = steps or StepRange(worst_step, worst_step, is_open=False)
        elif steps is None and not index and curve.end >= max(3 * curve.start, 0.1 * bounds[-1]):
            title = "engine and policy drift apart"
            steps = curve.moved()
        if steps is not None:
            yield Finding(
                level,
                title,
                f"{curve.end:.3g} nats now, {curve.start:.3g} at the start, "
                f"{curve.values.max():.3g} at the most; at {bounds[-1]:.3g} the run stops.",
                step=steps.first,
                metric=curve.key,
            )


def _judge_memory(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding about the memory that grows most in the second half of the run."""
    # Memory that stays in use, not peaks, which follow the lengths. The first half of a run takes
    # what it needs once, so a leak must still grow in the second half.
    half = run.steps[len(run.steps) // 2 :]
    names = matching_metrics(half, r"(memory/(?:sleep/left|host/workers|\w+/allocated)_gib)")
    curves = [metric_curve(half, name) for name in names]
    growing = [
        curve
        for curve in curves
        if len(curve) >= 10 and curve.gain >= max(_MIN_GROWTH_GIB, 0.05 * abs(curve.start))
    ]
    for curve in sorted(growing, key=lambda curve: -curve.gain)[:1]:
        steps = curve.moved()
        rate = curve.gain / max(1, curve.steps[-1] - curve.steps[0]) * 1000
        yield Finding(
            "warning",
            "memory grows",
            f"{curve.key}: {curve.start:.2f} GiB half way, {curve.end:.2f} now, "
            f"{rate:.2g} GiB in 1,000 steps.{_MEMORY_CAUSES.get(curve.key, '')}",
            step=steps.first if steps is not None else int(curve.steps[0]),
            metric=curve.key,
        )


def _judge_evaluations(run: RecordedRun) -> Iterator[Finding]:
    """Yields each evaluation set whose last two scores are well below its best one.

    It does so only if the training reward has risen since the best score: the policy then overfits.
    """
    reward = run.curve("reward/mean")
    for name in matching_metrics(run.evaluations, r"eval/(.+)/mean"):
        scores = metric_curve(run.evaluations, f"eval/{name}/mean")
        if not len(reward) or len(scores) < 4:
            continue
        top = int(np.argmax(scores.values[:-2]))
        best = float(scores.values[top])
        drop = best - float(scores.values[-2:].max())
        num_prompts = metric_curve(run.evaluations, f"eval/{name}/num_prompts").end
        # Two standard errors of a share of prompts, at most.
        noise = 2 * (0.25 / num_prompts) ** 0.5 if num_prompts > 0 else 0.0
        # The reward when the evaluation was at its best.
        is_before = reward.steps <= max(scores.steps[top], reward.steps[0])
        gain = reward.end - float(np.mean(reward.values[is_before][-reward.window :]))
        if drop >= max(0.05 * abs(best), noise, 1e-9) and gain >= 0.1 * reward_spread(run):
            yield Finding(
                "warning",
                f"evaluation {name} falls",
                f"{best:.3g} after step {scores.steps[top]}, {scores.values[-1]:.3g} now, while "
                f"the training reward rose by {gain:.2g}: it learns what only holds for its "
                "own prompts. checkpoint.best_metric keeps a best.",
                step=int(scores.steps[top + 1]),
                metric=scores.key,
            )


# A rule looks at one kind of trouble, and yields what it has to say about a run.
Rule = Callable[[RecordedRun], Iterator[Finding | Check]]
SYMPTOMS: tuple[Rule, ...] = (
    _judge_end_state,
    _judge_proofs,
    _judge_mismatch,
    _judge_skipped_updates,
    _judge_reward,
    _judge_failures,
    _judge_tools,
    _judge_shares,
    _judge_lengths,
    _judge_alarms,
    _judge_entropy,
    _judge_gradient,
    _judge_memory,
    _judge_evaluations,
)


def has_learned(run: RecordedRun) -> bool:
    """Returns True if the reward has risen and is at its best, without a sign of reward hacking.

    A run in which one of its rewards fell, or which cuts half of its completions off, has learned
    something else.
    """
    reward = run.curve("reward/mean")
    # The first step's: a run may learn within the few steps that make up the level at the start.
    spread = run.curve("reward/std").values[:1].sum()
    has_risen = reward.end - reward.values[:1].sum() >= 0.5 * spread > 0
    is_best = reward.end >= 0.9 * reward.smoothed.max(initial=-math.inf)
    is_cut_off = run.curve("completion/truncated_frac").end >= 0.5
    return has_risen and is_best and not is_cut_off and not fallen_rewards(run)


def is_solved(run: RecordedRun) -> bool:
    """Returns True if the run has learned, and a step's rewards differ half as much as at first."""
    std = run.curve("reward/std")
    return has_learned(run) and std.end <= 0.5 * std.start


def fallen_rewards(run: RecordedRun) -> list[Curve]:
    """Returns the curves of the rewards that have fallen by a quarter of their spread or more."""
    fallen = []
    for name in matching_metrics(run.steps, r"reward/(.+)/mean"):
        curve = run.curve(f"reward/{name}/mean")
        spread = run.curve(f"reward/{name}/std")
        if len(curve) >= 6 and -curve.gain >= max(0.25 * spread.start, 3 * curve.noise, 1e-9):
            fallen.append(curve)
    return fallen


def reward_spread(run: RecordedRun) -> float:
    """Returns the standard deviation of a step's rewards (the median over the steps)."""
    std = run.curve("reward/std")
    return float(np.median(std.values)) if len(std) else 0.0


def setting(run: RecordedRun, key: str, default: float) -> float:
    """Returns the value of `key` in the run's config if it is a positive number, else `default`."""
    value = run.config.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else default
