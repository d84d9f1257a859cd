"""Causes of a run's troubles: each names its evidence and the key to change.

The evidence is in the metrics, in the timeline of the newest steps (a rank slower than the others,
slow rewards), or in a few dumped rollouts. A cause takes the place of its symptoms
(`Finding.explains`), so that one trouble is told once. The folder may be somebody else's: what
cannot be read is passed over.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from grpo_spmd.diagnosis.curves import Finding, find_range, matching_metrics
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.diagnosis.symptoms import (
    OTHER_SIGNALS,
    Rule,
    fallen_rewards,
    reward_spread,
    setting,
)
from grpo_spmd.files import UntrustedError, read_json
from grpo_spmd.observe.timeline import Timeline

# Metrics that change at once if an update throws the policy far away, each with the change that
# counts: for a fraction its rise, for other metrics the ratio of their values.
_LEAPS = {
    "loss/entropy": 2.0,
    "completion/tokens_mean": 2.0,
    "optim/grad_norm": 10.0,
    "completion/truncated_frac": 0.3,
    "reward/zero_std_groups_frac": 0.3,
}
_MAX_LR = 1e-3  # of AdamW on tiny models; large ones, and LoRA, train at less
_MIN_STEPS_AFTER = 4  # fewer steps after the first update prove nothing
_MIN_STEPS_TO_LEARN = 20  # before that a critic or the distance to a teacher is not judged
_ALIKE_FRAC = 0.999  # of groups: so many with equal rewards are all groups
_SLOW_FRAC = 0.4  # of the steps' time: rewards or checkpoints that take more are slow
_SLOW_CALL_FRAC = 0.5  # of the time that a step samples
_MIN_SAMPLING_S = 1.0  # a step that samples for less is a tiny model's
# Only a step away from the sampling policy is clipped, so about half of the tokens at the most.
_CLIPPED_FRAC = 0.3
_TEACHES_NAT = 1e-5  # a KL below it is rounding
_NUM_TIMED_STEPS = 50  # the newest ones, of which the timeline is read
_MIN_STEPS = 3  # fewer steps of the timeline prove nothing
_MIN_STEP_S = 1.0  # shorter steps are a tiny model's
_SLOW_RANK_FRAC = 0.15  # of the steps' time: a rank that costs the others more is slow
_MIN_GROUPS = 8  # fewer groups, or prompts, prove nothing
_FOLLOWS = 0.8  # from this correlation on the reward follows the length
_MOST = 0.8  # of completions that are cut off, and of these with one special token


def _judge_learning_rate(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the first updates changed the policy at once, and not for the better.

    Then the learning rate is too high.
    """
    lr = setting(run, "optimizer.lr", 0.0)
    updates = run.curve("optim/updates")
    update_steps = updates.steps[updates.values > 0]
    if not lr or not len(update_steps):
        return
    # The metrics of the step with the first update were sampled before it.
    begin = int(update_steps[0]) + 1
    num_after = max(_MIN_STEPS_AFTER, len(run.steps) // 10)

    def levels(metric: str) -> tuple[float, float]:
        """Returns a metric's level before the first update has an effect, and its level after it.

        Both are NaN if too few steps came after it.
        """
        curve = run.curve(metric)
        late_values = curve.values[curve.steps >= begin][:num_after]
        # A few completions of a few steps prove nothing.
        if len(late_values) < _MIN_STEPS_AFTER:
            return math.nan, math.nan
        return float(np.mean(curve.values[curve.steps < begin])), float(np.median(late_values))

    initial, later = levels("reward/mean")
    spread = run.curve("reward/std").values[:1].sum()
    if later >= initial + 0.1 * spread:
        return
    leaps = {"reward/mean": (initial, later)} if later <= initial - 0.25 * spread < initial else {}
    for metric, size in _LEAPS.items():
        initial, later = levels(metric)
        is_leap = max(initial, later) >= size * min(initial, later) > 0
        if metric.endswith("_frac"):
            is_leap = later >= initial + size
        if is_leap:
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
            explains=("reward/mean", "optim/skipped_updates", *_LEAPS),
        )


def _judge_learning_rate_of_zero(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the learning rate is 0 in the newest steps."""
    lr = run.curve("optim/lr")
    steps = find_range(lr.steps, lr.values == 0)
    if steps is not None and steps.is_open and steps.last - steps.first >= 3:
        yield Finding(
            "bad",
            "the learning rate is 0",
            "Nothing is learned: optimizer.lr, optimizer.min_lr, or optimizer.schedule ends before "
            "training.num_steps.",
            step=steps.first,
            metric=lr.key,
        )


def _judge_reward_hacking(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding for each named reward that falls while the weighted sum rises."""
    reward = run.curve("reward/mean")
    if reward.gain < max(0.1 * reward_spread(run), 3 * reward.noise, 1e-9):
        return
    names = matching_metrics(run.steps, r"reward/(.+)/mean")
    for fallen in fallen_rewards(run):
        name = fallen.key.removeprefix("reward/").removesuffix("/mean")
        riser = max(names, key=lambda name: run.curve(f"reward/{name}/mean").gain)
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


def _judge_constant_reward(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the reward is the same number for every completion of the run."""
    spread = run.curve("reward/std")
    mean = run.curve("reward/mean")
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


def _judge_groups_far_from_solved(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if each group's rewards are alike, but not those of different prompts."""
    alike_frac = run.curve("reward/zero_std_groups_frac")
    spread = run.curve("reward/std")
    if len(alike_frac) < 3 or spread.end <= 0 or run.steps[-1].keys() & OTHER_SIGNALS:
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


def _judge_teacher(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the teacher equals the policy, or if the policy moves away from it."""
    kl = run.curve("teacher/kl")
    if len(kl) < 3:
        return
    largest = np.abs(kl.values).max()
    if largest <= _TEACHES_NAT:
        yield Finding(
            "warning",
            "the teacher teaches nothing",
            f"teacher/kl is at most {largest:.1g} nats since the start: teacher "
            "and policy have the same weights and prompt (teacher.path, teacher.prompt_key).",
            step=int(kl.steps[0]),
            metric=kl.key,
        )
    elif len(kl) >= _MIN_STEPS_TO_LEARN and kl.gain > 3 * kl.noise:
        steps = kl.moved()
        yield Finding(
            "warning",
            "the policy moves away from its teacher",
            f"teacher/kl was {kl.start:.3g} nats at the start and is {kl.end:.3g} now: a larger "
            "teacher.coef, a lower optimizer.lr, or rewards that ask for something else.",
            step=steps.first if steps is not None else None,
            metric=kl.key,
        )


def _judge_critic(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the critic's values explain no variance of the returns."""
    explained = run.curve("critic/explained_variance")
    loss = run.curve("critic/loss")
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


def _judge_slow_phases(run: RecordedRun) -> Iterator[Finding]:
    """Yields findings about environments and checkpoints that take much of a step's time."""
    step_s = run.curve("time/step_s")
    if len(step_s) < 3 or step_s.end <= 0:
        return
    checkpoint_frac = run.curve("time/checkpoint_s").values.sum() / step_s.values.sum()
    if checkpoint_frac >= _SLOW_FRAC and step_s.end >= 1:
        yield Finding(
            "warning",
            "steps wait for checkpoints",
            f"Checkpoints take {checkpoint_frac:.0%} of the time: a larger checkpoint.every_steps, "
            "or a faster disk for run_dir.",
            metric="time/checkpoint_s",
        )
    sampling_s = run.curve("time/rollout_s").end
    call_s = run.curve("environment/call_s_p95")
    # A quick call is no bottleneck, however much of a tiny model's step it takes.
    if len(call_s) < 3 or sampling_s < _MIN_SAMPLING_S:
        return
    num_workers = setting(run, "environment.num_workers", 16)
    # Only the first rank of an engine has environments, and the metric is a mean over all ranks.
    engine_ranks = setting(run, "rollout.tensor_parallel_size", 1)
    calls_s = engine_ranks * run.curve("environment/calls_s_per_rank").end
    busy_frac = calls_s / num_workers / sampling_s
    # An agent's one call is its whole episode.
    has_agent = run.config.get("environment.agent") is not None
    turns = 2.0 if has_agent else run.curve("episode/turns_mean").end
    waiting_frac = call_s.end * max(1.0, turns - 1) / sampling_s
    slowest = f"The slowest twentieth of its calls takes {call_s.end:.3g} s or more"
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
    else:
        return
    yield Finding(
        "warning",
        "the environment or a tool is slow",
        text,
        step=int(call_s.steps[0]),
        metric=call_s.key,
        explains=("rollout/tail_waste_frac",),
    )


def _judge_off_policy(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if many tokens are clipped: the policy has left the one that sampled."""
    clipped = run.curve("loss/clip_frac")
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


def _judge_timeline(run: RecordedRun) -> Iterator[Finding]:
    """Yields the findings about slow ranks and slow rewards in the newest 50 steps.

    Steps whose line in timeline.jsonl lacks the spans of a rank are left out.
    """
    steps = [line["step"] for line in run.steps[-_NUM_TIMED_STEPS:]]
    lines = [line for line in run.files.timeline(steps).values() if all(line.spans)]
    if len(lines) >= _MIN_STEPS:
        yield from _judge_ranks(lines)
        yield from _judge_rewards(lines)


def _judge_ranks(lines: list[Timeline]) -> Iterator[Finding]:
    """Yields a finding about the rank that falls behind the others most, if that costs much time.

    `lines` has the timelines of some steps. Ranks leave a collective together, so a slow rank shows
    only in phases that it ends alone, as when it samples. Ranks that are slow in turn, because they
    happen to have the longest completions, are no finding.
    """
    delays: dict[int, Counter[str]] = {}
    num_slowest: Counter[int] = Counter()
    for line in lines:
        line_delays = _delays(line)
        for rank, delay in line_delays.items():
            delays.setdefault(rank, Counter()).update(delay)
        num_slowest[max(line_delays, key=lambda rank: line_delays[rank].total())] += 1
    if len(delays) < 2:
        return
    totals = {rank: delay.total() for rank, delay in delays.items()}
    slowest = max(totals, key=lambda rank: totals[rank])
    usual = float(np.median([total for rank, total in totals.items() if rank != slowest]))
    excess = (totals[slowest] - usual) / sum(map(_step_s, lines))
    if excess >= _SLOW_RANK_FRAC:
        phases = " and ".join(phase for phase, _ in delays[slowest].most_common(2))
        yield Finding(
            "warning",
            f"rank {slowest} is slow",
            f"It is the slowest in {num_slowest[slowest]} of the last {len(lines)} steps, mostly "
            f"in {phases}, and costs {excess:.0%} of the time: look for another process on its "
            "machine, a throttled GPU or a slow disk (grpo-spmd checkup).",
            step=lines[0].step,
            explains=("rollout/tail_waste_frac", "time/reward_s"),
        )


def _judge_rewards(lines: list[Timeline]) -> Iterator[Finding]:
    """Yields a finding if rewards take much of the time of the steps in `lines`.

    A rank that waits for another rank's rollouts does so in its reward phase. So the time of the
    rank with the shortest reward phase counts.
    """
    reward_s = [
        min(
            sum(span.end_s - span.start_s for span in spans if span.phase == "reward")
            for spans in line.spans
        )
        for line in lines
    ]
    total_s = sum(map(_step_s, lines))
    if total_s >= _MIN_STEP_S * len(lines) and sum(reward_s) >= _SLOW_FRAC * total_s:
        yield Finding(
            "warning",
            "steps wait for rewards",
            f"Rewards take {sum(reward_s) / total_s:.0%} of the last {len(lines)} steps: more "
            "reward_pool.num_workers for functions; max_concurrent, or a faster host, for servers.",
            metric="time/reward_s",
        )


def _delays(line: Timeline) -> dict[int, Counter[str]]:
    """Returns for each rank the seconds by phase that it fell behind the earliest rank.

    In each phase it counts how much later the rank ended, minus how much later it started. A rank
    that only waits for another one in a collective falls behind nobody.
    """
    delays: dict[int, Counter[str]] = {rank: Counter() for rank in line.ranks}
    for index in range(min(len(spans) for spans in line.spans)):
        spans = [rank_spans[index] for rank_spans in line.spans]
        earliest_start_s = min(span.start_s for span in spans)
        earliest_end_s = min(span.end_s for span in spans)
        for rank, span in zip(line.ranks, spans, strict=True):
            behind_s = (span.end_s - earliest_end_s) - (span.start_s - earliest_start_s)
            delays[rank][span.phase] += max(0.0, behind_s)  # type: ignore[assignment]
    return delays


def _step_s(line: Timeline) -> float:
    """Returns the seconds from a step's start to the end of the last phase on any rank."""
    return max(span.end_s for spans in line.spans for span in spans)


def _judge_length_reward(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the reward follows the length of completions, which grow or shrink.

    The evidence is the correlation of rewards and lengths within the groups of a few dumped steps.
    """
    tokens = run.curve("completion/tokens_mean")
    if len(tokens) < 6 or tokens.start <= 0:
        return
    ratio = tokens.end / tokens.start
    steps = tokens.moved()
    if 1 / 1.3 < ratio < 1.3 or steps is None:
        return
    # At the end all completions may be as long as they can be.
    groups: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for record in run.rollouts_around(steps.first):
        if record.reward is not None:
            groups[record.position].append((len(record.completion_ids), record.reward))
    correlations = []
    for group in groups.values():
        lengths, rewards = np.array(group, np.float64).T
        # A correlation needs both to differ.
        if len(group) >= 3 and np.ptp(lengths) > 0 and np.ptp(rewards) > 0:
            correlations.append(float(np.corrcoef(lengths, rewards)[0, 1]))
    if len(correlations) < _MIN_GROUPS:
        return
    correlation = float(np.mean(correlations))
    if abs(correlation) >= _FOLLOWS and (correlation > 0) == (ratio > 1):
        yield Finding(
            "warning",
            "the reward follows the length",
            f"Within a group rewards and lengths correlate by {correlation:.2f}, and completions "
            f"went from {tokens.start:.0f} to {tokens.end:.0f} tokens: length is what is learned. "
            "Bound it in the reward, or advantage.overlong_penalty; loss.aggregation=constant "
            "favours no length.",
            step=steps.first,
            metric=tokens.key,
            explains=(tokens.key, "completion/truncated_frac", "reward/zero_std_groups_frac"),
        )


def _judge_end_of_turn(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding about a special token that should end a completion, but does not.

    Completions contain it and go on to the limit of tokens: the model's config does not name it as
    a stop token.
    """
    cut = run.curve("completion/truncated_frac")
    if not cut.start >= _MOST:
        return
    names = _special_tokens(run)
    truncated = [record for record in run.initial_rollouts if record.finish_reason == "length"]
    counts = Counter(
        token for record in truncated for token in {*record.completion_ids} & names.keys()
    )
    for token, count in counts.most_common(1):
        if count >= _MOST * len(truncated):
            yield Finding(
                "bad",
                f"{names[token]!r:.40} does not end a completion",
                f"{count / len(truncated):.0%} of the completions recorded at the start contain "
                "it and go on to rollout.max_completion_tokens, so it is no stop token: add it to "
                "eos_token_id in the model's generation_config.json.",
                step=int(cut.steps[0]),
                metric=cut.key,
                explains=(
                    cut.key,
                    "completion/tokens_mean",
                    "reward/zero_std_groups_frac",
                    "reward/std",
                ),
            )


def _special_tokens(run: RecordedRun) -> dict[int, str]:
    """Returns the special tokens in the run folder's copy of the tokenizer, by id."""
    names: dict[int, str] = {}
    with suppress(OSError, UntrustedError, ValueError):
        entries = read_json(run.folder / "tokenizer.json").get("added_tokens")
        for entry in entries if isinstance(entries, list) else []:
            is_special = isinstance(entry, dict) and entry.get("special") is True
            if is_special and type(entry.get("id")) is int:
                names[entry["id"]] = str(entry.get("content"))
    return names


def _judge_repeated_prompts(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if many rows of the data have the same prompt and columns."""
    # An environment's rows may differ in other columns alone.
    records = run.initial_rollouts + run.newest_rollouts
    prompts = {record.row: str((record.prompt, record.columns)) for record in records}
    num_copies = len(prompts) - len({*prompts.values()})
    if len(prompts) >= _MIN_GROUPS and num_copies >= 0.2 * len(prompts):
        yield Finding(
            "warning",
            "the data repeats itself",
            f"Of {len(prompts)} recorded rows {num_copies} are copies of another one: such prompts "
            "count several times in every epoch. Remove copies from data.train.",
            step=run.dumped_steps[0],
        )


def _judge_same_completions(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding if the policy answers every prompt with one and the same text."""
    records = run.newest_rollouts
    num_prompts = len({record.position for record in records})
    for text, count in Counter(record.completion for record in records).most_common(1):
        if num_prompts >= _MIN_GROUPS and count >= 0.9 * len(records):
            yield Finding(
                "bad",
                "all completions are one text",
                f"{count / len(records):.0%} of the newest completions are {text!r:.80}, whatever "
                "the prompt: go back to a checkpoint before it, with a lower optimizer.lr, a "
                "higher loss.kl_coef or a reward that this text does not get.",
                explains=("reward/zero_std_groups_frac", "loss/entropy", "optim/grad_norm"),
            )


def _judge_evaluation_data(run: RecordedRun) -> Iterator[Finding]:
    """Yields a finding for each evaluation set that is the training set."""
    train = run.config.get("data.train")
    for key, value in run.config.items():
        if key.startswith("data.eval") and train is not None and value == train:
            yield Finding(
                "warning",
                f"{key} is data.train",
                "The evaluation asks what was trained on, so it shows memory and not skill: give "
                f"{key} rows of its own.",
            )


CAUSES: tuple[Rule, ...] = (
    _judge_timeline,
    _judge_learning_rate,
    _judge_learning_rate_of_zero,
    _judge_reward_hacking,
    _judge_constant_reward,
    _judge_groups_far_from_solved,
    _judge_teacher,
    _judge_critic,
    _judge_slow_phases,
    _judge_off_policy,
    _judge_length_reward,
    _judge_end_of_turn,
    _judge_repeated_prompts,
    _judge_same_completions,
    _judge_evaluation_data,
)
"""The rules. A cause comes before what it explains: a slow rank, say, before what waits for it."""
