"""Damaged checkpoints, and disks that run full or turn read-only."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from benchmarks.support.report import Row
from benchmarks.survival.faults.lab import AT_ONCE, EVERY, Lab, Launch, Run, metrics_of
from benchmarks.survival.faults.rows import row
from grpo_spmd.checkpoint.manifest import CheckpointError, read_manifest, verify_checkpoint
from grpo_spmd.checkpoint.run_dir import list_checkpoints
from tests.support.models import make_model

# Files of a checkpoint


def _flip(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def _zero(path: Path, rng: random.Random) -> None:
    """A range of bytes that were not all zero: a hole that a crashed file system leaves."""
    content = bytearray(path.read_bytes())
    changed = bytearray(content)
    while changed == content:
        start, length = rng.randrange(len(content)), rng.choice((1, 512, 4096, len(content)))
        end = min(len(content), start + length)
        changed[start:end] = bytes(end - start)
    path.write_bytes(changed)


def _empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def _remove(path: Path, rng: random.Random) -> None:
    path.unlink()


def _add(path: Path, rng: random.Random) -> None:
    path.with_name(f"{rng.randrange(10**6)}.safetensors").write_bytes(path.read_bytes())


def _later_format(path: Path, rng: random.Random) -> None:
    """As a later version would write it: with a manifest that fits."""
    folder = path.parent
    trainer, manifest = (
        json.loads((folder / name).read_text()) for name in ("trainer.json", "manifest.json")
    )
    manifest["format"] = trainer["format"] = rng.randint(2, 10**6)
    (folder / "trainer.json").write_text(json.dumps(trainer))
    (folder / "manifest.json").write_text(json.dumps(manifest))


_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "truncated": _truncate,
    "one bit flipped": _flip,
    "zeroed": _zero,
    "emptied": _empty,
    "removed": _remove,
    "added": _add,
}


def corruption(lab: Lab, num: int) -> Iterator[Row]:
    """Of files of a checkpoint: first many draws against its manifest, then some through a real
    start."""
    good = list_checkpoints(lab.reference.run_dir)[-1]
    facts = read_manifest(good)
    for damage, do in _DAMAGES.items():
        undetected, harmless, tried = [], 0, 0
        for name in sorted({*facts, "manifest.json"}):
            for draw in range(num):
                copy = lab.root / "damaged"
                shutil.copytree(good, copy)
                do(copy / name, random.Random(f"{damage} {name} {draw}"))
                tried += 1
                try:
                    verify_checkpoint(copy)
                    # a blank turned into another one, say: all that it stands for is there
                    if read_manifest(copy) == facts:
                        harmless += 1
                    else:
                        undetected.append(f"{name}, draw {draw}")
                except CheckpointError:
                    pass
                shutil.rmtree(copy)
        notes = f"{len(facts) + 1} files" + (
            f"; {harmless} not seen in manifest.json, which still says the same" if harmless else ""
        )
        yield row(f"checkpoint: a file {damage}", tried, undetected, "-", notes)
    yield from _corruption_through_a_start(lab)


def _corruption_through_a_start(lab: Lab) -> Iterator[Row]:
    stopped = lab.run("stopped")  # with checkpoints after 6 and 9 steps, and perhaps the best one
    stopped.plan(0, where="weight_sync", count=3 * EVERY + 2)
    Launch(stopped, 2).wait()
    shard, rng = "state/shard_00002.safetensors", random.Random(0)

    def go_on(
        case: str, damage: Callable[[Path], None], selection: int, *overrides: str
    ) -> tuple[Run, Launch]:
        run = stopped.copy("damaged_" + re.sub("[^a-z]+", "_", case))
        for checkpoint in list_checkpoints(run.run_dir)[selection:]:
            damage(checkpoint)
        launch = Launch(run, 2, "checkpoint.resume=auto", *overrides)
        launch.wait()
        return run, launch

    def falls_back(case: str, damage: Callable[[Path], None]) -> str:
        run, launch = go_on(case, damage, -1)
        if launch.wait() or "passed over" not in launch.output:
            return f"{case}: exit code {launch.wait()}, {launch.output[-200:]}"
        differences = run.differences()
        return f"{case}: {'; '.join(differences)}" if differences else ""

    def refuses(case: str, damage: Callable[[Path], None], says: str, *overrides: str) -> str:
        run, launch = go_on(case, damage, 0, *overrides)
        line = next((line for line in launch.output.splitlines() if line.startswith("error: ")), "")
        retained = metrics_of(run.run_dir) == metrics_of(stopped.run_dir)
        # the rank's; torchrun's own is 1 whatever it was
        good = says in line and retained and re.search(r"exitcode *: 2\b", launch.output)
        return "" if good else f"{case}: {launch.output[-300:]}"

    def nothing(_: Path) -> None:
        pass

    second = make_model(lab.root / "other", "qwen3", tied=True, seed=1)
    fall_backs: dict[str, Callable[[Path], None]] = {
        "shard, a bit flipped": lambda c: _flip(c / shard, rng),
        "trainer.json zeroed": lambda c: _zero(c / "trainer.json", rng),
        "manifest.json removed": lambda c: _remove(c / "manifest.json", rng),
        "a file of model/ truncated": lambda c: _truncate(c / "model" / "config.json", rng),
    }
    refusals: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
        "all of them damaged": (lambda c: _flip(c / shard, rng), "cannot be loaded", ()),
        "a later format": (lambda c: _later_format(c / "trainer.json", rng), "newer", ()),
        "another model": (nothing, "another model", (f"model.path={second}",)),
        "another seed": (nothing, "seed", ("seed=1",)),
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        fell = list(pool.map(lambda case: falls_back(case, fall_backs[case]), fall_backs))
        refused = list(
            pool.map(lambda case: refuses(case, *refusals[case][:2], *refusals[case][2]), refusals)
        )
    for fault, outcomes, expected, cases in (
        ("newest checkpoint damaged, real start", fell, "fell back to the one before", fall_backs),
        ("no usable checkpoint, real start", refused, "one line and exit code 2", refusals),
    ):
        problems = [problem for problem in outcomes if problem]
        yield row(fault, len(outcomes), problems, "-", f"{expected}: {', '.join(cases)}")


# Disks


def disk(lab: Lab, num: int) -> Iterator[Row]:
    """The checkpoints, or the whole run folder, on a small disk that runs full or turns read-only
    at the second
    save."""
    probe = lab.root / "probe"
    probe.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(probe)], capture_output=True
    ).returncode:
        yield row("disk full or read-only", 0, [], "-", "skipped: mounting a small disk needs root")
        return
    subprocess.run(["umount", str(probe)], check=True)
    newest = list_checkpoints(lab.reference.run_dir)[-1]
    state_kib = sum(path.stat().st_size for path in (newest / "state").iterdir()) // 1024 + 1
    fill = "dd if=/dev/zero of={disk}/filler bs=1k 2>/dev/null; truncate -s -{left}K {disk}/filler"
    for fault, full, command, last_code in (
        ("disk full before a save", False, fill.format(disk="{disk}", left=64), 1),
        (
            "disk full in the middle of a save",
            False,
            fill.format(disk="{disk}", left=state_kib + 16),
            1,
        ),
        (
            "disk full, free again after a second",
            False,
            fill.format(disk="{disk}", left=64) + "; (sleep 1; rm {disk}/filler) &",
            0,
        ),
        ("disk of the whole run folder full", True, fill.format(disk="{disk}", left=64), 1),
        ("folder read-only", False, "mount -o remount,ro {disk}", 1),
    ):
        run = lab.run("disk_" + re.sub("[^a-z]+", "_", fault))
        with _small_disk(run.run_dir if full else run.run_dir / "checkpoints") as disk_folder:
            run.plan(0, where="checkpoint", count=2 * EVERY, do=command.format(disk=disk_folder))
            launch = Launch(run, 2)
            code, problems = launch.wait(), []
            subprocess.run(["mount", "-o", "remount,rw", str(disk_folder)], check=True)
            message = "not saved" in launch.output or "No space left" in launch.output
            halves = [path.name for path in (run.run_dir / "checkpoints").glob("*.tmp")]
            checkpoints = list_checkpoints(run.run_dir)
            if code != last_code:
                problems.append(f"exit code {code}: {launch.output[-200:]}")
            if not message:
                problems.append("not a word about it")
            if halves and not full:
                problems.append(f"{halves} left")
            if not checkpoints:
                problems.append("no checkpoint left")
            for checkpoint in checkpoints:
                try:
                    verify_checkpoint(checkpoint)
                except CheckpointError as error:
                    problems.append(str(error))
            (disk_folder / "filler").unlink(missing_ok=True)
            again = Launch(run, 2, "checkpoint.resume=auto") if code else launch
            if again.wait():
                problems.append(f"does not go on: {again.output[-300:]}")
            elif differences := run.differences():
                problems.append("; ".join(differences))
            kept_names = ", ".join(checkpoint.name for checkpoint in checkpoints)
            yield row(
                fault,
                1,
                problems[:1],
                f"exit code {code}",
                "; ".join([*problems[1:], f"kept {kept_names}, went on to the bit"]),
            )


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
