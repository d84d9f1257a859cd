"""The memory of a rank that config and shapes alone tell, exactly. `--explain` prints it; plan/ adds the rest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from grpo_spmd.config.schema import Config
from grpo_spmd.preflight import arithmetic
from grpo_spmd.preflight.engine_room import engine_tokens
from grpo_spmd.preflight.model_facts import ModelFacts

Row = tuple[str, str, str]  # name, value, how it follows
_NO_SIZES = "config.json does not name the sizes of a decoder as Llama's does"


@dataclass(frozen=True)
class State:
    """What one rank holds of the policy between updates."""

    shard: int  # parameters of a full shard
    trained: int  # those of it, or of the adapters, that train: float32, with two moments
    base: int  # bytes, frozen under adapters
    reference: int  # bytes

    @property
    def num_bytes(self) -> int:
        return arithmetic.TRAINED_ITEMSIZE * self.trained + self.base + self.reference

    @property
    def gradients(self) -> int:
        return 4 * self.trained

    def offloaded(self, offload: bool | Literal["optimizer"]) -> int:
        """Bytes in host memory while the engine is awake."""
        return {False: 0, "optimizer": 8 * self.trained, True: self.num_bytes}[offload]


def state_of(config: Config, model: ModelFacts, num_ranks: int) -> State:
    itemsize, ranks = arithmetic.ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    shard, lora = arithmetic.shard_numel(model.shapes, ranks), config.model.lora
    if lora.rank:
        adapters = arithmetic.shard_numel(arithmetic.adapter_shapes(model.shapes, lora), ranks)
        return State(shard, adapters, base=itemsize * shard, reference=0)
    return State(shard, shard, base=0, reference=itemsize * shard if config.loss.kl_coef else 0)


def sync_buffers(config: Config, model: ModelFacts, num_ranks: int, bucket_bytes: int) -> dict[str, int]:
    """Bytes that a weight sync takes on a rank beside policy and engine, by what they are for."""
    itemsize, ranks = arithmetic.ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    shapes, lora, found = model.shapes, config.model.lora, dict[str, int]()
    whole = {name: ranks * _shard(shape, ranks) * itemsize for name, shape in shapes.items()}
    merged = dict.fromkeys(shapes, 0)
    if lora.rank and lora.sync == "merged":  # W + BA of a tensor, and W, in float32; all A
        adapters = arithmetic.adapter_shapes(shapes, lora)
        found["adapters, whole"] = 4 * sum(math.prod(s) for name, s in adapters.items() if name.endswith(".lora_A"))
        adapted = {name.removesuffix(".lora_B") for name in adapters if name.endswith(".lora_B")}
        merged |= {name: _shard(shapes[name], ranks) * (4 if itemsize == 4 else 8) for name in adapted}
    if ranks == 1:  # no bucket: a tensor is rounded, or W + BA is, on its way to its place (16 MiB at a time are named)
        largest = (max(of, whole[name] + min(of, 4 * math.prod(shapes[name]))) for name, of in merged.items())
        return found | {"largest tensor": max(largest)}
    row = arithmetic.shard_numel(shapes, ranks)
    room = min(max(1, bucket_bytes // (ranks * itemsize)), row)
    num_pieces = -(-row // room)
    found["buckets"] = min(2, num_pieces) * ranks * room * itemsize
    # Where there is a next bucket, it is filled while a tensor of this one is put together.
    both = max(whole.values()), max(merged.values())
    return found | {"largest tensor": sum(both) if num_pieces > 1 else max(both)}


def _shard(shape: tuple[int, ...], ranks: int) -> int:
    return arithmetic.shard_numel({"": shape}, ranks)


def engine_weights(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights of one rank of an engine; norms and biases are whole on each."""
    itemsize, tp = arithmetic.ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    return itemsize * sum(math.prod(shape) // (tp if len(shape) > 1 else 1) for shape in model.shapes.values())


def kv_itemsize(config: Config) -> int:
    is_fp8 = str(config.rollout.engine.get("kv_cache_dtype", "")).startswith("fp8")
    return 1 if is_fp8 else arithmetic.ITEMSIZE[config.model.dtype]


def sequences_of_engine(config: Config, num_ranks: int) -> int:
    """The most completions that one engine samples in a step, before any refill."""
    engines = num_ranks // config.rollout.tensor_parallel_size
    return -(-config.rollout.num_launched_prompts // engines) * config.rollout.group_size


def training_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    state, ranks = state_of(config, model, num_ranks), num_ranks // config.model.num_replicas
    yield from _state_rows(config, state, ranks)
    yield from _logits_rows(config, model, num_ranks)
    buffers = sync_buffers(config, model, num_ranks, config.rollout.sync_bucket_bytes("cuda"))
    parts = " + ".join(f"{name} {size_text(size)}" for name, size in buffers.items())
    how = f"{parts}; vLLM keeps more until a layer is whole"
    yield "buffers of the weight sync", size_text(sum(buffers.values())), how
    how = "python -m grpo_spmd.plan --config ... --gpu H100-80GB --ranks N runs the layers on fake tensors"
    yield "peak of each phase, and what fits", "see the planner", how


def _state_rows(config: Config, state: State, ranks: int) -> Iterator[Row]:
    dtype, trained, offload = config.model.dtype, state.trained, config.model.offload
    each, parts = arithmetic.ITEMSIZE[dtype], ["parameters + moments"]
    divided = f"{state.shard:,} parameters of a shard (ceil(rows / {ranks}) of each tensor)"
    if state.base:
        yield "base", size_text(state.base), f"{divided} x {each} ({dtype}), frozen; the reference too"
        divided = f"{trained:,} parameters of a shard of the adapters (rank {config.model.lora.rank})"
        parts.append("base")
    yield "master parameters", size_text(4 * trained), f"{divided} x 4 (float32)"
    yield "gradients", size_text(state.gradients), f"{trained:,} x 4 (float32), in the update only"
    yield "AdamW's moments", size_text(8 * trained), f"{trained:,} x 2 x 4 (float32)"
    if state.reference:
        yield "reference", size_text(state.reference), f"{state.shard:,} x {each} ({dtype})"
        parts.append("reference")
    yield "state between updates", size_text(state.num_bytes), " + ".join(parts)
    if offload:
        how = f"while the engine is awake: offload {str(offload).lower()}"
        yield "of it in host memory", size_text(state.offloaded(offload)), how
    how = "parameters that train + moments, while a thread writes them"
    yield "checkpoint's copy in host memory", size_text(arithmetic.TRAINED_ITEMSIZE * trained), how


def _logits_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    if (sizes := model.dimensions) is None:
        yield "logits of a chunk", "unknown", _NO_SIZES
        return
    tokens = min(config.model.logprob_chunk_tokens, arithmetic.micro_batch_tokens(config, num_ranks))
    each = arithmetic.logits_bytes_per_element(arithmetic.ITEMSIZE[config.model.dtype])
    how = f"{tokens} tokens x V {sizes.vocabulary} x {each} bytes in the backward pass"
    yield "logits of a chunk", size_text(tokens * sizes.vocabulary * each), how


def engine_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, tp = arithmetic.ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    how = f"parameters x {itemsize} / tensor_parallel_size {tp} (norms and biases whole)"
    yield "weights", size_text(engine_weights(config, model)), how
    if (sizes := model.dimensions) is None:
        yield "KV cache", "unknown", _NO_SIZES
        return
    itemsize, heads = kv_itemsize(config), max(1, sizes.kv_heads // tp)
    token = arithmetic.kv_bytes_per_token(sizes, itemsize, tp)
    how = f"2 x {sizes.layers} layers x {heads} kv heads of a rank x head_dim {sizes.head_dim} x {itemsize}"
    yield "KV cache of a token", size_text(token), how
    sequences = sequences_of_engine(config, num_ranks)
    longest = engine_tokens(config)  # as the judge it reads longer texts than rollouts are
    needed = sequences * longest
    how = f"{sequences} sequences of an engine x {longest} tokens x {token:,} bytes"
    yield "KV cache for all at full length", f"<= {size_text(needed * token)}", f"{how} (a group shares its prompt)"
    if isinstance(given := config.rollout.engine.get("kv_cache_memory_bytes"), int):
        how = f"engine.kv_cache_memory_bytes {given:,} / {token:,}"
        yield "tokens that fit", f"{given // token:,} of {needed:,}", how


def size_text(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"
