"""Runs over several epochs: on changing numbers of ranks, and long enough for a leak to show."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, read_lines
from benchmarks.survival.faults.lab import NUM_PROMPTS, Lab, Launch, Run
from benchmarks.survival.faults.rows import row


def world_size(lab: Lab, num: int) -> Iterator[Row]:
    """2 -> 1 -> 2 ranks with five kills over three epochs; the loss of the first step after a
    change, against the other
    number of ranks."""
    steps_an_epoch = NUM_PROMPTS // 4
    overrides, num_epochs = [f"training.num_steps={3 * steps_an_epoch}"], 3
    run, going = lab.run("world_size"), [*overrides, "checkpoint.resume=auto"]
    strikes, problems, first_losses = [], [], []
    for i, (num_ranks, steps) in enumerate(((2, 5), (2, 4), (1, 5), (1, 4), (2, 5), (2, 100))):
        if i in (2, 4):  # what the number of ranks before would have made of the next step
            second = run.copy(f"world_size_{i}")
            second.plan(99, where="weight_sync", count=2)
            Launch(second, 3 - num_ranks, *going).wait()
        resumed = len(run.events())
        run.plan(i, where="update", count=steps, rank=num_ranks - 1, moment=0.5)
        launch = Launch(run, num_ranks, *(going if i else overrides))
        launch.wait()
        if i in (2, 4):
            step = next(
                event["step"] for event in run.events()[resumed:] if event["event"] == "resumed"
            )
            local, theirs = (_by_step(r)[step + 1] for r in (run, second))
            first_losses += [
                abs(local[name] - theirs[name])
                for name in ("loss/total", "loss/policy", "loss/entropy")
            ]
            problems += (
                ["other rewards at the first step"]
                if local["reward/mean"] != theirs["reward/mean"]
                else []
            )
    strikes = run.strikes()
    if len(strikes) != 5 or launch.wait():
        problems.append(f"{len(strikes)} kills, exit code {launch.wait()}: {launch.output[-200:]}")
    for epoch in range(num_epochs):
        rows: list[int] = []
        for step in range(epoch * steps_an_epoch + 1, (epoch + 1) * steps_an_epoch + 1):
            lines = read_lines(run.run_dir / "rollouts" / f"step_{step:06d}.jsonl")
            rows += [record["row"] for record in lines if record["sample"] == 0]
        if sorted(rows) != list(range(NUM_PROMPTS)):
            problems.append(
                f"epoch {epoch}: {len(set(rows))} of {NUM_PROMPTS} prompts, {len(rows)} groups"
            )
    worst = max(first_losses, default=float("inf"))
    if worst > 1e-6:
        problems.append(f"losses of the first step differ by {worst:.1e}")
    damaged = [event["damage"] for event in run.events() if event.get("damage")]
    notes = f"each of {NUM_PROMPTS} prompts once in each of {num_epochs} epochs"
    yield row(
        "2 -> 1 -> 2 ranks, 5 kills, 3 epochs",
        5,
        [*problems, *damaged][:5],
        f"{worst:.1e} of the first step's losses",
        notes,
    )


def _by_step(run: Run) -> dict[int, dict[str, Any]]:
    return {
        line["step"]: line
        for line in read_lines(run.run_dir / "metrics.jsonl")
        if "reward/mean" in line
    }


def soak(lab: Lab, num: int) -> Iterator[Row]:
    """Ten times as many steps as --num says, a checkpoint each 50."""
    num_steps, run = 10 * num, lab.run("soak")
    every = f"checkpoint.every_steps={min(50, num_steps // 4)}"
    launch = Launch(
        run, 2, f"training.num_steps={num_steps}", every, "eval.every_steps=50", "optimizer.lr=1e-4"
    )
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
                [
                    figures[figure]
                    for step, of, figures in samples
                    if of == rank and initial <= step < final
                ]
                for initial, final in (
                    (settled, 1.5 * settled),
                    (num_steps - 0.5 * settled, num_steps),
                )
            )
            growths.append(
                statistics.median(late) / statistics.median(early) - 1
                if early and late
                else float("inf")
            )
        worst.append(f"{figure} {max(growths, key=abs):+.2%}")
        if max(growths) > (0.01 if figure == "resident KiB" else 0):
            problems.append(f"{figure} grew by {max(growths):.2%}")
    final = {rank: figures for _, rank, figures in samples}
    message = ["; ".join(problems)] if problems else []
    yield row(
        f"{num_steps} steps",
        1,
        message,
        ", ".join(worst),
        f"after step {settled}; at the end {final}",
    )


def _figures_of(pid: int) -> dict[str, int]:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return {}
    result = {
        name: re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE) for name in ("VmRSS", "Threads")
    }
    if not all(result.values()):
        return {}
    resident, threads = (int(match[1]) for match in result.values() if match)
    return {"resident KiB": resident, "descriptors": open_files, "threads": threads}
