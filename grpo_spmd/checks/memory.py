"""Computes the memory of a rank from the config and the tensor shapes, and advises on the config.

The arithmetic is exact, and `--explain` prints it. The planner (tools/plan) adds the peaks of
forward and backward passes, which it measures on fake tensors. The second half of the file is about
valid configs that may still not do what their author meant: it looks for config keys that have no
effect, and gives advice. If the run would certainly be meaningless, the config is refused.
Everything else is a line of `--explain`, printed only if it applies, with its numbers.

Words: a *shard* is the part of every tensor that FSDP2 gives to one rank. A *replica* is a group of
ranks that together hold one whole copy of the policy. *numel* counts elements, *itemsize* is the
bytes of one element. Imports no torch.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from grpo_spmd.config.coerce import read_table
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import FROM_RECIPE
from grpo_spmd.config.rules import met_conditions
from grpo_spmd.config.schema import (
    ADAPTER_RANKS,
    MOMENT_BLOCK,
    POLICY,
    ROUTES_SAMPLED_EVERY,
    Config,
    LoraConfig,
    OptimizerConfig,
)
from grpo_spmd.model.config_json import (
    Dimensions,
    ModelFacts,
    Shapes,
    route_bytes_per_token,
)
from grpo_spmd.rewards.servers import fields_in, read_rubric

ITEMSIZE = {"float32": 4, "bfloat16": 2}
# What a judge's prompt has besides its rubric: instructions, marks around texts, chat template.
_JUDGE_EXTRA_TOKENS = 512
# The part before the first "/" of every metric's name.
_METRICS = (
    "batching", "completion", "critic", "dynamic_sampling", "environment", "episode", "eval",
    "loss", "memory", "optim", "process", "progress", "reward", "rollout", "rollout_correction",
    "teacher", "throughput", "time", "weight_sync",
)  # fmt: skip


# Sizes and counts of a step


def replica_ranks(config: Config, num_ranks: int) -> int:
    """Returns the number of ranks over which one copy of the policy is sharded."""
    return num_ranks // config.model.num_replicas


def shard_numel(shapes: Shapes, num_ranks: int) -> int:
    """Returns how many elements a full shard has: the largest part that a rank can get.

    FSDP2 gives each rank ceil(rows / ranks) rows of each tensor. The last rank may get fewer.
    """
    return sum(
        -(-shape[0] // num_ranks) * math.prod(shape[1:]) for shape in shapes.values() if shape
    )


def moment_bytes(shapes: Shapes, num_ranks: int, optimizer: OptimizerConfig) -> int:
    """Returns the bytes of AdamW's two moments of a full shard.

    Both are float32; or, with adamw_8bit, a matrix has codes of one byte and a float32 scale for
    each block of MOMENT_BLOCK numbers of a row.
    """
    num_bytes = 0
    for shape in shapes.values():
        numel = shard_numel({"": shape}, num_ranks)
        if optimizer.name == "adamw" or len(shape) < 2:
            num_bytes += 8 * numel
        else:
            blocks = -(-shape[-1] // MOMENT_BLOCK)
            num_bytes += 2 * numel + 8 * blocks * (numel // shape[-1])
    return num_bytes


def trained_bytes(shapes: Shapes, num_ranks: int, optimizer: OptimizerConfig) -> int:
    """Returns the bytes of a full shard of parameters that train, in float32, and their moments."""
    return 4 * shard_numel(shapes, num_ranks) + moment_bytes(shapes, num_ranks, optimizer)


def adapter_shapes(shapes: Shapes, lora: LoraConfig) -> Shapes:
    """Returns the shapes of LoRA's matrices, for each matrix that `target_modules` names.

    A weight [rows, columns] gets A [rank, columns] and B [rows, rank].
    """
    adapters: Shapes = {}
    for name, shape in shapes.items():
        # As in peft, target_modules has the last part of a name: q_proj, without the path.
        module = name.removesuffix(".weight").rpartition(".")[2]
        # Embedding and lm_head have no layer number, and get no adapters.
        is_target = lora.target_modules == "all-linear" or module in lora.target_modules
        # peft adapts only linear layers; the experts' weights are not in such layers.
        is_linear = len(shape) == 2 and ".experts." not in name
        if is_target and is_linear and re.search(r"\.layers\.\d+\.", name):
            adapters[f"{name}.lora_A"] = (lora.rank, shape[1])
            adapters[f"{name}.lora_B"] = (shape[0], lora.rank)
    return adapters


class ExtraPasses(NamedTuple):
    """Counts the forward passes of the policy's layers over all rollouts before the update."""

    old_logprobs: int
    reference: int
    # For the values of a critic that is a head on the policy's layers.
    policy_values: int
    # For teachers that are the policy or the reference.
    shared_teachers: int


def extra_passes(config: Config) -> ExtraPasses:
    """Returns how many forward passes over all rollouts a step makes before its update, by
    purpose."""
    loss = config.loss
    # With one optimizer step, the logprobs of the update itself serve as the old ones.
    needs_old = loss.kl_in == "reward" or config.training.num_optimizer_steps > 1
    return ExtraPasses(
        old_logprobs=int(loss.old_logprobs != "engine" and needs_old),
        reference=int(loss.kl_coef > 0),
        policy_values=int(config.critic.is_on_policy),
        shared_teachers=int(
            any(is_shared_teacher(config, path) for path in config.teacher.paths.values())
        ),
    )


def is_shared_teacher(config: Config, path: str) -> bool:
    """Returns True if a teacher is the policy, with or without its adapters, or the reference."""
    if path == POLICY:
        return True
    return path == config.model.path and bool(config.model.lora.rank or config.loss.kl_coef)


def rollouts_of_a_rank(config: Config, num_ranks: int) -> int:
    """Returns how many rollouts one rank trains on in one optimizer step, at most.

    Ranks that share their micro-batches (model.sequence_parallel_size) have the same rollouts. All
    rollouts are assumed to have the same length.
    """
    rollouts = config.rollout.num_prompts_per_step * config.rollout.group_size
    num_groups = num_ranks // config.model.sequence_parallel_size
    return -(-(rollouts // config.training.num_mini_batches) // num_groups)


def exchanged_bytes(sizes: Dimensions, num_tokens: int, num_ranks: int, itemsize: int) -> int:
    """Returns the bytes that a rank sends in a forward pass of all layers if ranks share a row.

    Each of `num_ranks` ranks computes a slice of a micro-batch of `num_tokens` tokens
    (model/sequence_parallel.py), and sends the others the queries, keys, values and attention's
    output of its tokens. KV heads are repeated until the ranks divide them. The backward pass sends
    as many bytes.
    """
    kv_heads = math.lcm(sizes.kv_heads, num_ranks)
    width = 2 * (sizes.heads + kv_heads) * sizes.head_dim
    slice_tokens = -(-num_tokens // num_ranks)
    return sizes.layers * slice_tokens * width * itemsize * (num_ranks - 1) // num_ranks


def micro_batches_per_step(config: Config, num_ranks: int) -> tuple[int, int]:
    """Returns the fewest and the most micro-batches that a rank can have in a step.

    It has the most if every rollout has its full length.
    """
    steps = config.training.num_optimizer_steps
    # A rollout is never split over micro-batches.
    rollouts_each = config.micro_batch_tokens // config.max_rollout_tokens
    return steps, steps * -(-rollouts_of_a_rank(config, num_ranks) // rollouts_each)


def micro_batch_tokens(config: Config, num_ranks: int) -> int:
    """Returns the most tokens that one micro-batch can have."""
    # If a rank has few rollouts, all of them together may be less than the budget.
    rank_tokens = rollouts_of_a_rank(config, num_ranks) * config.max_rollout_tokens
    return min(config.micro_batch_tokens, rank_tokens)


def route_bytes(config: Config, model: ModelFacts, num_ranks: int) -> int:
    """Returns the bytes of the routes of the rollouts that a rank trains on in a step, at most.

    Routes are the experts that the engine's MoE routers chose for each token. They are on the
    rank's device from the exchange of the rollouts to the end of the step. The result is 0 if the
    engine records no routes."""
    per_token = route_bytes_per_token(model.config)
    # vLLM returns the routes of an engine on several GPUs to the first rank alone.
    if not per_token or not config.model.router_replay or config.rollout.engine_ranks > 1:
        return 0
    rollouts = rollouts_of_a_rank(config, num_ranks) * config.training.num_mini_batches
    # Some rollouts have a second set of routes, to compare the engine's with the policy's own: at
    # most one micro-batch ("row") of rollouts.
    row = micro_batch_tokens(config, num_ranks) // config.max_rollout_tokens
    rollouts += min(row, -(-rollouts // ROUTES_SAMPLED_EVERY))
    # A byte of each token says whether it has routes.
    return rollouts * config.max_rollout_tokens * (per_token + 1)


# Trainer


@dataclass(frozen=True)
class State:
    """The sizes of what one rank holds of the policy between updates."""

    # The number of parameters in a full shard.
    shard: int
    # The number of parameters that train: those of the shard, or of its LoRA adapters.
    trained: int
    # The bytes of the moments of the parameters that train.
    moments: int
    # The bytes of the frozen base model under LoRA adapters; 0 without LoRA.
    base: int
    # The bytes of the reference model; 0 if there is none, or if it is the base.
    reference: int

    @property
    def saved(self) -> int:
        """The bytes of a checkpoint: parameters that train, and their moments."""
        return 4 * self.trained + self.moments

    @property
    def num_bytes(self) -> int:
        """The bytes of parameters, moments, base and reference together."""
        return self.saved + self.base + self.reference

    @property
    def gradients(self) -> int:
        """The bytes of all gradients, which are float32."""
        return 4 * self.trained

    def offloaded(self, offload: bool | Literal["optimizer"]) -> int:
        """Returns how many bytes are in host memory while the engine is awake."""
        return {False: 0, "optimizer": self.moments, True: self.num_bytes}[offload]


def state_of(config: Config, model: ModelFacts, num_ranks: int) -> State:
    """Returns the policy's state on one rank."""
    ranks = replica_ranks(config, num_ranks)
    shard, lora = shard_numel(model.shapes, ranks), config.model.lora
    frozen_bytes = ITEMSIZE[config.model.dtype] * shard
    trained_shapes = adapter_shapes(model.shapes, lora) if lora.rank else model.shapes
    return State(
        shard=shard,
        trained=shard_numel(trained_shapes, ranks),
        moments=moment_bytes(trained_shapes, ranks, config.optimizer),
        # With adapters the reference is the base with these switched off: it costs nothing.
        base=frozen_bytes if lora.rank else 0,
        reference=frozen_bytes if config.loss.kl_coef and not lora.rank else 0,
    )


def sync_size(shapes: Shapes, num_ranks: int, itemsize: int, bucket_bytes: int) -> tuple[int, int]:
    """Returns the bytes and the number of collectives of one weight sync in a replica.

    They are the same as the run's SyncStats. `num_ranks` is the number of ranks of the replica.
    """
    numel = shard_numel(shapes, num_ranks)
    if num_ranks == 1:
        return numel * itemsize, 0
    # A bucket gathers the same number of elements from every rank.
    bucket = min(max(1, bucket_bytes // (num_ranks * itemsize)), numel)
    return num_ranks * numel * itemsize, -(-numel // bucket)


def sync_buffers(config: Config, model: ModelFacts, num_ranks: int) -> dict[str, int]:
    """Returns the bytes of the buffers of a weight sync on GPUs, by purpose: what it needs besides
    policy and engine."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], replica_ranks(config, num_ranks)
    shapes, lora = model.shapes, config.model.lora
    merges = lora.rank > 0 and lora.sync == "merged"
    adapters = adapter_shapes(shapes, lora) if merges else {}
    buffers: dict[str, int] = {}
    if adapters:
        # All A matrices are gathered before the first bucket, and kept as float32.
        numel_a = sum(math.prod(s) for name, s in adapters.items() if name.endswith(".lora_A"))
        buffers["adapters, whole"] = 4 * numel_a
    # For each tensor: the bytes of the whole tensor in the engine's dtype, with the padding of
    # every rank's shard; and the bytes that merging this rank's shard takes: W + BA in float32,
    # beside a float32 copy of W unless W is float32 already.
    sizes: list[tuple[int, int]] = []
    for name, shape in shapes.items():
        numel = shard_numel({name: shape}, ranks)
        merged = numel * (4 if itemsize == 4 else 8) * (f"{name}.lora_B" in adapters)
        sizes.append((ranks * numel * itemsize, merged))
    if ranks == 1:
        # There are no buckets: each tensor is rounded, or merged and then rounded, on its way into
        # the engine. The peak is while it is merged, or while the rounded tensor is made from the
        # merged one.
        buffers["largest tensor"] = max(
            max(merged, whole + min(merged, 4 * whole // itemsize)) for whole, merged in sizes
        )
        return buffers
    bucket_bytes = config.rollout.sync_bucket_bytes("cuda")
    num_bytes, num_buckets = sync_size(shapes, ranks, itemsize, bucket_bytes)
    # A bucket holds whole elements of all ranks.
    bucket = max(1, bucket_bytes // (ranks * itemsize)) * ranks * itemsize
    # One bucket is gathered while the tensors of the bucket before it are copied to the engine.
    buffers["buckets"] = min(2, num_buckets) * min(bucket, num_bytes)
    # If there are several buckets, a tensor of one bucket may be put together while a shard is
    # merged for the next bucket: then both buffers exist at the same time.
    largest = [max(size) for size in zip(*sizes, strict=True)]
    buffers["largest tensor"] = sum(largest) if num_buckets > 1 else max(largest)
    return buffers


def logits_bytes_per_element(itemsize: int) -> int:
    """Returns the bytes of one logit at the peak of TokenLogprobs.

    The peak holds a float32 logit, and in bfloat16 the product that it was computed from.
    """
    return 4 if itemsize == 4 else 4 + itemsize


# Engine


def engine_weights(config: Config, model: ModelFacts) -> int:
    """Returns the bytes of an engine's weights on one rank."""
    itemsize, tp = ITEMSIZE[config.model.dtype], config.rollout.engine_ranks
    # vLLM splits matrices over the ranks of an engine. Norms and biases are whole on each rank.
    return itemsize * sum(
        math.prod(shape) // (tp if len(shape) > 1 else 1) for shape in model.shapes.values()
    )


def engine_backup(config: Config, model: ModelFacts, tables: int = 0) -> int:
    """Returns the bytes of host memory that an engine on a GPU pins on one rank while it sleeps.

    An engine keeps its weights in host memory at `sleep_level` 1, and at either level while reward
    models score; otherwise this is 0. At every such sleep vLLM copies each block of its pool into a
    pinned tensor, even those of a base that did not change (CuMemAllocator.sleep, 0.26 to 0.33).
    Torch rounds the size of each up to a power of two, and keeps the memory for later sleeps
    (CachingHostAllocator). `tables` are the bytes of one more tensor in the pool,
    the sampler's tables."""
    scores = any(reward.model is not None for reward in config.rewards)
    if config.rollout.sleep_level_with(config.model.lora) != 1 and not scores:
        return 0
    itemsize, tp = ITEMSIZE[config.model.dtype], config.rollout.engine_ranks
    sizes = Counter({"tables": tables})
    for shapes in (model.shapes, engine_adapter_shapes(config, model.shapes)):
        for name, shape in shapes.items():
            # vLLM merges q, k and v, and gate and up, into one tensor each, but not their adapters.
            if not name.endswith(("lora_A", "lora_B")):
                name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
                name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
            sizes[name] += itemsize * math.prod(shape) // (tp if len(shape) > 1 else 1)
    # Torch's blocks on a GPU: tensors up to 1 MiB share blocks of 2 MiB, those below 10 MiB share
    # blocks of 20 MiB, and each larger one has its own, a multiple of 2 MiB
    # (c10/cuda/CUDACachingAllocator, 2.11 to 2.14).
    mib = 1 << 20
    small = sum(size for size in sizes.values() if size <= mib)
    middle = sum(size for size in sizes.values() if mib < size < 10 * mib)
    blocks = [2 * mib] * -(-small // (2 * mib)) + [20 * mib] * -(-middle // (20 * mib))
    blocks += [-(-size // (2 * mib)) * 2 * mib for size in sizes.values() if size >= 10 * mib]
    return sum(1 << (size - 1).bit_length() for size in blocks)


def engine_adapter_shapes(config: Config, shapes: Shapes) -> Shapes:
    """Returns the shapes of the adapters that an engine holds beside the base, {} if it gets none.

    vLLM allocates them for the smallest of the ranks that it knows (ADAPTER_RANKS) that
    suffices."""
    lora = config.model.lora
    if not lora.base_stays_in_engine:
        return {}
    rank = next(rank for rank in ADAPTER_RANKS if rank >= lora.rank)
    return adapter_shapes(shapes, replace(lora, rank=rank))


def kv_itemsize(config: Config) -> int:
    """Returns the bytes of one number in the KV cache."""
    # checks/machine.py refuses fp8 for a run, but the planner may be asked about it.
    is_fp8 = str(config.rollout.engine.get("kv_cache_dtype", "")).startswith("fp8")
    return 1 if is_fp8 else ITEMSIZE[config.model.dtype]


def sequences_of_engine(config: Config, num_ranks: int) -> int:
    """Returns how many completions one engine samples in a step.

    Groups that dynamic sampling starts later, in the place of dropped ones, are not counted.
    """
    # An engine samples whole groups.
    engines = num_ranks // config.rollout.engine_ranks
    return -(-config.rollout.num_launched_prompts // engines) * config.rollout.group_size


def most_sequences(config: Config, num_ranks: int, num_held_out: float = math.inf) -> float:
    """Returns the most sequences that one engine can get at one time, in a step or an evaluation.

    `num_held_out` counts the prompts of all held-out sets. If it is not known because no data was
    read, an evaluation has no bound. A judge gets one text for each completion, so it never gets
    more."""
    engines = num_ranks // config.rollout.engine_ranks
    rollouts = sequences_of_engine(config, num_ranks)
    # An evaluation distributes completions, not prompts.
    is_on = config.eval.every_steps > 0
    return max(rollouts, num_held_out * config.eval.num_samples / engines if is_on else 0)


def judge_prompt_tokens(config: Config) -> dict[int, int]:
    """Returns the longest prompt, in tokens, of each judge that the run's own engine serves.

    The keys are indices into `config.rewards`. The limit is the judge's max_tokens, if it is set.
    Otherwise it is a bound that needs no tokenizer: the rubric's bytes, and the limits of the
    prompts and completions that are put into the rubric. An eighth is added to these limits,
    because the texts are tokenized again, as JSON in a chat. A data column counts as a prompt.
    Raises ConfigError for a rubric that cannot be read.
    """
    prompt_limit = config.data.max_prompt_tokens
    completion_limit = config.max_rollout_tokens - prompt_limit
    tokens: dict[int, int] = {}
    for index, reward in enumerate(config.rewards):
        if not reward.is_engine_judge:
            continue
        rubric = read_rubric(str(reward.judge), f"rewards.{index}.judge")
        inserted = sum(
            completion_limit if name == "completion" else prompt_limit for name in fields_in(rubric)
        )
        # A token has at least one byte, so the rubric has at most as many tokens as bytes.
        bound = len(rubric.encode()) + _JUDGE_EXTRA_TOKENS + inserted * 9 // 8
        tokens[index] = reward.max_tokens or bound
    return tokens


def judge_tokens(config: Config) -> dict[int, int]:
    """Returns the most tokens of prompt and reply together, for each judge that the engine
    serves."""
    return {
        index: tokens + config.rewards[index].judge_tokens
        for index, tokens in judge_prompt_tokens(config).items()
    }


def engine_tokens(config: Config) -> int:
    """Returns vLLM's max_model_len: the tokens of the longest rollout, or of a judge's prompt and
    reply.

    Raises ConfigError for a rubric that cannot be read.
    """
    return max(config.max_rollout_tokens, *judge_tokens(config).values(), 0)


def size_text(num_bytes: float) -> str:
    """Returns a size in bytes as text with a binary unit, such as "1.50 GiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


# Config keys that have no effect, and advice about valid configs


def check_idle_keys(config: Config, sources: Mapping[str, str] | None = None) -> None:
    """Raises ConfigError for keys with which the run would silently not do what the user meant.

    `sources` tells where each key was set, as load_config_with_sources returns it.
    """
    sources = sources or {}
    lora = config.model.lora
    # A rank of 0 may be set on purpose, to switch adapters off for one launch.
    lora_key = _first_key_set(sources, "model.lora.")
    if not lora.rank and lora_key and sources.get("model.lora.rank") == "default":
        raise ConfigError(
            f"model.lora.rank is not set (0: full fine-tuning), so that {lora_key} would do "
            "nothing; set it, e.g. to 16, or take the other out"
        )
    if lora.rank and not lora.target_modules:
        raise ConfigError(
            "model.lora.target_modules names no layer; leave it out (all-linear), or name "
            "some: [q_proj]"
        )
    teacher_key = _first_key_set(sources, "teacher.")
    # The recorded config of a run sets every key, teacher.path too (to null): that is no mistake.
    if teacher_key and not config.teacher.is_on and sources.get("teacher.path") == "default":
        raise ConfigError(
            f"teacher.path is not set, so that {teacher_key} would do nothing; set it to the "
            "folder or hub id of a model, or take the other out"
        )
    # A teacher alone, or an environment's own reward, is enough to learn from.
    has_other_signal = config.teacher.is_on or config.environment.can_reward
    all_zero = config.rewards and not any(reward.weight for reward in config.rewards)
    if all_zero and not has_other_signal:
        raise ConfigError(
            "rewards: all weights are 0, so that every reward is 0; set one rewards.N.weight"
        )
    # AdamW normalizes gradients: a step moves each weight by about lr.
    if config.optimizer.lr > 1:
        raise ConfigError(
            f"optimizer.lr ({config.optimizer.lr:g}) is above 1, where AdamW moves each weight "
            "by more than that a step; is a sign missing? e.g. 2e-6"
        )
    metric = config.checkpoint.best_metric
    if metric is not None and not metric.startswith(tuple(f"{name}/" for name in _METRICS)):
        raise ConfigError(
            f"checkpoint.best_metric ({metric}) is no metric's name: they are as in "
            "metrics.jsonl, e.g. reward/mean or eval/SET/mean"
        )


def _first_key_set(sources: Mapping[str, str], prefix: str) -> str | None:
    """Returns the first key that begins with `prefix` and that the user has set, or None."""
    keys = (name for name in sources if name.startswith(prefix) and sources[name] != "default")
    return next(keys, None)


def idle_keys(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    """Yields a line for each key that was set and has no effect because of another key."""
    values = flatten_config(config)
    for name, conditions in read_table("idle_keys.tsv"):
        reason = met_conditions(conditions, values)
        for key in fnmatch.filter(sources, name) if reason else ():
            # A recipe sets keys for its algorithm, which the user's override of another key may
            # make idle: that is no mistake.
            if not sources[key].startswith(("default", FROM_RECIPE)):
                yield f"{key} does nothing: {reason}"


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    """Yields a line for each setting of a valid config that is worth a second look."""
    values = flatten_config(config)
    for conditions, problem in read_table("advice.tsv"):
        if facts := met_conditions(conditions, values):
            yield f"{facts}: {problem}"
    loss, max_tokens = config.loss, config.max_rollout_tokens
    budget = config.micro_batch_tokens
    if budget < 2 * max_tokens:
        yield (
            f"training.max_tokens_per_micro_batch {budget} holds fewer than 2 of the longest "
            f"rollouts ({max_tokens} tokens): long ones are not packed"
        )
    # GSPO's ratio is a mean over the sequence, which stays much closer to 1.
    low, high = loss.clip_ratio_low, loss.clip_ratio_high
    if loss.policy == "gspo" and max(low, high) > 0.01:
        yield (
            f"loss.policy gspo with clip bounds {low:g} and {high:g}, sized for ratios of "
            "tokens: the GSPO paper has 3e-4 and 4e-4"
        )
    weights = [reward.weight for reward in config.rewards]
    if config.advantage.estimator == "max_rl" and min(weights, default=0.0) < 0:
        yield (
            "advantage.estimator max_rl with a weight below 0 among rewards: it divides by "
            "the group's mean reward, and where that is not above 0 the group teaches nothing"
        )
    rollout, training, optimizer = config.rollout, config.training, config.optimizer
    # All engines wait for the one that samples the most groups.
    prompts, engines = rollout.num_prompts_per_step, num_ranks // rollout.engine_ranks
    if prompts % engines:
        problem = f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        if prompts < engines:
            problem = f"{engines - prompts} never sample while others do"
            problem += f"; raise it to {engines} or a multiple"
        yield (
            f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: {problem}"
        )
    per_step = prompts * rollout.group_size // training.num_mini_batches
    num_rows = num_ranks // config.model.sequence_parallel_size
    trainers = "ranks" if num_rows == num_ranks else "groups of ranks"
    if per_step < num_rows:
        yield (
            f"{per_step} completions per optimizer step for {num_rows} {trainers}: "
            f"{num_rows - per_step} of them have nothing to train on; raise "
            "rollout.num_prompts_per_step"
        )
    steps = config.policy_training.num_run_optimizer_steps
    if optimizer.warmup_steps >= steps:
        yield (
            f"optimizer.warmup_steps {optimizer.warmup_steps} covers the run's {steps} "
            f"optimizer steps: lr {optimizer.lr:g} is reached at its end or never"
        )
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        yield (
            "checkpoint.every_steps 0: a run that dies before the end of its "
            f"{training.num_steps} steps has nothing to go on from"
        )
