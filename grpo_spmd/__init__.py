"""GRPO for language models: every rank runs the same loop under torchrun; no Ray, no controller."""

from grpo_spmd.api import RunResult, run
from grpo_spmd.config.errors import ConfigError

__all__ = ["ConfigError", "RunResult", "run"]
__version__ = "0.1.0"
