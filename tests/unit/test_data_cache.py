"""What a node keeps of a data set: made once, never trusted, told apart by all that it was made
from."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_spmd.checks import inputs
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.data import cache, rows, tokens
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.data.rows import CachedRows, PromptRow, read_rows
from grpo_spmd.data.tokens import Prompts, build_prompts, digests_of
from grpo_spmd.proofs import batch_check
from grpo_spmd.records import Prompt
from tests.unit.test_data import ROLES, _raw_tokenizer, _tokenizer

# Each as JSON text of a line: what would come back as something else after a copy by way of other
# types.
VALUES = (
    '"gr\\u00fc\\u00dfe \\ud83d\\ude00 '
    '\\u2028"', '"\u00e9\u4e2d"', "null", "1", "1.0", "-0.0", "1e400", "NaN", "true",
    "123456789012345678901234567890", "0.1", "[]", "{}", '{"b": {"a": [1, 1.0, null]}, "a": [[], '
                                                         '{}]}', '"\\ud800"',
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's, where also the smallest data set is kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setattr(cache, "SMALL", 0)
    (tmp_path / "tmp").mkdir()
    return tmp_path / "xdg" / "grpo_spmd"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A file each time that its lines are read."""
    result: list[Path] = []
    read = rows._read_jsonl

    def counting(path: Path) -> Any:
        result.append(path)
        return read(path)

    monkeypatch.setattr(rows, "_read_jsonl", counting)
    return result


def _lines(path: Path, *lines: str) -> str:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def _train(tmp_path: Path, number: int = 9) -> DataConfig:
    words = ("a", "b", "c", "hello", "world")
    lines = (
        json.dumps({"prompt": " ".join(words[: 1 + n % 5]), "answer": n}) for n in range(number)
    )
    return DataConfig(train=_lines(tmp_path / "train.jsonl", *lines))


def _entries(folder: Path, kind: str) -> list[Path]:
    return sorted(path for path in folder.glob(f"{kind}-*") if not path.suffix)


class _Counting:
    """A tokenizer that counts the texts it was given."""

    def __init__(self, template: str | None = None) -> None:
        self._inner, self.num_texts = _tokenizer(template), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        self.num_texts += 1 if isinstance(text, str) else len(text)
        return self._inner(text, **options)


# The same as from the file


def test_columns_are_the_objects_that_the_line_has(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    lines = [f'{{"prompt": "a", "value": {value}}}' for value in VALUES]
    config = DataConfig(train=_lines(tmp_path / "t.jsonl", "\ufeff" + lines[0], "", *lines[1:]))
    for _ in range(2):
        result = read_rows(config)
        assert isinstance(result, CachedRows)
        assert [repr(row.columns) for row in result] == [
            repr({"value": json.loads(value)}) for value in VALUES
        ]
        numbers = [1, *range(3, len(VALUES) + 2)]
        assert [row.where for row in result] == [f"{config.train}:{number}" for number in numbers]
        assert [result[-1], result[-2:][0]] == [result[len(VALUES) - 1], result[len(VALUES) - 2]]
        with pytest.raises(IndexError):
            result[len(VALUES)]
    assert len(reads) == 1
    assert oct((folder / _entries(folder, "rows")[0].name).stat().st_mode)[-3:] == "600"
    assert oct(folder.stat().st_mode)[-3:] == "700"


def test_a_small_set_leaves_no_file(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "SMALL", 1 << 20)
    config = _train(tmp_path)
    assert [row.columns for row in read_rows(config)] == [{"answer": n} for n in range(9)]
    assert len(build_prompts(read_rows(config), _tokenizer(), config, 1)) == 9
    assert not folder.exists()


def test_parquet_rows_that_are_no_json_come_back_as_they_are(tmp_path: Path, folder: Path) -> None:
    values = [datetime.datetime(2026, 1, 2, 3), decimal.Decimal("1.50"), b"\0", [("k", 1)], None]
    for value in values:
        kind = pyarrow.map_(pyarrow.string(), pyarrow.int64()) if isinstance(value, list) else None
        table = pyarrow.table({"prompt": ["a"], "value": pyarrow.array([value], kind)})
        pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
        (row,) = read_rows(DataConfig(train=str(tmp_path / "t.parquet")))
        assert repr(row.columns) == repr({"value": value})
    assert len(_entries(folder, "rows")) == len(values)  # all but the last say that they hold none
    (row,) = read_rows(DataConfig(train=str(tmp_path / "t.parquet")))
    assert row.columns == {"value": None}


def test_a_parquet_file_is_read_a_few_rows_at_a_time(
    tmp_path: Path, folder: Path, monkeypatch: Any
) -> None:
    retained = list[int]()
    batches = pyarrow.parquet.ParquetFile.iter_batches

    def counting(*provided: Any, **options: Any) -> Any:
        for batch in batches(*provided, **options):
            retained.append(len(batch))
            yield batch

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counting)
    table = pyarrow.table({"prompt": [f"a {n}" for n in range(5000)], "answer": [*range(5000)]})
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(table, path, row_group_size=3000)
    result = read_rows(DataConfig(train=str(path)))
    assert [(row.prompt, row.columns, row.where) for row in result] == [
        (f"a {n}", {"answer": n}, f"{path}:row {n}") for n in range(5000)
    ]
    assert sum(retained) == 5000
    assert max(retained) <= 1024  # though a group holds three times as many
    assert [*result] == [result[n] for n in range(5000)] == result[:]
    assert result[4998:2:-511] == [result[n] for n in range(4998, 2, -511)]
    assert result[7:3] == []


def test_a_parquet_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"])] * 3, names=["prompt", "x", "x"])
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    with pytest.raises(
        ConfigError, match=r"t\.parquet cannot be read as parquet: it has the column 'x' twice"
    ):
        read_rows(DataConfig(train=str(tmp_path / "t.parquet")))


def test_the_proof_reads_the_same_parquet_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": [f"a {n}" for n in range(9000)]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet", row_group_size=5000)
    wanted = {0, 4095, 4096, 4999, 5000, 8999}
    result = batch_check._read_rows(str(tmp_path / "t.parquet"), wanted)
    assert result == {n: {"prompt": f"a {n}"} for n in wanted}


def test_hub_rows_are_kept_under_the_content_of_their_files(
    tmp_path: Path, folder: Path, monkeypatch: Any
) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "repo").mkdir()
    source = f"hub:{tmp_path / 'repo'}::train"
    for value in (1, 2):
        _lines(tmp_path / "repo" / "train.jsonl", json.dumps({"prompt": "a", "answer": value}))
        for _ in range(2):
            (row,) = read_rows(DataConfig(train=source))
            assert row == PromptRow("a", {"answer": value}, f"{source}:row 0")
        assert len(_entries(folder, "rows")) == value


def test_a_row_that_shows_nothing_waits_for_what_is_said_first(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config = DataConfig(
        train=_lines(
            tmp_path / "t.jsonl", '{"prompt": "a"}', '{"prompt": " "}', '{"prompt": "  "}', "{"
        )
    )
    with pytest.raises(ConfigError, match=r"t\.jsonl:4: not valid JSON"):
        read_rows(config)
    _lines(tmp_path / "t.jsonl", '{"prompt": "a"}', '{"prompt": " "}', '{"prompt": "  "}')
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"t\.jsonl:2: the prompt is nothing but white space"):
            inputs.check_prompts(read_rows(config), config)
        with pytest.raises(ConfigError, match=r"t\.jsonl:2: the prompt is nothing but white space"):
            inputs.check_prompts([*read_rows(config)], config)
    assert len(reads) == 2


# Made once


def test_the_next_start_neither_reads_nor_tokenizes(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config, counting = _train(tmp_path), _Counting()
    initial = [*build_prompts(read_rows(config), counting, config, 1)]
    created = counting.num_texts
    assert created >= 9
    again = build_prompts(read_rows(config), counting, config, 1)
    assert [*again] == initial
    assert all(type(token) is int for prompt in again for token in prompt.token_ids)
    assert (len(reads), counting.num_texts) == (1, created)


def test_checks_are_made_once_and_what_they_warn_of_is_said_again(
    tmp_path: Path,
    folder: Path,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    looked, model = list[Any](), tmp_path / "model"
    model.mkdir()
    _raw_tokenizer().save(str(model / "tokenizer.json"))
    displayed = inputs.check_prompts
    monkeypatch.setattr(
        inputs, "check_prompts", lambda *provided: looked.append(displayed(*provided))
    )
    monkeypatch.setattr(inputs, "num_embeddings", lambda _: 99)
    lines = ('{"prompt": "a", "answer": "1"}', '{"prompt": "b", "answer": null}')
    config = Config(
        run_dir="r",
        model=ModelConfig(path=str(model)),
        data=DataConfig(train=_lines(tmp_path / "t.jsonl", *lines), max_prompt_tokens=2),
        rollout=RolloutConfig(num_prompts_per_step=1),
        rewards=(RewardConfig(name="exact"),),
    )
    answer = []
    for _ in range(2):
        result = inputs.read_and_check_rows(config, (), model)
        answer.append(inputs.find_gold_warnings(config, result, is_held_out=False))
    assert answer[0] == answer[1] != []
    assert (len(reads), len(looked)) == (1, 1)
    shorter = dataclasses.replace(
        config, data=dataclasses.replace(config.data, max_prompt_tokens=1)
    )
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: the prompt has 2 tokens"):  # <bos> a
        inputs.read_and_check_rows(shorter, (), model)


_PROCESS = """
import sys, time
from pathlib import Path
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import DataConfig
from grpo_spmd.data import cache, rows
cache.SMALL = 0
read = rows._read_jsonl
def reading(path):
    with open(sys.argv[2], "a") as file:
        file.write("read ")
    time.sleep(float(sys.argv[3]))
    return read(path)
rows._read_jsonl = reading
cache.cache_folders()
print("ready", flush=True)
sys.stdin.readline()
try:
    print(sum(row.columns["answer"] for row in rows.read_rows(DataConfig(train=sys.argv[1]))))
except ConfigError as error:
    print(error)
"""


def _processes(number: int, train: str, notes: Path, sleep_s: float) -> list[subprocess.Popen[str]]:
    """Ranks of a node that stand before the reading."""
    command = [sys.executable, "-c", _PROCESS, train, str(notes), str(sleep_s)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen(command, **pipes) for _ in range(number)]  # type: ignore[call-overload]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    return ranks


def _go(ranks: Sequence[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def test_ranks_that_start_together_read_once(tmp_path: Path, folder: Path) -> None:
    ranks = _processes(3, _train(tmp_path).train, tmp_path / "notes", 0.5)
    _go(ranks)
    assert [rank.communicate()[0] for rank in ranks] == ["36\n"] * 3  # 0 + 1 + ... + 8
    assert (tmp_path / "notes").read_text() == "read "


def test_what_one_rank_finds_wrong_all_say_and_it_is_read_once(
    tmp_path: Path, folder: Path
) -> None:
    train = _lines(tmp_path / "t.jsonl", '{"prompt": "a", "answer": 1}', "{oops")
    ranks = _processes(3, train, tmp_path / "notes", 0.5)
    _go(ranks)
    answer = (
        f"{train}:2: not valid JSON: Expecting property name enclosed in double quotes at "
        "column 2 (char 1)\n"
    )
    assert [rank.communicate()[0] for rank in ranks] == [answer] * 3
    assert (tmp_path / "notes").read_text() == "read "
    # The next start reads again, and with the line mended there is nothing left of the error.
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: not valid JSON"):
        read_rows(DataConfig(train=train))
    _lines(tmp_path / "t.jsonl", '{"prompt": "a", "answer": 1}')
    assert len(read_rows(DataConfig(train=train))) == 1


def test_an_error_of_another_file_of_that_content_is_not_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two jobs on one node, each with a copy of the file: who waited says what is wrong with its
    own."""

    def refusing(of: str) -> cache.Make:
        def make(_: cache.EntryWriter) -> None:
            created.append(of)
            raise ConfigError(f"{of}2: wrong")

        return make

    created = list[str]()
    monkeypatch.setattr(cache.time, "time_ns", lambda: 0)  # asked before the other was done
    for of in ("a.jsonl:", "b.jsonl:", "a.jsonl:"):
        with pytest.raises(ConfigError, match=f"^{of}2: wrong$"):
            cache.load_or_make("rows", ["content"], 9, refusing(of), of)
    assert created == ["a.jsonl:", "b.jsonl:"]


def test_a_killed_maker_leaves_the_work_to_the_next(tmp_path: Path, folder: Path) -> None:
    train, notes = _train(tmp_path).train, tmp_path / "notes"
    (initial,) = _processes(1, train, notes, 60.0)
    _go([initial])
    while not notes.exists():
        time.sleep(0.01)
    (second,) = _processes(1, train, notes, 0.0)
    _go([second])
    initial.send_signal(signal.SIGKILL)
    initial.communicate()
    assert second.communicate()[0] == "36\n"
    assert notes.read_text() == "read read "


# Never trusted


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 9)


def _flip(position: Callable[[int], int]) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[position(len(content))] ^= 4
        path.write_bytes(content)

    return flip


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": _cut,
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "a bit of the first row": _flip(lambda _: 12),
    "a bit of the arrays": _flip(lambda size: size // 2),
    "a bit of the facts": _flip(lambda size: size - 60),
    "a bit of the length": _flip(lambda size: size - 8),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a link": _link,
    "a fifo": _fifo,
    "writable for all": lambda path: path.chmod(0o666),
    "another entry": lambda path: path.write_bytes(_entries(path.parent, "gold")[0].read_bytes()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["rows", "tokens"])
def test_an_entry_that_is_not_as_it_was_made_is_made_again(
    kind: str, damage: str, tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config, counting = _train(tmp_path), _Counting()
    expected = [*build_prompts(read_rows(config), counting, config, 1)]
    cache.load_or_make("gold", 1, 1, lambda maker: maker.facts.update(said=1))
    (entry,) = _entries(folder, kind)
    created = counting.num_texts
    DAMAGES[damage](entry)
    assert [*build_prompts(read_rows(config), counting, config, 1)] == expected
    assert (len(reads), counting.num_texts > created) == (
        (2, False) if kind == "rows" else (1, True)
    )
    assert entry.is_file()
    assert not entry.is_symlink()
    created = counting.num_texts
    assert [*build_prompts(read_rows(config), counting, config, 1)] == expected
    assert (len(reads), counting.num_texts) == (
        2 if kind == "rows" else 1,
        created,
    )  # the new one is whole


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '[[1], "x"]', "null"])
def test_a_damaged_note_of_a_digest_is_not_used(
    content: str, tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config = _train(tmp_path)
    for _ in range(2):
        assert len(read_rows(config)) == 9
        for note in folder.glob("*.note"):
            note.write_text(content)
    assert len(reads) == 2  # nobody knows any more whether the entry is whole


def test_a_folder_of_somebody_else_or_open_to_others_is_not_used(
    tmp_path: Path, folder: Path
) -> None:
    usable = cache.cache_folders()
    assert usable == [folder, tmp_path / "tmp" / f"grpo_spmd-{os.geteuid()}"]
    folder.chmod(0o777)
    usable[1].rmdir()
    usable[1].symlink_to(folder)
    assert cache.cache_folders() == []


def test_a_folder_of_another_user_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache.cache_folders()[0] == folder
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert folder not in cache.cache_folders()


# Where nothing can be kept


def test_a_full_disk_moves_it_to_the_temporary_folder_with_one_warning(
    tmp_path: Path,
    folder: Path,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sync, config = os.fsync, _train(tmp_path)

    def full(descriptor: int) -> None:
        if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    assert len(read_rows(config)) == len(read_rows(config)) == 9
    assert capfd.readouterr().err.count("No space left on device") == 1
    assert len(reads) == 2  # tried in the first folder, made in the second; not the second time
    assert not _entries(folder, "rows")
    assert not [*folder.glob("*.tmp")]


def test_without_any_folder_each_rank_has_its_own_and_says_so_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _lines(tmp_path / "file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _lines(tmp_path / "tmp" / f"grpo_spmd-{os.geteuid()}")
    config = _train(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert [row.columns["answer"] for row in read_rows(config)] == [*range(9)]
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("LOCAL_RANK", "0")
    prompts = build_prompts(read_rows(config), _tokenizer(), config, 1)
    assert [prompt.columns["answer"] for prompt in prompts] == [*range(9)]
    assert "set XDG_CACHE_HOME" in capfd.readouterr().err


def test_a_place_without_room_is_not_tried(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    assert len(read_rows(_train(tmp_path))) == 9
    assert not _entries(folder, "rows")
    assert "has 0.0 GB free" in capfd.readouterr().err


def test_what_was_not_used_for_a_month_goes(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config = _train(tmp_path)
    build_prompts(read_rows(config), _tokenizer(), config, 1)
    (old,), month = _entries(folder, "rows"), 31 * 86_400
    remaining, retained = folder / "rows-1.x.tmp", _entries(folder, "tokens")[0]
    remaining.touch()
    for path in (remaining, old.with_suffix(".lock"), old.with_suffix(".note"), old, retained):
        os.utime(path, (time.time() - month,) * 2)
    _lines(tmp_path / "other.jsonl", '{"prompt": "a"}')
    assert len(read_rows(DataConfig(train=f"{tmp_path}/other.jsonl"))) == 1
    assert not old.exists()
    assert not old.with_suffix(".note").exists()
    assert not remaining.exists()
    assert retained.exists()  # its note, which says when it was used, is new


def test_a_folder_of_another_host_is_passed_over(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is mapped from there is gone, and the rank with it, as soon as somebody there removes
    it."""
    kinds = {folder: "nfs4"}
    monkeypatch.setattr(cache, "_file_system_of", lambda position: kinds.get(position, "ext4"))
    config = _train(tmp_path)
    build_prompts(read_rows(config), _tokenizer(), config, 1)
    assert f"{folder}: on another host (nfs4)" in capfd.readouterr().err
    assert not _entries(folder, "rows")
    assert (
        len([*(tmp_path / "tmp").glob("grpo_spmd-*/tokens-*")]) == 3
    )  # itself, its note and its lock


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    assert cache._file_system_of(Path("/proc/self")) == "proc"
    assert cache._file_system_of(Path("/nowhere")) == cache._file_system_of(Path("/"))


def test_a_stopped_maker_is_not_waited_for_without_end(
    tmp_path: Path, folder: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _train(tmp_path)
    ranks = _processes(1, config.train, tmp_path / "notes", 60.0)
    _go(ranks)
    try:
        while not (tmp_path / "notes").exists():
            time.sleep(0.01)
        monkeypatch.setattr(cache, "_MAX_WAIT_S", 0.2)
        (its_own,) = folder.glob("rows-*.tmp")
        assert len(read_rows(config)) == 9
        assert len(reads) == 1  # by this process: it took nothing of the other's
        assert its_own.exists()  # nor from it, who may only be slow
    finally:
        ranks[0].kill()
        ranks[0].communicate()


# The fingerprint


def test_content_counts_and_neither_its_path_nor_its_time(
    tmp_path: Path, folder: Path, reads: list[Path]
) -> None:
    config = _train(tmp_path)
    read_rows(config)
    moved = tmp_path / "moved.jsonl"
    Path(config.train).rename(moved)
    os.utime(moved, (1, 1))
    assert read_rows(DataConfig(train=str(moved)))[8].where == f"{moved}:9"
    assert len(reads) == 1
    state = moved.stat()
    moved.write_text(moved.read_text().replace('"answer": 8', '"answer": 7'))
    os.utime(moved, ns=(state.st_atime_ns, state.st_mtime_ns))  # as large and as old as before
    assert read_rows(DataConfig(train=str(moved)))[8].columns == {"answer": 7}
    assert len(reads) == 2


def test_a_digest_is_remembered_only_of_a_file_that_rests(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hashed, read = tmp_path / "file", list[str](), hashlib.file_digest

    def counting(file: Any, kind: str) -> Any:
        hashed.append(kind)
        return read(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", counting)
    path.write_bytes(b"abc")
    expected = hashlib.sha256(b"abc").hexdigest()
    assert [cache.digest_of(path), cache.digest_of(path)] == [expected] * 2
    assert (
        len(hashed) == 2
    )  # written just now: it may be written to again within the same tick of the clock
    monkeypatch.setattr(cache, "_RECENT_S", -1.0)
    assert [cache.digest_of(path), cache.digest_of(path)] == [expected] * 2
    assert len(hashed) == 3
    path.write_bytes(b"abd")
    assert cache.digest_of(path) == hashlib.sha256(b"abd").hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_key": "question"},
        {"prompt_template": "{question}"},
        {"as_chat": True},
        {"system_prompt": "be brief"},
    ],
)
def test_rows_are_those_of_the_keys_that_make_them(
    change: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    config = DataConfig(train=_lines(tmp_path / "t.jsonl", '{"prompt": "a", "question": "b"}'))
    alternative = dataclasses.replace(config, **change)
    initial, second = read_rows(config)[0], read_rows(alternative)[0]
    assert initial.prompt != second.prompt
    assert (read_rows(config)[0], read_rows(alternative)[0]) == (initial, second)
    assert len(_entries(folder, "rows")) == 2


def _names_of(tmp_path: Path, folder: Path, tokenizer: Any, **options: Any) -> list[str]:
    """The entry of tokens that is made, and no other."""
    old = {*_entries(folder, "tokens")}
    config = dataclasses.replace(_train(tmp_path), **options)
    build_prompts(read_rows(config), tokenizer, config, 1)
    return [path.name for path in _entries(folder, "tokens") if path not in old]


def test_tokens_are_those_of_tokenizer_template_limits_and_versions(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(tokenizer: Any = None, **options: Any) -> list[str]:
        return _names_of(tmp_path, folder, tokenizer or _tokenizer(ROLES), **options)

    assert named()
    assert named() == []
    assert named(shuffle=False) == []
    assert named(eval={"x": "y"}) == []
    assert named(max_prompt_tokens=99)
    assert named(on_long_prompt="drop")
    assert named(chat_template_kwargs={"enable_thinking": False})
    assert named(_tokenizer(f"{ROLES} "))
    more = _tokenizer(ROLES)
    more.add_tokens(["lo w"])
    assert named(more)
    other_end = _tokenizer(ROLES)
    other_end.eos_token = "c"  # which a template may write
    assert named(other_end)
    monkeypatch.setattr(tokens, "versions_of", lambda *names: ["another"] * len(names))
    assert named()


def test_a_template_that_writes_the_date_is_of_one_day(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated = "{{ strftime_now('%Y') }}" + ROLES
    today = _names_of(tmp_path, folder, _tokenizer(dated), as_chat=True)
    assert today
    assert _names_of(tmp_path, folder, _tokenizer(dated), as_chat=True) == []
    monkeypatch.setattr(tokens.time, "strftime", lambda *_: "2031-01-01")
    assert _names_of(tmp_path, folder, _tokenizer(dated), as_chat=True)


def test_a_tokenizer_in_python_is_asked_each_time(tmp_path: Path, folder: Path) -> None:
    class Characters:
        chat_template = None

        def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
            ids = [
                [ord(letter) for letter in item]
                for item in ([text] if isinstance(text, str) else text)
            ]
            return {"input_ids": ids[0] if isinstance(text, str) else ids}

    config = _train(tmp_path)
    prompts = build_prompts(read_rows(config), Characters(), config, 1)
    assert [prompt.token_ids for prompt in prompts] == [
        [ord(c) for c in str(prompt.text)] for prompt in prompts
    ]
    assert not _entries(folder, "tokens")


def test_data_that_change_while_they_are_read_are_refused(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, read = _train(tmp_path), rows._read_jsonl

    def reading(path: Path) -> Any:
        yield from read(path)
        with path.open("a") as file:
            file.write('{"prompt": "late"}\n')

    monkeypatch.setattr(rows, "_read_jsonl", reading)
    with pytest.raises(
        ConfigError, match=r"data\.train: .*train\.jsonl was changed while it was read"
    ):
        read_rows(config)
    assert not _entries(folder, "rows")


# Tokens


def test_batches_give_the_tokens_of_one_by_one(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_BATCH", 3)
    text, tokenizer = "hello [world] a", _tokenizer(ROLES)
    chat = [{"role": "user", "content": text}]
    records = [
        text,
        chat,
        "b",
        "c",
        "a a",
        chat,
        [*chat, {"role": "user", "content": "b"}],
        chat,
        chat,
        chat,
        text,
    ]
    config = DataConfig(
        train=_lines(tmp_path / "t.jsonl", *(json.dumps({"prompt": item}) for item in records))
    )
    result = [prompt.token_ids for prompt in build_prompts(read_rows(config), tokenizer, config, 1)]
    options = {"tokenize": True, "add_generation_prompt": True, "return_dict": False}
    assert result == [
        tokenizer.encode(item)
        if isinstance(item, str)
        else tokenizer.apply_chat_template(item, **options)
        for item in records
    ]


def test_a_class_that_encodes_in_its_own_way_is_heard(tmp_path: Path, folder: Path) -> None:
    import transformers

    class Own(transformers.PreTrainedTokenizerFast):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *provided: Any, **options: Any) -> Any:
            turned = (
                text[::-1]
                if isinstance(text, str)
                else [item[::-1] if "c" in item else item for item in text]
            )
            return super()._encode_plus(turned, *provided, **options)

    config = DataConfig(train=_lines(tmp_path / "t.jsonl", '{"prompt": "a"}', '{"prompt": "b c"}'))
    tokenizer = Own(tokenizer_object=_raw_tokenizer(), unk_token="<unk>")
    _, second = build_prompts(read_rows(config), tokenizer, config, 1)
    assert second.token_ids == [1, 13, 12]  # <bos> c b


@pytest.mark.parametrize("position", [0, 1, 2, 3, 7])
def test_the_first_row_that_is_wrong_is_named_cold_and_warm(
    position: int, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_BATCH", 3)
    refused = [{"role": "system", "content": "s"}]
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}a"
    )
    prompts: list[Any] = [[{"role": "user", "content": "b"}] for _ in range(8)]
    prompts[position] = "a b c a b c"  # too long, and before the one that the template refuses
    prompts.append(refused)
    config = DataConfig(
        train=_lines(tmp_path / "t.jsonl", *(json.dumps({"prompt": prompt}) for prompt in prompts)),
        max_prompt_tokens=5,
    )
    expected = (
        f"{config.train}:{position + 1}: the prompt has 7 tokens, over data.max_prompt_tokens=5"
    )
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            build_prompts(read_rows(config), _tokenizer(template), config, 1)
        assert str(caught.value).startswith(expected)
    dropping = dataclasses.replace(config, on_long_prompt="drop")
    for _ in range(2):
        with pytest.raises(
            ConfigError,
            match=r"t\.jsonl:9: the chat template refused the messages: .*no system here",
        ):
            build_prompts(read_rows(dropping), _tokenizer(template), dropping, 1)
    assert not _entries(folder, "tokens")


def test_threads_of_the_library_are_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Tokenizer:
        def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
            seen.append(os.environ.get("TOKENIZERS_PARALLELISM"))
            return {"input_ids": [1] if isinstance(text, str) else [[1]]}

    for requests, expected in ((None, "false"), ("true", "true")):
        monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        if requests is not None:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", requests)
        build_prompts([PromptRow("a", {}, "x:1")], Tokenizer(), DataConfig(train="x.jsonl"), 1)
        assert {*seen} == {expected}
        assert os.environ.get("TOKENIZERS_PARALLELISM") == requests
        seen.clear()


def test_checkpoints_know_the_data_as_they_did(tmp_path: Path, folder: Path) -> None:
    lines = (
        '{"prompt": "a", "z": 1, "answer": [1.0, null]}',
        '{"prompt": "a b c"}',
        '{"prompt": "b", "answer": "é"}',
    )
    train = _lines(tmp_path / "t.jsonl", *lines)
    config = DataConfig(train=train, max_prompt_tokens=3, on_long_prompt="drop", eval={"x": train})
    # by hand: <bos> is 1, a 11, b 12; rows 0 and 2 are left
    tokens_values = hashlib.sha256(array("q", [2, 1, 11, 2, 1, 12])).hexdigest()
    columns = [{"answer": [1.0, None], "z": 1}, {"answer": "é"}]
    for eval_set, ids in ((None, (None, None)), ("x", ([1, 11], [1, 12]))):
        rows_values = hashlib.sha256()
        for number, local, token_ids in zip((0, 2), columns, ids, strict=True):
            rows_values.update(json.dumps([number, local, token_ids]).encode())
        for _ in range(2):
            result = build_prompts(read_rows(config, eval_set), _tokenizer(), config, 1, eval_set)
            assert isinstance(result, Prompts)
            assert digests_of(result, with_tokens=eval_set is not None) == (
                tokens_values,
                rows_values.hexdigest(),
            )
        listed: list[Prompt] = [*result]
        assert digests_of(listed, with_tokens=eval_set is not None) == (
            tokens_values,
            rows_values.hexdigest(),
        )
    assert len(_entries(folder, "tokens")) == 2


def test_the_stream_is_in_the_order_that_a_list_was_shuffled_in() -> None:
    prompts = [Prompt(row, row, [row], "", {}) for row in range(1000)]
    expected = list(range(1000))
    random.Random("5/0").shuffle(expected)
    assert [
        prompt.row for prompt in PromptStream(prompts, seed=5, shuffle=True).take(1000)
    ] == expected
