"""The tests that need a GPU, counted. Arguments beyond --json are pytest's.

python -m benchmarks.gpu_day.gpu_tests [--json FILE] -m gpu tests
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from benchmarks.support.report import Row, arguments_parser, report


def main() -> int:
    args, of_pytest = arguments_parser(__doc__).parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder, "junit.xml")
        options = ["-p", "no:cacheprovider", "--continue-on-collection-errors", "-o", "junit_family=xunit1"]
        command = [sys.executable, "-m", "pytest", *options, f"--junitxml={junit}", *of_pytest]
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        code = subprocess.run(command, env=environment, stderr=subprocess.STDOUT).returncode
        row = counted(junit) if junit.is_file() else {"passed": 0, "failed": "pytest did not come to its end"}
    report("gpu_day_tests", [{"tests": " ".join(of_pytest), **row, "exit_code": code}], args.json)
    return code


def counted(junit: Path) -> Row:
    """Tests by how they ended, and the names of those that failed."""
    cases = list(ElementTree.parse(junit).getroot().iter("testcase"))
    ended = {
        what: [case for case in cases if any(case.find(tag) is not None for tag in tags)]
        for what, tags in (("failed", ("failure", "error")), ("skipped", ("skipped",)))
    }
    row: Row = {"passed": len(cases) - sum(map(len, ended.values()))}
    row |= {what: len(found) for what, found in ended.items()}
    names = [f"{case.get('classname')}::{case.get('name')}" for case in ended["failed"]]
    return row | {"seconds": sum(float(case.get("time", 0)) for case in cases), "failures": " ".join(names) or "-"}


if __name__ == "__main__":
    sys.exit(main())
