"""Builds the critic: a separate decoder with a value head, or a head on the policy's layers.

A value is an estimate of the reward to come, at one token of a completion. A value head turns a
hidden state into a value."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import VALUE_HEADS, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.logits import fix_rotary_factors
from grpo_spmd.model.families.refusals import refuse_untrainable, stored_names, trainable_config
from grpo_spmd.model.hf_files import checkpoint_folder, tensor_files
from grpo_spmd.model.policy import DTYPES, Policy, attention_backend, load_weights, set_up_layer
from grpo_spmd.model.reward_model_files import errors_about
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")


class ValueModel(nn.Module):
    """A decoder that estimates the value of the rest of a completion at each of its tokens.

    Call it only through `forward` and `plain_values`, where FSDP gathers its parameters."""

    def __init__(self, decoder: Any, hidden_size: int, attention: Backend) -> None:
        super().__init__()
        self.backbone = decoder
        self.attention = attention
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Returns values [C] of the states before `batch.target_ids`, float32."""
        layout = PackedLayout(batch.sequence_lengths, batch.input_ids.device, self.attention)
        states = self.backbone(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed_layout=layout,
        )
        return _head_values(self.head, states.last_hidden_state[0][batch.predict_index])

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns values [S, L] of rows of one sequence each, by HF's forward pass."""
        states = self.backbone(input_ids=token_ids, use_cache=False)
        return _head_values(self.head, states.last_hidden_state)


def _head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    values: Tensor = head(hidden.float())[..., 0].clone()
    return values


@errors_about("critic.path")
def build_value_model(
    path: str, config: ModelConfig, session: Session, max_rollout_tokens: int, num_tokens: int
) -> ValueModel:
    """Collective. Returns the critic of `path`, float32 and sharded.

    dtype, attention and recomputation are those of the policy's `config`. Its head is the
    checkpoint's, or zero if that has none: then the first advantages are the rewards.
    `max_rollout_tokens` bounds a rollout's tokens, `num_tokens` is the number of the policy's token
    ids. Raises ConfigError, which names critic.path."""
    refuse_untrainable(path, max_rollout_tokens, is_policy=False)
    hf_config = trainable_config(path, max_rollout_tokens, is_policy=False)
    vocabulary = hf_config.get_text_config().vocab_size
    if vocabulary < num_tokens:
        raise ConfigError(
            f"model.path: {path} knows {vocabulary} tokens, the policy {num_tokens}; the critic "
            "needs the policy's vocabulary"
        )
    attention = attention_backend(hf_config, config, session)
    with torch.device("meta"):
        hf_model = build_hf_model(
            hf_config, path, attn_implementation=PACKED_ATTENTION, dtype=torch.float32
        )
        hidden_size = hf_model.get_output_embeddings().weight.shape[1]
        model = ValueModel(hf_model.get_decoder(), hidden_size, attention)
    layers = decoder_layers(hf_model)
    folder = checkpoint_folder(path)
    files = tensor_files(folder)
    names_on_disk = stored_names(hf_model, files)
    for layer in layers:
        set_up_layer(layer, config.activation_checkpointing, config.compile)
    # The head computes alone and in float32: bfloat16 would round its one number to 3 digits.
    fully_shard(
        model.head, mesh=session.mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
    )
    shard_over_ranks(model, layers, session.mesh, DTYPES[config.dtype], reshard_root=False)
    register_fsdp_forward_method(model, "plain_values")
    model.to_empty(device=session.device)
    initialise_buffers(hf_model)
    fix_rotary_factors(model.backbone, max_rollout_tokens)
    prefix = next(name for name, module in hf_model.named_modules() if module is model.backbone)
    load_weights(model.backbone.named_parameters(prefix), folder, names_on_disk)
    head_name = next((name for name in VALUE_HEADS if f"{name}.weight" in files), None)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    if head_name is not None:
        # A checkpoint's head may have no bias.
        stored = [pair for pair in model.head.named_parameters(head_name) if pair[0] in files]
        load_weights(stored, folder)
    _log.info(
        "critic: %s, %.1f M parameters, %s",
        type(model.backbone).__name__,
        sum(parameter.numel() for parameter in model.parameters()) / 1e6,
        f"value head {head_name} of {folder}" if head_name else "a value head of zeros",
    )
    return model


class PolicyValues(nn.Module):
    """A value head on the policy's last hidden states: a critic without layers of its own.

    The head is float32 and zero at first. The policy's parameters are not this module's."""

    policy: Policy

    def __init__(self, policy: Policy, session: Session) -> None:
        """Collective. Adds a head of zeros to `policy`."""
        super().__init__()
        # Set so, nn.Module does not register it as a child.
        object.__setattr__(self, "policy", policy)
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, device=session.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Each pass gathers it again: a pass without a backward pass would leave it gathered, and
        # stale after a step.
        shard_over_ranks(self.head, (), session.mesh, torch.float32, reshard_root=True)
        _log.info(
            "critic: a value head on the policy's own layers, %d parameters, of zeros", width + 1
        )

    @property
    def backbone(self) -> Any:
        return self.policy.model.get_decoder()

    def term(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Collective. Returns values, float32 [C], for hidden states [C, D]. It is a Term of the
        policy."""
        return _head_values(self.head, hidden)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Returns values [C] before `batch.target_ids`, with a gradient for the
        head."""
        with torch.no_grad():
            (hidden,) = self.policy(batch, lambda hidden, _: hidden, only_term=True)
        return self.term(hidden, hidden)

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns values [S, L] of rows of one sequence each, by HF's forward pass."""
        with plain_states(self.policy) as states:
            start = torch.zeros(1, dtype=torch.int64, device=token_ids.device)
            self.policy.plain_logits(token_ids, start)
        return _head_values(self.head, states[0])

    def reshard(self) -> None:
        """Frees the policy's gathered root parameters."""
        cast(FSDPModule, self.policy).reshard()


@contextmanager
def plain_states(policy: Policy) -> Iterator[list[Tensor]]:
    """Yields a list that gets the decoder's last hidden states [S, L, D] of each pass inside."""
    states: list[Tensor] = []
    handle = policy.model.get_decoder().register_forward_hook(
        lambda *call: states.append(call[-1].last_hidden_state)
    )
    try:
        yield states
    finally:
        handle.remove()
