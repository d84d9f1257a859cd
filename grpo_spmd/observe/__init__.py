"""What a run shows: metrics, console line, rollout dump, memory ledger, W&B, the check of logprobs.

Not here: decisions about the run. Nothing here may end a run for want of a disk or a tracker.
Imports everything up to learn.
"""
