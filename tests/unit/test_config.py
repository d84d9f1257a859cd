"""Loading, coercion, overrides, cross checks and the resolved copy of the config."""

from __future__ import annotations

import json
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_spmd.config import load
from grpo_spmd.config.describe import config_to_dict, describe_keys, flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import apply_override, load_config, load_config_with_sources
from grpo_spmd.config.rules import met_conditions
from grpo_spmd.config.schema import Config
from tests.support.models import write_config

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {
    "run_dir": "runs/x",
    "model": {"path": "some/model"},
    "data": {"train": "x.jsonl"},
    "rewards": [{"name": "exact"}],
}


def _load(tmp_path: Path, tree: Any = None, *overrides: str) -> Config:
    """`tree` is YAML text, or a mapping that goes over the smallest valid config."""
    path = tmp_path / "config.yaml"
    path.write_text(
        tree if isinstance(tree, str) else yaml.safe_dump({**MINIMAL, **(tree or {})}),
        encoding="utf-8",
    )
    return load_config(path, overrides)


def _refusal(tmp_path: Path, tree: Any = None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, tree, *overrides)
    return str(caught.value)


# Loading and coercion


def test_smallest_config_takes_every_default(tmp_path: Path) -> None:
    config = _load(tmp_path)
    assert (
        config.seed,
        config.rollout.group_size,
        config.optimizer.betas,
        config.rewards[0].weight,
    ) == (
        0,
        8,
        (0.9, 0.95),
        1.0,
    )


def test_lr_written_as_1e_6_is_a_float(tmp_path: Path) -> None:
    # YAML 1.1 reads 1e-6, without a dot, as a string
    assert yaml.safe_load("1e-6") == "1e-6"
    config = _load(tmp_path, yaml.safe_dump(MINIMAL) + "optimizer:\n  lr: 1e-6\n")
    assert config.optimizer.lr == 1e-6


@pytest.mark.parametrize(
    ("override", "section", "name", "value"),
    [
        ("optimizer.lr=1", "optimizer", "lr", 1.0),
        ("optimizer.lr=3E-4", "optimizer", "lr", 3e-4),
        ("optimizer.betas=[0.8, 1e-1]", "optimizer", "betas", (0.8, 0.1)),
        ("training.num_steps='12'", "training", "num_steps", 12),
        ("data.shuffle=false", "data", "shuffle", False),
        ("data.system_prompt=null", "data", "system_prompt", None),
        ("data.system_prompt=", "data", "system_prompt", None),
        ("data.system_prompt=a=b", "data", "system_prompt", "a=b"),
        ("data.prompt_key=5", "data", "prompt_key", "5"),
        ("rollout.sleep_level=1", "rollout", "sleep_level", 1),
        ("rollout.engine.enforce_eager=true", "rollout", "engine", {"enforce_eager": True}),
        ("logging.wandb=true", "logging", "wandb", True),
        ("logging.wandb=offline", "logging", "wandb", "offline"),
        ("logging.trackers=trackio", "logging", "trackers", ("trackio",)),
        ("logging.trackers=wandb,tensorboard", "logging", "trackers", ("wandb", "tensorboard")),
        ("logging.report_every_steps=50", "logging", "report_every_steps", 50),
    ],
)
def test_value_has_the_declared_type(
    override: str, section: str, name: str, value: Any, tmp_path: Path
) -> None:
    got = getattr(getattr(_load(tmp_path, None, override), section), name)
    assert (got, type(got)) == (value, type(value))


def test_override_wins_over_the_file(tmp_path: Path) -> None:
    assert _load(tmp_path, {"seed": 1}, "seed=2").seed == 2


def test_last_of_two_overrides_wins(tmp_path: Path) -> None:
    assert _load(tmp_path, None, "seed=2", "seed=3").seed == 3


def test_override_leaves_the_rest_of_its_section(tmp_path: Path) -> None:
    config = _load(
        tmp_path, {"rollout": {"group_size": 4, "num_prompts_per_step": 6}}, "rollout.group_size=2"
    )
    assert (config.rollout.group_size, config.rollout.num_prompts_per_step) == (2, 6)


def test_override_reaches_into_the_list_of_rewards(tmp_path: Path) -> None:
    config = _load(
        tmp_path,
        {"rewards": [{"name": "exact"}, {"name": "gsm8k"}]},
        "rewards.0.weight=2",
        "rewards.1.args.x=1e-3",
    )
    assert [r.weight for r in config.rewards] == [2.0, 1.0]
    assert config.rewards[1].args == {"x": "1e-3"}  # free-form: nobody declared a type


def test_override_may_fill_a_section_that_is_empty_in_the_file(tmp_path: Path) -> None:
    assert (
        _load(tmp_path, yaml.safe_dump(MINIMAL) + "optimizer:\n", "optimizer.lr=2").optimizer.lr
        == 2.0
    )


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    text = yaml.safe_dump(MINIMAL).replace(
        "rewards:\n- name: exact\n",
        "rewards:\n- &e {name: exact, weight: 2}\n- {<<: *e, name: gsm8k}\n",
    )
    assert [(r.name, r.weight) for r in _load(tmp_path, text).rewards] == [
        ("exact", 2.0),
        ("gsm8k", 2.0),
    ]


def test_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert _load(tmp_path, "\ufeff" + yaml.safe_dump(MINIMAL)).run_dir == "runs/x"


def test_max_rollout_tokens_is_prompt_plus_completion(tmp_path: Path) -> None:
    assert (
        _load(
            tmp_path, None, "data.max_prompt_tokens=10", "rollout.max_completion_tokens=7"
        ).max_rollout_tokens
        == 17
    )


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_shipped_config_is_valid(path: Path) -> None:
    config = load_config(path)
    assert config.rewards or config.environment.can_reward


# Refusals


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("optimizer.lrate=1", "optimizer.lr"),
        ("optimiser.lr=1", "optimizer"),
        ("rollout.groupsize=2", "rollout.group_size"),
        ("rollouts.group_size=2", "rollout"),
        ("group_size=2", "rollout.group_size"),
        ("max_completion_tokens=2", "rollout.max_completion_tokens"),
        ("training.num_step=2", "training.num_steps"),
        ("loss.klcoef=0", "loss.kl_coef"),
        ("rewards.0.wieght=2", "rewards.0.weight"),
        ("run_dirr=x", "run_dir"),
        ("sede=1", "seed"),
    ],
)
def test_unknown_key_names_the_nearest(override: str, nearest: str, tmp_path: Path) -> None:
    assert _refusal(tmp_path, None, override).endswith(f"unknown key; did you mean {nearest}?")


def test_unknown_key_like_none_points_to_help(tmp_path: Path) -> None:
    assert _refusal(tmp_path, {"zzzzqqq": 1}) == "zzzzqqq: unknown key; --help lists them all"


def test_all_unknown_keys_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "run_dir: r\nmodel: {path: m, pth: 3}\ndata: {train: x, max_prompt_length: 5}\n"
        "rewards: [{nme: x}]\nactor: {lr: 1}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        "4 unknown keys: model.pth: unknown key; did you mean model.path?; "
        "data.max_prompt_length: unknown key, verl's name: here data.max_prompt_tokens; "
        "rewards.0.nme: unknown key; did you mean rewards.0.name?; "
        "actor: unknown key; --help lists them all"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=fast", "optimizer.lr must be a number >= 0; got 'fast'"),
        ("optimizer.lr=.inf", "optimizer.lr must be a finite number"),
        ("optimizer.lr=true", "optimizer.lr must be a number >= 0; got True"),
        ("optimizer.lr=1" + "0" * 400, "optimizer.lr must be a number >= 0; got 1000"),
        (
            "optimizer.betas=[0.9]",
            "optimizer.betas must be a list of 2 numbers >= 0 and < 1; got [0.9]",
        ),
        (
            "optimizer.betas=[0.9, x]",
            "optimizer.betas must be a list of 2 numbers >= 0 and < 1; got [0.9, 'x']",
        ),
        ("training.num_steps=1.5", "training.num_steps must be a whole number >= 1; got 1.5"),
        ("training.num_steps=true", "training.num_steps must be a whole number >= 1; got True"),
        ("data.shuffle=1", "data.shuffle must be true or false; got 1"),
        ("data.train=[a]", "data.train must be text; got ['a']"),
        ("data.train=", "data.train must be text; got None"),
        (
            "advantage.estimator=remax",
            "advantage.estimator must be grpo|dr_grpo|rloo|reinforce_pp|max_rl|gae; got 'remax'",
        ),
        ("rollout.sleep_level=true", "rollout.sleep_level must be 1|2 or null; got True"),
        (
            "logging.trackers=tensorbord",
            "logging.trackers: no tracker 'tensorbord'; there are wandb, tensorboard, trackio",
        ),
        (
            "logging.trackers=[mlflow]",
            "logging.trackers: no tracker 'mlflow'; there are wandb, tensorboard, trackio",
        ),
        (
            "logging.trackers_rollouts_every_steps=5",
            "logging.trackers_rollouts_every_steps (5) needs a tracker",
        ),
        (
            "logging.wandb=maybe",
            "logging.wandb must be true or false or online|offline; got 'maybe'",
        ),
        ("rollout=5", "rollout: expected a section (a mapping), got 5"),
        ("rewards={name: exact}", "rewards must be a list; got {'name': 'exact'}"),
        ("rollout.engine=[1]", "rollout.engine must be a mapping; got [1]"),
        ("rewards.1.weight=2", "rewards.1: '1' is not an index into a list of 1"),
        ("rewards.²=2", "rewards.²: '²' is not an index into a list of 1"),
        ("seed.x=2", "seed.x: seed is a value, not a section"),
        ("seed", "an override is section.key=value, got 'seed'"),
        ("=1", "an override is section.key=value, got '=1'"),
        ("seed={", "seed: the value '{' is not valid YAML"),
    ],
)
def test_refusal_names_key_and_value(override: str, message: str, tmp_path: Path) -> None:
    tree = {"seed": 3}
    assert _refusal(tmp_path, tree, override).startswith(message)


@pytest.mark.parametrize("key", ["run_dir", "model.path", "data.train", "rewards"])
def test_missing_required_key_is_named(key: str, tmp_path: Path) -> None:
    section, _, name = key.partition(".")
    tree = {
        k: ({} if k == section and name else v) for k, v in MINIMAL.items() if name or k != section
    }
    assert _refusal(tmp_path, yaml.safe_dump(tree)).startswith(f"{key} is required and missing")


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (
            [
                "training.max_tokens_per_micro_batch=99",
                "data.max_prompt_tokens=60",
                "rollout.max_completion_tokens=40",
            ],
            ["99", "100"],
        ),
        (["training.num_mini_batches=3", "rollout.num_prompts_per_step=8"], ["3", "8"]),
        (["rollout.group_size=1"], ["2", "1"]),
        (["loss.clip_ratio_low=1.5"], ["1", "1.5"]),
        (["rollout.temperature=0"], ["0"]),
        (["optimizer.betas=[0.9, 1.0]"], ["betas", "1"]),
    ],
)
def test_cross_check_prints_both_numbers(
    overrides: list[str], numbers: list[str], tmp_path: Path
) -> None:
    message = _refusal(tmp_path, None, *overrides)
    assert overrides[0].partition("=")[0] in message
    assert all(number in message for number in numbers)


def test_budget_that_just_holds_the_longest_rollout_is_enough(tmp_path: Path) -> None:
    sizes = ["data.max_prompt_tokens=60", "rollout.max_completion_tokens=40"]
    assert (
        _load(
            tmp_path, None, "training.max_tokens_per_micro_batch=100", *sizes
        ).training.max_tokens_per_micro_batch
        == 100
    )


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("model", "model.path"),
        ("tensor_parallel_size", "rollout.tensor_parallel_size"),
        ("load_format", "the trainer decides this itself"),
    ],
)
def test_engine_option_that_the_trainer_owns_is_refused(
    name: str, instead: str, tmp_path: Path
) -> None:
    message = _refusal(tmp_path, {"rollout": {"engine": {name: 1}}})
    assert message.startswith(f"rollout.engine.{name}: ")
    assert instead in message


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run_dir: x\nseed: 1\nseed: 2\n", 3),
        ("model:\n  path: a\n  path: b\n", 3),
        ("a: 1\n b: 2\n", 2),
        ("? [a]\n: 1\n", 1),
    ],
    ids=["duplicate", "duplicate_below", "indent", "list_as_key"],
)
def test_broken_yaml_names_the_line(text: str, line: int, tmp_path: Path) -> None:
    assert _refusal(tmp_path, text).startswith(f"{tmp_path}/config.yaml:{line}: not valid YAML: ")


@pytest.mark.parametrize(
    "text",
    [
        "a: 2024-13-45",
        "a: " + "1" * 5000,
        "[" * 3000,
        "a: \0",
        "a: 0x_",
        "a: !!bool x",
        "a: !!timestamp x",
        "!!python/object:os.system x",
        "a: *b",
    ],
    ids=["date", "digits", "nesting", "nul", "hex", "bool", "timestamp", "python_tag", "alias"],
)
def test_whatever_yaml_chokes_on_is_one_line_with_the_file(text: str, tmp_path: Path) -> None:
    message = _refusal(tmp_path, text)
    assert message.startswith(f"{tmp_path}/config.yaml")
    assert "not valid YAML" in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "- a\n", "just text\n"])
def test_config_that_is_no_mapping_is_refused(text: str, tmp_path: Path) -> None:
    assert "a config is a mapping of sections" in _refusal(tmp_path, text)


def test_config_error_is_one_line_whatever_it_quotes() -> None:
    assert str(ConfigError("a: two\nlines")) == "a: two lines"


# The resolved copy


def test_resolved_config_loads_to_the_same_config(tmp_path: Path) -> None:
    tree = {
        "rewards": [
            {"function": "a.py:f", "weight": 0.5, "args": {"x": [1, {"y": None}]}},
            {"name": "math"},
        ],
        "rollout": {"engine": {"enforce_eager": True, "compilation_config": {"level": 0}}},
        "optimizer": {"lr": "1e-6", "betas": [0.8, 0.9]},
        "logging": {"wandb": "offline"},
        "data": {"train": "x.jsonl", "system_prompt": "two\nlines: é"},
    }
    config = _load(tmp_path, tree)
    assert _load(tmp_path, yaml.safe_dump(config_to_dict(config), sort_keys=False)) == config


def test_resolved_config_is_plain_data(tmp_path: Path) -> None:
    tree = config_to_dict(_load(tmp_path, {"rollout": {"engine": {"sizes": {1: "a"}}}}))
    assert yaml.safe_load(yaml.safe_dump(tree)) == tree
    assert json.loads(json.dumps(tree["optimizer"])) == tree["optimizer"]


def test_resolved_config_shows_no_secret(tmp_path: Path) -> None:
    args = {
        "api_key": "s3cret",
        "HF_TOKEN": "s3cret",
        "nested": [{"password": "s3cret"}],
        "client_secrets": {"a": "s3cret"},
    }
    tree = config_to_dict(
        _load(
            tmp_path,
            {
                "rewards": [{"name": "exact", "args": args}],
                "rollout": {"engine": {"hf_token": "s3cret"}},
            },
        )
    )
    assert "s3cret" not in yaml.safe_dump(tree)
    assert tree["rewards"][0]["args"]["api_key"] == "<redacted>"


def test_resolved_config_keeps_what_only_sounds_like_a_secret(tmp_path: Path) -> None:
    engine = {"tokenizer_threads": 2, "max_num_batched_tokens": 4096, "block_size": 16}
    tree = config_to_dict(
        _load(
            tmp_path,
            {"rollout": {"engine": engine}, "data": {"train": "x.jsonl", "prompt_key": "question"}},
        )
    )
    assert tree["rollout"]["engine"] == engine
    assert (tree["data"]["prompt_key"], tree["data"]["max_prompt_tokens"]) == ("question", 512)


SECRETS = {
    "authorization": "Bearer x",
    "Authorization": "x",
    "auth": "x",
    "basic_auth": "x",
    "passwd": "x",
    "pwd": "x",
    "pw": "x",
    "db_pwd": "x",
    "credential": "x",
    "credentials": "x",
    "api-key": "x",
    "x-api-key": "x",
    "apikey": "x",
    "APIKEY": "x",
    "access_key": "x",
    "passphrase": "x",
    "hf_token": "x",
    "TOKEN": "x",
    "session_cookie": "x",
    "oauth": "x",
    "jwt": "x",
    # by their form
    "header": "Authorization: Bearer abcdefgh12",
    "h2": "bearer abcdefgh12",
    "url": "https://user:pw@host/x",
    "dsn2": "postgres://u:p@h:5432/d",
    "login": "hf_" + "a1" * 12,
    "x": "sk-" + "a1" * 12,
    "y": "sk-proj-" + "a1" * 12,
    "z": "ghp_" + "a1" * 18,
    "aws": "AKIA" + "A1" * 8,
    "line": "curl -H 'authorization: Token abc'",
    "w": "PASSWORD=abc",
    "pem": "-----BEGIN RSA PRIVATE KEY-----",
}
NO_SECRETS = {
    "author": "x",
    "authors": "x",
    "authored": "x",
    "tokenizer": "x",
    "pattern": "x",
    "path": "x",
    "compass": "x",
    "keyword": "x",
    "url": "https://host:80/a@b",
    "text": "the bearer of news",
    "sk": "sk-learn",
    "hf": "hf_transfer",
    "user": "a:b@c",
    "passage": "x",
    "power": "x",
    "hub": "hub:openai/gsm8k:main:test",
    "patch": "x",
}


def test_redaction_by_name_and_by_form(tmp_path: Path) -> None:
    args = SECRETS | {f"no_{name}": value for name, value in NO_SECRETS.items()}
    tree = config_to_dict(
        _load(tmp_path, {"rewards": [{"name": "exact", "args": {"inner": args}}]})
    )
    displayed = tree["rewards"][0]["args"]["inner"]
    assert {name for name in displayed if displayed[name] == "<redacted>"} == set(SECRETS)
    assert {name: displayed[f"no_{name}"] for name in NO_SECRETS} == NO_SECRETS


def test_redaction_of_a_declared_key_by_its_form(tmp_path: Path) -> None:
    for path in (
        "https://user:pw@host/model",
        "https://host/model?v=1&api_key=abc",
        "s3://bucket/x?X-Amz-Signature=abc",
    ):
        tree = config_to_dict(_load(tmp_path, {"model": {"path": path}}))
        assert tree["model"]["path"] == "<redacted>"


def test_redacting_does_not_change_the_config_itself(tmp_path: Path) -> None:
    config = _load(tmp_path, {"rewards": [{"name": "exact", "args": {"api_key": "s3cret"}}]})
    config_to_dict(config)
    assert config.rewards[0].args == {"api_key": "s3cret"}


def test_help_describes_every_key(tmp_path: Path) -> None:
    def leaves(tree: dict[str, Any], location: str = "") -> list[str]:
        names = []
        for name, value in tree.items():
            names += (
                leaves(value, f"{location}{name}.")
                if isinstance(value, dict) and name != "engine" and value
                else [location + name]
            )
        return names

    described = {line.split()[0] for line in describe_keys().splitlines() if line[2] != " "}
    expected = set(leaves(config_to_dict(_load(tmp_path)))) - {"rewards"}
    assert described - {name for name in described if name.startswith("rewards.N.")} == expected
    assert "rewards.N.weight" in described


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_help_fits_the_terminal_and_names_each_key_at_the_start_of_a_line(columns: int) -> None:
    lines = describe_keys(columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert "  rollout.group_size  (a whole number >= 2; default 8)" in lines
    assert lines[lines.index("  rollout.group_size  (a whole number >= 2; default 8)") + 1] == (
        "      completions for each prompt (G)"
    )


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("loss.dual_clip=None", "loss.dual_clip", None),
        ("loss.dual_clip=none", "loss.dual_clip", None),
        ("data.system_prompt=None", "data.system_prompt", None),
        ("training.num_steps=1e3", "training.num_steps", 1000),
        ("training.num_steps=2000.0", "training.num_steps", 2000),
        ("rollout.weight_sync_bucket_mib=1e2", "rollout.weight_sync_bucket_mib", 100),
        ("model.lora.target_modules=q_proj", "model.lora.target_modules.0", "q_proj"),
        ("model.lora.target_modules=q_proj,v_proj", "model.lora.target_modules.1", "v_proj"),
        ("model.lora.target_modules=all-linear", "model.lora.target_modules", "all-linear"),
        ("model.dtype=bf16", "model.dtype", "bfloat16"),
        ("model.dtype=fp32", "model.dtype", "float32"),
        ("optimizer.lr=1e-6", "optimizer.lr", 1e-6),
    ],
)
def test_what_can_mean_one_thing_alone_is_taken_for_it(
    override: str, key: str, value: Any, tmp_path: Path
) -> None:
    result = flatten_config(_load(tmp_path, None, override))[key]
    assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.num_steps=2.5", "training.num_steps must be a whole number >= 1; got 2.5"),
        ("training.num_steps=1e300", "training.num_steps must be a whole number >= 1; got '1e300'"),
        (
            "training.num_steps=-1",
            "got -1; without an end: a large number, stopped by Ctrl-C or training.max_time_s",
        ),
        ("seed=true", "seed must be a whole number >= 0; got True"),
        (
            "checkpoint.resume=true",
            "checkpoint.resume must be text; got True; auto goes on from run_dir's newest",
        ),
        (
            "rollout.temperature=0",
            "are alike and teach nothing; eval.temperature: 0 evaluates greedily",
        ),
        ("rollout.stop=</a>", "must be a list; got '</a>'; a list of texts: ['</a>']"),
        ("model.dtype=fp16", "float32|bfloat16; got 'fp16'; float16 overflows"),
        ("model.attention=flash_attention_2", "got 'flash_attention_2'; flash is flash-attn"),
        (
            "rewards=gsm8k",
            "rewards must be a list; got 'gsm8k'; [{name: gsm8k}], or [{function: 'file.py:fn'}]",
        ),
        ("logging.wandb=project", "got 'project'; the project's name is logging.wandb_project"),
        ("data.train=[a.jsonl, b.jsonl]", "cat a.jsonl b.jsonl > both.jsonl makes one of two"),
        ("model.lora=16", "got 16; {rank: 16, alpha: 32}"),
        ("model.lora.rank=-1", "model.lora.rank must be a whole number >= 0; got -1"),
        (
            "loss.clip_ratio_low=None",
            "loss.clip_ratio_low must be a number > 0 and <= 1; got 'None'",
        ),
    ],
)
def test_what_cannot_be_taken_gets_its_remedy(override: str, message: str, tmp_path: Path) -> None:
    assert message in _refusal(tmp_path, None, override)


@pytest.mark.parametrize("text", ["{question}", "{a}: {b}", "{a}", "'{a} # {b}'", "ask {a}"])
def test_a_template_on_the_command_line_needs_no_quotes_of_yaml(text: str) -> None:
    for key in ("data.prompt_template", "teacher.prompt_template"):
        tree: dict[str, Any] = {}
        assert apply_override(tree, f"{key}={text}") == (key, text.strip("'"))
    # Other keys take a mapping as before.
    assert apply_override({}, "data.eval={a: b.jsonl}")[1] == {"a": "b.jsonl"}


@pytest.mark.parametrize(
    ("sizes", "tokens"),
    [
        ([], 2048),
        (
            ["data.max_prompt_tokens=1000", "rollout.max_completion_tokens=500"],
            3000,
        ),  # two of the longest
        (
            ["data.max_prompt_tokens=9000", "rollout.max_completion_tokens=5000"],
            16384,
        ),  # never above the default
        (["training.max_tokens_per_micro_batch=4096"], 4096),
        (["training.max_tokens_per_micro_batch=16384"], 16384),  # as the default, but said
    ],
)
def test_micro_batches_fit_a_cpu_where_the_config_does_not_say(
    tmp_path: Path, sizes: list[str], tokens: int
) -> None:
    path = write_config(tmp_path, tmp_path, training=None)
    displayed = load_config_with_sources(path, ["data.max_prompt_tokens=50", *sizes], on_cpu=True)[
        0
    ]
    assert displayed.training.max_tokens_per_micro_batch == tokens
    assert load_config(path, sizes[:2]).micro_batch_tokens in (16384, 4096)


def test_hidden_gpus_and_none_are_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(load, "num_gpus", lambda: 8)
    assert load.trains_on_cpu() == (
        torch.version.cuda is None
    )  # a build for the CPU cannot use them
    monkeypatch.setattr(load, "is_built_for_cpu", lambda _: False)
    assert not load.trains_on_cpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert load.trains_on_cpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(load, "num_gpus", lambda: 0)
    assert load.trains_on_cpu()


def test_a_build_of_torch_says_what_it_is_for_without_being_imported(tmp_path: Path) -> None:
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    assert not load.is_built_for_cpu(spec)  # a torch that says nothing
    for message, is_for_cpu in [
        ("cuda: Optional[str] = None", True),
        ("cuda = None", True),
        ("cuda = '12.8'", False),
    ]:
        (tmp_path / "version.py").write_text(
            f"__version__ = '2.13.0'\n{message}\nhip: Optional[str] = None\n"
        )
        assert load.is_built_for_cpu(spec) == is_for_cpu
    assert load.is_built_for_cpu(find_spec("torch")) == (torch.version.cuda is None)


def test_windows_shows_one_device_where_nvidia_s_driver_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(load, "Path", lambda _: tmp_path)  # no /dev/nvidia0
    monkeypatch.setattr(load, "_WSL_DEVICE", tmp_path / "dxg")
    monkeypatch.setattr(load, "_WSL_CUDA", tmp_path / "libcuda.so.1")
    assert load.num_gpus() == 0
    (tmp_path / "dxg").touch()
    assert load.num_gpus() == 0  # another maker's
    (tmp_path / "libcuda.so.1").touch()
    assert load.num_gpus() == 1


def test_a_condition_on_a_key_that_does_not_exist_is_an_error() -> None:
    """Else a misspelt key in conflicts.tsv would switch its rule off."""
    with pytest.raises(KeyError):
        met_conditions("rollout.tail_batchin != 1", {"rollout.tail_batching": 1.0})
