"""Where a demo may be made: it replaces what is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.demo import __main__ as command
from grpo_spmd.demo.making import make_folder


def _fill(model: Path) -> list[dict[str, object]]:
    (model / "weights").write_text("w")
    return [{"prompt": "1"}]


def test_what_no_demo_has_made_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "home/thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years")
    dangling = tmp_path / "link"
    dangling.symlink_to(tmp_path / "nowhere")
    for out in (thesis.parent, thesis, dangling):
        with pytest.raises(ConfigError, match="was not made by this command"):
            make_folder(out, {"seed": 0}, _fill)
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(thesis.parent)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    error = capsys.readouterr().err
    assert error.startswith("error: --out: ")
    assert error.count("\n") == 1
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(tmp_path / ("a" * 300))])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    error = capsys.readouterr().err
    assert error.endswith(": File name too long\n")
    assert error.count("\n") == 1
    assert thesis.read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "link"]


def test_an_empty_folder_and_a_demo_of_before_are_replaced(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    for seed in (0, 1):
        make_folder(out, {"seed": seed}, _fill)
        assert json.loads((out / "made_from.json").read_text())["seed"] == seed
        assert (out / "train.jsonl").read_text() == '{"prompt": "1"}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
