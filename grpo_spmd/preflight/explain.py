"""`--explain`: what a config comes to, by arithmetic, and where each of its values was set. Needs no torch, no vllm, no
GPU.

Sizes come from the headers of the model's safetensors files, else from its config.json. What is not exact says
"estimate".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Literal

from grpo_spmd.config.dump import flat_config
from grpo_spmd.config.schema import Config
from grpo_spmd.preflight.arithmetic import (
    activation_bytes,
    activation_bytes_per_token,
    adapter_shapes,
    kv_bytes_per_token,
    logits_bytes_per_element,
    micro_batch_tokens,
    micro_batches_per_step,
    ratio_is_one,
    rollouts_of_a_rank,
    shard_numel,
    sync_size,
)
from grpo_spmd.preflight.model_facts import ModelFacts

Row = tuple[str, str, str]  # name, value, how it follows
_ITEMSIZE = {"float32": 4, "bfloat16": 2}
_GPU_GIB = (24, 80, 141)


def explain(
    config: Config, sources: Mapping[str, str], model: ModelFacts | None, *, num_rows: int, num_ranks: int
) -> list[str]:
    """The lines that `--explain` prints.

    Args:
        sources: of `config.load_config_with_sources`.
        model: of `read_model`; None leaves out what only the model could tell, and says so.
        num_rows: rows of data.train.
        num_ranks: ranks to assume, a multiple of rollout.tensor_parallel_size.
    """
    lines = _section("a step", _step_rows(config, num_ranks))
    lines += _section("the run", _run_rows(config, num_rows))
    if model is None:
        unknown = (
            f"sizes, sync and memory of {config.model.path} are not known here: it is no folder with all its weights"
        )
        lines += ["", f"{unknown}, and not in the local Hugging Face cache (hf download brings it)"]
    else:
        lines += _section("model and weight sync", _sync_rows(config, model, num_ranks))
        lines += _section("memory of a rank: training", _training_rows(config, model, num_ranks))
        lines += _section("memory of a rank: engine", _engine_rows(config, model, num_ranks))
    found = list(advice(config, num_ranks))
    lines += ["", "worth a look" + ("" if found else ": nothing found"), *(f"  - {line}" for line in found)]
    return [*lines, "", "where each value came from", *_provenance(config, sources)]


def _step_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    rollout, training, loss = config.rollout, config.training, config.loss
    prompts, group, longest = rollout.num_prompts_per_step, rollout.group_size, config.max_rollout_tokens
    samples, steps, budget = prompts * group, config.training.num_optimizer_steps, training.max_tokens_per_micro_batch
    engines = num_ranks // rollout.tensor_parallel_size
    yield "ranks", f"{num_ranks:,}", "--ranks, else WORLD_SIZE, else 1"
    yield "engines", f"{engines:,}", f"{num_ranks} ranks / tensor_parallel_size {rollout.tensor_parallel_size}"
    yield "samples", f"{samples:,}", f"{prompts} prompts x group_size {group}"
    if rollout.dynamic_sampling:
        yield (
            "samples, generated",
            f">= {samples:,}",
            f"dynamic_sampling: up to {rollout.dynamic_sampling_max_rounds} rounds of generation",
        )
    yield (
        "longest rollout, tokens",
        f"{longest:,}",
        f"max_prompt_tokens {config.data.max_prompt_tokens} + {rollout.max_completion_tokens}",
    )
    yield "tokens", f"<= {samples * longest:,}", f"{samples} samples x {longest}"
    yield (
        "optimizer steps",
        f"{steps:,}",
        f"num_mini_batches {training.num_mini_batches} x num_epochs {training.num_epochs}",
    )
    per_step = samples // training.num_mini_batches
    yield (
        "completions per optimizer step",
        f"{per_step:,}",
        f"{samples} samples / num_mini_batches {training.num_mini_batches}",
    )
    yield (
        "micro-batch, tokens",
        f"<= {budget:,}",
        f"the budget holds {budget // longest} of the longest rollouts ({budget} / {longest})",
    )
    fewest, most = micro_batches_per_step(config, num_ranks)
    rollouts = rollouts_of_a_rank(config, num_ranks)
    how = f"optimizer steps x 1, to x ceil({rollouts} rollouts of full length / {budget // longest} in a micro-batch)"
    yield "micro-batches of a rank", f"{fewest:,} to {most:,}", how
    if loss.old_logprobs == "engine":
        yield "extra passes for old logprobs", "0", "old_logprobs engine: those that came with the completions"
    elif loss.kl_in == "reward":
        yield "extra passes for old logprobs", "1", "a forward of all rollouts, for the KL in the reward"
    elif steps == 1:
        yield "extra passes for old logprobs", "0", "one optimizer step: they are those of the update itself"
    else:
        yield (
            "extra passes for old logprobs",
            "1",
            f"a forward of all rollouts before the first of {steps} optimizer steps",
        )
    if loss.kl_coef:
        yield "extra passes of the reference", "1", f"a forward of all rollouts, for kl_coef {loss.kl_coef:g}"
    else:
        yield "extra passes of the reference", "0", "kl_coef 0: no reference model is built"


def _run_rows(config: Config, num_rows: int) -> Iterator[Row]:
    prompts, steps = config.rollout.num_prompts_per_step, config.training.num_steps
    samples, dynamic = prompts * config.rollout.group_size, config.rollout.dynamic_sampling
    dropped = config.data.on_long_prompt == "drop"
    note = "; prompts over max_prompt_tokens are dropped" if dropped else ""
    yield "rows of data.train", ("<= " if dropped else "") + f"{num_rows:,}", config.data.train + note
    how = f"{num_rows} rows / {prompts} prompts" + ("; refills take prompts too" if dynamic else "")
    yield "steps per epoch of the data", ("<= " if dynamic or dropped else "") + f"{num_rows / prompts:,.1f}", how
    how = f"{steps} steps x {prompts} prompts / {num_rows} rows"
    yield "epochs of the data", (">= " if dynamic or dropped else "") + f"{steps * prompts / num_rows:,.2f}", how
    yield (
        "samples trained on",
        ("<= " if dynamic else "") + f"{steps * samples:,}",
        f"{steps} steps x {samples} samples",
    )
    optimizer_steps = config.training.num_optimizer_steps
    yield "optimizer steps", f"{steps * optimizer_steps:,}", f"{steps} steps x {optimizer_steps}"


def _sync_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, mib = _ITEMSIZE[config.model.dtype], config.rollout.weight_sync_bucket_mib
    ranks = num_ranks // config.model.num_replicas
    moved, collectives = sync_size(model.shapes, ranks, itemsize, mib << 20)
    padding = moved - model.num_parameters * itemsize
    yield "parameters", f"{model.num_parameters:,}", f"{len(model.shapes)} tensors, tied ones once; {model.source}"
    padded = f" + {_size(padding)} of padding to full shards" if padding else ""
    yield (
        "bytes of a sync",
        _size(moved),
        f"parameters x {itemsize} ({config.model.dtype}){padded}; what each engine is handed",
    )
    piece = min(mib << 20, moved)
    how = (
        f"ceil({_size(moved)} / {_size(piece)} bucket), over {ranks} ranks"
        if ranks > 1
        else "one rank holds the whole policy"
    )
    yield "collectives of a sync", f"{collectives:,}", how
    if config.model.lora.base_stays_in_engine:
        adapters = itemsize * sum(
            math.prod(shape) for shape in adapter_shapes(model.shapes, config.model.lora).values()
        )
        yield (
            "bytes of a later sync",
            _size(adapters),
            "the adapters alone, in one collective; the base stays in the engine",
        )


def _training_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    itemsize, budget = _ITEMSIZE[config.model.dtype], micro_batch_tokens(config, num_ranks)
    ranks = num_ranks // config.model.num_replicas
    shard, layer, root = shard_numel(model.shapes, ranks), model.layer_numel, model.root_numel
    divided = f"{shard:,} parameters of a shard (ceil(rows / {ranks}) of each tensor)"
    frozen = {"base": 0, "reference": 0}  # bytes
    trained = shard
    if config.model.lora.rank:
        trained = shard_numel(adapter_shapes(model.shapes, config.model.lora), ranks)
        frozen["base"] = itemsize * shard
        yield "base", _size(frozen["base"]), f"{divided} x {itemsize} ({config.model.dtype}), frozen; the reference too"
        divided = f"{trained:,} parameters of a shard of the adapters (rank {config.model.lora.rank})"
    elif config.loss.kl_coef:
        frozen["reference"] = itemsize * shard
    yield "master parameters", _size(4 * trained), f"{divided} x 4 (float32)"
    yield "gradients", _size(4 * trained), f"{trained:,} x 4 (float32), in the update only"
    yield "AdamW's moments", _size(8 * trained), f"{trained:,} x 2 x 4 (float32)"
    if frozen["reference"]:
        yield "reference", _size(frozen["reference"]), f"{shard:,} x {itemsize} ({config.model.dtype})"
    named = ["parameters + moments", *(name for name, size in frozen.items() if size)]
    state = 12 * trained + sum(frozen.values())
    yield "state between updates", _size(state), " + ".join(named)
    offload = config.model.offload
    away = {False: 0, "optimizer": 8 * trained, True: state}[offload]
    if offload:
        yield "of it in host memory", _size(away), f"while the engine is awake: offload {str(offload).lower()}"
    yield (
        "checkpoint's copy in host memory",
        _size(12 * trained),
        "parameters that train + moments, while a thread writes them",
    )

    gathered = itemsize * (root + 2 * layer)
    how = f"estimate: {itemsize} x ({root:,} of embedding, lm_head, norm + 2 layers of {layer:,}: in use, arriving)"
    yield "gathered by FSDP", _size(gathered), how
    peak, sizes = state + 4 * trained + gathered, model.dimensions
    if sizes is None:
        yield "logits and activations", "unknown", "config.json does not name the sizes of a decoder as Llama's does"
    else:
        tokens = min(config.model.logprob_chunk_tokens, budget)
        each = logits_bytes_per_element(itemsize)
        logits = tokens * sizes.vocabulary * each
        one = _size(4 * tokens * sizes.vocabulary)
        how = f"{tokens} tokens x V {sizes.vocabulary} x {each} bytes in the backward pass (one float32 [chunk, V]: {one})"
        yield "logits of a chunk", _size(logits), how
        head = 0 if config.model.lora.rank else sizes.vocabulary * sizes.hidden * (4 + itemsize)
        if head:
            how = f"V {sizes.vocabulary} x D {sizes.hidden} x (4 + {itemsize}): whole, before it is reduced"
            yield "lm_head's gradient", _size(head), how
        checkpointing, qk_norm = (
            config.model.activation_checkpointing,
            any(name.endswith("q_norm.weight") for name in model.shapes),
        )
        choices: tuple[tuple[bool | Literal["selective"], str, str], ...] = (
            (False, "without checkpointing", "all kept"),
            (
                "selective",
                "selective checkpointing",
                "one in full, of the others the input, the products and attention",
            ),
            (True, "with checkpointing", "one in full, of the others the input"),
        )
        token = activation_bytes_per_token(sizes, itemsize, qk_norm=qk_norm)
        for choice, name, what in choices:
            kept = activation_bytes(sizes, budget, itemsize, checkpointing=choice, qk_norm=qk_norm)
            how = f"estimate: {budget} tokens x ({sizes.layers} layers of {token:,} bytes, {what}; and {4 + 4 * itemsize} x D)"
            yield f"activations, {name}" + (" *" if choice == checkpointing else ""), _size(kept), how
            peak += kept if choice == checkpointing else 0
        peak += logits + head
        how = "estimate: state + gradients + gathered + logits + lm_head's gradient + activations (*), without fragmentation"
        yield "peak of the update", _size(peak), how
    moved = sync_size(model.shapes, ranks, itemsize, 1)[0]
    buckets = min(2 * (config.rollout.weight_sync_bucket_mib << 20), moved) if ranks > 1 else 0
    largest = max(math.prod(shape) for shape in model.shapes.values()) * itemsize
    sync = buckets + largest
    how = f"estimate: two buckets {_size(buckets)} + largest tensor {_size(largest)}; what vLLM keeps until a layer is complete"
    yield "buffers of the weight sync", _size(sync), how
    left = 1 - config.rollout.gpu_memory_utilization
    how = f"{_size(state - away)} of state / (1 - gpu_memory_utilization {1 - left:g}); for the update, its peak"
    yield "GPU that the rollout needs", f">= {_size(math.ceil((state - away) / left))}", how


def _engine_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    rollout, itemsize, tp = config.rollout, _ITEMSIZE[config.model.dtype], config.rollout.tensor_parallel_size
    weights = itemsize * sum(math.prod(shape) // (tp if len(shape) > 1 else 1) for shape in model.shapes.values())
    yield (
        "weights",
        _size(weights),
        f"estimate: parameters x {itemsize} / tensor_parallel_size {tp} (norms and biases whole)",
    )
    sizes = model.dimensions
    if sizes is None:
        yield "KV cache", "unknown", "config.json does not name the sizes of a decoder as Llama's does"
        return
    kv_itemsize = 1 if str(rollout.engine.get("kv_cache_dtype", "")).startswith("fp8") else itemsize
    token = kv_bytes_per_token(sizes, kv_itemsize, tp)
    heads = max(1, sizes.kv_heads // tp)
    how = f"2 x {sizes.layers} layers x {heads} kv heads of a rank x head_dim {sizes.head_dim} x {kv_itemsize}"
    yield "KV cache of a token", _size(token), how
    engines = num_ranks // tp
    sequences = -(-rollout.num_prompts_per_step // engines) * rollout.group_size
    needed = sequences * config.max_rollout_tokens
    how = f"{sequences} sequences of an engine x {config.max_rollout_tokens} tokens x {token:,} bytes (a group shares its prompt)"
    yield "KV cache for all at full length", f"<= {_size(needed * token)}", how
    if isinstance(given := rollout.engine.get("kv_cache_memory_bytes"), int):
        yield (
            "tokens that fit",
            f"{given // token:,} of {needed:,}",
            f"engine.kv_cache_memory_bytes {given:,} / {token:,}",
        )
    else:
        fit = {gib: int(max(0, rollout.gpu_memory_utilization * (gib << 30) - weights) // token) for gib in _GPU_GIB}
        share = rollout.gpu_memory_utilization
        how = f"estimate: (gpu_memory_utilization {share:g} x GPU - weights) / {token:,}, before vLLM's own buffers"
        for gib, tokens in fit.items():
            yield f"tokens that fit, GPU of {gib} GiB", f"{tokens:,}", how
            how = f"for all at full length: {needed:,}; what does not fit waits its turn" if gib == _GPU_GIB[0] else ""


def advice(config: Config, num_ranks: int) -> Iterator[str]:
    """What a careful colleague would say about a config that is valid: one line each, with the numbers, only where it
    is true."""
    rollout, training, loss, advantage = config.rollout, config.training, config.loss, config.advantage
    prompts, group, longest = rollout.num_prompts_per_step, rollout.group_size, config.max_rollout_tokens
    steps, engines = config.training.num_optimizer_steps, num_ranks // rollout.tensor_parallel_size
    low, high = loss.clip_ratio_low, loss.clip_ratio_high
    if training.max_tokens_per_micro_batch < 2 * longest:
        yield (
            f"training.max_tokens_per_micro_batch {training.max_tokens_per_micro_batch} holds fewer than 2 of the longest rollouts "
            f"({longest} tokens): long ones are not packed"
        )
    if ratio_is_one(config):
        yield (
            f"one optimizer step a rollout: the ratio is exactly 1, so that loss.clip_ratio_low {low:g}, clip_ratio_high {high:g} and "
            "dual_clip never bind"
        )
    elif loss.policy == "gspo" and max(low, high) > 0.01:
        yield f"loss.policy gspo with clip bounds {low:g} and {high:g}, sized for ratios of tokens: the GSPO paper has 3e-4 and 4e-4"
    if loss.policy == "gspo" and loss.aggregation == "token":
        yield "loss.policy gspo with aggregation token: long sequences count for more; the paper takes the mean over sequences (sequence)"
    if advantage.estimator == "dr_grpo" and loss.aggregation != "constant":
        yield f"advantage.estimator dr_grpo with loss.aggregation {loss.aggregation}: the paper divides by a constant (constant)"
    if loss.kl_in == "reward" and advantage.estimator == "grpo" and advantage.normalize_std == "group":
        yield "loss.kl_in reward with normalize_std group: where rewards are alike, small differences of KL become advantages"
    if loss.policy == "gspo" and loss.rollout_correction in ("token_tis", "icepop"):
        yield f"loss.policy gspo with rollout_correction {loss.rollout_correction}: weights of tokens in a loss of sequences (sequence_tis)"
    if loss.policy == "cispo" and low < 1:
        yield f"loss.policy cispo with clip_ratio_low {low:g}: it is usually run without a lower bound (1)"
    if advantage.estimator == "rloo" and group < 4:
        yield f"advantage.estimator rloo with rollout.group_size {group}: each baseline is the mean of only {group - 1} other rewards"
    if advantage.estimator == "grpo" and advantage.normalize_std == "group" and group == 2:
        yield "rollout.group_size 2 with normalize_std group: every pair gets the same two advantages, however far its rewards are apart"
    if prompts % engines:
        yield (
            f"rollout.num_prompts_per_step {prompts} is no multiple of {engines} engines: "
            f"some sample {-(-prompts // engines)} groups a step, others {prompts // engines}"
        )
    per_step = prompts * group // training.num_mini_batches
    if per_step < num_ranks:
        yield f"{per_step} completions per optimizer step for {num_ranks} ranks: {num_ranks - per_step} of them have nothing to train on"
    if rollout.dynamic_sampling and rollout.dynamic_sampling_max_rounds == 1:
        yield "rollout.dynamic_sampling with dynamic_sampling_max_rounds 1: groups are dropped, and never replaced"
    if config.optimizer.warmup_steps >= steps * training.num_steps:
        yield (
            f"optimizer.warmup_steps {config.optimizer.warmup_steps} covers the run's {steps * training.num_steps} optimizer steps: "
            f"lr {config.optimizer.lr:g} is reached at its end or never"
        )
    if not config.checkpoint.every_steps and training.num_steps >= 100:
        yield f"checkpoint.every_steps 0: a run that dies before the end of its {training.num_steps} steps has nothing to go on from"


def _section(title: str, rows: Iterator[Row]) -> list[str]:
    return ["", title, *(f"  {name:36} {value:>16}  {how}".rstrip() for name, value, how in rows)]


def _provenance(config: Config, sources: Mapping[str, str]) -> Iterator[str]:
    for name, value in flat_config(config).items():
        text = json.dumps(value, ensure_ascii=False)
        yield f"  {name:40} {text if len(text) <= 48 else text[:45] + '...':48}  {sources[name]}"


def _size(num_bytes: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.2f} {unit}"
    return f"{num_bytes} B"
