"""Errors that the report of a failure knows."""

from __future__ import annotations


class Rank0Error(RuntimeError):
    """`on_rank0` failed on rank 0; every rank raises this, so that none waits for a result that never comes."""


class BreachError(RuntimeError):
    """What a running proof found. Its text says all there is to say: where it was raised tells nobody anything."""
