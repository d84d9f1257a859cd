"""What a run records and shows: metrics, console, rollout dumps, memory, launches, trackers.

Not here: decisions about the run. Nothing here may end a run because of a disk or a tracker.
Imports everything up to learn and proofs.
"""
