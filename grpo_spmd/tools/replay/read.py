"""Reads what a run recorded of one step, for a replay: config, rollouts, metrics and data rows.

It also finds the rewards that are not computed again (of servers, reward models, environments), and
describes episodes turn by turn for the report. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.rows import PromptRow, overview_of, read_rows
from grpo_spmd.observe.launches import other_versions
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    read_episode,
)
from grpo_spmd.observe.run_folder import RunFolder, dump_path
from grpo_spmd.records import Completion
from grpo_spmd.rewards.protocol import load_rewards
from grpo_spmd.rewards.servers import check_calls

# Characters of a message in a line of the report.
_MAX_CHARS = 160

# Overrides for one process on a CPU, since the run may have had several ranks and GPUs. None of
# these keys changes what is computed.
_ONE_PROCESS = (
    "model.num_replicas=1",
    "model.sequence_parallel_size=1",
    "model.offload=false",
    "model.compile=false",
    "model.attention=auto",
    "rollout.tensor_parallel_size=1",
)


@dataclass(frozen=True)
class RecordedStep:
    """What a run recorded of one step, and the config of the replay."""

    run_dir: Path
    step: int
    config: Config
    rollouts: list[list[RolloutRecord]]
    """The rollouts of each group (all completions of one prompt), in the order of the prompts."""
    metrics: dict[str, float | None]
    """The step's line of metrics.jsonl; {} if the run ended during the step."""
    columns: list[dict[str, Any]] | None
    """For each group, the columns of its data row; None if the data cannot be read as it was."""
    all_columns: set[str]
    """The names of all columns that rewards of the run were given."""
    epoch: float
    """The passes over the data before the step. Rows that the run dropped as too long count too."""
    notes: list[str]
    """Remarks for the report."""
    asks_servers: bool = False
    """True if servers that give rewards are asked again (--ask-servers)."""


@dataclass(frozen=True)
class ReplayedRollout:
    """A rollout as the run recorded it, and the same rollout with the results of the replay."""

    recorded: RolloutRecord
    replayed: RolloutRecord
    in_loss: bool
    logprobs: list[float] | None
    """The policy's logprobs; None without a policy, or if the rollout is not in the loss."""

    @property
    def name(self) -> str:
        """The rollout's name in the report: POSITION/SAMPLE.

        These are the prompt's index in the run's stream of prompts and the rollout's index in its
        group."""
        return f"{self.recorded.position}/{self.recorded.sample}"


@dataclass(frozen=True)
class Replay:
    """The results of a replay."""

    notes: list[str]
    metrics: dict[str, tuple[float | None, float | None]]
    """The pair (recorded value, replayed value) of each metric."""
    rollouts: list[ReplayedRollout]


def read_step(
    run_dir: Path, step: int, overrides: Sequence[str] = (), *, asks_servers: bool = False
) -> RecordedStep:
    """Returns what the run folder has of a step.

    `overrides` replace values of the run's config. With `asks_servers`, servers that give rewards
    are called again. Raises ConfigError if something is missing, or if a line of the dump is
    broken."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR: {run_dir} holds no config.yaml, so it is no run folder")
    config = load_config(run_dir / "config.yaml", [*overrides, *_ONE_PROCESS])
    notes = [f"override: {override}" for override in overrides]
    notes += _redaction_notes(config)
    if config.model.dtype == "bfloat16":
        notes.append(
            "the run computed in bfloat16, which is rounded differently on another machine: "
            "a few percent in loss and gradient mean nothing"
        )
    versions = other_versions(run_dir, step)
    if versions:
        notes.append(f"versions differ from the run's, and may round differently: {versions}")
    rollouts = _read_groups(run_dir, step, config.rollout.group_size)
    metrics: dict[str, float | None] = {}
    for line in read_metrics(run_dir / "metrics.jsonl"):
        if line.values["step"] == step and not is_evaluation(line.values):
            # If the step is in the file twice, the last line counts.
            metrics = line.values
    if not metrics:
        notes.append(
            f"metrics.jsonl has no line of step {step}: the run ended during it, "
            "and only the rollouts can be compared"
        )
    if not asks_servers:
        config = dataclasses.replace(config, rewards=_without_rubrics(config.rewards))
    # Loaded here to raise ConfigError; in the pool the same mistake would end in a traceback.
    load_rewards(config.rewards)
    if asks_servers:
        check_calls(config.rewards, 1)
    # Without the data set, recorded rewards are taken, so that columns and epoch are not needed.
    columns: list[dict[str, Any]] | None = None
    all_columns = set[str]()
    epoch = 0.0
    try:
        rows = read_rows(config.data)
        columns = _group_columns(rollouts, rows, config)
        all_columns = _all_columns(rows, config)
        epoch = rollouts[0][0].position / len(rows)
    except ConfigError as error:
        notes.append(
            "rewards are those that the run recorded, since the data set cannot be read as it was: "
            f"{error}"
        )
    return RecordedStep(
        run_dir=run_dir,
        step=step,
        config=config,
        rollouts=rollouts,
        metrics=metrics,
        columns=columns,
        all_columns=all_columns,
        epoch=epoch,
        notes=notes,
        asks_servers=asks_servers,
    )


def _redaction_notes(config: Config) -> list[str]:
    """Returns a note for each argument of a reward or of the engine that is a secret.

    The run wrote it as "<redacted>" into its config.yaml, so the replay lacks it."""
    arguments = {
        "rewards": [{"args": reward.args} for reward in config.rewards],
        "rollout.engine": config.rollout.engine,
    }
    return [
        f"{key} is redacted in config.yaml; give it as an override, if a reward needs it"
        for key, value in flat(arguments).items()
        if value == "<redacted>"
    ]


def _without_rubrics(rewards: Iterable[RewardConfig]) -> tuple[RewardConfig, ...]:
    """Returns the rewards' configs, in which rewards of servers have no rubric and no arguments.

    A replay that does not ask servers needs neither, and the file of a rubric may be gone.
    """
    return tuple(
        dataclasses.replace(reward, name=reward.metric_name, judge=None, args={})
        if reward.url is not None
        else reward
        for reward in rewards
    )


def _read_groups(run_dir: Path, step: int, group_size: int) -> list[list[RolloutRecord]]:
    """Returns the step's rollouts by group. Raises ConfigError if a group is not complete."""
    records = RunFolder(run_dir).complete_rollouts(step)
    groups = [list(group) for _, group in groupby(records, key=attrgetter("position"))]
    for group in groups:
        samples = [record.sample for record in group]
        if samples != list(range(group_size)):
            raise ConfigError(
                f"{dump_path(run_dir, step)}: the group at position {group[0].position} has the "
                f"samples {samples}, and should have 0 to {group_size - 1} "
                f"(rollout.group_size={group_size})"
            )
    if not groups:
        raise ConfigError(f"{dump_path(run_dir, step)}: no rollouts")
    return groups


def _group_columns(
    rollouts: Sequence[Sequence[RolloutRecord]], rows: Sequence[PromptRow], config: Config
) -> list[dict[str, Any]]:
    """Returns for each group the columns of its row in the data set, which rewards are given.

    `rows` is the data set as it is now. Raises ConfigError if a group's row is no longer as the run
    had it.
    """
    columns = []
    for group in rollouts:
        number = group[0].row
        if number >= len(rows):
            raise ConfigError(
                f"data.train: {config.data.train} has {len(rows)} rows, "
                f"and the dump names row {number}"
            )
        row = rows[number]
        # The dump's prompt was written as JSON and read back, which makes lists of tuples, so the
        # row's prompt is compared in the same form.
        is_same = json.loads(json.dumps(row.prompt)) == group[0].prompt
        # Only an episode (a rollout of several turns) has a status. Its environment or agent may
        # have added to the prompt, so the columns are compared instead.
        if group[0].status is not None and group[0].columns:
            is_same = json.loads(json.dumps(bounded_values(row.columns))) == group[0].columns
        if not is_same:
            raise ConfigError(
                f"data.train: the prompt at {row.where} is no longer the one "
                "that the run sampled from"
            )
        columns.append(row.columns)
    return columns


def _all_columns(rows: Sequence[PromptRow], config: Config) -> set[str]:
    """Returns the names of all columns that rewards of the run were given.

    They are those of the training set and, if the run evaluates, of its evaluation sets."""
    columns = {*overview_of(rows).columns}
    if config.eval.every_steps:
        for name in config.data.eval_sets:
            # If the set is gone, its columns are left out. In the run they were None for training
            # rows, so few rewards depend on them.
            with suppress(ConfigError):
                columns |= {*overview_of(read_rows(config.data, name)).columns}
    return columns


def unasked_rewards(recorded: RecordedStep) -> dict[str, list[str]]:
    """Returns the names of the rewards that a replay does not compute again, by the reason.

    It uses the values that the run recorded of them. A reason is the beginning of a note in the
    report. There are no environments and no engine in a replay. Servers cost money and may be gone,
    so they are asked only with --ask-servers. Reward models need the run's devices."""
    rewards = recorded.config.rewards
    names = {
        "environments, which are not here, gave": environment_rewards(recorded),
        "servers, which were not asked (--ask-servers), gave": [
            reward.metric_name
            for reward in rewards
            if reward.url is not None and not reward.is_engine_judge and not recorded.asks_servers
        ],
        "reward models, which do not score again, gave": [
            reward.metric_name for reward in rewards if reward.model is not None
        ],
        "judges by the run's engine, which is not here, gave": [
            reward.metric_name for reward in rewards if reward.is_engine_judge
        ],
    }
    return {reason: group for reason, group in names.items() if group}


def has_model(path: str) -> bool:
    """Returns True if `path` is a folder on this machine or a hub id (organisation/name)."""
    folder = Path(path)
    is_hub_id = not folder.is_absolute() and len(folder.parts) == 2 and not folder.parent.exists()
    return folder.is_dir() or is_hub_id


def make_completion(record: RolloutRecord) -> Completion:
    """Returns the recorded completion in the form in which the engine gave it to the run."""
    episode = None
    # Only an episode has a status.
    if record.status is not None:
        episode = read_episode(vars(record), record.completion_ids)
    return Completion(
        token_ids=record.completion_ids,
        logprobs=record.rollout_logprobs,
        finish_reason=record.finish_reason,
        episode=episode,
    )


def reward_weights(recorded: RecordedStep) -> dict[str, float]:
    """Returns the weight of each reward by its name.

    As in a run, a reward that only the environment gives has the weight 1.
    """
    weights = {reward.metric_name: reward.weight for reward in recorded.config.rewards}
    for name in environment_rewards(recorded):
        weights.setdefault(name, 1.0)
    return weights


def callable_rewards(recorded: RecordedStep) -> list[RewardConfig]:
    """Returns the configs of the rewards that a replay computes again, by calling their functions.

    A replay takes the recorded values of all others, which `unasked_rewards` lists with reasons.
    """
    # `pool_rewards` are the rewards that worker processes compute. Their names are known only after
    # they have been loaded.
    unavailable = set[str]().union(*unasked_rewards(recorded).values())
    configs = recorded.config.pool_rewards
    return [
        config
        for config, reward in zip(configs, load_rewards(configs), strict=True)
        if reward.name not in unavailable
    ]


def environment_rewards(recorded: RecordedStep) -> list[str]:
    """Returns the names of the rewards that environments gave in the run; [] without episodes.

    They are in the order in which the dump has them."""
    records = [record for group in recorded.rollouts for record in group]
    names = {name for record in records for name in record.environment.get("rewards", ())}
    return [name for name in records[0].rewards if name in names]


def describe_episodes(rollouts: Sequence[ReplayedRollout], top: int) -> list[str]:
    """Returns lines about the `top` episodes with the largest |advantage|; [] if there are none.

    An episode is a rollout of several turns. Those that are not in the loss come last."""
    episodes = [rollout for rollout in rollouts if rollout.recorded.status is not None]
    if not episodes:
        return []
    episodes.sort(key=lambda r: abs(r.replayed.advantage or 0.0) * r.in_loss, reverse=True)
    lines = ["", f"episodes, of {len(episodes)} those with the largest |advantage|:"]
    for rollout in episodes[:top]:
        lines += _describe_episode(rollout)
    return lines


def _describe_episode(rollout: ReplayedRollout) -> list[str]:
    """Returns lines about an episode: its turns with their tokens, then its messages.

    Turns with one common context are a segment. A turn is either sampled by the policy, or given by
    the prompt or the environment."""
    record = rollout.recorded
    logprobs = rollout.logprobs or record.rollout_logprobs
    num_turns = sum(turn["sampled"] for turn in record.turns)
    summary = f"{num_turns} turns, {len(logprobs)} tokens sampled"
    error = record.environment.get("error")
    lines = [f"  {rollout.name:>9} {record.status}: {_one_line(error or summary)}"]
    # Index of the turn's first logprob: given tokens have none.
    begin = 0
    for turn in record.turns:
        num_tokens = len(turn["token_ids"])
        facts = [f"    segment {turn['segment'] + 1}: {num_tokens} tokens"]
        if turn["sampled"]:
            logprob = sum(logprobs[begin : begin + num_tokens])
            begin += num_tokens
            facts += ["sampled", "in the loss" if rollout.in_loss else "not in the loss"]
            facts += [
                turn["finish_reason"],
                f"reward {turn.get('reward')}",
                f"logprob {logprob:.6g}",
            ]
        else:
            facts.append("given")
        lines.append(", ".join(facts))
    for message in record.messages:
        lines += [
            f"      {message.get('role')} {name}: {_one_line(value)}"
            for name, value in message.items()
            if name != "role" and value
        ]
    return lines


def _one_line(value: Any) -> str:
    """Returns a text of a policy or a tool as one line of ASCII, shortened in its middle."""
    return cut_middle(ascii(value), _MAX_CHARS)
