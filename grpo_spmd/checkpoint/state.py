"""The tensors of a checkpoint, and one rank's file of them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def state_tensors(policy: Policy, updater: PolicyUpdater) -> dict[str, DTensor]:
    """What trains, and its moments once there are any, by their names in a checkpoint."""
    tensors: dict[str, DTensor] = {}
    for name, parameter in trained_parameters(policy).items():
        tensors[f"policy.{name}"] = parameter
        for moment in MOMENTS:
            if moment in updater.optimizer.state.get(parameter, {}):
                tensors[f"{moment}.{name}"] = updater.optimizer.state[parameter][moment]
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
    """Write this rank's rows [rows, ...] of each tensor as safetensors, with the place of the first one; sync;
    {"bytes", "sha256"}.

    Tensor by tensor and straight from their memory: safetensors' own writer would first make a copy of them all.
    """
    header: dict[str, Any] = {}
    offsets = {name: {"saved_offsets": [rows[name], *[0] * (tensor.ndim - 1)]} for name, tensor in tensors.items()}
    header["__metadata__"] = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(offsets)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for piece in (len(text).to_bytes(8, "little"), text, *map(_bytes_of, tensors.values())):
            file.write(piece)
            digest.update(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": 8 + len(text) + end, "sha256": digest.hexdigest()}


def _bytes_of(tensor: Tensor) -> Any:
    """Its memory as a buffer: no copy."""
    return tensor.view(-1).view(torch.uint8).numpy()
