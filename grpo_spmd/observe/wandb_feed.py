"""W&B, fed from metrics.jsonl by a thread of its own: the training waits for none of it, and no line is lost."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.observe.metrics_file import is_evaluation, read_lines
from grpo_spmd.untrusted import UntrustedError, check_fields, read_json, text, whole

_log = logging.getLogger("grpo_spmd")
ANSWER_S = 60.0  # a call that takes longer is said to hang
FINISH_S = 60.0  # what W&B gets at the end of a run to take the rest


class WandbFeed:
    """Follows `<run_dir>/metrics.jsonl`, which is the queue: W&B gets each line when it has taken the one before.
    `<run_dir>/wandb.json` keeps W&B's id of the run and the next step that it lacks: a run that goes on brings what W&B
    missed, and sends steps that are run again once more. W&B refuses steps below its own counter, so that counter is
    left to itself, and `step` is a metric, the x-axis of the others. An exception (no package, no key, no network, a
    full disk) ends the feed with a warning; a call that hangs keeps a daemon thread."""

    def __init__(self, run_dir: Path, options: LoggingConfig, config: dict[str, Any]) -> None:
        """`config`: what W&B shows as the run's."""
        self._run_dir, self._options, self._config = run_dir, options, config
        self._metrics, self._state = run_dir / "metrics.jsonl", run_dir / "wandb.json"
        self._id, self._next_step = _read_state(self._state)
        # What lies before this is of an earlier process, and W&B may know it.
        self._known_bytes = self._metrics.stat().st_size if self._metrics.exists() else 0
        self._taken = self._written = 0
        self._called_at: float | None = None  # since when W&B has been busy with a call
        self._said = False
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
        self._thread.start()

    def line_written(self) -> None:
        """Takes microseconds."""
        self._written += 1
        self._news.set()
        called_at = self._called_at  # read once: the thread changes it
        if called_at is not None and time.monotonic() - called_at > ANSWER_S and not self._said:
            self._said = True
            text = "W&B has not answered for %.0f s; the run goes on without it, and metrics.jsonl is complete"
            _log.warning(text, ANSWER_S)

    def finish(self, timeout_s: float | None = None) -> None:
        """Give W&B `timeout_s` (default FINISH_S) to take the rest; what is left it gets when the run goes on."""
        timeout_s = FINISH_S if timeout_s is None else timeout_s
        self._ended.set()
        self._news.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            behind = self._written - self._taken
            _log.warning("W&B did not finish within %g s, %d lines short; metrics.jsonl is complete", timeout_s, behind)

    def _run(self) -> None:
        try:
            with self._call():
                run = self._start()
            self._save_state()
            for metrics in self._lines():
                with self._call():
                    run.log(metrics)
                self._taken += 1
                self._next_step = int(metrics["step"]) + 1
                self._save_state()
            with self._call():
                run.finish()
        except BaseException as error:  # whatever a tracker raises, SystemExit too, the training goes on
            what = f"{type(error).__name__}: {error}"
            _log.warning("W&B is off from here on (%s); metrics.jsonl is complete without it", what)

    def _start(self) -> Any:
        import wandb

        # A captured console would stand between the training and its terminal; logs/rank_0.log has all of it. Of W&B's
        # own lines one is of use, the address. Without a key it may ask for one at a terminal, but not for ever.
        settings = wandb.Settings(init_timeout=120, login_timeout=30, console="off", silent=True)
        mode = self._options.wandb if isinstance(self._options.wandb, str) else None  # None: WANDB_MODE, else online
        project, name, folder = self._options.wandb_project, self._run_dir.name, str(self._run_dir)
        of_run: dict[str, Any] = {"project": project, "name": name, "dir": folder, "id": self._id, "resume": "allow"}
        run = wandb.init(**of_run, mode=mode, config=self._config, settings=settings)
        _log.info("W&B: %s", run.url or run.dir)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._called_at = time.monotonic()
        yield
        self._called_at = None

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl that W&B lacks, as they come; ends after `finish`."""
        place = 0
        while True:
            self._news.clear()  # before the question: news that come after it must not be taken for old ones
            ended = self._ended.is_set()  # before the reading: what was written until then must still be sent
            for line in read_lines(self._metrics, place):
                step = line.metrics["step"] + is_evaluation(line.metrics)  # it follows the line of its step
                if line.end > self._known_bytes or step >= self._next_step:
                    yield line.metrics
                place = line.end
            if ended:
                return
            self._news.wait()

    def _save_state(self) -> None:
        temporary = self._state.with_name(self._state.name + ".tmp")
        with suppress(OSError):  # a full disk: lines would be sent twice, which is better than not at all
            temporary.write_text(json.dumps({"id": self._id, "next_step": self._next_step}), encoding="utf-8")
            temporary.replace(self._state)


def _read_state(path: Path) -> tuple[str, int]:
    try:
        state = read_json(path)
        check_fields(state, {"id": text(r"[\w-]{1,64}", "an id"), "next_step": whole(0)}, path, ("id", "next_step"))
        return state["id"], state["next_step"]
    except (OSError, UntrustedError):
        return secrets.token_hex(8), 0
