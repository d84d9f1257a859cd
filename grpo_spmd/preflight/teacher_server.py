"""What a teacher's server tells before a model is built: that it is there, has the model, and means by each token's id
what the policy does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.data.early import load_tokenizer_file
from grpo_spmd.preflight.model_facts import local_folder
from grpo_spmd.preflight.teacher import tokens_of
from grpo_spmd.rewards.remote.client import headers_of
from grpo_spmd.rewards.remote.prompt_logprobs import PromptLogprobs, Served
from grpo_spmd.rewards.trl import FailedCallError

T = TypeVar("T")
_MOST_S = 30.0  # of one request
_FIRST_PAUSE_S = 0.5
_NUM_PROBED = 256  # tokens of the policy's vocabulary


def check_servers(config: Config, *, num_ranks: int, to_run: bool) -> None:
    """Raises ConfigError. Asks them only `to_run`, and on one rank."""
    most = config.teacher.max_concurrent
    if most < num_ranks:
        why = "each of which makes its own share of the requests; raise it, or take fewer ranks"
        raise ConfigError(f"teacher.max_concurrent ({most}) must be >= the number of ranks ({num_ranks}), {why}")
    headers_of(config.teacher.headers_env, "teacher.headers_env")
    if to_run and os.environ.get("RANK", "0") == "0":
        for name in config.teacher.urls:
            check_server(config, name)


def check_server(config: Config, name: str) -> str:
    """The name that the teacher's server has for its model. Raises ConfigError where it is not there, or is no teacher
    for this run."""
    teacher, key = config.teacher, f"teacher.url.{name}" if name else "teacher.url"
    server = open_server(config, name, teacher.model)
    served = _served(config, server, key)
    longest = config.max_rollout_tokens + 1  # it samples one, which nobody needs
    if served.max_tokens is not None and served.max_tokens < longest:
        what = (
            f"{served.name} takes {served.max_tokens} tokens there, and the longest rollout and one more are {longest}"
        )
        raise ConfigError(f"{key}: {what}; start it with --max-model-len {longest}, or lower the rollout's limits")
    _check_vocabulary(config, open_server(config, name, served.name), key, served)
    return served.name


def open_server(config: Config, name: str, model: str | None) -> PromptLogprobs:
    headers = headers_of(config.teacher.headers_env, "teacher.headers_env")
    return PromptLogprobs(config.teacher.urls[name], headers, model)


def _served(config: Config, server: PromptLogprobs, key: str) -> Served:
    model = config.teacher.model
    try:
        found = _patiently(config, server.served)
    except FailedCallError as error:
        if model is not None and error.status is not None:  # it is there, and only has no list
            return Served(model, None)
        how = "start it, or correct the address" if error.status is None else "or name its model: teacher.model"
        raise ConfigError(f"{key}: the server {error}; {how}") from None
    names = [each.name for each in found]
    if model is None and len(found) == 1:
        return found[0]
    if model not in names:
        rule = "must be one that the server has" if model is not None else "is needed where a server has several"
        raise ConfigError(f"teacher.model {rule} ({key} has {', '.join(names) or 'none'}); got {model}")
    return found[names.index(model)]


def _check_vocabulary(config: Config, server: PromptLogprobs, key: str, served: Served) -> None:
    """What its server writes for each of some tokens beside what the policy's tokenizer does. What one of both does not
    write by itself, a part of a character, is not held against it."""
    folder, top_k = local_folder(config.model.path), config.teacher.top_k if config.teacher.loss == "topk" else 0
    file = None if folder is None else folder / "tokenizer.json"
    ids = [0] if file is None or not file.is_file() else sorted(tokens_of(file))
    most = min(_NUM_PROBED, (served.max_tokens or _NUM_PROBED) - 2)
    ids = sorted({ids[place * (len(ids) - 1) // most] for place in range(most + 1)})
    asked = [ids[0], *ids]  # of the first nothing is said

    def texts(number: int) -> list[str]:
        return _patiently(config, lambda limit_s: server.texts(asked, number, limit_s))

    try:
        said = texts(top_k)
    except FailedCallError as error:
        if not top_k or error.status != 400:
            raise ConfigError(f"{key}: {_why(error, config, served)}") from None
        try:
            texts(0)
        except FailedCallError as without:
            raise ConfigError(f"{key}: {_why(without, config, served)}") from None
        how = f"start it with --max-logprobs {top_k}, or lower teacher.top_k"
        raise ConfigError(f"teacher.top_k ({top_k}) is more than the server takes; {how}: it {error}") from None
    if file is None or not file.is_file():
        return
    tokenizer = load_tokenizer_file(file)
    own = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    pairs = [(i, a, b) for i, a, b in zip(ids, own, said, strict=True) if _is_whole(a) and _is_whole(b)]
    if not pairs:
        raise ConfigError(f"{key}: the server does not say what tokens are; start it with its tokenizer")
    odd = next(((i, a, b) for i, a, b in pairs if a.strip() != b.strip()), None)
    if odd is not None:
        what = f"token {odd[0]} is {odd[2]!r} there, and {odd[1]!r} in the policy's"
        rule = f"{served.name} has another vocabulary than {config.model.path}"
        raise ConfigError(f"{key}: {rule}: {what}; take a teacher of its family")


def _why(error: FailedCallError, config: Config, served: Served) -> str:
    if error.status == 400:
        rule = "teachers have the policy's vocabulary, and give prompt_logprobs as vLLM does"
        return f"{served.name} does not take tokens of {config.model.path} ({rule}): the server {error}"
    return f"the server {error}; it must be vLLM's"


def _is_whole(text: str) -> bool:
    return bool(text) and "\ufffd" not in text


def _patiently(config: Config, ask: Callable[[float], T]) -> T:
    """What `ask` gives, asked again as the run asks again. Raises FailedCallError."""
    limit_s = min(config.teacher.timeout_s, _MOST_S)
    for number in range(config.teacher.retries + 1):
        try:
            return ask(limit_s)
        except FailedCallError as error:
            if not error.may_retry or number == config.teacher.retries:
                raise
            time.sleep(min(_FIRST_PAUSE_S * 2**number if error.wait_s is None else error.wait_s, limit_s))
    raise AssertionError("the last time raises")
