"""Rows of jsonl, parquet and the hub, each with a usable prompt. Needs neither torch nor a tokenizer."""

from __future__ import annotations

import codecs
import functools
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.home import looked_for
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data.cache import digest_of, stamp, versions_of
from grpo_spmd.data.hub import check_reachable, is_offline, need_datasets
from grpo_spmd.data.parquet import read_parquet
from grpo_spmd.data.shown import check_row
from grpo_spmd.data.table import Found, PromptRow, Source, rows_of
from grpo_spmd.untrusted import each_once


def key_and_source(config: DataConfig, eval_set: str | None) -> tuple[str, str]:
    """The config key of a data set, for messages, and its file or hub name; `eval_set` None is the training set."""
    if eval_set is None:
        return "data.train", config.train
    return ("data.eval" if isinstance(config.eval, str) else f"data.eval.{eval_set}"), config.eval_sets[eval_set]


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
        origin = "written by data.prompt_template" if config.prompt_template else f"in column {config.prompt_key!r}"
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
    num_rows: int, config: DataConfig, num_prompts_per_step: int, *, num_dropped: int = 0, eval_set: str | None = None
) -> None:
    """Refuse (ConfigError) a training set that cannot fill one step, and a held-out set without a prompt."""
    key, source = key_and_source(config, eval_set)
    longer = f"{num_dropped} longer than data.max_prompt_tokens={config.max_prompt_tokens}"
    note = f" ({longer} were dropped)" if num_dropped else ""
    if eval_set is None and num_rows < num_prompts_per_step:
        why = f"but one step takes rollout.num_prompts_per_step={num_prompts_per_step}; lower that or add prompts"
        raise ConfigError(f"{key}: {source} has {num_rows} usable prompts{note}, {why}")
    if num_rows == 0:
        raise ConfigError(f"{key}: {source} has 0 usable prompts{note}; add prompts or leave the set out")


def _find_file(path: Path, key: str) -> Source:
    is_lines = path.name.endswith(".jsonl")
    try:
        state = path.stat()
        is_one = stat.S_ISREG(state.st_mode)  # a folder of parquet files and a fifo have no fingerprint
        inputs = [path.suffix, digest_of(path), [] if is_lines else versions_of("pyarrow")] if is_one else None
    except OSError as error:
        raise ConfigError(_unreadable(path, key, error)) from None

    def read() -> Iterator[Found]:
        try:
            yield from _read_jsonl(path) if is_lines else read_parquet(path, key)
            if is_one and stamp(path.stat()) != stamp(state):
                raise ConfigError(f"{key}: {path} was changed while it was read; start again when it is whole")
        except OSError as error:
            raise ConfigError(_unreadable(path, key, error)) from None

    return Source(f"{path}:" if is_lines else f"{path}:row ", read, inputs, state.st_size)


def _unreadable(path: Path, key: str, error: OSError) -> str:
    return f"{key}: cannot read {path}: {error.strerror or error}{looked_for(path)}"


def _read_jsonl(path: Path) -> Iterator[Found]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # some editors mark its start
                record = json.loads(text, object_pairs_hook=each_once)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{where}: not UTF-8 ({error.reason} at byte {error.start})") from None
            except json.JSONDecodeError as error:
                hint = _of_an_array(line)
                raise ConfigError(f"{where}: not valid JSON: {error.msg} at column {error.colno}{hint}") from None
            except (RecursionError, ValueError) as error:  # too deep; a number of more digits than Python reads
                raise ConfigError(f"{where}: not valid JSON: {error}") from None
            if not isinstance(record, dict):
                hint = _of_an_array(line)
                raise ConfigError(f"{where}: expected a JSON object, got {type(record).__name__}{hint}")
            yield number, record, line.removeprefix(codecs.BOM_UTF8)


def _of_an_array(line: bytes) -> str:
    is_one = line.lstrip()[:1] == b"["
    return f"; a JSON array? jsonl has one object a line{_how_to_make_jsonl('in.json')}" if is_one else ""


def _how_to_make_jsonl(source: str) -> str:
    reader = {".json": "json.load(sys.stdin)", ".csv": "csv.DictReader(sys.stdin)"}.get(Path(source).suffix)
    if reader:
        each = f"import csv,json,sys; [print(json.dumps(row)) for row in {reader}]"
        return f': python -c "{each}" < {source} > {Path(source).stem}.jsonl'
    return f"; of the hub: hub:{source}::train" if re.fullmatch(r"[\w.-]+/[\w-]+", source) else ""


def _find_hub(source: str, key: str) -> Source:
    parts = source.split(":", 3)  # a split may hold a colon: train[:100]
    if len(parts) != 4 or not parts[1] or not parts[3]:
        raise ConfigError(f"{key}: a hub data set is hub:REPO:SUBSET:SPLIT (SUBSET may be empty); got {source!r}")
    _, repo, subset, split = parts
    need_datasets(source, key)
    if not is_offline() and not _is_cached(repo):
        check_reachable("datasets", repo, key)
    import datasets

    try:
        dataset = datasets.load_dataset(repo, subset or None, split=split)
    except Exception as error:  # the library raises many types for "not found", "no network", "no such split"
        remedy = "; `python -m grpo_spmd.prefetch` brings it where there is network" if is_offline() else ""
        raise ConfigError(f"{key}: cannot load {source}: {type(error).__name__}: {error}{remedy}") from None
    files = [Path(file["filename"]) for file in getattr(dataset, "cache_files", ())]
    size, inputs = sum(file.stat().st_size for file in files), None
    if files:
        inputs = [source, versions_of("datasets"), [*map(digest_of, files)], str(dataset.features), len(dataset)]

    def read() -> Iterator[Found]:
        return ((number, dict(record), None) for number, record in enumerate(dataset))

    return Source(f"{source}:row ", read, inputs, size)


def _is_cached(repo: str) -> bool:
    """Whether datasets has something of it: what that is, and whether it is enough, only datasets can tell."""
    home = Path(os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser())
    folder = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets")
    return (folder / repo.replace("/", "___")).is_dir() or Path(repo).exists()


def _checked_messages(prompt: Any, where: str, config: DataConfig) -> list[dict[str, Any]]:
    if not isinstance(prompt, list) or not all(isinstance(message, dict) and _is_sound(message) for message in prompt):
        rule = 'must be a string or a list of {"role": text, "content": text} messages'
        raise ConfigError(f"{where}: the prompt in column {config.prompt_key!r} {rule}; got {str(prompt)[:80]}")
    if prompt and config.system_prompt and prompt[0]["role"] != "system":
        return [{"role": "system", "content": config.system_prompt}, *prompt]
    return prompt


def _is_sound(message: dict[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content", 0), str | list | None)


def _is_text(prompt: str | list[dict[str, Any]]) -> bool:
    """False where JSON smuggled in something like "\\ud800", which no tokenizer takes."""
    parts = [prompt] if isinstance(prompt, str) else [value for message in prompt for value in message.values()]
    if all(isinstance(part, str) and part.isascii() for part in parts):  # nearly all are: fast
        return True
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    return re.search(r"[\ud800-\udfff]", text) is None
