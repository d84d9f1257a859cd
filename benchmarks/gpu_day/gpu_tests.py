"""The tests that need a GPU, counted. Arguments beyond these are pytest's.

    python -m benchmarks.gpu_day.gpu_tests [--json FILE] --marked gpu

Of the tests only files that name the mark are read: the others ask for packages that a borrowed
host may lack, and importing all of them takes longer than the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.report import Row, arguments_parser, report


def main() -> int:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--marked", metavar="MARK", help="the tests with this mark, wherever they are"
    )
    args, pytest_values = parser.parse_known_args()
    if args.marked:
        pytest_values = ["-m", args.marked, *naming(args.marked), *pytest_values]
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        code = run_tests(sys.executable, pytest_values, junit)
        row = (
            counted(junit)
            if junit.is_file()
            else {"passed": 0, "failed": "pytest did not come to its end"}
        )
    report(
        "gpu_day_tests", [{"tests": " ".join(pytest_values), **row, "exit_code": code}], args.json
    )
    return code


def run_tests(python: str, arguments: Sequence[str], junit: Path) -> int:
    """Runs pytest by an interpreter, with its report in `junit`. Returns the exit code."""
    options = [
        "-p",
        "no:cacheprovider",
        "--continue-on-collection-errors",
        "-o",
        "junit_family=xunit1",
    ]
    command = [python, "-m", "pytest", *options, f"--junitxml={junit}", *arguments]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env=environment, stderr=subprocess.STDOUT).returncode


def naming(mark: str) -> list[str]:
    """Files of tests that name the mark."""
    files = sorted(Path("tests").rglob("test_*.py"))
    return [
        str(path) for path in files if f"pytest.mark.{mark}" in path.read_text(encoding="utf-8")
    ]


def counted(junit: Path, beginning: str = "") -> Row:
    """Tests whose names have this beginning, by how they ended, and the names of those that
    failed."""
    cases = [
        case
        for case in ElementTree.parse(junit).getroot().iter("testcase")
        if str(case.get("name")).startswith(beginning)
    ]
    ended = {
        label: [case for case in cases if any(case.find(tag) is not None for tag in tags)]
        for label, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",)))
    }
    row: Row = {"passed": len(cases) - sum(map(len, ended.values()))}
    row |= {label: len(result) for label, result in ended.items()}
    names = [f"{case.get('classname')}::{case.get('name')}" for case in ended["failed"]]
    return row | {
        "seconds": sum(float(case.get("time", 0)) for case in cases),
        "failures": " ".join(names) or "-",
    }


if __name__ == "__main__":
    sys.exit(main())
