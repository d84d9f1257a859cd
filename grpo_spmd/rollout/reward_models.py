"""Rewards by models: what they give for completions, beside what reward functions and environments gave."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from grpo_spmd.distributed.collectives import exchange_bytes, scatter_from_rank0
from grpo_spmd.distributed.packed import PackedReader, pack
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.learn.balance import fill_rows
from grpo_spmd.model.hf_files import load_tokenizer
from grpo_spmd.model.offload import ParkedModel
from grpo_spmd.model.reward_model import RewardModel
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about
from grpo_spmd.proofs.reward_model_check import RewardModelCheck, Scored
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.scorers import merge_results

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
                    raise TextError(
                        f"has the token {max(ids)}, and the model {self._model.num_embeddings} of them"
                    )
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
            check.run(
                self.name,
                [
                    Scored(g.prompt, g.completions[n], value, status)
                    for (g, n), value, status in given
                ],
            )
        self._parked.park()
        first = errors[0] if errors else None
        return ScoredRollouts(
            by_name={self.name: values}, statuses={self.name: statuses}, first_error=first
        )

    @torch.no_grad()
    def _score_row(self, texts: list[list[int]]) -> list[float]:
        scores: list[float] = self._model(self._model.row_of(texts)).tolist()
        return scores


class RewardModels:
    """Scores with all models behind whatever else scores."""

    def __init__(
        self,
        models: Sequence[ModelReward],
        engine: RolloutEngine,
        checks: Mapping[str, RewardModelCheck],
        check_every_steps: int,
    ) -> None:
        """`checks`: by the model's name, run
        at each scoring, of an evaluation too, of the process's first step and of steps that `check_every_steps` divides
        (0: of the first alone)."""
        self._models, self._engine = list(models), engine
        self._checks, self._check_every_steps = checks, check_every_steps
        self._first_version: int | None = None

    def score(self, groups: Sequence[RolloutGroup], scored: ScoredRollouts) -> ScoredRollouts:
        """Collective. The models' scores, as a Scorer gives them."""
        version = self._engine.policy_version or 0
        self._first_version = version if self._first_version is None else self._first_version
        every = self._check_every_steps
        is_due = version == self._first_version or (every > 0 and version % every == 0)
        self._engine.rest()  # the device is the models' now
        checks = [self._checks[model.name] if is_due else None for model in self._models]
        each = zip(self._models, checks, strict=True)
        return merge_results([model.score(groups, scored.texts, check) for model, check in each])


# Texts of all ranks dealt to rows and ranks: who forwards which, alike whichever rank sampled them, so that a score
# does not hang on which engine was fast, and no rank waits for another's.


Texts = Sequence[Sequence[int]]


def score_over_ranks(
    keys: Sequence[int],
    texts: Texts,
    max_tokens: int,
    score: Callable[[list[list[int]]], list[float]],
) -> list[float]:
    """Collective. The score of each of this rank's `texts`, perhaps none, named by `keys` over all ranks. `score` takes
    the texts of a row, no longer than `max_tokens` together, equal lengths side by side, perhaps none; it is called
    equally often on all ranks."""
    arrays = np.array(keys, np.int64), np.array([len(text) for text in texts], np.int64)
    share = json.loads(
        scatter_from_rank0(lambda parts: _deal(parts, max_tokens), pack(len(texts), arrays))
    )
    sent = [_packed([texts[i] for i in numbers]) for numbers in share["give"]]
    received = [_unpacked(payload) for payload in exchange_bytes(sent)]
    scores = [[0.0] * len(of_source) for of_source in received]
    for row in share["rows"]:
        places = sorted(row, key=lambda place: -len(received[place[0]][place[1]]))
        found = score([received[source][number] for source, number in places])
        for (source, number), value in zip(
            places, found, strict=False
        ):  # of an empty row one that counts nothing
            scores[source][number] = value
    returned = exchange_bytes([np.array(of_source, np.float64).tobytes() for of_source in scores])
    mine = [0.0] * len(texts)
    for numbers, payload in zip(share["give"], returned, strict=True):
        for i, value in zip(numbers, np.frombuffer(payload).tolist(), strict=True):
            mine[i] = value
    return mine


def _deal(parts: list[bytes], max_tokens: int) -> list[bytes]:
    """On rank 0. Each rank's: `give`, of its texts the numbers of those for each rank, in the order in which they are
    sent; `rows`, of the texts that it forwards (rank that sent it, number in what that one sent)."""
    found = [(unpacked := PackedReader(part), int(unpacked.header)) for part in parts]
    columns = [
        (unpacked.array(np.int64, number), unpacked.array(np.int64, number))
        for unpacked, number in found
    ]
    sources = np.repeat(np.arange(len(parts)), [number for _, number in found])
    numbers = np.concatenate([np.arange(number) for _, number in found])
    keys, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    give: list[list[list[int]]] = [[[] for _ in parts] for _ in parts]
    rows: list[list[list[tuple[int, int]]]] = [[] for _ in parts]
    if len(keys):
        order = np.argsort(keys)
        places, counts = fill_rows(
            lengths[order].astype(np.float64), lengths[order], len(parts), max_tokens
        )
        following = iter(order[places].tolist())
        for target, of_rank in enumerate(counts.tolist()):
            for count in of_rank:
                row = []
                for place in (next(following) for _ in range(count)):
                    source = int(sources[place])
                    row.append((source, len(give[source][target])))
                    give[source][target].append(int(numbers[place]))
                rows[target].append(row)
    return [
        json.dumps({"give": give[rank], "rows": rows[rank]}).encode() for rank in range(len(parts))
    ]


def _packed(texts: Texts) -> bytes:
    ids = [np.asarray(text, np.int32) for text in texts]
    return pack([len(text) for text in texts], ids)


def _unpacked(payload: bytes) -> list[list[int]]:
    packed = PackedReader(payload)
    return [packed.array(np.int32, length).tolist() for length in packed.header]


# What a reward model reads of a rollout: token ids, by its own tokenizer and chat template where they differ.


class TextError(ValueError):
    """A rollout that cannot be shown to the model, and why."""


class RewardTexts:
    """Chat messages, and episodes, go through the model's chat template, the completion as the assistant's message,
    without a generation prompt. Plain text is prompt and completion, one behind the other: the token ids as the policy
    read and sampled them where the model has the policy's whole vocabulary, else the text encoded anew."""

    def __init__(self, files: RewardModelFiles, policy_tokenizer: Any) -> None:
        """Raises ConfigError where there is no tokenizer."""
        with errors_about(f"{files.where}.model"):
            self.tokenizer = load_tokenizer(str(files.folder))
        self._files = files
        self._shares_ids = (
            policy_tokenizer.get_vocab().items() <= self.tokenizer.get_vocab().items()
        )

    def ids_of(self, prompt: Prompt, completion: Completion, text: str) -> list[int] | None:
        """`text`: the completion, decoded. None where it is too long for a score. Raises TextError."""
        ids = self._ids(prompt, completion, text)
        if not ids:
            raise TextError("has no token to read")
        longest = self._files.longest
        if len(ids) <= longest:
            return ids
        return ids[-longest:] if self._files.drops_start else None

    def _ids(self, prompt: Prompt, completion: Completion, text: str) -> list[int]:
        asked, episode = prompt.text, completion.episode
        if isinstance(asked, str) and episode is None:
            if self._shares_ids:
                return [*prompt.token_ids, *completion.token_ids]
            return list(self.tokenizer(asked + text)["input_ids"])
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
        messages += (
            [{"role": "assistant", "content": text}] if episode is None else episode.messages
        )
        options = {
            "chat_template": self._files.template,
            "add_generation_prompt": False,
            "return_dict": False,
        }
        try:
            return list(self.tokenizer.apply_chat_template(messages, tokenize=True, **options))
        except Exception as error:  # a template may refuse with any error, e.g. roles in an order that it does not know
            raise TextError(
                f"cannot be shown in its chat template: {type(error).__name__}: {error}"
            ) from None
