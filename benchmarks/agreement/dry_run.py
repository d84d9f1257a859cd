"""Whether the GPU's side of the trainer passes its dry run on fake tensors (tests/support/dry_run/)
on the installed torch and on CUDA builds of others. Needs no GPU, but g++.

python -m benchmarks.agreement.dry_run [--torch 2.11.0 2.14.0 ...] [--environments FOLDER]
                                       [--json FILE]

Each torch gets an environment with a torch of its own (4.6 GB) over ours; without --environments in
a temporary folder that is gone at the end. Exit code 1 where a test failed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu_day.gpu_tests import counted, run_tests
from benchmarks.support.environment import environment_python
from benchmarks.support.report import Row, arguments_parser, report

VERSIONS = "2.11.0", "2.14.0"  # the least that pyproject.toml takes, the newest
_TESTS = "tests/ranks/test_dry_run.py"
_CASE = "test_ours_runs_on_a_cuda_device"
_FAULT = "test_a_mistake_that_only_a_gpu_would_show_is_seen"


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--torch", nargs="*", default=VERSIONS, metavar="VERSION", help="besides the installed one"
    )
    parser.add_argument("--environments", type=Path, help="a folder that keeps them")
    args = parser.parse_args()
    rows = [measure(sys.executable)]
    for version in args.torch:
        with tempfile.TemporaryDirectory() as scratch:
            folder = (args.environments or Path(scratch)) / f"torch-{version}"
            # Three equal signs: PyPI's build for CUDA, not one with a local suffix such as +cpu.
            rows.append(measure(environment_python(folder, [[f"torch==={version}"]])))
    report("dry_run", rows, args.json)
    # Without g++ all are skipped.
    raise SystemExit(any(row["failed"] or row["skipped"] for row in rows))


def measure(python: str) -> Row:
    """Returns the row of the torch of an interpreter."""
    asks = [python, "-c", "import torch; print(torch.__version__)"]
    version = subprocess.run(asks, capture_output=True, text=True, check=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        run_tests(python, [_TESTS], junit)
        every, cases, faults = (counted(junit, beginning) for beginning in ("", _CASE, _FAULT))
    return {
        "its torch": version,
        "cases passed": cases["passed"],
        "faults seen": faults["passed"],
        **every,
    }


if __name__ == "__main__":
    main()
