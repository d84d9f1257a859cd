"""One rank of the host_overhead benchmark: tells the seconds of each part, a dictionary a round.

python -m benchmarks.speed.host_overhead_worker NUM_ROLLOUTS ROUNDS
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.balance import GROUP_SIZE, trace
from benchmarks.support.ranks import tell
from grpo_spmd.config.schema import (
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn import assemble, balance
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.observe.rollout_writer import RolloutDump, RolloutWriter
from grpo_spmd.records import Completion, Prompt, RolloutGroup, ScoredRollouts

PARTS = (
    "plan_batch",
    "encode_rollouts",
    "exchange_bytes",
    "decode_rollouts",
    "pack_rollouts",
)  # of assemble_batch


def main() -> None:
    num_rollouts, num_rounds = int(sys.argv[1]), int(sys.argv[2])
    session = start_session()
    groups, scored = make_groups(num_rollouts, session)
    with tempfile.TemporaryDirectory() as folder:
        config = Config(
            run_dir=on_rank0(lambda folders: folders[0], folder),
            model=ModelConfig(path=""),
            data=DataConfig(train=""),
            rewards=(),
            rollout=RolloutConfig(
                num_prompts_per_step=num_rollouts // GROUP_SIZE,
                group_size=GROUP_SIZE,
                max_completion_tokens=4096,
            ),
            training=TrainingConfig(num_mini_batches=2, max_tokens_per_micro_batch=16384),
            logging=LoggingConfig(rollouts_every_steps=1),
        )
        rounds = [one_round(groups, scored, config, session) for _ in range(num_rounds)]
        barrier()  # rank 0's folder must stay until all have written
    tell(rounds)
    end_session()


def make_groups(num_rollouts: int, session: Session) -> tuple[list[RolloutGroup], ScoredRollouts]:
    """This rank's groups, and scores of two rewards for them."""
    rng = np.random.default_rng(session.rank)
    lengths = trace(num_rollouts, median=448, max_length=4096)
    groups, scored = (
        [],
        ScoredRollouts(by_name={"first": [], "second": []}, statuses={"first": [], "second": []}),
    )
    for slot in range(session.rank, num_rollouts // GROUP_SIZE, session.world_size):
        prompt = Prompt(slot, slot, rng.integers(0, 150_000, 128).tolist(), "Why?", {})
        completions = []
        for length in lengths[slot * GROUP_SIZE : (slot + 1) * GROUP_SIZE]:
            token_ids = rng.integers(0, 150_000, length).tolist()
            logprobs = (
                (-rng.exponential(size=length)).astype(np.float32).tolist()
            )  # as an engine's are
            completions.append(Completion(token_ids, logprobs, "stop"))
            reward = float(rng.integers(2))
            scored.rewards.append(reward)
            scored.texts.append("Because. " * (length // 3))
            for name in scored.by_name:
                scored.by_name[name].append(reward / 2)
                scored.statuses[name].append("ok")
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups, scored


def one_round(
    groups: list[RolloutGroup], scored: ScoredRollouts, config: Config, session: Session
) -> dict[str, float]:
    """Seconds of this rank: "add", the parts of assemble_batch and its rest, "total" of these (and
    in CPU time), and
    "dump"."""
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return inner

    positions = {name: balance if name == "plan_batch" else assemble for name in PARTS}
    originals = {name: getattr(module, name) for name, module in positions.items()}
    for name, original in originals.items():
        setattr(positions[name], name, timed(name, original))
    sections = config.rollout, config.advantage, config.loss, config.training
    rules = StepRules(
        *sections,
        config.reward_pool.max_error_frac,
        session.world_size,
        attention_cost_ratio=2.8e-5,
    )
    sampled = SampledStep(rules)
    barrier()
    cpu_start = time.process_time()
    timed("add", sampled.add)(groups, scored)
    _, decision = timed("assemble", assemble_batch)(sampled, session)
    cpu = time.process_time() - cpu_start
    for name, original in originals.items():
        setattr(positions[name], name, original)
    barrier()
    dump = RolloutDump(RolloutWriter(Path(config.run_dir), config.logging, session), every_steps=1)
    timed("dump", dump.write_if_due)(0, sampled, decision)
    pieces = {name: seconds.get(name, 0.0) for name in ("add", *PARTS)}
    total = seconds["add"] + seconds["assemble"]
    return {
        **pieces,
        "rest": total - sum(pieces.values()),
        "total": total,
        "total_cpu": cpu,
        "dump": seconds["dump"],
    }


if __name__ == "__main__":
    with exit_with_outcome():
        main()
