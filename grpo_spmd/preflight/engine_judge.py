"""Judges that are the run's own engine, before torch is there: their rubrics, the model's chat template, and room for
what they read and say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.config.spelling import of_others
from grpo_spmd.data.early import load_tokenizer_file, template_of, tokenizer_settings
from grpo_spmd.data.table import PromptRow, overview_of
from grpo_spmd.preflight.memory import Row
from grpo_spmd.rewards.remote.judge import Judge, places_in, read_rubric
from grpo_spmd.untrusted import read_model_config

# For what the judge is told beside the rubric, the marks around the completion, and the chat template's own words.
_OWN_TOKENS = 512


def prompt_tokens_of_judges(config: Config) -> dict[int, int]:
    """By the place in `rewards`, the longest prompt of each judge in tokens: its max_tokens, or a bound that needs no
    tokenizer: the rubric's bytes, and for what is put into it the limits of prompts and completions, with an eighth for
    what encoding it anew, as JSON where it is a chat, may add. A column counts as a prompt."""
    of_prompt, found = config.data.max_prompt_tokens, dict[int, int]()
    of_completion = config.max_rollout_tokens - of_prompt
    for index, reward in enumerate(config.rewards):
        if not reward.by_engine:
            continue
        rubric = read_rubric(str(reward.judge), f"rewards.{index}.judge")
        shown = sum(of_completion if name == "completion" else of_prompt for name in places_in(rubric))
        found[index] = reward.max_tokens or len(rubric.encode()) + _OWN_TOKENS + shown * 9 // 8
    return found


def room_of_judges(config: Config) -> dict[int, int]:
    """The same with the reply."""
    return {index: n + config.rewards[index].judge_tokens for index, n in prompt_tokens_of_judges(config).items()}


def check_engine_judges(config: Config, folder: Path | None, row_sets: Sequence[Sequence[PromptRow]]) -> None:
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
                raise ConfigError(f"{where}.judge: {what}; besides the prompt it has {there}{of_others(lacking[0])}")
        if folder is None:
            continue
        settings = tokenizer_settings(folder)
        has_template = settings is None or template_of(folder, settings) is not None
        if not has_template and not any(folder.glob("*chat_template*")):
            what = "a judge is asked in a chat, and the tokenizer of model.path has no chat template"
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
    if room > longest and "longrope" in f"{model.get('rope_scaling')}{model.get('rope_parameters')}":
        what = f"the model's rotary factors (longrope) follow the engine's longest text, {room} with the judge"
        raise ConfigError(f"{where}: {what}, and the policy's the longest rollout, {longest}; take a judge at a server")


def _check_rubric(reward: RewardConfig, folder: Path, where: str) -> None:
    """By the tokenizers library, without the template's words: the run looks once more."""
    if reward.max_tokens is None or not (file := folder / "tokenizer.json").is_file():
        return
    judge = Judge(reward, f"{where}.judge")
    [message] = judge.body([""], [""], {name: [""] for name in judge.needs})["messages"]
    if (alone := len(load_tokenizer_file(file).encode(message["content"]).ids)) >= reward.max_tokens:
        what = f"the rubric alone takes {alone} tokens of the judge's prompt, of {reward.max_tokens}"
        raise ConfigError(f"{where}.max_tokens: {what}; raise it, or shorten the rubric")


def engine_judge_rows(config: Config) -> Iterator[Row]:
    """For `--explain`."""
    rooms = room_of_judges(config)
    for index, tokens in prompt_tokens_of_judges(config).items():
        reward = config.rewards[index]
        how = "max_tokens" if reward.max_tokens else "the rubric's bytes, and 9/8 of the longest of what is put into it"
        yield f"longest prompt of {reward.shown_name}, tokens", f"{tokens:,}", how
        yield f"longest reply of {reward.shown_name}, tokens", f"{reward.judge_tokens:,}", "judge_tokens"
    longest = config.max_rollout_tokens
    how = f"the longest of rollout ({longest:,}) and a judge's prompt with its reply; micro-batches know rollouts alone"
    yield "longest text of the engine, tokens", f"{max(longest, *rooms.values()):,}", how
