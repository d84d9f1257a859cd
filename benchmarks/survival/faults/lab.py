"""A training run under faults: start it, kill it, and judge what is left against a run that nobody
touched. How a
campaign does it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support.report import read_lines
from benchmarks.support.tree import marked
from grpo_spmd.checkpoint.manifest import read_manifest
from grpo_spmd.checkpoint.run_dir import list_checkpoints
from tests.support.models import make_model, write_config
from tests.support.processes import torchrun

ROOT = Path(__file__).resolve().parents[3]
AT_ONCE = 2  # runs side by side: half of a start waits for something
EVERY, NUM_STEPS, NUM_PROMPTS = (
    3,
    36,
    32,
)  # interval of checkpoints, steps of a run, rows of the data
LIMIT_S = 600.0  # for one launch to end in
_MARK = "GRPO_SPMD_FAULTS_ID"
_OF_A_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Of a metrics line: what no two runs have alike.
_MEASURED = (
    "time/",
    "memory/",
    "throughput/",
    "rollout/tail_waste_frac",
    "rollout/tokens_per_s",
    "weight_sync/proof_s",
    "proofs/update_check_s",
)
_started: list[Launch] = []
_closed = threading.Event()


class Launch:
    """One torchrun over benchmarks.survival.faults.worker. All processes of it carry a mark in
    their environment."""

    def __init__(self, run: Run, num_ranks: int, *overrides: str, max_restarts: int = 0) -> None:
        if _closed.is_set():
            raise RuntimeError("the campaign is over")
        number = len(list(run.folder.glob("launch_*.log")))
        self.mark, self.log = uuid.uuid4().hex, run.folder / f"launch_{number:03d}.log"
        options = [
            "--max-restarts",
            str(max_restarts),
            "--signals-to-handle",
            "SIGTERM,SIGINT,SIGUSR1",
        ]
        train = [
            "-m",
            "benchmarks.survival.faults.worker",
            "--config",
            str(run.lab.config),
            f"run_dir={run.run_dir}",
            *overrides,
        ]
        env = {name: value for name, value in os.environ.items() if name not in _OF_A_GROUP}
        env |= {
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "FAULTS": str(run.folder),
            _MARK: self.mark,
        }
        env |= {"TMPDIR": str(run.folder / "tmp")}
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                torchrun(num_ranks, *options, *train),
                cwd=ROOT,
                env=env | {"FAULTS_START_S": str(run.lab.start_s)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        _started.append(self)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def pids(self) -> set[int]:
        """All processes that are there, torchrun's own included."""
        return marked(self.mark, _MARK)

    def ranks(self) -> dict[int, int]:
        """Process by rank, of the ranks that run now."""
        agent, result = self.process.pid, {}
        for task in Path(f"/proc/{agent}/task").glob("*/children"):
            for pid in _read(task).split():
                for entry in _read(Path(f"/proc/{int(pid)}/environ")).split(b"\0"):
                    if entry.startswith(b"RANK="):
                        result[int(entry[5:])] = int(pid)
        return result

    def wait(self, limit_s: float = LIMIT_S) -> int:
        """Exit code. Past the limit everything is killed, and the code is -1."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return -1

    def kill(self) -> None:
        """SIGKILL for torchrun first, so that it starts nothing any more, then for the rest."""
        self.process.kill()
        self.process.wait()
        while remaining := self.pids():
            for pid in remaining:
                _kill(pid)
            time.sleep(0.02)


def kill_all_launches() -> None:
    """Leave nothing behind, however the campaign ends; nothing starts any more."""
    _closed.set()
    for launch in _started:
        if launch.process.poll() is None or launch.pids():
            launch.kill()


def wait_until_gone(pids: set[int], limit_s: float = 60.0) -> float:
    """Seconds until none of the processes is there."""
    start = time.monotonic()
    while (
        any(_read(Path(f"/proc/{pid}/cmdline")) for pid in pids)
        and time.monotonic() < start + limit_s
    ):
        time.sleep(0.02)
    return time.monotonic() - start


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # gone in the meantime
        return b""


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Lab:
    """Model, data and config of all runs of a campaign, and the run that nobody touches, made
    once."""

    def __init__(
        self, root: Path, *, num_steps: int = NUM_STEPS, seed: int = 0, **sections: Any
    ) -> None:
        """`seed`: of the moments that are drawn; `sections`: of the config, over those that all
        have."""
        self.root, self.seed = root, seed
        model = make_model(root / "model", "qwen3", tied=True)
        rows = [{"prompt": f"{a},{a}=", "nums": [a, a], "target": 2 * a} for a in range(1, 5)]
        (root / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.config = write_config(
            root,
            model,
            data={"eval": {"held": str(root / "held.jsonl")}},
            eval={"every_steps": 1, "num_samples": 1},
            optimizer={"lr": 1e-3},
            # Two mini-batches: the policy's logprobs are taken before the update, in a phase of
            # their own.
            training={
                "num_steps": num_steps,
                "num_mini_batches": 2,
                "max_tokens_per_micro_batch": 256,
            },
            checkpoint={
                "every_steps": EVERY,
                "keep": 2,
                "best_metric": "eval/held/mean",
                "resume": "never",
            },
            **sections,
        )
        self.start_s = 10.0  # from a process's first line to its first step
        self._reference: Run | None = None

    def run(self, name: str) -> Run:
        folder = self.root / name
        (folder / "plan").mkdir(parents=True)
        (folder / "tmp").mkdir()
        return Run(self, folder)

    @property
    def reference(self) -> Run:
        """Two ranks, never interrupted."""
        if self._reference is None:
            run = self.run("reference")
            launch = Launch(run, 2)
            if launch.wait():
                raise RuntimeError(f"the run without any fault fails:\n{launch.output}")
            starts, ends = (
                [e["time"] for e in run.events() if e["event"] == name]
                for name in ("start", "resumed")
            )
            self.start_s, self._reference = ends[0] - starts[0], run
        return self._reference


@dataclass
class Strike:
    """A fault that happened."""

    time: float
    what: str
    problems: list[str] = field(default_factory=list)
    lost_steps: int | None = None
    in_save: bool = False
    gone_s: float = 0.0  # until no process of the start was there any more


@dataclass
class Run:
    lab: Lab
    folder: Path
    began: float = field(default_factory=time.time)

    def temporary(self) -> list[str]:
        """What is left in the folder for temporary files, but for what torchrun itself, killed,
        leaves in it."""
        return sorted(
            path.name
            for path in (self.folder / "tmp").iterdir()
            if not path.name.startswith("torchelastic_")
        )

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def plan(self, number: int, **fault: Any) -> None:
        """See worker.Trap."""
        (self.folder / "plan" / f"{number:03d}.json").write_text(
            json.dumps({"do": "kill", "moment": 0.0, "count": 1, "rank": 0} | fault)
        )

    def strikes(self) -> list[Strike]:
        """Of the plan, those that happened."""
        done = sorted((self.folder / "plan").glob("*.struck"))
        return [
            Strike(path.stat().st_mtime, json.loads(path.read_text())["where"]) for path in done
        ]

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        return read_lines(path) if path.exists() else []

    def copy(self, name: str) -> Run:
        """With all that is on disk."""
        folder = self.lab.root / name
        shutil.copytree(self.folder, folder)
        return Run(self.lab, folder)

    def judge(self, strikes: list[Strike], launch: Launch) -> list[Strike]:
        """Wait for the end of `launch`, then say what each fault did: by what the start after it
        found, and by how the
        run came out."""
        code = launch.wait()
        events = self.events()
        starts = [i for i, event in enumerate(events) if event["event"] == "start"]
        for strike in strikes:
            new = [i for i in starts if events[i]["time"] > strike.time]
            if not new:
                strike.problems.append("never started again")
                continue
            result = events[new[0]]
            strike.in_save = bool(result["half_written"])
            if result["damage"]:
                strike.problems.append(f"newest checkpoint: {result['damage']}")
            strike.lost_steps = result["finished"] - (result["newest"] or 0)
            # What was finished while the save was under way comes on top of the interval.
            maximum = 2 * EVERY - 1 if result["half_written"] else EVERY
            if strike.lost_steps > maximum:
                strike.problems.append(f"{strike.lost_steps} steps lost")
            went_on = events[new[0] + 1 : new[0] + 2]
            if (
                went_on
                and went_on[0]["event"] == "resumed"
                and went_on[0]["step"] != (result["newest"] or 0)
            ):
                strike.problems.append(
                    f"went on from step {went_on[0]['step']}, newest was {result['newest']}"
                )
        problems = [f"exit code {code}: {launch.output[-300:]}"] if code else self.differences()
        if remaining := launch.pids():
            problems.append(f"{len(remaining)} processes left")
            launch.kill()
        for strike in strikes:
            strike.problems += problems
        return strikes

    def differences(self, checkpoint_values: bool = True) -> list[str]:
        """From the run that nobody touched."""
        reference, result = self.lab.reference.run_dir, []
        for path in sorted(Path(reference, "rollouts").iterdir()):
            local = self.run_dir / "rollouts" / path.name
            if not local.exists() or _sorted_lines(local) != _sorted_lines(path):
                result.append(f"rollouts/{path.name} differs")
        if len(list(Path(self.run_dir, "rollouts").iterdir())) != len(
            list(Path(reference, "rollouts").iterdir())
        ):
            result.append("other files of rollouts")
        if metrics_of(self.run_dir) != metrics_of(reference):
            result.append("metrics.jsonl differs")
        if checkpoint_values and state_of(self.run_dir) != state_of(reference):
            result.append("the final state differs")
        return result


def _sorted_lines(dump: Path) -> list[bytes]:
    """Which rank sampled what, and so their order, is not the same in a run that went on."""
    return sorted(dump.read_bytes().splitlines())


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what is measured with a clock."""
    lines = read_lines(run_dir / "metrics.jsonl")
    return [
        {name: value for name, value in line.items() if not name.startswith(_MEASURED)}
        for line in lines
    ]


def state_of(run_dir: Path) -> dict[str, Any]:
    """Digests of the final checkpoint's shards, and where it says that the run was."""
    newest = list_checkpoints(run_dir)[-1]
    trainer = json.loads((newest / "trainer.json").read_text())
    shards = {
        name: facts["sha256"]
        for name, facts in read_manifest(newest).items()
        if name.startswith("state/")
    }
    return shards | {
        name: trainer[name]
        for name in ("step", "position", "num_updates", "skipped_in_a_row", "mismatch_scale")
    }
