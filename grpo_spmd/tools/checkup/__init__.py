"""`python -m grpo_spmd.checkup`: is this machine, or are these ranks, fit for a run.

Not here: vllm, parts of a run. --check and the planner are asked as programs.
Imports only rooms that stand before `tools` in tests/support/house.py.
"""
