"""Checks before torch is imported, and the exact memory arithmetic that --explain prints.

Not here: torch, vllm, processes. Imports config, files, data, rewards, and from checkpoint, model
and engine modules without torch.
"""
