"""Reward models before torch is there: their folders looked through, and what they add to the memory of a rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_spmd.checks.data import load_tokenizer_file, renderer, template_of, tokenizer_settings
from grpo_spmd.checks.memory import ITEMSIZE, Row, shard_numel, size_text
from grpo_spmd.checks.model_folder import folder_of
from grpo_spmd.config.coerce import foreign_parameter_hint
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.rows import PromptRow, overview_of
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import local_folder
from grpo_spmd.model.reward_model_files import RewardModelFiles, read_reward_model, said_of
from grpo_spmd.rewards.remote.servers import Judge, places_in, read_rubric

_NUM_SHOWN = 8  # prompts that a template is tried on
_SAID = ("one answer", "another")  # completions that it must tell apart


def check_reward_models(
    config: Config,
    rows: Sequence[PromptRow],
    eval_rows: Mapping[str, Sequence[PromptRow]],
    *,
    to_run: bool = True,
) -> None:
    """`rows` to train on, and those held out by the set's name. A name of the hub that is not in the cache yet is only
    asked for, and only `to_run`. Raises ConfigError, which names the key."""
    row_sets = {"data.train": rows} | {
        f"data.eval.{name}": of_set for name, of_set in eval_rows.items()
    }
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        where = f"rewards.{index}"
        folder = _folder(reward, where, to_run)
        if folder is None:
            continue
        files = read_reward_model(index, reward, folder, config.training.max_tokens_per_micro_batch)
        for source, of_set in row_sets.items():
            is_chat = config.environment.is_on or any(
                not isinstance(row.prompt, str) for row in of_set[:1]
            )
            if is_chat:
                _check_template(files, source, of_set, is_episode=config.environment.is_on)
            elif reward.template is not None:
                what = (
                    f"the prompts of {source} are plain text, which goes through no chat template"
                )
                raise ConfigError(
                    f"{where}.template: {what}; set data.as_chat: true, or take the template out"
                )


def _check_template(
    files: RewardModelFiles, source: str, rows: Sequence[PromptRow], *, is_episode: bool
) -> None:
    """That some of the first prompts can be shown, each with what is said to it. A template may refuse others."""
    key, settings = f"{files.where}.template", tokenizer_settings(files.folder)
    if settings is None:
        raise ConfigError(
            f"{files.where}.model: cannot read {files.folder / 'tokenizer_config.json'} as JSON"
        )
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
        asked = (
            [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        )
        try:
            shown = {render([*asked, {"role": "assistant", "content": said}]) for said in _SAID}
        except Exception as error:  # a template may fail in any way
            why = why or f"{row.where}: {type(error).__name__}: {error}"
            continue
        if len(shown) < len(_SAID):
            what = "shows a prompt alike whatever the assistant said, so that all completions would score alike"
            raise ConfigError(
                f"{key}: the chat template {what}; give a file with one that shows it"
            )
        return
    if why:
        raise ConfigError(
            f"{key}: the chat template cannot show {why}; give a file with one that can"
        )


def reward_model_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """For `--explain`."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        folder = local_folder(reward.model, reward.revision)
        if folder is None:
            yield f"reward model {reward.metric_name}", "unknown", f"{reward.model} is not here"
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


# Judges that are the run's own engine, before torch is there: their rubrics, the model's chat template, and room for
# what they read and say.


# For what the judge is told beside the rubric, the marks around the completion, and the chat template's own words.
_OWN_TOKENS = 512


def prompt_tokens_of_judges(config: Config) -> dict[int, int]:
    """By the place in `rewards`, the longest prompt of each judge in tokens: its max_tokens, or a bound that needs no
    tokenizer: the rubric's bytes, and for what is put into it the limits of prompts and completions, with an eighth for
    what encoding it anew, as JSON where it is a chat, may add. A column counts as a prompt."""
    of_prompt, found = config.data.max_prompt_tokens, dict[int, int]()
    of_completion = config.max_rollout_tokens - of_prompt
    for index, reward in enumerate(config.rewards):
        if not reward.is_engine_judge:
            continue
        rubric = read_rubric(str(reward.judge), f"rewards.{index}.judge")
        shown = sum(
            of_completion if name == "completion" else of_prompt for name in places_in(rubric)
        )
        found[index] = reward.max_tokens or len(rubric.encode()) + _OWN_TOKENS + shown * 9 // 8
    return found


def room_of_judges(config: Config) -> dict[int, int]:
    """The same with the reply."""
    return {
        index: n + config.rewards[index].judge_tokens
        for index, n in prompt_tokens_of_judges(config).items()
    }


def check_engine_judges(
    config: Config, folder: Path | None, row_sets: Sequence[Sequence[PromptRow]]
) -> None:
    """`folder` of the policy, where it is here; `row_sets`: to train on, and those held out. Raises ConfigError, which
    names the key."""
    for index, room in room_of_judges(config).items():
        where, reward = f"rewards.{index}", config.rewards[index]
        needed = Judge(reward, f"{where}.judge").needs
        for of_set in row_sets:
            columns = overview_of(of_set).columns
            if lacking := [name for name in needed if name not in columns]:
                what = f"{reward.judge} says {{{lacking[0]}}}, and the data has no such column"
                there = ", ".join(sorted(columns)) or "none"
                raise ConfigError(
                    f"{where}.judge: {what}; besides the prompt it has {there}{foreign_parameter_hint(lacking[0])}"
                )
        if folder is None:
            continue
        settings = tokenizer_settings(folder)
        has_template = settings is None or template_of(folder, settings) is not None
        if not has_template and not any(folder.glob("*chat_template*")):
            what = (
                "a judge is asked in a chat, and the tokenizer of model.path has no chat template"
            )
            how = "give the model's folder one (chat_template.jinja), or take an instruct model"
            raise ConfigError(f"{where}: {what}; {how}")
        _check_room(config, folder, where, room, reward.judge_tokens)
        _check_rubric(reward, folder, where)


def _check_room(config: Config, folder: Path, where: str, room: int, of_reply: int) -> None:
    model = read_model_config(folder)
    positions, longest = model.get("max_position_embeddings"), config.max_rollout_tokens
    if isinstance(positions, int) and room > positions:
        what = f"up to {room - of_reply} tokens to read and {of_reply} to say (judge_tokens) are {room}"
        how = f"set {where}.max_tokens (what is longer is not judged, and counted), or shorten the rubric"
        raise ConfigError(f"{where}.judge: {what}, and the model has {positions} positions; {how}")
    if (
        room > longest
        and "longrope" in f"{model.get('rope_scaling')}{model.get('rope_parameters')}"
    ):
        what = f"the model's rotary factors (longrope) follow the engine's longest text, {room} with the judge"
        raise ConfigError(
            f"{where}: {what}, and the policy's the longest rollout, {longest}; take a judge at a server"
        )


def _check_rubric(reward: RewardConfig, folder: Path, where: str) -> None:
    """By the tokenizers library, without the template's words: the run looks once more."""
    if reward.max_tokens is None or not (file := folder / "tokenizer.json").is_file():
        return
    judge = Judge(reward, f"{where}.judge")
    [message] = judge.body([""], [""], {name: [""] for name in judge.needs})["messages"]
    if (
        alone := len(load_tokenizer_file(file).encode(message["content"]).ids)
    ) >= reward.max_tokens:
        what = (
            f"the rubric alone takes {alone} tokens of the judge's prompt, of {reward.max_tokens}"
        )
        raise ConfigError(f"{where}.max_tokens: {what}; raise it, or shorten the rubric")


def engine_judge_rows(config: Config) -> Iterator[Row]:
    """For `--explain`."""
    rooms = room_of_judges(config)
    for index, tokens in prompt_tokens_of_judges(config).items():
        reward = config.rewards[index]
        how = (
            "max_tokens"
            if reward.max_tokens
            else "the rubric's bytes, and 9/8 of the longest of what is put into it"
        )
        yield f"longest prompt of {reward.metric_name}, tokens", f"{tokens:,}", how
        yield (
            f"longest reply of {reward.metric_name}, tokens",
            f"{reward.judge_tokens:,}",
            "judge_tokens",
        )
    longest = config.max_rollout_tokens
    how = f"the longest of rollout ({longest:,}) and a judge's prompt with its reply; micro-batches know rollouts alone"
    yield "longest text of the engine, tokens", f"{max(longest, *rooms.values()):,}", how
