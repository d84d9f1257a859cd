"""The garbage collector is out of the way while modules are imported, and looks at none of them
afterwards."""

from __future__ import annotations

import gc
import json
import sys

import pytest

from grpo_spmd.distributed.startup import garbage_collector_off
from tests.support.processes import run_command


def test_it_is_as_it_was_afterwards() -> None:
    def fails() -> None:
        with garbage_collector_off():
            assert not gc.isenabled()
            raise ValueError("gone")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="gone"):
        fails()
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_collector_off():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


COUNTS = """
import gc, json, sys
from grpo_spmd.distributed.startup import garbage_collector_off
collections = []
gc.callbacks.append(lambda phase, info: phase == "start" and collections.append(info["generation"]))
with garbage_collector_off():
    import torch
within, left = len(collections), len(gc.get_objects())
gc.unfreeze()
print(json.dumps([within, left, len(gc.get_objects())]))
"""


def test_modules_are_imported_without_a_collection_and_not_looked_at_again() -> None:
    done = run_command([sys.executable, "-c", COUNTS])
    assert done.returncode == 0, done.stderr
    within, remaining, thawed = json.loads(done.stdout)
    assert within == 0
    assert remaining < 1_000 < 100_000 < thawed
