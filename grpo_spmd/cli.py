"""The console script: grpo-spmd train checks, then starts the ranks; grpo-spmd COMMAND is python -m grpo_spmd.COMMAND.

The ranks of one machine, or with --nnodes and --rdzv-... (torchrun's options, passed on) of several. One rank alone is
the debug mode: this process itself, in which breakpoint() works.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import io
import os
import re
import runpy
import signal
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

from grpo_spmd import __version__
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.distributed import interrupt, startup
from grpo_spmd.files import hold_standard_streams, show

_PACKAGE = Path(__file__).parent
_STARTS = '\nif __name__ == "__main__":'
_PASSED_ON = (
    "nnodes",
    "node-rank",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "master-addr",
    "master-port",
    "local-addr",
    "max-restarts",
)
_OF_SEVERAL_NODES = tuple(name for name in _PASSED_ON if name != "max-restarts")
_USAGE = """\
usage: grpo-spmd COMMAND ...

  grpo-spmd train --nproc N --config x.yaml [section.key=value ...]

commands (each has --help):
{commands}
"""
_TRAIN_USAGE = """\
usage: grpo-spmd train [--nproc N] [TORCHRUN OPTIONS] --config x.yaml
                       [section.key=value ...]

Checks config and data, then starts N ranks on this machine (default: 1, in
this process: the debug mode). Ctrl-C once saves and stops, twice stops at once.

On several nodes, the same command on each: --nnodes, --rdzv-endpoint and these
go to torchrun as they are:
{options}

What follows is of python -m grpo_spmd.train.
"""


def main() -> None:
    hold_standard_streams()
    if not sys.flags.safe_path:
        sys.path[0] = (
            os.getcwd()
        )  # as python -m has it: a reward's file imports what lies beside the config
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, commands()))
        listed = "\n".join(f"  {name:{width}}  {text}" for name, text in commands().items())
        show(_USAGE.format(commands=listed).rstrip())
        return
    name = arguments[0]
    if name in ("--version", "-V", "version"):
        show(f"grpo-spmd {__version__}")
        return
    if name not in commands():
        closest = difflib.get_close_matches(name, commands(), 1, 0.0)[0]
        refuse(
            ConfigError(
                f"grpo-spmd {name}: unknown command; did you mean {closest}? --help lists them"
            )
        )
    if name == "train":
        _train(arguments[1:])
        return
    sys.argv = [f"grpo-spmd {name}", *arguments[1:]]
    try:
        runpy.run_module(f"grpo_spmd.{name}", run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        say(f"grpo-spmd {name}: stopped by Ctrl-C")
        sys.exit(1)


def commands() -> dict[str, str]:
    """Every module and folder at the package's top that can be run, with what it says of itself."""
    modules = [*_PACKAGE.glob("*.py"), *_PACKAGE.glob("tools/*.py")]
    found = {path.stem: (path, path) for path in modules if path != Path(__file__)}
    mains = [*_PACKAGE.glob("*/__main__.py"), *_PACKAGE.glob("tools/*/__main__.py")]
    folders = (path.parent for path in mains)
    found |= {path.name: (path / "__main__.py", path / "__init__.py") for path in folders}
    texts = {
        name: [path.read_text(encoding="utf-8") for path in paths]
        for name, paths in sorted(found.items())
    }
    return {
        name: _about(*of_command) for name, of_command in texts.items() if _STARTS in of_command[0]
    }


def _about(program: str, described: str) -> str:
    """The description of its parser, where that is one string, or the first line that describes it."""
    in_parser = re.search(r'description="([^"]+)"[,)]', program)
    line = (
        in_parser[1]
        if in_parser
        else (ast.get_docstring(ast.parse(described)) or "").partition("\n")[0]
    )
    line = re.sub(r"`?python -m grpo_spmd\.[^:]*:? ?", "", line).strip(" .:")
    return textwrap.shorten(line[:1].upper() + line[1:], 66, placeholder=" ...")


def _train(arguments: list[str]) -> None:
    interrupt.listen()
    parser = _TrainParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc")
    for name in _PASSED_ON:
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}")  # torchrun takes both
    own, rest = parser.parse_known_args(arguments)
    passed = {
        name: value
        for name in _PASSED_ON
        if (value := getattr(own, name.replace("-", "_"))) is not None
    }
    num_nodes = _number("--nnodes", passed.get("nnodes", "1").partition(":")[0])
    local_ranks = _number("--nproc", own.nproc or "1")
    for_help, only_asks = {"-h", "--help"} & {*rest}, {"--check", "--explain"} & {*rest}
    if for_help:
        show(
            _TRAIN_USAGE.format(
                options=textwrap.fill(" ".join(f"--{name}" for name in _PASSED_ON), 80)
            )
        )
    sys.argv = ["grpo-spmd train", *rest]
    from grpo_spmd import train

    if for_help or (local_ranks == 1 and not passed):
        train.main()
        return
    sizes = {"WORLD_SIZE": str(local_ranks * num_nodes), "LOCAL_WORLD_SIZE": str(local_ranks)}
    os.environ.update(sizes)
    startup.begin("checking config and data")
    if only_asks:
        train.main()
        return
    sys.argv.append("--check")
    with contextlib.redirect_stdout(io.StringIO()):
        train.main()
    for name in sizes:
        del os.environ[name]
    options = [f"--{name}={value}" for name, value in passed.items()]
    if not {*_OF_SEVERAL_NODES} & passed.keys():
        options.append("--standalone")
    elif "rdzv-endpoint" in passed and "rdzv-backend" not in passed:
        options.append("--rdzv-backend=c10d")
    started = ["-m", "grpo_spmd.distributed.launch", *options, f"--nproc-per-node={local_ranks}"]
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # pending until launch.py hears it
    os.execv(sys.executable, [sys.executable, *started, "-m", "grpo_spmd.train", *rest])


class _TrainParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        refuse(ConfigError(message))


def _number(name: str, text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        refuse(ConfigError(f"{name}: {text!r} is not a number from 1 on"))
    return int(text)


if __name__ == "__main__":
    main()
