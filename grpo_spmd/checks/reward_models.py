"""Early checks of reward models, and of judges that the run's own vLLM engine serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_spmd.checks.data import (
    check_columns,
    load_tokenizer_file,
    renderer,
    template_of,
    tokenizer_settings,
)
from grpo_spmd.checks.memory import judge_tokens
from grpo_spmd.checks.model_folder import find_model_folder
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, RewardConfig
from grpo_spmd.data.rows import PromptRow
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import text_config
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about, read_reward_model
from grpo_spmd.rewards.servers import Judge

_NUM_TRIED = 8  # prompts that a template is tried on
_COMPLETIONS = ("one answer", "another")  # a template must render them differently


def check_reward_models(
    config: Config, row_sets: Mapping[str, Sequence[PromptRow]], *, to_run: bool = True
) -> None:
    """Raises ConfigError if the folder or chat template of a reward model cannot be used.

    `row_sets` has the rows by the config key of their source. `to_run`: the run is about to start,
    so the hub is asked about models that are not in the cache.
    """
    for index, reward in enumerate(config.rewards):
        if reward.model is None:
            continue
        key_prefix = f"rewards.{index}"
        if Path(reward.model).is_dir() and reward.revision is not None:
            raise ConfigError(
                f"{key_prefix}.revision: {reward.model} is a folder, which has none; take it out"
            )
        folder = find_model_folder(
            reward.model, f"{key_prefix}.model", to_run=to_run, revision=reward.revision
        )
        if folder is None:
            continue
        files = read_reward_model(index, reward, folder, config.micro_batch_tokens)
        for source, rows in row_sets.items():
            # All rows have the same kind of prompt.
            is_chat = any(not isinstance(row.prompt, str) for row in rows[:1])
            if config.environment.is_on:
                _check_template(files, "episodes", rows)
            elif is_chat:
                _check_template(files, f"the prompts of {source}", rows)
            elif reward.template is not None:
                raise ConfigError(
                    f"{key_prefix}.template: the prompts of {source} are plain text, which "
                    "goes through no chat template; set data.as_chat: true, or take the "
                    "template out"
                )


def _check_template(files: RewardModelFiles, problem: str, rows: Sequence[PromptRow]) -> None:
    """Raises ConfigError if a model has no chat template, or one that cannot render the prompts.

    `problem` is the beginning of the error: it names the chats that need the template.
    """
    key = f"{files.where}.template"
    settings = tokenizer_settings(files.folder)
    if settings is None:
        file = files.folder / "tokenizer_config.json"
        raise ConfigError(f"{files.where}.model: cannot read {file} as JSON")
    template = files.template or template_of(files.folder, settings)
    if template is None:
        problem += " are chat messages, and the model has no chat template"
        if (files.folder / "chat_template.json").is_file():
            problem += " (its chat_template.json is a processor's, which no tokenizer reads)"
        raise ConfigError(f"{key}: {problem}; give a file with one")
    with errors_about(key):
        render = renderer(template, settings, opens_turn=False)
    # Only transformers can compile this template.
    if render is None:
        return
    # Try the first prompts until one succeeds: a template may refuse some of them.
    error_text = ""
    for row in rows[:_NUM_TRIED]:
        prompt = row.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            texts = {
                render([*messages, {"role": "assistant", "content": completion}])
                for completion in _COMPLETIONS
            }
        except Exception as error:  # a template may fail in any way
            error_text = error_text or f"{row.where}: {type(error).__name__}: {error}"
            continue
        if len(texts) < len(_COMPLETIONS):
            raise ConfigError(
                f"{key}: the chat template shows a prompt alike whatever the assistant said, "
                "so that all completions would score alike; give a file with one that shows it"
            )
        return
    if error_text:
        raise ConfigError(
            f"{key}: the chat template cannot show {error_text}; give a file with one that can"
        )


def check_engine_judges(
    config: Config, folder: Path | None, row_sets: Sequence[Sequence[PromptRow]]
) -> None:
    """Checks judges that the run's own engine serves. Raises ConfigError, which names the key.

    Checks the columns that they need, the chat template, and whether their prompts fit the model.
    `folder` is the policy's, or None if it is not here."""
    for index, num_tokens in judge_tokens(config).items():
        key_prefix, reward = f"rewards.{index}", config.rewards[index]
        judge = Judge(reward, f"{key_prefix}.judge")
        for rows in row_sets:
            check_columns(rows, judge.needs, f"{key_prefix}.judge: {reward.judge}", "the data")
        if folder is None:
            continue
        settings = tokenizer_settings(folder)
        has_template = settings is None or template_of(folder, settings) is not None
        if not has_template and not any(folder.glob("*chat_template*")):
            raise ConfigError(
                f"{key_prefix}: a judge is asked in a chat, and the tokenizer of model.path "
                "has no chat template; give the model's folder one (chat_template.jinja), or "
                "take an instruct model"
            )
        model = text_config(read_model_config(folder))
        positions, reply_tokens = model.get("max_position_embeddings"), reward.judge_tokens
        if isinstance(positions, int) and num_tokens > positions:
            raise ConfigError(
                f"{key_prefix}.judge: up to {num_tokens - reply_tokens} tokens to read and "
                f"{reply_tokens} to say (judge_tokens) are {num_tokens}, and the model has "
                f"{positions} positions; set {key_prefix}.max_tokens (what is longer is not "
                "judged, and counted), or shorten the rubric"
            )
        has_longrope = "longrope" in f"{model.get('rope_scaling')}{model.get('rope_parameters')}"
        # vLLM would use the factors for long texts, while the policy used those for short ones.
        if num_tokens > config.max_rollout_tokens and has_longrope:
            raise ConfigError(
                f"{key_prefix}: the model's rotary factors (longrope) follow the engine's longest "
                f"text, {num_tokens} with the judge, and the policy's the longest rollout, "
                f"{config.max_rollout_tokens}; take a judge at a server"
            )
        _check_rubric_size(judge, reward, folder, key_prefix)


def _check_rubric_size(judge: Judge, reward: RewardConfig, folder: Path, key_prefix: str) -> None:
    """Raises ConfigError if the rubric alone has too many tokens.

    Its tokens are counted with the tokenizers library, without those of the chat template. The run
    counts again, with transformers' tokenizer and the template.
    """
    file = folder / "tokenizer.json"
    if reward.max_tokens is None or not file.is_file():
        return
    # The rubric with an empty text for each of its fields.
    [message] = judge.body([""], [""], {name: [""] for name in judge.needs})["messages"]
    num_tokens = len(load_tokenizer_file(file).encode(message["content"]).ids)
    if num_tokens >= reward.max_tokens:
        raise ConfigError(
            f"{key_prefix}.max_tokens: the rubric alone takes {num_tokens} tokens of the "
            f"judge's prompt, of {reward.max_tokens}; raise it, or shorten the rubric"
        )
