"""The papers' figures are what the rows of benchmarks/results/ say (benchmarks/measured.py), of the
newest run, with
what lost; a row that is not as it should be costs one line."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import measured
from benchmarks.support import record as record_module
from benchmarks.support.record import (
    CHANGES,
    NOT_IN_HISTORY,
    Record,
    RecordedRow,
    RecordError,
    figure,
    taken_on,
)
from benchmarks.support.report import commit
from tests.support.measured_rows import MADE, Rows, made_rows, spread

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.jsonl"))


def _record(folder: Path, rows: Rows, name: str = "made.jsonl") -> Record:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Record(folder.glob("*.jsonl"))


def _said(record: Record, name: str) -> list[str]:
    return [
        f"{line.what} | {line.figures} | {taken_on(line.rows)}"
        for line in measured.LINES[name](record)
    ]


def test_the_papers_are_what_the_rows_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured.main(["--check"]) == 0, capsys.readouterr()


def test_every_benchmark_is_in_the_table() -> None:
    script = (ROOT / "benchmarks/run.sh").read_text()
    modules = re.search(r"^modules=\((.*?)\)", script, re.MULTILINE | re.DOTALL)
    assert modules is not None
    names = {module.partition(".")[2] for module in modules[1].split()} | {"gpu_day"}
    assert len(names) > 15
    assert names <= measured.LINES.keys()
    readme = (ROOT / "benchmarks/README.md").read_text()
    tables = "".join(result[0] for result in re.findall(r"begin measured -->\n((\|.*\n)+)", readme))
    assert names <= set(re.findall(r"\| `(\w+)` \|$", tables, re.MULTILINE))


def test_rows_name_commits_of_this_history() -> None:
    """Those of before it was rewritten are listed, and marked in the table; nothing is listed that
    need not be."""
    asks = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository", "--show-toplevel"]
    try:
        requests = subprocess.run(asks, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no git")
    if requests.stdout.split("\n")[:2] != ["false", str(ROOT)]:
        pytest.skip("the repository's history is not here, or not whole")
    history = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "HEAD"], capture_output=True, text=True, check=True
    )
    expected_names = {commit[:7] for commit in history.stdout.split()}
    named = defaultdict(list)
    for path in RESULTS:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            named[json.loads(line)["commit"].removesuffix(CHANGES)[:7]].append(
                f"{path.name}:{number}"
            )
    assert not {
        commit: rows
        for commit, rows in named.items()
        if commit not in expected_names | NOT_IN_HISTORY
    }
    assert not NOT_IN_HISTORY & expected_names
    assert named.keys() >= NOT_IN_HISTORY


def test_rows_of_the_benchmark_before_are_no_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments],
            check=True,
            capture_output=True,
        )

    monkeypatch.chdir(tmp_path)
    git("init")
    for path in ("code.py", "benchmarks/results/a.jsonl"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("")
    git("add", ".")
    git("commit", "-m", "x")
    clean = commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    for name in ("a", "b"):
        Path(f"benchmarks/results/{name}.jsonl").write_text("{}\n")
    assert commit() == clean
    monkeypatch.chdir(tmp_path / "benchmarks")
    assert commit() == clean
    (tmp_path / "code.py").write_text("changed = 1\n")
    assert commit() == clean + CHANGES


def test_what_no_commit_has_is_said(tmp_path: Path) -> None:
    gone = sorted(NOT_IN_HISTORY)[0]
    rows = [
        *made_rows("x", {}, commit=f"{gone}{CHANGES}", date="2026-12-01"),
        *made_rows("x", {}, {}, date="2026-12-02"),
    ]
    assert (
        taken_on(_record(tmp_path, rows).all("x"))
        == f"`{gone}+changes`\\*, 2026-12-01; `abc1234`, 2026-12-02"
    )
    noted = "\n".join(measured.table(Record(RESULTS)))
    assert "no commit has" in noted
    assert "is not in the history" in noted


@pytest.mark.parametrize("name", MADE)
def test_a_line_has_the_figures_of_its_rows(name: str, tmp_path: Path) -> None:
    rows, text = MADE[name]
    expected = [" ".join(f"{line} | `abc1234`, 2026-12-01".split()) for line in text.split("\n\n")]
    assert _said(_record(tmp_path, rows), name) == expected


def _rows_of(name: str) -> Rows:
    """Made ones where there are some, else those of the record."""
    if name in MADE:
        return MADE[name][0]
    local = {
        row.place: dict(row) for line in measured.LINES[name](Record(RESULTS)) for row in line.rows
    }
    return list(local.values())


@pytest.mark.parametrize("name", measured.LINES)
def test_a_row_without_a_column_or_with_another_kind_of_value_is_one_line(
    name: str, tmp_path: Path
) -> None:
    """Every column of the newest row of each benchmark in turn; without some, there is still a
    line."""
    refused, last_of = 0, {row["benchmark"]: row for row in _rows_of(name)}
    for final in last_of.values():
        rest = [
            row
            for row in _rows_of(name)
            if row is not final and row["benchmark"] == final["benchmark"]
        ]
        for column in set(final) - {"benchmark"}:
            less = {key: value for key, value in final.items() if key != column}
            for changed in (
                less,
                final | {column: None},
                final | {column: "x"},
                final | {column: [1]},
            ):
                error = _error_of(tmp_path, [*rest, changed], name)
                refused += bool(error)
                assert re.fullmatch(rf"(.*made\.jsonl:\d+: |{name}: ).*|", error), error
    assert refused > 5


def _error_of(folder: Path, rows: Rows, name: str) -> str:
    """As the command reads them."""
    try:
        measured._read(name, lambda: _said(_record(folder, rows), name))
    except RecordError as error:
        return str(error)
    return ""


_SPEED = {name: [*(ROOT / "benchmarks/speed").glob(f"{name}*.py")] for name in MADE}


@pytest.mark.parametrize("name", [name for name, modules in _SPEED.items() if modules])
def test_columns_that_a_line_reads_are_written_by_its_benchmark(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a text of its code, or one that it puts together: `now_us` of {form} and `_us`."""
    read = set[str]()

    class Watched(RecordedRow):
        def __getitem__(self, column: str) -> Any:
            read.add(column)
            return super().__getitem__(column)

    monkeypatch.setattr(record_module, "RecordedRow", Watched)
    assert _said(_record(tmp_path, MADE[name][0]), name)
    assert len(read) > 6
    modules = [*_SPEED[name], ROOT / "benchmarks/support/report.py"]
    written, created = set[str](), list[str]()
    for node in itertools.chain.from_iterable(
        ast.walk(ast.parse(path.read_text())) for path in modules
    ):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            written.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            expected_names = [
                str(piece.value) if isinstance(piece, ast.Constant) else "" for piece in node.values
            ]
            if max(map(len, expected_names)) > 2:
                created.append("".join(re.escape(piece) or r"[\w' ]+" for piece in expected_names))
        elif isinstance(node, ast.keyword):
            written.add(node.arg or "")
    assert [
        item for item in read - written if not any(re.fullmatch(form, item) for form in created)
    ] == []


def test_the_newest_run_counts_and_what_lost_stays(tmp_path: Path) -> None:
    def init(peak: float, commit: str, date: str) -> Rows:
        row = {
            "built by": "build_policy",
            "ranks": 1,
            "shard_mib": 600.0,
            **spread("peak_beyond_shard_mib", peak, 1, 99),
        }
        return made_rows("init", row, commit=commit, date=date)

    old, middle, new = (
        init(5, "aaa0000", "2026-12-01"),
        init(6, "bbb0000", "2026-12-02"),
        init(70, "bbb0000", "2026-12-02"),
    )
    (message,) = _said(
        _record(tmp_path, [*middle, *new, *old]), "init"
    )  # twice on one commit: the later
    assert "70.0 (1.00 to 99.0) MiB" in message
    assert message.endswith("`bbb0000`, 2026-12-02")


def test_a_shape_that_was_not_measured_again_keeps_its_row(tmp_path: Path) -> None:
    """And rows of before there were shapes are of the first."""
    rows, _ = MADE["step_vs_trl"]
    short = [
        row | {"shape": "short", "commit": "bbb0000", "date": "2026-12-02", "ratio": 3.5}
        for row in rows
    ]
    oldest = [
        {key: value for key, value in row.items() if key != "shape"} | {"date": "2026-11-30"}
        for row in rows
    ]
    initial, second = _said(_record(tmp_path, [*oldest, *rows, *short]), "step_vs_trl")
    assert "`short`" in initial
    assert "step 3.50" in initial
    assert initial.endswith("`bbb0000`, 2026-12-02")
    assert "`long_prompts`" in second
    assert second.endswith("`abc1234`, 2026-12-01")
    (alone,) = _said(_record(tmp_path, oldest), "step_vs_trl")
    assert "`short`" in alone


def test_faults_of_one_commit_add_up_and_older_ones_are_replaced(tmp_path: Path) -> None:
    def fault(
        name: str, tried: int, lost: int, worst: str, commit: str, date: str = "2026-12-01"
    ) -> Rows:
        row = {
            "fault": name,
            "tried": tried,
            "survived": tried - lost,
            "lost": lost,
            "worst": worst,
        }
        return made_rows("faults", row, commit=commit, date=date)

    rows = [
        *fault("SIGKILL of a whole tree", 50, 9, "3 steps lost", "aaa0000"),
        *fault("SIGKILL of a whole tree", 8, 0, "2 steps lost", "bbb0000"),
        *fault(
            "SIGKILL of a whole tree", 8, 1, "12 steps lost", "bbb0000", "2026-12-02"
        ),  # past midnight
        *fault("save of 20 M parameters, 1 ranks", 10, 0, "9.2 x less wait", "aaa0000"),
        *fault("save of 20 M parameters, 2 ranks", 10, 0, "11.5 x less wait", "aaa0000"),
    ]
    record = _record(tmp_path, rows)
    lines = list(measured.BLOCKS["faults"](record))[2:]
    assert [line.partition(" | ")[2] for line in lines] == [
        "16 | 15 | 1 | 12 steps lost | `bbb0000`, 2026-12-01; `bbb0000`, 2026-12-02 |",
        "20 | 20 | 0 | 9.2 x less wait | `aaa0000`, 2026-12-01 |",
    ]
    (message,) = _said(record, "faults")
    assert "36 tried, 35 survived; lost: SIGKILL of a whole tree: 1 |" in message


def test_a_model_type_that_was_tried_again_has_its_new_outcome_alone(tmp_path: Path) -> None:
    def tried(family: str, dtype: str, outcome: str, **columns: Any) -> dict[str, Any]:
        trains = (
            {"mismatch": 1e-7, "proved": "25 of 24"}
            if outcome == "trains"
            else {"mismatch": "", "proved": ""}
        )
        return {"family": family, "dtype": dtype, "outcome": outcome, **trains, **columns}

    both = ("float32", "bfloat16")
    old = made_rows(
        "families",
        *(tried(name, dtype, "trains") for name in ("a", "b") for dtype in both),
        commit="aaa0000",
    )
    new = made_rows(
        "families",
        tried("a", "float32", "refused", ranks=1, direct=""),
        *(tried("c", dtype, "trains", ranks=1, direct="20 of 24") for dtype in both),
        tried("d", "float32", "refused", ranks=1, direct=""),
        tried("d", "bfloat16", "trains", ranks=1, direct="24 of 24", rounds=0.03),
        tried("b", "float32", "NOT THE SAME", ranks=2, direct="24 of 24"),
    )
    record = _record(tmp_path, [*old, *new])
    single, two = _said(record, "families")
    assert "| 3 train, 1 are refused in one line | `aaa0000`, `abc1234`, 2026-12-01" in single
    assert "2 ranks sharing an engine | 1 NOT THE SAME |" in two
    trains, refused = list(measured.BLOCKS["families"](record))[2:]
    assert trains.endswith(
        "all tensors proved; copied directly as the loader does to the bit, in part: c; not "
        "compared: b; in bfloat16 alone: d; d at 1e-7 in bfloat16, where transformers itself "
        "rounds 0.03 | b, c, d |"
    )
    assert refused == "| refused | 1 | - | a |"


def test_dry_rows_and_broken_steps_of_a_day_are_no_measurements(tmp_path: Path) -> None:
    rows, _ = MADE["kernels"]
    message = _said(_record(tmp_path, rows), "kernels")
    odd = [rows[0] | {"form": "dry"}, rows[0] | {"form": "gpu", "status": "limit"}]
    day = [row | {"form": "gpu", "status": "done"} for row in rows]
    assert _said(_record(tmp_path, [*day, *odd]), "kernels") == message
    assert _said(_record(tmp_path, odd), "kernels") == []


def test_rows_whose_age_cannot_be_told_or_that_are_none_are_refused(tmp_path: Path) -> None:
    _record(tmp_path, made_rows("rank0", {}), "a.jsonl")
    with pytest.raises(
        RecordError, match=r"b\.jsonl:1: .*a\.jsonl has rows of rank0 of 2026-12-01 too"
    ):
        _record(tmp_path, made_rows("rank0", {}, commit="def"), "b.jsonl")
    for text in ("{", "[1]", '{"benchmark": "rank0", "date": "2026-12-01"}', '{"benchmark": 3}'):
        (tmp_path / "b.jsonl").write_text(f"{text}\n")
        with pytest.raises(RecordError, match=r"b\.jsonl:1: "):
            Record(tmp_path.glob("*.jsonl"))


def test_the_command_writes_what_stands_between_marks_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, papers = tmp_path / "benchmarks/results", [tmp_path / name for name in measured.PAPERS]
    results.mkdir(parents=True)
    papers[1].parent.mkdir()
    text = "# a\n\n<!-- rows: begin faults -->\n| typed by hand |\n<!-- rows: end -->\n\nb\n"
    for paper in papers:
        paper.write_text(text)
    created = made_rows(
        "faults", {"fault": "1000 steps", "tried": 1, "survived": 1, "lost": 0, "worst": "-"}
    )
    _record(results, created)
    assert measured.main(["--check"], tmp_path) == 1
    assert papers[0].read_text() == text
    assert "run python -m benchmarks.measured" in capsys.readouterr().out
    assert measured.main([], tmp_path) == 0
    row = "| 1000 steps | 1 | 1 | 0 | - | `abc1234`, 2026-12-01 |"
    head = "| | tried | survived | lost | worst | commit, date |\n|---|---|---|---|---|---|"
    assert papers[1].read_text() == text.replace("| typed by hand |", f"{head}\n{row}")
    assert measured.main(["--check"], tmp_path) == 0
    capsys.readouterr()
    for faulty, message in (
        (text.replace("faults", "fault"), "no such table; there are measured"),
        (text.replace("<!-- rows: end -->", ""), "on a line of its own"),
        (text.replace("<!-- rows: begin", "see <!-- rows: begin"), "on a line of its own"),
    ):
        papers[0].write_text(faulty)
        assert measured.main([], tmp_path) == 2
        printed = capsys.readouterr()
        assert printed.err.startswith(f"error: {measured.PAPERS[0]}: ")
        assert message in printed.err
        assert printed.err.count("\n") == 1
        assert papers[0].read_text() == faulty
    _record(results, [{key: value for key, value in created[0].items() if key != "lost"}])
    papers[0].write_text(text)
    assert measured.main([], tmp_path) == 2
    expected = "error: results/made.jsonl:1: faults has no column 'lost'; take the row again"
    assert capsys.readouterr().err.startswith(expected)
    assert papers[0].read_text() == text


def test_figures_are_short() -> None:
    expected_names = {
        0: "0",
        0.0000013: "1.3e-6",
        0.017: "0.017",
        0.1: "0.10",
        0.9999: "1.00",
        9.996: "10.0",
        99.96: "100",
    }
    assert {value: figure(value) for value in expected_names} == expected_names
    assert (figure(1210.2), figure(-0.5), figure(-16.56)) == ("1,210", "-0.50", "-16.6")
