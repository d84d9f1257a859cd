"""Data sets: rows of files and the hub, prompts as token ids, the node's cache, the shuffled stream.

Not here: torch, ranks, rewards. Imports config, files, records and distributed (its heartbeat).
"""
