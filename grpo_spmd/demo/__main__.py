"""Makes a demo's model and prompts, from a seed and without a download; or runs the demo's judge.

python -m grpo_spmd.demo [NAME] [--out .demo] [--seed 0] [--numbers 2|3-4]
python -m grpo_spmd.demo judge
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.demo.countdown import (
    fill_distillation_demo,
    fill_experts_demo,
    fill_hybrid_demo,
    fill_reward_model_demo,
    make_demo,
)
from grpo_spmd.demo.judge import serve
from grpo_spmd.demo.making import make_folder, temporary_folder
from grpo_spmd.demo.tools import fill_compacting_demo, fill_tools_demo
from grpo_spmd.distributed import interrupt

# The functions that write a demo's models and return its rows, by the demo's name.
_FILLS = {
    "tools": fill_tools_demo,
    "experts": fill_experts_demo,
    "hybrid": fill_hybrid_demo,
    "compacting": fill_compacting_demo,
    "distill": fill_distillation_demo,
    "rm": fill_reward_model_demo,
}


def main() -> None:
    """Makes the demo that the arguments name, or serves the demo's judge."""
    parser = OneLineParser(
        prog="python -m grpo_spmd.demo", description="Make a demo's model and prompts."
    )
    add = parser.add_argument
    add("name", nargs="?", choices=("countdown", *_FILLS, "judge"), default="countdown")
    add("--out", type=Path, help="folder (default: .demo for countdown, else .demo-NAME)")
    add("--seed", type=int, default=0)
    add("--numbers", choices=("2", "3-4"), default="2", help="numbers in a countdown task")
    args = parser.parse_args()
    if args.name == "judge":
        serve()
        return
    out = args.out or Path(".demo" if args.name == "countdown" else f".demo-{args.name}")

    def quit_cleanly(_: int) -> None:
        """Handles Ctrl-C: removes the unfinished folder and ends the process."""
        interrupt.print_notice("demo: stopped by Ctrl-C; the demo's model is not made")
        shutil.rmtree(temporary_folder(out), ignore_errors=True)
        os._exit(1)

    interrupt.listen(quit_cleanly)
    # For torch, which is imported later. On a busy machine a second thread makes this small
    # training many times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        if args.name == "countdown":
            make_demo(out, args.seed, args.numbers)
        else:
            fill = functools.partial(_FILLS[args.name], seed=args.seed)
            make_folder(out, {"seed": args.seed, "demo": args.name}, fill)
    except ConfigError as error:
        refuse(error)
    except OSError as error:
        # For example a name that is too long, a folder without permission, or a full disk.
        refuse(ConfigError(f"--out: {error.filename or out}: {error.strerror}"))


if __name__ == "__main__":
    main()
