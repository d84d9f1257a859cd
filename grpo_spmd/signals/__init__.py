"""Training signals besides the rewards: teachers and critics, each with its running check.

This room does not call vllm, torch's collectives or the reward functions.
It may import the rooms up to and including checks (the order is in tests/support/house.py).
"""
