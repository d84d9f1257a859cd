"""The engine's states with the real vLLM: what a GPU's memory depends on, as far as a CPU's vLLM
goes through it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import write_config
from tests.support.ranks import RanksJob

AWAKE, ASLEEP = [[], False], [["kv_cache", "weights"], True]


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    rollout = {"max_completion_tokens": 24, "engine": {"max_num_seqs": 8}}
    config = write_config(folder, folder / "model", rollout=rollout)
    outs = {method: folder / f"{method}.json" for method in ("plain", "async")}
    jobs = [
        RanksJob(1, "tests.support.workers.engine_states", str(config), str(out), method)
        for method, out in outs.items()
    ]
    for code, output in [job.wait(200) for job in jobs]:
        assert code == 0, output
    return {method: json.loads(out.read_text()) for method, out in outs.items()}


@pytest.mark.parametrize("method", ["plain", "async"])
def test_vllm_sleeps_at_both_levels_and_wakes_tag_by_tag(
    found: dict[str, dict[str, Any]], method: str
) -> None:
    """In vLLM's own books; in its sleep it samples nothing, and our engine is not even asked (in
    the worker)."""
    of = found[method]
    for level in (2, 1):
        rests = ["sleep 1", "wake weights kv_cache", "sleep 1"]
        # A rest goes on as the sleep at both levels: nothing is copied back for it. The last call
        # is the second sleep.
        expected = ["wake weights", "wake kv_cache", *rests, f"sleep {level}"]
        assert of[f"level {level}"]["calls"] == expected
        assert of[f"level {level}"]["states"] == [AWAKE, ASLEEP, AWAKE, ASLEEP]
    assert of["states"] == [ASLEEP, [["kv_cache"], True], AWAKE]


def test_asynchronous_scheduling_samples_the_same_and_can_be_aborted(
    found: dict[str, dict[str, Any]],
) -> None:
    for level in ("level 2", "level 1"):
        assert found["async"][level]["made"] == found["plain"][level]["made"]
    completions, conversations = found["plain"]["level 2"]["made"]
    assert all(len(tokens) == len(logprobs) > 0 for tokens, logprobs in completions)
    assert (
        conversations
    )  # whose turns were answered late, in any order; the worker compares each with itself alone
