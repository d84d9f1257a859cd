"""Checks before torch is imported, and the exact memory arithmetic that --explain prints.

Not here: torch, vllm, processes.
Imports config, files, data, rewards, and those modules of checkpoint, model, engine without torch.
"""
