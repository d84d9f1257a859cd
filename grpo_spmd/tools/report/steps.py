"""Makes the chunk of the page for one step: a table of all its rollouts, and the texts of some.

Dumps are large, so a first pass (the scan) parses only a few fields of every line and remembers the
line's position. Only the lines of the rollouts whose texts the page shows are read again and parsed
fully. A broken line or file is counted, and the rest is shown. Texts of policies and data sets are
cut to bounded sizes. "Pieces" are the texts of single tokens.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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
_MIN_TURN_CHARS = 200  # of a turn that is cut
# The fields of a RolloutRecord that the scan parses.
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
# Statuses of rewards, and of rewards and episodes, that count as failures.
_REWARD_FAILURES = ("error", "timeout")
_FAILURES = (*_REWARD_FAILURES, "env_error", "env_timeout")
_NUM_EARLY = 7  # of the best, worst, mismatched and failed rollouts, those whose tokens come early
_MAX_SHOWN = 2_000  # rollouts of a step with their texts
_NUM_SAMPLES = 8  # rollouts of a step whose size is measured
# The size of a rollout compressed together with others at the page's level, relative to its size
# compressed alone at the quickest level.
_COMPRESSION = 0.9
# A longer completion is cut in its middle; the limit is between these two, by the room of the step.
_MIN_COMPLETION_CHARS = 2_000
_MAX_COMPLETION_CHARS = 60_000


@dataclass
class PageRollout:
    """A rollout whose text the page shows."""

    record: RolloutRecord
    score_line: bytes | None  # its line of token scores
    fields: dict[str, Any]  # its JSON in the page; "tokens" is None unless there was room for them

    @property
    def prompt(self) -> str:
        """The prompt as one text, cut to at most about MAX_PROMPT_CHARS characters."""
        return prompt_text(self.record.prompt)


def parse_line(line: bytes | None) -> RolloutRecord | None:
    """Returns the rollout in a line of a dump.

    Returns None if the line is missing (None), broken, or nested too deeply."""
    # json.dumps raises RecursionError for deep nesting.
    with suppress(ConfigError):
        record = parse_rollout(line or b"", "")
        if is_shallow([record.columns, record.prompt, record.extra, record.environment]):
            return record
    return None


# Cached: the values come from float16, which has 65,536 of them, and a look-up is quicker than
# rounding.
@lru_cache(1 << 16)
def _three_digits(value: float) -> float:
    """Returns the number rounded to three significant digits."""
    return float(f"{value:.3g}")


def _cut_middle(tokens: dict[str, Any], texts: Sequence[str], max_chars: int) -> dict[str, Any]:
    """Returns `tokens` without those in the middle, so that about `max_chars` characters remain.

    `tokens` has lists by name (or None), with an entry for each token; `texts` are the tokens'
    pieces. The middle is replaced by one entry: its piece says how many characters are missing, and
    its other values are None.
    """
    # The number of characters up to and with each token.
    ends = np.cumsum([len(text) for text in texts])
    head_end = int(np.searchsorted(ends, max_chars // 2))
    tail_begin = int(np.searchsorted(ends, int(ends[-1]) - max_chars // 2)) + 1
    # A few long tokens at the ends may leave nothing to cut between them.
    if head_end >= tail_begin:
        return tokens
    marker = _cut_marker(sum(map(len, texts[head_end:tail_begin])))
    middle = {**dict.fromkeys(tokens), "pieces": marker}
    return {
        name: values and [*values[:head_end], middle[name], *values[tail_begin:]]
        for name, values in tokens.items()
    }


def prompt_text(prompt: str | list[Any]) -> str:
    """Returns a prompt as one text; a chat becomes "role: content" for each message."""
    texts = []
    for message in [prompt] if isinstance(prompt, str) else prompt:
        if isinstance(message, dict) and isinstance(message.get("content"), str):
            texts.append(f"{message.get('role', '')}: {message['content']}")
        else:
            texts.append(message if isinstance(message, str) else json.dumps(message))
    return shorten("\n\n".join(texts), MAX_PROMPT_CHARS)[0]


def shorten(text: str, max_chars: int) -> tuple[str, int]:
    """Returns `text` with at most about `max_chars` characters, and how many were cut.

    They are cut from the middle, where a marker says how many are missing.
    """
    if len(text) <= max_chars + 100:  # the marker takes some characters too
        return text, 0
    num_cut = len(text) - max_chars
    begin = max_chars // 2
    return text[:begin] + _cut_marker(num_cut) + text[begin + num_cut :], num_cut


def _cut_marker(num_cut: int) -> str:
    """Returns the text that stands in place of `num_cut` characters."""
    return f"\n[... {num_cut:,} characters ...]\n"


class ScannedRollout(NamedTuple):
    """The figures of a rollout for the page's table, and where its lines are in the files."""

    position: int  # of its prompt in the run's stream of prompts
    sample: int  # its index in the group
    row: int  # of its prompt in the data set
    reward: float | None
    advantage: float | None
    tokens: int  # the number of sampled tokens
    finish: int  # 1 if finish_reason is "length", else 0
    status: str  # how a reward failed, else how an episode ended, else "ok"
    mismatch: float | None  # largest |policy - engine| of a token
    line: LinePosition
    score_line: LinePosition | None


def scan_step(folder: RunFolder, step: int) -> tuple[list[ScannedRollout], ReadErrors]:
    """Returns (rollouts, errors): the rollouts of a step, and what could not be read of it.

    The rollouts are in the order of their prompts, and within a group in the order of samples.
    """
    errors = ReadErrors()
    # By rollout id: the largest difference and the line. The table needs no more of the scores.
    scores: dict[int | None, tuple[float | None, LinePosition | None]] = {
        values.rollout_id: (values.difference_max, line.position)
        for line, values in folder.scores(step, errors)
    }
    rollouts: dict[tuple[int, int], ScannedRollout] = {}
    for line, fields in folder.rollouts(step, _TABLE_FIELDS, errors):
        # These two are unique in a step of a run; files of several runs in one folder repeat them.
        key = (fields.position, fields.sample)
        if key in rollouts:
            errors.add(f"{line.name}: position {key[0]}, sample {key[1]} was in an earlier line")
            continue
        mismatch, score_line = scores.get(fields.rollout_id, (None, None))
        logprobs = fields.rollout_logprobs
        rollouts[key] = ScannedRollout(
            position=fields.position,
            sample=fields.sample,
            row=fields.row,
            reward=_finite(fields.reward),
            advantage=_finite(fields.advantage),
            # Raw bytes of float32; earlier versions wrote a list.
            tokens=len(logprobs) if isinstance(logprobs, list) else len(logprobs) // 4,
            finish=int(fields.finish_reason == "length"),
            # The failure of a reward is more important than how an episode ended.
            status=next(
                (status for status in fields.statuses.values() if status in _REWARD_FAILURES),
                (fields.status or "ok")[:_MAX_STATUS_CHARS],
            ),
            mismatch=mismatch,
            line=line.position,
            score_line=score_line,
        )
    return [rollouts[key] for key in sorted(rollouts)], errors


def _finite(value: float | None) -> float | None:
    """Returns the value if it is a finite number, else None."""
    return value if value is not None and math.isfinite(value) else None


def spread_out(steps: Iterable[int]) -> list[int]:
    """Returns the steps in the order in which to show them if there is not room for all.

    For every n, the first n of them are spread over the run. The newest step comes first, then the
    oldest one.
    """
    ordered = sorted(steps)
    middle = [ordered[1 + index] for index in _spread_order(len(ordered) - 2, 0)]
    return list(dict.fromkeys([*ordered[-1:], *ordered[:1], *middle]))


def compressed_size(value: object) -> float:
    """Estimates how many bytes a JSON value takes in the page, compressed."""
    return _COMPRESSION * len(zlib.compress(json_bytes(value), 1))


def _wanted_rollouts(rollouts: Sequence[ScannedRollout]) -> dict[int, str]:
    """Returns the rollouts that deserve a look, as {index: reason}.

    They are the most mismatched, the best, the worst (of equal ones the first) and all that failed.
    """
    wanted: dict[int, str] = {}

    def rank(index: int) -> tuple[float, float]:
        """Returns the sort key of a rollout, by reward and then advantage."""
        return rollouts[index].reward or 0.0, rollouts[index].advantage or 0.0

    mismatched = [i for i, rollout in enumerate(rollouts) if rollout.mismatch is not None]
    if mismatched:
        worst = max(mismatched, key=lambda index: rollouts[index].mismatch or 0.0)
        wanted[worst] = "engine differs"
    scored = [i for i, rollout in enumerate(rollouts) if rollout.reward is not None]
    if scored:
        wanted.setdefault(max(scored, key=rank), "best")
        wanted.setdefault(min(scored, key=rank), "worst")
    for index, rollout in enumerate(rollouts):
        if rollout.status in _FAILURES:
            wanted.setdefault(index, "failed")
    return wanted


def _spread_order(num: int, step: int) -> Iterator[int]:
    """Yields all numbers below `num`, each far from the previous ones.

    The order starts at another number at each `step`, so that the steps show different groups.
    """
    # Multiples of a stride that is coprime to `num` reach all numbers modulo `num`. A stride near
    # the golden ratio spreads them evenly.
    stride = max(1, round(num * 0.618))
    while math.gcd(stride, num) != 1:
        stride += 1
    yield from ((step * 7 + index * stride) % num for index in range(num))


class StepTask(NamedTuple):
    """The order to make the chunk of one step; it may be sent to another process."""

    run_dir: Path
    step: int
    room: int  # bytes that the step's rollouts may take, compressed


class Group(NamedTuple):
    """A group of a step (the rollouts of one prompt), for the page's list of prompts."""

    row: int  # of the prompt in the data set
    mean: float | None  # of the known rewards
    line: LinePosition  # the line of one of its rollouts, which has the prompt


@dataclass(frozen=True)
class StepResult:
    """The chunk of one step, and what the page's summary of all steps needs to know of it."""

    step: int
    content: bytes  # the chunk's JSON
    counts: Counter[str]  # numbers of rollouts, from StepPage.fill
    groups: list[Group]
    rewards: tuple[float, float] | None  # the lowest and the highest


class StepCost(NamedTuple):
    """The bytes that a step takes in the page, compressed."""

    table: float  # for the figures of all its rollouts
    text: float  # for the text of one rollout
    tokens: float  # for the tokens of one rollout


def measure_step(task: StepTask) -> StepCost:
    """Returns the cost of a step, measured on a few of its rollouts, spread evenly."""
    page = StepPage(task)
    # No rollout's text has been added yet, so the content is the table alone.
    table = len(zlib.compress(page.content()))
    texts = [0.0]
    tokens = [0.0]
    for index in spread_indices(len(page.rollouts), _NUM_SAMPLES):
        rollout = page.make(index, "sampled")
        if rollout is not None:
            texts.append(compressed_size([rollout.fields, rollout.prompt]))
            tokens.append(compressed_size(page.tokens(rollout)))
    return StepCost(table, *(sum(sizes) / max(1, len(sizes) - 1) for sizes in (texts, tokens)))


def make_step(task: StepTask) -> StepResult:
    """Makes the chunk of one step. Raises nothing, whatever the files hold."""
    page = StepPage(task)
    counts = page.fill()
    rewards = [rollout.reward for rollout in page.rollouts if rollout.reward is not None]
    return StepResult(
        step=task.step,
        content=page.content(),
        counts=counts,
        groups=page.summarize_groups(),
        rewards=(min(rewards), max(rewards)) if rewards else None,
    )


class StepPage:
    """The rollouts of a step, from which the step's chunk of the page is made.

    The figures of all rollouts are known after the scan; `fill` chooses those whose texts and
    tokens are shown, and `content` makes the chunk.
    """

    def __init__(self, task: StepTask) -> None:
        """Scans the step. No rollout's text is read yet."""
        folder, self._pieces = open_folder(task.run_dir)
        self.rollouts, self.errors = scan_step(folder, task.step)
        # Each group as the list of its rollouts' indices in `rollouts`.
        indices = groupby(range(len(self.rollouts)), lambda index: self.rollouts[index].position)
        self.groups = [list(group) for _, group in indices]
        self.shown: dict[int, PageRollout] = {}  # by the index in `rollouts`
        self._step = task.step
        self._num_bytes_left = float(task.room)  # compressed
        # A longer completion is cut. At least three then fit: a character takes less than a byte
        # when compressed.
        self._max_chars = min(max(task.room // 3, _MIN_COMPLETION_CHARS), _MAX_COMPLETION_CHARS)
        self._broken: set[int] = set()  # indices of rollouts whose lines could not be read
        self._store = LineStore()

    def make(self, index: int, reason: str) -> PageRollout | None:
        """Returns a rollout for the page, without its tokens; None if its line is broken.

        `index` is its place in `rollouts`. `reason` says why the page shows it: "best", "group" and
        so on (see `fill`).
        """
        rollout = self.rollouts[index]
        record = parse_line(self._store.read(rollout.line))
        if record is None:
            self.errors.add(f"{rollout.line.path}: a broken line")
            return None
        scores = self._store.read(rollout.score_line) if rollout.score_line is not None else None
        # The keys are those of the page's scripts (page/tokens.js).
        completion, num_cut = shorten(record.completion, self._max_chars)
        fields = {
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
            fields |= self._episode(record, is_cut=num_cut > 0)
        return PageRollout(record, scores, fields)

    def _episode(self, record: RolloutRecord, *, is_cut: bool) -> dict[str, Any]:
        """Returns the fields that only an episode (a rollout of several turns) has in the page.

        Of the characters for a completion, turns get two thirds and messages one. Sampled turns are
        cut only if the completion is (`is_cut`)."""
        # A turn is sampled by the policy, or given by the prompt or the environment. A segment is
        # the turns that share one context.
        turns = record.turns[:_MAX_TURNS]
        third = self._max_chars // 3
        max_turn_chars = max(_MIN_TURN_CHARS, 2 * third // max(1, len(turns)))
        page_turns = []
        for turn in turns:
            page_turn = {
                "sampled": turn["sampled"],
                "segment": turn["segment"],
                "reward": turn.get("reward"),
                "num_tokens": len(turn["token_ids"]),
            }
            if self._pieces is not None:
                texts = self._pieces.decode(turn["token_ids"])
                if not turn["sampled"] or is_cut:
                    texts = [shorten("".join(texts), max_turn_chars)[0]]
                page_turn["pieces"] = texts
            page_turns.append(page_turn)
        # A message is shown whole or not at all: a cut one would look as if it had been sent so.
        ends = accumulate(len(json.dumps(message)) for message in record.messages[:_MAX_MESSAGES])
        num_shown = sum(end <= third for end in ends)
        messages = record.messages[:num_shown]
        if num_shown < len(record.messages):
            messages.append({"role": "", "content": "further messages are not in this page"})
        return {
            "status": record.status,
            "turns": page_turns,
            "messages": messages,
            "environment": bounded_values(record.environment),
        }

    def tokens(self, rollout: PageRollout) -> dict[str, Any] | None:
        """Returns the values of a rollout's tokens in the page, or None.

        They are lists by name, with an entry for each sampled token. A list is null if its values
        are not known. A null `advantage` means that all tokens have the rollout's; a null `mask`
        means that all tokens count. Numbers that are not finite are null in JSON. Returns None if
        the completion is cut but its tokens cannot be.
        """
        record = rollout.record
        is_cut = rollout.fields["cut"] > 0
        # The turns of an episode refer to all tokens. Without pieces it is not known which tokens
        # belong to the text that was cut.
        if is_cut and (record.status is not None or self._pieces is None):
            return None
        texts = self._pieces.decode(record.completion_ids) if self._pieces is not None else None
        tokens: dict[str, Any] = {
            "pieces": texts,
            "ids": record.completion_ids,
            "logprob": np.round(record.rollout_logprobs, 3).tolist(),
            **dict.fromkeys(("difference", "entropy", "advantage", "mask")),
        }
        with suppress(ConfigError):
            scores = parse_scores(rollout.score_line or b"", "")
            # Scores of another length belong to a rollout of another run.
            if len(scores.difference) == len(record.completion_ids):
                # The page shows three digits; more would only take room.
                for name, values in (
                    ("difference", scores.difference),
                    ("entropy", scores.entropy),
                    ("advantage", scores.advantages),
                ):
                    if values is not None:
                        tokens[name] = list(map(_three_digits, values.tolist()))
                if scores.loss_mask is not None:
                    tokens["mask"] = scores.loss_mask.astype(int).tolist()
        return _cut_middle(tokens, texts, self._max_chars) if is_cut and texts else tokens

    def fill(self) -> Counter[str]:
        """Chooses the rollouts whose texts the page shows, as far as there is room, and reads them.

        Returns numbers of rollouts for the page's note on what is left out.

        First come the texts of the most mismatched, the best, the worst and some failed rollouts,
        then their tokens and further failed ones; then whole groups, different ones at each step;
        then single rollouts, spread evenly.

        The choice depends on the step and its room alone, not on time, so that the same page can be
        made again.
        """
        wanted = _wanted_rollouts(self.rollouts)
        order = list(wanted)
        # All these texts come before any tokens: another text is worth more than tokens.
        for index in order[:_NUM_EARLY]:
            self._add_text(index, wanted[index])
        for index in order[:_NUM_EARLY]:
            self._add_tokens(index)
        for index in order[_NUM_EARLY:]:
            self._add_text(index, wanted[index])
        num_hidden = len(wanted) - len(self.shown)
        for number in _spread_order(len(self.groups), self._step):
            group = self.groups[number]
            has_room = all(self._add_text(index, "group") for index in group)
            if not has_room or not all(map(self._add_tokens, group)):
                break
        for index in _spread_order(len(self.rollouts), self._step):
            if not self._add_text(index, "sampled"):
                break
            self._add_tokens(index)
        return Counter(
            read=len(self.rollouts),
            shown=len(self.shown),
            wanted=len(wanted),
            hidden=num_hidden,  # of the wanted ones
            broken=self.errors.num,  # lines and files
        )

    def _add_text(self, index: int, reason: str) -> bool:
        """Adds a rollout to those that are shown. Returns False if there is no room left.

        A rollout whose line cannot be read is left out, and True is returned.
        """
        if index in self.shown or index in self._broken:
            return True
        # A browser lists a few thousand rollouts without delay.
        if len(self.shown) >= _MAX_SHOWN or self._num_bytes_left <= 0:
            return False
        rollout = self.make(index, reason)
        if rollout is None:
            self._broken.add(index)
            return True
        # A group stores its prompt only once, so its size is not counted for each rollout.
        if not self._spend([rollout.fields, rollout.prompt if reason != "group" else ""]):
            return False
        self.shown[index] = rollout
        return True

    def _add_tokens(self, index: int) -> bool:
        """Adds the tokens of a rollout that is shown. Returns False if there is no room left."""
        rollout = self.shown.get(index)
        if rollout is None or rollout.fields["tokens"] is not None:
            return True
        if self._num_bytes_left <= 0:
            return False
        tokens = self.tokens(rollout)
        if tokens is None or self._spend(tokens):
            rollout.fields["tokens"] = tokens
            return True
        return False

    def _spend(self, value: object) -> bool:
        """Takes the room for `value` from what is left. Returns False if there is not enough."""
        # Each value is measured: even texts of one policy compress very differently.
        size = compressed_size(value)
        if size > self._num_bytes_left:
            return False
        self._num_bytes_left -= size
        return True

    def summarize_groups(self) -> list[Group]:
        """Returns a summary of each group of the step: its row, its mean reward and a line."""
        summaries = []
        for indices in self.groups:
            rewards = [self.rollouts[index].reward for index in indices]
            known_rewards = [reward for reward in rewards if reward is not None]
            mean = sum(known_rewards) / len(known_rewards) if known_rewards else None
            rollout = self.rollouts[indices[0]]
            summaries.append(Group(rollout.row, mean, rollout.line))
        return summaries

    def content(self) -> bytes:
        """Returns the JSON of the step: a table of all rollouts, and the texts that are shown.

        In the table, which is stored by columns, `status` is an index into "status_names", `prompt`
        one into "prompts", and `shown` one into "rollouts", or -1 if the text is not shown.
        """
        shown_indices = sorted(self.shown)
        shown_numbers = {index: number for number, index in enumerate(shown_indices)}
        status_names = ["ok", *sorted({rollout.status for rollout in self.rollouts} - {"ok"})]
        # Stored by columns, since a column of numbers compresses far better than rows of objects.
        table = {
            name: [getattr(rollout, name) for rollout in self.rollouts]
            for name in ("position", "sample", "row", "tokens", "finish")
        }
        for name, num_digits in (("reward", 6), ("advantage", 4), ("mismatch", 3)):
            values = (getattr(rollout, name) for rollout in self.rollouts)
            table[name] = [round_digits(value, num_digits) for value in values]
        status_numbers = {name: number for number, name in enumerate(status_names)}
        table["status"] = [status_numbers[rollout.status] for rollout in self.rollouts]
        table["shown"] = [shown_numbers.get(index, -1) for index in range(len(self.rollouts))]
        table["prompt"] = []
        prompts = []
        for number, indices in enumerate(self.groups):
            table["prompt"] += [number] * len(indices)
            shown = [self.shown[index] for index in indices if index in self.shown]
            prompts.append(shown[-1].prompt if shown else "")
        return json_bytes(
            {
                "step": self._step,
                "table": table,
                "status_names": status_names,
                "prompts": prompts,
                "rollouts": [self.shown[index].fields for index in shown_indices],
            }
        )


@lru_cache(maxsize=1)
def open_folder(run_dir: Path) -> tuple[RunFolder, TokenPieces | None]:
    """Returns the reader of a run's dumps, and the decoder of its tokens (None without one).

    They are cached, so that a process opens them once for all its tasks."""
    return RunFolder(run_dir), read_pieces(run_dir)


def spread_indices(num: int, max_indices: int) -> list[int]:
    """Returns at most `max_indices` numbers below `num`, evenly spread, with 0 and the largest."""
    spread = np.linspace(0, max(0, num - 1), min(num, max_indices)).round().astype(int)
    indices: list[int] = np.unique(spread).tolist()
    return indices


def round_digits(value: float | None, num_digits: int) -> float | int | None:
    """Returns a number rounded to `num_digits` significant digits; a whole number as an int."""
    if value is None:
        return None
    if value == int(value) and abs(value) < 10**num_digits:
        return int(value)
    return float(f"{value:.{num_digits}g}")
