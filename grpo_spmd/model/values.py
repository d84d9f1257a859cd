"""The critic's model: the decoder of a causal LM or a classifier with a head of one number a token, sharded as the
policy is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import VALUE_HEADS, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout, choose_backend
from grpo_spmd.model.config_json import head_dim
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.logits import fix_rotary_factors
from grpo_spmd.model.families.refusals import (
    refuse_structure,
    refuse_untrainable,
    stored_names,
    trainable_config,
)
from grpo_spmd.model.hf_files import checkpoint_folder, tensor_files
from grpo_spmd.model.policy import DTYPES, Policy, load_weights, set_up_layer
from grpo_spmd.model.sharding import first_row, shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")


class ValueModel(nn.Module):
    """What the rest of a completion is worth, at the places from which its tokens are predicted. `forward` is the only
    door."""

    def __init__(self, decoder: Any, hidden_size: int, attention: Backend) -> None:
        super().__init__()
        self.backbone, self.attention = decoder, attention
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Values [C] of the states before `batch.target_ids`, float32."""
        layout = PackedLayout(batch.sequence_lengths, batch.input_ids.device, self.attention)
        row = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        out = self.backbone(**row, use_cache=False, packed_layout=layout)
        values: Tensor = self.head(out.last_hidden_state[0][batch.predict_index].float())[
            :, 0
        ].clone()
        return values

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Values [S, L] of rows of one sequence each, by HF's own forward pass: for proofs/."""
        hidden = self.backbone(input_ids=token_ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden.float())[..., 0].clone()
        return values


def build_value_model(
    path: str, config: ModelConfig, session: Session, longest: int, num_tokens: int
) -> ValueModel:
    """Collective. The model of `path`, float32 and sharded; dtype, attention and what is recomputed are as `config` has
    it of the policy. Its head is the checkpoint's, or zero where that has none: then the first advantages are the
    rewards. Raises ConfigError under critic.path; `longest`: tokens of a rollout, `num_tokens`: the policy's ids."""
    try:
        return _build(path, config, session, longest, num_tokens)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.path:", "critic.path:", 1)) from error


def _build(
    path: str, config: ModelConfig, session: Session, longest: int, num_tokens: int
) -> ValueModel:
    refuse_untrainable(path, longest, is_policy=False)
    hf_config, compute = trainable_config(path, longest, is_policy=False), DTYPES[config.dtype]
    if hf_config.get_text_config().vocab_size < num_tokens:
        sizes = f"knows {hf_config.get_text_config().vocab_size} tokens, the policy {num_tokens}"
        raise ConfigError(f"model.path: {path} {sizes}; the critic needs the policy's vocabulary")
    capped = getattr(hf_config, "attn_logit_softcapping", None) is not None
    attention = choose_backend(
        config.attention, session.device, compute, head_dim(hf_config), capped=capped
    )
    with torch.device("meta"):
        whole = build_hf_model(
            hf_config, path, attn_implementation=PACKED_ATTENTION, dtype=torch.float32
        )
        model = ValueModel(
            whole.get_decoder(), whole.get_output_embeddings().weight.shape[1], attention
        )
    refuse_structure(whole, path)
    layers, folder = decoder_layers(whole), checkpoint_folder(path)
    prefix = next(name for name, module in whole.named_modules() if module is model.backbone) + "."
    stored_as = stored_names(whole, tensor_files(folder))
    for layer in layers:
        set_up_layer(layer, config.activation_checkpointing, config.compile)
    # Alone and in float32: one number is all that it gives, and bfloat16 would round that to 3 digits.
    fully_shard(
        model.head, mesh=session.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
    )
    shard_over_ranks(model, layers, session.mesh, compute, reshard_root=False)
    register_fsdp_forward_method(model, "plain_values")
    model.to_empty(device=session.device)
    initialise_buffers(whole)
    fix_rotary_factors(model.backbone, longest)
    load_weights(
        ((stored_as.get(name, name), p) for name, p in _named(model.backbone, prefix)), folder
    )
    how = _fill_head(model.head, folder)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    _log.info("critic: %s, %.1f M parameters, %s", type(model.backbone).__name__, size, how)
    return model


def _named(module: nn.Module, prefix: str) -> Iterator[tuple[str, DTensor]]:
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor), name
        yield prefix + name, parameter


@torch.no_grad()
def _fill_head(head: nn.Linear, folder: Path) -> str:
    """From the checkpoint, or with zeros; says which."""
    files = tensor_files(folder)
    name = next((name for name in VALUE_HEADS if f"{name}.weight" in files), None)
    for kind, parameter in _named(head, ""):
        local, first = parameter.to_local(), first_row(parameter)
        local.zero_()
        if name is None or f"{name}.{kind}" not in files:
            continue
        with safe_open(files[f"{name}.{kind}"], framework="pt") as file:
            stored = file.get_slice(f"{name}.{kind}")
            if (found := list(stored.get_shape())) != list(parameter.shape):
                rule = f"{name}.{kind} has shape {found} in {folder}, and a value head {list(parameter.shape)}"
                raise ConfigError(f"model.path: {rule}")
            local.copy_(stored[first : first + len(local)])
    return f"value head {name} of {folder}" if name is not None else "a value head of zeros"


# A critic on the policy's own layers: a head of one number a token over its last hidden states.


class PolicyValues(nn.Module):
    """The head, float32 and zero at first, and the policy below it, whose parameters are not its own."""

    def __init__(self, policy: Policy, session: Session) -> None:
        """Collective."""
        super().__init__()
        self._policy = (policy,)  # in a tuple nn.Module does not find it
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, device=session.device)
        with torch.no_grad():
            for parameter in self.head.parameters():
                parameter.zero_()
        # Gathered again by each pass: a pass without a backward pass would leave it gathered, and stale behind a step.
        shard_over_ranks(self.head, (), session.mesh, torch.float32, reshard_root=True)
        _log.info(
            "critic: a value head on the policy's own layers, %d parameters, of zeros", width + 1
        )

    @property
    def policy(self) -> Policy:
        return self._policy[0]

    @property
    def backbone(self) -> Any:
        return self.policy.model.get_decoder()

    def term(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Collective. Values, float32 [C], of hidden states [C, D] of the policy: a Term of its forward pass."""
        values: Tensor = self.head(hidden.float())[:, 0].clone()
        return values

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Values [C] of the states before `batch.target_ids`, with a gradient for the head alone."""
        with torch.no_grad():
            (hidden,) = self.policy(batch, lambda hidden, _: hidden, only_term=True)
        return self.term(hidden, hidden)

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Values [S, L] of rows of one sequence each, by HF's own forward pass: for proofs/."""
        with plain_states(self.policy) as states:
            self.policy.plain_logits(
                token_ids, torch.zeros(1, dtype=torch.int64, device=token_ids.device)
            )
        values: Tensor = self.head(states[0].float())[..., 0].clone()
        return values

    def reshard(self) -> None:
        cast(FSDPModule, self.policy).reshard()


@contextmanager
def plain_states(policy: Policy) -> Iterator[list[Tensor]]:
    """What the decoder gives to the lm_head [S, L, D] in each of the passes within."""
    states: list[Tensor] = []
    handle = policy.model.get_decoder().register_forward_hook(
        lambda *a: states.append(a[-1].last_hidden_state)
    )
    try:
        yield states
    finally:
        handle.remove()
