"""This module gives rewards by reward models, which are sequence classifiers.

The completions of all ranks are divided evenly over the ranks, in an order that does not depend on
which rank sampled what. So no rank waits for one that has more to score, and the same texts share a
forward pass however fast the engines were (the other texts of a pass can change a score's last
bits). Several texts are *packed* into one row, which is one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.schema import ModelConfig, ProofConfig, RewardConfig
from grpo_spmd.distributed.collectives import exchange_values
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.episodes.chat_format import PlainText, TemplateError, render, render_with_data
from grpo_spmd.learn.balance import fill_rows
from grpo_spmd.model.config_json import checkpoint_folder, load_tokenizer
from grpo_spmd.model.offload import ParkedModel
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about, read_reward_model
from grpo_spmd.model.values import RewardModel, build_reward_model
from grpo_spmd.proofs.reward_model_check import RewardModelCheck, ScoredCompletion
from grpo_spmd.proofs.schedule import ProofSchedule
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.scorers import RewardColumn, merge_results


class ModelReward:
    """One reward model of the run. Its parameters are in host memory except while it scores."""

    def __init__(self, name: str, model: RewardModel, texts: RewardTexts, max_tokens: int) -> None:
        """`max_tokens` is the most tokens of a packed row."""
        self.name = name
        self._model = model
        self._texts = texts
        self._max_tokens = max_tokens
        self._parked = ParkedModel(model)
        self._parked.park()

    def score(
        self, groups: Sequence[RolloutGroup], texts: Sequence[str], check: RewardModelCheck | None
    ) -> ScoredRollouts:
        """Collective. Returns the scores of this model; `texts` are the decoded completions.

        If `check` is given, it computes scores again in a plain way, and every rank raises
        Rank0Error if a score differs on any rank.
        """
        completions = [(group, n) for group in groups for n in range(len(group.completions))]
        column = RewardColumn(self.name, len(completions))
        # The token ids of the completions that can be scored, by the completion's number.
        inputs: dict[int, list[int]] = {}
        for number, ((group, n), text) in enumerate(zip(completions, texts, strict=True)):
            try:
                ids = self._texts.ids_of(group.prompt, group.completions[n], text)
                if ids is not None and max(ids) >= self._model.num_embeddings:
                    raise TextError(
                        f"has the token {max(ids)}, and the model "
                        f"{self._model.num_embeddings} of them"
                    )
            except TextError as error:
                column.fail(number, f"got a completion that {error}")
                continue
            if ids is not None:
                inputs[number] = ids
        # The slot and the sample of a completion identify it among those of all ranks.
        keys = [(group.slot, n) for group, n in (completions[number] for number in inputs)]
        self._parked.fetch()
        scores = score_over_ranks(keys, [*inputs.values()], self._max_tokens, self._score_row)
        for number, score in zip(inputs, scores, strict=True):
            if math.isfinite(score):
                column.give(number, score)
            else:
                column.fail(number, f"gave the score {score}")
        if check is not None:
            scored = [
                ScoredCompletion(group.prompt, group.completions[n], value, status)
                for (group, n), value, status in zip(
                    completions, column.values, column.statuses, strict=True
                )
            ]
            check.run(self.name, scored)
        self._parked.park()
        return column.scores

    @torch.no_grad()
    def _score_row(self, texts: list[list[int]]) -> Tensor:
        scores: Tensor = self._model(self._model.row_of(texts))
        return scores


@dataclass
class RewardModels:
    """The Scorer for all reward models of the run. They score after the engine has finished."""

    models: Sequence[ModelReward]
    engine: RolloutEngine
    checks: Mapping[str, RewardModelCheck]
    """The checks by the model's name; empty if `proofs.signals` is off.

    In the steps of `schedule` they run at each scoring, also in an evaluation."""
    schedule: ProofSchedule

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Collective. Returns the models' scores, as a Scorer does."""
        is_due = self.schedule.is_due(self.engine.policy_version or 0)
        # Puts the engine to sleep: from here on the reward models use the device's memory.
        self.engine.rest()
        return merge_results(
            [
                model.score(groups, scored.texts, self.checks.get(model.name) if is_due else None)
                for model in self.models
            ]
        )


def build_reward_models(
    rewards: Sequence[RewardConfig],
    model_config: ModelConfig,
    max_tokens: int,
    *,
    policy_tokenizer: Any,
    engine: RolloutEngine,
    session: Session,
    proofs: ProofConfig,
) -> RewardModels:
    """Collective. Builds the models of `rewards`; `max_tokens` is the most tokens of a packed row.

    Raises ConfigError for a model that cannot be used.
    """
    models: list[ModelReward] = []
    checks: dict[str, RewardModelCheck] = {}
    for index, reward in enumerate(rewards):
        if reward.model is None:
            continue
        folder = checkpoint_folder(reward.model, reward.revision)
        files = read_reward_model(index, reward, folder, max_tokens)
        texts = RewardTexts(files, policy_tokenizer)
        model = build_reward_model(files, model_config, session)
        if proofs.signals:
            checks[files.name] = RewardModelCheck(
                files,
                model,
                policy_tokenizer,
                dtype=model_config.dtype,
                bound_factor=proofs.bound_factor,
            )
        models.append(ModelReward(files.name, model, texts, max_tokens))
    return RewardModels(models, engine, checks, ProofSchedule(proofs.every_steps))


def score_over_ranks(
    keys: Sequence[Any],
    texts: Sequence[Sequence[int]],
    max_tokens: int,
    score: Callable[[list[list[int]]], Tensor],
) -> list[float]:
    """Collective. Returns the score of each of this rank's `texts` (perhaps none).

    `keys` identify the texts over all ranks. `score` takes the texts of a row, of at most
    `max_tokens` tokens together and sorted by length, and returns their scores [S]. It is called
    equally often on all ranks, so a row may be empty.
    """
    rank = dist.get_rank()
    report = (keys, [len(text) for text in texts])
    # Every rank computes the same rows from the same lengths.
    reports = exchange_values([report] * dist.get_world_size())
    rows = rows_of_ranks(reports, max_tokens)
    # For each rank: the indices of this rank's texts that are sent to it, in the order of its rows.
    numbers = [[n for row in theirs for source, n in row if source == rank] for theirs in rows]
    sent = [[texts[n] for n in one_rank] for one_rank in numbers]
    arriving = [iter(received) for received in exchange_values(sent)]
    # For an empty row `score` returns one value, which is left out.
    row_scores = [
        score([next(arriving[source]) for source, _ in row])[: len(row)] for row in rows[rank]
    ]
    # All scores are copied to the host at once: to wait for each row would leave the device idle.
    values = torch.cat(row_scores).cpu().tolist() if row_scores else []
    scores: list[list[float]] = [[] for _ in rows]
    for (source, _), value in zip(chain.from_iterable(rows[rank]), values, strict=True):
        scores[source].append(value)
    local_scores = [0.0] * len(texts)
    for one_rank, returned in zip(numbers, exchange_values(scores), strict=True):
        for n, value in zip(one_rank, returned, strict=True):
            local_scores[n] = value
    return local_scores


def rows_of_ranks(
    reports: Sequence[tuple[Sequence[Any], list[int]]], max_tokens: int
) -> list[list[list[tuple[int, int]]]]:
    """Returns for each rank its rows: the texts that go through the model together.

    A text is (rank that has it, its index there). The longest text of a row comes first. `reports`
    has the keys and the lengths of each rank's texts.
    """
    # Sorted by key, so that the order does not depend on which rank has which text.
    entries = sorted(
        (key, length, source, number)
        for source, (keys, lengths) in enumerate(reports)
        for number, (key, length) in enumerate(zip(keys, lengths, strict=True))
    )
    rows: list[list[list[tuple[int, int]]]] = [[] for _ in reports]
    if not entries:
        return rows
    lengths = np.array([length for _, length, *_ in entries], np.int64)
    order, row_sizes = fill_rows(lengths.astype(np.float64), lengths, len(reports), max_tokens)
    following = iter(order.tolist())
    for target, sizes in zip(rows, row_sizes.tolist(), strict=True):
        for size in sizes:
            row = [entries[next(following)] for _ in range(size)]
            row.sort(key=lambda entry: -entry[1])
            target.append([(source, number) for *_, source, number in row])
    return rows


class TextError(ValueError):
    """The error for a rollout that cannot be encoded for the model; the message says why."""


class RewardTexts:
    """Encodes rollouts as token ids for a reward model, with the model's own tokenizer and chat
    template.

    Chat messages and episodes go through the model's chat template, with the completion as the
    assistant's message, without a generation prompt. If the prompt is plain text, the completion
    follows it directly: as the policy's token ids if the model has the policy's whole vocabulary,
    else as text that is encoded again. What the policy and tools wrote is data: where it spells a
    special token, it becomes ordinary tokens for the letters.
    """

    def __init__(self, files: RewardModelFiles, policy_tokenizer: Any) -> None:
        """Raises ConfigError if there is no tokenizer."""
        with errors_about(f"{files.where}.model"):
            self.tokenizer = load_tokenizer(str(files.folder))
            self._plain = PlainText(self.tokenizer)
        self._files = files
        self._shares_ids = (
            policy_tokenizer.get_vocab().items() <= self.tokenizer.get_vocab().items()
        )

    def ids_of(self, prompt: Prompt, completion: Completion, text: str) -> list[int] | None:
        """Returns the token ids of a rollout, or None if they are too many to be scored.

        `text` is the decoded completion. Raises TextError if the rollout cannot be encoded.
        """
        ids = self._encode(prompt, completion, text)
        if not ids:
            raise TextError("has no token to read")
        max_tokens = self._files.max_tokens
        if len(ids) <= max_tokens:
            return ids
        return ids[-max_tokens:] if self._files.drops_start else None

    def _encode(self, prompt: Prompt, completion: Completion, text: str) -> list[int]:
        """Returns all token ids of a rollout. Raises TextError."""
        episode = completion.episode
        before = prompt.text_before(completion)
        if isinstance(before, str):
            if episode is None:
                if self._shares_ids:
                    return [*prompt.token_ids, *completion.token_ids]
                return self._encode_text(before, text)
            messages = [{"role": "user", "content": before}]
        else:
            messages = list(before)
        # The number of messages from the data set, which are not data in the sense of chat_format.
        # Further ones come from an environment's reset() or from an agent.
        num_dataset = len(messages) if before == prompt.text else 0
        if isinstance(prompt.text, list):
            num_dataset = len(prompt.text)
        answer = [{"role": "assistant", "content": text}] if episode is None else episode.messages
        render_text = partial(render, self.tokenizer, generate=False, template=self._files.template)
        try:
            # What the policy, tools and reset() wrote is data: it must not end its message and
            # begin another one.
            rendered, data = render_with_data(
                self._plain,
                render_text,
                [*messages, *answer],
                num_dataset,
                marks_thinking=False,
            )
            return self._plain.encode(rendered, data)
        except TemplateError as error:
            raise TextError(f"cannot be shown to it: {error}") from None

    def _encode_text(self, prompt: str, completion: str) -> list[int]:
        """Returns the tokens of plain text, including those that the tokenizer adds at both ends.

        The completion is data, the prompt is not.
        """
        text = prompt + completion
        framed = self.tokenizer(text, return_special_tokens_mask=True)
        ids = list(framed["input_ids"])
        try:
            text_ids = self._plain.encode(text, [(len(prompt), len(text))])
        except TemplateError as error:
            raise TextError(f"cannot be shown to it: {error}") from None
        is_added = framed["special_tokens_mask"]
        begin = is_added.index(0) if 0 in is_added else len(ids)
        end = len(ids) - (is_added[::-1].index(0) if 0 in is_added else 0)
        return [*ids[:begin], *text_ids, *ids[end:]]
