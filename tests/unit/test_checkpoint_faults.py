"""What becomes of a damaged checkpoint, without torch: hundreds of draws against its manifest, and
the folders around it.

Real runs that are killed are in test_resume.py, and by the hundred in
benchmarks/survival/faults.py.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_spmd.checkpoint.manifest import (
    CheckpointError,
    NewerFormatError,
    read_manifest,
    read_trainer,
    verify_checkpoint,
    verify_files,
    write_manifest,
)
from grpo_spmd.checkpoint.run_dir import (
    Candidates,
    Start,
    begin_in,
    checkpoint_path,
    find_candidates,
    is_same_launch,
    list_checkpoints,
    put_in_place,
    refuse_in_use,
    remove_old,
    set_aside,
    step_of,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.observe.metrics_file import cut_metrics

_FILES = (
    "state/shard_00001.safetensors",
    "state/shard_00002.safetensors",
    "model/config.json",
    "trainer.json",
)
_NUM_DRAWS = 40  # of each damage to each file
Damage = Callable[[Path, random.Random], None]


def trainer_of(step: int) -> dict[str, Any]:
    run_values = {
        "model_fingerprint": "1" * 64,
        "data_fingerprint": "2" * 64,
        "model_path": "m",
        "dtype": "float32",
    }
    config = {
        "seed": 0,
        "model.num_replicas": 1,
        "data.eval": {},
        "loss.dual_clip": None,
        "data.train": "a.jsonl",
    }
    counts = {
        "position": 4 * step,
        "num_updates": step,
        "skipped_in_a_row": 0,
        "mismatch_scale": [1e-7, 1e-6],
    }
    return {"format": 1, "step": step, **counts, **run_values, "config": config, "world_size": 2}


def make_checkpoint(
    run_dir: Path,
    step: int,
    content: int = 0,
    position: Callable[[Path, Path], object] = Path.rename,
) -> Path:
    """A complete one. Its shards are noise, since nothing here looks into them."""
    folder, noise = checkpoint_path(run_dir, step), random.Random(f"{step} {content}")
    temporary = folder.with_name(folder.name + ".tmp")
    for name in _FILES:
        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
        (temporary / name).write_bytes(noise.randbytes(3000))
    (temporary / "model/config.json").write_text('{"model_type": "qwen3"}')
    (temporary / "trainer.json").write_text(json.dumps(trainer_of(step)))
    write_manifest(temporary, {})
    position(temporary, folder)
    return folder


@contextmanager
def damaged(folder: Path, name: str, damage: Damage, seed: int) -> Iterator[None]:
    """With one file of the checkpoint damaged; whole again afterwards."""
    old = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    damage(folder / name, random.Random(f"{name} {seed}"))
    yield
    if (folder / name).is_dir():
        (folder / name).rmdir()
    (folder / name).write_bytes(old[folder / name])
    for path in folder.rglob("*"):
        if path.is_file() and path not in old:
            path.unlink()


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def zero(path: Path, rng: random.Random) -> None:
    """A range of bytes that were not zero before."""
    content = bytearray(path.read_bytes())
    start = rng.choice([position for position, byte in enumerate(content) if byte])
    end = min(len(content), start + rng.choice((1, 512, len(content))))
    content[start:end] = bytes(end - start)
    path.write_bytes(content)


def lengthen(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(rng.randint(1, 100)))


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def add(path: Path, rng: random.Random) -> None:
    path.with_name(f"shard_{rng.randrange(10**5):05d}.safetensors.new").touch()


def become_a_folder(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [truncate, flip, zero, lengthen, remove, add, become_a_folder])
def test_damage_to_any_file_is_found(tmp_path: Path, damage: Damage) -> None:
    folder, says = (
        make_checkpoint(tmp_path, 3),
        r"step_000003: .*(is damaged|missing|should have|not in manifest|cannot read)",
    )
    for name in _FILES:
        for draw in range(_NUM_DRAWS):
            with damaged(folder, name, damage, draw), pytest.raises(CheckpointError, match=says):
                verify_checkpoint(folder)
    verify_checkpoint(folder)


@pytest.mark.parametrize("damage", [truncate, flip, zero, remove, become_a_folder])
def test_a_damaged_manifest_is_found_or_says_the_same(tmp_path: Path, damage: Damage) -> None:
    """A flipped bit may turn a blank into another one, or a 1 of the format into a 0; nothing else
    may pass."""
    folder, num_found = make_checkpoint(tmp_path, 3), 0
    facts = read_manifest(folder)
    for draw in range(4 * _NUM_DRAWS):
        with damaged(folder, "manifest.json", damage, draw):
            try:
                verify_checkpoint(folder)
                assert damage is flip
                assert read_manifest(folder) == facts
            except CheckpointError:
                num_found += 1
    assert num_found > 0.7 * 4 * _NUM_DRAWS
    verify_checkpoint(folder)


NO_MANIFESTS = (
    *(
        "",
        "null",
        "[]",
        "{}",
        '{"format": 1}',
        '{"format": 1, "files": [1]}',
        '{"format": "1", "files": {}}',
    ),
    *('{"format": 1, "files": {"trainer.json": {"bytes": 1}}}', "[" * 100_000, '"\ud800"'),
)


@pytest.mark.parametrize("manifest", NO_MANIFESTS)
def test_what_is_no_manifest_is_damage(tmp_path: Path, manifest: str) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "manifest.json").write_bytes(manifest.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json"])
def test_a_later_format_is_told_from_damage(tmp_path: Path, name: str) -> None:
    """It must not be passed over: the run would go on from an older one, and overwrite what the
    later version has
    done."""
    folder = make_checkpoint(tmp_path, 3)
    later = json.loads((folder / name).read_text()) | {"format": 3}
    (folder / name).write_text(json.dumps(later))
    if name == "trainer.json":
        write_manifest_anew(folder)
    with pytest.raises(NewerFormatError, match="format 3, this one reads up to 2"):
        verify_checkpoint(folder)


def write_manifest_anew(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    write_manifest(folder, {})


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
def test_each_file_is_in_exactly_one_share(tmp_path: Path, num_shares: int) -> None:
    """The ranks verify a share each: a file that none of them reads would be a file whose damage
    nobody sees."""
    folder = make_checkpoint(tmp_path, 3)
    for name in read_manifest(folder):
        message = []
        with damaged(folder, name, flip, 0):
            for fraction in range(num_shares):
                try:
                    verify_files(folder, fraction, num_shares)
                except CheckpointError as error:
                    message.append(str(error))
        assert len(message) == 1
        assert name in message[0]
    verify_checkpoint(folder)


def test_the_order_in_which_a_start_tries_them(tmp_path: Path) -> None:
    """By number, not by name; nothing that is half written, set aside, or somebody's."""
    steps = [9, 10, 999_999, 1_000_000, 2]
    for step in steps:
        make_checkpoint(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    for second in ("step_000077.tmp", "step_000078.aside", "step_79", "step_000080 (copy)", "best"):
        (checkpoints / second).mkdir()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == sorted(steps)
    assert list_checkpoints(tmp_path / "nowhere") == []


def test_the_newest_good_one_is_what_is_left_of_many(tmp_path: Path) -> None:
    """Whichever are damaged, going back from the newest one finds the newest good one."""
    rng = random.Random(0)
    for draw in range(30):
        run_dir = tmp_path / str(draw)
        good = []
        for step in range(1, 6):
            folder = make_checkpoint(run_dir, step)
            if rng.random() < 0.6:
                rng.choice((truncate, flip, remove))(folder / rng.choice(_FILES), rng)
            else:
                good.append(step)
        result = None
        for folder in list_checkpoints(run_dir)[::-1]:
            try:
                verify_checkpoint(folder)
                result = step_of(folder)
                break
            except CheckpointError:
                continue
        assert result == max(good, default=None)


def test_a_step_that_was_run_again_takes_the_place_of_its_first_run(tmp_path: Path) -> None:
    """And never in a way that leaves neither: the one before steps aside first."""
    checkpoint = make_checkpoint(tmp_path, 3, 1, put_in_place)
    old = (checkpoint / _FILES[0]).read_bytes()
    second = make_checkpoint(tmp_path, 3, 2, put_in_place)
    verify_checkpoint(second)
    assert (second / _FILES[0]).read_bytes() != old
    aside = second.with_name("step_000003.aside")
    assert (aside / _FILES[0]).read_bytes() == old
    assert list_checkpoints(tmp_path) == [second]
    make_checkpoint(tmp_path, 3, 3, put_in_place)  # what was set aside before gives way
    assert (aside / _FILES[0]).read_bytes() != old
    verify_checkpoint(aside)


def test_set_aside_is_seen_by_no_start(tmp_path: Path) -> None:
    checkpoint, gone = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 6)
    set_aside(gone)
    assert list_checkpoints(tmp_path) == [checkpoint]
    verify_checkpoint(gone.with_name("step_000006.aside"))


@pytest.mark.parametrize(
    ("keep", "best", "remaining"),
    [
        (2, None, [9, 12]),
        (2, 3, [3, 9, 12]),
        (2, 12, [9, 12]),
        (1, 6, [6, 12]),
        (9, None, [3, 6, 9, 12]),
    ],
)
def test_remove_old(tmp_path: Path, keep: int, best: int | None, remaining: list[int]) -> None:
    for step in (3, 6, 9, 12):
        make_checkpoint(tmp_path, step)
    remove_old(tmp_path, keep, best)
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == remaining


def test_what_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (3, 6, 9, 12):
        make_checkpoint(tmp_path, step)
    removed = []

    def rmtree(folder: Path, ignore_errors: bool = False) -> None:
        removed.append(step_of(folder))
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove_old(tmp_path, 2, None)
    assert removed == [3, 6]  # the second one is tried all the same
    assert len(list_checkpoints(tmp_path)) == 4


def test_a_run_that_goes_on_has_its_start_as_the_newest_checkpoint(tmp_path: Path) -> None:
    for step in (3, 6, 9, 12):
        make_checkpoint(tmp_path, step)
    half = tmp_path / "checkpoints" / "step_000015.tmp"
    (half / "state").mkdir(parents=True)
    begin_in(tmp_path, Start(6, checkpoint_path(tmp_path, 6), goes_on=True))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000003", "step_000006", "step_000009.aside", "step_000012.aside"]
    verify_checkpoint(tmp_path / "checkpoints" / "step_000009.aside")  # it may be wanted


def test_a_run_that_starts_from_another_ones_checkpoint_has_it_too(tmp_path: Path) -> None:
    """Else a crash before its first save would begin it anew, from the model."""
    theirs = make_checkpoint(tmp_path / "other", 6)
    begin_in(tmp_path / "run", Start(6, theirs))
    [local] = list_checkpoints(tmp_path / "run")
    assert local.name == "step_000006"
    verify_checkpoint(local)
    assert (local / "trainer.json").samefile(
        theirs / "trainer.json"
    )  # a link: no second copy of the bytes
    set_aside(theirs)
    shutil.rmtree(theirs.with_name("step_000006.aside"))
    verify_checkpoint(local)


def test_a_checkpoint_under_another_name_takes_its_place(tmp_path: Path) -> None:
    good = make_checkpoint(tmp_path, 6)
    named = good.rename(good.with_name("step_000006.aside"))
    (make_checkpoint(tmp_path, 6) / "trainer.json").write_text("other")
    begin_in(tmp_path, Start(6, named, goes_on=True))
    assert list_checkpoints(tmp_path) == [good]
    verify_checkpoint(good)


def test_a_new_run_is_not_begun_where_another_one_was(tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "config.yaml", "checkpoints/step_000900"):
        run_dir = tmp_path / name.replace("/", "_")
        if name.startswith("checkpoints"):
            make_checkpoint(run_dir, 900)
        else:
            run_dir.mkdir()
            (run_dir / name).write_text("")
        with pytest.raises(ConfigError, match=f"holds a {name} already"):
            begin_in(run_dir, Start())
    begin_in(tmp_path / "new", Start())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["logs"]


def test_an_attempt_that_failed_before_its_first_step_does_not_hold_the_folder(
    tmp_path: Path,
) -> None:
    """Nothing of it is lost: its logs are written on, the rest is kept beside, of the second
    failure too."""
    for number in (1, 2):
        begin_in(tmp_path, Start())
        (tmp_path / "rollouts").mkdir()
        (tmp_path / "token_scores").mkdir()
        looked_at = "timeline.jsonl", "tokenizer.json", "token_scores/step_000001.jsonl"
        for name in (
            "config.yaml",
            "metrics.jsonl",
            "rollouts/step_000001.jsonl",
            "logs/rank_0.log",
            *looked_at,
        ):
            with (tmp_path / name).open("a") as file:
                file.write(f"{number}" if name != "metrics.jsonl" else "")
    refuse_in_use(tmp_path)
    assert find_candidates(tmp_path, "never", False) == Candidates([], False)
    assert (tmp_path / "logs/rank_0.log").read_text() == "12"
    assert (tmp_path / "config.yaml").read_text() == "2"
    assert {
        path.relative_to(tmp_path / "failed_1").as_posix()
        for path in (tmp_path / "failed_1").rglob("*")
    } == {
        "config.yaml",
        "rollouts",
        "rollouts/step_000001.jsonl",
        "token_scores",
        *looked_at,
    }
    (tmp_path / "metrics.jsonl").write_text("{}\n")  # one step was trained: another run's folder
    for refused in (lambda: refuse_in_use(tmp_path), lambda: begin_in(tmp_path, Start())):
        with pytest.raises(ConfigError, match=r"holds a metrics\.jsonl already"):
            refused()


@pytest.mark.parametrize(
    ("old", "after", "same"),
    [
        ({}, {}, False),  # without torchrun nothing starts a process again
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "a"}, True),
        ({"TORCHELASTIC_RUN_ID": "a"}, {"TORCHELASTIC_RUN_ID": "b"}, False),
        (
            {"TORCHELASTIC_RUN_ID": "none"},
            {"TORCHELASTIC_RUN_ID": "none"},
            True,
        ),  # the same parent process
        (
            *[
                {
                    "TORCHELASTIC_RUN_ID": "none",
                    "GROUP_WORLD_SIZE": "2",
                    "MASTER_ADDR": "n",
                    "MASTER_PORT": "1",
                }
            ]
            * 2,
            True,
        ),
    ],
)
def test_which_launch_began_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: dict[str, str],
    after: dict[str, str],
    same: bool,
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in old.items():
        monkeypatch.setenv(name, value)
    begin_in(tmp_path, Start())
    for name, value in after.items():
        monkeypatch.setenv(name, value)
    assert is_same_launch(tmp_path) == same
    assert not is_same_launch(tmp_path / "elsewhere")


def test_where_a_restart_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By (checkpoint.resume, restart): which checkpoints are tried, the best first; in a folder
    that a launch of the
    same id has used."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "fixed")
    run_dir, theirs = tmp_path / "run", make_checkpoint(tmp_path / "other", 7)

    def tried(resume: str, is_restart: bool) -> list[str]:
        return find_candidates(run_dir, resume, is_restart).folders

    # a new folder
    for is_restart in (False, True):  # before the run has begun both are the same
        assert tried("never", is_restart) == tried("auto", is_restart) == []
        assert tried(str(theirs), is_restart) == [str(theirs)]
    begin_in(run_dir, Start())
    (run_dir / "config.yaml").touch()
    assert tried("never", True) == []  # a crash before the first save
    assert tried(str(theirs), True) == [str(theirs)]  # a crash before its checkpoint came here
    for step in (3, 6):
        make_checkpoint(run_dir, step)
    newest_first = [str(checkpoint_path(run_dir, step)) for step in (6, 3)]
    assert (
        tried("never", True)
        == tried(str(theirs), True)
        == tried(newest_first[1], True)
        == tried("auto", True)
        == newest_first
    )
    # another launch of the same id
    for resume in ("never", str(theirs)):
        for is_restart in (
            False,
            True,
        ):  # a refusal stays one, also where torchrun starts the ranks again
            with pytest.raises(ConfigError, match=r"holds a config\.yaml already"):
                tried(resume, is_restart)
    assert tried(newest_first[1], False) == newest_first[1:]
    assert (
        tried(newest_first[1], True) == newest_first[1:]
    )  # a crash before the folder was put back
    assert tried("auto", False) == newest_first


def test_metrics_are_cut_at_any_byte(tmp_path: Path) -> None:
    """A kill may cut the last line anywhere, also within a character of two bytes; whole lines
    before the step stay,
    byte by byte."""
    lines = [
        json.dumps({"step": step, "name": "é", "value": step / 3}, ensure_ascii=False).encode()
        + b"\n"
        for step in range(1, 7)
    ]
    content, path = b"".join(lines), tmp_path / "metrics.jsonl"
    for length in range(len(b"".join(lines[:4])), len(content) + 1):
        for num_steps in (2, 6):
            path.write_bytes(content[:length])
            cut_metrics(path, num_steps)
            num_whole = content[:length].count(b"\n")
            # The last line is whole without its line break too: it lacks nothing.
            num_whole += any(length == len(b"".join(lines[: i + 1])) - 1 for i in range(6))
            assert path.read_bytes() == b"".join(lines[: min(num_whole, num_steps)])


def test_metrics_after_steps_that_were_run_twice(tmp_path: Path) -> None:
    """A run that a kill has left without a cut: the later line of a step counts."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        "".join(
            json.dumps({"step": step, "of": of}) + "\n"
            for of, step in [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3)]
        )
    )
    cut_metrics(path, 3)
    assert [json.loads(line)["of"] for line in path.read_text().splitlines()] == [1, 2, 2]
    cut_metrics(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


def test_trainer_of_a_good_checkpoint(tmp_path: Path) -> None:
    assert read_trainer(make_checkpoint(tmp_path, 3)) == trainer_of(3)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("critic", {}, "critic"),
        ("critic", {"num_updates": 2**53, "skipped_in_a_row": 0}, "updates in 3 steps"),
        ("num_updates", 2**53, "9007199254740992 updates in 3 steps, which no run makes"),
    ],
)
def test_counts_that_no_run_has_are_damage(
    tmp_path: Path, field: str, value: Any, message: str
) -> None:
    folder = make_checkpoint(tmp_path, 3)
    (folder / "trainer.json").write_text(json.dumps(trainer_of(3) | {field: value}))
    write_manifest_anew(folder)
    with pytest.raises(CheckpointError, match=rf"trainer\.json is damaged: .*{message}"):
        verify_checkpoint(folder)
