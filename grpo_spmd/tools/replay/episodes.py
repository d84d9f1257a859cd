"""Episodes of a recorded step: made again of their dump, scored by what their environments gave, shown turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.observe.rollout_record import RolloutRecord, read_episode
from grpo_spmd.records import Completion
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.tools.replay.read import RecordedStep, ReplayedRollout, unasked_rewards

_LONGEST = 100  # characters of what is said, shown in a line


def completion_of(record: RolloutRecord) -> Completion:
    """What the run had sampled."""
    said = record.completion_ids, record.rollout_logprobs, record.finish_reason
    return Completion(
        *said, read_episode(vars(record), said[0]) if record.status is not None else None
    )


def weights_of(recorded: RecordedStep) -> dict[str, float]:
    """Of each reward, by the config; of one that is the environment's alone 1, as in a run."""
    own = {reward.metric_name: reward.weight for reward in recorded.config.rewards}
    return own | {name: 1.0 for name in given_rewards(recorded) if name not in own}


def own_rewards(recorded: RecordedStep) -> list[RewardConfig]:
    """Those that can be called again: environments have given theirs, and are not here; nor are servers asked."""
    given, rewards = (
        given_rewards(recorded) + unasked_rewards(recorded),
        recorded.config.pool_rewards,
    )
    return [
        config
        for config, reward in zip(rewards, load_rewards(rewards), strict=True)
        if reward.name not in given
    ]


def given_rewards(recorded: RecordedStep) -> list[str]:
    """The rewards that environments gave, by name; none where there are no episodes."""
    records = [record for group in recorded.rollouts for record in group]
    given = {name for record in records for name in record.environment.get("rewards", ())}
    return [name for name in records[0].rewards if name in given]


def shown_episode(rollout: ReplayedRollout) -> list[str]:
    """What was said, called and answered, and which tokens count."""
    record, lines, sampled = rollout.recorded, list[str](), list[str]()
    logprobs, begin, given = rollout.logprobs or record.rollout_logprobs, 0, 0
    for turn in record.turns:
        if not turn["sampled"]:
            given += len(turn["token_ids"])
            continue
        end = begin + len(turn["token_ids"])
        counts = "in the loss" if rollout.in_loss else "not in the loss"
        reward = f", reward {turn['reward']:.6g}" if turn.get("reward") is not None else ""
        where = (
            f"segment {turn['segment'] + 1}, {given} tokens given, {end - begin} sampled, {counts}"
        )
        sampled.append(
            f"{where}, {turn['finish_reason']}{reward}, logprob {sum(logprobs[begin:end]):.6g}"
        )
        begin, given = end, 0
    number = 0
    for message in record.messages:
        if message.get("role") == "assistant":
            number += 1
            if number <= len(sampled):
                lines.append(f"    turn {number}: {sampled[number - 1]}")
        lines += [f"      {line}" for line in _said(message)]
    lines += [f"    turn {n}: {sampled[n - 1]}" for n in range(number + 1, len(sampled) + 1)]
    if given:
        lines.append(f"    {given} tokens given behind the last turn")
    how = record.environment.get("error") or f"{len(sampled)} turns, {begin} tokens sampled"
    return [f"  {rollout.name:>9} {record.status}: {_short(how)}", *lines]


def _said(message: Mapping[str, Any]) -> list[str]:
    name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
    calls = message.get("tool_calls")
    lines = (
        []
        if calls and not message.get("content")
        else [f"{message.get('role')}{name}: {_short(message.get('content'))}"]
    )
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        lines.append(f"calls {_short(function.get('name'))} {_short(function.get('arguments'))}")
    return lines


def shown_episodes(rollouts: Sequence[ReplayedRollout], top: int) -> list[str]:
    """Of those with most weight in the loss; nothing of single turns."""
    episodes = [rollout for rollout in rollouts if rollout.recorded.status is not None]
    in_order = sorted(
        episodes, key=lambda r: abs(r.replayed.advantage or 0.0) * r.in_loss, reverse=True
    )
    title = [f"episodes, of {len(episodes)} those with the largest |advantage|:"]
    return (
        ["", *title, *(line for r in in_order[:top] for line in shown_episode(r))]
        if episodes
        else []
    )


def _short(value: Any) -> str:
    """In one line of ASCII, whatever a policy or a tool wrote."""
    text = ascii(value) if isinstance(value, str) else ascii(str(value))[1:-1]
    return (
        text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    )
