"""The house keeps its rules (tests/support/house.py), and the checks see a breach of each of
them."""

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
    assert _of_the_package(check) == set()


def test_the_benchmarks_run_no_code_of_others() -> None:
    assert list(house.code_of_others(ROOT / "benchmarks")) == []


def test_the_readmes_map_is_the_tree() -> None:
    assert list(house.map_differences(PACKAGE, _map())) == []


def _map() -> str:
    return (PACKAGE / "README.md").read_text(encoding="utf-8")


_IN_A_FUNCTION = "def f(x):\n    "
_SILENT = 'def f(x):\n    """Sums x."""\n    dist.all_reduce(x)'
_IMPORTS_UPDATE = "from grpo_spmd.learn.update import PolicyUpdater"
_IMPORTS_LATE = _IN_A_FUNCTION + _IMPORTS_UPDATE
_VAGUE = "def f(own, said):\n    what = own\n    of_them = said\n    return what, of_them"
_PACKED = "def f(x, y):\n    rest = x, y\n    return f(*rest)"
_PACKED_BESIDE = "def f(x, y):\n    z, rest = x, (x, y)\n    return f(*rest)"
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
    (
        house.code_of_others,
        "data/rows.py",
        "from grpo_spmd.rewards.named import unpack",
        "imports unpack, which is cloudpickle's",
    ),
    (house.oversize, "learn/advantages.py", "x = 1\n" * 10_000, "learn: "),
    (house.oversize, "cellar.py", "x = 1", "the room cellar has no number of tokens"),
    (house.import_circles, "learn/losses.py", _IMPORTS_UPDATE, "learn.losses: stands in a circle"),
    (house.import_circles, "learn/losses.py", _IMPORTS_LATE, "learn.losses: stands in a circle"),
    (house.vague_names, "loop.py", _VAGUE, "loop.py:"),
    (house.packed_tuples, "loop.py", _PACKED, "*rest is a packed tuple"),
    (house.packed_tuples, "loop.py", _PACKED_BESIDE, "*rest is a packed tuple"),
    (house.undescribed_rooms, "learn/__init__.py", "x = 1", "must be two to six lines"),
]


@functools.cache
def _of_the_package(check: Check) -> set[str]:
    return set(check(PACKAGE))


def _ignored(folder: str, names: list[str]) -> list[str]:
    """Leaves out what is below the package's top, where a breach is planted there."""
    return [name for name in names if Path(folder) == PACKAGE and (PACKAGE / name).is_dir()]


@pytest.mark.parametrize(
    ("check", "file", "text", "message"),
    BREACHES,
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_breach_is_found(
    check: Check, file: str, text: str, message: str, tmp_path: Path
) -> None:
    package = tmp_path / "grpo_spmd"
    if check is house.foreign_attributes:
        # It looks for the class of the attribute, which another room may have.
        shutil.copytree(PACKAGE, package)
    else:
        # One room, because a check reads every module that it is given.
        room = Path(file).parent
        shutil.copytree(PACKAGE / room, package / room, ignore=_ignored)
    with (package / file).open("a", encoding="utf-8") as module:
        module.write(f"\n\n{text}\n")
    result = set(check(package)) - _of_the_package(check)
    assert [line for line in result if message in line], result


def test_too_many_late_imports_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "MOST_LATE_IMPORTS", 0)
    assert any(line.startswith("api.py:") for line in house.late_imports(PACKAGE))


def test_too_many_files_and_names_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "MOST_FILES", 10)
    monkeypatch.setattr(house, "MOST_NAMES_AT_TOP", 5)
    breaches = "\n".join(house.oversize(PACKAGE))
    assert "files, and 10 are the most" in breaches
    assert "names at the top, and 5 are the most" in breaches


def test_a_room_that_the_map_does_not_name_is_found() -> None:
    torn = _map().replace("| `engine/` |", "| `motor/` |")
    assert list(house.map_differences(PACKAGE, torn)) == [
        "README.md: names motor/, which is not there",
        "README.md: does not name engine/",
    ]
