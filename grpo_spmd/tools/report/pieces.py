"""Decodes token ids to pieces, the texts of single tokens, with the tokenizer.json of a run.

Joined, the pieces of a sequence are the tokenizer's own decoding, special tokens included. A
character that is made of several tokens belongs to the last of them.

Each token of the vocabulary is decoded once, and only those that are parts of characters are
decoded together with their neighbours. `tokenizers.decoders.DecodeStream` (0.23) would take ten
times as long, and raises on invalid bytes of tokenizers with byte fallback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_spmd.files import open_regular

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_FILE_BYTES = 1 << 27


class TokenPieces:
    """A tokenizer that decodes token by token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        # A completion's text leaves these out.
        self.special_ids = {index for index, token in added_tokens.items() if token.special}
        # Some decoders remove the space before the first token, so tokens are decoded behind one
        # that is a text by itself.
        self._anchor = next((i for i in range(1000) if self._is_text(self._decode([i]), i)), 0)
        self._num_anchor_chars = len(self._decode([self._anchor]))
        # Each token of the vocabulary is decoded only once.
        self._text = cache(self._make_text)

    def decode(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the pieces of a sequence: a text, possibly empty, for each token."""
        # A tokenizer has no larger ids, and refuses them.
        ids = [min(token_id, 2**32 - 1) for token_id in token_ids]
        pieces: list[str] = []
        for is_part, group in groupby(ids, lambda token_id: self._text(token_id) is None):
            members = list(group)
            if is_part:
                pieces += self._decode_parts(members)
            else:
                pieces += [self._text(token_id) or "" for token_id in members]
        decoding = self._decode(ids)
        if "".join(pieces) == f" {decoding}":
            pieces[0] = pieces[0].removeprefix(" ")
        return _make_whole(pieces, decoding)

    def _decode_parts(self, ids: Sequence[int]) -> list[str]:
        """Returns the pieces of neighbouring tokens that are parts of characters."""
        pieces: list[str] = []
        pending: list[int] = []
        for number, token_id in enumerate(ids, start=1):
            pending.append(token_id)
            text = self._decode_inside(pending)
            # A character has at most four bytes, so eight tokens without an end make none.
            is_complete = not text.endswith("\ufffd") or len(pending) == 8
            if is_complete or number == len(ids):
                pending.clear()
            pieces.append("" if pending else text)
        return _make_whole(pieces, self._decode_inside(ids))

    def _make_text(self, token_id: int) -> str | None:
        """Returns the text of one token; None if it may be a part of a character."""
        text = self._decode_inside([token_id])
        return text if self._is_text(text, token_id) or not text else None

    def _is_text(self, text: str, token_id: int) -> bool:
        """Returns True if `text`, to which the token is decoded, depends on no other token."""
        token = self._tokenizer.id_to_token(token_id) or ""
        is_byte = re.fullmatch("<0x[0-9A-Fa-f]{2}>", token) is not None
        return text != "" and "\ufffd" not in text and not is_byte

    def _decode_inside(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens inside a sequence."""
        return self._decode([self._anchor, *ids])[self._num_anchor_chars :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _make_whole(pieces: list[str], decoding: str) -> list[str]:
    """Returns `pieces` if they make the text `decoding`, else that text as the piece of the last
    token, as where invalid bytes change the decoding of those before them."""
    if "".join(pieces) == decoding:
        return pieces
    return [*[""] * (len(pieces) - 1), decoding]


def read_pieces(run_dir: Path) -> TokenPieces | None:
    """Reads the tokenizer.json of a run. Returns None if it is missing or broken."""
    # tokenizers raises Exception itself for a file that it cannot read.
    with suppress(Exception), open_regular(run_dir / "tokenizer.json") as file:
        from tokenizers import Tokenizer

        content = file.read(_MAX_FILE_BYTES + 1)
        if len(content) <= _MAX_FILE_BYTES:
            return TokenPieces(Tokenizer.from_str(content.decode()))
    return None
