"""Data sets: rows of files and the hub, prompts as token ids, each node's cache of these ids, and
the order in which prompts are sampled.

Not here: torch, ranks, rewards. Imports config, files, records and distributed (its heartbeat).
"""
