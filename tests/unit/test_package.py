"""What a wheel of this package holds and asks for."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data import hub
from grpo_spmd.data.rows import read_rows
from grpo_spmd.tools import prefetch
from tests.support.nightly import NIGHTLY
from tests.support.processes import ROOT

_EXTRAS = ("datasets", "wandb", "tensorboard", "trackio")


def test_a_wheel_has_every_module_and_the_marker_of_types(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = apply_configuration(
        Distribution({"script_name": "setup.py"}), ROOT / "pyproject.toml"
    )
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    modules = {Path(file) for _, _, file in build.find_all_modules()}
    assert modules == {path.relative_to(ROOT) for path in (ROOT / "grpo_spmd").rglob("*.py")}
    data = {f"{package}/{name}" for package, _, _, names in build.data_files for name in names}
    files = (ROOT / "grpo_spmd" / "config").iterdir()
    tables = {str(path.relative_to(ROOT)) for path in files if path.suffix in (".tsv", ".yaml")}
    assert {"grpo_spmd/py.typed", *tables} <= data
    assert len(tables) == 8


@pytest.mark.parametrize("extra", _EXTRAS)
def test_an_extra_is_no_dependency_is_locked_and_imported_only_in_functions(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert not [text for text in project["dependencies"] if text.startswith(extra)]
    (requests,) = project["optional-dependencies"][extra]
    assert requests.startswith(f"{extra}>=")
    assert requests in project["optional-dependencies"]["dev"]
    for kind in ("cpu", "gpu"):
        lock = (ROOT / f"launch/constraints-{kind}.txt").read_text(encoding="utf-8")
        assert f"\n{extra}==" in lock
    for path in (ROOT / "grpo_spmd").rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert extra not in {name.partition(".")[0] for name in names}, path


def test_without_datasets_a_set_of_the_hub_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr(hub.importlib.util, "find_spec", lambda name: None)
    config = DataConfig(train="hub:openai/gsm8k:main:train")
    for read in (read_rows, prefetch._fetch_rows):
        with pytest.raises(ConfigError) as caught:
            read(config, None)
        message = (
            "data.train: hub:openai/gsm8k:main:train needs the package datasets, which is "
            "not installed; "
        )
        assert (
            str(caught.value) == f"{message}pip install datasets, or give a .jsonl or .parquet file"
        )


def test_every_nightly_entry_names_tests() -> None:
    """An entry that fits nothing would say that a test is nightly which every run has."""
    for entry in NIGHTLY:
        file, _, test = entry.partition("::")
        text = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert not test or f"def {test.partition('[')[0]}" in text, entry
