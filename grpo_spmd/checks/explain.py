"""`--explain`: what a config comes to, by arithmetic, and where each of its values was set. Needs no torch, no GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from grpo_spmd.checks import memory
from grpo_spmd.checks.engine_keys import idle_keys
from grpo_spmd.checks.memory import Row, advice, engine_rows, size_text, training_rows
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
    """The lines that `--explain` prints; `model` None leaves out what only the model could tell, and says so."""
    lines = _section("a step", _step_rows(config, num_ranks))
    lines += _section("the run", _run_rows(config, num_rows))
    if model is None:
        why = "it is no folder with all its weights, and not in the local Hugging Face cache (hf download brings it)"
        lines += ["", f"sizes, sync and memory of {config.model.path} are not known here: {why}"]
    else:
        lines += _section("model and weight sync", _sync_rows(config, model, num_ranks))
        lines += _section("memory of a rank: training", _held_rows(config, model, num_ranks))
        lines += _section("memory of a rank: engine", engine_rows(config, model, num_ranks))
    lines += [
        line for title, rows in model_sections(config, num_ranks) for line in _section(title, rows)
    ]
    found = [*advice(config, num_ranks), *idle_keys(config, sources)]
    lines += [
        "",
        "worth a look" + ("" if found else ": nothing found"),
        *(f"  - {line}" for line in found),
    ]
    return [*lines, "", "where each value came from", *_provenance(config, sources, with_defaults)]


def _step_rows(config: Config, num_ranks: int) -> Iterator[Row]:
    rollout, training, tp = config.rollout, config.training, config.rollout.tensor_parallel_size
    prompts, group, longest = (
        rollout.num_prompts_per_step,
        rollout.group_size,
        config.max_rollout_tokens,
    )
    samples, batches, budget = (
        prompts * group,
        training.num_mini_batches,
        training.max_tokens_per_micro_batch,
    )
    yield "ranks", f"{num_ranks:,}", "--ranks, else WORLD_SIZE, else 1"
    yield "engines", f"{num_ranks // tp:,}", f"{num_ranks} ranks / tensor_parallel_size {tp}"
    yield "samples", f"{samples:,}", f"{prompts} prompts x group_size {group}"
    if rollout.dynamic_sampling:
        how = f"dynamic_sampling: up to {rollout.dynamic_sampling_max_rounds} rounds of generation"
        yield "samples, generated", f">= {samples:,}", how
    if (launched := rollout.num_launched_prompts) > prompts:
        how = f"{launched} prompts x group_size {group}: tail_batching {rollout.tail_batching:g}"
        yield "samples, begun in a short round", f"{launched * group:,}", how
    how = f"max_prompt_tokens {config.data.max_prompt_tokens} + {rollout.max_completion_tokens}"
    yield "longest rollout, tokens", f"{longest:,}", how
    yield "tokens", f"<= {samples * longest:,}", f"{samples} samples x {longest}"
    how = f"num_mini_batches {batches} x num_epochs {training.num_epochs}"
    yield "optimizer steps", f"{training.num_optimizer_steps:,}", how
    yield (
        "completions per optimizer step",
        f"{samples // batches:,}",
        f"{samples} samples / num_mini_batches {batches}",
    )
    how = f"the budget holds {budget // longest} of the longest rollouts ({budget} / {longest})"
    yield "micro-batch, tokens", f"<= {budget:,}", how
    fewest, most = memory.micro_batches_per_step(config, num_ranks)
    rollouts = memory.rollouts_of_a_rank(config, num_ranks)
    how = f"optimizer steps x 1, to x ceil({rollouts} rollouts of full length / {budget // longest} in a micro-batch)"
    yield "micro-batches of a rank", f"{fewest:,} to {most:,}", how
    yield from _extra_pass_rows(config)


def _held_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    yield from training_rows(config, model, num_ranks)
    if config.teacher.is_on:
        from grpo_spmd.checks.signals import teacher_rows

        yield from teacher_rows(config, num_ranks)
    if config.critic.path is not None:
        from grpo_spmd.checks.signals import critic_rows

        yield from critic_rows(config, num_ranks)


def _extra_pass_rows(config: Config) -> Iterator[Row]:
    loss, steps = config.loss, config.training.num_optimizer_steps
    old, reference, _ = memory.extra_passes(config)
    how = f"a forward of all rollouts before the first of {steps} optimizer steps"
    if loss.old_logprobs == "engine":
        how = "old_logprobs engine: those that came with the completions"
    elif loss.kl_in == "reward":
        how = "a forward of all rollouts, for the KL in the reward"
    elif not old:
        how = "one optimizer step: they are those of the update itself"
    yield "extra passes for old logprobs", str(old), how
    how = (
        f"a forward of all rollouts, for kl_coef {loss.kl_coef:g}"
        if reference
        else "kl_coef 0: no reference model"
    )
    yield "extra passes of the reference", str(reference), how
    if config.teacher.is_on:
        how = (
            "each rollout by its own"
            if len(config.teacher.names) > 1
            else "a forward of all rollouts"
        )
        yield (
            "extra passes of teachers",
            str(int(not config.teacher.url)),
            f"{how}, teacher.loss {config.teacher.loss}",
        )
    if config.critic.is_on_policy:
        yield (
            "passes of the critic",
            "1",
            "a forward of all rollouts for their values; it learns in the policy's update",
        )
    elif config.critic.path is not None:
        how = f"a forward of all rollouts for their values, and {config.training.num_epochs} for its own update"
        yield "passes of the critic", str(1 + config.training.num_epochs), how


def _run_rows(config: Config, num_rows: int) -> Iterator[Row]:
    prompts, steps = config.rollout.num_prompts_per_step, config.training.num_steps
    samples, is_dynamic = prompts * config.rollout.group_size, config.rollout.dynamic_sampling
    is_cut = config.data.on_long_prompt == "drop"
    note = "; prompts over max_prompt_tokens are dropped" if is_cut else ""
    yield (
        "rows of data.train",
        ("<= " if is_cut else "") + f"{num_rows:,}",
        config.data.train + note,
    )
    how = f"{num_rows} rows / {prompts} prompts" + (
        "; refills take prompts too" if is_dynamic else ""
    )
    yield (
        "steps per epoch of the data",
        ("<= " if is_dynamic or is_cut else "") + f"{num_rows / prompts:,.1f}",
        how,
    )
    how = f"{steps} steps x {prompts} prompts / {num_rows} rows"
    yield (
        "epochs of the data",
        (">= " if is_dynamic or is_cut else "") + f"{steps * prompts / num_rows:,.2f}",
        how,
    )
    most = "<= " if is_dynamic else ""
    yield "samples trained on", f"{most}{steps * samples:,}", f"{steps} steps x {samples} samples"
    updates = config.training.num_optimizer_steps
    yield "optimizer steps", f"{steps * updates:,}", f"{steps} steps x {updates}"
    yield from schedule_rows(config.optimizer, steps * updates)


def _sync_rows(config: Config, model: ModelFacts, num_ranks: int) -> Iterator[Row]:
    dtype, lora, bucket = (
        config.model.dtype,
        config.model.lora,
        config.rollout.sync_bucket_bytes("cuda"),
    )
    itemsize, ranks = memory.ITEMSIZE[dtype], num_ranks // config.model.num_replicas
    moved, collectives = memory.sync_size(model.shapes, ranks, itemsize, bucket)
    padding = moved - model.num_parameters * itemsize
    yield (
        "parameters",
        f"{model.num_parameters:,}",
        f"{len(model.shapes)} tensors, tied ones once; {model.source}",
    )
    padded = f" + {size_text(padding)} of padding to full shards" if padding else ""
    how = f"parameters x {itemsize} ({dtype}){padded}; what each engine is handed"
    yield "bytes of a sync", size_text(moved), how
    how = f"ceil({size_text(moved)} / {size_text(min(bucket, moved))} bucket), over {ranks} ranks"
    yield (
        "collectives of a sync, on GPUs",
        f"{collectives:,}",
        how if ranks > 1 else "one rank holds the whole policy",
    )
    if lora.base_stays_in_engine:
        adapters = itemsize * sum(
            math.prod(shape) for shape in memory.adapter_shapes(model.shapes, lora).values()
        )
        how = "the adapters alone, in one collective; the base stays in the engine"
        yield "bytes of a later sync", size_text(adapters), how


def _section(title: str, rows: Iterator[Row]) -> list[str]:
    return ["", title, *(f"  {name:36} {value:>16}  {how}".rstrip() for name, value, how in rows)]


def _provenance(config: Config, sources: Mapping[str, str], with_defaults: bool) -> Iterator[str]:
    values = flatten_config(config)
    shown = [name for name in values if with_defaults or sources[name] != "default"]
    for name, value in ((name, values[name]) for name in shown):
        text = json.dumps(value, ensure_ascii=False)
        yield f"  {name:40} {text if len(text) <= 48 else text[:45] + '...':48}  {sources[name]}"
    if len(shown) < len(values):
        yield f"  {len(values) - len(shown)} others have their defaults: --explain=all shows them too"


# Sections of `--explain` for rewards that are models: sequence classifiers, and the run's own engine.


def model_sections(config: Config, num_ranks: int) -> Iterator[tuple[str, Iterator[Row]]]:
    """Titles and rows; nothing is imported for what there is none of."""
    if any(reward.model is not None for reward in config.rewards):
        from grpo_spmd.checks.reward_models import reward_model_rows

        yield "memory of a rank: reward models", reward_model_rows(config, num_ranks)
    if any(reward.is_engine_judge for reward in config.rewards):
        from grpo_spmd.checks.reward_models import engine_judge_rows

        yield "the engine as judge", engine_judge_rows(config)
