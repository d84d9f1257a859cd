"""GRPO for language models: every rank runs the same loop under torchrun; no Ray, no controller."""

import importlib.util
import sys

# The first command of a newcomer is often that of another python than the one that launch/setup.sh made.
if getattr(sys, "argv", [])[:1] == ["-m"]:  # `python -m grpo_spmd.x` is being found
    for _needed in ("yaml", "numpy", "safetensors", "tokenizers"):
        if importlib.util.find_spec(_needed) is None:
            _how = "make the environment by launch/setup.sh, and then: . .venv/bin/activate"
            sys.stderr.write(f"error: {_needed} is not installed for {sys.executable}: {_how}\n")
            raise SystemExit(2)

from grpo_spmd.api import RunResult, run
from grpo_spmd.config.errors import ConfigError

# `python -m grpo_spmd.report` and the other commands live in tools/; imports name them grpo_spmd.tools.
__path__.append(__path__[0] + "/tools")

__all__ = ["ConfigError", "RunResult", "run"]
__version__ = "0.1.0"
