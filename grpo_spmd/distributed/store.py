"""The run's key-value store, through which ranks tell each other things without a collective.

The store is in the process of torchrun's agent, or of rank 0.
"""

from __future__ import annotations

import torch.distributed as dist

_store: dist.Store | None = None


def open_store(store: dist.Store) -> None:
    """Makes `store` the run's store. No earlier attempt of the run may have used its prefix."""
    global _store
    _store = store


def claim(queue: str, num_jobs: int, num_claimers: int) -> int | None:
    """Claims the next job in `queue` and returns its number; None if no job is left.

    Jobs are numbered from 0 to `num_jobs` - 1, and no two calls get the same one. Each of the
    `num_claimers` ranks must claim until it gets None. The last of these calls removes the queue,
    so that the store does not grow; only then may the name be used again.
    """
    number = _run_store().add(queue, 1) - 1
    # The last rank that gets None.
    if number == num_jobs + num_claimers - 1:
        _run_store().delete_key(queue)
    return number if number < num_jobs else None


def count_up(counter: str, by: int = 1) -> int:
    """Adds `by` to `counter`, which starts at 0, and returns the sum; no two calls get the same."""
    return int(_run_store().add(counter, by))


def delete_counter(counter: str) -> None:
    """Removes a counter that nobody uses any more, so that the store does not grow."""
    _run_store().delete_key(counter)


def clone_store() -> dist.Store:
    """Returns the store over a new connection, for use in another thread.

    A call that waits blocks its connection: over a shared one it would block the main thread too.
    """
    return _run_store().clone()  # type: ignore[attr-defined, no-any-return]


def post_notice(notice: str, text: str) -> None:
    """Shows `text` to all ranks under the name `notice`."""
    _run_store().set(notice, text)


def read_notice(notice: str) -> str | None:
    """Returns what some rank has posted under this name, or None."""
    return _run_store().get(notice).decode() if _run_store().check([notice]) else None


def _run_store() -> dist.Store:
    assert _store is not None, "start_session comes first"
    return _store
