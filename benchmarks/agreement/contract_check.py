"""Rows of the contract held against a package's source: kept, broken and how, or absent where that
is allowed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agreement.contract_rows import Row
from benchmarks.agreement.contract_source import Source

_NO_NAME, _TAKES_NO = "there is no such name", "it takes no "


@dataclass(frozen=True)
class Finding:
    row: Row
    verdict: str  # "kept", "broken", "absent, as allowed", "of another version"
    how: str = ""


def check(rows: Iterable[Row], source: Source, version: tuple[int, int]) -> Iterator[Finding]:
    for row in rows:
        if not row.since <= version < row.before:
            yield Finding(row, "of another version")
            continue
        breach = _breach(row, source)
        if row.absent and breach.startswith(
            (_NO_NAME, _TAKES_NO)
        ):  # whatever is there must be as it is called
            yield Finding(row, "absent, as allowed", row.absent)
        else:
            yield Finding(row, "broken" if breach else "kept", breach)


def _breach(row: Row, source: Source) -> str:
    """What is wrong, or nothing."""
    result = source.find(row.name)
    if result is None:
        return _NO_NAME
    for text in row.says:
        if text not in result.text:
            return f"its source does not say {text}"
    if not row.call:
        return ""
    takes = source.parameters(result)
    if takes is None:
        return "it is no function or class whose parameters can be read"
    call = ast.parse(f"f{row.call}", mode="eval").body
    assert isinstance(call, ast.Call)
    inputs = [keyword.arg for keyword in call.keywords if keyword.arg]
    expected_names = {*takes.positional, *takes.keyword_only}
    if row.forwards_to and takes.takes_any_keyword:
        forwarded = source.find(row.forwards_to)
        fields = source.parameters(forwarded) if forwarded is not None else None
        expected_names |= {*fields.positional} if fields is not None else set()
        unknown = [name for name in inputs if name not in expected_names]
    else:
        unknown = (
            []
            if takes.takes_any_keyword
            else [name for name in inputs if name not in expected_names]
        )
    if unknown:
        return f"{_TAKES_NO}{', '.join(unknown)}"
    if len(call.args) > len(takes.positional) and not takes.takes_any_positional:
        return f"it takes {len(takes.positional)} by place, and is given {len(call.args)}"
    left_out = sorted(takes.required - {*inputs, *takes.positional[: len(call.args)]})
    return f"it needs {', '.join(left_out)} too" if left_out else ""


def installed_version(package: str, folder: Path) -> tuple[int, int]:
    """Major and minor number of what lies in a site folder, by the metadata of its wheel."""
    for metadata in sorted(folder.glob("*.dist-info/METADATA")):
        text = metadata.read_text(encoding="utf-8", errors="replace")
        name = re.search(r"^Name: (.+)$", text, re.MULTILINE)
        if name and name[1].strip().lower() in (package, f"{package}-cpu"):
            number = re.search(r"^Version: (\d+)\.(\d+)", text, re.MULTILINE)
            assert number is not None, metadata
            return int(number[1]), int(number[2])
    raise FileNotFoundError(f"{folder} holds no metadata of {package}")
