"""tokenizer.json of a run folder: the run's own tokenizer, so that token ids can be shown where the model is not.
Imports no torch, and no transformers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import write_durably
from grpo_spmd.untrusted import UntrustedError, open_regular

_log = logging.getLogger("grpo_spmd")
_NAME = "tokenizer.json"
_LONGEST = 1 << 27  # bytes; those of 260,000 tokens have 34 MB


def save_tokenizer(run_dir: Path, tokenizer: Any) -> None:
    """Write the fast tokenizer of transformers, where it is not there already; a slow one has none. It is for people:
    what a disk does to it raises nothing."""
    if not getattr(tokenizer, "is_fast", False):
        return
    path, content = run_dir / _NAME, tokenizer.backend_tokenizer.to_str().encode("utf-8", "surrogatepass")
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


def read_tokenizer(run_dir: Path) -> Any:
    """A `tokenizers.Tokenizer`; None where the run left none. Raises ConfigError for what is none."""
    path = run_dir / _NAME
    if not os.path.lexists(path):
        return None
    try:
        with open_regular(path) as file:
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > _LONGEST:
        raise ConfigError(f"{path}: larger than {_LONGEST >> 20} MiB, which no tokenizer is")
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except BaseException as error:  # a bare Exception of the library's, or, no Exception at all, a panic of Rust's
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: no tokenizer: {said:.200}") from None
