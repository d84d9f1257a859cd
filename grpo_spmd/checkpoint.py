"""Weights on disk in HF's format: complete or absent, never half."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from grpo_spmd.config import Config, ModelConfig
from grpo_spmd.distributed import Session, barrier
from grpo_spmd.lora import gather_adapters, named_adapters, write_peft_config
from grpo_spmd.policy import DTYPES, Policy, checkpoint_folder
from grpo_spmd.weight_sync import SyncStats, gather_full_tensors

_log = logging.getLogger("grpo_spmd")
_FILE_BYTES = 2 << 30
_BUCKET_BYTES = 16 << 20


def save_weights_if_due(policy: Policy, config: Config, num_finished_steps: int, session: Session) -> None:
    """Collective. At the end of the run and each `checkpoint.every_steps`: save weights or adapters; keep the newest `checkpoint.keep`."""
    every = config.checkpoint.every_steps
    if num_finished_steps == config.training.num_steps or (every and num_finished_steps % every == 0):
        folder = Path(config.run_dir) / "checkpoints" / f"step_{num_finished_steps:06d}"
        save = save_adapters if policy.lora.rank else save_weights
        save(policy, config.model, folder, session)
        if session.is_rank0:
            _remove_old(folder.parent, config.checkpoint.keep)


def save_weights(policy: Policy, model: ModelConfig, folder: Path, session: Session) -> None:
    """Collective. Write `folder`: a model that transformers and vLLM load, in the compute dtype.

    Rank 0 writes, one file of at most about 2 GiB in memory at a time.
    """
    weight_map: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    total = 0
    with _complete_or_absent(folder, session) as temporary:

        def write_file() -> None:
            name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            weight_map.update(dict.fromkeys(pending, name))
            save_file(pending, temporary / name, metadata={"format": "pt"})
            pending.clear()

        for name, tensor in gather_full_tensors(policy, DTYPES[model.dtype], _BUCKET_BYTES, SyncStats()):
            if not session.is_rank0:
                continue
            size = tensor.numel() * tensor.element_size()
            if pending and sum(t.numel() * t.element_size() for t in pending.values()) + size > _FILE_BYTES:
                write_file()
            pending[name] = tensor.cpu()
            total += size
        if session.is_rank0:
            write_file()
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
            _copy_companions(checkpoint_folder(model.path), temporary, model.dtype)


def save_adapters(policy: Policy, model: ModelConfig, folder: Path, session: Session) -> None:
    """Collective. Write `folder`: the adapters alone, in float32, in the format that peft and vLLM load on top of `model.path`."""
    with _complete_or_absent(folder, session) as temporary:
        adapters = gather_adapters([(name, p, p.to_local) for name, p in named_adapters(policy.model)], torch.float32)
        if session.is_rank0:
            named = {f"base_model.model.{name}": tensor.cpu() for name, tensor in adapters.items()}
            save_file(named, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
            write_peft_config(policy.model, model.path, temporary)


@contextmanager
def _complete_or_absent(folder: Path, session: Session) -> Iterator[Path]:
    """Collective. A folder for rank 0 to write into, which gets its name when everything is on disk, and goes if anything failed."""
    temporary = folder.with_name(folder.name + ".tmp")
    if session.is_rank0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    try:
        yield temporary
        if session.is_rank0:
            _sync_to_disk(temporary)
            temporary.rename(folder)
            _sync_path(folder.parent)
    except BaseException:
        if session.is_rank0:  # half a checkpoint would only keep a full disk full
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    barrier()  # no rank goes on as if it were saved before it is


def _copy_companions(source: Path, target: Path, dtype: str) -> None:
    """Config, tokenizer and generation config: all that is not weights."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2))


def _sync_to_disk(folder: Path) -> None:
    for path in folder.iterdir():
        _sync_path(path)
    _sync_path(folder)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, keep: int) -> None:
    for old in sorted(p for p in folder.glob("step_*") if p.suffix != ".tmp")[:-keep]:
        try:
            shutil.rmtree(old)
        except OSError as error:
            _log.warning("checkpoint.keep: could not remove %s: %s", old, error.strerror)
