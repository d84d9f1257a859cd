"""The error that all ranks share."""

from __future__ import annotations


class Rank0Error(RuntimeError):
    """`on_rank0` failed on rank 0; every rank raises this, so that none waits for a result that never comes."""
