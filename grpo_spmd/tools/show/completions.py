"""Pages of recorded completions: the best and the worst of a step, its groups, a prompt, a search.

A group is the completions of one prompt at one step; a prompt is a row of the data set. The page of
a step also has the step's metrics. A search shows matches of the newest steps first, and counts the
matches at each step. TokenDifferences describes and colours tokens by the difference between the
logprobs of engine and policy.
"""

from __future__ import annotations

import heapq
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np

from grpo_spmd.config.errors import ConfigError, cut_middle
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.observe.rollout_record import RolloutRecord
from grpo_spmd.observe.run_folder import ReadErrors
from grpo_spmd.observe.token_scores import TokenScores
from grpo_spmd.proofs.logprob_check import bounds_of
from grpo_spmd.tools.report.pieces import read_pieces
from grpo_spmd.tools.report.steps import as_text, message_text, prompt_text
from grpo_spmd.tools.show.overview import (
    LABEL_COLUMNS,
    curve,
    histogram,
    is_drawable,
    number,
    time_lines,
)
from grpo_spmd.tools.terminal import Column, Line, Styles, Terminal

# Returns False for a line of a dump that need not be parsed.
LineFilter = Callable[[bytes], bool]
# The style of a token whose difference is at least so many times the bound.
_STYLES = ((100.0, "far"), (10.0, "over"), (1.0, "near"))
_INDENT = 2
# How many lines of a long text are shown at its beginning and its end.
_HEAD_LINES = 14
_HALF_MESSAGES = 20  # at the beginning of a conversation, and as many at its end
_NUM_GROUPS = 12  # how many of the worst and of the best groups of a step are shown
GROUP_COLUMNS = (
    Column("n", 5),
    Column("mean", 8),
    Column("spread", 8),
    Column("cut", 6),
    Column("  rewards", 10, "<", style="curve"),
)
PROMPT_COLUMN = Column("  prompt", align="<")
_MAX_ROWS = 200  # a search for prompts stops at so many rows of the data set
_MAX_PROMPT_CHARS = 400  # in a list
_MAX_SHOWN = 20  # matches of a search for completions
_CONTEXT_CHARS = 100  # on each side of a match


# Steps, lines and texts


def error_lines(errors: ReadErrors, terminal: Terminal) -> Iterator[Line]:
    """Yields warnings about dumps that could not be read; nothing if all were read."""
    if errors.num_missing:
        warning = f"{errors.num_missing} rollouts of the step are not in its files"
        yield from terminal.excerpt(f"{warning}; each node wrote one file", 2, styles="warning")
    if errors.num:
        warning = f"{errors.num} lines or files not read; the first: {errors.first}"
        yield from terminal.excerpt(warning, 3, styles="warning")


def contains_text(text: str) -> LineFilter | None:
    """Returns a filter for JSON lines that may contain `text`, in upper or lower case.

    Returns None if every line must be parsed to know.
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
    """Returns a filter for JSON lines of rollouts whose prompt is row `row` of the data set."""
    # The number must end there, or row 1 would match row 10.
    pattern = re.compile(rb'"row": ?%d[,}\s]' % row)
    return lambda line: pattern.search(line) is not None


def describe_steps(steps: Sequence[int]) -> str:
    """Returns in words which steps have recorded completions."""
    if not steps:
        return "no step has any (logging.rollouts_every_steps)"
    return f"steps with completions: {cut_middle(', '.join(map(str, steps)), 60)}"


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


# Tokens


class TokenDifferences:
    """The differences between the policy's and the engine's logprobs, for each token.

    They are those that the run recorded (token_scores/) of some rollouts of one step.
    """

    def __init__(
        self, run: RecordedRun, step: int, records: Sequence[RolloutRecord], errors: ReadErrors
    ) -> None:
        """Reads the scores of `records`, which are rollouts of the step; `errors` is added to."""
        # The bound of the mean over a step. In a healthy run single tokens may exceed it by far.
        self._bound, _ = bounds_of(run.dtype, None, None)
        self._pieces = read_pieces(run.folder)
        num_tokens = {record.rollout_id: len(record.completion_ids) for record in records}
        # Scores of another length belong to a rollout of another run.
        self._scores: dict[int | None, TokenScores] = {
            scores.rollout_id: scores
            for _, scores in run.files.scores(step, errors)
            if num_tokens.get(scores.rollout_id) == len(scores.difference)
        }

    def legend_lines(self, terminal: Terminal) -> Iterator[Line]:
        """Yields a legend of the colours, if any token can be coloured."""
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
        pieces = self._decode(record)
        piece = f" {pieces[index]!r:.40}" if pieces else ""
        # None stands for a mean that is not finite.
        mean = "inf" if scores.difference_mean is None else number(scores.difference_mean)
        return (
            f"policy - engine: mean {mean}, largest {number(float(sizes[index]))} nats "
            f"(token {index + 1}{piece})"
        )

    def token_text(self, record: RolloutRecord, has_colour: bool) -> tuple[str, Styles]:
        """Returns the completion, decoded from its tokens with the special ones, and the style of
        each character.

        A newline is put between the turns of an episode. If nothing was recorded of the rollout,
        or if the decoded tokens differ from the recorded text, that text is returned with no style.
        """
        pieces = self._decode(record)
        special_ids = self._pieces.special_ids if self._pieces else set()
        # A completion's text leaves the special tokens out.
        named_pieces = zip(record.completion_ids, pieces, strict=False)
        plain_text = "".join(
            piece for token_id, piece in named_pieces if token_id not in special_ids
        )
        is_other = not plain_text.strip().startswith(record.completion.strip())
        if not pieces or (record.status is None and is_other):
            return record.completion, ""
        turns = [turn for turn in record.turns if turn["sampled"]]
        # The indices of tokens that begin another turn of an episode.
        for index in np.cumsum([len(turn["token_ids"]) for turn in turns])[:-1].tolist():
            if index:
                pieces[index - 1] += "\n"
        scores = self._scores.get(record.rollout_id) if has_colour else None
        sizes = np.zeros(len(pieces)) if scores is None else np.abs(scores.difference) / self._bound
        styles: list[str] = []
        for size, piece in zip(sizes, pieces, strict=True):
            # `not <`, so that NaN counts as beyond every bound.
            style = next((style for bound, style in _STYLES if not size < bound), "")
            styles += [style] * len(piece)
        return "".join(pieces), styles

    def _decode(self, record: RolloutRecord) -> list[str]:
        """Returns the text of each token; [] without a tokenizer, or if the texts are too long."""
        pieces = self._pieces.decode(record.completion_ids) if self._pieces else []
        return pieces if sum(map(len, pieces)) <= 1 << 24 else []


# Completions


def ranked_completions(
    run: RecordedRun, step: int | None, num: int, is_best: bool, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of the `num` completions of a step with the highest or the lowest reward.

    Completions of equal reward are ordered by their advantage; those without a reward come last.
    Raises ConfigError if the step has no completions.
    """
    step = find_dumped_step(run, step)
    errors = ReadErrors()
    # Counted while the dump is read, since it is read only once.
    num_records = 0

    def counted_records() -> Iterator[RolloutRecord]:
        nonlocal num_records
        for _, record in run.files.rollouts(step, errors=errors):
            num_records += 1
            yield record

    # nsmallest keeps only `num` records: all completions of a step may not fit into memory.
    records = heapq.nsmallest(num, counted_records(), key=lambda record: _rank(record, is_best))
    word = "best" if is_best else "worst"
    titles = [f"{word} {rank + 1} of {num_records}, step {step}" for rank in range(len(records))]
    differences = TokenDifferences(run, step, records, errors)
    for title, record in zip(titles, records, strict=True):
        yield from completion_lines(record, title, differences, terminal)
        yield Line()
    yield from differences.legend_lines(terminal)
    yield from error_lines(errors, terminal)
    hint = f"more: --step {step}   --prompt ROW   --grep TEXT"
    yield terminal.line(hint + "   --full" * (not terminal.is_full), "dim")


def _rank(record: RolloutRecord, is_best: bool) -> tuple[bool, float, float, int, int]:
    """Returns a sort key, which is smallest for the best completion, or for the worst."""
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
    """Yields one completion: its facts, its prompt, its messages or text, and its error if any."""
    title += f", row {number(record.row)}, sample {number(record.sample)}"
    yield terminal.line(title, "title")
    texts = ["   ".join(_facts(record)), differences.describe(record)]
    yield from terminal.excerpt("\n".join(filter(None, texts)), _HEAD_LINES, indent=_INDENT)
    if has_prompt:
        yield from prompt_lines(record, terminal)
    yield from _conversation(record.messages, terminal)
    text, styles = differences.token_text(record, terminal.has_colour)
    if not record.messages or any(styles):
        title = "sampled tokens" if record.messages else "completion"
        yield terminal.line(title, "role", _INDENT)
        yield from _text_lines(text, terminal, styles)
    error = record.environment.get("error")
    if error:
        yield terminal.line(f"failed: {error}", "bad", _INDENT)


def prompt_lines(record: RolloutRecord, terminal: Terminal) -> Iterator[Line]:
    """Yields the prompt and the other columns of its data row."""
    prompt = record.prompt
    messages = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    yield from _conversation(messages, terminal)
    for name, value in list(record.columns.items())[: terminal.limit(12)]:
        text = f"{name} = {as_text(value)}"
        yield from terminal.excerpt(text, 3, indent=2 * _INDENT, styles="dim")


def _facts(record: RolloutRecord) -> Iterator[str]:
    """Yields reward, advantage, reward components, length, and how sampling ended, as texts."""
    yield f"reward {number(record.reward)}"
    sign = "+" if (record.advantage or 0) > 0 else ""
    yield f"advantage {sign}{number(record.advantage)}"
    for name, value in record.rewards.items():
        status = record.statuses.get(name, "ok")
        yield f"{name} {number(value)}" + (f" ({status})" if status != "ok" else "")
    ending = "cut off" if record.finish_reason == "length" else record.finish_reason
    yield f"{len(record.completion_ids)} tokens, {ending}"
    if record.status is not None:
        num_turns = sum(bool(turn.get("sampled")) for turn in record.turns)
        yield f"{num_turns} turns, {record.status}"
    if record.rollout_id is None:
        yield "not trained on"
    for name, values in record.extra.items():
        if isinstance(values, Mapping):
            yield from (f"{name}/{column}={as_text(value)}" for column, value in values.items())


def _conversation(messages: Sequence[Any], terminal: Terminal) -> Iterator[Line]:
    """Yields the lines of a conversation; the middle of a long one is left out."""
    # The beginning has the task and the end has the answer, so both are shown. The others are left
    # out before any line is made: an episode may have 100,000 messages.
    num_hidden = len(messages) - 2 * _HALF_MESSAGES
    if num_hidden > 0 and not terminal.is_full:
        note = {"role": f"{num_hidden} messages left out (--full shows them)"}
        messages = [*messages[:_HALF_MESSAGES], note, *messages[-_HALF_MESSAGES:]]
    for message in messages:
        yield from _message_lines(message, terminal)


def _message_lines(message: Any, terminal: Terminal) -> Iterator[Line]:
    """Yields one message: who speaks, its thoughts, its content and the tools that it calls."""
    fields = message if isinstance(message, Mapping) else {}
    speaker = f"{as_text(fields.get('role', 'message'))} {as_text(fields.get('name', ''))}"
    yield terminal.line(speaker.rstrip(), "role", _INDENT)
    # The fields in which chat templates keep a model's thoughts.
    for name in ("reasoning_content", "thinking"):
        thought = fields.get(name)
        if isinstance(thought, str) and thought:
            yield from _text_lines(thought, terminal, "dim")
    content = message_text(message)
    if content:
        yield from _text_lines(content, terminal)
    calls = fields.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else call
        text = as_text(call)
        if isinstance(function, Mapping):
            text = f"{as_text(function.get('name'))}({as_text(function.get('arguments'))})"
        yield from _text_lines(f"calls {text}", terminal)


def _text_lines(text: str, terminal: Terminal, styles: Styles = "") -> Iterator[Line]:
    """Yields the indented lines of a text of any length; the middle of a long one is left out."""
    return terminal.excerpt(text, _HEAD_LINES, 10, indent=2 * _INDENT, styles=styles)


# The page of a step


def step_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields the page of one step: its metrics, its time by phase, and its groups."""
    metrics = next((line for line in run.steps if line["step"] == step), {})
    evaluation = next((line for line in run.evaluations if line["step"] == step), {})
    total = f" of {run.num_steps}" if run.num_steps else ""
    yield terminal.line(f"{run.name}  step {step}{total}", "title")
    yield from metric_blocks({**metrics, **evaluation}, terminal)
    if metrics:
        yield from time_lines([metrics], terminal)
    yield Line()
    if step in run.dumped_steps:
        yield from _group_lines(run, step, terminal)
    else:
        warning = f"no completions of step {step} were recorded; {describe_steps(run.dumped_steps)}"
        yield terminal.line(warning, "warning")


def metric_blocks(metrics: Mapping[str, Any], terminal: Terminal) -> Iterator[Line]:
    """Yields metrics in blocks by the first part of their names, in as many columns as fit."""
    num_columns = max(1, terminal.columns // 40)
    label = (terminal.columns - 2) // num_columns - 12
    # The times of phases are shown as bars.
    is_bar = re.compile(r"time/(?!wall)\w+_s").fullmatch
    all_names = sorted(name for name in metrics if "/" in name and not is_bar(name))
    for block, members in groupby(all_names, lambda name: name.partition("/")[0]):
        names = list(members)
        yield terminal.line(block, "role")
        num_rows = -(-len(names) // num_columns)  # rounded up
        for row in range(num_rows):
            line = Line("  ")
            for name in names[row::num_rows]:
                line.append_text(terminal.pad(name.partition("/")[2], label, "dim"))
                line.append(f"{number(metrics[name]):>8}    ")
            yield line


# Groups


@dataclass
class PromptGroup:
    """Statistics of the completions of one prompt at one step."""

    row: int
    prompt: str
    num: int = 0  # completions
    rewards: list[float] = field(default_factory=list)  # of completions that have one
    num_cut: int = 0  # completions that were cut off at a limit of length
    mismatch: float | None = None  # the largest |policy - engine| of a trained token, in nats

    def add(self, record: RolloutRecord, mismatch: float | None = None) -> None:
        """Counts a completion; `mismatch` is its largest |policy - engine| if it is known."""
        self.num += 1
        if record.reward is not None and is_drawable(record.reward):
            self.rewards.append(record.reward)
        self.num_cut += record.finish_reason == "length"
        if mismatch is not None:
            self.mismatch = max(self.mismatch or 0.0, mismatch)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.rewards) if self.rewards else None

    def cells(self, scale: tuple[float, float]) -> list[str]:
        """Returns the cells of this group for GROUP_COLUMNS.

        `scale` is the lowest and the highest reward of the histogram.
        """
        # The standard deviation is that of n - 1, as in advantages.
        spread = statistics.stdev(self.rewards) if len(self.rewards) > 1 else None
        figures = [str(self.num), number(self.mean), number(spread)]
        return [*figures, f"{self.num_cut / self.num:.0%}", f"  {histogram(self.rewards, *scale)}"]


def _reward_scale(groups: Iterable[PromptGroup]) -> tuple[float, float]:
    """Returns the lowest and the highest reward of all groups, the scale of their histograms."""
    rewards = [reward for group in groups for reward in group.rewards]
    return min(rewards, default=0.0), max(rewards, default=0.0)


def _group_lines(run: RecordedRun, step: int, terminal: Terminal) -> Iterator[Line]:
    """Yields a table of a step's groups, the lowest mean reward first."""
    errors = ReadErrors()
    # The largest difference of each rollout: one number, so all of a step fit into memory.
    mismatches: dict[int | None, float] = {
        scores.rollout_id: math.inf if scores.difference_max is None else scores.difference_max
        for _, scores in run.files.scores(step, errors)
    }
    by_position: dict[int, PromptGroup] = {}
    for _, record in run.files.rollouts(step, errors=errors):
        group = PromptGroup(record.row, prompt_text(record.prompt)[:_MAX_PROMPT_CHARS])
        by_position.setdefault(record.position, group).add(
            record, mismatches.get(record.rollout_id)
        )
    groups = [group for _, group in sorted(by_position.items())]
    # Groups with a low mean come first, since they need a look; groups without a reward come last.
    groups.sort(key=lambda group: (group.mean is None, group.mean or 0.0))
    low, high = scale = _reward_scale(groups)
    num_completions = sum(group.num for group in groups)
    title = f"{len(groups)} groups, {num_completions} completions; rewards from {number(low)} to "
    yield terminal.line(f"{title}{number(high)}, least mean first", "role")
    columns = [Column("row", 7), *GROUP_COLUMNS, Column("mismatch", 8), PROMPT_COLUMN]
    rows = [
        [number(group.row), *group.cells(scale), number(group.mismatch), f"  {group.prompt}"]
        for group in groups
    ]
    # Of many groups the worst and the best are shown; the first line of the table is its titles.
    yield from terminal.elide(terminal.table(columns, rows), _NUM_GROUPS + 1, _NUM_GROUPS)
    num_unscored = num_completions - sum(len(group.rewards) for group in groups)
    if num_unscored:
        yield terminal.line(f"{num_unscored} completions have no reward", "warning")
    yield from error_lines(errors, terminal)
    yield Line()
    hint = f"more: --step {step} --worst 3   --step {step} --best 3   --prompt ROW   --grep TEXT"
    yield terminal.line(hint, "dim")


# Prompts


def find_prompts(run: RecordedRun, wanted: str, errors: ReadErrors) -> list[dict[int, PromptGroup]]:
    """Returns for each matching prompt its groups by step, at most _MAX_ROWS prompts.

    A prompt matches if `wanted` is the number of its row, or else if it contains the text `wanted`,
    in upper or lower case.
    """
    # A number of at most 18 digits fits into 64 bits; a longer one is looked for as a text.
    row = int(wanted) if re.fullmatch("[0-9]{1,18}", wanted) else None
    pattern = text_pattern(wanted)
    line_filter = contains_text(wanted) if row is None else has_row(row)
    prompts: dict[int, dict[int, PromptGroup]] = {}
    for step in run.dumped_steps:
        for _, record in run.files.rollouts(step, errors=errors, is_wanted=line_filter):
            text = prompt_text(record.prompt)
            is_match = pattern.search(text) is not None if row is None else record.row == row
            # The limit is on rows: of a row that was found, every further step counts.
            if is_match and (record.row in prompts or len(prompts) < _MAX_ROWS):
                groups = prompts.setdefault(record.row, {})
                group = PromptGroup(record.row, text[:_MAX_PROMPT_CHARS])
                groups.setdefault(step, group).add(record)
    return [groups for _, groups in sorted(prompts.items())]


def prompt_page(
    run: RecordedRun, wanted: str, step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of the prompt that `wanted` names, or a list of prompts if several match.

    Raises ConfigError if no dump has such a prompt.
    """
    errors = ReadErrors()
    # Raises ConfigError if the step has no completions, before all dumps are read.
    find_dumped_step(run, step)
    prompts = find_prompts(run, wanted, errors)
    if not prompts:
        searched = f"no prompt of {len(run.dumped_steps)} steps contains that text"
        raise ConfigError(f"--prompt {wanted!r}: {searched}, and there is no such row")
    if len(prompts) == 1:
        yield from _prompt_history(run, prompts[0], step, terminal)
    else:
        # At this limit the search added no further rows.
        more = " or more" if len(prompts) == _MAX_ROWS else ""
        yield terminal.line(f"{len(prompts)}{more} prompts; --prompt ROW shows one", "title")
        columns = [Column("row", 8), Column("steps", 7), Column("first", 8), Column("last", 8)]
        rows = []
        for groups in prompts:
            means = [number(group.mean) for group in groups.values()]
            newest = groups[max(groups)]
            figures = [number(newest.row), str(len(means)), means[0], means[-1]]
            rows.append([*figures, f"  {newest.prompt}"])
        # The titles and twelve prompts.
        yield from terminal.elide(terminal.table([*columns, PROMPT_COLUMN], rows), 13)
    yield from error_lines(errors, terminal)


def _prompt_history(
    run: RecordedRun, groups: Mapping[int, PromptGroup], step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields the page of one prompt: its rewards over the steps, and its completions at `step`.

    `groups` has the prompt's group at each step. If `step` is None, the newest of them is taken.
    """
    step = max(groups) if step is None else step
    row = groups[max(groups)].row
    errors = ReadErrors()  # not shown: `prompt_page` shows those of its search
    dump = run.files.rollouts(step, errors=errors, is_wanted=has_row(row))
    records = [record for _, record in dump if record.row == row]
    title = f"row {number(row)}: sampled at {len(groups)} of "
    yield terminal.line(f"{title}{len(run.dumped_steps)} steps with completions", "title")
    if records:
        yield from prompt_lines(records[0], terminal)
    yield Line()
    means = [group.mean for group in groups.values()]
    figures = f"  first {number(means[0])}  last {number(means[-1])}"
    yield _curve_line("mean reward", means, figures, terminal, is_peak=False)
    scale = _reward_scale(groups.values())
    rows = [[str(group_step), *group.cells(scale)] for group_step, group in groups.items()]
    table = terminal.table([Column("step", 8), *GROUP_COLUMNS], rows)
    yield from terminal.elide(table, 1, 12)
    if not records:
        yield terminal.line(f"not sampled at step {step}", "warning")
    records.sort(key=lambda record: (record.position, record.sample))
    differences = TokenDifferences(run, step, records, errors)
    for record in records:
        yield Line()
        title = f"step {step}"
        yield from completion_lines(record, title, differences, terminal, has_prompt=False)
    yield from differences.legend_lines(terminal)


def _curve_line(
    title: str, values: Sequence[float | None], figures: str, terminal: Terminal, *, is_peak: bool
) -> Line:
    """Returns one line: a title, the curve of `values`, and `figures` about them."""
    drawn = curve(values, terminal.columns - LABEL_COLUMNS - 28, is_peak)
    return Line.assemble(terminal.pad(title, LABEL_COLUMNS), terminal.text(drawn, "curve"), figures)


# A search


def search_lines(
    run: RecordedRun, text: str, step: int | None, terminal: Terminal
) -> Iterator[Line]:
    """Yields completions that contain `text`, ignoring case, then the number of them at each step.

    In an episode, the answers of tools and the environment are searched too. Searches all steps if
    `step` is None. Raises ConfigError if the step has no completions.
    """
    errors = ReadErrors()
    pattern = text_pattern(text)
    newest_step = find_dumped_step(run, step)
    # The newest step first, since the present policy matters most.
    steps = run.dumped_steps[::-1] if step is None else [newest_step]
    # A search of all steps shows a few matches of each, so that one does not fill the page.
    max_per_step = 5 if step is None else _MAX_SHOWN
    counts = dict.fromkeys(steps, 0)
    num_shown = 0
    for searched_step in steps:
        for _, record in run.files.rollouts(
            searched_step, errors=errors, is_wanted=contains_text(text)
        ):
            # The answers of tools are in the messages only.
            texts = [record.completion, *map(message_text, record.messages)]
            match = next(filter(None, map(pattern.search, texts)), None)
            if match is None:
                continue
            counts[searched_step] += 1
            has_room = num_shown < _MAX_SHOWN and counts[searched_step] <= max_per_step
            # With --full all matches are shown.
            if terminal.is_full or has_room:
                num_shown += 1
                title = f"step {searched_step}, row {number(record.row)}, sample "
                title += f"{number(record.sample)}, reward {number(record.reward)}"
                yield terminal.line(title, "title")
                yield from _match_lines(match, terminal)
    yield from _summary(counts, text, num_shown, terminal)
    yield from error_lines(errors, terminal)


def _match_lines(match: re.Match[str], terminal: Terminal) -> Iterator[Line]:
    """Yields the text around `match` (all of it with --full), in which all matches are marked.

    They are marked by a colour, or without colours by >> and <<.
    """
    text = match.string
    if not terminal.is_full:
        begin = max(0, match.start() - _CONTEXT_CHARS)
        end = match.end() + _CONTEXT_CHARS
        prefix = terminal.ellipsis if begin else ""
        suffix = terminal.ellipsis if end < len(text) else ""
        text = f"{prefix}{text[begin:end]}{suffix}"
    # A pattern such as a space matches very often in a long text.
    if not terminal.has_colour:
        return _text_lines(match.re.sub(r">>\g<0><<", text, count=1000), terminal)
    styles = [""] * len(text)
    for marked in islice(match.re.finditer(text), 1000):
        styles[marked.start() : marked.end()] = ["mark"] * len(marked[0])
    return _text_lines(text, terminal, styles)


def _summary(
    counts: Mapping[int, int], text: str, num_shown: int, terminal: Terminal
) -> Iterator[Line]:
    """Yields how many completions match in all, and a curve of `counts`, the matches by step."""
    steps = sorted(counts)
    matching_steps = [step for step in steps if counts[step]]
    total = sum(counts.values())
    searched = f"{len(steps)} steps" if len(steps) > 1 else f"step {steps[0]}"
    if not total:
        yield terminal.line(f"no completion of {searched} contains {text!r}", "title")
        return
    yield Line()
    note = f"{total} completions of {searched}, {num_shown} of them shown; "
    note += f"first step {matching_steps[0]}, last {matching_steps[-1]}"
    yield from terminal.excerpt(note, 3, styles="title")
    if len(steps) > 1:
        values = [counts[step] for step in steps]
        figures = f"  most {max(values)}"
        # Draw the peaks, since single matches would vanish in a mean over many steps.
        yield _curve_line("of each step", values, figures, terminal, is_peak=True)
    if num_shown < total:
        yield terminal.line("--step N shows those of one step, --full all of them in full", "dim")
