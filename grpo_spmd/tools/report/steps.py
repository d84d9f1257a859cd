"""Makes the report page's part about one step: figures of all rollouts, and some rollouts whole.

Dumps are large, so a first pass (the scan) reads a few fields of every line and remembers where the
line is. Only the lines of rollouts that the page shows are read again and parsed as a whole. A
broken line or file is counted, and the rest is shown. Texts of policies and data sets are cut to
bounded sizes. "Pieces" are the texts of single tokens.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.metrics_file import LinePosition
from grpo_spmd.observe.rollout_record import (
    RolloutRecord,
    bounded_values,
    is_shallow,
    parse_rollout,
)
from grpo_spmd.observe.run_folder import LineStore, ReadErrors, RunFolder
from grpo_spmd.observe.token_scores import parse_scores
from grpo_spmd.tools.report.page import json_bytes
from grpo_spmd.tools.report.pieces import TokenPieces, read_pieces

MAX_PROMPT_CHARS = 12_000
_MAX_TURNS = 200
_MAX_MESSAGES = 200
_MAX_MESSAGE_CHARS = 40_000  # of all messages of an episode
# Characters of a turn: of one that was not sampled, and of any turn that is cut.
_MAX_GIVEN_CHARS = 4_000
_MIN_TURN_CHARS = 200
_TABLE_FIELDS = (
    "row",
    "position",
    "sample",
    "rollout_id",
    "reward",
    "advantage",
    "statuses",
    "finish_reason",
    "status",
    "rollout_logprobs",
)
_MAX_STATUS_CHARS = 40
_REWARD_FAILURES = ("error", "timeout")
_FAILURES = (*_REWARD_FAILURES, "env_error", "env_timeout")
_NUM_EARLY_FAILURES = 4  # failed rollouts that come before the tokens of other rollouts
_MAX_SHOWN = 2_000  # rollouts of a step
_NUM_SAMPLES = 8  # rollouts that tell what those of a step cost
# The size of a rollout beside others, relative to its size alone at the quickest level.
_COMPRESSION = 0.9
# Characters of a completion that is shown as a whole.
_MIN_COMPLETION_CHARS = 2_000
_MAX_COMPLETION_CHARS = 60_000


@dataclass
class PageRollout:
    """The JSON of one rollout, in two parts so that the second one can be left out."""

    text: dict[str, Any]
    prompt: str
    make_tokens: Callable[[], dict[str, Any] | None]

    @cached_property
    def tokens(self) -> dict[str, Any] | None:
        return self.make_tokens()


def make_rollout(
    line: bytes, score_line: bytes | None, pieces: TokenPieces | None, max_chars: int, reason: str
) -> PageRollout | None:
    """Returns the rollout of a dump's line and its line of token scores; None if it is broken.

    A completion of more than `max_chars` characters is cut in its middle. `reason` says why the
    page shows the rollout.
    """
    record = parse_line(line)
    if record is None:
        return None
    # The keys are those of the page's scripts (page/tokens.js).
    completion, num_cut = shorten(record.completion, max_chars)
    text = {
        "position": record.position,
        "sample": record.sample,
        "why": reason,
        "completion": completion,
        "cut": num_cut,
        "reward": record.reward,
        "rewards": record.rewards,
        "statuses": record.statuses,
        "advantage": record.advantage,
        "finish_reason": record.finish_reason,
        "columns": bounded_values(record.columns),
        "extra": bounded_values(record.extra),
        "tokens": None,
    }
    if record.status is not None:
        text |= _episode(record, pieces, max_chars, is_cut=num_cut > 0)

    def make_tokens() -> dict[str, Any] | None:
        # An episode's turns count on all tokens. Without texts nobody sees where the middle is.
        if num_cut and (record.status is not None or pieces is None):
            return None
        texts = pieces.decode(record.completion_ids) if pieces is not None else None
        tokens = _token_columns(record, texts, score_line)
        return _cut_middle(tokens, texts, max_chars) if num_cut and texts is not None else tokens

    return PageRollout(text, prompt_text(record.prompt), make_tokens)


def parse_line(line: bytes) -> RolloutRecord | None:
    """Returns None for a line that is broken, or nested too deeply to be written as JSON again."""
    # Deep nesting would end json.dumps with a RecursionError.
    with suppress(ConfigError):
        record = parse_rollout(line, "")
        if is_shallow([record.columns, record.prompt, record.extra, record.environment]):
            return record
    return None


def _token_columns(
    record: RolloutRecord, texts: list[str] | None, score_line: bytes | None
) -> dict[str, Any]:
    """Returns lists with an entry for each sampled token.

    A list is null if its values are not known. A null `advantage` means the rollout's; a null
    `mask` means that all tokens count. JSON has null for numbers that are not finite.
    """
    tokens: dict[str, Any] = {
        "pieces": texts,
        "ids": record.completion_ids,
        "logprob": np.round(record.rollout_logprobs, 3).tolist(),
        **dict.fromkeys(("difference", "entropy", "advantage", "mask")),
    }
    scores = None
    with suppress(ConfigError):
        scores = parse_scores(score_line, "") if score_line is not None else None
    # Scores of another length are from another run's rollout.
    if scores is not None and len(scores.difference) == len(record.completion_ids):
        # Three digits are what the page shows; more would only take room.
        tokens["difference"] = _three_digits(scores.difference)
        tokens["entropy"] = _three_digits(scores.entropy)
        if scores.advantages is not None:
            tokens["advantage"] = _three_digits(scores.advantages)
        if scores.loss_mask is not None:
            tokens["mask"] = scores.loss_mask.astype(int).tolist()
    return tokens


def _three_digits(values: npt.NDArray[np.float32]) -> list[float]:
    # The values were float16, so a table of all of them is quicker than rounding each.
    digits: list[float] = _three_digit_table()[values.astype(np.float16).view(np.uint16)].tolist()
    return digits


@cache
def _three_digit_table() -> npt.NDArray[np.float64]:
    """Returns the nearest number of three digits for each float16, by its bits."""
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float64).tolist()
    return np.array([float(f"{value:.3g}") for value in values])


def _cut_middle(tokens: dict[str, Any], texts: Sequence[str], max_chars: int) -> dict[str, Any]:
    """Returns the tokens at both ends, around one without figures that says what is missing."""
    ends = np.cumsum([len(text) for text in texts])
    head_end = int(np.searchsorted(ends, max_chars // 2))
    tail_begin = int(np.searchsorted(ends, int(ends[-1]) - max_chars // 2)) + 1
    # A few long tokens at the ends may leave nothing to cut between them.
    if head_end >= tail_begin:
        return tokens
    marker = _cut_marker(sum(map(len, texts[head_end:tail_begin])))
    shortened: dict[str, Any] = {}
    for name, values in tokens.items():
        middle = marker if name == "pieces" else None
        is_known = values is not None
        shortened[name] = [*values[:head_end], middle, *values[tail_begin:]] if is_known else None
    return shortened


def _episode(
    record: RolloutRecord, pieces: TokenPieces | None, max_chars: int, *, is_cut: bool
) -> dict[str, Any]:
    """Returns the fields of an episode.

    Given turns, sampled turns (if the completion is cut) and messages get a third of `max_chars`
    each, since all three repeat what the completion says.
    """
    max_chars //= 3
    turns = record.turns[:_MAX_TURNS]
    num_sampled = sum(turn["sampled"] for turn in turns)
    chars_per_given = max_chars // max(1, len(turns) - num_sampled)
    max_given = min(_MAX_GIVEN_CHARS, max(_MIN_TURN_CHARS, chars_per_given))
    max_sampled = max(_MIN_TURN_CHARS, max_chars // max(1, num_sampled))
    page_turns = []
    for turn in turns:
        page_turn = {
            "sampled": turn["sampled"],
            "segment": turn["segment"],
            "reward": turn.get("reward"),
            "num_tokens": len(turn["token_ids"]),
        }
        if pieces is not None:
            texts = pieces.decode(turn["token_ids"])
            if not turn["sampled"] or is_cut:
                texts = [shorten("".join(texts), max_sampled if turn["sampled"] else max_given)[0]]
            page_turn["pieces"] = texts
        page_turns.append(page_turn)
    messages = []
    # Whole messages or none: half a message would look like what was said.
    num_chars_left = min(_MAX_MESSAGE_CHARS, max_chars)
    for message in record.messages[:_MAX_MESSAGES]:
        num_chars_left -= len(json.dumps(message))
        if num_chars_left < 0:
            messages.append({"role": "", "content": "further messages are not in this page"})
            break
        messages.append(message)
    return {
        "status": record.status,
        "turns": page_turns,
        "messages": messages,
        "environment": bounded_values(record.environment),
    }


def prompt_text(prompt: str | list[Any]) -> str:
    """Returns a prompt as one text, of chat messages role and content."""
    texts = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            texts.append(f"{message.get('role', '')}: {message['content']}")
        else:
            texts.append(message if isinstance(message, str) else json.dumps(message))
    return shorten("\n\n".join(texts), MAX_PROMPT_CHARS)[0]


def shorten(text: str, max_chars: int) -> tuple[str, int]:
    """Returns `text` without what is too long in its middle, and the number of cut characters."""
    if len(text) <= max_chars + 100:  # the marker has some characters itself
        return text, 0
    num_cut = len(text) - max_chars
    begin = max_chars // 2
    return text[:begin] + _cut_marker(num_cut) + text[begin + num_cut :], num_cut


def _cut_marker(num_cut: int) -> str:
    return f"\n[... {num_cut:,} characters ...]\n"


class ScannedRollout(NamedTuple):
    """What the tables show of a rollout, and where its lines are."""

    position: int
    sample: int
    row: int
    reward: float | None
    advantage: float | None
    num_tokens: int
    is_cut: bool  # finish_reason is "length"
    status: str  # how an episode ended, or how a reward failed; else "ok"
    mismatch: float | None  # largest |policy - engine| of a token
    line: LinePosition
    score_line: LinePosition | None


def scan_step(folder: RunFolder, step: int) -> tuple[list[ScannedRollout], ReadErrors]:
    """Returns the rollouts of a step in the order of the prompt stream, and what is broken."""
    errors = ReadErrors()
    # Of token scores the table has only the largest difference.
    scores: dict[int | None, tuple[float | None, LinePosition | None]] = {
        values.rollout_id: (values.difference_max, line.position)
        for line, values in folder.scores(step, errors)
    }
    rollouts: dict[tuple[int, int], ScannedRollout] = {}
    for line, fields in folder.rollouts(step, _TABLE_FIELDS, errors):
        # Files of several runs in one folder repeat these two.
        key = (fields.position, fields.sample)
        if key in rollouts:
            errors.add(f"{line.name}: position {key[0]}, sample {key[1]} is there twice")
            continue
        mismatch, score_line = scores.get(fields.rollout_id, (None, None))
        logprobs = fields.rollout_logprobs
        rollouts[key] = ScannedRollout(
            position=fields.position,
            sample=fields.sample,
            row=fields.row,
            reward=_finite(fields.reward),
            advantage=_finite(fields.advantage),
            # Bytes of float32, or the list that earlier versions wrote.
            num_tokens=len(logprobs) if isinstance(logprobs, list) else len(logprobs) // 4,
            is_cut=fields.finish_reason == "length",
            status=_status(fields.statuses, fields.status),
            mismatch=mismatch,
            line=line.position,
            score_line=score_line,
        )
    return [rollouts[key] for key in sorted(rollouts)], errors


def _status(reward_statuses: dict[str, str], episode_status: str | None) -> str:
    # A reward's failure counts more than how an episode ended.
    failures = [status for status in reward_statuses.values() if status in _REWARD_FAILURES]
    return failures[0] if failures else (episode_status or "ok")[:_MAX_STATUS_CHARS]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def spread_out(steps: Iterable[int]) -> list[int]:
    """Returns the steps in an order whose every beginning is spread evenly over the run.

    The newest and the first step come first.
    """
    ordered = sorted(steps)
    if len(ordered) < 3:
        return ordered[::-1]
    middle = (ordered[1 + index] for index in _spread_order(len(ordered) - 2, 0))
    return [ordered[-1], ordered[0], *middle]


class Selection:
    """The rollouts of a step that are shown, by their index in the scan."""

    def __init__(self, reader: StepReader, room: int) -> None:
        """`room` is the number of compressed bytes of the page that the rollouts may take."""
        self.rollouts: dict[int, PageRollout] = {}
        self.with_tokens: set[int] = set()
        self.num_wanted = 0  # best, worst, most mismatched and failed ones
        self.num_wanted_shown = 0
        self._reader = reader
        self._num_bytes_left = float(room)
        self._broken: set[int] = set()

    def fill(self, step: int) -> None:
        """Chooses rollouts; the result depends on the step alone.

        The most mismatched, the best, the worst and the failed rollouts come first, then their
        tokens; then whole groups, other ones at each step; then single rollouts, spread evenly.
        """
        # Nothing here depends on time or on other steps, so a page can be made again.
        wanted: dict[int, str] = {}
        for index, reason in _wanted_rollouts(self._reader.rollouts):
            wanted.setdefault(index, reason)
        self.num_wanted = len(wanted)
        failed = [index for index, reason in wanted.items() if reason == "failed"]
        late = dict.fromkeys(failed[_NUM_EARLY_FAILURES:])
        early = [index for index in wanted if index not in late]
        # First all texts, then all tokens: a text without tokens is worth more than
        # tokens without the other texts.
        for index in early:
            self._add_text(index, wanted[index])
        for index in early:
            self._add_tokens(index)
        for index in late:
            self._add_text(index, "failed")
        self.num_wanted_shown = len(self.rollouts)
        groups = self._reader.groups
        for number in _spread_order(len(groups), step):
            has_room = all(self._add_text(index, "group") for index in groups[number])
            if not has_room or not all(map(self._add_tokens, groups[number])):
                break
        for index in _spread_order(len(self._reader.rollouts), step):
            if not self._add_text(index, "sampled"):
                break
            self._add_tokens(index)

    def _add_text(self, index: int, reason: str) -> bool:
        """Shows a rollout. Returns False if there is no room; a broken line takes none."""
        if index in self.rollouts or index in self._broken:
            return True
        # A browser lists a few thousand rollouts without delay.
        if len(self.rollouts) >= _MAX_SHOWN or self._num_bytes_left <= 0:
            return False
        rollout = self._reader.make(index, reason)
        if rollout is None:
            self._broken.add(index)
            return True
        # The rollouts of a group share one prompt.
        if not self._spend([rollout.text, rollout.prompt if reason != "group" else ""]):
            return False
        self.rollouts[index] = rollout
        return True

    def _add_tokens(self, index: int) -> bool:
        """Shows the tokens of a shown rollout. Returns False if there is no room."""
        rollout = self.rollouts.get(index)
        if rollout is None or index in self.with_tokens or rollout.tokens is None:
            return True
        if self._num_bytes_left <= 0 or not self._spend(rollout.tokens):
            return False
        self.with_tokens.add(index)
        return True

    def _spend(self, value: object) -> bool:
        # Measured one by one: texts of one policy compress very differently.
        size = compressed_size(value)
        if size > self._num_bytes_left:
            return False
        self._num_bytes_left -= size
        return True


def compressed_size(value: object) -> float:
    """Returns the bytes that a JSON value takes in the page, about."""
    return _COMPRESSION * len(zlib.compress(json_bytes(value), 1))


def _wanted_rollouts(rollouts: Sequence[ScannedRollout]) -> Iterator[tuple[int, str]]:
    """Yields (index, reason); the first of equal ones."""
    mismatches = {
        index: rollout.mismatch
        for index, rollout in enumerate(rollouts)
        if rollout.mismatch is not None
    }
    if mismatches:
        yield max(mismatches, key=mismatches.__getitem__), "mismatched"
    ranks = {
        index: (rollout.reward, rollout.advantage or 0.0)
        for index, rollout in enumerate(rollouts)
        if rollout.reward is not None
    }
    if ranks:
        yield max(ranks, key=ranks.__getitem__), "best"
        yield min(ranks, key=ranks.__getitem__), "worst"
    for index, rollout in enumerate(rollouts):
        if rollout.status in _FAILURES:
            yield index, "failed"


def _spread_order(num: int, step: int) -> Iterator[int]:
    """Yields the numbers below `num`, each far from those before it; others first at each step."""
    # Multiples of a stride that is prime to `num` reach all numbers. The golden ratio spreads them.
    stride = max(1, round(num * 0.618))
    while math.gcd(stride, num) != 1:
        stride += 1
    yield from ((step * 7 + index * stride) % num for index in range(num))


@dataclass(frozen=True)
class StepTask:
    """What a process needs in order to make the part of one step."""

    run_dir: Path
    step: int
    room: int  # compressed bytes for rollouts
    listed_at: float = 0.0  # when the folder was listed: a process lists it once for all tasks


class Group(NamedTuple):
    """A group of a step, for the table of prompts."""

    row: int
    mean: float  # of the known rewards; NaN if none is known
    line: LinePosition  # of one of its rollouts


@dataclass(frozen=True)
class StepResult:
    """The part of one step, and what the page says about all steps together."""

    step: int
    content: bytes  # JSON of the step's chunk
    num_rollouts: int
    num_shown: int
    num_wanted: int
    num_wanted_shown: int
    num_broken: int
    groups: list[Group]
    min_reward: float | None
    max_reward: float | None


@dataclass(frozen=True)
class StepCost:
    """Compressed bytes that a step takes in the page."""

    table: float  # the figures of all its rollouts
    text: float  # one rollout's text
    tokens: float  # one rollout's tokens


def measure_step(task: StepTask) -> StepCost:
    """Returns the cost of a step, measured on some of its rollouts."""
    reader = StepReader(task, _MAX_COMPLETION_CHARS)
    indices = spread_indices(len(reader.rollouts), _NUM_SAMPLES)
    samples = [reader.make(index, "sampled") for index in indices]
    texts = [compressed_size([sample.text, sample.prompt]) for sample in samples if sample]
    tokens = [compressed_size(sample.tokens) for sample in samples if sample]
    table = len(zlib.compress(_chunk(reader, Selection(reader, room=0), task.step)))
    return StepCost(table, float(np.mean(texts or [0.0])), float(np.mean(tokens or [0.0])))


def make_step(task: StepTask) -> StepResult:
    """Makes the part of one step. Raises nothing, whatever the files hold."""
    # A character takes less than a byte compressed, so three completions fit.
    max_chars = min(max(task.room // 3, _MIN_COMPLETION_CHARS), _MAX_COMPLETION_CHARS)
    reader = StepReader(task, max_chars)
    selection = Selection(reader, task.room)
    selection.fill(task.step)
    rewards = [rollout.reward for rollout in reader.rollouts if rollout.reward is not None]
    return StepResult(
        step=task.step,
        content=_chunk(reader, selection, task.step),
        num_rollouts=len(reader.rollouts),
        num_shown=len(selection.rollouts),
        num_wanted=selection.num_wanted,
        num_wanted_shown=selection.num_wanted_shown,
        num_broken=reader.errors.num,
        groups=reader.summarize_groups(),
        min_reward=min(rewards, default=None),
        max_reward=max(rewards, default=None),
    )


class StepReader:
    """The scanned rollouts of a step, and single ones as a whole."""

    def __init__(self, task: StepTask, max_chars: int) -> None:
        folder, self._pieces = _open_folder(task.run_dir, task.listed_at)
        self.rollouts, self.errors = scan_step(folder, task.step)
        indices = groupby(range(len(self.rollouts)), lambda index: self.rollouts[index].position)
        self.groups = [list(group) for _, group in indices]
        self._store = LineStore()
        self._max_chars = max_chars

    def make(self, index: int, reason: str) -> PageRollout | None:
        rollout = self.rollouts[index]
        line = self._store.read(rollout.line)
        if line is None:
            return None
        score_line = rollout.score_line
        scores = self._store.read(score_line) if score_line is not None else None
        page_rollout = make_rollout(line, scores, self._pieces, self._max_chars, reason)
        if page_rollout is None:
            self.errors.add(f"{rollout.line.path}: a broken line")
        return page_rollout

    def summarize_groups(self) -> list[Group]:
        summaries = []
        for indices in self.groups:
            rewards = [self.rollouts[index].reward for index in indices]
            known_rewards = [reward for reward in rewards if reward is not None]
            mean = sum(known_rewards) / len(known_rewards) if known_rewards else math.nan
            first = self.rollouts[indices[0]]
            summaries.append(Group(first.row, mean, first.line))
        return summaries


@lru_cache(maxsize=1)
def _open_folder(run_dir: Path, listed_at: float) -> tuple[RunFolder, TokenPieces | None]:
    return RunFolder(run_dir), read_pieces(run_dir)


def _chunk(reader: StepReader, selection: Selection, step: int) -> bytes:
    """Returns the JSON of a step: a table by columns, and the shown rollouts."""
    rollouts = reader.rollouts
    shown_indices = sorted(selection.rollouts)
    shown_numbers = {index: number for number, index in enumerate(shown_indices)}
    status_names = ["ok", *sorted({rollout.status for rollout in rollouts} - {"ok"})]
    status_numbers = {name: number for number, name in enumerate(status_names)}
    prompts = []
    prompt_numbers: list[int] = []
    for number, indices in enumerate(reader.groups):
        prompt_numbers += [number] * len(indices)
        shown = [selection.rollouts[index] for index in indices if index in shown_numbers]
        prompts.append(shown[-1].prompt if shown else "")
    # By columns: a column of numbers compresses far better than rows of objects.
    table = {
        "position": [rollout.position for rollout in rollouts],
        "sample": [rollout.sample for rollout in rollouts],
        "row": [rollout.row for rollout in rollouts],
        "reward": [round_digits(rollout.reward, 6) for rollout in rollouts],
        "advantage": [round_digits(rollout.advantage, 4) for rollout in rollouts],
        "tokens": [rollout.num_tokens for rollout in rollouts],
        "finish": [int(rollout.is_cut) for rollout in rollouts],
        "status": [status_numbers[rollout.status] for rollout in rollouts],
        "mismatch": [round_digits(rollout.mismatch, 3) for rollout in rollouts],
        "shown": [shown_numbers.get(index, -1) for index in range(len(rollouts))],
        "prompt": prompt_numbers,
    }
    head = json_bytes(
        {"step": step, "table": table, "status_names": status_names, "prompts": prompts}
    )
    encoded = [
        _encode_rollout(selection.rollouts[index], index in selection.with_tokens)
        for index in shown_indices
    ]
    return head[:-1] + b',"rollouts":[' + b",".join(encoded) + b"]}"


def _encode_rollout(rollout: PageRollout, with_tokens: bool) -> bytes:
    if not with_tokens or rollout.tokens is None:
        return json_bytes(rollout.text)
    text = json_bytes({name: value for name, value in rollout.text.items() if name != "tokens"})
    # Column by column: only the texts may need the slower of the two encoders.
    columns = {name: msgspec.Raw(json_bytes(value)) for name, value in rollout.tokens.items()}
    return text[:-1] + b',"tokens":' + msgspec.json.encode(columns) + b"}"


def spread_indices(num: int, max_indices: int) -> list[int]:
    """Returns at most `max_indices` of the numbers below `num`, evenly, with first and last."""
    spread = np.linspace(0, max(0, num - 1), min(num, max_indices)).round().astype(int)
    indices: list[int] = np.unique(spread).tolist()
    return indices


def round_digits(value: float | None, num_digits: int) -> float | int | None:
    """Returns a number with so many digits; as a whole number if it is one."""
    if value is None:
        return None
    if value == int(value) and abs(value) < 10**num_digits:
        return int(value)
    return float(f"{value:.{num_digits}g}")
