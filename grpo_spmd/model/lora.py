"""LoRA: trained low-rank adapters on a frozen base. Layers and files are peft's; sharding and sending are ours.

An adapted layer computes x W^T + (alpha / rank) (x A^T) B^T, with A [rank, in] and B [out, rank]. W stays as it was
read: the engine gets W + (alpha / rank) B A, computed on the shards as they are sent, or W once and then A and B
(`model.lora.sync`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoraConfig
from grpo_spmd.model.families.build import build_hf_model, decoder_layers
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.sharding import gather_rows

# A tensor's name, its sharded parameter, and a call that gives this rank's shard of the values to send.
Shard = tuple[str, DTensor, Callable[[], Tensor]]


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Put peft's layers around those that `target_modules` gives; freeze all but the adapters, which are float32."""
    import peft

    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha
    size: dict[str, Any] = {
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
    }  # the engine has no dropout
    peft_config = peft.LoraConfig(
        **size, target_modules=target_modules(model, config), task_type="CAUSAL_LM"
    )
    peft.inject_adapter_in_model(peft_config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for layer in adapted_layers(model).values():
        layer.lora_A.float()
        layer.lora_B.float()


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """A as peft makes it (Kaiming), from `seed` and its name alone on any number of ranks; B zero, so that the policy
    starts as the base. The global random state is not touched."""
    for name, parameter in named_adapters(model):
        full = torch.zeros(parameter.shape)
        if name.endswith("lora_A.weight"):
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        # src_data_rank=None: every rank has the whole and takes its own rows, nothing is sent
        own = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(own.to_local())


def target_modules(model: Any, config: LoraConfig) -> list[str]:
    """`config.target_modules`, or for "all-linear" the last parts of the names of the decoder's linear layers. Raises
    ConfigError where a name matches none of them."""
    layers = [
        name
        for name, module in decoder_layers(model).named_modules()
        if isinstance(module, nn.Linear)
    ]
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if config.target_modules == "all-linear":
        return known
    for target in config.target_modules or [""]:
        if not any(f".layers.{name}".endswith(f".{target}") for name in layers):
            raise ConfigError(
                f"model.lora.target_modules: {target!r} names no linear layer of {type(model).__name__}'s decoder; it "
                f"has {', '.join(known)} (the embedding and the lm_head get no adapter)"
            )
    return list(config.target_modules)


def engine_target_modules(path: str, config: LoraConfig) -> list[str]:
    """Last parts of the names of the layers that get an adapter, for an engine that starts before the policy."""
    with torch.device("meta"):
        model = build_hf_model(load_config(path), path)
    return [target.rpartition(".")[2] for target in target_modules(model, config)]


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def hf_name(name: str) -> str:
    """The name in an HF checkpoint of a base parameter, which peft has moved into its layer."""
    return name.replace(".base_layer.", ".")


def adapted_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by the HF name of the layer that they adapt."""
    from peft.tuners.lora import LoraLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def named_adapters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Sharded adapters as LAYER.lora_A.weight and LAYER.lora_B.weight, in one order on all ranks."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert isinstance(parameter, DTensor), name
            yield (
                name.replace(".default.", "."),
                parameter,
            )  # peft's name for the one adapter of a layer


def adapter_shards(model: nn.Module, config: LoraConfig) -> Iterator[Shard]:
    """What an engine with adapters must hold: A, and B times alpha / rank, so that the product is rounded once."""
    for name, parameter in named_adapters(model):
        is_b = name.endswith("lora_B.weight")
        yield (
            name,
            parameter,
            partial(_scaled, parameter, config.alpha / config.rank if is_b else 1.0),
        )


def merged_shards(
    model: nn.Module, config: LoraConfig, base: Iterator[tuple[str, DTensor]]
) -> Iterator[Shard]:
    """Collective: one all-gather of all A, when the first is drawn. Base parameters; the call gives this rank's rows of
    W + (alpha / rank) B A, in a float32 tensor of their own: W keeps every bit. FSDP deals rows of B as those of W."""
    adapters, scale = dict(named_adapters(model)), config.alpha / config.rank
    shards_a: list[Shard] = [
        (name, p, p.to_local) for name, p in adapters.items() if name.endswith("lora_A.weight")
    ]
    full_a = gather_adapters(shards_a, torch.float32)
    for name, parameter in base:
        a, b = (f"{name.removesuffix('weight')}lora_{which}.weight" for which in "AB")
        merged = (
            partial(_merged, parameter, adapters[b], full_a[a], scale)
            if a in full_a
            else parameter.to_local
        )
        yield name, parameter, merged


@torch.no_grad()
def gather_adapters(shards: list[Shard], dtype: torch.dtype) -> dict[str, Tensor]:
    """Collective: one all-gather. The full tensors [rows, columns] of these shards, cast to `dtype` on the shard."""
    full = gather_rows((parameter, shard().to(dtype)) for _, parameter, shard in shards)
    return {name: tensor for (name, *_), tensor in zip(shards, full, strict=True)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Within it the model computes with its base alone. (peft's own switch would also turn off requires_grad of the
    adapters, which FSDP manages.)"""
    layers = adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_peft_config(model: Any, base_model: str, folder: Path) -> None:
    """adapter_config.json: with adapter_model.safetensors beside it, peft and vLLM load the folder."""
    values = {
        **model.peft_config["default"].to_dict(),
        "base_model_name_or_path": base_model,
        "inference_mode": True,
    }
    values["target_modules"] = sorted(
        values["target_modules"]
    )  # a set, whose order changes from run to run
    (folder / "adapter_config.json").write_text(json.dumps(values, indent=2, sort_keys=True))


def _scaled(parameter: DTensor, scale: float) -> Tensor:
    local = parameter.to_local().detach()
    return local if scale == 1.0 else local * scale


def _merged(base: DTensor, lora_b: DTensor, full_a: Tensor, scale: float) -> Tensor:
    return torch.addmm(base.to_local().float(), lora_b.to_local().detach(), full_a, alpha=scale)
