"""Bad configs and data files of all kinds, for tests/unit/test_bad_inputs.py and
tests/runs/test_bad_inputs.py.

Each case spoils one thing in a folder that is otherwise good
(`test_the_unspoiled_folder_is_accepted`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import yaml

from grpo_spmd.train import main

ONE_TENSOR = safetensors.numpy.save({"x": numpy.zeros(3)})
Tree = dict[str, Any]
Spoil = Callable[[Tree], None]  # gets the config's tree; the working directory is the folder


@dataclass(frozen=True)
class Case:
    name: str
    expected: str  # must be in the line
    spoil: Spoil = lambda tree: None
    overrides: tuple[str, ...] = ()
    world_size: int | None = None
    local_world_size: int | None = None


CASES: list[Case] = []


def check_exit_code(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Of the command over ./config.yaml, with --check: should a bad input be accepted by mistake,
    the test fails
    instead of starting to train in pytest's own process."""
    monkeypatch.setattr(sys, "argv", ["train", "--config", "config.yaml", "--check", *overrides])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def bad(
    name: str, expected: str, *overrides: str, world_size: int | None = None
) -> Callable[[Spoil], Spoil]:
    """Decorates a function that spoils the folder."""

    def add(spoil: Spoil) -> Spoil:
        CASES.append(Case(name, expected, spoil, overrides, world_size))
        return spoil

    return add


def bad_value(
    expected: str,
    *overrides: str,
    world_size: int | None = None,
    local_world_size: int | None = None,
) -> None:
    name = " ".join(overrides)[:60]
    CASES.append(
        Case(
            name,
            expected,
            overrides=overrides,
            world_size=world_size,
            local_world_size=local_world_size,
        )
    )


def bad_file(name: str, file: str, content: str | bytes, expected: str, *overrides: str) -> None:
    """One file of the folder has other content."""

    def spoil(_: Tree) -> None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        Path(file).write_bytes(content.encode() if isinstance(content, str) else content)

    CASES.append(Case(name, expected, spoil, overrides))


def bad_line(name: str, content: str | bytes, expected: str, *overrides: str) -> None:
    """The second line of the data set is another one."""
    line = content.encode() if isinstance(content, str) else content
    bad_file(
        f"data: {name}",
        "train.jsonl",
        GOOD_LINE + line + b"\n" + 4 * GOOD_LINE,
        f"train.jsonl:2: {expected}",
        *overrides,
    )


def bad_reward(name: str, source: str | bytes, expected: str, *overrides: str) -> None:
    """The reward is a function of mine.py."""
    bad_file(
        f"reward: {name}",
        "mine.py",
        source,
        expected,
        "rewards=[{function: 'mine.py:score'}]",
        *overrides,
    )


GOOD_LINE = b'{"prompt": "3,8=24:", "nums": [3, 8], "target": 24}\n'
GOOD_CONFIG: Tree = {
    "run_dir": "runs/new",
    "model": {"path": "./model"},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 8},
    "rollout": {"num_prompts_per_step": 4, "group_size": 2, "max_completion_tokens": 8},
    "rewards": [{"name": "countdown", "args": {"answer_tag": None}}],
    "training": {"max_tokens_per_micro_batch": 64},
}

# The config file

bad_file("yaml: indent", "config.yaml", "run_dir: a\n seed: 1\n", "config.yaml:2: not valid YAML")
bad_file("yaml: open bracket", "config.yaml", "run_dir: a\nseed: [1\n", "not valid YAML")
bad_file(
    "yaml: tab", "config.yaml", "run_dir: a\nmodel:\n\tpath: b\n", "config.yaml:3: not valid YAML"
)
bad_file(
    "yaml: key twice",
    "config.yaml",
    "run_dir: a\nmodel: {}\nrun_dir: b\n",
    "config.yaml:3: not valid YAML: the key 'run_dir'",
)
bad_file("yaml: control character", "config.yaml", "run_dir: a\0b\n", "config.yaml: not valid YAML")
bad_file(
    "yaml: python object",
    "config.yaml",
    "run_dir: !!python/name:os.getcwd\n",
    "config.yaml:1: not valid YAML",
)
bad_file(
    "yaml: impossible date",
    "config.yaml",
    "run_dir: 2024-13-45\n",
    "config.yaml: not valid YAML: month",
)
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, after in zip("abcdefghij", "bcdefghijk", strict=True)
)
for name, text, expected in (
    (
        "billion laughs",
        LAUGHS,
        "config.yaml:4: not valid YAML: more than 10000 values, aliases written out",
    ),
    (
        "laughs merged",
        LAUGHS.replace("[x,", "[{b: 1},") + "run_dir:\n  <<: *k\n",
        "more than 10000 values",
    ),
    (
        "a list of itself",
        "run_dir: &a [*a, *a]\n",
        "config.yaml:1: not valid YAML: more than 10000 values",
    ),
    (
        "a mapping of itself",
        "run_dir: &a {b: *a}\n",
        "config.yaml:1: not valid YAML: more than 10000 values",
    ),
    (
        "many values",
        "run_dir:\n" + "- 1\n" * 200_000,
        "config.yaml:10001: not valid YAML: more than 10000 values",
    ),
    ("too large", "run_dir: " + "x" * (1 << 20), "--config: config.yaml is larger than 1 MiB"),
    ("nested too deeply", "run_dir: " + "[" * 5000, "config.yaml: not valid YAML"),
    ("mappings nested too deeply", "run_dir: " + "{a: " * 5000, "config.yaml: not valid YAML"),
    ("a million digits", "seed: " + "9" * 1_000_000, "config.yaml:1: not valid YAML"),
    ("a long hexadecimal number", "seed: 0x" + "f" * 5000, "a number of more than 1000 digits"),
    (
        "a long number to the base 60",
        "seed: 1" + ":1" * 90_000,
        "a number of more than 1000 digits",
    ),
    ("bytes", "run_dir: !!binary aGVsbG8=\n", "run_dir must be text; got b'hello'"),
    ("a set", "run_dir: !!set {a}\n", "run_dir must be text; got"),
    ("a set as a key", "? !!set {a}\n: 1\n", "not valid YAML"),
    ("an empty int", 'seed: !!int ""\n', "not valid YAML"),
    ("a sign alone", 'seed: !!float "-"\n', "not valid YAML"),
    ("a large number to the base 60", "seed: 1" + ":1" * 200 + ".0\n", "not valid YAML"),
    ("a key that clears the screen", '"\\e[2J": 1\n', "\\x1b[2J: unknown key"),
):
    bad_file(f"yaml: {name}", "config.yaml", text, expected)
bad_value("seed must be a finite number, and below 2^63", "seed=" + "9" * 30)
bad_value("seed must be a whole number >= 0; got '99999", 'seed="' + "9" * 6000 + '"')
bad_value("run_dir: the value 'a\\nb' holds a control character", "run_dir=a\nb")
bad_value("run_dir: the value 'a\\x1b[2Jb' holds a control character", "run_dir=a\x1b[2Jb")
bad_value(
    "run_dir must not contain a control character, as a line break is; got 'a\\nb'",
    'run_dir="a\\nb"',
)
bad_value("model.path must not contain a control character", 'model.path="a\\tb"')
bad_value(
    "data.eval.a must not contain a control character",
    'data.eval={a: "b\\n.jsonl"}',
    "eval.every_steps=5",
)
bad_value(
    "rewards.0.function must not contain a control character", 'rewards=[{function: "a\\n.py:f"}]'
)
bad_value(
    "rollout.engine.when must be text or a number; got datetime",
    "rollout.engine={when: 2024-01-01}",
)
bad_file("yaml: not UTF-8", "config.yaml", b"run_dir: \xff\n", "--config: cannot read config.yaml")
bad_file("yaml: empty", "config.yaml", "", "config.yaml: a config is a mapping")
bad_file("yaml: list", "config.yaml", "- run_dir: a\n", "config.yaml: a config is a mapping")


@bad("yaml: no such file", "--config: cannot read config.yaml")
def _(_: Tree) -> None:
    Path("config.yaml").unlink()


@bad("yaml: a folder", "--config: cannot read config.yaml")
def _(_: Tree) -> None:
    Path("config.yaml").unlink()
    Path("config.yaml").mkdir()


for section in ("run_dir", "model", "data", "rewards"):

    @bad(f"missing {section}", f"{section}")
    def _(tree: Tree, section: str = section) -> None:
        del tree[section]


@bad("missing model.path", "model.path is required and missing")
def _(tree: Tree) -> None:
    tree["model"] = None


@bad("unknown section", "optimiser: unknown key; did you mean optimizer?")
def _(tree: Tree) -> None:
    tree["optimiser"] = {"lr": 1}


@bad("unknown key with a line break", "unknown key")
def _(tree: Tree) -> None:
    tree["data"]["two\nlines"] = 1


bad_value(
    "rollout.group_sise: unknown key; did you mean rollout.group_size?", "rollout.group_sise=2"
)
bad_value("rewards.0.wait: unknown key", "rewards.0.wait=2")
bad_value("an override is section.key=value, got 'seed'", "seed")
bad_value("seed: the value '[' is not valid YAML", "seed=[")
bad_value("rewards.3", "rewards.3.weight=1")
bad_value("optimizer.lr must be a number >= 0; got nan", "optimizer.lr=.nan")
bad_value("optimizer.lr must be a finite number", "optimizer.lr=.inf")
bad_value("optimizer.lr must be a number >= 0; got 'small'", "optimizer.lr=small")
bad_value("optimizer.lr must be a number >= 0; got -0.1", "optimizer.lr=-0.1")
bad_value(
    "rewards.0.weight must be a number >= -1e+06 and <= 1e+06; got nan", "rewards.0.weight=.nan"
)
bad_value("training.num_steps must be a whole number >= 1; got 0", "training.num_steps=0")
bad_value("training.num_steps must be a whole number >= 1; got 2.5", "training.num_steps=2.5")
bad_value(
    "rollout.num_prompts_per_step must be a whole number >= 1; got -4",
    "rollout.num_prompts_per_step=-4",
)
bad_value("rollout.group_size must be a whole number >= 2; got 1", "rollout.group_size=1")
bad_value(
    "rollout.max_completion_tokens must be a whole number >= 1; got -1",
    "rollout.max_completion_tokens=-1",
)
bad_value("rollout.temperature must be a number >= 0.01 and <= 100; got 0", "rollout.temperature=0")
bad_value("rollout.temperature must be a number", "rollout.temperature=1e30")
bad_value("eval.temperature must be a number", "eval.temperature=1e30")
bad_value("watchdog.timeout_s must be a number", "watchdog.timeout_s=1e300")
bad_value("watchdog.phase_timeouts_s must be a mapping", "watchdog.phase_timeouts_s={eval: 1e8}")
bad_value("environment.call_timeout_s must be a number", "environment.call_timeout_s=1e10")
bad_value("rewards.0.weight must be a number", "rewards=[{name: exact, weight: 1e30}]")
bad_value("run_dir: / is the root of all folders", "run_dir=/")
bad_value(
    "rollout.engine.max_num_seq: vllm.LLM of the installed version has no such argument; did you "
    "mean max_num_seqs?",
    "rollout.engine={max_num_seq: 8}",
)
bad_value(
    "rollout.gpu_memory_utilization must be a number > 0 and < 1; got 1.5",
    "rollout.gpu_memory_utilization=1.5",
)
bad_value("loss.clip_ratio_low must be a number > 0 and <= 1; got 1.5", "loss.clip_ratio_low=1.5")
bad_value("loss.kl_coef must be a number >= 0; got -0.1", "loss.kl_coef=-0.1")
bad_value("loss.kl_estimator must be k1|k2|k3; got 'k4'", "loss.kl_estimator=k4")
bad_value("optimizer.betas must be a list of 2 numbers", "optimizer.betas=[0.9, 0.95, 0.99]")
bad_value(
    "optimizer.betas must be a list of 2 numbers >= 0 and < 1; got [0.9, 1]",
    "optimizer.betas=[0.9, 1]",
)
bad_value("seed must be a whole number >= 0; got -1", "seed=-1")
bad_value("data.shuffle must be true or false; got 'maybe'", "data.shuffle=maybe")
bad_value("run_dir must not be empty", "run_dir=''")
bad_value("run_dir must not contain a control character", 'run_dir="a\\0b"')
bad_value(
    "training.max_tokens_per_micro_batch (15) must hold the longest rollout",
    "training.max_tokens_per_micro_batch=15",
)
bad_value(
    "training.num_mini_batches (3) must divide rollout.num_prompts_per_step (4)",
    "training.num_mini_batches=3",
)
bad_value("rollout.engine.max_model_len", "rollout.engine.max_model_len=10")
bad_value("rewards must name at least one reward", "rewards=[]")
bad_value(
    "rollout.tensor_parallel_size (2) must divide the number of ranks (1)",
    "rollout.tensor_parallel_size=2",
)
bad_value(
    "rollout.tensor_parallel_size (4) must divide the number of ranks (6)",
    "rollout.tensor_parallel_size=4",
    world_size=6,
)
bad_value(
    "rollout.tensor_parallel_size (4) must divide the number of ranks (2): 1, 2 would",
    "rollout.tensor_parallel_size=4",
    world_size=2,
)
bad_value(
    "model.num_replicas (4) must divide the number of ranks (6): 1, 2, 3, 6 would",
    "model.num_replicas=4",
    world_size=6,
)
bad_value(
    "model.num_replicas (2) must divide the number of ranks (1): 1 would", "model.num_replicas=2"
)
bad_value(
    "model.sequence_parallel_size (2) must divide the number of ranks (3): 1, 3 would",
    "model.sequence_parallel_size=2",
    world_size=3,
)
bad_value(
    "model.sequence_parallel_size (4) must divide the ranks of a node, since those that share a "
    "row are on one (6): 1, 2, 3, 6 would",
    "model.sequence_parallel_size=4",
    world_size=12,
    local_world_size=6,
)
bad_value(
    "model.sequence_parallel_size (8) must divide the model's 4 attention heads",
    "model.sequence_parallel_size=8",
    world_size=8,
)
bad_value(
    "training.share_prefixes is true and model.sequence_parallel_size is 2: ranks share whole "
    "rows; set share_prefixes to auto or false",
    "model.sequence_parallel_size=2",
    "training.share_prefixes=true",
    world_size=2,
)
bad_value(
    "model.sequence_parallel_size (2): a teacher does not score rows that ranks share; set it to 1",
    "model.sequence_parallel_size=2",
    "teacher.path=policy",
    "teacher.prompt_key=answer",
    world_size=2,
)
bad_value("model.num_replicas must be a whole number >= 1; got 0", "model.num_replicas=0")
bad_value(
    "rollout.tensor_parallel_size (4) must divide the ranks of a node, since an engine stays on "
    "one (6): 1, 2, 3, 6 would",
    "rollout.tensor_parallel_size=4",
    world_size=12,
    local_world_size=6,
)
bad_value(
    "must divide the model's 4 attention heads", "rollout.tensor_parallel_size=3", world_size=3
)

# Texts and values as people know them from elsewhere

for name, text, expected in (
    ("a dotted key", "rollout.group_size: 4\n", "in the file write rollout: {group_size: 4}"),
    ("no blank after a colon", "run_dir: a\nseed:3\n",
        "config.yaml:2: not valid YAML: could not find expected ':'; a blank is missing after "
        "the colon: seed: 3"),
    ("no blank in a section", "run_dir: a\nmodel:\n  path:x\n",
        "model: expected a section (a mapping), got 'path:x'; a blank is missing after the "
        "colon"),
    ("TOML", '[model]\npath = "x"\n', "config.yaml:2: not valid YAML: expected '<document "
                                      "start>', but found "
        "'<scalar>'; it looks like TOML"),
    ("TOML with a key first", 'seed = 3\n[model]\npath = "x"\n', "got str; it looks like TOML"),
    ("a no-break space", "run_dir: a\nseed:\u00a03\n", "config.yaml:2: not valid YAML: could not "
                                                       "find expected ':'; it "
        "holds the character '\\xa0'"),
    ("a template without quotes", "run_dir: a\nmodel: {path: model}\ndata: {train: a.jsonl, "
                                  "prompt_template: {a}}\n",
        "stands in quotes, in the file 'Q: {question}'"),
    ("a colon in a text", "data:\n  prompt_template: Question: "
                          "{prompt}\n", "with a colon and a blank in it stands in"),
    ("a number with a zero in front", "seed: 010\n", "config.yaml:1: not valid YAML: 010 is to "
                                                     "the base 8"),
):  # fmt: skip
    bad_file(f"yaml: {name}", "config.yaml", text, expected)
for expected, override in (
    ("stands in quotes, in the file 'Q: {question}'", "data.prompt_template=Q: {question}"),
    ("model.path: “model” has the quotes of a text processor", "model.path=“model”"),
    ("rewards[0].weight: an index stands after a dot: rewards.0.weight=2", "rewards[0].weight=2"),
    ("+optimizer.lr: no + or ~ stands before a key: optimizer.lr=1e-6", "+optimizer.lr=1e-6"),
    ("to add one, give the whole list: rewards=[...]", "rewards.1.name=gsm8k"),
    ("rewards.0: expected a section (a mapping), got 'exact'; write {name: "
     "NAME}", "rewards=[exact]"),
    ("got 'r.py:fn'; write {name: NAME} or {function: 'file.py:fn'}", "rewards=[r.py:fn]"),
    ("loss.aggregation must be token|sequence|constant; got 'token-mean'; token-mean is "
     "token",
     "loss.aggregation=token-mean"),
    ("reinforce_plus_plus is reinforce_pp", "advantage.estimator=reinforce_plus_plus"),
    ("nearest is grpo with advantage.normalize_std: "
     "batch", "advantage.estimator=reinforce_baseline"),
    ("low_var_kl is k3", "loss.kl_estimator=low_var_kl"),
    ("got False; False is none", "advantage.normalize_std=false"),
    ("constant with optimizer.warmup_steps", "optimizer.schedule=constant_with_warmup"),
    ("cosine with optimizer.min_lr", "optimizer.schedule=cosine_with_min_lr"),
    ("true: parameters and optimizer state", "model.offload=cpu"),
    ("full is true", "model.activation_checkpointing=full"),
    ("drop leaves it out", "data.on_long_prompt=truncate"),
    ("ppo is clip", "loss.policy=ppo"),
    ("got '1,024'; write the digits alone, with a point", "training.num_steps=1,024"),
    ("got '16k'; write the digits alone", "training.num_steps=16k"),
    ("got '0,001'; write the digits alone, with a point", "optimizer.lr=0,001"),
    ("got '60%'; write the digits alone", "rollout.gpu_memory_utilization=60%"),
    ("in seconds, or as 12:00:00", "training.max_time_s=12h"),
    ("got 'Qwen/Qwen3'; model.path=Qwen/Qwen3", "model=Qwen/Qwen3"),
    ("auto goes on from run_dir's newest checkpoint", "checkpoint.resume=null"),
    ("010 is to the base 8", "seed=010"),
    ("run_dir: $SCRATCH/x must be a folder: no URL, no variable", "run_dir=$SCRATCH/x"),
    ("run_dir: ${HOME}/x must be a folder", "run_dir=${HOME}/x"),
    ("run_dir: ~nobody_here/x must be a folder", "run_dir=~nobody_here/x"),
    ("run_dir: s3://bucket/x must be a folder", "run_dir=s3://bucket/x"),
    ("run_dir: " + "a" * 40 + "... is too long for a path", "run_dir=" + "a" * 300),
    ("model.path: " + "b" * 40 + "... is too long for a path", "model.path=" + "b" * 300),
    ("run_dir: model is the folder of model.path", "run_dir=model"),
    ("rewards.0.function: " + "d" * 40 + "... is too long for a "
                                         "path", "rewards=[{function: " + "d" * 300 + ".py:fn}]"),
    ("checkpoint.resume: " + "c" * 40 + "... is too long", "checkpoint.resume=" + "c" * 300),
    ("rollout.engine.temperature: set rollout.temperature "
     "instead", "rollout.engine={temperature: 0.5}"),
    ("rollout.engine.max_tokens: set rollout.max_completion_tokens "
     "instead", "rollout.engine={max_tokens: 5}"),
):  # fmt: skip
    bad_value(expected, override)
bad_value(
    "optimizer.lr is given twice, with two values; leave one out",
    "optimizer.lr=1e-6",
    "optimizer.lr=2e-6",
)

# The data

bad_line("broken JSON", '{"prompt": "1', "not valid JSON")
bad_line("JSON cut off", '{"prompt": "1"', "not valid JSON")
bad_line("not UTF-8", b'{"prompt": "\xff"}', "not UTF-8")
bad_line("UTF-16", '{"prompt": "1"}'.encode("utf-16"), "not UTF-8")
bad_line("a name twice", '{"prompt": "1", "prompt": "2"}', "not valid JSON: a name is given twice")
bad_line("a list", '["1"]', "expected a JSON object, got list")
bad_line("a number", "1", "expected a JSON object, got int")
bad_line("nested too deeply", "[" * 100_000, "not valid JSON")
bad_line("a number of 5000 digits", '{"prompt": "1", "n": ' + "1" * 5000 + "}", "not valid JSON")
bad_line(
    "missing column",
    '{"question": "1"}',
    "no column 'prompt' (data.prompt_key); the columns are question",
)
bad_line("no columns", "{}", "no column 'prompt' (data.prompt_key); the columns are none")
bad_line("empty prompt", '{"prompt": ""}', "the prompt in column 'prompt' is empty")
bad_line(
    "empty prompt as chat",
    '{"prompt": ""}',
    "the prompt in column 'prompt' is empty",
    "data.as_chat=true",
)
bad_line("no messages", '{"prompt": []}', "the prompt in column 'prompt' is empty")
bad_line(
    "prompt is null", '{"prompt": null}', "the prompt in column 'prompt' must be a string or a list"
)
bad_line(
    "prompt is a number",
    '{"prompt": 5}',
    "the prompt in column 'prompt' must be a string or a list",
)
bad_line(
    "prompt is a list of strings",
    '{"prompt": ["1"]}',
    "the prompt in column 'prompt' must be a string or a list",
)
bad_line(
    "message without a role",
    '{"prompt": [{"content": "1"}]}',
    "the prompt in column 'prompt' must be a string or a list",
)
bad_line(
    "message without content",
    '{"prompt": [{"role": "user"}]}',
    "the prompt in column 'prompt' must be a string or a list",
)
bad_line(
    "content is a number",
    '{"prompt": [{"role": "user", "content": 1}]}',
    "the prompt in column 'prompt' must be a string or a list",
)
bad_line(
    "half a surrogate pair",
    '{"prompt": "\\ud800"}',
    "the prompt in column 'prompt' holds half a surrogate pair",
)
bad_line(
    "half a surrogate pair in a part",
    '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "\\ud800"}]}]}',
    "the prompt in column 'prompt' holds half a surrogate pair",
)
bad_line(
    "prompt too long",
    '{"prompt": "1+2+3+4+5"}',
    "the prompt has 9 tokens, over data.max_prompt_tokens=8",
)

bad_value(
    "data.train: train.jsonl has 5 usable prompts, but one step takes "
    "rollout.num_prompts_per_step=6",
    "rollout.num_prompts_per_step=6",
)
bad_value(
    "rollout.tail_batching (3.5) launches 7 prompts, and data.train has 5 usable ones; lower it, "
    "or leave it out",
    "rollout.num_prompts_per_step=2",
    "rollout.tail_batching=3.5",
)
bad_value(
    "rollout.dynamic_sampling is true and rollout.tail_batching is",
    "rollout.tail_batching=1.5",
    "rollout.dynamic_sampling=true",
)
bad_value("no column 'question' (data.prompt_key)", "data.prompt_key=question")
bad_value("data.train: cannot read nowhere.jsonl", "data.train=nowhere.jsonl")
bad_value("data.train: cannot read nowhere.parquet", "data.train=nowhere.parquet")
bad_value("data.train: cannot read folder.jsonl", "data.train=folder.jsonl")
bad_value("data.train must end in .jsonl or .parquet", "data.train=train.csv")
bad_value("data.train: a hub data set is hub:REPO:SUBSET:SPLIT", "data.train=hub:org/name")
bad_value("data.train: a hub data set is hub:REPO:SUBSET:SPLIT", "data.train=hub:::train")
bad_file("data: empty", "train.jsonl", "", "data.train: train.jsonl has 0 usable prompts")
bad_file(
    "data: only blank lines",
    "train.jsonl",
    "\n \n\n",
    "data.train: train.jsonl has 0 usable prompts",
)
bad_file(
    "data: parquet of zero bytes",
    "x.parquet",
    "",
    "data.train: x.parquet cannot be read as parquet",
    "data.train=x.parquet",
)
bad_file(
    "data: jsonl named parquet",
    "x.parquet",
    GOOD_LINE * 9,
    "data.train: x.parquet cannot be read as parquet",
    "data.train=x.parquet",
)
bad_file(
    "data: parquet named jsonl", "train.jsonl", b"PAR1\x15\x04\xff", "train.jsonl:1: not UTF-8"
)


# The held-out sets

EVERY = "eval.every_steps=5"


def bad_eval_line(name: str, content: str, expected: str, *overrides: str) -> None:
    """The second line of the second held-out set is another one."""
    bad_file(
        f"eval: {name}",
        "b.jsonl",
        GOOD_LINE + content.encode() + b"\n",
        expected,
        "data.eval={a: train.jsonl, b: b.jsonl}",
        *overrides,
    )


bad_eval_line("broken JSON", '{"prompt": "1"', "b.jsonl:2: not valid JSON", EVERY)
bad_eval_line(
    "missing prompt",
    '{"question": "1"}',
    "b.jsonl:2: no column 'prompt' (data.prompt_key); the columns are question",
    EVERY,
)
bad_eval_line(
    "prompt too long",
    '{"prompt": "1+2+3+4+5"}',
    "b.jsonl:2: the prompt has 9 tokens, over data.max_prompt_tokens=8",
    EVERY,
)
bad_eval_line(
    "messages without a chat template",
    '{"prompt": [{"role": "user", "content": "1"}]}',
    "b.jsonl:2: the prompt is chat messages",
    EVERY,
)
bad_file(
    "eval: empty",
    "b.jsonl",
    "\n",
    "data.eval.b: b.jsonl has 0 usable prompts; add prompts or leave",
    "data.eval={b: b.jsonl}",
    EVERY,
)
bad_file(
    "eval: missing reward column",
    "b.jsonl",
    '{"prompt": "1", "nums": [1]}\n',
    "rewards.0: 'countdown' needs the column 'target', which b.jsonl does not have; besides the "
    "prompt it has nums",
    "data.eval={a: train.jsonl, b: b.jsonl}",
    EVERY,
)
bad_file(
    "eval: jsonl named parquet",
    "x.parquet",
    GOOD_LINE,
    "data.eval.x: x.parquet cannot be read as",
    "data.eval={x: x.parquet}",
    EVERY,
)
bad_value(
    "data.eval is set, but eval.every_steps is 0, so that nothing would be evaluated",
    "data.eval=nowhere.jsonl",
)
bad_value("data.prompt_template names no column in braces", "data.prompt_template=Say")
bad_value(
    "train.jsonl:1: no column 'question' (data.prompt_template); the columns are prompt",
    "data.prompt_template='Q: {question}'",
)
bad_value(
    "rewards.0.args.time_s (8) must be at least a second under reward_pool.timeout_s (8.5)",
    "rewards=[{name: code, args: {tests_column: nums}}]",
    "reward_pool.timeout_s=8.5",
)
bad_value("loss.dual_clip (1.2) must be > 1 + loss.clip_ratio_high (1.28)", "loss.dual_clip=1.2")
bad_value("loss.kl_in is reward and loss.kl_coef is 0", "loss.kl_in=reward")
bad_value(
    "loss.old_logprobs is engine and loss.rollout_correction is token_tis",
    "loss.old_logprobs=engine",
)
bad_value(
    "rollout.top_p: unknown key, vLLM's name: nothing here (training samples from the whole "
    "distribution",
    "rollout.top_p=0.9",
)
bad_value(
    "rollout.engine.min_p: training samples from the whole distribution",
    "rollout.engine={min_p: 0.1}",
)
bad_value(
    "data.chat_template_kwargs.tools: the trainer sets this itself",
    "data.chat_template_kwargs={tools: []}",
)
bad_value(
    "eval.temperature is 0 and eval.num_samples is 4",
    "data.eval=train.jsonl",
    EVERY,
    "eval.temperature=0",
)
bad_value(
    "eval.temperature must be 0 (greedy) or >= 0.01; got 0.001",
    "data.eval=train.jsonl",
    EVERY,
    "eval.temperature=0.001",
)
bad_value(
    "advantage.overlong_buffer_tokens (99) must be <= rollout.max_completion_tokens",
    "advantage.overlong_buffer_tokens=99",
)
bad_value("data.eval: cannot read nowhere.jsonl", "data.eval=nowhere.jsonl", EVERY)
bad_value("data.eval.a: cannot read nowhere.parquet", "data.eval={a: nowhere.parquet}", EVERY)
bad_value(
    "data.eval must end in .jsonl or .parquet, or be hub:REPO:SUBSET:SPLIT; got 'test.csv'",
    "data.eval=test.csv",
    EVERY,
)
bad_value(
    "data.eval.a: a hub data set is hub:REPO:SUBSET:SPLIT", "data.eval={a: 'hub:org/name'}", EVERY
)


def _write_parquet(records: list[Tree]) -> Path:
    import pyarrow
    import pyarrow.parquet

    path = Path("x.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


@bad(
    "data: truncated parquet",
    "data.train: x.parquet cannot be read as parquet",
    "data.train=x.parquet",
)
def _(_: Tree) -> None:
    path = _write_parquet([{"prompt": "1"}] * 5)
    path.write_bytes(path.read_bytes()[:-20])


@bad("data: parquet torn in the middle", "data.train", "data.train=x.parquet")
def _(_: Tree) -> None:
    path = _write_parquet([{"prompt": f"{i} {i * i}"} for i in range(500)])
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 400 + content[404:])


@bad(
    "data: parquet without the column",
    "x.parquet:row 0: no column 'prompt'",
    "data.train=x.parquet",
)
def _(_: Tree) -> None:
    _write_parquet([{"question": "1"}])


@bad(
    "data: parquet with a null prompt",
    "x.parquet:row 1: the prompt in column 'prompt' must be",
    "data.train=x.parquet",
)
def _(_: Tree) -> None:
    _write_parquet([{"prompt": "1"}, {"prompt": None}])


for name, prompt, overrides in [
    ("messages", '[{"role": "user", "content": "1"}]', ()),
    ("as_chat", '"1"', ("data.as_chat=true",)),
    ("system prompt", '"1"', ("data.system_prompt=1",)),
]:
    content = 5 * ('{"prompt": ' + prompt + ', "nums": [], "target": 0}\n')
    bad_file(
        f"data: {name} without a chat template",
        "train.jsonl",
        content,
        "train.jsonl:1: the prompt is chat messages",
        *overrides,
    )

bad_value(
    "data.system_prompt make plain text some), but the tokenizer of model.path has no chat",
    "data.system_prompt=b",
)
bad_value("the prompt is chat messages (data.as_chat and data.system_prompt make plain text some), "
          "but the tokenizer of model.path has no chat template; take an instruct",
          "data.as_chat=true")  # fmt: skip

# The run folder


@bad("run_dir: holds a run", "run_dir: runs/new holds a metrics.jsonl already")
def _(_: Tree) -> None:
    Path("runs/new").mkdir(parents=True)
    Path("runs/new/metrics.jsonl").write_text("{}\n", encoding="utf-8")


@bad("run_dir: is a file", "run_dir: runs/new is not a folder")
def _(_: Tree) -> None:
    Path("runs").mkdir()
    Path("runs/new").write_text("precious", encoding="utf-8")


@bad("run_dir: lies below a file", "run_dir: runs is not a folder")
def _(_: Tree) -> None:
    Path("runs").write_text("precious", encoding="utf-8")


# The model

bad_value("model.path: there is no folder", "model.path=./nowhere")
bad_value("model.path: there is no folder", "model.path=/nowhere/at/all")
bad_value("model.path: there is no folder config.yaml", "model.path=config.yaml")
bad_value(
    "(8) + rollout.max_completion_tokens (60) = 68, but the model has 64 positions",
    "rollout.max_completion_tokens=60",
    "training.max_tokens_per_micro_batch=99",
)
bad_file(
    "model: broken config.json",
    "model/config.json",
    "{",
    "model.path: model/config.json is not valid JSON",
)
bad_file(
    "model: config.json not UTF-8",
    "model/config.json",
    b"\xff",
    "model.path: model/config.json is not valid JSON",
)
bad_file(
    "model: no model_type",
    "model/config.json",
    "{}",
    "model.path: model/config.json names no model_type",
)
bad_file(
    "model: weights cut off",
    "model/model.safetensors",
    ONE_TENSOR[:-1],
    "model.path: model/model.safetensors is not a whole safetensors file",
)
bad_file(
    "model: weights empty",
    "model/model.safetensors",
    b"",
    "model.path: model/model.safetensors is not a whole safetensors file",
)
bad_file(
    "model: weights are text",
    "model/model.safetensors",
    b"version https://git-lfs",
    "model.path: model/model.safetensors is not a whole",
)
bad_file(
    "model: config.json is a list",
    "model/config.json",
    "[]",
    "model.path: model/config.json must hold a JSON object, got list",
)
bad_file(
    "model: broken tokenizer.json",
    "model/tokenizer.json",
    "{}",
    "model.path: cannot read model/tokenizer.json",
)


BACKTRACKS = {
    "type": "Split",
    "pattern": {"Regex": "(a+)+$"},
    "behavior": "Isolated",
    "invert": False,
}


@bad(
    "model: a tokenizer that backtracks without end",
    "model.path: its tokenizer fails on a prompt from train.jsonl:1 on",
)
def _(_: Tree) -> None:
    path = Path("model/tokenizer.json")
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"pre_tokenizer": BACKTRACKS}), encoding="utf-8"
    )
    Path("train.jsonl").write_bytes(5 * GOOD_LINE.replace(b"3,8=24:", b"a" * 40 + b"b"))


def bad_model_file(name: str, file: str, value: Any, expected: str) -> None:
    bad_file(f"model: {name}", f"model/{file}", json.dumps(value), expected)


for name, change, expected in (
    (
        "hidden_size is text",
        {"hidden_size": "x"},
        "model/config.json: hidden_size: Expected `int | array | null`, got `str`; got 'x'",
    ),
    ("negative hidden_size", {"hidden_size": -1}, "got -1"),
    (
        "a thousand million layers",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers: Expected `int` <= 1000; got 1000000000",
    ),
    (
        "eos_token_id is text",
        {"eos_token_id": "x"},
        "model/config.json: eos_token_id: Expected `int | array | null`",
    ),
    ("negative eos_token_id", {"eos_token_id": -1}, "eos_token_id: Expected `int`"),
    ("nested eos_token_id", {"eos_token_id": [[1]]}, "eos_token_id: Expected `int`"),
    ("huge eos_token_id", {"eos_token_id": 10**30}, "eos_token_id: Expected `int`"),
    (
        "true as a number",
        {"num_attention_heads": True},
        "num_attention_heads: Expected `int | array | null`, got `bool`",
    ),
    (
        "inner config",
        {"text_config": {"vocab_size": 0}},
        "model/config.json: text_config: vocab_size: Expected `int` >= 1; got 0",
    ),
):
    bad_model_file(name, "config.json", {"model_type": "qwen3", **change}, f"{expected}")
bad_model_file(
    "eos of generation_config",
    "generation_config.json",
    {"eos_token_id": {}},
    "generation_config.json: eos_token",
)
for name, index, expected in (
    ("no weight_map", {}, "model.safetensors.index.json names no weight_map"),
    (
        "out of the folder",
        {"weight_map": {"x": "../../../etc/passwd"}},
        "weight_map: Expected `str`",
    ),
    ("out by a name", {"weight_map": {"x": "../x.safetensors"}}, "weight_map: Expected `str`"),
    ("weight_map is a list", {"weight_map": ["x"]}, "weight_map: Expected `object`"),
    ("file is a number", {"weight_map": {"x": 5}}, "weight_map: Expected `str`"),
    (
        "a missing shard",
        {"weight_map": {"x": "none.safetensors"}},
        "cannot read model/none.safetensors: No such file",
    ),
):
    bad_model_file(f"index: {name}", "model.safetensors.index.json", index, expected)
bad_file(
    "model: nested too deeply",
    "model/config.json",
    "[" * 100_000,
    "model.path: model/config.json is not valid JSON",
)
bad_file(
    "model: a name twice",
    "model/config.json",
    '{"model_type": "a", "model_type": "b"}',
    "a name is given twice",
)
bad_file(
    "model: a million labels",
    "model/config.json",
    '{"model_type": "a", "num_labels": 1000000}',
    "num_labels: Expected `int`",
)
bad_file(
    "model: layers by another name",
    "model/config.json",
    '{"model_type": "a", "n_layer": 1000000}',
    "n_layer: Expected `int`",
)
for shape, offsets in (
    ([2**62] * 100_000, [0, 24]),
    ([4], [0, 24]),
    ([3], [24, 0]),
    (["3"], [0, 24]),
    ([-3], [0, 24]),
    ([3], [0, 10**12]),
):
    header = json.dumps({"x": {"dtype": "F64", "shape": shape, "data_offsets": offsets}}).encode()
    lying = len(header).to_bytes(8, "little") + header + bytes(24)
    bad_file(
        f"model: weights lie, {shape[:5]} {offsets}",
        "model/model.safetensors",
        lying,
        "is not a whole safetensors file",
    )


@bad("model: a fifo", "model.path: model/chat_template.jinja is neither a file nor a folder")
def _(_: Tree) -> None:
    os.mkfifo("model/chat_template.jinja")


@bad(
    "model: a link to a device",
    "model.path: model/tokenizer_config.json is neither a file nor a folder",
)
def _(_: Tree) -> None:
    Path("model/tokenizer_config.json").symlink_to("/dev/zero")


for file, expected in {
    "config.json": "model.path: cannot read model/config.json",
    "model.safetensors": "model holds no .safetensors file",
    "tokenizer.json": "model holds no tokenizer",
}.items():

    @bad(f"model: no {file}", expected)
    def _(_: Tree, file: str = file) -> None:
        Path("model", file).unlink()


# The rewards

bad_value(
    "rewards.0.name: no shipped reward 'gsm9k'; there are code, countdown, exact, format, gsm8k, "
    "math",
    "rewards=[{name: gsm9k}]",
)
bad_value("rewards.0 needs a name (a shipped reward) or a function", "rewards=[{weight: 1}]")
bad_value(
    "rewards.0.max_per_minute (1): the 64 calls of a step take 3,780 s, and the watchdog stops "
    "phase reward after "
    "1,800 s; raise it, or set watchdog.phase_timeouts_s: {reward: 4560}",
    "rewards=[{url: 'http://127.0.0.1:1/', max_per_minute: 1}]", "rollout.group_size=16",
)  # fmt: skip
bad_value(
    "rewards.1.name: 'countdown' is given twice", "rewards=[{name: countdown}, {name: countdown}]"
)
bad_value(
    "rewards.0.args: countdown does not take 'tag'", "rewards=[{name: countdown, args: {tag: x}}]"
)
bad_value("rewards.0.args: format needs 'pattern'", "rewards=[{name: format}]")
bad_value(
    "rewards.0.args.pattern ('('): is not a regular expression",
    "rewards=[{name: format, args: {pattern: '('}}]",
)
bad_value(
    "rewards.0.args.pattern (5): Expected `str`, got `int`",
    "rewards=[{name: format, args: {pattern: 5}}]",
)
bad_value(
    "rewards.0: 'gsm8k' needs the column 'answer', which train.jsonl does not have",
    "rewards=[{name: gsm8k}]",
)
bad_value(
    "rewards.0.function: there is no file nowhere.py", "rewards=[{function: 'nowhere.py:score'}]"
)
bad_value(
    "rewards.0.function must be \"file.py:function\"; got 'mine.score'",
    "rewards=[{function: mine.score}]",
)
bad_reward(
    "syntax error",
    "def score(completions:\n    return []\n",
    "rewards.0.function: mine.py:1 cannot be imported: SyntaxError",
)
bad_reward(
    "raises when imported",
    "x = 1\nx / 0\n",
    "rewards.0.function: mine.py:2 cannot be imported: ZeroDivisionError",
)
bad_reward(
    "error of two lines",
    "raise ValueError('two\\nlines')\n",
    "rewards.0.function: mine.py:1 cannot be imported: ValueError: two lines",
)
bad_reward(
    "exits when imported",
    "import sys\nsys.exit(7)\n",
    "rewards.0.function: mine.py:2 cannot be imported: SystemExit",
)
bad_reward("not UTF-8", b"x = '\xff'\n", "rewards.0.function: mine.py")
bad_reward(
    "no such function",
    "def other(**_):\n    return []\n",
    "rewards.0.function: mine.py has no function 'score'",
)
bad_reward("not a function", "score = 5\n", "rewards.0.function: mine.py has no function 'score'")
bad_reward(
    "without a signature",
    "score = max\n",
    "has no readable signature",
)
bad_reward(
    "missing column",
    "def score(completions, gold):\n    return []\n",
    "rewards.0: 'score' needs the column 'gold'",
)
for name in ("solution_str", "labels", "completion"):
    bad_reward(
        f"another trainer's {name}",
        f"def score(completions, {name}):\n    return []\n",
        "besides the prompt it has nums, target; a reward function is fn(prompts, ",
    )
bad_reward(
    "reads our arguments",
    "import sys\nassert not sys.argv[1:]\nraise ValueError(sys.argv)\n",
    "mine.py:3 cannot be imported: ValueError: ['mine.py']",
)
bad_reward(
    "args",
    "def score(completions):\n    return []\n",
    "rewards.0.args: score does not take 'a'",
    "rewards.0.args.a=1",
)


def good_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good run's inputs, in the working directory."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    Path("model").mkdir()
    Path("folder.jsonl").mkdir()
    model = {"model_type": "qwen3", "max_position_embeddings": 64, "num_attention_heads": 4}
    Path("model/config.json").write_text(json.dumps(model), encoding="utf-8")
    Path("model/model.safetensors").write_bytes(ONE_TENSOR)
    tokenizer = Tokenizer(
        models.WordLevel(
            {"<unk>": 0, **{c: i for i, c in enumerate("0123456789+-*,=:", 1)}}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.save("model/tokenizer.json")
    Path("train.jsonl").write_bytes(5 * GOOD_LINE)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def prepare(case: Case) -> None:
    tree: Tree = json.loads(json.dumps(GOOD_CONFIG))
    Path("config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    old = json.dumps(tree)
    case.spoil(tree)
    if json.dumps(tree) != old:
        Path("config.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")


def check(case: Case, status: int, stdout: str, stderr: str) -> None:
    assert status == 2
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert stderr.endswith("\n")
    assert len(stderr.splitlines()) == 1
    assert case.expected in stderr
