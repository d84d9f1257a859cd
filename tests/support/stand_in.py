"""A checkout whose trainer is tests/support/workers/stand_in_train.py, for the scripts of
launch/."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from tests.support.processes import ROOT


def make_checkout(folder: Path, num_steps: int) -> Path:
    """What the scripts find in the folder that they are called in; its config.yaml is the
    stand-in's."""
    for name in ("launch", ".venv"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "grpo_spmd").mkdir()
    (folder / "grpo_spmd/__init__.py").touch()
    shutil.copy(ROOT / "tests/support/workers/stand_in_train.py", folder / "grpo_spmd/train.py")
    config = {
        "run_dir": "runs/a b",
        "seed": 0,
        "num_steps": num_steps,
        "step_s": 0.05,
        "crash_at": -1,
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"checkpoint.resume": "never"}))
    return folder
