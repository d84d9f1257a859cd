"""Worker: dumps of rollouts on real ranks, without an engine.

    python -m tests.support.workers.dump FOLDER
What each folder below is to hold: tests/ranks/test_dump.py.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from grpo_spmd.config.schema import (
    AdvantageConfig,
    LoggingConfig,
    LossConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import barrier
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.reductions import Max, Reductions
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.observe.rollout_writer import RolloutDump, RolloutWriter
from grpo_spmd.records import Completion, Decision, Prompt, Rollout, RolloutGroup, ScoredRollouts

NUM_GROUPS, GROUP_SIZE = 6, 2
TEXTS = [
    "why?",
    "h\u00e4h \u2028 \ud800?",
    "line\nbreak\t\\",
]  # what a line of JSON must hold, half a pair among it


def main() -> None:
    folder, session = Path(sys.argv[1]), start_session()
    alone = dataclasses.replace(
        session, local_rank=0
    )  # as torchrun says on the first rank of a host
    for name, node_values in (("one", session), ("two", alone)):
        dump(folder / name, node_values, [1])
        dump(folder / f"{name}_gzip", node_values, [1], compression="gzip")
        dump(folder / f"{name}_full", node_values, [1, 2, 3], full_at=2)
        dump(folder / f"{name}_keep", node_values, [1, 2, 3, 4], keep=2)
        scored(folder / f"{name}_scored", node_values, [1, 2, 3], keep=2)
    dump(folder / "shrunk", alone, [1, 2])
    dump(folder / "shrunk", session, [2], compression="gzip")  # one node now, and the other form
    dump(folder / "shrunk_keep", alone, [1, 2])
    dump(folder / "shrunk_keep", session, [3], keep=1)
    scored(folder / "shrunk_scored", alone, [1, 2])
    scored(folder / "shrunk_scored", session, [2], compression="gzip")
    end_session()


def dump(
    run_dir: Path,
    session: Session,
    steps: list[int],
    *,
    compression: Literal["none", "gzip"] = "none",
    keep: int | None = None,
    full_at: int | None = None,
) -> None:
    """Collective. Dump the same step as each of `steps`; at `full_at` the disk of rank 1 takes only
    100 bytes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    options = LoggingConfig(rollouts_compression=compression, rollouts_keep=keep)
    dump = RolloutDump(RolloutWriter(run_dir, options, session), every_steps=1)
    sampled, decision = sample(session)
    num_open = len(os.listdir("/proc/self/fd"))
    for step in steps:
        if step == full_at and session.rank == 0:
            (run_dir / f"rollouts/step_{step:06d}.jsonl").write_text("of an earlier process\n")
        barrier()
        is_full = step == full_at and session.rank == 1
        counted = messages(
            partial(limited, 100 if is_full else None, dump, step, sampled, decision)
        )
        # of sizes, of errors, and at first of hosts: one number a rank, and nothing else
        assert counted == [("all_gather", 8)] * (2 + (step == steps[0])), counted
    assert len(os.listdir("/proc/self/fd")) == num_open
    barrier()


def scored(run_dir: Path, session: Session, steps: list[int], **options: Any) -> None:
    """Collective. Dump steps, and the scores of their tokens, whatever rank they were trained on:
    rollout i has 1 + i
    tokens, whose difference is i / 8 and whose entropy is the step."""
    run_dir.mkdir(parents=True, exist_ok=True)
    files = {
        "rollouts_compression": options.get("compression", "none"),
        "rollouts_keep": options.get("keep"),
    }
    writers = [
        RolloutWriter(run_dir, LoggingConfig(**files), session, name)
        for name in ("rollouts", "token_scores")
    ]
    dump = RolloutDump(writers[0], 1, writers[1])
    sampled, decision = sample(session)
    for step in steps:
        dump.write_if_due(step, sampled, decision)
        keep = dump.keep_scores_if_due(step)
        assert keep is not None
        ids = [
            i
            for i in range(NUM_GROUPS * GROUP_SIZE)[::-1]
            if i * 7 % 5 % session.world_size == session.rank
        ]
        row = pack_rollouts(
            [Rollout(i, 1.0, True, [1], [2] * (i + 1), [-1.0] * (i + 1)) for i in ids],
            session.device,
        )
        keep(
            row,
            torch.tensor(row.rollout_ids)[row.sequence_index] / 8 - 1,
            torch.full([len(row.target_ids)], step),
        )
        sums: Reductions = {"optim/skipped_updates": Max(0.0)}
        counted = messages(partial(dump.write_updated, step, sampled, decision, sums, keep))
        assert counted == [("all_gather", 8)] * (2 + (step == steps[0])), counted


def sample(session: Session) -> tuple[SampledStep, Decision]:
    """Collective. A step whose groups the ranks have in no order."""
    rules = StepRules(
        RolloutConfig(num_prompts_per_step=NUM_GROUPS, group_size=GROUP_SIZE),
        AdvantageConfig(),
        LossConfig(),
        TrainingConfig(),
        max_error_frac=1.0,
        num_ranks=session.world_size,
    )
    groups, scored = [], ScoredRollouts(by_name={"r": []}, statuses={"r": []})
    for slot in (3, 0, 5, 2, 4, 1):
        if slot % session.world_size != session.rank:
            continue
        prompt = Prompt(100 + slot, slot, [slot, 7], TEXTS[slot % 3], {"answer": "\u00fc" * slot})
        completions = [
            Completion([slot, sample, 9], [-0.1 * slot, -1 / 3, float("nan")], "stop")
            for sample in range(GROUP_SIZE)
        ]
        groups.append(RolloutGroup(slot, prompt, completions))
        for sample in range(GROUP_SIZE):
            scored.rewards.append(float(slot * sample))
            scored.texts.append(f"{slot} {sample}")
            scored.by_name["r"].append(float(slot * sample))
            scored.statuses["r"].append("ok")
    sampled = SampledStep(rules)
    sampled.add(groups, scored)
    return sampled, sampled.decide()


def limited(
    size: int | None, dump: RolloutDump, step: int, sampled: SampledStep, decision: Decision
) -> None:
    """A dump where files may grow to `size`: the kernel refuses more, as it does on a full disk."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit[0] if size is None else size, limit[1]))
    try:
        dump.write_if_due(step, sampled, decision)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)


def messages(act: Callable[[], object]) -> list[tuple[str, int]]:
    """The collectives that `act` enters, with the bytes that this rank gives each."""
    result = []
    names = (
        "all_gather",
        "gather",
        "broadcast",
        "all_to_all_single",
        "all_reduce",
        "scatter",
        "send",
        "isend",
    )
    originals = {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            inputs = arguments[1] if name in ("all_gather", "all_to_all_single") else arguments[0]
            result.append((name, inputs.nbytes))
            return originals[name](*arguments, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        act()
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return result


if __name__ == "__main__":
    with exit_with_outcome():
        main()
