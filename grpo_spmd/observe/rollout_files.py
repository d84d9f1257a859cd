"""The files of rollouts/: their names, how they are written, and which of them stay. Imports no torch."""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from grpo_spmd.config.schema import LoggingConfig

_log = logging.getLogger("grpo_spmd")
_PLAIN, _PACKED = ".jsonl", ".jsonl.gz"
_LEVEL = 1  # of gzip: 6 takes four times as long for a tenth less


def rollouts_file(run_dir: Path, step: int) -> Path:
    """The dump of a step in the form that is there; where there is none, as text. Of two the newer one: a kill can come
    between the writing of the one and the removal of the other."""
    stem = f"step_{step:06d}"
    there = [path for ending in (_PLAIN, _PACKED) if (path := run_dir / "rollouts" / f"{stem}{ending}").is_file()]
    return max(there, key=lambda path: path.stat().st_mtime_ns, default=run_dir / "rollouts" / f"{stem}{_PLAIN}")


def dumped_steps(run_dir: Path) -> list[int]:
    """Whose rollouts are there, in their order."""
    return sorted({step for step, _ in _step_files(run_dir / "rollouts")})


def _step_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if found := re.fullmatch(r"step_(\d{6,})\.jsonl(\.gz)?", path.name):
            yield int(found[1]), path


class RolloutFiles:
    """Writes the dumps of a run, on rank 0. They are for people: a full disk costs one of them, and a warning."""

    def __init__(self, run_dir: Path, options: LoggingConfig) -> None:
        self._folder = run_dir / "rollouts"
        self._is_packed, self._keep = options.rollouts_compression == "gzip", options.rollouts_keep

    def write(self, stem: str, lines: Iterable[bytes]) -> None:
        """Put `lines` into <stem>.jsonl or <stem>.jsonl.gz, whole or not at all, in the place of what either form of it
        held: the same step may have been run before."""
        content = b"".join(line + b"\n" for line in lines)
        path, other = (self._folder / f"{stem}{ending}" for ending in (_PLAIN, _PACKED))
        if self._is_packed:
            path, other = other, path
            content = gzip.compress(content, _LEVEL, mtime=0)  # without the time: a step run again gives the same bytes
        temporary = path.with_name(path.name + ".tmp")
        try:
            self._folder.mkdir(exist_ok=True)
            temporary.write_bytes(content)
            temporary.replace(path)
            other.unlink(missing_ok=True)
        except OSError as error:  # a run may go on without them, and find space again
            for left in (temporary, path, other):  # also what an earlier process wrote, which may say something else
                with suppress(OSError):
                    left.unlink(missing_ok=True)
            _log.warning("%s is not written: %s", path, error.strerror)

    def write_step(self, step: int, lines: Iterable[bytes]) -> None:
        """`write` as the dump of `step`, and remove those before it, but for the newest `logging.rollouts_keep`. A run
        that goes on needs none of them; of steps that it will do again the files stay until then."""
        self.write(f"step_{step:06d}", lines)
        if self._keep is None:
            return
        upto = sorted(((number, path) for number, path in _step_files(self._folder) if number <= step), reverse=True)
        kept = set(sorted({number for number, _ in upto})[-self._keep :])
        for number, path in upto:
            if number not in kept:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    _log.warning("could not remove %s: %s", path, error.strerror)
