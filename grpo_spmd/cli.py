"""The console script `grpo-spmd`.

`grpo-spmd train` checks config and data, then starts the ranks: on this machine alone, or together
with other machines (torchrun's options --nnodes, --rdzv-endpoint and so on). A single rank runs in
this process, so that breakpoint() works. For every other command `grpo-spmd COMMAND` is the same as
`python -m grpo_spmd.COMMAND`.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import os
import runpy
import signal
import sys
import textwrap
from typing import NoReturn

from grpo_spmd import __version__
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.distributed import interrupt, startup
from grpo_spmd.files import hold_standard_streams, show

_COMMANDS = {
    "checkup": "Check whether this machine, or these ranks, are fit for a run",
    "demo": "Make the models, tokenizers and prompts of the built-in demos",
    "eval": "Evaluate a checkpoint or a model, without training",
    "export": "Write a checkpoint as a model folder for transformers and vLLM",
    "plan": "Work out memory by phase and time of a step, without a GPU",
    "port": "Translate a script of TRL, verl or OpenRLHF into a config",
    "prefetch": "Fetch the models and data sets that a config names from the hub",
    "replay": "Repeat a dumped step on the CPU",
    "report": "Write one HTML file about a run, without network or server",
    "show": "Show a run, its steps and completions in the terminal",
    "small": "Run GRPO on one page, made of this package's parts",
    "train": "Train a language model with GRPO",
}
_NODE_OPTIONS = [
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "local-addr",
]
# Options that are passed on to torchrun unchanged.
_TORCHRUN_OPTIONS = [*_NODE_OPTIONS, "max-restarts"]
_COLUMNS = 80
_USAGE = """\
usage: grpo-spmd COMMAND ...

  grpo-spmd train --nproc N --config x.yaml [section.key=value ...]

commands (each has --help):
{commands}
"""
_TRAIN_USAGE = """\
usage: grpo-spmd train [--nproc N] [TORCHRUN OPTIONS] --config x.yaml
                       [section.key=value ...]

Checks config and data, then starts N ranks on this machine. The default is one
rank in this process, where a debugger works. Ctrl-C once saves and stops; twice
stops at once.

On several nodes, start the same command on each with --nnodes and
--rdzv-endpoint. These options are passed on to torchrun:
{options}

What follows is the help of python -m grpo_spmd.train.
"""


def main() -> None:
    """Runs the command that the arguments name."""
    hold_standard_streams()
    if not sys.flags.safe_path:
        # As python -m does, so that a user's reward file can import modules beside it.
        sys.path[0] = os.getcwd()
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        lines = "\n".join(f"  {name:9} {text}" for name, text in _COMMANDS.items())
        show(_USAGE.format(commands=lines).rstrip())
        return
    name = arguments[0]
    if name in ("--version", "-V", "version"):
        show(f"grpo-spmd {__version__}")
        return
    if name not in _COMMANDS:
        # With a cutoff of 0.0 there is always a closest command.
        closest = difflib.get_close_matches(name, _COMMANDS, 1, 0.0)[0]
        remedy = f"did you mean {closest}? --help lists them"
        refuse(ConfigError(f"grpo-spmd {name}: unknown command; {remedy}"))
    if name == "train":
        _train(arguments[1:])
        return
    sys.argv = [f"grpo-spmd {name}", *arguments[1:]]
    try:
        runpy.run_module(f"grpo_spmd.{name}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        say(f"grpo-spmd {name}: stopped by Ctrl-C")
        sys.exit(1)


def _train(arguments: list[str]) -> None:
    """Runs `grpo-spmd train`: checks config and data, then replaces this process by torchrun's.

    The launcher that execv starts is distributed/launch.py. With --help, --check or --explain, and
    with a single rank and no options of torchrun, all is done in this process.
    """
    interrupt.listen()
    parser = _TrainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc")
    for name in _TORCHRUN_OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")  # torchrun takes both
    args, rest = parser.parse_known_args(arguments)
    values = vars(args).items()
    options = {name.replace("_", "-"): value for name, value in values if value is not None}
    local_ranks = _positive_number("--nproc", options.pop("nproc", "1"))
    num_nodes = _positive_number("--nnodes", options.get("nnodes", "1").partition(":")[0])
    is_help = bool({"-h", "--help"} & {*rest})
    if is_help:
        names = textwrap.fill(" ".join(f"--{name}" for name in _TORCHRUN_OPTIONS), _COLUMNS)
        show(_TRAIN_USAGE.format(options=names))
    sys.argv = ["grpo-spmd train", *rest]
    # Imported here, so that the other commands need not load the checks of training.
    from grpo_spmd import train

    if is_help or (local_ranks == 1 and not options):
        train.main()
        return
    sizes = {"WORLD_SIZE": str(local_ranks * num_nodes), "LOCAL_WORLD_SIZE": str(local_ranks)}
    os.environ.update(sizes)
    startup.begin("checking config and data")
    if {"--check", "--explain"} & {*rest}:
        train.main()
        return
    # The check's output is not shown; an error in it exits with 2 before any rank starts.
    sys.argv.append("--check")
    with contextlib.redirect_stdout(io.StringIO()):
        train.main()
    # The checks have read these two; torchrun sets its own for each rank.
    for name in sizes:
        del os.environ[name]
    words = [f"--{name}={value}" for name, value in options.items()]
    if not {*_NODE_OPTIONS} & options.keys():
        words.append("--standalone")
    elif "rdzv-endpoint" in options and "rdzv-backend" not in options:
        words.append("--rdzv-backend=c10d")
    launch = ["-m", "grpo_spmd.distributed.launch", *words, f"--nproc-per-node={local_ranks}"]
    sys.stdout.flush()
    # execv keeps the signal mask: a Ctrl-C stays pending until launch.py can handle it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.execv(sys.executable, [sys.executable, *launch, "-m", "grpo_spmd.train", *rest])


class _TrainParser(argparse.ArgumentParser):
    """A parser that reports a wrong argument in one line, as other wrong input is reported."""

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after printing `message`."""
        refuse(ConfigError(message))


def _positive_number(name: str, text: str) -> int:
    """Returns the number in `text`. Exits with code 2 if it is no positive integer."""
    if not (text.isdecimal() and int(text) > 0):
        refuse(ConfigError(f"{name}: {text!r} is not a number from 1 on"))
    return int(text)


if __name__ == "__main__":
    main()
