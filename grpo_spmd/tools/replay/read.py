"""Who gave rewards of a recorded step and is not asked again: servers, unless it is said so, since they cost and may be
gone; reward models, which took the run's devices; and the run's own engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.rows import overview_of, read_rows
from grpo_spmd.observe.launches import other_versions
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import RunFolder, dump_path
from grpo_spmd.rewards.protocol import load_rewards


def unasked_rewards(recorded: RecordedStep) -> list[str]:
    """Names of the rewards that are not to be had again; with --ask-servers those of models and the engine alone."""
    return _servers(recorded) + _models(recorded) + _judges(recorded)


def notes_of(recorded: RecordedStep) -> list[str]:
    """A line for each kind."""
    kinds = {"servers, which were not asked (--ask-servers), gave": _servers(recorded)}
    kinds |= {"reward models, which do not score again, gave": _models(recorded)}
    kinds |= {"judges by the run's engine, which is not here, gave": _judges(recorded)}
    return [
        f"rewards are those that the run recorded: {who} {', '.join(names)}"
        for who, names in kinds.items()
        if names
    ]


def without_rubrics(rewards: Iterable[RewardConfig]) -> tuple[RewardConfig, ...]:
    """As they are where nobody is asked: a judge's rubric may be gone, and what else it is sent does not matter."""
    return tuple(
        dataclasses.replace(reward, name=reward.metric_name, judge=None, args={})
        if reward.url is not None
        else reward
        for reward in rewards
    )


def _servers(recorded: RecordedStep) -> list[str]:
    rewards = () if recorded.asks_servers else recorded.config.rewards
    return [
        reward.metric_name
        for reward in rewards
        if reward.url is not None and not reward.is_engine_judge
    ]


def _models(recorded: RecordedStep) -> list[str]:
    return [reward.metric_name for reward in recorded.config.rewards if reward.model is not None]


def _judges(recorded: RecordedStep) -> list[str]:
    return [reward.metric_name for reward in recorded.config.rewards if reward.is_engine_judge]


# What a run left behind of a step, read and checked. Imports no torch.


@dataclass(frozen=True)
class RecordedStep:
    """What a run left behind of one step, under the config that it is to be replayed with."""

    run_dir: Path
    step: int
    config: Config
    rollouts: list[
        list[RolloutRecord]
    ]  # lines of the dump, group by group, in the order of the prompt stream
    metrics: dict[str, float | None]  # none of them where the run ended within the step
    columns: list[dict[str, Any]] | None  # of each group's data row; None: the data is gone
    all_columns: set[str]  # that a reward of the run was given
    epoch: float  # at its beginning; of all rows, also where the run dropped some as too long
    notes: list[str]
    asks_servers: bool = False  # that give rewards


@dataclass(frozen=True)
class ReplayedRollout:
    recorded: RolloutRecord
    replayed: RolloutRecord
    in_loss: bool
    logprobs: list[float] | None  # of the policy, where it was there and trained on the rollout

    @property
    def name(self) -> str:
        return f"{self.recorded.position}/{self.recorded.sample}"


@dataclass(frozen=True)
class Replay:
    notes: list[str]
    metrics: dict[str, tuple[float | None, float | None]]  # recorded, replayed
    rollouts: list[ReplayedRollout]


def read_step(
    run_dir: Path, step: int, overrides: Sequence[str] = (), *, asks_servers: bool = False
) -> RecordedStep:
    """Read and check what the run left; a ConfigError says what is missing, or which line of the dump is broken."""
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR: {run_dir} holds no config.yaml, so it is no run folder")
    config = load_config(run_dir / "config.yaml", overrides)
    notes = [f"override: {override}" for override in overrides]
    free_form = {
        f"rewards.{index}.args": reward.args for index, reward in enumerate(config.rewards)
    }
    free_form["rollout.engine"] = config.rollout.engine
    redacted = [
        f"{key}.{name}"
        for key, args in free_form.items()
        for name in args
        if args[name] == "<redacted>"
    ]
    notes += [
        f"{key} is redacted in config.yaml; give it as an override, if a reward needs it"
        for key in redacted
    ]
    # Of the run that trained on several ranks and a GPU; none of it changes what is computed.
    model = dataclasses.replace(
        config.model, num_replicas=1, offload=False, compile=False, attention="auto"
    )
    rollout = dataclasses.replace(config.rollout, tensor_parallel_size=1)
    config = dataclasses.replace(config, model=model, rollout=rollout)
    if model.dtype == "bfloat16":
        what = "the run computed in bfloat16, whose rounding is another on another machine"
        notes.append(f"{what}: a few percent in loss and gradient mean nothing")
    if versions := other_versions(run_dir, step):
        notes.append(f"other versions than the run's, which may round otherwise: {versions}")
    rollouts = _read_dump(run_dir, step, config.rollout.group_size)
    lines = [line.metrics for line in read_metrics(run_dir / "metrics.jsonl")]
    metrics = next(
        (line for line in lines[::-1] if line["step"] == step and not is_evaluation(line)), {}
    )
    if not metrics:
        what = f"metrics.jsonl has no line of step {step}: the run ended within it"
        notes.append(f"{what}, and only the rollouts can be compared")
    if not asks_servers:
        config = dataclasses.replace(config, rewards=without_rubrics(config.rewards))
    load_rewards(config.rewards)  # refuses here what the pool would refuse with a traceback
    if asks_servers:
        from grpo_spmd.rewards.remote.servers import check_calls

        check_calls(config.rewards, 1)
    columns: tuple[list[dict[str, Any]] | None, set[str], float] = None, set(), 0.0
    try:
        columns = _columns_of(rollouts, config)
    except ConfigError as error:
        notes.append(
            f"rewards are those that the run recorded, since the data set cannot be had as it was: {error}"
        )
    return RecordedStep(run_dir, step, config, rollouts, metrics, *columns, notes, asks_servers)


def _read_dump(run_dir: Path, step: int, group_size: int) -> list[list[RolloutRecord]]:
    path = dump_path(run_dir, step)
    try:
        records = RunFolder(run_dir).complete_rollouts(step)
    except ConfigError as error:
        raise ConfigError(f"--step: {error}") from None
    groups: dict[int, list[RolloutRecord]] = {}
    for record in records:
        groups.setdefault(record.position, []).append(record)
    for position, group in groups.items():
        samples = [record.sample for record in group]
        if samples != list(range(group_size)):
            what = f"{path}: the group at position {position} has the samples {samples}, and should have 0 to"
            raise ConfigError(f"{what} {group_size - 1} (rollout.group_size={group_size})")
    if not groups:
        raise ConfigError(f"{path}: no rollouts")
    return list(groups.values())


def _columns_of(
    rollouts: Sequence[Sequence[RolloutRecord]], config: Config
) -> tuple[list[dict[str, Any]], set[str], float]:
    """The columns of each group's data row, all that a reward of the run was given, and the epoch."""
    rows, columns = read_rows(config.data), list[dict[str, Any]]()
    for group in rollouts:
        number = group[0].row
        if number >= len(rows):
            raise ConfigError(
                f"data.train: {config.data.train} has {len(rows)} rows, and the dump names row {number}"
            )
        row = rows[number]
        if json.loads(json.dumps(row.prompt)) != group[0].prompt:
            raise ConfigError(
                f"data.train: the prompt at {row.where} is no longer the one that the run sampled from"
            )
        columns.append(row.columns)
    known = {*overview_of(rows).columns}
    for name in config.data.eval_sets if config.eval.every_steps else ():
        with suppress(ConfigError):  # its columns are None in training rows, and few rewards look
            known |= {*overview_of(read_rows(config.data, name)).columns}
    return columns, known, rollouts[0][0].position / len(rows)


def is_there(path: str) -> bool:
    """Whether a model may be had: a hub id is organisation/name, any other path without a folder is that of another
    machine."""
    folder = Path(path)
    is_hub_id = not folder.is_absolute() and len(folder.parts) == 2 and not folder.parent.exists()
    return folder.is_dir() or is_hub_id
