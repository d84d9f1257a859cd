"""From scored groups to a changed policy: advantages, plan, exchange, loss, update.

Not here: vllm, files, log lines. Pure maths takes tensors and numbers, never a config or a process group.
Imports distributed, rewards and model.
"""
