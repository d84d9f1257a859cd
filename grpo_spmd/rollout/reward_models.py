"""Rewards by models: what they give for completions, beside what reward functions and environments gave."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.model.parked import ParkedModel
from grpo_spmd.model.reward_model import RewardModel
from grpo_spmd.proofs.reward_model_check import RewardModelCheck, Scored
from grpo_spmd.records import RolloutGroup, ScoredRollouts
from grpo_spmd.rollout.beside import Score, with_scores
from grpo_spmd.rollout.reward_rows import score_over_ranks
from grpo_spmd.rollout.reward_texts import RewardTexts, TextError

_MOST_SAMPLES = 1 << 20  # of a group


class ModelReward:
    """One reward model of the run. Its parameters wait in host memory but while it scores."""

    def __init__(self, name: str, model: RewardModel, texts: RewardTexts, max_tokens: int) -> None:
        """`max_tokens`: of a packed row."""
        self.name, self._model, self._texts, self._max_tokens = name, model, texts, max_tokens
        self._parked = ParkedModel(model)
        self._parked.park()

    def score(
        self, groups: Sequence[RolloutGroup], texts: Sequence[str], check: RewardModelCheck | None
    ) -> ScoredRollouts:
        """Collective. `by_name`, `statuses` and `first_error` of this model alone; `texts` are the decoded completions.
        Raises Rank0Error on every rank where `check` finds other scores than a plain recomputation."""
        completions = [(group, n) for group in groups for n in range(len(group.completions))]
        values: list[float | None] = [None] * len(completions)
        statuses, errors = ["not_applicable"] * len(completions), list[str]()
        keys, shown, places = list[int](), list[list[int]](), list[int]()

        def fail(place: int, why: str) -> None:
            values[place], statuses[place] = math.nan, "error"
            errors.append(f"reward {self.name!r}: a completion {why}")

        for place, ((group, n), text) in enumerate(zip(completions, texts, strict=True)):
            completion = group.completions[n]
            if completion.episode is not None and not completion.episode.turns:
                continue  # its environment failed: there is nothing to read
            try:
                ids = self._texts.ids_of(group.prompt, completion, text)
                if ids is not None and max(ids) >= self._model.num_embeddings:
                    raise TextError(f"has the token {max(ids)}, and the model {self._model.num_embeddings} of them")
            except TextError as error:
                fail(place, str(error))
                continue
            if ids is not None:
                keys.append(group.slot * _MOST_SAMPLES + n)
                shown.append(ids)
                places.append(place)
        self._parked.fetch()
        scores = score_over_ranks(keys, shown, self._max_tokens, self._score_row)
        for place, value in zip(places, scores, strict=True):
            values[place], statuses[place] = value, "ok"
            if not math.isfinite(value):
                fail(place, f"has the score {value}")
        if check is not None:
            given = zip(completions, values, statuses, strict=True)
            check.run(self.name, [Scored(g.prompt, g.completions[n], value, status) for (g, n), value, status in given])
        self._parked.park()
        first = errors[0] if errors else None
        return ScoredRollouts(by_name={self.name: values}, statuses={self.name: statuses}, first_error=first)

    @torch.no_grad()
    def _score_row(self, texts: list[list[int]]) -> list[float]:
        scores: list[float] = self._model(self._model.row_of(texts)).tolist()
        return scores


class RewardModels:
    """Scores with all models behind whatever else scores."""

    def __init__(
        self,
        models: Sequence[ModelReward],
        weights: Mapping[str, float],
        engine: RolloutEngine,
        checks: Mapping[str, RewardModelCheck],
        check_every_steps: int,
    ) -> None:
        """`weights` of all rewards of the run, in the order in which they are to be. `checks`: by the model's name, run
        at each scoring, of an evaluation too, of the process's first step and of steps that `check_every_steps` divides
        (0: of the first alone)."""
        self._models, self._weights, self._engine = list(models), weights, engine
        self._checks, self._check_every_steps = checks, check_every_steps
        self._first_version: int | None = None

    def behind(self, score: Score) -> Score:
        """Collective, and called on every rank, also with no groups. `score` with the models' scores, once it has
        scored on all ranks."""
        return partial(self._score_behind, score)

    def _score_behind(self, score: Score, groups: Sequence[RolloutGroup], **more: Any) -> ScoredRollouts:
        scored = score(groups, **more)
        version = self._engine.policy_version or 0
        self._first_version = version if self._first_version is None else self._first_version
        every = self._check_every_steps
        is_due = version == self._first_version or (every > 0 and version % every == 0)
        self._engine.rest()  # the device is the models' now
        checks = [self._checks[model.name] if is_due else None for model in self._models]
        each = zip(self._models, checks, strict=True)
        found = [model.score(groups, scored.texts, check) for model, check in each]
        return with_scores(scored, found, self._weights)
