"""`--explain`: what a config amounts to in numbers, and where each value was set.

Needs no torch and no GPU.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping

from grpo_spmd.checks.memory import (
    ITEMSIZE,
    Row,
    adapter_shapes,
    advice,
    engine_rows,
    extra_passes,
    idle_keys,
    micro_batches_per_step,
    replica_ranks,
    rollouts_of_a_rank,
    size_text,
    sync_size,
    training_rows,
)
from grpo_spmd.checks.signals import judge_rows, side_model_rows
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import ModelFacts
from grpo_spmd.model.schedule import schedule_rows


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

    If `model` is None, its sizes are unknown, and a line says so. `num_rows` counts data.train."""
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
    sections["the engine as judge"] = judge_rows(config)
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
    rollout, training, tp = config.rollout, config.training, config.rollout.engine_ranks
    prompts, group, max_tokens = (
        rollout.num_prompts_per_step,
        rollout.group_size,
        config.max_rollout_tokens,
    )
    samples = prompts * group
    yield Row("ranks", f"{num_ranks:,}", "--ranks, else WORLD_SIZE, else 1")
    size = rollout.tensor_parallel_size
    engines = f"{'<= ' if size == 'auto' else ''}{num_ranks // tp:,}"
    yield Row("engines", engines, f"{num_ranks} ranks / tensor_parallel_size {size}")
    yield Row("samples", f"{samples:,}", f"{prompts} prompts x group_size {group}")
    if rollout.dynamic_sampling:
        yield Row(
            "samples, generated",
            f">= {samples:,}",
            f"dynamic_sampling: up to {rollout.dynamic_sampling_max_rounds} rounds of generation",
        )
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
    rollouts = rollouts_of_a_rank(config, num_ranks)
    yield Row(
        "micro-batches of a rank",
        f"{fewest:,} to {highest:,}",
        f"optimizer steps x 1, to x ceil({rollouts} rollouts of full length / {fitting} in a "
        "micro-batch)",
    )
    yield from _extra_pass_rows(config)


def _extra_pass_rows(config: Config) -> Iterator[Row]:
    """Yields the number of forward passes that a step makes besides those of the update."""
    loss, training, teacher = config.loss, config.training, config.teacher
    passes = extra_passes(config)
    # Old logprobs are computed before the first update, unless those of the update itself or of the
    # engine serve as such.
    explanation = f"a forward of all rollouts if needed: {training.num_optimizer_steps} optimizer"
    explanation += f" steps, old_logprobs {loss.old_logprobs}, kl_in {loss.kl_in}"
    yield Row("extra passes for old logprobs", str(passes.old_logprobs), explanation)
    explanation = f"a forward of all rollouts unless kl_coef is 0; it is {loss.kl_coef:g}"
    yield Row("extra passes of the reference", str(passes.reference), explanation)
    if teacher.is_on:
        explanation = f"each rollout by one of {len(teacher.names)}, teacher.loss {teacher.loss}"
        yield Row("extra passes of teachers", str(int(not teacher.url)), explanation)
    values = "a forward of all rollouts for their values"
    if config.critic.is_on_policy:
        yield Row("passes of the critic", "1", f"{values}; it learns in the policy's update")
    elif config.critic.path is not None:
        yield Row(
            "passes of the critic",
            str(1 + training.num_epochs),
            f"{values}, and {training.num_epochs} for its own update",
        )


def _run_rows(config: Config, num_rows: int) -> Iterator[Row]:
    """Yields the counts of the whole run: rows, epochs, samples, optimizer steps, schedule."""
    prompts, steps = config.rollout.num_prompts_per_step, config.training.num_steps
    samples, is_dynamic = prompts * config.rollout.group_size, config.rollout.dynamic_sampling
    drops_rows = config.data.on_long_prompt == "drop"
    dropped = "; prompts over max_prompt_tokens are dropped" if drops_rows else ""
    # Refills take prompts too, and dropped rows give none: then the figures are only bounds.
    at_most = "<= " if is_dynamic or drops_rows else ""
    at_least = ">= " if is_dynamic or drops_rows else ""
    limit = "<= " if drops_rows else ""
    yield Row("rows of data.train", f"{limit}{num_rows:,}", config.data.train + dropped)
    explanation = f"{num_rows} rows / {prompts} prompts"
    explanation += "; refills take prompts too" if is_dynamic else ""
    yield Row("steps per epoch of the data", f"{at_most}{num_rows / prompts:,.1f}", explanation)
    yield Row(
        "epochs of the data",
        f"{at_least}{steps * prompts / num_rows:,.2f}",
        f"{steps} steps x {prompts} prompts / {num_rows} rows",
    )
    limit = "<= " if is_dynamic else ""
    yield Row(
        "samples trained on", f"{limit}{steps * samples:,}", f"{steps} steps x {samples} samples"
    )
    updates = config.training.num_optimizer_steps
    yield Row("optimizer steps", f"{steps * updates:,}", f"{steps} steps x {updates}")
    num_updates = config.policy_training.num_run_optimizer_steps
    for name, value, explanation in schedule_rows(config.optimizer, num_updates):
        yield Row(name, value, explanation)


def sync_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    """Yields the sizes of the model and of a weight sync."""
    dtype, lora = config.model.dtype, config.model.lora
    itemsize, ranks = ITEMSIZE[dtype], replica_ranks(config, num_ranks)
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
        f"parameters x {itemsize} ({dtype}){padded}; what each engine is handed",
    )
    explanation = "one rank holds the whole policy"
    if ranks > 1:
        explanation = f"ceil({size_text(num_bytes)} / {size_text(min(bucket, num_bytes))} bucket)"
        explanation += f", over {ranks} ranks"
    yield Row("collectives of a sync, on GPUs", f"{collectives:,}", explanation)
    if lora.base_stays_in_engine:
        adapters = adapter_shapes(model.shapes, lora)
        size = itemsize * sum(math.prod(shape) for shape in adapters.values())
        yield Row(
            "bytes of a later sync",
            size_text(size),
            "the adapters alone, in one collective; the base stays in the engine",
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
