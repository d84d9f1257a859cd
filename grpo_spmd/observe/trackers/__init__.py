"""Where else a run's metrics go: W&B, TensorBoard, trackio. Each gets them from metrics.jsonl, by a thread of its own.

Not here: what the metrics are. Nothing here may hold a run up or end it.
Imports everything up to observe.
"""
