"""GRPO for language models: every rank runs the same loop under torchrun; no Ray, no controller."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

# A newcomer's first command is often run by another Python than that of launch/setup.sh.
# sys.argv is ["-m"] while `python -m grpo_spmd.x` is being found.
if getattr(sys, "argv", [])[:1] == ["-m"]:
    for _package in ("yaml", "numpy", "safetensors", "tokenizers"):
        if importlib.util.find_spec(_package) is None:
            _remedy = "make the environment by launch/setup.sh, and then: . .venv/bin/activate"
            _error = f"error: {_package} is not installed for {sys.executable}: {_remedy}\n"
            sys.stderr.write(_error)
            raise SystemExit(2)

from grpo_spmd.config.errors import ConfigError

if TYPE_CHECKING:
    from grpo_spmd.api import RunResult, run

# `python -m grpo_spmd.report` and the other commands live in tools/; imports name them
# grpo_spmd.tools.
__path__.append(__path__[0] + "/tools")

__all__ = ["ConfigError", "RunResult", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Imports api.py when it is first used: `import grpo_spmd` must be quick."""
    if name not in ("RunResult", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_spmd import api

    return getattr(api, name)
