"""A plan: what is live on one rank in each phase of a step, at its peak, beside what the card has."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_spmd.checks import memory
from grpo_spmd.checks.memory import engine_tokens
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import PHASES, Config
from grpo_spmd.model.config_json import ModelFacts
from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.plan.device import (
    FRAGMENTATION,
    GIB,
    engine_activations,
    layer_in_reload,
    outside,
)
from grpo_spmd.tools.plan.dry_run import Parts, Pass, Peaks, peaks_of
from grpo_spmd.tools.plan.signals import (
    host_bytes,
    models_beside,
    widened,
    with_models,
    with_time,
    with_value_head,
)
from grpo_spmd.tools.plan.step_time import StepTime, step_time

_BLOCK = 16  # tokens of a block of vLLM's KV cache on a GPU


@dataclass(frozen=True)
class KvCache:
    """Of one engine."""

    num_bytes: int  # on one rank
    tokens: int  # that it holds
    longest_bytes: (
        int  # of the longest text of the engine: a rollout, or what a judge reads and says
    )
    needed_tokens: int  # of all its sequences of a step at full length, the prompt once a group
    full_length: int  # sequences of full length that run at one time
    sequences: int  # of a step


@dataclass(frozen=True)
class Plan:
    config: Config
    card: Card
    num_ranks: int
    num_parameters: int
    phases: dict[str, Parts]  # bytes on the device
    host: Parts  # bytes in host memory of this rank
    kv_cache: KvCache
    time: StepTime

    def peak_gib(self, phase: str) -> float:
        return self.phases[phase].total() / GIB

    def margin_of(self, phase: str) -> float:
        """GiB."""
        return self.card.gib - self.peak_gib(phase)

    @property
    def tightest(self) -> str:
        return min(self.phases, key=self.margin_of)

    @property
    def margin_gib(self) -> float:
        """The least free of any phase; where the KV cache holds no rollout of full length, what it lacks."""
        spare = (self.kv_cache.num_bytes - self.kv_cache.longest_bytes) / GIB
        return min(self.margin_of(self.tightest), spare if spare < 0 else math.inf)

    @property
    def fits(self) -> bool:
        return self.margin_gib >= 0


def make_plan(config: Config, model: ModelFacts, folder: Path, card: Card, num_ranks: int) -> Plan:
    """`folder` has the model's config.json. Raises ConfigError where the model cannot be built from it."""
    if (sizes := model.dimensions) is None:
        raise ConfigError(
            f"model.path: {folder / 'config.json'} does not name the sizes of a decoder as Llama's does"
        )
    cache, models = (
        kv_cache(config, model, card, num_ranks),
        models_beside(config, num_ranks, longest_row(config, num_ranks)),
    )
    peaks = trainer_peaks(config, folder, num_ranks, on_gpu=True)
    peaks = widened(
        with_value_head(peaks, config, sizes.hidden, longest_row(config, num_ranks)), models
    )
    device = with_models(phases(config, model, card, num_ranks, peaks, cache), models)
    state = memory.state_of(config, model, num_ranks)
    copy = memory.TRAINED_ITEMSIZE * state.trained
    host = Counter({"checkpoint's copy": copy, "offloaded": state.offloaded(config.model.offload)})
    host += host_bytes(models)
    if config.rollout.sleep_level_with(config.model.lora) == 1:
        host["engine's weights, asleep"] = memory.engine_weights(config, model)
    time = step_time(config, model, sizes, card, num_ranks, cache.full_length)
    time = with_time(time, config, models, card, num_ranks)
    return Plan(config, card, num_ranks, model.num_parameters, device, host, cache, time)


def trainer_peaks(config: Config, folder: Path, num_ranks: int, *, on_gpu: bool) -> Peaks:
    """Of the largest micro-batch: as many rollouts of full length as it holds, and what is left as a shorter one."""
    lengths = longest_row(config, num_ranks)
    _, most = memory.micro_batches_per_step(config, num_ranks)
    accumulates = most > config.training.num_optimizer_steps
    scores = sum(memory.extra_passes(config)) > 0
    here = replace(
        config.model, offload=False
    )  # nothing is away during a pass: one dry run for all
    work = Pass(folder, here, config.loss, num_ranks, lengths, accumulates, scores, on_gpu)
    return peaks_of(work)


def longest_row(config: Config, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Prompt and completion tokens of the rollouts of the largest micro-batch."""
    tokens, longest = memory.micro_batch_tokens(config, num_ranks), config.max_rollout_tokens
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)] * (
        tokens // longest
    )
    if (rest := tokens % longest) > 1:
        lengths.append((1, rest - 1))
    return tuple(lengths)


def kv_cache(config: Config, model: ModelFacts, card: Card, num_ranks: int) -> KvCache:
    sizes, rollout = model.dimensions, config.rollout
    assert sizes is not None
    token = memory.kv_bytes_per_token(
        sizes, memory.kv_itemsize(config), rollout.tensor_parallel_size
    )
    given = rollout.engine.get("kv_cache_memory_bytes")
    if isinstance(given, int):
        num_bytes = given
    else:
        rest = engine_activations(config, model, card) + outside(config, model, num_ranks).graphs
        num_bytes = (
            int(rollout.gpu_memory_utilization * card.gib * GIB)
            - memory.engine_weights(config, model)
            - rest
        )
    tokens = max(0, num_bytes // (token * _BLOCK) * _BLOCK)
    sequences, longest = memory.sequences_of_engine(config, num_ranks), config.max_rollout_tokens
    prompts = sequences // rollout.group_size * config.data.max_prompt_tokens
    needed = prompts + sequences * rollout.max_completion_tokens
    whole = -(-longest // _BLOCK) * _BLOCK
    at_once = min(tokens // whole, rollout.engine.get("max_num_seqs") or tokens)
    text = -(-engine_tokens(config) // _BLOCK) * _BLOCK
    return KvCache(num_bytes, tokens, text * token, needed, at_once, sequences)


def phases(
    config: Config, model: ModelFacts, card: Card, num_ranks: int, peaks: Peaks, cache: KvCache
) -> dict[str, Parts]:
    """Bytes by what they are for, of each phase at its peak, in a step after the first update."""
    beside, state = outside(config, model, num_ranks), memory.state_of(config, model, num_ranks)
    offload, itemsize = config.model.offload, memory.ITEMSIZE[config.model.dtype]
    fixed = Counter(
        {
            "CUDA context": beside.context,
            "NCCL": beside.nccl,
            "CUDA graphs, workspaces": beside.graphs,
        }
    )
    held = Counter({"policy": 4 * state.trained, "moments": 8 * state.trained})
    held += Counter({"base": state.base, "reference": state.reference})
    awake, in_sync = (
        _without(held, state, offload),
        _without(held, state, "optimizer" if offload else False),
    )
    if offload is True:
        in_sync.pop("reference", None)
    engine = Counter({"engine's weights": memory.engine_weights(config, model)})
    bucket_bytes = config.rollout.sync_bucket_bytes("cuda")
    buffers = Counter(memory.sync_buffers(config, model, num_ranks, bucket_bytes))
    buffers["layer in load"] = layer_in_reload(model, itemsize)
    sampling = engine + Counter({"KV cache": max(0, cache.num_bytes)})
    sampling["engine's activations"] = engine_activations(config, model, card)
    of_phase = {
        "weight_sync": in_sync + engine + _with_holes(buffers),
        "eval": awake + sampling,
        "rollout": awake + sampling,
        "reward": awake + sampling,
        "logprobs": held + _with_holes(peaks.scoring),
        "update": held + _with_holes(_at_least(peaks.update, state)),
        "checkpoint": held,
    }
    if not config.eval.every_steps:
        del of_phase["eval"]
    return {phase: fixed + of_phase[phase] for phase in PHASES if phase in of_phase}


def _at_least(peak: Parts, state: memory.State) -> Parts:
    """AdamW runs with all gradients there; fused, as on a GPU, it takes nothing for itself."""
    return peak if peak.total() > state.gradients else Counter({"gradients": state.gradients})


def _without(held: Parts, state: memory.State, offload: object) -> Parts:
    if offload is True:
        return Counter()
    return Counter({**held, "moments": 0}) if offload == "optimizer" else held.copy()


def _with_holes(parts: Parts) -> Parts:
    return parts + Counter({"fragmentation": int(FRAGMENTATION * parts.total())})
