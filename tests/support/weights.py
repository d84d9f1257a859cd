"""What tests say of a policy's weights."""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.weight_proof import local_weights_hash, weights_id
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy


def name_of_weights(policy: Policy) -> str:
    """Collective. Of the parameters as they are, not as an engine gets them."""
    shards = [
        Shard(name, cast(DTensor, parameter), cast(DTensor, parameter).to_local)
        for name, parameter in policy.model.named_parameters()
    ]
    return on_rank0(weights_id, local_weights_hash(shards, torch.float32))
