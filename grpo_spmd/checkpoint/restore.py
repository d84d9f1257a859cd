"""Where a run starts: the newest good checkpoint of its folder, and its state back in the policy's and optimizer's shards."""

from __future__ import annotations

import hashlib
import logging
import warnings
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from grpo_spmd.checkpoint.manifest import (
    CheckpointError,
    NewerFormatError,
    check_same_run,
    fingerprint_of_files,
    list_checkpoints,
    read_manifest,
    read_trainer,
    verify_files,
)
from grpo_spmd.checkpoint.run_dir import Start, is_inside, is_same_launch, lock_run_dir, note_launch, refuse_in_use
from grpo_spmd.checkpoint.state import MOMENTS, state_tensors, trained_parameters
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.hf_files import checkpoint_folder
from grpo_spmd.model.policy import Policy
from grpo_spmd.observe.metrics_file import last_step
from grpo_spmd.records import Prompt

_log = logging.getLogger("grpo_spmd")


def find_start(config: Config, session: Session, prompts: Sequence[Prompt]) -> Start:
    """Collective. The newest good checkpoint of the run folder, or the one that `checkpoint.resume` names; all ranks
    the same.

    Each rank reads its share of the files and compares their checksums. A damaged checkpoint is passed over, with a
    warning.

    Raises:
        ConfigError: the run folder is in use; the named checkpoint is damaged; all are; one is of a later version; or
            it belongs to another model, data set or seed.
    """
    # Rank 0 says, for another rank may see the folder a moment later.
    folders, goes_on, named = on_rank0(lambda _: _candidates(config, session.is_restart), None)
    why: list[str] = []
    for folder in map(Path, folders):
        damage = _damage_found(folder, session)
        if damage is None:
            return _start_from(config, folder, goes_on, prompts)
        why.append(damage)
        if session.is_rank0 and not named:
            _log.warning("passed over: %s", damage)
    if why:
        all_bad = "" if named else f"; {len(why)} checkpoints cannot be loaded; move them away to start anew"
        raise ConfigError(f"checkpoint.resume: {why[0]}{all_bad}")
    return Start(goes_on=goes_on)


def _candidates(config: Config, is_restart: bool) -> tuple[list[str], bool, bool]:
    """On rank 0: the checkpoints to try, whether the run that the folder holds goes on, and whether the one to try was
    named."""
    run_dir = Path(config.run_dir)
    # an earlier launch had the same id: its note must not speak for this one's restarts
    if not is_restart and is_same_launch(run_dir):
        lock_run_dir(run_dir)
        note_launch(run_dir, "")
    again = is_restart and is_same_launch(run_dir)  # then the run has begun, from wherever `resume` said
    has_begun = again and bool(list_checkpoints(run_dir))
    named = config.checkpoint.resume not in ("auto", "never") and not has_begun
    goes_on = again or config.checkpoint.resume == "auto" or (named and is_inside(config.checkpoint.resume, run_dir))
    if not goes_on:
        refuse_in_use(run_dir)
    elif run_dir.exists():
        lock_run_dir(run_dir)
    if named:
        return [config.checkpoint.resume], goes_on, True
    return [str(folder) for folder in list_checkpoints(run_dir)[::-1]] if goes_on else [], goes_on, False


def _damage_found(folder: Path, session: Session) -> str | None:
    """Collective."""
    error = ""
    try:
        verify_files(folder, read_manifest(folder), session.rank, session.world_size)
        read_trainer(folder)
    except NewerFormatError as newer:
        error = f"!{newer}"
    except CheckpointError as damaged:
        error = str(damaged)
    except OSError as unreadable:
        error = f"{folder}: cannot be read: {unreadable}"

    def first(errors: list[str]) -> str | None:
        for text in errors:
            if text.startswith("!"):
                raise ConfigError(f"checkpoint.resume: {text[1:]}")
        return next((text for text in errors if text), None)

    return on_rank0(first, error)


def _start_from(config: Config, folder: Path, goes_on: bool, prompts: Sequence[Prompt]) -> Start:
    """Collective."""

    def check(_: list[Any]) -> tuple[dict[str, Any], bool]:
        trainer = read_trainer(folder)
        changed = check_same_run(folder, trainer, config)
        for name, mine in fingerprints(config, prompts).items():
            if trainer[name] != mine:
                what = (
                    "model.path holds another model"
                    if name == "model_fingerprint"
                    else "data.train gives other prompts"
                )
                raise ConfigError(
                    f"checkpoint.resume: {what} than the run had that wrote {folder}; restore it, or start a new "
                    "run_dir"
                )
        is_last = int(trainer["step"]) >= config.training.num_steps
        if is_last:
            _log.info(
                "%s is the end of this run; raise training.num_steps (%d) to go on", folder, config.training.num_steps
            )
        if changed:
            _log.info("changed since %s was written: %s", folder, "; ".join(changed))
        # the line of the evaluation that closes a run
        closing = config.training.num_steps if config.eval.every_steps else -1
        return trainer, goes_on and is_last and last_step(Path(config.run_dir, "metrics.jsonl")) >= closing

    trainer, is_over = on_rank0(check, None)
    return Start(int(trainer["step"]), folder, trainer, goes_on, is_over)


def fingerprints(config: Config, prompts: Sequence[Prompt]) -> dict[str, str]:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(array("q", [len(prompt.token_ids), *prompt.token_ids]))
    files = [
        p
        for p in checkpoint_folder(config.model.path).iterdir()
        if p.suffix == ".safetensors" or p.name == "config.json"
    ]
    return {"model_fingerprint": fingerprint_of_files(files), "data_fingerprint": digest.hexdigest()}


@torch.no_grad()
def load_state(policy: Policy, updater: PolicyUpdater | None, folder: Path, trainer: dict[str, Any]) -> None:
    """Collective. Fill the policy's shards, and the optimizer's, from a verified checkpoint of any world size and mesh.

    Args:
        updater: None where only the policy is wanted.

    Raises:
        ConfigError: the tensors are not those of this model.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    stored = {
        name: list(getattr(facts, "size", [])) for name, facts in reader.read_metadata().state_dict_metadata.items()
    }
    parameters = trained_parameters(policy)
    if updater is not None:
        for name, parameter in parameters.items():
            if f"exp_avg.{name}" in stored:
                moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
                updater.optimizer.state[parameter] = {"step": torch.tensor(float(trainer["num_updates"])), **moments}
        wanted = state_tensors(policy, updater)
        updater.restore(trainer)
    else:
        wanted = {f"policy.{name}": parameter for name, parameter in parameters.items()}
    expected = {name: list(tensor.shape) for name, tensor in wanted.items()}
    for name in sorted(expected.keys() | {n for n in stored if n.startswith("policy.")}):
        if stored.get(name) != expected.get(name):
            raise ConfigError(
                f"checkpoint.resume: {folder} is of another model: {name} has shape {stored.get(name, 'none')} there, "
                "and "
                f"{expected.get(name, 'none')} here"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # Each rank reads what it holds: nothing needs to be agreed on, and DCP's own collectives would send pickles.
        dcp.load(dict(wanted), storage_reader=reader, no_dist=True)
