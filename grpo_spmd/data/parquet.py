"""Rows of a parquet file, a few at a time; of a folder of them, held whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.data.table import Found

_ROWS = 1024  # that are held at a time


def read_parquet(path: Path, key: str) -> Iterator[Found]:
    """Of a file, page by page: a row group may be all of it. Of a folder of files. Raises ConfigError."""
    import pyarrow
    import pyarrow.parquet

    try:
        if path.is_dir():
            batches = iter(pyarrow.parquet.read_table(path).to_batches(max_chunksize=_ROWS))
        else:
            file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            names = file.schema_arrow.names
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"the column {twice[0]!r} is there twice")
            batches = file.iter_batches(_ROWS, use_threads=False)
        for number, record in enumerate(record for batch in batches for record in batch.to_pylist()):
            yield number, record, None
    except (pyarrow.ArrowException, ValueError) as error:  # ValueError: a text column that is not UTF-8
        raise ConfigError(f"{key}: {path} cannot be read as parquet: {error}") from None
