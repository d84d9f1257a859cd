"""What the demos have in common: a tiny Qwen3, its warm start, and a folder that is complete or absent."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.distributed import startup

Lesson = tuple[list[int], list[bool]]  # token ids, and which of them the model is taught


def model_config(**sizes: Any) -> Any:
    """A Qwen3's config: two layers for the countdown demo's tokenizer, but for the `sizes` given."""
    import transformers

    tiny = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    tiny |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
    }
    tokens = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": 0}
    return transformers.Qwen3Config(
        **{**tiny, **tokens, "tie_word_embeddings": True, "dtype": "float32", **sizes}
    )


def make_model(
    folder: Path,
    seed: int,
    config: Any,
    lessons: Callable[[int], Sequence[Lesson]],
    learning_rates: Sequence[float],
) -> None:
    """A Qwen3 after a warm start of a step for each learning rate, on the batch that `lessons` has for it."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(seed)
    model = transformers.Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    startup.begin("demo: warm start")
    for step, learning_rate in enumerate(learning_rates):
        startup.note(f", step {step + 1} of {len(learning_rates)}")
        optimizer.param_groups[0]["lr"] = learning_rate
        batch = lessons(step)
        longest = max(len(ids) for ids, _ in batch)
        # Padding on the right: under a causal mask no token that is trained sees it.
        inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        taught = torch.tensor(
            [is_taught + [False] * (longest - len(is_taught)) for _, is_taught in batch]
        )
        loss = model(input_ids=inputs, labels=inputs.where(taught, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(folder)


def make_folder(
    out: Path, made_from: dict[str, Any], fill: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Write `out`/model and `out`/train.jsonl, unless the same seed and code made what is there; complete or absent.
    `fill` writes the model into the folder that it gets, and returns the rows."""
    try:
        if json.loads((out / "made_from.json").read_text(encoding="utf-8")) == made_from:
            print(f"demo: {out} is there already")
            return
    except (OSError, ValueError):
        pass
    start = time.perf_counter()
    print(f"demo: making a tiny model and its prompts in {out}, half a minute or more", flush=True)
    startup.begin("demo: importing torch and transformers")
    temporary = temporary_folder(out)
    try:
        (temporary / "model").mkdir(parents=True)
        rows = "".join(json.dumps(row) + "\n" for row in fill(temporary / "model"))
        (temporary / "train.jsonl").write_text(rows, encoding="utf-8")
        (temporary / "made_from.json").write_text(json.dumps(made_from), encoding="utf-8")
        shutil.rmtree(out, ignore_errors=True)
        temporary.rename(out)
    finally:
        startup.end()
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"demo: made in {time.perf_counter() - start:.0f} s", flush=True)


def temporary_folder(out: Path) -> Path:
    return out.with_name(out.name + f".tmp{os.getpid()}")


def code() -> str:
    """The text of all that makes a demo: what was made by another one is made anew."""
    return "".join(
        path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
    )
