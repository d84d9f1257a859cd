"""Names and spellings of other trainers: the line names our key, or says that there is none."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_spmd.config.coerce import key_names, read_aliases, translate_key
from grpo_spmd.config.command_line import OverridesParser, number_of_ranks
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RewardConfig

OURS = {*key_names(Config), *key_names(RewardConfig, "rewards.N")}
NAMES: dict[str, list[str]] = {}
for _alias in read_aliases():
    NAMES.setdefault(_alias.trainer, []).extend(_alias.names)


@pytest.mark.parametrize(
    ("trainer", "minimum"),
    [("TRL", 40), ("verl", 40), ("OpenRLHF", 25), ("prime-rl", 20), ("slime", 7)],
)
def test_each_name_is_given_once_and_leads_to_keys_that_exist(trainer: str, minimum: int) -> None:
    names = NAMES[trainer]
    assert len(names) >= minimum
    assert sorted(names) == sorted(set(names))
    for alias in read_aliases():
        assert set(alias.keys) <= OURS


@pytest.mark.parametrize("trainer", NAMES)
def test_no_name_is_a_key_of_ours_at_its_own_place(trainer: str) -> None:
    """Such a key is never unknown, so that its line could not be read; in verl's tree it stands in
    another place."""
    in_their_tree = {
        "rollout.gpu_memory_utilization",
        "rollout.temperature",
        "advantage.estimator",
        "algorithm",
    }
    assert set(NAMES[trainer]) & OURS <= in_their_tree


def _refusal(folder: Path, tree: dict[str, Any], *overrides: str) -> str:
    good = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "rewards": [{"name": "exact"}],
    }
    (folder / "x.yaml").write_text(yaml.safe_dump(good | tree), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(folder / "x.yaml", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "ours", "mind"),
    [
        ("learning_rate", "optimizer.lr", "TRL's name"),
        ("per_device_train_batch_size", "rollout.num_prompts_per_step", "sizes are global here"),
        ("beta", "loss.kl_coef", "optimizer.betas"),
        ("save_steps", "checkpoint.every_steps", "TRL's and OpenRLHF's name"),
        ("num_generations", "rollout.group_size", "TRL's name"),
        ("report_to", "logging.trackers", "offline"),
        ("epsilon", "loss.clip_ratio_low, loss.clip_ratio_high", "theirs sets both"),
        ("max_steps", "training.num_steps", "prime-rl's name"),
        ("use_vllm", "nothing here", "always runs in the process"),
        ("n_samples_per_prompt", "rollout.group_size", "OpenRLHF's name"),
        ("seq_len", "rollout.max_completion_tokens", "prime-rl's name"),
        ("data.train_batch_size", "rollout.num_prompts_per_step", "verl's name"),
        ("actor_rollout_ref.rollout.n", "rollout.group_size", "verl's name"),
        ("optimizer.learning_rate", "optimizer.lr", "TRL's name"),
        ("loss.beta", "loss.kl_coef", "TRL's name"),
        ("actor.adam.lr", "optimizer.lr", "OpenRLHF's name"),
        ("trainer.logger", "logging.trackers", "verl's name"),
        ("rewards.0.reward_weights", "rewards.N.weight", "TRL's name"),
        ("train_files", "data.train", "verl's name"),  # by the last part of theirs
        ("n", "rollout.group_size", "verl's name"),
        ("temperature", "rollout.temperature", "TRL's name"),
        ("chat_template_kwargs", "data.chat_template_kwargs", "TRL's name"),
        ("data.apply_chat_template_kwargs", "data.chat_template_kwargs", "verl's name"),
        ("actor_rollout_ref.rollout.multi_turn", "environment.agent", "EPISODES.md"),
        ("agent_func_path", "environment.gym", "reset(**row)"),
        ("scale_rewards", "advantage.normalize_std", "max_rl"),
        ("custom_chat_template", "model.path", "chat_template.jinja"),
        ("model.lora.r", "model.lora.rank", "TRL's name"),
        ("rollout.ignore_eos", "nothing here", "may end"),
        ("stop_strings", "rollout.stop", "a list"),
        ("stop_token_ids", "nothing here", "model's own eos"),
        ("val_kwargs.top_p", "eval.top_p", "verl's name"),
        ("model.revision", "model.path", "folder of that revision"),
        ("model.load_in_4bit", "nothing here", "no quantisation"),
        ("optimizer.eps", "nothing here", "1e-8"),
        ("data.seed", "here seed", "one seed"),
        ("log_level", "nothing here", "metrics.jsonl"),
        ("num_processes", "nothing here", "--nproc-per-node"),
        ("do_eval", "eval.every_steps", "data.eval"),
        ("data.reward_fn_key", "rewards.N.args", "verl's name"),
        ("model.tokenizer", "model.path", "model's folder"),
        ("dataset_train_split", "data.train", "hub:REPO:SUBSET:SPLIT"),
        ("actor_rollout_ref.rollout.top_p", "nothing here", "whole distribution"),
        ("actor_rollout_ref.rollout.name", "nothing here", "vLLM in the process"),
        ("model.trust_remote_code", "nothing here", "never run"),
        ("teacher_model_name_or_path", "teacher.path", "TRL's name"),
        ("teacher_model_server_url", "teacher.url", "TRL's name"),
        ("distillation.distillation_loss.topk", "teacher.top_k", "verl's name"),
        ("opd_kl_coef", "teacher.coef", "slime's name"),
        ("remote_rm_url", "rewards.N.url", "OpenRLHF's name"),
        ("rm_url", "rewards.N.url", "slime's name"),
        ("inference.gpu_memory_utilization", "rollout.gpu_memory_utilization", "prime-rl's name"),
    ],
)
def test_an_unknown_key_of_another_trainer_is_translated(
    name: str, ours: str, mind: str, tmp_path: Path
) -> None:
    refusal = _refusal(tmp_path, {}, f"{name}=1")
    assert refusal.startswith(f"{name}: unknown key, ")
    assert ours in refusal
    assert mind in refusal
    if not name.startswith("rewards."):
        section, _, inner = name.partition(".")
        nested: Any = 1
        for piece in reversed(inner.split(".") if inner else []):
            nested = {piece: nested}
        path = (
            {"path": "m"}
            if section == "model"
            else {"train": "t.jsonl"}
            if section == "data"
            else {}
        )
        in_file = _refusal(
            tmp_path, {section: path | nested if isinstance(nested, dict) else nested}
        )
        assert in_file == refusal


def test_a_section_of_theirs_is_answered_by_the_first_key_in_it_that_has_a_name_here(
    tmp_path: Path,
) -> None:
    tree = {
        "actor_rollout_ref": {
            "actor": {"strategy": "fsdp", "optim": {"lr": 1e-6}},
            "rollout": {"n": 8},
        }
    }
    assert (
        _refusal(tmp_path, tree)
        == "actor_rollout_ref.actor.optim.lr: unknown key, verl's name: here optimizer.lr"
    )
    assert "Coming from" in _refusal(tmp_path, {"trainer": {"of_nobody": 1}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "num_generation",
            "num_generation: unknown key; did you mean num_generations, TRL's name: here "
            "rollout.group_size?",
        ),
        (
            "learningrate",
            "learningrate: unknown key; did you mean learning_rate, TRL's name: here optimizer.lr?",
        ),
        ("group_sise", "group_sise: unknown key; did you mean rollout.group_size?"),
        ("lr", "lr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.kind", "optimizer.kind: unknown key; --help lists them all"),
        ("name", "name: unknown key; did you mean optimizer.name?"),
        (
            "rollout.min_completion_tokens",
            "rollout.min_completion_tokens: unknown key; --help lists them all",
        ),
        ("optimizer.max_lr", "optimizer.max_lr: unknown key; --help lists them all"),
        ("model.lora.rnak", "model.lora.rnak: unknown key; did you mean model.lora.rank?"),
        ("rollout.temp", "rollout.temp: unknown key; did you mean rollout.temperature?"),
        ("optimizer.lr_end", "optimizer.lr_end: unknown key; --help lists them all"),
        ("data.group_size", "data.group_size: unknown key; did you mean rollout.group_size?"),
        ("eval.rollouts", "eval.rollouts: unknown key; --help lists them all"),
    ],
)
def test_a_name_that_is_nearly_theirs_is_asked_for_where_none_of_ours_is_near(
    name: str, message: str, tmp_path: Path
) -> None:
    assert _refusal(tmp_path, {}, f"{name}=1") == message


def test_what_nobody_has_is_left_to_the_closest_key(tmp_path: Path) -> None:
    assert translate_key("optimizer.lrr") is None
    assert _refusal(tmp_path, {}, "optimizer.lrr=1").endswith("did you mean optimizer.lr?")


def test_the_table_is_not_read_for_a_good_config(tmp_path: Path) -> None:
    read_aliases.cache_clear()
    good = {
        "run_dir": "r",
        "model": {"path": "m"},
        "data": {"train": "t.jsonl"},
        "rewards": [{"name": "exact"}],
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(good), encoding="utf-8")
    load_config(tmp_path / "x.yaml", ["optimizer.lr=1e-5"])
    assert not read_aliases.cache_info().currsize


def _parser() -> OverridesParser:
    parser = OverridesParser(prog="x", allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--check", action="store_true")
    return parser


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--config x --optimizer.lr=1e-6",
            "optimizer.lr: an override has no dashes: optimizer.lr=1e-6",
        ),
        (
            "--config x --optimizer.lr 1e-6",
            "optimizer.lr: an override has no dashes: optimizer.lr=1e-6",
        ),
        (
            "--learning_rate 1e-6 --config x",
            "here optimizer.lr; an override has no dashes: section.key=value",
        ),
        (
            "--config x --num-generations=8",
            "here rollout.group_size; an override has no dashes: section.key=value",
        ),
        (
            "--config x --bf16",
            "master weights are float32); an override has no dashes: section.key=",
        ),
        ("--config x --lr 3", "did you mean optimizer.lr?; an override has no dashes"),
        ("--config x --epsilon 0.3", "an override has no dashes: section.key=value"),
        ("--config x --temperature=0.9", "rollout.temperature; an override has no dashes"),
        ("--config x --zero_stage=3", "nothing here (FSDP2 shards"),
        ("--config x --vllm_num_engines=8", "nothing here (each rank has an engine"),
        (
            "--config x --orchestrator.batch-size=128",
            "rollout.num_prompts_per_step",
        ),
        (
            "--config x --train_batch_size=128",
            "OpenRLHF's name: here training.num_mini_batches (how many optimizer",
        ),
        ("--config x --train_batch_size=128", "an override has no dashes: section.key=value"),
        ("--config x --micro_train_batch_size=2", "here training.max_tokens_per_micro_batch"),
        (
            "--config x --warmup_ratio=0.1",
            "here optimizer.warmup_steps",
        ),
        ("--config x --attn_implementation=flash_attention_2", "here model.attention"),
        ("--config x --advantage_estimator=group_norm", "here advantage.estimator"),
        ("--config x --inference.gpu-memory-utilization=0.5", "rollout.gpu_memory_utilization"),
        (
            "--config x --nproc 2",
            "--nproc: no such option; grpo-spmd train --nproc N, or torchrun's --nproc-per-node",
        ),
        ("-c x", "-c: no such option; --config x.yaml"),
        ("--config-name x", "--config-name: no such option; --config x.yaml"),
        ("--config x --version", "--version: no such option; python -c"),
        (
            "--config x --zzz 3",
            "zzz: unknown key; --help lists them all; an override has no dashes",
        ),
        (
            "--config x optimizer.lr = 1e-6",
            "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6",
        ),
        (
            "--config x optimizer.lr =1e-6",
            "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6",
        ),
        (
            "--config x optimizer.lr= 1e-6",
            "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6",
        ),
        (
            "--config x optimizer.lr 1e-6",
            "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6",
        ),
        (
            "--config x optimizer.lr -1",
            "optimizer.lr: no spaces around the equals sign: optimizer.lr=-1",
        ),
        ("--confg x", "--confg: no such option; did you mean --config?"),
        ("--chekc --config x", "--chekc: no such option; did you mean --check?"),
        ("--check", "the following arguments are required: --config"),
        ("--config x --config y", "--config is given twice; a run has one file"),
        ("--config x seed=1 --check seed=2", "seed is given twice, with two values; leave one out"),
    ],
)
def test_a_misspelt_override_costs_one_line(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parser().parse(words.split())
    displayed = capsys.readouterr()
    assert stop.value.code == 2
    assert displayed.out == ""
    assert len(displayed.err.splitlines()) == 1
    assert message in displayed.err


def test_what_is_written_well_is_taken() -> None:
    words = "a.b=1 --config x.yaml c=-1 --check d= e.f==2"
    args = _parser().parse(words.split())
    assert (args.config, args.check, args.overrides) == (
        "x.yaml",
        True,
        ["a.b=1", "c=-1", "d=", "e.f==2"],
    )
    assert _parser().parse(["--config=x"]).overrides == []
    twice = [
        "run_dir=a",
        "seed=1",
        "checkpoint.resume=auto",
        "seed=1",
        "checkpoint.resume=never",
        "run_dir=b",
    ]
    assert _parser().parse(["--config=x", *twice]).overrides == twice  # as launch scripts put them


@pytest.mark.parametrize("command", ["export", "replay", "prefetch", "demo"])
@pytest.mark.parametrize("words", ["", "--zzz 3", "x --step x y"])
def test_each_command_says_a_mistake_in_one_line(
    command: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module(
        {name: f"grpo_spmd.{name}.__main__" for name in ("replay", "demo")}.get(
            command, f"grpo_spmd.{command}"
        )
    )
    monkeypatch.setattr(sys, "argv", [command, *(words or "--zz").split()])
    with pytest.raises(SystemExit) as stop:
        module.main()
    displayed = capsys.readouterr()
    assert (stop.value.code, displayed.out, len(displayed.err.splitlines())) == (2, "", 1)
    assert displayed.err.startswith("error: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [("WORLD_SIZE", "abc"), ("WORLD_SIZE", ""), ("WORLD_SIZE", "0"), ("LOCAL_WORLD_SIZE", "x")],
)
def test_what_torchrun_sets_must_be_numbers(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(
        ConfigError, match=f"^{name} must be a whole number from 1 on; got '{text}'"
    ):
        number_of_ranks()


def test_a_python_without_the_packages_is_told_which_to_activate() -> None:
    bare = [sys.executable, "-I", "-S", "-c", _AS_MODULE]
    done = subprocess.run(
        bare, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "yaml is not installed for " in line
    assert line.endswith("make the environment by launch/setup.sh, and then: . .venv/bin/activate")


_AS_MODULE = "import sys; sys.path.insert(0, '.'); sys.argv = ['-m']; import grpo_spmd"


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(
        ConfigError, match=r"cannot read x\.yaml: No such file.*the working folder itself is gone"
    ):
        load_config("x.yaml")
