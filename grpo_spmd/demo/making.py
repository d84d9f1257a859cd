"""Trains the tiny Qwen3 of each demo, and writes a demo's folder, which is complete or absent.

The training is a *warm start*: short and supervised, so that the model is sometimes right when RL
begins.
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
from grpo_spmd.records import Fields

_WARM_UP_STEPS = 50


class Example(NamedTuple):
    """One sequence that the warm start trains on."""

    token_ids: list[int]
    # For each token, whether it counts in the loss.
    is_trained: list[bool]


def model_config(**sizes: Any) -> Any:
    """Returns the config of a Qwen3 with two layers and the vocabulary of countdown.

    `sizes` replace values of the config. With `num_experts` among them the model is a Qwen3-MoE,
    with `layer_types` a Qwen3.5.
    """
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
    """Returns the factor of the learning rate at `step`: it rises linearly to 1 in 50 steps."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS)


def rise_and_fall(num_steps: int) -> list[float]:
    """Returns a factor of the learning rate for each step.

    It rises to 1 as in `warm_up`, and falls linearly to zero over the second half of the steps.
    """
    return [min(warm_up(step), (num_steps - step) / (num_steps / 2)) for step in range(num_steps)]


def make_model(
    folder: Path,
    seed: int,
    config: Any,
    batch_of: Callable[[int], Sequence[Example]],
    learning_rates: Sequence[float],
) -> None:
    """Makes a model with random weights, gives it a warm start and saves it in `folder`.

    The warm start makes one step for each of `learning_rates`, on the examples `batch_of(step)`.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    # The initial weights depend on the seed alone.
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)

    def loss_of(step: int) -> torch.Tensor:
        """Returns the cross-entropy of a step's examples, over their trained tokens."""
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
    """Makes one optimizer step for each of `learning_rates`, with the loss `loss_of(step)`.

    `phase` names this training in the progress lines on the terminal.
    """
    startup.begin(phase)
    for step, learning_rate in enumerate(learning_rates):
        startup.note(f", step {step + 1} of {len(learning_rates)}")
        optimizer.param_groups[0]["lr"] = learning_rate
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def padded(rows: Iterable[list[Any]]) -> Any:
    """Returns rows of different lengths as one tensor, padded with zeros on the right.

    No attention mask is needed: under a causal mask no token attends to the padding after it.
    """
    import torch

    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def make_folder(out: Path, settings: Fields, fill: Callable[[Path], list[Fields]]) -> None:
    """Writes `out`/model and `out`/train.jsonl, or neither.

    Does nothing if `out` was made before, with the same `settings` and by the same code. `fill`
    writes the model into the folder that it is given, and returns the rows. Raises ConfigError if
    `out` is something that no demo has made, since it would be deleted.
    """
    # Other code may write another tokenizer or template, so the demo is made again if it changed.
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
    # Fill a folder beside `out` and rename it at the end, so that `out` is complete or absent.
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
    """Returns the folder beside `out` that this process fills and then renames to `out`."""
    return out.with_name(out.name + f".tmp{os.getpid()}")


def _code() -> str:
    """Returns the source code of this folder, by which `make_folder` sees that it has changed."""
    paths = sorted(Path(__file__).parent.glob("*.py"))
    return "".join(path.read_text(encoding="utf-8") for path in paths)
