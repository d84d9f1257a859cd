"""The memory of a rank by arithmetic, phase by phase, as rows of `--explain`. What is not exact says "estimate"."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.schema import Config
from grpo_spmd.preflight import arithmetic
from grpo_spmd.preflight.model_facts import ModelFacts

Row = tuple[str, str, str]  # name, value, how it follows
_GPU_GIB = (24, 80, 141)
_NO_SIZES = "config.json does not name the sizes of a decoder as Llama's does"
_ALL_GIVEN_UP = "one in full, of the others the input"
_CHECKPOINTING: tuple[tuple[bool | Literal["selective"], str, str], ...] = (
    (False, "without checkpointing", "all kept"),
    ("selective", "selective checkpointing", f"{_ALL_GIVEN_UP}, the products and attention"),
    (True, "with checkpointing", _ALL_GIVEN_UP),
)


@dataclass(frozen=True)
class _State:
    """What one rank holds of the policy between updates."""

    shard: int  # parameters of a full shard
    trained: int  # those of it, or of the adapters, that train: float32, with two moments
    base: int  # bytes, frozen under adapters
    reference: int  # bytes

    @property
    def num_bytes(self) -> int:
        return 12 * self.trained + self.base + self.reference

    def offloaded(self, offload: bool | Literal["optimizer"]) -> int:
        """Bytes in host memory while the engine is awake."""
        return {False: 0, "optimizer": 8 * self.trained, True: self.num_bytes}[offload]


def training_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, ranks = arithmetic.ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    shard, lora = arithmetic.shard_numel(model.shapes, ranks), config.model.lora
    if lora.rank:
        adapters = arithmetic.shard_numel(arithmetic.adapter_shapes(model.shapes, lora), ranks)
        state = _State(shard, adapters, base=itemsize * shard, reference=0)
    else:
        state = _State(shard, shard, base=0, reference=itemsize * shard if config.loss.kl_coef else 0)
    yield from _state_rows(config, state, ranks)
    yield from _update_rows(config, model, state, arithmetic.micro_batch_tokens(config, num_ranks))
    moved = arithmetic.sync_size(model.shapes, ranks, itemsize, 1)[0]
    buckets = min(2 * config.rollout.sync_bucket_bytes("cuda"), moved) if ranks > 1 else 0
    largest = max(math.prod(shape) for shape in model.shapes.values()) * itemsize
    parts = f"two buckets {size_text(buckets)} + largest tensor {size_text(largest)}"
    how = f"estimate: {parts}; what vLLM keeps until a layer is complete"
    yield "buffers of the weight sync", size_text(buckets + largest), how
    share, stays = config.rollout.gpu_memory_utilization, state.num_bytes - state.offloaded(config.model.offload)
    how = f"{size_text(stays)} of state / (1 - gpu_memory_utilization {share:g}); for the update, its peak"
    yield "GPU that the rollout needs", f">= {size_text(math.ceil(stays / (1 - share)))}", how


def _state_rows(config: Config, state: _State, ranks: int) -> Iterator[Row]:
    dtype, trained, offload = config.model.dtype, state.trained, config.model.offload
    each, parts = arithmetic.ITEMSIZE[dtype], ["parameters + moments"]
    divided = f"{state.shard:,} parameters of a shard (ceil(rows / {ranks}) of each tensor)"
    if state.base:
        yield "base", size_text(state.base), f"{divided} x {each} ({dtype}), frozen; the reference too"
        divided = f"{trained:,} parameters of a shard of the adapters (rank {config.model.lora.rank})"
        parts.append("base")
    yield "master parameters", size_text(4 * trained), f"{divided} x 4 (float32)"
    yield "gradients", size_text(4 * trained), f"{trained:,} x 4 (float32), in the update only"
    yield "AdamW's moments", size_text(8 * trained), f"{trained:,} x 2 x 4 (float32)"
    if state.reference:
        yield "reference", size_text(state.reference), f"{state.shard:,} x {each} ({dtype})"
        parts.append("reference")
    yield "state between updates", size_text(state.num_bytes), " + ".join(parts)
    if offload:
        how = f"while the engine is awake: offload {str(offload).lower()}"
        yield "of it in host memory", size_text(state.offloaded(offload)), how
    how = "parameters that train + moments, while a thread writes them"
    yield "checkpoint's copy in host memory", size_text(12 * trained), how


def _update_rows(config: Config, model: ModelFacts, state: _State, budget: int) -> Iterator[Row]:
    """`budget`: tokens of a micro-batch."""
    itemsize, root, layer = arithmetic.ITEMSIZE[config.model.dtype], model.root_numel, model.layer_numel
    gathered = itemsize * (root + 2 * layer)
    how = f"estimate: {itemsize} x ({root:,} of embedding, lm_head, norm + 2 layers of {layer:,}: in use, arriving)"
    yield "gathered by FSDP", size_text(gathered), how
    sizes = model.dimensions
    if sizes is None:
        yield "logits and activations", "unknown", _NO_SIZES
        return
    tokens, each = min(config.model.logprob_chunk_tokens, budget), arithmetic.logits_bytes_per_element(itemsize)
    logits, one = tokens * sizes.vocabulary * each, size_text(4 * tokens * sizes.vocabulary)
    how = f"{tokens} tokens x V {sizes.vocabulary} x {each} bytes in the backward pass (one float32 [chunk, V]: {one})"
    yield "logits of a chunk", size_text(logits), how
    head = 0 if config.model.lora.rank else sizes.vocabulary * sizes.hidden * (4 + itemsize)
    if head:
        how = f"V {sizes.vocabulary} x D {sizes.hidden} x (4 + {itemsize}): whole, before it is reduced"
        yield "lm_head's gradient", size_text(head), how
    qk_norm, activations = any(name.endswith("q_norm.weight") for name in model.shapes), 0
    layer = arithmetic.activation_bytes_per_token(sizes, itemsize, qk_norm=qk_norm)
    for choice, name, what in _CHECKPOINTING:
        kept = arithmetic.activation_bytes(sizes, budget, itemsize, checkpointing=choice, qk_norm=qk_norm)
        is_chosen = choice == config.model.activation_checkpointing
        layers = f"{sizes.layers} layers of {layer:,} bytes, {what}"
        how = f"estimate: {budget} tokens x ({layers}; and {4 + 4 * itemsize} x D)"
        yield f"activations, {name}" + (" *" if is_chosen else ""), size_text(kept), how
        activations = kept if is_chosen else activations
    peak = state.num_bytes + 4 * state.trained + gathered + logits + head + activations
    parts = "state + gradients + gathered + logits + lm_head's gradient + activations (*)"
    yield "peak of the update", size_text(peak), f"estimate: {parts}, without fragmentation"


def engine_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, tp = arithmetic.ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    weights = itemsize * sum(math.prod(shape) // (tp if len(shape) > 1 else 1) for shape in model.shapes.values())
    how = f"estimate: parameters x {itemsize} / tensor_parallel_size {tp} (norms and biases whole)"
    yield "weights", size_text(weights), how
    if (sizes := model.dimensions) is None:
        yield "KV cache", "unknown", _NO_SIZES
        return
    rollout, share = config.rollout, config.rollout.gpu_memory_utilization
    is_fp8 = str(rollout.engine.get("kv_cache_dtype", "")).startswith("fp8")
    itemsize = 1 if is_fp8 else itemsize
    token, heads = arithmetic.kv_bytes_per_token(sizes, itemsize, tp), max(1, sizes.kv_heads // tp)
    how = f"2 x {sizes.layers} layers x {heads} kv heads of a rank x head_dim {sizes.head_dim} x {itemsize}"
    yield "KV cache of a token", size_text(token), how
    sequences = -(-rollout.num_prompts_per_step // (num_ranks // tp)) * rollout.group_size
    needed = sequences * config.max_rollout_tokens
    how = f"{sequences} sequences of an engine x {config.max_rollout_tokens} tokens x {token:,} bytes"
    yield "KV cache for all at full length", f"<= {size_text(needed * token)}", f"{how} (a group shares its prompt)"
    if isinstance(given := rollout.engine.get("kv_cache_memory_bytes"), int):
        how = f"engine.kv_cache_memory_bytes {given:,} / {token:,}"
        yield "tokens that fit", f"{given // token:,} of {needed:,}", how
        return
    how = f"estimate: (gpu_memory_utilization {share:g} x GPU - weights) / {token:,}, before vLLM's own buffers"
    for gib in _GPU_GIB:
        yield f"tokens that fit, GPU of {gib} GiB", f"{int(max(0, share * (gib << 30) - weights) // token):,}", how
        how = f"for all at full length: {needed:,}; what does not fit waits its turn" if gib == _GPU_GIB[0] else ""


def size_text(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"
