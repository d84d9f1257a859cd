"""Trackers, fed from metrics.jsonl by threads of their own: the training waits for none, and no line is lost."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import UntrustedError, check_fields, matching_text, read_json, whole_number
from grpo_spmd.observe.metrics_file import is_evaluation, read_metrics, read_metrics_backwards
from grpo_spmd.observe.trackers.completions import ShownRollout, shown_rollouts

_log = logging.getLogger("grpo_spmd")
ANSWER_S = 60.0  # a call that takes longer is said to hang


class Tracker:
    """Where metrics go. All calls come from one thread; what they raise ends the tracker's feed."""

    name = ""  # in logging.trackers, of its thread and of its state's file
    title = ""  # as people write it
    settles_s = 0.0  # how long a kill may still take from it what it was given

    def start(self, run_id: str, next_step: int) -> None:
        """`next_step`: the first that it lacks, as far as our own notes tell."""
        raise NotImplementedError

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """Whether it needs a line that was written before this launch. An evaluation follows the line of its step."""
        return step + is_evaluation >= next_step

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """A line of metrics.jsonl, `step` in it; of its step some rollouts, or none."""
        raise NotImplementedError

    def finish(self) -> None:
        raise NotImplementedError


class TrackerFeed:
    """Follows `<run_dir>/metrics.jsonl`, which is the queue: the tracker gets each line when it has taken the one
    before. Each tracker has a feed, and so a thread, of its own, which reads the file for itself: with one thread
    for all of them a hanging one would hold up the others. `<run_dir>/NAME.json` keeps the tracker's id of the run
    and the next step that it lacks: a run that goes on brings what the tracker missed, and sends steps that are run
    again once more, and what a kill may have taken from the tracker (`settles_s`). An exception (no package, no
    key, no network, a full disk) ends the feed with a warning; a call that hangs keeps a daemon thread. Rollouts
    are read here too, from the step's dump."""

    def __init__(self, run_dir: Path, tracker: Tracker, rollouts_every_steps: int = 0) -> None:
        self._run_dir, self._tracker, self._rollouts_every_steps = (
            run_dir,
            tracker,
            rollouts_every_steps,
        )
        self._metrics, self._state = run_dir / "metrics.jsonl", run_dir / f"{tracker.name}.json"
        self._id, next_step = _read_state(self._state)
        # What lies before this is of an earlier process, and the tracker may know it.
        self._known_bytes = self._metrics.stat().st_size if self._metrics.exists() else 0
        last_step = next((metrics["step"] for metrics in read_metrics_backwards(self._metrics)), -1)
        self._next_step = min(
            next_step, last_step + 1
        )  # the file was cut back to where the run goes on
        self._given = deque[
            tuple[float, int]
        ]()  # when, and which step would be the next: what has not settled
        self._taken = self._written = 0
        self._called_at: float | None = None  # since when the tracker has been busy with a call
        self._said = False
        self._news, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name=tracker.name, daemon=True)
        self._thread.start()

    def line_written(self) -> None:
        """Takes microseconds."""
        self._written += 1
        self._news.set()
        called_at = self._called_at  # read once: the thread changes it
        if called_at is not None and time.monotonic() - called_at > ANSWER_S and not self._said:
            self._said = True
            text = "%s has not answered for %.0f s; the run goes on without it, and metrics.jsonl is complete"
            _log.warning(text, self._tracker.title, ANSWER_S)

    def end(self) -> None:
        """No line comes any more."""
        self._ended.set()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """Give the tracker `timeout_s` to take the rest; what is left it gets when the run goes on."""
        self.end()
        self._thread.join(max(timeout_s, 0))
        if self._thread.is_alive():
            behind, said = (
                self._written - self._taken,
                "%s did not finish within %.3g s, %d lines short; %s",
            )
            _log.warning(
                said, self._tracker.title, max(timeout_s, 0), behind, "metrics.jsonl is complete"
            )

    def _run(self) -> None:
        try:
            with self._call():
                self._tracker.start(self._id, self._next_step)
            self._save_state()
            for metrics in self._lines():
                rollouts = self._rollouts(metrics)
                with self._call():
                    self._tracker.log(metrics, rollouts)
                self._taken += 1
                self._note_taken(int(metrics["step"]) + 1)
            with self._call():
                self._tracker.finish()
            self._note_taken(
                self._given[-1][1] if self._given else self._next_step, is_settled=True
            )
        except (
            BaseException
        ) as error:  # whatever a tracker raises, SystemExit too, the training goes on
            what = f"{type(error).__name__}: {error}"
            said = "%s is off from here on (%s); metrics.jsonl is complete without it"
            _log.warning(said, self._tracker.title, what)

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._called_at = time.monotonic()
        try:
            yield
        finally:
            self._called_at = None

    def _lines(self) -> Iterator[dict[str, Any]]:
        """The lines of metrics.jsonl that the tracker lacks, as they come; ends after `end`."""
        place, next_step = 0, self._next_step
        while True:
            self._news.clear()  # before the question: news that come after it must not be taken for old ones
            ended = (
                self._ended.is_set()
            )  # before the reading: what was written until then must still be sent
            for line in read_metrics(self._metrics, place):
                of_line = line.metrics["step"], is_evaluation(line.metrics)
                if line.end > self._known_bytes or self._tracker.lacks(*of_line, next_step):
                    yield line.metrics
                place = line.end
            if ended:
                return
            self._news.wait()

    def _rollouts(self, metrics: dict[str, Any]) -> Sequence[ShownRollout]:
        """Of the step's dump, which is on disk before its line; none where it is gone by now, or broken."""
        every_steps, step = self._rollouts_every_steps, metrics["step"]
        if not every_steps or step % every_steps or is_evaluation(metrics):
            return ()
        try:
            return shown_rollouts(self._run_dir, step)
        except (OSError, ConfigError) as error:
            _log.warning("%s gets no rollouts of step %d: %s", self._tracker.title, step, error)
            return ()

    def _note_taken(self, next_step: int, is_settled: bool = False) -> None:
        now = time.monotonic()
        self._given.append((now, next_step))
        while self._given and (is_settled or now - self._given[0][0] >= self._tracker.settles_s):
            self._next_step = self._given.popleft()[1]
        self._save_state()

    def _save_state(self) -> None:
        temporary = self._state.with_name(self._state.name + ".tmp")
        with suppress(
            OSError
        ):  # a full disk: lines would be sent twice, which is better than not at all
            temporary.write_text(
                json.dumps({"id": self._id, "next_step": self._next_step}), encoding="utf-8"
            )
            temporary.replace(self._state)


def _read_state(path: Path) -> tuple[str, int]:
    try:
        state = read_json(path)
        check_fields(
            state,
            {"id": matching_text(r"[\w-]{1,64}", "an id"), "next_step": whole_number(0)},
            path,
            ("id", "next_step"),
        )
        return state["id"], state["next_step"]
    except (OSError, UntrustedError):
        return secrets.token_hex(8), 0
