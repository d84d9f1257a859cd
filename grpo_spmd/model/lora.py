"""LoRA: trained low-rank adapters on a frozen base, with peft's layers and files, sharded by FSDP2.

An adapted layer computes x W^T + (alpha / rank) (x A^T) B^T, with A [rank, in] and B [out, rank]. W
never changes. The engine gets W + (alpha / rank) B A, computed on the shards as they are sent, or W
once and then A and B alone: the config's key model.lora.sync chooses."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoraConfig
from grpo_spmd.model.config_json import has_recurrent_layers
from grpo_spmd.model.families.build import build_on_meta, decoder_layers, is_mixture
from grpo_spmd.model.sharding import gather_rows


class Shard(NamedTuple):
    """Describes a tensor to send to the engine or to gather, and computes this rank's rows of
    it."""

    name: str
    parameter: DTensor
    local_rows: Callable[[], Tensor]
    """Computes this rank's rows of the values to send."""


def add_adapters(model: Any, config: LoraConfig) -> None:
    """Wraps the target modules in peft's LoRA layers, and freezes all parameters except the
    adapters, which are float32."""
    import peft

    alpha: Any = int(config.alpha) if config.alpha.is_integer() else config.alpha
    peft_config = peft.LoraConfig(
        r=config.rank,
        lora_alpha=alpha,
        # The engine has no dropout, and would sample from another distribution.
        lora_dropout=0.0,
        target_modules=target_modules(model, config),
        task_type="CAUSAL_LM",
    )
    peft.inject_adapter_in_model(peft_config, model)
    # Set it here, whatever peft does: nothing of the base may train, nor its embedding and norms.
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    for layer in _adapted_layers(model):
        layer.lora_A.float()
        layer.lora_B.float()


@torch.no_grad()
def initialise_adapters(model: nn.Module, seed: int) -> None:
    """Fills each A as peft does (Kaiming), and each B with zeros, so that the policy starts as the
    base model.

    The values of an A depend only on `seed` and its name, not on the number of ranks. The global
    random state is not touched."""
    for name, parameter in named_adapters(model):
        full = torch.zeros(parameter.shape)
        if name.endswith("lora_A.weight"):
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        # src_data_rank=None: every rank has the whole and takes its own rows; nothing is sent.
        sharded = distribute_tensor(
            full, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
        parameter.to_local().copy_(sharded.to_local())


def target_modules(model: Any, config: LoraConfig) -> list[str]:
    """Returns `config.target_modules`; for "all-linear" the last parts of all linear layers' names.

    Raises ConfigError if a name matches no linear layer of the decoder."""
    layers = [
        name
        for name, module in decoder_layers(model).named_modules()
        if isinstance(module, nn.Linear)
    ]
    # A name without the path matches the layer in every decoder block.
    layer_names = list(dict.fromkeys(name.rpartition(".")[2] for name in layers))
    if config.target_modules == "all-linear":
        return layer_names
    for target in config.target_modules or [""]:
        if not any(f".layers.{name}".endswith(f".{target}") for name in layers):
            raise ConfigError(
                f"model.lora.target_modules: {target!r} names no linear layer of "
                f"{type(model).__name__}'s decoder; it has {', '.join(layer_names)} (embedding "
                "and lm_head get no adapter)"
            )
    return list(config.target_modules)


def engine_target_modules(path: str, config: LoraConfig) -> list[str]:
    """Returns the last parts of the names of the layers that get an adapter, as an option of vLLM.

    The engine starts before the policy is built, so the model is built here on the meta device.
    Raises ConfigError for a model with experts or recurrent layers, whose adapters must be merged
    into the weights that the engine gets."""
    model = build_on_meta(path)
    if is_mixture(model) or has_recurrent_layers(model.config.to_dict()):
        raise ConfigError(
            f"model.lora.sync: adapter, but {path} has experts or recurrent layers, which vLLM "
            "wraps for adapters of their own; set merged"
        )
    return [target.rpartition(".")[2] for target in target_modules(model, config)]


def is_adapter(name: str) -> bool:
    """Returns True if a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def hf_name(name: str) -> str:
    """Returns the name that a base parameter has in an HF checkpoint. peft puts ".base_layer" into
    the names of the layers that it wraps."""
    return name.replace(".base_layer.", ".")


def base_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters without adapters by HF name, a tied lm_head under both its names."""
    return {
        hf_name(name): parameter
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not is_adapter(name)
    }


def _adapted_layers(model: nn.Module) -> list[Any]:
    """Returns peft's layers, in one order on all ranks."""
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def named_adapters(model: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Yields (name, sharded parameter) of all A and B, named LAYER.lora_A.weight and
    LAYER.lora_B.weight, in the same order on all ranks."""
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            assert isinstance(parameter, DTensor), name
            # peft calls the one adapter of a layer "default".
            yield name.replace(".default.", "."), parameter


def adapter_shards(model: nn.Module, config: LoraConfig) -> Iterator[Shard]:
    """Yields the adapters that an engine must hold beside the base: A, and B times alpha / rank.

    The factor is multiplied into B so that the product B A is rounded once."""

    def local_rows(parameter: DTensor, scale: float) -> Tensor:
        """Computes this rank's rows of the scaled matrix."""
        return parameter.to_local().detach() * scale

    for name, parameter in named_adapters(model):
        scale = config.alpha / config.rank if name.endswith("lora_B.weight") else 1.0
        yield Shard(name, parameter, partial(local_rows, parameter, scale))


def merged_shards(
    model: nn.Module, config: LoraConfig, base: Iterator[tuple[str, DTensor]]
) -> Iterator[Shard]:
    """Collective: one all-gather of all A, when the first shard is drawn. Yields all weights of the
    base as shards. If a layer has an adapter, the adapter is merged into its weight.

    A merged shard's `local_rows` computes this rank's rows of W + (alpha / rank) B A in a new
    float32 tensor, so that the stored W does not change. FSDP shards B by rows just as W."""
    adapters = dict(named_adapters(model))
    scale = config.alpha / config.rank
    full_a = gather_adapters(
        [
            Shard(name, parameter, parameter.to_local)
            for name, parameter in adapters.items()
            if name.endswith("lora_A.weight")
        ],
        torch.float32,
    )

    def local_rows(weight: DTensor, lora_b: DTensor, lora_a: Tensor) -> Tensor:
        """Computes this rank's rows of the merged weight."""
        rows_b = lora_b.to_local().detach()
        return torch.addmm(weight.to_local().float(), rows_b, lora_a, alpha=scale)

    for name, parameter in base:
        layer = name.removesuffix("weight")
        lora_a = full_a.get(f"{layer}lora_A.weight")
        if lora_a is None:
            yield Shard(name, parameter, parameter.to_local)
        else:
            lora_b = adapters[f"{layer}lora_B.weight"]
            yield Shard(name, parameter, partial(local_rows, parameter, lora_b, lora_a))


@torch.no_grad()
def gather_adapters(shards: list[Shard], dtype: torch.dtype) -> dict[str, Tensor]:
    """Collective: one all-gather. Returns the full matrices by name. Each rank casts its rows to
    `dtype` before they are sent."""
    full = gather_rows((shard.parameter, shard.local_rows().to(dtype)) for shard in shards)
    return {shard.name: tensor for shard, tensor in zip(shards, full, strict=True)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Makes the model compute with its base alone inside the block.

    peft's own switch would also turn off requires_grad of the adapters, which FSDP manages."""
    layers = _adapted_layers(model)
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def adapters_at_zero(model: nn.Module) -> Iterator[None]:
    """Makes all adapters add 0 inside the block.

    The model then computes what the base alone does, by other code than with `adapters_off`: a
    proof can compare the two."""
    scales = [(layer.scaling, dict(layer.scaling)) for layer in _adapted_layers(model)]
    try:
        for scaling, values in scales:
            scaling.update(dict.fromkeys(values, 0.0))
        yield
    finally:
        for scaling, values in scales:
            scaling.update(values)


def write_peft_config(model: Any, base_model: str, folder: Path) -> None:
    """Writes adapter_config.json into `folder`.

    peft and vLLM can load a folder that has it and adapter_model.safetensors. `base_model` is the
    folder or hub id of the base."""
    config = model.peft_config["default"].to_dict()
    config |= {
        "base_model_name_or_path": base_model,
        "inference_mode": True,
    }
    # peft has sets, whose order changes from run to run.
    config = {key: sorted(v) if isinstance(v, set) else v for key, v in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
