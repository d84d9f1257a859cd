"""What a vLLM server says of tokens that it did not sample: their logprobs, and of the likeliest ones at each place.

It is asked by token ids, so that nothing is tokenized twice. Of an answer it is proved, place by place, that it is of
this sequence: vLLM returns the ids that it was given, and has among the tokens of each place always the prompt's own.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spmd.rewards.remote.client import MAX_ANSWER_BYTES, JsonClient, UnexpectedError

_MOST_BYTES_OF_ONE = 256  # of what an answer says of one token at one place
_NO_LESS = -9999.0  # vLLM's for minus infinity
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")
_ABOVE = 1e-4  # by which rounding may take a probability over 1


@dataclass(frozen=True)
class Place:
    """What is said of one place of a sequence."""

    logprob: float  # of the token that is there
    likeliest: list[tuple[int, float]]  # as many as were asked for, the likeliest first


@dataclass(frozen=True)
class Served:
    """A model that a server has."""

    name: str
    max_tokens: int | None  # of prompt and completion; None: it does not say


class PromptLogprobs:
    """Asks one server for one model's."""

    def __init__(self, url: str, headers: Mapping[str, str], model: str | None = None) -> None:
        """`url` ends with /completions. `headers` may hold secrets: no error shows their values."""
        address, _, query = url.partition("?")
        models = address.removesuffix("/completions") + "/models" + (f"?{query}" if query else "")
        self._completions, self._models = JsonClient(url, headers), JsonClient(models, headers)
        self._model = model

    def served(self, limit_s: float) -> list[Served]:
        """Its models. Raises FailedCallError."""
        answer = self._models.ask(None, limit_s=limit_s)
        try:
            found = [(each["id"], each.get("max_model_len")) for each in answer["data"]]
        except (KeyError, TypeError, AttributeError):
            raise self._models.malformed(UnexpectedError("no list of models", answer)) from None
        return [Served(str(name), most if isinstance(most, int) else None) for name, most in found]

    def ask(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[Place]:
        """Of each token but the first, by what stands before it. Raises FailedCallError."""
        return [place for place, _ in self._ask(token_ids, top_k, limit_s)]

    def texts(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[str]:
        """Each token but the first as its server writes it; "" where it does not. As `ask`."""
        said = self._ask(token_ids, top_k, limit_s)
        return [str(own.get("decoded_token") or "") for _, own in said]

    def _ask(self, token_ids: Sequence[int], top_k: int, limit_s: float) -> list[tuple[Place, Mapping[str, Any]]]:
        ids = [int(token_id) for token_id in token_ids]
        body = {
            "model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k,
            "add_special_tokens": False, "return_token_ids": True, "stream": False,
        }  # fmt: skip
        most_bytes = MAX_ANSWER_BYTES + len(ids) * (top_k + 1) * _MOST_BYTES_OF_ONE
        answer = self._completions.ask(body, limit_s=limit_s, most_bytes=most_bytes)
        try:
            return _read(answer, ids, top_k)
        except UnexpectedError as error:
            raise self._completions.malformed(error) from None


def _read(answer: Any, token_ids: Sequence[int], top_k: int) -> list[tuple[Place, Mapping[str, Any]]]:
    """Raises UnexpectedError for what is no answer to these tokens, none of which it shows: it may be of any size."""
    try:
        choice = answer["choices"][0]
        places, given = choice["prompt_logprobs"], choice.get("prompt_token_ids")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise UnexpectedError("no choices[0].prompt_logprobs") from None
    if given is not None and given != token_ids:
        raise UnexpectedError("for another prompt than it was asked of")
    if not isinstance(places, list) or len(places) != len(token_ids):
        number = len(places) if isinstance(places, list) else "no"
        raise UnexpectedError(f"{number} prompt_logprobs for {len(token_ids)} tokens")
    return [_read_place(said, str(own), top_k) for said, own in zip(places[1:], token_ids[1:], strict=True)]


def _read_place(said: Any, own: str, top_k: int) -> tuple[Place, Mapping[str, Any]]:
    if not isinstance(said, dict) or not all(_TOKEN_ID.fullmatch(i) and isinstance(x, dict) for i, x in said.items()):
        raise UnexpectedError("prompt_logprobs of another form")
    if own not in said:
        raise UnexpectedError("prompt_logprobs without the prompt's own token at its place")
    logprobs = {name: _logprob(each.get("logprob")) for name, each in said.items()}
    # The prompt's own is there in addition where it is not among the likeliest, and nothing else ever is.
    likeliest = {name: value for name, value in logprobs.items() if len(said) <= top_k or name != own}
    ranks = [said[name].get("rank", 1) for name in likeliest]
    is_above = own not in likeliest and logprobs[own] > min(likeliest.values(), default=0.0)
    if len(likeliest) != top_k or is_above or any(rank not in range(1, top_k + 1) for rank in ranks):
        raise UnexpectedError(f"{len(said)} tokens at a place, which are not the {top_k} likeliest and its own")
    if math.fsum(map(math.exp, logprobs.values())) > 1 + _ABOVE:
        raise UnexpectedError("probabilities that add up to more than 1")
    in_order = sorted(((int(name), value) for name, value in likeliest.items()), key=lambda each: (-each[1], each[0]))
    return Place(logprobs[own], in_order), said[own]


def _logprob(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _NO_LESS < value <= _ABOVE:  # NaN is neither
        raise UnexpectedError("what is no logprob", value if is_number else "")
    return min(float(value), 0.0)
