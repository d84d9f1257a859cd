"""Everything that can be refused before torch is imported.

A mistake costs a second and one line of text, not a GPU minute. `CHECKS` lists all checks in
their order; `check_inputs` makes those that the config needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_spmd.checks.data import check_columns, check_prompts_early, prompt_check_inputs
from grpo_spmd.checks.environments import check_environment_early
from grpo_spmd.checks.machine import (
    check_disk,
    check_engine_keys,
    check_packages,
    check_run_dir,
    check_world_size,
)
from grpo_spmd.checks.memory import check_idle_keys
from grpo_spmd.checks.model_folder import check_model, num_embeddings
from grpo_spmd.checks.reward_models import check_engine_judges, check_reward_models
from grpo_spmd.checks.signals import check_critic_model, check_teachers
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
from grpo_spmd.rewards.remote.servers import check_calls, check_pace, check_sent
from grpo_spmd.rewards.verifiers import DEFAULT_TIME_S


@dataclass(frozen=True)
class Inputs:
    """The rows of the data sets and the reward functions, read and checked before torch is
    imported."""

    rows: Sequence[PromptRow]
    eval_rows: dict[str, Sequence[PromptRow]]  # by the set's name; empty if eval.every_steps is 0
    rewards: Sequence[Reward] = ()  # in the order of the config
    start_time: float = field(default_factory=time.monotonic)  # the run's, after reading

    @property
    def row_sets(self) -> list[Sequence[PromptRow]]:
        return [self.rows, *self.eval_rows.values()]

    @property
    def columns(self) -> set[str]:
        """Returns the columns of all sets. A row without one of them passes None for it."""
        return {name for rows in self.row_sets for name in overview_of(rows).columns}

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.row_sets))


@dataclass
class CheckState:
    """Holds the config to check, and what earlier checks have read for later ones."""

    config: Config
    num_ranks: int
    to_run: bool
    sources: Mapping[str, str] | None
    folder: Path | None = None  # the policy's; None for a hub id outside the cache
    inputs: Inputs = field(default_factory=lambda: Inputs((), {}))
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """A Check is one early check. Its `look` raises ConfigError, or stores what it has read."""

    name: str
    look: Callable[[CheckState], None]
    is_needed: Callable[[Config], bool] = lambda config: True
    only_to_run: bool = False


def check_inputs(
    config: Config, *, num_ranks: int, to_run: bool = True, sources: Mapping[str, str] | None = None
) -> Inputs:
    """Reads data and rewards, and checks everything that needs no torch.

    If `to_run` is False, the user only asks about a config, perhaps that of a running job. Then run
    folder, packages, disk and servers are not checked. `sources` tells where each value was set.
    Raises ConfigError, which names the key or file:line.
    """
    state = CheckState(config, num_ranks, to_run, sources)
    for check in CHECKS:
        if check.is_needed(config) and (to_run or not check.only_to_run):
            check.look(state)
    if os.environ.get("RANK", "0") == "0":
        for line in state.warnings:
            say(f"warning: {line}")
    return state.inputs


def _check_ranks(state: CheckState) -> None:
    # Only a launcher sets it. A question about a config is about num_ranks alone.
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE") if state.to_run else None
    check_world_size(state.config, state.num_ranks, int(local_ranks) if local_ranks else None)


def _check_policy_model(state: CheckState) -> None:
    state.folder = check_model(state.config, to_run=state.to_run)


def _check_teacher(state: CheckState) -> None:
    check_teachers(state.config, num_ranks=state.num_ranks, to_run=state.to_run)


def _load_rewards(state: CheckState) -> None:
    # The first check that runs users' code.
    state.inputs = Inputs((), {}, load_rewards(state.config.rewards))


def _check_pool(state: CheckState) -> None:
    config = state.config
    allow_workers(config.reward_pool.num_workers, "reward_pool.num_workers")
    limit_s = config.reward_pool.timeout_s
    for index, reward in enumerate(config.rewards):
        time_s = reward.args.get("time_s", DEFAULT_TIME_S)
        # The sandbox ends an endless loop after time_s and scores it as wrong. The pool kills
        # its worker after timeout_s, and the completion stays unknown.
        if reward.name == "code" and reward.is_shipped and time_s > limit_s - 1:
            raise ConfigError(
                f"rewards.{index}.args.time_s ({time_s:g}) must be at least a second under "
                f"reward_pool.timeout_s ({limit_s:g}), or an endless loop is killed as unknown "
                "before it is found wrong"
            )


def _read_data(state: CheckState) -> None:
    config, rewards, folder = state.config, state.inputs.rewards, state.folder
    # Sets that are never evaluated need not exist.
    eval_sets = config.data.eval_sets if config.eval.every_steps else ()
    rows = read_and_check_rows(config, rewards, folder)
    eval_rows = {name: read_and_check_rows(config, rewards, folder, name) for name in eval_sets}
    state.inputs = Inputs(rows, eval_rows, rewards)


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
        check_prompts(rows, config.data)
        if folder is not None:
            check_prompts_early(rows, config.data, folder, num_embeddings(folder))

    # That the rows passed is noted on the node, until they or the tokenizer's files change.
    depends_on = None
    if folder is not None:
        depends_on = [prompt_check_inputs(folder, config.data), num_embeddings(folder)]
    cached_result("checked", rows, depends_on, look)
    return rows


def _check_servers(state: CheckState) -> None:
    config, inputs = state.config, state.inputs
    check_calls(config.rewards, state.num_ranks)
    for rows in inputs.row_sets:
        check_sent(config.rewards, rows)
    check_pace(
        config.rewards,
        state.num_ranks,
        config.watchdog,
        step_shape=(config.rollout.num_prompts_per_step, config.rollout.group_size),
        # An evaluation calls the servers too.
        num_evaluated=config.eval.num_samples * sum(map(len, inputs.eval_rows.values())),
    )


def _check_reward_models(state: CheckState) -> None:
    row_sets = {f"data.eval.{name}": rows for name, rows in state.inputs.eval_rows.items()}
    row_sets = {"data.train": state.inputs.rows} | row_sets
    check_reward_models(state.config, row_sets, to_run=state.to_run)


def _check_judges(state: CheckState) -> None:
    check_engine_judges(state.config, state.folder, state.inputs.row_sets)


def _check_gold_answers(state: CheckState) -> None:
    """Raises ConfigError for data without answers that the rewards can read.

    If only some rows lack them, warnings are stored.
    """
    for rows in state.inputs.row_sets:
        is_held_out = rows is not state.inputs.rows
        state.warnings += find_gold_warnings(state.config, rows, is_held_out=is_held_out)


def find_gold_warnings(
    config: Config, rows: Sequence[PromptRow], *, is_held_out: bool
) -> list[str]:
    """Returns the warnings of `check_gold`, cached on the node. Raises ConfigError."""
    rewards = [[reward.name, reward.function, repr(reward.args)] for reward in config.rewards]
    # A warning names the file as the config does.
    depends_on = [rows[0].where if rows else "", is_held_out, rewards]

    def look() -> list[str]:
        return [*check_gold(config.rewards, rows, is_held_out=is_held_out)]

    return list(cached_result("gold", rows, depends_on, look))


# In this order: cheap checks of the config first, and what differs between machines last.
CHECKS = (
    # The config alone.
    Check("keys without effect", lambda state: check_idle_keys(state.config, state.sources)),
    Check("ranks", _check_ranks),
    Check("run folder", lambda state: check_run_dir(state.config), only_to_run=True),
    # Model folders.
    Check("model", _check_policy_model),
    Check("rollout.engine", lambda state: check_engine_keys(state.config.rollout.engine)),
    Check("teachers", _check_teacher, lambda config: config.teacher.is_on),
    Check(
        "critic",
        lambda state: check_critic_model(state.config, to_run=state.to_run),
        lambda config: config.critic.path is not None,
    ),
    # Users' code, which is only loaded, and files that are only parsed.
    Check("reward functions", _load_rewards),
    Check(
        "environments",
        lambda state: check_environment_early(state.config.environment),
        lambda config: config.environment.is_on,
    ),
    Check("reward pool", _check_pool),
    # Rows, against the columns that the rewards need and the model's tokenizer.
    Check("data", _read_data),
    # Everything that looks at rows again.
    Check(
        "reward servers",
        _check_servers,
        lambda config: any(reward.is_measured for reward in config.rewards),
    ),
    Check("reward models", _check_reward_models),
    Check("judges", _check_judges),
    Check("gold answers", _check_gold_answers),
    Check("disk", lambda state: check_disk(state.config), only_to_run=True),
    Check("packages", lambda state: check_packages(state.config), only_to_run=True),
)
