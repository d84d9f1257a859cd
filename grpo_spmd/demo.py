"""Makes what the demo trains, from nothing but a seed: a tiny Qwen3, its tokenizer, and countdown prompts. No download.

    python -m grpo_spmd.demo [--out .demo] [--seed 0]

The task is TinyZero's countdown, cut down to two numbers: "3,8=24:" wants an equation that uses 3 and 8 once each and reaches 24,
such as "3*8". A short supervised warm start teaches the form alone: equations over the given numbers with a random operation, right
about a third of the time. Which operation reaches the target is left for GRPO to find out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import time
from pathlib import Path

_CHARACTERS = "0123456789+-*,=:"
_EOS = "<eos>"
_LARGEST = 9
WARM_START_STEPS = 300
WARM_START_BATCH = 128


def make_prompts() -> list[dict[str, object]]:
    """All solvable tasks over two numbers from 1 to 9, one row each: columns prompt, nums, target."""
    rows = {}
    for a in range(1, _LARGEST + 1):
        for b in range(1, _LARGEST + 1):
            for target in (a + b, a - b, a * b):
                if target > 0:
                    rows[a, b, target] = {"prompt": f"{a},{b}={target}:", "nums": [a, b], "target": target}
    return list(rows.values())


def random_equation(nums: list[int], rng: random.Random) -> str:
    """What the warm start imitates: the given numbers in random order around a random operation."""
    first, second = rng.sample(nums, 2)
    return f"{first}{rng.choice('+-*')}{second}"


def make_tokenizer(folder: Path) -> None:
    """A tokenizer of single characters and an end-of-sequence token, without a chat template."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers import Regex

    vocabulary = {token: i for i, token in enumerate([_EOS, *_CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS).save_pretrained(folder)


def make_model(folder: Path, seed: int) -> None:
    """A two-layer Qwen3 of about 0.2 million parameters after the warm start."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = make_prompts()
    for _ in range(WARM_START_STEPS):
        texts = []
        for row in rng.choices(rows, k=WARM_START_BATCH):
            texts.append((str(row["prompt"]), random_equation(row["nums"], rng) + _EOS))  # type: ignore[arg-type]
        encoded = [(tokenizer(p)["input_ids"], tokenizer(c)["input_ids"]) for p, c in texts]
        longest = max(len(p) + len(c) for p, c in encoded)
        inputs = torch.zeros(len(encoded), longest, dtype=torch.long)
        labels = torch.full_like(inputs, -100)
        for i, (p, c) in enumerate(encoded):
            inputs[i, : len(p) + len(c)] = torch.tensor(p + c)
            labels[i, len(p) : len(p) + len(c)] = torch.tensor(c)
        # Padding on the right: under a causal mask no token that is trained sees it.
        loss = model(input_ids=inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)


def make_demo(out: Path, seed: int) -> None:
    """Write `out`/model and `out`/train.jsonl, unless they are there from the same seed and code. `out` is complete or absent."""
    marker = {"seed": seed, "code": Path(__file__).read_text(encoding="utf-8")}
    try:
        if json.loads((out / "made_from.json").read_text(encoding="utf-8")) == marker:
            print(f"demo: {out} is there already")
            return
    except (OSError, ValueError):
        pass
    start = time.perf_counter()
    print(f"demo: making a tiny model and its prompts from seed {seed} in {out} ...", flush=True)
    temporary = out.with_name(out.name + f".tmp{os.getpid()}")
    (temporary / "model").mkdir(parents=True)
    make_tokenizer(temporary / "model")
    make_model(temporary / "model", seed)
    (temporary / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_prompts()), encoding="utf-8")
    (temporary / "made_from.json").write_text(json.dumps(marker), encoding="utf-8")
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    print(f"demo: made in {time.perf_counter() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m grpo_spmd.demo", description="Make the demo's model and prompts.")
    parser.add_argument("--out", type=Path, default=Path(".demo"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make_demo(args.out, args.seed)


if __name__ == "__main__":
    main()
