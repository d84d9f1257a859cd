"""Where a run starts: the newest good checkpoint of its folder, and its state back in the policy and the optimizer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Container
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from grpo_spmd.checkpoint.export import stored_tensors
from grpo_spmd.checkpoint.manifest import (
    TO_GO_ON,
    CheckpointError,
    NewerFormatError,
    read_trainer,
    verify_files,
)
from grpo_spmd.checkpoint.run_dir import Candidates, Start, check_same_run, find_candidates
from grpo_spmd.checkpoint.state import (
    MOMENTS,
    RunFacts,
    TrainedSignal,
    state_tensors,
    trained_parameters,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.schedule import changed_schedule
from grpo_spmd.observe.metrics_file import ends_with_evaluation

_log = logging.getLogger("grpo_spmd")


def find_start(
    run_dir: Path,
    resume: str,
    session: Session,
    facts: RunFacts,
    num_steps: int,
    has_closing_eval: bool,
) -> Start:
    """Collective. The newest good checkpoint of the run folder, or the one that `resume` names; the same on all ranks.
    Damaged ones are passed over, with a warning. `facts`: of the run that starts; with `has_closing_eval` an evaluation
    follows its `num_steps`, which has a metrics line of its own. Raises ConfigError: the folder is in use; the named
    checkpoint, or all, are damaged; one is of a later version; or it is of another model, data set or seed."""
    # Rank 0 says, for another rank may see the folder a moment later.
    found = Candidates(
        **on_rank0(lambda _: asdict(find_candidates(run_dir, resume, session.is_restart)), None)
    )
    if (folder := _newest_good(found, session)) is None:
        return Start(goes_on=found.goes_on)

    def check(_: list[Any]) -> tuple[dict[str, Any], bool]:
        trainer = read_trainer(folder)
        changed, recorded = check_same_run(folder, trainer, facts.config), trainer.get("contents")
        other = [
            name
            for name, digest in facts.contents.items()
            if (recorded or {}).get(name, digest) != digest
        ]
        changed += [f"{name} edited" for name in other]
        if trainer["world_size"] != facts.world_size:
            changed.append(f"ranks {trainer['world_size']} -> {facts.world_size}")
        for part, what in (
            ("model", "model.path holds another model"),
            ("data", "data.train gives other prompts"),
        ):
            if trainer[f"{part}_fingerprint"] != getattr(facts, f"{part}_fingerprint"):
                why = f" ({'; '.join(changed)})" if part == "data" and changed else ""
                text = f"{what} than the run had that wrote {folder}{why}"
                raise ConfigError(f"checkpoint.resume: {text}; restore it, or start a new run_dir")
        is_last = int(trainer["step"]) >= num_steps
        if is_last:
            _log.info(
                "%s is the end of this run; raise training.num_steps (%d) to go on",
                folder,
                num_steps,
            )
        if changed:
            _log.info("changed since %s was written: %s", folder, "; ".join(changed))
        if goes_on := changed_schedule(
            trainer["config"], facts.config, int(trainer["num_updates"])
        ):
            _log.info("%s", goes_on)
        if recorded is None:
            _log.info(
                "%s does not record answers, reward files and tokenizer: edits of them are not seen",
                folder,
            )
        has_all_lines = not has_closing_eval or ends_with_evaluation(
            run_dir / "metrics.jsonl", num_steps
        )
        return trainer, found.goes_on and is_last and has_all_lines

    trainer, is_over = on_rank0(check, None)
    return Start(int(trainer["step"]), folder, trainer, found.goes_on, is_over)


def _newest_good(found: Candidates, session: Session) -> Path | None:
    """Collective. Each rank reads its share of the files and compares their checksums. Raises ConfigError."""
    why: list[str] = []
    for folder in map(Path, found.folders):
        if (damage := _damage_of(folder, session)) is None:
            return folder
        why.append(damage)
        if session.is_rank0 and not found.is_named:
            _log.warning("passed over: %s", damage)
    if why:
        all_bad = (
            ""
            if found.is_named
            else f"; {len(why)} checkpoints cannot be loaded; move them away to start anew"
        )
        raise ConfigError(f"checkpoint.resume: {why[0]}{all_bad}")
    return None


def _damage_of(folder: Path, session: Session) -> str | None:
    """Collective. What some rank found wrong with it. Raises ConfigError where it is of a later version."""
    text, is_newer = "", False
    try:
        verify_files(folder, session.rank, session.world_size)
        trainer = read_trainer(folder, TO_GO_ON)
        if session.is_rank0:  # what torch's reader would trust of the shards
            stored_tensors(folder, trainer, prefix="")
    except CheckpointError as error:
        text, is_newer = str(error), isinstance(error, NewerFormatError)
    except OSError as unreadable:
        text = f"{folder}: cannot be read: {unreadable}"

    def first(damages: list[tuple[str, bool]]) -> str | None:
        if newer := [text for text, is_newer in damages if is_newer]:
            raise ConfigError(f"checkpoint.resume: {newer[0]}")
        return next((text for text, _ in damages if text), None)

    return on_rank0(first, (text, is_newer))


@torch.no_grad()
def load_state(
    policy: Policy,
    updater: PolicyUpdater,
    folder: Path,
    trainer: dict[str, Any],
    critic: TrainedSignal | None = None,
) -> None:
    """Collective. Fill the policy's shards, and the optimizer's, from a verified checkpoint of any world size and mesh,
    and those of the critic. Raises ConfigError where the tensors are not those of these models."""
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    metadata = reader.read_metadata().state_dict_metadata
    stored = {name: list(getattr(tensor, "size", [])) for name, tensor in metadata.items()}
    _make_moments(trained_parameters(policy), updater.optimizer, trainer["num_updates"], "", stored)
    updater.restore(trainer)
    kinds: tuple[str, ...] = ("policy.",)
    if critic is not None:
        if (counts := trainer.get("critic")) is None:
            raise ConfigError(
                f"checkpoint.resume: {folder} holds no critic; leave critic.path out, or start a new run_dir"
            )
        _make_moments(
            critic.trained_parameters(), critic.optimizer, counts["num_updates"], "critic_", stored
        )
        critic.restore(counts)
        kinds = ("policy.", "critic.")
    wanted = state_tensors(policy, updater, critic)
    expected = {name: list(tensor.shape) for name, tensor in wanted.items()}
    for name in sorted(expected.keys() | {n for n in stored if n.startswith(kinds)}):
        if stored.get(name) != expected.get(name):
            shapes = f"{stored.get(name, 'none')} there, and {expected.get(name, 'none')} here"
            raise ConfigError(
                f"checkpoint.resume: {folder} is of another model: {name} has shape {shapes}"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # each rank reads what it holds: nothing needs to be agreed on, and DCP's own collectives would send pickles
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)


def _make_moments(
    parameters: dict[str, DTensor],
    optimizer: torch.optim.Optimizer,
    num_updates: int,
    prefix: str,
    stored: Container[str],
) -> None:
    """Those that the checkpoint has, to be filled."""
    for name, parameter in parameters.items():
        if f"{prefix}exp_avg.{name}" in stored:
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            num_steps = torch.tensor(
                float(num_updates), device=parameter.device
            )  # for the fused kernel
            optimizer.state[parameter] = {"step": num_steps, **moments}
