"""A step's part of the page, made in a process of its own where there are many: the figures of all its rollouts, and
some of them whole."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from grpo_spmd.report.json_text import json_bytes
from grpo_spmd.report.pieces import Pieces, read_pieces
from grpo_spmd.report.scan import Contents, Line, StepScan, scan_step
from grpo_spmd.report.selection import Selection, select, size_of
from grpo_spmd.report.shown import Shown, shown

_LEAST_CUT, _MOST_CUT = 2_000, 60_000  # characters of a completion that is shown whole


@dataclass(frozen=True)
class StepTask:
    """`room`: bytes that rollouts may take, compressed."""

    run_dir: Path
    step: int
    parts: Sequence[Path]
    score_parts: Sequence[Path]
    room: int


@dataclass(frozen=True)
class StepResult:
    step: int
    content: bytes  # JSON of the step's chunk
    num_rollouts: int
    num_shown: int
    num_wanted: int  # best, worst, most mismatched, failed
    num_wanted_shown: int
    num_broken: int
    rows: npt.NDArray[np.int64]  # of the groups
    means: npt.NDArray[np.float64]  # of their rewards; NaN: none is known
    first_lines: list[Line]  # one of each group
    lowest: float | None  # reward of the step
    highest: float | None


@dataclass(frozen=True)
class Cost:
    """Bytes in the page, compressed: of the figures of all rollouts of a step; of one rollout's text; of its tokens."""

    table: float
    text: float
    tokens: float


def cost_of(task: StepTask) -> Cost:
    """Of this step, by some of its rollouts."""
    scan, contents = scan_step(task.step, task.parts, task.score_parts)
    reader = _Reader(scan, contents, _pieces_of(task.run_dir), _MOST_CUT)
    places = {round(place) for place in np.linspace(0, len(scan) - 1, 8).tolist()} if len(scan) else set()
    some = [made for place in sorted(places) if (made := reader.make(place, "sampled")) is not None]
    texts = [size_of([made.text, made.prompt]) for made in some]
    tokens = [size_of(made.tokens) for made in some]
    table = len(zlib.compress(_chunk(scan, Selection({}, set()))))
    return Cost(table, float(np.mean(texts or [0.0])), float(np.mean(tokens or [0.0])))


def make_step(task: StepTask) -> StepResult:
    """Raises nothing for whatever the files hold."""
    scan, contents = scan_step(task.step, task.parts, task.score_parts)
    reader = _Reader(scan, contents, _pieces_of(task.run_dir), task.room)
    chosen = select(scan, task.room, reader.make)
    rows, means, firsts = _groups(scan)
    known = [reward for reward in scan.rewards if reward is not None]
    return StepResult(
        step=task.step,
        content=_chunk(scan, chosen),
        num_rollouts=len(scan),
        num_shown=len(chosen.rollouts),
        num_wanted=chosen.num_wanted,
        num_wanted_shown=chosen.num_wanted_shown,
        num_broken=contents.num_broken,
        rows=rows,
        means=means,
        first_lines=firsts,
        lowest=min(known, default=None),
        highest=max(known, default=None),
    )


class _Reader:
    """Makes what is shown of single rollouts, by their place in the step."""

    def __init__(self, scan: StepScan, contents: Contents, pieces: Pieces | None, room: int) -> None:
        self._scan, self._contents, self._pieces = scan, contents, pieces
        self._longest = min(max(room // 3, _LEAST_CUT), _MOST_CUT)  # a letter takes less than a byte, compressed

    def make(self, place: int, why: str) -> Shown | None:
        line = self._contents.lines({0: self._scan.lines[place]}).get(0)
        if line is None:
            return None
        where = self._scan.score_lines[place]
        scores = self._contents.lines({0: where}, of_scores=True).get(0) if where is not None else None
        made = shown(line, scores, self._pieces, self._longest, why)
        if made is None:
            self._contents.count_broken()
        return made


@lru_cache(maxsize=1)
def _pieces_of(run_dir: Path) -> Pieces | None:
    return read_pieces(run_dir)


def _groups(scan: StepScan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], list[Line]]:
    """Row, mean reward and first line of each group of the step."""
    positions = np.array(scan.positions, np.int64)
    if not len(positions):
        return np.zeros(0, np.int64), np.zeros(0), []
    firsts = np.flatnonzero(np.diff(positions, prepend=positions[0] - 1))
    rewards = np.array([np.nan if reward is None else reward for reward in scan.rewards])
    known = ~np.isnan(rewards)
    sums, counts = np.add.reduceat(np.where(known, rewards, 0.0), firsts), np.add.reduceat(known.astype(int), firsts)
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return np.array(scan.rows, np.int64)[firsts], means, [scan.lines[first] for first in firsts]


def _chunk(scan: StepScan, chosen: Selection) -> bytes:
    order = sorted(chosen.rollouts)
    shown_at = {place: number for number, place in enumerate(order)}
    names = ["ok", *sorted(set(scan.statuses) - {"ok"})]
    numbers = {name: number for number, name in enumerate(names)}
    prompt_of = dict[int, int]()
    for position in scan.positions:
        prompt_of.setdefault(position, len(prompt_of))
    prompts = [""] * len(prompt_of)
    for place in order:
        prompts[prompt_of[scan.positions[place]]] = chosen.rollouts[place].prompt
    table = {
        "position": scan.positions,
        "sample": scan.samples,
        "row": scan.rows,
        "reward": [_rounded(value, 6) for value in scan.rewards],
        "advantage": [_rounded(value, 4) for value in scan.advantages],
        "tokens": scan.tokens,
        "finish": [int(is_cut) for is_cut in scan.is_cut],
        "status": [numbers[status] for status in scan.statuses],
        "mismatch": [_rounded(value, 3) for value in scan.mismatches],
        "shown": [shown_at.get(place, -1) for place in range(len(scan))],
        "prompt": [prompt_of[position] for position in scan.positions],
    }
    rollouts = [_encoded(chosen.rollouts[place], place in chosen.with_tokens) for place in order]
    head = json_bytes({"step": scan.step, "table": table, "status_names": names, "prompts": prompts})
    return head[:-1] + b',"rollouts":[' + b",".join(rollouts) + b"]}"


def _encoded(of: Shown, with_tokens: bool) -> bytes:
    if not with_tokens or of.tokens is None:
        return json_bytes(of.text)
    text = json_bytes({name: value for name, value in of.text.items() if name != "tokens"})
    numbers = {name: msgspec.Raw(json_bytes(value)) for name, value in of.tokens.items()}
    return text[:-1] + b',"tokens":' + msgspec.json.encode(numbers) + b"}"


def _rounded(value: float | None, digits: int) -> float | int | None:
    """To so many digits; a whole number is one."""
    if value is None:
        return None
    if value == int(value) and abs(value) < 10**digits:
        return int(value)
    return float(f"{value:.{digits}g}")
