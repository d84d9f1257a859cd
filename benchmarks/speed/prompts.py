"""What prompts cost a node at the start of a run, in CPU seconds and memory: read, tokenized, kept,
found again.

Two ranks start together over the same jsonl file of rows of about 60 tokens, as plain text and as
chat through a ChatML template. Texts are stretches of Python's language reference with a line break
in each; one word in twelve is a number of one to five digits, one in fifty a name that does not
come up again. The tokenizer is a byte-level BPE of 16,384 that was trained on that reference, with
the expression and the normalizer (NFC) of Qwen 2's. "first" finds nothing made: one rank makes it,
the other waits. "next" finds it. "in memory" keeps nothing: each rank makes its own, as where no
folder takes it, of 20,000 rows at most.

node_cpu_s is of both ranks together, from the check of the config to the first 64 prompts, without
imports and the loading of the tokenizer; us_a_row the same by rows; check_s (before torch) and
tokens_s are of the rank that took longest, in CPU time, rank_cpu_s and wall_s of the one that took
longest from start to end. encode_s is what the tokenizers library alone takes for all texts in
batches without offsets, on one thread, by 10,000 of them, measured by one rank in the same minute,
and the least that tokens_s can be. anon_mib is the most anonymous memory that a rank held beyond
what it had after those imports, after_mib what it holds of it in the end, kept_mb what lies in the
cache.
"""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.models import make_model
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.demo.making import model_config

_RANKS, _OWN = 2, 20_000
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[100_000],
        help="sizes of the data set (default: 100000)",
    )
    parser.add_argument(
        "--prompts", nargs="+", default=["plain", "chat"], choices=("plain", "chat")
    )
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder, "model"))
        for num_rows in args.rows:
            _make_data(Path(folder, "train.jsonl"), num_rows)
            for prompts in args.prompts:
                rows += [
                    _measure(Path(folder), num_rows, prompts, start) for start in ("first", "next")
                ]
        _make_data(Path(folder, "train.jsonl"), local := min(_OWN, *args.rows))
        rows += [_measure(Path(folder), local, prompts, "in memory") for prompts in args.prompts]
    report("prompts", rows, args.json)


def _measure(folder: Path, num_rows: int, prompts: str, start: str) -> Row:
    config = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "as_chat": prompts == "chat"},
        "rewards": [{"name": "exact"}],
        "rollout": {"num_prompts_per_step": 64, "max_completion_tokens": 64},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    cache = folder / f"cache_{prompts}_{num_rows}"
    message = measure(
        _RANKS,
        "benchmarks.speed.prompts_worker",
        str(folder),
        start,
        env={"XDG_CACHE_HOME": str(cache)},
    )
    retained = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    cpu_s = sum(rank["rank_cpu_s"] for rank in message)
    row: Row = {
        "rows": num_rows,
        "prompts": prompts,
        "start": start,
        "ranks": _RANKS,
        "tokens": message[0]["tokens"],
    }
    row |= {"node_cpu_s": cpu_s, "us_a_row": cpu_s / num_rows * 1e6}
    for name in (
        "check_s",
        "tokens_s",
        "rank_cpu_s",
        "wall_s",
        "encode_s",
        "anon_mib",
        "after_mib",
    ):
        row[name] = max(rank[name] for rank in message)
    return row | {"kept_mb": retained / 1e6}


def _make_data(path: Path, num_rows: int) -> None:
    words = [
        word for word in _corpus().split() if len(word) < 20 and re.search(r"\w", word)
    ]  # no rules of tables
    draw = random.Random(0)
    syllables = [
        initial + vowel + final
        for initial in "bdfgklmnprstv"
        for vowel in "aeiou"
        for final in ("", "n", "r", "s")
    ]
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            begin, length = draw.randrange(len(words) - 60), draw.randrange(20, 56)
            text = words[begin : begin + length]
            for position in draw.choices(range(length), k=length // 12):
                text[position] = (
                    f"{draw.randrange(10 ** draw.randrange(1, 6))}"
                    f"{draw.choice(('', '', ',', '.', '%'))}"
                )
            if number % 5 < 4:
                position = draw.randrange(length)
                text[position] = "".join(draw.choices(syllables, k=3)).title()
            text[length // 2] += "\n"
            record = {
                "prompt": " ".join(text).replace("\n ", "\n"),
                "answer": str(number),
                "level": number % 5,
            }
            file.write(json.dumps(record) + "\n")


def _corpus() -> str:
    return " ".join(pydoc_data.topics.topics.values())


def _make_model(folder: Path) -> None:
    import transformers
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    make_model(folder, model_config(vocab_size=16_384, max_position_embeddings=1024))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_QWEN2), "isolated"), pieces]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([_corpus()], trainer)
    options: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": _CHATML}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(
        folder
    )


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
