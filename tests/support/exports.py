"""Checkpoints written by hand, for the tests of the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_spmd.checkpoint.manifest import write_manifest

COMPANIONS = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def write_state(folder: Path, tensors: dict[str, Tensor], num_ranks: int) -> None:
    """Row shards as FSDP deals them, written by safetensors' own writer: an empty share is not
    written."""
    folder.mkdir(parents=True)
    for rank in range(num_ranks):
        rows, offsets = {}, {}
        for name, tensor in tensors.items():
            chunks = tensor.chunk(num_ranks)
            if rank < len(chunks):
                rows[name] = chunks[rank].contiguous()
                offsets[name] = {"saved_offsets": [rank * len(chunks[0]), *[0] * (tensor.ndim - 1)]}
        if rows:
            save_file(
                rows,
                folder / f"shard_{rank + 1:05d}.safetensors",
                metadata={"DCP_SHARDING_INFO": json.dumps(offsets)},
            )


def finish(checkpoint: Path, num_ranks: int, **changes: Any) -> Path:
    """trainer.json and manifest.json."""
    trainer = {
        "format": 1,
        "step": 7,
        "dtype": "bfloat16",
        "world_size": num_ranks,
        "config": {"model.num_replicas": 1},
        **changes,
    }
    (checkpoint / "trainer.json").write_text(json.dumps(trainer))
    write_manifest(checkpoint, {})
    return checkpoint


def weights_of(model: Path) -> dict[str, Tensor]:
    """A model's tensors as transformers saved them (a tied lm_head is none of them)."""
    return load_file(model / "model.safetensors")


def make_checkpoint(folder: Path, model: Path, num_ranks: int, **changes: Any) -> Path:
    weights = weights_of(model)
    state = {f"policy.{name}": tensor for name, tensor in weights.items()}
    state |= {f"exp_avg.{name}": torch.full_like(tensor, 9.0) for name, tensor in weights.items()}
    write_state(folder / "state", state, num_ranks)
    (folder / "model").mkdir()
    for name in COMPANIONS:
        if (model / name).exists():
            shutil.copy(model / name, folder / "model")
    return finish(folder, num_ranks, **changes)
