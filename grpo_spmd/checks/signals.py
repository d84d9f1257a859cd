"""Checks teachers, critics, reward models and judges before the run, and lists the side models.

A *side model* is a model that has weights of its own besides the policy's: a teacher, a critic or a
reward model. `side_models` lists them; `--explain` and the planner both use the list. A new kind of
signal adds its entry there, its check in this file and its rows in explain.py.

A teacher may also be on a server. Then the checks ask whether the server answers, has the model,
and has the policy's vocabulary. Its replies come from the network: they are compared, never
trusted. Imports no torch.

`to_run` always means that the run is about to start. Then the hub and servers are asked; otherwise
the user only asks about a config, and nothing goes over the network.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from grpo_spmd.checks.data import (
    check_columns,
    check_prompts_early,
    load_tokenizer_file,
    read_tokenizer_files,
    renderer,
)
from grpo_spmd.checks.memory import (
    ITEMSIZE,
    is_shared_teacher,
    judge_tokens,
    shard_numel,
    trained_bytes,
)
from grpo_spmd.checks.model_folder import check_model, find_model_folder, num_embeddings
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import (
    POLICY,
    VALUE_HEADS,
    Config,
    DataConfig,
    LoraConfig,
    RewardConfig,
)
from grpo_spmd.data.hub import check_reachable
from grpo_spmd.data.rows import PromptRow, read_rows
from grpo_spmd.files import read_model_config
from grpo_spmd.model.config_json import (
    Shapes,
    local_folder,
    refuse_by_config,
    shapes_from_headers,
    text_config,
)
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about, read_reward_model
from grpo_spmd.rewards.client import PromptLogprobs, ServedModel, headers_of
from grpo_spmd.rewards.servers import Judge
from grpo_spmd.rewards.trl import FailedCallError

T = TypeVar("T")
Kind = Literal["teacher", "critic", "reward model"]
# The most seconds of one request of a check, and the seconds before its first retry, which double
# with each further one.
_REQUEST_LIMIT_S = 30.0
_FIRST_PAUSE_S = 0.5
# How many tokens of the policy's vocabulary a server is asked about.
_NUM_PROBED = 256


# Teachers on servers


def tokens_of(file: Path) -> dict[int, str]:
    """Returns the tokens of a tokenizer.json by their ids."""
    vocabulary = load_tokenizer_file(file).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def check_servers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Raises ConfigError if the teachers' servers cannot be used.

    Servers are asked only if the run is about to start (`to_run`), and only by rank 0.
    """
    limit = config.teacher.max_concurrent
    if limit < num_ranks:
        raise ConfigError(
            f"teacher.max_concurrent ({limit}) must be >= the number of ranks ({num_ranks}), "
            "each of which makes its own share of the requests; raise it, or take fewer ranks"
        )
    headers_of(config.teacher.headers_env, "teacher.headers_env")
    if to_run and os.environ.get("RANK", "0") == "0":
        for name in config.teacher.urls:
            check_server(config, name)


def check_server(config: Config, name: str) -> str:
    """Checks the server of the teacher `name` and returns the server's name for its model.

    Raises ConfigError if the server does not answer, or cannot teach this policy.
    """
    key = f"teacher.url.{name}" if name else "teacher.url"
    served = _choose_model(config, open_server(config, name, config.teacher.model), key)
    # vLLM always samples one more token, which is not used.
    needed = config.max_rollout_tokens + 1
    if served.max_tokens is not None and served.max_tokens < needed:
        raise ConfigError(
            f"{key}: {served.name} takes {served.max_tokens} tokens there, and the longest "
            f"rollout and one more are {needed}; start it with --max-model-len {needed}, or "
            "lower the rollout's limits"
        )
    _compare_vocabulary(config, open_server(config, name, served.name), key, served)
    return served.name


def open_server(config: Config, name: str, model: str | None) -> PromptLogprobs:
    """Returns a client for the server of the teacher `name`, without connecting yet."""
    headers = headers_of(config.teacher.headers_env, "teacher.headers_env")
    return PromptLogprobs(config.teacher.urls[name], headers, model)


def _choose_model(config: Config, server: PromptLogprobs, key: str) -> ServedModel:
    """Returns the server's model that `teacher.model` names, or the server's only model."""
    model = config.teacher.model
    try:
        models = _call_with_retries(config, server.list_models)
    except FailedCallError as error:
        # An HTTP status shows that the server is there, and only has no list of its models.
        if model is not None and error.status is not None:
            return ServedModel(model, None)
        remedy = "start it, correct the address, or name its model: teacher.model"
        raise ConfigError(f"{key}: the server {error}; {remedy}") from None
    for served in models:
        if served.name == model or (model is None and len(models) == 1):
            return served
    available = ", ".join(served.name for served in models) or "none"
    rule = "must be one that the server has, and is needed where a server has several"
    raise ConfigError(f"teacher.model {rule} ({key} has {available}); got {model}")


def _compare_vocabulary(
    config: Config, server: PromptLogprobs, key: str, served: ServedModel
) -> None:
    """Raises ConfigError if some token ids mean another text on the server than for the policy.

    A token that has no text by itself (a part of a character) is not compared.
    """
    folder = local_folder(config.model.path)
    file = folder / "tokenizer.json" if folder else None
    if file is None or not file.is_file():
        # Without the policy's tokenizer, the server is only asked about one token, as a trial.
        _ask_texts(config, server, [0], key=key, served=served)
        return
    tokenizer = load_tokenizer_file(file)
    known_ids = sorted(tokens_of(file))
    num_probed = min(_NUM_PROBED, (served.max_tokens or _NUM_PROBED) - 2)
    # Evenly spread up to the last id: models of one family may differ in tokens added at the end.
    spread = (i * (len(known_ids) - 1) // num_probed for i in range(num_probed + 1))
    ids = sorted({known_ids[index] for index in spread})
    server_texts = _ask_texts(config, server, ids, key=key, served=served)
    num_compared = 0
    for token_id, server_text in zip(ids, server_texts, strict=True):
        policy_text = tokenizer.decode([token_id], skip_special_tokens=False)
        texts = (policy_text, server_text)
        # An empty text, or U+FFFD, is a part of a character.
        if not all(texts) or any("\ufffd" in text for text in texts):
            continue
        num_compared += 1
        # Some servers strip the space at a word's beginning.
        if policy_text.strip() != server_text.strip():
            raise ConfigError(
                f"{key}: {served.name} has another vocabulary than {config.model.path}: token "
                f"{token_id} is {server_text!r} there, and {policy_text!r} in the policy's; "
                "take a teacher of its family"
            )
    if not num_compared:
        raise ConfigError(
            f"{key}: the server does not say what tokens are; start it with its tokenizer"
        )


def _ask_texts(
    config: Config, server: PromptLogprobs, ids: list[int], *, key: str, served: ServedModel
) -> list[str]:
    """Returns the text that the server has for each of `ids`.

    The request asks for as many logprobs as the run will, so that a limit of the server is found
    now.
    """
    # The reply has nothing about a prompt's first token, so the first id is put there twice.
    prompt = [ids[0], *ids]
    top_k = config.teacher.top_k if config.teacher.loss == "topk" else 0
    try:
        positions = _call_with_retries(config, lambda s: server.ask(prompt, top_k, s))
    except FailedCallError as error:
        # 400 is vLLM's status for ids that its model lacks, and for more logprobs than it gives.
        rule = (
            f"does not take {top_k} prompt_logprobs of tokens of {config.model.path} (it must be "
            "vLLM's, with the policy's vocabulary, and started with --max-logprobs of at least "
            "teacher.top_k)"
        )
        raise ConfigError(f"{key}: {served.name} {rule}: the server {error}") from None
    return [position.text for position in positions]


def _call_with_retries(config: Config, ask: Callable[[float], T]) -> T:
    """Returns what `ask` returns, with as many retries as in the run (teacher.retries).

    `ask` sends one request to a server; its argument is the request's time limit in seconds. Raises
    FailedCallError if no attempt succeeds.
    """
    # A check must not take as long as a call of the run may.
    limit_s = min(config.teacher.timeout_s, _REQUEST_LIMIT_S)
    for number in range(config.teacher.retries + 1):
        try:
            return ask(limit_s)
        except FailedCallError as error:
            if not error.may_retry or number == config.teacher.retries:
                raise
            pause_s = _FIRST_PAUSE_S * 2**number if error.wait_s is None else error.wait_s
            time.sleep(min(pause_s, limit_s))
    raise AssertionError("the last attempt raises")


# Side models


@dataclass(frozen=True)
class SideModel:
    """A teacher, critic or reward model that has weights of its own."""

    name: str
    kind: Kind
    path: str
    # The config key that holds `path`.
    key: str
    revision: str | None = None

    def num_bytes(self, config: Config, shapes: Shapes, num_ranks: int) -> int:
        """Returns the bytes that a rank holds of the model between updates, if its tensors have
        these shapes."""
        # A critic trains, so it has optimizer state. The others are frozen.
        if self.kind == "critic":
            return trained_bytes(shapes, num_ranks, config.optimizer)
        return ITEMSIZE[config.model.dtype] * shard_numel(shapes, num_ranks)


def head_shapes(hidden: int) -> Shapes:
    """Returns the shapes of a value head on hidden states of this size."""
    return {"weight": (1, hidden), "bias": (1,)}


def side_models(config: Config) -> list[SideModel]:
    """Returns the teachers, the critic and the reward models that have weights of their own."""
    models = [
        SideModel(f"teacher {name}".strip(), "teacher", path, "teacher.path")
        for name, path in config.teacher.paths.items()
        # A shared teacher costs no memory of its own.
        if not is_shared_teacher(config, path)
    ]
    if config.critic.path is not None and not config.critic.is_on_policy:
        models.append(SideModel("critic", "critic", config.critic.path, "critic.path"))
    for index, reward in enumerate(config.rewards):
        if reward.model is not None:
            name, key = f"reward model {reward.metric_name}", f"rewards.{index}.model"
            models.append(SideModel(name, "reward model", reward.model, key, reward.revision))
    return models


# Teachers


def check_teachers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Raises ConfigError if the teachers cannot be used.

    Their folders are checked like the policy's, then their vocabularies and the data rows. The hub
    (about models that are not in the cache) and servers are asked only if the run is about to start
    (`to_run`).
    """
    if config.teacher.url:
        check_servers(config, num_ranks=num_ranks, to_run=to_run)
    for name, path in config.teacher.paths.items():
        key = f"teacher.path.{name}" if name else "teacher.path"
        path = config.model.path if path == POLICY else path
        # vLLM does not run a teacher: its folder is checked as if on one rank, without adapters.
        model = dataclasses.replace(config.model, path=path, lora=LoraConfig())
        rollout = dataclasses.replace(config.rollout, tensor_parallel_size=1, engine={})
        teacher_config = dataclasses.replace(config, model=model, rollout=rollout)
        with errors_about(key):
            folder = check_model(teacher_config, to_run=False)
        if folder is None:
            if to_run:
                check_reachable("models", path, key)
            continue
        check_vocabulary(config.model.path, path, key)
        _check_top_k(config, folder, path)
    _check_teacher_prompts(config)
    _check_teacher_column(config)


def _check_top_k(config: Config, folder: Path, path: str) -> None:
    """Raises ConfigError if `teacher.top_k` is larger than the number of tokens that both models
    have."""
    # A teacher scores only tokens that the policy has too.
    policy_folder = local_folder(config.model.path)
    sizes = [num_embeddings(model) for model in (folder, policy_folder) if model is not None]
    num_shared = min(filter(None, sizes), default=config.teacher.top_k)
    if config.teacher.loss == "topk" and config.teacher.top_k > num_shared:
        raise ConfigError(
            f"teacher.top_k ({config.teacher.top_k}) is more than the tokens that {path} and "
            f"the policy share ({num_shared}); lower it, or set teacher.loss: full"
        )


def check_vocabulary(policy: str, model: str, key: str, kind: str = "teacher") -> None:
    """Raises ConfigError if a token id means another token in `model` than in the policy.

    A teacher or critic reads the policy's token ids as they are. `policy` and `model` are folders
    or hub ids, `key` is the config key of `model`. Models whose tokenizer files are not here are
    not compared.
    """
    folders = [local_folder(policy), local_folder(model)]
    if policy == model or None in folders:
        return
    policy_size, model_size = (num_embeddings(folder) for folder in folders if folder)
    # More tokens are allowed: embeddings are often padded to a round number.
    if policy_size is not None and model_size is not None and model_size < policy_size:
        raise ConfigError(
            f"{key}: {model} knows {model_size} tokens, and {policy} {policy_size}; take a "
            f"{kind} of the policy's family"
        )
    files = [folder / "tokenizer.json" for folder in folders if folder]
    if not all(file.is_file() for file in files):
        return
    policy_tokens, model_tokens = (tokens_of(file) for file in files)
    # The loss never compares tokens that only one of the models has.
    for token_id in sorted(policy_tokens.keys() & model_tokens.keys()):
        if policy_tokens[token_id] != model_tokens[token_id]:
            raise ConfigError(
                f"{key}: {model} has another vocabulary than {policy}: token {token_id} is "
                f"{model_tokens[token_id]!r} there, and {policy_tokens[token_id]!r} in the "
                "policy's; take one of its family"
            )


def teacher_data(config: Config) -> DataConfig | None:
    """Returns the config of the training set with the teacher's own prompts.

    Returns None if the teacher gets the same prompts as the policy."""
    prompt_key = config.teacher.prompt_key
    if not config.teacher.is_on or prompt_key is None:
        return None
    # A long prompt is an error: dropping its row would shift all later rows against the policy's.
    return dataclasses.replace(
        config.data, prompt_key=prompt_key, prompt_template=None, on_long_prompt="error"
    )


def _check_teacher_prompts(config: Config) -> None:
    """Raises ConfigError if the teacher's own prompts cannot be read, or are those of the
    policy."""
    data = teacher_data(config)
    if data is None:
        return
    if data.prompt_key == config.data.prompt_key and config.data.prompt_template is None:
        raise ConfigError(
            "teacher.prompt_key is data.prompt_key itself; name the teacher's own, or leave it out"
        )
    folder = local_folder(config.model.path)
    try:
        # Cached on the node: the run reads the same rows again.
        rows = read_rows(data)
        if folder is not None:
            check_prompts_early(rows, data, folder, num_embeddings(folder))
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.prompt_key", "teacher.prompt_key")) from None


def _check_teacher_column(config: Config) -> None:
    """Raises ConfigError if there are several teachers, and a row's column `teacher` names none."""
    names = config.teacher.names
    # A single teacher has the name "".
    for row in read_rows(config.data) if "" not in names else ():
        name = row.columns.get("teacher")
        if name not in names:
            key = "teacher.url" if config.teacher.url else "teacher.path"
            raise ConfigError(
                f"{row.where}: the column teacher must name one of {key}: {', '.join(names)}; "
                f"got {name!r}"
            )


# The critic


def check_critic_model(config: Config, *, to_run: bool = True) -> None:
    """Raises ConfigError if the critic's model cannot be used.

    The model must exist, be trainable and have the policy's vocabulary. It needs no tokenizer. A
    hub id that is not in the cache is only looked up at the hub, if the run is about to start
    (`to_run`).
    """
    # The critic is a value head on the policy's own model, which is checked elsewhere.
    if config.critic.is_on_policy:
        return
    path = str(config.critic.path)
    folder = find_model_folder(path, "critic.path", to_run=to_run)
    if folder is None:
        return
    with errors_about("critic.path"):
        model = read_model_config(folder)
        # Without its architectures, so that a classifier is not refused: a critic needs no lm_head.
        refuse_by_config(model | {"architectures": None}, path)
        # A classifier's head becomes the value head, so it must have exactly one label.
        shapes = shapes_from_headers(folder, tied=False)
        for name in (f"{head}.weight" for head in VALUE_HEADS):
            if name in shapes and shapes[name][0] > 1:
                raise ConfigError(
                    f"critic.path: {path} distinguishes {shapes[name][0]} labels ({name}: "
                    f"{model.get('id2label')!s:.100}), and a value is one number; take a "
                    "classifier of one label, or the causal LM that it was made from"
                )
        check_vocabulary(config.model.path, path, "critic.path", "critic")


# Reward models, and judges that the run's own vLLM engine serves

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
    tokenizer_files = read_tokenizer_files(files.folder)
    if not tokenizer_files.is_readable:
        file = files.folder / "tokenizer_config.json"
        raise ConfigError(f"{files.where}.model: cannot read {file} as JSON")
    template = files.template or tokenizer_files.template
    if template is None:
        problem += " are chat messages, and the model has no chat template"
        if (files.folder / "chat_template.json").is_file():
            problem += " (its chat_template.json is a processor's, which no tokenizer reads)"
        raise ConfigError(f"{key}: {problem}; give a file with one")
    with errors_about(key):
        render = renderer(template, tokenizer_files.settings, opens_turn=False)
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
        if read_tokenizer_files(folder).has_template is False:
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
