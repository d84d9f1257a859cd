"""Feeds trackers with the lines of metrics.jsonl and some rollouts, in a thread per tracker.

The training does not wait for trackers, and no line is lost.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.metrics_file import (
    is_evaluation,
    read_lines,
    read_metrics,
    read_metrics_backwards,
)
from grpo_spmd.observe.rollout_record import RolloutRecord, gold_answer, parse_rollout_fields
from grpo_spmd.observe.run_folder import RunFolder

_log = logging.getLogger("grpo_spmd")
# If a call of a tracker takes longer than this, a warning says that the tracker does not answer.
ANSWER_S = 60.0
MAX_ROLLOUTS = 64
MAX_MESSAGES = 32
# The most characters that are shown of a prompt, of a completion and of a message.
MAX_TEXT_CHARS = 4_000
# Characters that a browser obeys instead of showing them: control characters, writing directions,
# half surrogates.
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_FIELDS = (
    "position", "sample", "prompt", "completion", "reward", "rewards", "advantage",
    "finish_reason", "columns", "status", "messages",
)  # fmt: skip


class ShownRollout(NamedTuple):
    """A rollout as trackers show it. All texts are shortened and escaped."""

    messages: list[dict[str, str]]
    """Role and content: the prompt's messages, then the episode's."""
    fields: dict[str, Any]
    """Texts, numbers and None by the column of a table: prompt, completion, reward, each
    reward/NAME before weighting, and so on."""


class Tracker:
    """A service that metrics are sent to; the base class.

    All calls come from one thread. An exception ends the tracker's feed."""

    name = ""
    """The name in logging.trackers, also of the tracker's thread and its state file."""
    title = ""
    """The name in messages."""
    settles_s = 0.0
    """For how many seconds a line that the tracker accepted can still be lost by a kill."""

    def start(self, run_id: str, next_step: int) -> None:
        """Opens the tracker's run `run_id`.

        `next_step` is the first step that the tracker lacks, according to the feed's state file."""

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """Returns whether the tracker lacks a line that an earlier launch wrote.

        The line of an evaluation follows the line of its step."""
        return step + is_evaluation >= next_step

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """Takes a line of metrics.jsonl, with `step`, and some rollouts of the step or none."""

    def finish(self) -> None:
        """Sends what is left, and closes the tracker's run."""


@dataclass
class TrackerFeed:
    """Sends the lines of `<run_dir>/metrics.jsonl`, which serves as a queue, to one tracker.

    Each tracker has a feed and a thread of its own, so that one that hangs does not delay another.
    The state file `<run_dir>/NAME.json` has the tracker's id of the run and the first step that it
    lacks. A resumed run sends what the tracker missed, the steps that are run again, and what the
    tracker may have lost by a kill (`settles_s`). An exception (no package, no key, no network, a
    full disk) ends the feed with a warning. A call that hangs blocks only the feed's daemon thread.
    """

    run_dir: Path
    tracker: Tracker
    rollouts_every_steps: int = 0

    def __post_init__(self) -> None:
        self._metrics = self.run_dir / "metrics.jsonl"
        self._state = self.run_dir / f"{self.tracker.name}.json"
        self._id, next_step = _read_state(self._state)
        # What is in the file already was written by an earlier launch, and the tracker may have it.
        self._known_bytes = self._metrics.stat().st_size if self._metrics.exists() else 0
        newest = next(read_metrics_backwards(self._metrics), {"step": -1})
        # The file may have been cut back to the step where the run goes on.
        self._next_step = min(next_step, newest["step"] + 1)
        # (time of acceptance, next step) of lines that the tracker could still lose by a kill
        self._unsettled = deque[tuple[float, int]]()
        # when the tracker's present call began
        self._called_at: float | None = None
        self._has_warned = False
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.tracker.name, daemon=True)
        self._thread.start()

    def line_written(self, step: int, is_evaluation: bool) -> None:
        """Tells the feed of a new line. Takes microseconds."""
        self._news.set()
        # read the attribute only once, since the thread changes it
        called_at = self._called_at
        is_hanging = called_at is not None and time.monotonic() - called_at > ANSWER_S
        if is_hanging and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s has not answered for %.0f s; the run goes on without it, "
                "and metrics.jsonl is complete",
                self.tracker.title,
                ANSWER_S,
            )

    def end(self, has_ended: bool = True) -> None:
        """Tells the feed that no more lines come."""
        self._ended.set()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the tracker to take the rest.

        What is left then is sent when the run is resumed."""
        self.end()
        self._thread.join(max(timeout_s, 0))
        if self._thread.is_alive():
            _log.warning(
                "%s did not finish within %.3g s; metrics.jsonl is complete",
                self.tracker.title,
                max(timeout_s, 0),
            )

    def _run(self) -> None:
        """Sends all lines to the tracker as they are written; the body of the thread."""
        try:
            self._call(self.tracker.start, self._id, self._next_step)
            self._save_state()
            for metrics in self._wanted_lines():
                self._call(self.tracker.log, metrics, self._rollouts(metrics))
                self._unsettled.append((time.monotonic(), int(metrics["step"]) + 1))
                self._settle(time.monotonic() - self.tracker.settles_s)
            self._call(self.tracker.finish)
            self._settle(time.monotonic())
        # whatever a tracker raises, even SystemExit, the training goes on
        except BaseException as error:
            self._called_at = None
            _log.warning(
                "%s is off from here on (%s: %s); metrics.jsonl is complete without it",
                self.tracker.title,
                type(error).__name__,
                error,
            )

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        """Calls a method of the tracker, and notes meanwhile when the call began."""
        self._called_at = time.monotonic()
        method(*arguments)
        self._called_at = None

    def _wanted_lines(self) -> Iterator[dict[str, Any]]:
        """Yields the lines of metrics.jsonl that the tracker lacks, as they are written.

        Returns after `end` was called."""
        start = 0
        while True:
            # Cleared before the file is read: a line that is written later sets it again.
            self._news.clear()
            # Read before the file is: what was written before the end must still be sent.
            has_ended = self._ended.is_set()
            for line in read_metrics(self._metrics, start):
                start = line.end
                is_new = line.end > self._known_bytes
                step = line.values["step"]
                if is_new or self.tracker.lacks(step, is_evaluation(line.values), self._next_step):
                    yield line.values
            if has_ended:
                return
            self._news.wait()

    def _rollouts(self, metrics: dict[str, Any]) -> Sequence[ShownRollout]:
        """Returns rollouts of the line's step, if they are due; none if the dump is gone or broken.

        The step's dump is written before its line."""
        every_steps = self.rollouts_every_steps
        step = metrics["step"]
        if not every_steps or step % every_steps or is_evaluation(metrics):
            return ()
        try:
            return shown_rollouts(self.run_dir, step)
        except ConfigError as error:
            _log.warning("%s gets no rollouts of step %d: %s", self.tracker.title, step, error)
            return ()

    def _settle(self, accepted_until: float) -> None:
        """Notes that the tracker can no longer lose the lines that it accepted up to that time."""
        while self._unsettled and self._unsettled[0][0] <= accepted_until:
            self._next_step = self._unsettled.popleft()[1]
        self._save_state()

    def _save_state(self) -> None:
        temporary = self._state.with_name(self._state.name + ".tmp")
        # if the disk is full, lines may be sent twice later, which is better than not at all
        with suppress(OSError):
            temporary.write_text(json.dumps({"id": self._id, "next_step": self._next_step}))
            temporary.replace(self._state)


def _read_state(path: Path) -> tuple[str, int]:
    """Returns the tracker's id of the run and its next step; a new id if the file is not usable."""
    try:
        state = json.loads(path.read_bytes())
        return str(state["id"]), int(state["next_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return secrets.token_hex(8), 0


def shown_rollouts(run_dir: Path, step: int) -> list[ShownRollout]:
    """Returns at most MAX_ROLLOUTS rollouts of the step's dump, evenly spread over it.

    Broken lines are skipped. Raises ConfigError for files that cannot be read.
    """
    # Trackers send what they read to a server, so no link out of the run folder is followed.
    files = RunFolder(run_dir).rollout_files.get(step, {})
    lines = (line.text for path in files.values() for line in read_lines(path))
    rollouts = []
    for line in spread_evenly(lines, MAX_ROLLOUTS):
        with suppress(ConfigError):
            rollouts.append(_show(parse_rollout_fields(line, "", _FIELDS)))
    return rollouts


def spread_evenly(lines: Iterable[bytes], max_lines: int) -> list[bytes]:
    """Returns at most `max_lines` lines, at even distances; never holds more than twice that."""
    chosen: list[bytes] = []
    stride = 1
    for number, line in enumerate(lines):
        if number % stride == 0:
            chosen.append(line)
        if len(chosen) == 2 * max_lines:
            chosen = chosen[::2]
            stride *= 2
    if len(chosen) <= max_lines:
        return chosen
    return [chosen[i * len(chosen) // max_lines] for i in range(max_lines)]


def _show(record: RolloutRecord) -> ShownRollout:
    """Returns a rollout as trackers show it."""
    prompt = record.prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    answers = record.messages or [{"role": "assistant", "content": record.completion}]
    messages = [_show_message(message) for message in [*prompt, *answers][:MAX_MESSAGES]]
    prompt_text = record.prompt
    if not isinstance(prompt_text, str):
        prompt_messages = messages[: len(prompt)]
        prompt_text = "\n\n".join(f"{item['role']}: {item['content']}" for item in prompt_messages)
    rewards = {f"reward/{show_text(name)}": value for name, value in record.rewards.items()}
    fields = {
        "prompt": show_text(prompt_text),
        "completion": show_text(record.completion),
        "reward": record.reward,
        **rewards,
        "advantage": record.advantage,
        "finish_reason": show_text(record.finish_reason),
        # how an episode ended
        "status": None if record.status is None else show_text(record.status),
        # the column that most likely holds the right answer, as "name=value"
        "answer": show_text(gold_answer(record.columns)),
        "position": record.position,
        "sample": record.sample,
    }
    return ShownRollout(messages, fields)


def _show_message(message: Any) -> dict[str, str]:
    """Returns role and content; other fields, such as tool calls, follow the content as JSON."""
    fields = {**message} if isinstance(message, dict) else {"content": message}
    role = fields.pop("role", "unknown")
    texts = [fields.pop("content", None), {name: value for name, value in fields.items() if value}]
    content = "\n".join(
        text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        for text in texts
        if text
    )
    return {"role": show_text(str(role))[:40], "content": show_text(content)}


def show_text(text: str) -> str:
    r"""Returns the text, shortened to MAX_TEXT_CHARS with a note of its length.

    Characters that a browser would obey become escapes, such as "\u202e"."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]} ... ({len(text)} characters)"
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_table(rollouts: Sequence[ShownRollout]) -> tuple[list[str], list[list[Any]]]:
    """Returns column names and rows of texts, numbers and None."""
    columns = list(dict.fromkeys(name for rollout in rollouts for name in rollout.fields))
    return columns, [[rollout.fields.get(name) for name in columns] for rollout in rollouts]
