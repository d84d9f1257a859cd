"""launch/setup.sh with stand-ins for Python and uv: never silent, ended at any moment, finished by
the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Job

# Python, pip and uv as far as the script uses them. At the phase that SLOW names it takes a minute,
# in a child.
STAND_IN = """#!/usr/bin/env bash
at() {{ if [ "${{SLOW:-}}" = "$1" ]; then {python} -c "import time; time.sleep(60)" || exit 1; fi; }}
site=.venv/lib/python3/site-packages
package() {{  # its list may name compiled files, which set-up makes itself
  mkdir -p $site/$1.dist-info
  printf '%s\\n' "$1.dist-info/RECORD,," "$1.pyc,sha256=x,99" >$site/$1.dist-info/RECORD
}}
install() {{
  echo "$0 $*" >>calls
  case $* in *" -e "*) package own; return ;; esac
  while read -r line; do
    echo "Collecting $line"
    if [ "$line" = two==2 ]; then at fetching; fi
  done <.venv/packages.txt
  echo "Installing collected packages: one, two, three"
  package one-1
  mkdir -p $site/two-2.dist-info  # has no list of its files until it is whole
  at installing
  package two-2
  package three-3
}}
case $*_ in
  "venv "*)
    mkdir -p .venv/bin $site
    at venv
    cp {stand_in} .venv/bin/python
    package pip-9 ;;
  "-m pip --version_") [ -d $site/pip-9.dist-info ] ;;
  "-m pip config"*) echo "global.extra-index-url='\\\\nA\\\\nB'"; echo ":env:.find-links='/wheels'"
                     echo "global.cert='/c.pem'" ;;
  "-m pip check_") at checking; if [ -e conflict ]; then echo "one 1 requires four, which is not installed."; fi ;;
  "pip install"*) echo "$SSL_CERT_FILE" >certificate
                  if [ -e uv_fails ]; then echo "error: no such index"; exit 2; fi; install "$@" ;;
  *"pip install"*) install "$@" ;;
  "-m venv"*) shift; "$0" "$@" ;;
  "-m compileall"*) touch $site/one.py $site/one.pyc $site/two.py; at compiling ;;
  "-__") ;;
  -_) exec {python} -c "import sysconfig; sysconfig.get_path = lambda name: '$site'; exec(open(0).read())" ;;
  "-W ignore -c import"*) at importing; if [ ! -e $site/two-2.dist-info/RECORD ]; then echo "no two"; exit 1; fi ;;
  "--version_") echo "Python 3.99" ;;
esac
"""  # noqa: E501


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    text = (ROOT / "launch/setup.sh").read_text(encoding="utf-8")
    assert text.count("while sleep 7 &&") == 1
    (tmp_path / "launch/setup.sh").write_text(
        text.replace("while sleep 7 &&", "while sleep 0.2 &&")
    )
    (tmp_path / "launch/constraints-cpu.txt").write_text(
        "# pinned\none==1\ntwo==2\nthree==3\ntorchaudio==4\n"
    )
    (tmp_path / "pyproject.toml").touch()
    stand_in = tmp_path / "stand_in"
    stand_in.write_text(STAND_IN.format(python=sys.executable, stand_in=stand_in))
    stand_in.chmod(0o755)
    return tmp_path


def start(checkout: Path, **variables: str) -> Job:
    env = {"PYTHON": f"{checkout}/stand_in", "UV": ""} | variables
    return Job(["bash", "launch/setup.sh", "cpu"], env=env, cwd=checkout)


def packages(checkout: Path) -> set[str]:
    return {
        path.parent.name
        for path in checkout.glob(".venv/lib/python3/site-packages/*.dist-info/RECORD")
    }


ALL = {f"{name}.dist-info" for name in ("one-1", "two-2", "three-3", "own", "pip-9")}


@pytest.mark.parametrize(
    ("phase", "line"),
    [
        ("venv", "setup: making .venv, "),
        ("fetching", "setup: fetched 2 of 3 packages, 1 MB, "),
        ("installing", "setup: installed 3 of 3 packages, "),  # pip, one and two
        ("compiling", "setup: compiled 1 of 2 files, "),
        ("checking", "setup: checking that they fit together, "),
        ("importing", "setup: checking the imports, "),
    ],
)
def test_it_says_how_far_it_is_and_ctrl_c_leaves_nothing_that_the_next_start_trips_over(
    checkout: Path, phase: str, line: str
) -> None:
    job = start(checkout, SLOW=phase)
    assert job.process.stdout is not None
    message: list[str] = []
    while not message or not message[-1].startswith(
        line
    ):  # ends with the output, else a line that never comes would hang
        message.append(job.process.stdout.readline())
        assert message[-1], "".join(message)
    began = time.monotonic()
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does
    code, rest = job.wait(60)
    assert time.monotonic() - began < 15
    assert code == 130
    assert [item for item in rest.splitlines() if not item.startswith(line)] == [
        "setup: stopped; the next start goes on from here"
    ]
    assert not job.survivors()
    assert not (checkout / ".venv/tmp").exists()
    code, output = start(checkout).wait(60)
    assert code == 0, output
    assert packages(checkout) == ALL
    halves = [line for line in output.splitlines() if "half installed" in line]
    expected = ["setup: it was left half installed, and comes again: two-2"]
    assert halves == (expected if phase == "installing" else [])
    assert max(map(len, [*message, *output.splitlines()])) <= 80
    code, output = start(checkout).wait(60)
    assert (code, output) == (0, "setup: .venv is up to date (cpu)\n")


def test_after_a_kill_the_next_start_waits_for_what_still_installs_and_finishes(
    checkout: Path,
) -> None:
    """Nobody could tell pip, which goes on; the lock is free when it is gone, and what it left half
    is seen."""
    initial = start(checkout, SLOW="installing")
    assert initial.process.stdout is not None
    while "installed" not in initial.process.stdout.readline():
        assert initial.process.poll() is None
    initial.process.kill()
    second = start(checkout)
    assert second.process.stdout is not None
    assert "waiting for it" in second.process.stdout.readline()
    for pid in initial.running():
        os.kill(pid, signal.SIGKILL)
    code, output = second.wait(60)
    assert code == 0, output
    assert "setup: it was left half installed, and comes again: two-2" in output.splitlines()
    assert packages(checkout) == ALL
    initial.process.communicate()


def test_a_second_start_says_that_it_waits(checkout: Path) -> None:
    holder = subprocess.Popen(["flock", ".venv.lock", "sleep", "60"], cwd=checkout)
    while not (checkout / ".venv.lock").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    job = start(checkout)
    assert job.process.stdout is not None
    assert (
        job.process.stdout.readline()
        == "setup: another set-up of this folder is under way; waiting for it\n"
    )
    os.killpg(job.process.pid, signal.SIGINT)
    code, output = job.wait(15)
    holder.terminate()
    holder.wait()
    assert (code, output) == (130, "setup: stopped; the next start goes on from here\n")


def test_uv_installs_the_same_lock_from_where_pip_would(checkout: Path) -> None:
    code, output = start(checkout, UV=f"{checkout}/stand_in", SSL_CERT_FILE="").wait(60)
    assert code == 0, output
    assert (checkout / "certificate").read_text() == "/c.pem\n"
    initial, local = (checkout / "calls").read_text().splitlines()
    assert "--extra-index-url A --extra-index-url B --find-links /wheels" in initial
    assert initial.endswith("--no-deps -r .venv/packages.txt")
    assert local.endswith("--no-deps --no-build-isolation -e .")
    assert (checkout / ".venv/packages.txt").read_text() == "one==1\ntwo==2\nthree==3\n"
    assert packages(checkout) == ALL


def test_where_uv_cannot_pip_does_it(checkout: Path) -> None:
    (checkout / "uv_fails").touch()
    code, output = start(checkout, UV=f"{checkout}/stand_in").wait(60)
    assert code == 0, output
    assert "setup: uv could not: error: no such index" in output.splitlines()
    assert packages(checkout) == ALL


def test_what_does_not_fit_this_python_is_left_to_pip_to_work_out(checkout: Path) -> None:
    (checkout / "conflict").touch()
    code, output = start(checkout).wait(60)
    assert code == 0, output
    assert "setup: not all of them fit this Python: pip looks for what does" in output.splitlines()
    assert (
        "-e .[cpu,dev] -c launch/constraints-cpu.txt"
        in (checkout / "calls").read_text().splitlines()[-1]
    )
