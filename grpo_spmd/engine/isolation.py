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
