"""`python -m grpo_spmd.plan`: memory of a rank by phase and time of a step, without a GPU.

Not here: vllm, processes, real tensors, and exact arithmetic without torch, which is in checks/.
Imports only rooms that stand before `tools` in tests/support/house.py; from model/ and learn/ what
it runs on fake tensors.
"""
