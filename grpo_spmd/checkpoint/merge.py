"""The base model with a checkpoint's adapters in its weights, as a plain model in Hugging Face's
format. Tensor by tensor and rows at a time: one process, and memory for one output file, as every
export."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from grpo_spmd.checkpoint.export import (
    FILE_BYTES,
    READ_BYTES,
    Readable,
    StoredTensor,
    complete_or_absent,
    empty_tensor,
    save_model,
    stored_tensors,
)
from grpo_spmd.checkpoint.manifest import CheckpointError, read_trainer
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.files import Rule, check_fields, read_json, regular_files, whole_number

if TYPE_CHECKING:
    from torch import Tensor

_ADAPTER = {
    "r": whole_number(1, 2**20),
    "lora_alpha": Rule(
        "a number above 0", lambda value: type(value) in (int, float) and 0 < value < 1e9
    ),
    **dict.fromkeys(
        ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern"),
        Rule("off", lambda value: not value),
    ),
}


@dataclass(frozen=True)
class _Merged:
    """W + scale B A for a tensor W of the base; W itself if `adapter`, (A, B), is None."""

    file: Path
    name: str
    shape: tuple[int, ...]
    adapter: tuple[StoredTensor, StoredTensor] | None
    scale: float

    def read(self, dtype: str) -> Tensor:
        """Returns the sum, computed in float32 and rounded once."""
        merged = empty_tensor(self.shape, dtype)
        a, b = (tensor.read("float32") for tensor in self.adapter) if self.adapter else (None, None)
        row_elements = max(1, merged.numel() // max(1, len(merged)))
        rows_at_a_time = max(1, READ_BYTES // (4 * row_elements))
        for row in range(0, len(merged), rows_at_a_time):
            part = slice(row, row + rows_at_a_time)
            # Opened each time: the pages of a mapping count as resident memory until it is closed.
            with safe_open(self.file, framework="pt") as file:
                rows = file.get_slice(self.name)[part].float()
                if a is not None and b is not None:
                    rows = rows.addmm(b[part], a, alpha=self.scale)
                merged[part] = rows
        return merged


def export_merged(
    checkpoint: Path,
    out: Path,
    dtype: str | None = None,
    base: Path | None = None,
    max_file_bytes: int = FILE_BYTES,
) -> None:
    """Write the base model plus the adapters of `checkpoint` to `out`, as export_checkpoint writes
    a model, and with its errors. `base`: where the base model is now; None: where the run had it.
    Raises ConfigError where the checkpoint has no adapters, or the base is not to be found or is
    another model."""
    trainer = read_trainer(checkpoint, ("world_size", "config", "dtype", "model_path"))
    regular_files(checkpoint)  # raises where a link leads out of it
    adapter_config = checkpoint / "model" / "adapter_config.json"
    if not adapter_config.is_file():
        raise ConfigError(
            f"--merge: {checkpoint} holds a whole model and no adapters; leave --merge out"
        )
    folder = _base_folder(str(base or trainer["model_path"]))
    _check_is_base(folder, trainer.get("model_fingerprint"), checkpoint)
    values = read_json(adapter_config)
    check_fields(values, _ADAPTER, adapter_config, ("r", "lora_alpha"))
    tensors = _merged_tensors(
        folder, stored_tensors(checkpoint, trainer), values["lora_alpha"] / values["r"], checkpoint
    )
    with complete_or_absent(out, into_existing=False) as temporary:
        copy_companions(folder, temporary)
        save_model(tensors, temporary, dtype or str(trainer["dtype"]), max_file_bytes)


def copy_companions(model: Path, folder: Path) -> None:
    """Copies the files beside the weights of a model: config, tokenizer, templates."""
    for path in model.iterdir():
        # The model's folder may be another run's checkpoint, whose own two files would hide this
        # one's.
        is_state = path.name.endswith(".index.json") or path.name in (
            "manifest.json",
            "trainer.json",
        )
        is_companion = path.suffix in (".json", ".txt", ".model", ".jinja") and not is_state
        if path.is_file() and is_companion:
            shutil.copyfile(path, folder / path.name)


def _base_folder(path: str) -> Path:
    from huggingface_hub.errors import HfHubHTTPError

    from grpo_spmd.model.hf_files import checkpoint_folder

    try:
        return checkpoint_folder(path)
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"--merge: the base model {path} is not to be found (it is no folder here, "
            f"and the hub gives none: {type(error).__name__}); name it with --base"
        ) from None


def _check_is_base(folder: Path, fingerprint: str | None, checkpoint: Path) -> None:
    from grpo_spmd.checkpoint.state import model_fingerprint

    if fingerprint and model_fingerprint(folder) != fingerprint:
        raise ConfigError(
            f"--merge: {folder} holds another model than the adapters of {checkpoint} "
            "were trained on; "
            "name the right one with --base"
        )


def _merged_tensors(
    folder: Path, adapters: dict[str, StoredTensor], scale: float, checkpoint: Path
) -> dict[str, Readable]:
    """By the names of the policy's parameters, a tied lm_head once. Raises CheckpointError where an
    adapter belongs to none of them."""
    import torch

    from grpo_spmd.model.families.build import build_hf_model
    from grpo_spmd.model.hf_files import load_config, tensor_files

    with torch.device("meta"):
        model = build_hf_model(load_config(str(folder)), str(folder))
    files = tensor_files(folder)
    tensors: dict[str, Readable] = {}
    num_used = 0
    for name, parameter in model.named_parameters():
        layer = name.removesuffix("weight")
        a = adapters.get(f"{layer}lora_A.weight")
        b = adapters.get(f"{layer}lora_B.weight")
        shape = tuple(parameter.shape)
        if name not in files:
            raise ConfigError(f"--merge: {folder} has no tensor {name}")
        pair = (a, b) if a is not None and b is not None else None
        if pair is not None and (pair[1].shape[0], pair[0].shape[1], pair[0].shape[0]) != (
            *shape,
            pair[1].shape[1],
        ):
            raise CheckpointError(
                f"{checkpoint}: the adapter of {name} does not have the shape for {list(shape)}"
            )
        num_used += 2 if pair is not None else 0
        tensors[name] = _Merged(files[name], name, shape, pair, scale)
    if num_used != len(adapters):
        raise CheckpointError(
            f"{checkpoint}: {len(adapters) - num_used} tensors of adapters belong to no layer "
            f"of {folder}"
        )
    return tensors
