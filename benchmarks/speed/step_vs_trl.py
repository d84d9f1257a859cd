"""A whole step beside TRL's: the same model, data, sampling, loss and optimizer, real generation by
vLLM on both sides, one thread each.

    benchmarks/run.sh step_vs_trl [--shape short|long_prompts|long_completions] [--sizes N ...]
    [--json FILE]

A random Qwen3 (float32, 4 layers of width 256) ends a completion with the same chance at each
token, so that lengths are ragged; a step is one optimizer step.

| shape | prompts x completions | tokens of a prompt | of a completion: mean, most | vocabulary |
|---|---|---|---|---|
| short | 16 x 8 | 8 to 24 | 90, 256 | 4,096 |
| long_prompts | 4 x 16 | 180 to 220 | 60, 240 | 8,192 |
| long_completions | 4 x 8 | 8 to 24 | 370, 1,024 | 4,096 |

Ours is `python -m grpo_spmd.train`, unchanged, with its defaults. TRL's is its GRPOTrainer with
colocated vLLM in .venv-trl (made on first use), its weight sync repaired for the CPU
(step_vs_trl_worker.py says how) and without what would slow it down here: bfloat16 and activation
checkpointing, both on by default. Both sides sample and train in float32. TRL by itself has vLLM
choose, which samples from a float32 policy in
bfloat16: a matrix product takes a CPU with AMX a fraction of the time, and what is sampled from is
not what is trained. The rows of that say so.

First, that both do the same: a small run of ours, whose rollouts TRL's trainer then trains on; loss
and advantages of each step must agree, and after several optimizer steps TRL's policy must still
give our completions the logprobs that our engine, synced from our policy, gave them. Then a sweep
of TRL's micro-batch, and rounds in
turn: ours, TRL at per_device_train_batch_size's default, with all rollouts in one batch
(gradient_accumulation_steps' default), at its best of --sizes, and at that with the engine in
bfloat16. All processes live on between their turns, stopped. Ours is stopped within a step, which
is left out; TRL waits between steps, and the one it makes in its turn counts. `tried` is
--sizes.

Times are wall-clock seconds of a step. "update" is forward, backward, clip and optimizer;
"logprobs" the pass before
it: TRL makes one for its weights of engine against policy, we take them from the update's own pass.
"a token" is the time over the tokens that were sampled in it: lengths are random, and of other
steps on either side.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import transformers
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from benchmarks.support.models import make_model
from benchmarks.support.report import Row, arguments_parser, ratios, report, spread
from benchmarks.support.trl_environment import TRL_VERSION, trl_python
from grpo_spmd.demo.making import model_config
from grpo_spmd.observe.run_folder import RunFolder

_ROUNDS = 5
_STEPS_A_TURN = 2  # of ours; TRL makes one
_SIZES = (4, 8, 16, 32, 64, 128)  # as far as the step has rollouts
_DEFAULT_SIZE = 8
_EOS = "<eos>"
_PHASES = ("generation", "sync", "reward", "logprobs", "update", "step")
_SHOWN = (
    "step",
    "step a token",
    "generation",
    "generation a token",
    "sync",
    "update",
    "logprobs + update",
)


@dataclass(frozen=True)
class Task:
    """A step's size and the learning rate, for both sides."""

    num_prompts: int
    group_size: int
    num_steps: int
    lr: float
    max_completion_tokens: int = 256
    max_prompt_tokens: int = 24

    @property
    def num_rollouts(self) -> int:
        return self.num_prompts * self.group_size


@dataclass(frozen=True)
class Shape:
    """What is timed; the learning rate is so small that lengths do not drift, one way here and the
    other way there."""

    task: Task
    fewest_prompt_tokens: int
    vocabulary: int
    mean_tokens: float  # of completions that nothing cuts off

    @property
    def end_logit(self) -> float:
        """Of the end above all others, which are near uniform: an end every `mean_tokens`."""
        return math.log((self.vocabulary - 1) / (self.mean_tokens - 1))


SHAPES = {
    "short": Shape(Task(16, 8, 1000, 1e-8), 8, 4096, 97),
    "long_prompts": Shape(Task(4, 16, 1000, 1e-8, 240, 220), 180, 8192, 61),
    "long_completions": Shape(Task(4, 8, 1000, 1e-8, 1024), 8, 4096, 420),
}
_COMPARED = Task(4, 4, 4, 1e-4)
_TOLERANCE = 1e-4  # TRL adds 1e-4 to standard deviations of about 50, which is some of what is seen


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="default: all, one after the other")
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=_SIZES, help="micro-batches that TRL is tried with"
    )
    args = parser.parse_args()
    chosen = [args.shape] if args.shape else list(SHAPES)
    for num_rollouts in (SHAPES[shape].task.num_rollouts for shape in chosen):
        fitting = [size for size in args.sizes if size <= num_rollouts]
        if not fitting or any(num_rollouts % size for size in fitting):
            parser.error(
                f"--sizes: of {num_rollouts} rollouts a micro-batch must be a part without "
                "remainder"
            )
    transformers.utils.logging.disable_progress_bar()
    python = trl_python()
    with tempfile.TemporaryDirectory() as name:
        make(Path(name), SHAPES["short"])
        equal = compare(Path(name), python)
        report("step_vs_trl_equal", equal, args.json)
        if off := [row["what"] for row in equal if not row["difference"] <= row["at most"]]:
            raise AssertionError(f"the two sides do not compute the same: {', '.join(off)}")
    for shape in chosen:
        with tempfile.TemporaryDirectory() as name:
            make(Path(name), SHAPES[shape])
            sweep, rows = race(Path(name), python, SHAPES[shape].task, args.rounds, args.sizes)
        report("step_vs_trl_sweep", [{"shape": shape, **row} for row in sweep], args.json)
        report("step_vs_trl", [{"shape": shape, **row} for row in rows], args.json)


# The task


def make(folder: Path, shape: Shape) -> None:
    """The model with its tokenizer in FOLDER/model, and FOLDER/train.jsonl."""
    num_words, max_length = shape.vocabulary, shape.task.max_prompt_tokens
    vocabulary = {_EOS: 0, **{f"w{i}": i for i in range(1, num_words)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_EOS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def change(model: Any) -> None:
        # An lm_head has no bias: one channel that is the same for every token stands in for it.
        model.model.embed_tokens.weight[:, 0] = 0.5
        model.lm_head.weight[0] = 0.0
        channel = (
            model.model(torch.randint(1, num_words, (8, 128))).last_hidden_state[..., 0].mean()
        )
        model.lm_head.weight[0, 0] = shape.end_logit / channel

    config = model_config(
        vocab_size=num_words,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    make_model(folder / "model", config, change=change)
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=_EOS, pad_token=_EOS
    )
    tokens.save_pretrained(folder / "model")  # in place of the demo's: words, not characters
    rng = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{rng.randrange(1, num_words)}" for _ in range(length))}
        for length in (rng.randint(shape.fewest_prompt_tokens, max_length) for _ in range(512))
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# Processes that take turns


class Side:
    """A process that writes a line of JSON to `steps` after each step. Only one of all has its turn
    at a time."""

    def __init__(self, command: list[str], steps: Path, log: Path) -> None:
        self._steps, self._log = steps, log
        self._file: TextIO | None = None
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=environment,
                text=True,
                start_new_session=True,
            )

    def wait(self, count: int) -> list[Row]:
        """The next `count` steps."""
        lines: list[str] = []
        piece = ""
        while len(lines) < count:
            ended = (
                self.process.poll() is not None
            )  # looked at first: what it wrote before its end is read below
            if self._file is None and self._steps.exists():
                self._file = self._steps.open()
            piece += self._file.readline() if self._file else ""
            if piece.endswith("\n"):
                lines.append(piece)
                piece = ""
            elif ended:
                raise SystemExit(
                    f"{self._steps.stem}: ended with "
                    f"{self.process.returncode}:\n{self._log.read_text()[-3000:]}"
                )
            else:
                time.sleep(0.002)
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        if self._file:
            self._file.close()
        os.killpg(
            self.process.pid, signal.SIGKILL
        )  # also where it is stopped; reward processes end with it
        self.process.wait()


class Ours(Side):
    def __init__(self, folder: Path, name: str, task: Task, **sections: dict[str, Any]) -> None:
        """`sections` of the config are laid over those below, key by key."""
        self.run = folder / name
        config: dict[str, Any] = {
            "run_dir": str(self.run),
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "data": {
                "train": str(folder / "train.jsonl"),
                "max_prompt_tokens": task.max_prompt_tokens,
            },
            "rollout": {
                "num_prompts_per_step": task.num_prompts,
                "group_size": task.group_size,
                "max_completion_tokens": task.max_completion_tokens,
            },
            "rewards": [
                {
                    "name": "even",
                    "function": f"{Path(__file__).with_name('step_vs_trl_reward.py')}:even_tokens",
                }
            ],
            "reward_pool": {"num_workers": 1},
            "optimizer": {"lr": task.lr},
            "training": {"num_steps": task.num_steps},
        }
        for section, values in sections.items():
            config[section] = config.get(section, {}) | values
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        super().__init__(
            [sys.executable, "-m", "grpo_spmd.train", "--config", str(path)],
            self.run / "metrics.jsonl",
            folder / f"{name}.log",
        )

    def turn(self, count: int) -> list[Row]:
        """`count` whole steps. The process is stopped at the start of a further one, which the next
        turn leaves out."""
        os.killpg(self.process.pid, signal.SIGCONT)
        steps = self.wait(1 + count)[1:]
        os.killpg(self.process.pid, signal.SIGSTOP)
        return [figures(metrics) for metrics in steps]


def figures(metrics: Row) -> Row:
    """A step of ours, by the names that TRL's side gives its own."""
    return {
        "generation_s": metrics["time/rollout_s"],
        "sync_s": metrics["time/weight_sync_s"],
        "reward_s": metrics["time/reward_s"],
        "logprobs_s": metrics["time/logprobs_s"],
        "update_s": metrics["time/update_s"],
        "step_s": metrics["time/step_s"],
        "reward_mean": metrics["reward/mean"],
        "tokens_mean": metrics["completion/tokens_mean"],
    }


class Trl(Side):
    def __init__(
        self,
        folder: Path,
        name: str,
        task: Task,
        python: str,
        micro_batch: int,
        replay: Sequence[Sequence[Row]] = (),
        engine_dtype: str | None = "float32",
        environment: str | None = None,
        **arguments: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "task": vars(task),
            "micro_batch": micro_batch,
            "arguments": arguments,
        }
        settings |= {"replay": replay, "engine_dtype": engine_dtype, "environment": environment}
        (folder / f"{name}.json").write_text(json.dumps(settings))
        command = [
            python,
            "-W",
            "ignore",
            "-m",
            "benchmarks.speed.step_vs_trl_worker",
            str(folder),
            name,
        ]
        super().__init__(command, folder / f"{name}.jsonl", folder / f"{name}.log")

    def turn(self, count: int) -> list[Row]:
        """`count` steps, after which the process waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.wait(count)


# The same numbers first


def compare(folder: Path, python: str) -> list[Row]:
    """TRL's trainer on the rollouts of a run of ours, over several optimizer steps."""
    ours = Ours(folder, "compared", _COMPARED)
    metrics = ours.wait(_COMPARED.num_steps)
    ours.end()
    run_folder = RunFolder(ours.run)
    rollouts = [run_folder.complete_rollouts(step) for step in range(1, _COMPARED.num_steps + 1)]
    retained = ("prompt_ids", "completion_ids", "rollout_logprobs")
    replay = [
        [{key: getattr(rollout, key) for key in retained} for rollout in step] for step in rollouts
    ]
    theirs = {}
    changed: dict[str, dict[str, Any]] = {"trained": {}, "untrained": {"learning_rate": 0.0}}
    for name, arguments in changed.items():
        trl = Trl(folder, name, _COMPARED, python, _COMPARED.group_size, replay, **arguments)
        theirs[name] = trl.turn(_COMPARED.num_steps)
        trl.end()
    pairs = [
        (m, step, trl) for m, step, trl in zip(metrics, rollouts, theirs["trained"], strict=True)
    ]
    rewards = max(abs(m["reward/mean"] - trl["reward_mean"]) for m, _, trl in pairs)
    loss = max(abs(m["loss/total"] - trl["loss"]) for m, _, trl in pairs)
    advantages = max(
        abs(r.advantage - a)
        for _, step, trl in pairs
        for r, a in zip(step, trl["advantages"], strict=True)
    )
    logprobs, untrained = (
        theirs[name][-1]["logprob_difference"] for name in ("trained", "untrained")
    )
    facts = {
        "steps": _COMPARED.num_steps,
        "rollouts a step": _COMPARED.num_rollouts,
        "lr": _COMPARED.lr,
        "TRL version": TRL_VERSION,
    }
    return [
        {
            "what": label,
            "difference": difference,
            "at most": maximum,
            "if TRL had not trained": idle,
            **facts,
        }
        for label, difference, maximum, idle in (
            ("mean reward", rewards, _TOLERANCE, "-"),
            ("loss", loss, _TOLERANCE, "-"),
            ("advantages", advantages, _TOLERANCE, "-"),
            (
                "logprobs of the last step: TRL's policy, our engine",
                logprobs,
                untrained / 100,
                untrained,
            ),
        )
    ]


# The times


def race(
    folder: Path, python: str, task: Task, rounds: int, chosen: Sequence[int]
) -> tuple[list[Row], list[Row]]:
    """Rows of the sweep over TRL's micro-batch, and of the rounds."""
    sides: list[Side] = []
    sizes = sorted(size for size in chosen if size <= task.num_rollouts)
    try:
        ours = Ours(folder, "ours", task)
        sides.append(ours)
        ours.turn(1)
        trl: dict[int, Trl] = {}
        swept: dict[int, Row] = {}
        for size in sizes:
            trl[size] = Trl(folder, f"trl_{size}", task, python, size)
            sides.append(trl[size])
            _, swept[size] = trl[size].turn(2)
        best = min(sizes, key=lambda size: swept[size]["step_s"])
        names = (
            (_DEFAULT_SIZE, "its default"),
            (task.num_rollouts, "one batch"),
            (best, "its best"),
        )
        racing = {
            ", ".join([str(size), *(name for item, name in names if item == size)]): trl[size]
            for size in sizes
            if size in dict(names)
        }
        for size in set(sizes) - set(dict(names)):
            trl[size].end()
        alone = racing[f"{best}, its best, engine in bfloat16"] = Trl(
            folder, "trl_alone", task, python, best, engine_dtype=None
        )
        sides.append(alone)
        alone.turn(1)
        local: list[list[Row]] = []
        theirs: dict[str, list[list[Row]]] = {label: [] for label in racing}
        for number in range(rounds):
            local.append(ours.turn(_STEPS_A_TURN))
            for label, racer in racing.items():
                theirs[label].append(racer.turn(1))
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        for side in sides:
            if side.process.returncode is None:
                side.end()
    facts = {
        "rollouts": task.num_rollouts,
        "threads": 1,
        "TRL version": TRL_VERSION,
        "tried": " ".join(map(str, sizes)),
    }
    sweep = [
        {"TRL's micro-batch": size, **{f"{p}_s": swept[size][f"{p}_s"] for p in _PHASES}, **facts}
        for size in sizes
    ]
    rows = []
    for label, turns in theirs.items():
        rows += [_row(label, phase, local, turns, task.num_rollouts) | facts for phase in _SHOWN]
    return sweep, rows


def _row(
    label: str, phase: str, local: list[list[Row]], theirs: list[list[Row]], num_rollouts: int
) -> Row:
    """One phase in all rounds; a round's ratio is between its own turns."""

    pieces, by_token = phase.removesuffix(" a token").split(" + "), phase.endswith(" a token")

    def seconds(turn: list[Row]) -> float:
        summed = [sum(float(step[f"{piece}_s"]) for piece in pieces) for step in turn]
        return sum(summed) / (tokens(turn) * num_rollouts * len(turn) if by_token else len(turn))

    def median(rounds: list[list[Row]], value: Callable[[list[Row]], float]) -> float:
        return statistics.median(value(turn) for turn in rounds)

    def tokens(turn: list[Row]) -> float:
        return statistics.mean(float(step["tokens_mean"]) for step in turn)

    return {
        "TRL's micro-batch": label,
        "phase": phase,
        "ours_s": median(local, seconds),
        "trl_s": median(theirs, seconds),
        **spread(
            "ratio", ratios([seconds(turn) for turn in theirs], [seconds(turn) for turn in local])
        ),
        "ours_samples_per_s": num_rollouts / median(local, seconds),
        "trl_samples_per_s": num_rollouts / median(theirs, seconds),
        "ours_tokens_mean": median(local, tokens),
        "trl_tokens_mean": median(theirs, tokens),
        "rounds": len(local),
    }


if __name__ == "__main__":
    main()
