"""Checkpoints and the run folder: saving, resuming, and exporting weights for other programs.

Not here: metrics and rollout dumps (observe), finished completions (rollout.buffer).
Imports everything up to rollout; only checks, replay, run, export and loop import it.
"""
