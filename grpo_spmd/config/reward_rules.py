"""What an entry of `rewards` may say together with what."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from urllib.parse import urlsplit

from grpo_spmd.config.dump import SECRET, SECRET_NAME
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.reward_keys import RewardConfig

_OF_A_CALL = ("timeout_s", "max_concurrent", "max_per_minute")
_OF_A_URL = ("retries", "headers_env", "form", "judge")
_OF_A_MODEL = ("label", "max_tokens", "on_long", "template", "revision")
_OF_A_JUDGE = ("judge_model", "judge_scale")
_OF_A_SERVER = ("retries", "headers_env", "form", "judge_model")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
# Those that say how the body is sent, which is the client's matter.
_OWN_HEADERS = ("host", "content-length", "content-type", "content-encoding", "transfer-encoding", "connection",
                "accept-encoding", "expect", "te", "trailer", "upgrade")  # fmt: skip


def check_reward(where: str, reward: RewardConfig) -> None:
    """Raises ConfigError, which begins with `where`, the entry."""
    given = [name for name in ("function", "url", "model") if getattr(reward, name) is not None]
    if len(given) > 1:
        raise ConfigError(f"{where} has {' and '.join(given)}, and a reward is one of them; make it two entries")
    if not given and reward.name is None:
        what = (
            "needs a name (a shipped reward) or a function (file.py:function) or a url or a model (a folder or hub id)"
        )
        raise ConfigError(f"{where} {what}")
    if reward.is_shipped or reward.model is not None:
        _refuse_set(where, reward, _OF_A_CALL, "is of a function or a url; reward_pool.timeout_s bounds all rewards")
    if reward.model is None:
        of_model = tuple(name for name in _OF_A_MODEL if not (reward.by_engine and name == "max_tokens"))
        _refuse_set(where, reward, of_model, "is of a reward model")
    elif reward.args:
        raise ConfigError(f"{where}.args: they are for a function or a url, and a model takes none; take it out")
    if reward.url is None:
        _refuse_set(where, reward, _OF_A_URL, "is of a url")
    if reward.judge is None:
        _refuse_set(where, reward, _OF_A_JUDGE, "is of a judge; set judge, a rubric's file")
    if reward.model is not None and reward.shown_name in ("", ".."):
        raise ConfigError(f"{where}.name: {reward.model!r} ends with no name, which its metrics bear; set name")
    if reward.by_engine:
        _check_engine_judge(where, reward)
    else:
        _refuse_set(where, reward, ("judge_tokens",), "is of url: engine; a judge's server takes args: {max_tokens: N}")
    if reward.url is not None and not reward.by_engine:
        check_url(f"{where}.url", reward.url)
        check_headers(f"{where}.headers_env", reward.headers_env)
    if reward.judge is not None:
        _check_judge(where, reward)


def _refuse_set(where: str, reward: RewardConfig, names: tuple[str, ...], why: str) -> None:
    defaults = {field.name: field.default for field in fields(RewardConfig)} | {"headers_env": {}}
    for name in names:
        if getattr(reward, name) != defaults[name]:
            raise ConfigError(f"{where}.{name} {why}; take it out")


def check_url(where: str, url: str) -> None:
    """What it says is not shown where it may hold a secret."""
    address, _, query = url.partition("?")
    parameters = [parameter.partition("=")[0] for parameter in query.split("&")]
    is_secret = any(SECRET_NAME.search(name) or name.lower() == "code" for name in parameters)  # code: Azure's
    if SECRET.search(url) or "@" in address or is_secret:
        raise ConfigError(f"{where} holds a password or a key, and would be written down; give it by headers_env")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0 and url.isascii() and not re.search(r"\s", url)
        (parts.hostname or "").encode("idna")
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https") or parts.fragment:
        raise ConfigError(f"{where} must be an address such as http://host:8000/path; got {url!r}")


def check_headers(where: str, headers: Mapping[str, str]) -> None:
    for name, variable in headers.items():
        if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise ConfigError(f"{where}: {name!r:.100} is no header that can be given")
        if not _VARIABLE.fullmatch(variable) or SECRET.search(variable):
            rule = "must be the name of an environment variable, in capitals, and not what it holds"
            raise ConfigError(f"{where}.{name} {rule} (not shown here)")
    if len({name.lower() for name in headers}) < len(headers):
        raise ConfigError(f"{where} names a header twice: {', '.join(headers)}")


def _check_engine_judge(where: str, reward: RewardConfig) -> None:
    if reward.judge is None:
        raise ConfigError(f"{where}.judge: url: engine is the policy as a judge, by a rubric; give the rubric's file")
    _refuse_set(where, reward, (*_OF_A_CALL, *_OF_A_SERVER), "is of a server, and url: engine is the run's own engine")
    if reward.args:
        raise ConfigError(f"{where}.args: they are for a function or a server, and url: engine takes none; take it out")


def _check_judge(where: str, reward: RewardConfig) -> None:
    if reward.judge_model is None and not reward.by_engine:
        raise ConfigError(f"{where}.judge needs judge_model, the name that the server at url has for it")
    if reward.form != "slime":
        raise ConfigError(f"{where}.form ({reward.form}) is of a server that is no judge; take it out")
    low, high = reward.judge_scale
    if not low < high:
        raise ConfigError(f"{where}.judge_scale must be its lowest and its highest score; got {low:g}, {high:g}")
