"""Pages of folders in which any value may be any other: an answer or one line, never a traceback,
no line too wide."""

from __future__ import annotations

import base64
import copy
import json
import random
import struct
import sys
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.tools.show.__main__ import main
from tests.support.shown_run import LAUNCH, metrics_of, rollout_of, write_lines, write_run

JUNK: list[Any] = [
    None, True, 0, -1, 10**400, -(10**30), 1e308, -1e308, 5e-324, float("nan"), float("inf"), "", "\x1b[2J", "\ud800",  # noqa: E501
    "x" * 3000, [], {}, [[]], [1, "a", None], {"a": {"b": [1]}}, json.loads("[" * 300 + "]" * 300), "12", 2**63,  # noqa: E501
    "ok", [3, 4, 0], {"role": "x"},
]  # fmt: skip
PAGES = [
    [],
    ["--step", "2"],
    ["--worst", "9"],
    ["--best", "9", "--full"],
    ["--prompt", "10"],
    ["--prompt", "question"],
]
PAGES += [["--grep", "yes"], ["--step", "1"], ["--grep", "\u00e9", "--step", "2"]]
CONFIGS = [
    "model: {dtype: float32}\n",
    "[1, 2]",
    "model: [1]\n",
    "\x00",
    "training:\n  num_steps: -5\n",
]
TURNS = [{"segment": 0, "sampled": False, "token_ids": [1, 2]}]
TURNS += [{"segment": 0, "sampled": True, "token_ids": [3, 4, 0], "finish_reason": "stop"}]
MESSAGES = [
    {
        "role": "assistant",
        "content": "a",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    }
]
EPISODE: dict[str, Any] = {
    "status": "ok",
    "turns": TURNS,
    "messages": MESSAGES,
    "prompt": [{"role": "user", "content": "question"}],
}
EPISODE |= {"environment": {"rewards": {"r": 1.0}, "calls_s": [0.1], "error": None}}
TOKENIZER = {
    "model": {"vocab": {"a": 3, "b": 4}},
    "decoder": {"type": "Fuse"},
    "added_tokens": [{"id": 0}],
}


def _changed(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.06:
        return copy.deepcopy(rng.choice(JUNK))
    if isinstance(value, dict):
        return {name: _changed(inner, rng) for name, inner in value.items() if rng.random() > 0.01}
    return [_changed(inner, rng) for inner in value] if isinstance(value, list) else value


def _write(folder: Path, rng: random.Random) -> Path:
    metrics = [_changed(metrics_of(step), rng) for step in (1, 2, 3)]
    metrics += [_changed({"step": 2, "eval/held/mean": 0.5}, rng)]
    kinds_values = [(p, s, EPISODE if p == 1 else {}) for p in range(3) for s in range(3)]
    rollouts = [
        _changed(rollout_of(p, s, s / 3, "yes it is", **rest), rng) for p, s, rest in kinds_values
    ]
    write_run(folder, metrics, {1: rollouts[:2], 2: rollouts}, config=rng.choice(CONFIGS))
    write_lines(
        folder / "launches.jsonl", [_changed(LAUNCH | {"outcome": rng.choice([None, "done"])}, rng)]
    )
    differences = base64.b64encode(struct.pack("<3e", 0, -3, float("nan"))).decode()
    scores = {
        "difference": differences,
        "entropy": differences,
        "difference_mean": None,
        "difference_max": 3.0,
    }
    lines = [{"rollout_id": number, **scores} for number in range(8)]
    lines = lines if rng.random() < 0.7 else [_changed(line, rng) for line in lines]
    write_lines(folder / "token_scores" / "step_000002.jsonl", lines)
    (folder / "tokenizer.json").write_text(json.dumps(_changed(TOKENIZER, rng)))
    return folder


@pytest.mark.parametrize("seed", range(25))
def test_any_value_in_the_place_of_any_other(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    _see_all_pages(_write(tmp_path / "run", rng), rng.choice([60, 80, 133]), monkeypatch, capsys)


EXTREMES = [10**400, -(10**30), 1e308, -1e308, 1e200, 5e-324, float("nan"), float("inf")]


@pytest.mark.parametrize(
    "value", EXTREMES, ids=lambda value: f"{value:.3}" if isinstance(value, float) else "whole"
)
def test_figures_beyond_all_bounds(
    value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the place of each figure, beside ordinary ones."""
    plain = metrics_of(1)
    metrics = [
        metrics_of(1, **{"time/step_s": value}),
        {name: value if name != "step" else 2 for name in plain},
    ]
    metrics += [
        metrics_of(number, **{name: value})
        for number, name in enumerate(plain, start=3)
        if name != "step"
    ]
    rollouts = [
        rollout_of(0, 0, 0.5),
        rollout_of(0, 1, value),
        rollout_of(1, 0, value),
        rollout_of(1, 1, value),
    ]
    run = write_run(tmp_path / "run", metrics, {2: rollouts})
    _see_all_pages(run, 80, monkeypatch, capsys)


def _see_all_pages(
    run: Path, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in PAGES:
        monkeypatch.setattr(sys, "argv", ["show", str(run), *words])
        with warnings.catch_warnings():
            warnings.simplefilter(
                "error"
            )  # of numpy, on a terminal: two lines that nobody can read
            try:
                main()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        out, err = capsys.readouterr()
        assert (code, err.count("\n")) in ((0, 0), (2, 1)), (words, err)
        for line in out.splitlines():
            assert (
                sum(1 + (unicodedata.east_asian_width(char) in "WF") for char in line) <= columns
            ), (words, line)
