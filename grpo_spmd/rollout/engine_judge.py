"""This module gives rewards by judges that the run's own vLLM engine serves: the policy judges.

A judge reads a rubric with a completion in it, as rewards/servers.py writes it. Its reply is
decoded greedily, with the same weights that have sampled the completion. The score is on the last
line of the reply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.distributed.collectives import exchange_values
from grpo_spmd.distributed.session import Session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.episodes.chat_format import PlainText, TemplateError, render, without_surrogates
from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts
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


class EngineJudge:
    """One judge. It encodes prompts as tokens of the policy, and reads the scores in replies."""

    def __init__(
        self, entry: str, config: RewardConfig, tokenizer: Any, max_prompt_tokens: int
    ) -> None:
        """`entry` is the judge's place in the config, such as "rewards.0".

        Raises ConfigError for an unsuitable tokenizer, or for a rubric that leaves no room for a
        completion.
        """
        self.name = config.metric_name
        self.reply_tokens = config.judge_tokens
        self._judge = Judge(config, f"{entry}.judge")
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._plain = PlainText(tokenizer)
        pieces = render(tokenizer, [{"role": "user", "content": _PLACEHOLDER}]).split(_PLACEHOLDER)
        if len(pieces) != 2:
            raise ConfigError(
                f"{entry}: the chat template of model.path must write a user's message just once"
            )
        self._prefix, self._suffix = pieces
        empty = dict.fromkeys(self._judge.needs)
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
        body = self._judge.body([inputs["prompts"]], [completion], columns)
        content = without_surrogates(body["messages"][0]["content"])
        # The whole filled-in rubric is data. Otherwise a completion with special tokens in its text
        # could end the user's message and write the judge's reply itself.
        start = len(self._prefix)
        return self._plain.encode(
            f"{self._prefix}{content}{self._suffix}", [(start, start + len(content))]
        )

    def text_of(self, reply: Completion) -> str:
        """Returns the text of a reply."""
        return str(self._tokenizer.decode(reply.token_ids, skip_special_tokens=True))

    def score_of(self, reply: str, finish_reason: str) -> float:
        """Returns the score in a reply, in [0, 1]. Raises UnexpectedError for a reply without a
        score."""
        return self._judge.score_of(reply, finish_reason)


class EngineJudges:
    """The Scorer for all judges that the run's own vLLM engine serves.

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
        """Collective. Returns the judges' scores, as a Scorer does."""
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
        """Collective. Returns the scores of one judge."""
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
                column.give(number, judge.score_of(text, reply.finish_reason))
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
            if turns:
                return None
            prompt_ids = all_prompts[jobs[job][number]]
            return Request(
                prompt_ids,
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
