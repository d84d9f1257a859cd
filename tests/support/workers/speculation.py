"""Worker: completions of one engine over all ranks, with speculation where the config says so.

    python -m tests.support.workers.speculation CONFIG OUT.json
Four generations, of which the last two repeat the seeds of the first two, so that most drafts are
right. Each has conversations of two turns over shared prompts, with other temperatures, top_p,
greedy ones, with stop strings and without. Rank 0 writes {completions, accepted, drafted,
preempted}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import GenerationHooks, Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Completion
from tests.support.workers.routes import count_preemptions

# Of 33 tokens, one more than a block of the prefix cache: the second of a prompt finds all but its
# last token cached, and vLLM would pad it with drafts.
PROMPTS = [[5 + i, *range(10, 42)] for i in range(3)]
NUM_SAMPLES, NUM_TOKENS = 4, 24
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"temperature": 0.5, "is_rollout": False},
    {"temperature": 0.0, "ends_at_stops": False},
)


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    if engine._speculation is not None:
        # More drafts than a short run would have. The ranks measure different times.
        engine._speculation._cost.base_rows = lambda: 60.0 + 500 * session.rank  # type: ignore[method-assign]
    num_preempted = count_preemptions(engine)
    policy = build_policy(config.model, config.rollout.temperature, session)
    weight_sync = WeightSync(policy, engine, 1 << 20)
    rows: list[Any] = []
    drafted = accepted = 0.0
    for step in (1, 2, 3, 4):
        weight_sync.sync(step)

        def next_request(
            job: int, number: int, turns: Sequence[Completion], step: int = step
        ) -> Request | None:
            options = OPTIONS[number % len(OPTIONS)]
            prompt = PROMPTS[job]
            for turn in turns:
                prompt = [*prompt, *turn.token_ids, 7, 8]
            seed = 1000 * (step % 2) + 100 * job + 10 * number + len(turns)
            is_greedy = options.get("temperature") == 0.0
            return (
                None
                if len(turns) == 2
                else Request(prompt, None if is_greedy else seed, max_tokens=NUM_TOKENS, **options)
            )

        jobs = engine.generate_shared(
            [NUM_SAMPLES] * len(PROMPTS), GenerationHooks(next_request), step
        )
        for conversations in jobs.values():
            for turns in conversations:
                rows += [
                    [
                        turn.token_ids,
                        turn.logprobs,
                        turn.finish_reason,
                        None if turn.routes is None else turn.routes.tolist(),
                    ]
                    for turn in turns
                ]
        metrics = engine.take_speculation()
        if metrics:
            drafted += metrics["speculation/drafted_tokens"].value
            accepted += (metrics["speculation/accepted_frac"].value or 0) * (
                metrics["speculation/drafted_tokens"].value
            )
        engine.sleep()
    if session.is_rank0:
        facts = {"completions": rows, "accepted": accepted, "drafted": drafted}
        Path(sys.argv[2]).write_text(json.dumps(facts | {"preempted": num_preempted[0]}))
    engine.shutdown()
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
