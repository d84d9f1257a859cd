"""CachedRows of jsonl, parquet and the hub, each with a usable prompt. Needs neither torch nor a tokenizer."""

from __future__ import annotations

import codecs
import functools
import itertools
import json
import os
import re
import stat
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import path_remark
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import Entry, EntryWriter, digest_of, load_or_make, stamp, versions_of
from grpo_spmd.data.hub import check_reachable, is_offline, need_datasets
from grpo_spmd.files import reject_duplicates


def key_and_source(config: DataConfig, eval_set: str | None) -> tuple[str, str]:
    """The config key of a data set, for messages, and its file or hub name; `eval_set` None is the training set."""
    if eval_set is None:
        return "data.train", config.train
    return (
        "data.eval" if isinstance(config.eval, str) else f"data.eval.{eval_set}"
    ), config.eval_sets[eval_set]


def read_rows(config: DataConfig, eval_set: str | None = None) -> Sequence[PromptRow]:
    """All rows of `data.train`, or of a set of `data.eval`, read once on a node. Raises ConfigError, which names
    file:line or file:row."""
    key, source = key_and_source(config, eval_set)
    if source.startswith("hub:"):
        found = _find_hub(source, key)
    elif source.endswith((".jsonl", ".parquet")):
        found = _find_file(Path(source), key)
    else:
        rule = f"{key} must end in .jsonl or .parquet, or be hub:REPO:SUBSET:SPLIT; got {source!r}"
        raise ConfigError(f"{rule}{_how_to_make_jsonl(source)}")
    return rows_of(found, functools.partial(usable_row, config=config), row_keys(config), check_row)


def row_keys(config: DataConfig) -> list[Any]:
    """What decides about a row beside the data."""
    return [config.prompt_key, config.prompt_template, config.as_chat, config.system_prompt]


def usable_row(record: dict[str, Any], where: str, config: DataConfig) -> PromptRow:
    """Raises ConfigError for a prompt that cannot be used."""
    prompt = _prompt_of(record, where, config)
    if isinstance(prompt, str) and (config.as_chat or config.system_prompt):
        prompt = [{"role": "user", "content": prompt}] if prompt else []
    if not isinstance(prompt, str):
        prompt = _checked_messages(prompt, where, config)
    if not prompt or not _is_text(prompt):
        origin = (
            "written by data.prompt_template"
            if config.prompt_template
            else f"in column {config.prompt_key!r}"
        )
        what = "holds half a surrogate pair, which is no text" if prompt else "is empty"
        raise ConfigError(f"{where}: the prompt {origin} {what}")
    own = None if config.prompt_template else config.prompt_key
    return PromptRow(prompt, {name: value for name, value in record.items() if name != own}, where)


def _prompt_of(record: dict[str, Any], where: str, config: DataConfig) -> Any:
    def column(name: str, key: str) -> Any:
        if name not in record:
            there = ", ".join(map(str, record)) or "none"
            raise ConfigError(f"{where}: no column {name!r} ({key}); the columns are {there}")
        return record[name]

    if config.prompt_template is None:
        return column(config.prompt_key, "data.prompt_key")

    # Not str.format: braces belong to many prompts, and those of a LaTeX command (\boxed{answer}) are no column.
    def fill(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[0]
        value = column(found[2], "data.prompt_template")
        if value is None:
            raise ConfigError(f"{where}: the column {found[2]!r} (data.prompt_template) is null")
        return str(value)

    return re.sub(r"(\\\w+)?\{(\w+)\}", fill, config.prompt_template)


def check_enough_rows(
    num_rows: int,
    config: DataConfig,
    num_prompts_per_step: int,
    *,
    num_dropped: int = 0,
    eval_set: str | None = None,
) -> None:
    """Refuse (ConfigError) a training set that cannot fill one step, and a held-out set without a prompt."""
    key, source = key_and_source(config, eval_set)
    longer = f"{num_dropped} longer than data.max_prompt_tokens={config.max_prompt_tokens}"
    note = f" ({longer} were dropped)" if num_dropped else ""
    if eval_set is None and num_rows < num_prompts_per_step:
        why = f"but one step takes rollout.num_prompts_per_step={num_prompts_per_step}; lower that or add prompts"
        raise ConfigError(f"{key}: {source} has {num_rows} usable prompts{note}, {why}")
    if num_rows == 0:
        raise ConfigError(
            f"{key}: {source} has 0 usable prompts{note}; add prompts or leave the set out"
        )


def _find_file(path: Path, key: str) -> Source:
    is_lines = path.name.endswith(".jsonl")
    try:
        state = path.stat()
        is_one = stat.S_ISREG(
            state.st_mode
        )  # a folder of parquet files and a fifo have no fingerprint
        inputs = (
            [path.suffix, digest_of(path), [] if is_lines else versions_of("pyarrow")]
            if is_one
            else None
        )
    except OSError as error:
        raise ConfigError(_unreadable(path, key, error)) from None

    def read() -> Iterator[SourceRow]:
        try:
            yield from _read_jsonl(path) if is_lines else read_parquet(path, key)
            if is_one and stamp(path.stat()) != stamp(state):
                raise ConfigError(
                    f"{key}: {path} was changed while it was read; start again when it is whole"
                )
        except OSError as error:
            raise ConfigError(_unreadable(path, key, error)) from None

    return Source(f"{path}:" if is_lines else f"{path}:row ", read, inputs, state.st_size)


def _unreadable(path: Path, key: str, error: OSError) -> str:
    return f"{key}: cannot read {path}: {error.strerror or error}{path_remark(path)}"


def _read_jsonl(path: Path) -> Iterator[SourceRow]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                text = line.decode(
                    "utf-8-sig" if number == 1 else "utf-8"
                )  # some editors mark its start
                record = json.loads(text, object_pairs_hook=reject_duplicates)
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{where}: not UTF-8 ({error.reason} at byte {error.start})"
                ) from None
            except json.JSONDecodeError as error:
                hint = _of_an_array(line)
                raise ConfigError(
                    f"{where}: not valid JSON: {error.msg} at column {error.colno}{hint}"
                ) from None
            except (
                RecursionError,
                ValueError,
            ) as error:  # too deep; a number of more digits than Python reads
                raise ConfigError(f"{where}: not valid JSON: {error}") from None
            if not isinstance(record, dict):
                hint = _of_an_array(line)
                raise ConfigError(
                    f"{where}: expected a JSON object, got {type(record).__name__}{hint}"
                )
            yield number, record, line.removeprefix(codecs.BOM_UTF8)


def _of_an_array(line: bytes) -> str:
    is_one = line.lstrip()[:1] == b"["
    return (
        f"; a JSON array? jsonl has one object a line{_how_to_make_jsonl('in.json')}"
        if is_one
        else ""
    )


def _how_to_make_jsonl(source: str) -> str:
    reader = {".json": "json.load(sys.stdin)", ".csv": "csv.DictReader(sys.stdin)"}.get(
        Path(source).suffix
    )
    if reader:
        each = f"import csv,json,sys; [print(json.dumps(row)) for row in {reader}]"
        return f': python -c "{each}" < {source} > {Path(source).stem}.jsonl'
    return f"; of the hub: hub:{source}::train" if re.fullmatch(r"[\w.-]+/[\w-]+", source) else ""


def _find_hub(source: str, key: str) -> Source:
    parts = source.split(":", 3)  # a split may hold a colon: train[:100]
    if len(parts) != 4 or not parts[1] or not parts[3]:
        raise ConfigError(
            f"{key}: a hub data set is hub:REPO:SUBSET:SPLIT (SUBSET may be empty); got {source!r}"
        )
    _, repo, subset, split = parts
    need_datasets(source, key)
    if not is_offline() and not _is_cached(repo):
        check_reachable("datasets", repo, key)
    import datasets

    try:
        dataset = datasets.load_dataset(repo, subset or None, split=split)
    except (
        Exception
    ) as error:  # the library raises many types for "not found", "no network", "no such split"
        remedy = (
            "; `python -m grpo_spmd.prefetch` brings it where there is network"
            if is_offline()
            else ""
        )
        raise ConfigError(
            f"{key}: cannot load {source}: {type(error).__name__}: {error}{remedy}"
        ) from None
    files = [Path(file["filename"]) for file in getattr(dataset, "cache_files", ())]
    size, inputs = sum(file.stat().st_size for file in files), None
    if files:
        inputs = [
            source,
            versions_of("datasets"),
            [*map(digest_of, files)],
            str(dataset.features),
            len(dataset),
        ]

    def read() -> Iterator[SourceRow]:
        return ((number, dict(record), None) for number, record in enumerate(dataset))

    return Source(f"{source}:row ", read, inputs, size)


def _is_cached(repo: str) -> bool:
    """Whether datasets has something of it: what that is, and whether it is enough, only datasets can tell."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return (folder / repo.replace("/", "___")).is_dir() or Path(repo).exists()


def _checked_messages(prompt: Any, where: str, config: DataConfig) -> list[dict[str, Any]]:
    if not isinstance(prompt, list) or not all(
        isinstance(message, dict) and _is_sound(message) for message in prompt
    ):
        rule = 'must be a string or a list of {"role": text, "content": text} messages'
        raise ConfigError(
            f"{where}: the prompt in column {config.prompt_key!r} {rule}; got {str(prompt)[:80]}"
        )
    if prompt and config.system_prompt and prompt[0]["role"] != "system":
        return [{"role": "system", "content": config.system_prompt}, *prompt]
    return prompt


def _is_sound(message: dict[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(
        message.get("content", 0), str | list | None
    )


def _is_text(prompt: str | list[dict[str, Any]]) -> bool:
    """False where JSON smuggled in something like "\\ud800", which no tokenizer takes."""
    parts = (
        [prompt]
        if isinstance(prompt, str)
        else [value for message in prompt for value in message.values()]
    )
    if all(isinstance(part, str) and part.isascii() for part in parts):  # nearly all are: fast
        return True
    text = (
        prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    )
    return re.search(r"[\ud800-\udfff]", text) is None


# CachedRows of a parquet file, a few at a time; of a folder of them, held whole.


_ROWS = 1024  # that are held at a time


def read_parquet(path: Path, key: str) -> Iterator[SourceRow]:
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
        for number, record in enumerate(
            record for batch in batches for record in batch.to_pylist()
        ):
            yield number, record, None
    except (
        pyarrow.ArrowException,
        ValueError,
    ) as error:  # ValueError: a text column that is not UTF-8
        raise ConfigError(f"{key}: {path} cannot be read as parquet: {error}") from None


# What a prompt would show the model that nobody can have meant: the answer, JSON as text, a column that was not filled
# in. Reads every row, at a microsecond each.


# A column in other notations than {name}: jinja's, str.format's fields and escapes.
_OTHERWISE = re.compile(
    r"\{\{\s*(\w+)\s*\}\}|\{\s+(\w+)\s*\}|\{(\w+)\s+\}|\{(\w+)(?:[.\[!:][^{}\n]*)\}"
)


def check_source(key: str, source: str) -> None:
    """Refuse an address: only files and the hub are read. Raises ConfigError."""
    if not re.match(r"\w+://", source):
        return
    found = re.match(r"(?:hf://|https://huggingface\.co/)datasets/([\w.-]+/[\w.-]+)", source)
    remedy = (
        f"of the hub: hub:{found[1]}::train" if found else "download it, and give the file's path"
    )
    raise ConfigError(f"{key}: addresses are not read; {remedy}; got {source!r}")


def check_shown(rows: Sequence[PromptRow], config: DataConfig) -> None:
    """Refuse rows whose prompt is not what it should be. Raises ConfigError, which names file:line."""
    if rows and config.prompt_template:
        _check_template(config.prompt_template, rows[0])
    if isinstance(rows, CachedRows):  # they were looked at when they were read
        rows = [] if rows.first_odd is None else [rows[rows.first_odd]]
    for row in rows:
        check_row(row)


def check_row(row: PromptRow) -> None:
    """Raises ConfigError."""
    if isinstance(row.prompt, str):
        _check_text(row.prompt, row.where)
    else:
        _check_messages(row.prompt, row.where)


def _check_template(template: str, row: PromptRow) -> None:
    for found in _OTHERWISE.finditer(template):
        name = next(filter(None, found.groups()))
        if name in row.columns:
            what = f"{found[0]} is not how a column is written: write {{{name}}}"
            raise ConfigError(f"data.prompt_template: {what}")


def _check_text(text: str, where: str) -> None:
    if not text.strip():
        raise ConfigError(f"{where}: the prompt is nothing but white space")
    start = text.lstrip()[:2]
    if start[:1] == "[" and '"role"' in text and _is_messages(text):
        how = "make it a list in the file (json.loads)"
        raise ConfigError(
            f"{where}: the prompt is a JSON text of chat messages, and would be shown as such; {how}"
        )


def _is_messages(text: str) -> bool:
    try:
        value = json.loads(text)
    except (RecursionError, ValueError):
        return False
    return isinstance(value, list) and all(
        isinstance(each, dict) and "role" in each for each in value
    )


def _check_messages(messages: Sequence[dict[str, Any]], where: str) -> None:
    last = messages[-1]
    if last["role"] == "assistant":
        what = "the chat prompt ends with an assistant's message, so that the model would be shown the answer"
        raise ConfigError(
            f"{where}: {what}; take it out of the prompt, e.g. into a column of its own"
        )
    says_something = False
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
                if kind != "text":
                    raise ConfigError(
                        f"{where}: the prompt has a part of type {kind!r}, and only text is trained on"
                    )
                says_something = says_something or bool(str(part.get("text") or "").strip())
        elif content is not None and content.strip():
            says_something = True
    if not says_something:
        raise ConfigError(f"{where}: the messages of the prompt are nothing but white space")
    if isinstance(last.get("content"), str):
        _check_text(last["content"] or "-", where)


# CachedRows of a data set that stay in a file of the cache: each is decoded when it is asked for, from its line, or from
# JSON where it never was a line.


_BATCH = 256  # rows that are decoded together
SourceRow = tuple[
    int, dict[str, Any], bytes | None
]  # number of the line or row, the row, and its line if it has one


@dataclass(frozen=True)
class PromptRow:
    """One usable row: its prompt (text or chat messages), its other columns, and where it stands, for messages."""

    prompt: str | list[dict[str, Any]]
    columns: dict[str, Any]
    where: str


@dataclass(frozen=True)
class Source:
    """A data set that was found, and not read yet."""

    prefix: str  # of where a row stands; its number follows
    read: Callable[[], Iterator[SourceRow]]  # raises ConfigError
    inputs: Any  # what tells its content from others', for a fingerprint; None: nothing does
    size: int  # in bytes


@dataclass
class Overview:
    """What the checks ask of all rows together."""

    columns: dict[str, None] = field(
        default_factory=dict
    )  # their names, in the order in which they come up
    sizes: Sequence[int] = field(default_factory=lambda: array("q"))  # characters of each prompt
    first_chat: int | None = None  # the first row whose prompt is messages

    def add(self, row: PromptRow) -> None:
        assert isinstance(self.sizes, array)
        if self.first_chat is None and not isinstance(row.prompt, str):
            self.first_chat = len(self.sizes)
        self.sizes.append(_characters(row.prompt))
        if not row.columns.keys() <= self.columns.keys():
            self.columns |= dict.fromkeys(row.columns)


class CachedRows(Sequence[PromptRow]):
    def __init__(
        self, entry: Entry, source: Source, usable: Callable[[dict[str, Any], str], PromptRow]
    ) -> None:
        self._entry, self._usable, self.prefix = entry, usable, source.prefix
        self._ends, self._numbers = entry.array("ends"), entry.array("numbers")
        self.inputs: Any = None
        """What their content is a function of; None: of nothing that could be named."""
        self.size = source.size
        facts = entry.facts
        self.overview = Overview(
            dict.fromkeys(facts["columns"]), entry.array("sizes"), facts["first_chat"]
        )
        self.first_odd: int | None = facts["first_odd"]
        """The first row that `look` refused."""

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> PromptRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptRow]: ...
    def __getitem__(self, index: int | slice) -> PromptRow | list[PromptRow]:
        if not isinstance(index, slice):
            number = range(len(self))[index]
            return self._read(number, number + 1)[0]
        numbers = range(len(self))[index]
        if numbers.step != 1:
            return [self[number] for number in numbers]
        return self._read(numbers.start, numbers.stop)

    def __iter__(self) -> Iterator[PromptRow]:
        for start in range(0, len(self), _BATCH):
            yield from self[start : start + _BATCH]

    def _read(self, start: int, stop: int) -> list[PromptRow]:
        """CachedRows side by side: as one JSON list, in half the time."""
        if start >= stop:
            return []
        ends = [self._ends[start - 1] if start else 0, *self._ends[start:stop]]
        text = b",".join([self._entry.blob[begin:end] for begin, end in itertools.pairwise(ends)])
        records, numbers = json.loads(f"[{str(text, 'utf-8')}]"), self._numbers[start:stop]
        prefix, usable = self.prefix, self._usable
        return [
            usable(record, f"{prefix}{number}")
            for record, number in zip(records, numbers, strict=True)
        ]


def rows_of(
    source: Source,
    usable: Callable[[dict[str, Any], str], PromptRow],
    row_keys: list[Any],
    look: Callable[[PromptRow], None],
) -> Sequence[PromptRow]:
    """Each row as `usable` makes it, which decides by `row_keys`. Read once on a node. Raises ConfigError; what `look`
    raises in the same pass waits until it is asked for."""

    def make(maker: EntryWriter) -> None:
        ends, numbers, overview = array("q"), array("q"), Overview()
        end, first_odd, maker.facts["is_json"] = 0, None, True
        for number, record, line in source.read():
            overview.add(row := usable(record, f"{source.prefix}{number}"))
            if first_odd is None:
                try:
                    look(row)
                except ConfigError:
                    first_odd = len(numbers)
            if line is None:
                if not _is_json(
                    record
                ):  # a date, bytes, an image: JSON would bring back something else
                    maker.facts["is_json"] = False
                    return
                line = json.dumps(record).encode()
            maker.add(line)
            end += len(line)
            ends.append(end)
            numbers.append(number)
        assert isinstance(overview.sizes, array)
        maker.arrays.update(ends=ends, numbers=numbers, sizes=overview.sizes)
        maker.facts.update(
            columns=list(overview.columns), first_chat=overview.first_chat, first_odd=first_odd
        )

    inputs = None if source.inputs is None else [source.inputs, row_keys]
    entry = load_or_make("rows", inputs, source.size, make, source.prefix)
    if not entry.facts["is_json"]:
        return [usable(record, f"{source.prefix}{number}") for number, record, _ in source.read()]
    rows = CachedRows(entry, source, usable)
    rows.inputs = inputs
    return rows


def _is_json(value: Any) -> bool:
    """Whether JSON brings it back as it was, by type too."""
    kind = type(value)
    if kind is dict:
        return all(type(name) is str for name in value) and all(map(_is_json, value.values()))
    return (
        all(map(_is_json, value)) if kind is list else kind in (str, int, float, bool, type(None))
    )


def overview_of(rows: Sequence[PromptRow]) -> Overview:
    if isinstance(rows, CachedRows):
        return rows.overview
    found = Overview()
    for row in rows:
        found.add(row)
    return found


def once(kind: str, rows: Sequence[PromptRow], inputs: Any, look: Callable[[], Any]) -> Any:
    """What `look` says of the rows, which survives JSON and is a function of them and of `inputs`: asked once on a
    node, until one of them changes. What it raises is raised."""

    def make(maker: EntryWriter) -> None:
        maker.facts["said"] = look()

    if not isinstance(rows, CachedRows) or rows.inputs is None:
        return look()
    return load_or_make(kind, [rows.inputs, inputs], rows.size, make, rows.prefix).facts["said"]


def _characters(prompt: str | list[dict[str, Any]]) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(str(message.get("content"))) for message in prompt)
