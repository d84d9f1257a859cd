"""From the command to the end of its first step: the demo's model, untrained, on a CPU or GPUs,
caches warm.

    benchmarks/run.sh start [--before COMMIT] [--rounds N] [--command torchrun|grpo-spmd] [--ranks 1
    2]

"command" is plain torchrun or `grpo-spmd train`. total_s is wall time (median, least and most of
the rounds), cpu_s the CPU time of all its processes up to their end, rank_cpu_s that of rank 0 up
to the end of the step. The rest are the phases of rank 0, one after another, in seconds (medians):

launcher  the launcher's own start and checks, up to rank 0's interpreter
checks    config and data, without torch
imports   torch, transformers and our own modules
group     tokenizer, prompts and the process group
vllm      vLLM's imports
engine    the engine's start
policy    policy, optimizer and all else up to the first step
step      the step

With --before the same is measured from a checkout of that commit, in turn, and before_x is its
total over this one's, round by round.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import yaml

from benchmarks.speed.start_probe.sitecustomize import FILE
from benchmarks.support.models import make_model
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from grpo_spmd.demo.countdown import make_rows
from grpo_spmd.demo.making import model_config
from tests.support.processes import ROOT, torchrun

_COMMANDS = ["torchrun", "grpo-spmd"]
_PROBE = Path(__file__).parent / "start_probe"
# What each phase of rank 0 ends with; the first one began with the command.
_ENDS = {
    "launcher": "python begins",
    "checks": "torch begins",
    "imports": "grpo_spmd.loop ends",
    "group": "start_session ends",
    "vllm": "vllm.v1.engine.llm_engine ends",
    "engine": "RolloutEngine ends",
    "policy": "_train_step begins",
    "step": "_train_step ends",
}
Figures = dict[str, float]


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit too, in turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--command", choices=_COMMANDS, nargs="*", default=_COMMANDS)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _checkout(args.before) as old:
        sides = ({args.before: old} if old else {}) | {"now": ROOT}
        config = _make(Path(name))
        for side, root in sides.items():  # warms up
            _launch(args.command[0], args.ranks[0], root, config, Path(name, f"warm_{side}"))
        rows: list[Row] = []
        for num_ranks in args.ranks:
            for command in args.command:
                result: dict[str, list[Figures]] = {side: [] for side in sides}
                for number in range(args.rounds):
                    for side in sorted(sides, reverse=bool(number % 2)):
                        folder = Path(name, f"{side}_{number}_{len(rows)}")
                        result[side].append(
                            _launch(command, num_ranks, sides[side], config, folder)
                        )
                rows += _rows(command, num_ranks, result)
    report("start", rows, args.json)


def _make(folder: Path) -> Path:
    make_model(folder / "model", model_config())
    lines = [json.dumps(row) + "\n" for row in make_rows("2", 0)]
    (folder / "train.jsonl").write_text("".join(lines), encoding="utf-8")
    config = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 8},
        "rollout": {"num_prompts_per_step": 16, "group_size": 4, "max_completion_tokens": 8},
        "rewards": [{"name": "countdown", "args": {"answer_tag": None}}],
        "training": {"num_steps": 1},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@contextmanager
def _checkout(commit: str | None) -> Iterator[Path | None]:
    """A tree of the commit, in a temporary folder."""
    if commit is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as name:
        folder, git = Path(name, "tree"), ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--detach", str(folder), commit], check=True, capture_output=True
        )
        try:
            yield folder
        finally:
            subprocess.run([*git, "remove", "--force", str(folder)], check=True)


def _launch(command: str, num_ranks: int, root: Path, config: Path, folder: Path) -> Figures:
    """One run of one step; raises RuntimeError with its output where it fails."""
    folder.mkdir()
    arguments = ["--config", str(config), f"run_dir={folder}/run"]
    if command == "torchrun":
        started = [*torchrun(num_ranks, "-m", "grpo_spmd.train"), *arguments]
    else:
        started = [
            sys.executable,
            "-m",
            "grpo_spmd.cli",
            "train",
            "--nproc",
            str(num_ranks),
            *arguments,
        ]
    lines = folder / "probe.jsonl"
    path = os.pathsep.join([str(_PROBE), str(root)])
    environment = {**os.environ, "PYTHONPATH": path, FILE: str(lines), "HF_HUB_OFFLINE": "1"}
    cpu, begin = _cpu_of_children(), time.monotonic()
    done = subprocess.run(started, cwd=root, env=environment, capture_output=True, text=True)
    cpu = _cpu_of_children() - cpu
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(started)} ended with exit code "
            f"{done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return _phases(lines, begin) | {"cpu_s": cpu}


def _phases(lines: Path, begin: float) -> Figures:
    noted = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    rank0 = next(
        line["pid"] for line in noted if line["what"] == "_train_step ends" and line["rank"] == "0"
    )
    initial: dict[str, Mapping[str, float]] = {}
    for line in noted:
        if line["pid"] == rank0:
            initial.setdefault(line["what"], line)
    figures, final = Figures(), begin
    for phase, milestone in _ENDS.items():
        figures[phase], final = initial[milestone]["t"] - final, initial[milestone]["t"]
    return {"total_s": final - begin, "rank_cpu_s": initial[milestone]["cpu"]} | figures


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rows(command: str, num_ranks: int, found: Mapping[str, list[Figures]]) -> list[Row]:
    rows, current = [], [figures["total_s"] for figures in found["now"]]
    for side, rounds in found.items():
        totals = [figures["total_s"] for figures in rounds]
        row: Row = {
            "command": command,
            "ranks": num_ranks,
            "side": side,
            **spread("total_s", totals),
        }
        for name in ("cpu_s", "rank_cpu_s", *_ENDS):
            row[name] = median(figures[name] for figures in rounds)
        if side != "now":
            now_values = spread("before_x", ratios(totals, current))
            row |= {
                "before_x": now_values["before_x"],
                "before_x_min": now_values["min"],
                "before_x_max": now_values["max"],
            }
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
