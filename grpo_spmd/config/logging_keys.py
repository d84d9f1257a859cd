"""The keys of what a run writes for people: dumps, trackers, the report; and what they demand of each other."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.key import key

TRACKERS = ("wandb", "tensorboard", "trackio")  # their packages, too


# The section is a table: a key's type and default on one line, and its sentence below where that line is full.
# fmt: off
@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    trackers: tuple[str, ...] = key((), "send the metrics to these too: wandb, tensorboard, trackio")
    trackers_rollouts_every_steps: int = key(0,
        "show up to 64 rollouts of each N-th step there, of those that are dumped; 0: never", at_least=0)
    wandb: bool | Literal["online", "offline"] = key(False, "wandb among the trackers, and how it is reached")
    wandb_project: str = key("grpo_spmd", "the project there, and in trackio")
    report_every_steps: int = key(0,
        "write run_dir/report.html after each N-th step and at the end, in a process of its own; 0: never", at_least=0)
    rollouts_every_steps: int = key(1, "dump each N-th step's rollouts as jsonl; 0: never", at_least=0)
    rollouts_compression: Literal["none", "gzip"] = key("none", "gzip: step_N.jsonl.gz, less than half the size")
    rollouts_keep: int | None = key(None,
        "how many of the newest steps' dumps stay on disk; null: all (evaluations' always stay)", at_least=1)

    @property
    def tracker_names(self) -> list[str]:
        """Each once."""
        return [name for name in TRACKERS if name in self.trackers or (name == "wandb" and self.wandb)]
# fmt: on


def check_logging(options: LoggingConfig) -> None:
    """Raises ConfigError for keys that do not go together, and for a tracker that is not there."""
    for name in options.trackers:
        if name not in TRACKERS:
            near = difflib.get_close_matches(name.lower(), TRACKERS, n=1)
            meant = f"did you mean {near[0]}? There are" if near else "there are"
            raise ConfigError(f"logging.trackers: no tracker {name!r}; {meant} {', '.join(TRACKERS)}")
    every, dumped = options.trackers_rollouts_every_steps, options.rollouts_every_steps
    if every and not options.tracker_names:
        remedy = "needs a tracker: set logging.trackers, e.g. to [tensorboard], or leave it out"
        raise ConfigError(f"logging.trackers_rollouts_every_steps ({every}) {remedy}")
    if every and (not dumped or every % dumped):
        rule = f"must be a multiple of logging.rollouts_every_steps ({dumped}), whose files it reads"
        raise ConfigError(f"logging.trackers_rollouts_every_steps ({every}) {rule}; set it to another")
