"""Data sets: rows of files and of the hub, prompts as token ids, each node's cache of both, and the
order in which prompts are sampled.

Not here: torch, ranks, rewards. Imports config, files, records and distributed (startup.py).
"""
