"""The policy's tensors as a receiver of all of them gets them, without an engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing

import torch
from torch import Tensor

from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_sync import gather_tensors, saved_tensors
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.records import SyncStats


def gather_full_tensors(
    source: Policy | Sequence[Shard], dtype: torch.dtype, bucket_bytes: int, stats: SyncStats
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. Yields (HF name, full tensor) for the whole policy or for some shards.

    The other arguments are those of `gather_tensors`."""
    shards = list(hf_named_shards(source)) if isinstance(source, Policy) else source
    with closing(gather_tensors(shards, dtype, bucket_bytes, stats)) as tensors:
        yield from tensors


def load_full_tensors(policy: Policy, engine: RolloutEngine, weights: dict[str, Tensor]) -> None:
    """Collective. Gives the engine these tensors, by the policy's names, as version 1."""
    engine.sleep()
    engine.wake_weights()
    engine.load_weights(saved_tensors(iter(weights.items()), policy.saved), 1)
    engine.wake_kv_cache()
