"""Makes what a demo trains, from a seed and without a download; or is the judge of one.

python -m grpo_spmd.demo [countdown|tools|distill|rm] [--out .demo] [--seed 0] [--numbers 2|3-4]
python -m grpo_spmd.demo judge
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_spmd.config.command_line import OneLineParser
from grpo_spmd.demo.countdown import make_demo
from grpo_spmd.demo.distill import make_distillation_demo
from grpo_spmd.demo.making import temporary_folder
from grpo_spmd.demo.reward_model import make_reward_model_demo
from grpo_spmd.demo.tools import make_tools_demo
from grpo_spmd.distributed import interrupt

_FOLDERS = {
    "countdown": Path(".demo"),
    "tools": Path(".demo-tools"),
    "distill": Path(".demo-distill"),
    "rm": Path(".demo-rm"),
}


def main() -> None:
    parser = OneLineParser(
        prog="python -m grpo_spmd.demo", description="Make a demo's model and prompts."
    )
    parser.add_argument("name", nargs="?", choices=(*_FOLDERS, "judge"), default="countdown")
    parser.add_argument(
        "--out", type=Path, help="the folder; default: .demo, of another than countdown .demo-NAME"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--numbers",
        choices=("2", "3-4"),
        default="2",
        help="how many numbers a task of countdown has",
    )
    args = parser.parse_args()
    if args.name == "judge":
        from grpo_spmd.demo.judge import serve

        serve()
        return
    out = args.out or _FOLDERS[args.name]

    def quit_cleanly(_: int) -> None:
        interrupt.print_notice("demo: stopped by Ctrl-C; the demo's model is not made")
        shutil.rmtree(temporary_folder(out), ignore_errors=True)
        os._exit(1)

    interrupt.listen(quit_cleanly)
    os.environ["OMP_NUM_THREADS"] = (
        "1"  # torch reads it; on a busy machine a second thread makes it many times slower
    )
    if args.name == "tools":
        make_tools_demo(out, args.seed)
    elif args.name == "distill":
        make_distillation_demo(out, args.seed)
    elif args.name == "rm":
        make_reward_model_demo(out, args.seed)
    else:
        make_demo(out, args.seed, args.numbers)


if __name__ == "__main__":
    main()
