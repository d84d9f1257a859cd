"""Completions: G for each prompt of a step, kept on disk until they are saved, and those of
held-out sets.

Not here: vllm itself, rewards, advantages.
Imports everything up to engine.
"""
