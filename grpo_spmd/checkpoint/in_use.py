"""Whether a run folder is in use: by its checkpoints, and by what an attempt left that failed. Without torch."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from grpo_spmd.config.errors import ConfigError


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def list_checkpoints(run_dir: str | Path) -> list[Path]:
    """Folders that were completed, good or bad, in the order of steps: not those whose names end in .tmp or .aside."""
    folder = Path(run_dir) / "checkpoints"
    found = [path for path in folder.iterdir() if re.fullmatch(r"step_\d{6,}", path.name)] if folder.is_dir() else []
    return sorted(found, key=step_of)


def refuse_in_use(run_dir: Path) -> None:
    """Raises ConfigError where a run has been in the folder; not for one that failed before its first step's end."""
    metrics = run_dir / "metrics.jsonl"
    has_failed = (run_dir / "logs" / "rank_0.log").exists() and not (metrics.exists() and metrics.stat().st_size)
    names = () if has_failed else ("metrics.jsonl", "config.yaml")
    for name in (*names, *(f"checkpoints/{path.name}" for path in list_checkpoints(run_dir))):
        if (run_dir / name).exists():
            remedy = "set checkpoint.resume: auto to go on with that run, choose another folder, or move it away"
            raise ConfigError(f"run_dir: {run_dir} holds a {name} already, and nothing is written over; {remedy}")


def set_attempt_aside(run_dir: Path) -> None:
    """Keep what an attempt left that failed before its first step's end; its logs stay, and are written on."""
    names = "config.yaml", "rollouts", "rollout_buffer", "timeline.jsonl", "token_scores", "tokenizer.json"
    left = [path for name in names if (path := run_dir / name).exists()]
    if left:
        number = next(n for n in itertools.count(1) if not (run_dir / f"failed_{n}").exists())
        (run_dir / f"failed_{number}").mkdir()
        for path in left:
            path.rename(run_dir / f"failed_{number}" / path.name)
