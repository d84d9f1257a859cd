"""Completions in full: the best and the worst of a step, those of a prompt, an episode's turns."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.charts import MAX_FINITE, number
from grpo_spmd.tools.show.dump import (
    as_json,
    as_text,
    error_lines,
    find_dumped_step,
    message_text,
)
from grpo_spmd.tools.show.token_differences import TokenDifferences
from grpo_spmd.tools.terminal import Line, Styles, Terminal, width_of

_INDENT = 2
_MAX_TEXT_COLUMNS = 120
# Lines of a text that is not shown in full.
_HEAD_LINES = 14
_TAIL_LINES = 10
_MAX_MESSAGES = 40
_MAX_COLUMNS = 12  # of a data row
_FINISH_REASONS = {"stop": "ended by itself", "length": "cut off"}


@dataclass(frozen=True)
class View:
    """How completions are shown."""

    terminal: Terminal
    is_full: bool  # nothing is left out of texts and lists

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
        for record in run.files.rollouts(step, errors=errors):
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
    columns = list(record.columns.items())
    for name, value in columns if view.is_full else columns[:_MAX_COLUMNS]:
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
