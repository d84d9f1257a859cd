"""`python -m grpo_spmd.plan`: predicts a rank's memory by phase and the time of a step, without a
GPU.

This room uses no vllm, no further processes and no real tensors. Memory that can be counted without
torch is counted in checks/. It imports only rooms that stand before `tools` in
tests/support/house.py, and from model/ and learn/ the code that it runs on fake tensors.
"""
