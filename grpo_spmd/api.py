"""grpo_spmd.run: a run from Python, in a script or a notebook, several times in one process.

The process is its owner's: a run that ends leaves it as it was, and a failure is an exception (guest.py). Imports no
torch at its top."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config.errors import ConfigError

if TYPE_CHECKING:
    from grpo_spmd.config.schema import Config

RewardFunction = Callable[..., Any]
Entry = RewardFunction | tuple[RewardFunction, float] | Mapping[str, Any]


@dataclass(frozen=True)
class RunResult:
    """What a run has come to."""

    run_dir: Path
    num_steps: int
    """Steps that are done, those of earlier starts too."""
    is_preempted: bool
    """Stopped on the way, by Ctrl-C, a signal or the end of its time, with everything saved."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, read anew each time."""
        with (self.run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def run(
    config: str | os.PathLike[str] | Mapping[str, Any],
    rewards: Sequence[Entry] | None = None,
    **overrides: Any,
) -> RunResult:
    """Train, and return when the run has ended. One process, unless torchrun has started this one: then each rank calls
    it alike. From the main thread.

    `config`: a YAML file, or the same as a mapping; keys may be dotted ("optimizer.lr"). `overrides` are merged over it
    in the same way: optimizer={"lr": 1e-6}, or **{"optimizer.lr": 1e-6}. `rewards`, in place of those of the config:
    functions fn(prompts, completions, completion_ids, **columns), pairs (function, weight), or entries as in YAML,
    whose "function" may be one too. They are scored in processes of their own, under the same deadlines as ever.

    Ctrl-C, once: the run saves, and returns; twice: KeyboardInterrupt. Raises ConfigError for what cannot be used, and
    RuntimeError, with the run's report, for anything else.
    """
    from grpo_spmd.config.load import build_config, trains_on_cpu
    from grpo_spmd.rewards.named import given

    tree = _tree_of(config)
    _merge(tree, overrides, "")
    functions: dict[str, RewardFunction] = {}
    if rewards is not None:
        tree["rewards"] = rewards
    if isinstance(tree.get("rewards"), list | tuple):
        tree["rewards"] = [
            _reward_of(entry, index, functions) for index, entry in enumerate(tree["rewards"])
        ]
    elif rewards is not None:
        raise ConfigError(
            f"rewards must be a list, as in rewards=[fn]; got {type(rewards).__name__}"
        )
    with given(functions):
        return _train(build_config(tree, on_cpu=trains_on_cpu()))


def _train(config: Config) -> RunResult:
    from grpo_spmd.checkpoint.run_dir import let_go
    from grpo_spmd.checks.inputs import check_inputs
    from grpo_spmd.distributed.embedded_run import embedded_run
    from grpo_spmd.rewards.named import packed
    from grpo_spmd.train import prepare_torch

    inputs = check_inputs(config, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    if (
        functions := packed(config.rewards)
    ) is not None:  # refused now, and not when the engine has started
        os.close(functions)
    run_dir = Path(config.run_dir)
    try:
        with embedded_run(_release):
            prepare_torch()
            from grpo_spmd.loop import train

            train(config, inputs)
    finally:
        let_go(run_dir)
    marker = run_dir / "preempted.json"
    is_preempted = marker.is_file()
    num_steps = (
        json.loads(marker.read_text("utf-8"))["step"] if is_preempted else config.training.num_steps
    )
    return RunResult(run_dir, int(num_steps), is_preempted)


def _release() -> None:
    """End what a failed run has left of its engine, its process group and whoever followed its metrics."""
    import torch.distributed as dist

    from grpo_spmd.engine.failures import end_engines
    from grpo_spmd.observe.followers import finish_all

    finish_all()
    end_engines()
    if dist.is_initialized():
        dist.destroy_process_group()


def _tree_of(config: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    from grpo_spmd.config.load import read_tree

    if isinstance(config, Mapping):
        tree: dict[str, Any] = {}
        _merge(tree, config, "")
        return tree
    if not isinstance(config, str | os.PathLike):
        raise ConfigError(
            f"config must be the path of a YAML file or a mapping; got {type(config).__name__}"
        )
    return read_tree(Path(config))[0]


def _merge(tree: dict[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Put `values` into `tree`: mappings into mappings, key by key; anything else in the place of what was there."""
    for name, value in values.items():
        full = f"{where}{name}"
        if not isinstance(name, str):
            raise ConfigError(f"{full}: a key must be text")
        first, dot, rest = name.partition(".")
        if dot:
            value = {rest: value}
        before = tree.get(first)
        if isinstance(value, Mapping) and (value or isinstance(before, dict)):
            tree[first] = dict(before) if isinstance(before, dict) else {}
            _merge(tree[first], value, f"{where}{first}.")
        else:
            tree[first] = _plain(value)


def _plain(value: Any) -> Any:
    """As YAML would have it; functions stay."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _reward_of(entry: Any, index: int, functions: dict[str, RewardFunction]) -> Any:
    """An entry of `rewards` as YAML has it; a function goes into `functions`, by what stands for it there."""
    from grpo_spmd.rewards.named import name_of, spec_of

    if isinstance(entry, list | tuple) and len(entry) == 2 and callable(entry[0]):
        entry = {"function": entry[0], "weight": entry[1]}
    elif callable(entry):
        entry = {"function": entry}
    elif not isinstance(entry, Mapping):
        rule = "must be a function, a pair (function, weight), or an entry as in YAML"
        raise ConfigError(f"rewards.{index} {rule}; got {entry!r:.80}")
    made = dict(entry)
    if callable(function := made.get("function")):
        if isinstance(function, type):
            raise ConfigError(
                f"rewards.{index}: {function.__name__} is a class; give an object of it"
            )
        spec = spec_of(function)
        spec = f"{spec}#{index}" if spec in functions else spec
        functions[spec] = function
        made = {"name": name_of(function) or f"reward_{index}", **made, "function": spec}
    return made
