"""Reward models before torch is there: their folders looked through, and what they add to the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.early import renderer, template_of, tokenizer_settings
from grpo_spmd.data.table import PromptRow
from grpo_spmd.model.reward_model_files import RewardModelFiles, read_reward_model, said_of
from grpo_spmd.preflight.arithmetic import ITEMSIZE, shard_numel
from grpo_spmd.preflight.beside import folder_of
from grpo_spmd.preflight.memory import Row, size_text
from grpo_spmd.preflight.model_facts import local_folder

_NUM_SHOWN = 8  # prompts that a template is tried on
_SAID = ("one answer", "another")  # completions that it must tell apart


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
        for source, of_set in row_sets.items():
            is_chat = config.environment.is_on or any(not isinstance(row.prompt, str) for row in of_set[:1])
            if is_chat:
                _check_template(files, source, of_set, is_episode=config.environment.is_on)
            elif reward.template is not None:
                what = f"the prompts of {source} are plain text, which goes through no chat template"
                raise ConfigError(f"{where}.template: {what}; set data.as_chat: true, or take the template out")


def _check_template(files: RewardModelFiles, source: str, rows: Sequence[PromptRow], *, is_episode: bool) -> None:
    """That some of the first prompts can be shown, each with what is said to it. A template may refuse others."""
    key, settings = f"{files.where}.template", tokenizer_settings(files.folder)
    if settings is None:
        raise ConfigError(f"{files.where}.model: cannot read {files.folder / 'tokenizer_config.json'} as JSON")
    template = files.template or template_of(files.folder, settings)
    if template is None:
        what = "episodes are" if is_episode else f"the prompts of {source} are"
        what += " chat messages, and the model has no chat template"
        if (files.folder / "chat_template.json").is_file():
            what += " (its chat_template.json is a processor's, which no tokenizer reads)"
        raise ConfigError(f"{key}: {what}; give a file with one")
    with said_of(key):
        render = renderer(template, settings, opens_turn=False)
    if render is None:  # transformers alone could
        return
    why = ""
    for row in rows[:_NUM_SHOWN]:
        asked = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        try:
            shown = {render([*asked, {"role": "assistant", "content": said}]) for said in _SAID}
        except Exception as error:  # a template may fail in any way
            why = why or f"{row.where}: {type(error).__name__}: {error}"
            continue
        if len(shown) < len(_SAID):
            what = "shows a prompt alike whatever the assistant said, so that all completions would score alike"
            raise ConfigError(f"{key}: the chat template {what}; give a file with one that shows it")
        return
    if why:
        raise ConfigError(f"{key}: the chat template cannot show {why}; give a file with one that can")


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
