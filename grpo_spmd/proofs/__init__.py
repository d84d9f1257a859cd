"""Checks of a run while it runs: engine against policy, and an update against a plain
recomputation.

Not here: vllm, files of the run, what the trainer itself computes with.
Imports config, records, distributed, data, model, rewards and learn.
"""
