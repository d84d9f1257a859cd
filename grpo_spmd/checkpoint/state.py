"""What a checkpoint holds of a run: facts that tell it from another, tensors, and one rank's file of them."""

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

from grpo_spmd.data.tokens import digests_of
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.hf_files import checkpoint_folder
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.policy import Policy
from grpo_spmd.records import Prompt

MOMENTS = ("exp_avg", "exp_avg_sq")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' names


class TrainedSignal(Protocol):
    """A model that trains next to the policy (the critic), as a checkpoint stores it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def trained_parameters(self) -> dict[str, DTensor]: ...
    def state(self) -> dict[str, int]: ...
    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class RunFacts:
    """What trainer.json says of the run as a whole."""

    model_fingerprint: (
        str  # of the files in the model's folder; both fingerprints are "" on other ranks than 0
    )
    data_fingerprint: str  # of the prompts' tokens, in their order
    config: dict[str, Any]  # flat, as resolved, without secrets
    model_path: str
    dtype: str
    world_size: int
    contents: dict[str, str] = field(
        default_factory=dict
    )  # SHA-256 of what may change on the way, but not in silence


def run_facts(
    config: dict[str, Any],
    prompts: Sequence[Prompt],
    session: Session,
    held_out: Mapping[str, Sequence[Prompt]],
) -> RunFacts:
    """`config`: the whole one, flat; `held_out`: the sets of evaluation by name."""
    fingerprints, contents, model_path = ("", ""), dict[str, str](), str(config["model.path"])
    if session.is_rank0:
        of_tokens, of_rows = digests_of(prompts, whole=False)
        folder = checkpoint_folder(model_path)
        fingerprints = model_fingerprint(folder), of_tokens
        contents = {
            f"data.eval.{name}": digests_of(rows, whole=True)[1] for name, rows in held_out.items()
        }
        contents |= {"answers and other columns of data.train": of_rows}
        of_tokenizer = re.compile(
            r"tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|generation_config"
        )
        files = {
            f"{path.name} of model.path": path
            for path in folder.iterdir()
            if of_tokenizer.match(path.name)
        }
        functions = {
            key: str(spec)
            for key, spec in config.items()
            if re.fullmatch(r"rewards\.\d+\.(function|judge)", key)
        }
        files |= {
            f"{key} ({spec})": Path(spec.rpartition(":")[0] or spec)
            for key, spec in functions.items()
        }
        for key, path in config.items():
            if path and re.match(
                r"(teacher\.path(\.[^=]+)?|critic\.path(?!=policy$))=", f"{key}={path}"
            ):
                contents[f"the model of {key}"] = model_fingerprint(checkpoint_folder(str(path)))
            if path is not None and re.fullmatch(r"rewards\.\d+\.model", key):
                revision = config.get(key.removesuffix("model") + "revision")
                contents[f"{key} ({path})"] = model_fingerprint(
                    checkpoint_folder(str(path), revision)
                )
            if path is not None and re.fullmatch(r"rewards\.\d+\.template", key):
                files[f"{key} ({path})"] = Path(str(path))
        contents |= {
            name: hashlib.sha256(p.read_bytes()).hexdigest()
            for name, p in files.items()
            if p.is_file()
        }
    return RunFacts(
        *fingerprints, config, model_path, config["model.dtype"], session.world_size, contents
    )


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over names, sizes and both ends of its files: tells models apart without reading them."""
    digest = hashlib.sha256()
    for path in sorted(
        p for p in folder.iterdir() if p.suffix == ".safetensors" or p.name == "config.json"
    ):
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
    """What trains, and its moments once there are any, by their names in a checkpoint."""
    tensors = _with_moments(trained_parameters(policy), updater.optimizer, "policy.", "")
    if critic is not None:
        tensors |= _with_moments(
            critic.trained_parameters(), critic.optimizer, "critic.", "critic_"
        )
    return tensors


def _with_moments(
    parameters: dict[str, DTensor], optimizer: torch.optim.Optimizer, prefix: str, of_moments: str
) -> dict[str, DTensor]:
    tensors: dict[str, DTensor] = {}
    for name, parameter in parameters.items():
        tensors[prefix + name] = parameter
        moments = optimizer.state.get(parameter, {})
        tensors |= {
            f"{of_moments}{moment}.{name}": moments[moment]
            for moment in MOMENTS
            if moment in moments
        }
    return tensors


def trained_parameters(policy: Policy) -> dict[str, DTensor]:
    """Sharded parameters that train by HF's name, adapters as LAYER.lora_A.weight and LAYER.lora_B.weight."""
    found: dict[str, DTensor] = {}
    for name, parameter in policy.model.named_parameters():
        if parameter.requires_grad:
            assert isinstance(parameter, DTensor), name
            found[hf_name(name).replace(".default.", ".")] = parameter
    return found


def write_shard(path: Path, tensors: dict[str, Tensor], rows: dict[str, int]) -> dict[str, Any]:
    """Write this rank's rows of each tensor, from the one in `rows` on, as safetensors; sync; {"bytes", "sha256"}.
    Straight from their memory: safetensors' own writer would first make a copy of them all."""
    offsets = {
        name: {"saved_offsets": [rows[name], *[0] * (tensor.ndim - 1)]}
        for name, tensor in tensors.items()
    }
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        pieces: list[Any] = [
            t.view(-1).view(torch.uint8).numpy() for t in tensors.values()
        ]  # their memory: no copy
        for piece in (len(text).to_bytes(8, "little"), text, *pieces):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}
