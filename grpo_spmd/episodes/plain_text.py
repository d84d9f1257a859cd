"""Text in which stretches are data: special-token text in those becomes the tokens of its letters, all else is encoded
as the tokenizer always does it."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

Span = tuple[int, int]
_BLANK = re.compile(
    "[\\s\u2581]*"
)  # runs of newlines are added tokens in Gemma's vocabulary, and may stay such


class TemplateError(ValueError):
    """A conversation that the chat template refuses, or text that cannot be written without special tokens."""


class PlainText:
    """How a tokenizer encodes text with data in it.

    transformers encodes what a template rendered, so a `<|im_end|>` in a tool's result would be the special token; its
    `split_special_tokens` spares only tokens with special=True (not Qwen's `<tool_call>`), and would split the
    template's too. Here the text is encoded as ever; where a special or added token came out of data, the stretch
    between the template's own tokens around it is encoded once more by a copy of the tokenizer that knows none of them.
    What still is one (a vocabulary may hold `<s>` as a word) is cut in two, and what cannot be cut is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        ends = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        unknown = {
            tokenizer.unk_token_id
        } - ends  # what data may become where it has letters that nobody knows
        added = tokenizer.added_tokens_decoder.items()
        self._texts = {
            token_id: token.content
            for token_id, token in added
            if token_id not in unknown and not _BLANK.fullmatch(token.content)
        }
        longest_first = sorted(self._texts.values(), key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def is_special(self, text: str) -> bool:
        """Whether it has the text of a special or added token in it."""
        return self._any.search(text) is not None

    def special_ids(self, ids: Sequence[int]) -> list[int]:
        """Of these tokens the special and added ones."""
        return [token_id for token_id in ids if token_id in self._texts]

    def encode(self, text: str, data: Collection[Span] = ()) -> list[int]:
        """Its tokens. Raises TemplateError where one of `data`, stretches of characters, would become special."""
        encoded = _encoded(self._tokenizer, text)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        if not data:
            return list(ids)
        special = [number for number, token_id in enumerate(ids) if token_id in self._texts]
        own = [
            number
            for number in special
            if not self._is_data(text, ids[number], offsets[number], data)
        ]
        if len(own) == len(special):
            return list(ids)
        found = list[int]()
        for before, after in pairwise([-1, *own, len(ids)]):
            if any(token_id in self._texts for token_id in ids[before + 1 : after]):
                begin = offsets[before][1] if before >= 0 else 0
                found += self._plain(
                    text[begin : offsets[after][0] if after < len(ids) else len(text)]
                )
            else:
                found += ids[before + 1 : after]
            found += ids[after : after + 1]
        return found

    def _is_data(self, text: str, token_id: int, offset: Span, data: Collection[Span]) -> bool:
        """A token may swallow blanks beside it, which may be data's: what counts is where its own text stands."""
        begin, end = offset
        content = self._texts[token_id]
        if (place := text.find(content, begin, end)) >= 0:
            begin, end = place, place + len(content)
        return any(begin < last and first < end for first, last in data)

    def _plain(self, text: str) -> list[int]:
        """Of text that stands behind a special token."""
        copy, mark, mark_id = self._copy
        found, waiting = list[int](), [text]
        while waiting:
            piece = waiting.pop()
            encoding = copy.encode(mark + piece, add_special_tokens=False)
            if encoding.ids[:1] != [mark_id] or mark_id in encoding.ids[1:]:
                raise TemplateError(
                    f"the tokenizer does not keep {piece[:40]!r} apart from what is before it"
                )
            cuts = list[int]()
            for token_id, (begin, end) in zip(encoding.ids[1:], encoding.offsets[1:], strict=True):
                if token_id in self._texts:
                    if end - begin < 2:
                        letters = piece[begin - len(mark) : end - len(mark)]
                        what = f"{letters!r} becomes {self._texts[token_id]!r}"
                        raise TemplateError(
                            f"the tokenizer cannot write it without special tokens: {what}"
                        )
                    cuts.append(begin - len(mark) + 1)
            if not cuts:
                found += encoding.ids[1:]
            waiting += reversed(
                [piece[a:b] for a, b in pairwise([0, *cuts, len(piece)])] if cuts else []
            )
        return found

    @cached_property
    def _copy(self) -> tuple[Any, str, int]:
        """The tokenizer without its added tokens, and one of its own, which no data has: behind it text is encoded as
        it is behind any special token. Made when first needed: a large vocabulary takes a second."""
        from tokenizers import AddedToken, Tokenizer

        tree = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in tree["added_tokens"]:
            token["special"] = True
        copy = Tokenizer.from_str(json.dumps(tree | {"truncation": None, "padding": None}))
        copy.encode_special_tokens = (
            True  # it then finds no special token in a text, and all of them are
        )
        mark = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
        copy.add_tokens([AddedToken(mark, special=False, normalized=False)])
        mark_id = copy.token_to_id(mark)
        assert mark_id is not None, "a token that was added has an id"
        return copy, mark, mark_id


def _encoded(tokenizer: Any, text: str) -> Any:
    try:
        return tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except (
        BaseException
    ) as error:  # the library's Rust gives up an expression that backtracks without end
        if type(error).__name__ != "PanicException":
            raise
        raise TemplateError(f"the tokenizer fails on it: {error}") from None


def without_surrogates(text: str) -> str:
    """Halves of a pair are replaced, as no tokenizer takes them; a whole pair is the letter that it stands for."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
