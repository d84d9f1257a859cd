"""Names and spellings of other trainers: the line names our key, or says that there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_spmd.config.aliases import TRAINERS, entries, known_elsewhere
from grpo_spmd.config.coerce import key_names
from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, RewardConfig

OURS = {*key_names(Config), *key_names(RewardConfig, "rewards.N")}
NAMES = {trainer: [name for names, *_ in entries(table) for name in names] for trainer, table in TRAINERS.items()}


@pytest.mark.parametrize(("trainer", "least"), [("TRL", 40), ("verl", 40), ("OpenRLHF", 25), ("prime-rl", 20)])
def test_each_name_is_given_once_and_leads_to_keys_that_exist(trainer: str, least: int) -> None:
    names = NAMES[trainer]
    assert len(names) >= least
    assert sorted(names) == sorted(set(names))
    for _, keys, note in entries(TRAINERS[trainer]):
        assert set(keys) <= OURS
        assert "\n" not in note


@pytest.mark.parametrize("trainer", NAMES)
def test_no_name_is_a_key_of_ours_at_its_own_place(trainer: str) -> None:
    """Such a key is never unknown, so that its line could not be read; in verl's tree it stands in another place."""
    in_their_tree = {"rollout.gpu_memory_utilization", "rollout.temperature", "advantage.estimator"}
    assert set(NAMES[trainer]) & OURS <= in_their_tree


def _refusal(folder: Path, tree: dict[str, Any], *overrides: str) -> str:
    good = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rewards": [{"name": "exact"}]}
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
        ("report_to", "logging.wandb", "offline"),
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
        ("trainer.logger", "logging.wandb", "verl's name"),
        ("rewards.0.reward_weights", "rewards.N.weight", "TRL's name"),
        ("train_files", "data.train", "verl's name"),  # by the last part of theirs
        ("n", "rollout.group_size", "verl's name"),
    ],
)
def test_an_unknown_key_of_another_trainer_is_translated(name: str, ours: str, mind: str, tmp_path: Path) -> None:
    said = _refusal(tmp_path, {}, f"{name}=1")
    assert said.startswith(f"{name}: unknown key, ")
    assert ours in said
    assert mind in said
    if not name.startswith("rewards."):
        section, _, inner = name.partition(".")
        nested: Any = 1
        for part in reversed(inner.split(".") if inner else []):
            nested = {part: nested}
        path = {"path": "m"} if section == "model" else {"train": "t.jsonl"} if section == "data" else {}
        in_file = _refusal(tmp_path, {section: path | nested if isinstance(nested, dict) else nested})
        assert in_file == said


def test_a_section_of_theirs_is_answered_by_the_first_key_in_it_that_has_a_name_here(tmp_path: Path) -> None:
    tree = {"actor_rollout_ref": {"actor": {"strategy": "fsdp", "optim": {"lr": 1e-6}}, "rollout": {"n": 8}}}
    assert _refusal(tmp_path, tree) == "actor_rollout_ref.actor.optim.lr: unknown key, verl's name: here optimizer.lr"
    assert "Coming from" in _refusal(tmp_path, {"trainer": {"of_nobody": 1}})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "num_generation",
            "num_generation: unknown key; did you mean num_generations, TRL's name: here rollout.group_size?",
        ),
        ("learningrate", "learningrate: unknown key; did you mean learning_rate, TRL's name: here optimizer.lr?"),
        ("group_sise", "group_sise: unknown key; did you mean rollout.group_size?"),
        ("lr", "lr: unknown key; did you mean optimizer.lr?"),
        ("optimizer.name", "optimizer.name: unknown key; did you mean optimizer?"),
        ("name", "name: unknown key; --help lists them all"),
    ],
)
def test_a_name_that_is_nearly_theirs_is_asked_for_where_none_of_ours_is_near(
    name: str, said: str, tmp_path: Path
) -> None:
    assert _refusal(tmp_path, {}, f"{name}=1") == said


def test_what_nobody_has_is_left_to_the_closest_key(tmp_path: Path) -> None:
    assert known_elsewhere("optimizer.lrr") is None
    assert _refusal(tmp_path, {}, "optimizer.lrr=1").endswith("did you mean optimizer.lr?")


def test_the_table_is_not_read_for_a_good_config(tmp_path: Path) -> None:
    sys.modules.pop("grpo_spmd.config.aliases")
    good = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "rewards": [{"name": "exact"}]}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(good), encoding="utf-8")
    load_config(tmp_path / "x.yaml", ["optimizer.lr=1e-5"])
    assert "grpo_spmd.config.aliases" not in sys.modules


def _parser() -> OverridesParser:
    parser = OverridesParser(prog="x", allow_abbrev=False)
    parser.add_argument("--config", required=True)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("overrides", nargs="*")
    return parser


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config x --optimizer.lr=1e-6", "optimizer.lr: an override has no dashes: optimizer.lr=1e-6"),
        ("--config x --optimizer.lr 1e-6", "optimizer.lr: an override has no dashes: optimizer.lr=1e-6"),
        ("--learning_rate 1e-6 --config x", "here optimizer.lr; an override has no dashes: optimizer.lr=1e-6"),
        ("--config x --num-generations=8", "here rollout.group_size; an override has no dashes: rollout.group_size=8"),
        ("--config x --bf16", "an override has no dashes: model.dtype=value"),
        ("--config x --lr 3", "lr: an override has no dashes: optimizer.lr=3"),
        ("--config x --epsilon 0.3", "an override has no dashes: section.key=0.3"),
        ("--config x optimizer.lr = 1e-6", "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6"),
        ("--config x optimizer.lr =1e-6", "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6"),
        ("--config x optimizer.lr= 1e-6", "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6"),
        ("--config x optimizer.lr 1e-6", "optimizer.lr: no spaces around the equals sign: optimizer.lr=1e-6"),
        ("--config x optimizer.lr -1", "optimizer.lr: no spaces around the equals sign: optimizer.lr=-1"),
        ("--confg x", "--confg: no such option; did you mean --config?"),
        ("--chekc --config x", "--chekc: no such option; did you mean --check?"),
        ("--check", "the following arguments are required: --config"),
    ],
)
def test_a_misspelt_override_costs_one_line(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        _parser().parse(words.split())
    shown = capsys.readouterr()
    assert stop.value.code == 2
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert said in shown.err


def test_what_is_written_well_is_taken() -> None:
    words = "a.b=1 --config x.yaml c=-1 --check d= e.f==2"
    args = _parser().parse(words.split())
    assert (args.config, args.check, args.overrides) == ("x.yaml", True, ["a.b=1", "c=-1", "d=", "e.f==2"])
    assert _parser().parse(["--config=x"]).overrides == []
