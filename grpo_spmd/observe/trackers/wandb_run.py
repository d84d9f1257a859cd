"""W&B as a tracker."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.trackers.feed import ShownRollout, Tracker, as_table

_log = logging.getLogger("grpo_spmd")


class WandbRun(Tracker):
    """W&B refuses steps below its own counter. So the counter is not set, and `step` is a metric:
    the x-axis."""

    name = "wandb"
    title = "W&B"
    # wandb 0.31 writes its file, and sends, every 15 s, and its process ends with ours. A line that
    # it gets twice is drawn over itself.
    settles_s = 45.0

    def __init__(self, run_dir: Path, options: LoggingConfig, config: dict[str, Any]) -> None:
        """`config` is what W&B shows as the run's."""
        self._run_dir = run_dir
        self._options = options
        self._config = config

    def start(self, run_id: str, next_step: int) -> None:
        import wandb

        # A captured console would stand between the training and its terminal; logs/rank_0.log has
        # all of it. Without a key W&B may ask for one at a terminal, but not for ever.
        settings = wandb.Settings(init_timeout=120, login_timeout=30, console="off", silent=True)
        mode = self._options.wandb
        self._run = wandb.init(
            project=self._options.wandb_project,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            id=run_id,
            resume="allow",
            # None: WANDB_MODE, else online
            mode=mode if isinstance(mode, str) else None,
            config=self._config,
            settings=settings,
        )
        _log.info("W&B: %s", self._run.url or self._run.dir)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        if rollouts:
            import wandb

            columns, rows = as_table(rollouts)
            metrics = metrics | {"rollouts": wandb.Table(columns=columns, data=rows)}
        self._run.log(metrics)

    def finish(self) -> None:
        self._run.finish()
