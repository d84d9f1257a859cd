"""Run reward -> advantage -> loss of a dumped step again, on the CPU, in one process, without vLLM: to look into yesterday's spike.

    python -m grpo_spmd.replay RUN_DIR --step N [--checkpoint FOLDER] [section.key=value ...]

It is the trainer's own code over the rollouts that the run dumped, so that breakpoint() works in a reward (which is called in the reward
pool, with its deadlines, as in training), in the advantages and in the loss. Overrides ask what another config would have made of the step.
Nothing is written into the run folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_spmd.config import Config, ConfigError, load_config, refuse
from grpo_spmd.data import read_rows
from grpo_spmd.data_types import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.manifest import CheckpointError, checkpoint_path, list_checkpoints, read_trainer, verify_checkpoint
from grpo_spmd.rewards import RewardError, load_rewards, weighted_sum
from grpo_spmd.rewards.pool import RewardPool

if TYPE_CHECKING:  # a wrong path or a broken line should not wait for torch
    from grpo_spmd.assemble import Decision, SampledStep
    from grpo_spmd.data_types import RolloutBatch
    from grpo_spmd.distributed import Session

_SAME = 1e-6  # differences up to this are rounding: float32, summed in another order
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
    notes += [f"{key} is redacted in config.yaml; give it as an override, if a reward needs it" for key in _redacted(config)]
    # Of the run that trained on several ranks and a GPU; none of it changes what is computed.
    model = dataclasses.replace(config.model, num_replicas=1, offload=False, compile=False, attention="auto")
    config = dataclasses.replace(config, model=model, rollout=dataclasses.replace(config.rollout, tensor_parallel_size=1))
    if model.dtype == "bfloat16":
        notes.append(
            "the run computed in bfloat16, whose rounding is another on another machine: a few percent in loss and gradient mean nothing"
        )
    rollouts = _read_dump(run_dir / "rollouts" / f"step_{step:06d}.jsonl", config)
    metrics = _read_metrics(run_dir / "metrics.jsonl", step)
    if not metrics:
        notes.append(f"metrics.jsonl has no line of step {step}: the run ended within it, and only the rollouts can be compared")
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
    return [f"{where}.{name}" for where, values in free_form.items() for name, value in values.items() if value == "<redacted>"]


def _read_dump(path: Path, config: Config) -> list[list[dict[str, Any]]]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        there = ", ".join(str(int(p.stem.removeprefix("step_"))) for p in sorted(path.parent.glob("step_*.jsonl"))) or "none"
        raise ConfigError(
            f"--step: cannot read {path}: {error.strerror}; there are dumps of the steps {there} (logging.rollouts_every_steps)"
        ) from None
    groups: dict[int, list[dict[str, Any]]] = {}
    for number, line in enumerate(lines, start=1):
        record = _read_line(line, f"{path}:{number}")
        groups.setdefault(record["position"], []).append(record)
    for position, group in groups.items():
        if [record["sample"] for record in group] != list(range(config.rollout.group_size)):
            raise ConfigError(
                f"{path}: the group at position {position} has the samples {[r['sample'] for r in group]}, and should have 0 to "
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
            raise ConfigError(f"{where}: {name} is {'missing' if name not in record else f'{record[name]!r:.80}'}; this is no rollout dump")
    if len(record["completion_ids"]) != len(record["rollout_logprobs"]):
        raise ConfigError(
            f"{where}: {len(record['completion_ids'])} completion_ids, but {len(record['rollout_logprobs'])} rollout_logprobs"
        )
    return record


def _read_metrics(path: Path, step: int) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    if path.is_file():
        for line in path.read_bytes().splitlines():
            with suppress(ValueError, KeyError, TypeError):  # a line that a kill has cut short
                metrics = json.loads(line)
                if metrics["step"] == step and "loss/policy" in metrics:  # not the evaluation that follows the last step
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
            raise ConfigError(f"data.train: the prompt at {rows[number].where} is no longer the one that the run sampled from")
        columns.append(rows[number].columns)
    known = {name for row in rows for name in row.columns}
    for name in config.data.eval_sets if config.eval.every_steps else ():
        with suppress(ConfigError):  # its columns are None in training rows, and few rewards look
            known |= {column for row in read_rows(config.data, name) for column in row.columns}
    return columns, known


class _RecordedTexts:
    """Stands for the tokenizer: the texts that the run scored."""

    def __init__(self, rollouts: Sequence[Sequence[dict[str, Any]]]) -> None:
        self._texts = {tuple(record["completion_ids"]): record["completion"] for group in rollouts for record in group}

    def batch_decode(self, token_ids: Sequence[Sequence[int]], skip_special_tokens: bool) -> list[str]:
        assert skip_special_tokens
        return [self._texts[tuple(ids)] for ids in token_ids]


def _groups(recorded: RecordedStep) -> list[RolloutGroup]:
    groups = []
    for slot, records in enumerate(recorded.rollouts):
        first = records[0]
        columns = recorded.columns[slot] if recorded.columns is not None else {}
        prompt = Prompt(first["position"], first["row"], first["prompt_ids"], first["prompt"], columns)
        completions = [
            Completion(r["completion_ids"], [math.nan if x is None else x for x in r["rollout_logprobs"]], r["finish_reason"])
            for r in records
        ]
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def _recorded_scores(groups: Sequence[RolloutGroup], recorded: RecordedStep) -> ScoredRollouts:
    """What the run scored, under the weights of the config."""
    weights = {reward.name: reward.weight for reward in load_rewards(recorded.config.rewards)}
    scored = ScoredRollouts()
    for record in (record for group in groups for record in recorded.rollouts[group.slot]):
        if weights.keys() != record["rewards"].keys():
            names = f"the run recorded {', '.join(record['rewards'])}, the config names {', '.join(weights)}"
            raise ConfigError(f"rewards: {names}; without the data set no other reward can be called: set data.train")
        unusable = {name for name, status in record["statuses"].items() if status not in ("ok", "not_applicable")}
        values = {name: math.nan if name in unusable else value for name, value in record["rewards"].items()}
        for name, value in values.items():
            scored.by_name.setdefault(name, []).append(value)
            scored.statuses.setdefault(name, []).append(record["statuses"][name])
        scored.rewards.append(weighted_sum([(weights[name], value) for name, value in values.items()]))
        scored.texts.append(record["completion"])
    return scored


def replay(recorded: RecordedStep, checkpoint: Path | None = None) -> Replay:
    """Score, decide and train once more; on the CPU, in a process group of one.

    Args:
        checkpoint: where the policy is taken from, instead of the checkpoint of this step.

    Raises:
        ConfigError, CheckpointError: what is missing or damaged, and what to do. RewardError: the user left the debugger.
    """
    with tempfile.NamedTemporaryFile(prefix="rewards_", suffix=".log", delete=False) as log:
        log_file = Path(log.name)
    config = recorded.config
    with RewardPool(config.rewards, config.reward_pool, log_file, columns=recorded.all_columns) as pool:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # from here on: a reward may have a model on the GPU, the replay has none
        from grpo_spmd.distributed import end_session, start_session

        session = start_session()
        try:
            found = _replay(recorded, checkpoint, pool, session)
        finally:
            end_session()
    if log_file.stat().st_size:
        found.notes.append(f"what the rewards printed is in {log_file}")
    else:
        log_file.unlink()
    return found


def _replay(recorded: RecordedStep, checkpoint: Path | None, pool: RewardPool, session: Session) -> Replay:
    from grpo_spmd.assemble import SampledStep, assemble_batch
    from grpo_spmd.distributed import Rank0Error

    config, notes = recorded.config, list(recorded.notes)
    sampled = SampledStep(config, session)
    waiting, texts = _groups(recorded), _RecordedTexts(recorded.rollouts)
    try:
        while sampled.num_missing and waiting:  # once, unless dynamic sampling refilled the step
            sampled.num_missing = min(sampled.num_missing, len(waiting))
            groups, waiting = waiting[: sampled.num_missing], waiting[sampled.num_missing :]
            rescored = pool.score(groups, texts) if recorded.columns is not None else _recorded_scores(groups, recorded)
            sampled.add(groups, rescored)
        if sampled.num_missing:
            notes.append(f"the step would now have drawn {sampled.num_missing} more prompts, of which there are no rollouts")
        if waiting:
            notes.append(f"{len(waiting)} groups of the dump are not needed now")
        batch, decided = assemble_batch(sampled, config, session)
    except Rank0Error as error:
        notes.append(f"the step is refused: {error}")
        return Replay(notes, {}, _rollouts(recorded, sampled, None, {}))
    of_update, logprobs, decided = _train(recorded, checkpoint, batch, decided, session, notes)
    replayed = {name: value for name, value in decided.metrics.items() if not name.startswith("batching/")} | of_update
    metrics = {name: (recorded.metrics.get(name), value) for name, value in replayed.items()} if recorded.metrics else {}
    return Replay(notes, metrics, _rollouts(recorded, sampled, decided, logprobs))


def _train(
    recorded: RecordedStep, checkpoint: Path | None, batch: RolloutBatch, decided: Decision, session: Session, notes: list[str]
) -> tuple[dict[str, float | None], dict[int, list[float]], Decision]:
    """The update with the policy of the step, or as much of it as can be had. Returns its metrics, the policy's logprobs, the decision."""
    import torch

    from grpo_spmd.assemble import penalise_rewards_by_kl
    from grpo_spmd.checkpoint import load_state
    from grpo_spmd.metrics import loss_metrics
    from grpo_spmd.policy import build_policy, build_reference
    from grpo_spmd.update import PolicyUpdater, attach_logprobs

    config = recorded.config
    source, has_policy = _policy_source(recorded, checkpoint, notes)
    if not has_policy:
        return {"loss/policy": _loss_on_engine_logprobs(batch, config)}, {}, decided
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        model = config.model
        if source is not None and not model.lora.rank:  # all of its weights: model.path need not be on this machine
            from grpo_spmd.export import export_checkpoint

            export_checkpoint(source, Path(folder, "model"), "float32")
            model = dataclasses.replace(model, path=str(Path(folder, "model")))
        policy = build_policy(model, config.rollout.temperature, session, seed=config.seed)
    reference = build_reference(config, session, policy)
    updater = PolicyUpdater(policy, config)
    if source is not None:
        load_state(policy, updater, source, read_trainer(source))
    attach_logprobs(policy, reference, batch, config)
    decided = penalise_rewards_by_kl(batch, decided, config)
    logprobs: dict[int, list[float]] = {}
    with torch.no_grad():
        for micro_batch in (m for mini_batch in batch.mini_batches for m in mini_batch):
            scores, _ = policy(micro_batch)
            for place, rollout_id in enumerate(micro_batch.rollout_ids):
                logprobs[rollout_id] = scores[micro_batch.sequence_index == place].tolist()
    return loss_metrics(updater.update(batch), config.loss), logprobs, decided


def _policy_source(recorded: RecordedStep, checkpoint: Path | None, notes: list[str]) -> tuple[Path | None, bool]:
    """The checkpoint that holds the policy, None for the model that the run started from, and whether either can be had."""
    step, model_path = recorded.step, Path(recorded.config.model.path)
    own = checkpoint_path(recorded.run_dir, step)
    source = checkpoint or (own if own.is_dir() else None)
    # A hub id is organisation/name; any other path without a folder is that of another machine.
    has_model = model_path.is_dir() or (not model_path.is_absolute() and len(model_path.parts) == 2 and not model_path.parent.exists())
    needs_model = bool(recorded.config.loss.kl_coef) or recorded.config.model.lora.rank > 0
    if source is not None:
        verify_checkpoint(source)
        if needs_model and not has_model:
            raise ConfigError(f"model.path: there is no folder {model_path}, and the reference or the adapters need it; set model.path")
        if (holds := (source / "model" / "adapter_config.json").is_file()) != (recorded.config.model.lora.rank > 0):
            what = "adapters" if holds else "a whole model"
            raise ConfigError(f"model.lora.rank: {recorded.config.model.lora.rank} does not go with {source}, which holds {what}")
        saved = int(read_trainer(source)["step"])
        notes.append(f"policy: {source}, after {saved} finished steps")
        if saved != step:
            notes.append(f"that is not the policy that sampled step {step}: loss, entropy, gradient and mismatch differ for that alone")
        return source, True
    if step == 0 and has_model:
        notes.append(f"policy: {model_path}, with which the run started")
        return None, True
    there = ", ".join(path.name for path in list_checkpoints(recorded.run_dir)) or "none"
    why = f"there is no folder {model_path} (model.path)" if step == 0 else f"no {own} (there are: {there}; --checkpoint takes another)"
    notes.append(
        f"policy: {why}, so the engine's recorded logprobs stand in for the policy's: every ratio is 1, and there is no entropy, KL, "
        "gradient or mismatch"
    )
    return None, False


def _loss_on_engine_logprobs(batch: RolloutBatch, config: Config) -> float | None:
    """The policy's loss where the policy's logprobs are taken to be the engine's."""
    import torch
    from torch import Tensor, nn

    from grpo_spmd.data_types import MicroBatch
    from grpo_spmd.policy import Policy
    from grpo_spmd.update import PolicyUpdater

    class EngineAsPolicy(Policy):
        def __init__(self) -> None:
            nn.Module.__init__(self)  # without a model
            self.nothing = nn.Parameter(torch.zeros(1))  # a backward pass needs something to end at

        def forward(self, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
            return micro_batch.rollout_logprobs + self.nothing, torch.zeros_like(micro_batch.rollout_logprobs)

    updater = PolicyUpdater(EngineAsPolicy(), config)
    total, updates = 0.0, 0
    for mini_batch, tokens, sequences in zip(batch.mini_batches, batch.num_loss_tokens, batch.num_loss_sequences, strict=True):
        updates += tokens > 0
        total += sum(float(updater.backward(micro_batch, tokens, sequences, True)[0]["policy"]) for micro_batch in mini_batch)
    return total / updates if updates else None


def _rollouts(recorded: RecordedStep, sampled: SampledStep, decided: Decision | None, logprobs: dict[int, list[float]]) -> list[Rollout]:
    slots = {position: slot for slot, position in enumerate(decided.positions if decided else [])}
    size, scored = recorded.config.rollout.group_size, sampled.scored
    found = []
    for number, reward in enumerate(scored.rewards):
        group, sample = sampled.groups[number // size], number % size
        own = slots.get(group.prompt.position)
        rollout_id = None if own is None else own * size + sample
        found.append(
            Rollout(
                recorded.rollouts[group.slot][sample],
                reward,
                scored.finite_by_name(number),
                {name: statuses[number] for name, statuses in scored.statuses.items()},
                None if decided is None or rollout_id is None else decided.advantages[rollout_id],
                decided is not None and rollout_id is not None and decided.counts[rollout_id],
                None if rollout_id is None else logprobs.get(rollout_id),
            )
        )
    return found


def report(recorded: RecordedStep, found: Replay, top: int) -> list[str]:
    """The replay as text: notes, the metrics side by side, the rollouts that differ most, and those that look suspicious."""
    rollouts = found.rollouts
    lines = [f"step {recorded.step} of {recorded.run_dir}: {len(rollouts)} rollouts in groups of {recorded.config.rollout.group_size}"]
    lines += [f"  {note}" for note in found.notes]
    if found.metrics:
        lines += ["", f"{'':34}{'recorded':>14}{'replayed':>14}{'difference':>14}"]
        shown = [(name, a, b) for name, (a, b) in sorted(found.metrics.items()) if a or b]  # most shares of errors and the like are 0
        lines += [f"{name:34}{_number(a):>14}{_number(b):>14}{_difference(a, b):>14}" for name, a, b in shown]
    lines += ["", *_differences(rollouts, top)]
    weights = [(abs(r.advantage or 0.0) * len(r.engine_logprobs) if r.counts else 0.0, r) for r in rollouts]
    lines += _listed("most weight in the loss, |advantage| x tokens", weights, top)
    finite = [r for r in rollouts if _is_finite(r)]
    whose = "policy" if any(r.logprobs is not None for r in rollouts) else "engine"
    lowest = [(-min(r.logprobs or r.engine_logprobs, default=0.0), r) for r in finite]
    lines += _listed(f"least likely token, -logprob of the {whose}", lowest, top)
    far = [(max(abs(a - b) for a, b in zip(r.logprobs, r.engine_logprobs, strict=True)), r) for r in finite if r.logprobs]
    lines += _listed("furthest from the engine, largest |policy - engine| of a token", far, top)
    broken = [(1.0, r) for r in rollouts if not _is_finite(r)]
    return lines + _listed(f"{len(broken)} rollouts with a logprob that is not finite", broken, top)


def _differences(rollouts: Sequence[Rollout], top: int) -> list[str]:
    lines, changed = [], []
    counts = {"reward": 0, "statuses": 0, "advantage": 0}
    names = dict.fromkeys(name for r in rollouts for name in (*r.recorded["rewards"], *r.rewards))
    counts |= {f"reward {name}": 0 for name in names if len(names) > 1}
    for rollout in rollouts:
        was = rollout.recorded
        moved = [f"reward {_number(was['reward'])} -> {_number(rollout.reward)}"] if _differ(was["reward"], rollout.reward) else []
        counts["reward"] += bool(moved)
        for name in names:
            before, after = was["rewards"].get(name), rollout.rewards.get(name)
            if len(names) > 1 and _differ(before, after):
                counts[f"reward {name}"] += 1
                moved.append(f"{name} {_number(before)} -> {_number(after)}")
            if was["statuses"].get(name) != rollout.statuses.get(name):
                counts["statuses"] += 1
                moved.append(f"{name} {was['statuses'].get(name, '-')} -> {rollout.statuses.get(name, '-')}")
        if _differ(was["advantage"], rollout.advantage):
            counts["advantage"] += 1
            moved.append(f"advantage {_number(was['advantage'])} -> {_number(rollout.advantage)}")
        if moved:
            change = abs((was["advantage"] or 0.0) - (rollout.advantage or 0.0)), abs((was["reward"] or 0.0) - (rollout.reward or 0.0))
            changed.append((change, f"  {rollout.name:>9}  {'; '.join(moved)}  {_short(was['completion'])}"))
    lines.append(f"of {len(rollouts)} rollouts differ: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    if changed:
        lines.append("largest differences (position/sample):")
        lines += [text for _, text in sorted(changed, key=lambda pair: pair[0], reverse=True)[:top]]
    return lines


def _listed(title: str, scored: Sequence[tuple[float, Rollout]], top: int) -> list[str]:
    shown = sorted((pair for pair in scored if pair[0] > 0), key=lambda pair: pair[0], reverse=True)[:top]
    return ["", f"{title}:"] * bool(shown) + [
        f"  {r.name:>9} {_number(value):>10}  reward {_number(r.reward)}  advantage {_number(r.advantage)}  "
        f"{len(r.engine_logprobs)} tokens  {r.recorded['finish_reason']}  {_short(r.recorded['completion'])}"
        for value, r in shown
    ]


def _is_finite(rollout: Rollout) -> bool:
    return all(map(math.isfinite, (*rollout.engine_logprobs, *(rollout.logprobs or ()))))


def _differ(a: float | None, b: float | None) -> bool:
    return (a is None) != (b is None) or (a is not None and b is not None and not abs(a - b) <= _SAME * max(1.0, abs(a)))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _difference(a: float | None, b: float | None) -> str:
    return "-" if a is None or b is None else "0" if a == b else f"{b - a:+.1e}"


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:18]} ... {text[-18:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m grpo_spmd.replay",
        description="Run reward -> advantage -> loss of a dumped step again, on the CPU, without vLLM, and compare with what was recorded. "
        "breakpoint() works in a reward, in the advantages and in the loss.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder, or a copy of it")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="as in metrics.jsonl, from 0 on")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="FOLDER", help="the policy (default: RUN_DIR/checkpoints/step_N, and for step 0 also model.path)"
    )
    parser.add_argument("--top", type=int, default=5, metavar="K", help="rollouts in each list (default: 5)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that replace those of the run's config")
    args = parser.parse_intermixed_args()
    try:
        recorded = read_step(args.run_dir, args.step, args.overrides)
    except ConfigError as error:
        refuse(error)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as in train.py
    code = 0
    try:
        print("\n".join(report(recorded, replay(recorded, args.checkpoint), args.top)))
    except (ConfigError, CheckpointError, RewardError) as error:
        print(f"error: {error}", file=sys.stderr)
        code = 1 if isinstance(error, RewardError) else 2
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see distributed.exit_with_outcome: threads that gloo leaves now and then abort the interpreter's own exit


if __name__ == "__main__":
    main()
