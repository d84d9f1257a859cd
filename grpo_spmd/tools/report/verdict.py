"""Where a curve begins to be what it should not be. Pure."""

from __future__ import annotations

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
Mask = npt.NDArray[np.bool_]
LEAST_STEPS = 3  # in a row, more or less, before something is more than a hiccup
_MOST_LEVEL = 20  # steps that a level is the mean of


@dataclass(frozen=True)
class Curve:
    """A metric where it is known: at least one value, at ascending steps."""

    steps: npt.NDArray[np.int64]
    values: Floats

    @property
    def window(self) -> int:
        """Steps that say what a level is: a tenth of the curve."""
        return min(max(len(self.values) // 10, min(3, len(self.values))), _MOST_LEVEL)

    @property
    def start(self) -> float:
        """The level that it began at."""
        return float(np.median(self.values[: self.window]))

    @property
    def now(self) -> float:
        """The level that it has come to."""
        return float(np.median(self.values[-self.window :]))

    @property
    def smooth(self) -> Floats:
        """Means of `window` values around each."""
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        half, number = self.window // 2, len(self.values)
        low = np.maximum(np.arange(number) - half, 0)
        high = np.minimum(np.arange(number) + half + 1, number)
        means: Floats = (sums[high] - sums[low]) / (high - low)
        return means


@dataclass(frozen=True)
class Stretch:
    """Steps at which something held, nearly all of them."""

    first: int
    last: int
    goes_on: bool  # to the end of the curve

    def __str__(self) -> str:
        return (
            f"since step {self.first}" if self.goes_on else f"from step {self.first} to {self.last}"
        )


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Curve | None:
    """None where no line knows the metric."""
    known = [(line["step"], float(value)) for line in lines if (value := line.get(key)) is not None]
    if not known:
        return None
    return Curve(
        np.array([step for step, _ in known], np.int64), np.array([value for _, value in known])
    )


def stretch(steps: npt.NDArray[np.int64], holds: Mask, least: int = LEAST_STEPS) -> Stretch | None:
    """Where `holds` is mostly true: the end of the curve that has most steps with it beyond those without, else such a
    part in the middle; None where that is fewer than `least` steps (or than all, of a short curve)."""
    score = np.where(holds, 1, -1)
    needed = min(least, len(score))
    of_ends = np.cumsum(score[::-1])[::-1]
    best = int(of_ends.max(initial=0))
    if best >= needed > 0:
        first = int(np.flatnonzero(of_ends == best)[-1])  # of two that say the same the shorter one
        return Stretch(int(steps[first]), int(steps[-1]), True)
    sums = np.concatenate([[0], np.cumsum(score)])
    gains = sums[1:] - np.minimum.accumulate(sums[:-1])
    if len(gains) and gains.max() >= max(needed, LEAST_STEPS):
        last = int(np.argmax(gains))
        low = sums[: last + 1]
        first = int(np.flatnonzero(low == low.min())[-1])
        return Stretch(int(steps[first]), int(steps[last]), False)
    return None


def moved(of: Curve, start: float, now: float, part: float = 0.25) -> Stretch | None:
    """Since when it is `part` of the way from `start` to `now`, or further."""
    there = start + part * (now - start)
    return stretch(of.steps, of.values >= there if now > start else of.values <= there)


def spikes(
    of: Curve, times: float, before: int = 20, least_before: int = 5
) -> npt.NDArray[np.int64]:
    """Steps with a value of more than `times` the median of those `before` it."""
    found = [
        int(of.steps[i])
        for i in np.flatnonzero(of.values > times * np.median(of.values))
        if i >= least_before and of.values[i] > times * np.median(of.values[max(0, i - before) : i])
    ]
    return np.array(found, np.int64)


# What a person should look at in a run, and how far its running checks were from their bounds. Imports no torch.
#
# A finding is of a stretch of steps, never of one step's luck, and says at which it began.


Level = Literal["ok", "warning", "bad"]
_RANK = {"bad": 0, "warning": 1, "ok": 2}
_FAILED = 0.01  # share of completions that failed, from which on it is worth a word
_NEAR = 0.5  # of a bound
_SPIKE = 10.0  # times the gradients before
_MOST_ALIKE, _MOST_CUT, _MOST_WASTE, _MOST_UNSCORED, _FAR_UNSCORED = (
    0.8,
    0.5,
    0.3,
    0.05,
    0.25,
)  # shares
_TEACH_ALIKE = {"teacher/kl", "critic/loss"}  # what learns from groups whose rewards are alike
_LEAST_GROWTH_GIB = 0.5
_MEAN, _LARGEST = "weight_sync/mismatch_abs_mean", "weight_sync/mismatch_abs_max"


@dataclass(frozen=True)
class Finding:
    """Something to look at; `step`: where it began; `metric`: the curve that shows it."""

    level: Level
    title: str
    text: str
    step: int | None
    metric: str | None


@dataclass(frozen=True)
class Check:
    """One of the run's own checks: what it found so far beside the bound at which it stops the run."""

    name: str
    level: Level
    value: str
    bound: str
    text: str


def list_findings(run: RecordedRun) -> list[Finding]:
    """The worst first; one that all is well where nothing is warned of."""
    with np.errstate(
        all="ignore"
    ):  # a folder that somebody made up may have figures beyond all bounds
        found = [finding for rule in _RULES for finding in rule(run)]
        found += _near_checks(run) if all(finding.level == "ok" for finding in found) else ()
    if run.steps and all(finding.level == "ok" for finding in found):
        text = f"{len(run.steps)} steps: rewards, lengths, entropy, gradients, memory and the checks show no trouble."
        found.append(Finding("ok", "nothing stands out", text, None, None))
    return sorted(found, key=lambda finding: _RANK[finding.level])


def list_checks(run: RecordedRun) -> list[Check]:
    """Those that the run has made, with their margins."""
    with np.errstate(all="ignore"):
        found = [
            *_proof_checks(run),
            *_logprob_checks(run),
            *_step_checks(run),
            *_error_checks(run),
        ]
    return [check for check in found if check.value]


def _near_checks(run: RecordedRun) -> Iterator[Finding]:
    """Where nothing else is said of them: one that is not well must not stand beside praise."""
    for check in (check for check in list_checks(run) if check.level != "ok"):
        text = f"{check.value}; its bound is {check.bound}: {check.text}."
        yield Finding(
            check.level, f"the check of {check.name} is not far from its bound", text, None, None
        )


# What stopped it


def _state(run: RecordedRun) -> Iterator[Finding]:
    if run.state in ("failed", "killed", "silent"):
        yield Finding("bad", f"the run {_WORDS[run.state]}", run.why, run.last_step or None, None)


_WORDS = {"failed": "failed", "killed": "was killed", "silent": "writes nothing any more"}

# Rewards


def _alike(run: RecordedRun) -> Iterator[Finding]:
    key, steps = (
        "reward/zero_std_groups_frac",
        [one for one in run.steps if not one.keys() & _TEACH_ALIKE],
    )
    alike, reward = curve(steps, key), curve(run.steps, "reward/mean")
    if alike is None or (where := stretch(alike.steps, alike.values >= _MOST_ALIKE)) is None:
        return
    share = f"{_mean_in(alike, where):.0%} of the groups have rewards that are all alike {where}, and teach nothing"
    if reward is not None and where.goes_on and _is_solved(run, reward):
        text = f"{share}: the reward has risen from {reward.start:.3g} to {reward.now:.3g}, and what is left is little."
        yield Finding("ok", "the prompts are nearly solved", text, where.first, key)
        return
    remedy = "The task is too hard, too easy, or the reward never differs: see the completions, other prompts, a larger"
    text = f"{share}. {remedy} rollout.group_size, or rollout.dynamic_sampling."
    level: Level = "bad" if where.goes_on and alike.now >= 0.95 else "warning"
    yield Finding(level, "groups are alike", text, where.first, key)


def _reward(run: RecordedRun) -> Iterator[Finding]:
    """A fall counts that is a quarter of the climb before it, of the spread within a step, and beyond the curve's own
    noise."""
    key = "reward/mean"
    reward = curve(run.steps, key)
    if reward is None or len(reward.values) < 2 * reward.window or len(reward.values) < 6:
        return
    smooth = reward.smooth
    top = int(np.argmax(smooth[: -reward.window]))
    peak, drop = float(smooth[top]), float(smooth[top]) - reward.now
    noise = float(np.std(reward.values - smooth)) * (2 / reward.window) ** 0.5
    climbed = peak - float(smooth[: top + 1].min())
    if drop < max(0.25 * climbed, 0.25 * _spread(run), 4 * noise, 1e-9):
        return
    after = Curve(reward.steps[top:], reward.values[top:])
    where = moved(after, peak, reward.now)
    if where is not None and where.goes_on:
        text = f"It was {peak:.3g} about step {reward.steps[top]}, and is {reward.now:.3g} now."
        level: Level = "bad" if drop >= 0.5 * max(climbed, _spread(run)) else "warning"
        yield Finding(level, "the reward falls", f"{text}{_beside(run, where)}", where.first, key)


def _beside(run: RecordedRun, where: Stretch) -> str:
    """What else changed with it, by how many times."""
    said = []
    for key in (
        "completion/tokens_mean",
        "loss/entropy",
        "optim/grad_norm",
        "completion/truncated_frac",
        _MEAN,
    ):
        of = curve(run.steps, key)
        if of is None or not (of.steps < where.first).any() or not (of.steps >= where.first).any():
            continue
        before, after = (
            np.mean(of.values[of.steps < where.first][-20:]),
            np.mean(of.values[of.steps >= where.first]),
        )
        if max(before, after) > 1.5 * min(before, after) and max(abs(before), abs(after)) > 1e-9:
            said.append(f"{key} {before:.3g} -> {after:.3g}")
    return f" With it changed {', '.join(said)}." if said else ""


def _unscored(run: RecordedRun) -> Iterator[Finding]:
    key = "reward/unscored_frac"
    unscored = curve(run.steps, key)
    if (
        unscored is None
        or (where := stretch(unscored.steps, unscored.values >= _MOST_UNSCORED)) is None
    ):
        return
    text = f"{_mean_in(unscored, where):.0%} of the completions have no reward {where}: they enter no mean, and nothing "
    text += "is learned from them. A reward gave nothing, or the environment failed: see their statuses."
    level: Level = "bad" if where.goes_on and unscored.now >= _FAR_UNSCORED else "warning"
    yield Finding(level, "completions have no reward", text, where.first, key)


def _reward_errors(run: RecordedRun) -> Iterator[Finding]:
    bound = _number(run, "reward_pool.max_error_frac", 0.3)
    for name in _named(run, r"reward/(.+)/error_frac"):
        yield from _failures(
            run,
            f"reward {name}",
            (f"reward/{name}/error_frac", f"reward/{name}/timeout_frac"),
            bound,
        )


def _episode_errors(run: RecordedRun) -> Iterator[Finding]:
    bound = _number(run, "reward_pool.max_error_frac", 0.3)
    yield from _failures(
        run, "the environment", ("episode/env_error_frac", "episode/env_timeout_frac"), bound
    )
    for key, what in (("episode/context_overflow_frac", "the context's end"), ("episode/max_turns_frac", "max_turns"),
                      ("episode/invalid_calls_frac", "calls that nobody could read")):  # fmt: skip
        of = curve(run.steps, key)
        if of is not None and (where := stretch(of.steps, of.values >= _MOST_CUT)) is not None:
            text = f"{_mean_in(of, where):.0%} of the episodes end so {where}."
            yield Finding("warning", f"episodes end by {what}", text, where.first, key)


def _failures(run: RecordedRun, who: str, keys: tuple[str, ...], bound: float) -> Iterator[Finding]:
    curves = [of for key in keys if (of := curve(run.steps, key)) is not None]
    worst = max(curves, key=lambda of: float(of.values.max()), default=None)
    if worst is None or (most := float(worst.values.max())) < _FAILED:
        return
    key = keys[
        next(
            i
            for i, name in enumerate(keys)
            if (of := curve(run.steps, name)) and of.values.max() == most
        )
    ]
    first = int(worst.steps[np.flatnonzero(worst.values >= _FAILED)[0]])
    is_near = most >= _NEAR * bound
    number = int((worst.values >= _FAILED).sum())
    text = f"{most:.1%} of the completions of step {int(worst.steps[np.argmax(worst.values)])} at the most, "
    text += f"in {number} of {len(worst.values)} steps {_FAILED:.0%} or more; at {bound:.0%} the run stops."
    title = f"{who} {'times out' if 'timeout' in key else 'fails'}"
    yield Finding("bad" if is_near else "warning", title, text, first, key)


# Lengths, entropy, gradients


def _truncation(run: RecordedRun) -> Iterator[Finding]:
    key = "completion/truncated_frac"
    cut = curve(run.steps, key)
    if cut is None:
        return
    where = stretch(cut.steps, cut.values >= _MOST_CUT)
    if where is None and cut.now >= cut.start + 0.2:
        where = moved(cut, cut.start, cut.now)
    if where is None:
        return
    text = f"{_mean_in(cut, where):.0%} of the completions are cut off {where}, {cut.values[0]:.0%} at the start. "
    longest = run.config.get("rollout.max_completion_tokens")
    text += f"Their ends, and answers, are missing: rollout.max_completion_tokens={longest}, or a penalty for length."
    is_bad = where.goes_on and cut.now >= 0.9
    yield Finding("bad" if is_bad else "warning", "completions are cut off", text, where.first, key)


def _lengths(run: RecordedRun) -> Iterator[Finding]:
    """Longer completions are no trouble where the reward comes with them."""
    key = "completion/tokens_mean"
    tokens, reward = curve(run.steps, key), curve(run.steps, "reward/mean")
    if tokens is None or reward is None or tokens.start <= 0 or len(tokens.values) < 6:
        return
    times, gained = tokens.now / tokens.start, reward.now - reward.start
    if (times >= 3 and gained < 0.25 * _spread(run)) or (
        times <= 1 / 3 and gained < -0.25 * _spread(run)
    ):
        where = moved(tokens, tokens.start, tokens.now)
        if where is not None:
            what = "explode" if times > 1 else "collapse"
            text = f"{tokens.start:.0f} tokens at the start, {tokens.now:.0f} now, and the reward went from "
            text += f"{reward.start:.3g} to {reward.now:.3g}."
            yield Finding("warning", f"lengths {what}", text, where.first, key)


def _entropy(run: RecordedRun) -> Iterator[Finding]:
    key = "loss/entropy"
    entropy, reward = curve(run.steps, key), curve(run.steps, "reward/mean")
    if entropy is None:
        return
    gone = _alarmed(run, "entropy")
    is_solved = reward is not None and _is_solved(run, reward)
    if gone is not None:
        level: Level = "ok" if is_solved else "bad"
        yield Finding(level, "the entropy is gone", f"{_said(run, 'entropy')}.", gone.first, key)
    elif len(entropy.values) >= 6 and entropy.start > 0 and not is_solved:
        times = entropy.now / entropy.start
        where = moved(entropy, entropy.start, entropy.now, part=0.5)  # it falls by right too
        if where is None or 0.1 < times < 3 or (times >= 3 and entropy.now < 1):
            return
        word = "collapses" if times < 1 else "explodes"
        text = f"{entropy.start:.3g} nats a token at the start, {entropy.now:.3g} now. A lower optimizer.lr, "
        text += "a higher loss.clip_ratio_high or loss.kl_coef slow that down."
        yield Finding("warning", f"the entropy {word}", text, where.first, key)


def _gradients(run: RecordedRun) -> Iterator[Finding]:
    skipped, norm = curve(run.steps, "optim/skipped_updates"), curve(run.steps, "optim/grad_norm")
    if skipped is not None and skipped.values.any():
        where = np.flatnonzero(skipped.values)
        text = f"{skipped.values.sum():.0f} updates in {len(where)} steps, since loss or gradient was not finite."
        level: Level = "bad" if len(where) > 1 or where[0] == len(skipped.values) - 1 else "warning"
        yield Finding(
            level,
            "updates are skipped",
            text,
            int(skipped.steps[where[0]]),
            "optim/skipped_updates",
        )
    if norm is None:
        return
    high, bound = spikes(norm, _SPIKE), _number(run, "optimizer.max_grad_norm", 1.0)
    high = high[np.isin(high, norm.steps[norm.values > bound])]
    if len(high):
        at = ", ".join(map(str, high[:5])) + ", ..." * (len(high) > 5)
        text = f"More than {_SPIKE:.0f} times those before, and above optimizer.max_grad_norm={bound:g}, at step {at}."
        yield Finding("warning", "the gradient spikes", text, int(high[0]), "optim/grad_norm")
    for name, title in (("update", "no update is made"), ("gradient", "the gradient is 0")):
        if (stopped := _alarmed(run, name)) is not None:
            yield Finding("bad", title, f"{_said(run, name)}.", stopped.first, "optim/grad_norm")


# Engine and policy, memory, time, evaluation


def _mismatch(run: RecordedRun) -> Iterator[Finding]:
    for key, place in ((_MEAN, 0), (_LARGEST, 1)):
        of = curve(run.steps, key)
        if of is None:
            continue
        first_bound, bound = _bounds(run, 0)[place], _bounds(run, 1)[place]
        shares = of.values / np.where(np.arange(len(of.values)) == 0, first_bound, bound)
        where = stretch(of.steps, shares >= _NEAR)
        if shares.max() >= 1:
            where = where or Stretch(
                int(of.steps[np.argmax(shares)]), int(of.steps[np.argmax(shares)]), False
            )
            text = (
                f"It differs by {of.values.max():.3g} nats, and the bound is {bound:.3g} ({where})."
            )
            yield Finding("bad", "engine and policy differ", text, where.first, key)
        elif where is not None:
            text = f"{of.now:.3g} nats now, {of.start:.3g} at the start; at {bound:.3g} the run stops ({where})."
            yield Finding("warning", "engine and policy near their bound", text, where.first, key)
        elif (
            place == 0
            and of.now >= max(3 * of.start, 0.1 * bound)
            and (since := moved(of, of.start, of.now))
        ):
            text = f"{of.now:.3g} nats a token now, {of.start:.3g} at the start; at {bound:.3g} the run stops."
            yield Finding("warning", "engine and policy drift apart", text, since.first, key)


def _memory(run: RecordedRun) -> Iterator[Finding]:
    """What stays in use, not peaks, which follow lengths. It must still grow: a start takes what it needs, once."""
    found = []
    for key in _named(run, r"(memory/(?:sleep/left|\w+/allocated)_gib)"):
        of = curve(run.steps[2:], key)
        if of is None or len(of.values) < 20:
            continue
        late = Curve(of.steps, of.values)
        half, grown = (
            float(np.median(of.values[len(of.values) // 2 :][: of.window])),
            late.now - late.start,
        )
        if (
            grown >= max(_LEAST_GROWTH_GIB, 0.1 * abs(late.start))
            and late.now - half >= 0.25 * grown
        ):
            found.append((grown, key, late))
    if found:
        grown, key, late = max(found, key=lambda entry: entry[0])
        where = moved(late, late.start, late.now)
        text = f"{key}: {late.start:.2f} GiB at the start, {late.now:.2f} now, "
        text += f"{grown / max(1, late.steps[-1] - late.steps[0]) * 1000:.2g} GiB in 1,000 steps."
        first = where.first if where is not None else int(late.steps[0])
        yield Finding("warning", "memory grows", text, first, key)


def _tail(run: RecordedRun) -> Iterator[Finding]:
    key = "rollout/tail_waste_frac"
    waste = curve(run.steps, key)
    if (
        waste is not None
        and (where := stretch(waste.steps, waste.smooth >= _MOST_WASTE, 5)) is not None
    ):
        share = _mean_in(waste, where)
        text = (
            f"{share:.0%} of the ranks' time in rollout is spent waiting for the slowest {where}: "
        )
        text += "rollout.tail_batching, or a bound on lengths."
        yield Finding("warning", "ranks wait for the slowest completion", text, where.first, key)


def _evaluation(run: RecordedRun) -> Iterator[Finding]:
    """Two evaluations in a row well below the best, while the training reward went on rising."""
    reward = curve(run.steps, "reward/mean")
    for name in _named(run, r"eval/(.+)/mean", run.evaluations):
        key = f"eval/{name}/mean"
        held = curve(run.evaluations, key)
        if held is None or reward is None or len(held.values) < 4:
            continue
        top = int(np.argmax(held.values[:-2]))
        best, last = float(held.values[top]), float(held.values[-2:].max())
        size = curve(run.evaluations, f"eval/{name}/num_prompts")
        noise = 2 * (0.25 / size.now) ** 0.5 if size is not None and size.now > 0 else 0.0
        before = reward.values[reward.steps <= max(held.steps[top], reward.steps[0])][
            -reward.window :
        ]
        rose = reward.now - float(np.mean(before))
        if best - last >= max(0.05 * abs(best), noise, 1e-9) and rose >= 0.1 * _spread(run):
            text = f"{best:.3g} after step {held.steps[top]}, {held.values[-1]:.3g} now, while the training reward "
            text += f"rose by {rose:.2g}: it learns what only holds for its own prompts. "
            text += "checkpoint.best_metric keeps a best."
            yield Finding(
                "warning", f"evaluation {name} falls", text, int(held.steps[top + 1]), key
            )


_RULES: tuple[Callable[[RecordedRun], Iterator[Finding]], ...] = (
    _state, _reward, _alike, _unscored, _reward_errors, _episode_errors, _truncation, _lengths, _entropy, _gradients,
    _mismatch, _memory, _evaluation, _tail,
)  # fmt: skip


# Checks


def _proof_checks(run: RecordedRun) -> Iterator[Check]:
    every = run.config.get("proofs.every_steps")
    how = f"at the start and every {every} steps" if every else "at the start"
    for name, key, told, text in (
        ("weight sync", "weight_sync/proof_s", r"does not hold the policy's weights|hold different weights",
         "each engine holds the policy's weights, tensor by tensor"),
        ("update", "proofs/update_check_s", r"plain recomputation|plain one",
         "loss, gradient, AdamW, advantages, masks, data and rewards as a plain recomputation has them"),
    ):  # fmt: skip
        made = [line["step"] for line in run.steps if (line.get(key) or 0.0) > 0]
        broken = run.state == "failed" and re.search(told, run.why) is not None
        value = f"held {len(made)} times, last at step {made[-1]}" if made else ""
        yield Check(
            name,
            "bad" if broken else "ok",
            "broken" if broken else value,
            how,
            run.why if broken else text,
        )


def _logprob_checks(run: RecordedRun) -> Iterator[Check]:
    for name, key, place in (("logprobs, mean", _MEAN, 0), ("logprobs, largest", _LARGEST, 1)):
        of = curve(run.steps, key)
        if of is None or (place and np.isinf(_bounds(run, 1)[place])):
            continue
        shares = [value / _bounds(run, i)[place] for i, value in enumerate(of.values)]
        worst = int(np.argmax(shares))
        level: Level = (
            "bad" if shares[worst] >= 1 else "warning" if shares[worst] >= _NEAR else "ok"
        )
        value = f"{of.values[worst]:.3g} at step {of.steps[worst]}"
        text = "|policy - engine| on the tokens just sampled, nats a token, at each step"
        yield Check(name, level, value, f"{_bounds(run, worst)[place]:.3g}", text)


def _step_checks(run: RecordedRun) -> Iterator[Check]:
    if not run.steps:
        return
    text = "each token that rank 0 counted was trained on once, on whichever rank"
    lost = (
        run.state == "failed"
        and re.search(r"trained on \d+ tokens where rank 0 had decided", run.why) is not None
    )
    value = "broken" if lost else f"held at {len(run.steps)} steps"
    yield Check("partition of tokens", "bad" if lost else "ok", value, "at each step", text)
    skipped = curve(run.steps, "optim/skipped_updates")
    if skipped is not None:
        number = float(skipped.values.sum())
        bound = f"fewer than {run.config.get('training.max_nonfinite_in_a_row', 3)} in a row"
        text = "updates that were not made, since loss or gradient was not finite"
        yield Check(
            "finite updates", "warning" if number else "ok", f"{number:.6g} skipped", bound, text
        )


def _error_checks(run: RecordedRun) -> Iterator[Check]:
    bound = _number(run, "reward_pool.max_error_frac", 0.3)
    pairs = [
        (f"reward {name}", f"reward/{name}/{{}}_frac")
        for name in _named(run, r"reward/(.+)/error_frac")
    ]
    pairs += [("environment", "episode/env_{}_frac")] * bool(
        _named(run, r"(episode/env_error_frac)")
    )
    for name, form in pairs:
        totals = [
            sum(line.get(form.format(kind)) or 0.0 for kind in ("error", "timeout"))
            for line in run.steps
        ]
        worst = int(np.argmax(totals))
        level: Level = (
            "bad"
            if totals[worst] >= _NEAR * bound
            else "warning"
            if totals[worst] >= _FAILED
            else "ok"
        )
        value = f"{totals[worst]:.2%}" + (
            f" at step {run.steps[worst]['step']}" if totals[worst] else ""
        )
        yield Check(
            name,
            level,
            value,
            f"{bound:.0%}",
            "share of a step's completions that failed or timed out",
        )


# Common to several


def _bounds(run: RecordedRun, place: int) -> tuple[float, float]:
    """Of mean and largest mismatch at the run's `place`-th step."""
    dtype = "float32" if run.config.get("model.dtype") == "float32" else "bfloat16"
    first = run.steps[0].get(_MEAN) if place and run.steps else None
    return bounds_of(dtype, _number(run, "proofs.max_mismatch", 0.0) or None, first)


def _is_solved(run: RecordedRun, reward: Curve) -> bool:
    """The reward has risen by half of a step's spread or more, is where it was at its best, and hardly differs any more
    within a step."""
    std = curve(run.steps, "reward/std")
    if std is None or std.now > 0.5 * std.start:
        return False
    return reward.now - reward.start >= 0.5 * std.start > 0 and reward.now >= 0.9 * float(
        reward.smooth.max()
    )


def _spread(run: RecordedRun) -> float:
    """Standard deviation of the rewards of a step."""
    std = curve(run.steps, "reward/std")
    return 0.0 if std is None else float(np.median(std.values))


def _alarmed(run: RecordedRun, name: str) -> Stretch | None:
    """Where the run's own alarm of that name would have been raised, step by step."""
    lines = [
        line for line in run.steps if "optim/updates" in line and "optim/skipped_updates" in line
    ]
    steps = np.array([line["step"] for line in lines], np.int64)
    return stretch(
        steps, np.array([any(name == own for own, _ in alarms(line)) for line in lines], np.bool_)
    )


def _said(run: RecordedRun, name: str) -> str:
    lines = [
        line for line in run.steps if "optim/updates" in line and "optim/skipped_updates" in line
    ]
    return next((text for line in lines[::-1] for own, text in alarms(line) if own == name), "")


def _mean_in(of: Curve, where: Stretch) -> float:
    return float(np.mean(of.values[(of.steps >= where.first) & (of.steps <= where.last)]))


def _named(run: RecordedRun, pattern: str, lines: list[dict[str, Any]] | None = None) -> list[str]:
    """What the group of `pattern` is in the metrics' names, in their order."""
    keys = dict.fromkeys(
        key for line in (run.steps if lines is None else lines)[-200:] for key in line
    )
    return [found[1] for key in keys if (found := re.fullmatch(pattern, key))]


def _number(run: RecordedRun, key: str, default: float) -> float:
    value = run.config.get(key)
    return float(value) if isinstance(value, int | float) and value > 0 else default
