"""The house keeps its rules (tests/support/house.py), and the checks see a breach of each of them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import house
from tests.support.processes import ROOT

PACKAGE = ROOT / "grpo_spmd"
Check = Callable[[Path], Iterator[str]]


@pytest.mark.parametrize("check", house.CHECKS, ids=lambda check: check.__name__)
def test_the_house_keeps_its_rules(check: Check) -> None:
    assert list(check(PACKAGE)) == []


def test_the_benchmarks_run_no_code_of_others() -> None:
    assert list(house.code_of_others(ROOT / "benchmarks")) == []


def test_the_readmes_map_is_the_tree() -> None:
    assert (
        list(house.map_differences(PACKAGE, (ROOT / "README.md").read_text(encoding="utf-8"))) == []
    )


_IN_A_FUNCTION = "def f(x):\n    "
_SILENT = 'def f(x):\n    """Sums x."""\n    dist.all_reduce(x)'
BREACHES: list[tuple[Check, str, str, str]] = [
    (
        house.upward_imports,
        "learn/losses.py",
        "from grpo_spmd.engine.engine import RolloutEngine",
        "learn imports engine",
    ),
    (
        house.upward_imports,
        "model/policy.py",
        _IN_A_FUNCTION + "from grpo_spmd.rewards import pool",
        "imports rewards",
    ),
    (
        house.upward_imports,
        "config/load.py",
        "from grpo_spmd import records",
        "config imports records",
    ),
    (house.upward_imports, "cellar.py", "x = 1", "the room cellar has no place"),
    (
        house.vllm_outside_the_engine,
        "rollout/sample.py",
        _IN_A_FUNCTION + "import vllm.config",
        "imports vllm",
    ),
    (
        house.scattered_collectives,
        "engine/engine.py",
        _IN_A_FUNCTION + "dist.all_reduce(x)",
        "a collective outside",
    ),
    (house.scattered_collectives, "distributed/collectives.py", _SILENT, "f communicates"),
    (
        house.known_config,
        "observe/log.py",
        "from grpo_spmd.config.schema import Config",
        "knows the whole Config",
    ),
    (house.known_config, "rollout/sample.py", "from grpo_spmd.parts import Run", "knows the Run"),
    (
        house.foreign_attributes,
        "learn/update.py",
        _IN_A_FUNCTION + "x.policy_version = 3",
        "writes x.policy_version",
    ),
    (
        house.foreign_attributes,
        "loop.py",
        _IN_A_FUNCTION + "x.policy_version += 3",
        "writes x.policy_version",
    ),
    (
        house.code_of_others,
        "model/lora.py",
        "x = AutoModel.from_pretrained(y)",
        "without trust_remote_code=False",
    ),
    (
        house.code_of_others,
        "model/lora.py",
        "x = AutoModel.from_config(y, trust_remote_code=z)",
        "from_config without",
    ),
    (house.code_of_others, "model/lora.py", "x = vllm.LLM\n", "vllm.LLM without"),
    (
        house.code_of_others,
        "model/policy.py",
        "x = torch.load(y)",
        "torch.load without weights_only=True",
    ),
    (house.code_of_others, "model/policy.py", "import pickle", "imports pickle"),
    (house.oversize, "learn/advantages.py", "def f():\n" + "    x = 1\n" * 70, "f has 71 lines"),
    (house.oversize, "learn/advantages.py", "x = 1\n" * 450, "no file may have more than 450"),
    (house.oversize, "learn/advantages.py", "# " + "x" * 119, "121 columns"),
    (house.oversize, "cellar.py", "x = 1", "in no budget"),
    (house.oversize, "tools/export.py", "x = 1\n" * 100, "export: "),
    (house.oversize, "learn/extra.py", "x = 1\n" * 6000, "trainer: "),
    (house.undescribed_rooms, "learn/__init__.py", "x = 1", "must be three lines"),
]


@functools.cache
def _of_the_package(check: Check) -> set[str]:
    return set(check(PACKAGE))


@pytest.mark.parametrize(
    ("check", "file", "text", "said"), BREACHES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_planted_breach_is_found(
    check: Check, file: str, text: str, said: str, tmp_path: Path
) -> None:
    package = tmp_path / "grpo_spmd"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    path = package / file
    with path.open("a", encoding="utf-8") as module:
        module.write(f"\n\n{text}\n")
    found = set(check(package)) - _of_the_package(check)
    assert [line for line in found if said in line], found


def test_a_room_that_the_map_does_not_name_is_found() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    torn = readme.replace("| `grpo_spmd/engine/` |", "| `grpo_spmd/motor/` |")
    assert list(house.map_differences(PACKAGE, torn)) == [
        "README.md: names grpo_spmd/motor/, which is not there",
        "README.md: does not name grpo_spmd/engine/",
    ]
