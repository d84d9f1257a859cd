"""One process of the engine_host benchmark: tells one row for each kind of request.

python -m benchmarks.speed.engine_host_worker MODEL NUM_SEQUENCES
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks.support.ranks import tell
from benchmarks.support.report import Row
from benchmarks.support.stubbed_engine import StubbedModel
from grpo_spmd.config.schema import ModelConfig, RolloutConfig
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request

NUM_STEPS = 60
_GROUP_SIZE = 8
_PROMPT_TOKENS = 8
# The stub samples token 50, which is in neither list.
_STOP_IDS = {
    "short": [2],
    "long_stops": [*range(60, 90), *range(100, 466)],
    "evaluation": [2],
}


class _TimedCalls:
    """CPU seconds of each call of a function, and of all calls together."""

    def __init__(self, function: Callable[..., Any], stub: StubbedModel) -> None:
        self._function = function
        self._stub = stub
        self.calls: list[tuple[int, float]] = []
        """(requests that took part, seconds) of each call, without the stub's own seconds."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stub_seconds = self._stub.seconds
        start = time.process_time()
        result = self._function(*args, **kwargs)
        seconds = time.process_time() - start - (self._stub.seconds - stub_seconds)
        self.calls.append((self._stub.num_running, seconds))
        return result

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self.calls)


def main() -> None:
    path, num_sequences = sys.argv[1], int(sys.argv[2])
    session = start_session()
    rollout = RolloutConfig(
        max_completion_tokens=NUM_STEPS,
        engine={
            "max_num_seqs": num_sequences,
            "max_num_batched_tokens": 16384,
            "kv_cache_memory_bytes": 1 << 30,
        },
    )
    model = ModelConfig(path=path, dtype="float32")
    engine = RolloutEngine(model, rollout, _PROMPT_TOKENS + NUM_STEPS, session, _STOP_IDS["short"])
    stub = StubbedModel(engine, next_token=lambda request_id: 50)
    gc.collect()
    gc.freeze()
    tell([_measure(engine, stub, num_sequences, stops) for stops in _STOP_IDS])
    end_session()


def _measure(engine: RolloutEngine, stub: StubbedModel, num_sequences: int, stops: str) -> Row:
    """Returns the row of one generation of `num_sequences` completions, all of the same length."""
    engine._stop_token_ids = _STOP_IDS[stops]
    vllm = engine._engine
    step, add_request = vllm.step, vllm.add_request
    vllm.step = _TimedCalls(step, stub)
    vllm.add_request = _TimedCalls(add_request, stub)
    hooks = GenerationHooks(
        lambda job, number, turns: (
            None
            if turns
            else Request(
                [1 + job % 90] * _PROMPT_TOKENS,
                seed=job * _GROUP_SIZE + number,
                is_rollout=stops != "evaluation",
            )
        )
    )
    sizes = [_GROUP_SIZE] * (num_sequences // _GROUP_SIZE)
    stub_seconds = stub.seconds
    start = time.process_time()
    completions = engine.generate_shared(sizes, hooks, policy_version=1)
    total = time.process_time() - start - (stub.seconds - stub_seconds)
    assert sum(map(len, completions.values())) == num_sequences
    steps, adds = vllm.step, vllm.add_request
    vllm.step, vllm.add_request = step, add_request
    full = [seconds for number, seconds in steps.calls if number == num_sequences]
    vllm_ms = median(full) * 1e3
    return {
        "sequences": num_sequences,
        "stops": stops,
        "vllm_ms": vllm_ms,
        "vllm_us_a_sequence": vllm_ms / num_sequences * 1e3,
        "loop_ms": (total - steps.total - adds.total) / len(steps.calls) * 1e3,
        "add_us": adds.total / num_sequences * 1e6,
    }


if __name__ == "__main__":
    with exit_with_outcome():
        main()
