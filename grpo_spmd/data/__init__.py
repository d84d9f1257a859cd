"""Data sets: rows of files and of the hub, prompts as token ids, the shuffled stream.

Not here: torch, ranks, rewards.
Imports config and records.
"""
