"""Data sets: rows of files and of the hub, prompts as token ids, what a node keeps of both, the shuffled stream.

Not here: torch, ranks, rewards.
Imports config, distributed (its heartbeat), records and untrusted.
"""
