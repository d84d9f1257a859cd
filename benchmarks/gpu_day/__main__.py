"""A day of evidence on a borrowed GPU, or its dry form on a CPU. The manual is in
benchmarks/README.md.

    benchmarks/run.sh gpu_day [--minutes 9] [--out FOLDER] [--scratch FOLDER] [--from FOLDER]
    [--again STEP] [--dry]

Steps run in order of value, each with a limit at which its whole tree of processes is killed; what
is done is remembered, and the same command goes on after its end or a kill. Results are in --out
after every step: state.json, rows.jsonl, page.txt, logs.tar.gz. Exit codes: 0 all steps are done or
were skipped, 1 one failed or came to its limit, 2 it cannot begin (one line), 3 there is more to
do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_day.day import ROOT, Day, DayError
from benchmarks.gpu_day.steps import DRY, GPU
from benchmarks.support.report import COMMIT, commit

# Whether torch reaches the GPU, asked in another process: this one must not hold a context there.
_ASK = (
    "import torch; torch.cuda.is_available() and torch.zeros(1, device='cuda'); "
    "print(torch.cuda.is_available())"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes", type=float, help="no step begins that may outlast them; default: 9, dry 20"
    )
    parser.add_argument(
        "--out", type=Path, help="where the results go; default: $OUT, else runs/gpu_day[_dry]"
    )
    parser.add_argument(
        "--scratch", type=Path, help="models, runs and logs; default: runs/gpu_day[_dry].scratch"
    )
    parser.add_argument(
        "--from", type=Path, dest="before", help="results of an earlier machine, to go on with"
    )
    parser.add_argument(
        "--again", action="append", default=[], metavar="STEP", help="make this step anew"
    )
    parser.add_argument(
        "--dry",
        action="store_true",
        help="the small forms on the CPU; so too where there is no GPU",
    )
    parser.add_argument(
        "--commit", help="where there is no git, what the rows name; default: $" + COMMIT
    )
    args = parser.parse_args()
    try:
        dry = args.dry or not _has_gpu()
        form = "dry" if dry else "gpu"
        default = ROOT / "runs" / ("gpu_day_dry" if dry else "gpu_day")
        out = args.out or (Path(os.environ["OUT"]) if os.environ.get("OUT") else default)
        scratch = args.scratch or default.with_name(default.name + ".scratch")
        old = [args.before] if args.before else [out]
        named = args.commit or os.environ.get(COMMIT) or commit()
        day = Day(DRY if dry else GPU, scratch.resolve(), out.resolve(), form, named, old)
        code = day.run((20.0 if dry else 9.0) if args.minutes is None else args.minutes, args.again)
    except DayError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print((out / "page.txt").read_text())
    return code


def _has_gpu() -> bool:
    """Raises DayError where there is a GPU that torch cannot use: a dry day there would pass for a
    real one."""
    requests = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ASK], capture_output=True, text=True
    )
    if requests.returncode == 0 and requests.stdout.strip() == "True":
        return True
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        listed = ""
    if "GPU" in listed:
        reason = (requests.stderr.strip().splitlines() or ["torch.cuda.is_available() is False"])[
            -1
        ]
        raise DayError(
            f"nvidia-smi lists a GPU that torch cannot use ({reason}); mend that, or ask for --dry"
        )
    return False


if __name__ == "__main__":
    sys.exit(main())
