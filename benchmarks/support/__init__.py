"""What several benchmarks share: how they report, the environment of TRL."""
