"""`grpo_spmd.run` trains from Python: in a script or a notebook, and as often as wanted.

The process belongs to the caller: signal handlers, environment variables and logging are restored
when a run ends, and a failure is raised as an exception (distributed/embedded_run.py). Importing
this module does not import torch.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_spmd.checkpoint.run_dir import let_go
from grpo_spmd.checks.inputs import check_inputs
from grpo_spmd.checks.trials import try_and_tell
from grpo_spmd.config.describe import flat
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import build_config, read_tree, trains_on_cpu
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.embedded_run import embedded_run
from grpo_spmd.observe.followers import finish_all
from grpo_spmd.rewards.named import function_name, function_spec, pack_functions, registered
from grpo_spmd.train import prepare_torch

RewardFunction = Callable[..., Any]
Entry = RewardFunction | tuple[RewardFunction, float] | Mapping[str, Any]


@dataclass(frozen=True)
class RunResult:
    """The result of a run that has ended."""

    run_dir: Path
    # Finished steps, including the steps of earlier starts of the run.
    num_steps: int
    # The run was stopped early by Ctrl-C, a signal or the end of its time. Everything is saved.
    is_preempted: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one dict each. Every access reads the file again."""
        with (self.run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def run(
    config: str | os.PathLike[str] | Mapping[str, Any],
    rewards: Sequence[Entry] | None = None,
    **overrides: Any,
) -> RunResult:
    """Trains, and returns when the run has ended. Call it in the main thread.

    Training runs in this process, as a single rank. In a script that torchrun has started, each
    process is a rank, and all of them must call `run` with the same arguments.

    `config` is a YAML file, or a mapping with the same content; keys may be dotted
    ("optimizer.lr"). `overrides` replace values of the config: optimizer={"lr": 1e-6}, or
    **{"optimizer.lr": 1e-6}. `rewards` replace the config's rewards. An entry is a function
    fn(prompts, completions, completion_ids, **columns), a pair (function, weight), or a mapping as
    in YAML, whose "function" may be a function too. Rewards are computed in separate processes,
    with the usual time limits. data.train and the sets of data.eval may be lists of rows or
    Datasets; they are written to temporary files, which are deleted when the run has ended.

    After one Ctrl-C the run saves and returns; a second one raises KeyboardInterrupt. Raises
    ConfigError if the config or the data cannot be used, and RuntimeError with the run's report for
    any other failure.
    """
    if isinstance(config, Mapping):
        tree = _merged({}, config)
    elif isinstance(config, str | os.PathLike):
        tree = read_tree(Path(config))[0]
    else:
        kind = type(config).__name__
        raise ConfigError(f"config must be the path of a YAML file or a mapping; got {kind}")
    tree = _merged(tree, overrides)
    functions: dict[str, RewardFunction] = {}
    if rewards is not None:
        tree["rewards"] = rewards
    entries = tree.get("rewards")
    if isinstance(entries, list | tuple):
        tree["rewards"] = [
            _reward_entry(entry, index, functions) for index, entry in enumerate(entries)
        ]
    elif rewards is not None:
        kind = type(rewards).__name__
        raise ConfigError(f"rewards must be a list, as in rewards=[fn]; got {kind}")
    for name, value in flat({**tree, "rewards": None, "data": None}).items():
        if callable(value):
            raise ConfigError(
                f"{name} is a Python object; give what a config file can hold: for a model its "
                'folder or hub id, for a class or function "file.py:name"'
            )
    with tempfile.TemporaryDirectory(prefix="grpo_spmd_data_") as folder, registered(functions):
        data = tree.get("data") or {}
        for name in {"train", "eval"} & {*data}:
            data[name] = _source(data[name], Path(folder, f"{name}.jsonl"))
        return _train(build_config(tree, on_cpu=trains_on_cpu()))


def _train(config: Config) -> RunResult:
    """Checks the config and the data, trains, and returns the result."""
    inputs = check_inputs(config, num_ranks=int(os.environ.get("WORLD_SIZE", "1")))
    # Functions that cannot be sent to workers are refused now, not after the engine has started.
    pack_functions(config.rewards)
    try_and_tell(config, inputs, inputs.notes.append)
    run_dir = Path(config.run_dir)
    try:
        # Everything from here on must leave the caller's process as it was.
        with embedded_run(_release):
            prepare_torch()
            from grpo_spmd.loop import train

            train(config, inputs)
    finally:
        let_go(run_dir)
    # The marker is written only after every rank has saved.
    marker = run_dir / "preempted.json"
    is_preempted = marker.is_file()
    num_steps = config.training.num_steps
    if is_preempted:
        num_steps = int(json.loads(marker.read_text("utf-8"))["step"])
    return RunResult(run_dir, num_steps, is_preempted)


def _release() -> None:
    """Ends the trackers, the engine and the process group that a failed run has left behind."""
    import torch.distributed as dist

    from grpo_spmd.engine.start import end_engines

    finish_all()
    end_engines()
    if dist.is_initialized():
        dist.destroy_process_group()


def _merged(old: Any, new: Any) -> Any:
    """Returns `old` updated by `new`, as a config's sections are overridden.

    Mappings are merged key by key, other values are replaced. Dotted keys become sections. Both
    arguments may belong to the caller, and are not changed.
    """
    # An empty mapping leaves a section as it is. Where there is no section, it is the value {}.
    if not isinstance(new, Mapping) or not (new or isinstance(old, Mapping)):
        return _plain(new)
    tree = dict(old) if isinstance(old, Mapping) else {}
    for key, value in new.items():
        # "optimizer.lr": 1 is the same as optimizer: {lr: 1}.
        name, dot, subkey = str(key).partition(".")
        tree[name] = _merged(tree.get(name), {subkey: value} if dot else value)
    return tree


def _plain(value: Any) -> Any:
    """Returns a copy of `value` as a YAML file would give it: paths as text, tuples as lists.

    Values that no YAML file can hold, such as functions, stay as they are.
    """
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def _source(rows: Any, file: Path) -> Any:
    """Returns a data source in the form that a YAML file has it: a path, or paths by name.

    Rows (a list or a Dataset) are written to `file`, a JSONL file, and its path is returned. A text
    (a path or a data set of the hub) is returned as it is. A mapping of named sets is converted set
    by set, to files beside `file`.
    """
    if rows is None or isinstance(rows, str):
        return rows
    if isinstance(rows, Mapping):
        return {
            name: _source(rows[name], file.with_name(f"{i}.jsonl")) for i, name in enumerate(rows)
        }
    try:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    except TypeError as error:
        raise ConfigError(
            f"data: {error}; give a list or Dataset of rows that JSON can hold, or a file"
        ) from None
    return str(file)


def _reward_entry(entry: Any, index: int, functions: dict[str, RewardFunction]) -> Any:
    """Returns an entry of `rewards` in the form that a YAML file has it, a mapping.

    A Python function in it is replaced by a text, its spec, and is added to `functions` under that
    spec. `index` is the entry's place in the list.
    """
    if isinstance(entry, list | tuple) and len(entry) == 2 and callable(entry[0]):
        entry = {"function": entry[0], "weight": entry[1]}
    elif callable(entry):
        entry = {"function": entry}
    elif not isinstance(entry, Mapping):
        rule = "must be a function, a pair (function, weight), or an entry as in YAML"
        raise ConfigError(f"rewards.{index} {rule}; got {entry!r:.80}")
    function = entry.get("function")
    if not callable(function):
        return dict(entry)
    if isinstance(function, type):
        rule = "is a class; give an object of it"
        raise ConfigError(f"rewards.{index}: {function.__name__} {rule}")
    spec = function_spec(function)
    # Two functions of the same name have the same spec, for example two lambdas.
    if spec in functions:
        spec = f"{spec}#{index}"
    functions[spec] = function
    return {"name": function_name(function) or f"reward_{index}", **entry, "function": spec}
