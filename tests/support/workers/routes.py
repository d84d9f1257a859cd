"""Worker: the engine's recorded routes beside those of plain transformers.

    python -m tests.support.workers.routes CONFIG
Prompts are longer than a block of the prefix cache and shared by several completions, a second turn
continues the first, and the cache is so small that requests are preempted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import transformers

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.learn.contexts import extend_routes
from grpo_spmd.model.policy import build_policy
from grpo_spmd.model.routing import router_kind

PROMPTS = [[5 + i, *range(10, 60)] for i in range(2)]
NUM_SAMPLES = 4


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    assert engine.records_routes
    num_preempted = count_preemptions(engine)
    policy = build_policy(config.model, config.rollout.temperature, session)
    weight_sync = WeightSync(policy, engine, 1 << 20)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        config.model.path, dtype=torch.float32
    )
    num_tokens = num_different = 0
    # The second sync reloads the experts once more.
    for step in (1, 2):
        weight_sync.sync(step)
        requests = [Request(prompt, seed) for prompt in PROMPTS for seed in range(NUM_SAMPLES)]
        first_turns = engine.generate(requests, step)
        contexts = [
            [*request.prompt_ids, *completion.token_ids, 7, 8, 9]
            for request, completion in zip(requests, first_turns, strict=True)
        ]
        second_turns = engine.generate(
            [Request(context, 100 + seed) for seed, context in enumerate(contexts)], step
        )
        for context, first, second in zip(contexts, first_turns, second_turns, strict=True):
            ids = [*context, *second.token_ids]
            expected = plain_routes(model, ids)[:-1]
            for known in (first.routes, second.routes, extend_routes(first.routes, second.routes)):
                assert known is not None
                assert known.dtype == "uint8"
                sets = torch.from_numpy(known).long().sort(-1)[0]
                wanted = expected[: len(sets)].sort(-1)[0]
                num_different += int((sets != wanted).any(-1).sum())
                num_tokens += len(sets)
            assert second.routes is not None
            assert len(second.routes) == len(ids) - 1
        engine.sleep()
    print(
        f"rank {session.rank}: {num_different} sets differ of {num_tokens} tokens, "
        f"{num_preempted[0]} preempted",
        flush=True,
    )
    assert num_different == 0
    engine.shutdown()
    end_session()


def count_preemptions(engine: RolloutEngine) -> list[int]:
    """A list whose number grows with each request that vLLM preempts."""
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request
    count = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counting
    return count


def plain_routes(model: Any, ids: list[int]) -> torch.Tensor:
    """The experts [tokens, layers, k] that transformers takes."""
    kind = router_kind(model)
    assert kind is not None
    chosen: list[torch.Tensor] = []
    handles = [
        module.register_forward_hook(
            lambda _module, _inputs, outputs: chosen.append(
                next(output for output in outputs if not output.is_floating_point())
            )
        )
        for module in model.modules()
        if isinstance(module, kind.module_class)
    ]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(chosen, 1)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
