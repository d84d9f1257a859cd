"""This module reads rows from jsonl files, parquet files and the Hugging Face hub.

Each row is checked when it is read, and must have a usable prompt. The rows of a large data set are
read once on a node and kept in a file of its cache (cache.py), from which a row is decoded when it
is needed. The module needs neither torch nor a tokenizer.
"""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import Entry, EntryWriter, digest_of, load_or_make, stamp, versions_of
from grpo_spmd.data.hub import check_reachable, is_offline, need_datasets
from grpo_spmd.files import reject_duplicates

# Matches the column {name} in a template; group 1 is a LaTeX command before it (\boxed{answer}), in
# which case it is no column. str.format is not used, since many prompts contain other braces.
_COLUMN = re.compile(r"(\\\w+)?\{(\w+)\}")
Messages = list[dict[str, Any]]
# The number of rows of a parquet file that are read into memory at a time.
_NUM_PARQUET_ROWS = 1024
# The number of cached rows that are decoded together.
_NUM_DECODED_ROWS = 256
# Matches a column in jinja's notation {{ name }}, with blanks, or with a format of str.format.
_FOREIGN_COLUMN = re.compile(
    r"\{\{\s*(\w+)\s*\}\}|\{\s+(\w+)\s*\}|\{(\w+)\s+\}|\{(\w+)(?:[.\[!:][^{}\n]*)\}"
)


@dataclass(frozen=True)
class PromptRow:
    """One row of a data set, with a usable prompt."""

    prompt: str | Messages
    columns: dict[str, Any]
    """The columns other than the prompt's."""
    where: str
    """The row's file and line, or hub name and row number, for messages."""


class SourceRow(NamedTuple):
    """One row of a source as it was read, before its prompt is made from the columns."""

    number: int
    record: dict[str, Any]
    line: bytes | None
    """The row's line of a jsonl file; None for other sources."""


@dataclass(frozen=True)
class Source:
    """A data set (a file, folder or hub name) that was found, but has not been read yet."""

    prefix: str
    """The beginning of `PromptRow.where`; the row's number follows."""
    read: Callable[[], Iterator[SourceRow]]
    """A function that yields the rows. Raises ConfigError if it cannot read one."""
    inputs: Any
    """Values that identify the content, for the cache; None if the data cannot be cached."""
    num_bytes: int


@dataclass
class Overview:
    """Facts about all rows of a data set, for the checks."""

    columns: dict[str, None] = field(default_factory=dict)
    """Names of the columns (a dict keeps the order in which they first occur)."""
    sizes: array[int] = field(default_factory=lambda: array("q"))
    """The number of characters of each prompt."""
    first_chat: int | None = None
    """The index of the first row whose prompt is a list of messages."""
    first_refused: int | None = None
    """The index of the first row that `check_row` refuses."""


class CachedRows(Sequence[PromptRow]):
    """The rows of a data set, decoded on access from an entry of the node's cache."""

    def __init__(
        self,
        entry: Entry,
        source: Source,
        inputs: Any,
        make_row: Callable[[dict[str, Any], str], PromptRow],
    ) -> None:
        """`inputs` are the values that identify the rows, for the cache; None if they cannot be
        cached. `make_row` is `_make_row` with its config."""
        self.inputs = inputs
        self.prefix = source.prefix
        self.num_bytes = source.num_bytes
        self._make_row = make_row
        # Row i is the JSON in the bytes bounds[i] to bounds[i + 1] of the blob; numbers[i] is its
        # number in the source.
        self._blob = entry.blob
        self._bounds = entry.arrays["bounds"]
        self._numbers = entry.arrays["numbers"]
        self.overview = Overview(
            columns=dict.fromkeys(entry.facts["columns"]),
            sizes=array("q", entry.arrays["sizes"]),
            first_chat=entry.facts["first_chat"],
            first_refused=entry.facts["first_odd"],
        )

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        """Returns the PromptRow at an index, or the list of those in a slice."""
        indices = range(len(self))[index]
        if isinstance(indices, int):
            return self._decode([indices])[0]
        return self._decode(indices)

    def __iter__(self) -> Iterator[PromptRow]:
        """Yields all rows in order. Many are decoded at a time, which is faster."""
        for start in range(0, len(self), _NUM_DECODED_ROWS):
            yield from self[start : start + _NUM_DECODED_ROWS]

    def _decode(self, indices: Sequence[int]) -> list[PromptRow]:
        """Returns the rows at some indices. Decoding them as one JSON list halves the time."""
        lines = b",".join([self._blob[self._bounds[i] : self._bounds[i + 1]] for i in indices])
        records = json.loads(f"[{str(lines, 'utf-8')}]")
        return [
            self._make_row(record, f"{self.prefix}{self._numbers[i]}")
            for record, i in zip(records, indices, strict=True)
        ]


def key_and_source(config: DataConfig, eval_set: str | None) -> tuple[str, str]:
    """Returns (key, source): a data set's config key, for messages, and its file or hub name.

    If `eval_set` is None, this is the training set.
    """
    if eval_set is None:
        return "data.train", config.train
    key = "data.eval" if isinstance(config.eval, str) else f"data.eval.{eval_set}"
    return key, config.eval_sets[eval_set]


def read_rows(config: DataConfig, eval_set: str | None = None) -> Sequence[PromptRow]:
    """Returns all rows of `data.train`, or of a set of `data.eval`.

    The first process of a node reads them into a file of the node's cache, which the node's other
    processes memory-map. Rows with values that JSON cannot hold (dates, bytes, images) are not
    cached: each process reads them into its memory. Raises ConfigError, which names the file and
    line or row, if a file or a row cannot be read.
    """
    key, name = key_and_source(config, eval_set)
    if name.startswith("hub:"):
        source = _find_hub(name, key)
    elif name.endswith((".jsonl", ".parquet")):
        source = _find_file(Path(name), key)
    else:
        raise ConfigError(
            f"{key} must end in .jsonl or .parquet, or be hub:REPO:SUBSET:SPLIT; got "
            f"{name!r}{_conversion_hint(name)}"
        )
    make_row = functools.partial(_make_row, config=config)
    # A row depends on its source and on these settings only.
    settings = [config.prompt_key, config.prompt_template, config.as_chat, config.system_prompt]
    inputs = None if source.inputs is None else [source.inputs, settings]
    make = functools.partial(_write_rows, source=source, make_row=make_row)
    entry = load_or_make("rows", inputs, source.num_bytes, make, source.prefix)
    if not entry.facts["is_json"]:
        return [make_row(row.record, f"{source.prefix}{row.number}") for row in source.read()]
    return CachedRows(entry, source, inputs, make_row)


def _write_rows(
    writer: EntryWriter, source: Source, make_row: Callable[[dict[str, Any], str], PromptRow]
) -> None:
    """Reads all rows of a source and writes them to a cache entry as lines of JSON.

    Stops at the first row that JSON cannot hold, and sets the fact "is_json" to False. Raises
    ConfigError for a row without a usable prompt.
    """
    # The bytes bounds[i] to bounds[i + 1] of the blob are the line of row i.
    bounds = array("q", [0])
    numbers = array("q")
    writer.facts["is_json"] = True

    def write() -> Iterator[PromptRow]:
        """Yields the rows as it reads them, and adds each one's line to the entry."""
        for number, record, line in source.read():
            yield make_row(record, f"{source.prefix}{number}")
            if line is None:
                if not _is_json(record):
                    writer.facts["is_json"] = False
                    return
                line = json.dumps(record).encode()
            writer.add(line)
            bounds.append(bounds[-1] + len(line))
            numbers.append(number)

    # overview_of reads `write()` to its end, which writes the rows to the entry.
    overview = overview_of(write())
    writer.arrays.update(bounds=bounds, numbers=numbers, sizes=overview.sizes)
    writer.facts.update(
        columns=list(overview.columns),
        first_chat=overview.first_chat,
        first_odd=overview.first_refused,
    )


def _is_json(value: Any) -> bool:
    """Returns True if a value survives JSON: decoded, it is the same, also in type."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_is_json, value.values()))
    if kind is list:
        return all(map(_is_json, value))
    return kind in (str, int, float, bool, type(None))


def overview_of(rows: Iterable[PromptRow]) -> Overview:
    """Returns the Overview of a data set; for CachedRows, without reading the rows again."""
    if isinstance(rows, CachedRows):
        return rows.overview
    overview = Overview()
    for index, row in enumerate(rows):
        if isinstance(row.prompt, str):
            num_chars = len(row.prompt)
        else:
            num_chars = sum(len(str(message.get("content"))) for message in row.prompt)
            if overview.first_chat is None:
                overview.first_chat = index
        overview.sizes.append(num_chars)
        if not row.columns.keys() <= overview.columns.keys():
            overview.columns |= dict.fromkeys(row.columns)
        # Only remember the row here; check_prompts raises the error later.
        if overview.first_refused is None:
            try:
                check_row(row)
            except ConfigError:
                overview.first_refused = index
    return overview


def cached_result(
    kind: str, rows: Sequence[PromptRow], inputs: Any, compute: Callable[[], Any]
) -> Any:
    """Returns the result of `compute`, from the node's cache if it was computed for these rows and
    `inputs` before.

    The result must survive JSON, and depend on nothing but the rows and `inputs`. `kind` names it
    in the cache. Raises whatever `compute` raises.
    """
    if not isinstance(rows, CachedRows) or rows.inputs is None:
        return compute()

    def make(writer: EntryWriter) -> None:
        """Computes the result and stores it in a new entry of the cache."""
        writer.facts["said"] = compute()

    entry = load_or_make(kind, [rows.inputs, inputs], rows.num_bytes, make, rows.prefix)
    return entry.facts["said"]


# The functions below turn a record into a row with a usable prompt.


def _make_row(record: dict[str, Any], location: str, config: DataConfig) -> PromptRow:
    """Returns a record as a PromptRow. Raises ConfigError if its prompt cannot be used."""
    prompt = _prompt_of(record, location, config)
    if isinstance(prompt, str) and (config.as_chat or config.system_prompt):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if not isinstance(prompt, str):
        prompt = _checked_messages(prompt, location, config)
    if not prompt or not _is_unicode(prompt):
        origin = f"in column {config.prompt_key!r}"
        if config.prompt_template:
            origin = "written by data.prompt_template"
        rule = "holds half a surrogate pair, which is no text" if prompt else "is empty"
        raise ConfigError(f"{location}: the prompt {origin} {rule}")
    prompt_column = None if config.prompt_template else config.prompt_key
    columns = {name: value for name, value in record.items() if name != prompt_column}
    return PromptRow(prompt, columns, location)


def _prompt_of(record: dict[str, Any], location: str, config: DataConfig) -> Any:
    """Returns the prompt column of a record, or the template filled with its columns.

    Raises ConfigError if a column is missing, or null in a template.
    """

    def column(name: str, key: str) -> Any:
        """Returns the record's value of a column, which the config key `key` names."""
        if name not in record:
            columns = ", ".join(map(str, record)) or "none"
            raise ConfigError(f"{location}: no column {name!r} ({key}); the columns are {columns}")
        return record[name]

    # Without a template, the prompt column is the prompt: a string or a list of messages.
    if config.prompt_template is None:
        return column(config.prompt_key, "data.prompt_key")

    def text(name: str) -> str:
        """Returns the record's value of a column as text, to be inserted into the template."""
        value = column(name, "data.prompt_template")
        if value is None:
            raise ConfigError(f"{location}: the column {name!r} (data.prompt_template) is null")
        return str(value)

    return fill_columns(config.prompt_template, text)


def fill_columns(template: str, text_of: Callable[[str], str]) -> str:
    """Returns a template in which each column name in braces is replaced by `text_of(name)`."""

    def fill(match: re.Match[str]) -> str:
        """Returns what replaces a match of _COLUMN: itself after a LaTeX command, else the text."""
        return match[0] if match[1] is not None else text_of(match[2])

    return _COLUMN.sub(fill, template)


def columns_of(template: str) -> set[str]:
    """Returns the names of the columns in a template."""
    return {name for command, name in _COLUMN.findall(template) if not command}


def _checked_messages(prompt: Any, location: str, config: DataConfig) -> Messages:
    """Returns a prompt's messages, after data.system_prompt if they have no system message.

    Raises ConfigError if `prompt` is not a list of messages.
    """
    if not isinstance(prompt, list) or not all(map(_is_message, prompt)):
        raise ConfigError(
            f"{location}: the prompt in column {config.prompt_key!r} must be a string or a list "
            f'of {{"role": text, "content": text}} messages; got {str(prompt)[:80]}'
        )
    if prompt and config.system_prompt and prompt[0]["role"] != "system":
        return [{"role": "system", "content": config.system_prompt}, *prompt]
    return prompt


def _is_message(value: Any) -> bool:
    """Returns True for a chat message: a dict with a role, and with a content that may be None."""
    # The default 0 has none of the allowed types, so that a message without content is refused.
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content", 0), str | list | None)
    )


def _is_unicode(prompt: str | Messages) -> bool:
    """Returns False if the prompt has a lone surrogate ("\\ud800"), which no tokenizer accepts."""
    text = prompt
    if not isinstance(text, str):
        text = json.dumps(prompt, ensure_ascii=False, default=str)
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# The functions below find and read files and data sets of the hub.


def _find_file(path: Path, key: str) -> Source:
    """Returns the Source of a jsonl or parquet file, or of a folder of parquet files.

    `key` is the config key that names the path, for messages. Raises ConfigError if it cannot be
    opened.
    """
    is_jsonl = path.name.endswith(".jsonl")
    inputs = None
    try:
        state = path.stat()
        # A folder of parquet files or a fifo is not cached, but read at each start.
        is_file = stat.S_ISREG(state.st_mode)
        if is_file:
            versions = [] if is_jsonl else versions_of("pyarrow")
            inputs = [path.suffix, digest_of(path), versions]
    except OSError as error:
        raise _read_error(path, key, error) from None

    def read() -> Iterator[SourceRow]:
        """Yields the file's rows. Raises ConfigError if it cannot be read, or was changed."""
        try:
            yield from _read_jsonl(path) if is_jsonl else _read_parquet(path, key)
            if is_file and stamp(path.stat()) != stamp(state):
                raise ConfigError(
                    f"{key}: {path} was changed while it was read; start again when it is whole"
                )
        except OSError as error:
            raise _read_error(path, key, error) from None

    return Source(f"{path}:" if is_jsonl else f"{path}:row ", read, inputs, state.st_size)


def _read_error(path: Path, key: str, error: OSError) -> ConfigError:
    """Returns the error for a path that cannot be read; `key` is the config key that names it."""
    reason = error.strerror or error
    return ConfigError(f"{key}: cannot read {path}: {reason}{path_remark(path)}")


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    """Yields the rows of a jsonl file; its empty lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = _read_line(line, number, f"{path}:{number}")
                yield SourceRow(number, record, line.removeprefix(codecs.BOM_UTF8))


def _read_line(line: bytes, number: int, location: str) -> dict[str, Any]:
    """Returns the JSON object on line `number` of a jsonl file.

    Raises ConfigError if it is not a JSON object in UTF-8, or has a name twice.
    """
    array_hint = ""
    if line.lstrip()[:1] == b"[":
        example = _conversion_hint("in.json")
        array_hint = f"; a JSON array? jsonl has one object a line{example}"
    try:
        # Some editors write a byte order mark at the start of a file; utf-8-sig skips it.
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        record = json.loads(text, object_pairs_hook=reject_duplicates)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{location}: not UTF-8: {error}") from None
    # This includes JSON that is nested too deeply, or has a number of more digits than Python
    # converts.
    except (RecursionError, ValueError) as error:
        reason = str(error).replace(": line 1 column", " at column")
        raise ConfigError(f"{location}: not valid JSON: {reason}{array_hint}") from None
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise ConfigError(f"{location}: expected a JSON object, got {kind}{array_hint}")
    return record


def _conversion_hint(source: str) -> str:
    """Returns the end of an error message that says how to turn `source` into something readable.

    Returns "" if `source` has no known format.
    """
    readers = {".json": "json.load(sys.stdin)", ".csv": "csv.DictReader(sys.stdin)"}
    reader = readers.get(Path(source).suffix)
    if reader:
        return (
            f': python -c "import csv,json,sys; [print(json.dumps(row)) for row in {reader}]" < '
            f"{source} > {Path(source).stem}.jsonl"
        )
    if Path(source).is_dir():
        return "; it is a folder: give a file in it (datasets.load_from_disk and to_parquet)"
    return f"; on the hub: hub:{source}::train" if re.fullmatch(r"[\w.-]+/[\w-]+", source) else ""


def _read_parquet(path: Path, key: str) -> Iterator[SourceRow]:
    """Yields the rows of a parquet file, or of a folder of parquet files.

    A file is read in small batches, since one row group may be the whole file. A folder is read
    into memory as a whole.
    """
    # Imported late, since jsonl data needs no pyarrow.
    import pyarrow
    import pyarrow.parquet

    try:
        if path.is_dir():
            table = pyarrow.parquet.read_table(path)
            batches = iter(table.to_batches(max_chunksize=_NUM_PARQUET_ROWS))
        else:
            file = pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
            names = file.schema_arrow.names
            duplicates = sorted({name for name in names if names.count(name) > 1})
            if duplicates:
                raise ValueError(f"it has the column {duplicates[0]!r} twice")
            batches = file.iter_batches(_NUM_PARQUET_ROWS, use_threads=False)
        records = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
        for number, record in enumerate(records):
            yield SourceRow(number, record, None)
    # ValueError: a duplicate column, or a text column that is not UTF-8.
    except (pyarrow.ArrowException, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as parquet: {error}") from None


def _find_hub(source: str, key: str) -> Source:
    """Returns the Source of a data set on the hub, which datasets downloads or has in its cache.

    `source` is hub:REPO:SUBSET:SPLIT. Raises ConfigError if the data set cannot be loaded.
    """
    # A split may contain a colon: train[:100].
    fields = source.split(":", 3)
    if len(fields) != 4 or not fields[1] or not fields[3]:
        raise ConfigError(
            f"{key}: a hub data set is hub:REPO:SUBSET:SPLIT (SUBSET may be empty); got {source!r}"
        )
    _, repo, subset, split = fields
    need_datasets(source, key)
    if not is_offline() and not _is_cached(repo):
        check_reachable("datasets", repo, key)
    # Imported late, since the package is optional and slow to import.
    import datasets

    try:
        dataset = datasets.load_dataset(repo, subset or None, split=split)
    # The library raises exceptions of many types for "not found", "no network", "no such split".
    except Exception as error:
        remedy = ""
        if is_offline():
            remedy = "; `python -m grpo_spmd.prefetch` downloads it where there is network"
        raise ConfigError(
            f"{key}: cannot load {source}: {type(error).__name__}: {error}{remedy}"
        ) from None
    files = [Path(file["filename"]) for file in getattr(dataset, "cache_files", ())]
    inputs = None
    if files:
        digests = [*map(digest_of, files)]
        features = str(dataset.features)
        inputs = [source, versions_of("datasets"), digests, features, len(dataset)]

    def read() -> Iterator[SourceRow]:
        """Yields the rows of the data set."""
        for number, record in enumerate(dataset):
            yield SourceRow(number, dict(record), None)

    return Source(f"{source}:row ", read, inputs, sum(file.stat().st_size for file in files))


def _is_cached(repo: str) -> bool:
    """Returns True if the cache of datasets has a folder for `repo`, or `repo` is a local path.

    Only datasets itself knows whether the cached part is enough.
    """
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return (folder / repo.replace("/", "___")).is_dir() or Path(repo).exists()


# The functions below check sources and rows.


def check_source(key: str, source: str) -> None:
    """Raises ConfigError if `source` is a URL, since only files and the hub are read."""
    if not re.match(r"\w+://", source):
        return
    hub = re.match(r"(?:hf://|https://huggingface\.co/)datasets/([\w.-]+/[\w.-]+)", source)
    remedy = "download it, and give the file's path"
    if hub:
        remedy = f"on the hub: hub:{hub[1]}::train"
    raise ConfigError(f"{key}: URLs are not read; {remedy}; got {source!r}")


def check_enough_rows(
    num_rows: int,
    config: DataConfig,
    num_prompts_per_step: int,
    *,
    num_dropped: int = 0,
    eval_set: str | None = None,
) -> None:
    """Raises ConfigError for a training set that has too few prompts for a step, and for an
    evaluation set that has none.

    `num_rows` does not count the `num_dropped` prompts that are too long.
    """
    key, source = key_and_source(config, eval_set)
    note = ""
    if num_dropped:
        limit = f"data.max_prompt_tokens={config.max_prompt_tokens}"
        note = f" ({num_dropped} longer than {limit} were dropped)"
    prompts = f"{source} has {num_rows} usable prompts{note}"
    if eval_set is None and num_rows < num_prompts_per_step:
        raise ConfigError(
            f"{key}: {prompts}, but one step takes "
            f"rollout.num_prompts_per_step={num_prompts_per_step}; lower that or add prompts"
        )
    if num_rows == 0:
        raise ConfigError(f"{key}: {prompts}; add prompts or leave the set out")


def check_prompts(rows: Sequence[PromptRow], config: DataConfig) -> None:
    """Raises ConfigError, which names file:line, for prompts that are surely a mistake.

    For instance, they would show the model the answer, JSON as text, or the name of a column that
    the template did not fill in.
    """
    if rows and config.prompt_template:
        for match in _FOREIGN_COLUMN.finditer(config.prompt_template):
            name = next(filter(None, match.groups()))
            if name in rows[0].columns:
                raise ConfigError(
                    f"data.prompt_template: {match[0]} is not how a column is written: write "
                    f"{{{name}}}"
                )
    first_refused = overview_of(rows).first_refused
    if first_refused is not None:
        check_row(rows[first_refused])


def check_row(row: PromptRow) -> None:
    """Raises ConfigError if a prompt is surely a mistake. Takes about a microsecond."""
    if isinstance(row.prompt, str):
        _check_text(row.prompt, row.where)
    else:
        _check_messages(row.prompt, row.where)


def _check_text(text: str, location: str) -> None:
    """Raises ConfigError for a blank text, and for chat messages that were encoded as JSON text."""
    if not text.strip():
        raise ConfigError(f"{location}: the prompt is nothing but white space")
    if text.lstrip()[:1] == "[" and '"role"' in text and _is_json_messages(text):
        raise ConfigError(
            f"{location}: the prompt is a JSON text of chat messages, and the model would see that "
            "text; make it a list in the file (json.loads)"
        )


def _is_json_messages(text: str) -> bool:
    """Returns True if a text is a JSON list of chat messages."""
    try:
        value = json.loads(text)
    except (RecursionError, ValueError):
        return False
    return isinstance(value, list) and all(
        isinstance(item, dict) and "role" in item for item in value
    )


def _check_messages(messages: Sequence[dict[str, Any]], location: str) -> None:
    """Raises ConfigError if messages are blank, or end with the assistant's answer."""
    last_message = messages[-1]
    if last_message["role"] == "assistant":
        raise ConfigError(
            f"{location}: the chat prompt ends with an assistant's message, so that the model "
            "would be shown the answer; take it out of the prompt, e.g. into a column of its own"
        )
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        texts += _block_texts(content, location) if isinstance(content, list) else [content or ""]
    if not any(text.strip() for text in texts):
        raise ConfigError(f"{location}: the messages of the prompt are nothing but white space")
    if isinstance(last_message.get("content"), str):
        # An empty last message is allowed after other messages.
        _check_text(last_message["content"] or "-", location)


def _block_texts(blocks: list[Any], location: str) -> Iterator[str]:
    """Yields the texts of a message's content blocks. Raises ConfigError for other blocks."""
    for block in blocks:
        kind = block.get("type", "text") if isinstance(block, dict) else type(block).__name__
        if kind != "text":
            raise ConfigError(
                f"{location}: the prompt has a part of type {kind!r}, and only text is trained on"
            )
        yield str(block.get("text") or "")
