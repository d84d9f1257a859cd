"""The replay as text: notes, metrics side by side, the rollouts that differ or look suspicious."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_spmd.observe.rollout_record import gold_answer
from grpo_spmd.tools.replay.episodes import shown_episodes
from grpo_spmd.tools.replay.read import RecordedStep, Replay, ReplayedRollout

_SAME = 1e-6  # differences up to this are rounding: float32, summed in another order


def report(recorded: RecordedStep, found: Replay, top: int) -> list[str]:
    rollouts, size = found.rollouts, recorded.config.rollout.group_size
    lines = [
        f"step {recorded.step} of {recorded.run_dir}: {len(rollouts)} rollouts in groups of {size}"
    ]
    lines += [f"  {note}" for note in found.notes]
    if found.metrics:
        lines += ["", f"{'':34}{'recorded':>14}{'replayed':>14}{'difference':>14}"]
        shown = [
            (name, a, b) for name, (a, b) in sorted(found.metrics.items()) if a or b
        ]  # most shares are 0
        lines += [
            f"{name:34}{_number(a):>14}{_number(b):>14}{_difference(a, b):>14}"
            for name, a, b in shown
        ]
    lines += ["", *_differences(rollouts, top)]
    trained = [r for r in rollouts if r.in_loss]
    weights = [
        (abs(r.replayed.advantage or 0.0) * len(r.recorded.rollout_logprobs), r) for r in trained
    ]
    lines += _listed("most weight in the loss, |advantage| x tokens", weights, top)
    finite = [r for r in rollouts if _is_finite(r)]
    whose = "policy" if any(r.logprobs is not None for r in rollouts) else "engine"
    lowest = [(-min(r.logprobs or r.recorded.rollout_logprobs, default=0.0), r) for r in finite]
    lines += _listed(f"least likely token, -logprob of the {whose}", lowest, top)
    pairs = [
        (r, zip(r.logprobs, r.recorded.rollout_logprobs, strict=True)) for r in finite if r.logprobs
    ]
    far = [(max(abs(a - b) for a, b in logprobs), r) for r, logprobs in pairs]
    lines += _listed("furthest from the engine, largest |policy - engine| of a token", far, top)
    broken = [(1.0, r) for r in rollouts if not _is_finite(r)]
    lines += _listed(f"{len(broken)} rollouts with a logprob that is not finite", broken, top)
    return lines + shown_episodes(rollouts, top)


def _differences(rollouts: Sequence[ReplayedRollout], top: int) -> list[str]:
    changed = []
    names = dict.fromkeys(
        name for r in rollouts for name in (*r.recorded.rewards, *r.replayed.rewards)
    )
    counts = {"reward": 0, "statuses": 0, "advantage": 0} | {
        f"reward {n}": 0 for n in names if len(names) > 1
    }
    for rollout in rollouts:
        was, now, moved = rollout.recorded, rollout.replayed, []
        if _differ(was.reward, now.reward):
            counts["reward"] += 1
            moved.append(f"reward {_number(was.reward)} -> {_number(now.reward)}")
        for name in names:
            before, after = was.rewards.get(name), now.rewards.get(name)
            if len(names) > 1 and _differ(before, after):
                counts[f"reward {name}"] += 1
                moved.append(f"{name} {_number(before)} -> {_number(after)}")
            if was.statuses.get(name) != now.statuses.get(name):
                counts["statuses"] += 1
                moved.append(
                    f"{name} {was.statuses.get(name, '-')} -> {now.statuses.get(name, '-')}"
                )
        if _differ(was.advantage, now.advantage):
            counts["advantage"] += 1
            moved.append(f"advantage {_number(was.advantage)} -> {_number(now.advantage)}")
        if moved:
            pairs = (was.advantage, now.advantage), (was.reward, now.reward)
            distances = [abs((before or 0.0) - (after or 0.0)) for before, after in pairs]
            shown = f"{'; '.join(moved)}  {_short(was.completion)}  {_gold(rollout)}".rstrip()
            changed.append((distances, f"  {rollout.name:>9}  {shown}"))
    lines = [
        f"of {len(rollouts)} rollouts differ: "
        + ", ".join(f"{what} {n}" for what, n in counts.items())
    ]
    if changed:
        lines.append("largest differences (position/sample):")
        lines += [text for _, text in sorted(changed, key=lambda pair: pair[0], reverse=True)[:top]]
    return lines


def _listed(title: str, scored: Sequence[tuple[float, ReplayedRollout]], top: int) -> list[str]:
    shown = sorted(
        (pair for pair in scored if pair[0] > 0), key=lambda pair: pair[0], reverse=True
    )[:top]
    return ["", f"{title}:"] * bool(shown) + [
        f"  {r.name:>9} {_number(value):>10}  reward {_number(r.replayed.reward)}  "
        f"advantage {_number(r.replayed.advantage)}  {len(r.recorded.rollout_logprobs)} tokens  "
        f"{r.recorded.finish_reason}  {_short(r.recorded.completion)}  {_gold(r)}".rstrip()
        for value, r in shown
    ]


def _gold(rollout: ReplayedRollout) -> str:
    """Of the dump; where that is of an earlier version, of the data set, if it is there."""
    return gold_answer(rollout.recorded.columns or rollout.replayed.columns)


def _is_finite(rollout: ReplayedRollout) -> bool:
    return all(map(math.isfinite, (*rollout.recorded.rollout_logprobs, *(rollout.logprobs or ()))))


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return not abs(a - b) <= _SAME * max(1.0, abs(a))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _difference(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else "0" if a == b else f"{b - a:+.1e}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:18]} ... {text[-18:]}")
