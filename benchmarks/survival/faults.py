"""The fault table: what a run was put through, how often, and how often it came out as if nothing had happened. Real processes and kills.

    benchmarks/run.sh faults [--json FILE] [--only NAME ...] [--num N]        about an hour on 2 cores
A row a fault: how many were tried, survived and lost, the worst figure, and what went wrong where something did. Rows are printed and
written as they end. A run of two ranks survives a kill if the newest checkpoint is whole, at most one interval of steps was lost (and
what was finished while a save was under way), and it ends with the same state, metrics and rollouts, to the bit, as the run that nobody
touched. --num: the number of random kills (100) and of draws a kind of damage; kills a phase and repeats are a tenth of it. The exit
code is 1 if anything was lost.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, report
from benchmarks.survival.faults_run import EVERY, NUM_PROMPTS, Lab, Launch, Run, Strike, kill_all_launches, metrics_of, wait_until_gone
from benchmarks.survival.faults_worker import PHASES, START, WRITE_POINTS, has_rank
from grpo_spmd.manifest import CheckpointError, list_checkpoints, read_manifest, verify_checkpoint
from tests.support.models import make_model, write_config
from tests.support.processes import torchrun

_AT_ONCE = 2  # runs side by side: half of a start waits for something
_KILLS_A_RUN = 5
_START_LIMIT_S = 180.0  # for a run to come to the next place of a kill
_TIMEOUT_S = 10.0  # watchdog.timeout_s of runs with a rank that sleeps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="append one JSON object a row to this file")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="parts to run")
    parser.add_argument("--num", type=int, default=100)
    args = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    lost = 0
    try:
        with tempfile.TemporaryDirectory(prefix="grpo_spmd_faults_", ignore_cleanup_errors=True) as root:
            lab = Lab(Path(root))
            for part in args.only or PARTS:
                for row in PARTS[part](lab, args.num):
                    report("faults", [row], args.json)
                    lost += row["lost"]
    finally:
        kill_all_launches()
    sys.exit(1 if lost else 0)


def _end(*_: Any) -> None:
    kill_all_launches()  # first: threads wait for them
    sys.exit(1)


def _row(fault: str, tried: int, problems: list[str], worst: str, notes: str = "") -> Row:
    """A problem is a fault that was not survived."""
    said = "; ".join(dict.fromkeys(problems[:3]))
    return {
        "fault": fault,
        "tried": tried,
        "survived": tried - len(problems),
        "lost": len(problems),
        "worst": worst,
        "notes": "; ".join(note for note in (said, notes) if note) or "-",
    }


def _row_of_strikes(fault: str, strikes: list[Strike], notes: str = "") -> Row:
    lost = [strike.lost_steps for strike in strikes if strike.lost_steps is not None]
    in_save = sum(strike.in_save for strike in strikes)
    worst = f"{max(lost, default=0)} steps lost, interval {EVERY}"
    problems = ["; ".join(strike.problems) for strike in strikes if strike.problems]
    return _row(fault, len(strikes), problems, worst, "; ".join(note for note in (f"{in_save} with a save half written", notes) if note))


def _side_by_side(jobs: Sequence[Callable[[], list[Strike]]]) -> list[Strike]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [strike for strikes in pool.map(lambda job: job(), jobs) for strike in strikes]


# Kills at random times


class _Budget:
    """Kills that are left, for runs side by side."""

    def __init__(self, num: int) -> None:
        self._left, self._lock, self._num_runs = num, threading.Lock(), 0

    def take(self) -> bool:
        with self._lock:
            if self._left <= 0:
                return False
            self._left -= 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self._left += 1

    def next_run(self) -> int | None:
        with self._lock:
            self._num_runs += 1
            return self._num_runs if self._left > 0 else None


def sigkill_random(lab: Lab, num: int) -> Iterator[Row]:
    """Also while starting and inside a save."""
    assert lab.reference
    for fault, everything, count in (
        ("SIGKILL of a random rank, torchrun --max-restarts", False, num),
        ("SIGKILL of torchrun and all ranks, checkpoint.resume: auto", True, max(1, num // 4)),
    ):
        budget = _Budget(count)

        def runs(budget: _Budget = budget, everything: bool = everything) -> list[Strike]:
            strikes: list[Strike] = []
            while (number := budget.next_run()) is not None:
                name = f"random_{'all' if everything else 'rank'}_{number}"
                strikes += _kill_at_random(lab.run(name), random.Random(name), budget, everything)
            return strikes

        strikes = _side_by_side([runs] * _AT_ONCE)
        kinds = {what: sum(strike.what == what for strike in strikes) for what in _MANNERS}
        gone = max((strike.gone_s for strike in strikes), default=0.0)
        aims = ", ".join(f"{count} {what}" for what, count in kinds.items())
        yield _row_of_strikes(fault, strikes, f"{aims}; all ranks gone within {gone:.1f} s")


_MANNERS = ("while starting", "while training", "aimed at a save")


def _kill_at_random(run: Run, rng: random.Random, budget: _Budget, everything: bool) -> list[Strike]:
    """One run from its start to its end."""
    strikes: list[Strike] = []
    launch, before = Launch(run, 2, max_restarts=1000), set[int]()
    while True:
        ranks: dict[int, int] = {}
        while len(ranks) < 2 and launch.process.poll() is None:
            time.sleep(0.05)
            ranks = {rank: pid for rank, pid in launch.ranks().items() if pid not in before}
        if len(ranks) < 2 or not budget.take():
            return run.judge(strikes, launch)
        manner = rng.choices(_MANNERS, (1, 3, 2))[0]
        _wait_for_the_moment(run, launch, rng, manner)
        if launch.process.poll() is not None:  # it came to its end before
            budget.give_back()
            return run.judge(strikes, launch)
        before, killed = launch.pids() - {launch.process.pid}, time.time()
        if everything:
            launch.kill()
        else:
            try:
                os.kill(ranks[rng.randrange(2)], signal.SIGKILL)
            except ProcessLookupError:  # it has just come to its end, and torchrun has not yet
                budget.give_back()
                launch.process.wait()
                return run.judge(strikes, launch)
        strikes.append(Strike(killed, manner, gone_s=wait_until_gone(before)))
        if everything:
            launch = Launch(run, 2, "checkpoint.resume=auto", max_restarts=1000)


def _wait_for_the_moment(run: Run, launch: Launch, rng: random.Random, manner: str) -> None:
    limit = time.monotonic() + _START_LIMIT_S

    def wait(is_there: Callable[[], Any], poll_s: float) -> None:
        while launch.process.poll() is None and not is_there():
            if time.monotonic() > limit:
                launch.kill()  # which the judge sees
            time.sleep(poll_s)

    if manner == "while starting":
        end = time.monotonic() + rng.random() * run.lab.start_s
        wait(lambda: time.monotonic() > end, 0.05)
        return
    wait(lambda: run.events()[-1:] and run.events()[-1]["event"] == "resumed", 0.05)
    if manner == "while training":
        end = time.monotonic() + rng.random() * 4
        wait(lambda: time.monotonic() > end, 0.001)
    else:
        for _ in range(rng.randint(1, 3)):
            seen = _half_written(run.run_dir)
            wait(functools.partial(_has_new, run.run_dir, seen), 0.001)
        time.sleep(rng.random() * 0.03)


def _half_written(run_dir: Path) -> set[Path]:
    return set((run_dir / "checkpoints").glob("*.tmp"))


def _has_new(run_dir: Path, seen: set[Path]) -> bool:
    return bool(_half_written(run_dir) - seen)


# Kills at a place


def sigkill_phase(lab: Lab, num: int) -> Iterator[Row]:
    """A kill strikes at a drawn moment of a drawn visit to its place."""
    assert lab.reference
    count = max(1, num // 10)
    sizes = [min(_KILLS_A_RUN, count - first) for first in range(0, count, _KILLS_A_RUN)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = {
            where: [pool.submit(_kill_at, lab, where, number, size) for number, size in enumerate(sizes)]
            for where in (START, *PHASES, *WRITE_POINTS)
        }
        for where, runs in jobs.items():
            yield _row_of_strikes(f"SIGKILL of a rank, {where}", [strike for run in runs for strike in run.result()])


def _kill_at(lab: Lab, where: str, number: int, count: int) -> list[Strike]:
    run = lab.run(f"phase_{re.sub('[^a-z]+', '_', where)}_{number}")
    rng = random.Random(run.folder.name)
    most_visits = 6 if where in PHASES else 2 if where in WRITE_POINTS[:-1] else 1
    for i in range(count):
        rank = rng.randrange(2) if has_rank(where, 1) else 0
        run.plan(i, where=where, rank=rank, count=rng.randint(1, most_visits), moment=rng.random())
    launch = Launch(run, 2, max_restarts=1000)
    launch.wait()
    return run.judge(run.strikes(), launch)


# Damage


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
    trainer, manifest = (json.loads((folder / name).read_text()) for name in ("trainer.json", "manifest.json"))
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
    """Of files of a checkpoint: first many draws against its manifest, then some through a real start."""
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
                    if read_manifest(copy) == facts:  # a blank turned into another one, say: all that it stands for is there
                        harmless += 1
                    else:
                        undetected.append(f"{name}, draw {draw}")
                except CheckpointError:
                    pass
                shutil.rmtree(copy)
        notes = f"{len(facts) + 1} files" + (f"; {harmless} not seen in manifest.json, which still says the same" if harmless else "")
        yield _row(f"checkpoint: a file {damage}", tried, undetected, "-", notes)
    yield from _corruption_through_a_start(lab)


def _corruption_through_a_start(lab: Lab) -> Iterator[Row]:
    stopped = lab.run("stopped")  # with checkpoints after 6 and 9 steps, and perhaps the best one
    stopped.plan(0, where="weight_sync", count=3 * EVERY + 2)
    Launch(stopped, 2).wait()
    shard, rng = "state/shard_00002.safetensors", random.Random(0)

    def go_on(case: str, damage: Callable[[Path], None], which: int, *overrides: str) -> tuple[Run, Launch]:
        run = stopped.copy("damaged_" + re.sub("[^a-z]+", "_", case))
        for checkpoint in list_checkpoints(run.run_dir)[which:]:
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
        kept = metrics_of(run.run_dir) == metrics_of(stopped.run_dir)
        good = says in line and kept and re.search(r"exitcode *: 2\b", launch.output)  # the rank's; torchrun's own is 1 whatever it was
        return "" if good else f"{case}: {launch.output[-300:]}"

    def nothing(_: Path) -> None:
        pass

    other = make_model(lab.root / "other", "qwen3", tied=True, seed=1)
    fall_backs: dict[str, Callable[[Path], None]] = {
        "shard, a bit flipped": lambda c: _flip(c / shard, rng),
        "trainer.json zeroed": lambda c: _zero(c / "trainer.json", rng),
        "manifest.json removed": lambda c: _remove(c / "manifest.json", rng),
        "a file of model/ truncated": lambda c: _truncate(c / "model" / "config.json", rng),
    }
    refusals: dict[str, tuple[Callable[[Path], None], str, tuple[str, ...]]] = {
        "all of them damaged": (lambda c: _flip(c / shard, rng), "cannot be loaded", ()),
        "a later format": (lambda c: _later_format(c / "trainer.json", rng), "newer", ()),
        "another model": (nothing, "another model", (f"model.path={other}",)),
        "another seed": (nothing, "seed", ("seed=1",)),
    }
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        fell = list(pool.map(lambda case: falls_back(case, fall_backs[case]), fall_backs))
        refused = list(pool.map(lambda case: refuses(case, *refusals[case][:2], *refusals[case][2]), refusals))
    for fault, outcomes, expected, cases in (
        ("newest checkpoint damaged, real start", fell, "fell back to the one before", fall_backs),
        ("no usable checkpoint, real start", refused, "one line and exit code 2", refusals),
    ):
        problems = [problem for problem in outcomes if problem]
        yield _row(fault, len(outcomes), problems, "-", f"{expected}: {', '.join(cases)}")


# Disks


def disk(lab: Lab, num: int) -> Iterator[Row]:
    """The checkpoints, or the whole run folder, on a small disk that runs full or turns read-only at the second save."""
    probe = lab.root / "probe"
    probe.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(probe)], capture_output=True).returncode:
        yield _row("disk full or read-only", 0, [], "-", "skipped: mounting a small disk needs root")
        return
    subprocess.run(["umount", str(probe)], check=True)
    newest = list_checkpoints(lab.reference.run_dir)[-1]
    state_kib = sum(path.stat().st_size for path in (newest / "state").iterdir()) // 1024 + 1
    fill = "dd if=/dev/zero of={disk}/filler bs=1k 2>/dev/null; truncate -s -{left}K {disk}/filler"
    for fault, whole, command, last_code in (
        ("disk full before a save", False, fill.format(disk="{disk}", left=64), 1),
        ("disk full in the middle of a save", False, fill.format(disk="{disk}", left=state_kib + 16), 1),
        ("disk full, free again after a second", False, fill.format(disk="{disk}", left=64) + "; (sleep 1; rm {disk}/filler) &", 0),
        ("disk of the whole run folder full", True, fill.format(disk="{disk}", left=64), 1),
        ("folder read-only", False, "mount -o remount,ro {disk}", 1),
    ):
        run = lab.run("disk_" + re.sub("[^a-z]+", "_", fault))
        with _small_disk(run.run_dir if whole else run.run_dir / "checkpoints") as disk_folder:
            run.plan(0, where="checkpoint", count=2 * EVERY, do=command.format(disk=disk_folder))
            launch = Launch(run, 2)
            code, problems = launch.wait(), []
            subprocess.run(["mount", "-o", "remount,rw", str(disk_folder)], check=True)
            said = "not saved" in launch.output or "No space left" in launch.output
            halves = [path.name for path in (run.run_dir / "checkpoints").glob("*.tmp")]
            kept = list_checkpoints(run.run_dir)
            if code != last_code:
                problems.append(f"exit code {code}: {launch.output[-200:]}")
            if not said:
                problems.append("not a word about it")
            if halves and not whole:
                problems.append(f"{halves} left")
            if not kept:
                problems.append("no checkpoint left")
            for checkpoint in kept:
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
            kept_names = ", ".join(checkpoint.name for checkpoint in kept)
            yield _row(fault, 1, problems[:1], f"exit code {code}", "; ".join([*problems[1:], f"kept {kept_names}, went on to the bit"]))


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# Numbers of ranks


def world_size(lab: Lab, num: int) -> Iterator[Row]:
    """2 -> 1 -> 2 ranks with five kills over three epochs; the loss of the first step after a change, against the other number of ranks."""
    steps_an_epoch = NUM_PROMPTS // 4
    overrides, num_epochs = [f"training.num_steps={3 * steps_an_epoch}"], 3
    run, going = lab.run("world_size"), [*overrides, "checkpoint.resume=auto"]
    strikes, problems, first_losses = [], [], []
    for i, (num_ranks, steps) in enumerate(((2, 5), (2, 4), (1, 5), (1, 4), (2, 5), (2, 100))):
        if i in (2, 4):  # what the number of ranks before would have made of the next step
            other = run.copy(f"world_size_{i}")
            other.plan(99, where="weight_sync", count=2)
            Launch(other, 3 - num_ranks, *going).wait()
        resumed = len(run.events())
        run.plan(i, where="update", count=steps, rank=num_ranks - 1, moment=0.5)
        launch = Launch(run, num_ranks, *(going if i else overrides))
        launch.wait()
        if i in (2, 4):
            step = next(event["step"] for event in run.events()[resumed:] if event["event"] == "resumed")
            mine, theirs = (_by_step(r)[step] for r in (run, other))
            first_losses += [abs(mine[name] - theirs[name]) for name in ("loss/total", "loss/policy", "loss/entropy")]
            problems += ["other rewards at the first step"] if mine["reward/mean"] != theirs["reward/mean"] else []
    strikes = run.strikes()
    if len(strikes) != 5 or launch.wait():
        problems.append(f"{len(strikes)} kills, exit code {launch.wait()}: {launch.output[-200:]}")
    for epoch in range(num_epochs):
        rows: list[int] = []
        for step in range(epoch * steps_an_epoch, (epoch + 1) * steps_an_epoch):
            lines = (run.run_dir / "rollouts" / f"step_{step:06d}.jsonl").read_text().splitlines()
            rows += [record["row"] for record in map(json.loads, lines) if record["sample"] == 0]
        if sorted(rows) != list(range(NUM_PROMPTS)):
            problems.append(f"epoch {epoch}: {len(set(rows))} of {NUM_PROMPTS} prompts, {len(rows)} groups")
    worst = max(first_losses, default=float("inf"))
    if worst > 1e-6:
        problems.append(f"losses of the first step differ by {worst:.1e}")
    damaged = [event["damage"] for event in run.events() if event.get("damage")]
    notes = f"each of {NUM_PROMPTS} prompts once in each of {num_epochs} epochs"
    yield _row("2 -> 1 -> 2 ranks, 5 kills, 3 epochs", 5, [*problems, *damaged][:5], f"{worst:.1e} of the first step's losses", notes)


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


# What a save costs


_SIZES: dict[str, dict[str, Any]] = {
    "1 M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4},
    "20 M": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6},
    "100 M": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8},
}


def save_time(lab: Lab, num: int) -> Iterator[Row]:
    """Training's wait for a save that is written in the background, against one that it waits for to the end."""
    repeats = max(3, num // 10)
    for size, sizes in _SIZES.items():
        folder = lab.root / f"save_{size.split()[0]}"
        model = make_model(folder / "model", "qwen3", tied=True, num_attention_heads=8, head_dim=64, **sizes)
        config = write_config(folder, model)
        for num_ranks in (1, 2):
            run_dir = folder / f"run_{num_ranks}"
            worker = ["-m", "benchmarks.survival.faults_save_worker", str(config), str(run_dir), str(repeats)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run(torchrun(num_ranks, *worker), capture_output=True, text=True, env=env)
            shutil.rmtree(run_dir, ignore_errors=True)
            fault = f"save of {size} parameters, {num_ranks} ranks"
            if done.returncode:
                yield _row(fault, 1, [done.stderr[-300:]], "-")
                continue
            facts = json.loads(done.stdout.splitlines()[-1])
            ratios = [save / copy for copy, save in zip(facts["copies_s"], facts["saves_s"], strict=True)]
            slow = [f"{ratio:.1f} x" for ratio in ratios if ratio < 5]
            copy, save = statistics.median(facts["copies_s"]), statistics.median(facts["saves_s"])
            worst = f"{min(ratios):.1f} x less wait, median {statistics.median(ratios):.1f}, most {max(ratios):.1f}"
            times = f"copy {1e3 * copy:.1f} ms (first {1e3 * facts['first_s']:.0f}), all {1e3 * save:.0f} ms"
            yield _row(fault, len(ratios), slow, worst, f"{facts['bytes'] / 2**20:.0f} MiB: {times}")


# A long run


def soak(lab: Lab, num: int) -> Iterator[Row]:
    """Ten times as many steps as --num says, a checkpoint each 50."""
    num_steps, run = 10 * num, lab.run("soak")
    every = f"checkpoint.every_steps={min(50, num_steps // 4)}"
    launch = Launch(run, 2, f"training.num_steps={num_steps}", every, "eval.every_steps=50", "optimizer.lr=1e-4")
    samples: list[tuple[int, int, dict[str, int]]] = []  # step, rank, figures
    metrics = run.run_dir / "metrics.jsonl"
    while launch.process.poll() is None:
        time.sleep(0.5)
        step = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
        for rank, pid in launch.ranks().items():
            if figures := _figures_of(pid):
                samples.append((step, rank, figures))
    problems, worst, settled = [], [], min(100, num_steps // 4)
    if launch.wait():
        problems.append(f"exit code {launch.wait()}: {launch.output[-300:]}")
    for figure in ("resident KiB", "descriptors", "threads"):
        growths = []
        for rank in (0, 1):
            early, late = (
                [figures[figure] for step, of, figures in samples if of == rank and first <= step < last]
                for first, last in ((settled, 1.5 * settled), (num_steps - 0.5 * settled, num_steps))
            )
            growths.append(statistics.median(late) / statistics.median(early) - 1 if early and late else float("inf"))
        worst.append(f"{figure} {max(growths, key=abs):+.2%}")
        if max(growths) > (0.01 if figure == "resident KiB" else 0):
            problems.append(f"{figure} grew by {max(growths):.2%}")
    last = {rank: figures for _, rank, figures in samples}
    said = ["; ".join(problems)] if problems else []
    yield _row(f"{num_steps} steps", 1, said, ", ".join(worst), f"after step {settled}; at the end {last}")


def _figures_of(pid: int) -> dict[str, int]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return {}
    found = {name: re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("VmRSS", "Threads")}
    if not all(found.values()):
        return {}
    resident, threads = (int(match[1]) for match in found.values() if match)
    return {"resident KiB": resident, "descriptors": open_files, "threads": threads}


# Ranks that raise, or sleep; signals


def raises(lab: Lab, num: int) -> Iterator[Row]:
    """On either rank in each phase: all ranks out within 10 s, not as a success, and the first traceback is there."""

    def is_named(output: str, rank: int, phase: str) -> bool:
        headline = rf"^rank {rank} \([^)]*\) failed first, in phase {phase}, [^\n]*PlannedError: planned"
        return re.search(headline, output, re.MULTILINE) is not None and 'raise PlannedError("planned")' in output

    yield from _stop_in_each_phase(lab, num, "a raise", "raise", 10.0, is_named)


def hang(lab: Lab, num: int) -> Iterator[Row]:
    """On either rank in each phase: stopped within the watchdog's limit and 5 s, and the report names the rank and its phase."""

    def is_named(output: str, rank: int, phase: str) -> bool:
        return re.search(rf"^rank {rank} \([^)]*\) hangs in phase {phase}, ", output, re.MULTILINE) is not None

    limits = [f"watchdog.timeout_s={_TIMEOUT_S}", "watchdog.phase_timeouts_s={start: 300}"]
    yield from _stop_in_each_phase(lab, num, "a rank asleep", "sleep", _TIMEOUT_S + 5, is_named, *limits)


def _stop_in_each_phase(
    lab: Lab, num: int, fault: str, do: str, limit_s: float, says: Callable[[str, int, str], bool], *overrides: str
) -> Iterator[Row]:
    assert lab.reference

    def stop(case: tuple[str, int]) -> tuple[float, str]:
        phase, rank = case
        run = lab.run(f"{do}_{phase}_{rank}")
        run.plan(0, where=phase, rank=rank, count=3, do=do)
        launch = Launch(run, 2, *overrides)
        code = launch.wait()
        struck = run.strikes()
        took = time.time() - struck[0].time if struck else float("inf")
        left = launch.pids()
        good = code > 0 and struck and took < limit_s and not left and says(launch.output, rank, phase)
        return took, "" if good else f"{phase}, rank {rank}: exit code {code} after {took:.1f} s, {len(left)} left: {launch.output[-200:]}"

    cases = [(phase, rank) for phase in PHASES for rank in (0, 1)]
    cases = random.Random(0).sample(cases, min(len(cases), max(2, num // 5)))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        outcomes = list(pool.map(stop, cases))
    problems = [problem for _, problem in outcomes if problem]
    yield _row(f"{fault}, each rank in each phase", len(cases), problems, f"all out after {max(t for t, _ in outcomes):.1f} s")


def signals(lab: Lab, num: int) -> Iterator[Row]:
    """To torchrun, at a random time of the training: saved and gone within 30 s, and the run goes on to the same end."""
    assert lab.reference
    for number in (signal.SIGTERM, signal.SIGUSR1):

        def preempt(i: int, number: signal.Signals = number) -> tuple[float, str]:
            run, rng = lab.run(f"{number.name.lower()}_{i}"), random.Random(f"{number.name} {i}")
            launch = Launch(run, 2)
            _wait_for_the_moment(run, launch, rng, "while training")
            start = time.monotonic()
            launch.process.send_signal(number)
            code, took = launch.wait(60), time.monotonic() - start
            marked, left = (run.run_dir / "preempted.json").exists(), launch.pids()
            if not marked or left or took > 30:
                return took, f"exit code {code} after {took:.1f} s, marker {marked}, {len(left)} left: {launch.output[-200:]}"
            launch = Launch(run, 2, "checkpoint.resume=auto")
            problems = run.judge([Strike(0.0, "")], launch)[0].problems
            return took, "; ".join(problems)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            outcomes = list(pool.map(preempt, range(max(1, num // 20))))
        problems = [problem for _, problem in outcomes if problem]
        worst = f"out after {max(t for t, _ in outcomes):.1f} s"
        yield _row(f"{number.name} to torchrun", len(outcomes), problems, worst, "marker, no orphans, went on to the bit")


PARTS: dict[str, Callable[[Lab, int], Iterator[Row]]] = {
    "sigkill_random": sigkill_random,
    "sigkill_phase": sigkill_phase,
    "corruption": corruption,
    "disk": disk,
    "world_size": world_size,
    "async": save_time,
    "soak": soak,
    "raise": raises,
    "hang": hang,
    "signals": signals,
}


if __name__ == "__main__":
    main()
