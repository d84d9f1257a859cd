"""Draws a page again and again while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.tools.report.run import RecordedRun, read_run
from grpo_spmd.tools.show.overview import newest_lines, state_lines
from grpo_spmd.tools.terminal import Line, Terminal, find_terminal

_POLL_S = 0.5  # between two looks at the size of metrics.jsonl
_STATE_S = 10.0  # between two looks at the run's state: it may have been killed
# After reading and drawing, nothing is read for so many times as long as that took.
_PAUSE_FACTOR = 10
_RUNNING_STATES = ("going", "silent")
Draw = Callable[[RecordedRun, Terminal], list[Line]]


def follow(run_dir: Path, draw: Draw) -> None:
    """Draws the page when metrics.jsonl or the terminal changed, until the run has ended.

    If stdout is no terminal, writes the page once, and then a line for each step. Raises
    ConfigError if there is no run.
    """
    drawn_for: tuple[int, Terminal] | None = None
    is_first = True
    last_step = 0
    next_draw_s = 0.0
    next_state_s = 0.0
    while True:
        begin = time.monotonic()
        terminal = find_terminal()
        current = (_file_size(run_dir / "metrics.jsonl"), terminal)
        if (begin >= next_draw_s and current != drawn_for) or begin >= next_state_s:
            run = read_run(run_dir)
            has_ended = run.state not in _RUNNING_STATES
            if terminal.is_tty or is_first:
                page = _draw_page(draw, run, terminal, has_ended)
                _show_page(page, terminal, clear=is_first or has_ended, redraw=not has_ended)
            else:
                if run.last_step != last_step:
                    terminal.write(list(newest_lines(run, terminal))[-1:])
                if has_ended:
                    terminal.write(state_lines(run, terminal))
            if has_ended:
                return
            is_first = False
            drawn_for = current
            last_step = run.last_step
            # A large run takes long to read, and must not keep a core busy all the time.
            end = time.monotonic()
            next_draw_s = end + _PAUSE_FACTOR * (end - begin)
            next_state_s = max(next_draw_s, end + _STATE_S)
        time.sleep(_POLL_S)


def _draw_page(draw: Draw, run: RecordedRun, terminal: Terminal, has_ended: bool) -> list[Line]:
    """Returns the page, or why there is none yet: the first completions may be to come."""
    try:
        return draw(run, terminal)
    except ConfigError as error:
        if has_ended:
            raise
        warning = terminal.excerpt(str(error), 4, styles="warning")
        return [*state_lines(run, terminal), *warning]


def _show_page(lines: list[Line], terminal: Terminal, *, clear: bool, redraw: bool) -> None:
    if terminal.is_tty and clear:
        terminal.clear()
    if terminal.is_tty and redraw:
        terminal.redraw(lines)
    else:
        # The last page stays as a whole, for a user who scrolls back.
        terminal.write(lines)


def _file_size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0
