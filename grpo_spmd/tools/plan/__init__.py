"""`python -m grpo_spmd.plan`: memory of a rank by phase, whether it fits a GPU, and the time of a step, without a GPU.

Not here: vllm, processes, real tensors. Arithmetic that needs no torch is in preflight/, which --explain shares.
Imports what stands below it; from model/ and learn/ what it runs on fake tensors.
"""
