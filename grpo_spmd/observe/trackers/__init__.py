"""Trackers that a run's metrics go to: W&B, TensorBoard and trackio, each with a thread of its own.

Not here: what the metrics are. Nothing here may delay a run or end it. Imports everything up to
observe.
"""
