"""Everything that can be refused before torch is imported: a mistake costs a second and one line, not a GPU minute."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_spmd.checkpoint.manifest import (
    CheckpointError,
    NewerFormatError,
    read_manifest,
    read_trainer,
)
from grpo_spmd.checkpoint.run_dir import (
    check_same_run,
    is_inside,
    is_same_launch,
    list_checkpoints,
    refuse_in_use,
)
from grpo_spmd.checks.data import check_prompts_early, inputs_of
from grpo_spmd.checks.engine_keys import check_engine_keys, check_idle_keys
from grpo_spmd.checks.memory import check_engine_room
from grpo_spmd.checks.model_folder import check_disk, check_model, check_packages, num_embeddings
from grpo_spmd.config.coerce import foreign_parameter_hint
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.config.load import looked_for
from grpo_spmd.config.schema import Config
from grpo_spmd.data.rows import (
    PromptRow,
    check_enough_rows,
    check_shown,
    check_source,
    key_and_source,
    once,
    overview_of,
    read_rows,
)
from grpo_spmd.rewards.named import check_gold
from grpo_spmd.rewards.pool.processes import allow_workers
from grpo_spmd.rewards.protocol import Reward, load_rewards
from grpo_spmd.rewards.verifiers import DEFAULT_TIME_S


@dataclass(frozen=True)
class Inputs:
    rows: Sequence[PromptRow]
    eval_rows: dict[str, Sequence[PromptRow]]  # by the set's name; none where eval.every_steps is 0
    rewards: Sequence[Reward] = ()  # as the config lists them
    began: float = field(default_factory=time.monotonic)  # when they had been read: the run begins

    @property
    def columns(self) -> set[str]:
        """Those of the training and the held-out sets: a row that lacks one passes None for it."""
        return {
            name
            for rows in (self.rows, *self.eval_rows.values())
            for name in overview_of(rows).columns
        }

    @property
    def num_rows(self) -> int:
        return len(self.rows) + sum(len(rows) for rows in self.eval_rows.values())


def check_inputs(
    config: Config, *, num_ranks: int, to_run: bool = True, sources: Mapping[str, str] | None = None
) -> Inputs:
    """Read data and rewards, and check them, the model, the run folder and the number of ranks against the config.
    `to_run` False leaves the run folder out: somebody only asks about a config, perhaps that of a run under way.
    `sources`: where each value was set. Raises ConfigError, which names the key or file:line."""
    check_idle_keys(config, sources)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE") if to_run else None
    check_world_size(config, num_ranks, int(local_ranks) if local_ranks else None)
    if to_run:
        _check_run_dir(config)
    folder = check_model(config, to_run=to_run)
    check_engine_keys(config.rollout.engine)
    if config.teacher.is_on:
        from grpo_spmd.checks.signals import check_teachers

        check_teachers(config, num_ranks=num_ranks, to_run=to_run)
    if config.critic.path is not None:
        from grpo_spmd.checks.signals import check_critic_model

        check_critic_model(config, to_run=to_run)
    rewards = load_rewards(config.rewards)
    if config.environment.is_on:
        from grpo_spmd.checks.environments import check_environment_early

        check_environment_early(config.environment)
    allow_workers(config.reward_pool.num_workers, "reward_pool.num_workers")
    _check_code_time(config)
    rows = _read_and_check(config, rewards, folder)
    eval_sets = config.data.eval_sets if config.eval.every_steps else ()
    inputs = Inputs(
        rows, {name: _read_and_check(config, rewards, folder, name) for name in eval_sets}, rewards
    )
    if any(reward.is_measured for reward in config.rewards):
        from grpo_spmd.rewards.remote.servers import check_calls, check_pace, check_sent

        check_calls(config.rewards, num_ranks)
        for rows in (inputs.rows, *inputs.eval_rows.values()):
            check_sent(config.rewards, rows)
        of_step = config.rollout.num_prompts_per_step, config.rollout.group_size
        num_evaluated = config.eval.num_samples * sum(map(len, inputs.eval_rows.values()))
        check_pace(
            config.rewards, num_ranks, config.watchdog, of_step=of_step, num_evaluated=num_evaluated
        )
    if any(reward.model is not None for reward in config.rewards):
        from grpo_spmd.checks.reward_models import check_reward_models

        check_reward_models(config, inputs.rows, inputs.eval_rows, to_run=to_run)
    check_engine_room(config, folder, [inputs.rows, *inputs.eval_rows.values()])
    odd = [
        line
        for rows in (inputs.rows, *inputs.eval_rows.values())
        for line in _gold(config, rows, inputs)
    ]
    if to_run:  # last: what is wrong with the config itself is the same on every machine
        check_disk(config)
        check_packages(config)
    for line in odd if os.environ.get("RANK", "0") == "0" else ():
        say(f"warning: {line}")
    return inputs


def _check_code_time(config: Config) -> None:
    for index, reward in enumerate(config.rewards):
        time_s, limit_s = reward.args.get("time_s", DEFAULT_TIME_S), config.reward_pool.timeout_s
        if reward.name == "code" and reward.is_shipped and time_s > limit_s - 1:
            bound = f"at least a second under reward_pool.timeout_s ({limit_s:g})"
            why = "or an endless loop is killed as unknown before it is found wrong"
            raise ConfigError(f"rewards.{index}.args.time_s ({time_s:g}) must be {bound}, {why}")


def _read_and_check(
    config: Config, rewards: Sequence[Reward], folder: Path | None, eval_set: str | None = None
) -> Sequence[PromptRow]:
    key, source = key_and_source(config.data, eval_set)
    check_source(key, source)
    rows = read_rows(config.data, eval_set)
    check_enough_rows(
        len(rows), config.data, config.rollout.num_prompts_per_step, eval_set=eval_set
    )
    if eval_set is None and config.rollout.tail_batching > 1:
        from grpo_spmd.data.prompts import check_enough_to_launch

        check_enough_to_launch(len(rows), config.rollout)
    _check_reward_columns(rewards, rows, source)

    asked = None if folder is None else [inputs_of(folder, config.data), num_embeddings(folder)]

    def look() -> None:
        check_shown(rows, config.data)
        if folder is not None:
            check_prompts_early(rows, config.data, folder, num_embeddings(folder))

    once("checked", rows, asked, look)
    return rows


def _gold(config: Config, rows: Sequence[PromptRow], inputs: Inputs) -> list[str]:
    """`check_gold`, of rows that have not been looked at yet."""
    is_held_out = rows is not inputs.rows
    where = rows[0].where if rows else ""  # what it says names the file as the config does
    asked = [
        where,
        is_held_out,
        [[reward.name, reward.function, repr(reward.args)] for reward in config.rewards],
    ]
    return list(
        once(
            "gold",
            rows,
            asked,
            lambda: [*check_gold(config.rewards, rows, is_held_out=is_held_out)],
        )
    )


def _check_reward_columns(
    rewards: Sequence[Reward], rows: Sequence[PromptRow], source: str
) -> None:
    columns = {*overview_of(rows).columns}
    for index, reward in enumerate(rewards):
        for name in reward.needs:
            if name not in columns:
                what = f"{reward.name!r} needs the column {name!r}, which {source} does not have"
                there = ", ".join(sorted(columns)) or "none"
                raise ConfigError(
                    f"rewards.{index}: {what}; besides the prompt it has {there}{foreign_parameter_hint(name)}"
                )


def check_world_size(config: Config, world_size: int, local_world_size: int | None) -> None:
    """`local_world_size`: ranks of each node, where they are known."""
    engine = config.rollout.tensor_parallel_size
    of_node = local_world_size or engine
    for key, size, whole, what in (
        ("rollout.tensor_parallel_size", engine, world_size, "the number of ranks"),
        (
            "rollout.tensor_parallel_size",
            engine,
            of_node,
            "the ranks of a node, since an engine stays on one",
        ),
        ("model.num_replicas", config.model.num_replicas, world_size, "the number of ranks"),
    ):
        if whole % size:
            would = ", ".join(
                str(divisor) for divisor in range(1, whole + 1) if whole % divisor == 0
            )
            raise ConfigError(f"{key} ({size}) must divide {what} ({whole}): {would} would")


def _check_run_dir(config: Config) -> None:
    run_dir, resume = Path(config.run_dir), config.checkpoint.resume
    existing = next((path for path in (run_dir, *run_dir.parents) if path.exists()), Path())
    if not existing.is_dir():
        raise ConfigError(f"run_dir: {existing} is not a folder")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"run_dir: no permission to write in {existing}")
    if resume == "auto" or is_same_launch(run_dir):
        _check_newest(list_checkpoints(run_dir)[-1:], config)
        return
    if resume != "never":
        folder = Path(resume)
        if not folder.is_dir():
            rule = "it is auto, never, or the folder of a checkpoint"
            raise ConfigError(
                f"checkpoint.resume: there is no folder {folder}{looked_for(folder)}; {rule}"
            )
        if not (folder / "manifest.json").exists():
            inside = list_checkpoints(folder) or list_checkpoints(folder.parent)
            hint = (
                f"; give one of its run's checkpoints, the newest is {inside[-1]}" if inside else ""
            )
            raise ConfigError(
                f"checkpoint.resume: {folder} is no checkpoint, it has no manifest.json{hint}"
            )
        try:
            read_manifest(folder)
        except CheckpointError as error:
            raise ConfigError(
                f"checkpoint.resume: {error}; restore it, or take another one"
            ) from None
        _check_newest([folder], config)
        if is_inside(folder, run_dir):
            return
    refuse_in_use(run_dir)


def _check_newest(checkpoints: list[Path], config: Config) -> None:
    """What can be said before torch is there. A damaged one is passed over later, when all ranks have seen it."""
    for checkpoint in checkpoints:
        try:
            check_same_run(checkpoint, read_trainer(checkpoint), flatten_config(config))
        except NewerFormatError as error:
            raise ConfigError(f"checkpoint.resume: {error}") from None
        except (CheckpointError, KeyError, TypeError):
            continue
