"""This module finds the newest good checkpoint of a run folder, and restores the training state.

A checkpoint is good if its files match its manifest. The training state is that of the policy, the
optimizer and the critic.
"""

from __future__ import annotations

import logging
import warnings
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
from grpo_spmd.checkpoint.state import RunFacts, TrainedSignal, state_tensors, trained_parameters
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.optimizer import initial_state
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
    """Collective. Returns where the run starts: at its newest good checkpoint, or at the one that
    `resume` names, or at step 0 if there is none.

    The result is the same on all ranks. Damaged checkpoints are skipped with a warning. `facts`
    describe the run that starts, which has `num_steps` steps. With `has_closing_eval` an evaluation
    with a metrics line of its own follows the last step. Raises ConfigError if the folder is in
    use; if the named checkpoint, or every checkpoint, is damaged; if a later version wrote it; or
    if it is of another model, data set or seed.
    """
    # Rank 0 lists the folder for all: on a shared disk other ranks may see another state of it.
    candidates = Candidates(
        *on_rank0(lambda _: find_candidates(run_dir, resume, session.is_restart), None)
    )
    folder = _find_newest_good(candidates, session)
    if folder is None:
        return Start(goes_on=candidates.goes_on)

    def check(_: list[Any]) -> tuple[dict[str, Any], bool]:
        """Returns (trainer.json, whether the run is over); runs on rank 0."""
        trainer = read_trainer(folder)
        _check_facts(folder, trainer, facts)
        is_last = int(trainer["step"]) >= num_steps
        if is_last:
            _log.info(
                "%s is the end of this run; raise training.num_steps (%d) to go on",
                folder,
                num_steps,
            )
        metrics = run_dir / "metrics.jsonl"
        # The run is over only if its last evaluation was written, too.
        has_all_lines = not has_closing_eval or ends_with_evaluation(metrics, num_steps)
        return trainer, candidates.goes_on and is_last and has_all_lines

    trainer, is_over = on_rank0(check, None)
    return Start(
        step=int(trainer["step"]),
        folder=folder,
        trainer=trainer,
        goes_on=candidates.goes_on,
        is_over=is_over,
    )


def _check_facts(folder: Path, trainer: dict[str, Any], facts: RunFacts) -> None:
    """Raises ConfigError if another run wrote the checkpoint, and logs what has changed since then.

    Only rank 0 calls this.
    """
    changes = check_same_run(folder, trainer, facts.config)
    recorded = trainer.get("contents")
    # If the checkpoint has no digest of a file, it is not known whether the file was edited.
    changes += [
        f"{name} edited"
        for name, digest in facts.contents.items()
        if (recorded or {}).get(name, digest) != digest
    ]
    if trainer["world_size"] != facts.world_size:
        changes.append(f"ranks {trainer['world_size']} -> {facts.world_size}")
    edits = f" ({'; '.join(changes)})" if changes else ""
    for name, problem in (
        ("model_fingerprint", "model.path holds another model"),
        ("data_fingerprint", "data.train gives other prompts"),
    ):
        if trainer[name] != getattr(facts, name):
            raise ConfigError(
                f"checkpoint.resume: {problem} than the run had that wrote {folder}{edits}; "
                "restore it, or start a new run_dir"
            )
    if changes:
        _log.info("changed since %s was written: %s", folder, "; ".join(changes))
    new_schedule = changed_schedule(trainer["config"], facts.config, int(trainer["num_updates"]))
    if new_schedule:
        _log.info("%s", new_schedule)
    if recorded is None:
        _log.info(
            "%s does not record answers, reward files and tokenizer: edits of them go unnoticed",
            folder,
        )


def _find_newest_good(candidates: Candidates, session: Session) -> Path | None:
    """Collective. Returns the first candidate that is not damaged; None if there are no candidates.

    Each rank reads a part of the files and compares their checksums. Raises ConfigError if all
    candidates are damaged, or if a later version wrote one that comes before the first good one: an
    older checkpoint must not be used in its place.
    """
    damages: list[str] = []
    for folder in map(Path, candidates.folders):
        damage = _find_damage(folder, session)
        if damage is None:
            return folder
        damages.append(damage)
        if session.is_rank0 and not candidates.is_named:
            _log.warning("passed over: %s", damage)
    if not damages:
        return None
    hint = ""
    if not candidates.is_named:
        hint = f"; {len(damages)} checkpoints cannot be loaded; move them away to start anew"
    raise ConfigError(f"checkpoint.resume: {damages[0]}{hint}")


def _find_damage(folder: Path, session: Session) -> str | None:
    """Collective. Returns a text that says what is wrong with a checkpoint; None if it is good.

    Raises ConfigError if a later version wrote the checkpoint.
    """
    # Errors are not raised here, because every rank must reach the collective below.
    result = (False, "")
    try:
        verify_files(folder, session.rank, session.world_size)
        trainer = read_trainer(folder, TO_GO_ON)
        if session.is_rank0:
            # Raises if rows are missing or doubled in the shards: torch's reader does not check it.
            stored_tensors(folder, trainer, prefix="")
    except (CheckpointError, OSError) as error:
        result = (isinstance(error, NewerFormatError), str(error))

    def choose(results: list[tuple[bool, str]]) -> str | None:
        # A newer format on any rank counts more than damage on another.
        is_newer, damage = max(results)
        if is_newer:
            raise ConfigError(f"checkpoint.resume: {damage}")
        return damage or None

    return on_rank0(choose, result)


@torch.no_grad()
def load_state(
    policy: Policy,
    updater: PolicyUpdater,
    folder: Path,
    trainer: dict[str, Any],
    critic: TrainedSignal | None = None,
) -> None:
    """Fills this rank's shards of policy, optimizer and critic from a verified checkpoint.

    Every rank calls this and reads its own rows, without communication. The checkpoint may have
    been written by any world size and mesh. From `trainer`, its trainer.json, the counts of updates
    and the schedules are restored. Raises ConfigError if the checkpoint's tensors do not have the
    names and shapes of these models' tensors, or if a `critic` is given and the checkpoint has
    none.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder / "state"))
    metadata = reader.read_metadata().state_dict_metadata
    stored = {name: list(getattr(tensor, "size", [])) for name, tensor in metadata.items()}
    models: list[tuple[str, dict[str, DTensor], PolicyUpdater | TrainedSignal, dict[str, Any]]] = [
        ("", trained_parameters(policy), updater, trainer)
    ]
    # Only the tensors with these prefixes must match the models: the checkpoint may have a critic
    # that the run does not have any more.
    prefixes: tuple[str, ...] = ("policy.",)
    if critic is not None:
        if trainer.get("critic") is None:
            raise ConfigError(
                f"checkpoint.resume: {folder} holds no critic; "
                "leave critic.path out, or start a new run_dir"
            )
        models.append(("critic_", critic.trained_parameters(), critic, trainer["critic"]))
        prefixes = ("policy.", "critic.")
    for prefix, parameters, model, counts in models:
        # Before the first update no parameter has moments; after it all have them.
        with_moments = [name for name in parameters if f"{prefix}exp_avg.{name}" in stored]
        for name in parameters.keys() - with_moments if with_moments else ():
            raise ConfigError(
                f"checkpoint.resume: {folder} is damaged: it lacks {prefix}exp_avg.{name}, and has "
                "those of other tensors; name an earlier checkpoint, or start a new run_dir"
            )
        for name, parameter in parameters.items():
            # `dcp.load` only fills tensors that exist, so the moments are made first.
            if f"{prefix}exp_avg.{name}" in stored:
                model.optimizer.state[parameter] = initial_state(
                    model.optimizer, parameter, counts["num_updates"]
                )
        model.restore(counts)
    tensors = state_tensors(policy, updater, critic)
    expected = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(expected.keys() | {name for name in stored if name.startswith(prefixes)}):
        if stored.get(name) != expected.get(name):
            shapes = f"{stored.get(name, 'none')} there, and {expected.get(name, 'none')} here"
            raise ConfigError(
                f"checkpoint.resume: {folder} is of another model: {name} has shape {shapes}"
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        # no_dist: each rank reads its own rows, so the ranks have nothing to agree on, and DCP's
        # collectives would send pickles.
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
