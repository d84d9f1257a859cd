"""The section `teacher`: a model whose distribution the policy learns on its own rollouts (on-policy distillation),
here or behind a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.key import key


# fmt: off
@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    path: dict[str, str] | str = key({},
        "model that teaches on the policy's own rollouts, a folder or a hub id, perhaps model.path itself; or {name: "
        "path}, of which the row's column `teacher` names one")
    url: dict[str, str] | str = key({},
        "in place of path: address of a vLLM server, http(s)://host:port/v1/completions, which is asked for the "
        "logprobs of prompt and completion, as token ids; or {name: address}")
    coef: float = key(1.0, "weight of what it says", above=0)
    loss: Literal["sampled", "topk", "full"] = key("sampled",
        "sampled: coef * log(policy / teacher) of each sampled token is taken off its advantage; full: the divergence "
        "of both distributions is a term of the loss; topk: that over the teacher's likeliest tokens and one for all "
        "others")
    beta: float = key(1.0,
        "divergence of full and topk: 0: KL(teacher || policy), 1: KL(policy || teacher), between: the generalized "
        "Jensen-Shannon divergence", at_least=0, at_most=1)
    top_k: int = key(32, "tokens of topk", at_least=1)
    prompt_key: str | None = key(None,
        "column with the prompt that the teacher sees in place of the policy's, e.g. one that has the solution")
    model: str | None = key(None, "the model at url, by its server's name; null: the only one that it has")
    timeout_s: float = key(120.0, "seconds for what a url says of one context of a rollout: requests and the pauses "
        "between them", above=0)
    max_concurrent: int = key(64, "requests to a url under way at once, over all ranks", at_least=1)
    retries: int = key(3, "requests to a url made again for a context, as rewards.N.retries", at_least=0, at_most=20)
    headers_env: dict[str, str] = key({}, "headers that a url is sent, as rewards.N.headers_env")

    @property
    def is_on(self) -> bool:
        return bool(self.path or self.url)

    @property
    def paths(self) -> dict[str, str]:
        """By name; a single one has none."""
        return _by_name(self.path)

    @property
    def urls(self) -> dict[str, str]:
        """As paths."""
        return _by_name(self.url)

    @property
    def names(self) -> list[str]:
        return [*self.paths, *self.urls]


# fmt: on
def check_teacher(
    teacher: TeacherConfig, *, has_episodes: bool, is_dynamic: bool, has_rewards: bool, kl_in: str
) -> None:
    """Raises ConfigError for what does not go together. `has_rewards`: some that count."""
    if teacher.is_on and teacher.prompt_key is not None and has_episodes:
        why = "an episode's prompt comes again in its later turns, where the teacher's would not"
        raise ConfigError(f"teacher.prompt_key with an environment: {why}; leave one of them out")
    if teacher.is_on and is_dynamic and not has_rewards:
        why = "without a reward that counts all groups are alike, and would all be dropped"
        raise ConfigError(f"rollout.dynamic_sampling with a teacher alone: {why}; set dynamic_sampling: false")
    if teacher.is_on and kl_in == "reward" and not has_rewards:
        why = "without a reward that counts there is nothing that the KL could be taken off"
        raise ConfigError(f"loss.kl_in: reward with a teacher alone: {why}; set kl_in: loss")
    for name, path in teacher.paths.items():
        if not path.strip() or "/" in name:
            rule = "needs a path, and a name without a slash, since metrics bear it (teacher/NAME/kl)"
            raise ConfigError(f"teacher.path.{name} {rule}; got {path!r}")


def _by_name(given: dict[str, str] | str) -> dict[str, str]:
    if isinstance(given, str):
        return {"": given} if given else {}
    return given
