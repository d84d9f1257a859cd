"""`--explain`: its numbers against hand arithmetic, transformers, torch's own accounting and real
ranks; its sources
against the files."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import safetensors.torch
import torch
import transformers
import yaml
from torch.profiler import ProfilerActivity, profile

from grpo_spmd.checks import explain, memory
from grpo_spmd.checks.memory import advice
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config, load_config_with_sources
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.model import config_json
from grpo_spmd.model.config_json import dimensions
from grpo_spmd.model.logprobs import TokenLogprobs
from tests.support.models import FAMILIES, make_model, write_config


def sources_of(tmp_path: Path, text: str, *overrides: str) -> dict[str, str]:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    config, sources = load_config_with_sources(path, overrides)
    assert config == load_config(path, overrides)
    assert list(sources) == list(flatten_config(config))
    return {name: source.replace(f"{path}:", "x.yaml:") for name, source in sources.items()}


TEXT = """\
run_dir: runs/x
model: {path: some/model,
        dtype: float32}
data:
  train: x.jsonl

optimizer:
  betas:
    - 0.9
    - 0.99
rewards:
  - name: exact
    args: {a: [1, {b: 2}]}
  - weight: 2
    function: f.py:g
rollout:
training: {}
"""


# Where a value came from


def test_every_value_names_its_line_the_command_line_or_default(tmp_path: Path) -> None:
    sources = sources_of(
        tmp_path,
        TEXT,
        "seed=3",
        "rollout.engine.enforce_eager=true",
        "optimizer.betas.1=0.95",
        "rewards.1.weight=3",
    )
    inputs = {name: source for name, source in sources.items() if source != "default"}
    assert inputs == {
        "run_dir": "x.yaml:1",
        "seed": "command line",
        "model.path": "x.yaml:2",
        "model.dtype": "x.yaml:3",
        "data.train": "x.yaml:5",
        "rollout.engine.enforce_eager": "command line",
        "rewards.0.name": "x.yaml:12",
        "rewards.0.args.a.0": "x.yaml:13",
        "rewards.0.args.a.1.b": "x.yaml:13",
        "rewards.1.weight": "command line",
        "rewards.1.function": "x.yaml:15",
        "optimizer.betas.0": "x.yaml:9",
        "optimizer.betas.1": "command line",
    }


def test_an_override_of_a_whole_section_leaves_no_line_of_the_file(tmp_path: Path) -> None:
    sources = sources_of(
        tmp_path, TEXT, "rewards=[{name: format, args: {pattern: a}}]", "optimizer={lr: 1e-3}"
    )
    rewards_values = {
        name: source for name, source in sources.items() if name.startswith("rewards.")
    }
    inputs = {"rewards.0.name": "command line", "rewards.0.args.pattern": "command line"}
    assert rewards_values == dict.fromkeys(rewards_values, "default") | inputs
    assert {name: source for name, source in sources.items() if name.startswith("optimizer")} == {
        "optimizer.name": "default",
        "optimizer.lr": "command line",
        "optimizer.schedule": "default",
        "optimizer.min_lr": "default",
        "optimizer.weight_decay": "default",
        "optimizer.betas.0": "default",
        "optimizer.betas.1": "default",
        "optimizer.max_grad_norm": "default",
        "optimizer.warmup_steps": "default",
    }


def test_of_two_overrides_the_later_one_counts_and_an_empty_mapping_has_a_source(
    tmp_path: Path,
) -> None:
    sources = sources_of(tmp_path, TEXT, "rewards.0.args.a=1", "rewards.0.args={}")
    assert sources["rewards.0.args"] == "command line"
    assert not any(name.startswith("rewards.0.args.") for name in sources)


def test_merged_keys_name_the_line_of_their_anchor(tmp_path: Path) -> None:
    base = "run_dir: r\nmodel: {path: a/b}\ndata: {train: x.jsonl}\n"
    text = (
        base + "rewards:\n  - &one\n    name: exact\n    weight: 2\n  - <<: *one\n    weight: 3\n"
    )
    sources = sources_of(tmp_path, text)
    assert (sources["rewards.1.name"], sources["rewards.1.weight"]) == ("x.yaml:6", "x.yaml:9")


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid YAML"):
        sources_of(tmp_path, "run_dir: &a [*a]\n")


# Sizes of the model


def true_shapes(folder: Path) -> config_json.Shapes:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("family", "tied"), list(itertools.product(FAMILIES, (True, False))))
def test_shapes_equal_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    folder = make_model(tmp_path / "model", family, tied=tied)
    facts = config_json.read_model(str(folder))
    assert facts is not None
    assert facts.shapes == true_shapes(folder)
    assert facts.shapes == config_json.shapes_from_config(
        json.loads((folder / "config.json").read_text())
    )


def test_shards_of_an_index_and_a_tied_head_that_was_saved_count_once(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "qwen3", tied=True)
    expected = true_shapes(folder)
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    tensors |= {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "model.layers.0.rotary_emb.inv_freq": torch.zeros(16),
    }
    (folder / "model.safetensors").unlink()
    files = {name: f"part_{number % 3}.safetensors" for number, name in enumerate(tensors)}
    for file in set(files.values()):
        safetensors.torch.save_file(
            {name: tensors[name] for name in tensors if files[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    # a second copy that the policy does not read
    shutil.copy(folder / "part_0.safetensors", folder / "consolidated.safetensors")
    facts = config_json.read_model(str(folder))
    assert facts is not None
    assert facts.shapes == expected


def test_a_hub_id_is_looked_up_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert config_json.read_model("some/model") is None
    repo = tmp_path / "models--some--model"
    folder = make_model(repo / "snapshots/abc", "llama", tied=False)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("abc")
    facts = config_json.read_model("some/model")
    assert facts is not None
    assert facts.source.startswith("safetensors headers")
    (folder / "model.safetensors").unlink()
    worked_out = config_json.read_model("some/model")
    assert worked_out is not None
    assert worked_out.source.endswith("the weights are not there")
    assert worked_out.shapes == facts.shapes


def test_a_config_that_names_no_sizes_gives_none() -> None:
    assert dimensions({"n_embd": 4, "n_layer": 2}) is None
    assert config_json.shapes_from_config({"model_type": "gpt2", "n_embd": 4}) == {}


# Numbers by hand. 3 x 5 and 4 elements over 2 ranks: shards of 2 x 5 and 2; 4 bytes each, 2 ranks:
# 96 bytes a sync.


def test_shards_and_sync_by_hand() -> None:
    shapes = {"a": (3, 5), "b": (4,)}
    assert memory.shard_numel(shapes, 1) == 19
    assert memory.shard_numel(shapes, 2) == 12
    assert memory.sync_size(shapes, 2, 4, 1 << 20) == (96, 1)
    assert memory.sync_size(shapes, 2, 4, 40) == (
        96,
        3,
    )  # 5 elements of a rank in a bucket: 5 + 5 + 2
    assert memory.sync_size(shapes, 2, 4, 1) == (96, 12)  # one element at a time
    assert memory.sync_size(shapes, 1, 4, 1) == (76, 0)  # one rank has it all


def a_config(tmp_path: Path, *overrides: str) -> Config:
    path = tmp_path / "x.yaml"
    tree = {
        "run_dir": "r",
        "model": {"path": "some/model"},
        "data": {"train": "x.jsonl", "max_prompt_tokens": 10},
        "rewards": [{"name": "exact"}],
        "rollout": {"num_prompts_per_step": 6, "group_size": 4, "max_completion_tokens": 30},
        "training": {"num_steps": 50, "num_mini_batches": 2, "max_tokens_per_micro_batch": 100},
    }
    path.write_text(yaml.safe_dump(tree))
    return load_config(path, overrides)


@pytest.mark.parametrize("with_defaults", [False, True])
def test_the_end_says_what_is_set_and_the_defaults_only_when_asked(
    with_defaults: bool, tmp_path: Path
) -> None:
    config = a_config(tmp_path, "optimizer.lr=3e-3")
    sources = dict.fromkeys(flatten_config(config), "default") | {
        "optimizer.lr": "command line",
        "run_dir": "x:1",
    }
    lines = explain.explain(config, sources, None, 60, 1, with_defaults=with_defaults)
    final = lines[lines.index("where each value came from") + 1 :]
    if with_defaults:
        assert [line.split()[0] for line in final] == list(flatten_config(config))
    else:
        assert [line.split()[0] for line in final[:-1]] == ["run_dir", "optimizer.lr"]
        assert (
            final[-1]
            == f"  {len(sources) - 2} others have their defaults: --explain=all shows them too"
        )


def rows_of(
    config: Config, model: config_json.ModelFacts | None, num_ranks: int = 1, num_rows: int = 60
) -> dict[str, list[str]]:
    """{name: [value, how, ...]} of the derived part, a name of two sections with both."""
    lines = explain.explain(
        config,
        dict.fromkeys(flatten_config(config), "default"),
        model,
        num_rows=num_rows,
        num_ranks=num_ranks,
    )
    assert lines.index("where each value came from") < 100
    result: dict[str, list[str]] = {}
    for line in lines[: lines.index("where each value came from")]:
        if line.startswith("  ") and not line.startswith("  - "):
            result.setdefault(line[2:38].strip(), []).extend(line[38:].strip().split("  ", 1))
    return result


def test_the_buckets_of_a_sync_are_a_gpus(tmp_path: Path) -> None:
    model = config_json.ModelFacts(
        {"lm_head.weight": (262144, 1024)}, {}, "here"
    )  # 512 MiB in bfloat16
    rows = [
        rows_of(a_config(tmp_path, *inputs), model, num_ranks=4)
        for inputs in ((), ("rollout.weight_sync_bucket_mib=64",))
    ]
    assert [row["collectives of a sync, on GPUs"][0] for row in rows] == ["2", "8"]


def test_a_page_by_hand(tmp_path: Path) -> None:
    """A model of V 10, D 4, F 6, two layers, one kv head of 2; 4 ranks, 24 samples of at most 40
    tokens."""
    # 16 + 8 + 8 + 16 + 24 + 4 = 76
    layer = {"q": (4, 4), "k": (2, 4), "v": (2, 4), "o": (4, 4), "up": (6, 4), "norm": (4,)}
    shapes: config_json.Shapes = {
        f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()
    }
    shapes["model.embed_tokens.weight"] = (10, 4)
    sizes = {
        "hidden_size": 4,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 6,
    }
    model = config_json.ModelFacts(shapes, {**sizes, "vocab_size": 10}, "here")
    config = a_config(
        tmp_path, "training.num_epochs=3", "loss.kl_coef=0.1", "rollout.tensor_parallel_size=2"
    )
    rows = rows_of(config, model, num_ranks=4)
    values = {name: cells[0] for name, cells in rows.items()}
    assert values["engines"] == "2"
    assert values["samples"] == "24"
    assert values["tokens"] == "<= 960"
    assert rows["optimizer steps"][::2] == ["6", "300"]  # a step; the run of 50
    assert values["completions per optimizer step"] == "12"
    # 3 rollouts a rank, 2 in a micro-batch of 100: 2 micro-batches in each of 6 optimizer steps
    assert values["micro-batches of a rank"] == "6 to 12"
    assert (values["extra passes for old logprobs"], values["extra passes of the reference"]) == (
        "1",
        "1",
    )
    assert values["steps per epoch of the data"] == "10.0"
    assert values["epochs of the data"] == "5.00"
    assert values["samples trained on"] == "1,200"
    assert values["parameters"] == "192"
    # Rows over 4 ranks: 1 + 1 + 1 + 1 + 2 rows of 4 and 1 = 25 a layer, 3 rows of 4 = 12: 62
    # elements, 248 with
    # padding, 2 bytes each
    assert values["bytes of a sync"] == "496 B"
    assert " + 112 B of padding to full shards" in rows["bytes of a sync"][1]
    alone = rows_of(a_config(tmp_path), model)
    assert alone["bytes of a sync"][0] == "384 B"
    assert "padding" not in alone["bytes of a sync"][1]
    assert values["collectives of a sync, on GPUs"] == "1"
    assert values["master parameters"] == "248 B"
    assert values["AdamW's moments"] == "496 B"
    assert values["reference"] == "124 B"
    assert values["state between updates"] == "868 B"
    assert values["logits of a chunk"] == "5.86 KiB"  # 100 tokens x 10 x (4 + 2)
    # two buckets would hold it all: one of 4 ranks' 62 elements; the embedding as 4 shards of 3
    # rows
    assert values["buffers of the weight sync"] == "592 B"  # 496 + 96
    # 3 prompts an engine: 12 sequences of 40 tokens; a token is 2 x 2 layers x 1 head x 2 x 2 bytes
    assert (values["KV cache of a token"], values["KV cache for all at full length"]) == (
        "16 B",
        "<= 7.50 KiB",
    )


def test_without_the_model_the_rest_is_still_said(tmp_path: Path) -> None:
    config = a_config(
        tmp_path,
        "rollout.dynamic_sampling=true",
        "loss.old_logprobs=engine",
        "loss.rollout_correction=none",
    )
    lines = explain.explain(
        config, dict.fromkeys(flatten_config(config), "default"), None, num_rows=60, num_ranks=1
    )
    assert any("of some/model are not known here" in line for line in lines)
    rows = rows_of(config, None)
    assert "parameters" not in rows
    assert rows["samples, generated"][0] == ">= 24"
    assert rows["epochs of the data"][0] == ">= 5.00"
    assert rows["extra passes for old logprobs"][0] == "0"


def test_a_critic_learns_in_the_policys_update_or_in_its_own(tmp_path: Path) -> None:
    inputs = ("advantage.estimator=gae", "advantage.normalize_std=batch", "training.num_epochs=3")
    rows = [
        rows_of(a_config(tmp_path, *inputs, f"critic.path={path}"), None)["passes of the critic"]
        for path in ("policy", "some/critic")
    ]
    values = "a forward of all rollouts for their values"
    assert rows == [
        ["1", f"{values}; it learns in the policy's update"],
        ["4", f"{values}, and 3 for its own update"],
    ]


def test_tail_batching_begins_more_than_a_step_takes(tmp_path: Path) -> None:
    rows = rows_of(a_config(tmp_path, "rollout.tail_batching=1.5"), None)
    assert (rows["samples"][0], rows["samples, begun in a short round"][0]) == (
        "24",
        "36",
    )  # 6 and 9 prompts of 4
    assert "samples, begun in a short round" not in rows_of(a_config(tmp_path), None)


def test_micro_batches_are_those_of_the_real_plan(tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(100):
        ranks, budget = rng.randint(1, 5), rng.randint(40, 200)
        config = a_config(
            tmp_path,
            f"training.max_tokens_per_micro_batch={budget}",
            f"rollout.group_size={rng.randint(2, 9)}",
        )
        samples = 6 * config.rollout.group_size

        def rows(lengths: list[int], ranks: int = ranks, budget: int = budget) -> int:
            plan = plan_batch(
                lengths,
                num_ranks=ranks,
                mini_batch_sizes=[len(lengths) // 2] * 2,
                max_tokens=budget,
            )
            return sum(len(mini_batch[0]) for mini_batch in plan)

        fewest, maximum = memory.micro_batches_per_step(config, ranks)
        assert rows([40] * samples) == maximum
        low = rng.choice([2, 20, 30])
        assert fewest <= rows([rng.randint(low, 40) for _ in range(samples)]) <= maximum
    assert fewest == 2


# Memory against torch's own accounting


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time while `work` ran, beyond those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    assert recorded.profiler is not None
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    assert events
    changes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("uses_entropy", [True, False])
@pytest.mark.parametrize("num_chunks", [1, 3])
def test_the_logits_alive_are_those_that_token_logprobs_holds(
    dtype: torch.dtype, uses_entropy: bool, num_chunks: int
) -> None:
    """Two buffers of half the rows (forward, and backward through the entropy) take less than one
    and a product in
    bfloat16."""
    vocabulary, chunk = 8000, 1024
    hidden = torch.randn(num_chunks * chunk, 4, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, 4, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (len(hidden),))
    result: list[torch.Tensor] = []
    forward = peak_bytes(
        lambda: result.extend(TokenLogprobs.apply(hidden, head, targets, 0.7, chunk))
    )
    logprobs, entropy = result
    backward = peak_bytes(
        lambda: (logprobs.sum() + entropy.sum() if uses_entropy else logprobs.sum()).backward()
    )
    two_halves = 4 if dtype is torch.float32 else 4 + dtype.itemsize / 2
    assert forward / (chunk * vocabulary) == pytest.approx(two_halves, rel=0.06)
    expected = two_halves if uses_entropy else memory.logits_bytes_per_element(dtype.itemsize)
    assert backward / (chunk * vocabulary) == pytest.approx(expected, rel=0.06)


# Advice: the base config gets none, each change one line


GSPO = "loss.policy=gspo loss.rollout_correction=sequence_tis"
GSPO_BOUNDS = "loss.clip_ratio_low=3e-4 loss.clip_ratio_high=4e-4"


@pytest.mark.parametrize(
    ("overrides", "num_ranks", "expected"),
    [
        ("", 1, None),
        (
            "training.max_tokens_per_micro_batch=79",
            1,
            "max_tokens_per_micro_batch 79 holds fewer than 2 of the longest rollouts (40 tokens)",
        ),
        ("training.max_tokens_per_micro_batch=80", 1, None),
        (
            "training.num_mini_batches=1",
            1,
            "the ratio is exactly 1, so that loss.clip_ratio_low, clip_ratio_high",
        ),
        ("training.num_mini_batches=1 training.num_epochs=2", 1, None),
        (
            "training.num_mini_batches=1 loss.old_logprobs=engine loss.rollout_correction=none",
            1,
            None,
        ),
        (f"{GSPO} loss.aggregation=sequence", 1, "gspo with clip bounds 0.2 and 0.28"),
        (f"{GSPO} {GSPO_BOUNDS}", 1, "gspo and loss.aggregation is token"),
        (f"{GSPO} {GSPO_BOUNDS} loss.aggregation=sequence", 1, None),
        (
            f"loss.policy=gspo {GSPO_BOUNDS} loss.aggregation=sequence "
            "loss.rollout_correction=icepop",
            1,
            "gspo and loss.rollout_correction is icepop",
        ),
        (
            "loss.policy=cispo",
            1,
            "cispo and loss.clip_ratio_low is 0.2: it is usually run without a lower bound",
        ),
        ("loss.policy=cispo loss.clip_ratio_low=1", 1, None),
        ("loss.kl_in=reward loss.kl_coef=0.1", 1, "small differences of KL become advantages"),
        ("loss.kl_in=reward loss.kl_coef=0.1 advantage.normalize_std=none", 1, None),
        ("advantage.estimator=dr_grpo", 1, "dr_grpo and loss.aggregation is token"),
        ("advantage.estimator=dr_grpo loss.aggregation=constant", 1, None),
        (
            "advantage.estimator=rloo rollout.group_size=3",
            1,
            "the mean of only one or two other rewards",
        ),
        ("rollout.group_size=2", 1, "advantage.normalize_std is group and rollout.group_size is 2"),
        ("rollout.group_size=2 advantage.normalize_std=batch", 1, None),
        (
            "",
            4,
            "num_prompts_per_step 6 is no multiple of 4 engines: some sample 2 groups a step, "
            "others 1",
        ),
        (
            "",
            8,
            "6 is no multiple of 8 engines: 2 never sample while others do; raise it to 8 or a "
            "multiple",
        ),
        ("rollout.tensor_parallel_size=2", 4, None),
        (
            "rollout.tensor_parallel_size=3",
            18,
            "12 completions per optimizer step for 18 ranks: 6 of them",
        ),
        (
            "rollout.dynamic_sampling=true rollout.dynamic_sampling_max_rounds=1",
            1,
            "never replaced",
        ),
        ("optimizer.warmup_steps=100", 1, "warmup_steps 100 covers the run's 100 optimizer steps"),
        ("optimizer.warmup_steps=99", 1, None),
        (
            "training.num_steps=100 checkpoint.every_steps=0",
            1,
            "before the end of its 100 steps has nothing to go on from",
        ),
    ],
)
def test_advice(tmp_path: Path, overrides: str, num_ranks: int, expected: str | None) -> None:
    result = list(advice(a_config(tmp_path, *overrides.split()), num_ranks))
    assert len(result) == (expected is not None), result
    assert expected is None or expected in result[0]


def test_lora_offload_and_replicas_change_what_a_rank_holds(tmp_path: Path) -> None:
    """Worked by hand: 2 ranks of 2 replicas are 1 rank of a shard."""
    model = config_json.ModelFacts(
        {
            "model.layers.0.q_proj.weight": (8, 6),
            "model.layers.0.norm.weight": (6,),
            "lm_head.weight": (10, 6),
        },
        {},
        "",
    )
    assert memory.adapter_shapes(model.shapes, LoraConfig(rank=2)) == {
        "model.layers.0.q_proj.weight.lora_A": (2, 6),
        "model.layers.0.q_proj.weight.lora_B": (8, 2),
    }
    assert memory.adapter_shapes(model.shapes, LoraConfig(rank=2, target_modules=("k_proj",))) == {}
    overrides = [
        "model.dtype=bfloat16",
        "model.lora.rank=2",
        "model.offload=true",
        "model.num_replicas=2",
    ]
    config = load_config(write_config(tmp_path, tmp_path), overrides)
    values = {name: value for name, value, _ in explain.training_rows(config, model, 2)}
    assert values["base"] == "228 B"  # (48 + 6 + 60) x 2
    assert values["master parameters"] == values["gradients"] == "112 B"  # (12 + 16) x 4
    assert (
        values["of it in host memory"] == values["state between updates"] == "564 B"
    )  # 228 + 112 + 224
    assert "reference" not in values
    reasons = {name: reason for name, _, reason in explain.training_rows(config, model, 2)}
    assert (
        "28 trained parameters of a shard of the adapters (rank 2) " in reasons["master parameters"]
    )
    # config.json names no sizes.
    assert values["logits of a chunk"] == "unknown"
    assert reasons["logits of a chunk"].startswith("config.json does not name the sizes")
    # one rank of a shard, which needs no bucket: W + BA of the 8 x 6 product, and W, in float32; A
    # whole (2 x 6). W
    # rounded, 48 x 2, comes when the W in float32 is gone, the lm_head's 60 x 2 when W + BA is
    assert values["buffers of the weight sync"] == "432 B"  # 48 x 8 + 12 x 4
    config = load_config(write_config(tmp_path, tmp_path), [*overrides, "model.lora.sync=adapter"])
    assert {name: value for name, value, _ in explain.sync_rows(config, model, 2)}[
        "bytes of a later sync"
    ] == "56 B"  # (12 + 16) x 2
