"""Rollouts: sampling a step's completions, keeping them on disk, and evaluating on held-out sets.

Rewards by reward models and by the policy as judge are here too, since they use all ranks.
Not here: vllm itself, other rewards, advantages.
Imports everything up to episodes.
"""
