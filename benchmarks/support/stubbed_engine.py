"""A rollout engine whose model is left out: what remains is vLLM's host code and our own loop.

vLLM's scheduler, request state and output processing run as they are; only the executor's model is
replaced by a function that says which token each request samples next. Works with vLLM 0.26 to
0.33, with the schedulers for its V1 and V2 model runners, synchronous and asynchronous.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from grpo_spmd.engine.engine import RolloutEngine


def allow_asynchronous_scheduling() -> None:
    """Lets `rollout.engine.async_scheduling` have its way on a CPU. Call it before the engine
    starts.

    vLLM's CPU platform switches asynchronous scheduling off (0.26 to 0.32)."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        wanted = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


class StubbedModel:
    """Stands in the place of an engine's model: `next_token` names a request's next token.

    The logprob of token t is -t / 10, so that a logprob beside another token shows. `seconds` is
    the CPU time of the stub itself, which is no part of an engine's host time."""

    def __init__(self, engine: RolloutEngine, next_token: Callable[[str], int]) -> None:
        self.core = engine._engine.engine_core.engine_core
        self.seconds = 0.0
        self.num_running = 0
        """Requests that took part in the last step."""
        self._next_token = next_token
        self._scheduled: list[Any] = []
        executor = self.core.model_executor
        executor.execute_model = self._execute_model
        executor.sample_tokens = self._sample_tokens
        # The stub samples from any weights, so that no sync has to come first.
        engine._llm.wake_up()
        engine._weights_awake = engine._kv_cache_awake = True
        engine.policy_version = 1

    def _execute_model(self, scheduled: Any, non_block: bool = False) -> Any:
        # vLLM samples in a second call, except for a step in which nothing is scheduled.
        if scheduled.total_num_scheduled_tokens == 0:
            return self._answer(self._output(scheduled), non_block)
        self._scheduled.append(scheduled)
        return _done(None) if non_block else None

    def _sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._answer(self._output(self._scheduled.pop()), non_block)

    @staticmethod
    def _answer(output: Any, non_block: bool) -> Any:
        return _done(output) if non_block else output

    def _output(self, scheduled: Any) -> Any:
        """Returns vLLM's record of one sampled token for each scheduled request."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        start = time.process_time()
        ids = list(scheduled.num_scheduled_tokens)
        self.num_running = len(ids)
        tokens = [[self._next_token(request_id)] for request_id in ids]
        column = np.array(tokens, np.int32).reshape(-1, 1)
        logprobs = LogprobsLists(
            column, -column.astype(np.float32) / 10, np.ones(len(ids), np.int32)
        )
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=logprobs if ids else None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.seconds += time.process_time() - start
        return output


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
