"""Decodes token ids to pieces, the texts of single tokens, with the tokenizer.json of a run.

Joined, the pieces of a sequence are the tokenizer's own decoding, special tokens included. A
character that is made of several tokens belongs to the last of them; invalid bytes become U+FFFD,
as in the tokenizer's decode().

`tokenizers.decoders.DecodeStream` (0.23) cannot replace this module: it raises on invalid bytes of
tokenizers with byte fallback, and it takes ten times as long.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import msgspec

from grpo_spmd.files import UntrustedError, open_regular

_MAX_FILE_BYTES = 1 << 27
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_BLANK = "\u2581"
_KNOWN_DECODERS = {"ByteLevel", "ByteFallback", "Metaspace", "Replace"}


class _Decoder(msgspec.Struct, frozen=True):
    """The decoder of tokenizer.json; one of type "Sequence" has a list of decoders."""

    type: str
    decoders: list[_Decoder] = []
    content: str = ""
    start: int = 0
    prepend_scheme: str = "always"

    def strips_blank(self) -> bool:
        """Returns True if this decoder removes the space before the first token."""
        if self.type == "Metaspace":
            return self.prepend_scheme != "never"
        return self.type == "Strip" and self.content == " " and self.start > 0


class _Model(msgspec.Struct, frozen=True):
    """The vocabulary of tokenizer.json."""

    vocab: dict[str, int] | list[tuple[str, float]]  # Unigram: token and score, in order of ids


class _AddedToken(msgspec.Struct, frozen=True):
    """A token that was added to the vocabulary, such as a special token."""

    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct, frozen=True):
    """The fields of tokenizer.json that are needed here."""

    model: _Model
    decoder: _Decoder
    added_tokens: list[_AddedToken] = []


class _Token(NamedTuple):
    """One token of the vocabulary, decoded."""

    data: bytes
    text: str | None  # None if `data` is no valid UTF-8 alone; with its neighbours it may be


class TokenPieces:
    """Decodes token ids to pieces, a text for each token, with the vocabulary of a tokenizer."""

    def __init__(self, content: bytes) -> None:
        """Reads a tokenizer.json. Raises ValueError if it is broken or of an unknown kind."""
        file = msgspec.json.decode(content, type=_TokenizerFile)
        decoders = file.decoder.decoders or [file.decoder]
        kinds = {decoder.type for decoder in decoders}
        # A tokenizer whose only decoder joins tokens ("Fuse") has its texts in the vocabulary.
        if not kinds & _KNOWN_DECODERS and kinds != {"Fuse"}:
            raise ValueError("this kind of tokenizer is not known")
        vocab = file.model.vocab
        if isinstance(vocab, dict):
            self._texts = {index: token for token, index in vocab.items()}
        else:
            self._texts = {index: token for index, (token, _) in enumerate(vocab)}
        # Added second, since they may replace tokens of the vocabulary.
        self._texts.update({token.id: token.content for token in file.added_tokens})
        # The special tokens, which are not in the recorded text of a completion.
        self.special_ids = {token.id for token in file.added_tokens if token.special}
        self._is_byte_level = "ByteLevel" in kinds
        self._strips_blank = any(decoder.strips_blank() for decoder in decoders)
        # Cached: each token of the vocabulary is decoded only once.
        self._token = cache(self._make_token)

    def decode(self, token_ids: Sequence[int]) -> list[str]:
        """Returns the pieces of a sequence: a text, possibly empty, for each token."""
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

    def _make_token(self, token_id: int) -> _Token:
        """Decodes one token of the vocabulary; an unknown id gives an empty one."""
        source = self._texts.get(token_id, "")
        match = _BYTE_TOKEN.fullmatch(source)
        if match and not self._is_byte_level:
            return _Token(bytes([int(match[1], 16)]), None)
        if not self._is_byte_level:
            source = source.replace(_SENTENCEPIECE_BLANK, " ")
        data = source.encode("utf-8", "replace")
        if self._is_byte_level and all(letter in BYTE_ALPHABET for letter in source):
            data = bytes(BYTE_ALPHABET[letter] for letter in source)
        text = None
        with suppress(UnicodeDecodeError):
            text = data.decode("utf-8")
        return _Token(data, text)


def _decode_bytes(tokens: Sequence[_Token]) -> list[str]:
    """Returns a text for each token; a character belongs to the token that completes it."""
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
    """Returns a text for each of `tokens`, byte tokens that follow each other in a sequence.

    A byte token, such as <0x0A>, stands for a single byte of a character."""
    # As in the tokenizer: if together they are no valid UTF-8, each byte becomes U+FFFD.
    try:
        b"".join(token.data for token in tokens).decode("utf-8")
    except UnicodeDecodeError:
        return ["\ufffd"] * len(tokens)
    return _decode_bytes(tokens)


def read_pieces(run_dir: Path) -> TokenPieces | None:
    """Returns the decoder of a run's tokens, from the tokenizer.json in its folder.

    Returns None if the file is missing, broken, too large, or of a kind that is not known."""
    with (
        suppress(OSError, UntrustedError, ValueError, RecursionError),
        open_regular(run_dir / "tokenizer.json") as file,
    ):
        content = file.read(_MAX_FILE_BYTES + 1)
        return TokenPieces(content) if len(content) <= _MAX_FILE_BYTES else None
    return None


def _byte_alphabet() -> dict[str, int]:
    """Returns the byte that each letter stands for in a byte-level vocabulary (GPT-2's)."""
    # Printable bytes are their own letters; the others have letters from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = {chr(0x100 + index): byte for index, byte in enumerate(hidden)}
    return {chr(byte): byte for byte in printable} | letters


BYTE_ALPHABET = _byte_alphabet()
