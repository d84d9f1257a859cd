"""The line of a rollout dump, written and read, and the reader of metrics.jsonl."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.metrics_file import (
    cut_metrics,
    ends_with_evaluation,
    read_metrics,
    read_metrics_backwards,
)
from grpo_spmd.observe.rollout_record import (
    MAX_ROW_CHARS,
    MAX_VALUE_CHARS,
    EvalRecord,
    RolloutRecord,
    bounded_values,
    gold_answer,
    parse_rollout,
    to_line,
)

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
    rollout_logprobs=[-0.5, 1.0],
    num_rollouts=16,
)


def test_a_record_is_read_as_it_was_written() -> None:
    line = to_line(RECORD)
    assert line.startswith(
        b'{"rollout_id":null,"row":3,"position":7,"sample":1,"prompt":[{"role":"user","content":'
    )
    assert "häh?".encode() in line
    # -0.5 is 0xbf000000 and 1.0 is 0x3f800000, the lowest byte first; one of them at a time by hand
    assert b'"rollout_logprobs":"AAAAvwAAgD8=","num_rollouts":16}' in line
    assert b'"completion_ids":[3,4]' in line
    assert parse_rollout(line, "f:1") == RECORD
    assert json.loads(line)["prompt_ids"] == [1, 2]


# As the version before wrote it: no columns, and logprobs as doubles.
OLD_LINE = (
    '{"rollout_id": 0, "row": 3, "position": 7, "sample": 1, "prompt": "2+2=", "completion": '
    '"4", "reward": 1.0, '
    '"rewards": {"exact": 1.0}, "statuses": {"exact": "ok"}, "advantage": 0.5, "finish_reason": '
    '"stop", '
    '"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], '
    '"rollout_logprobs": [-0.10000000149011612, null, -1.401298464324817e-45], "extra": '
    '{"exact": {"length": 1}}}'
)


def test_a_line_of_the_version_before_is_read() -> None:
    record = parse_rollout(OLD_LINE.encode(), "f:1")
    assert (record.columns, record.extra) == ({}, {"exact": {"length": 1}})
    assert (record.prompt, record.completion, record.reward) == ("2+2=", "4", 1.0)
    assert record.num_rollouts is None
    assert repr(record.rollout_logprobs) == "[-0.10000000149011612, nan, -1.401298464324817e-45]"
    assert repr(parse_rollout(to_line(record), "f:1")) == repr(record)
    nine_digits = OLD_LINE.replace("-0.10000000149011612", "-0.100000001").replace(
        "-1.401298464324817e-45", "-0.0"
    )
    assert (
        repr(parse_rollout(nine_digits.encode(), "f:1").rollout_logprobs)
        == "[-0.10000000149011612, nan, -0.0]"
    )


def test_logprobs_come_back_to_the_bit_and_numpy_reads_them() -> None:
    """Of float32, which engines give: all exponents, both zeros and infinities, NaN, and random
    patterns."""
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits = np.concatenate(
        [bits, np.arange(0, 2**32, 2**23, dtype=np.uint64).astype(np.uint32), [1, 0x7F7FFFFF]]
    )
    values = bits.astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]  # whose payload Python's float does not keep
    values = np.append(values, np.float32("nan"))
    record = dataclasses.replace(
        RECORD, completion_ids=[0] * len(values), rollout_logprobs=values.tolist()
    )
    line = to_line(record)
    read = np.frombuffer(base64.b64decode(json.loads(line)["rollout_logprobs"]), "<f4")
    assert (read.view(np.uint32) == values.view(np.uint32)).all()
    again = np.array(parse_rollout(line, "f:1").rollout_logprobs, np.float64).astype(np.float32)
    assert (again.view(np.uint32) == values.view(np.uint32)).all()
    assert len(line) < 4 / 3 * 4 * len(values) + 2 * len(values) + 1000


def test_what_the_fast_encoder_does_not_know_is_json_all_the_same() -> None:
    """Half a surrogate pair in any text, and a key that is no text."""
    for change in (
        {"prompt": "a\ud800b\u2028"},
        {"completion": "\udfff"},
        {"columns": {"half": "\ud800"}},
        {"extra": {"r": {None: 1.0}}},
    ):
        record = dataclasses.replace(RECORD, **change)
        line = to_line(record)
        assert b"\n" not in line
        expected = json.loads(json.dumps(vars(record) | {"rollout_logprobs": "AAAAvwAAgD8="}))
        not_written: dict[str, Any] = {
            "extra": {},
            "status": None,
            "turns": [],
            "messages": [],
            "environment": {},
        }
        assert {**not_written, **json.loads(line.decode())} == expected
    assert b"a\\ud800b\xe2\x80\xa8" in to_line(dataclasses.replace(RECORD, prompt="a\ud800b\u2028"))


def test_columns_are_bounded_and_become_json() -> None:
    moment = datetime.datetime(2026, 1, 2, 3, 4, 5)
    columns = {
        "answer": "18",
        "nums": [1, 2.5, None, {"a": "ü"}],
        "when": moment,
        "nan": math.nan,
        "exact": "y" * MAX_VALUE_CHARS,
        "long": "x" * (MAX_VALUE_CHARS + 1),
        "tests": [f"assert f({i}) == {i}" for i in range(10_000)],
    }
    result = bounded_values(columns)
    assert list(result) == list(columns)
    assert {name: result[name] for name in ("answer", "nums", "exact")} == {
        name: columns[name] for name in ("answer", "nums", "exact")
    }
    assert (result["when"], result["nan"]) == ("2026-01-02 03:04:05", "nan")
    assert result["long"] == "x" * MAX_VALUE_CHARS + f" ... ({MAX_VALUE_CHARS + 1} characters)"
    as_json = json.dumps(columns["tests"])
    assert result["tests"] == as_json[:MAX_VALUE_CHARS] + f" ... ({len(as_json)} characters)"
    several = bounded_values({f"c{i}": "z" * 3000 for i in range(100)})
    assert sum(value.count("z") for value in several.values()) == MAX_ROW_CHARS
    assert several["c0"] == "z" * 3000
    assert several["c99"] == " ... (3000 characters)"
    assert columns["long"] == "x" * (MAX_VALUE_CHARS + 1)  # the reward functions' own
    record = dataclasses.replace(
        RECORD, columns=bounded_values({"bytes": b"\x00\n", "keys": {(1, 2): 3}, "half": "\ud800"})
    )
    line = to_line(record)
    assert b"\n" not in line
    assert parse_rollout(line, "f:1").columns == {
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
        (
            {"solution": "ab\n" * 40},
            "solution='ab\\nab\\nab\\nab\\nab\\nab\\n ... ab\\nab\\nab\\nab\\nab\\nab\\n'",
        ),
        ({}, ""),
    ],
)
def test_the_gold_answer_is_shown_in_a_line(columns: dict[str, Any], expected: str) -> None:
    assert gold_answer(columns) == expected


def test_a_line_of_an_evaluation_tells_the_models_answer_from_the_datas() -> None:
    record = EvalRecord(
        3, 0, "6*7=", {"answer": "42"}, r"\boxed{41}", "41", False, 0.0, {"math": 0.0}, "stop"
    )
    values = json.loads(to_line(record))
    assert "answer" not in values
    assert (values["columns"]["answer"], values["final_answer"], values["completion"]) == (
        "42",
        "41",
        r"\boxed{41}",
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"columns": 3},
            r"f:1: Expected `object`, got `int` - at `\$.columns`; this is no rollout dump",
        ),
        (
            {"rollout_logprobs": ["x", 1]},
            r"f:1: Expected `float \| null`, got `str` - at `\$.rollout_logprobs\[0\]`; .*",
        ),
        ({"row": "3"}, r"f:1: Expected `int`, got `str` - at `\$.row`; this is no rollout dump"),
        ({"reward": "no"}, r"f:1: Expected `float \| null`, got `str` - at `\$.reward`; .*"),
        ({"rewards": []}, r"f:1: Expected `object`, got `array` - at `\$.rewards`; .*"),
        (
            {"rollout_logprobs": [-0.5]},
            "f:1: 2 completion_ids, but 1 rollout_logprobs; this is no rollout dump",
        ),
        (
            {"rollout_logprobs": "AAAAvw=="},
            "f:1: 2 completion_ids, but 1 rollout_logprobs; this is no rollout dump",
        ),
        (
            {"rollout_logprobs": ""},
            "f:1: 2 completion_ids, but 0 rollout_logprobs; this is no rollout dump",
        ),
        (
            {"rollout_logprobs": "AAAAvwAAgA=="},
            r"f:1: buffer size must be a multiple of element size; .*",
        ),
        (
            {"rollout_logprobs": "AAAAvwAAgD8"},
            r"f:1: Invalid base64 encoded string - at `\$.rollout_logprobs`; .*",
        ),
        (
            {"rollout_logprobs": "AAAA\nvwAAgD8="},
            r"f:1: Invalid base64 encoded string .*",
        ),
        (
            {"rollout_logprobs": "h\u00e4h"},
            r"f:1: Invalid base64 encoded string .*",
        ),
        (
            {"rollout_logprobs": 3},
            r"f:1: Expected `bytes \| array`, got `int` - at `\$.rollout_logprobs`; .*",
        ),
        (
            {"num_rollouts": "16"},
            r"f:1: Expected `int \| null`, got `str` - at `\$.num_rollouts`; .*",
        ),
    ],
)
def test_what_is_no_record_is_one_line(change: dict[str, Any], expected: str) -> None:
    values = json.loads(to_line(RECORD))
    assert (
        parse_rollout(json.dumps(values | {"reward": 1, "more": "x"}).encode(), "f:1").reward == 1
    )
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        parse_rollout(json.dumps(values | change).encode(), "f:1")
    del values["sample"]
    with pytest.raises(
        ConfigError, match=r"^f:1: Object missing required field `sample`; this is no rollout dump$"
    ):
        parse_rollout(json.dumps(values).encode(), "f:1")
    for text in (b"{", b"[" * 100_000):
        with pytest.raises(ConfigError, match=r"^f:1: not valid JSON: "):
            parse_rollout(text, "f:1")


def test_a_follower_gets_each_line_once_however_it_was_written(tmp_path: Path) -> None:
    path, position, seen = tmp_path / "metrics.jsonl", 0, []
    assert list(read_metrics(path)) == []
    pieces = ('{"step": 0}\n{"st', 'ep": 1}\n', "hostile\n[1]\n", '{"step": 2}', '\n{"step": 3}\n')
    for piece in pieces:
        with path.open("a") as file:
            file.write(piece)
        for line in read_metrics(path, position):
            seen.append(line.values["step"])
            position = line.end
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "end",
    [
        "",
        '{"step": 9',
        "\0" * 9000,
        "[" * 100_000 + "\n",
        "\n\n\n",
        '{"step": true}\n',
        "x" * 200_000,
    ],
)
def test_the_last_lines_are_read_from_the_end_and_cut(end: str, tmp_path: Path) -> None:
    """Whatever a kill, or somebody, left behind it; and over the borders of the blocks that are
    read."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": step, "text": "x" * (step * 997 % 9000)}) + "\n"
            for step in range(1, 301)
        )
        + end
    )
    assert [metrics["step"] for metrics in read_metrics_backwards(path)] == [*range(1, 301)][::-1]
    for num_steps in (300, 299, 1, 0):
        cut_metrics(path, num_steps)
        assert [metrics["step"] for metrics in read_metrics_backwards(path)] == [
            *range(1, num_steps + 1)
        ][::-1]
        assert len(path.read_bytes().splitlines()) == num_steps


@pytest.mark.parametrize(
    "is_plain", [True, False], ids=["as a run leaves it", "with a line of somebody else"]
)
def test_the_evaluation_after_the_last_step_that_is_kept_is_cut(
    is_plain: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The run that goes on makes it again; those before it stay, each behind the line of its
    step."""
    path = tmp_path / "metrics.jsonl"
    step_values = {
        step: json.dumps({"step": step, "reward/mean": 0.5}) + "\n" for step in range(1, 5)
    }
    policy_values = {
        step: json.dumps({"step": step, "eval/held/mean": 0.5}) + "\n" for step in (0, 2, 4)
    }
    lines = [
        policy_values[0],
        step_values[1],
        step_values[2],
        policy_values[2],
        step_values[3],
        step_values[4],
        policy_values[4],
    ]
    second = "" if is_plain else "somebody\n"
    for num_steps, num_kept in ((4, 6), (3, 5), (2, 3), (1, 2), (0, 0)):
        path.write_text(second + "".join(lines))
        assert ends_with_evaluation(path, 4)
        assert not ends_with_evaluation(path, 5)
        cut_metrics(path, num_steps)
        assert path.read_text() == "".join(lines[:num_kept])
        assert not ends_with_evaluation(path, 0)
    assert not caplog.text
    path.write_text(second + "".join(lines[:4] + lines[5:]))
    cut_metrics(path, 4)
    assert path.read_text() == "".join(lines[:4] + lines[5:6])
    assert "lacks 1 of the first 4 steps, first step 3" in caplog.text


def test_metrics_that_are_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for position in (
        os.mkfifo,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to("nowhere"),
    ):
        position(path)
        for read in (
            lambda path: ends_with_evaluation(path, 3),
            lambda path: cut_metrics(path, 3),
            lambda path: list(read_metrics(path)),
        ):
            with pytest.raises(ConfigError, match=r"metrics\.jsonl is a"):
                read(path)
        path.unlink()
