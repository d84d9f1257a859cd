"""What the bounds of single keys cannot say: keys that need, exclude or bound each other."""

from __future__ import annotations

import math
import re

from grpo_spmd.config.coerce import REFUSED_KEYS, coerce
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import PHASES, Config

# What the trainer itself decides about the engine: a second value for it in `rollout.engine` would be a second source
# of truth.
_ENGINE_KEYS_OWNED = {
    "model": "model.path",
    "dtype": "model.dtype",
    "seed": "seed",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enable_lora": "model.lora.sync",
    "max_lora_rank": "model.lora.rank",
    "max_model_len": "data.max_prompt_tokens and rollout.max_completion_tokens",
    "distributed_executor_backend": None,
    "data_parallel_size": None,
    "pipeline_parallel_size": None,
    "enable_sleep_mode": None,
    "logprobs_mode": None,
    "load_format": None,
    "skip_tokenizer_init": None,
    "scheduling_policy": None,
    "quantization": None,
    "generation_config": None,
    "override_generation_config": None,
    "logits_processors": None,
}


def check_rules(config: Config) -> None:
    rollout, training = config.rollout, config.training
    at_least = {
        "seed": (config.seed, 0),
        "model.logprob_chunk_tokens": (config.model.logprob_chunk_tokens, 1),
        "model.lora.rank": (config.model.lora.rank, 0),
        "model.num_replicas": (config.model.num_replicas, 1),
        "data.max_prompt_tokens": (config.data.max_prompt_tokens, 1),
        "rollout.num_prompts_per_step": (rollout.num_prompts_per_step, 1),
        "rollout.group_size": (rollout.group_size, 2),
        "rollout.max_completion_tokens": (rollout.max_completion_tokens, 1),
        "rollout.tensor_parallel_size": (rollout.tensor_parallel_size, 1),
        "rollout.weight_sync_bucket_mib": (rollout.weight_sync_bucket_mib, 1),
        "rollout.dynamic_sampling_max_rounds": (rollout.dynamic_sampling_max_rounds, 1),
        "reward_pool.num_workers": (config.reward_pool.num_workers, 1),
        "advantage.overlong_buffer_tokens": (config.advantage.overlong_buffer_tokens, 0),
        "advantage.overlong_penalty": (config.advantage.overlong_penalty, 0),
        "rollout.temperature": (rollout.temperature, 0.01),  # vLLM would silently sample at 0.01
        "loss.kl_coef": (config.loss.kl_coef, 0),
        "loss.entropy_coef": (config.loss.entropy_coef, 0),
        "optimizer.lr": (config.optimizer.lr, 0),
        "optimizer.weight_decay": (config.optimizer.weight_decay, 0),
        "optimizer.warmup_steps": (config.optimizer.warmup_steps, 0),
        "training.num_steps": (training.num_steps, 1),
        "training.num_mini_batches": (training.num_mini_batches, 1),
        "training.num_epochs": (training.num_epochs, 1),
        "training.max_nonfinite_in_a_row": (training.max_nonfinite_in_a_row, 1),
        "proofs.every_steps": (config.proofs.every_steps, 0),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 0),
        "checkpoint.keep": (config.checkpoint.keep, 1),
        "checkpoint.export_every_steps": (config.checkpoint.export_every_steps, 0),
        "eval.every_steps": (config.eval.every_steps, 0),
        "eval.num_samples": (config.eval.num_samples, 1),
        "eval.temperature": (config.eval.temperature, 0),
        "logging.rollouts_every_steps": (config.logging.rollouts_every_steps, 0),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ConfigError(f"{name} must be >= {least}; got {value}")
    inside = {
        "model.lora.alpha": (config.model.lora.alpha, 0.0, math.inf),
        "loss.clip_ratio_high": (config.loss.clip_ratio_high, 0.0, math.inf),
        "loss.dual_clip": (config.loss.dual_clip if config.loss.dual_clip is not None else 2.0, 1.0, math.inf),
        "loss.rollout_correction_cap": (config.loss.rollout_correction_cap, 1.0, math.inf),
        "reward_pool.timeout_s": (config.reward_pool.timeout_s, 0.0, math.inf),
        "proofs.max_mismatch": (
            config.proofs.max_mismatch if config.proofs.max_mismatch is not None else 1.0,
            0.0,
            math.inf,
        ),
        "optimizer.max_grad_norm": (config.optimizer.max_grad_norm, 0.0, math.inf),
        "training.max_time_s": (training.max_time_s if training.max_time_s is not None else 1.0, 0.0, math.inf),
        "watchdog.timeout_s": (config.watchdog.timeout_s, 0.0, math.inf),
        "rollout.gpu_memory_utilization": (rollout.gpu_memory_utilization, 0.0, 1.0),
    }
    for name, (number, low, high) in inside.items():
        if not low < number < high:
            raise ConfigError(
                f"{name} must be > {low:g}" + (f" and < {high:g}" if high < math.inf else "") + f"; got {number:g}"
            )
    for name, number in {
        "loss.clip_ratio_low": config.loss.clip_ratio_low,
        "reward_pool.max_error_frac": config.reward_pool.max_error_frac,
    }.items():
        if not 0.0 < number <= 1.0:
            raise ConfigError(f"{name} must be > 0 and <= 1; got {number:g}")
    for index, beta in enumerate(config.optimizer.betas):
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"optimizer.betas.{index} must be >= 0 and < 1; got {beta:g}")
    for name, text in {
        "run_dir": config.run_dir,
        "model.path": config.model.path,
        "data.train": config.data.train,
    }.items():
        if not text.strip() or "\0" in text:
            raise ConfigError(f"{name} must not be empty, nor contain a NUL character; got {text!r}")
    if training.max_tokens_per_micro_batch < config.max_rollout_tokens:
        raise ConfigError(
            f"training.max_tokens_per_micro_batch ({training.max_tokens_per_micro_batch}) must hold the longest "
            "rollout: "
            f"data.max_prompt_tokens ({config.data.max_prompt_tokens}) + rollout.max_completion_tokens "
            f"({rollout.max_completion_tokens}) = {config.max_rollout_tokens}; raise the first or lower one of the "
            "others"
        )
    if rollout.num_prompts_per_step % training.num_mini_batches:
        raise ConfigError(
            f"training.num_mini_batches ({training.num_mini_batches}) must divide rollout.num_prompts_per_step "
            f"({rollout.num_prompts_per_step}), so that every optimizer step sees as many prompts"
        )
    for name in rollout.engine:
        if name in REFUSED_KEYS:
            raise ConfigError(f"rollout.engine.{name}: {REFUSED_KEYS[name]}")
        if name in _ENGINE_KEYS_OWNED:
            instead = _ENGINE_KEYS_OWNED[name]
            raise ConfigError(
                f"rollout.engine.{name}: "
                + (f"set {instead} instead" if instead else "the trainer decides this itself")
            )
    if config.data.prompt_template is not None and not re.search(r"\{\w+\}", config.data.prompt_template):
        raise ConfigError(
            "data.prompt_template names no column in braces, so that all prompts were alike; got "
            f"{config.data.prompt_template!r}"
        )
    _cross_check_features(config)
    if not config.rewards:
        raise ConfigError("rewards must name at least one reward, e.g. `rewards: [{name: gsm8k}]`")
    for index, reward in enumerate(config.rewards):
        if reward.name is None and reward.function is None:
            raise ConfigError(f"rewards.{index} needs a name (a shipped reward) or a function (file.py:function)")


def _cross_check_features(config: Config) -> None:
    """Combinations that cannot mean what they say."""
    loss = config.loss
    if loss.dual_clip is not None and loss.policy != "cispo" and loss.dual_clip <= 1.0 + loss.clip_ratio_high:
        raise ConfigError(
            f"loss.dual_clip ({loss.dual_clip:g}) must be > 1 + loss.clip_ratio_high ({1.0 + loss.clip_ratio_high:g}), "
            "or it would cut off "
            "what the upper clip leaves; raise it, or set it to null"
        )
    if config.loss.kl_in == "reward" and not config.loss.kl_coef:
        raise ConfigError("loss.kl_in: reward needs loss.kl_coef > 0; set it, or leave kl_in out")
    if config.loss.old_logprobs == "engine" and config.loss.rollout_correction != "none":
        raise ConfigError(
            f"loss.rollout_correction ({config.loss.rollout_correction}) needs loss.old_logprobs: policy; with engine "
            "the ratio itself is "
            "taken to the engine's logprobs, so that nothing is left to correct: set rollout_correction: none"
        )
    if config.advantage.overlong_buffer_tokens > config.rollout.max_completion_tokens:
        raise ConfigError(
            f"advantage.overlong_buffer_tokens ({config.advantage.overlong_buffer_tokens}) must be <= "
            "rollout.max_completion_tokens "
            f"({config.rollout.max_completion_tokens})"
        )
    if config.rollout.sleep_level == 2 and config.model.lora.base_stays_in_engine:
        raise ConfigError(
            "rollout.sleep_level: 2 drops the engine's weights, and with model.lora.sync: adapter no sync brings the "
            "base back; "
            "leave sleep_level out, or set it to 1"
        )
    phases = ("start", *PHASES)
    for name, limit_s in config.watchdog.phase_timeouts_s.items():
        where = f"watchdog.phase_timeouts_s.{name}"
        if name not in phases:
            raise ConfigError(f"{where}: no such phase; there are {', '.join(phases)}")
        if coerce(float, limit_s, where) <= 0:
            raise ConfigError(f"{where} must be > 0; got {limit_s}")
    if config.data.eval_sets and not config.eval.every_steps:
        raise ConfigError(
            "data.eval is set, but eval.every_steps is 0, so that nothing would be evaluated; set it, e.g. to 20"
        )
    if config.eval.every_steps and not config.data.eval_sets:
        raise ConfigError(
            "eval.every_steps needs held-out sets: set data.eval, e.g. {gsm8k: hub:openai/gsm8k:main:test}"
        )
    if config.eval.temperature and config.eval.temperature < 0.01:  # vLLM would silently sample at 0.01
        raise ConfigError(f"eval.temperature must be 0 (greedy) or >= 0.01; got {config.eval.temperature:g}")
    if not config.eval.temperature and config.eval.num_samples > 1:
        raise ConfigError(
            f"eval.num_samples ({config.eval.num_samples}) must be 1 with eval.temperature: 0, where all samples are "
            "alike"
        )
    for name, source in config.data.eval_sets.items():
        if not isinstance(source, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"data.eval.{name} must be a name (letters, digits, . _ -) with a source as in data.train; got "
                f"{source!r}"
            )
