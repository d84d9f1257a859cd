"""The training command: checks everything that can be checked without torch, then trains.

torchrun --nproc-per-node 8 -m grpo_spmd.train --config x.yaml [section.key=value ...]
python -m grpo_spmd.train --config x.yaml [...]

The second command trains in a single process, in which breakpoint() works, for example in the loss
or the weight sync.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_spmd.checks.explain import explain
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.checks.trials import try_and_tell
from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.describe import describe_keys
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.config.load import load_config_with_sources, trains_on_cpu
from grpo_spmd.distributed import interrupt, startup
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.processes import end_with_parent
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.model.config_json import read_model


def main() -> None:
    """Runs the command: --help, --check, --explain or the training."""
    listen()
    parser = OverridesParser(
        allow_abbrev=False,
        prog="python -m grpo_spmd.train",
        description="Train a language model with GRPO.",
        epilog="config keys:\n" + describe_keys(shutil.get_terminal_size().columns),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--config", required=True, help="YAML file; configs/ has examples")
    add(
        "--check",
        action="store_true",
        help="check config, data and users' code, say what was checked, and stop",
    )
    add(
        "--explain",
        action="store_true",
        help="print what follows from the config and where each set value comes from, and stop",
    )
    add("--explain=all", dest="all", action="store_true", help="the same, with the defaults")
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="number of ranks to check or explain (default: WORLD_SIZE, else 1)",
    )
    args = parser.parse()
    args.explain |= args.all
    if args.ranks is not None and (args.ranks < 1 or not (args.explain or args.check)):
        parser.error("--ranks is a number from 1 on, and goes with --check or --explain")
    try:
        num_ranks = number_of_ranks(args.ranks)
        config, sources = load_config_with_sources(
            args.config, args.overrides, on_cpu=trains_on_cpu()
        )
        interrupt.set_run_dir(config.run_dir)
        inputs = check_inputs(config, num_ranks=num_ranks, to_run=not args.explain, sources=sources)
        if not args.explain:
            summary = try_and_tell(config, inputs, show if args.check else inputs.notes.append)
    except ConfigError as error:
        refuse(error)
    if args.explain:
        model = read_model(config.model.path)
        num_rows = len(inputs.rows)
        lines = explain(config, sources, model, num_rows, num_ranks, with_defaults=args.all)
        show("\n".join(lines))
        return
    if args.check:
        show(summary)
        return

    with torch_process():
        with startup.garbage_collector_off():
            from grpo_spmd.loop import train

        train(config, inputs)


@contextmanager
def torch_process() -> Iterator[None]:
    """Prepares this process for torch and vLLM, which the block imports and uses.

    When the block ends, it ends this process with the exit code of the outcome.
    """
    prepare_torch()
    startup.begin("importing torch and vLLM")
    # On a crash in C code, Python's traceback is printed.
    faulthandler.enable()
    with exit_with_outcome():
        yield


def listen() -> None:
    """Makes this process end when torchrun ends and, until training begins, at Ctrl-C."""
    # Until the process group exists, a rank would not notice otherwise that torchrun was killed.
    # Without torchrun the parent is a shell, which the run may outlive.
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)
    hold_standard_streams()
    interrupt.listen()


def prepare_torch() -> None:
    """Sets environment variables that torch reads when it is imported."""
    # Hides torch's C++ warnings (NUMA binding, hooks at exit), about which a user can do nothing.
    # Its errors are still shown.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Huge pages for large tensors in host memory. Without them half the time of a weight sync on
    # the CPU is spent on page faults.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


if __name__ == "__main__":
    main()
