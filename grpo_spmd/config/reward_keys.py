"""The entries of `rewards` and the section `reward_pool`: what scores completions, and in which processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Literal

from grpo_spmd.config.key import key


# fmt: off
@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    name: str | None = key(None, "a shipped reward (math, gsm8k, countdown, code, format, exact), or another's name")
    function: str | None = key(None, '"file.py:function": fn(prompts, completions, completion_ids, **columns)')
    url: str | None = key(None,
        "in place of function: http(s) address of a server, called by POST of JSON; engine: the policy is the judge")
    model: str | None = key(None,
        "folder or hub id of a reward model: a decoder (qwen3, llama, ...) with a head for sequence classification")
    weight: float = key(1.0, "factor of this reward in the sum")
    args: dict[str, Any] = key({}, "further keyword arguments for the function, or fields of what a url is sent")
    timeout_s: float | None = key(None, "as reward_pool.timeout_s, which null means, of this function or url: requests "
        "for one completion and the pauses between them", above=0)
    max_concurrent: int | None = key(None, "calls of this function or url under way at once, over all ranks; a "
        "function with a limit is called with one completion at a time", at_least=1)
    max_per_minute: int | None = key(None, "calls begun in a minute, over all ranks, at even distances", at_least=1)
    retries: int = key(3, "requests to a url made again for a completion, with growing pauses, or those the server "
        "asks for, after 408, 429, 5xx, a dropped line or a malformed answer", at_least=0, at_most=20)
    headers_env: dict[str, str] = key({}, "headers that a url is sent, by the environment variables that hold them: "
        "{Authorization: MY_TOKEN}")
    form: Literal["slime", "openrlhf"] = key("slime", "what a url is sent: slime, {prompt, response, label, metadata} "
        "of one completion; openrlhf, {query, prompts, labels} of a group")
    judge: str | None = key(None, "file with a rubric over {prompt}, {completion} and columns: url is then an "
        "OpenAI-compatible .../v1/chat/completions, whose reply ends with a score")
    judge_model: str | None = key(None, "the model that judges, by the name its server has for it")
    judge_scale: tuple[float, float] = key((0.0, 10.0), "lowest and highest score of the rubric, made 0 and 1")
    judge_tokens: int = key(256, "longest reply of a judge with url: engine, in tokens; a longer one is no score",
        at_least=1)
    label: str | None = key(None, "whose score counts where `model` has several labels: its name or number")
    max_tokens: int | None = key(None,
        "longest text for `model`, in tokens; null: its positions, training.max_tokens_per_micro_batch at most; for a "
        "judge with url: engine its prompt; null: as its rubric and the limits of prompt and completion come to",
        at_least=1)
    on_long: Literal["not_applicable", "drop_start"] = key("not_applicable",
        "a longer one gets no score from `model`, or only its last max_tokens are read")
    template: str | None = key(None, "file with a chat template (jinja) for `model`, in place of its own")
    revision: str | None = key(None, "branch, tag or commit of a `model` at the hub")

    @property
    def is_shipped(self) -> bool:
        """Whether `name` says what it is, and not only what it is called."""
        return self.function is None and self.url is None and self.model is None

    @property
    def by_engine(self) -> bool:
        """Whether the run's own engine judges."""
        return self.url == "engine"

    @property
    def is_called(self) -> bool:
        """Whether the reward pool calls it."""
        return self.model is None and not self.by_engine

    @property
    def shown_name(self) -> str:
        """Its metric's."""
        of_url = "judge" if self.judge is not None else "server"
        of_file = (self.function or "").rpartition(":")[2] or PurePath(self.model or "").name
        return self.name or (of_url if self.url is not None else of_file)

    @property
    def is_watched(self) -> bool:
        """Whether calls of it are measured and held to limits of their own."""
        limits = self.timeout_s, self.max_concurrent, self.max_per_minute
        return (self.url is not None and not self.by_engine) or any(limit is not None for limit in limits)


@dataclass(frozen=True, kw_only=True)
class RewardPoolConfig:
    num_workers: int = key(4, "processes on each rank that score rewards", at_least=1, at_most=4096)
    timeout_s: float = key(10.0, "seconds that scoring one completion may take before its process is killed", above=0)
    max_error_frac: float = key(0.3,
        "share of a step's completions without a usable reward at which the run stops", above=0, at_most=1)
