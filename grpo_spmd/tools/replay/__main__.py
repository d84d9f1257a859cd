"""The command: python -m grpo_spmd.replay RUN_DIR --step N [--checkpoint FOLDER] [section.key=value
...]"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from grpo_spmd.checkpoint.manifest import CheckpointError
from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError, refuse
from grpo_spmd.distributed.doctor import exit_process
from grpo_spmd.files import hold_standard_streams, show
from grpo_spmd.rewards.protocol import RewardError
from grpo_spmd.tools.replay.read import read_step
from grpo_spmd.tools.replay.redo import replay, report


def main() -> None:
    """Runs the command; the exit code is 2 for wrong input and 1 for any other failure."""
    hold_standard_streams()
    about = (
        "Run reward -> advantage -> loss of a dumped step again, on the CPU, without vLLM, "
        "and compare with what was recorded. breakpoint() works in a reward, in the "
        "advantages and in the loss."
    )
    parser = OverridesParser(prog="python -m grpo_spmd.replay", description=about)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, or a copy of it")
    add("--step", type=int, required=True, metavar="N", help="as in metrics.jsonl, from 1 on")
    policy = "the policy (default: that of checkpoints/step_(N-1); for step 1 also model.path)"
    add("--checkpoint", type=Path, metavar="FOLDER", help=policy)
    add("--top", type=int, default=5, metavar="K", help="rollouts in each list (default: 5)")
    add(
        "--ask-servers",
        action="store_true",
        help="ask servers and judges again (default: take the recorded rewards)",
    )
    add(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="values that replace those of the run's config",
    )
    args = parser.parse()
    if args.step < 1:
        parser.error(f"--step counts from 1 on; got {args.step}")
    try:
        recorded = read_step(args.run_dir, args.step, args.overrides, asks_servers=args.ask_servers)
    except ConfigError as error:
        refuse(error)
    # Otherwise torch's C++ warnings would be among the lines of the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    code = 0
    try:
        show("\n".join(report(recorded, replay(recorded, args.checkpoint), args.top)))
    except (ConfigError, CheckpointError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RewardError) else 2
    except BaseException:
        traceback.print_exc()
        code = 1
    exit_process(code)


if __name__ == "__main__":
    main()
