"""What the bounds of single keys cannot say: keys that need, exclude or bound each other."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from urllib.parse import urlsplit

from grpo_spmd.config.coerce import REFUSED_KEYS
from grpo_spmd.config.describe import SECRET, SECRET_NAME
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import (
    ADAPTER_RANKS,
    PHASES,
    Config,
    LossConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TeacherConfig,
    check_critic,
    check_environment,
    check_logging,
    check_teacher,
)

# What the trainer itself decides about the engine, where a second value would be a second truth, and where it is set.
_ENGINE_KEYS_OWNED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_lora": "model.lora.sync",
    "max_lora_rank": "model.lora.rank",
    "max_model_len": "data.max_prompt_tokens and rollout.max_completion_tokens",
    "max_tokens": "rollout.max_completion_tokens",
    "temperature": "rollout.temperature",
    "n": "rollout.group_size",
} | dict.fromkeys((
    "distributed_executor_backend", "data_parallel_size", "pipeline_parallel_size", "enable_sleep_mode", "load_format",
    "logprobs_mode", "skip_tokenizer_init", "scheduling_policy", "quantization", "generation_config",
    "override_generation_config", "logits_processors", "trust_remote_code", "hf_config_path", "code_revision",
    "tokenizer", "worker_cls", "worker_extension_cls", "stop",
))  # fmt: skip


def check_rules(config: Config) -> None:
    """Raises ConfigError for the first combination of keys that cannot mean what it says."""
    _check_sizes(config)
    _check_engine_keys(config.rollout)
    _check_loss(config.loss)
    _check_evaluation(config)
    _check_schedule(config.optimizer)
    check_logging(config.logging)
    has_rewards = config.environment.can_reward or any(reward.weight for reward in config.rewards)
    check_signals(config, has_rewards)
    overlong, is_gae = config.advantage.overlong_buffer_tokens, config.advantage.estimator == "gae"
    kl_in = "loss" if is_gae else config.loss.kl_in  # gae's KL is the tokens'
    check_environment(config.environment, config.rollout.tail_batching, overlong, kl_in)
    template = config.data.prompt_template
    if template is not None and not re.search(r"\{\w+\}", template):
        what = "names no column in braces, as {question} does, so that all prompts were alike"
        raise ConfigError(f"data.prompt_template {what}; got {template!r}")
    lora, most = config.model.lora, ADAPTER_RANKS[-1]
    if lora.base_stays_in_engine and lora.rank > most:
        raise ConfigError(
            f"model.lora.rank: {lora.rank} is more than vLLM takes ({most}); set model.lora.sync: merged"
        )
    if config.rollout.sleep_level == 2 and config.model.lora.base_stays_in_engine:
        why = "2 drops the engine's weights, and with model.lora.sync: adapter no sync brings the base back"
        raise ConfigError(f"rollout.sleep_level: {why}; leave sleep_level out, or set it to 1")
    phases = ("start", *PHASES)
    for name in config.watchdog.phase_timeouts_s:
        if name not in phases:
            raise ConfigError(
                f"watchdog.phase_timeouts_s.{name}: no such phase; there are {', '.join(phases)}"
            )
    if not (config.rewards or config.environment.can_reward or config.teacher.is_on):
        raise ConfigError("rewards must name at least one reward, e.g. `rewards: [{name: gsm8k}]`")
    for index, reward in enumerate(config.rewards):
        check_reward(f"rewards.{index}", reward)


def _check_sizes(config: Config) -> None:
    budget, longest = config.training.max_tokens_per_micro_batch, config.max_rollout_tokens
    completion = f"rollout.max_completion_tokens ({config.rollout.max_completion_tokens})"
    if budget < longest:
        of_episode = longest - config.data.max_prompt_tokens
        is_completion = of_episode == config.rollout.max_completion_tokens
        behind = completion if is_completion else f"environment.max_tokens ({of_episode})"
        sizes = f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + {behind} = {longest}"
        rule = f"must hold the longest rollout: {sizes}; raise the first or lower one of the others"
        raise ConfigError(f"training.max_tokens_per_micro_batch ({budget}) {rule}")
    batches, prompts = config.training.num_mini_batches, config.rollout.num_prompts_per_step
    if prompts % batches:
        rule = f"must divide rollout.num_prompts_per_step ({prompts}), so that every optimizer step sees as many prompts"
        raise ConfigError(f"training.num_mini_batches ({batches}) {rule}")
    if config.rollout.dynamic_sampling and config.rollout.tail_batching > 1:
        why = "which groups are refilled would hang on which were fast; set dynamic_sampling: false or tail_batching: 1"
        raise ConfigError(
            f"rollout.tail_batching and rollout.dynamic_sampling do not go together: {why}"
        )
    overlong = config.advantage.overlong_buffer_tokens
    if overlong > config.rollout.max_completion_tokens:
        raise ConfigError(f"advantage.overlong_buffer_tokens ({overlong}) must be <= {completion}")


def _check_engine_keys(rollout: RolloutConfig) -> None:
    for name in rollout.engine:
        if name in REFUSED_KEYS:
            raise ConfigError(f"rollout.engine.{name}: {REFUSED_KEYS[name]}")
        if name in _ENGINE_KEYS_OWNED:
            instead = _ENGINE_KEYS_OWNED[name]
            remedy = f"set {instead} instead" if instead else "the trainer decides this itself"
            raise ConfigError(f"rollout.engine.{name}: {remedy}")


def _check_loss(loss: LossConfig) -> None:
    dual_clip, upper = loss.dual_clip, 1.0 + loss.clip_ratio_high
    if dual_clip is not None and loss.policy != "cispo" and dual_clip <= upper:
        why = "or it would cut off what the upper clip leaves; raise it, or set it to null"
        raise ConfigError(
            f"loss.dual_clip ({dual_clip:g}) must be > 1 + loss.clip_ratio_high ({upper:g}), {why}"
        )
    if loss.kl_in == "reward" and not loss.kl_coef:
        raise ConfigError("loss.kl_in: reward needs loss.kl_coef > 0; set it, or leave kl_in out")
    if loss.old_logprobs == "engine" and (correction := loss.rollout_correction) != "none":
        why = "with engine the ratio itself is taken to the engine's logprobs, so that nothing is left to correct"
        remedy = f"needs loss.old_logprobs: policy; {why}: set rollout_correction: none"
        raise ConfigError(f"loss.rollout_correction ({correction}) {remedy}")


def _check_schedule(optimizer: OptimizerConfig) -> None:
    if optimizer.min_lr and optimizer.schedule == "constant":
        remedy = "needs optimizer.schedule: linear or cosine, which come down to it; set one, or leave min_lr out"
        raise ConfigError(f"optimizer.min_lr ({optimizer.min_lr:g}) {remedy}")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(
            f"optimizer.min_lr ({optimizer.min_lr:g}) must be <= optimizer.lr ({optimizer.lr:g})"
        )


def _check_evaluation(config: Config) -> None:
    sets, every, temperature = (
        config.data.eval_sets,
        config.eval.every_steps,
        config.eval.temperature,
    )
    if sets and not every:
        why = "so that nothing would be evaluated; set it, e.g. to 20"
        raise ConfigError(f"data.eval is set, but eval.every_steps is 0, {why}")
    if every and not sets:
        remedy = "set data.eval, e.g. {gsm8k: hub:openai/gsm8k:main:test}"
        raise ConfigError(f"eval.every_steps needs held-out sets: {remedy}")
    if 0 < temperature < 0.01:  # vLLM would silently sample at 0.01
        raise ConfigError(f"eval.temperature must be 0 (greedy) or >= 0.01; got {temperature:g}")
    if not temperature and (samples := config.eval.num_samples) > 1:
        rule = "must be 1 with eval.temperature: 0, where all samples are alike"
        raise ConfigError(f"eval.num_samples ({samples}) {rule}")
    metric = config.checkpoint.best_metric or ""
    if metric.startswith("eval/") and metric.split("/")[1] not in sets:
        there = ", ".join(sets) or "no held-out sets"
        raise ConfigError(
            f"checkpoint.best_metric ({metric}) is of a set that data.eval does not have: {there}"
        )
    for name, source in sets.items():
        if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", name):
            form = "must be a name (letters, digits, . _ -) with a source as in data.train"
            raise ConfigError(f"data.eval.{name} {form}; got {source!r}")


# What an entry of `rewards` may say together with what.


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
        raise ConfigError(
            f"{where} has {' and '.join(given)}, and a reward is one of them; make it two entries"
        )
    if not given and reward.name is None:
        what = "needs a name (a shipped reward) or a function (file.py:function) or a url or a model (a folder or hub id)"
        raise ConfigError(f"{where} {what}")
    if reward.is_shipped or reward.model is not None:
        _refuse_set(
            where,
            reward,
            _OF_A_CALL,
            "is of a function or a url; reward_pool.timeout_s bounds all rewards",
        )
    if reward.model is None:
        of_model = tuple(
            name for name in _OF_A_MODEL if not (reward.is_engine_judge and name == "max_tokens")
        )
        _refuse_set(where, reward, of_model, "is of a reward model")
    elif reward.args:
        raise ConfigError(
            f"{where}.args: they are for a function or a url, and a model takes none; take it out"
        )
    if reward.url is None:
        _refuse_set(where, reward, _OF_A_URL, "is of a url")
    if reward.judge is None:
        _refuse_set(where, reward, _OF_A_JUDGE, "is of a judge; set judge, a rubric's file")
    if reward.model is not None and reward.metric_name in ("", ".."):
        raise ConfigError(
            f"{where}.name: {reward.model!r} ends with no name, which its metrics bear; set name"
        )
    if reward.is_engine_judge:
        _check_engine_judge(where, reward)
    else:
        _refuse_set(
            where,
            reward,
            ("judge_tokens",),
            "is of url: engine; a judge's server takes args: {max_tokens: N}",
        )
    if reward.url is not None and not reward.is_engine_judge:
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
    is_secret = any(
        SECRET_NAME.search(name) or name.lower() == "code" for name in parameters
    )  # code: Azure's
    if SECRET.search(url) or "@" in address or is_secret:
        raise ConfigError(
            f"{where} holds a password or a key, and would be written down; give it by headers_env"
        )
    try:
        parts = urlsplit(url)
        is_whole = (
            bool(parts.hostname) and parts.port != 0 and url.isascii() and not re.search(r"\s", url)
        )
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
        raise ConfigError(
            f"{where}.judge: url: engine is the policy as a judge, by a rubric; give the rubric's file"
        )
    _refuse_set(
        where,
        reward,
        (*_OF_A_CALL, *_OF_A_SERVER),
        "is of a server, and url: engine is the run's own engine",
    )
    if reward.args:
        raise ConfigError(
            f"{where}.args: they are for a function or a server, and url: engine takes none; take it out"
        )


def _check_judge(where: str, reward: RewardConfig) -> None:
    if reward.judge_model is None and not reward.is_engine_judge:
        raise ConfigError(
            f"{where}.judge needs judge_model, the name that the server at url has for it"
        )
    if reward.form != "slime":
        raise ConfigError(
            f"{where}.form ({reward.form}) is of a server that is no judge; take it out"
        )
    low, high = reward.judge_scale
    if not low < high:
        raise ConfigError(
            f"{where}.judge_scale must be its lowest and its highest score; got {low:g}, {high:g}"
        )


# What a critic and teachers do not go together with.


def check_signals(config: Config, has_rewards: bool) -> None:
    """`has_rewards`: some that count; from the config alone an environment is taken to give one. Raises ConfigError."""
    of_turns, num_steps, estimator = (
        config.environment.discount,
        config.training.num_steps,
        config.advantage.estimator,
    )
    check_critic(
        config.critic, estimator, config.advantage.normalize_std, of_turns, num_steps, has_rewards
    )
    sampling = {"is_dynamic": config.rollout.dynamic_sampling, "has_rewards": has_rewards}
    check_teacher(
        config.teacher, has_episodes=config.environment.is_on, kl_in=config.loss.kl_in, **sampling
    )
    check_teacher_url(config.teacher, config.rollout.temperature)


def check_known_rewards(config: Config, weights: dict[str, float]) -> None:
    """Once it is known what an environment gives: `weights` of all rewards but models. Raises ConfigError."""
    has_rewards = any(weights.values()) or any(reward.weight for reward in config.rewards)
    if not (has_rewards or config.teacher.is_on):
        what = "the environment gives none" + (", and all weights are 0" if config.rewards else "")
        raise ConfigError(
            f"rewards: {what}; name one, e.g. `rewards: [{{function: my.py:reward}}]`"
        )
    check_signals(config, has_rewards)


# What the section `teacher` may say of a server.


_OF_A_URL_teacher_rules = ("model", "timeout_s", "max_concurrent", "retries", "headers_env")


def check_teacher_url(teacher: TeacherConfig, temperature: float) -> None:
    """Raises ConfigError. `temperature`: of the rollouts."""
    if teacher.path and teacher.url:
        raise ConfigError("teacher has path and url, and is one of them; take one out")
    if not teacher.url:
        defaults = {field.name: field.default for field in fields(TeacherConfig)} | {
            "headers_env": {}
        }
        for name in _OF_A_URL_teacher_rules:
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
        raise ConfigError(
            "teacher.loss: full needs the whole distribution, which no url gives; take topk, or a path"
        )
    if temperature != 1:
        rule = f"rollout.temperature ({temperature:g}) must be 1 with teacher.url, whose logprobs are of temperature 1"
        raise ConfigError(f"{rule}; set it to 1, or take teacher.path")
