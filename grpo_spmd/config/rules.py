"""Rules between config keys: which keys need, exclude or bound each other.

The functions named ..._errors yield an error message for each broken rule, and `check_rules` raises
the first of them. The bounds of a single key are in its declaration (schema.py).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from grpo_spmd.config.coerce import read_table
from grpo_spmd.config.describe import SECRET, SECRET_NAME, default_of, flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import (
    ADAPTER_RANKS,
    PHASES,
    POLICY,
    TRACKERS,
    Config,
    LoggingConfig,
    RewardConfig,
    TeacherConfig,
)

# Variables of chat templates that the trainer sets itself.
_TEMPLATE_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt"}


def check_rules(config: Config) -> None:
    """Raises ConfigError for the first combination of keys that cannot work."""
    for error in _errors(config):
        raise ConfigError(error)


def _errors(config: Config) -> Iterator[str]:
    """Yields an error message for each broken rule."""
    # The table of conflicting values comes first, because its messages explain later errors.
    values = flatten_config(config)
    for conditions, remedy in read_table("conflicts.tsv"):
        if facts := met_conditions(conditions, values):
            yield f"{facts}: {remedy}"
    yield from _size_errors(config)
    for names, reason in read_table("engine_keys.tsv"):
        for name in names.split(", "):
            if name in config.rollout.engine:
                yield f"rollout.engine.{name}: {reason}"
    if config.rollout.speculation and config.rollout.engine.get("async_scheduling"):
        yield (
            "rollout.engine.async_scheduling: with rollout.speculation each step's drafts need the "
            "tokens of the step before; take it out"
        )
    loss = config.loss
    upper = 1.0 + loss.clip_ratio_high
    # dual_clip is used by clip and gspo only; in CISPO the ratio is a detached weight.
    if loss.dual_clip is not None and loss.policy != "cispo" and loss.dual_clip <= upper:
        yield (
            f"loss.dual_clip ({loss.dual_clip:g}) must be > 1 + loss.clip_ratio_high ({upper:g}), "
            "or it would clip ratios that the upper clip allows; raise it, or set it to null"
        )
    yield from _evaluation_errors(config)
    if config.optimizer.min_lr > config.optimizer.lr:
        yield (
            f"optimizer.min_lr ({config.optimizer.min_lr:g}) must be <= optimizer.lr "
            f"({config.optimizer.lr:g})"
        )
    yield from logging_errors(config.logging)
    # The environment is not started here. If it may give rewards, it is assumed to give one with a
    # weight; check_known_rewards checks the rules again when the rewards are known.
    yield from _signal_errors(config, _has_weighted_reward(config) or config.environment.can_reward)
    yield from _environment_errors(config)
    # str.format would accept a template without columns.
    template = config.data.prompt_template
    if template is not None and not re.search(r"\{\w+\}", template):
        yield (
            "data.prompt_template names no column in braces, as {question} does, "
            f"so all prompts would be the same; got {template!r}"
        )
    for name in _TEMPLATE_VARIABLES & config.data.chat_template_kwargs.keys():
        yield (f"data.chat_template_kwargs.{name}: the trainer sets this itself; take it out")
    sharing = config.model.sequence_parallel_size
    if sharing > 1 and (config.teacher.is_on or config.critic.path is not None):
        key = "teacher" if config.teacher.is_on else "critic"
        yield (
            f"model.sequence_parallel_size ({sharing}): a {key} does not score rows that ranks "
            "share; set it to 1"
        )
    lora = config.model.lora
    # vLLM takes adapters up to its largest rank only.
    if lora.base_stays_in_engine and lora.rank > ADAPTER_RANKS[-1]:
        yield (
            f"model.lora.rank: {lora.rank} is more than vLLM takes ({ADAPTER_RANKS[-1]}); "
            "set model.lora.sync: merged"
        )
    phases = ("start", *PHASES)
    for name in config.watchdog.phase_timeouts_s:
        if name not in phases:
            yield f"watchdog.phase_timeouts_s.{name}: no such phase; there are {', '.join(phases)}"
    if not (config.rewards or config.environment.can_reward or config.teacher.is_on):
        yield "rewards must name at least one reward, e.g. `rewards: [{name: gsm8k}]`"
    for index, reward in enumerate(config.rewards):
        yield from _reward_errors(f"rewards.{index}", reward)
    # The run would write its files among those of the model.
    if os.path.realpath(config.run_dir) == os.path.realpath(config.model.path):
        yield (
            f"run_dir: {config.run_dir} is the folder of model.path; a run has a folder of its own"
        )


def met_conditions(conditions: str, values: Mapping[str, Any]) -> str:
    """Returns "KEY is VALUE and ..." if the flat config `values` meets all `conditions`, else "".

    `conditions` is a cell of a .tsv table, in the syntax that idle_keys.tsv explains.
    """
    facts = []
    for condition in conditions.split(" & "):
        key, sign, words = condition.split()
        value = values[key]
        # json.dumps writes null, true and numbers like YAML. A float such as 1.0 is written as 1.
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')
        if (text in words.split("|")) != (sign == "="):
            return ""
        facts.append(f"{key} is {text}")
    return " and ".join(facts)


def check_known_rewards(config: Config, weights: Mapping[str, float]) -> None:
    """Checks the rules about rewards again, now that the environment's own rewards are known.

    Raises ConfigError. `weights` has the weights of all rewards except reward models, by name.
    """
    has_rewards = any(weights.values()) or _has_weighted_reward(config)
    if not (has_rewards or config.teacher.is_on):
        raise ConfigError(
            "rewards: the environment gives none, and no other has a weight; name one, e.g. "
            "`rewards: [{function: my.py:reward}]`"
        )
    for error in _signal_errors(config, has_rewards):
        raise ConfigError(error)


def _signal_errors(config: Config, has_rewards: bool) -> Iterator[str]:
    """Yields the errors of critic and teacher. `has_rewards` is True if a reward has a weight other
    than 0."""
    yield from _critic_errors(config, has_rewards)
    yield from _teacher_errors(config, has_rewards)
    yield from _teacher_url_errors(config.teacher, config.rollout.temperature)


def logging_errors(logging: LoggingConfig) -> Iterator[str]:
    """Yields the errors of section `logging`."""
    for name in logging.trackers:
        if name not in TRACKERS:
            yield f"logging.trackers: no tracker {name!r}; there are {', '.join(TRACKERS)}"
    # Trackers read rollouts from the files of logging.rollouts_every_steps.
    every_steps = logging.trackers_rollouts_every_steps
    dump_steps = logging.rollouts_every_steps
    key = f"logging.trackers_rollouts_every_steps ({every_steps})"
    if every_steps and not logging.tracker_names:
        yield (
            f"{key} needs a tracker: set logging.trackers, e.g. to [tensorboard], or leave it out"
        )
    if every_steps and (not dump_steps or every_steps % dump_steps):
        yield (
            f"{key} must be a multiple of logging.rollouts_every_steps ({dump_steps}), "
            "whose files it reads; set it to another"
        )


def _has_weighted_reward(config: Config) -> bool:
    """Returns True if a reward of the config has a weight other than 0."""
    return any(reward.weight for reward in config.rewards)


def _size_errors(config: Config) -> Iterator[str]:
    """Yields the errors of sizes that do not fit each other."""
    rollout = config.rollout
    prompt_tokens = config.data.max_prompt_tokens
    rollout_tokens = config.max_rollout_tokens
    micro_batch_tokens = config.micro_batch_tokens
    if micro_batch_tokens < rollout_tokens:
        yield (
            f"training.max_tokens_per_micro_batch ({micro_batch_tokens}) must hold the longest "
            f"rollout ({rollout_tokens} tokens): data.max_prompt_tokens ({prompt_tokens}) and "
            f"rollout.max_completion_tokens, or in an episode environment.max_tokens "
            f"({rollout_tokens - prompt_tokens}); raise the first or lower one of the others"
        )
    # Each mini-batch has the same number of prompts.
    mini_batches = config.training.num_mini_batches
    if rollout.num_prompts_per_step % mini_batches:
        yield (
            f"training.num_mini_batches ({mini_batches}) must divide rollout.num_prompts_per_step "
            f"({rollout.num_prompts_per_step}), so that all optimizer steps have equally many"
            " prompts"
        )
    # A buffer as long as the longest completion already penalizes every completion.
    overlong_tokens = config.advantage.overlong_buffer_tokens
    if overlong_tokens > rollout.max_completion_tokens:
        yield (
            f"advantage.overlong_buffer_tokens ({overlong_tokens}) must be <= "
            f"rollout.max_completion_tokens ({rollout.max_completion_tokens})"
        )


def _evaluation_errors(config: Config) -> Iterator[str]:
    """Yields the errors of section `eval`, `data.eval` and `checkpoint.best_metric`."""
    sets = config.data.eval_sets
    every_steps = config.eval.every_steps
    temperature = config.eval.temperature
    if sets and not every_steps:
        yield (
            "data.eval is set, but eval.every_steps is 0, so that nothing would be evaluated; "
            "set it, e.g. to 20"
        )
    if every_steps and not sets:
        yield (
            "eval.every_steps needs held-out sets: "
            "set data.eval, e.g. {gsm8k: hub:openai/gsm8k:main:test}"
        )
    # vLLM silently raises lower temperatures to 0.01.
    if 0 < temperature < 0.01:
        yield f"eval.temperature must be 0 (greedy) or >= 0.01; got {temperature:g}"
    # The metric eval/SET/mean only exists if there is such a set.
    metric = config.checkpoint.best_metric or ""
    if metric.startswith("eval/") and metric.split("/")[1] not in sets:
        names = ", ".join(sets) or "no held-out sets"
        yield (
            f"checkpoint.best_metric ({metric}) is of a set that data.eval does not have: {names}"
        )
    for name, source in sets.items():
        if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", name):
            yield (
                f"data.eval.{name} must be a name (letters, digits, . _ -) with a source as in "
                f"data.train; got {source!r}"
            )


def _environment_errors(config: Config) -> Iterator[str]:
    """Yields the errors of section `environment`."""
    environment = config.environment
    kinds = [name for name in ("gym", "agent") if getattr(environment, name)]
    if environment.tools or environment.factory:
        kinds.insert(0, "tools" if environment.tools else "factory")
    if len(kinds) > 1:
        yield (
            f"environment.{kinds[0]} and environment.{kinds[1]} are two ways to run an episode; "
            "leave one out (tools and factory go together)"
        )
    if environment.is_on and config.rollout.tail_batching > 1:
        yield (
            f"rollout.tail_batching and environment.{kinds[0]} do not go together: an episode that "
            "waits for its environment would be dropped as a slow one; set tail_batching: 1"
        )
    overlong_tokens = config.advantage.overlong_buffer_tokens
    if environment.is_on and overlong_tokens:
        yield (
            f"advantage.overlong_buffer_tokens ({overlong_tokens}) with environment.{kinds[0]}: "
            "it measures one completion, not the turns of an episode; set it to 0"
        )
    has_turn_rewards = environment.gym or not environment.is_on
    if environment.discount is not None and not has_turn_rewards:
        yield (
            f"environment.discount ({environment.discount:g}) credits turns with rewards of their "
            "own, which only a step of environment.gym gives; leave it out"
        )


def _critic_errors(config: Config, has_rewards: bool) -> Iterator[str]:
    """Yields the errors of section `critic`; `has_rewards` is as in `_signal_errors`."""
    critic = config.critic
    if critic.path is None:
        return
    if not critic.path.strip():
        yield "critic.path is empty; name a model's folder or hub id, or leave it out"
    if not has_rewards:
        yield (
            "critic.path: a critic learns to predict rewards, and no reward has a weight; "
            "give one a weight, or leave the critic out"
        )
    if critic.warmup_steps >= config.training.num_steps:
        yield (
            f"critic.warmup_steps ({critic.warmup_steps}) must be < training.num_steps "
            f"({config.training.num_steps}), or the policy is never trained"
        )


def _teacher_errors(config: Config, has_rewards: bool) -> Iterator[str]:
    """Yields the errors of section `teacher`; `has_rewards` is as in `_signal_errors`."""
    teacher = config.teacher
    # Not in conflicts.tsv: its errors name values, and a template may be pages long.
    if teacher.prompt_key is not None and teacher.prompt_template is not None:
        yield "teacher has prompt_key and prompt_template, and takes one of them; take one out"
    if POLICY in teacher.paths.values() and not teacher.sees_other_prompt:
        yield (
            "teacher.path: policy teaches nothing after the policy's own prompt; set "
            "teacher.prompt_key or teacher.prompt_template (a folder of that name is ./policy)"
        )
    if teacher.is_on and teacher.sees_other_prompt and config.environment.is_on:
        key = "prompt_key" if teacher.prompt_template is None else "prompt_template"
        yield (
            f"teacher.{key} with an environment: the later turns of an episode contain its prompt "
            "again, and the teacher's prompt would not replace it there; leave one of them out"
        )
    # Without rewards all advantages of a group are the same.
    is_alone = teacher.is_on and not has_rewards
    if is_alone and config.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling with a teacher alone: no reward has a weight, so all groups "
            "have equal rewards and would be dropped; set dynamic_sampling: false"
        )
    if is_alone and config.loss.kl_in == "reward":
        yield (
            "loss.kl_in: reward with a teacher alone: no reward has a weight, so there is none "
            "from which the KL could be subtracted; set kl_in: loss"
        )
    for name, path in teacher.paths.items():
        if not path.strip() or "/" in name:
            yield (
                f"teacher.path.{name} needs a path, and a name without a slash, since metrics bear "
                f"it (teacher/NAME/kl); got {path!r}"
            )


def _teacher_url_errors(teacher: TeacherConfig, temperature: float) -> Iterator[str]:
    """Yields the errors of a teacher behind a server. `temperature` is rollout.temperature."""
    if teacher.path and teacher.url:
        yield "teacher has both path and url, and only one can be used; take one out"
    if not teacher.url:
        keys = ("model", "timeout_s", "max_concurrent", "retries", "headers_env")
        for name in _keys_set(teacher, keys):
            yield f"teacher.{name} is of a url; set teacher.url, or take it out"
        return
    for name, url in teacher.urls.items():
        key = f"teacher.url.{name}" if name else "teacher.url"
        errors = [*_url_errors(key, url)]
        yield from errors
        path = urlsplit(url).path
        is_completions = path.endswith("/completions") and not path.endswith("/chat/completions")
        # A URL with errors is not quoted, because it may hold a secret.
        if not errors and ("/" in name or not is_completions):
            yield (
                f"{key} must be the address of completions, such as "
                f"http://host:8000/v1/completions, with a name without /; got {url!r}"
            )
    yield from _header_errors("teacher.headers_env", teacher.headers_env)
    if teacher.loss == "full":
        yield (
            "teacher.loss: full needs the whole distribution, which a server does not send; "
            "set loss: topk, or teacher.path in place of url"
        )
    # A server's prompt logprobs are always those of temperature 1, and the policy's are compared
    # with them.
    if temperature != 1:
        yield (
            f"rollout.temperature ({temperature:g}) must be 1 with teacher.url, whose logprobs are "
            "of temperature 1; set it to 1, or take teacher.path"
        )


# Keys of a reward that only apply to some kinds of rewards.
_CALL_KEYS = ("timeout_s", "max_concurrent", "max_per_minute")
_SERVER_KEYS = ("retries", "headers_env", "form", "judge_model")
_URL_KEYS = ("retries", "headers_env", "form", "judge")
_MODEL_KEYS = ("label", "on_long", "template", "revision")
_JUDGE_KEYS = ("judge_model", "judge_scale")


def _reward_errors(prefix: str, reward: RewardConfig) -> Iterator[str]:
    """Yields the errors of one entry of `rewards`, whose dotted key is `prefix`."""
    kinds = [name for name in ("function", "url", "model") if getattr(reward, name) is not None]
    if len(kinds) > 1:
        yield (
            f"{prefix} has {' and '.join(kinds)}, but a reward has only one of them; make it two "
            "entries"
        )
    if not kinds and reward.name is None:
        yield (
            f"{prefix} needs a name (a shipped reward) or a function (file.py:function) or a url "
            "or a model (a folder or hub id)"
        )
    is_model = reward.model is not None
    is_engine = reward.is_engine_judge
    if is_engine and reward.judge is None:
        yield (
            f"{prefix}.judge: url: engine is the policy as a judge, by a rubric; "
            "give the rubric's file"
        )
    # Each entry is (True if the keys must not be set, the keys, the reason).
    for is_refused, names, reason in (
        (
            reward.is_shipped or is_model,
            _CALL_KEYS,
            " belongs to a function or a url; reward_pool.timeout_s bounds all rewards",
        ),
        (not is_model, _MODEL_KEYS, " belongs to a reward model"),
        (
            not is_model and not is_engine,
            ("max_tokens",),
            " belongs to a reward model or an engine's judge",
        ),
        (is_model, ("args",), ": they are for a function or a url, and a model takes none"),
        (reward.url is None, _URL_KEYS, " belongs to a url"),
        (reward.judge is None, _JUDGE_KEYS, " belongs to a judge; set judge, a rubric's file"),
        (
            is_engine,
            _CALL_KEYS + _SERVER_KEYS,
            " belongs to a server, and url: engine is the run's own engine",
        ),
        (
            is_engine,
            ("args",),
            ": they are for a function or a server, and url: engine takes none",
        ),
        (
            not is_engine,
            ("judge_tokens",),
            " is of url: engine; a judge's server takes args: {max_tokens: N}",
        ),
    ):
        for name in _keys_set(reward, names) if is_refused else ():
            yield f"{prefix}.{name}{reason}; take it out"
    if is_model and reward.metric_name in ("", ".."):
        yield (
            f"{prefix}.name: {reward.model!r} ends with no name, which its metrics bear; set name"
        )
    if reward.url is not None and not is_engine:
        yield from _url_errors(f"{prefix}.url", reward.url)
        yield from _header_errors(f"{prefix}.headers_env", reward.headers_env)
    if reward.judge is None:
        return
    if reward.judge_model is None and not is_engine:
        yield f"{prefix}.judge needs judge_model, the name that the server at url has for it"
    if reward.form != "slime":
        yield f"{prefix}.form ({reward.form}) is of a server that is no judge; take it out"
    low, high = reward.judge_scale
    if not low < high:
        yield (
            f"{prefix}.judge_scale must be its lowest and its highest score; got {low:g}, {high:g}"
        )


def _keys_set(section: Any, names: Iterable[str]) -> list[str]:
    """Returns the keys among `names` that the user has changed: their value is not the default."""
    defaults = {field.name: default_of(field) for field in fields(section)}
    return [name for name in names if getattr(section, name) != defaults[name]]


def _url_errors(prefix: str, url: str) -> Iterator[str]:
    """Yields the errors of a URL. The messages do not quote it if it may hold a secret."""
    address, _, query = url.partition("?")
    parameters = [parameter.partition("=")[0] for parameter in query.split("&")]
    # Azure's access keys are in a parameter named "code".
    has_secret = any(SECRET_NAME.search(name) or name.lower() == "code" for name in parameters)
    if SECRET.search(url) or "@" in address or has_secret:
        yield (
            f"{prefix} holds a password or a key, and would be written down; give it by headers_env"
        )
    elif not _ADDRESS.fullmatch(url):
        yield f"{prefix} must be an address such as http://host:8000/path; got {url!r}"


_ADDRESS = re.compile(
    r"https?://([\w-]+(\.[\w-]+)*\.?|\[[\da-f:.]+\])(:([1-9]\d{0,3}|[1-5]\d{4}|6[0-5]\d{3}))?"
    r"([/?][!-\"$-~]*)?",
    re.ASCII | re.IGNORECASE,
)
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,99}")
# Headers about the connection and the body, which the HTTP client sets itself.
_CLIENT_HEADERS = re.compile(
    r"host|content-.*|transfer-encoding|connection|accept-encoding|expect|te|trailer|upgrade",
    re.IGNORECASE,
)


def _header_errors(prefix: str, headers: Mapping[str, str]) -> Iterator[str]:
    """Yields the errors of a key headers_env: {header: name of an environment variable}."""
    for name, variable in headers.items():
        if not _HEADER.fullmatch(name) or _CLIENT_HEADERS.fullmatch(name):
            yield f"{prefix}: {name!r:.100} is no header that can be given"
        # The value is not shown, because it may be the secret itself.
        if not _VARIABLE.fullmatch(variable) or SECRET.search(variable):
            yield (
                f"{prefix}.{name} must be the name of an environment variable, in capitals, and "
                "not what it holds (not shown here)"
            )
    # The names of HTTP headers are not case-sensitive.
    if len({name.lower() for name in headers}) < len(headers):
        yield f"{prefix} names a header twice: {', '.join(headers)}"
