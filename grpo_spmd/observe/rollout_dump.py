"""The run's own rollouts on disk, whatever rank made them: rollouts/step_N.jsonl, a line a rollout."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_spmd.distributed.collectives import gather_bytes
from grpo_spmd.distributed.errors import Rank0Error
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.observe.rollout_record import RolloutRecord, rollouts_file, to_line
from grpo_spmd.records import Decision

_log = logging.getLogger("grpo_spmd")


class RolloutDump:
    """Dumps the rollouts of each `every_steps`-th step (0: of none), and of steps that went wrong."""

    def __init__(self, run_dir: Path, every_steps: int) -> None:
        self._run_dir, self._every_steps = run_dir, every_steps

    def write_if_due(self, step: int, sampled: SampledStep, decision: Decision) -> None:
        """Collective."""
        if self._is_due(step):
            self._write(step, sampled, decision)

    def write_if_skipped(self, step: int, sampled: SampledStep, decision: Decision, sums: Reductions) -> None:
        """Collective. Where an update was skipped (on all ranks alike), and the file is not there yet."""
        if sums["optim/skipped_updates"].value and not self._is_due(step):
            self._write(step, sampled, decision)

    @contextmanager
    def if_refused(self, step: int, sampled: SampledStep) -> Iterator[None]:
        """Collective, where rank 0 refuses the step's rewards: the file shows what was wrong."""
        try:
            yield
        except Rank0Error:  # on all ranks alike
            self._write(step, sampled, None)
            raise

    def _is_due(self, step: int) -> bool:
        return self._every_steps > 0 and step % self._every_steps == 0

    def _write(self, step: int, sampled: SampledStep, decision: Decision | None) -> None:
        """In the order of the prompt stream; groups that dynamic sampling dropped are there too."""
        size = len(sampled.groups[0].completions) if sampled.groups else 0
        lines = {record.position * size + record.sample: to_line(record) for record in records_of(sampled, decision)}
        write_lines_in_order(rollouts_file(self._run_dir, step), lines)


def records_of(sampled: SampledStep, decision: Decision | None) -> Iterator[RolloutRecord]:
    """This rank's rollouts of a step, in the order in which they were sampled."""
    scored, slots = sampled.scored, {p: slot for slot, p in enumerate(decision.positions if decision else [])}
    own = ((group, n, completion) for group in sampled.groups for n, completion in enumerate(group.completions))
    for number, (group, sample, completion) in enumerate(own):
        prompt, slot = group.prompt, slots.get(group.prompt.position)
        rollout_id = None if slot is None else slot * len(group.completions) + sample
        yield RolloutRecord(
            rollout_id=rollout_id,
            row=prompt.row,
            position=prompt.position,
            sample=sample,
            prompt=prompt.text,
            completion=scored.texts[number],
            reward=scored.rewards[number],
            rewards=scored.finite_by_name(number),
            statuses={name: statuses[number] for name, statuses in scored.statuses.items()},
            advantage=None if decision is None or rollout_id is None else decision.advantages[rollout_id],
            finish_reason=completion.finish_reason,
            prompt_ids=prompt.token_ids,
            completion_ids=completion.token_ids,
            rollout_logprobs=[x if math.isfinite(x) else None for x in completion.logprobs],
            extra=scored.notes.get(number, {}).get("extra", {}),
        )


def write_lines_in_order(path: Path, lines: dict[int, str]) -> None:
    """Collective. Write all ranks' lines to one file, by their numbers. A full disk costs that file alone."""
    # JSON has no line break of its own. Half a surrogate pair, which a prompt may hold, becomes JSON's escape for it.
    text = "".join(f"{number}\t{line}\n" for number, line in lines.items())
    parts = gather_bytes(text.encode("utf-8", "backslashreplace"))
    if parts is None:
        return
    numbered = [line.split(b"\t", 1) for part in parts for line in part.split(b"\n") if line]
    numbered.sort(key=lambda pair: int(pair[0]))
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"".join(line + b"\n" for _, line in numbered))
    except OSError as error:  # these lines are for people: a run may go on without them, and find space again
        path.unlink(missing_ok=True)
        _log.warning("%s is not written: %s", path, error.strerror)
