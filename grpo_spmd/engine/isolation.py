"""What vLLM does to the process around it, undone."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_TOUCHED_ENVIRONMENT = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "LD_LIBRARY_PATH", "NUMEXPR_MAX_THREADS")


@contextmanager
def isolated() -> Iterator[None]:
    """Put back the global random states, which vLLM reseeds and draws from, so that the trainer's randomness does not
    depend on what was generated; and the environment, where LOCAL_WORLD_SIZE would be the TP size."""
    random_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    environment = {name: os.environ[name] for name in _TOUCHED_ENVIRONMENT if name in os.environ}
    try:
        yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        for name in _TOUCHED_ENVIRONMENT:
            os.environ.pop(name, None)
        os.environ.update(environment)


@contextmanager
def allocator_settings_kept(device: torch.device) -> Iterator[None]:
    """Keep the user's options of torch's allocator: vLLM switches expandable segments off while it fills the pool of
    its sleep mode, which cannot live in them, and on again. Up to 0.30 it looks for them in PYTORCH_CUDA_ALLOC_CONF
    alone, not in PYTORCH_ALLOC_CONF, and sets nothing but that one option; torch resets all others to their defaults.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")  # in torch's order
    if device.type != "cuda" or not given:
        yield
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    yield
    torch._C._accelerator_setAllocatorSettings(given)
