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


@contextmanager
def allocator_settings_kept(device: torch.device) -> Iterator[None]:
    """The pool of vLLM's sleep mode cannot live in torch's expandable segments: vLLM switches them off while it fills
    it, and on again.

    Up to 0.30 it looks for them in PYTORCH_CUDA_ALLOC_CONF alone, not in PYTORCH_ALLOC_CONF, and writes nothing but
    that one option back; torch takes an option that is not in what it is handed for the default, so that the user's
    others were gone for the rest of the run.
    """
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")  # in torch's order
    if device.type != "cuda" or not given:
        yield
        return
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = given
    yield
    torch._C._accelerator_setAllocatorSettings(given)
