"""Ill and healthy runs: does the diagnosis name the cause of each, and say nothing false?

    benchmarks/run.sh diagnosis [--json FILE]        about 15 minutes on 2 cores
    python -m benchmarks.agreement.diagnosis [--only WORDS ...] [--json FILE]

Each case is a real run of the demo's model with a fault in its config, reward function, data, model
folder or machine, or a healthy run. "named": a finding has the cause's title. "symptoms": findings
without the cause. "missed": nothing worse than "ok". "false": findings that the case does not
expect; of a healthy run that is all findings worse than "ok". The exit code is 1 if a cause was not
named, or if something false was said.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.support.report import Row, arguments_parser, report
from grpo_spmd.demo.countdown import make_demo
from grpo_spmd.demo.making import make_folder
from grpo_spmd.demo.tools import fill_tools_demo
from grpo_spmd.diagnosis.findings import list_findings
from grpo_spmd.diagnosis.run import read_run
from tests.support.ranks import RanksJob

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 300
# Reward functions of the cases. A completion of the demo is an equation such as "3*4".
REWARDS = '''
import time

from grpo_spmd.demo.stockroom import Stockroom

def constant(prompts, completions, **columns):
    return [0.5 for _ in completions]

def by_prompt(prompts, completions, **columns):
    return [float(sum(map(ord, prompt)) % 2) for prompt in prompts]

def plus_signs(prompts, completions, **columns):
    return [min(text.count("+"), 8) / 2 for text in completions]

def long(prompts, completions, completion_ids, **columns):
    return [len(ids) / 16 for ids in completion_ids]

def nines(prompts, completions, **columns):
    return [text.count("9") / 8 for text in completions]

def one_text(prompts, completions, **columns):
    return [float(text == "1+1") + text.count("1") / 8 for text in completions]

def absent(prompts, completions, **columns):
    return [None if text[:1] in "13579" else 1.0 for text in completions]

def slow(prompts, completions, **columns):
    time.sleep(0.1)
    return [float("*" in text) for text in completions]

def failing(prompts, completions, **columns):
    if "9" in completions[0]:
        raise ConnectionError("no route to the checker")
    return [float("*" in text) for text in completions]

def right_counts(completions, environments, **columns):
    return [float(messages[-1].get("content") == environment._answer())
            for messages, environment in zip(completions, environments)]

class FailingRoom(Stockroom):
    def count(self, item: str) -> int:
        """
        Count one item.

        Args:
            item: The item's letter.
        """
        if item in "abcd":
            raise ConnectionError("the stock's database is down")
        return super().count(item)

class SlowRoom(Stockroom):
    def count(self, item: str) -> int:
        """
        Count one item.

        Args:
            item: The item's letter.
        """
        time.sleep(0.5)
        return super().count(item)

class LeakingRoom(Stockroom):
    kept = []

    def count(self, item: str) -> int:
        """
        Count one item.

        Args:
            item: The item's letter.
        """
        self.kept.append(b"x" * 300_000)
        return super().count(item)

kept = []

def leaking(prompts, completions, **columns):
    kept.append(b"x" * 2_000_000)
    return [float("*" in text) for text in completions]

def hanging(prompts, completions, **columns):
    if completions[0].startswith("9"):
        time.sleep(60)
    return [float("*" in text) for text in completions]
'''


@dataclass(frozen=True)
class Case:
    """A run, the title that names its cause, and what else may be said of it.

    Titles are compared by their beginning. A healthy run has no `cause`.
    """

    overrides: tuple[str, ...]
    cause: str = ""
    allowed: tuple[str, ...] = ()
    config: str = "demo"
    num_steps: int = 14
    num_ranks: int = 1
    prepare: Callable[[Path, Path], Sequence[str]] | None = None
    """Changes the case's folder, given the demo's; returns further overrides."""
    evidence: str = ""
    """What the finding of the cause has in its text."""
    stops_rank: int | None = None
    """This rank is stopped for most of each second."""


def _reward(function: str, *others: str) -> tuple[str, ...]:
    return (f"rewards=[{{function: 'REWARDS:{function}'}}]", *others)


def _other_end_token(folder: Path, demo: Path) -> Sequence[str]:
    """The model goes on after its end token, because its folder names another one."""
    shutil.copytree(demo / "model", folder / "model")
    for name in ("config.json", "generation_config.json"):
        path = folder / "model" / name
        if path.exists():
            content = json.loads(path.read_text())
            content["eos_token_id"] = 16
            path.write_text(json.dumps(content))
    path = folder / "model/tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token": "<eos>"', '"eos_token": ":"'))
    return [f"model.path={folder / 'model'}"]


def _copied_rows(folder: Path, demo: Path) -> Sequence[str]:
    rows = (demo / "train.jsonl").read_text().splitlines()[:60]
    (folder / "copied.jsonl").write_text("".join(f"{row}\n" for row in rows * 4))
    return [f"data.train={folder / 'copied.jsonl'}"]


def _impossible_rows(folder: Path, demo: Path) -> Sequence[str]:
    rows = [json.loads(line) for line in (demo / "train.jsonl").read_text().splitlines()]
    (folder / "hard.jsonl").write_text(
        "".join(json.dumps({**row, "target": 9_999}) + "\n" for row in rows)
    )
    return [f"data.train={folder / 'hard.jsonl'}"]


def _evaluate_on_training_data(folder: Path, demo: Path) -> Sequence[str]:
    return [f"data.eval={demo / 'train.jsonl'}", "eval.every_steps=10"]


def _teach_itself(folder: Path, demo: Path) -> Sequence[str]:
    return [f"teacher.path={demo / 'model'}", "optimizer.lr=1e-9"]


def _make_critic(folder: Path, demo: Path) -> Sequence[str]:
    return [f"critic.path={demo / 'model'}"]


def _ask_tools(folder: Path, demo: Path) -> Sequence[str]:
    tools = demo.parent / "tools"
    return [f"model.path={tools / 'model'}", f"data.train={tools / 'train.jsonl'}"]


def _room(name: str, *overrides: str, num_steps: int = 8) -> Case:
    """Returns a run of the tools demo in a room of that class."""
    reward = "rewards=[{function: 'REWARDS:right_counts'}]"
    per_step = "rollout.num_prompts_per_step=16"
    return Case(
        (f"environment.factory=REWARDS:{name}", reward, per_step, *overrides),
        config="demo-tools",
        num_steps=num_steps,
        prepare=_ask_tools,
    )


def _with_plus_signs(weight: float) -> str:
    countdown = f"{{name: countdown, args: {{answer_tag: null}}, weight: {weight}}}"
    return f"rewards=[{countdown}, {{function: 'REWARDS:plus_signs'}}]"


# What is true of a policy that has found a way to its reward, beside the reason why.
_COLLAPSE = (
    "completions are cut off",
    "groups are alike",
    "the entropy",
    "all completions are one text",
    "the reward follows the length",  # more plus signs are more tokens
)
CASES: dict[str, Case] = {
    "learning rate 0.1": Case(("optimizer.lr=0.1",), "the learning rate is too high"),
    "learning rate 0.03": Case(("optimizer.lr=0.03",), "the learning rate is too high"),
    "learning rate 0.9 of LoRA": Case(
        ("optimizer.lr=0.9", "model.lora.rank=4"), "the learning rate is too high"
    ),
    "a second reward pays more": Case(
        (_with_plus_signs(0.2),),
        "countdown falls while the reward rises",
        allowed=(*_COLLAPSE, "lengths explode"),
        num_steps=30,
    ),
    "a watched reward falls": Case(
        (_with_plus_signs(0.0),),
        "countdown falls while the reward rises",
        allowed=(*_COLLAPSE, "lengths explode"),
        num_steps=30,
    ),
    "length is paid": Case(
        (*_reward("long"), "rollout.max_completion_tokens=16"),
        "the reward follows the length",
        allowed=("completions are cut off", "lengths explode", "the entropy"),
        num_steps=30,
    ),
    "one text is paid": Case(
        _reward("one_text"),
        "all completions are one text",
        allowed=("the ", "groups are alike", "each prompt's"),
        num_steps=60,
    ),
    "a constant reward": Case(_reward("constant"), "the reward never differs"),
    "the prompt alone is paid": Case(_reward("by_prompt"), "each prompt's rewards are all alike"),
    "temperature 0.1": Case(
        ("rollout.temperature=0.1",),
        "groups are alike",
        allowed=("each prompt's rewards", "the entropy is gone"),
    ),
    "an impossible task": Case((), "the reward never differs", prepare=_impossible_rows),
    "another end token": Case(
        ("rollout.max_completion_tokens=12",),
        "'<eos>' does not end a completion",
        allowed=("lengths", "the entropy", "groups are alike"),
        prepare=_other_end_token,
    ),
    "two tokens a completion": Case(
        ("rollout.max_completion_tokens=2",),
        "completions are cut off",
        allowed=("the reward never differs",),
    ),
    "a slow reward": Case(
        (*_reward("slow"), "reward_pool.num_workers=1"), "steps wait for rewards", num_steps=6
    ),
    "a failing reward": Case(
        (*_reward("failing"), "reward_pool.max_error_frac=0.9"),
        "reward failing fails",
        allowed=("completions have no reward",),
        evidence="no route to the checker (rewards.py:",
    ),
    "a hanging reward": Case(
        (*_reward("hanging"), "reward_pool.max_error_frac=0.9", "reward_pool.timeout_s=1"),
        "reward hanging times out",
        allowed=("completions have no reward", "steps wait for rewards"),
    ),
    "a dead reward server": Case(
        (
            "rewards=[{name: countdown, args: {answer_tag: null}}, "
            "{name: scorer, url: 'http://127.0.0.1:9/score', weight: 0, retries: 0}]",
        ),
        "reward scorer fails",
        allowed=("steps wait for rewards",),
        evidence="Connection refused",
        num_steps=6,
    ),
    "a failing tool": replace(
        _room("FailingRoom"),
        cause="tool calls fail",
        evidence="the stock's database is down",
        allowed=("groups are alike", "the reward never differs", "completions are cut off"),
    ),
    "a slow tool, few workers": replace(
        _room("SlowRoom", "environment.num_workers=8"),
        cause="the environment or a tool is slow",
        evidence="Its 8 workers a rank are busy",
    ),
    "a slow tool, a worker for each episode": replace(
        _room("SlowRoom", "environment.num_workers=32", "rollout.num_prompts_per_step=4"),
        cause="the environment or a tool is slow",
        allowed=("groups are alike",),
    ),
    "a reward that keeps memory": Case(
        _reward("leaking"),
        "memory grows",
        num_steps=26,
        allowed=("groups are alike", "the "),
        evidence="A reward function, a tool or an environment keeps",
    ),
    "a tool that keeps memory": replace(
        _room("LeakingRoom", num_steps=26),
        cause="memory grows",
        evidence="A reward function, a tool or an environment keeps",
    ),
    "rewards that are None": Case(
        _reward("absent"), "completions have no reward", allowed=("groups are alike", "the ")
    ),
    "the policy as its teacher": Case((), "the teacher teaches nothing", prepare=_teach_itself),
    "a critic that never learns": Case(
        ("critic.lr=1e-12",),
        "the critic explains nothing",
        config="demo-ppo",
        num_steps=24,
        prepare=_make_critic,
    ),
    "rows four times": Case(
        (), "the data repeats itself", allowed=("the prompts are",), prepare=_copied_rows
    ),
    "evaluation on the training set": Case(
        (), "data.eval is data.train", prepare=_evaluate_on_training_data
    ),
    "a clip range of 0.001": Case(
        (
            "loss.clip_ratio_low=0.001",
            "loss.clip_ratio_high=0.001",
            "training.num_mini_batches=4",
            "training.num_epochs=4",
        ),
        "many tokens are clipped",
    ),
    "a rank that is stopped": Case((), "rank 1 is slow", num_ranks=2, stops_rank=1, num_steps=40),
    # healthy runs
    **{f"healthy: seed {seed}": Case((f"seed={seed}",), num_steps=40) for seed in range(4)},
    "healthy: 2 ranks": Case((), num_ranks=2, num_steps=30),
    "healthy: to mastery": Case((), num_steps=80),
    **{
        f"healthy: {name}": Case((f"algorithm={name}",), num_steps=20)
        for name in ("dapo", "gspo", "cispo", "dr_grpo", "rloo")
    },
    "healthy: LoRA": Case(("model.lora.rank=8", "optimizer.lr=3e-3"), num_steps=30),
    "healthy: KL": Case(("loss.kl_coef=0.02",), num_steps=20),
    "healthy: dynamic sampling": Case(("rollout.dynamic_sampling=true",), num_steps=15),
    "healthy: mini-batches": Case(("training.num_mini_batches=4",), num_steps=20),
    "healthy: recomputation": Case(("model.activation_checkpointing=true",), num_steps=10),
    "healthy: a low rate": Case(("optimizer.lr=1e-5",), num_steps=20),
    "healthy: PPO": Case((), config="demo-ppo", num_steps=40, prepare=_make_critic),
    "healthy: tail batching": Case(("rollout.tail_batching=1.5",), num_steps=20),
    "healthy: tools": _room("Stockroom", num_steps=20),
    "healthy: entropy bonus": Case(("loss.entropy_coef=0.001",), num_steps=20),
    "healthy: few steps": Case((), num_steps=3),
}


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument(
        "--only", nargs="+", metavar="WORDS", help="the cases whose names have one of these in them"
    )
    args = parser.parse_args()
    names = [
        name for name in CASES if args.only is None or any(words in name for words in args.only)
    ]
    rows = measure_all(names)
    report("diagnosis", rows, args.json)
    sys.exit(any(row["result"] not in ("named", "silent") or row["false"] for row in rows))


def measure_all(names: Sequence[str]) -> list[Row]:
    """Returns the row of each case; two run at a time."""
    with tempfile.TemporaryDirectory() as created:
        folder = Path(created)
        make_demo(folder / "demo", seed=0)
        fill_tools = functools.partial(fill_tools_demo, seed=0)
        make_folder(folder / "tools", {"seed": 0, "demo": "tools"}, fill_tools)
        (folder / "rewards.py").write_text(REWARDS)
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(lambda name: measure(name, folder), names)]


def measure(name: str, folder: Path) -> Row:
    """Runs one case and returns its row."""
    case = CASES[name]
    demo = folder / "demo"
    local = Path(tempfile.mkdtemp(dir=folder))
    prepared = case.prepare(local, demo) if case.prepare is not None else ()
    overrides = {
        "run_dir": str(local / "run"),
        "model.path": str(demo / "model"),
        "data.train": str(demo / "train.jsonl"),
        "rollout.num_prompts_per_step": "32",
        "training.num_steps": str(case.num_steps),
    }
    for text in (*case.overrides, *prepared):
        key, _, value = text.partition("=")
        overrides[key] = value.replace("REWARDS", str(folder / "rewards.py"))
    job = RanksJob(
        case.num_ranks,
        "grpo_spmd.train",
        "--config",
        str(_ROOT / f"configs/{case.config}.yaml"),
        *(f"{key}={value}" for key, value in overrides.items()),
    )
    with _stopped_now_and_then(local / "run", case.stops_rank):
        code, output = job.wait(_TIMEOUT_S)
    if code:
        print(f"{name}: exit code {code}\n{output[-2000:]}", file=sys.stderr)
        return {"case": name, "result": f"exit code {code}", "findings": "", "false": ""}
    facts = {"case": name, "seed": int(overrides.get("seed", 0)), "steps": case.num_steps}
    row = facts | _judge(case, local / "run")
    print(f"{row['result']:<10} {name}: {row['findings']}", flush=True)
    return row


def _judge(case: Case, run_dir: Path) -> Row:
    findings = [finding for finding in list_findings(read_run(run_dir)) if finding.level != "ok"]
    titles = [finding.title for finding in findings]
    expected = (case.cause, *case.allowed) if case.cause else case.allowed
    false = [title for title in titles if not title.startswith(expected)] if expected else titles
    if not case.cause:
        result = "silent" if not titles else "not silent"
    elif any(f.title.startswith(case.cause) and case.evidence in f.text for f in findings):
        result = "named"
    else:
        result = "symptoms" if titles else "missed"
    return {"result": result, "findings": "; ".join(titles), "false": "; ".join(false)}


@contextmanager
def _stopped_now_and_then(run_dir: Path, rank: int | None) -> Iterator[None]:
    """Stops the process of `rank` for 0.6 s of each second, from its first step on."""
    is_over = threading.Event()

    def stop() -> None:
        while not is_over.wait(0.4):
            metrics = run_dir / "metrics.jsonl"
            if not metrics.exists() or not metrics.stat().st_size:
                continue
            for pid in _ranks_of(run_dir, rank):
                os.kill(pid, signal.SIGSTOP)
                is_over.wait(0.6)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop, daemon=True)
    if rank is not None:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        if rank is not None:
            thread.join()


def _ranks_of(run_dir: Path, rank: int | None) -> list[int]:
    """Returns the processes that write the log of `rank`."""
    log = run_dir / "logs" / f"rank_{rank}.log"
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                is_writer = any(
                    os.path.realpath(file) == str(log) for file in (folder / "fd").iterdir()
                )
            except OSError:
                continue
            if is_writer:
                pids.append(int(folder.name))
    return pids


if __name__ == "__main__":
    main()
