"""What a critic and teachers do not go together with."""

from __future__ import annotations

from grpo_spmd.config.critic import check_critic
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.config.teacher import check_teacher
from grpo_spmd.config.teacher_rules import check_teacher_url


def check_signals(config: Config, has_rewards: bool) -> None:
    """`has_rewards`: some that count; from the config alone an environment is taken to give one. Raises ConfigError."""
    of_turns, num_steps, estimator = config.environment.discount, config.training.num_steps, config.advantage.estimator
    check_critic(config.critic, estimator, config.advantage.normalize_std, of_turns, num_steps, has_rewards)
    sampling = {"is_dynamic": config.rollout.dynamic_sampling, "has_rewards": has_rewards}
    check_teacher(config.teacher, has_episodes=config.environment.is_on, kl_in=config.loss.kl_in, **sampling)
    check_teacher_url(config.teacher, config.rollout.temperature)


def check_given_rewards(config: Config, weights: dict[str, float]) -> None:
    """Once it is known what an environment gives: `weights` of all rewards but models. Raises ConfigError."""
    has_rewards = any(weights.values()) or any(reward.weight for reward in config.rewards)
    if not (has_rewards or config.teacher.is_on):
        what = "the environment gives none" + (", and all weights are 0" if config.rewards else "")
        raise ConfigError(f"rewards: {what}; name one, e.g. `rewards: [{{function: my.py:reward}}]`")
    check_signals(config, has_rewards)
