"""A frozen reward model: a decoder with a head for sequence classification, sharded like the reference. Packed rows go
through transformers' own layers and our attention; a score is the head at one token of each sequence."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GenericForSequenceClassification

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout, choose_backend
from grpo_spmd.model.config_json import head_dim
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.refusals import refuse_structure, refuse_tensors
from grpo_spmd.model.hf_files import load_config
from grpo_spmd.model.policy import DTYPES, load_weights
from grpo_spmd.model.reward_model_files import RewardModelFiles, errors_about
from grpo_spmd.model.sharding import shard_over_ranks

_log = logging.getLogger("grpo_spmd")


@dataclass(frozen=True)
class TextRow:
    """Texts packed into one row without padding."""

    input_ids: Tensor  # int64 [T]
    position_ids: Tensor  # int64 [T], starts at 0 in each text
    lengths: list[int]  # of S texts, that add up to T
    last: Tensor  # int64 [S], the place in the row whose hidden state gives the score


class RewardModel(nn.Module):
    """Scores texts, in the compute dtype but for the head. `forward` is the door for FSDP, as the policy's is."""

    def __init__(self, config: Any, label: int, attention: Backend, dtype: torch.dtype) -> None:
        super().__init__()
        kind, how = (
            transformers.AutoModelForSequenceClassification,
            {"attn_implementation": PACKED_ATTENTION},
        )
        self.model = build_hf_model(config, config.name_or_path, kind, **how, dtype=dtype)
        self._label, self._attention, self._pad = label, attention, config.pad_token_id

    @property
    def num_embeddings(self) -> int:
        """Tokens that it has a row for."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def forward(self, row: TextRow) -> Tensor:
        """Collective. Scores of the label, float32 [S]."""
        layout = PackedLayout(row.lengths, row.input_ids.device, self._attention)
        ids = {"input_ids": row.input_ids[None], "position_ids": row.position_ids[None]}
        hidden = self.model.get_decoder()(
            **ids, use_cache=False, packed_layout=layout
        ).last_hidden_state
        scores: Tensor = hidden[0][row.last].float() @ self.model.score.weight[self._label].float()
        return scores

    def plain_score(self, token_ids: Tensor) -> Tensor:
        """Collective. The score [] of one text [T] by transformers' own forward pass and nothing of ours: what proofs/
        compares `forward` with. FSDP knows it as a second door."""
        logits: Tensor = self.model(input_ids=token_ids[None], use_cache=False).logits
        return logits[0, self._label].float()

    def row_of(self, texts: list[list[int]]) -> TextRow:
        """Texts in this order, equal lengths side by side; none of them: one token that counts nothing, to keep
        step."""
        texts = texts or [[0]]
        device = next(self.model.parameters()).device
        ids, places, last = list[int](), list[int](), list[int]()
        for text in texts:
            last.append(len(ids) + self._scored_place(text))
            ids += text
            places += range(len(text))
        tensors = (torch.tensor(numbers, device=device) for numbers in (ids, places, last))
        input_ids, position_ids, scored = tensors
        return TextRow(input_ids, position_ids, [len(text) for text in texts], scored)

    def _scored_place(self, text: list[int]) -> int:
        """The last token, or where the model has a padding token the last other one: as transformers takes it, also
        where that token is the end of a text."""
        places = (place for place in range(len(text) - 1, -1, -1) if text[place] != self._pad)
        return next(places, len(text) - 1 if self._pad is None else 0)


def build_reward_model(
    files: RewardModelFiles, config: ModelConfig, session: Session
) -> RewardModel:
    """Collective. The model of `files.folder`, frozen in the compute dtype of the policy's `config`: meta device, then
    FSDP2, then each rank reads its own rows. Raises ConfigError, of the reward's key, for what cannot be packed."""
    with errors_about(f"{files.where}.model"):
        path = str(files.folder)
        hf_config, compute = load_config(path), DTYPES[config.dtype]
        capped = getattr(hf_config, "attn_logit_softcapping", None) is not None
        attention = choose_backend(
            config.attention, session.device, compute, head_dim(hf_config), capped=capped
        )
        with torch.device("meta"):
            model = RewardModel(hf_config, files.label, attention, compute)
        _refuse_other_heads(model.model, path)
        refuse_structure(model.model, path)
        stored_as = refuse_tensors(model.model, files.folder)
        model.requires_grad_(False).eval()
        shard_over_ranks(
            model, decoder_layers(model.model), session.mesh, compute, reshard_root=True
        )
        register_fsdp_forward_method(model, "plain_score")
        model.to_empty(device=session.device)
        initialise_buffers(model.model)
        named = [(name, parameter) for name, parameter in model.model.named_parameters()]
        shards = ((name, shard) for name, shard in named if isinstance(shard, DTensor))
        load_weights(((stored_as.get(name, name), shard) for name, shard in shards), files.folder)
    numel = sum(parameter.numel() for _, parameter in named)
    _log.info(
        "reward model %r: %s, %.1f M parameters",
        files.name,
        type(model.model).__name__,
        numel / 1e6,
    )
    return model


def _refuse_other_heads(model: Any, path: str) -> None:
    if type(model).forward is not GenericForSequenceClassification.forward:
        why = "which transformers scores in a way of its own, and not with a head at each text's last token"
        raise ConfigError(f"model.path: {path} is a {type(model).__name__}, {why}")
