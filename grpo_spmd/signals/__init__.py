"""Training signals besides the rewards: teachers and critics, each with its running check.

Not here: vllm, torch's collectives, the reward functions themselves.
Imports everything up to checks.
"""
