"""Makes all checks of a run's inputs that are possible before torch is imported.

So a mistake is reported after a second, in one line, without a minute of GPU time. `check_inputs`
makes all checks that the config needs: cheap checks of the config first, and what differs between
machines last.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_spmd.checks.data import check_columns, check_prompts_early, prompt_check_inputs
from grpo_spmd.checks.machine import (
    check_disk,
    check_engine_keys,
    check_packages,
    check_run_dir,
    check_world_size,
)
from grpo_spmd.checks.memory import check_idle_keys
from grpo_spmd.checks.model_folder import check_model, num_embeddings
from grpo_spmd.checks.signals import (
    check_critic_model,
    check_engine_judges,
    check_reward_models,
    check_teachers,
)
from grpo_spmd.config.errors import ConfigError, say
from grpo_spmd.config.schema import Config
from grpo_spmd.data.prompts import check_enough_to_launch
from grpo_spmd.data.rows import (
    PromptRow,
    cached_result,
    check_enough_rows,
    check_prompts,
    check_source,
    key_and_source,
    overview_of,
    read_rows,
)
from grpo_spmd.rewards.named import check_gold
from grpo_spmd.rewards.pool.processes import allow_workers
from grpo_spmd.rewards.protocol import Reward, load_rewards
from grpo_spmd.rewards.servers import check_calls, check_pace, check_sent
from grpo_spmd.rewards.trl import CALL_COLUMNS, EXTRA_ARGUMENTS
from grpo_spmd.rewards.verifiers import DEFAULT_TIME_S


@dataclass(frozen=True)
class Inputs:
    """The rows of the data sets, and the reward functions, after reading and checking them."""

    rows: Sequence[PromptRow]
    eval_rows: dict[str, Sequence[PromptRow]]  # by the set's name; empty if eval.every_steps is 0
    rewards: Sequence[Reward] = ()  # in the order of the config
    notes: list[str] = field(default_factory=list)  # for the run's log
    start_time: float = field(default_factory=time.monotonic)  # of the run, once all is read

    @property
    def row_sets(self) -> list[Sequence[PromptRow]]:
        """The rows of data.train, and then those of each evaluation set."""
        return [self.rows, *self.eval_rows.values()]

    @property
    def columns(self) -> set[str]:
        """The columns of all sets. For a column that a row lacks, rewards get None."""
        return {name for rows in self.row_sets for name in overview_of(rows).columns}

    @property
    def num_rows(self) -> int:
        """The number of rows of all sets together."""
        return sum(map(len, self.row_sets))


def check_inputs(
    config: Config, *, num_ranks: int, to_run: bool = True, sources: Mapping[str, str] | None = None
) -> Inputs:
    """Reads data and rewards, and checks everything that needs no torch.

    If `to_run` is False, the user only asks about a config, perhaps that of a running job. Then run
    folder, packages, disk and servers are not checked. `sources` tells where each value was set.
    Raises ConfigError, which names the key or file:line.
    """
    # Checks of the config alone.
    check_idle_keys(config, sources)
    # Only a launcher sets LOCAL_WORLD_SIZE. A question about a config is about `num_ranks` alone.
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE") if to_run else None
    check_world_size(config, num_ranks, int(local_ranks) if local_ranks else None)
    if to_run:
        check_run_dir(config)
    # Checks of model folders. `folder` is None for a hub id that is not in the cache.
    folder = check_model(config, to_run=to_run)
    check_engine_keys(config.rollout.engine)
    if config.teacher.is_on:
        check_teachers(config, num_ranks=num_ranks, to_run=to_run)
    if config.critic.path is not None:
        check_critic_model(config, to_run=to_run)
    # Users' code is loaded here, but not called.
    rewards = load_rewards(config.rewards)
    _check_pool(config)
    # The rows must have the columns that the rewards need, and must suit the model's tokenizer.
    # Sets that are never evaluated need not exist.
    eval_sets = config.data.eval_sets if config.eval.every_steps else ()
    rows = read_and_check_rows(config, rewards, folder)
    eval_rows = {name: read_and_check_rows(config, rewards, folder, name) for name in eval_sets}
    inputs = Inputs(rows, eval_rows, rewards)
    # Checks that look at the rows again.
    if any(reward.is_measured for reward in config.rewards):
        _check_servers(config, inputs, num_ranks)
    row_sets = {f"data.eval.{name}": eval_set for name, eval_set in eval_rows.items()}
    check_reward_models(config, {"data.train": rows} | row_sets, to_run=to_run)
    check_engine_judges(config, folder, inputs.row_sets)
    # If no row has an answer that the rewards can read, the data is refused. If only some rows lack
    # one, there is a warning.
    warnings = find_gold_warnings(config, rows, is_held_out=False)
    for eval_set in eval_rows.values():
        warnings += find_gold_warnings(config, eval_set, is_held_out=True)
    hidden = inputs.columns & {*CALL_COLUMNS, *EXTRA_ARGUMENTS, "environments"}
    for name in sorted(hidden):
        warnings.append(
            f"data: no reward sees the column {name!r}, as the trainer gives its own argument of "
            "that name; rename the column"
        )
    if to_run:
        check_disk(config)
        check_packages(config)
    if os.environ.get("RANK", "0") == "0":
        for line in warnings:
            say(f"warning: {line}")
    return inputs


def _check_pool(config: Config) -> None:
    """Raises ConfigError if the limit of open files does not allow the reward pool's workers, or if
    the pool's time limit is too short for the shipped reward "code"."""
    allow_workers(config.reward_pool.num_workers, "reward_pool.num_workers")
    limit_s = config.reward_pool.timeout_s
    for index, reward in enumerate(config.rewards):
        time_s = reward.args.get("time_s", DEFAULT_TIME_S)
        # The sandbox ends an endless loop after time_s and scores the completion as wrong. The pool
        # kills the worker after timeout_s, and the reward stays unknown.
        if reward.name == "code" and reward.is_shipped and time_s > limit_s - 1:
            raise ConfigError(
                f"rewards.{index}.args.time_s ({time_s:g}) must be at least a second under "
                f"reward_pool.timeout_s ({limit_s:g}), or an endless loop is killed as unknown "
                "before it is found wrong"
            )


def read_and_check_rows(
    config: Config, rewards: Sequence[Reward], folder: Path | None, eval_set: str | None = None
) -> Sequence[PromptRow]:
    """Returns the checked rows of data.train, or of an evaluation set. Raises ConfigError."""
    key, source = key_and_source(config.data, eval_set)
    check_source(key, source)
    rows = read_rows(config.data, eval_set)
    num_prompts = config.rollout.num_prompts_per_step
    check_enough_rows(len(rows), config.data, num_prompts, eval_set=eval_set)
    if eval_set is None and config.rollout.tail_batching > 1:
        check_enough_to_launch(len(rows), config.rollout)
    # Columns first: they are known without looking at the rows.
    for index, reward in enumerate(rewards):
        check_columns(rows, reward.needs, f"rewards.{index}: {reward.name!r}", source)

    def look() -> None:
        """Raises ConfigError for a prompt that cannot be used."""
        check_prompts(rows, config.data)
        if folder is not None:
            check_prompts_early(rows, config.data, folder, num_embeddings(folder))

    # The node's cache remembers that the rows passed, until they or the tokenizer's files change.
    depends_on = None
    if folder is not None:
        depends_on = [prompt_check_inputs(folder, config.data), num_embeddings(folder)]
    cached_result("checked", rows, depends_on, look)
    return rows


def _check_servers(config: Config, inputs: Inputs, num_ranks: int) -> None:
    """Raises ConfigError if limits on calls leave no time, or if a column cannot be sent as
    JSON."""
    check_calls(config.rewards, num_ranks)
    for rows in inputs.row_sets:
        check_sent(config.rewards, rows)
    check_pace(
        config.rewards,
        num_ranks,
        config.watchdog,
        step_shape=(config.rollout.num_prompts_per_step, config.rollout.group_size),
        # An evaluation calls the servers too.
        num_evaluated=config.eval.num_samples * sum(map(len, inputs.eval_rows.values())),
    )


def find_gold_warnings(
    config: Config, rows: Sequence[PromptRow], *, is_held_out: bool
) -> list[str]:
    """Returns a warning for each shipped reward that has nothing to compare with in some rows.

    That is so, for example, in a row whose answer is null. The warnings are those of `check_gold`,
    cached on the node. Raises ConfigError as it does."""
    rewards = [[reward.name, reward.function, repr(reward.args)] for reward in config.rewards]
    # The path is part of the key because the cached warnings quote it.
    depends_on = [rows[0].where if rows else "", is_held_out, rewards]

    def look() -> list[str]:
        """Returns the warnings; called only if the cache does not have them."""
        return [*check_gold(config.rewards, rows, is_held_out=is_held_out)]

    return list(cached_result("gold", rows, depends_on, look))
