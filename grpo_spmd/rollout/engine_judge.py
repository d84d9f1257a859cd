"""Rewards by the run's own engine: the policy as judge. It reads a rubric with a completion in it, as remote/judge.py
writes it, and replies greedily with the weights that have just sampled; the score is on the reply's last line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.distributed.collectives import exchange_bytes
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.episodes.plain_text import PlainText, TemplateError, without_surrogates
from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.remote.client import UnexpectedError
from grpo_spmd.rewards.remote.servers import Judge, text_of
from grpo_spmd.rewards.scorers import merge_results

_ASKED = "asked7c1f0b"  # no template has this word in it
_OWN_COLUMNS = ("prompts", "completions", "completion_ids")
_MOST_SHOWN = 200  # characters of a reply that is no score
Key = tuple[int, int]  # of a completion over all ranks: its group's slot, its number there


class EngineJudge:
    """What one judge is asked, in tokens of the policy, and what its reply is worth."""

    def __init__(self, where: str, config: RewardConfig, tokenizer: Any, longest: int) -> None:
        """`longest`: prompt, in tokens. Raises ConfigError: a tokenizer that cannot ask, or a rubric that leaves no
        room for a completion."""
        if not getattr(tokenizer, "is_fast", False):
            what = "is not a fast one, which alone says where in a text a token stands; save it as tokenizer.json"
            raise ConfigError(f"{where}: the tokenizer of model.path {what}")
        self.name, self.reply_tokens = config.metric_name, config.judge_tokens
        self._judge, self._tokenizer, self._longest = (
            Judge(config, f"{where}.judge"),
            tokenizer,
            longest,
        )
        self._plain = PlainText(tokenizer)
        asked = [{"role": "user", "content": _ASKED}]
        try:
            text = str(
                tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            )
        except Exception as error:  # a template may refuse with any error
            what = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{where}: the chat template of model.path refuses a user's message: {what}"
            ) from None
        self._before, found, self._behind = text.partition(_ASKED)
        if not found or _ASKED in self._behind:
            raise ConfigError(
                f"{where}: the chat template of model.path does not say a user's message just once"
            )
        nothing = dict.fromkeys(self._judge.needs)
        alone = len(self._ids({**nothing, "prompts": "", "completions": ""}))
        if alone >= longest:
            what = f"the rubric alone takes {alone} tokens of the judge's prompt, of {longest}"
            raise ConfigError(f"{where}.max_tokens: {what}; raise it, or shorten the rubric")

    def prompt_ids(self, given: Mapping[str, Any]) -> list[int] | None:
        """`given`: what a reward function gets of a completion. None where that is too long. Raises TemplateError for a
        text that cannot be written without special tokens."""
        ids = self._ids(given)
        return ids if len(ids) <= self._longest else None

    def _ids(self, given: Mapping[str, Any]) -> list[int]:
        columns = {name: [value] for name, value in given.items() if name not in _OWN_COLUMNS}
        body = self._judge.body([given["prompts"]], [text_of(given["completions"])], columns)
        content, begin = without_surrogates(body["messages"][0]["content"]), len(self._before)
        # All of it is data: a completion that says how a turn ends must not end the judge's, and reply to itself.
        return self._plain.encode(
            f"{self._before}{content}{self._behind}", [(begin, begin + len(content))]
        )

    def text_of(self, reply: Completion) -> str:
        return str(self._tokenizer.decode(reply.token_ids, skip_special_tokens=True))

    def score_of(self, said: str, finish_reason: str) -> float:
        """Of a reply's text, in [0, 1]. Raises UnexpectedError for what is no score."""
        choice = {"message": {"content": said}, "finish_reason": finish_reason}
        [score] = self._judge.scores({"choices": [choice]}, 1)
        return score


class EngineJudges:
    """All judges of the run that are its engine, behind whatever else scores while the engine is awake."""

    def __init__(
        self,
        judges: Sequence[EngineJudge],
        engine: RolloutEngine,
        num_ranks: int,
        check: Callable[[], None],
    ) -> None:
        """`check` is called by all ranks after each generation, and raises on all alike where it was ended early on
        one."""
        self._judges, self._engine = list(judges), engine
        self._num_ranks, self._check = num_ranks, check

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Collective. The judges' scores, as a Scorer gives them."""
        # What is found in the cache is computed in other pieces, which rounds differently: a reply must not hang on
        # what was sampled here before, nor the next prompts of a step on what was judged.
        self._engine.reset_prefix_cache()
        results = [self._judged(judge, groups, scored) for judge in self._judges]
        self._engine.reset_prefix_cache()
        return merge_results(results)

    def _judged(
        self, judge: EngineJudge, groups: Sequence[RolloutGroup], scored: ScoredRollouts
    ) -> ScoredRollouts:
        """Collective. Of one judge alone."""
        completions = [
            ((group.slot, n), one) for group in groups for n, one in enumerate(group.completions)
        ]
        values: list[float | None] = [None] * len(completions)
        statuses, errors = ["not_applicable"] * len(completions), list[str]()
        asked, notes = dict[Key, list[int]](), dict[int, dict[str, Any]]()

        def fail(place: int, why: str) -> None:
            values[place], statuses[place] = math.nan, "error"
            errors.append(f"reward {judge.name!r}: {why}")

        for place, ((key, completion), given) in enumerate(
            zip(completions, scored.reward_inputs, strict=True)
        ):
            if completion.episode is not None and not completion.episode.turns:
                continue  # its environment failed: there is nothing to judge
            try:
                ids = judge.prompt_ids(given)
            except TemplateError as error:
                fail(place, f"the engine cannot be asked: {error}")
                continue
            if ids is not None:
                asked[key] = ids
        replies = self._replies(asked, judge.reply_tokens)
        for place, (key, _) in enumerate(completions):
            if key not in asked:
                continue
            reply = replies[key]
            said = judge.text_of(reply)
            logged = {"reply_tokens": [float(len(reply.token_ids)), 1]}
            notes[place] = {"logged": {judge.name: logged}, "extra": {judge.name: {"reply": said}}}
            try:
                values[place], statuses[place] = judge.score_of(said, reply.finish_reason), "ok"
            except UnexpectedError as error:
                fail(place, f"the engine answered {error}: {said[-_MOST_SHOWN:]!r}")
        first = errors[0] if errors else None
        by_name, of_all = {judge.name: values}, {judge.name: statuses}
        return ScoredRollouts(by_name=by_name, statuses=of_all, first_error=first, notes=notes)

    def _replies(self, asked: Mapping[Key, list[int]], max_tokens: int) -> dict[Key, Completion]:
        """Collective. The greedy reply to each of this rank's prompts. Those of all ranks are shared out over the
        engines as a rollout's are, those of a group to one engine, since they begin alike."""
        mine = sorted(asked.items())
        packed = pack(
            [[*key, len(ids)] for key, ids in mine], [np.array(ids, np.int32) for _, ids in mine]
        )
        of_all: dict[Key, tuple[int, list[int]]] = {}
        for rank, payload in enumerate(exchange_bytes([packed] * self._num_ranks)):
            unpacked = PackedReader(payload)
            for slot, number, length in unpacked.header:
                of_all[slot, number] = rank, unpacked.array(np.int32, length).tolist()
        jobs = [list(keys) for _, keys in groupby(sorted(of_all), key=lambda key: key[0])]

        def request(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
            prompt = of_all[jobs[job][number]][1]
            return None if turns else Request(prompt, None, 0.0, max_tokens, is_rollout=False)

        version = self._engine.policy_version or 0  # of an engine that has none it is refused
        made = self._engine.generate_shared(
            [len(keys) for keys in jobs], GenerationHooks(request), version
        )
        self._check()
        back: list[list[Any]] = [[] for _ in range(self._num_ranks)]
        for job, turns in (
            made.items() if self._engine.tp_rank == 0 else ()
        ):  # its other ranks have the same
            for key, [reply] in zip(jobs[job], turns, strict=True):
                back[of_all[key][0]].append([*key, reply.token_ids, reply.finish_reason])
        found = exchange_bytes([json.dumps(of_rank).encode() for of_rank in back])
        replies = (reply for payload in found for reply in json.loads(payload))
        return {(slot, number): Completion(ids, [], why) for slot, number, ids, why in replies}
