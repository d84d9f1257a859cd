"""Rewards by models that the run holds itself: reward models, and the run's own engine as a judge.

Reward models are sequence classifiers. The completions of all ranks are divided evenly over the
ranks, in an order that does not depend on which rank sampled what. So no rank waits for one that
has more to score, and the same texts share a forward pass however fast the engines were (the other
texts of a pass can change a score's last bits). Several texts are *packed* into one row, which is
one forward pass.

A judge is the policy in the run's vLLM engine. It reads a rubric with a completion in it, as
rewards/servers.py writes it. Its reply is decoded greedily, with the same weights that have
sampled the completion. The score is on the last line of the reply.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ModelConfig, ProofConfig, RewardConfig
from grpo_spmd.distributed.collectives import exchange_values
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.episodes.chat_format import (
    PlainText,
    TemplateError,
    render,
    render_with_data,
    without_surrogates,
)
from grpo_spmd.learn.balance import fill_rows
from grpo_spmd.model.config_json import checkpoint_folder, load_tokenizer
from grpo_spmd.model.offload import ParkedModel
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about, read_reward_model
from grpo_spmd.model.values import RewardModel, build_reward_model
from grpo_spmd.proofs.reward_model_check import RewardModelCheck, ScoredCompletion
from grpo_spmd.proofs.schedule import ProofSchedule
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.client import UnexpectedError
from grpo_spmd.rewards.scorers import RewardColumn, merge_results
from grpo_spmd.rewards.servers import Judge, assistant_text
from grpo_spmd.rewards.trl import CALL_COLUMNS

# A word that stands in the rubric's place in a trial prompt. No chat template contains it.
_PLACEHOLDER = "asked7c1f0b"
# The number of characters that an error shows of a reply without a score.
_MAX_SHOWN_CHARS = 200
# Identifies a completion over all ranks: (slot of its group, its number in the group).
Key = tuple[int, int]


class ModelReward:
    """One reward model of the run: a sequence classifier that scores the ranks' completions.

    Its parameters are in host memory except while it scores.
    """

    def __init__(self, name: str, model: RewardModel, texts: RewardTexts, max_tokens: int) -> None:
        """`texts` encodes rollouts for the model; `max_tokens` is the most tokens of a packed
        row."""
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

        A completion that is too long for the model gets no score (its reward is None), one that
        cannot be encoded gets NaN. If `check` is given, it computes scores again in a plain way,
        and every rank raises Rank0Error if a score differs on any rank.
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
        """Returns the scores of texts (token ids) that are packed into one row, in float32 [S].

        Called by `score_over_ranks`. An empty row gives one value, which the caller leaves out.
        """
        scores: Tensor = self._model(self._model.row_of(texts))
        return scores


@dataclass
class RewardModels:
    """The Scorer (rewards/scorers.py) for all reward models of the run.

    They score after the engine has finished.
    """

    models: Sequence[ModelReward]
    engine: RolloutEngine
    checks: Mapping[str, RewardModelCheck]
    """The checks by the model's name; empty if `proofs.signals` is off.

    In the steps of `schedule` they run at each scoring, also in an evaluation."""
    schedule: ProofSchedule

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Collective. Returns the scores of all reward models, in the form of Scorer.score.

        `scored` has the decoded completions; the scores in it are not used.
        """
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

    `keys` identify the texts over all ranks. `score` takes the S texts of a row, of at most
    `max_tokens` tokens together and the longest first, and returns their scores [S]. It is called
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
    scores = list(zip(chain.from_iterable(rows[rank]), values, strict=True))
    # Every rank gets all scores, and takes those of its own texts.
    gathered = chain.from_iterable(exchange_values([scores] * len(rows)))
    return [score for _, score in sorted(entry for entry in gathered if entry[0][0] == rank)]


def rows_of_ranks(
    reports: Sequence[tuple[Sequence[Any], list[int]]], max_tokens: int
) -> list[list[list[tuple[int, int]]]]:
    """Returns for each rank its rows; a row has the texts of one forward pass.

    A text is given as (rank that has it, its index there). The longest text of a row comes first.
    `reports` has, for each rank, the keys and the lengths in tokens of its texts. Every rank
    computes the same result.
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
    """Raised for a rollout that cannot be encoded for a reward model; the message says why."""


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
        """Loads the reward model's tokenizer. Raises ConfigError if there is none."""
        with errors_about(f"{files.where}.model"):
            self.tokenizer = load_tokenizer(str(files.folder))
            self._plain = PlainText(self.tokenizer)
        self._files = files
        # True if each token of the policy has the same id in the reward model's vocabulary.
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
        """Returns all token ids of a rollout, however many they are. Raises TextError."""
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
        """Returns the tokens of a plain prompt and its completion, with the tokens that the
        tokenizer adds at both ends (BOS, EOS).

        Only the completion is data, in which no text may become a special token.
        """
        text = prompt + completion
        framed = self.tokenizer(text, return_special_tokens_mask=True)
        ids = list(framed["input_ids"])
        try:
            text_ids = self._plain.encode(text, [(len(prompt), len(text))])
        except TemplateError as error:
            raise TextError(f"cannot be shown to it: {error}") from None
        # The tokenizer has added the tokens before index `begin`, and those from index `end` on.
        is_added = framed["special_tokens_mask"]
        begin = is_added.index(0) if 0 in is_added else len(ids)
        end = len(ids) - (is_added[::-1].index(0) if 0 in is_added else 0)
        return [*ids[:begin], *text_ids, *ids[end:]]


# Judges that the engine serves.


class EngineJudge:
    """One judge: the policy in the run's engine, which reads a rubric and replies with a score.

    This class encodes the judge's prompts as tokens of the policy, and reads the scores in replies.
    """

    def __init__(
        self, entry: str, config: RewardConfig, tokenizer: Any, max_prompt_tokens: int
    ) -> None:
        """`entry` is the judge's place in the config, such as "rewards.0". `max_prompt_tokens` is
        the most tokens of the judge's prompt, which is the rubric with a completion in it.

        Raises ConfigError for an unsuitable tokenizer, or for a rubric that leaves no room for a
        completion.
        """
        self.name = config.metric_name
        self.reply_tokens = config.judge_tokens
        self.form = Judge(config, f"{entry}.judge")
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._plain = PlainText(tokenizer)
        pieces = render(tokenizer, [{"role": "user", "content": _PLACEHOLDER}]).split(_PLACEHOLDER)
        if len(pieces) != 2:
            raise ConfigError(
                f"{entry}: the chat template of model.path must write a user's message just once"
            )
        self._prefix, self._suffix = pieces
        empty = dict.fromkeys(self.form.needs)
        num_tokens = len(self._encode({**empty, "prompts": "", "completions": ""}))
        if num_tokens >= max_prompt_tokens:
            raise ConfigError(
                f"{entry}.max_tokens: the rubric alone takes {num_tokens} tokens of "
                f"the judge's prompt, of {max_prompt_tokens}; raise it, or shorten the rubric"
            )

    def prompt_ids(self, inputs: Mapping[str, Any]) -> list[int] | None:
        """Returns the judge's prompt, or None if it is too long.

        `inputs` are a reward function's arguments for one completion. Raises TemplateError for a
        text that cannot be written without special tokens.
        """
        ids = self._encode(inputs)
        return ids if len(ids) <= self._max_prompt_tokens else None

    def _encode(self, inputs: Mapping[str, Any]) -> list[int]:
        """Returns the tokens of the judge's prompt: the rubric, filled in, as a user's message."""
        columns = {name: [value] for name, value in inputs.items() if name not in CALL_COLUMNS}
        completion = assistant_text(inputs["completions"])
        body = self.form.body([inputs["prompts"]], [completion], columns)
        content = without_surrogates(body["messages"][0]["content"])
        # The whole filled-in rubric is data. Otherwise a completion with special tokens in its text
        # could end the user's message and write the judge's reply itself.
        start = len(self._prefix)
        return self._plain.encode(
            f"{self._prefix}{content}{self._suffix}", [(start, start + len(content))]
        )

    def text_of(self, reply: Completion) -> str:
        """Returns the text of a judge's reply, without special tokens."""
        return str(self._tokenizer.decode(reply.token_ids, skip_special_tokens=True))


class EngineJudges:
    """The Scorer (rewards/scorers.py) for all judges that the run's own vLLM engine serves.

    It scores while the engine is awake.
    """

    def __init__(
        self,
        rewards: Sequence[RewardConfig],
        prompt_tokens: Mapping[int, int],
        tokenizer: Any,
        engine: RolloutEngine,
        session: Session,
        check: Callable[[], None],
    ) -> None:
        """`prompt_tokens` has the most tokens of a prompt of each judge, by its index in `rewards`.
        All ranks call `check` after each generation; it raises on all of them if one was aborted.

        Raises ConfigError.
        """
        self._judges = [
            EngineJudge(f"rewards.{index}", rewards[index], tokenizer, max_prompt_tokens)
            for index, max_prompt_tokens in prompt_tokens.items()
        ]
        self._engine = engine
        self._session = session
        self._check = check

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Collective. Returns the scores of all judges, in the form of Scorer.score.

        `scored` has the arguments of reward functions for each completion, which fill the rubrics.
        """
        # With a cached prefix a prompt is computed in chunks of other sizes, which rounds
        # differently. The cache is emptied before, so that replies do not depend on earlier
        # samples, and after, so that later samples do not depend on what was judged.
        self._engine.reset_prefix_cache()
        results = [self._score_with(judge, groups, scored) for judge in self._judges]
        self._engine.reset_prefix_cache()
        return merge_results(results)

    def _score_with(
        self, judge: EngineJudge, groups: Sequence[RolloutGroup], scored: ScoredRollouts
    ) -> ScoredRollouts:
        """Collective. Returns the scores of one judge.

        A completion whose prompt is too long for the judge has no score (None). One that cannot be
        shown to the judge, or whose reply has no score, gets NaN.
        """
        keys = [(group.slot, n) for group in groups for n in range(len(group.completions))]
        column = RewardColumn(judge.name, len(keys))
        prompts: dict[Key, list[int]] = {}
        for number, (key, inputs) in enumerate(zip(keys, scored.reward_inputs, strict=True)):
            try:
                ids = judge.prompt_ids(inputs)
            except TemplateError as error:
                column.fail(number, f"cannot ask the engine: {error}")
            else:
                if ids is not None:
                    prompts[key] = ids
        replies = self._generate_replies(prompts, judge.reply_tokens)
        for number, key in enumerate(keys):
            reply = replies.get(key)
            if reply is None:
                continue
            text = judge.text_of(reply)
            column.scores.notes[number] = {
                "logged": {judge.name: {"reply_tokens": [float(len(reply.token_ids)), 1]}},
                "extra": {judge.name: {"reply": text}},
            }
            try:
                column.give(number, judge.form.score_of(text, reply.finish_reason))
            except UnexpectedError as error:
                column.fail(number, f"got from the engine {error}: {text[-_MAX_SHOWN_CHARS:]!r}")
        return column.scores

    def _generate_replies(
        self, prompts: Mapping[Key, list[int]], max_tokens: int
    ) -> dict[Key, Completion]:
        """Collective. Returns the greedy reply to each of this rank's prompts.

        The prompts of all ranks are distributed over the engines like those of a rollout. The
        prompts about one group go to one engine, since they have the same beginning.
        """
        all_prompts = {
            (slot, number): ids for (slot, number), ids in self._gather(list(prompts.items()))
        }
        jobs = [list(keys) for _, keys in groupby(sorted(all_prompts), key=lambda key: key[0])]

        def request(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
            """Returns the judge's request for prompt `number` of a job (a group's prompts)."""
            # The judge has replied: its conversation of one turn is over.
            if turns:
                return None
            prompt_ids = all_prompts[jobs[job][number]]
            return Request(
                prompt_ids,
                # None, since greedy decoding draws no random numbers.
                seed=None,
                temperature=0.0,
                max_tokens=max_tokens,
                is_rollout=False,
                ends_at_stops=False,
                prompt_recurs=False,
            )

        # An engine without weights has no version, and refuses 0 like any other version.
        version = self._engine.policy_version or 0
        sizes = [len(keys) for keys in jobs]
        conversations = self._engine.generate_shared(sizes, GenerationHooks(request), version)
        self._check()
        replies = [
            (key, reply.token_ids, reply.finish_reason)
            for job, turns in conversations.items()
            for key, [reply] in zip(jobs[job], turns, strict=True)
            # The other ranks of an engine have the same replies.
            if self._engine.tp_rank == 0
        ]
        return {
            (slot, number): Completion(ids, [], finish_reason)
            for (slot, number), ids, finish_reason in self._gather(replies)
            if (slot, number) in prompts
        }

    def _gather(self, items: list[Any]) -> list[Any]:
        """Collective. Returns the items of all ranks, in rank order."""
        return [*chain(*exchange_values([items] * self._session.world_size))]
