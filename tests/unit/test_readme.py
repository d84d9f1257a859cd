"""The README and the shipped files say what is there."""

from __future__ import annotations

import ast
import dataclasses
import re
import sys
from pathlib import Path
from typing import cast

import pytest

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from tests.support.processes import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = {
    path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "grpo_spmd").rglob("*.py"))
}


def test_every_file_that_the_readme_names_exists() -> None:
    for name in re.findall(
        r"(?:launch|tests|configs|benchmarks|grpo_spmd)/[\w./-]+\.(?:sh|py|yaml|sbatch)", README
    ):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize(
    "config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_shipped_config_loads(config: Path) -> None:
    load_config(config)


def test_every_config_key_is_read_outside_config_py() -> None:
    """A key that only the config knows would promise what nothing does."""
    used = "\n".join(
        text
        for path, text in CODE.items()
        if path.parent.name != "config" and path.name != "explain.py"
    )

    def unread(cls: type, prefix: str) -> list[str]:
        missing = []
        for field in dataclasses.fields(cls):
            section = field.default_factory if isinstance(field.default_factory, type) else None
            section = section or {"model": "ModelConfig", "data": "DataConfig"}.get(field.name)
            if isinstance(section, str):
                section = getattr(sys.modules["grpo_spmd.config.schema"], section)
            if section is not None and dataclasses.is_dataclass(section):
                missing += unread(cast(type, section), f"{prefix}{field.name}.")
            elif not re.search(rf"\.{field.name}(_with)?\b", used):
                missing.append(prefix + field.name)
        return missing

    # A recipe is put below the config's values while it is loaded: nothing else reads its name.
    assert 'tree.get("algorithm")' in CODE[ROOT / "grpo_spmd/config/load.py"]
    assert unread(Config, "") == ["algorithm"]


def test_only_rollout_imports_vllm_and_config_imports_no_torch() -> None:
    for path, text in CODE.items():
        imported = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
        if path.parent.name != "engine":
            assert "vllm" not in imported, path
        if path.parent.name in ("config", "checks", "data"):
            assert "torch" not in imported, path


def test_the_package_uses_no_pickle_and_no_eval() -> None:
    for path, text in CODE.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), f"{path}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in (
                    "broadcast_object_list",
                    "all_gather_object",
                    "gather_object",
                ), f"{path}:{node.lineno}"
        assert "import pickle" not in text, path


def test_functions_that_communicate_say_so() -> None:
    """Whoever calls torch.distributed's collectives says "Collective." to those who must call it on
    all ranks."""
    text = CODE[ROOT / "grpo_spmd/distributed/collectives.py"]
    collectives = (
        "dist.all_gather",
        "dist.gather",
        "dist.all_to_all",
        "dist.broadcast",
        "_ALL_GATHER(",
        "init_process_group(",
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            body = ast.get_source_segment(text, node) or ""
            if any(call in body for call in collectives):
                assert (ast.get_docstring(node) or "").startswith(
                    ("Collective.", "Collective over")
                ), node.name
