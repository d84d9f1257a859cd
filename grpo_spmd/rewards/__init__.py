"""Rewards: the protocol, shipped verifiers, the worker pool, servers, the sandbox for model code.

Not here: torch, advantages, and what a step does with rewards.
Imports config, files, records, distributed and data.
"""
