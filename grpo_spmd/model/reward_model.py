"""A frozen reward model: a decoder with a head for sequence classification, sharded.

Packed rows go through transformers' own layers and our attention. A score is the head's product
with
one token's hidden state of each text."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers.modeling_layers import GenericForSequenceClassification

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.refusals import refuse_structure, refuse_tensors
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.policy import DTYPES, attention_backend, load_weights
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about
from grpo_spmd.model.sharding import shard_over_ranks

_log = logging.getLogger("grpo_spmd")


@dataclass(frozen=True)
class TextRow:
    """Texts packed into one row without padding."""

    input_ids: Tensor
    """int64 [T]."""
    position_ids: Tensor
    """int64 [T], from 0 in each text."""
    lengths: list[int]
    """Tokens of the S texts; their sum is T."""
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
            packed_layout=PackedLayout(row.lengths, row.input_ids.device, self._attention),
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
        device = next(self.model.parameters()).device
        ids: list[int] = []
        positions: list[int] = []
        scored: list[int] = []
        for text in texts:
            scored.append(len(ids) + self._scored_position(text))
            ids += text
            positions += range(len(text))
        return TextRow(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            [len(text) for text in texts],
            torch.tensor(scored, device=device),
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
        stored_names = refuse_tensors(model.model, files.folder)
        model.requires_grad_(False).eval()
        layers = decoder_layers(model.model)
        shard_over_ranks(model, layers, session.mesh, compute, reshard_root=True)
        register_fsdp_forward_method(model, "plain_score")
        model.to_empty(device=session.device)
        initialise_buffers(model.model)
        load_weights(model.model.named_parameters(), files.folder, stored_names)
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
