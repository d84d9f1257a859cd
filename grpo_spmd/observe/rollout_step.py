"""The rollouts of a step out of the files of all nodes, each there once and none missing. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_files import part_name, rollouts_file, rollouts_parts, step_stem
from grpo_spmd.observe.rollout_reader import read_lines_of, read_rollout
from grpo_spmd.observe.rollout_record import RolloutRecord

_MOST = 8  # names in a line


def read_rollouts(run_dir: Path, step: int) -> list[RolloutRecord]:
    """In the order of the prompt stream, whichever rank wrote them. Raises OSError where there is no dump or it cannot
    be read, and ConfigError, which names the file and the line or the rollouts, for one that is broken, incomplete or
    of several runs."""
    parts = rollouts_parts(run_dir, step) or {0: rollouts_file(run_dir, step)}
    found: list[RolloutRecord] = []
    places: dict[str, str] = {}
    for path in parts.values():
        for number, line in enumerate(read_lines_of(path), start=1):
            where = f"{path}:{number}"
            record = read_rollout(line, where)
            names = [f"the rollout {record.position}/{record.sample} (position/sample)"]
            names += [f"the rollout id {record.rollout_id}"] * (record.rollout_id is not None)
            for name in names:
                if (first := places.setdefault(name, where)) != where:
                    raise ConfigError(f"{where}: {name} is in {first} too; is one of these files of another run?")
            found.append(record)
    _check_complete(found, parts, step)
    return sorted(found, key=lambda record: (record.position, record.sample))


def _check_complete(records: Sequence[RolloutRecord], parts: Mapping[int, Path], step: int) -> None:
    """By how many rollouts the step had, and by their ids, which have no gap. Dumps of earlier versions tell only the
    ids; those of a refused step neither."""
    first, *others = parts.values()
    where = f"{first} and {len(others)} more" if others else f"{first}"
    sizes = sorted({record.num_rollouts for record in records if record.num_rollouts is not None})
    if len(sizes) > 1 or (sizes and sizes[0] < len(records)):
        had = f"of a step that had {_listed(sizes)}"
        raise ConfigError(f"{where}: {len(records)} rollouts {had}; is one of these files of another run?")
    known = {record.rollout_id for record in records if record.rollout_id is not None}
    num_ids = max(known, default=-1) + 1
    if sizes and len(known) == len(records):  # dynamic sampling dropped none of these
        num_ids = max(num_ids, sizes[0])
    num_missing = max(num_ids - len(known), sizes[0] - len(records) if sizes else 0)
    if num_missing > 0:
        ids = [i for i in range(min(num_ids, len(known) + _MOST + 1)) if i not in known]
        said = f"{where}: {num_missing} rollouts are missing" + (f", with the ids {_listed(ids)}" if ids else "")
        nodes = [node for node in range(min(max(parts), len(parts) + _MOST)) if node not in parts]
        gone = [f"{part_name(step_stem(step), node)}.jsonl" for node in nodes]
        said += f"; there is no {_listed(gone)}" if gone else ""
        raise ConfigError(f"{said}; each node wrote a file, and all of them must be in one folder")


def _listed(values: Sequence[object]) -> str:
    return ", ".join(map(str, values[:_MOST])) + ", ..." * (len(values) > _MOST)
