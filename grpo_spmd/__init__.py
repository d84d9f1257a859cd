"""GRPO for language models: every rank runs the same loop under torchrun; no Ray, no controller."""

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

# A newcomer often runs the first command with another Python than that of launch/setup.sh. The
# missing packages are then named in one line. While Python looks for the module of
# `python -m grpo_spmd.x`, and so imports this file, sys.argv begins with "-m".
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

# Modules in tools/ are also found as modules of this package, so that `python -m grpo_spmd.report`
# works. Imports use their full name, grpo_spmd.tools.report.
__path__.append(__path__[0] + "/tools")

__all__ = ["ConfigError", "RunResult", "run"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Returns `run` or `RunResult` of api.py, which is imported only when one of them is used, to
    keep `import grpo_spmd` quick."""
    if name not in ("RunResult", "run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_spmd import api

    return getattr(api, name)
