"""How lines are shown: in groups, aligned, in 80 columns, coloured on a terminal only."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError, printable
from grpo_spmd.files import show
from grpo_spmd.tools.checkup.results import Result, plural

_COLOURS = {"ok": "32", "warning": "33", "bad": "31;1"}
_NAME = 14
_INDENT = " " * (2 + 7 + 2 + _NAME + 1)


class Page:
    def __init__(self, json_file: Path | None = None, columns: int = 80) -> None:
        """Raises ConfigError where `json_file` cannot be written."""
        self.counts: Counter[str] = Counter()
        self._columns, self._group = columns, ""
        is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colours = is_terminal and not os.environ.get("NO_COLOR")
        try:
            self._json = json_file.open("w", encoding="utf-8") if json_file else None
        except OSError as error:
            raise ConfigError(f"--json: cannot write {json_file}: {error.strerror}") from None

    def add(self, group: str, result: Result) -> None:
        if group != self._group:
            show(("\n" if self._group else "") + group)
            self._group = group
        self.counts[result.level] += 1
        show("\n".join(self._lines(result)))
        own = {"group": group, "name": result.name, "level": result.level}
        self._write(own | {"found": result.found, "remedy": result.remedy})

    def _lines(self, result: Result) -> list[str]:
        level = f"{result.level:7}"
        if self._has_colours:
            level = f"\x1b[{_COLOURS[result.level]}m{level}\x1b[0m"
        texts = self._wrapped(result.found, "") + (
            self._wrapped(result.remedy, "-> ") if result.remedy else []
        )
        first, *rest = texts or [""]
        return [
            f"  {level}  {result.name:{_NAME}} {first}".rstrip(),
            *(_INDENT + text for text in rest),
        ]

    def _wrapped(self, text: str, before: str) -> list[str]:
        """Words that are longer than a line (paths, commands to copy) stay whole."""
        room = self._columns - len(_INDENT)
        options: dict[str, Any] = {"initial_indent": before, "subsequent_indent": " " * len(before)}
        plain = " ".join(printable(text).split())
        return textwrap.wrap(plain, room, break_long_words=False, break_on_hyphens=False, **options)

    def close(self, seconds: float) -> int:
        """The verdict, shown; 2 where a line is bad, else 0."""
        bad, warnings, ok = (self.counts[level] for level in ("bad", "warning", "ok"))
        said = (
            [f"{bad} bad"] * bool(bad)
            + [plural(warnings, "warning")] * bool(warnings)
            + [f"{ok} ok"]
        )
        verdict = "not fit" if bad else "fit"
        show(f"\n{verdict}: {', '.join(said)}, {seconds:.1f} s")
        self._write({"verdict": verdict, "bad": bad, "warnings": warnings, "ok": ok})
        if self._json is not None:
            self._json.close()
        return 2 if bad else 0

    def _write(self, what: dict[str, Any]) -> None:
        if self._json is not None:
            self._json.write(json.dumps(what) + "\n")
            self._json.flush()
