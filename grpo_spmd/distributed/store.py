"""The run's key-value store, which torchrun's agent or rank 0 keeps: what ranks tell each other without waiting."""

from __future__ import annotations

import torch.distributed as dist

_store: dist.Store | None = None


def open_store(store: dist.Store) -> None:
    """Take `store`, whose prefix no earlier attempt of the run has used, for the run's (start_session)."""
    global _store
    _store = store


def claim(queue: str, num_jobs: int, num_claimers: int) -> int | None:
    """The first of 0 .. `num_jobs` - 1 not yet claimed from `queue`, or None: until it each of the `num_claimers` ranks
    must claim. The last None removes the queue, or the store would grow; only then may its name be used anew."""
    number = _run_store().add(queue, 1) - 1
    if number == num_jobs + num_claimers - 1:
        _run_store().delete_key(queue)
    return number if number < num_jobs else None


def count_up(counter: str, by: int = 1) -> int:
    """The number that `counter`, 0 at first, has come to with this; two calls never bring it to the same one."""
    return int(_run_store().add(counter, by))


def delete_counter(counter: str) -> None:
    """Remove a counter that nobody asks for any more, or the store would grow."""
    _run_store().delete_key(counter)


def clone_store() -> dist.Store:
    """Over a connection of its own, for a thread: a call that waits would make the main thread wait too."""
    return _run_store().clone()  # type: ignore[attr-defined, no-any-return]


def post_notice(notice: str, text: str) -> None:
    """Show `text` to all ranks under the name `notice`."""
    _run_store().set(notice, text)


def read_notice(notice: str) -> str | None:
    """What some rank has read_notice under this name, or None."""
    return _run_store().get(notice).decode() if _run_store().check([notice]) else None


def _run_store() -> dist.Store:
    assert _store is not None, "start_session comes first"
    return _store
