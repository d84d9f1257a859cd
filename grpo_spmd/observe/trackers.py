"""Trackers (W&B, TensorBoard, trackio), each fed with the lines of metrics.jsonl in its own thread.

The training does not wait for trackers, and no line is lost. Each package is imported only if a run
uses it. TensorBoard's event files are written here, without torch's SummaryWriter and its threads.
trackio, Hugging Face's, writes a SQLite file on this machine unless its environment variables name
a server.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoggingConfig
from grpo_spmd.files import write_durably
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
# The fields of a rollout's record that are read to show it.
_FIELDS = (
    "position", "sample", "prompt", "completion", "reward", "rewards", "advantage",
    "finish_reason", "columns", "status", "messages",
)  # fmt: skip


# Columns of ShownRollout.fields whose text its messages have, too.
_MESSAGE_FIELDS = ("prompt", "completion")


class ShownRollout(NamedTuple):
    """A rollout as trackers show it. All texts are shortened and escaped."""

    messages: list[dict[str, str]]
    """Role and content: the prompt's messages, then the episode's."""
    fields: dict[str, Any]
    """Texts, numbers and None by the column of a table: prompt, completion, reward, each
    reward/NAME before weighting, and so on."""


class Tracker:
    """The base class of a service that metrics are sent to, such as W&B.

    A TrackerFeed makes all calls, from its own thread. An exception ends that feed, and not the
    run.
    """

    name = ""
    """The name in logging.trackers, also of the tracker's thread and its state file."""
    title = ""
    """The name in messages."""
    settles_s = 0.0
    """If the process is killed, the tracker may lose the lines of this many last seconds."""

    def start(self, run_id: str, next_step: int) -> None:
        """Opens the tracker's run `run_id`.

        `next_step` is the first step that the tracker lacks, according to the feed's state file."""

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """Returns whether the tracker lacks a line of metrics.jsonl that an earlier launch wrote.

        `next_step` is as in `start`. An evaluation's line follows the line of its step, and has the
        same `step`. So it is counted here as of the next step.
        """
        return step + is_evaluation >= next_step

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """Sends a line of metrics.jsonl, which has `step`, and some or no rollouts of the step."""

    def finish(self) -> None:
        """Sends what is left, and closes the tracker's run."""


@dataclass
class TrackerFeed:
    """Sends the lines of `<run_dir>/metrics.jsonl`, which serves as a queue, to one tracker.

    Each tracker has a feed and a daemon thread of its own, so that a tracker that hangs delays
    neither another one nor the run. The state file `<run_dir>/NAME.json` has the tracker's id of
    the run and the first step that the tracker lacks. A resumed run sends what the tracker missed,
    the steps that are made again, and what the tracker may have lost by a kill (`settles_s`). An
    exception (no package, no key, no network, a full disk) ends the feed with a warning.
    """

    run_dir: Path
    tracker: Tracker
    rollouts_every_steps: int = 0

    def __post_init__(self) -> None:
        """Reads the state file, and starts the thread."""
        self._metrics = self.run_dir / "metrics.jsonl"
        self._state = self.run_dir / f"{self.tracker.name}.json"
        self._id, next_step = _read_state(self._state)
        # What is in the file already was written by an earlier launch, and the tracker may have it.
        self._known_bytes = self._metrics.stat().st_size if self._metrics.exists() else 0
        newest = next(read_metrics_backwards(self._metrics), {"step": -1})
        # If the run resumes from an older checkpoint, the lines after it were cut off the file.
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
        """Wakes the thread, because metrics.jsonl has a new line. Takes microseconds.

        Also warns, once, if the tracker has not answered a call for a minute.
        """
        self._news.set()
        # read the attribute only once, since the thread changes it
        called_at = self._called_at
        is_hanging = called_at is not None and time.monotonic() - called_at > ANSWER_S
        if is_hanging and not self._has_warned:
            self._has_warned = True
            self._warn(f"has not answered for {ANSWER_S:.0f} s; the run goes on without it")

    def end(self, has_ended: bool = True) -> None:
        """Tells the thread that no more lines come. `has_ended` is not used here.

        It is there because ReportProcess, which is called in the same way, needs it.
        """
        self._ended.set()
        self._news.set()

    def finish(self, timeout_s: float) -> None:
        """Waits up to `timeout_s` for the tracker to take the lines that are left.

        Lines that are still left after that are sent when the run is resumed.
        """
        self.end()
        self._thread.join(max(timeout_s, 0))
        if self._thread.is_alive():
            self._warn(f"did not finish within {max(timeout_s, 0):.3g} s")

    def _warn(self, problem: str) -> None:
        """Logs that the tracker has a problem, and that metrics.jsonl lacks nothing."""
        _log.warning("%s %s; metrics.jsonl is complete", self.tracker.title, problem)

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
            self._warn(f"is off from here on ({type(error).__name__}: {error})")

    def _call(self, method: Callable[..., None], *arguments: object) -> None:
        """Calls a method of the tracker. Meanwhile `_called_at` is the time at which it began."""
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
        """Returns rollouts of the step of a metrics line, for the tracker to show with it.

        Returns none if the step is not due (`rollouts_every_steps`), if the line is an
        evaluation's, or if the step's dump cannot be read. The dump is written before the line.
        """
        every_steps = self.rollouts_every_steps
        step = metrics["step"]
        if every_steps and step % every_steps == 0 and not is_evaluation(metrics):
            try:
                return shown_rollouts(self.run_dir, step)
            except ConfigError as error:
                _log.warning("%s gets no rollouts of step %d: %s", self.tracker.title, step, error)
        return ()

    def _settle(self, accepted_until: float) -> None:
        """Saves that the tracker can no longer lose the lines that it accepted until that time.

        `accepted_until` is on the monotonic clock.
        """
        while self._unsettled and self._unsettled[0][0] <= accepted_until:
            self._next_step = self._unsettled.popleft()[1]
        self._save_state()

    def _save_state(self) -> None:
        """Writes the state file. An error of the disk is ignored."""
        state = {"id": self._id, "next_step": self._next_step}
        # if the disk is full, lines may be sent twice later, which is better than not at all
        with suppress(OSError):
            write_durably(self._state, json.dumps(state).encode())


def _read_state(path: Path) -> tuple[str, int]:
    """Returns (the tracker's id of the run, the first step that it lacks) from the state file.

    If the file is not usable, the id is new and the step is 0.
    """
    try:
        state = json.loads(path.read_bytes())
        return str(state["id"]), int(state["next_step"])
    except (OSError, ValueError, TypeError, KeyError):
        return secrets.token_hex(8), 0


# The rollouts that trackers show.


def shown_rollouts(run_dir: Path, step: int) -> list[ShownRollout]:
    """Returns at most MAX_ROLLOUTS rollouts of a step's dump, evenly spread over it.

    Broken lines are skipped. Raises ConfigError if a file cannot be read.
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
    """Returns at most `max_lines` of the lines, at even distances.

    Never holds more than twice as many in memory: whenever there are so many, every second one is
    dropped.
    """
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
    fields = {
        "prompt": prompt_text,
        "completion": record.completion,
        "reward": record.reward,
        **{f"reward/{show_text(name)}": value for name, value in record.rewards.items()},
        "advantage": record.advantage,
        "finish_reason": record.finish_reason,
        # how an episode ended
        "status": record.status,
        # the column that most likely holds the right answer, as "name=value"
        "answer": gold_answer(record.columns),
        "position": record.position,
        "sample": record.sample,
    }
    shown = {name: show_text(v) if isinstance(v, str) else v for name, v in fields.items()}
    return ShownRollout(messages, shown)


def _show_message(message: Any) -> dict[str, str]:
    """Returns a chat message's role and content as text.

    Other fields of the message, such as tool calls, follow its content as JSON.
    """
    fields = {**message} if isinstance(message, dict) else {"content": message}
    role = fields.pop("role", "unknown")
    texts = [fields.pop("content", None), {name: value for name, value in fields.items() if value}]
    content = "\n".join(
        text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
        for text in texts
        if text
    )
    return {"role": show_text(f"{role}")[:40], "content": show_text(content)}


def show_text(text: str) -> str:
    r"""Returns the text, shortened to MAX_TEXT_CHARS with a note of its length.

    Characters that a browser would obey become escapes, such as "\u202e"."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:MAX_TEXT_CHARS]} ... ({len(text)} characters)"
    return _OBEYED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def as_table(rollouts: Sequence[ShownRollout]) -> tuple[list[str], list[list[Any]]]:
    """Returns (names of columns, rows) of a table with one row for each rollout.

    Cells are texts, numbers or None.
    """
    columns = list(dict.fromkeys(name for rollout in rollouts for name in rollout.fields))
    return columns, [[rollout.fields.get(name) for name in columns] for rollout in rollouts]


# The trackers.


@dataclass
class WandbRun(Tracker):
    """W&B as a tracker.

    W&B refuses steps below its own counter, so we leave the counter alone: `step` is logged as a
    metric, and is the x-axis of the others."""

    run_dir: Path
    options: LoggingConfig
    config: dict[str, Any]
    """What W&B shows as the config of the run."""

    name = "wandb"
    title = "W&B"
    # wandb 0.31 writes its file and sends lines every 15 s, in a process that ends with ours. A
    # line that is sent twice is drawn over itself.
    settles_s = 45.0

    def start(self, run_id: str, next_step: int) -> None:
        """Opens W&B's run, or goes on with it if an earlier launch has opened it."""
        import wandb

        # console="off": capturing it would put W&B between the training and its terminal, and
        # logs/rank_0.log has every line. login_timeout: without a key W&B may ask for one at a
        # terminal, but not for ever.
        settings = wandb.Settings(init_timeout=120, login_timeout=30, console="off", silent=True)
        mode = self.options.wandb
        self._run = wandb.init(
            project=self.options.wandb_project,
            name=self.run_dir.name,
            dir=str(self.run_dir),
            id=run_id,
            resume="allow",
            # None: WANDB_MODE, else online
            mode=mode if isinstance(mode, str) else None,
            config=self.config,
            settings=settings,
        )
        _log.info("W&B: %s", self._run.url or self._run.dir)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """Sends a line to W&B. The rollouts become a table."""
        if rollouts:
            import wandb

            columns, rows = as_table(rollouts)
            metrics = metrics | {"rollouts": wandb.Table(columns=columns, data=rows)}
        self._run.log(metrics)

    def finish(self) -> None:
        """Waits until W&B has sent everything, and closes its run."""
        self._run.finish()


@dataclass
class TensorboardRun(Tracker):
    """TensorBoard as a tracker: writes one event file per launch.

    TensorBoard reads all files of the folder as one run, in the order of their names. Each file
    begins with a START event, at which TensorBoard drops what earlier files have from the event's
    step on. So a step that is made again by a resumed run is shown once.
    """

    run_dir: Path
    config: dict[str, Any]
    """What is shown, as a text, as the config of the run."""

    name = "tensorboard"
    title = "TensorBoard"

    def start(self, run_id: str, next_step: int) -> None:
        """Creates the launch's event file, with a START event and the config as a text."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event_type = Event
        folder = self.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        earlier = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
        # a clock may be set back, but the names must stay in the order of the launches
        unix_s = max([int(time.time()), *(1 + int(text) for text in earlier if text.isdecimal())])
        path = folder / f"events.out.tfevents.{unix_s:010d}.{socket.gethostname()}"
        self._file = RecordWriter(path.open("xb"))
        self._write(file_version="brain.Event:2")
        first_step = max(next_step - 1, 0)
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))
        config = yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True)
        self._write(step=first_step, summary={"value": [_text_value("config", [[config]])]})
        _log.info("TensorBoard: %s", folder)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """Returns whether the tracker lacks a line; see the base class."""
        # The START event has dropped the step before the next one too, so it is sent again.
        return step >= next_step - 1

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """Writes an event with the line's numbers. The rollouts become a table of text."""
        values: list[Any] = [
            {"tag": name, "simple_value": value}
            for name, value in metrics.items()
            if type(value) in (int, float) and name != "step"
        ]
        if rollouts:
            columns, rows = as_table(rollouts)
            values.append(_text_value("rollouts", [columns, *rows]))
        self._write(step=metrics["step"], summary={"value": values})

    def finish(self) -> None:
        """Closes the event file."""
        self._file.close()

    def _write(self, **fields: Any) -> None:
        """Writes an event with these fields of TensorBoard's Event message."""
        event = self._event_type(wall_time=time.time(), **fields)
        self._file.write(event.SerializeToString())
        self._file.flush()


def _text_value(tag: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Returns a value for an event's summary, which TensorBoard's text plugin shows as a table."""
    from tensorboard.plugins.text.metadata import create_summary_metadata

    cells = [_escape(cell).encode("utf-8", "backslashreplace") for row in rows for cell in row]
    shape = {"dim": [{"size": len(rows)}, {"size": len(rows[0])}]}
    tensor = {"dtype": "DT_STRING", "string_val": cells, "tensor_shape": shape}
    return {"tag": tag, "metadata": create_summary_metadata(tag, ""), "tensor": tensor}


def _escape(cell: Any) -> str:
    """Returns a table's cell as a Markdown code block, so that its text is shown as it is.

    TensorBoard's text plugin renders Markdown, and would fetch images that a completion names. Four
    spaces before each line make a code block.
    """
    if type(cell) is float:
        cell = f"{cell:.6g}"
    text = "" if cell is None else str(cell)
    return "\n".join(f"    {line}" for line in text.split("\n"))


@dataclass
class TrackioRun(Tracker):
    """trackio as a tracker.

    trackio writes in the background twice a second, so a kill can lose lines that it had accepted.
    To find out which lines it lacks, a launch reads trackio's own file and not our state file.
    Rollouts are sent as its traces, whose text trackio shows as it is; the text of its tables it
    would interpret.
    """

    run_dir: Path
    project: str
    config: dict[str, Any]
    """What trackio shows as the config of the run."""

    name = "trackio"
    title = "trackio"
    stored_lines: set[tuple[int, bool]] | None = None
    """(step, is_evaluation) of the lines that trackio has; None if that is not known."""

    def start(self, run_id: str, next_step: int) -> None:
        """Opens trackio's run, or goes on with it, and reads which lines it has already."""
        import trackio

        self._run = trackio.init(
            project=self.project,
            # the folders of two runs may have the same name
            name=f"{self.run_dir.name}-{run_id[:6]}",
            config=self.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if not (os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")):
            self.stored_lines = _read_stored_lines(self.project, self._run.id)

    def lacks(self, step: int, is_evaluation: bool, next_step: int) -> bool:
        """Returns whether trackio lacks a line, by its own file if that can be read."""
        if self.stored_lines is None:
            return super().lacks(step, is_evaluation, next_step)
        return (step, is_evaluation) not in self.stored_lines

    def log(self, metrics: dict[str, Any], rollouts: Sequence[ShownRollout]) -> None:
        """Sends a line to trackio. Each rollout becomes one of its traces."""
        import trackio

        values = {
            name: value for name, value in metrics.items() if name != "step" and value is not None
        }
        if rollouts:
            values["rollouts"] = []
        for messages, fields in rollouts:
            # prompt and completion are messages
            metadata = {name: fields[name] for name in fields if name not in _MESSAGE_FIELDS}
            values["rollouts"].append(trackio.Trace(messages, metadata=metadata))
        self._run.log(values, step=metrics["step"])

    def finish(self) -> None:
        """Waits until trackio has written everything, and closes its run."""
        import trackio

        trackio.finish()


def _read_stored_lines(project: str, run_id: str) -> set[tuple[int, bool]] | None:
    """Returns (step, is_evaluation) of each line that trackio's SQLite file has for a run.

    Reads the schema that trackio documents. Returns None if there is no file, or if it has another
    schema.
    """
    from trackio.sqlite_storage import SQLiteStorage

    uri = f"{SQLiteStorage.get_project_db_path(project).absolute().as_uri()}?mode=ro"
    query = "SELECT step, substr(metrics, 1, 7) FROM metrics WHERE run_id = ?"
    with suppress(sqlite3.Error), closing(sqlite3.connect(uri, uri=True)) as connection:
        rows = connection.execute(query, (run_id,))
        return {(step, start in (b'{"eval/', '{"eval/')) for step, start in rows}
    return None
