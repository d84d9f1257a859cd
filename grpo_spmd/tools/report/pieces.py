"""Token ids as the pieces of text that they stand for, from the tokenizer.json of a run.

The pieces of a sequence join to what the tokenizer's own decode makes of it, special tokens included. A character that
several tokens make belongs to the last of them; bytes that make none become U+FFFD, as in decode."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from grpo_spmd.files import UntrustedError, open_regular

_LONGEST = 1 << 27  # bytes of a tokenizer.json
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"  # of sentencepiece


class Pieces:
    """The vocabulary of a tokenizer, each token as bytes."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        """`tree`: of tokenizer.json. Raises ValueError for a kind of tokenizer that we do not know."""
        decoders = [*_parts_of(tree.get("decoder"))]
        kinds = {kind for part in decoders if isinstance(kind := part.get("type"), str)}
        model = tree.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, list):  # Unigram: [token, score] in the order of ids
            vocabulary = {
                pair[0]: i
                for i, pair in enumerate(vocabulary)
                if isinstance(pair, list) and pair and isinstance(pair[0], str)
            }
        is_known = kinds & {"ByteLevel", "ByteFallback", "Metaspace", "Replace"} or kinds == {
            "Fuse"
        }  # as it is
        if not isinstance(vocabulary, dict) or not is_known:
            raise ValueError("this kind of tokenizer is not known")
        self._is_byte_level = "ByteLevel" in kinds
        tokens = {
            i: token for token, i in vocabulary.items() if type(i) is int and isinstance(token, str)
        }
        added = tree.get("added_tokens")
        for entry in added if isinstance(added, list) else []:
            if (
                isinstance(entry, dict)
                and type(entry.get("id")) is int
                and isinstance(entry.get("content"), str)
            ):
                tokens[entry["id"]] = entry["content"]
        self._tokens = tokens
        self._strips_blank = any(
            (part.get("type") == "Strip" and part.get("content") == " " and part.get("start"))
            or (part.get("type") == "Metaspace" and part.get("prepend_scheme", "always") != "never")
            for part in decoders
        )
        self._made: dict[int, tuple[bytes, str | None]] = {}

    def of(self, token_ids: Sequence[int]) -> list[str]:
        """One text a token, from the beginning of what is decoded."""
        found = self._of_bytes(token_ids) if self._is_byte_level else self._of_texts(token_ids)
        if self._strips_blank and found and found[0].startswith(" "):
            found[0] = found[0][1:]
        return found

    def _of_bytes(self, token_ids: Sequence[int]) -> list[str]:
        found: list[str] = []
        waiting = b""  # of the tokens before, the beginning of a character
        for token in token_ids:
            made, text = self._made.get(token) or self._make(token)
            if text is None or waiting:
                whole, waiting = _whole(waiting + made)
                text = whole.decode("utf-8", "replace")
            found.append(text)
        if waiting:
            found[-1] += waiting.decode("utf-8", "replace")
        return found

    def _of_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Where bytes that follow each other are no text, each of them is U+FFFD."""
        found: list[str] = []
        for is_byte, run in groupby(
            token_ids, lambda token: (self._made.get(token) or self._make(token))[1] is None
        ):
            made = [self._made[token] for token in run]
            if not is_byte:
                found += [text or "" for _, text in made]
                continue
            waiting = b""
            try:
                b"".join(part for part, _ in made).decode("utf-8")
            except UnicodeDecodeError:
                found += ["\ufffd"] * len(made)
                continue
            for part, _ in made:
                whole, waiting = _whole(waiting + part)
                found.append(whole.decode("utf-8"))
        return found

    def _make(self, token: int) -> tuple[bytes, str | None]:
        """Its bytes, and the text that they are; None for bytes that are no characters, or that others may join."""
        token_text = self._tokens.get(token, "")
        text: str | None = None
        if self._is_byte_level:
            known = all(letter in BYTE_ALPHABET for letter in token_text)
            made = (
                bytes(BYTE_ALPHABET[letter] for letter in token_text)
                if known
                else _encoded(token_text)
            )
            with suppress(UnicodeDecodeError):
                text = made.decode("utf-8")
        elif found := _BYTE.fullmatch(token_text):
            made = bytes([int(found[1], 16)])
        else:
            made = _encoded(token_text.replace(_BLANK, " "))
            text = made.decode("utf-8")
        self._made[token] = made, text
        return made, text


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def read_pieces(run_dir: Path) -> Pieces | None:
    """None where the run has no tokenizer.json, or one that is broken or of a kind that we do not know."""
    with (
        suppress(OSError, UntrustedError, ValueError, RecursionError),
        open_regular(run_dir / "tokenizer.json") as file,
    ):
        content = file.read(_LONGEST + 1)
        tree = json.loads(content) if len(content) <= _LONGEST else None
        return Pieces(tree) if isinstance(tree, dict) else None
    return None


def _parts_of(decoder: Any) -> Iterable[dict[str, Any]]:
    if isinstance(decoder, dict):
        parts = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
        yield from (
            part for part in (parts if isinstance(parts, list) else []) if isinstance(part, dict)
        )


def _whole(text: bytes) -> tuple[bytes, bytes]:
    """What can be decoded, and a character's beginning behind it that further bytes may complete."""
    for length in range(1, min(4, len(text)) + 1):
        lead = text[-length]
        if lead & 0xC0 != 0x80:  # no continuation
            needed = (
                2
                if 0xC2 <= lead <= 0xDF
                else 3
                if 0xE0 <= lead <= 0xEF
                else 4
                if 0xF0 <= lead <= 0xF4
                else 1
            )
            if length < needed and _may_go_on(text[-length:]):
                return text[:-length], text[-length:]
            break
    return text, b""


def _may_go_on(text: bytes) -> bool:
    """Whether the decoder asks for more, and does not call it broken already."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return False


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + i): byte for i, byte in enumerate(others)
    }


BYTE_ALPHABET = _byte_alphabet()
