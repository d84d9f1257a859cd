"""This module collects what a checkpoint stores, writes one rank's shard of the tensors, and
restores the training state from the newest good checkpoint of a run folder.

A checkpoint stores facts about the run (RunFacts, in trainer.json) and the trained tensors with
their *moments*, Adam's running means exp_avg and exp_avg_sq: in float32, or as 8-bit codes with
scales. A *shard* is a file with the rows of all tensors that one rank holds. A checkpoint is good
if its files match its manifest. The training state is that of policy, optimizer and critic.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.checkpoint.export import stored_tensors
from grpo_spmd.checkpoint.manifest import (
    TO_GO_ON,
    CheckpointError,
    NewerFormatError,
    model_fingerprint,
    read_trainer,
    verify_files,
)
from grpo_spmd.checkpoint.run_dir import Candidates, Start, check_same_run, find_candidates
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import POLICY
from grpo_spmd.data.tokens import digests_of
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.config_json import checkpoint_folder
from grpo_spmd.model.families.build import constants
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.optimizer import initial_state
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.schedule import changed_schedule
from grpo_spmd.model.sharding import as_shard
from grpo_spmd.observe.metrics_file import ends_with_evaluation
from grpo_spmd.records import Fields, Prompt

_log = logging.getLogger("grpo_spmd")
# The names that safetensors gives to the dtypes of what trains and its moments.
_DTYPES = {torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}


class TrainedSignal(Protocol):
    """The interface by which checkpoints save and restore a second trained model, the critic.

    `trained_parameters` returns the sharded parameters by their names in a checkpoint. `state`
    returns counts for trainer.json, and `restore` continues from them."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def trained_parameters(self) -> dict[str, DTensor]: ...
    def state(self) -> dict[str, int]: ...
    def restore(self, state: Fields) -> None: ...


@dataclass(frozen=True)
class RunFacts:
    """The facts about the whole run that trainer.json records, and that a run which continues from
    the checkpoint compares with its own."""

    model_fingerprint: str
    """The fingerprint of model.path's files. On other ranks than 0 both fingerprints are ""."""
    data_fingerprint: str
    """The fingerprint of the prompts' tokens, in their order."""
    config: Fields
    """The whole config as {"section.key": value}, without secrets."""
    model_path: str
    dtype: str
    world_size: int
    contents: dict[str, str] = field(default_factory=dict)
    """SHA-256 digests of files and data that may change within a run, by a description of each. On
    resuming, changes are only logged, by these descriptions."""


def run_facts(
    config: Fields,
    prompts: Sequence[Prompt],
    session: Session,
    held_out: Mapping[str, Sequence[Prompt]],
) -> RunFacts:
    """Returns the facts of this run. The fingerprints and digests are computed on rank 0 only.

    `config` is the whole config as {"section.key": value}. `held_out` has the prompts of each
    evaluation set.
    """
    model_digest = ""
    token_digest = ""
    contents: dict[str, str] = {}
    if session.is_rank0:
        folder = checkpoint_folder(config["model.path"])
        model_digest = model_fingerprint(folder)
        token_digest, row_digest = digests_of(prompts, with_tokens=False)
        for name, rows in held_out.items():
            contents[f"data.eval.{name}"] = digests_of(rows, with_tokens=True)[1]
        contents["answers and other columns of data.train"] = row_digest
        contents |= _content_digests(config, folder)
    return RunFacts(
        model_fingerprint=model_digest,
        data_fingerprint=token_digest,
        config=config,
        model_path=str(config["model.path"]),
        dtype=config["model.dtype"],
        world_size=session.world_size,
        contents=contents,
    )


def _content_digests(config: Fields, model_folder: Path) -> dict[str, str]:
    """Returns {description: digest} of the models and files that `config` names.

    When the run is resumed, the log says which of them have changed since. The models are teachers,
    the critic and reward models. The files are those of the tokenizer, reward functions, rubrics
    and templates.
    """
    tokenizer_names = re.compile(
        r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config"
    )
    files = {
        f"{path.name} of model.path": path
        for path in model_folder.iterdir()
        if tokenizer_names.match(path.name)
    }
    digests = {}
    for key, value in config.items():
        path = str(value)
        if re.fullmatch(r"rewards\.\d+\.(function|judge|template)", key):
            # A function is FILE:FUNCTION; a rubric or template is FILE.
            file = Path(path)
            files[f"{key} ({path})"] = file if file.is_file() else Path(path.rpartition(":")[0])
        elif value and re.fullmatch(r"rewards\.\d+\.model", key):
            revision = config.get(f"{key.removesuffix('model')}revision")
            folder = checkpoint_folder(path, revision)
            digests[f"{key} ({path})"] = model_fingerprint(folder)
        # POLICY names the policy itself, whose files have their own fingerprint.
        elif (
            value and path != POLICY and re.fullmatch(r"critic\.path|teacher\.path(\.[^=]+)?", key)
        ):
            digests[f"the model of {key}"] = model_fingerprint(checkpoint_folder(path))
    for name, file in files.items():
        if file.is_file():
            digests[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return digests


def state_tensors(
    policy: Policy, updater: PolicyUpdater, critic: TrainedSignal | None = None
) -> dict[str, DTensor]:
    """Returns the trained tensors and their Adam moments by the names that they have in a
    checkpoint. Before the first update there are no moments."""
    models: list[tuple[str, str, dict[str, DTensor], torch.optim.Optimizer]] = [
        ("policy.", "", trained_parameters(policy), updater.optimizer)
    ]
    if critic is not None:
        models.append(("critic.", "critic_", critic.trained_parameters(), critic.optimizer))
    tensors: dict[str, DTensor] = {}
    for prefix, moment_prefix, parameters, optimizer in models:
        for name, parameter in parameters.items():
            tensors[prefix + name] = parameter
            for moment, value in optimizer.state.get(parameter, {}).items():
                if moment != "step":
                    tensors[f"{moment_prefix}{moment}.{name}"] = value
    # An export of a whole model also needs the model's constants, which are buffers; an export of
    # adapters does not.
    if not policy.lora.rank:
        parameter = next(iter(models[0][2].values()))
        for name, constant in constants(policy.model).items():
            tensors[f"policy.{name}"] = as_shard(constant, parameter)
    return tensors


def trained_parameters(policy: Policy) -> dict[str, DTensor]:
    """Returns the policy's sharded parameters that are trained, by HF's names.

    The names of adapters are LAYER.lora_A.weight and LAYER.lora_B.weight.
    """
    parameters: dict[str, DTensor] = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor), name
            parameters[hf_name(name).replace(".default.", ".")] = parameter
    return parameters


def write_shard(path: Path, tensors: dict[str, Tensor], first_rows: dict[str, int]) -> Fields:
    """Writes `tensors`, this rank's rows, as a safetensors file and syncs it to the disk.

    Returns the file's {"bytes", "sha256"}. `first_rows` has for each name the index, in the whole
    tensor, of the first of these rows. The bytes are written directly from the tensors' memory;
    safetensors' own writer would first copy all of them.
    """
    # torch.distributed.checkpoint reads the offsets from this field of the header (torch 2.13).
    offsets = {
        name: {"saved_offsets": [first_rows[name], *[0] * (tensor.ndim - 1)]}
        for name, tensor in tensors.items()
    }
    header: Fields = {"__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}}
    end = 0
    for name, tensor in tensors.items():
        start = end
        end += tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    # In the format tensors begin at a multiple of 8 bytes, so the header is padded with spaces.
    text += b" " * (-len(text) % 8)
    # Views of the tensors' memory, without a copy.
    views: list[Any] = [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors.values()]
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text, *views):
            file.write(chunk)
            digest.update(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


# Where a run starts


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

    def check(_: list[Any]) -> tuple[Fields, bool]:
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


def _check_facts(folder: Path, trainer: Fields, facts: RunFacts) -> None:
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
    """Collective. Returns the newest checkpoint that is not damaged; None without candidates.

    The candidates are tried from the newest on. Each rank reads a part of the files and compares
    their checksums. Raises ConfigError if all candidates are damaged, or if a later version of
    grpo_spmd wrote a candidate that is tried before a good one: an older checkpoint must not be
    used in its place.
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

    Raises ConfigError if a later version of grpo_spmd wrote the checkpoint.
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
        """Returns the damage that any rank found, or None. Runs on rank 0."""
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
    trainer: Fields,
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
    models: list[tuple[str, dict[str, DTensor], PolicyUpdater | TrainedSignal, Fields]] = [
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
        lacking = [name for name in parameters if f"{prefix}exp_avg.{name}" not in stored]
        if lacking and len(lacking) < len(parameters):
            raise ConfigError(
                f"checkpoint.resume: {folder} is damaged: it lacks {prefix}exp_avg.{lacking[0]}, "
                "and has those of other tensors; name an earlier checkpoint, or start a new run_dir"
            )
        # `dcp.load` only fills tensors that exist, so the moments are made first.
        if not lacking:
            for parameter in parameters.values():
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
