"""From scored groups to a changed policy: advantages, plan, exchange of rollouts, loss, update.

Not here: vllm, files, log lines. Pure maths takes tensors and numbers, no config or process group.
Imports config, records, distributed, rewards and model.
"""
