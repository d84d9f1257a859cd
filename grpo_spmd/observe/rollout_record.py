"""rollouts/step_N.jsonl: one line a rollout."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import gather_bytes
from grpo_spmd.distributed.errors import Rank0Error
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.records import Decision

_log = logging.getLogger("grpo_spmd")


def rollouts_file(config: Config, step: int) -> Path:
    return Path(config.run_dir) / "rollouts" / f"step_{step:06d}.jsonl"


def dump_rollouts_if_due(config: Config, step: int, sampled: SampledStep, decision: Decision) -> None:
    """Collective. Each `logging.rollouts_every_steps`: write `rollouts/step_<step>.jsonl`, a line a rollout, whatever
    rank made it.

    Groups that dynamic sampling dropped are there too, with rollout_id null. The order is that of the prompt stream.
    """
    if dump_is_due(config, step):
        dump_rollouts(config, step, sampled, decision)


@contextmanager
def dump_if_refused(config: Config, step: int, sampled: SampledStep) -> Iterator[None]:
    """Collective, where rank 0 refuses the step's rewards: writes its rollouts, due or not, for they show what was
    wrong."""
    try:
        yield
    except Rank0Error:  # on all ranks alike
        dump_rollouts(config, step, sampled, None)
        raise


def dump_is_due(config: Config, step: int) -> bool:
    every = config.logging.rollouts_every_steps
    return every > 0 and step % every == 0


def dump_rollouts(config: Config, step: int, sampled: SampledStep, decision: Decision | None) -> None:
    lines: dict[int, str] = {}
    slots = {position: slot for slot, position in enumerate(decision.positions if decision else [])}
    scored, size = sampled.scored, config.rollout.group_size
    own = ((g, sample, c) for g in sampled.groups for sample, c in enumerate(g.completions))
    for number, (group, sample, completion) in enumerate(own):
        position = group.prompt.position
        rollout_id = slots[position] * size + sample if position in slots else None
        record = {
            "rollout_id": rollout_id,
            "row": group.prompt.row,
            "position": position,
            "sample": sample,
            "prompt": group.prompt.text,
            "completion": scored.texts[number],
            "reward": scored.rewards[number],
            "rewards": scored.finite_by_name(number),
            "statuses": {name: statuses[number] for name, statuses in scored.statuses.items()},
            "advantage": None if decision is None or rollout_id is None else decision.advantages[rollout_id],
            "finish_reason": completion.finish_reason,
            "prompt_ids": group.prompt.token_ids,
            "completion_ids": completion.token_ids,
            "rollout_logprobs": [x if math.isfinite(x) else None for x in completion.logprobs],
        }
        lines[position * size + sample] = json.dumps(record, ensure_ascii=False)
    write_lines_in_order(rollouts_file(config, step), lines)


def write_lines_in_order(path: Path, lines: dict[int, str]) -> None:
    """Collective. Write all ranks' lines to one file, in the order of their numbers. A disk that is full costs that
    file alone."""
    # A line is JSON and has no line break of its own. Half a surrogate pair, which a prompt may hold, becomes JSON's
    # escape for it.
    parts = gather_bytes(
        "".join(f"{number}\t{line}\n" for number, line in lines.items()).encode("utf-8", "backslashreplace")
    )
    if parts is not None:
        numbered = [line.split(b"\t", 1) for part in parts for line in part.split(b"\n") if line]
        numbered.sort(key=lambda pair: int(pair[0]))
        try:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"".join(line + b"\n" for _, line in numbered))
        except (
            OSError
        ) as error:  # these lines are for people; a full disk is no reason to stop a run that may find space again
            path.unlink(missing_ok=True)
            _log.warning("%s is not written: %s", path, error.strerror)
