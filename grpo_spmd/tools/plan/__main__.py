"""The command: python -m grpo_spmd.plan --config x.yaml --gpu H100-80GB --ranks 8 [key=value]"""

from __future__ import annotations

import argparse
import json
import logging
import os
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.checks.machine import check_world_size
from grpo_spmd.checks.model_folder import check_model_sizes, folder_with_config
from grpo_spmd.config.command_line import OverridesParser
from grpo_spmd.config.errors import ConfigError, refuse, say
from grpo_spmd.config.load import decided, decided_values, load_config
from grpo_spmd.config.schema import ENGINE_RANKS_KEY, Config
from grpo_spmd.files import hold_standard_streams, read_model_config, show
from grpo_spmd.model.config_json import refuse_by_config, text_config
from grpo_spmd.model.reward_model_files import errors_about
from grpo_spmd.observe.cards import Card, find_card
from grpo_spmd.tools.plan.step_time import FRAGMENTATION, GIB, RANKS_PER_NODE, Case

if TYPE_CHECKING:
    from grpo_spmd.tools.plan.phases import Plan, Suggestion

_MAX_RANKS = 65_536
_WRAPPER = textwrap.TextWrapper(
    100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)


def main() -> None:
    """Runs the command. The exit code is 0 if the config fits, 1 if it does not, 2 for an error."""
    hold_standard_streams()
    # Nothing is downloaded, even if the config names a hub id. huggingface_hub reads this variable
    # when it is imported.
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = _parser().parse()
    try:
        if not 1 <= args.ranks <= _MAX_RANKS:
            raise ConfigError(f"--ranks is a number from 1 to {_MAX_RANKS:,}; got {args.ranks:,}")
        if args.ranks_per_node is not None and not 1 <= args.ranks_per_node <= args.ranks:
            raise ConfigError(f"--ranks-per-node is 1 to --ranks; got {args.ranks_per_node:,}")
        card = find_card(args.gpu)
        folder = _check_config(load_config(args.config, args.overrides), args)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        logging.getLogger("torch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="torch")
        fits = _print_plan(args, folder, card)
    except ConfigError as error:
        refuse(error)
    if not fits:
        raise SystemExit(1)


def _print_plan(args: argparse.Namespace, folder: Path, card: Card) -> bool:
    """Prints the plan of the config, or with --suggest only overrides.

    Returns True if the config fits, with --suggest also if it fits with the printed overrides.
    Writes the file of --json."""
    from grpo_spmd.tools.plan.phases import (
        decide,
        facts_from_config,
        larger_cache,
        make_plan,
        suggestions,
    )

    def plan_of(config: Config) -> Plan:
        """Returns the plan of a config in which no key is auto."""
        return make_plan(Case(config, facts, card, args.ranks), folder)

    def plan_with(overrides: Sequence[str]) -> Plan:
        """Returns the plan of the command's config with further overrides.

        Raises ConfigError if a run would refuse them."""
        # The values chosen for auto stay as they are, so that a suggestion changes little.
        config = load_config(args.config, [*args.overrides, *_decided_overrides(plan), *overrides])
        _check_config(config, args)
        return plan_of(config)

    facts = facts_from_config(folder)
    config = load_config(args.config, args.overrides)
    # First values for the keys that are auto, then overrides that the user would have to set.
    plan = decide(config, plan_of, _engine_sizes(config, facts.config, args))
    proposals, advised = suggestions(plan, plan_with), larger_cache(plan, plan_with)
    if args.json is not None:
        text = json.dumps(_as_json(plan, proposals, advised), indent=1)
        try:
            args.json.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json: cannot write {args.json}: {error.strerror}") from None
    if not args.suggest:
        for line in _text_lines(plan, proposals, advised):
            show(_WRAPPER.fill(line))
    elif plan.fits:
        say(f"it fits as it is, with a margin of {plan.margin_gib:.1f} GiB")
    elif proposals and proposals[0].plan.fits and not proposals[0].changes_training:
        show("\n".join(proposals[0].overrides))
        return True
    else:
        say(
            "nothing that was tried makes it fit with the same training: more ranks, a larger card "
            f"or shorter rollouts would{_lora_text(proposals)}"
        )
    return plan.fits


def _lora_text(proposals: Sequence[Suggestion]) -> str:
    """Returns the end of a sentence about a suggestion that fits because it trains only adapters;
    "" if there is none."""
    fitting = [item for item in proposals if item.plan.fits and item.changes_training]
    if not fitting:
        return ""
    return f"; so would {' '.join(fitting[0].overrides)}, which trains adapters alone"


def _decided_overrides(plan: Plan) -> list[str]:
    """Returns overrides that set the keys that can be auto to their values in the planned config.

    The keys are those of DECIDED_KEYS."""
    values = decided_values(plan.case.config)
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _text_lines(
    plan: Plan, proposals: Sequence[Suggestion], advised: Suggestion | None
) -> Iterator[str]:
    """Yields the lines of the printed plan. `proposals` are suggestions with which a plan that does
    not fit might fit; `advised` is one with a larger KV cache."""
    case, card, cache = plan.case, plan.case.card, plan.kv_cache
    verdict = "fits" if plan.fits else "does not fit"
    yield (
        f"{case.config.model.path} ({case.model.num_parameters / 1e9:.2f} B parameters) on "
        f"{case.num_ranks} x {card.name} ({card.gib:g} GiB each): {verdict}"
    )
    yield (
        f"margin {plan.margin_gib:.1f} GiB, least in phase {plan.tightest}; "
        "a prediction: nothing of it has been compared with a real GPU"
    )
    yield f"with {', '.join(_decided_overrides(plan))}".replace('"', "")
    yield ""
    yield f"{'phase':12} {'peak':>7} {'free':>7}  GiB of one rank, of the peak"
    for phase, usage in plan.phases.items():
        peak, free = plan.peak_gib(phase), plan.margin_of(phase)
        row = f"{phase:12} {peak:7.2f} {free:7.2f}  {_join_usage(usage)}"
        # Lines after the first stay in the column of the last cell.
        yield from textwrap.wrap(
            row, 100, subsequent_indent=" " * 30, break_long_words=False, break_on_hyphens=False
        )
    yield ""
    yield (
        "estimates: CUDA context, NCCL, CUDA graphs and workspaces, engine's activations, "
        f"engine's sampler tables, layer in load, fragmentation ({FRAGMENTATION:.0%} of a phase's "
        "own tensors); counted: the rest"
    )
    yield f"host memory of a rank, GiB: {_join_usage(plan.host) or 'nothing'}"
    yield (
        f"KV cache of an engine: {cache.tokens:,} tokens ({max(0, cache.num_bytes) / GIB:.2f} "
        f"GiB) of {cache.needed_tokens:,} for its {cache.sequences} sequences of a step at "
        f"full length; {cache.num_running} of them of full length run at one time, others wait"
    )
    if advised is not None:
        yield (
            f"memory is free in rollout: {advised.overrides[0]} would run "
            f"{advised.plan.kv_cache.num_running} of them at one time, not {cache.num_running}"
        )
    # Without room for one sequence the time of a rollout cannot be estimated.
    if cache.full_length:
        seconds = ", ".join(f"{phase} {s:.1f}" for phase, s in plan.time.items())
        yield (
            "step, s, every completion at full length (a model: shares of the card's ceilings): "
            f"{plan.step_s:.1f}: {seconds}; rewards, evaluation and checkpoints not counted"
        )
    else:
        yield "no time of a step: the KV cache holds no sequence of full length"
    if plan.fits:
        return
    yield ""
    has_fitting = any(suggestion.plan.fits for suggestion in proposals)
    yield "what would make it fit, the cheapest first:" if has_fitting else "nothing tried fits:"
    for suggestion in proposals:
        outcome = suggestion.plan
        line = f"  {' '.join(suggestion.overrides)}  margin {outcome.margin_gib:.1f} GiB"
        if outcome.kv_cache.full_length:
            line += f", step {outcome.step_s:.1f} s"
        if suggestion.changes_training:
            line += "; changes the training: adapters alone"
        yield line


def _as_json(
    plan: Plan, proposals: Sequence[Suggestion], advised: Suggestion | None
) -> dict[str, Any]:
    """Returns the plan as the JSON object of --json.

    `proposals` are suggestions with which a plan that does not fit might fit; `advised` is one with
    a larger KV cache, or None."""
    cache = plan.kv_cache
    return {
        "fits": plan.fits,
        "cannot_fit": plan.cannot_fit,  # even without the estimated bytes
        "decided": decided_values(plan.case.config),
        "margin_gib": plan.margin_gib,
        "tightest_phase": plan.tightest,
        "is_prediction": True,  # no plan has been compared with a GPU
        "gpu": asdict(plan.case.card),
        "num_ranks": plan.case.num_ranks,
        "num_parameters": plan.case.model.num_parameters,
        "phases": {
            phase: {
                "peak_gib": plan.peak_gib(phase),
                "free_gib": plan.margin_of(phase),
                "live_gib": _gib_by_name(usage),
            }
            for phase, usage in plan.phases.items()
        },
        "host_gib": _gib_by_name(plan.host),
        "kv_cache": {
            "gib": max(0, cache.num_bytes) / GIB,
            "tokens": cache.tokens,
            "needed_tokens": cache.needed_tokens,
            "full_length_at_once": cache.full_length,
            "sequences": cache.sequences,
        },
        "step_s": plan.step_s,
        "step_s_by_phase": plan.time,
        "suggestions": [_suggestion_json(suggestion) for suggestion in proposals],
        "larger_cache": None if advised is None else _suggestion_json(advised),
    }


def _suggestion_json(suggestion: Suggestion) -> dict[str, Any]:
    """Returns a suggestion as a JSON object of --json: its overrides, and the plan with them."""
    plan = suggestion.plan
    return {
        "overrides": list(suggestion.overrides),
        "fits": plan.fits,
        "margin_gib": plan.margin_gib,
        "step_s": plan.step_s,
        "full_length_at_once": plan.kv_cache.full_length,
        "changes_training": suggestion.changes_training,
    }


def _gib_by_name(usage: Mapping[str, int]) -> dict[str, float]:
    """Returns the GiB for each purpose of a usage, the largest first, without those of 0 bytes."""
    return {
        name: size / GIB
        for name, size in sorted(usage.items(), key=lambda item: -item[1])
        if size > 0
    }


def _join_usage(usage: Mapping[str, int]) -> str:
    """Returns a usage as text: each purpose with its GiB, the largest first."""
    return ", ".join(f"{name} {gib:.2f}" for name, gib in _gib_by_name(usage).items())


def _engine_sizes(
    config: Config, model: Mapping[str, Any], args: argparse.Namespace
) -> Sequence[int]:
    """Returns the numbers of ranks that an engine may have, in ascending order.

    If tensor_parallel_size is auto, they are 1 and those of 2, 4, 8 that suit the ranks and the
    model. `model` is the contents of config.json."""
    if config.rollout.tensor_parallel_size != "auto":
        return (config.rollout.engine_ranks,)
    # A size that the checks refuse is left out.
    sizes = [1]
    for size in (2, 4, 8):
        candidate = decided(config, {ENGINE_RANKS_KEY: size})
        with suppress(ConfigError):
            check_world_size(candidate, args.ranks, args.ranks_per_node or RANKS_PER_NODE)
            check_model_sizes(candidate, model)
            sizes.append(size)
    return sizes


def _check_config(config: Config, args: argparse.Namespace) -> Path:
    """Checks the config and returns the model's folder.

    Raises ConfigError if the config cannot run on this number of ranks, or the model cannot be
    trained.
    """
    check_world_size(config, args.ranks, args.ranks_per_node)
    path = config.model.path
    folder = folder_with_config(path, "model.path")
    with errors_about("model.path"):
        model = read_model_config(folder)
    refuse_by_config(model, path)
    check_model_sizes(config, text_config(model))
    return folder


def _parser() -> OverridesParser:
    """Returns the parser of the command line."""
    parser = OverridesParser(
        allow_abbrev=False,
        prog="python -m grpo_spmd.plan",
        description="Predict a rank's memory by phase, whether a config fits a GPU, and the time "
        "of a step. Needs no GPU, and of the model only config.json. Exit code 1: it does not fit.",
    )
    add = parser.add_argument
    gpu_help = "by name (H100-80GB), or by figures: 80GiB,989TFLOPS,3350GB/s"
    node_help = "ranks of a node, on which an engine stays; default: 8"
    suggest_help = "print only overrides that make it fit, one a line; none if it does"
    add("--config", required=True, help="a YAML file; configs/ has examples")
    add("--gpu", required=True, metavar="CARD", help=gpu_help)
    add("--ranks", type=int, required=True, metavar="N", help="of the whole run")
    add("--ranks-per-node", type=int, metavar="N", help=node_help)
    add("--json", type=Path, metavar="FILE", help="write the plan there as JSON")
    add("--suggest", action="store_true", help=suggest_help)
    return parser


if __name__ == "__main__":
    main()
