"""Sizes and counts that follow from a config and a model's shapes."""

from __future__ import annotations

import math
import re

from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.model.dimensions import Dimensions
from grpo_spmd.preflight.model_facts import Shapes

ITEMSIZE = {"float32": 4, "bfloat16": 2}
TRAINED_ITEMSIZE = 12  # float32 and AdamW's two moments


def shard_numel(shapes: Shapes, num_ranks: int) -> int:
    """Elements of a full shard: FSDP2 deals ceil(rows / ranks) rows of each tensor to a rank, and pads the last."""
    return sum(-(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes.values() if shape)


def adapter_shapes(shapes: Shapes, lora: LoraConfig) -> Shapes:
    """A and B, (rank, columns) and (rows, rank), beside each matrix of a layer that `target_modules` names."""
    found: Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        is_named = lora.target_modules == "all-linear" or module in lora.target_modules
        if is_named and len(shape) == 2 and re.search(r"\.layers\.\d+\.", name):
            found |= {f"{name}.lora_A": (lora.rank, shape[1]), f"{name}.lora_B": (shape[0], lora.rank)}
    return found


def sync_size(shapes: Shapes, num_ranks: int, itemsize: int, bucket_bytes: int) -> tuple[int, int]:
    """Bytes and collectives of one weight sync over the ranks of a replica, as SyncStats counts them."""
    row = shard_numel(shapes, num_ranks)
    if num_ranks == 1:
        return row * itemsize, 0
    room = min(max(1, bucket_bytes // (num_ranks * itemsize)), row)
    return num_ranks * row * itemsize, -(-row // room)


def ratio_is_one(config: Config) -> bool:
    """Whether the policy that trains is always the one whose logprobs the ratio is taken to."""
    return config.training.num_optimizer_steps == 1 and config.loss.old_logprobs == "policy"


def extra_passes(config: Config) -> tuple[int, int, int]:
    """Forward passes of all rollouts before the update: for the old logprobs, of the reference, for the values of a
    critic on the policy's layers."""
    loss = config.loss
    is_asked = loss.kl_in == "reward" or config.training.num_optimizer_steps > 1
    return int(loss.old_logprobs != "engine" and is_asked), int(loss.kl_coef > 0), int(config.critic.is_on_policy)


def micro_batches_per_step(config: Config, num_ranks: int) -> tuple[int, int]:
    """Fewest and most forward-backwards of a rank in a step; the most where every rollout is of full length."""
    steps = config.training.num_optimizer_steps
    in_a_row = config.training.max_tokens_per_micro_batch // config.max_rollout_tokens
    return steps, steps * -(-rollouts_of_a_rank(config, num_ranks) // in_a_row)


def micro_batch_tokens(config: Config, num_ranks: int) -> int:
    """The most tokens of one forward-backward: its budget, or all that a rank gets for one optimizer step."""
    whole = rollouts_of_a_rank(config, num_ranks) * config.max_rollout_tokens
    return min(config.training.max_tokens_per_micro_batch, whole)


def rollouts_of_a_rank(config: Config, num_ranks: int) -> int:
    """Rollouts of one rank for one optimizer step, where all are equally long."""
    rollouts = config.rollout.num_prompts_per_step * config.rollout.group_size // config.training.num_mini_batches
    return -(-rollouts // num_ranks)


def logits_bytes_per_element(itemsize: int) -> int:
    """Bytes of each logit at the peak of logprobs.TokenLogprobs: float32, and the product in another compute dtype."""
    return 4 if itemsize == 4 else 4 + itemsize


def kv_bytes_per_token(sizes: Dimensions, itemsize: int, tensor_parallel_size: int) -> int:
    """Keys and values of one token on one rank of an engine; with more ranks than kv heads each rank holds one head."""
    return 2 * sizes.layers * max(1, sizes.kv_heads // tensor_parallel_size) * sizes.head_dim * itemsize
