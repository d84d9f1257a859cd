"""Builds the models that give numbers: the critic, and frozen reward models.

A value is an estimate of the reward to come, at one token of a completion. A value head turns a
hidden state into a value. The critic is a separate decoder with such a head, or a head on the
policy's layers. A reward model is a decoder with a head for sequence classification: a score is the
head's product with one token's hidden state of each text. Packed rows go through transformers' own
layers and our attention."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers.modeling_layers import GenericForSequenceClassification

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import VALUE_HEADS, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout, sequence_starts
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.logits import fix_rotary_factors
from grpo_spmd.model.families.refusals import (
    refuse_structure,
    refuse_tensors,
    refuse_untrainable,
    trainable_config,
)
from grpo_spmd.model.families.stored import constants, saved_layout, stored_layout
from grpo_spmd.model.hf_files import checkpoint_folder, load_config, tensor_files
from grpo_spmd.model.offload import copy_to_device
from grpo_spmd.model.policy import DTYPES, Policy, attention_backend, load_weights, set_up_layer
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about
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
        layout = PackedLayout(batch.sequence_lengths, batch.sequence_starts, self.attention)
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
    # Two dimensions: of three, torch's Linear returns a view. FSDP warns of a module's output that
    # is a view, and so the values are cloned too.
    values: Tensor = head(hidden.float().flatten(0, -2))
    return values.view(hidden.shape[:-1]).clone()


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
    stored = stored_layout(hf_model, files, saved_layout(hf_model))
    for layer in layers:
        set_up_layer(layer, config.recompute, config.compile)
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
    load_weights(model.backbone.named_parameters(prefix), folder, stored)
    load_weights(constants(model.backbone, prefix).items(), folder)
    head_name = next((name for name in VALUE_HEADS if f"{name}.weight" in files), None)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    if head_name is not None:
        # A checkpoint's head may have no bias.
        head = [pair for pair in model.head.named_parameters(head_name) if pair[0] in files]
        load_weights(head, folder)
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


@dataclass(frozen=True)
class TextRow:
    """Texts packed into one row without padding."""

    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], from 0 in each text."""
    lengths: list[int]
    """Tokens of the S texts; their sum is T."""
    starts: Tensor
    """int32 [S + 1]: their `sequence_starts`."""
    scored: Tensor
    """int64 [S]: the position in the row whose hidden state gives the score."""


class RewardModel(nn.Module):
    """Scores texts, in the compute dtype but for the head.

    Call it only through `forward` and `plain_score`, where FSDP gathers its parameters."""

    def __init__(self, config: Any, label: int, attention: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = build_hf_model(
            config,
            config.name_or_path,
            transformers.AutoModelForSequenceClassification,
            attn_implementation=PACKED_ATTENTION,
            dtype=dtype,
        )
        self._label = label
        self._attention = attention
        self._pad_id = config.pad_token_id

    @property
    def num_embeddings(self) -> int:
        """Number of token ids that it knows."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def forward(self, row: TextRow) -> Tensor:
        """Collective. Returns the label's scores, float32 [S]."""
        states = self.model.get_decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            packed_layout=PackedLayout(row.lengths, row.starts, self._attention),
        )
        # The head's product is float32: bfloat16 would round a score to 3 digits.
        hidden = states.last_hidden_state[0][row.scored].float()
        scores: Tensor = hidden @ self.model.score.weight[self._label].float()
        return scores

    def plain_score(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns the score [] of one text [T] by transformers' own forward pass.

        Nothing of ours is in it: proofs/ compares `forward` with it."""
        logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits
        return logits[0, self._label].float()

    def row_of(self, texts: list[list[int]]) -> TextRow:
        """Packs texts in this order; equal lengths should be neighbours.

        Without texts the row is one token that counts nothing, so that the rank takes part."""
        # Every rank must run the model, since FSDP gathers its layers from all ranks.
        texts = texts or [[0]]
        ids: list[int] = []
        positions: list[int] = []
        scored: list[int] = []
        for text in texts:
            scored.append(len(ids) + self._scored_position(text))
            ids += text
            positions += range(len(text))
        lengths = [len(text) for text in texts]
        device = next(self.model.parameters()).device
        return TextRow(
            copy_to_device(torch.tensor(ids), device),
            copy_to_device(torch.tensor(positions), device),
            lengths,
            starts=copy_to_device(sequence_starts(lengths), device),
            scored=copy_to_device(torch.tensor(scored), device),
        )

    def _scored_position(self, text: list[int]) -> int:
        """Returns the position of the last token that is not the padding token.

        transformers counts so, even if the padding token is the end of a text."""
        positions = reversed(range(len(text)))
        return next((position for position in positions if text[position] != self._pad_id), 0)


def build_reward_model(
    files: RewardModelFiles, config: ModelConfig, session: Session
) -> RewardModel:
    """Collective. Returns the model of `files.folder`, frozen in the policy's compute dtype.

    It is built on the meta device, sharded by FSDP2, and each rank reads its own rows. Raises
    ConfigError, which names the reward's key, for a model that cannot be packed."""
    with errors_about(f"{files.where}.model"):
        path = str(files.folder)
        hf_config = load_config(path)
        compute = DTYPES[config.dtype]
        attention = attention_backend(hf_config, config, session)
        with torch.device("meta"):
            model = RewardModel(hf_config, files.label, attention, compute)
        # Before any memory is taken on the device.
        _refuse_other_heads(model.model, path)
        refuse_structure(model.model, path)
        stored = refuse_tensors(model.model, files.folder, saved_layout(model.model))
        model.requires_grad_(False).eval()
        layers = decoder_layers(model.model)
        shard_over_ranks(model, layers, session.mesh, compute, reshard_root=True)
        register_fsdp_forward_method(model, "plain_score")
        model.to_empty(device=session.device)
        initialise_buffers(model.model)
        load_weights(model.model.named_parameters(), files.folder, stored)
        load_weights(constants(model.model).items(), files.folder)
    _log.info(
        "reward model %r: %s, %.1f M parameters",
        files.name,
        type(model.model).__name__,
        sum(parameter.numel() for parameter in model.parameters()) / 1e6,
    )
    return model


def _refuse_other_heads(model: Any, path: str) -> None:
    if type(model).forward is not GenericForSequenceClassification.forward:
        raise ConfigError(
            f"model.path: {path} is a {type(model).__name__}, which transformers does not score "
            "with a head at each text's last token"
        )
