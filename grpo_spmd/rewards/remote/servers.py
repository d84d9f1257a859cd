"""A reward whose function asks a server: what is sent, in the form that slime's or OpenRLHF's servers take, or a judge.

The label is the column `label`, or where there is none `answer`; null where there is neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.rewards.protocol import Reward
from grpo_spmd.rewards.remote.client import JsonClient, UnexpectedError, finite, headers_of, number_in
from grpo_spmd.rewards.remote.early import LABELS


class Form(Protocol):
    fields: tuple[str, ...]  # of a body, beside `args`
    needs: tuple[str, ...]  # columns
    one_at_a_time: bool

    def body(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, list[Any]]) -> Any: ...

    def scores(self, answer: Any, number: int) -> list[float]:
        """One for each of `number` completions. UnexpectedError, which says what was answered instead."""


def server_reward(config: RewardConfig, where: str) -> Reward:
    """ConfigError: a rubric that is not there or names no completion, or `args` that are the form's own."""
    form: Form = _Slime() if config.form == "slime" else _OpenRlhf()
    if config.judge is not None:
        from grpo_spmd.rewards.remote.judge import Judge

        form = Judge(config, f"{where}.judge")
    if own := [name for name in config.args if name in form.fields]:
        raise ConfigError(f"{where}.args: {own[0]!r} is given by the trainer; take it out")
    asks = _Asks(config, form, f"{where}.headers_env")
    return Reward(
        name=config.shown_name, weight=config.weight, needs=form.needs, one_at_a_time=form.one_at_a_time, function=asks
    )


class _Asks:
    """The function of a reward. The client is made at its first call, in a worker: nobody else needs the secrets."""

    def __init__(self, config: RewardConfig, form: Form, where: str) -> None:
        self._config, self._form, self._where = config, form, where
        self._client: JsonClient | None = None

    def __call__(
        self, /, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any, **columns: list[Any]
    ) -> list[float]:
        if self._client is None:
            headers = headers_of(self._config.headers_env, self._where)
            self._client = JsonClient(str(self._config.url), headers)
        said = [text_of(completion) for completion in completions]
        answer = self._client.ask({**self._config.args, **self._form.body(prompts, said, columns)})
        try:
            return self._form.scores(answer, len(said))
        except UnexpectedError as error:
            raise self._client.malformed(error) from None


def text_of(completion: Any) -> Any:
    """What the assistant said to a chat, which is a list of one message; anything else as it is, calls of tools too."""
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], dict):
        return completion if completion[0].get("tool_calls") else completion[0].get("content", completion)
    return completion


def _labels(columns: Mapping[str, list[Any]], number: int) -> list[Any]:
    nothing = [None] * number  # and a row that lacks a column which others have holds None for it
    pairs = zip(*(columns.get(name, nothing) for name in LABELS), strict=True)
    return [answer if label is None else label for label, answer in pairs]


class _Slime:
    """slime's `--rm-url`: one completion a request; its answer is the reward, or an object that has it."""

    fields: tuple[str, ...] = ("prompt", "response", "label", "metadata")
    needs: tuple[str, ...] = ()
    one_at_a_time = True

    def body(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, list[Any]]) -> Any:
        metadata = {name: values[0] for name, values in columns.items()}
        label = _labels(columns, 1)[0]
        return {"prompt": prompts[0], "response": completions[0], "label": label, "metadata": metadata}

    def scores(self, answer: Any, number: int) -> list[float]:
        return [number_in(answer, ("score", "reward", "rewards"))]


class _OpenRlhf:
    """OpenRLHF's `--remote_rm_url`: all completions of a call in one request; `rewards`, as many."""

    fields: tuple[str, ...] = ("query", "prompts", "labels")
    needs: tuple[str, ...] = ()
    one_at_a_time = False

    def body(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, list[Any]]) -> Any:
        query = [_joined(prompt, said) for prompt, said in zip(prompts, completions, strict=True)]
        return {"query": query, "prompts": list(prompts), "labels": _labels(columns, len(prompts))}

    def scores(self, answer: Any, number: int) -> list[float]:
        rewards = answer.get("rewards") if isinstance(answer, dict) else answer
        if not isinstance(rewards, list):
            raise UnexpectedError("no list of rewards")
        if len(rewards) != number:
            raise UnexpectedError(f"{len(rewards)} rewards for {number} completions")
        return [finite(reward) for reward in rewards]


def _joined(prompt: Any, said: Any) -> Any:
    """The whole of a prompt and its completion: text, or messages."""
    if isinstance(prompt, str) and isinstance(said, str):
        return prompt + said
    of_prompt = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return [*of_prompt, *(said if isinstance(said, list) else [{"role": "assistant", "content": said}])]
