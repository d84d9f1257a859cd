"""`--explain`: what a config amounts to in numbers, and where each value was set.

Needs no torch and no GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from grpo_spmd.checks.memory import (
    ITEMSIZE,
    adapter_shapes,
    advice,
    engine_tokens,
    engine_weights,
    exchanged_bytes,
    extra_passes,
    idle_keys,
    is_shared_teacher,
    judge_prompt_tokens,
    kv_itemsize,
    logits_bytes_per_element,
    micro_batch_tokens,
    micro_batches_per_step,
    replica_ranks,
    rollouts_of_a_rank,
    route_bytes,
    sequences_of_engine,
    shard_numel,
    size_text,
    state_of,
    sync_buffers,
    sync_size,
    trained_bytes,
)
from grpo_spmd.checks.signals import head_shapes, side_models
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.schema import MOMENT_BLOCK, POLICY, Config
from grpo_spmd.model.config_json import (
    ModelFacts,
    kv_bytes_per_sequence,
    kv_bytes_per_token,
    read_model,
    route_bytes_per_token,
)
from grpo_spmd.model.schedule import schedule_rows

_NO_SIZES = "config.json does not name the sizes of a decoder as Llama's does"


class Row(NamedTuple):
    """One line of `--explain`: a name, a value, and where the value comes from."""

    name: str
    value: str
    explanation: str


def explain(
    config: Config,
    sources: Mapping[str, str],
    model: ModelFacts | None,
    num_rows: int,
    num_ranks: int,
    *,
    with_defaults: bool = False,
) -> list[str]:
    """Returns the lines that `--explain` prints.

    `sources` tells where each value was set; `with_defaults` also lists the keys that have their
    defaults. If `model` is None, its sizes are unknown, and a line says so. `num_rows` counts
    data.train."""
    sections: dict[str, Iterable[Row]] = {
        "a step": _step_rows(config, num_ranks),
        "the run": _run_rows(config, num_rows),
    }
    if model is not None:
        sections |= {
            "model and weight sync": sync_rows(config, model, num_ranks),
            "memory of a rank: training": training_rows(config, model, num_ranks),
            "memory of a rank: engine": engine_rows(config, model, num_ranks),
        }
    sections["memory of a rank: teachers, critic and reward models"] = side_model_rows(
        config, num_ranks
    )
    sections["the engine as judge"] = _judge_rows(config)
    lines = []
    for title, rows in sections.items():
        text = [f"  {name:36} {value:>16}  {reason}".rstrip() for name, value, reason in rows]
        lines += ["", title, *text] if text else []
    if model is None:
        problem = f"sizes, sync and memory of {config.model.path} are not known here"
        reason = "it is no folder with all its weights, and not in the local Hugging Face cache"
        lines += ["", f"{problem}: {reason} (hf download brings it)"]
    remarks = [f"  - {line}" for line in (*advice(config, num_ranks), *idle_keys(config, sources))]
    lines += ["", "worth a look" if remarks else "worth a look: nothing found", *remarks]
    return [*lines, "", "where each value came from", *_origins(config, sources, with_defaults)]


def _step_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Yields the counts of one step: ranks, samples, tokens, batches and passes."""
    rollout, training = config.rollout, config.training
    prompts = rollout.num_prompts_per_step
    group = rollout.group_size
    samples = prompts * group
    max_tokens = config.max_rollout_tokens
    yield Row("ranks", f"{num_ranks:,}", "--ranks, else WORLD_SIZE, else 1")
    size = rollout.tensor_parallel_size
    engines = f"{'<= ' if size == 'auto' else ''}{num_ranks // rollout.engine_ranks:,}"
    yield Row("engines", engines, f"{num_ranks} ranks / tensor_parallel_size {size}")
    yield Row("samples", f"{samples:,}", f"{prompts} prompts x group_size {group}")
    if rollout.dynamic_sampling:
        rounds = f"up to {rollout.dynamic_sampling_max_rounds} rounds of generation"
        yield Row("samples, generated", f">= {samples:,}", f"dynamic_sampling: {rounds}")
    launched = rollout.num_launched_prompts
    if launched > prompts:
        yield Row(
            "samples, begun in a short round",
            f"{launched * group:,}",
            f"{launched} prompts x group_size {group}: tail_batching {rollout.tail_batching:g}",
        )
    yield Row(
        "longest rollout, tokens",
        f"{max_tokens:,}",
        f"max_prompt_tokens {config.data.max_prompt_tokens} + {rollout.max_completion_tokens}",
    )
    yield Row("tokens", f"<= {samples * max_tokens:,}", f"{samples} samples x {max_tokens}")
    batches = training.num_mini_batches
    yield Row(
        "optimizer steps",
        f"{training.num_optimizer_steps:,}",
        f"num_mini_batches {batches} x num_epochs {training.num_epochs}",
    )
    yield Row(
        "completions per optimizer step",
        f"{samples // batches:,}",
        f"{samples} samples / num_mini_batches {batches}",
    )
    budget = config.micro_batch_tokens
    fitting = budget // max_tokens
    yield Row(
        "micro-batch, tokens",
        f"<= {budget:,}",
        f"the budget holds {fitting} of the longest rollouts ({budget} / {max_tokens})",
    )
    fewest, highest = micro_batches_per_step(config, num_ranks)
    yield Row(
        "micro-batches of a rank",
        f"{fewest:,} to {highest:,}",
        f"optimizer steps x 1, to x ceil({rollouts_of_a_rank(config, num_ranks)} rollouts of full "
        f"length / {fitting} in a micro-batch)",
    )
    loss, teacher, critic = config.loss, config.teacher, config.critic
    passes = extra_passes(config)
    yield Row(
        "extra passes for old logprobs",
        str(passes.old_logprobs),
        f"a forward of all rollouts if needed: {training.num_optimizer_steps} optimizer steps, "
        f"old_logprobs {loss.old_logprobs}, kl_in {loss.kl_in}",
    )
    explanation = f"a forward of all rollouts unless kl_coef is 0; it is {loss.kl_coef:g}"
    yield Row("extra passes of the reference", str(passes.reference), explanation)
    if teacher.is_on:
        explanation = f"each rollout by one of {len(teacher.names)}, teacher.loss {teacher.loss}"
        yield Row("extra passes of teachers", str(int(not teacher.url)), explanation)
    if critic.path is not None:
        num_updates = 0 if critic.is_on_policy else training.num_epochs
        updates_text = f", and {num_updates} for its own update"
        if critic.is_on_policy:
            updates_text = "; it learns in the policy's update"
        explanation = f"a forward of all rollouts for their values{updates_text}"
        yield Row("passes of the critic", str(1 + num_updates), explanation)


def _run_rows(config: Config, num_rows: int) -> Iterator[Row]:
    """Yields the counts of the whole run: rows, epochs, samples, optimizer steps, schedule."""
    steps, updates = config.training.num_steps, config.training.num_optimizer_steps
    prompts = config.rollout.num_prompts_per_step
    samples = prompts * config.rollout.group_size
    drops_rows = config.data.on_long_prompt == "drop"
    # Refills take prompts too, and dropped rows give none: then the figures are only bounds.
    sampled_bound = "<= " if config.rollout.dynamic_sampling else ""
    dropped_bound = "<= " if drops_rows else ""
    bound = sampled_bound or dropped_bound
    dropped = "; prompts over max_prompt_tokens are dropped" if drops_rows else ""
    yield Row("rows of data.train", f"{dropped_bound}{num_rows:,}", config.data.train + dropped)
    refills = "; refills take prompts too" if sampled_bound else ""
    explanation = f"{num_rows} rows / {prompts} prompts{refills}"
    yield Row("steps per epoch of the data", f"{bound}{num_rows / prompts:,.1f}", explanation)
    epochs = f"{bound.replace('<', '>')}{steps * prompts / num_rows:,.2f}"
    explanation = f"{steps} steps x {prompts} prompts / {num_rows} rows"
    yield Row("epochs of the data", epochs, explanation)
    trained = f"{sampled_bound}{steps * samples:,}"
    yield Row("samples trained on", trained, f"{steps} steps x {samples} samples")
    yield Row("optimizer steps", f"{steps * updates:,}", f"{steps} steps x {updates}")
    for row in schedule_rows(config.optimizer, config.policy_training.num_run_optimizer_steps):
        yield Row(*row)


def sync_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    """Yields the sizes of the model and of a weight sync."""
    itemsize, ranks = ITEMSIZE[config.model.dtype], replica_ranks(config, num_ranks)
    bucket = config.rollout.sync_bucket_bytes("cuda")
    num_bytes, collectives = sync_size(model.shapes, ranks, itemsize, bucket)
    yield Row(
        "parameters",
        f"{model.num_parameters:,}",
        f"{len(model.shapes)} tensors, tied ones once; {model.source}",
    )
    padding = num_bytes - model.num_parameters * itemsize
    padded = f" + {size_text(padding)} of padding to full shards" if padding else ""
    yield Row(
        "bytes of a sync",
        size_text(num_bytes),
        f"parameters x {itemsize} ({config.model.dtype}){padded}; what each engine is handed",
    )
    explanation = "one rank holds the whole policy"
    if ranks > 1:
        bucket_text = size_text(min(bucket, num_bytes))
        explanation = f"ceil({size_text(num_bytes)} / {bucket_text} bucket), over {ranks} ranks"
    yield Row("collectives of a sync, on GPUs", f"{collectives:,}", explanation)
    if config.model.lora.base_stays_in_engine:
        adapters = adapter_shapes(model.shapes, config.model.lora)
        size = itemsize * sum(math.prod(shape) for shape in adapters.values())
        explanation = "the adapters alone, in one collective; the base stays in the engine"
        yield Row("bytes of a later sync", size_text(size), explanation)


def training_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    """Yields the trainer's memory on one rank."""
    dtype, offload = config.model.dtype, config.model.offload
    state, itemsize = state_of(config, model, num_ranks), ITEMSIZE[dtype]
    trained = state.trained
    frozen = f"{state.shard:,} parameters of a shard x {itemsize} ({dtype}), frozen"
    adapters = f" of the adapters (rank {config.model.lora.rank})" if state.base else ""
    moments = "2 x 4 (float32)"
    if config.optimizer.name == "adamw_8bit":
        moments = f"2 x 1 + a float32 scale for each {MOMENT_BLOCK} of a row"
    # None: not known.
    sizes: dict[str, tuple[int | None, str]] = {
        "base": (state.base, f"{frozen}; the reference too"),
        "master parameters": (
            4 * trained,
            f"{trained:,} trained parameters of a shard{adapters} (ceil(rows / "
            f"{replica_ranks(config, num_ranks)}) of each tensor) x 4 (float32)",
        ),
        "gradients": (state.gradients, f"{trained:,} x 4 (float32), in the update only"),
        "AdamW's moments": (state.moments, f"{trained:,} x {moments}"),
        "reference": (state.reference, frozen),
        "state between updates": (state.num_bytes, "all of these but the gradients"),
        "of it in host memory": (
            state.offloaded(offload),
            f"while the engine is awake: offload {str(offload).lower()}",
        ),
        "checkpoint's copy in host memory": (
            state.saved,
            "parameters that train + moments, while a thread writes them",
        ),
    }
    dimensions = model.dimensions
    tokens = micro_batch_tokens(config, num_ranks)
    if dimensions is None:
        sizes["logits of a chunk"] = None, _NO_SIZES
    else:
        sharing = config.model.sequence_parallel_size
        sizes["sent for shared attention"] = (
            exchanged_bytes(dimensions, tokens, sharing, itemsize),
            f"a micro-batch of {tokens} tokens over {sharing} ranks, forward; as much backward",
        )
        # Logits, the largest of the activations, exist for one chunk of tokens at a time.
        tokens = min(config.model.logprob_chunk_tokens, tokens)
        vocabulary, element = dimensions.vocabulary, logits_bytes_per_element(itemsize)
        sizes["logits of a chunk"] = (
            tokens * vocabulary * element,
            f"{tokens} tokens x V {vocabulary} x {element} bytes in the backward pass",
        )
    sizes["routes of the engine"] = (
        route_bytes(config, model, num_ranks),
        f"{route_bytes_per_token(model.config)} bytes a token (layers x experts) + 1, of a step's "
        "rollouts",
    )
    buffers = sync_buffers(config, model, num_ranks)
    terms = " + ".join(f"{name} {size_text(size)}" for name, size in buffers.items())
    sizes["buffers of the weight sync"] = (
        sum(buffers.values()),
        f"{terms}; vLLM keeps more until a layer is whole",
    )
    for name, (num_bytes, explanation) in sizes.items():
        if num_bytes != 0:
            yield Row(name, "unknown" if num_bytes is None else size_text(num_bytes), explanation)
    yield Row(
        "peak of each phase, and what fits",
        "see the planner",
        "python -m grpo_spmd.plan --config ... --gpu H100-80GB --ranks N runs the layers on "
        "fake tensors",
    )


def engine_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    """Yields the engine's memory on one rank."""
    itemsize, tp = ITEMSIZE[config.model.dtype], config.rollout.engine_ranks
    yield Row(
        "weights",
        size_text(engine_weights(config, model)),
        f"parameters x {itemsize} / tensor_parallel_size {tp} (norms and biases whole)",
    )
    sizes = model.dimensions
    if sizes is None:
        yield Row("KV cache", "unknown", _NO_SIZES)
        return
    itemsize = kv_itemsize(config)
    token_bytes = kv_bytes_per_token(sizes, itemsize, tp)
    yield Row(
        "KV cache of a token",
        size_text(token_bytes),
        f"2 x {sizes.attention_layers} layers x {max(1, sizes.kv_heads // tp)} kv heads of a rank "
        f"x head_dim {sizes.head_dim} x {itemsize}",
    )
    # A judge that the engine serves may read texts that are longer than any rollout.
    sequences, longest_text = sequences_of_engine(config, num_ranks), engine_tokens(config)
    needed = sequences * longest_text
    sequence_bytes = kv_bytes_per_sequence(sizes, tp)
    shared = "a group shares its prompt"
    if sequence_bytes:
        shared = f"and {size_text(sequence_bytes)} of recurrent states each; no prefix is shared"
    yield Row(
        "KV cache for all at full length",
        f"<= {size_text(needed * token_bytes + sequences * sequence_bytes)}",
        f"{sequences} sequences of an engine x {longest_text} tokens x {token_bytes:,} bytes "
        f"({shared})",
    )
    cache_bytes = config.rollout.engine.get("kv_cache_memory_bytes")
    if isinstance(cache_bytes, int):
        explanation = f"engine.kv_cache_memory_bytes {cache_bytes:,} / {token_bytes:,}"
        yield Row("tokens that fit", f"{cache_bytes // token_bytes:,} of {needed:,}", explanation)


def side_model_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    """Yields the memory of teachers, critic and reward models on one rank. Those that need none of
    their own have a row that says why."""
    num_rollouts = config.rollout.num_prompts_per_step * config.rollout.group_size
    for name, url in config.teacher.urls.items():
        limit = config.teacher.max_concurrent
        explanation = f"{url} is asked of {num_rollouts:,} rollouts a step at most, {limit} at once"
        yield Row(f"teacher {name}".strip(), "0 B", explanation)
    for name, path in config.teacher.paths.items():
        if is_shared_teacher(config, path):
            owner = "the reference's"
            if path == POLICY:
                owner = "the model that trains, as it is before the step's updates"
            elif config.model.lora.rank:
                owner = "the policy's own, its adapters off"
            yield Row(f"teacher {name}".strip(), "0 B", f"{path} is {owner}")
    ranks = replica_ranks(config, num_ranks)
    for model in side_models(config):
        facts = read_model(model.path, model.revision)
        if facts is None:
            yield Row(model.name, "unknown", f"{model.path} is not here")
            continue
        shapes = facts.shapes
        if model.kind == "critic":
            # The value head in the place of its lm_head is one row, too small to count.
            shapes = {name: shape for name, shape in shapes.items() if "lm_head" not in name}
        shard = shard_numel(shapes, ranks)
        num_bytes = model.num_bytes(config, shapes, ranks)
        dtype = f"{config.model.dtype}, frozen"
        if model.kind == "critic":
            dtype = "float32, two moments"
        explanation = f"{shard:,} parameters of a shard x {num_bytes / shard:.3g} ({dtype})"
        yield Row(model.name, size_text(num_bytes), f"{explanation}; in host memory until used")
        if model.kind == "critic":
            copy_name = "its copy for a checkpoint, in host memory"
            yield Row(copy_name, size_text(num_bytes), "while a thread writes it")
            yield Row("its gradients", size_text(4 * shard), f"{shard:,} x 4, in its update")
        elif model.kind == "reward model":
            yield Row("extra passes of it", "1", "a forward of each completion, engine asleep")
    facts = read_model(config.model.path) if config.critic.is_on_policy else None
    if facts is not None and facts.dimensions is not None:
        hidden = facts.dimensions.hidden
        num_bytes = trained_bytes(head_shapes(hidden), 1, config.optimizer)
        explanation = f"{hidden + 1:,} parameters, on the rank that has its row"
        yield Row("value head and its optimizer", size_text(num_bytes), explanation)


def _judge_rows(config: Config) -> Iterator[Row]:
    """Yields the token limits of judges that the run's own engine serves."""
    prompt_tokens = judge_prompt_tokens(config)
    for index, tokens in prompt_tokens.items():
        reward = config.rewards[index]
        name = reward.metric_name
        # This bound needs no tokenizer (`judge_prompt_tokens`).
        bound = "the rubric's bytes, and 9/8 of the longest of what is put into it"
        explanation = "max_tokens" if reward.max_tokens else bound
        yield Row(f"longest prompt of {name}, tokens", f"{tokens:,}", explanation)
        yield Row(f"longest reply of {name}, tokens", f"{reward.judge_tokens:,}", "judge_tokens")
    if prompt_tokens:
        yield Row(
            "longest text of the engine, tokens",
            f"{engine_tokens(config):,}",
            f"the longest of rollout ({config.max_rollout_tokens:,}) and a judge's prompt with its "
            "reply; micro-batches know rollouts alone",
        )


def _origins(config: Config, sources: Mapping[str, str], with_defaults: bool) -> Iterator[str]:
    """Yields a line for each key: its value and where it was set."""
    values = flatten_config(config)
    names = [name for name in values if with_defaults or sources[name] != "default"]
    for name in names:
        text = json.dumps(values[name], ensure_ascii=False)
        text = text if len(text) <= 48 else text[:45] + "..."
        yield f"  {name:40} {text:48}  {sources[name]}"
    hidden = len(values) - len(names)
    if hidden:
        yield f"  {hidden} others have their defaults: --explain=all shows them too"
