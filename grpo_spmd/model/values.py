"""The models that return numbers: the critic, and frozen reward models.

A value is an estimate, made at one token of a completion, of the reward to come. A value head turns
a hidden state into a value. The critic is a separate decoder with such a head (ValueModel), or a
head on the policy's own layers (PolicyValues). A reward model is a decoder with a head for sequence
classification: the score of a text is the head's product with the hidden state of one of its
tokens. Packed rows run through transformers' own layers with our attention."""

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
from grpo_spmd.model.attention import (
    PACKED_ATTENTION,
    Backend,
    PackedLayout,
    row_inputs,
    sequence_starts,
)
from grpo_spmd.model.config_json import checkpoint_folder, load_config, tensor_files
from grpo_spmd.model.families.build import (
    build_hf_model,
    constants,
    decoder_layers,
    initialise_buffers,
    saved_layout,
    stored_layout,
)
from grpo_spmd.model.families.logits import fix_rotary_factors
from grpo_spmd.model.families.refusals import (
    refuse_structure,
    refuse_tensors,
    refuse_untrainable,
    trainable_config,
)
from grpo_spmd.model.offload import copy_to_device
from grpo_spmd.model.policy import DTYPES, Policy, attention_backend, load_weights, set_up_layer
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about
from grpo_spmd.model.sharding import shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")


class ValueModel(nn.Module):
    """A critic that is a decoder of its own, with a value head.

    Call only `forward` and `plain_values`, in which FSDP gathers the parameters."""

    def __init__(self, decoder: Any, hidden_size: int, attention: Backend) -> None:
        """`decoder` is HF's decoder without lm_head; `hidden_size` is the width of its hidden
        states."""
        super().__init__()
        self.backbone = decoder
        self.attention = attention
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Returns the values just before each of `batch.target_ids`, float32 [C]."""
        row = row_inputs(batch, self.attention)
        states = self.backbone(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,
            packed_layout=row.layout,
        )
        return _head_values(self.head, states.last_hidden_state[0][row.predict_index])

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns the values [S, L] at all tokens of `token_ids` [S, L], by HF's plain
        forward pass: each row is one sequence. Proofs compare `forward` with it."""
        states = self.backbone(input_ids=token_ids, use_cache=False)
        return _head_values(self.head, states.last_hidden_state)


def _head_values(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Returns the head's float32 values [...] of hidden states [..., D]."""
    # FSDP warns if a module's output is a view. Given three dimensions, torch's Linear would return
    # one: give it two, and clone the result of `view`.
    values: Tensor = head(hidden.float().flatten(0, -2))
    return values.view(hidden.shape[:-1]).clone()


@errors_about("critic.path")
def build_value_model(
    path: str, config: ModelConfig, session: Session, max_rollout_tokens: int, num_tokens: int
) -> ValueModel:
    """Collective. Returns the critic stored at `path`, sharded, with float32 parameters.

    The compute dtype, attention and recomputation are those of the policy's `config`. The value
    head is the checkpoint's. If that has none, the head is zero, so that all values are 0 and the
    first advantages are made of rewards alone. `max_rollout_tokens` is the largest number of tokens
    of a rollout, `num_tokens` the size of the policy's vocabulary. Raises ConfigError, which names
    critic.path."""
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
    # Shard the head by itself so that it computes in float32: bfloat16 would round values to 3
    # digits.
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
        # Load only the tensors that the checkpoint has: its head may have no bias.
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
    """A critic that is only a value head on the policy's last hidden states.

    The head is float32, and zero at first. The policy's parameters are not parameters of this
    module."""

    policy: Policy

    def __init__(self, policy: Policy, session: Session) -> None:
        """Collective. Adds a head of zeros to `policy`."""
        super().__init__()
        # Bypass nn.Module's __setattr__, which would register the policy as a child module.
        object.__setattr__(self, "policy", policy)
        width = policy.model.get_output_embeddings().weight.shape[1]
        self.head = nn.Linear(width, 1, device=session.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Reshard the head after each forward pass. Otherwise, a pass without a backward pass would
        # leave it gathered, and the gathered copy would be stale after the next optimizer step.
        shard_over_ranks(self.head, (), session.mesh, torch.float32, reshard_root=True)
        _log.info(
            "critic: a value head on the policy's own layers, %d parameters, of zeros", width + 1
        )

    @property
    def backbone(self) -> Any:
        """The policy's decoder, which computes the hidden states."""
        return self.policy.model.get_decoder()

    def term(self, hidden: Tensor, _: Tensor) -> Tensor:
        """Collective. Returns the values, float32 [C], of hidden states [C, D].

        It has the signature of a `Term` of policy.py, so that the policy's forward pass can compute
        values along with logprobs. The head of the language model is not used."""
        return _head_values(self.head, hidden)

    def forward(self, batch: MicroBatch) -> Tensor:
        """Collective. Returns the values just before each of `batch.target_ids`, float32 [C]. They
        have a gradient for the value head, none for the policy."""
        with torch.no_grad():
            (hidden,) = self.policy(batch, lambda hidden, _: hidden, only_term=True)
        return self.term(hidden, hidden)

    def plain_values(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns the values [S, L] at all tokens of `token_ids` [S, L], by HF's plain
        forward pass: each row is one sequence. Proofs compare `forward` with it."""
        with plain_states(self.policy) as states:
            start = torch.zeros(1, dtype=torch.int64, device=token_ids.device)
            self.policy.plain_logits(token_ids, start)
        return _head_values(self.head, states[0])

    def reshard(self) -> None:
        """Frees the parameters of the policy's root module that FSDP has gathered. Called after
        forward passes without a backward pass, which would free them."""
        cast(FSDPModule, self.policy).reshard()


@contextmanager
def plain_states(policy: Policy) -> Iterator[list[Tensor]]:
    """Yields a list to which each forward pass inside the block appends the decoder's last hidden
    states [S, L, D]."""
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
    """int64 [T], starting at 0 in each text."""
    lengths: list[int]
    """The number of tokens of each of the S texts; their sum is T."""
    starts: Tensor
    """int32 [S + 1]: `sequence_starts(lengths)`."""
    scored: Tensor
    """int64 [S]: for each text, the position in the row whose hidden state gives the score."""


class RewardModel(nn.Module):
    """A frozen model that scores texts. It computes in the compute dtype, its head in float32.

    Call only `forward` and `plain_score`, in which FSDP gathers the parameters."""

    def __init__(self, config: Any, label: int, attention: Backend, dtype: torch.dtype) -> None:
        """Builds the model of transformers' `config` on the current device. `label` is the index of
        the head's row that gives the score."""
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
        """The number of token ids in the model's embedding."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def forward(self, row: TextRow) -> Tensor:
        """Collective. Returns the score of each text by the label's row of the head, float32
        [S]."""
        states = self.model.get_decoder()(
            input_ids=row.input_ids[None],
            position_ids=row.position_ids[None],
            use_cache=False,
            packed_layout=PackedLayout(row.lengths, row.starts, self._attention),
        )
        # Compute the head's product in float32: bfloat16 would round a score to 3 digits.
        hidden = states.last_hidden_state[0][row.scored].float()
        scores: Tensor = hidden @ self.model.score.weight[self._label].float()
        return scores

    def plain_score(self, token_ids: Tensor) -> Tensor:
        """Collective. Returns the score [] of one text [T] by transformers' own forward pass.

        It uses no code of ours, so that proofs/ can compare `forward` with it."""
        logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits
        return logits[0, self._label].float()

    def row_of(self, texts: list[list[int]]) -> TextRow:
        """Packs texts, given as token ids, into one row in this order.

        Texts of equal length should be neighbours. If there are no texts the row has a single token
        whose score the caller must ignore."""
        # Every rank must run the model, since FSDP gathers its layers from all ranks: a rank
        # without texts needs a row, too.
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
        """Returns the position of the last token that is not the padding token, 0 if there is none.

        transformers scores this token, even if a text really ends with the padding token."""
        positions = reversed(range(len(text)))
        return next((position for position in positions if text[position] != self._pad_id), 0)


def build_reward_model(
    files: RewardModelFiles, config: ModelConfig, session: Session
) -> RewardModel:
    """Collective. Returns the reward model in `files.folder`, frozen and in the policy's compute
    dtype.

    It is built on the meta device and sharded by FSDP2, and each rank reads only its own rows of
    the weights. Raises ConfigError, which names the reward's config key, if packed rows cannot run
    through the model, or if it does not score a text by a head at the text's last token."""
    with errors_about(f"{files.where}.model"):
        path = str(files.folder)
        hf_config = load_config(path)
        compute = DTYPES[config.dtype]
        attention = attention_backend(hf_config, config, session)
        with torch.device("meta"):
            model = RewardModel(hf_config, files.label, attention, compute)
        # Make these checks before any memory is allocated on the device.
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
    """Raises ConfigError unless transformers scores a text with a head at its last token."""
    if type(model).forward is not GenericForSequenceClassification.forward:
        raise ConfigError(
            f"model.path: {path} is a {type(model).__name__}, which transformers does not score "
            "with a head at each text's last token"
        )
