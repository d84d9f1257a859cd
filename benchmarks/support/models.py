"""The random models that benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from grpo_spmd.demo.countdown import make_tokenizer


def make_model(
    folder: Path,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], None] | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Write a model of a transformers config with random weights, which `change` may edit, and the
    demo's tokenizer.
    Returns the model."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=False
    )
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def make_large_model(folder: Path, config: Any, *, seed: int = 0) -> int:
    """The same in bfloat16, for sizes whose weights torch would draw on one thread, and twice: half
    a minute at 1.5B. Normal ones as the config says, drawn on all cores; gains are ones, biases
    zeros. Returns the number of parameters,
    a tied one once."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    model.to_empty(device="cpu")
    model.tie_weights()
    std = config.initializer_range

    def draw(number: int, name: str, weight: torch.Tensor) -> None:
        if weight.ndim == 1:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            drawn = np.random.default_rng([seed, number]).standard_normal(weight.shape, np.float32)
            weight.copy_(torch.from_numpy(drawn).mul_(std))

    with ThreadPoolExecutor() as threads:
        drawing = [
            threads.submit(draw, number, name, weight.detach())
            for number, (name, weight) in enumerate(model.named_parameters())
        ]
        for item in drawing:
            item.result()
    model.save_pretrained(folder)
    return int(model.num_parameters())
