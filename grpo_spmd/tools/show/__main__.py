"""The command `python -m grpo_spmd.show RUN`: a run, a step or completions in the terminal."""

from __future__ import annotations

import argparse
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.diagnosis.run import RecordedRun, read_run
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.tools.follow import changes, file_sizes
from grpo_spmd.tools.show.completions import ranked_completions
from grpo_spmd.tools.show.groups import prompt_page, search_lines, step_lines
from grpo_spmd.tools.show.overview import newest_lines, overview, state_lines
from grpo_spmd.tools.terminal import Line, Terminal, find_terminal


def main() -> None:
    """Prints the page that the arguments ask for, with --follow again and again."""
    hold_standard_streams()
    args = _parse_arguments()
    try:
        if args.follow:
            _follow(args)
        else:
            terminal = find_terminal(args.full)
            terminal.write(_page(read_run(args.run_dir), args, terminal))
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        find_terminal().leave()
        # Ctrl-C is the usual end of --follow.
        raise SystemExit(0 if args.follow else 130) from None


def _number(low: int, high: int) -> Callable[[str], int]:
    """Returns a parser of option values: whole numbers from `low` to `high`."""

    def read(text: str) -> int:
        """Parses one value for argparse, which prints the error."""
        if not (text.isdecimal() and low <= int(text) <= high):
            raise ArgumentTypeError(f"must be a whole number from {low} to {high}; got {text!r}")
        return int(text)

    return read


def _text(text: str) -> str:
    """Parses an option's value that must not be empty."""
    if not text:
        raise ArgumentTypeError("is empty; give a text to look for")
    return text


def _parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line.

    Exits with code 2 for options that exclude each other."""
    parser = OneLineParser(
        prog="python -m grpo_spmd.show",
        description="Show a run in the terminal: its state, what to look at, its curves; a step, "
        "and completions. Reads the run's folder and writes nothing; the run may be running, "
        "killed or from an earlier version.",
        usage="%(prog)s RUN [--step N] [--full] [--follow]\n"
        "         [--worst K | --best K | --prompt P | --grep TEXT]",
    )
    count = _number(1, 1000)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the run's folder, or a copy of it")
    add(
        "--step",
        type=_number(0, 10**15),
        metavar="N",
        help="a step's metrics and groups; or the step of the completions "
        "(default: the newest with completions)",
    )
    kind = parser.add_mutually_exclusive_group().add_argument
    kind("--worst", type=count, metavar="K", help="the K completions with the lowest reward")
    kind("--best", type=count, metavar="K", help="the K with the highest reward")
    kind(
        "--prompt",
        type=_text,
        metavar="P",
        help="a prompt over the steps, by its row's number or a text in it, and its completions",
    )
    kind(
        "--grep",
        type=_text,
        metavar="TEXT",
        help="completions of all steps, or of --step, that contain TEXT in upper or lower case",
    )
    add("--full", action="store_true", help="leave nothing out of texts and lists")
    add(
        "--follow",
        action="store_true",
        help="draw again as the run goes on, until it ends or Ctrl-C",
    )
    args = parser.parse_args()
    # A finished step does not change, and a search of all steps takes too long to repeat.
    if args.follow and (args.step is not None or args.grep is not None):
        problem = "--follow shows the newest step, so it goes with neither --step nor --grep"
        parser.error(f"{problem}; leave one out")
    return args


def _page(run: RecordedRun, args: argparse.Namespace, terminal: Terminal) -> Iterator[Line]:
    """Returns the lines of the page that the arguments ask for.

    Raises ConfigError for a step or a prompt that the run does not have.
    """
    # The pages are generators: the first lines are shown while the rest is read.
    step = args.step
    steps = {line["step"] for line in [*run.steps, *run.evaluations]} | set(run.dumped_steps)
    if step is not None and step not in steps:
        remark = (
            f"it has steps {min(steps)} to {max(steps)}" if steps else "no step has finished yet"
        )
        raise ConfigError(f"--step {step}: {run.folder} has no such step; {remark}")
    if args.grep is not None:
        return search_lines(run, args.grep, step, terminal)
    if args.prompt is not None:
        return prompt_page(run, args.prompt, step, terminal)
    num = args.worst or args.best
    if num:
        return ranked_completions(run, step, num, is_best=bool(args.best), terminal=terminal)
    return overview(run, terminal) if step is None else step_lines(run, step, terminal)


def _follow(args: argparse.Namespace) -> None:
    """Draws the page again when the run's files or the terminal have changed, until the run ends.

    If stdout is no terminal, writes the page once, and then a line for each new step. Raises
    ConfigError if there is no run, or if it has ended and does not have what was asked for.
    """
    last_step: int | None = None  # at the previous look; None before the first

    def look() -> object:
        """Returns what the page depends on: sizes of the run's files, and the terminal's size."""
        return file_sizes([args.run_dir]), find_terminal()

    for _ in changes(look, min_age_s=0.0):
        terminal = find_terminal(args.full)
        run = read_run(args.run_dir)
        # A silent run has written nothing for some time, but may still go on.
        has_ended = run.state not in ("running", "silent")
        if terminal.is_tty or last_step is None:
            try:
                lines = list(_page(run, args, terminal))
            except ConfigError as error:
                if has_ended:
                    raise
                # What was asked for may still come, such as the first completions.
                warning = terminal.excerpt(str(error), 4, styles="warning")
                lines = [*state_lines(run, terminal), *warning]
            if terminal.is_tty:
                terminal.redraw(lines, is_last=has_ended)
            else:
                terminal.write(lines)
        else:
            if run.last_step != last_step:
                terminal.write(list(newest_lines(run, terminal))[-1:])
            if has_ended:
                terminal.write(state_lines(run, terminal))
        if has_ended:
            return
        last_step = run.last_step


if __name__ == "__main__":
    main()
