"""The memory of a rank that config and shapes alone tell, exactly. `--explain` prints it; plan/ adds the rest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from grpo_spmd.config.schema import AdvantageConfig, Config, LoraConfig, LossConfig
from grpo_spmd.data.rows import PromptRow
from grpo_spmd.model.config_json import Dimensions, ModelFacts, Shapes

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
        return TRAINED_ITEMSIZE * self.trained + self.base + self.reference

    @property
    def gradients(self) -> int:
        return 4 * self.trained

    def offloaded(self, offload: bool | Literal["optimizer"]) -> int:
        """Bytes in host memory while the engine is awake."""
        return {False: 0, "optimizer": 8 * self.trained, True: self.num_bytes}[offload]


def state_of(config: Config, model: ModelFacts, num_ranks: int) -> State:
    itemsize, ranks = ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    shard, lora = shard_numel(model.shapes, ranks), config.model.lora
    if lora.rank:
        adapters = shard_numel(adapter_shapes(model.shapes, lora), ranks)
        return State(shard, adapters, base=itemsize * shard, reference=0)
    return State(shard, shard, base=0, reference=itemsize * shard if config.loss.kl_coef else 0)


def sync_buffers(
    config: Config, model: ModelFacts, num_ranks: int, bucket_bytes: int
) -> dict[str, int]:
    """Bytes that a weight sync takes on a rank beside policy and engine, by what they are for."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], num_ranks // config.model.num_replicas
    shapes, lora, found = model.shapes, config.model.lora, dict[str, int]()
    whole = {name: ranks * _shard(shape, ranks) * itemsize for name, shape in shapes.items()}
    merged = dict.fromkeys(shapes, 0)
    if lora.rank and lora.sync == "merged":  # W + BA of a tensor, and W, in float32; all A
        adapters = adapter_shapes(shapes, lora)
        found["adapters, whole"] = 4 * sum(
            math.prod(s) for name, s in adapters.items() if name.endswith(".lora_A")
        )
        adapted = {name.removesuffix(".lora_B") for name in adapters if name.endswith(".lora_B")}
        merged |= {
            name: _shard(shapes[name], ranks) * (4 if itemsize == 4 else 8) for name in adapted
        }
    if (
        ranks == 1
    ):  # no bucket: a tensor is rounded, or W + BA is, on its way to its place (16 MiB at a time are named)
        largest = (
            max(of, whole[name] + min(of, 4 * math.prod(shapes[name])))
            for name, of in merged.items()
        )
        return found | {"largest tensor": max(largest)}
    row = shard_numel(shapes, ranks)
    room = min(max(1, bucket_bytes // (ranks * itemsize)), row)
    num_pieces = -(-row // room)
    found["buckets"] = min(2, num_pieces) * ranks * room * itemsize
    # Where there is a next bucket, it is filled while a tensor of this one is put together.
    both = max(whole.values()), max(merged.values())
    return found | {"largest tensor": sum(both) if num_pieces > 1 else max(both)}


def _shard(shape: tuple[int, ...], ranks: int) -> int:
    return shard_numel({"": shape}, ranks)


def engine_weights(config: Config, model: ModelFacts) -> int:
    """Bytes of the weights of one rank of an engine; norms and biases are whole on each."""
    itemsize, tp = ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    return itemsize * sum(
        math.prod(shape) // (tp if len(shape) > 1 else 1) for shape in model.shapes.values()
    )


def kv_itemsize(config: Config) -> int:
    is_fp8 = str(config.rollout.engine.get("kv_cache_dtype", "")).startswith("fp8")
    return 1 if is_fp8 else ITEMSIZE[config.model.dtype]


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
    each, parts = ITEMSIZE[dtype], ["parameters + moments"]
    divided = f"{state.shard:,} parameters of a shard (ceil(rows / {ranks}) of each tensor)"
    if state.base:
        yield (
            "base",
            size_text(state.base),
            f"{divided} x {each} ({dtype}), frozen; the reference too",
        )
        divided = (
            f"{trained:,} parameters of a shard of the adapters (rank {config.model.lora.rank})"
        )
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
    yield "checkpoint's copy in host memory", size_text(TRAINED_ITEMSIZE * trained), how


def _logits_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    if (sizes := model.dimensions) is None:
        yield "logits of a chunk", "unknown", _NO_SIZES
        return
    tokens = min(config.model.logprob_chunk_tokens, micro_batch_tokens(config, num_ranks))
    each = logits_bytes_per_element(ITEMSIZE[config.model.dtype])
    how = f"{tokens} tokens x V {sizes.vocabulary} x {each} bytes in the backward pass"
    yield "logits of a chunk", size_text(tokens * sizes.vocabulary * each), how


def engine_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, tp = ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    how = f"parameters x {itemsize} / tensor_parallel_size {tp} (norms and biases whole)"
    yield "weights", size_text(engine_weights(config, model)), how
    if (sizes := model.dimensions) is None:
        yield "KV cache", "unknown", _NO_SIZES
        return
    itemsize, heads = kv_itemsize(config), max(1, sizes.kv_heads // tp)
    token = kv_bytes_per_token(sizes, itemsize, tp)
    how = f"2 x {sizes.layers} layers x {heads} kv heads of a rank x head_dim {sizes.head_dim} x {itemsize}"
    yield "KV cache of a token", size_text(token), how
    sequences = sequences_of_engine(config, num_ranks)
    longest = engine_tokens(config)  # as the judge it reads longer texts than rollouts are
    needed = sequences * longest
    how = f"{sequences} sequences of an engine x {longest} tokens x {token:,} bytes"
    yield (
        "KV cache for all at full length",
        f"<= {size_text(needed * token)}",
        f"{how} (a group shares its prompt)",
    )
    if isinstance(given := config.rollout.engine.get("kv_cache_memory_bytes"), int):
        how = f"engine.kv_cache_memory_bytes {given:,} / {token:,}"
        yield "tokens that fit", f"{given // token:,} of {needed:,}", how


def size_text(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"


# How long a text the engine has room for: what vLLM calls max_model_len.


def engine_tokens(config: Config) -> int:
    """The longest rollout, or what a judge that is the engine reads and says, in tokens. Raises ConfigError for a
    rubric that cannot be read."""
    if not any(reward.is_engine_judge for reward in config.rewards):
        return config.max_rollout_tokens
    from grpo_spmd.checks.reward_models import room_of_judges

    return max(config.max_rollout_tokens, *room_of_judges(config).values())


def check_engine_room(
    config: Config, folder: Path | None, row_sets: Sequence[Sequence[PromptRow]]
) -> None:
    """As check_engine_judges, where there are any."""
    if any(reward.is_engine_judge for reward in config.rewards):
        from grpo_spmd.checks.reward_models import check_engine_judges

        check_engine_judges(config, folder, row_sets)


# Sizes and counts that follow from a config and a model's shapes.


ITEMSIZE = {"float32": 4, "bfloat16": 2}
TRAINED_ITEMSIZE = 12  # float32 and AdamW's two moments


def shard_numel(shapes: Shapes, num_ranks: int) -> int:
    """Elements of a full shard: FSDP2 deals ceil(rows / ranks) rows of each tensor to a rank, and pads the last."""
    return sum(
        -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes.values() if shape
    )


def adapter_shapes(shapes: Shapes, lora: LoraConfig) -> Shapes:
    """A and B, (rank, columns) and (rows, rank), beside each matrix of a layer that `target_modules` names."""
    found: Shapes = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight").rpartition(".")[2]
        is_named = lora.target_modules == "all-linear" or module in lora.target_modules
        if is_named and len(shape) == 2 and re.search(r"\.layers\.\d+\.", name):
            found |= {
                f"{name}.lora_A": (lora.rank, shape[1]),
                f"{name}.lora_B": (shape[0], lora.rank),
            }
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
    return (
        int(loss.old_logprobs != "engine" and is_asked),
        int(loss.kl_coef > 0),
        int(config.critic.is_on_policy),
    )


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
    rollouts = (
        config.rollout.num_prompts_per_step
        * config.rollout.group_size
        // config.training.num_mini_batches
    )
    return -(-rollouts // num_ranks)


def logits_bytes_per_element(itemsize: int) -> int:
    """Bytes of each logit at the peak of logprobs.TokenLogprobs: float32, and the product in another compute dtype."""
    return 4 if itemsize == 4 else 4 + itemsize


def kv_bytes_per_token(sizes: Dimensions, itemsize: int, tensor_parallel_size: int) -> int:
    """Keys and values of one token on one rank of an engine; with more ranks than kv heads each rank holds one head."""
    return (
        2
        * sizes.layers
        * max(1, sizes.kv_heads // tensor_parallel_size)
        * sizes.head_dim
        * itemsize
    )


# What a careful colleague would say about a valid config: one line each, with the numbers, only where it is true.


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    loss, training, longest = config.loss, config.training, config.max_rollout_tokens
    budget, low, high = (
        training.max_tokens_per_micro_batch,
        loss.clip_ratio_low,
        loss.clip_ratio_high,
    )
    if budget < 2 * longest:
        what = f"{budget} holds fewer than 2 of the longest rollouts ({longest} tokens)"
        yield f"training.max_tokens_per_micro_batch {what}: long ones are not packed"
    if ratio_is_one(config):
        what = f"loss.clip_ratio_low {low:g}, clip_ratio_high {high:g} and dual_clip never bind"
        yield f"one optimizer step a rollout: the ratio is exactly 1, so that {what}"
    elif loss.policy == "gspo" and max(low, high) > 0.01:
        what = f"with clip bounds {low:g} and {high:g}, sized for ratios of tokens"
        yield f"loss.policy gspo {what}: the GSPO paper has 3e-4 and 4e-4"
    yield from _about_the_algorithm(loss, config.advantage, config.rollout.group_size)
    if config.advantage.estimator == "max_rl" and any(
        reward.weight < 0 for reward in config.rewards
    ):
        what = "divides by the group's mean reward, and where that is not above 0 the group teaches nothing"
        yield f"advantage.estimator max_rl with a weight below 0 among rewards: it {what}"
    yield from _about_shares(config, num_ranks)
    steps, warmup = training.num_optimizer_steps * training.num_steps, config.optimizer.warmup_steps
    if warmup >= steps:
        what = f"optimizer.warmup_steps {warmup} covers the run's {steps} optimizer steps"
        yield f"{what}: lr {config.optimizer.lr:g} is reached at its end or never"
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        what = f"a run that dies before the end of its {training.num_steps} steps has nothing to go on from"
        yield f"checkpoint.every_steps 0: {what}"


def _about_the_algorithm(loss: LossConfig, advantage: AdvantageConfig, group: int) -> Iterator[str]:
    over_group = advantage.estimator == "grpo" and advantage.normalize_std == "group"
    if loss.policy == "gspo" and loss.aggregation == "token":
        what = "long sequences count for more; the paper takes the mean over sequences (sequence)"
        yield f"loss.policy gspo with aggregation token: {what}"
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        what = f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}"
        yield f"{what}: the paper divides by a constant (constant)"
    if loss.kl_in == "reward" and over_group:
        what = "where rewards are alike, small differences of KL become advantages"
        yield f"loss.kl_in reward with normalize_std group: {what}"
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        what = f"loss.policy gspo with rollout_correction {loss.rollout_correction}"
        yield f"{what}: weights of tokens in a loss of sequences (sequence_tis)"
    if loss.policy == "cispo" and (low := loss.clip_ratio_low) < 1:
        yield f"loss.policy cispo with clip_ratio_low {low:g}: it is usually run without a lower bound (1)"
    if advantage.estimator == "rloo" and group < 4:
        what = f"advantage.estimator rloo with rollout.group_size {group}"
        yield f"{what}: each baseline is the mean of only {group - 1} other rewards"
    if over_group and group == 2:
        what = "every pair gets the same two advantages, however far its rewards are apart"
        yield f"rollout.group_size 2 with normalize_std group: {what}"


def _about_shares(config: Config, num_ranks: int) -> Iterator[str]:
    rollout = config.rollout
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.tensor_parallel_size
    if prompts % engines:
        what = f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        if prompts < engines:
            what = f"{engines - prompts} never sample while others do; raise it to {engines} or a multiple"
        yield f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: {what}"
    per_step = prompts * rollout.group_size // config.training.num_mini_batches
    if per_step < num_ranks:
        what = f"{num_ranks - per_step} of them have nothing to train on; raise rollout.num_prompts_per_step"
        yield f"{per_step} completions per optimizer step for {num_ranks} ranks: {what}"
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        yield "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1: groups are dropped, and never replaced"
