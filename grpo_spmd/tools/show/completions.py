"""Completions in full: the best, the worst, those of a prompt; an episode as a conversation."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_spmd.observe.rollout_reader import RolloutRecord
from grpo_spmd.tools.report.run import RecordedRun
from grpo_spmd.tools.show.dump import (
    Scored,
    Unread,
    as_json,
    as_text,
    content_of,
    dumped_step,
    rollouts_of,
    unread_lines,
)
from grpo_spmd.tools.show.paper import Line, Paper, Span, Styles, number, width_of

_MARGIN, _WIDEST_TEXT = 2, 120
_HEAD, _TAIL = 14, 10  # lines of a text that is not shown in full
_MOST_MESSAGES, _MOST_COLUMNS = 40, 12


@dataclass(frozen=True)
class Look:
    """How completions are shown."""

    paper: Paper
    is_full: bool
    has_colour: bool

    @property
    def lines(self) -> tuple[int, int]:
        return (1 << 40, 0) if self.is_full else (_HEAD, _TAIL)

    def text(self, text: str, styles: Styles = "") -> Iterator[Line]:
        """`text` as it was written, behind a margin; `styles`: of its characters, where there are colours."""
        paper = Paper(min(self.paper.columns, _WIDEST_TEXT), self.paper.encoding)
        yield from paper.excerpt(text, *self.lines, 2 * _MARGIN, styles, " (--full shows them)")


def ranked_lines(
    run: RecordedRun, step: int | None, num: int, is_best: bool, look: Look
) -> Iterator[Line]:
    """The `num` completions of a step with the most or the least reward. Of equal ones those come first that are the
    furthest from their group; those without a reward last. Raises ConfigError where the step has none."""
    step, unread = dumped_step(run, step), Unread()
    counted = _Counted(rollouts_of(run.folder, step, unread))
    sign = -1.0 if is_best else 1.0
    chosen = heapq.nsmallest(num, counted, key=lambda record: _place(record, sign))
    scored = Scored(run, step, chosen, unread)
    for place, record in enumerate(chosen, start=1):
        which = f"{'best' if is_best else 'worst'} {place} of {counted.num}"
        yield from completion_lines(record, f"{which}, step {step}", scored, look)
        yield []
    yield from legend_lines(scored, look)
    yield from unread_lines(unread, look.paper)
    hint = f"more: --step {step}   --prompt ROW   --grep TEXT" + "   --full" * (not look.is_full)
    yield [look.paper.fitted(hint, look.paper.columns, "dim")]


class _Counted:
    """Counts what passes."""

    def __init__(self, records: Iterable[RolloutRecord]) -> None:
        self._records, self.num = records, 0

    def __iter__(self) -> Iterator[RolloutRecord]:
        for record in self._records:
            self.num += 1
            yield record


def _place(record: RolloutRecord, sign: float) -> tuple[bool, float, float, int, int]:
    reward, advantage = record.reward, record.advantage
    is_known = reward is not None and abs(reward) <= 1e300
    own = sign * float(reward) if is_known and reward is not None else 0.0
    far = sign * float(advantage) if advantage is not None and abs(advantage) <= 1e300 else 0.0
    return not is_known, own, far, record.sample, record.position


def completion_lines(
    record: RolloutRecord, title: str, scored: Scored, look: Look, has_prompt: bool = True
) -> Iterator[Line]:
    paper = look.paper
    yield [
        paper.fitted(
            f"{title}, row {number(record.row)}, sample {number(record.sample)}",
            paper.columns,
            "title",
        )
    ]
    yield from _facts(record, paper)
    if said := scored.said_of(record):
        yield from paper.excerpt(said, 3, 0, _MARGIN)
    if has_prompt:
        yield from prompt_lines(record, look)
    if record.messages:
        yield from _messages(record.messages, look)
    else:
        yield [Span(" " * _MARGIN), Span("completion", "role")]
        yield from look.text(
            *(scored.coloured(record) if look.has_colour else (record.completion,))
        )
    if record.messages and look.has_colour and scored.is_apart(record):
        yield [Span(" " * _MARGIN), Span("sampled tokens", "role")]
        yield from look.text(*scored.coloured(record))
    if error := record.environment.get("error"):
        yield [
            Span(" " * _MARGIN),
            paper.fitted(f"failed: {error}", paper.columns - _MARGIN, "bad"),
        ]


def legend_lines(scored: Scored, look: Look) -> Iterator[Line]:
    if look.has_colour and scored.legend:
        yield from look.paper.excerpt(scored.legend, 2, 0, 0, "dim")


def prompt_lines(record: RolloutRecord, look: Look) -> Iterator[Line]:
    """The prompt, and the other columns of its row."""
    paper = look.paper
    if isinstance(record.prompt, str):
        yield [Span(" " * _MARGIN), Span("prompt", "role")]
        yield from look.text(record.prompt)
    else:
        yield from _messages(record.prompt, look)
    columns = list(record.columns.items())
    for name, value in columns if look.is_full else columns[:_MOST_COLUMNS]:
        text = f"{name} = {as_text(value)}"
        yield from paper.excerpt(
            text, *(look.lines if look.is_full else (3, 0)), 2 * _MARGIN, "dim"
        )


def _facts(record: RolloutRecord, paper: Paper) -> Iterator[Line]:
    """Reward, what it is made of, and how sampling ended."""
    sign = "+" if (record.advantage or 0) > 0 else ""
    facts = [f"reward {number(record.reward)}", f"advantage {sign}{number(record.advantage)}"]
    for name, value in record.rewards.items():
        status = record.statuses.get(name, "ok")
        facts.append(f"{name} {number(value)}" + (f" ({status})" if status != "ok" else ""))
    ended = {"stop": "ended by itself", "length": "cut off"}.get(
        record.finish_reason, record.finish_reason
    )
    facts.append(f"{len(record.completion_ids)} tokens, {ended}")
    if record.status is not None:
        facts.append(
            f"{sum(bool(turn.get('sampled')) for turn in record.turns)} turns, {record.status}"
        )
    if record.rollout_id is None:
        facts.append("not trained on")
    for name, values in record.extra.items():
        facts += [f"{name}/{column}={as_json(value)}" for column, value in _items(values)]
    yield from _flowing(facts, paper)


def _flowing(facts: Iterable[str], paper: Paper) -> Iterator[Line]:
    """As many on a line as have room, each whole."""
    line, used = [Span(" " * _MARGIN)], _MARGIN
    for fact in facts:
        cell = paper.fitted(fact, paper.columns - _MARGIN)
        width = width_of(cell.shown)
        if used + width > paper.columns:
            yield line
            line, used = [Span(" " * _MARGIN)], _MARGIN
        line += [cell, Span("   ")]
        used += width + 3
    yield line


def _items(values: object) -> Iterable[tuple[Any, Any]]:
    return values.items() if isinstance(values, Mapping) else ()


def _messages(messages: Sequence[Any], look: Look) -> Iterator[Line]:
    """Who said what, in their order; the middle of a long conversation is left out."""
    half = _MOST_MESSAGES // 2
    for place, message in enumerate(messages):
        if not look.is_full and half <= place < len(messages) - half:
            if place == half:
                said = f"{len(messages) - 2 * half} messages left out (--full shows them)"
                yield [
                    Span(" " * _MARGIN),
                    look.paper.fitted(said, look.paper.columns - _MARGIN, "dim"),
                ]
            continue
        fields = message if isinstance(message, Mapping) else {}
        named = [
            as_text(fields.get(name, otherwise))
            for name, otherwise in (("role", "message"), ("name", ""))
        ]
        yield [
            Span(" " * _MARGIN),
            look.paper.fitted(" ".join(named).rstrip(), look.paper.columns - _MARGIN, "role"),
        ]
        for name in ("reasoning_content", "thinking"):
            if isinstance(thought := fields.get(name), str) and thought:
                yield from look.text(thought, "dim")
        if content := content_of(message):
            yield from look.text(content)
        calls = fields.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            yield from look.text(_call(call))


def _call(call: object) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return f"calls {as_json(call)}"
    return f"calls {as_text(function.get('name'))}({as_text(function.get('arguments'))})"
