"""Makes a tiny Qwen3 with a warm start for every demo, in a folder that is complete or absent.

A *warm start* is a short supervised training, so that the model is sometimes right when RL begins.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed import startup

_WARM_UP_STEPS = 50


class Example(NamedTuple):
    """An Example is one sequence of the warm start."""

    token_ids: list[int]
    # For each token, whether it counts in the loss.
    is_trained: list[bool]


def model_config(**sizes: Any) -> Any:
    """Returns a Qwen3 config: two layers for the countdown tokenizer, unless `sizes` differ.

    With `num_experts` it is a Qwen3-MoE's, with `layer_types` a Qwen3.5's."""
    import transformers

    # Small enough to learn in seconds on one CPU.
    tiny = {
        "vocab_size": 32,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    kind = transformers.Qwen3MoeConfig if "num_experts" in sizes else transformers.Qwen3Config
    if "layer_types" in sizes:
        kind = transformers.Qwen3_5TextConfig
    return kind(**tiny | sizes)


def warm_up(step: int) -> float:
    """Returns the factor of the learning rate, which rises linearly over the first steps."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS)


def rise_and_fall(num_steps: int) -> list[float]:
    """Returns the factors of a learning rate that rises, and falls over the second half."""
    return [min(warm_up(step), (num_steps - step) / (num_steps / 2)) for step in range(num_steps)]


def make_model(
    folder: Path,
    seed: int,
    config: Any,
    batch_of: Callable[[int], Sequence[Example]],
    learning_rates: Sequence[float],
) -> None:
    """Writes a model after a warm start of one step for each learning rate, on `batch_of(step)`."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # The weights depend on the seed alone.
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)

    def loss_of(step: int) -> torch.Tensor:
        batch = batch_of(step)
        input_ids = padded(example.token_ids for example in batch)
        is_trained = padded(example.is_trained for example in batch)
        # The model's own loss leaves out tokens with the label -100.
        labels = input_ids.where(is_trained, -100)
        loss: torch.Tensor = model(input_ids=input_ids, labels=labels).loss
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    train("demo: warm start", optimizer, loss_of, learning_rates=learning_rates)
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(folder)


def train(
    phase: str,
    optimizer: Any,
    loss_of: Callable[[int], Any],
    learning_rates: Sequence[float],
) -> None:
    """Runs one step for each learning rate, on the loss of `loss_of(step)`."""
    startup.begin(phase)
    for step, learning_rate in enumerate(learning_rates):
        startup.note(f", step {step + 1} of {len(learning_rates)}")
        optimizer.param_groups[0]["lr"] = learning_rate
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def padded(rows: Iterable[list[Any]]) -> Any:
    """Returns rows as a tensor, with zeros on the right: under a causal mask nothing sees them."""
    import torch

    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def make_folder(
    out: Path, settings: dict[str, Any], fill: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Writes `out`/model and `out`/train.jsonl, or neither.

    Does nothing if the same `settings` and code made the folder that is there. `fill` writes the
    model into the folder that it gets, and returns the rows. Raises ConfigError if something is
    there that no demo has made: it would be deleted.
    """
    # A demo of other code may have another tokenizer or template, so it is made again.
    made_from = settings | {"code": _code()}
    try:
        if json.loads((out / "made_from.json").read_text(encoding="utf-8")) == made_from:
            print(f"demo: {out} is there already")
            return
    except (OSError, ValueError):
        pass
    _refuse_foreign(out)
    start = time.perf_counter()
    print(f"demo: making a tiny model and its prompts in {out}, half a minute or more", flush=True)
    startup.begin("demo: importing torch and transformers")
    # Filled beside its final place and renamed at the end, so that it is complete or absent.
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


def _refuse_foreign(out: Path) -> None:
    """Raises ConfigError unless `out` is absent, an empty folder, or a folder that a demo made."""
    is_ours = (out / "made_from.json").is_file()
    if os.path.lexists(out) and not is_ours and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(
            f"--out: {out} was not made by this command (it has no made_from.json), and would be "
            "deleted; name a folder that does not exist"
        )


def temporary_folder(out: Path) -> Path:
    return out.with_name(out.name + f".tmp{os.getpid()}")


def _code() -> str:
    """Returns the text of this folder: what other code has made is made again."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in paths)
