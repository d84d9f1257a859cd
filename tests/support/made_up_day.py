"""A day of benchmarks/gpu_day whose steps are made up and take no time: python -m
tests.support.made_up_day FOLDER
MINUTES STEP,STEP... [EARLIER RESULTS]. Each step adds its name to FOLDER/told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu_day.day import SKIPPED, Day, Step

LIMITS = {"row": 15.0, "stuck": 3.0, "once": 20.0, "skip": 20.0, "bad": 20.0}

# In a session of its own, as torchrun's ranks are, with a child without an environment, as a
# sandbox is.
_RANK = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
time.sleep(60)
"""


def run_step(name: str, folder: Path, rows: Path) -> int:
    with (folder / "told").open("a") as report:
        print(name, file=report)
    if name == "row":  # and a second one, which a kill tore
        rows.write_text(json.dumps({"benchmark": "x", "a": 1}) + '\n{"benchmark": "x", ')
        time.sleep(0.5)
    elif name == "stuck":
        subprocess.Popen([sys.executable, "-c", _RANK], start_new_session=True)
        time.sleep(60)
    elif name == "once" and (folder / "told").read_text().split().count("once") == 1:
        time.sleep(60)
    elif name == "skip":
        print("skipped: no GPU")
        return SKIPPED
    elif name == "bad":
        sys.exit("oh")
    print(f"{name}: done")
    return 0


def main() -> int:
    if sys.argv[1] == "step":
        return run_step(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    folder, old = Path(sys.argv[1]), [Path(path) for path in sys.argv[4:]]
    module = "tests.support.made_up_day"
    steps = [
        Step(name, "-", ("-m", module, "step", name, str(folder), "{json}"), LIMITS[name])
        for name in sys.argv[3].split(",")
    ]
    return Day(steps, folder / "scratch", folder / "out", "dry", "abc", old).run(float(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
