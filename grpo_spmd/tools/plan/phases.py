"""A plan: what is live on one rank in each phase of a step, compared with the card's memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_spmd.checks.memory import (
    ITEMSIZE,
    TRAINED_ITEMSIZE,
    State,
    engine_tokens,
    engine_weights,
    extra_passes,
    kv_bytes_per_token,
    kv_itemsize,
    micro_batch_tokens,
    micro_batches_per_step,
    sequences_of_engine,
    state_of,
    sync_buffers,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import PHASES, Config
from grpo_spmd.model.config_json import Dimensions, ModelFacts
from grpo_spmd.observe.cards import Card
from grpo_spmd.tools.plan.device import (
    CONTEXT,
    GIB,
    engine_activations,
    graph_bytes,
    layer_in_reload,
    nccl_bytes,
    with_fragmentation,
)
from grpo_spmd.tools.plan.dry_run import Pass, Peaks, Usage, peaks_of
from grpo_spmd.tools.plan.signals import (
    add_time,
    host_bytes,
    merge_peaks,
    plan_side_models,
    with_side_models,
    with_value_head,
)
from grpo_spmd.tools.plan.step_time import StepTime, step_time

_BLOCK = 16  # tokens of a block of vLLM's KV cache on a GPU


@dataclass(frozen=True)
class KvCache:
    """The KV cache of one engine."""

    num_bytes: int  # on one rank
    tokens: int
    longest_bytes: int  # for the engine's longest text: a rollout, or a judge's prompt and reply
    needed_tokens: int  # for all sequences of a step at full length, a prompt once a group
    full_length: int  # sequences of full length that run at one time
    sequences: int  # of a step


@dataclass(frozen=True)
class Plan:
    """The prediction for one config on one kind of card."""

    config: Config
    card: Card
    num_ranks: int
    num_parameters: int
    phases: dict[str, Usage]  # bytes on the device
    host: Usage  # bytes in host memory of this rank
    kv_cache: KvCache
    time: StepTime

    def peak_gib(self, phase: str) -> float:
        return self.phases[phase].total() / GIB

    def margin_of(self, phase: str) -> float:
        """Free GiB at the phase's peak."""
        return self.card.gib - self.peak_gib(phase)

    @property
    def tightest(self) -> str:
        return min(self.phases, key=self.margin_of)

    @property
    def margin_gib(self) -> float:
        """Free GiB in the tightest phase; less than 0 too if the KV cache holds no rollout."""
        spare = (self.kv_cache.num_bytes - self.kv_cache.longest_bytes) / GIB
        return min(self.margin_of(self.tightest), spare if spare < 0 else math.inf)

    @property
    def fits(self) -> bool:
        return self.margin_gib >= 0


def make_plan(config: Config, model: ModelFacts, folder: Path, card: Card, num_ranks: int) -> Plan:
    """`folder` holds the model's config.json. Raises ConfigError if it cannot be built from it."""
    sizes = model.dimensions
    if sizes is None:
        raise ConfigError(
            f"model.path: {folder / 'config.json'} does not name the sizes of a decoder as "
            "Llama's does"
        )
    lengths = longest_row(config, num_ranks)
    models = plan_side_models(config, num_ranks, lengths)
    peaks = trainer_peaks(config, folder, num_ranks, on_gpu=True)
    peaks = merge_peaks(with_value_head(peaks, config, sizes.hidden, lengths), models)
    cache = kv_cache(config, model, sizes, card, num_ranks)
    state = state_of(config, model, num_ranks)
    host = Counter({"checkpoint's copy": TRAINED_ITEMSIZE * state.trained})
    host["offloaded"] = state.offloaded(config.model.offload)
    if config.rollout.sleep_level_with(config.model.lora) == 1:
        host["engine's weights, asleep"] = engine_weights(config, model)
    time = step_time(config, model, sizes, card, num_ranks, cache.full_length)
    policy_phases = plan_phases(config, model, sizes, card, num_ranks, peaks, cache)
    return Plan(
        config=config,
        card=card,
        num_ranks=num_ranks,
        num_parameters=model.num_parameters,
        phases=with_side_models(policy_phases, models),
        host=host + host_bytes(models),
        kv_cache=cache,
        time=add_time(time, config, models, card, num_ranks),
    )


def trainer_peaks(config: Config, folder: Path, num_ranks: int, *, on_gpu: bool) -> Peaks:
    """Peaks of the policy's passes over the largest micro-batch."""
    _, num_micro_batches = micro_batches_per_step(config, num_ranks)
    work = Pass(
        folder=folder,
        # Nothing is offloaded during a pass: one dry run serves all settings.
        model=replace(config.model, offload=False),
        loss=config.loss,
        num_ranks=num_ranks,
        lengths=longest_row(config, num_ranks),
        accumulates=num_micro_batches > config.training.num_optimizer_steps,
        scores=sum(extra_passes(config)) > 0,
        on_gpu=on_gpu,
    )
    return peaks_of(work)


def longest_row(config: Config, num_ranks: int) -> tuple[tuple[int, int], ...]:
    """Prompt and completion tokens of the rollouts in the largest micro-batch: as many of full
    length as it holds, and a shorter one in the rest."""
    num_full, rest = divmod(micro_batch_tokens(config, num_ranks), config.max_rollout_tokens)
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)] * num_full
    if rest > 1:
        # At least one prompt and one completion token.
        lengths.append((1, rest - 1))
    return tuple(lengths)


def kv_cache(
    config: Config, model: ModelFacts, sizes: Dimensions, card: Card, num_ranks: int
) -> KvCache:
    rollout = config.rollout
    num_bytes = rollout.engine.get("kv_cache_memory_bytes")
    if not isinstance(num_bytes, int):
        used = engine_activations(config, sizes, card) + graph_bytes(config, sizes)
        budget = int(rollout.gpu_memory_utilization * card.gib * GIB)
        num_bytes = budget - engine_weights(config, model) - used
    token = kv_bytes_per_token(sizes, kv_itemsize(config), rollout.tensor_parallel_size)
    tokens = max(0, num_bytes // (token * _BLOCK) * _BLOCK)
    sequences = sequences_of_engine(config, num_ranks)
    prompts = sequences // rollout.group_size
    # A group shares its prompt's blocks.
    needed = prompts * config.data.max_prompt_tokens + sequences * rollout.max_completion_tokens
    num_running = tokens // _round_to_blocks(config.max_rollout_tokens)
    return KvCache(
        num_bytes=num_bytes,
        tokens=tokens,
        longest_bytes=_round_to_blocks(engine_tokens(config)) * token,
        needed_tokens=needed,
        full_length=min(num_running, rollout.engine.get("max_num_seqs") or tokens),
        sequences=sequences,
    )


def _round_to_blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK


def plan_phases(
    config: Config,
    model: ModelFacts,
    sizes: Dimensions,
    card: Card,
    num_ranks: int,
    peaks: Peaks,
    cache: KvCache,
) -> dict[str, Usage]:
    """Bytes by what they are for in each phase, at its peak, in a step after the first update."""
    state, offload = state_of(config, model, num_ranks), config.model.offload
    fixed = Counter(
        {
            "CUDA context": CONTEXT,
            "NCCL": nccl_bytes(config, num_ranks),
            "CUDA graphs, workspaces": graph_bytes(config, sizes),
        }
    )
    policy = Counter({"policy": 4 * state.trained, "base": state.base})
    moments = Counter({"moments": 8 * state.trained})
    reference = Counter({"reference": state.reference})
    trainer = policy + moments + reference
    # What stays on the device while the engine is awake, and while the sync reads the policy.
    awake = {False: trainer, "optimizer": policy + reference, True: Counter[str]()}[offload]
    in_sync = {False: trainer, "optimizer": policy + reference, True: policy}[offload]
    engine = Counter({"engine's weights": engine_weights(config, model)})
    bucket_bytes = config.rollout.sync_bucket_bytes("cuda")
    buffers = Counter(sync_buffers(config, model, num_ranks, bucket_bytes))
    buffers["layer in load"] = layer_in_reload(sizes, ITEMSIZE[config.model.dtype])
    sampling = awake + engine + Counter({"KV cache": max(0, cache.num_bytes)})
    sampling["engine's activations"] = engine_activations(config, sizes, card)
    phases = {
        "weight_sync": in_sync + engine + with_fragmentation(buffers),
        "rollout": sampling,
        "reward": sampling,
        "logprobs": trainer + with_fragmentation(peaks.scoring),
        "update": trainer + with_fragmentation(_update_peak(peaks.update, state)),
        "checkpoint": trainer,
    }
    if config.eval.every_steps:
        phases["eval"] = sampling
    return {phase: fixed + phases[phase] for phase in PHASES if phase in phases}


def _update_peak(peak: Usage, state: State) -> Usage:
    """AdamW runs while all gradients exist. Fused, as on a GPU, it allocates nothing itself."""
    return peak if peak.total() > state.gradients else Counter({"gradients": state.gradients})
