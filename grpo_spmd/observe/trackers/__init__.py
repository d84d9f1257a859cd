"""Trackers that a run's metrics go to: W&B, TensorBoard and trackio, each with a thread of its own.

Not here: what the metrics are. Nothing here may hold a run up or end it.
Imports everything up to observe.
"""
