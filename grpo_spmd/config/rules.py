"""What the bounds of single keys cannot say: keys that need, exclude or bound each other."""

from __future__ import annotations

import re

from grpo_spmd.config.coerce import REFUSED_KEYS
from grpo_spmd.config.environment import check_environment
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.logging_keys import check_logging
from grpo_spmd.config.reward_rules import check_reward
from grpo_spmd.config.schema import ADAPTER_RANKS, PHASES, Config, LossConfig, OptimizerConfig, RolloutConfig
from grpo_spmd.config.signal_rules import check_signals

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
    has_rewards = config.environment.may_reward or any(reward.weight for reward in config.rewards)
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
        raise ConfigError(f"model.lora.rank: {lora.rank} is more than vLLM takes ({most}); set model.lora.sync: merged")
    if config.rollout.sleep_level == 2 and config.model.lora.base_stays_in_engine:
        why = "2 drops the engine's weights, and with model.lora.sync: adapter no sync brings the base back"
        raise ConfigError(f"rollout.sleep_level: {why}; leave sleep_level out, or set it to 1")
    phases = ("start", *PHASES)
    for name in config.watchdog.phase_timeouts_s:
        if name not in phases:
            raise ConfigError(f"watchdog.phase_timeouts_s.{name}: no such phase; there are {', '.join(phases)}")
    if not (config.rewards or config.environment.may_reward or config.teacher.is_on):
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
        rule = (
            f"must divide rollout.num_prompts_per_step ({prompts}), so that every optimizer step sees as many prompts"
        )
        raise ConfigError(f"training.num_mini_batches ({batches}) {rule}")
    if config.rollout.dynamic_sampling and config.rollout.tail_batching > 1:
        why = "which groups are refilled would hang on which were fast; set dynamic_sampling: false or tail_batching: 1"
        raise ConfigError(f"rollout.tail_batching and rollout.dynamic_sampling do not go together: {why}")
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
        raise ConfigError(f"loss.dual_clip ({dual_clip:g}) must be > 1 + loss.clip_ratio_high ({upper:g}), {why}")
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
        raise ConfigError(f"optimizer.min_lr ({optimizer.min_lr:g}) must be <= optimizer.lr ({optimizer.lr:g})")


def _check_evaluation(config: Config) -> None:
    sets, every, temperature = config.data.eval_sets, config.eval.every_steps, config.eval.temperature
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
        raise ConfigError(f"checkpoint.best_metric ({metric}) is of a set that data.eval does not have: {there}")
    for name, source in sets.items():
        if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", name):
            form = "must be a name (letters, digits, . _ -) with a source as in data.train"
            raise ConfigError(f"data.eval.{name} {form}; got {source!r}")
