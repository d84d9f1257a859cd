"""Episodes of a recorded step: made from the dump, scored as their environments did, shown turn by
turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.observe.rollout_record import RolloutRecord, read_episode
from grpo_spmd.records import Completion
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.tools.replay.read import RecordedStep, ReplayedRollout, unasked_rewards

_MAX_CHARS = 100  # of a message in a line


def make_completion(record: RolloutRecord) -> Completion:
    """Returns the completion that the run had sampled."""
    episode = None
    if record.status is not None:
        episode = read_episode(vars(record), record.completion_ids)
    return Completion(
        token_ids=record.completion_ids,
        logprobs=record.rollout_logprobs,
        finish_reason=record.finish_reason,
        episode=episode,
    )


def reward_weights(recorded: RecordedStep) -> dict[str, float]:
    """Returns the weight of each reward; 1 for a reward that only the environment gives, as in a
    run."""
    weights = {reward.metric_name: reward.weight for reward in recorded.config.rewards}
    for name in environment_rewards(recorded):
        weights.setdefault(name, 1.0)
    return weights


def callable_rewards(recorded: RecordedStep) -> list[RewardConfig]:
    """Returns the rewards that can be called again: not those of environments, servers and
    models."""
    unavailable = set(environment_rewards(recorded)).union(*unasked_rewards(recorded).values())
    configs = recorded.config.pool_rewards
    return [
        config
        for config, reward in zip(configs, load_rewards(configs), strict=True)
        if reward.name not in unavailable
    ]


def environment_rewards(recorded: RecordedStep) -> list[str]:
    """Returns the names of the rewards that environments gave; [] without episodes."""
    records = [record for group in recorded.rollouts for record in group]
    names = {name for record in records for name in record.environment.get("rewards", ())}
    return [name for name in records[0].rewards if name in names]


def describe_episodes(rollouts: Sequence[ReplayedRollout], top: int) -> list[str]:
    """Returns lines about the `top` episodes with the largest |advantage|; [] if there are none."""
    episodes = [rollout for rollout in rollouts if rollout.recorded.status is not None]
    if not episodes:
        return []
    episodes.sort(key=lambda r: abs(r.replayed.advantage or 0.0) * r.in_loss, reverse=True)
    lines = ["", f"episodes, of {len(episodes)} those with the largest |advantage|:"]
    for rollout in episodes[:top]:
        lines += _describe_episode(rollout)
    return lines


def _describe_episode(rollout: ReplayedRollout) -> list[str]:
    """Returns what was said, called and answered, and which tokens count."""
    record = rollout.recorded
    logprobs = rollout.logprobs or record.rollout_logprobs
    turns: list[str] = []  # one text per sampled turn
    num_sampled = 0
    num_given = 0  # tokens since the last sampled turn
    for turn in record.turns:
        if not turn["sampled"]:
            num_given += len(turn["token_ids"])
            continue
        end = num_sampled + len(turn["token_ids"])
        counts = "in the loss" if rollout.in_loss else "not in the loss"
        reward = f", reward {turn['reward']:.6g}" if turn.get("reward") is not None else ""
        turns.append(
            f"segment {turn['segment'] + 1}, {num_given} tokens given, "
            f"{end - num_sampled} sampled, "
            f"{counts}, {turn['finish_reason']}{reward}, "
            f"logprob {sum(logprobs[num_sampled:end]):.6g}"
        )
        num_sampled = end
        num_given = 0
    summary = record.environment.get("error") or f"{len(turns)} turns, {num_sampled} tokens sampled"
    lines = [f"  {rollout.name:>9} {record.status}: {_shorten(summary)}"]
    headings = [f"    turn {number}: {text}" for number, text in enumerate(turns, start=1)]
    for message in record.messages:
        # each sampled turn became an assistant's message
        if message.get("role") == "assistant" and headings:
            lines.append(headings.pop(0))
        lines += [f"      {line}" for line in _describe_message(message)]
    lines += headings
    if num_given:
        lines.append(f"    {num_given} tokens given behind the last turn")
    return lines


def _describe_message(message: Mapping[str, Any]) -> list[str]:
    calls = message.get("tool_calls")
    lines = []
    if message.get("content") or not calls:
        name = f" {message['name']}" if isinstance(message.get("name"), str) else ""
        lines.append(f"{message.get('role')}{name}: {_shorten(message.get('content'))}")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            function = {}
        arguments = _shorten(function.get("arguments"))
        lines.append(f"calls {_shorten(function.get('name'))} {arguments}")
    return lines


def _shorten(value: Any) -> str:
    """Returns one line of ASCII, whatever a policy or a tool wrote."""
    text = ascii(value) if isinstance(value, str) else ascii(str(value))[1:-1]
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[: _MAX_CHARS // 2]} ... {text[-_MAX_CHARS // 2 :]}"
