"""The command `python -m grpo_spmd.show RUN`: a run, a step or completions in the terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.tools.report.run import RecordedRun, read_run
from grpo_spmd.tools.show.completions import View, ranked_completions
from grpo_spmd.tools.show.overview import overview
from grpo_spmd.tools.show.prompts import prompt_page, search_lines
from grpo_spmd.tools.show.step import follow, step_lines
from grpo_spmd.tools.terminal import Line, Terminal, find_terminal

_MAX_COMPLETIONS = 1000  # on one page


def main() -> None:
    hold_standard_streams()
    args = _parse_arguments()
    try:
        # follow() writes itself, since it looks at the terminal again before each page.
        if args.follow:
            follow(args.run_dir, lambda run, terminal: list(_page(run, args, terminal)))
            return
        terminal = find_terminal()
        terminal.write(_page(read_run(args.run_dir), args, terminal))
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        find_terminal().leave()
        # Ctrl-C is the usual end of --follow.
        raise SystemExit(0 if args.follow else 130) from None


def _parse_arguments() -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m grpo_spmd.show",
        description="Show a run in the terminal: its state, what to look at, its curves; a step, "
        "and completions. Reads the run's folder and writes nothing; the run may be running, "
        "killed or from an earlier version.",
        usage="%(prog)s RUN [--step N] [--full] [--follow]\n"
        "         [--worst K | --best K | --prompt P | --grep TEXT]",
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the run's folder, or a copy of it")
    add(
        "--step",
        type=int,
        metavar="N",
        help="a step's metrics and groups; or the step of the completions "
        "(default: the newest with completions)",
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument(
        "--worst", type=int, metavar="K", help="the K completions of a step with the lowest reward"
    )
    kind.add_argument("--best", type=int, metavar="K", help="the K with the highest reward")
    kind.add_argument(
        "--prompt",
        metavar="P",
        help="a prompt over the steps, by its row's number or a text in it, and its completions",
    )
    kind.add_argument(
        "--grep",
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
    # argparse would say only "invalid value".
    for name, smallest in (("step", 0), ("worst", 1), ("best", 1)):
        value = getattr(args, name)
        if value is not None and value < smallest:
            parser.error(f"--{name} must be a whole number from {smallest} on; got {value}")
        if name != "step" and value is not None and value > _MAX_COMPLETIONS:
            parser.error(f"--{name} must be at most {_MAX_COMPLETIONS}; got {value}")
    for name in ("prompt", "grep"):
        if getattr(args, name) == "":
            parser.error(f"--{name} is empty; give a text to look for")
    # An old step does not change, and a search of all steps takes too long to repeat.
    if args.follow and (args.step is not None or args.grep is not None):
        problem = "--follow shows the newest step, so it goes with neither --step nor --grep"
        parser.error(f"{problem}; leave one out")
    return args


def _page(run: RecordedRun, args: argparse.Namespace, terminal: Terminal) -> Iterator[Line]:
    """Returns the lines of the page that the arguments ask for.

    Raises ConfigError for a step or a prompt that the run does not have.
    """
    # The pages are generators: the first lines are shown while the rest is read.
    view = View(terminal, args.full)
    if args.step is not None:
        _check_step(run, args.step)
    if args.grep is not None:
        return search_lines(run, args.grep, args.step, view)
    if args.prompt is not None:
        return prompt_page(run, args.prompt, args.step, view)
    if args.worst or args.best:
        num = args.worst or args.best
        return ranked_completions(run, args.step, num, is_best=bool(args.best), view=view)
    return overview(run, terminal) if args.step is None else step_lines(run, args.step, terminal)


def _check_step(run: RecordedRun, step: int) -> None:
    steps = {line["step"] for line in [*run.steps, *run.evaluations]} | set(run.dumped_steps)
    if step not in steps:
        remark = f"it has steps {min(steps)} to {max(steps)}" if steps else "no step is through yet"
        raise ConfigError(f"--step {step}: {run.folder} has no such step; {remark}")


if __name__ == "__main__":
    main()
