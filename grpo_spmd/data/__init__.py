"""Data sets: rows of files and the hub, prompts as token ids, the node's cache, their order.

Not here: torch, ranks, rewards. Imports config, files, records and distributed (its heartbeat).
"""
