"""Token ids as pieces of text, from the tokenizer.json of a run.

The pieces of a sequence join to the tokenizer's own decoding, special tokens included. A character
that several tokens make belongs to the last of them; invalid bytes become U+FFFD, as in decode.

`tokenizers.decoders.DecodeStream` (0.23) is no replacement: it raises on invalid bytes of tokenizers
with byte fallback, and it takes ten times as long.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.files import UntrustedError, open_regular

_MAX_FILE_BYTES = 1 << 27
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_BLANK = "\u2581"
_KNOWN_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}


class _Token(NamedTuple):
    """One token of the vocabulary."""

    data: bytes
    text: str | None  # None for bytes that are no characters, or that neighbours may complete


class TokenPieces:
    """A tokenizer's vocabulary, for decoding token by token."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        """Reads the tree of tokenizer.json. Raises ValueError for an unknown kind of tokenizer."""
        decoders = _decoders(tree.get("decoder"))
        kinds = {kind for decoder in decoders if isinstance(kind := decoder.get("type"), str)}
        model = tree.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list):
            # Unigram: pairs of token and score, in the order of their ids.
            pairs = [pair if isinstance(pair, list) and pair else [None] for pair in vocabulary]
            vocabulary = {
                pair[0]: index for index, pair in enumerate(pairs) if isinstance(pair[0], str)
            }
        # A decoder that only fuses leaves the tokens as they are.
        is_known = kinds & _KNOWN_DECODERS or kinds == {"Fuse"}
        if not isinstance(vocabulary, dict) or not is_known:
            raise ValueError("this kind of tokenizer is not known")
        self._texts = {
            index: token
            for token, index in vocabulary.items()
            if type(index) is int and isinstance(token, str)
        }
        # Added tokens may replace tokens of the vocabulary, so they come second.
        added = tree.get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            fields = entry if isinstance(entry, dict) else {}
            if type(fields.get("id")) is int and isinstance(fields.get("content"), str):
                self._texts[fields["id"]] = fields["content"]
        self._is_byte_level = "ByteLevel" in kinds
        self._strips_blank = any(map(_strips_blank, decoders))
        self._tokens: dict[int, _Token] = {}

    def decode(self, token_ids: Sequence[int]) -> list[str]:
        """Returns one text for each token of a sequence."""
        pieces: list[str] = []
        if self._is_byte_level:
            pieces = _decode_bytes([self._token(token_id) for token_id in token_ids])
        else:
            tokens = map(self._token, token_ids)
            for is_byte, group in groupby(tokens, lambda token: token.text is None):
                # groupby's group can be read only once.
                neighbours = list(group)
                if is_byte:
                    pieces += _decode_fallback_bytes(neighbours)
                else:
                    pieces += [token.text or "" for token in neighbours]
        if self._strips_blank and pieces:
            pieces[0] = pieces[0].removeprefix(" ")
        return pieces

    def _token(self, token_id: int) -> _Token:
        token = self._tokens.get(token_id)
        if token is None:
            token = self._tokens[token_id] = self._make_token(self._texts.get(token_id, ""))
        return token

    def _make_token(self, source: str) -> _Token:
        if match := _BYTE_TOKEN.fullmatch(source) if not self._is_byte_level else None:
            return _Token(bytes([int(match[1], 16)]), None)
        if not self._is_byte_level:
            source = source.replace(_SENTENCEPIECE_BLANK, " ")
        elif all(letter in BYTE_ALPHABET for letter in source):
            data = bytes(BYTE_ALPHABET[letter] for letter in source)
            with suppress(UnicodeDecodeError):
                return _Token(data, data.decode("utf-8"))
            return _Token(data, None)
        data = source.encode("utf-8", "replace")
        return _Token(data, data.decode("utf-8"))


def _decode_bytes(tokens: Sequence[_Token]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces: list[str] = []
    is_pending = False  # the decoder holds the beginning of a character
    for data, text in tokens:
        # Nearly all tokens are whole characters and need no decoder.
        if text is None or is_pending:
            text = decoder.decode(data)
            is_pending = bool(decoder.getstate()[0])
        pieces.append(text)
    if is_pending:
        pieces[-1] += decoder.decode(b"", final=True)
    return pieces


def _decode_fallback_bytes(tokens: Sequence[_Token]) -> list[str]:
    # If neighbouring bytes are not valid as a whole, each of them is U+FFFD.
    try:
        b"".join(token.data for token in tokens).decode("utf-8")
    except UnicodeDecodeError:
        return ["\ufffd"] * len(tokens)
    return _decode_bytes(tokens)


def read_pieces(run_dir: Path) -> TokenPieces | None:
    """Returns None if the run's tokenizer.json is missing, broken or of an unknown kind."""
    with (
        suppress(OSError, UntrustedError, ValueError, RecursionError),
        open_regular(run_dir / "tokenizer.json") as file,
    ):
        content = file.read(_MAX_FILE_BYTES + 1)
        tree = json.loads(content) if len(content) <= _MAX_FILE_BYTES else None
        return TokenPieces(tree) if isinstance(tree, dict) else None
    return None


def _decoders(decoder: object) -> list[dict[str, Any]]:
    """Returns the parts of a decoder that are well formed."""
    if not isinstance(decoder, dict):
        return []
    entries = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    return (
        [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    )


def _strips_blank(decoder: Mapping[str, Any]) -> bool:
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    is_blank = decoder.get("type") == "Strip" and decoder.get("content") == " "
    return bool(is_blank and decoder.get("start"))


def _byte_alphabet() -> dict[str, int]:
    # GPT-2's letters for bytes: printable ones are themselves, the others follow from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in printable} | letters


BYTE_ALPHABET = _byte_alphabet()
