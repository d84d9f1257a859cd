"""Shows recorded completions in the terminal, whole or as excerpts.

The file has three parts: helpers that all pages share (filters for lines of dumps, texts of
messages, read errors); TokenDifferences, which describes and colours tokens by the difference
between the logprobs of engine and policy; and the pages of the best and the worst completions of a
step.
"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces
from grpo_spmd.tools.show.overview import is_drawable, number
from grpo_spmd.tools.terminal import Line, Styles, Terminal, width_of

_MAX_LISTED_STEPS = 8
# A function of a raw line of a dump, which returns False if the line need not be parsed.
LineFilter = Callable[[bytes], bool]
_MAX_COLOURED_CHARS = 1 << 24
# (factor, style): a token has the first style whose factor times the bound its difference reaches.
_STYLES = ((100.0, "far"), (10.0, "over"), (1.0, "near"))
_INDENT = 2
_MAX_TEXT_COLUMNS = 120
# How many lines of a long text are shown at its beginning and its end.
_HEAD_LINES = 14
_TAIL_LINES = 10
_MAX_MESSAGES = 40
_MAX_COLUMNS = 12  # of a row of the data set
_FINISH_REASONS = {"stop": "ended by itself", "length": "cut off"}


def error_lines(errors: ReadErrors, terminal: Terminal) -> Iterator[Line]:
    """Yields warnings about rollouts and lines of dumps that could not be read.

    Yields nothing if all were read."""
    if errors.num_missing:
        warning = f"{errors.num_missing} rollouts of the step are not in its files"
        yield from terminal.excerpt(f"{warning}; each node wrote one file", 2, styles="warning")
    if errors.num:
        warning = f"{errors.num} lines or files not read; the first: {errors.first}"
        yield from terminal.excerpt(warning, 3, styles="warning")


def contains_text(text: str) -> LineFilter | None:
    """Returns a filter that passes JSON lines which may contain `text`, in upper or lower case.

    Returns None if no filter is possible, so that every line must be parsed.
    """
    # JSON may write a character beyond ASCII as an escape or as itself.
    if not text.isascii():
        return None
    # The text as JSON writes it, with quotes and control characters escaped.
    needle = json.dumps(text)[1:-1].lower().encode()
    return lambda line: needle in line.lower()


def text_pattern(text: str) -> re.Pattern[str]:
    """Returns a pattern that finds `text` in upper or lower case.

    ASCII text matches ASCII only (no U+017F for s), as in `contains_text`.
    """
    return re.compile(re.escape(text), re.IGNORECASE | (re.ASCII if text.isascii() else 0))


def has_row(row: int) -> LineFilter:
    """Returns a filter that passes JSON lines of rollouts whose prompt is row `row` of the data."""
    # The number must end there, or row 1 would match row 10.
    pattern = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: pattern.search(line) is not None


def prompt_text(prompt: str | Sequence[Any]) -> str:
    """Returns a prompt as one text; the contents of a chat's messages are joined by newlines."""
    return prompt if isinstance(prompt, str) else "\n".join(map(message_text, prompt))


def message_text(message: object) -> str:
    """Returns the content of a chat message as text, or as JSON if it is no text."""
    content = message.get("content") if isinstance(message, Mapping) else message
    # Content may be a list of parts, as in multimodal chats.
    if isinstance(content, list) and all(isinstance(p, Mapping) and "text" in p for p in content):
        return "".join(as_text(item["text"]) for item in content)
    return "" if content is None else as_text(content)


def as_text(value: object) -> str:
    """Returns a string unchanged, and any other value of a dump as JSON."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):  # nested more deeply than JSON can be written
        return "..."


def describe_steps(steps: Sequence[int]) -> str:
    """Returns a text that lists `steps`, which have recorded completions; a long list is cut."""
    if not steps:
        return "no step has any (logging.rollouts_every_steps)"
    names = list(map(str, steps[:_MAX_LISTED_STEPS]))
    if len(steps) > _MAX_LISTED_STEPS:
        names += ["...", str(steps[-1])]
    return f"steps with completions: {', '.join(names)}"


def find_dumped_step(run: RecordedRun, step: int | None) -> int:
    """Returns `step`, or the newest step with completions if `step` is None.

    Raises ConfigError if that step has no completions.
    """
    steps = run.dumped_steps
    wanted = steps[-1] if step is None and steps else step
    if wanted is None or wanted not in steps:
        problem = (
            "no completions" if step is None else f"--step {step}: no completions of this step"
        )
        raise ConfigError(f"{problem} are in {run.folder}/rollouts; {describe_steps(steps)}")
    return wanted


class TokenDifferences:
    """The recorded differences between the policy's and the engine's logprobs of tokens.

    They are those of some rollouts of one step, and the run wrote them to token_scores/."""

    def __init__(
        self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], errors: ReadErrors
    ) -> None:
        """Reads the differences of the rollouts `records` of the step.

        Lines that cannot be read are counted in `errors`, to which this call adds.
        """
        # In nats. Tokens with at least this |difference| are coloured. The run's own check has it
        # as the bound of the mean over a step, so in a healthy run single tokens may exceed it by
        # far.
        # None, None: the bound that depends on the dtype alone, not on the config or on step 1.
        self._bound, _ = bounds_of(run.dtype, None, None)
        self._run = run
        num_tokens = {record.rollout_id: len(record.completion_ids) for record in records}
        # By rollout id. Scores of another length belong to a rollout of another run.
        self._scores: dict[int | None, TokenScores] = {
            scores.rollout_id: scores
            for _, scores in run.files.scores(step, errors)
            if num_tokens.get(scores.rollout_id) == len(scores.difference)
        }

    def legend_lines(self, terminal: Terminal) -> Iterator[Line]:
        """Yields a line that explains the colours; nothing if no token can be coloured."""
        if terminal.has_colour and self._scores and self._pieces:
            near = f"policy and engine {number(self._bound)} nats apart or more"
            legend = f"tokens in yellow: {near}; in red: {number(10 * self._bound)}"
            yield from terminal.excerpt(legend, 2, styles="dim")

    def describe(self, record: RolloutRecord) -> str:
        """Returns the mean and the largest difference of a rollout as text, with the token that has
        the largest. Returns "" if no differences of the rollout were recorded."""
        scores = self._scores.get(record.rollout_id)
        if scores is None or not len(scores.difference):
            return ""
        sizes = np.where(np.isfinite(scores.difference), np.abs(scores.difference), np.inf)
        index = int(sizes.argmax())
        pieces = self._pieces.decode(record.completion_ids) if self._pieces else []
        piece = f" {pieces[index]!r:.40}" if pieces and pieces[index] else ""
        # The record has None for a mean that is not finite.
        mean = "inf" if scores.difference_mean is None else number(scores.difference_mean)
        return (
            f"policy - engine: mean {mean}, largest {number(float(sizes[index]))} nats "
            f"(token {index + 1}{piece})"
        )

    def token_text(self, record: RolloutRecord, has_colour: bool) -> tuple[str, Styles]:
        """Returns (text, styles): the completion and a style for each of its characters.

        The text is decoded from the tokens, with special tokens included. The style of a character
        is that of its token. A newline is put between the turns of an episode. If the run has no
        readable tokenizer, or if the decoded tokens differ from the recorded text, that text is
        returned with no style."""
        pieces = self._pieces.decode(record.completion_ids) if self._pieces else []
        if self._pieces is None or sum(map(len, pieces)) > _MAX_COLOURED_CHARS:
            return record.completion, ""
        # The indices of the tokens that begin a turn of an episode, except its first turn.
        turns = [turn for turn in record.turns if turn["sampled"]]
        breaks = set(np.cumsum([len(turn["token_ids"]) for turn in turns])[:-1].tolist())
        texts: list[str] = []
        styles: list[str] = []
        plain_texts: list[str] = []  # without special tokens, as in the recorded text
        scores = self._scores.get(record.rollout_id) if has_colour else None
        # The |difference| of each token as a multiple of the bound; 0 if it is not known.
        sizes = np.zeros(len(pieces)) if scores is None else np.abs(scores.difference) / self._bound
        for index, (token_id, piece) in enumerate(zip(record.completion_ids, pieces, strict=True)):
            if index in breaks:
                texts.append("\n")
                styles.append("")
            texts.append(piece)
            if token_id not in self._pieces.special_ids:
                plain_texts.append(piece)
            # `not <`, so that NaN counts as beyond every bound.
            style = next((style for bound, style in _STYLES if not sizes[index] < bound), "")
            styles += [style] * len(piece)
        plain_text = "".join(plain_texts)
        if record.status is None and not plain_text.strip().startswith(record.completion.strip()):
            return record.completion, ""
        return "".join(texts), styles

    @cached_property
    def _pieces(self) -> TokenPieces | None:
        """The decoder of token ids to texts; None if the run has no tokenizer.json that it knows.

        It is read when it is first needed, since that takes time."""
        return read_pieces(self._run.folder)


def text_lines(text: str, terminal: Terminal, styles: Styles = "") -> Iterator[Line]:
    """Yields the indented lines of a text of any length; the middle of a long one is left out."""
    # Very long lines are hard to read, so the text does not use all of a wide terminal.
    narrow = terminal.resized(min(terminal.columns, _MAX_TEXT_COLUMNS))
    return narrow.excerpt(text, _HEAD_LINES, _TAIL_LINES, indent=2 * _INDENT, styles=styles)


def ranked_completions(
    run: RecordedRun, step: int | None, num: int, is_best: bool, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of the `num` completions of a step with the highest or the lowest reward.

    `is_best` chooses the highest. None as `step` is the newest step that has completions.
    Completions of equal reward are ordered by their advantage; those without a reward come last.
    Raises ConfigError if the step has no completions."""
    step = find_dumped_step(run, step)
    errors = ReadErrors()
    # Counted while the dump is read, since it is read only once.
    num_records = 0

    def counted_records() -> Iterator[RolloutRecord]:
        """Yields the rollouts of the step, and counts them in `num_records`."""
        nonlocal num_records
        for _, record in run.files.rollouts(step, errors=errors):
            num_records += 1
            yield record

    # nsmallest keeps only `num` records: all completions of a step may not fit into memory.
    records = heapq.nsmallest(num, counted_records(), key=lambda record: _rank(record, is_best))
    differences = TokenDifferences(run, step, records, errors)
    word = "best" if is_best else "worst"
    for rank, record in enumerate(records, start=1):
        title = f"{word} {rank} of {num_records}, step {step}"
        yield from completion_lines(record, title, differences, terminal)
        yield Line()
    yield from differences.legend_lines(terminal)
    yield from error_lines(errors, terminal)
    hint = f"more: --step {step}   --prompt ROW   --grep TEXT"
    yield terminal.line(hint + "   --full" * (not terminal.is_full), "dim")


def _rank(record: RolloutRecord, is_best: bool) -> tuple[bool, float, float, int, int]:
    """Returns a sort key by reward and advantage.

    It is smallest for the best completion if `is_best`, else for the worst. A completion without a
    reward has the largest key."""
    sign = -1.0 if is_best else 1.0
    # Other people's files may hold NaN, which cannot be sorted.
    reward, advantage = (
        sign * value if value is not None and is_drawable(value) else None
        for value in (record.reward, record.advantage)
    )
    return reward is None, reward or 0.0, advantage or 0.0, record.sample, record.position


def completion_lines(
    record: RolloutRecord,
    title: str,
    differences: TokenDifferences,
    terminal: Terminal,
    has_prompt: bool = True,
) -> Iterator[Line]:
    """Yields the lines of one completion.

    They have `title`, facts such as its reward, its prompt (only with `has_prompt`), its messages
    or its text, and the error if its episode failed."""
    title += f", row {number(record.row)}, sample {number(record.sample)}"
    yield terminal.line(title, "title")
    # Put as many facts on a line as fit without cutting one.
    line = ""
    for fact in _facts(record):
        # A reward's name may be longer than the terminal is wide.
        cell = terminal.fit(fact, terminal.columns - _INDENT).plain
        if line and _INDENT + width_of(line + cell) > terminal.columns:
            yield terminal.line(line.rstrip(), indent=_INDENT)
            line = ""
        line += f"{cell}   "
    yield terminal.line(line.rstrip(), indent=_INDENT)
    description = differences.describe(record)
    if description:
        yield from terminal.excerpt(description, 3, indent=_INDENT)
    if has_prompt:
        yield from prompt_lines(record, terminal)
    if record.messages:
        yield from _message_lines(record.messages, terminal)
    text, styles = differences.token_text(record, terminal.has_colour)
    if not record.messages or any(styles):
        title = "sampled tokens" if record.messages else "completion"
        yield terminal.line(title, "role", _INDENT)
        yield from text_lines(text, terminal, styles)
    error = record.environment.get("error")
    if error:
        yield terminal.line(f"failed: {error}", "bad", _INDENT)


def prompt_lines(record: RolloutRecord, terminal: Terminal) -> Iterator[Line]:
    """Yields the prompt of a rollout, and the other columns of its row in the data set."""
    if isinstance(record.prompt, str):
        yield from _message_lines([{"role": "prompt", "content": record.prompt}], terminal)
    else:
        yield from _message_lines(record.prompt, terminal)
    for name, value in list(record.columns.items())[: terminal.limit(_MAX_COLUMNS)]:
        text = f"{name} = {as_text(value)}"
        yield from terminal.excerpt(text, 3, indent=2 * _INDENT, styles="dim")


def _facts(record: RolloutRecord) -> Iterator[str]:
    """Yields the facts about a completion as short texts.

    They are reward, advantage, each single reward, length and how sampling ended, an episode's
    turns and status, and what rewards logged."""
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
    # Rollouts of groups that dynamic sampling dropped have no id.
    if record.rollout_id is None:
        yield "not trained on"
    for name, values in record.extra.items():
        if isinstance(values, Mapping):
            yield from (f"{name}/{column}={as_text(value)}" for column, value in values.items())


def _message_lines(messages: Sequence[Any], terminal: Terminal) -> Iterator[Line]:
    """Yields the lines of a conversation: for each message its role, thoughts, text and tool calls.

    The middle of a long conversation is left out, except with --full."""
    # The beginning has the task and the end has the answer, so both are shown.
    half = _MAX_MESSAGES // 2
    if len(messages) > 2 * half and not terminal.is_full:
        note = {"role": f"{len(messages) - 2 * half} messages left out (--full shows them)"}
        messages = [*messages[:half], note, *messages[-half:]]
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        speaker = f"{as_text(fields.get('role', 'message'))} {as_text(fields.get('name', ''))}"
        yield terminal.line(speaker.rstrip(), "role", _INDENT)
        # The fields in which chat templates keep a model's thoughts.
        for name in ("reasoning_content", "thinking"):
            thought = fields.get(name)
            if isinstance(thought, str) and thought:
                yield from text_lines(thought, terminal, "dim")
        content = message_text(message)
        if content:
            yield from text_lines(content, terminal)
        calls = fields.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function", call) if isinstance(call, Mapping) else call
            text = as_text(call)
            if isinstance(function, Mapping):
                text = f"{as_text(function.get('name'))}({as_text(function.get('arguments'))})"
            yield from text_lines(f"calls {text}", terminal)
