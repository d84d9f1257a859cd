"""What prompts cost a node at the start of a run, in CPU seconds and memory: read, tokenized, kept, found again.

Two ranks start together over the same jsonl file of rows of about 60 tokens (words of this repository's papers, a
byte-level BPE of 8,192 that was trained on them), as plain text and as chat through a ChatML template. "first" finds
nothing made: one rank makes it, the other waits. "next" finds it. "in memory" keeps nothing: each rank makes its own,
as where no folder takes it.

node_cpu_s is of both ranks together, from the check of the config to the first 64 prompts, without imports and the
loading of the tokenizer; check_s (before torch) and tokens_s are of the rank that took longest, in CPU time;
encode_s is what the tokenizers library alone takes for all texts in batches, on one thread, measured in the same
minute. anon_mib is the most anonymous memory that a rank held beyond what it had after those imports, kept_mb what lies
in the cache.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import yaml

from benchmarks.support.models import make_model
from benchmarks.support.ranks import measure
from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.demo import model_config

_RANKS, _WORDS, _ROOT = 2, 50, Path(__file__).parents[2]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[100_000], help="sizes of the data set (default: 100000)"
    )
    parser.add_argument("--prompts", nargs="+", default=["plain", "chat"], choices=("plain", "chat"))
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        _make_model(Path(folder, "model"))
        for num_rows in args.rows:
            _make_data(Path(folder, "train.jsonl"), num_rows)
            for prompts in args.prompts:
                rows += _measure(Path(folder), num_rows, prompts)
    report("prompts", rows, args.json)


def _measure(folder: Path, num_rows: int, prompts: str) -> list[Row]:
    config = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "as_chat": prompts == "chat"},
        "rewards": [{"name": "exact"}],
        "rollout": {"num_prompts_per_step": 64, "max_completion_tokens": 64},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    rows = []
    for start in ("first", "next", "in memory"):
        cache = folder / f"cache_{prompts}_{num_rows}"
        told = measure(
            _RANKS, "benchmarks.speed.prompts_worker", str(folder), start, env={"XDG_CACHE_HOME": str(cache)}
        )
        kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
        rows.append(
            {"rows": num_rows, "prompts": prompts, "start": start, "ranks": _RANKS}
            | {"node_cpu_s": sum(rank["cpu_s"] for rank in told)}
            | {name: max(rank[name] for rank in told) for name in ("check_s", "tokens_s", "encode_s", "anon_mib")}
            | {"kept_mb": kept / 1e6}
        )
    return rows


def _make_data(path: Path, num_rows: int) -> None:
    words, draw = _words(), random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(num_rows):
            text = " ".join(draw.choices(words, k=_WORDS))
            file.write(json.dumps({"prompt": text, "answer": str(number), "level": number % 5}) + "\n")


def _words() -> list[str]:
    papers = (_ROOT / name for name in ("README.md", "CONTRIBUTING.md", "configs/README.md", "benchmarks/README.md"))
    return [word for paper in papers for word in paper.read_text(encoding="utf-8").split() if len(word) < 16]


def _make_model(folder: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    make_model(folder, model_config(vocab_size=8192, max_position_embeddings=1024))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, show_progress=False, special_tokens=special, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([" ".join(_words())], trainer)
    options: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": _CHATML}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    main()
