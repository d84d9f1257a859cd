"""This module collects what a checkpoint stores, and writes one rank's shard of the tensors.

A checkpoint stores facts about the run (RunFacts, in trainer.json) and the trained tensors with
their *moments*, Adam's running means exp_avg and exp_avg_sq: in float32, or as 8-bit codes with
scales. A *shard* is a file with the rows of all tensors that one rank holds.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import POLICY
from grpo_spmd.data.tokens import digests_of
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.config_json import checkpoint_folder
from grpo_spmd.model.families.build import constants
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import as_shard
from grpo_spmd.records import Prompt

# The names that safetensors gives to the dtypes of what trains and its moments.
_DTYPES = {torch.float32: "F32", torch.int8: "I8", torch.uint8: "U8"}


class TrainedSignal(Protocol):
    """The interface by which checkpoints save and restore a second trained model, the critic."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def trained_parameters(self) -> dict[str, DTensor]: ...
    def state(self) -> dict[str, int]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunFacts:
    """The facts about the whole run that trainer.json records."""

    model_fingerprint: str
    """The fingerprint of model.path's files. On other ranks than 0 both fingerprints are ""."""
    data_fingerprint: str
    """The fingerprint of the prompts' tokens, in their order."""
    config: dict[str, Any]
    """The whole config as {"section.key": value}, without secrets."""
    model_path: str
    dtype: str
    world_size: int
    contents: dict[str, str] = field(default_factory=dict)
    """SHA-256 digests of files and data that may change within a run. Changes are only logged, so
    the keys are descriptions for the log."""


def run_facts(
    config: dict[str, Any],
    prompts: Sequence[Prompt],
    session: Session,
    held_out: Mapping[str, Sequence[Prompt]],
) -> RunFacts:
    """Returns the facts of this run.

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


def _content_digests(config: dict[str, Any], model_folder: Path) -> dict[str, str]:
    """Returns the digests of models and files that `config` names, by descriptions for the log.

    The models are teachers, the critic and reward models. The files are those of the tokenizer,
    reward functions, rubrics and templates.
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


def model_fingerprint(folder: Path) -> str:
    """Returns a SHA-256 over the names, sizes, beginnings and ends of a model's files.

    So models can be distinguished without reading all of their bytes.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix != ".safetensors" and path.name != "config.json":
            continue
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 16)))
            digest.update(file.read())
    return digest.hexdigest()


def state_tensors(
    policy: Policy, updater: PolicyUpdater, critic: TrainedSignal | None = None
) -> dict[str, DTensor]:
    """Returns the trained tensors and, after the first update, their moments, by the names that
    they have in a checkpoint."""
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
    # An export is a whole model, or adapters alone.
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


def write_shard(
    path: Path, tensors: dict[str, Tensor], first_rows: dict[str, int]
) -> dict[str, Any]:
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
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
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
