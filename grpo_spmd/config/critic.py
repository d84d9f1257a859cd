"""The section `critic`: a model that learns what each token's rest of the completion is worth (PPO)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.key import key

# Where a checkpoint may have a value head: of transformers' classifiers (one label), of TRL's, of others'.
VALUE_HEADS = ("score", "value_head", "v_head", "v_head.summary")


# fmt: off
@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    path: str | None = key(None,
        "folder or hub id of a causal LM or a classifier of one label, whose decoder gets the value head; policy: the "
        "policy's own layers do; needs advantage.estimator: gae. null: no critic")
    lr: float = key(1e-5, "its learning rate; schedule, betas, decay and clipping are those of `optimizer`", above=0)
    coef: float = key(0.1, "of path: policy: what the value loss counts beside the policy's (TRL's vf_coef)", above=0)
    gamma: float = key(1.0, "discount of a token", at_least=0, at_most=1)
    lam: float = key(1.0, "GAE's lambda of the returns that the values are taught", at_least=0, at_most=1)
    lam_policy: float | Literal["length"] = key(0.95,
        "GAE's lambda of the policy's advantages; length: 1 - 1 / (length_alpha * tokens) of a completion, VAPO's",
        at_least=0, at_most=1)
    length_alpha: float = key(0.05, "that factor", above=0)
    warmup_steps: int = key(0, "first steps of the run, in which the critic alone is trained", at_least=0)
    clip_value: float | None = key(0.2,
        "an update moves a value by this at most, beyond which the loss has no gradient; null: no bound", above=0)

    @property
    def is_on_policy(self) -> bool:
        """Whether it has no layers of its own."""
        return self.path == "policy"


# fmt: on
def check_critic(
    critic: CriticConfig, estimator: str, normalize_std: str, discount: float | None, num_steps: int, has_rewards: bool
) -> None:
    """Raises ConfigError for what does not go together."""
    if critic.path is not None and not critic.path.strip():
        raise ConfigError("critic.path is empty; name a model's folder or hub id, or leave it out")
    if (estimator == "gae") != (critic.path is not None):
        if critic.path is None:
            raise ConfigError(
                "advantage.estimator: gae needs a critic; set critic.path, e.g. to policy or model.path's model"
            )
        rule = f"is not used by advantage.estimator: {estimator}; set estimator: gae, or leave critic.path out"
        raise ConfigError(f"critic.path ({critic.path}) {rule}")
    if critic.path is None:
        return
    if not has_rewards:
        why = "learns what rewards come to, and there is none that counts"
        raise ConfigError(f"critic.path: a critic {why}; give a reward a weight, or leave the critic out")
    if normalize_std == "group":
        why = "a deviation within groups, of which gae knows none"
        raise ConfigError(f"advantage.normalize_std: group is {why}; set it to batch (over the step's tokens) or none")
    if critic.warmup_steps >= num_steps:
        rule = f"must be < training.num_steps ({num_steps}), or the policy is never trained"
        raise ConfigError(f"critic.warmup_steps ({critic.warmup_steps}) {rule}")
    if discount is not None and discount != 1:
        why = "with gae it is critic.gamma that discounts, token by token"
        remedy = "set 1 for rewards at the ends of their turns, or leave it out"
        raise ConfigError(f"environment.discount ({discount:g}): {why}; {remedy}")
