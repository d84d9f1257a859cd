"""Config keys that have no effect, and advice about valid configs.

A config may be valid and still not do what its author meant. What certainly makes the run
meaningless is refused; the rest is a line of `--explain`, with the numbers, only where it is true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from grpo_spmd.checks.memory import ratio_is_one
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE
from grpo_spmd.config.schema import AdvantageConfig, Config, LossConfig

# First parts of the metrics' names.
_METRICS = (
    "batching", "completion", "critic", "dynamic_sampling", "environment", "episode", "eval",
    "loss", "memory", "optim", "process", "progress", "reward", "rollout", "rollout_correction",
    "teacher", "throughput", "time", "weight_sync",
)  # fmt: skip


def check_idle_keys(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Refuse keys that would silently make another run than was meant. `sources`: where each
    value was set. Raises ConfigError."""
    sources = sources or {}
    lora = config.model.lora
    # Rank 0 may be set on purpose, to switch adapters off for one launch.
    lora_key = _first_key_set(sources, "model.lora.")
    if not lora.rank and lora_key and sources.get("model.lora.rank") == "default":
        problem = "model.lora.rank is not set (0: full fine-tuning), so that"
        raise ConfigError(
            f"{problem} {lora_key} would do nothing; set it, e.g. to 16, or take the other out"
        )
    if lora.rank and not lora.target_modules:
        problem = "model.lora.target_modules names no layer"
        raise ConfigError(f"{problem}; leave it out (all-linear), or name some: [q_proj]")
    teacher_key = _first_key_set(sources, "teacher.")
    # The config of a finished run sets every key: there teacher.path itself is set to null.
    if teacher_key and not config.teacher.is_on and sources.get("teacher.path") == "default":
        problem = f"teacher.path is not set, so that {teacher_key} would do nothing"
        raise ConfigError(
            f"{problem}; set it to the folder or hub id of a model, or take the other out"
        )
    # A teacher alone, or an environment's own reward, is enough to learn from.
    has_other_signal = config.teacher.is_on or config.environment.can_reward
    all_zero = config.rewards and not any(reward.weight for reward in config.rewards)
    if all_zero and not has_other_signal:
        problem = "rewards: all weights are 0, so that every reward is 0"
        raise ConfigError(f"{problem}; set one rewards.N.weight")
    # AdamW normalizes gradients: a step moves each weight by about lr.
    if config.optimizer.lr > 1:
        problem = f"optimizer.lr ({config.optimizer.lr:g}) is above 1"
        reason = "where AdamW moves each weight by more than that a step"
        raise ConfigError(f"{problem}, {reason}; is a sign missing? e.g. 2e-6")
    metric = config.checkpoint.best_metric
    if metric is not None and (metric.partition("/")[0] not in _METRICS or "/" not in metric):
        rule = "is no metric's name: they are as in metrics.jsonl"
        raise ConfigError(
            f"checkpoint.best_metric ({metric}) {rule}, e.g. reward/mean or eval/SET/mean"
        )


def _first_key_set(sources: Mapping[str, str], prefix: str) -> str | None:
    """The first key below `prefix` that the user has set."""
    keys = (name for name in sources if name.startswith(prefix) and sources[name] != "default")
    return next(keys, None)


def idle_keys(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each key that was set and has no effect because of another key."""
    advantage, loss, critic, teacher = config.advantage, config.loss, config.critic, config.teacher
    no_evaluation = not config.eval.every_steps
    rules: list[tuple[str, bool, str]] = [
        (name, critic.path is None, "critic.path is null")
        for name in sources
        if name.startswith("critic.")
    ]
    rules += [
        ("critic.coef", not critic.is_on_policy, "critic.path is not policy"),
        ("critic.length_alpha", critic.lam_policy != "length", "critic.lam_policy is no length"),
        ("loss.kl_estimator", not loss.kl_coef, "loss.kl_coef is 0"),
        (
            "advantage.overlong_penalty",
            not advantage.overlong_buffer_tokens,
            "advantage.overlong_buffer_tokens is 0",
        ),
        (
            "advantage.normalize_std",
            advantage.estimator not in ("grpo", "gae"),
            f"advantage.estimator is {advantage.estimator}",
        ),
        ("eval.temperature", no_evaluation, "eval.every_steps is 0"),
        ("eval.num_samples", no_evaluation, "eval.every_steps is 0"),
        ("teacher.beta", teacher.loss == "sampled", "teacher.loss is sampled"),
        ("teacher.top_k", teacher.loss != "topk", f"teacher.loss is {teacher.loss}"),
        ("data.prompt_key", config.data.prompt_template is not None, "data.prompt_template is set"),
        (
            "loss.rollout_correction_cap",
            loss.rollout_correction == "none",
            "loss.rollout_correction is none",
        ),
    ]
    for key, is_idle, reason in rules:
        # A recipe sets keys for its algorithm that another override may make idle.
        if is_idle and not sources.get(key, "default").startswith(("default", FROM_RECIPE)):
            yield f"{key} does nothing: {reason}"


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    """Yields a line for each setting of a valid config that is worth a second look."""
    yield from _advise_on_loss(config)
    yield from _advise_on_estimator(config.loss, config.advantage, config.rollout.group_size)
    weights = [reward.weight for reward in config.rewards]
    if config.advantage.estimator == "max_rl" and min(weights, default=0.0) < 0:
        problem = "advantage.estimator max_rl with a weight below 0 among rewards"
        yield (
            f"{problem}: it divides by the group's mean reward, and where that is not above 0 the "
            "group teaches nothing"
        )
    yield from _advise_on_ranks(config, num_ranks)
    yield from _advise_on_steps(config)


def _advise_on_loss(config: Config) -> Iterator[str]:
    loss, max_tokens = config.loss, config.max_rollout_tokens
    budget = config.training.max_tokens_per_micro_batch
    low, high = loss.clip_ratio_low, loss.clip_ratio_high
    if budget < 2 * max_tokens:
        problem = f"{budget} holds fewer than 2 of the longest rollouts ({max_tokens} tokens)"
        yield f"training.max_tokens_per_micro_batch {problem}: long ones are not packed"
    if ratio_is_one(config):
        problem = f"loss.clip_ratio_low {low:g}, clip_ratio_high {high:g} and dual_clip never bind"
        yield f"one optimizer step a rollout: the ratio is exactly 1, so that {problem}"
    # GSPO's ratio is a mean over the sequence, which stays much closer to 1.
    elif loss.policy == "gspo" and max(low, high) > 0.01:
        problem = f"with clip bounds {low:g} and {high:g}, sized for ratios of tokens"
        yield f"loss.policy gspo {problem}: the GSPO paper has 3e-4 and 4e-4"


def _advise_on_estimator(
    loss: LossConfig, advantage: AdvantageConfig, group_size: int
) -> Iterator[str]:
    # Dividing by the standard deviation of a group enlarges small differences.
    over_group = advantage.estimator == "grpo" and advantage.normalize_std == "group"
    if loss.policy == "gspo" and loss.aggregation == "token":
        problem = (
            "long sequences count for more; the paper takes the mean over sequences (sequence)"
        )
        yield f"loss.policy gspo with aggregation token: {problem}"
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        problem = f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}"
        yield f"{problem}: the paper divides by a constant (constant)"
    if loss.kl_in == "reward" and over_group:
        problem = "where rewards are alike, small differences of KL become advantages"
        yield f"loss.kl_in reward with normalize_std group: {problem}"
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        problem = f"loss.policy gspo with rollout_correction {loss.rollout_correction}"
        yield f"{problem}: weights of tokens in a loss of sequences (sequence_tis)"
    if loss.policy == "cispo" and loss.clip_ratio_low < 1:
        problem = f"loss.policy cispo with clip_ratio_low {loss.clip_ratio_low:g}"
        yield f"{problem}: it is usually run without a lower bound (1)"
    if advantage.estimator == "rloo" and group_size < 4:
        problem = f"advantage.estimator rloo with rollout.group_size {group_size}"
        yield f"{problem}: each baseline is the mean of only {group_size - 1} other rewards"
    if over_group and group_size == 2:
        problem = "every pair gets the same two advantages, however far its rewards are apart"
        yield f"rollout.group_size 2 with normalize_std group: {problem}"


def _advise_on_ranks(config: Config, num_ranks: int) -> Iterator[str]:
    rollout = config.rollout
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.tensor_parallel_size
    # Engines wait for the one with most groups.
    if prompts % engines:
        problem = f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        if prompts < engines:
            problem = f"{engines - prompts} never sample while others do"
            problem += f"; raise it to {engines} or a multiple"
        rule = f"is no multiple of {engines} engines"
        yield f"rollout.num_prompts_per_step {prompts} {rule}: {problem}"
    per_step = prompts * rollout.group_size // config.training.num_mini_batches
    if per_step < num_ranks:
        problem = f"{num_ranks - per_step} of them have nothing to train on"
        yield (
            f"{per_step} completions per optimizer step for {num_ranks} ranks: {problem}; "
            "raise rollout.num_prompts_per_step"
        )
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        problem = "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1"
        yield f"{problem}: groups are dropped, and never replaced"


def _advise_on_steps(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    steps = training.num_optimizer_steps * training.num_steps
    if optimizer.warmup_steps >= steps:
        problem = f"optimizer.warmup_steps {optimizer.warmup_steps} covers the run's {steps}"
        yield f"{problem} optimizer steps: lr {optimizer.lr:g} is reached at its end or never"
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        problem = f"a run that dies before the end of its {training.num_steps} steps"
        yield f"checkpoint.every_steps 0: {problem} has nothing to go on from"
