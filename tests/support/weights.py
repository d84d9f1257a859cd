"""What tests say of a policy's weights."""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.gather import WeightDigest, weights_id
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy


def name_of_weights(policy: Policy) -> str:
    """Collective. Of the parameters as they are, not as an engine gets them."""
    digest = WeightDigest(next(policy.parameters()).device)
    for name, parameter in policy.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        digest.add_shard(Shard(name, parameter, parameter.to_local), parameter.dtype)
    return on_rank0(weights_id, digest.totals())
