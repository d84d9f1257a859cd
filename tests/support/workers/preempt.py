"""Worker: a generation that is ended by a signal and goes on from the rollout buffer, on real ranks
with real vLLM.

    python -m tests.support.workers.preempt CONFIG OUT FOLDER...
With no FOLDER: generates undisturbed, then with a signal to the last rank in the middle, then goes
on from what was kept. With
FOLDERs: goes on from each of these run folders, with other weights where its name says so. Rank 0
writes to OUT what the ranks made, and how many requests their engines were sent.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed import collectives as store
from grpo_spmd.distributed import preemption
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.preemption import Preempted, Preemption
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_sync import WeightSync
from grpo_spmd.model.policy import build_policy
from grpo_spmd.records import Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.rollout.buffer import RolloutBuffer
from grpo_spmd.rollout.sample import Sampler

CUTS = {"first round": signal.SIGTERM, "second round": signal.SIGUSR1}
STEP, ROUNDS = 3, (8, 5)  # prompts of the two rounds of the step, as with dynamic sampling
PROMPTS = [
    Prompt(40 + i, i, [i % 90 + 1, 5, *[i % 7 + 20] * (35 * (i % 2))], "", {})
    for i in range(sum(ROUNDS))
]


class Engine:
    """The real one, with what it was sent counted, and signalled where a test wants it."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.session = start_session()
        self.preemption = Preemption(config.training.max_time_s)
        self.engine = RolloutEngine(
            config.model, config.rollout, config.max_rollout_tokens, self.session, [0],
            lambda: self.preemption.should_abort(),
        )  # fmt: skip
        policy = build_policy(config.model, config.rollout.temperature, self.session)
        self.weights_id = (
            WeightSync(policy, self.engine, 1 << 20, is_named=True).sync(STEP).weights_id
        )
        self.num_sent = self.num_aborted = self.round = self.num_done = 0
        add_request = self.engine._engine.add_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.num_sent += 1
            return add_request(*args, **kwargs)

        self.engine._engine.add_request = counting

    def job(self, run_dir: str) -> RolloutBuffer:
        """What a new process has: no signal yet, nobody's notice, and a buffer that looks at the
        disk."""
        barrier()
        if self.session.is_rank0 and store._store is not None:
            store._store.delete_key("preempted")
        barrier()
        self.preemption = Preemption(self.config.training.max_time_s)
        self.preemption.begin_step()
        self.num_sent = self.num_aborted = 0
        return RolloutBuffer(
            run_dir, self.config.seed, self.config.model, self.config.rollout, self.session
        )

    def step(self, buffer: RolloutBuffer | None) -> dict[str, Any]:
        """All rounds of the step, as the trainer runs them."""
        score = self.preemption.guard(lambda groups: ScoredRollouts())
        sampler = Sampler(self.engine, self.config.rollout.group_size, self.config.seed, buffer)
        created: list[Any] = []
        start, reason = 0, ""
        try:
            for self.round, num_prompts in enumerate(ROUNDS):
                self.num_done = 0
                groups, _ = sampler.sample(
                    PROMPTS[start : start + num_prompts], STEP, self.weights_id
                )
                score(groups)
                created += on_rank0(
                    lambda pieces: [item for piece in pieces for item in piece], self.told(groups)
                )
                start += num_prompts
        except Preempted as preempted:
            reason = str(preempted)
        sent = on_rank0(list, self.num_sent)
        return {
            "made": created,
            "sent": sum(sent[:: self.config.rollout.engine_ranks]),
            "sent_by_rank": sent,
            "reason": reason,
        }

    def told(self, groups: list[RolloutGroup]) -> list[Any]:
        return [
            [self.session.rank, g.prompt.position, [dataclasses.astuple(c) for c in g.completions]]
            for g in groups
        ]

    @contextmanager
    def signalled(self, in_round: int, number: signal.Signals) -> Iterator[list[float]]:
        """The last rank signals itself when the first completion of a round is there; how many
        seconds later its
        generation was ended."""
        step, sent_at, latency = self.engine._engine.step, [0.0], []
        is_target = self.session.rank == self.session.world_size - 1
        abort = self.engine._abort

        def stepping() -> Any:
            outputs = step()
            old, self.num_done = (
                self.num_done,
                self.num_done + sum(output.finished for output in outputs),
            )
            time.sleep(0.02)  # so that the others are not done before they can notice
            if is_target and self.round == in_round and old == 0 < self.num_done:
                sent_at[0] = time.perf_counter()
                os.kill(os.getpid(), number)
            return outputs

        def aborting(request_ids: Any) -> None:
            self.num_aborted = len(request_ids)
            self.engine._engine.step = step
            abort(request_ids)
            if is_target:
                latency.append(time.perf_counter() - sent_at[0])
            self.engine._engine.step = stepping

        self.engine._engine.step, self.engine._abort = stepping, aborting  # type: ignore[method-assign]
        yield latency
        self.engine._engine.step, self.engine._abort = step, abort  # type: ignore[method-assign]

    def leftovers(self) -> list[Any]:
        """What an engine that has aborted has none of: unfinished, running and waiting requests,
        and requests on the
        model's side."""
        core = self.engine._engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        return [
            int(self.engine._engine.has_unfinished_requests()),
            *core.scheduler.get_request_counts(),
            len(core.scheduler.requests),
            len(runner.requests),
        ]


def main() -> None:
    preemption._NOTICE_POLL_S = 0.02
    config, out, folders = load_config(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    engine = Engine(config)
    result: dict[str, Any] = {}
    for folder in folders:
        name = Path(folder).name
        weights_id = engine.weights_id
        engine.weights_id = "another" if name == "other weights" else weights_id
        result[name] = engine.step(engine.job(folder))
        engine.weights_id = weights_id
    if not folders:
        run_dir = config.run_dir
        engine.job(run_dir)
        result["undisturbed"] = engine.step(None)
        num_keys = store._store.num_keys() if store._store else 0
        for in_round, (name, number) in enumerate(CUTS.items()):
            if in_round and config.rollout.engine_ranks > 1:
                break  # nothing new
            buffer = engine.job(f"{run_dir}/{name}")
            engine.engine.reset_prefix_cache()
            with engine.signalled(in_round, number) as latency:
                result[f"cut in the {name}"] = engine.step(buffer)
            result[f"cut in the {name}"] |= {
                "aborted": on_rank0(list, engine.num_aborted),
                "leftovers": on_rank0(list, engine.leftovers()),
                "latency": on_rank0(lambda pieces: [s for piece in pieces for s in piece], latency),
            }
            if engine.session.is_rank0:
                shutil.copytree(f"{run_dir}/{name}", f"{run_dir}/{name}, as it was cut")
            engine.engine.reset_prefix_cache()
            engine.engine.sleep()
            policy = build_policy(config.model, config.rollout.temperature, engine.session)
            WeightSync(policy, engine.engine, 1 << 20).sync(STEP)
            result[f"{name}, gone on"] = engine.step(engine.job(f"{run_dir}/{name}"))
            result[f"{name}, once more"] = engine.step(engine.job(f"{run_dir}/{name}"))
        engine.job(run_dir)
        result["new_keys"] = (store._store.num_keys() if store._store else 0) - num_keys
    if engine.session.is_rank0:
        out.write_text(json.dumps(result))
    engine.engine.shutdown()
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
