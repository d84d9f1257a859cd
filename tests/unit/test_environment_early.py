"""What the process that runs an environment's file refuses of it, before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.checks.trials import trial_of_environment
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import EnvironmentConfig
from grpo_spmd.episodes.worker import load
from tests.support.bad_inputs import Case as BadInput
from tests.support.bad_inputs import check_exit_code, good_folder, prepare

TYPED = (
    'def add(a: int) -> int:\n    """Add.\n\n    Args:\n        a: One.\n    """\n    return a\n'
)
METHOD = "    " + TYPED.replace("(a", "(self, a").replace("\n", "\n    ").rstrip(" ")
WORLD = f"class World:\n    def reset(self, **row): ...\n{METHOD}"

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"factory": "nowhere.py:World"}, "environment.factory: there is no file nowhere.py"),
    ("", {"tools": ("add",)}, "environment.tools.0 must be \"file.py:function\"; got 'add'"),
    ("", {"gym": "countdown"}, "environment.gym must be \"file.py:Class\"; got 'countdown'"),
    (
        WORLD,
        {"factory": {"a": "env.py:World", "b": "env.py:Word"}},
        "environment.factory.b: env.py has no Class 'Word'",
    ),
    (
        "def (\n",
        {"agent": "env.py:play"},
        "environment.agent: env.py:1 cannot be imported: SyntaxError: ",
    ),
    (
        f"class World:\n{METHOD}",
        {"factory": "env.py:World"},
        "environment.factory: World has no method reset(**row)",
    ),
    (
        f"class World:\n{METHOD}class B:\n    def reset(self): ...\n",
        {"factory": "env.py:World"},
        "has no method reset(**row)",
    ),
    (f"{WORLD}world = World()\n", {"factory": "env.py:world"}, "env.py has no Class 'world'"),
    (
        "class World:\n    def step(self, a): ...\n",
        {"gym": "env.py:World"},
        "World has no method reset or init",
    ),
    (
        "class World:\n    def init(self, a): ...\n",
        {"gym": "env.py:World"},
        "World has no method step",
    ),
    (
        TYPED.replace(": int", ""),
        {"tools": ("env.py:add",)},
        "add has no schema: Argument a is missing a type hint",
    ),
    (
        "def add(a: int): ...\n",
        {"tools": ("env.py:add",)},
        "add has no schema: Cannot generate JSON schema for add because it has no docstring",
    ),
    (
        WORLD.replace("a: int", "a"),
        {"factory": "env.py:World"},
        "add has no schema: Argument a is missing a type hint",
    ),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    (WORLD, {"factory": "env.py:World"}),
    (f"class Base:\n{METHOD}    def reset(self): ...\nclass World(Base): "
     "...\n", {"factory": "env.py:World"}),
    (f"class World:\n{METHOD}World.reset = lambda self: None\n", {"factory": "env.py:World"}),
    (f"class World:\n{METHOD}for c in [World]:\n    c.reset = len\n", {"factory": "env.py:World"}),
    (f"{WORLD}World2 = type('World2', (World,), {{}})\n", {"factory": "env.py:World2"}),
    (f"{WORLD}globals()['Wor' + 'ld2'] = World\n", {"factory": "env.py:World2"}),
    (f"class World:\n{METHOD}setattr(World, 're' + 'set', len)\n", {"factory": "env.py:World"}),
    (f"{WORLD}    @property\n    def name(self): ...\n    def _hidden(self, a): "
     "...\n", {"factory": "env.py:World"}),
    (f"{TYPED}if True:\n    other = add\n", {"tools": ("env.py:other",)}),
    ("from random import *\n" + WORLD, {"factory": "env.py:World"}),
    ("class World:\n    init = step = len\n", {"gym": "env.py:World"}),
    ("async def play(task, base_url, api_key, model): ...\n", {"agent": "env.py:play"}),
    ("", {"factory": "countdown"}),
]  # fmt: skip


@pytest.mark.parametrize(("source", "settings", "expected"), REFUSED)
def test_what_cannot_work_is_refused_in_one_line(
    source: str,
    settings: dict[str, Any],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(source)
    with (
        pytest.raises(ConfigError) as early,
        trial_of_environment(EnvironmentConfig(**settings)) as trial,
    ):
        trial.load()
    assert str(early.value).startswith("environment.")
    assert expected in str(early.value)
    assert "\n" not in str(early.value)


@pytest.mark.parametrize(("source", "settings"), TAKEN)
def test_what_works_is_not_refused(
    source: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("env.py").write_text(source)
    load({"environment": EnvironmentConfig(**settings), "rewards": [], "max_chars": 9})


def test_the_command_ends_with_2_and_runs_the_file_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = good_folder(tmp_path, monkeypatch)
    prepare(BadInput("", ""))
    Path(folder, "env.py").write_text(f"open('was_run', 'w')\n{WORLD}")
    Path(folder, "model/chat_template.jinja").write_text("{{ messages[-1].content }}")
    assert check_exit_code(monkeypatch, "environment.factory=env.py:Word") == 2
    assert capsys.readouterr().err == "error: environment.factory: env.py has no Class 'Word'\n"
    assert check_exit_code(monkeypatch, "environment.factory=env.py:World") == 0
    assert capsys.readouterr().err == ""
    assert Path(folder, "was_run").exists()
    assert "env" not in sys.modules
