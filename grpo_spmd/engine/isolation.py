"""What vLLM does to the process around it, undone; and what its reload leaves undone on the CPU."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

_TOUCHED_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")


@contextmanager
def isolated() -> Iterator[None]:
    """vLLM reseeds and consumes the global random states and edits the environment; undo both.

    Without this the trainer's own randomness would depend on what was generated, and LOCAL_WORLD_SIZE would be the TP
    size.
    """
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    environment = {name: os.environ.get(name) for name in _TOUCHED_ENVIRONMENT}
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def itself(model: nn.Module) -> nn.Module:
    return model


def before_reload_on_cpu(model: nn.Module) -> None:
    """An unquantised MoE layer packs its weights for the CPU when its kernel is built, and an update skips that (0.28
    to 0.32: wrong logprobs, no message). Without a kernel the update builds and packs anew."""
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if getattr(quant_method, "moe_kernel", None) is not None and type(quant_method).__name__.startswith(
            "Unquantized"
        ):
            quant_method._kernel_before_reload, quant_method.moe_kernel = quant_method.moe_kernel, None


def after_reload_on_cpu(model: nn.Module) -> None:
    """A tied lm_head gets no weights of its own, so its packed copy stays old (0.28 to 0.32: wrong by 1 nat, no
    message): pack anew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            quant_method.process_weights_after_loading(module)
        if getattr(quant_method, "_kernel_before_reload", None) is not None:
            if quant_method.moe_kernel is None:  # the layer got no weights: keep what it had
                quant_method.moe_kernel = quant_method._kernel_before_reload
            quant_method._kernel_before_reload = None
