"""What is in a page, held against metrics.jsonl and the dumps, which are read here by plain JSON;
and the bounds that
it keeps whatever the folder holds."""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
import resource
import stat
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_spmd.diagnosis.run import name_apart, read_run
from grpo_spmd.observe import run_folder
from grpo_spmd.observe.rollout_record import RolloutRecord, to_line
from grpo_spmd.observe.run_folder import LinePosition, RunFolder
from grpo_spmd.tools import follow
from grpo_spmd.tools.report import __main__ as command
from grpo_spmd.tools.report import build, steps
from grpo_spmd.tools.report.build import build_page
from grpo_spmd.tools.report.overview import summarize_prompts
from grpo_spmd.tools.report.page import json_bytes
from grpo_spmd.tools.report.steps import Group, StepResult, scan_step
from tests.support.dumps import dumped, logprobs_of
from tests.support.processes import ROOT
from tests.support.reported import GROUP, byte_tokenizer, dump, healthy, make_run, record, step_of

Json = dict[str, Any]


def _chunks(path: Path) -> dict[str, Json]:
    """As a browser unpacks them."""
    result = re.findall(rb'data-chunk="([^"]+)">([^<]*)<', path.read_bytes())
    unpacked = {
        name.decode(): zlib.decompress(base64.b64decode(text), -15) for name, text in result
    }
    assert all(text.isascii() for text in unpacked.values())
    return {name: json.loads(text, parse_constant=_refuse) for name, text in unpacked.items()}


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _page(*folders: Path) -> dict[str, Json]:
    out = folders[0].parent / "page.html"
    build_page(name_apart([read_run(folder) for folder in folders]), out)
    return _chunks(out)


def _scores(
    folder: Path, step: int, records: list[RolloutRecord], without: int | None = None
) -> None:
    (folder / "token_scores").mkdir(exist_ok=True)
    lines = []
    for number, of in enumerate(records):
        if of.rollout_id is None or number == without:
            continue
        count = len(of.completion_ids)
        difference = (np.arange(count) * 0.001 * (number + 1)).astype("<f2")
        entropy = (np.arange(count) * 0.25).astype("<f2")
        packed = {name: base64.b64encode(values.tobytes()).decode()
                  for name, values in (("difference", difference), ("entropy", entropy))}  # fmt: skip  # noqa: E501
        largest = float(difference.astype(np.float64).max(initial=0.0))
        lines.append(
            {
                "rollout_id": of.rollout_id,
                **packed,
                "difference_mean": 0.0,
                "difference_max": largest,
            }
        )
    path = folder / "token_scores" / f"step_{step:06d}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def _near(value: float | None, digits: int) -> Any:
    return value if value is None else pytest.approx(value, rel=0.6 * 10.0 ** (1 - digits))


def test_the_page_has_the_figures_of_the_metrics_and_of_the_dump(tmp_path: Path) -> None:
    lines = healthy(30)
    lines[4]["reward/mean"] = None
    retained = [{"step": step, "eval/held/mean": step / 40} for step in (0, 10, 20)]
    folder = make_run(tmp_path / "run", [*retained, *lines])
    byte_tokenizer(folder)
    for step in (1, 10, 30):
        records = step_of(step)
        dump(
            folder, step, records[:5] + records[:4:-1]
        )  # ranks write in the order in which they come
        _scores(folder, step, records, without=5)
    chunks = _page(folder)
    main = chunks["main"]
    (run,) = main["runs"]

    written = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps_values = [line for line in written if "eval/held/mean" not in line]
    assert run["steps"] == [line["step"] for line in steps_values]
    for key in steps_values[0].keys() - {"step"}:
        assert run["metrics"][key] == [_near(line[key], 6) for line in steps_values]
    assert run["evaluations"] == {
        "steps": [0, 10, 20],
        "metrics": {"eval/held/mean": [0, 0.25, 0.5]},
    }
    assert "thinned" not in run
    assert (run["name"], run["state"], run["last_step"], run["num_steps"]) == (
        f"{tmp_path.name}/run",
        "done",
        30,
        80,
    )

    assert run["rollouts"] == {"steps": [1, 10, 30], "shown": 48, "total": 48, "note": ""}
    for step in (1, 10, 30):
        _check_step(chunks[f"0/{step}"], dumped(folder, step), without=5)
    means: dict[int, list[float]] = {}
    for step in (1, 10, 30):
        groups: dict[tuple[int, int], list[float]] = {}
        for rollout in dumped(folder, step):
            groups.setdefault((rollout["row"], rollout["position"]), []).append(rollout["reward"])
        for (row, _), rewards in groups.items():
            means.setdefault(row, []).append(sum(rewards) / GROUP)
    displayed = {prompt["row"]: prompt for prompt in run["prompts"]}
    assert {row: prompt["means"] for row, prompt in displayed.items()} == {
        row: [_near(mean, 4) for mean in row_values] for row, row_values in means.items()
    }
    assert all(prompt["steps"] == [1, 10, 30] for prompt in displayed.values())
    assert (displayed[2]["prompt"], displayed[2]["columns"]) == (
        "user: question 2",
        {"answer": "2"},
    )
    assert run["prompts_total"] == 4


def _check_step(chunk: Json, dump_of_step: list[Json], without: int) -> None:
    """All of a step: the table, and every rollout whole."""
    table, rollouts = chunk["table"], chunk["rollouts"]
    assert {name: len(column) for name, column in table.items()} == dict.fromkeys(
        table, len(dump_of_step)
    )
    for position, rollout in enumerate(dump_of_step):
        largest = 0.001 * (position + 1) * (len(rollout["completion_ids"]) - 1)
        expected = {name: rollout[name] for name in ("position", "sample", "row")} | {
            "reward": _near(rollout["reward"], 6), "advantage": _near(rollout["advantage"], 4),
            "tokens": len(rollout["completion_ids"]), "finish": int(rollout["finish_reason"] == "length"),  # noqa: E501
            "mismatch": None if position == without else pytest.approx(largest, rel=0.01), "status": 0, "shown": position,  # noqa: E501
        }  # fmt: skip
        assert {name: table[name][position] for name in expected} == expected
        assert (
            chunk["prompts"][table["prompt"][position]]
            == f"user: {rollout['prompt'][0]['content']}"
        )
        full = rollouts[position]
        for name in ("position", "sample", "completion", "reward", "rewards", "statuses", "advantage", "finish_reason",  # noqa: E501
                     "columns"):  # fmt: skip
            assert full[name] == rollout[name], name
        tokens = full["tokens"]
        assert tokens["ids"] == rollout["completion_ids"]
        assert "".join(tokens["pieces"]) == rollout["completion"]
        assert tokens["logprob"] == [
            pytest.approx(logprob, abs=0.0006) for logprob in logprobs_of(rollout)
        ]
        if position == without:
            assert (tokens["difference"], tokens["entropy"]) == (None, None)
        else:
            count = len(tokens["ids"])
            differences = [
                pytest.approx(0.001 * (position + 1) * i, rel=0.01) for i in range(count)
            ]
            assert tokens["difference"] == differences
            assert tokens["entropy"] == [pytest.approx(0.25 * i, rel=0.01) for i in range(count)]
        assert (tokens["advantage"], tokens["mask"]) == (None, None)


def test_best_worst_failed_and_most_mismatched_come_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no room for all, and each under its reason; the same ones whenever it is
    built."""
    folder = make_run(tmp_path / "run", healthy(3))
    rng = np.random.default_rng(0)

    def said(*_: object) -> str:
        return base64.b64encode(rng.bytes(600)).decode()  # which nobody compresses further

    records = [*step_of(1, 20, text=said)]
    records[7] = record(1, 1, 3, said(), reward=2.0)
    records[33] = record(1, 8, 1, said(), reward=-2.0)
    records[50] = record(
        1, 12, 2, said(), reward=None, rewards={"math": None}, statuses={"math": "timeout"}
    )
    dump(folder, 1, records)
    _scores(folder, 1, records)  # most is the last one's, for its number
    task = steps.StepTask(folder, 1, room=4_000)
    step = steps.make_step(task)
    assert step.content == steps.make_step(task).content
    chunk = json.loads(step.content)
    first_ones = [
        rollout for rollout in chunk["rollouts"] if rollout["why"] not in ("group", "sampled")
    ]
    assert {rollout["why"]: (rollout["position"], rollout["sample"]) for rollout in first_ones} == {
        "best": (1, 3), "worst": (8, 1), "failed": (12, 2), "engine differs": (19, 3)
    }  # fmt: skip
    assert (step.counts["wanted"], step.counts["hidden"], step.counts["read"]) == (4, 0, 80)
    assert step.counts["shown"] == len(chunk["rollouts"]) < 8
    assert chunk["status_names"][chunk["table"]["status"][50]] == "timeout"
    displayed = {
        position: number for position, number in enumerate(chunk["table"]["shown"]) if number >= 0
    }
    assert {position: (position // GROUP, position % GROUP) for position in displayed} == {
        position: (chunk["rollouts"][number]["position"], chunk["rollouts"][number]["sample"])
        for position, number in displayed.items()
    }
    monkeypatch.setattr(build, "_PAGE_BYTES", 320_000)  # with 250,000 of the page itself
    (run,) = _page(folder)["main"]["runs"]
    assert "of 80 rollouts all are in the tables" in run["rollouts"]["note"]


def test_a_page_keeps_within_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", healthy(30))
    rng = np.random.default_rng(0)
    for step in range(1, 31):
        dump(
            folder,
            step,
            step_of(step, 8, text=lambda *_: base64.b64encode(rng.bytes(900)).decode()),
        )
    shell = 4 * build._SHELL_BYTES // 3 + 4 * build._PROMPTS_BYTES // 3
    sizes = []
    for more in (40_000, 400_000, 3_000_000):
        monkeypatch.setattr(build, "_PAGE_BYTES", shell + more)
        chunks = _page(folder)
        size = (tmp_path / "page.html").stat().st_size
        assert size <= build._PAGE_BYTES
        sizes.append(size)
        (run,) = chunks["main"]["runs"]
        steps_there = run["rollouts"]["steps"]
        assert {1, 30} <= {*steps_there}, "the first and the newest are always there"
        assert (len(steps_there) == 30) == (more > 200_000)
        if more < 200_000:
            assert f"{len(steps_there)} of 30 dumped steps" in run["rollouts"]["note"]
            assert max(b - a for a, b in pairwise(steps_there)) <= 2 * 30 / len(steps_there)
        displayed = sum(len(chunks[f"0/{step}"]["rollouts"]) for step in steps_there)
        assert displayed == run["rollouts"]["shown"]
    assert sizes == sorted(set(sizes))


def test_what_there_is_no_time_for_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The total counts as many a step as in those that were read."""
    folder = make_run(tmp_path / "run", healthy(5))
    for step in range(1, 6):
        dump(folder, step, step_of(step))
    monkeypatch.setattr(build, "_READING_S", -1.0)
    monkeypatch.setattr(build, "_SMALL_BYTES", 0)
    rollouts = _page(folder)["main"]["runs"][0]["rollouts"]
    assert (rollouts["steps"], rollouts["shown"], rollouts["total"]) == ([5], 16, 80)
    message = "1 of 5 dumped steps are in this page, spread evenly: there was no time for more"
    assert (
        rollouts["note"]
        == f"{message}; of about 80 rollouts 16 are in the tables, 16 with their text"
    )


def test_a_small_run_is_read_whole_however_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine so busy that the time is over before the first step."""
    folder = make_run(tmp_path / "run", healthy(5))
    for step in range(1, 6):
        packed = dump(folder, step, step_of(step))
        packed.with_name(f"{packed.name}.gz").write_bytes(gzip.compress(packed.read_bytes()))
        packed.unlink()
    for name in ("_READING_S", "_PATIENT_S", "_TEXTS_S"):
        monkeypatch.setattr(build, name, -1.0)
    (run,) = _page(folder)["main"]["runs"]
    assert run["rollouts"] == {"steps": [1, 2, 3, 4, 5], "shown": 80, "total": 80, "note": ""}
    assert [prompt["prompt"] for prompt in run["prompts"]] == [
        f"user: question {p['row']}" for p in run["prompts"]
    ]


def test_dumps_of_an_earlier_attempt_are_left_out(tmp_path: Path) -> None:
    """The run went back to step 2, and is at step 3: what 4 and later ones hold is of the policy
    before."""
    folder = make_run(tmp_path / "run", healthy(3))
    for step in range(1, 6):
        dump(folder, step, step_of(step))
    os.utime(folder / "rollouts/step_000004.jsonl", (1.7e9, 1.7e9))  # before the launch
    (run,) = _page(folder)["main"]["runs"]
    assert run["rollouts"]["steps"] == read_run(folder).dumped_steps == [1, 2, 3]
    assert run["rollouts"]["note"].startswith("2 dumps of an earlier attempt are left out")
    dump(folder, 4, step_of(4))  # of the step that is being made
    assert read_run(folder).dumped_steps == [1, 2, 3, 4]


def test_many_processes_make_the_page_that_one_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", healthy(4))
    for step in range(1, 5):
        dump(folder, step, step_of(step))
    alone = _page(folder)
    monkeypatch.setattr(build, "_POOL_BYTES", 1)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    together = _page(folder)
    for chunks in (alone, together):
        del chunks["main"]["made_unix_s"]
    assert together == alone


def test_broken_lines_cost_themselves(tmp_path: Path) -> None:
    """And a whole rollout in an odd form none: half a surrogate pair, numbers of an earlier
    version, a step of several
    nodes, packed."""
    folder = make_run(tmp_path / "run", healthy(3))
    records = step_of(1)
    lines = [to_line(single) for single in records]
    half = to_line(record(1, 0, 1, "x", completion="half \ud83d", prompt="\udc00"))
    old = json.loads(lines[2]) | {"rollout_logprobs": logprobs_of(json.loads(lines[2]))}
    for name in ("columns", "num_rollouts"):
        del old[name]
    lines[1], lines[2] = half, json.dumps(old).encode()
    broken = [b"", b"{", b"[1]", b'{"row": 1}', lines[5][:100], lines[6].replace(b'"row":', b'"row":-'), b"\xff\xfe",  # noqa: E501
              b"[" * 100_000, lines[7]]  # fmt: skip
    dump(folder, 1, [])
    (folder / "rollouts/step_000001.jsonl").write_bytes(b"\n".join([*lines[:8], *broken]) + b"\n")
    path = folder / "rollouts/step_000001.node_1.jsonl.gz"
    path.write_bytes(
        gzip.compress(b"\n".join(lines[8:12]) + b"\n") + gzip.compress(b"\n".join(lines[12:]))[:-20]
    )
    chunk = (chunks := _page(folder))["0/1"]
    assert len(chunk["table"]["row"]) >= 12
    assert [(r["position"], r["sample"]) for r in chunk["rollouts"]][:9] == [
        (i // 4, i % 4) for i in range(9)
    ]
    assert (chunk["rollouts"][1]["completion"], chunk["prompts"][0][:1]) == ("half \ud83d", "u")
    assert chunk["rollouts"][2]["tokens"]["logprob"] == [
        pytest.approx(x, abs=0.0006) for x in old["rollout_logprobs"]
    ]
    # the line that is empty, and that is there twice, count too
    message = re.search(r"(\d+) broken lines", chunks["main"]["runs"][0]["rollouts"]["note"])
    assert message is not None
    assert int(message[1]) in (len(broken) + 1, len(broken) + 2)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link", "empty", "noise", "zeros", "gone"])
def test_a_dump_that_is_none_costs_its_step(kind: str, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", healthy(3))
    dump(folder, 1, step_of(1))
    for name in (
        "rollouts/step_000002.jsonl",
        "rollouts/step_000003.jsonl.gz",
        "token_scores/step_000001.jsonl",
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind in ("link", "gone"):
            path.symlink_to("/dev/zero" if kind == "link" else "nowhere")
        else:
            path.write_bytes(
                {"empty": b"", "noise": os.urandom(100_000), "zeros": bytes(1 << 20)}[kind]
            )
    chunks = _page(folder)
    assert chunks["main"]["runs"][0]["rollouts"]["steps"] == [1]
    assert len(chunks["0/1"]["rollouts"]) == 16


@pytest.mark.parametrize("line", [b"\n", b"{}\n"])
def test_a_file_of_millions_of_broken_lines_is_given_up(line: bytes, tmp_path: Path) -> None:
    """Tried one by one they would take a minute, and 2 GB."""
    folder = make_run(tmp_path / "run", healthy(1))
    path = dump(folder, 1, step_of(1))
    number = (1 << 24) // len(line)
    path.with_name("step_000001.node_1.jsonl").write_bytes(line * number)
    out = tmp_path / "page.html"
    limits = lambda: resource.setrlimit(resource.RLIMIT_CPU, (15, 15))  # noqa: E731
    subprocess.run(
        [sys.executable, "-m", "grpo_spmd.report", folder, "--out", out],
        check=True,
        preexec_fn=limits,
    )
    (run,) = _chunks(out)["main"]["runs"]
    assert (run["rollouts"]["shown"], run["rollouts"]["note"]) == (
        16, "1,001 broken lines or files of dumps are left out",  # the file is given up after 1,000
    )  # fmt: skip


def test_a_long_completion_is_cut_in_its_middle(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", healthy(1))
    byte_tokenizer(folder)
    text = "begin" + "x" * 200_000 + "end"
    dump(folder, 1, [record(1, 0, 0, text), record(1, 0, 1, "short")])
    long, short = _page(folder)["0/1"]["rollouts"]
    assert (short["cut"], short["completion"]) == (0, "short")
    assert len(long["completion"]) < 70_000
    assert long["completion"].startswith("beginxxx")
    assert long["completion"].endswith("xxxend")
    assert f"[... {long['cut']:,} characters ...]" in long["completion"]
    assert len(text) - long["cut"] == len(long["completion"]) - len(
        f"\n[... {long['cut']:,} characters ...]\n"
    )
    pieces, ids = long["tokens"]["pieces"], long["tokens"]["ids"]
    (position,) = (i for i, token in enumerate(ids) if token is None)
    gone = int(re.sub(r"\D", "", pieces.pop(position)))
    assert len("".join(pieces)) + gone == len(text)
    assert (
        [pieces[i].encode() for i in (0, -1)] == [bytes([ids[0]]), bytes([ids[-1]])] == [b"b", b"d"]
    )
    assert {len(values) for values in (pieces, long["tokens"]["logprob"])} == {
        len(ids) - 1,
        len(ids),
    }
    assert long["tokens"]["logprob"][position] is None


def test_an_episode_is_told_turn_by_turn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", healthy(1))
    byte_tokenizer(folder)
    call, answer, end = (list(text.encode()) for text in ("call", "=7;", "7"))
    turns = [
        {"segment": 0, "sampled": False, "token_ids": [*b"ask"]},
        {"segment": 0, "sampled": True, "token_ids": call, "finish_reason": "stop", "reward": 0.5},
        {"segment": 0, "sampled": False, "token_ids": answer},
        {"segment": 0, "sampled": True, "token_ids": end, "finish_reason": "stop"},
    ]
    took = {"rewards": {"env": 1.0}, "calls_s": [0.5], "error": None}
    of = {
        "status": "max_turns",
        "turns": turns,
        "messages": [{"role": "assistant", "content": "call"}],
        "environment": took,
    }
    dump(
        folder,
        1,
        [
            record(1, 0, 0, "call7", **of),
            record(1, 0, 1, "", status="env_error", environment=took | {"error": "no"}),
        ],
    )
    chunk = _page(folder)["0/1"]
    assert [chunk["status_names"][i] for i in chunk["table"]["status"]] == [
        "max_turns",
        "env_error",
    ]
    displayed, failed = chunk["rollouts"]
    turns_values = [
        (turn["sampled"], "".join(turn["pieces"]), turn["num_tokens"], turn["reward"])
        for turn in displayed["turns"]
    ]
    assert turns_values == [
        (False, "ask", 3, None), (True, "call", 4, 0.5), (False, "=7;", 3, None), (True, "7", 1, None)  # noqa: E501
    ]  # fmt: skip
    assert "".join(displayed["tokens"]["pieces"]) == "call7"
    assert (displayed["status"], displayed["messages"]) == (
        "max_turns",
        [{"role": "assistant", "content": "call"}],
    )
    assert (failed["why"], failed["environment"]["error"]) in (
        ("failed", "no"),
        ("worst", "no"),
        ("best", "no"),
    )


def test_prompts_by_how_they_did(tmp_path: Path) -> None:
    """Rows 0 to 4: never, always, better, worse, and now and then."""
    folder = make_run(tmp_path / "run", healthy(6))
    solved = {
        0: "000000",
        1: "444444",
        2: "001344",
        3: "443110",
        4: "240242",
    }  # of 4 samples, step by step
    for step in range(1, 7):
        rewards = {
            row: [float(sample < int(of[step - 1])) for sample in range(GROUP)]
            for row, of in solved.items()
        }
        groups = [
            record(step, row, i, "x", reward=of[i], prompt=f"{row} at {step}")
            for row, of in rewards.items()
            for i in range(GROUP)
        ]
        dump(folder, step, groups)
    (run,) = _page(folder)["main"]["runs"]
    kinds = ["never", "always", "better", "worse", "mixed"]
    assert {prompt["row"]: prompt["kind"] for prompt in run["prompts"]} == dict(enumerate(kinds))
    assert run["prompt_kinds"] == dict.fromkeys(kinds, 1)
    assert [prompt["prompt"] for prompt in run["prompts"]] == [
        f"{row} at 6" for row in (0, 3, 2, 4, 1)
    ]
    assert [prompt["kind"] for prompt in run["prompts"]] == [
        "never",
        "worse",
        "better",
        "mixed",
        "always",
    ]


def test_two_runs_and_where_their_configs_differ(tmp_path: Path) -> None:
    form = "run_dir: {}\nmodel: {{path: m, dtype: bfloat16}}\nseed: {}\nloss: {{kl_coef: {}}}\n"
    folders = []
    for number, name in enumerate(("a", "b")):
        command_line = ["train.py", "--config", "x.yaml", f"loss.kl_coef={number}"]
        launch = {
            "launch": 1,
            "outcome": "done",
            "command": command_line,
            "versions": {"torch": "2"},
        }
        config = form.format(name, 0, number)
        folders.append(make_run(tmp_path / name / "run", healthy(3), launch, config))
        dump(folders[-1], 1, step_of(1, 1 + number))
    chunks = _page(*folders)
    main = chunks["main"]
    assert [run["name"] for run in main["runs"]] == ["a/run", "b/run"]
    assert [run["subject"] for run in main["runs"]] == ["m", "m"]
    assert main["differences"] == [["loss.kl_coef", 0, 1]]
    assert [len(chunks[f"{number}/1"]["table"]["row"]) for number in (0, 1)] == [4, 8]
    sources = {key: (value, source) for key, value, source in main["runs"][1]["config"]}
    assert sources == {
        "run_dir": ("b", "set"), "model.path": ("m", "set"), "model.dtype": ("bfloat16", "default"),
        "seed": (0, "default"), "loss.kl_coef": (1, "command line"),
    }  # fmt: skip
    assert main["runs"][0]["versions"] == {"torch": "2"}


def test_a_long_run_has_thinner_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ({"step": step, "x": step / 7} for step in range(1, 9_001)))
    (run,) = _page(folder)["main"]["runs"]
    assert (run["thinned"], len(run["steps"]), run["steps"][0], run["steps"][-1]) == (
        9_000,
        4_000,
        1,
        9_000,
    )
    assert run["metrics"]["x"] == [_near(step / 7, 6) for step in run["steps"]]


def _run(*arguments: str, deadline_s: float = 60) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "grpo_spmd.report", *arguments]
    return subprocess.run(line, capture_output=True, text=True, cwd=ROOT, timeout=deadline_s)


def test_the_command_writes_one_file_and_says_it_in_one_line(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", healthy(3))
    dump(folder, 1, step_of(1))
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = _run(str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(
        rf"{re.escape(str(folder))}/report\.html: 0\.\d MB, \d+\.\d s\n", done.stdout
    )
    remaining = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert remaining.keys() - old.keys() == {folder / "report.html"}
    assert {path: remaining[path] for path in old if path != folder} == {
        p: t for p, t in old.items() if p != folder
    }


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", healthy(3))
    for arguments, message in (
        ((str(tmp_path / "none"),), "is no folder"),
        ((str(folder), "--out", str(tmp_path)), "is a folder; name a file in it"),
        ((str(folder), "--out", "/dev/null"), "/dev/null is no page, and would be replaced"),
        ((str(folder), "--out", str(folder / "metrics.jsonl")), "is no page, and would be"),
        ((str(folder), "--out", str(tmp_path / ("n" * 300))), "File name too long"),
        ((str(folder), "--out", str(tmp_path / "no" / "page.html")), "No such file or directory"),
        ((str(folder),) * 9, "9 runs, and a page shows 8 at most"),
        ((), "the following arguments are required: RUN"),
    ):
        monkeypatch.setattr(sys, "argv", ["report", *arguments])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        displayed = capsys.readouterr()
        assert displayed.out == ""
        assert message in displayed.err
        assert displayed.err.count("\n") == 1


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    folder = make_run(tmp_path / "run", healthy(3))
    if os.geteuid() == 0:  # to whom modes say nothing

        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied", str(folder / "report.html"))

        monkeypatch.setattr(command, "build_page", refuse)
    else:
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert capsys.readouterr().err.endswith(
        "report.html: Permission denied; name a file with --out\n"
    )


def test_a_follower_ends_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes the page again when there is more to see, and a last time when the run has
    ended."""
    going = {"launch": 1, "outcome": None, "host": "another", "start": "2099-01-01T00:00:00Z"}
    folder = make_run(tmp_path / "run", healthy(2), going)
    monkeypatch.setattr(command, "_MIN_AGE_S", 0.0)
    monkeypatch.setattr(follow, "_POLL_S", 0.01)
    monkeypatch.setattr(sys, "argv", ["report", str(folder), "--follow"])
    built: list[int] = []
    inner: Callable[..., Any] = build_page

    def watched(runs: Any, out: Path) -> None:
        inner(runs, out)
        built.append(len(_chunks(out)["main"]["runs"][0]["steps"]))
        if len(built) == 1:
            make_run(folder, healthy(3), going)
        if len(built) == 2:
            make_run(folder, healthy(5))

    monkeypatch.setattr(command, "build_page", watched)
    command.main()
    assert built == [2, 3, 5]


def test_the_page_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(tmp_path / "run", healthy(3))
    dump(folder, 1, step_of(1))
    out = tmp_path / "page.html"
    out.write_text("before")

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(build, "make_step", fail)
    with pytest.raises(MemoryError):
        build_page([read_run(folder)], out)
    assert out.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.name != "run"] == ["page.html"]


def test_reading_imports_no_torch() -> None:
    large = "[m for m in ('torch', 'vllm', 'transformers') if m in sys.modules]"
    code = f"import sys, grpo_spmd.tools.report.__main__; print({large})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_a_process_that_is_killed_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", healthy(3))

    def fail(*_: object) -> None:
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(command, "build_page", fail)
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    with pytest.raises(SystemExit, match="1"):
        command.main()
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": [1.5, None]}, b'{"a":1,"b":[1.5,null]}'),
        (
            {"\u00e9": "\u4f60", "c": [{"d": "\U0001f600"}]},
            b'{"\\u00e9":"\\u4f60","c":[{"d":"\\ud83d\\ude00"}]}',
        ),
        ("half \ud83d", b'"half \\ud83d"'),
        (["\u00e9", math.nan, math.inf], b'["\\u00e9",null,null]'),
        ({"a": math.nan, "b": 10**30}, b'{"a":null,"b":1000000000000000000000000000000}'),
        ({"x": "</script>\x00\x1b"}, b'{"x":"</script>\\u0000\\u001b"}'),
    ],
)
def test_json_is_ascii_and_valid(value: Any, text: bytes) -> None:
    assert json_bytes(value) == text


def test_long_completions_and_episodes_cost_their_middle_and_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(tmp_path / "run", healthy(30))
    byte_tokenizer(folder)
    rng = np.random.default_rng(0)
    took: Json = {"rewards": {}, "calls_s": [], "error": None}
    for step in range(1, 31):
        message = base64.b64encode(rng.bytes(15_000)).decode()
        turns = [
            {
                "segment": 0,
                "sampled": i % 2 == 1,
                "token_ids": [*message[i * 900 : i * 900 + 900].encode()],
            }
            | ({"finish_reason": "stop"} if i % 2 else {})
            for i in range(20)
        ]
        sampled = "".join(message[i * 900 : i * 900 + 900] for i in range(1, 20, 2))
        messages = [{"role": "tool", "content": message[:800]}] * 50
        episode = {"status": "ok", "turns": turns, "messages": messages, "environment": took}
        rollouts = [record(step, 0, i, message[i:], reward=float(i)) for i in range(3)]
        dump(folder, step, [*rollouts, record(step, 0, 3, sampled, reward=9.0, **episode)])
    shell = 4 * (build._SHELL_BYTES + build._PROMPTS_BYTES) // 3
    monkeypatch.setattr(
        build, "_PAGE_BYTES", shell + 700_000
    )  # 17 KB a step, of 4 texts with 15 KB each
    chunks = _page(folder)
    assert (tmp_path / "page.html").stat().st_size <= build._PAGE_BYTES
    for step in range(1, 31):
        rollouts = chunks[f"0/{step}"]["rollouts"]
        assert {"best", "worst"} <= {rollout["why"] for rollout in rollouts}
        assert all(rollout["cut"] > 0 for rollout in rollouts)
        assert [len(rollout["turns"]) for rollout in rollouts if "turns" in rollout] == [20]


def test_files_that_are_not_held_in_memory_make_the_same_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their lines are found again on the disk, packed or not."""
    folder = make_run(tmp_path / "run", healthy(2))
    rng = np.random.default_rng(0)
    for step in (1, 2):
        records = step_of(step, 10, text=lambda *_: base64.b64encode(rng.bytes(3_000)).decode())
        _scores(folder, step, records)
        path = dump(folder, step, records)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    at_once = _page(folder)
    monkeypatch.setattr(run_folder, "_HELD_BYTES", 5_000)
    in_blocks = _page(folder)
    for chunks in (at_once, in_blocks):
        del chunks["main"]["made_unix_s"]
    assert in_blocks == at_once
    assert at_once["main"]["runs"][0]["rollouts"]["shown"] == 80


def test_a_link_in_the_place_of_token_scores_is_not_read(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", healthy(1))
    scores = folder / "token_scores/step_000001.jsonl"
    scores.parent.mkdir(exist_ok=True)
    elsewhere = tmp_path / "elsewhere.jsonl"
    elsewhere.write_text("no scores\n")
    scores.unlink(missing_ok=True)
    scores.symlink_to(elsewhere)
    _, errors = scan_step(RunFolder(folder), 1)
    assert errors.num == 1
    assert "and not a regular file" in errors.first


def test_prompts_of_one_kind_take_the_places_that_others_leave(tmp_path: Path) -> None:
    position = LinePosition(tmp_path / "none.jsonl", 0, 1)
    groups = [Group(row, 0.5 if row < 500 else 0.0, position) for row in range(510)]
    result = StepResult(1, b"", Counter(), groups, (0.0, 1.0))
    content = summarize_prompts([result], 0.0)
    assert content["prompt_kinds"] == {
        **dict.fromkeys(("worse", "better", "always"), 0),
        "never": 10,
        "mixed": 500,
    }
    kinds = Counter(prompt["kind"] for prompt in content["prompts"])
    assert kinds == {"never": 10, "mixed": 390}
