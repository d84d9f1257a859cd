"""The files of rollouts/: their names, and what of them is there. Imports no torch.

A step's rollouts are in one file a node: step_000012.jsonl of the first, step_000012.node_1.jsonl of the second, or the
same with .gz."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

PLAIN, PACKED = ".jsonl", ".jsonl.gz"
_NAME = re.compile(r"(.+?)(?:\.node_([1-9]\d{0,8}))?\.jsonl(?:\.gz)?")  # stem and node


def part_name(stem: str, node: int) -> str:
    """Of the file of `node`, without its ending."""
    return f"{stem}.node_{node}" if node else stem


def step_stem(step: int) -> str:
    return f"step_{step:06d}"


def rollouts_file(run_dir: Path, step: int, node: int = 0, folder: str = "rollouts") -> Path:
    """A node's part of a dump in the form that is there; where there is none, as text. Of two the newer one: a kill can
    come between the writing of the one and the removal of the other."""
    stem = part_name(step_stem(step), node)
    there = [path for ending in (PLAIN, PACKED) if (path := run_dir / folder / f"{stem}{ending}").is_file()]
    return max(there, key=lambda path: path.stat().st_mtime_ns, default=run_dir / folder / f"{stem}{PLAIN}")


def rollouts_parts(run_dir: Path, step: int, folder: str = "rollouts") -> dict[int, Path]:
    """The files of a dump that are there, by node in order."""
    own = {node for stem, node in files_there(run_dir / folder, step_stem(step)) if stem == step_stem(step)}
    return {node: rollouts_file(run_dir, step, node, folder) for node in sorted(own)}


def dumped_steps(run_dir: Path) -> list[int]:
    """Whose rollouts are there, in their order, at least in part."""
    steps = (step_of(stem) for stem, _ in files_there(run_dir / "rollouts"))
    return sorted({step for step in steps if step is not None})


def step_of(stem: str) -> int | None:
    """None: of an evaluation."""
    found = re.fullmatch(r"step_(\d{6,})", stem)
    return int(found[1]) if found else None


def files_there(folder: Path, begin: str = "") -> Iterator[tuple[str, int]]:
    """(stem, node) of each dump of `folder` whose name begins with `begin`, twice where it is there in both forms."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        if name.startswith(begin) and (found := _NAME.fullmatch(name)):  # a run may come to have very many
            yield found[1], int(found[2] or 0)


def begun_there(folder: Path) -> Iterator[tuple[Path, int]]:
    """(path, node) of each file of `folder` that some process was writing, or still is."""
    for path in folder.glob("*.tmp"):
        if found := _NAME.fullmatch(path.stem):
            yield path, int(found[2] or 0)
