"""`algorithm: NAME`: a bundle of defaults under what anybody says, shown with where each value came
from, and the table
of configs/README.md. What a recipe does in an update is shown in tests/ranks/test_recipes.py."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_spmd.checks.explain import explain
from grpo_spmd.checks.memory import advice, idle_keys
from grpo_spmd.config.coerce import key_names
from grpo_spmd.config.describe import (
    config_to_dict,
    flatten_config,
    read_recipes,
    recipes_as_markdown,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import build_config, load_config, load_config_with_sources
from grpo_spmd.config.schema import Algorithm, Config
from grpo_spmd.diagnosis.run import RecordedRun
from grpo_spmd.tools.report.overview import config_rows
from tests.support.processes import ROOT

DEMO = ROOT / "configs" / "demo.yaml"


def named(name: str) -> list[str]:
    """The overrides that choose it, with models from somewhere where it needs some."""
    return [f"algorithm={name}", *(f"{key}=some/model" for key in read_recipes()[name].needs)]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(DEMO, overrides)
    return str(caught.value)


def test_the_names_are_those_of_the_key_and_every_recipe_key_is_a_key() -> None:
    assert typing.get_args(Algorithm) == tuple(read_recipes())
    assert {key for recipe in read_recipes().values() for key in recipe.values} <= set(
        key_names(Config)
    )


def test_without_an_algorithm_nothing_is_another_than_before() -> None:
    plain, sources = load_config_with_sources(DEMO)
    assert plain.algorithm is None
    assert not any("algorithm" in source for source in sources.values())
    assert load_config(DEMO, ["algorithm=null"]) == plain


@pytest.mark.parametrize("name", read_recipes())
def test_a_recipe_stands_by_itself(name: Algorithm) -> None:
    """It passes every rule with the demo's sizes, sets each of its keys and no other, and nothing
    in it is idle or
    what --explain advises against."""
    values = read_recipes()[name].values
    config, sources = load_config_with_sources(DEMO, named(name))
    result, plain = flatten_config(config), flatten_config(load_config(DEMO))
    assert {key: result[key] for key in values} == values
    assert {key for key in result if result[key] != plain[key]} <= {
        "algorithm",
        *values,
        *read_recipes()[name].needs,
    }
    assert {key for key, source in sources.items() if source == f"from algorithm: {name}"} == set(
        values
    )
    assert not list(idle_keys(config, sources))
    message = [line for line in advice(config, 2) if "one optimizer step a rollout" not in line]
    assert not message


def test_any_key_overrides_it_from_file_command_line_and_python(tmp_path: Path) -> None:
    tree = yaml.safe_load(DEMO.read_text()) | {
        "algorithm": "dapo",
        "loss": {"clip_ratio_high": 0.3, "dual_clip": None},
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(tree))
    config, sources = load_config_with_sources(
        tmp_path / "x.yaml", ["rollout.dynamic_sampling=false"]
    )
    assert (
        config.loss.clip_ratio_high,
        config.loss.dual_clip,
        config.rollout.dynamic_sampling,
    ) == (0.3, None, False)
    assert (config.loss.aggregation, config.loss.mask_truncated) == ("token", True)
    lines = (tmp_path / "x.yaml").read_text().splitlines()
    line = lines.index("  clip_ratio_high: 0.3") + 1
    assert (
        sources["loss.clip_ratio_high"]
        == f"{tmp_path}/x.yaml:{line}, in place of 0.28 from algorithm: dapo"
    )
    assert (
        sources["rollout.dynamic_sampling"] == "command line, in place of true from algorithm: dapo"
    )
    assert sources["loss.clip_ratio_low"] == "from algorithm: dapo"
    python = build_config(tree | {"rollout": {**tree["rollout"], "dynamic_sampling": False}})
    assert python == config


def test_a_value_of_the_recipes_own_is_shown_as_whose_it_is(tmp_path: Path) -> None:
    sources = load_config_with_sources(DEMO, ["algorithm=dapo", "loss.clip_ratio_low=0.2"])[1]
    assert sources["loss.clip_ratio_low"] == "command line"


@pytest.mark.parametrize("empty", [None, "None", {}])
def test_an_empty_section_takes_the_whole_recipe(empty: Any) -> None:
    tree = yaml.safe_load(DEMO.read_text()) | {"algorithm": "rloo", "loss": empty}
    assert build_config(tree) == load_config(DEMO, ["algorithm=rloo"])
    assert tree["loss"] is empty or tree["loss"] == empty  # what was handed in is as it was


@pytest.mark.parametrize("name", read_recipes())
def test_the_resolved_config_loads_to_the_same(name: str, tmp_path: Path) -> None:
    """That is config.yaml of a run folder: the word stays, and the values in it win over a later
    table's."""
    config = load_config(DEMO, [*named(name), "loss.clip_ratio_high=0.25", "loss.dual_clip=9"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_to_dict(config)))
    again, sources = load_config_with_sources(tmp_path / "config.yaml")
    assert again == config
    assert again.algorithm == name
    assert not any(source.startswith("from") for source in sources.values())


@pytest.mark.parametrize(("name", "key"), [("opd", "teacher.path")])
def test_what_an_algorithm_needs_is_asked_for(name: str, key: str) -> None:
    assert (
        refusal(f"algorithm={name}")
        == f"algorithm: {name} needs {key}; set it to a model's folder or hub id"
    )


def test_explain_names_the_origin_of_each_value() -> None:
    overrides = ["algorithm=gspo", "loss.clip_ratio_low=1e-3"]
    config, sources = load_config_with_sources(DEMO, overrides)
    lines = [line.split() for line in explain(config, sources, None, 100, 2)]
    assert ["loss.aggregation", '"sequence"', "from", "algorithm:", "gspo"] in lines
    assert "loss.clip_ratio_low 0.001 command line, in place of 0.0003 from algorithm: gspo" in map(
        " ".join, lines
    )
    assert not any("loss.kl_estimator" in line for line in lines)


def test_a_value_of_the_recipe_is_not_called_idle() -> None:
    overrides = ["algorithm=grpo", "loss.kl_coef=0"]
    config, sources = load_config_with_sources(DEMO, overrides)
    assert not list(idle_keys(config, sources))
    config, sources = load_config_with_sources(DEMO, [*overrides, "loss.kl_estimator=k2"])
    assert list(idle_keys(config, sources)) == ["loss.kl_estimator does nothing: loss.kl_coef is 0"]


@pytest.mark.parametrize(
    ("inputs", "meant"),
    [
        ("dapp", "dapo"),
        ("DAPO", "dapo"),
        ("drgrpo", "dr_grpo"),
        ("'Dr. GRPO'", "dr_grpo"),
        ("REINFORCE++", "reinforce_pp"),
        ("reinforce_plus_plus", "reinforce_pp"),
        ("maxrl", "max_rl"),
    ],
)
def test_an_unknown_name_is_answered_by_the_closest(inputs: str, meant: str) -> None:
    message = refusal(f"algorithm={inputs}")
    assert message.startswith(f"algorithm must be {'|'.join(read_recipes())} or null; got ")
    assert message.endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("inputs", ["3", "true", "[1]", "adam"])
def test_what_is_no_name_is_refused(inputs: str) -> None:
    message = refusal(f"algorithm={inputs}")
    assert message.startswith("algorithm must be grpo|")
    assert "mean" not in message


def test_the_section_of_verl_is_still_answered() -> None:
    assert refusal("algorithm.adv_estimator=grpo").startswith(
        "algorithm.adv_estimator: unknown key, verl's name"
    )


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("algorithm=rloo", "loss.kl_coef=0"), '(algorithm: rloo sets loss.kl_in: "reward")'),
        (
            ("algorithm=dapo", "loss.clip_ratio_high=3"),
            "(algorithm: dapo sets loss.dual_clip: 3.0)",
        ),
        (
            ("algorithm=dapo", "rollout.tail_batching=1.5"),
            "(algorithm: dapo sets rollout.dynamic_sampling: true)",
        ),
    ],
)
def test_a_rule_that_a_recipe_breaks_names_the_recipe(
    overrides: tuple[str, ...], named: str
) -> None:
    assert refusal(*overrides).endswith(named)


def test_a_rule_that_the_user_broke_does_not() -> None:
    assert "algorithm" not in refusal(
        "algorithm=dapo", "loss.dual_clip=1.1", "loss.clip_ratio_high=0.2"
    )


def test_the_report_says_which_values_the_algorithm_gave() -> None:
    config = flatten_config(load_config(DEMO, ["algorithm=dapo", "loss.clip_ratio_high=0.3"]))
    created: dict[str, Any] = dict.fromkeys(field.name for field in dataclasses.fields(RecordedRun))
    run = RecordedRun(**created | {"config": config, "launches": []})
    sources = {key: source for key, _, source in config_rows(run)}
    assert sources["loss.mask_truncated"] == "from algorithm: dapo"
    assert (sources["loss.clip_ratio_high"], sources["loss.kl_estimator"]) == ("set", "default")


def test_the_readme_has_the_table() -> None:
    """`python -m grpo_spmd.config.describe recipes` prints it."""
    text = (ROOT / "configs" / "ALGORITHMS.md").read_text(encoding="utf-8")
    _, begin, rest = text.partition("<!-- recipes: begin -->")
    table, end, _ = rest.partition("<!-- recipes: end -->")
    assert begin
    assert end
    assert table.strip() == recipes_as_markdown()
