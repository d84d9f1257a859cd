"""`python -m grpo_spmd.checkup` checks whether this machine, or all launched ranks, can do a run.

Not here: vllm and the parts of a run; --check and the planner run as programs of their own.
Imports only rooms that stand before `tools` in tests/support/house.py.
"""
