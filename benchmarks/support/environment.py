"""Environments in which benchmarks run other versions of some packages, and the tests in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path


def environment_python(
    folder: Path,
    installs: Sequence[Sequence[str]],
    *,
    constraints: Sequence[str] = (),
    startup: str = "",
) -> str:
    """Returns the interpreter of an environment, which is made on first use: some packages of its
    own, all others those of the environment that we run in.

    Each of `installs` has the arguments of one `pip install`, `constraints` the lines of pip's file
    of constraints. `startup` is a line of Python that each of its processes runs first."""
    python = folder / "bin" / "python"
    # Ours come behind its own packages on the path.
    shared = f"{sysconfig.get_path('purelib')}\n{startup}\n"
    packages = "; ".join(" ".join(arguments) for arguments in installs)
    wanted = f"{shared}{packages}\n{' '.join(constraints)}"
    done = folder / "setup_done"
    if done.is_file() and done.read_text() == wanted:
        return str(python)
    print(f"making {folder} with {packages}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    site = next(folder.glob("lib/python3*/site-packages"))
    (site / "shared.pth").write_text(shared)
    constraint_file, log = folder / "constraints.txt", folder / "setup.log"
    constraint_file.write_text("".join(f"{line}\n" for line in constraints))
    quiet = ["--disable-pip-version-check", "--progress-bar", "off", "-c", str(constraint_file)]
    for arguments in installs:
        with log.open("a") as file:
            code = subprocess.run(
                [str(python), "-m", "pip", "install", *quiet, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
            ).returncode
        if code:
            raise SystemExit(f"pip failed: {log.read_text().strip().splitlines()[-1]}")
    done.write_text(wanted)
    return str(python)
