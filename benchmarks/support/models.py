"""The random models that benchmarks measure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from grpo_spmd.demo import make_tokenizer


def make_model(
    folder: Path,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    change: Callable[[Any], None] | None = None,
    max_shard_size: str = "5GB",
) -> Any:
    """Write a model of a transformers config with random weights, which `change` may edit, and the demo's tokenizer.
    Returns the model."""
    transformers.utils.logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
