"""Shapes in the signatures of the pure maths are checked while the tests run, and cost nothing in a
run."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

# two ranks on two cores: with more threads vLLM's CPU back end is 20 times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell ignores Ctrl-C in what it starts in the background, and every process of a test would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxtyping import install_import_hook

from tests.support.nightly import is_nightly
from tests.support.processes import launches

install_import_hook(
    [
        "grpo_spmd.learn.advantages",
        "grpo_spmd.model.logprobs",
        "grpo_spmd.learn.losses",
        "grpo_spmd.model.policy",
    ],
    "beartype.beartype",
)


# The small files of unit/ come last, so that at the end all processes have work.
_FOLDERS = ("faults", "ranks", "runs", "unit")


@pytest.hookimpl(tryfirst=True)  # before pytest's own hook selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is nightly, and orders files: pytest hands them to its processes in this order
    (`--dist loadfile --no-loadscope-reorder`)."""

    for item in items:
        if is_nightly(item.nodeid):
            item.add_marker("nightly")

    def folder_of(item: pytest.Item) -> int:
        return _FOLDERS.index(item.path.relative_to(Path(__file__).parent).parts[0])

    items.sort(key=folder_of)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(
        session.config, "workeroutput"
    ):  # one of several pytest processes: its controller prints for all
        session.config.workeroutput["launches"] = dict(launches)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    launches.update(getattr(node, "workeroutput", {}).get("launches", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if launches:
        terminalreporter.write_line(
            "started: "
            + ", ".join(f"{number} {label}" for label, number in sorted(launches.items()))
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new folder for a module's files, with a tiny Qwen3 in folder/model. Modules that want more
    in it have a fixture
    of their own."""
    from tests.support.models import make_model

    folder = tmp_path_factory.mktemp("tiny")
    make_model(folder / "model", "qwen3", tied=True)
    return folder


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `tests.support.recorded.plain`: run/, model/, config.yaml, train.jsonl. To be
    read only."""
    from tests.support.recorded import plain, record_once

    return record_once(tmp_path_factory, plain)


@pytest.fixture(scope="session")
def elaborate_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of `tests.support.recorded.elaborate`."""
    from tests.support.recorded import elaborate, record_once

    return record_once(tmp_path_factory, elaborate)
