"""Worker: our request loop over vLLM's asynchronous scheduler with its queue of two batches.

No CPU platform runs it by itself. The model is left out (benchmarks/support/stubbed_engine.py):
each request samples tokens that count up, so that a token that is lost, doubled, shifted or of
another request shows, and so does a logprob of another token.

python -m tests.support.workers.async_scheduler CONFIG (v1|v2)
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from unittest.mock import patch

import pytest

from benchmarks.support.stubbed_engine import StubbedModel, allow_asynchronous_scheduling
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.records import Completion

STOP = 2
FIRST_TOKEN = 50
NUM_TOKENS = 40
NUM_REQUESTS = 200
NUM_AT_A_TIME = 12
NUM_JOBS = 25
JOB_SIZE = 8
NUM_TURNS = 3


class CountingTokens:
    """The tokens of each request: 50, 51, ... 89, 50, ..., and now and then the stop token."""

    def __init__(self) -> None:
        self._num_sampled = Counter[str]()
        self._random = random.Random(0)

    def next(self, request_id: str) -> int:
        if self._random.random() < 0.05:
            return STOP
        self._num_sampled[request_id] += 1
        return FIRST_TOKEN + (self._num_sampled[request_id] - 1) % NUM_TOKENS


def main() -> None:
    config, scheduler_mode = load_config(sys.argv[1]), sys.argv[2]
    allow_asynchronous_scheduling()
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [STOP])
    stub = StubbedModel(engine, CountingTokens().next)
    core = stub.core
    assert core.batch_queue is not None, "vLLM does not schedule asynchronously"
    core.scheduler.use_v2_model_runner = scheduler_mode == "v2"
    preempted = Counter[str]()
    preempt = core.scheduler._preempt_request

    def count_preemption(request: object, *args: object, **kwargs: object) -> object:
        preempted["requests"] += 1
        return preempt(request, *args, **kwargs)

    core.scheduler._preempt_request = count_preemption
    limit = config.rollout.max_completion_tokens
    # The cache has room for these: nothing is preempted, and no token is missing.
    assert count_gaps(check_requests(engine, limit, NUM_AT_A_TIME)) == 0
    assert not preempted
    for _ in range(2):
        check_requests(engine, limit, NUM_REQUESTS)
        check_conversations(engine, limit)
        engine.reset_prefix_cache()
    check_abort(engine)
    check_race(engine)
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine is asleep"):
        engine.generate([Request([1], 0)], 1)
    engine._llm.wake_up()
    engine._weights_awake = engine._kv_cache_awake = True
    engine.policy_version = 1
    check_requests(engine, limit, NUM_REQUESTS)
    # Without preemptions this test would not show what they do.
    assert preempted["requests"] > 50, preempted
    print("preemptions:", preempted["requests"])
    engine.shutdown()
    end_session()


def check_completions(completions: Iterable[Completion], limit: int) -> None:
    """Asserts that each completion ends where it should, and that each logprob is its token's."""
    for completion in completions:
        tokens = completion.token_ids
        assert 0 < len(tokens) == len(completion.logprobs) <= limit
        assert completion.logprobs == pytest.approx([-token / 10 for token in tokens])
        assert STOP not in tokens[:-1]
        has_stopped = completion.finish_reason == "stop"
        assert has_stopped == (tokens[-1] == STOP)
        assert has_stopped or len(tokens) == limit


def check_requests(engine: RolloutEngine, limit: int, number: int) -> list[Completion]:
    """Returns the completions of `number` plain requests, after `check_completions`."""
    requests = [Request([1 + (i // 8) % 90] * 8, i) for i in range(number)]
    completions = engine.generate(requests, 1)
    assert len(completions) == number
    check_completions(completions, limit)
    return completions


def count_gaps(completions: Iterable[Completion]) -> int:
    """Returns how often a token does not follow the one before it."""
    num_gaps = 0
    for completion in completions:
        counted = [FIRST_TOKEN - 1, *(token for token in completion.token_ids if token != STOP)]
        num_gaps += sum((b - a) % NUM_TOKENS != 1 for a, b in pairwise(counted))
    return num_gaps


def next_turn(job: int, number: int, turns: Sequence[Completion]) -> Request | None:
    """Returns the request of a conversation's next turn, whose prompt has the turns before it."""
    if len(turns) == NUM_TURNS:
        return None
    earlier = [token for turn in turns for token in turn.token_ids]
    return Request([1 + job % 90] * 8 + earlier, job * JOB_SIZE + number)


def check_conversations(engine: RolloutEngine, limit: int) -> None:
    """Asserts that every conversation has all of its turns."""
    shared = engine.generate_shared([JOB_SIZE] * NUM_JOBS, GenerationHooks(next_turn), 1)
    assert len(shared) == NUM_JOBS
    conversations = [turns for job in shared.values() for turns in job]
    assert [len(turns) for turns in conversations] == [NUM_TURNS] * NUM_JOBS * JOB_SIZE
    check_completions((turn for turns in conversations for turn in turns), limit)


def check_abort(engine: RolloutEngine) -> None:
    """Asserts that an abort midway leaves nothing behind, neither requests nor a batch."""
    core = engine._engine.engine_core.engine_core
    calls = Counter[str]()

    def should_abort() -> bool:
        calls["asked"] += 1
        return calls["asked"] > 20

    with patch.object(engine, "_should_abort", should_abort):
        shared = engine.generate_shared([JOB_SIZE] * NUM_JOBS, GenerationHooks(next_turn), 1)
    assert shared == {}
    assert not core.scheduler.has_requests()
    assert not core.batch_queue


class EndsEarly:
    """An early stop after a few questions, which notes how much was dropped."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.dropped: list[int] = []

    def is_over(self) -> bool:
        self.num_asked += 1
        return self.num_asked > 3

    def drop(self, num_tokens: Sequence[int], /) -> None:
        self.dropped += num_tokens


def check_race(engine: RolloutEngine) -> None:
    """Asserts that a race gives whole jobs only, and counts what it drops."""
    early_stop = EndsEarly()
    hooks = GenerationHooks(next_turn, early_stop=early_stop)
    shared = engine.generate_shared([JOB_SIZE] * NUM_JOBS, hooks, 1)
    assert len(shared) < NUM_JOBS
    assert early_stop.dropped
    assert not engine._engine.has_unfinished_requests()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
