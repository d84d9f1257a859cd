"""The models that are trained or that score: HF's layers sharded by FSDP2, attention over packed
rows, logprobs, adapters, optimizer, offload.

Not here: vllm, rollouts, rewards.
Imports config, records and distributed.
"""
