"""Checkpoints and the run folder: what a run needs to go on, and the way out to other programs.

Not here: metrics and rollout dumps (observe), finished completions (rollout.buffer).
Imports everything up to rollout; only checks, replay, run, export and loop import it.
"""
