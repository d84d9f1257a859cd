"""Rewards: the protocol, shipped verifiers, the worker pool, servers, the sandbox for model code.

Not here: torch, advantages, what a step makes of rewards.
Imports config and records.
"""
