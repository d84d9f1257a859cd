"""The separate environment in which benchmarks run TRL."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from benchmarks.support.environment import environment_python

TRL_VERSION = "1.16.0"
_PACKAGES = (f"trl=={TRL_VERSION}", "accelerate==1.15.0")
# a variable of the worker's environment; TRL takes 10 s to import vLLM where it finds it
NO_VLLM = "BENCHMARK_WITHOUT_VLLM"


def trl_python() -> str:
    """The interpreter of .venv-trl, made on first use: TRL of its own, torch, vLLM and the rest
    from the environment we
    run in."""
    # torch and transformers are met by ours; where TRL asked for others, pip shall fail and not
    # fetch a CUDA build.
    constraints = f"torch=={torch.__version__}", f"transformers=={transformers.__version__}"
    return environment_python(
        Path(".venv-trl"),
        [_PACKAGES],
        constraints=constraints,
        startup=f"import os, sys; '{NO_VLLM}' in os.environ and sys.modules.update(vllm=None)",
    )
