"""Rewards: the protocol, the shipped verifiers, the pool of processes that calls them, the sandbox for models' code.

Not here: torch, advantages, what a step makes of rewards.
Imports config and records.
"""
