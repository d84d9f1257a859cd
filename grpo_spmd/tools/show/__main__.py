"""The command: python -m grpo_spmd.show RUN [--step N] [--worst K | --best K | --prompt P | --grep TEXT] [--follow]"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.files import hold_standard_streams
from grpo_spmd.tools.report.run import RecordedRun, read_run
from grpo_spmd.tools.show.completions import Look, ranked_lines
from grpo_spmd.tools.show.follow import follow
from grpo_spmd.tools.show.overview import overview
from grpo_spmd.tools.show.paper import Line
from grpo_spmd.tools.show.prompts import prompt_page
from grpo_spmd.tools.show.search import search_lines
from grpo_spmd.tools.show.step import step_lines
from grpo_spmd.tools.show.terminal import Terminal, find_terminal

_MOST = 1000  # completions of one page


def main() -> None:
    hold_standard_streams()
    args = _arguments()
    try:
        if args.follow:
            follow(args.run_dir, lambda run, terminal: list(_page(run, args, terminal)))
            return
        terminal = find_terminal()
        terminal.write(_page(read_run(args.run_dir), args, terminal))
    except ConfigError as error:
        refuse(error)
    except KeyboardInterrupt:
        find_terminal().leave()
        raise SystemExit(0 if args.follow else 130) from None


def _arguments() -> argparse.Namespace:
    about = "Show a run in the terminal: its state, what to look at, its curves; a step, and completions. Reads the "
    about += (
        "run's folder and writes nothing; the run may be going, killed or of an earlier version."
    )
    usage = "%(prog)s RUN [--step N] [--full] [--follow]\n"
    usage += "         [--worst K | --best K | --prompt P | --grep TEXT]"
    parser = OneLineParser(prog="python -m grpo_spmd.show", description=about, usage=usage)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="the run's folder, or a copy of it")
    newest = "(default: the newest with completions)"
    add(
        "--step",
        type=int,
        metavar="N",
        help="a step's metrics and groups; or the step of the completions " + newest,
    )
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--worst", type=int, metavar="K", help="the K completions of a step with the least reward"
    )
    one.add_argument("--best", type=int, metavar="K", help="the K with the most")
    said = "a prompt over the steps, by its row's number or a text in it, and its completions"
    one.add_argument("--prompt", metavar="P", help=said)
    said = "completions of all steps, or of --step, that contain TEXT as it is, upper and lower case alike"
    one.add_argument("--grep", metavar="TEXT", help=said)
    add("--full", action="store_true", help="nothing is left out of texts and lists")
    add(
        "--follow",
        action="store_true",
        help="draw again as the run goes on, until it ends or Ctrl-C",
    )
    args = parser.parse_args()
    for name, least in (("step", 0), ("worst", 1), ("best", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be a whole number from {least} on; got {value}")
        if name != "step" and value is not None and value > _MOST:
            parser.error(f"--{name} must be at most {_MOST}; got {value}")
    for name in ("prompt", "grep"):
        if getattr(args, name) == "":
            parser.error(f"--{name} is empty; give a text that is to be found")
    if args.follow and (args.step is not None or args.grep is not None):
        parser.error(
            "--follow shows the newest step, so it goes with neither --step nor --grep; leave one out"
        )
    return args


def _page(run: RecordedRun, args: argparse.Namespace, terminal: Terminal) -> Iterator[Line]:
    """Raises ConfigError for a step or a prompt that the run does not have."""
    paper = terminal.paper
    look = Look(paper, args.full, terminal.has_colour)
    if args.step is not None:
        _check_step(run, args.step)
    if args.grep is not None:
        return search_lines(run, args.grep, args.step, look)
    if args.prompt is not None:
        return prompt_page(run, args.prompt, args.step, look)
    if args.worst or args.best:
        return ranked_lines(run, args.step, args.worst or args.best, bool(args.best), look)
    return overview(run, paper) if args.step is None else step_lines(run, args.step, paper)


def _check_step(run: RecordedRun, step: int) -> None:
    known = {line["step"] for line in [*run.steps, *run.evaluations]} | set(run.dumped_steps)
    if step not in known:
        of = f"it has steps {min(known)} to {max(known)}" if known else "no step is through yet"
        raise ConfigError(f"--step {step}: {run.folder} has no such step; {of}")


if __name__ == "__main__":
    main()
