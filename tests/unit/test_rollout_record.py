"""The line of a rollout dump, written and read, and the reader of metrics.jsonl."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.columns import LONGEST_ROW, LONGEST_VALUE, bounded, gold
from grpo_spmd.observe.metrics_file import cut_metrics, ends_with_evaluation, lines_from_end, read_lines
from grpo_spmd.observe.rollout_reader import read_rollout
from grpo_spmd.observe.rollout_record import EvalRecord, RolloutRecord, to_line

RECORD = RolloutRecord(
    rollout_id=None,
    row=3,
    position=7,
    sample=1,
    prompt=[{"role": "user", "content": "häh?"}],
    columns={"answer": "ja", "nums": [1, 2]},
    completion="ja",
    reward=None,
    rewards={"exact": None, "format": 0.5},
    statuses={"exact": "error", "format": "ok"},
    advantage=-0.25,
    finish_reason="stop",
    prompt_ids=[1, 2],
    completion_ids=[3, 4],
    rollout_logprobs=[-0.5, None],
)


def test_a_record_is_read_as_it_was_written() -> None:
    line = to_line(RECORD)
    assert line.startswith('{"rollout_id": null, "row": 3, "position": 7, "sample": 1, "prompt": [{"role": "user", ')
    assert "häh?" in line
    assert read_rollout(line.encode(), "f:1") == RECORD
    assert RECORD.logprobs[0] == -0.5
    assert math.isnan(RECORD.logprobs[1])


# As the version before wrote it: no columns, and logprobs as doubles.
OLD_LINE = (
    '{"rollout_id": 0, "row": 3, "position": 7, "sample": 1, "prompt": "2+2=", "completion": "4", "reward": 1.0, '
    '"rewards": {"exact": 1.0}, "statuses": {"exact": "ok"}, "advantage": 0.5, "finish_reason": "stop", '
    '"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], '
    '"rollout_logprobs": [-0.10000000149011612, null, -1.401298464324817e-45], "extra": {"exact": {"length": 1}}}'
)


def test_a_line_of_the_version_before_is_read() -> None:
    record = read_rollout(OLD_LINE.encode(), "f:1")
    assert (record.columns, record.extra) == ({}, {"exact": {"length": 1}})
    assert (record.prompt, record.completion, record.reward) == ("2+2=", "4", 1.0)
    assert record.rollout_logprobs == [-0.10000000149011612, None, -1.401298464324817e-45]
    again = read_rollout(to_line(record).encode(), "f:1")
    assert again == record


def test_logprobs_come_back_to_the_bit_from_nine_digits() -> None:
    """Of float32, which engines give: all exponents, the smallest and the largest, both zeros, and random patterns."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits = np.concatenate([bits, np.arange(0, 2**32, 2**23, dtype=np.uint64).astype(np.uint32), [1, 0x7F7FFFFF]])
    values = bits.astype(np.uint32).view(np.float32)
    values = values[np.isfinite(values)]
    size = len(values)
    record = dataclasses.replace(RECORD, completion_ids=[0] * size, rollout_logprobs=values.tolist())
    line = to_line(record)
    text = line.partition('"rollout_logprobs": [')[2].partition("]")[0].split(", ")
    parts = [number for number, value in zip(text, values.tolist(), strict=True) if value % 1]
    assert max(len(re.sub(r"e.*|\D", "", number).lstrip("0")) for number in parts) == 9
    assert not [number for number in text if not re.search(r"[.e]", number)]  # none is an integer to a reader
    again = read_rollout(line.encode(), "f:1")
    # by their bits: -0.0 == 0.0, and numpy, not the reader's own way, makes float32 of them
    assert (
        np.array(again.rollout_logprobs, np.float64).astype(np.float32).view(np.uint32) == values.view(np.uint32)
    ).all()
    assert again.rollout_logprobs == values.tolist()  # also as doubles
    assert json.loads(line)["rollout_logprobs"][:3] == pytest.approx(values[:3].tolist(), rel=1e-8)


def test_columns_are_bounded_and_become_json() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "answer": "18",
        "nums": [1, 2.5, None, {"a": "ü"}],
        "when": moment,
        "nan": math.nan,
        "exact": "y" * LONGEST_VALUE,
        "long": "x" * (LONGEST_VALUE + 1),
        "tests": [f"assert f({i}) == {i}" for i in range(10_000)],
    }
    found = bounded(columns)
    assert list(found) == list(columns)
    assert {name: found[name] for name in ("answer", "nums", "exact")} == {
        name: columns[name] for name in ("answer", "nums", "exact")
    }
    assert (found["when"], found["nan"]) == ("2026-01-02 03:04:05", "nan")
    assert found["long"] == "x" * LONGEST_VALUE + f" ... ({LONGEST_VALUE + 1} characters)"
    as_json = json.dumps(columns["tests"])
    assert found["tests"] == as_json[:LONGEST_VALUE] + f" ... ({len(as_json)} characters)"
    many = bounded({f"c{i}": "z" * 3000 for i in range(100)})
    assert sum(value.count("z") for value in many.values()) == LONGEST_ROW
    assert many["c0"] == "z" * 3000
    assert many["c99"] == " ... (3000 characters)"
    assert columns["long"] == "x" * (LONGEST_VALUE + 1)  # the reward functions' own
    record = dataclasses.replace(RECORD, columns=bounded({"bytes": b"\x00\n", "keys": {(1, 2): 3}, "half": "\ud800"}))
    line = to_line(record)
    assert "\n" not in line
    assert read_rollout(line.encode("utf-8", "backslashreplace"), "f:1").columns == {
        "bytes": "b'\\x00\\n'",
        "keys": "{(1, 2): 3}",
        "half": "\ud800",
    }


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"id": 7, "answer": "18"}, "answer='18'"),
        ({"nums": [1, 2], "target": 3}, "target='3'"),
        ({"question_id": "q1", "level": 2}, "question_id='q1'"),
        ({"solution": "ab\n" * 40}, "solution='ab\\nab\\nab\\nab\\nab\\nab\\n ... ab\\nab\\nab\\nab\\nab\\nab\\n'"),
        ({}, ""),
    ],
)
def test_the_gold_answer_is_shown_in_a_line(columns: dict[str, Any], expected: str) -> None:
    assert gold(columns) == expected


def test_a_line_of_an_evaluation_tells_the_models_answer_from_the_datas() -> None:
    record = EvalRecord(3, 0, "6*7=", {"answer": "42"}, r"\boxed{41}", "41", False, 0.0, {"math": 0.0}, "stop")
    values = json.loads(to_line(record))
    assert "answer" not in values
    assert (values["columns"]["answer"], values["final_answer"], values["completion"]) == ("42", "41", r"\boxed{41}")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"columns": 3}, "f:1: columns is 3; this is no rollout dump"),
        ({"rollout_logprobs": ["x", 1]}, r"f:1: rollout_logprobs are no numbers \(must be real number, not str\); .*"),
        ({"row": "3"}, "f:1: row is '3'; this is no rollout dump"),
        ({"reward": "no"}, "f:1: reward is 'no'; this is no rollout dump"),
        ({"rewards": []}, r"f:1: rewards is \[\]; this is no rollout dump"),
        ({"rollout_logprobs": [-0.5]}, "f:1: 2 completion_ids, but 1 rollout_logprobs"),
    ],
)
def test_what_is_no_record_is_one_line(change: dict[str, Any], expected: str) -> None:
    values = json.loads(to_line(RECORD))
    assert read_rollout(json.dumps(values | {"reward": 1, "more": "x"}).encode(), "f:1").reward == 1
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        read_rollout(json.dumps(values | change).encode(), "f:1")
    del values["sample"]
    with pytest.raises(ConfigError, match=r"^f:1: sample is missing; this is no rollout dump$"):
        read_rollout(json.dumps(values).encode(), "f:1")
    for text in (b"{", b"[" * 100_000):
        with pytest.raises(ConfigError, match=r"^f:1: not valid JSON: "):
            read_rollout(text, "f:1")


def test_a_follower_gets_each_line_once_however_it_was_written(tmp_path: Path) -> None:
    path, place, seen = tmp_path / "metrics.jsonl", 0, []
    assert list(read_lines(path)) == []
    parts = ('{"step": 0}\n{"st', 'ep": 1}\n', "hostile\n[1]\n", '{"step": 2}', '\n{"step": 3}\n')
    for part in parts:
        with path.open("a") as file:
            file.write(part)
        for line in read_lines(path, place):
            seen.append(line.metrics["step"])
            place = line.end
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "end", ["", '{"step": 9', "\0" * 9000, "[" * 100_000 + "\n", "\n\n\n", '{"step": true}\n', "x" * 200_000]
)
def test_the_last_lines_are_read_from_the_end_and_cut(end: str, tmp_path: Path) -> None:
    """Whatever a kill, or somebody, left behind it; and over the borders of the blocks that are read."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(json.dumps({"step": step, "text": "x" * (step * 997 % 9000)}) + "\n" for step in range(1, 301)) + end
    )
    assert [metrics["step"] for metrics in lines_from_end(path)] == [*range(1, 301)][::-1]
    for num_steps in (300, 299, 1, 0):
        cut_metrics(path, num_steps)
        assert [metrics["step"] for metrics in lines_from_end(path)] == [*range(1, num_steps + 1)][::-1]
        assert len(path.read_bytes().splitlines()) == num_steps


@pytest.mark.parametrize("is_plain", [True, False], ids=["as a run leaves it", "with a line of somebody else"])
def test_the_evaluation_after_the_last_step_that_is_kept_is_cut(
    is_plain: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that goes on makes it again; those before it stay, each behind the line of its step."""
    path = tmp_path / "metrics.jsonl"
    of_step = {step: json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(1, 5)}
    of_policy = {step: json.dumps({"step": step, "eval/held/mean": 0.5}) + "\n" for step in (0, 2, 4)}
    lines = [of_policy[0], of_step[1], of_step[2], of_policy[2], of_step[3], of_step[4], of_policy[4]]
    other = "" if is_plain else "somebody\n"
    for num_steps, num_kept in ((4, 6), (3, 5), (2, 3), (1, 2), (0, 0)):
        path.write_text(other + "".join(lines))
        assert ends_with_evaluation(path, 4)
        assert not ends_with_evaluation(path, 5)
        cut_metrics(path, num_steps)
        assert path.read_text() == "".join(lines[:num_kept])
        assert not ends_with_evaluation(path, 0)
    assert not caplog.text
    path.write_text(other + "".join(lines[:4] + lines[5:]))
    cut_metrics(path, 4)
    assert path.read_text() == "".join(lines[:4] + lines[5:6])
    assert "lacks 1 of the first 4 steps, first step 3" in caplog.text


def test_metrics_that_are_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for place in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("nowhere")):
        place(path)
        for read in (
            lambda path: ends_with_evaluation(path, 3),
            lambda path: cut_metrics(path, 3),
            lambda path: list(read_lines(path)),
        ):
            with pytest.raises(ConfigError, match=r"metrics\.jsonl is a"):
                read(path)
        path.unlink()
