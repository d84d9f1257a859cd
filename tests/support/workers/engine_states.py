"""Worker: what vLLM on a CPU can do of the engine's way on a GPU: sleep and wake at both levels, by
tags, aborts, and calls at the wrong moment; with asynchronous scheduling, where vLLM is made to use
it.

python -m tests.support.workers.engine_states CONFIG OUT.json (plain|async)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.policy import build_policy
from tests.support.workers.conversations import converse_later, race_while_some_wait
from tests.support.workers.sync import refuses

REQUESTS = [Request([i + 1, 5, 7], seed=i) for i in range(6)]


def main() -> None:
    config, out, method = load_config(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(2)
    set_num_threads = torch.set_num_threads
    if method == "async":
        schedule_asynchronously()
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == 2, torch.get_num_threads()
    torch.set_num_threads(1)
    core = engine._llm.llm_engine.engine_core.engine_core
    assert (core.batch_queue is not None) == (method == "async"), core.batch_queue
    weight_sync = WeightSync(
        build_policy(config.model, config.rollout.temperature, session), engine, 1 << 20
    )
    result: dict[str, Any] = {"states": [state(engine)]}
    for level in (2, 1):
        with patch.object(engine, "_sleep_level", level), told(engine) as calls:
            weight_sync.sync(level)
            created = [[c.token_ids, c.logprobs] for c in engine.generate(REQUESTS, level)]
            abort(engine, level)
            again = [[c.token_ids, c.logprobs] for c in engine.generate(REQUESTS, level)]
            assert created == again, "an abort left something behind"
            conversations = converse_later(engine, level)
            race_while_some_wait(engine, level)
            states = [state(engine)]
            rests = rest_between(engine, level, created)
            engine.sleep()
            engine.sleep()  # as when a preempted run saves
        after_sleep(engine, level)
        states = [*states, *rests, state(engine)]
        result[f"level {level}"] = {
            "calls": calls,
            "made": [created, conversations],
            "states": states,
        }
    engine.wake_weights()
    result["states"].append(state(engine))
    engine.wake_kv_cache()
    result["states"].append(state(engine))
    out.write_text(json.dumps(result))
    engine.shutdown()
    end_session()


def rest_between(engine: RolloutEngine, version: int, made: list[Any]) -> list[list[Any]]:
    """Its states in a rest, and after the generation that ends it, with the same weights and no
    prefix in the cache.
    Leaves it in another, which the sleep ends."""
    engine.rest()
    engine.rest()  # as where two sets of rewards are models
    states = [state(engine)]
    assert [[c.token_ids, c.logprobs] for c in engine.generate(REQUESTS, version)] == made, (
        "a rest changed something"
    )
    states.append(state(engine))
    engine.rest()
    return states


def schedule_asynchronously() -> None:
    """vLLM's CPU platform switches it off whatever it is told, for it gains nothing; the rest of
    vLLM can do it."""
    from vllm.platforms.cpu import CpuPlatform

    plain = CpuPlatform.check_and_update_config.__func__

    def check(cls: Any, vllm_config: Any) -> None:
        plain(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check)


class told:
    """Within it, the calls that vLLM itself gets of `engine`; it makes them all."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._llm, self._calls = engine._llm, list[str]()

    def __enter__(self) -> list[str]:
        sleep, wake_up = self._llm.sleep, self._llm.wake_up

        def sleeping(level: int) -> None:
            sleep(level=level)
            self._calls.append(f"sleep {level}")

        def waking(tags: list[str]) -> None:
            wake_up(tags=tags)
            self._calls.append("wake " + " ".join(tags))

        self._llm.sleep, self._llm.wake_up = sleeping, waking
        return self._calls

    def __exit__(self, *_: object) -> None:
        del self._llm.sleep, self._llm.wake_up


def state(engine: RolloutEngine) -> list[Any]:
    """What of it vLLM holds to be asleep, and whether it schedules."""
    core = engine._llm.llm_engine.engine_core.engine_core
    return [sorted(core.model_executor.sleeping_tags), core.is_scheduler_paused()]


def abort(engine: RolloutEngine, version: int) -> None:
    """In the middle of requests, some under way and some waiting, when the first is done."""
    done: list[int] = []
    with patch.object(engine, "_should_abort", lambda: bool(done)):
        created = engine.generate_shared(
            [1] * 40,
            GenerationHooks(
                lambda job, _, turns: None if turns else Request([job + 1], job),
                lambda *_: done.append(0),
            ),
            version,
        )
    core = engine._llm.llm_engine.engine_core.engine_core
    assert created == {}, "it was not aborted"
    assert not core.batch_queue
    assert not engine._engine.has_unfinished_requests()


def after_sleep(engine: RolloutEngine, level: int) -> None:
    refuses(lambda: engine.generate(REQUESTS, level), "generate: the engine is asleep")
    refuses(lambda: engine.load_weights(iter([]), level), "load_weights: the engine is asleep")
    with patch.object(
        engine, "_refuse_unless_ready", lambda version: None
    ):  # a loop that forgot to ask
        engine._add_requests([("forgotten", REQUESTS[0])])
        created = [engine._engine.step() for _ in range(3)]
    assert not any(created), "vLLM sampled in its sleep"
    engine._abort(["forgotten"])


if __name__ == "__main__":
    with exit_with_outcome():
        main()
