"""The running check of reward models: at a process's first scoring and every `proofs.every_steps` a few completions of
each rank are rendered and scored again by transformers alone, one text a row, with its own attention and head."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.model.reward_model import RewardModel
from grpo_spmd.model.reward_model_files import RewardModelFiles
from grpo_spmd.proofs.gradient_check import eager_attention
from grpo_spmd.records import Completion, Prompt

_log = logging.getLogger("grpo_spmd")
_NUM_TEXTS = 4  # of a rank
# Of one text's difference, and of the mean of some, in parts of 1 + the score's size. Measured over 30 random models of
# 5 families, 2 to 24 layers, 32 texts each: float32 up to 1e-5; bfloat16 up to 0.04, where attention is sharp 0.18, and
# means of 4 texts up to 0.09: as far as transformers in bfloat16 is from itself in float32. Scores of other texts are
# off by 0.3 to 1, those at the token before by 0.1 to 0.7.
_BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.3, 0.1)}


class RewardModelCheckError(RuntimeError):
    """A reward model gave other scores than transformers gives with the same weights."""

    says_all = True  # in the report of a failure


@dataclass(frozen=True)
class Scored:
    """A completion as it was scored."""

    prompt: Prompt
    completion: Completion
    value: float | None
    status: str


class RewardModelCheck:
    """Of one reward model. Knows nothing of how rows are made, where a text is scored, or how texts go to ranks."""

    def __init__(
        self, files: RewardModelFiles, model: RewardModel, policy_tokenizer: Any, dtype: str
    ) -> None:
        self._files, self._model, self._bounds = files, model, _BOUNDS[dtype]
        # A tokenizer of its own, read from the files once more.
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=False
        )
        self._policy_tokenizer, self._has_run = policy_tokenizer, False

    def run(self, name: str, scored: list[Scored]) -> None:
        """Collective. Some of this rank's, spread over all. Raises Rank0Error on every rank."""
        chosen = [
            one for one in scored if one.status in ("ok", "not_applicable") and _was_asked(one)
        ]
        chosen = chosen[:: max(1, len(chosen) // _NUM_TEXTS)][:_NUM_TEXTS]
        wrong, found = list[str](), list[float]()
        for number in range(_NUM_TEXTS):  # as often on all ranks
            one = chosen[number] if number < len(chosen) else None
            ids = self._ids(one) if one is not None else []
            is_long = len(ids) > self._files.longest
            ids = ids[-self._files.longest :] if is_long else ids
            # A policy may sample a token that the model has no row for; all ranks make the pass.
            is_readable = bool(ids) and max(ids) < self._model.num_embeddings
            plain = self._plain_score(ids if is_readable else [0])
            if one is None:
                continue
            if is_long and not self._files.drops_start:
                if one.status == "ok":
                    wrong.append(
                        f"a text of {len(ids)} tokens or more was scored, over {self._files.longest}"
                    )
                continue
            if not is_readable:
                continue
            if one.value is None:
                wrong.append(f"a text of {len(ids)} tokens has no score")
                continue
            if not math.isfinite(plain):
                continue
            found.append(abs(one.value - plain) / (1 + abs(plain)))
            if not found[-1] <= self._bounds[0]:
                shown = self._tokenizer.decode(ids[-40:])
                wrong.append(
                    f"{one.value:.6g}, not {plain:.6g}, for the text that ends with {shown!r}"
                )
        judged: float | None = on_rank0(
            lambda of_ranks: _judge(name, of_ranks, self._bounds[1]), [wrong, found]
        )
        if not self._has_run and judged is not None:
            _log.info("reward model %r: its scores are within %.0e of transformers'", name, judged)
            self._has_run = True

    def _ids(self, one: Scored) -> list[int]:
        """As transformers renders and encodes the text by itself."""
        asked, episode, tokenizer = one.prompt.text, one.completion.episode, self._tokenizer
        text = self._policy_tokenizer.decode(one.completion.token_ids, skip_special_tokens=True)
        if isinstance(asked, str) and episode is None:
            own, of_policy = tokenizer.get_vocab(), self._policy_tokenizer.get_vocab()
            if all(own.get(token) == number for token, number in of_policy.items()):
                return [*one.prompt.token_ids, *one.completion.token_ids]
            return list(tokenizer.encode(asked + text))
        said = [{"role": "assistant", "content": text}] if episode is None else episode.messages
        messages = [
            *([{"role": "user", "content": asked}] if isinstance(asked, str) else asked),
            *said,
        ]
        shown = tokenizer.apply_chat_template(
            messages, chat_template=self._files.template, tokenize=False
        )
        return list(tokenizer.encode(shown, add_special_tokens=False))

    @torch.no_grad()
    def _plain_score(self, ids: list[int]) -> float:
        device = next(self._model.parameters()).device
        with eager_attention(self._model.model):
            return float(self._model.plain_score(torch.tensor(ids, device=device)))


def _was_asked(one: Scored) -> bool:
    return one.completion.episode is None or bool(one.completion.episode.turns)


def _judge(name: str, of_ranks: list[tuple[list[str], list[float]]], most: float) -> float | None:
    """On rank 0: the largest difference; None of no text. `most`: of the mean."""
    said = [f"rank {rank}: {text}" for rank, (wrong, _) in enumerate(of_ranks) for text in wrong]
    found = [one for _, of_rank in of_ranks for one in of_rank]
    mean = sum(found) / max(len(found), 1)
    if not said and len(found) >= _NUM_TEXTS and not mean <= most:  # one alone may be off by more
        said = [
            f"by {mean:.3g} of 1 + a score's size on average over {len(found)} texts; at most {most:g} is rounding"
        ]
    if said:
        more = f"; and {len(said) - 4} more" if len(said) > 4 else ""
        what = f"reward model {name!r} gives other scores than transformers does with its weights and template"
        raise RewardModelCheckError(f"{what}: {'; '.join(said[:4])}{more}")
    return max(found, default=None)
