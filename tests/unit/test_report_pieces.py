"""A run's tokens as text: the pieces of a sequence join to what the tokenizer's own decode makes of
it, whatever the
policy sampled, and each character belongs to the token that completes it."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces

TEXTS = [
    "The answer is 42.\n\n def f(x):\n\treturn x  # tabs and  blanks\r\n",
    "caf\u00e9 na\u00efve \u00bd \ufb00 \u03b1\u03b2\u03b3 \u0645\u0631\u062d\u0628\u0627 "
    "\u200f\u202e turned",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\U0001f600 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\x00\x01\x1b[31m</script><|end|>",
]


def _byte_level() -> Tokenizer:
    """Of GPT-2, Qwen, Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|\u00fcn\u00ef|>", "<\uff5cend\u2581of\uff5c>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _with_byte_fallback(strips: bool) -> Tokenizer:
    """Of Llama 2 and Mistral (a blank is put in front, and taken away), and of Gemma."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    blank = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), blank]) if strips else blank
    )
    pieces = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(pieces + [decoders.Strip(" ", 1, 0)] * strips)
    every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *every_byte], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    tree = json.loads(tokenizer.to_str())  # they are of the vocabulary, and not special
    tree["added_tokens"] = [
        token for token in tree["added_tokens"] if token["content"] not in every_byte
    ]
    return Tokenizer.from_str(json.dumps(tree))


def _unigram() -> Tokenizer:
    """Of T5 and XLM-R."""
    letters = sorted({letter for text in TEXTS for letter in text if letter != " "})
    tokenizer = Tokenizer(
        models.Unigram(
            [("<unk>", 0.0), ("\u2581", -2.0), *((letter, -3.0) for letter in letters)], 0
        )
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer


KINDS = {
    "byte level": _byte_level,
    "byte fallback": lambda: _with_byte_fallback(False),
    "byte fallback, stripped": lambda: _with_byte_fallback(True),
    "unigram": _unigram,
}


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_join_to_what_decode_makes(kind: str) -> None:
    tokenizer, rng = KINDS[kind](), random.Random(0)
    pieces, size = TokenPieces(tokenizer.to_str().encode()), tokenizer.get_vocab_size()
    texts_values = [tokenizer.encode(text).ids for text in TEXTS]
    # what no text is encoded to: half characters, bytes that are none, special tokens in between
    noise = [[rng.randrange(size) for _ in range(rng.randint(1, 40))] for _ in range(1000)]
    for ids in (*texts_values, *noise):
        result = pieces.decode(ids)
        assert len(result) == len(ids)
        assert "".join(result) == tokenizer.decode(ids, skip_special_tokens=False), [
            tokenizer.id_to_token(i) for i in ids
        ]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = _byte_level()
    letters = {token: number for token, number in tokenizer.get_vocab().items() if len(token) == 1}
    # U+1F600 is f0 9f 98 80, whose letters in GPT-2's alphabet these are; U+00E9 is c3 a9
    smile = [letters[letter] for letter in "\u00f0\u0141\u013a\u0122"]
    e_acute = [letters[letter] for letter in "\u00c3\u00a9"]
    pieces = TokenPieces(tokenizer.to_str().encode())
    assert pieces.decode([*smile, letters["a"], *e_acute]) == [
        "",
        "",
        "",
        "\U0001f600",
        "a",
        "",
        "\u00e9",
    ]
    assert pieces.decode([*smile[:3], letters["a"]]) == [
        "",
        "",
        "",
        "\ufffda",
    ]  # it was never completed
    assert pieces.decode(smile[:2]) == ["", "\ufffd"]
    assert pieces.decode([]) == []


def test_an_id_that_the_tokenizer_does_not_have_is_no_text() -> None:
    tokenizer = _byte_level()
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary["a"], 10**9, vocabulary["b"]]
    assert TokenPieces(tokenizer.to_str().encode()).decode(ids) == ["a", "", "b"]


def test_a_tokenizer_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert read_pieces(tmp_path) is None
    wordpiece = Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}))
    wordpiece.decoder = decoders.WordPiece()
    odd = '{"decoder": {"type": "ByteLevel"}, "model": %s}'
    trees = [
        "",
        "[]",
        "{",
        "[" * 100_000,
        wordpiece.to_str(),
        # The library's own decoders would panic, or double the text with each of them.
        '{"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 5}, '
        '"model": {"vocab": {"a": 0}}}',
        odd % "7",
        odd % '{"vocab": 3}',
        odd % '{"vocab": [1, [], [[1], 2]]}',
    ]
    for tree in trees:
        path.write_text(tree)
        assert read_pieces(tmp_path) is None or read_pieces(tmp_path).decode([0, 1]) == ["", ""]  # type: ignore[union-attr]
    path.unlink()
    os.mkfifo(path)
    assert read_pieces(tmp_path) is None
    path.unlink()
    path.write_text(_byte_level().to_str())
    assert read_pieces(tmp_path) is not None
