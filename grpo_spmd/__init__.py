"""GRPO for language models: every rank runs the same loop under torchrun; no Ray, no controller."""

__version__ = "0.1.0"
