"""What can be refused or worked out before torch is imported: checks of inputs, --explain.

Not here: torch, vllm, processes.
Imports config, data, rewards and what of checkpoint needs no torch.
"""
