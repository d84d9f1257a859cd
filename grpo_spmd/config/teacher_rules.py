"""What the section `teacher` may say of a server."""

from __future__ import annotations

from dataclasses import fields
from urllib.parse import urlsplit

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.reward_rules import check_headers, check_url
from grpo_spmd.config.teacher import TeacherConfig

_OF_A_URL = ("model", "timeout_s", "max_concurrent", "retries", "headers_env")


def check_teacher_url(teacher: TeacherConfig, temperature: float) -> None:
    """Raises ConfigError. `temperature`: of the rollouts."""
    if teacher.path and teacher.url:
        raise ConfigError("teacher has path and url, and is one of them; take one out")
    if not teacher.url:
        defaults = {field.name: field.default for field in fields(TeacherConfig)} | {"headers_env": {}}
        for name in _OF_A_URL:
            if getattr(teacher, name) != defaults[name]:
                raise ConfigError(f"teacher.{name} is of a url; set teacher.url, or take it out")
        return
    for name, url in teacher.urls.items():
        key = f"teacher.url.{name}" if name else "teacher.url"
        check_url(key, url)
        path = urlsplit(url).path
        if "/" in name or not path.endswith("/completions") or path.endswith("/chat/completions"):
            rule = "must be the address of completions, such as http://host:8000/v1/completions, with a name without /"
            raise ConfigError(f"{key} {rule}; got {url!r}")
    check_headers("teacher.headers_env", teacher.headers_env)
    if teacher.loss == "full":
        raise ConfigError("teacher.loss: full needs the whole distribution, which no url gives; take topk, or a path")
    if temperature != 1:
        rule = f"rollout.temperature ({temperature:g}) must be 1 with teacher.url, whose logprobs are of temperature 1"
        raise ConfigError(f"{rule}; set it to 1, or take teacher.path")
