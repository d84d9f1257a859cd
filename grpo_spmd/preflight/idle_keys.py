"""Keys that are set and would do nothing, or end a run's sense: what a run would say by its curve, days later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from grpo_spmd.config.algorithm import FROM_RECIPE
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config

# First parts of the metrics' names.
_METRICS = (
    "batching", "completion", "critic", "dynamic_sampling", "environment", "episode", "eval", "loss", "memory", "optim",
    "process", "progress", "reward", "rollout", "rollout_correction", "teacher", "throughput", "time", "weight_sync",
)  # fmt: skip


def check_idle_keys(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Refuse (ConfigError) what makes a run another one than was meant. `sources`: where each value was set."""
    lora = config.model.lora
    if not lora.rank and sources and sources.get("model.lora.rank") == "default":
        given = [name for name, source in sources.items() if name.startswith("model.lora.") and source != "default"]
        if given:
            what = f"model.lora.rank is not set (0: full fine-tuning), so that {given[0]} would do nothing"
            raise ConfigError(f"{what}; set it, e.g. to 16, or take the other out")
    if lora.rank and not lora.target_modules:
        raise ConfigError("model.lora.target_modules names no layer; leave it out (all-linear), or name some: [q_proj]")
    given = [name for name in sources or () if name.startswith("teacher.") and (sources or {})[name] != "default"]
    if given and not config.teacher.is_on and (sources or {}).get("teacher.path") == "default":  # not a run's own
        what = f"teacher.path is not set, so that {given[0]} would do nothing"
        raise ConfigError(f"{what}; set it to the folder or hub id of a model, or take the other out")
    teaches = config.teacher.is_on or config.environment.may_reward
    if config.rewards and not any(reward.weight for reward in config.rewards) and not teaches:
        raise ConfigError("rewards: all weights are 0, so that every reward is 0; set one rewards.N.weight")
    if config.optimizer.lr > 1:
        what = f"optimizer.lr ({config.optimizer.lr:g}) is above 1, where AdamW moves each weight by more than that"
        raise ConfigError(f"{what} a step; is a sign missing? e.g. 2e-6")
    metric = config.checkpoint.best_metric
    if metric is not None and (metric.partition("/")[0] not in _METRICS or "/" not in metric):
        rule = "is no metric's name: they are as in metrics.jsonl, e.g. reward/mean or eval/SET/mean"
        raise ConfigError(f"checkpoint.best_metric ({metric}) {rule}")


def idle_keys(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """A line for each key that was set, and that another key leaves without effect."""
    advantage, loss = config.advantage, config.loss
    estimator = f"advantage.estimator is {advantage.estimator}"
    of_critic = (name for name in sources if name.startswith("critic."))
    for key, is_idle, why in (
        *((name, config.critic.path is None, "critic.path is null") for name in of_critic),
        ("critic.coef", not config.critic.is_on_policy, "critic.path is not policy"),
        ("critic.length_alpha", config.critic.lam_policy != "length", "critic.lam_policy is no length"),
        ("loss.kl_estimator", not loss.kl_coef, "loss.kl_coef is 0"),
        ("advantage.overlong_penalty", not advantage.overlong_buffer_tokens, "advantage.overlong_buffer_tokens is 0"),
        ("advantage.normalize_std", advantage.estimator not in ("grpo", "gae"), estimator),
        ("eval.temperature", not config.eval.every_steps, "eval.every_steps is 0"),
        ("eval.num_samples", not config.eval.every_steps, "eval.every_steps is 0"),
        ("teacher.beta", config.teacher.loss == "sampled", "teacher.loss is sampled"),
        ("teacher.top_k", config.teacher.loss != "topk", f"teacher.loss is {config.teacher.loss}"),
        ("data.prompt_key", config.data.prompt_template is not None, "data.prompt_template is set"),
        ("loss.rollout_correction_cap", loss.rollout_correction == "none", "loss.rollout_correction is none"),
    ):
        if is_idle and not sources.get(key, "default").startswith(("default", FROM_RECIPE)):
            yield f"{key} does nothing: {why}"
