"""Worker: evaluations of the held-out sets on real ranks with real vLLM, sampled and then greedy.

    python -m tests.support.workers.evaluate CONFIG RUN_DIR
The sampled one is dumped in RUN_DIR as step 0, the greedy one as step 1; rank 0 writes
RUN_DIR/metrics.json of both.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import EvalConfig
from grpo_spmd.data.rows import read_rows
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine import engine as rollout
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.requests import Request
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.config_json import load_tokenizer, stop_token_ids
from grpo_spmd.model.policy import build_policy
from grpo_spmd.observe.rollout_writer import RolloutWriter
from grpo_spmd.records import Completion, RolloutGroup, ScoredRollouts
from grpo_spmd.rewards.pool.pool import RewardPool
from grpo_spmd.rollout.evaluate import Evaluator, HeldOut


def main() -> None:
    config = dataclasses.replace(load_config(sys.argv[1]), run_dir=sys.argv[2])
    greedy = EvalConfig(every_steps=2, num_samples=1, temperature=0.0)
    tokenizer = load_tokenizer(config.model.path)
    held_out = {
        name: build_prompts(read_rows(config.data, name), tokenizer, config.data, 1, name)
        for name in config.data.eval_sets
    }
    scored_here = []

    def score(groups: Sequence[RolloutGroup], num_step_completions: int) -> ScoredRollouts:
        scored_here.append(len(groups))
        return pool.score(groups, tokenizer, num_step_completions=num_step_completions)

    session = start_session()
    pool = RewardPool(
        config.rewards, config.reward_pool, Path(config.run_dir, f"rewards_{session.rank}.log")
    )
    Path(config.run_dir).mkdir(exist_ok=True)
    engine = RolloutEngine(
        config.model,
        config.rollout,
        config.max_rollout_tokens,
        session,
        stop_token_ids(config.model.path, tokenizer),
    )
    policy = build_policy(config.model, config.rollout.temperature, session)
    weight_sync = WeightSync(policy, engine, config.rollout.sync_bucket_bytes(session.device.type))

    def evaluator(held_out: HeldOut, section: EvalConfig) -> Evaluator:
        writer = RolloutWriter(Path(config.run_dir), config.logging, session)
        return Evaluator(
            held_out, engine, score, section, config.seed, config.reward_pool.max_error_frac, writer
        )

    sampled = evaluator(held_out, config.eval)
    weight_sync.sync(1)
    sampled_metrics = sampled.evaluate_if_due(0)
    weight_sync.sync(2)
    assert sampled.evaluate_if_due(1) == {}  # every second step
    assert sampled.evaluate(1) == sampled_metrics  # the same random numbers at each evaluation
    greedy_metrics = evaluator(held_out, greedy).evaluate(1)
    # A nucleus so small holds the likeliest token alone.
    nucleus = EvalConfig(every_steps=2, num_samples=1, temperature=1.0, top_p=1e-9)
    assert evaluator(held_out, nucleus).evaluate(1) == greedy_metrics
    # One prompt, one sample: somewhere a rank has nothing to score, and takes part all the same.
    alone = {"e1": held_out["e1"]}
    assert evaluator(alone, greedy).evaluate(1) == {
        k: v for k, v in greedy_metrics.items() if k.startswith("eval/e1/")
    }
    # Nothing is left behind: a prompt of the evaluation is computed anew. (Its second time it is
    # not, so this would
    # show.)
    cached = count_cached_tokens()
    for _ in range(2):
        engine.generate([Request(held_out["e1"][0].token_ids, 0)], 2)
    assert cached[0] == 0 < cached[1], cached
    if session.is_rank0:
        Path(config.run_dir, "metrics.json").write_text(
            json.dumps([sampled_metrics, greedy_metrics])
        )
    print(f"rank {session.rank} scored {scored_here}", flush=True)
    pool.close()
    engine.shutdown()
    end_session()


def count_cached_tokens() -> list[int]:
    """A list that gets, from here on, how many of each prompt's tokens vLLM found in its prefix
    cache."""
    cached, completion = [], rollout._completion

    def counting(output: Any) -> Completion:
        cached.append(output.num_cached_tokens)
        return completion(output)

    rollout._completion = counting
    return cached


if __name__ == "__main__":
    with exit_with_outcome():
        main()
