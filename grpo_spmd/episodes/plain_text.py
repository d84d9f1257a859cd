"""Encodes text in which some stretches are data.

Special-token text in data becomes the tokens of its letters; all else is encoded as the tokenizer
always does.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

Span = tuple[int, int]
# Runs of newlines are added tokens in Gemma's vocabulary, and data may contain them.
_BLANK = re.compile("[\\s\u2581]*")


class TemplateError(ValueError):
    """The chat template refuses a conversation, or data cannot be encoded as text."""


class PlainText:
    """Encodes text with data in it, by one tokenizer.

    transformers encodes what a template rendered, so a `<|im_end|>` in a tool's result would be the
    special token. Its `split_special_tokens` spares only tokens with special=True (not Qwen's
    `<tool_call>`), and would split the template's too. Here the text is encoded as always. Where a
    special or added token came out of data, the stretch between the template's own tokens around it
    is encoded once more, by a copy of the tokenizer without any of them. A token that still comes
    out (a vocabulary may hold `<s>` as a word) is cut in two; what cannot be cut is refused.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Data with letters outside the vocabulary may become the unknown token.
        allowed = {tokenizer.unk_token_id}
        allowed -= {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        self._texts = {
            token_id: token.content
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token_id not in allowed and not _BLANK.fullmatch(token.content)
        }
        texts = sorted(self._texts.values(), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")

    def is_special(self, text: str) -> bool:
        """Returns whether a text contains that of a special or added token."""
        return self._pattern.search(text) is not None

    def special_ids(self, ids: Sequence[int]) -> list[int]:
        """Returns the special and added tokens among `ids`."""
        return [token_id for token_id in ids if token_id in self._texts]

    def encode(self, text: str, data: Collection[Span] = ()) -> list[int]:
        """Returns the tokens of a text; `data` are stretches of characters.

        Raises TemplateError where data would become a special token.
        """
        encoded = self._encode_with_offsets(text)
        ids: list[int] = list(encoded["input_ids"])
        offsets = encoded["offset_mapping"]
        special = [i for i, token_id in enumerate(ids) if token_id in self._texts] if data else []
        trusted = [i for i in special if not self._is_data(text, ids[i], offsets[i], data)]
        if len(trusted) == len(special):
            return ids
        result: list[int] = []
        for previous, following in pairwise([-1, *trusted, len(ids)]):
            between = ids[previous + 1 : following]
            if self.special_ids(between):
                begin = offsets[previous][1] if previous >= 0 else 0
                end = offsets[following][0] if following < len(ids) else len(text)
                between = self._encode_without_special(text[begin:end])
            result += between
            result += ids[following : following + 1]
        return result

    def _encode_with_offsets(self, text: str) -> Any:
        try:
            return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # The Rust library panics where a regular expression backtracks without end.
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise TemplateError(f"the tokenizer fails on it: {error}") from None

    def _is_data(self, text: str, token_id: int, offset: Span, data: Collection[Span]) -> bool:
        """Returns whether a token's own text is in data; blanks that it swallows do not count."""
        begin, end = offset
        content = self._texts[token_id]
        content_begin = text.find(content, begin, end)
        if content_begin >= 0:
            begin = content_begin
            end = content_begin + len(content)
        return any(begin < data_end and data_begin < end for data_begin, data_end in data)

    def _encode_without_special(self, text: str) -> list[int]:
        """Returns the tokens of a text that stands behind a special token. Raises TemplateError."""
        copy, mark, mark_id = self._copy
        result: list[int] = []
        waiting = [text]
        while waiting:
            piece = waiting.pop()
            encoding = copy.encode(mark + piece, add_special_tokens=False)
            if encoding.ids[:1] != [mark_id] or mark_id in encoding.ids[1:]:
                rule = f"does not keep {piece[:40]!r} apart from what is before it"
                raise TemplateError(f"the tokenizer {rule}")
            cuts: list[int] = []
            for token_id, (begin, end) in zip(encoding.ids[1:], encoding.offsets[1:], strict=True):
                if token_id not in self._texts:
                    continue
                if end - begin < 2:
                    letters = piece[begin - len(mark) : end - len(mark)]
                    rule = f"{letters!r} becomes {self._texts[token_id]!r}"
                    raise TemplateError(
                        f"the tokenizer cannot write it without special tokens: {rule}"
                    )
                cuts.append(begin - len(mark) + 1)
            if cuts:
                bounds = [0, *cuts, len(piece)]
                waiting += reversed([piece[begin:end] for begin, end in pairwise(bounds)])
            else:
                result += encoding.ids[1:]
        return result

    @cached_property
    def _copy(self) -> tuple[Any, str, int]:
        """The tokenizer without its added tokens, and a mark: a token that no data contains.

        Behind the mark, text is encoded as behind any special token. Made when first needed: a
        large vocabulary takes a second.
        """
        # Imported late: data that is plain needs no copy.
        from tokenizers import AddedToken, Tokenizer

        tree = json.loads(self._tokenizer.backend_tokenizer.to_str())
        for token in tree["added_tokens"]:
            token["special"] = True
        copy = Tokenizer.from_str(json.dumps({**tree, "truncation": None, "padding": None}))
        # The copy then finds no special token in a text, and all added ones are special.
        copy.encode_special_tokens = True
        mark = f"\ufdd0{secrets.token_hex(16)}\ufdd1"
        copy.add_tokens([AddedToken(mark, special=False, normalized=False)])
        mark_id = copy.token_to_id(mark)
        assert mark_id is not None, "a token that was added has an id"
        return copy, mark, mark_id


def without_surrogates(text: str) -> str:
    """Returns a text that tokenizers take: halves of surrogate pairs are replaced, pairs joined."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
