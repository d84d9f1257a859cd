"""tokenizer.json of a run folder: the run's own tokenizer, so that token ids can be shown where the model is not."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from grpo_spmd.files import UntrustedError, open_regular, write_durably

_log = logging.getLogger("grpo_spmd")
_NAME = "tokenizer.json"


def save_tokenizer(run_dir: Path, tokenizer: Any) -> None:
    """Write the fast tokenizer of transformers, where it is not there already; a slow one has none. It is for people:
    what a disk does to it raises nothing."""
    if not getattr(tokenizer, "is_fast", False):
        return
    path, content = (
        run_dir / _NAME,
        tokenizer.backend_tokenizer.to_str().encode("utf-8", "surrogatepass"),
    )
    try:
        if _read(path, len(content)) != content:
            write_durably(path, content)
    except OSError as error:
        _log.warning("%s is not written: %s", path, error.strerror)


def _read(path: Path, size: int) -> bytes:
    """What is there, where it is a file of that size."""
    if os.path.lexists(path):
        try:
            with open_regular(path) as file:
                return file.read() if os.fstat(file.fileno()).st_size == size else b""
        except UntrustedError:
            pass  # it is replaced, and what it leads to stays
    return b""
