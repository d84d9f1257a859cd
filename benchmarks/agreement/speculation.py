"""Whether `rollout.speculation: auto` changes anything but time, and what it saves: trainings with
and without it, in turn, with the real vLLM.

    benchmarks/run.sh speculation [--only WORDS ...] [--json FILE]     about 30 minutes on 2 cores

Each row is a case of 20 steps, or of three epochs of 3 steps where its name says so. "differ" names
what is not equal to the bit: metrics (but times, memory and speculation's own), sampled tokens and
everything else in the rollout dumps, or the parameters at the end. "accepted" is the share of
checked drafts that were what was sampled, "steps saved" that of engine steps by the run's own
estimate, "drafted" the checked drafts a step, all as means over the steps, in epochs by epoch.
"time" is the time of a step's rollout phase with speculation over that without it: the median over
steps, and with epochs over three pairs of runs that took turns. The exit code is 1 if anything
differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks.support.report import Row, arguments_parser, read_lines, report
from grpo_spmd.demo import countdown
from grpo_spmd.demo.making import make_folder
from grpo_spmd.demo.tools import fill_tools_demo
from tests.support.dumps import dumped
from tests.support.processes import torchrun

_ROOT = Path(__file__).resolve().parents[2]
_EPOCH_STEPS, _NUM_EPOCHS, _NUM_PAIRS = 3, 3, 3
# What a run measures of its time, its memory and its drafts.
_MEASURED = (
    "time/", "throughput/", "memory/", "speculation/", "rollout/tokens_per_s",
    "rollout/tail_waste_frac", "environment/call", "weight_sync/proof_s",
    "proofs/update_check_s",
)  # fmt: skip
_MADE = "MADE"  # in overrides: the folder of the model and the data


@dataclass(frozen=True)
class Case:
    made: str
    """The model and the data: a key of MADE."""
    config: str
    num_ranks: int
    overrides: tuple[str, ...] = ()
    kill_after_step: int = 0
    """The step after which the run with speculation is killed, to go on from its checkpoint; 0:
    never."""

    has_epochs: bool = False
    """True for three epochs of three steps."""


MADE: dict[str, Callable[[Path], Any]] = {
    "countdown": partial(countdown.make_demo, seed=0),
    "3-4": partial(countdown.make_demo, seed=0, numbers="3-4"),
    "tools": lambda folder: make_folder(folder, {}, partial(fill_tools_demo, seed=0)),
    "experts": lambda folder: make_folder(folder, {}, partial(countdown.fill_experts_demo, seed=0)),
}
CASES = {
    "demo, 1 rank": Case("countdown", "demo.yaml", 1),
    "demo, 2 ranks": Case("countdown", "demo.yaml", 2, ("rollout.schedule=static",)),
    "demo, 2 ranks, an engine over both": Case(
        "countdown", "demo.yaml", 2, ("rollout.tensor_parallel_size=2",)
    ),
    "demo, a tiny cache": Case(
        "countdown", "demo.yaml", 1, ("rollout.engine={num_gpu_blocks_override: 24}",)
    ),
    "demo, adapters": Case(
        "countdown", "demo.yaml", 1, ("model.lora={rank: 8, alpha: 16, sync: adapter}",)
    ),
    "demo, greedy evaluation": Case(
        "countdown",
        "demo.yaml",
        1,
        (
            f"data.eval={{held: {_MADE}/train.jsonl}}",
            "eval={every_steps: 4, num_samples: 1, temperature: 0}",
        ),
    ),
    "demo, ppo": Case("countdown", "demo-ppo.yaml", 1, (f"critic.path={_MADE}/model",)),
    "demo, bfloat16": Case("countdown", "demo.yaml", 1, ("model.dtype=bfloat16",)),
    "demo, killed and resumed": Case(
        "countdown",
        "demo.yaml",
        1,
        ("checkpoint.every_steps=5", "checkpoint.resume=auto"),
        kill_after_step=13,
    ),
    "tools demo, 1 rank": Case("tools", "demo-tools.yaml", 1),
    "experts demo, 1 rank": Case("experts", "demo-experts.yaml", 1),
    "demo, three epochs": Case("countdown", "demo.yaml", 1, has_epochs=True),
    "countdown of 3 to 4 numbers, three epochs": Case(
        "3-4", "countdown-3to4.yaml", 1, ("rollout.dynamic_sampling=false",), has_epochs=True
    ),
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORDS")
    args = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if any(words in name for words in args.only):
                rows.append({"case": name, **measure(Path(folder), case)})
                print(json.dumps(rows[-1]), flush=True)
    report("speculation", rows, args.json)
    sys.exit(1 if any(row["differ"] != "nothing" for row in rows) else 0)


def measure(folder: Path, case: Case) -> Row:
    """Returns the columns of one case."""
    made = folder / case.made
    if not made.exists():
        MADE[case.made](made)
    if case.has_epochs:
        # As many rows as an epoch of a few steps trains on.
        num_rows = _EPOCH_STEPS * 64
        lines = (made / "train.jsonl").read_text().splitlines(keepends=True)[:num_rows]
        (made / "short.jsonl").write_text("".join(lines))
    ratios = []
    for _ in range(_NUM_PAIRS if case.has_epochs else 1):
        plain, auto = (_train(folder, case, value) for value in ("null", "auto"))
        pairs = zip(_step_lines(auto), _step_lines(plain), strict=True)
        ratios.append(
            median(ours["time/rollout_s"] / others["time/rollout_s"] for ours, others in pairs)
        )
    lines_of = _step_lines(auto)
    size = _EPOCH_STEPS if case.has_epochs else len(lines_of)
    row: Row = {"differ": ", ".join(differences(plain, auto)) or "nothing"}
    for start in range(0, len(lines_of), size):
        epoch = f", epoch {start // size + 1}" if case.has_epochs else ""
        for column in ("accepted_frac", "engine_steps_saved_frac", "drafted_tokens"):
            values = [line[f"speculation/{column}"] for line in lines_of[start : start + size]]
            known = [value for value in values if value is not None]
            row[column + epoch] = round(sum(known) / len(known), 3) if known else None
    return row | {
        "steps": len(lines_of),
        "time": median(ratios),
        "min": min(ratios),
        "max": max(ratios),
    }


def _train(folder: Path, case: Case, speculation: str) -> Path:
    """Trains, and returns the run folder."""
    made, run_dir = folder / case.made, Path(tempfile.mkdtemp(dir=folder), "run")
    data = made / ("short.jsonl" if case.has_epochs else "train.jsonl")
    overrides = [
        f"model.path={made / 'model'}",
        f"data.train={data}",
        f"run_dir={run_dir}",
        f"training.num_steps={_EPOCH_STEPS * _NUM_EPOCHS if case.has_epochs else 20}",
        "logging.rollouts_every_steps=1",
        f"rollout.speculation={speculation}",
        *(text.replace(_MADE, str(made)) for text in case.overrides),
    ]
    config = str(_ROOT / "configs" / case.config)
    command = torchrun(case.num_ranks, "-m", "grpo_spmd.train", "--config", config, *overrides)
    if case.kill_after_step and speculation != "null":
        _kill_after(case.kill_after_step, command, run_dir)
    result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(result.stdout[-4000:] + result.stderr[-4000:])
    return run_dir


def _kill_after(step: int, command: list[str], run_dir: Path) -> None:
    """Runs the command until its run has written this step, and kills it."""
    with subprocess.Popen(
        command,
        cwd=_ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        metrics = run_dir / "metrics.jsonl"
        while process.poll() is None:
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= step:
                # The ranks and what they started, too.
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                return
            time.sleep(0.05)
    raise RuntimeError("the run that should be killed ended before")


def _step_lines(run_dir: Path) -> list[Row]:
    """Returns the lines of metrics.jsonl that are steps, not evaluations."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "reward/mean" in line]


def differences(plain: Path, auto: Path) -> list[str]:
    """Names what differs between two run folders in any bit."""
    differing = []

    def metrics(run_dir: Path) -> list[Row]:
        return [
            {name: value for name, value in line.items() if not name.startswith(_MEASURED)}
            for line in read_lines(run_dir / "metrics.jsonl")
        ]

    for ours, others in zip(metrics(auto), metrics(plain), strict=True):
        differing += [
            name for name in ours.keys() | others.keys() if ours.get(name) != others.get(name)
        ]
    num_steps = len(_step_lines(plain))
    rollouts = [
        [dumped(run_dir, step + 1) for step in range(num_steps)] for run_dir in (plain, auto)
    ]
    assert all(rollouts[0])
    if _without_times(rollouts[0]) != _without_times(rollouts[1]):
        differing.append("rollouts")
    weights = [
        {path.name: path.read_bytes() for path in run_dir.glob("checkpoints/*/*.safetensors")}
        for run_dir in (plain, auto)
    ]
    assert weights[0]
    if weights[0] != weights[1]:
        differing.append("parameters")
    return sorted(set(differing))


def _without_times(value: Any) -> Any:
    """Returns a copy of a JSON value without the times in it."""
    if isinstance(value, dict):
        return {
            name: _without_times(entry) for name, entry in value.items() if not name.endswith("_s")
        }
    return [*map(_without_times, value)] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
