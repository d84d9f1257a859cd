"""Early check of teachers behind a server: it answers, has the model, and shares the vocabulary.

What a server says comes from the network: it is compared, never trusted. Imports no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grpo_spmd.checks.data import load_tokenizer_file
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import local_folder
from grpo_spmd.rewards.remote.client import PromptLogprobs, ServedModel, headers_of
from grpo_spmd.rewards.trl import FailedCallError

T = TypeVar("T")
_REQUEST_LIMIT_S = 30.0
_FIRST_PAUSE_S = 0.5
_NUM_PROBED = 256  # tokens of the policy's vocabulary


def tokens_of(file: Path) -> dict[int, str]:
    """Tokens of a tokenizer.json by their ids."""
    vocabulary = load_tokenizer_file(file).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}


def check_servers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Check the teachers' servers. They are asked only `to_run`, and by rank 0 alone. Raises
    ConfigError."""
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
    """Check the server of the teacher `name` and return its name for the model. Raises
    ConfigError if it does not answer, or cannot teach this policy."""
    key = f"teacher.url.{name}" if name else "teacher.url"
    served = _choose_model(config, open_server(config, name, config.teacher.model), key)
    # vLLM samples one token more, which nobody needs.
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
    headers = headers_of(config.teacher.headers_env, "teacher.headers_env")
    return PromptLogprobs(config.teacher.urls[name], headers, model)


def _choose_model(config: Config, server: PromptLogprobs, key: str) -> ServedModel:
    """The server's model that `teacher.model` names, or its only one."""
    model = config.teacher.model
    try:
        models = _call_with_retries(config, server.list_models)
    except FailedCallError as error:
        # A status shows that the server is there: it only has no list of its models.
        if model is not None and error.status is not None:
            return ServedModel(model, None)
        remedy = "or name its model: teacher.model"
        if error.status is None:
            remedy = "start it, or correct the address"
        raise ConfigError(f"{key}: the server {error}; {remedy}") from None
    if model is None and len(models) == 1:
        return models[0]
    names = [served.name for served in models]
    if model not in names:
        rule = "must be one that the server has"
        if model is None:
            rule = "is needed where a server has several"
        available = ", ".join(names) or "none"
        raise ConfigError(f"teacher.model {rule} ({key} has {available}); got {model}")
    return models[names.index(model)]


def _compare_vocabulary(
    config: Config, server: PromptLogprobs, key: str, served: ServedModel
) -> None:
    """Compare what the server writes for some token ids with the policy's tokenizer. Tokens that
    either cannot write alone, such as a part of a character, are not compared."""
    folder = local_folder(config.model.path)
    file = None if folder is None else folder / "tokenizer.json"
    has_file = file is not None and file.is_file()
    known_ids = sorted(tokens_of(file)) if file is not None and has_file else [0]
    num_probed = min(_NUM_PROBED, (served.max_tokens or _NUM_PROBED) - 2)
    # Evenly over the vocabulary: models of one family differ in added tokens at its end.
    spread = (i * (len(known_ids) - 1) // num_probed for i in range(num_probed + 1))
    ids = sorted({known_ids[index] for index in spread})
    server_texts = _ask_texts(config, server, ids, key=key, served=served)
    if file is None or not has_file:
        return
    tokenizer = load_tokenizer_file(file)
    num_compared = 0
    for token_id, server_text in zip(ids, server_texts, strict=True):
        policy_text = tokenizer.decode([token_id], skip_special_tokens=False)
        if not _is_complete(policy_text) or not _is_complete(server_text):
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
    """The server's texts of `ids`, asked with as many logprobs as the run will ask for."""
    # A server says nothing of a prompt's first token.
    prompt = [ids[0], *ids]

    def ask(num_logprobs: int) -> list[str]:
        return _call_with_retries(config, lambda s: server.texts(prompt, num_logprobs, s))

    top_k = config.teacher.top_k if config.teacher.loss == "topk" else 0
    try:
        return ask(top_k)
    except FailedCallError as error:
        refusal = error
    # 400 may mean that top_k is too large: then the same call without it succeeds.
    if top_k and refusal.status == 400:
        try:
            ask(0)
        except FailedCallError as error:
            refusal = error
        else:
            raise ConfigError(
                f"teacher.top_k ({top_k}) is more than the server takes; start it with "
                f"--max-logprobs {top_k}, or lower teacher.top_k: it {refusal}"
            )
    raise ConfigError(f"{key}: {_explain_refusal(refusal, config, served)}")


def _explain_refusal(error: FailedCallError, config: Config, served: ServedModel) -> str:
    if error.status == 400:
        return (
            f"{served.name} does not take tokens of {config.model.path} (teachers have the "
            f"policy's vocabulary, and give prompt_logprobs as vLLM does): the server {error}"
        )
    return f"the server {error}; it must be vLLM's"


def _is_complete(text: str) -> bool:
    return bool(text) and "\ufffd" not in text


def _call_with_retries(config: Config, ask: Callable[[float], T]) -> T:
    """What `ask` returns, retried as the run retries. Raises FailedCallError."""
    # A check may not take as long as a call of the run.
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
