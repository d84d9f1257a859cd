"""The same page again and again, while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools.report.run import RecordedRun, read_run
from grpo_spmd.tools.show.overview import newest_line, state_lines
from grpo_spmd.tools.show.paper import Line
from grpo_spmd.tools.show.terminal import Terminal, find_terminal

_LOOK_S, _STATE_S = (
    0.5,
    10.0,
)  # how often metrics.jsonl is looked at; and the run, which may have been killed
_SHARE = 10  # of the time that reading and drawing take, so long nothing is read
_GOES_ON = ("going", "silent")
Draw = Callable[[RecordedRun, Terminal], list[Line]]


def follow(run_dir: Path, draw: Draw) -> None:
    """Draws the page whenever metrics.jsonl grew or the terminal changed, until the run has ended; where the output is
    no terminal, the page once and then a line a step. Raises ConfigError where there is no run."""
    terminal, is_first = find_terminal(), True
    seen: tuple[int, Terminal] | None = None
    next_s, state_s, last = 0.0, 0.0, 0
    while True:
        now = time.monotonic()
        there = (_size(run_dir / "metrics.jsonl"), find_terminal())
        if is_first or (now >= next_s and there != seen) or now >= state_s:
            run, terminal = read_run(run_dir), there[1]
            ended = run.state not in _GOES_ON
            if terminal.is_tty or is_first:
                _show(_drawn(draw, run, terminal, ended), terminal, is_first, ended)
            elif ended or run.last_step != last:
                terminal.write(
                    [*newest_line(run, terminal.paper)][-1:] if run.last_step != last else []
                )
                terminal.write(state_lines(run, terminal.paper) if ended else [])
            if ended:
                return
            seen, is_first, last = there, False, run.last_step
            end = time.monotonic()
            next_s, state_s = end + _SHARE * (end - now), end + max(_STATE_S, _SHARE * (end - now))
        time.sleep(_LOOK_S)


def _drawn(draw: Draw, run: RecordedRun, terminal: Terminal, ended: bool) -> list[Line]:
    """The page, or why there is none yet: the first completions of a run may be to come."""
    try:
        return draw(run, terminal)
    except ConfigError as error:
        if ended:
            raise
        return [
            *state_lines(run, terminal.paper),
            *terminal.paper.excerpt(str(error), 4, 0, 0, "warning"),
        ]


def _show(lines: list[Line], terminal: Terminal, is_first: bool, ended: bool) -> None:
    """The last page stays, whole, for whoever scrolls back."""
    if not terminal.is_tty:
        terminal.write(lines)
        return
    if is_first or ended:
        terminal.clear()
    if ended:
        terminal.write(lines)
    else:
        terminal.redraw(lines)


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
