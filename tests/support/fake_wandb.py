"""W&B's stand-in for the tests of the feed."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

# A package `wandb` that writes down what it is told, and misbehaves as FAKE_WANDB says.
FAKE = """
import json, os, sys, threading
how, out = os.environ.get("FAKE_WANDB", ""), os.environ["FAKE_WANDB_OUT"]
if how == "import hangs":
    import grpo_spmd.observe.followers
    grpo_spmd.observe.followers.FINISH_S = 0.5  # the test need not wait a minute
    threading.Event().wait()
def note(**what):
    with open(out, "a") as file:
        file.write(json.dumps(what) + "\\n")
def misbehave(when):
    if how == when + " raises":
        raise OSError("no route to W&B")
    if how == when + " exits":
        sys.exit(1)
    if how == when + " hangs":
        threading.Event().wait()
class Settings:
    def __init__(self, **settings): pass
class Run:
    logged = 0
    url, dir = None, 'here'
    def define_metric(self, *args, **kwargs): pass
    def log(self, metrics):
        self.logged += 1
        if self.logged == 2:
            misbehave("log")
        note(log=metrics)
    def finish(self):
        misbehave("finish")
        note(finish=True)
def init(**how):
    misbehave("init")
    note(init={name: how[name] for name in ("id", "resume", "mode")})
    return Run()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the fake package, importable here; what it was told is in `out.jsonl`."""
    folder = tmp_path / "fake"
    folder.mkdir()
    (folder / "wandb.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setenv("FAKE_WANDB_OUT", str(folder / "out.jsonl"))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(logging.getLogger("grpo_spmd"), "propagate", True)
    real = sys.modules.pop("wandb", None)
    yield folder
    sys.modules.pop("wandb", None)
    if real is not None:
        sys.modules["wandb"] = real
