"""`python -m grpo_spmd.checkup`: is this machine, or are these ranks, fit for a run.

Not here: vllm, a run's own parts. What --check and plan find it asks them.
Imports what stands below it.
"""
