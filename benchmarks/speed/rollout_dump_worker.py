"""One rank of the rollout_dump benchmark: tells the seconds and the peak memory of each form of the
dump.

python -m benchmarks.speed.rollout_dump_worker NUM_ROLLOUTS TOKENS ROUNDS      TOKENS 0: of the
trace of host_overhead
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

from benchmarks.speed.host_overhead_worker import make_groups
from benchmarks.support.ranks import peak_bytes, tell, time_in_turn
from grpo_spmd.config.schema import (
    AdvantageConfig,
    LoggingConfig,
    LossConfig,
    RolloutConfig,
    TrainingConfig,
)
from grpo_spmd.distributed.collectives import barrier, gather_bytes, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.observe.rollout_writer import RolloutDump, RolloutWriter, rollout_records
from grpo_spmd.records import Completion, Decision

_PROMPT = 128  # tokens, as make_groups makes them


def main() -> None:
    num_rollouts, tokens, num_rounds = map(int, sys.argv[1:])
    session = start_session()
    groups, scored = make_groups(num_rollouts, session)
    size = len(groups[0].completions)
    if tokens:
        longer = tokens - _PROMPT
        for group in groups:
            group.completions[:] = [
                Completion(
                    [*islice(cycle(c.token_ids), longer)],
                    [*islice(cycle(c.logprobs), longer)],
                    "length",
                )
                for c in group.completions
            ]
        scored.texts[:] = ["Because. " * (longer // 3)] * len(scored.texts)
    rules = StepRules(
        RolloutConfig(num_prompts_per_step=num_rollouts // size, group_size=size),
        AdvantageConfig(),
        LossConfig(),
        TrainingConfig(max_tokens_per_micro_batch=16384),
        max_error_frac=1.0,
        num_ranks=session.world_size,
    )
    sampled = SampledStep(rules)
    sampled.add(groups, scored)
    decision = sampled.decide()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(on_rank0(lambda folders: folders[0], folder))
        old, current = run_dir / "before.jsonl", run_dir / "rollouts/step_000001.jsonl"
        dump = RolloutDump(RolloutWriter(run_dir, LoggingConfig(), session), every_steps=1)
        forms = {
            "before": lambda: dump_through_rank0(sampled, decision, old),
            "now": lambda: dump.write_if_due(1, sampled, decision),
        }
        peaks = {}
        for name, write in reversed(
            forms.items()
        ):  # the smaller first: what is freed stays resident
            barrier()
            peaks[name] = peak_bytes(write, on_gpu=False)
        times, _ = time_in_turn(forms, num_rounds)
        barrier()
        sizes = {"before": old.stat().st_size, "now": current.stat().st_size}
        barrier()  # rank 0's folder must stay until all have looked
    tell({"rank": session.rank, "times": times, "peaks": peaks, "sizes": sizes})
    end_session()


def dump_through_rank0(sampled: SampledStep, decision: Decision, path: Path) -> None:
    """Collective. As it was until the dump became one file a node: JSON by the standard library
    with logprobs in nine
    digits, gathered on rank 0, which sorts and writes it."""
    lines = []
    for record in rollout_records(sampled, decision):
        values = {
            name: value
            for name, value in vars(record).items()
            if name not in ("extra", "num_rollouts")
        }
        logprobs = [x if math.isfinite(x) else None for x in record.rollout_logprobs]
        values["rollout_logprobs"] = None
        fields = [
            f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in values.items()
        ]
        text = ", ".join(
            ["null" if x is None else f"{x:.9g}" if x % 1 else repr(x) for x in logprobs]
        )
        fields[list(values).index("rollout_logprobs")] = f'"rollout_logprobs": [{text}]'
        lines.append(f"{record.position * 8 + record.sample}\t{{{', '.join(fields)}}}\n")
    pieces = gather_bytes("".join(lines).encode("utf-8", "backslashreplace"))
    if pieces is not None:
        numbered = [line.split(b"\t", 1) for piece in pieces for line in piece.split(b"\n") if line]
        numbered.sort(key=lambda pair: int(pair[0]))
        path.write_bytes(b"".join(line + b"\n" for _, line in numbered))


if __name__ == "__main__":
    with exit_with_outcome():
        main()
