"""Reward models before torch is there: their folders looked through, and what they add to the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.table import PromptRow
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.preflight.arithmetic import ITEMSIZE, shard_numel
from grpo_spmd.preflight.beside import folder_of
from grpo_spmd.preflight.memory import Row, size_text
from grpo_spmd.preflight.model_facts import local_folder


def check_reward_models(
    config: Config, rows: Sequence[PromptRow], eval_rows: Mapping[str, Sequence[PromptRow]], *, to_run: bool = True
) -> None:
    """`rows` to train on, and those held out by the set's name. A name of the hub that is not in the cache yet is only
    asked for, and only `to_run`. Raises ConfigError, which names the key."""
    row_sets = {"data.train": rows} | {f"data.eval.{name}": of_set for name, of_set in eval_rows.items()}
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        where = f"rewards.{index}"
        folder = _folder(reward, where, to_run)
        if folder is None:
            continue
        files = read_reward_model(index, reward, folder, config.training.max_tokens_per_micro_batch)
        reads_chat = config.environment.is_on
        for source, of_set in row_sets.items():
            is_chat = reads_chat or any(not isinstance(row.prompt, str) for row in of_set[:1])
            if is_chat and not files.has_template:
                what = f"the prompts of {source} are chat messages, and the model has no chat template"
                what = what if not reads_chat else "episodes are chat messages, and the model has no chat template"
                raise ConfigError(f"{where}.template: {what}; give a file with one")
            if not is_chat and reward.template is not None:
                what = f"the prompts of {source} are plain text, which goes through no chat template"
                raise ConfigError(f"{where}.template: {what}; set data.as_chat: true, or take the template out")


def reward_model_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """For `--explain`."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        folder = local_folder(reward.model, reward.revision)
        if folder is None:
            yield f"reward model {reward.shown_name}", "unknown", f"{reward.model} is not here"
            continue
        files = read_reward_model(index, reward, folder, config.training.max_tokens_per_micro_batch)
        shard, numel = shard_numel(files.shapes, ranks), sum(map(math.prod, files.shapes.values()))
        size = size_text(itemsize * shard)
        how = f"{numel:,} parameters: {shard:,} of a shard x {itemsize} ({config.model.dtype}), frozen"
        yield f"reward model {files.name}", size, how
        how = "while it does not score; the engine's weights are there while it does (on a GPU)"
        yield "of it in host memory", size, how
        how = f"texts of {files.longest:,} tokens at most; a forward of each completion, engine asleep"
        yield "extra passes of it", "1", how


def _folder(reward: RewardConfig, where: str, to_run: bool) -> Path | None:
    path = str(reward.model)
    if Path(path).is_dir() and reward.revision is not None:
        raise ConfigError(f"{where}.revision: {path} is a folder, which has none; take it out")
    return folder_of(path, f"{where}.model", to_run=to_run, revision=reward.revision)
