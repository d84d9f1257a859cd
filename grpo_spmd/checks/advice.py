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
        raise ConfigError(
            f"model.lora.rank is not set (0: full fine-tuning), so that {lora_key} would do "
            "nothing; set it, e.g. to 16, or take the other out"
        )
    if lora.rank and not lora.target_modules:
        raise ConfigError(
            "model.lora.target_modules names no layer; leave it out (all-linear), or name "
            "some: [q_proj]"
        )
    teacher_key = _first_key_set(sources, "teacher.")
    # The config of a finished run sets every key: there teacher.path itself is set to null.
    if teacher_key and not config.teacher.is_on and sources.get("teacher.path") == "default":
        raise ConfigError(
            f"teacher.path is not set, so that {teacher_key} would do nothing; set it to the "
            "folder or hub id of a model, or take the other out"
        )
    # A teacher alone, or an environment's own reward, is enough to learn from.
    has_other_signal = config.teacher.is_on or config.environment.can_reward
    all_zero = config.rewards and not any(reward.weight for reward in config.rewards)
    if all_zero and not has_other_signal:
        raise ConfigError(
            "rewards: all weights are 0, so that every reward is 0; set one rewards.N.weight"
        )
    # AdamW normalizes gradients: a step moves each weight by about lr.
    if config.optimizer.lr > 1:
        raise ConfigError(
            f"optimizer.lr ({config.optimizer.lr:g}) is above 1, where AdamW moves each weight "
            "by more than that a step; is a sign missing? e.g. 2e-6"
        )
    metric = config.checkpoint.best_metric
    if metric is not None and (metric.partition("/")[0] not in _METRICS or "/" not in metric):
        raise ConfigError(
            f"checkpoint.best_metric ({metric}) is no metric's name: they are as in "
            "metrics.jsonl, e.g. reward/mean or eval/SET/mean"
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
        yield (
            "advantage.estimator max_rl with a weight below 0 among rewards: it divides by "
            "the group's mean reward, and where that is not above 0 the group teaches nothing"
        )
    yield from _advise_on_ranks(config, num_ranks)
    yield from _advise_on_steps(config)


def _advise_on_loss(config: Config) -> Iterator[str]:
    loss, max_tokens = config.loss, config.max_rollout_tokens
    budget = config.training.max_tokens_per_micro_batch
    low, high = loss.clip_ratio_low, loss.clip_ratio_high
    if budget < 2 * max_tokens:
        yield (
            f"training.max_tokens_per_micro_batch {budget} holds fewer than 2 of the longest "
            f"rollouts ({max_tokens} tokens): long ones are not packed"
        )
    if ratio_is_one(config):
        yield (
            "one optimizer step a rollout: the ratio is exactly 1, so that "
            f"loss.clip_ratio_low {low:g}, clip_ratio_high {high:g} and dual_clip never bind"
        )
    # GSPO's ratio is a mean over the sequence, which stays much closer to 1.
    elif loss.policy == "gspo" and max(low, high) > 0.01:
        yield (
            f"loss.policy gspo with clip bounds {low:g} and {high:g}, sized for ratios of "
            "tokens: the GSPO paper has 3e-4 and 4e-4"
        )


def _advise_on_estimator(
    loss: LossConfig, advantage: AdvantageConfig, group_size: int
) -> Iterator[str]:
    # Dividing by the standard deviation of a group enlarges small differences.
    over_group = advantage.estimator == "grpo" and advantage.normalize_std == "group"
    if loss.policy == "gspo" and loss.aggregation == "token":
        yield (
            "loss.policy gspo with aggregation token: long sequences count for more; the "
            "paper takes the mean over sequences (sequence)"
        )
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        yield (
            f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}: the paper "
            "divides by a constant (constant)"
        )
    if loss.kl_in == "reward" and over_group:
        yield (
            "loss.kl_in reward with normalize_std group: where rewards are alike, small "
            "differences of KL become advantages"
        )
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        yield (
            f"loss.policy gspo with rollout_correction {loss.rollout_correction}: weights of "
            "tokens in a loss of sequences (sequence_tis)"
        )
    if loss.policy == "cispo" and loss.clip_ratio_low < 1:
        yield (
            f"loss.policy cispo with clip_ratio_low {loss.clip_ratio_low:g}: it is usually run "
            "without a lower bound (1)"
        )
    if advantage.estimator == "rloo" and group_size < 4:
        yield (
            f"advantage.estimator rloo with rollout.group_size {group_size}: each baseline is "
            f"the mean of only {group_size - 1} other rewards"
        )
    if over_group and group_size == 2:
        yield (
            "rollout.group_size 2 with normalize_std group: every pair gets the same two "
            "advantages, however far its rewards are apart"
        )


def _advise_on_ranks(config: Config, num_ranks: int) -> Iterator[str]:
    rollout = config.rollout
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.tensor_parallel_size
    # Engines wait for the one with most groups.
    if prompts % engines:
        problem = f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        if prompts < engines:
            problem = f"{engines - prompts} never sample while others do"
            problem += f"; raise it to {engines} or a multiple"
        yield (
            f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: {problem}"
        )
    per_step = prompts * rollout.group_size // config.training.num_mini_batches
    if per_step < num_ranks:
        yield (
            f"{per_step} completions per optimizer step for {num_ranks} ranks: "
            f"{num_ranks - per_step} of them have nothing to train on; raise "
            "rollout.num_prompts_per_step"
        )
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        yield (
            "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1: groups are dropped, "
            "and never replaced"
        )


def _advise_on_steps(config: Config) -> Iterator[str]:
    training, optimizer = config.training, config.optimizer
    steps = training.num_optimizer_steps * training.num_steps
    if optimizer.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps} covers the run's {steps} "
            f"optimizer steps: lr {optimizer.lr:g} is reached at its end or never"
        )
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        yield (
            "checkpoint.every_steps 0: a run that dies before the end of its "
            f"{training.num_steps} steps has nothing to go on from"
        )
