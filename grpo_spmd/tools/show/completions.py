"""Shows recorded completions in the terminal, whole or as excerpts.

The file has three parts: helpers that all pages share (filters of raw lines, texts of messages,
errors of reading); TokenDifferences, which describes and colours tokens by the difference between
the logprobs of engine and policy; and the pages of the best and the worst completions of a step.
"""

from __future__ import annotations

import heapq
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from rich.text import Text

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.overview import MAX_FINITE, number
from grpo_spmd.tools.terminal import Line, Styles, Terminal, width_of

_MAX_LISTED_STEPS = 8
LineFilter = Callable[[bytes], bool]
_MAX_COLOURED_CHARS = 1 << 24
_STYLES = ((100.0, "far"), (10.0, "over"), (1.0, "near"))  # (from so many bounds on, style)
_INDENT = 2
_MAX_TEXT_COLUMNS = 120
# Lines of a text that is not shown in full.
_HEAD_LINES = 14
_TAIL_LINES = 10
_MAX_MESSAGES = 40
_MAX_COLUMNS = 12  # of a data row
_FINISH_REASONS = {"stop": "ended by itself", "length": "cut off"}


def error_lines(errors: ReadErrors, terminal: Terminal) -> Iterator[Line]:
    """Yields what could not be read from a run's dumps; nothing if all was read."""
    if errors.num_missing:
        warning = f"{errors.num_missing} rollouts of the step are not in its files"
        warning += "; each node wrote one file"
        yield from terminal.excerpt(warning, 2, styles="warning")
    if errors.num:
        more = f" (and {errors.num - 1} more)" if errors.num > 1 else ""
        yield from terminal.excerpt(f"not read{more}: {errors.first}", 3, styles="warning")


def contains_text(text: str) -> LineFilter | None:
    """Returns a filter for raw lines that may contain `text` in upper or lower case.

    Returns None if raw bytes cannot tell, because JSON may escape the text's characters.
    """
    # JSON may write other characters as escapes or as themselves.
    if not text.isascii():
        return None
    # As JSON writes the text: quotes and control characters are escaped there.
    needle = json.dumps(text)[1:-1].lower().encode()
    return lambda line: needle in line.lower()


def text_pattern(text: str) -> re.Pattern[str]:
    """Returns a pattern for `text` in upper or lower case; ASCII text matches ASCII only."""
    return re.compile(re.escape(text), re.IGNORECASE | (re.ASCII if text.isascii() else 0))


def has_row(row: int) -> LineFilter:
    """Returns a filter for raw lines from that row of the data set."""
    # After the number something else must follow, or row 1 would match row 10.
    pattern = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: pattern.search(line) is not None


def prompt_text(prompt: str | Sequence[Any]) -> str:
    """Returns a prompt as one text: a string, or the contents of its chat messages."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))


def message_text(message: object) -> str:
    """Returns the content of a chat message as text; as JSON if it is no text."""
    content = message.get("content") if isinstance(message, Mapping) else message
    # Content may be a list of parts, as in multimodal chats.
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(as_text(item["text"]) for item in content)
    return "" if content is None else as_text(content)


def as_text(value: object) -> str:
    """Returns a text unchanged, anything else as JSON."""
    return value if isinstance(value, str) else as_json(value)


def as_json(value: object) -> str:
    """Returns JSON of a value from a dump."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested more deeply than JSON can be written
        return "..."


def describe_steps(steps: Sequence[int]) -> str:
    """Returns in words which steps have completions."""
    if not steps:
        return "there are none of any step (logging.rollouts_every_steps)"
    names = list(map(str, steps[:_MAX_LISTED_STEPS]))
    if len(steps) > _MAX_LISTED_STEPS:
        names += ["...", str(steps[-1])]
    return f"there are those of the steps {', '.join(names)}"


def find_dumped_step(run: RecordedRun, step: int | None) -> int:
    """Returns `step`, or the newest step with completions if `step` is None.

    Raises ConfigError if that step has no completions.
    """
    steps = run.dumped_steps
    wanted = steps[-1] if step is None and steps else step
    if wanted is None or wanted not in steps:
        problem = "no completions" if step is None else f"--step {step}: no completions of it"
        raise ConfigError(f"{problem} are in {run.folder}/rollouts; {describe_steps(steps)}")
    return wanted


class TokenDifferences:
    """The recorded token scores of some rollouts of one step."""

    def __init__(
        self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], errors: ReadErrors
    ) -> None:
        # The bound of a step's mean. A single token may exceed it by far in a run that is fine.
        self._bound, _ = bounds_of(run.dtype, None, None)
        self._run = run
        rollout_ids = {record.rollout_id for record in records}
        self._scores = {
            scores.rollout_id: scores
            for _, scores in run.files.scores(step, errors)
            if scores.rollout_id in rollout_ids
        }

    @property
    def legend(self) -> str:
        """The meaning of the colours; "" if the run recorded no scores."""
        if not self._scores or not self._pieces:
            return ""
        near = f"policy and engine {number(self._bound)} nats apart or more"
        return f"tokens in yellow: {near}; in red: {number(10 * self._bound)}"

    def is_coloured(self, record: RolloutRecord) -> bool:
        """Returns True if any token has a colour."""
        scores = self._scores_of(record)
        # Written so that NaN counts as a difference.
        return scores is not None and not bool((np.abs(scores.difference) < self._bound).all())

    def describe(self, record: RolloutRecord) -> str:
        """Returns mean and largest difference and their token; "" if nothing was recorded."""
        scores = self._scores_of(record)
        if scores is None or not len(scores.difference):
            return ""
        sizes = np.where(np.isfinite(scores.difference), np.abs(scores.difference), np.inf)
        index = int(sizes.argmax())
        pieces = self._pieces.decode(record.completion_ids) if self._pieces else []
        piece = f" {pieces[index]!r:.40}" if index < len(pieces) and pieces[index] else ""
        mean = math.nan if scores.difference_mean is None else scores.difference_mean
        largest = math.nan if scores.difference_max is None else scores.difference_max
        figures = f"mean {number(mean)}, largest {number(largest)} nats"
        return f"policy - engine: {figures} (token {index + 1}{piece})"

    def coloured_text(self, record: RolloutRecord) -> tuple[str, Styles]:
        """Returns the completion as the text of its tokens, and the style of each character.

        An episode's turns stand below each other. If the tokens do not make the recorded text,
        that text is returned without colours.
        """
        scores = self._scores_of(record)
        if scores is None or self._pieces is None:
            return record.completion, ""
        pieces = self._pieces.decode(record.completion_ids)
        if sum(map(len, pieces)) > _MAX_COLOURED_CHARS:
            return record.completion, ""
        token_styles = [_style(size) for size in np.abs(scores.difference) / self._bound]
        # A single turn is one text; an episode has one for each sampled turn.
        num_tokens = [len(pieces)]
        if record.status is not None:
            num_tokens = [len(turn["token_ids"]) for turn in record.turns if turn["sampled"]]
        turns: list[str] = []
        styles: list[str] = []
        begin = 0
        for end in np.cumsum(num_tokens).tolist():
            turns.append("".join(pieces[begin:end]))
            for piece, style in zip(pieces[begin:end], token_styles[begin:end], strict=False):
                styles += [style] * len(piece)
            styles.append("")  # the line break after a turn
            begin = end
        text = "\n".join(turns)
        if record.status is None and not text.strip().startswith(record.completion.strip()):
            return record.completion, ""
        return text, styles[:-1]

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        return read_pieces(self._run.folder)

    def _scores_of(self, record: RolloutRecord) -> TokenScores | None:
        scores = None if record.rollout_id is None else self._scores.get(record.rollout_id)
        # Scores of another length are from another run's rollout.
        is_same = scores is not None and len(scores.difference) == len(record.completion_ids)
        return scores if is_same else None


def _style(num_bounds: float) -> str:
    # NaN is beyond all bounds.
    return next((style for bound, style in _STYLES if not num_bounds < bound), "")


@dataclass(frozen=True)
class View:
    """How completions are shown."""

    terminal: Terminal
    is_full: bool  # nothing is left out of texts and lists

    def limit(self, num: int) -> int | None:
        """Returns the end of a slice of a list that is not shown in full."""
        return None if self.is_full else num

    def excerpt(
        self, text: str, num_head: int, num_tail: int, indent: int, styles: Styles = ""
    ) -> Iterator[Line]:
        if self.is_full:
            num_head = len(text) + 1
        hint = " (--full shows them)"
        return self.terminal.excerpt(text, num_head, num_tail, indent, styles, hint)

    def text(self, text: str, styles: Styles = "") -> Iterator[Line]:
        """Yields a text that a model or a data set wrote, behind a margin."""
        # Very long lines are hard to read, so prose does not use a wide terminal.
        terminal = self.terminal.resized(min(self.terminal.columns, _MAX_TEXT_COLUMNS))
        view = View(terminal, self.is_full)
        return view.excerpt(text, _HEAD_LINES, _TAIL_LINES, 2 * _INDENT, styles)

    def note(self, text: str, style: str) -> Line:
        """Returns one indented line."""
        fitted = self.terminal.fit(text, self.terminal.columns - _INDENT, style)
        return Text.assemble(" " * _INDENT, fitted)


def ranked_completions(
    run: RecordedRun, step: int | None, num: int, is_best: bool, view: View
) -> Iterator[Line]:
    """Yields the `num` completions of a step with the highest or the lowest reward.

    Equal ones are ordered by their distance from the group's mean; those without a reward come
    last. Raises ConfigError if the step has no completions.
    """
    step = find_dumped_step(run, step)
    errors = ReadErrors()
    # Counted while they pass, since the dump is read only once.
    num_records = 0

    def counted_records() -> Iterator[RolloutRecord]:
        nonlocal num_records
        for _, record in run.files.rollouts(step, errors=errors):
            num_records += 1
            yield record

    # A heap, because all completions of a step may not fit into memory.
    records = heapq.nsmallest(num, counted_records(), key=lambda record: _rank(record, is_best))
    differences = TokenDifferences(run, step, records, errors)
    word = "best" if is_best else "worst"
    for rank, record in enumerate(records, start=1):
        title = f"{word} {rank} of {num_records}, step {step}"
        yield from completion_lines(record, title, differences, view)
        yield Text()
    yield from legend_lines(differences, view)
    yield from error_lines(errors, view.terminal)
    hint = f"more: --step {step}   --prompt ROW   --grep TEXT" + "   --full" * (not view.is_full)
    yield view.terminal.fit(hint, view.terminal.columns, "dim")


def _rank(record: RolloutRecord, is_best: bool) -> tuple[bool, float, float, int, int]:
    sign = -1.0 if is_best else 1.0
    # Other people's files may hold NaN, which has no place in an order.
    reward = _finite(record.reward)
    advantage = sign * (_finite(record.advantage) or 0.0)
    return reward is None, sign * (reward or 0.0), advantage, record.sample, record.position


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and abs(value) <= MAX_FINITE else None


def completion_lines(
    record: RolloutRecord,
    title: str,
    differences: TokenDifferences,
    view: View,
    has_prompt: bool = True,
) -> Iterator[Line]:
    """Yields one completion with its figures, its prompt and what went wrong."""
    terminal = view.terminal
    title += f", row {number(record.row)}, sample {number(record.sample)}"
    yield terminal.fit(title, terminal.columns, "title")
    yield from _flow(_facts(record), terminal)
    description = differences.describe(record)
    if description:
        yield from terminal.excerpt(description, 3, indent=_INDENT)
    if has_prompt:
        yield from prompt_lines(record, view)
    if record.messages:
        yield from _message_lines(record.messages, view)
    text: str = record.completion
    styles: Styles = ""
    if terminal.has_colour:
        # Without colours the recorded text is shown, not the tokens' text.
        text, styles = differences.coloured_text(record)
    if not record.messages:
        yield view.note("completion", "role")
        yield from view.text(text, styles)
    elif terminal.has_colour and differences.is_coloured(record):
        yield view.note("sampled tokens", "role")
        yield from view.text(text, styles)
    error = record.environment.get("error")
    if error:
        yield view.note(f"failed: {error}", "bad")


def legend_lines(differences: TokenDifferences, view: View) -> Iterator[Line]:
    if view.terminal.has_colour and differences.legend:
        yield from view.terminal.excerpt(differences.legend, 2, styles="dim")


def prompt_lines(record: RolloutRecord, view: View) -> Iterator[Line]:
    """Yields the prompt and the other columns of its data row."""
    if isinstance(record.prompt, str):
        yield view.note("prompt", "role")
        yield from view.text(record.prompt)
    else:
        yield from _message_lines(record.prompt, view)
    for name, value in list(record.columns.items())[: view.limit(_MAX_COLUMNS)]:
        yield from view.excerpt(f"{name} = {as_text(value)}", 3, 0, 2 * _INDENT, "dim")


def _facts(record: RolloutRecord) -> Iterator[str]:
    """Yields the reward, its components, and how sampling ended."""
    yield f"reward {number(record.reward)}"
    sign = "+" if (record.advantage or 0) > 0 else ""
    yield f"advantage {sign}{number(record.advantage)}"
    for name, value in record.rewards.items():
        status = record.statuses.get(name, "ok")
        yield f"{name} {number(value)}" + (f" ({status})" if status != "ok" else "")
    ending = _FINISH_REASONS.get(record.finish_reason, record.finish_reason)
    yield f"{len(record.completion_ids)} tokens, {ending}"
    if record.status is not None:
        num_turns = sum(bool(turn.get("sampled")) for turn in record.turns)
        yield f"{num_turns} turns, {record.status}"
    if record.rollout_id is None:
        yield "not trained on"
    for name, values in record.extra.items():
        if isinstance(values, Mapping):
            yield from (f"{name}/{column}={as_json(value)}" for column, value in values.items())


def _flow(facts: Iterable[str], terminal: Terminal) -> Iterator[Line]:
    """Yields lines with as many whole facts on each as fit."""
    line = Text(" " * _INDENT)
    num_columns = _INDENT
    for fact in facts:
        # A reward's name may be longer than the terminal is wide.
        cell = terminal.fit(fact, terminal.columns - _INDENT)
        width = width_of(cell.plain)
        if num_columns + width > terminal.columns:
            yield line
            line = Text(" " * _INDENT)
            num_columns = _INDENT
        line.append_text(cell).append("   ")
        num_columns += width + 3
    yield line


def _message_lines(messages: Sequence[Any], view: View) -> Iterator[Line]:
    """Yields a conversation; the middle of a long one is left out."""
    # The beginning has the task, the end has the answer.
    half = _MAX_MESSAGES // 2
    num_hidden = 0 if view.is_full else max(0, len(messages) - 2 * half)
    for index, message in enumerate(messages):
        if num_hidden and half <= index < half + num_hidden:
            if index == half:
                yield view.note(f"{num_hidden} messages left out (--full shows them)", "dim")
            continue
        fields = message if isinstance(message, Mapping) else {}
        speaker = f"{as_text(fields.get('role', 'message'))} {as_text(fields.get('name', ''))}"
        yield view.note(speaker.rstrip(), "role")
        # The names that chat templates use for thoughts.
        for name in ("reasoning_content", "thinking"):
            thought = fields.get(name)
            if isinstance(thought, str) and thought:
                yield from view.text(thought, "dim")
        content = message_text(message)
        if content:
            yield from view.text(content)
        calls = fields.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            yield from view.text(_describe_call(call))


def _describe_call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return f"calls {as_json(call)}"
    return f"calls {as_text(function.get('name'))}({as_text(function.get('arguments'))})"
