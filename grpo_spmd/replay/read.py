"""What a run left behind of a step, read and checked. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.data.rows import read_rows
from grpo_spmd.rewards.protocol import load_rewards

_FIELDS = {
    "rollout_id": int | None, "row": int, "position": int, "sample": int, "prompt": str | list, "completion": str,
    "reward": float | int | None, "rewards": dict, "statuses": dict, "advantage": float | int | None, "finish_reason": str,
    "prompt_ids": list, "completion_ids": list, "rollout_logprobs": list,
}  # fmt: skip


@dataclass(frozen=True)
class RecordedStep:
    """What a run left behind of one step, under the config that it is to be replayed with."""

    run_dir: Path
    step: int
    config: Config
    rollouts: list[list[dict[str, Any]]]  # lines of the dump, group by group, in the order of the prompt stream
    metrics: dict[str, float | None]  # none where the run ended within the step
    columns: list[dict[str, Any]] | None  # of each group's data row; None: the data is gone
    all_columns: set[str]
    notes: list[str]


@dataclass(frozen=True)
class Rollout:
    """One rollout, as recorded and as replayed."""

    recorded: dict[str, Any]
    reward: float | None
    rewards: dict[str, float | None]
    statuses: dict[str, str]
    advantage: float | None  # None: in no group that is trained on
    counts: bool
    logprobs: list[float] | None  # of the policy, where it was there

    @property
    def name(self) -> str:
        return f"{self.recorded['position']}/{self.recorded['sample']}"

    @property
    def engine_logprobs(self) -> list[float]:
        return [math.nan if x is None else x for x in self.recorded["rollout_logprobs"]]


@dataclass(frozen=True)
class Replay:
    """What came of it."""

    notes: list[str]
    metrics: dict[str, tuple[float | None, float | None]]  # recorded, replayed
    rollouts: list[Rollout] = field(default_factory=list)


def read_step(run_dir: Path, step: int, overrides: Sequence[str] = ()) -> RecordedStep:
    """Read and check what the run left behind. Imports no torch.

    Raises:
        ConfigError: one line that says what is not there, or which line of the dump is broken.
    """
    if not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"RUN_DIR: {run_dir} holds no config.yaml, so it is no run folder")
    config = load_config(run_dir / "config.yaml", overrides)
    notes = [f"override: {override}" for override in overrides]
    notes += [
        f"{key} is redacted in config.yaml; give it as an override, if a reward needs it" for key in _redacted(config)
    ]
    # Of the run that trained on several ranks and a GPU; none of it changes what is computed.
    model = dataclasses.replace(config.model, num_replicas=1, offload=False, compile=False, attention="auto")
    config = dataclasses.replace(
        config, model=model, rollout=dataclasses.replace(config.rollout, tensor_parallel_size=1)
    )
    if model.dtype == "bfloat16":
        notes.append(
            "the run computed in bfloat16, whose rounding is another on another machine: a few percent in loss and "
            "gradient mean nothing"
        )
    rollouts = _read_dump(run_dir / "rollouts" / f"step_{step:06d}.jsonl", config)
    metrics = _read_metrics(run_dir / "metrics.jsonl", step)
    if not metrics:
        notes.append(
            f"metrics.jsonl has no line of step {step}: the run ended within it, and only the rollouts can be compared"
        )
    load_rewards(config.rewards)  # refuses here what the pool would refuse with a traceback
    columns: list[dict[str, Any]] | None = None
    all_columns: set[str] = set()
    try:
        columns, all_columns = _columns_of(rollouts, config)
    except ConfigError as error:
        notes.append(f"rewards are those that the run recorded, since the data set cannot be had as it was: {error}")
    return RecordedStep(run_dir, step, config, rollouts, metrics, columns, all_columns, notes)


def _redacted(config: Config) -> list[str]:
    free_form = {f"rewards.{index}.args": reward.args for index, reward in enumerate(config.rewards)}
    free_form["rollout.engine"] = config.rollout.engine
    return [
        f"{where}.{name}"
        for where, values in free_form.items()
        for name, value in values.items()
        if value == "<redacted>"
    ]


def _read_dump(path: Path, config: Config) -> list[list[dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        there = (
            ", ".join(str(int(p.stem.removeprefix("step_"))) for p in sorted(path.parent.glob("step_*.jsonl")))
            or "none"
        )
        raise ConfigError(
            f"--step: cannot read {path}: {error.strerror}; there are dumps of the steps {there} "
            "(logging.rollouts_every_steps)"
        ) from None
    groups: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(lines, start=1):
        record = _read_line(line, f"{path}:{number}")
        groups.setdefault(record["position"], []).append(record)
    for position, group in groups.items():
        if [record["sample"] for record in group] != list(range(config.rollout.group_size)):
            raise ConfigError(
                f"{path}: the group at position {position} has the samples {[r['sample'] for r in group]}, and should "
                "have 0 to "
                f"{config.rollout.group_size - 1} (rollout.group_size={config.rollout.group_size})"
            )
    if not groups:
        raise ConfigError(f"{path}: no rollouts")
    return [groups[position] for position in sorted(groups)]


def _read_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {type(record).__name__}")
    for name, kind in _FIELDS.items():
        if name not in record or not isinstance(record[name], kind):
            raise ConfigError(
                f"{where}: {name} is {'missing' if name not in record else f'{record[name]!r:.80}'}; this is no "
                "rollout dump"
            )
    if len(record["completion_ids"]) != len(record["rollout_logprobs"]):
        raise ConfigError(
            f"{where}: {len(record['completion_ids'])} completion_ids, but {len(record['rollout_logprobs'])} "
            "rollout_logprobs"
        )
    return record


def _read_metrics(path: Path, step: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill has cut short
                metrics = json.loads(line)
                # not the evaluation that follows the last step
                if metrics["step"] == step and "loss/policy" in metrics:
                    found = metrics
    return found


def _columns_of(rollouts: Sequence[Sequence[dict[str, Any]]], config: Config) -> tuple[list[dict[str, Any]], set[str]]:
    """The columns of each group's data row, and all that a reward of the run was given."""
    rows = read_rows(config.data)
    columns = []
    for group in rollouts:
        number = group[0]["row"]
        if number >= len(rows):
            raise ConfigError(f"data.train: {config.data.train} has {len(rows)} rows, and the dump names row {number}")
        if json.loads(json.dumps(rows[number].prompt)) != group[0]["prompt"]:
            raise ConfigError(
                f"data.train: the prompt at {rows[number].where} is no longer the one that the run sampled from"
            )
        columns.append(rows[number].columns)
    known = {name for row in rows for name in row.columns}
    for name in config.data.eval_sets if config.eval.every_steps else ():
        with suppress(ConfigError):  # its columns are None in training rows, and few rewards look
            known |= {column for row in read_rows(config.data, name) for column in row.columns}
    return columns, known
