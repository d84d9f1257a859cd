"""Episodes beside TRL's: the same environment class, whose reset() gives the task, the same sampled
turns, and what reward functions are shown, scores and advantages.

    benchmarks/run.sh trl_episodes [--json FILE]        about 2 minutes on 2 cores

One step of a real run (the tools demo's model, vLLM, a learning rate of 0) samples episodes with
an environment of TRL's form: `reset(**row)` returns the task, `count` is a tool, `get_reward()` is
the environment's own reward. TRL's GRPOTrainer (trl_episodes_worker.py, in .venv-trl, made on first
use) gets the same rows and environment, and in the place of its generation the turns that we
sampled. The rest is TRL's code as it stands: prompts with the task, the chat template, the loop of
tool calls, reward functions, weights and advantages. Compared for each episode: the token ids of
the prompt and of all that follows it, which of these were sampled, each reward (one is a
digest of the prompts, one of the completions that the functions were given) and the advantage
before it is divided by a deviation.
The exit code is 1 if anything differs.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.support.report import Row, arguments_parser, report
from benchmarks.support.trl_environment import NO_VLLM, TRL_VERSION, trl_python
from grpo_spmd.demo.making import make_folder
from grpo_spmd.demo.tools import fill_tools_demo
from grpo_spmd.diagnosis.run import read_run
from tests.support.ranks import RanksJob

TOLERANCE = 1e-5
GROUP_SIZE = 8
_ROOT = Path(__file__).resolve().parents[2]
# Imported by both sides. Weights are those of the reward functions; TRL gives get_reward the weight
# 1, as ours is told to.
WEIGHTS = {"right": 2.0, "prompt_digest": 0.5, "completion_digest": 0.25}
ENVIRONMENT = '''
import json
import zlib

class Room:
    """Gives the task in reset(); the stock follows from the row, so that both sides draw alike."""

    def reset(self, items, number, **row):
        self.stock = {item: (number + ord(item)) % 10 for item in "abcdefgh"}
        self.items = items
        self.num_counts = 0
        return ",".join(items)

    def count(self, item: str) -> int:
        """
        Count what is in stock of one item.

        Args:
            item: The item's letter.

        Returns:
            How many there are.
        """
        self.num_counts += 1
        return self.stock[item]

    def get_reward(self):
        return 0.125 * self.num_counts

def right(completions, environments, **columns):
    answers = [",".join(str(room.stock[item]) for item in room.items) for room in environments]
    return [float(messages[-1].get("content") == answer)
            for messages, answer in zip(completions, answers)]

def _digest(messages):
    facts = [(message["role"], message.get("content") or "", message.get("name") or "",
              [call["function"] for call in message.get("tool_calls") or []])
             for message in messages]
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode()) % 1_000 / 1_000

def prompt_digest(prompts, completions, **columns):
    return [_digest(messages) for messages in prompts]

def completion_digest(prompts, completions, **columns):
    return [_digest(messages) for messages in completions]
'''


def main() -> None:
    args = arguments_parser(__doc__).parse_args()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = run_ours(folder)
        (folder / "episodes.json").write_text(json.dumps(ours))
        command = [python, "-W", "ignore", "-m", "benchmarks.agreement.trl_episodes_worker", name]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", NO_VLLM: "1"}
        subprocess.run(command, check=True, env=environment)
        theirs = json.loads((folder / "trl.json").read_text())
    rows = compare(ours, theirs)
    report("trl_episodes", rows, args.json)
    sys.exit(any(row["differ"] for row in rows))


def run_ours(folder: Path) -> list[dict[str, Any]]:
    """Returns the episodes of one step, each as prompt ids, turns, rewards and advantage."""
    tools = folder / "tools"
    fill_tools = functools.partial(fill_tools_demo, seed=0)
    make_folder(tools, {"seed": 0, "demo": "tools"}, fill_tools)
    (folder / "room.py").write_text(ENVIRONMENT)
    questions = [json.loads(line) for line in (tools / "train.jsonl").read_text().splitlines()]
    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "items": row["wanted"], "number": number}
        for number, row in enumerate(questions[:16])
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = [
        *(f"{{function: '{folder}/room.py:{name}', weight: {WEIGHTS[name]}}}" for name in WEIGHTS),
    ]
    overrides = {
        "run_dir": folder / "run",
        "model.path": tools / "model",
        "data.train": folder / "rows.jsonl",
        "rollout.num_prompts_per_step": len(rows),
        "rollout.group_size": GROUP_SIZE,
        "environment.factory": f"{folder}/room.py:Room",
        "environment.max_turns": 8,
        "environment.num_workers": 4,
        "rewards": f"[{', '.join(rewards)}]",
        # TRL divides by the deviation + 1e-4, ours by the deviation: compared before that.
        "advantage.normalize_std": "none",
        "optimizer.lr": 1e-12,
        "training.num_steps": 1,
        "logging.rollouts_every_steps": 1,
    }
    job = RanksJob(
        1,
        "grpo_spmd.train",
        "--config",
        str(_ROOT / "configs/demo-tools.yaml"),
        *(f"{key}={value}" for key, value in overrides.items()),
    )
    code, output = job.wait(300)
    if code:
        raise SystemExit(output[-2000:])
    records = [record for _, record in read_run(folder / "run").files.rollouts(1)]
    records.sort(key=lambda record: (record.position, record.sample))
    return [
        {
            "row": rows[record.row],
            "prompt_ids": record.turns[0]["token_ids"],
            "turns": [turn for turn in record.turns[1:] if turn["token_ids"]],
            "status": record.status,
            "rewards": record.rewards,
            "advantage": record.advantage,
        }
        for record in records
    ]


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Row]:
    """Returns a row for each kind of fact: episodes, and in how many the two sides differ."""
    distances: dict[str, list[float]] = {}
    for episode, other in zip(ours, theirs, strict=True):
        turns = episode["turns"]
        ids = [token for turn in turns for token in turn["token_ids"]]
        mask = [int(turn["sampled"]) for turn in turns for _ in turn["token_ids"]]
        facts = {
            "prompt tokens": float(episode["prompt_ids"] != other["prompt_ids"]),
            "tokens after the prompt": float(ids != other["completion_ids"]),
            "sampled or not": float(mask != other["mask"]),
            "advantage": abs(episode["advantage"] - other["advantage"]),
        }
        for name, reward in other["rewards"].items():
            facts[f"reward {name}"] = abs(episode["rewards"][name] - reward)
        for name, distance in facts.items():
            distances.setdefault(name, []).append(distance)
    turns_mean = sum(sum(turn["sampled"] for turn in e["turns"]) for e in ours) / len(ours)
    return [
        {
            "fact": name,
            "episodes": len(values),
            "turns": turns_mean,
            "differ": sum(value > TOLERANCE for value in values),
            "off by": max(values),
            "TRL version": TRL_VERSION,
        }
        for name, values in distances.items()
    ]


if __name__ == "__main__":
    main()
