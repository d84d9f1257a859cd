"""The running check of reward models: a few completions are rendered and scored again by
transformers alone.

To render is to apply the reward model's chat template to prompt and completion. The check runs at
the scorings of a process's first and third step and every `proofs.every_steps` steps, with one text
per forward pass, and with the model's own attention and head.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from grpo_spmd.model.reward_model_files import RewardModelFiles
from grpo_spmd.model.values import RewardModel
from grpo_spmd.proofs.gradient_check import (
    MAX_SCORE_BOUND,
    raise_if_wrong,
    sum_over_ranks,
    widen_by_noise,
)
from grpo_spmd.proofs.plain import use_float32, use_plain_attention
from grpo_spmd.proofs.synthetic import CheckResult
from grpo_spmd.records import Completion, Prompt

_log = logging.getLogger("grpo_spmd")
# The number of texts that each rank scores again: one forward pass each.
_NUM_TEXTS = 4
# Bounds of one text's difference, and of the mean of several, relative to 1 + the score's size.
# Measured over 30 random models of 5 families, 2 to 24 layers, 32 texts each: float32 up to 1e-5;
# bfloat16 up to 0.04, with sharp attention 0.18, and means of 4 texts up to 0.09, which is as far
# as transformers in bfloat16 is from itself in float32. Scores of other texts are off by 0.3 to 1,
# those at the token before by 0.1 to 0.7.
_BOUNDS = {"float32": (1e-4, 1e-4), "bfloat16": (0.3, 0.1)}
# The largest bound of one text's difference: however much a model rounds, the score of a wrong text
# must be noticed.
_MAX_TEXT_BOUND = 0.7


@dataclass(frozen=True)
class ScoredCompletion:
    """A completion with the score that a reward model gave it."""

    prompt: Prompt
    completion: Completion
    value: float | None
    """The score. None: there is none."""
    status: str
    """The status of the reward: "ok", "not_applicable" or "error"."""


class RewardModelCheck:
    """Checks the scores of one reward model. It shares no code with the run's own scoring, which
    packs texts into micro-batches."""

    def __init__(
        self,
        files: RewardModelFiles,
        model: RewardModel,
        policy_tokenizer: Any,
        *,
        dtype: str,
        bound_factor: float = 1.0,
    ) -> None:
        """`dtype` is `model.dtype`, `bound_factor` is `proofs.bound_factor`."""
        self._files = files
        self._model = model
        self._policy_tokenizer = policy_tokenizer
        self._text_bound, self._mean_bound = (bound * bound_factor for bound in _BOUNDS[dtype])
        # The check's own tokenizer, read from the files: it shares no state with the scoring.
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            files.folder, trust_remote_code=False
        )
        self._has_policy_vocabulary = (
            policy_tokenizer.get_vocab().items() <= self._tokenizer.get_vocab().items()
        )
        self._has_run = False

    def run(self, name: str, scored: list[ScoredCompletion]) -> None:
        """Collective. Checks a few of this rank's completions, spread evenly over `scored`.

        `name` is the reward's name in errors. Raises Rank0Error on every rank if a score is
        wrong."""
        candidates = [
            c for c in scored if c.status in ("ok", "not_applicable") and not self._has_markup(c)
        ]
        chosen = candidates[:: max(1, len(candidates) // _NUM_TEXTS)][:_NUM_TEXTS]
        result = CheckResult()
        # Passes are collective: every rank makes the same number of them.
        padded = [*chosen, *[None] * (_NUM_TEXTS - len(chosen))]
        pairs = [pair for text in padded for pair in self._check(result, text)]
        num_texts, total, noise = sum_over_ranks(
            [len(pairs), sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)]
        )
        # The mean of several texts has a smaller bound than the difference of one.
        if num_texts >= _NUM_TEXTS and not result.errors:
            bound = widen_by_noise(self._mean_bound, noise / num_texts, MAX_SCORE_BOUND)
            subject = f"the score relative to 1 + |score|, on average over {num_texts} texts,"
            result.check_difference(subject, "mean", total / num_texts, bound)
        metrics = raise_if_wrong(
            [result],
            f"reward model {name!r} gives other scores than transformers does with its weights and "
            "template",
        )
        if not self._has_run and num_texts:
            largest = metrics["score"]
            _log.info("reward model %r: its scores are within %.0e of transformers'", name, largest)
            self._has_run = True

    def _check(
        self, result: CheckResult, scored: ScoredCompletion | None
    ) -> list[tuple[float, float]]:
        """Collective. Compares the score of one completion with that of a plain pass. If `scored`
        is None, this rank only makes the passes, together with the other ranks.

        Returns the pair (difference, how much the number format rounds), both relative to
        1 + |score|, in a list that is empty if there was nothing to compare."""
        ids = self._encode(scored) if scored is not None else []
        max_tokens = self._files.max_tokens
        is_long = len(ids) > max_tokens
        ids = ids[-max_tokens:]
        # The policy may sample a token id for which the reward model has no embedding. The passes
        # are made all the same, over any token.
        is_readable = bool(ids) and max(ids) < self._model.num_embeddings
        read = ids if is_readable else [0]
        plain = self._plain_score(read)
        with use_float32(self._model):
            exact = self._plain_score(read)
        if scored is None:
            return []
        if is_long and not self._files.drops_start:
            if scored.status == "ok":
                result.errors.append(f"a text of over {max_tokens} tokens was scored")
        elif is_readable and scored.value is None:
            result.errors.append(f"a text of {len(ids)} tokens has no score")
        # If the plain pass overflows, there is no number to compare with.
        elif is_readable and scored.value is not None and math.isfinite(plain):
            difference, noise = (abs(x - plain) / (1 + abs(plain)) for x in (scored.value, exact))
            end = self._tokenizer.decode(ids[-40:])
            result.check_difference(
                f"the score {scored.value:.6g} of the text that ends with {end!r}, where it is "
                f"{plain:.6g},",
                "score",
                difference,
                widen_by_noise(self._text_bound, noise, _MAX_TEXT_BOUND),
            )
            return [(difference, noise)]
        return []

    def _has_markup(self, scored: ScoredCompletion) -> bool:
        """Returns whether the policy or a tool wrote out the text of a special token.

        Such a completion is not checked: the trainer scores these letters as plain text, whereas
        transformers would encode them as the special token."""
        episode = scored.completion.episode
        reply: Any = self._completion_text(scored) if episode is None else episode.messages
        written = json.dumps(reply, ensure_ascii=False, default=str).casefold()
        return not self._reads_tokens(scored) and any(
            token.content.casefold() in written
            for token in self._tokenizer.added_tokens_decoder.values()
            if token.content.strip() and token.content not in ("<think>", "</think>")
        )

    def _completion_text(self, scored: ScoredCompletion) -> str:
        """Returns the completion as text, without special tokens, by the policy's tokenizer."""
        token_ids = scored.completion.token_ids
        return str(self._policy_tokenizer.decode(token_ids, skip_special_tokens=True))

    def _reads_tokens(self, scored: ScoredCompletion) -> bool:
        """Returns whether the reward model reads the policy's token ids as they were sampled.

        Otherwise the completion is decoded and encoded again. The ids are read for plain text, if
        the reward model's vocabulary contains the policy's."""
        is_text = isinstance(scored.prompt.text, str) and scored.completion.episode is None
        return is_text and self._has_policy_vocabulary

    def _encode(self, scored: ScoredCompletion) -> list[int]:
        """Returns the tokens of prompt and completion as transformers renders and encodes them."""
        prompt = scored.prompt.text_before(scored.completion)
        episode = scored.completion.episode
        if self._reads_tokens(scored):
            return [*scored.prompt.token_ids, *scored.completion.token_ids]
        text = self._completion_text(scored)
        if isinstance(prompt, str) and episode is None:
            return list(self._tokenizer.encode(prompt + text))
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        reply = [{"role": "assistant", "content": text}]
        messages += reply if episode is None else episode.messages
        rendered = self._tokenizer.apply_chat_template(
            messages, chat_template=self._files.template, tokenize=False
        )
        return list(self._tokenizer.encode(rendered, add_special_tokens=False))

    @torch.no_grad()
    def _plain_score(self, ids: list[int]) -> float:
        """Collective. Returns the score of one text by a plain forward pass with plain
        attention."""
        device = next(self._model.parameters()).device
        with use_plain_attention(self._model.model):
            return float(self._model.plain_score(torch.tensor(ids, device=device)))
