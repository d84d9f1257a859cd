"""Writes the tables of the papers and the plots out of the rows in benchmarks/results/.

    python -m benchmarks.measured             after rows were added
    python -m benchmarks.measured --check     writes nothing; exit code 1 where a paper is not what
    the rows say

A paper has `<!-- rows: begin NAME -->` and `<!-- rows: end -->`; what lies between is written here,
from the newest run of each benchmark. No torch, no network: a second. Exit code 2: the rows or a
paper's marks are not as they should be, and nothing is written.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from benchmarks.support import measured_speed, measured_trials
from benchmarks.support.plots import drawings
from benchmarks.support.record import (
    CHANGES,
    NOT_IN_HISTORY,
    Line,
    Record,
    RecordError,
    Rows,
    taken_on,
)

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PAPERS = "benchmarks/README.md", "configs/README.md", "configs/ALGORITHMS.md"
_MARKS = re.compile(
    r"(?<=^<!-- rows: begin )(\w+) -->\n(.*?)(?=^<!-- rows: end -->$)", re.MULTILINE | re.DOTALL
)
# By the name that run.sh knows, in the order of the table.
LINES: dict[str, Callable[[Record], Iterator[Line]]] = {
    "step_vs_trl": measured_speed.step_vs_trl,
    "episodes": measured_speed.episodes,
    "start": measured_speed.start,
    "init": measured_speed.init,
    "weight_sync": measured_speed.weight_sync,
    "loss_memory": measured_speed.loss_memory,
    "logprob_kernels": measured_speed.logprob_kernels,
    "update": measured_speed.update,
    "shared_prefixes": measured_speed.shared_prefixes,
    "balance": measured_speed.balance,
    "rank0": measured_speed.rank0,
    "host_overhead": measured_speed.host_overhead,
    "prompts": measured_speed.prompts,
    "rollout_dump": measured_speed.rollout_dump,
    "rollout_tail": measured_speed.rollout_tail,
    "report": measured_speed.report,
    "engine_host": measured_speed.engine_host,
    "signals": measured_speed.signals,
    "learning": measured_trials.learning,
    "trl_loss": measured_trials.trl_loss,
    "trl_episodes": measured_trials.trl_episodes,
    "self_teacher": measured_trials.self_teacher,
    "families": measured_trials.families,
    "trained_weights": measured_trials.trained_weights,
    "router_replay": measured_trials.router_replay,
    "speculation": measured_trials.speculation,
    "sequence_parallel": measured_trials.sequence_parallel,
    "plan": measured_trials.plan,
    "mutations": measured_trials.mutations,
    "diagnosis": measured_trials.diagnosis,
    "contract": measured_trials.contract,
    "dry_run": measured_trials.dry_run,
    "old_vllm": measured_trials.old_vllm,
    "slurm_trial": measured_trials.slurm_trial,
    "faults": measured_trials.faults,
    "gpu": measured_speed.gpu,
    "kernels": measured_speed.kernels,
    "gpu_day": measured_trials.gpu_day,
}


def table(record: Record) -> Iterator[str]:
    yield "| | | commit, date | name |"
    yield "|---|---|---|---|"
    used: Rows = []
    for name, lines_of in LINES.items():
        lines = _read(name, lambda lines_of=lines_of: list(lines_of(record)))  # type: ignore[misc]
        used += [row for line in lines for row in line.rows]
        for line in lines:
            yield (
                f"| {_cell(line.what)} | {_cell(line.figures)} | {taken_on(line.rows)} | `{name}` |"
            )
        if not lines:
            yield f"| no row yet | | | `{name}` |"
    yield ""
    gone = any(row["commit"].removesuffix(CHANGES) in NOT_IN_HISTORY for row in used)
    changes = any(row["commit"].endswith(CHANGES) for row in used)
    notes = [f"`{CHANGES}`: of a tree with changes that no commit has."] * changes
    yield " ".join(
        notes + ["\\*: the commit was rewritten later, and is not in the history."] * gone
    )


BLOCKS: dict[str, Callable[[Record], Iterator[str]]] = {
    "measured": table,
    "families": measured_trials.families_table,
    "self_teacher": measured_trials.self_teacher_table,
    "trained_weights": measured_trials.trained_weights_table,
    "plan": measured_trials.plan_table,
    "predictions": measured_trials.predictions_table,
    "defaults": measured_trials.defaults_table,
    "states": measured_trials.states_table,
    "mutations": measured_trials.mutations_table,
    "diagnosis": measured_trials.diagnosis_table,
    "faults": measured_trials.faults_table,
}


def filled(name: str, paper: str, record: Record) -> str:
    """The text of a paper with its tables as the rows have them."""

    def block(marks: re.Match[str]) -> str:
        of = marks[1]
        if of not in BLOCKS:
            raise RecordError(
                f"{name}: <!-- rows: begin {of} -->: no such table; there are {', '.join(BLOCKS)}"
            )
        lines = _read(of, lambda: list(BLOCKS[of](record)))
        return f"{of} -->\n" + "".join(f"{line}\n" for line in lines)

    started, ended = (
        len(re.findall(rf"^<!-- rows: {end}\b", paper, re.MULTILINE)) for end in ("begin", "end")
    )
    if not started == ended == len(_MARKS.findall(paper)):
        raise RecordError(
            f"{name}: each <!-- rows: begin NAME --> stands on a line of its own, and <!-- rows: "
            "end --> after it"
        )
    return _MARKS.sub(block, paper)


def _read(name: str, call: Callable[[], list[T]]) -> list[T]:
    try:
        return call()
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise RecordError(
            f"{name}: its rows are not what its function reads ({type(error).__name__}: "
            f"{error}); take them again"
        ) from error


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a paper is another"
    )
    check = parser.parse_args(arguments).check
    texts: dict[Path, tuple[str, str]] = {}
    try:
        record = Record((root / "benchmarks/results").glob("*.jsonl"))
        for name in PAPERS:
            text = (root / name).read_text(encoding="utf-8")
            texts[root / name] = text, filled(name, text, record)
        for name, drawing in drawings(record).items():
            path = root / "benchmarks/results" / name
            old = path.read_text(encoding="utf-8") if path.is_file() else ""
            texts[path] = old, drawing
    except RecordError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rest = [path for path, (initial, new) in texts.items() if initial != new]
    for path in rest:
        if check:
            print(
                f"{path.relative_to(root)} is not what the rows say: run python -m "
                "benchmarks.measured"
            )
        else:
            path.write_text(texts[path][1], encoding="utf-8")
            print(f"{path.relative_to(root)} is written")
    return int(check and bool(rest))


if __name__ == "__main__":
    sys.exit(main())
