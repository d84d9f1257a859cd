"""The time of a step by phase: arithmetic and bytes over what the card can do at most, times the share of it that
others reached. A model, not a measurement: nothing of it has been compared with a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_spmd.checks import memory
from grpo_spmd.checks.memory import state_of
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import Dimensions, ModelFacts
from grpo_spmd.observe.cards import Card

# Products: torchtitan's Llama 3 8B under FSDP2 had 33 to 39 % of an H100's dense peak, 57 % of an A100's
# (benchmarks/llama3_h100_202412_torchtitan.md, docs/performance.md there).
MATMUL_SHARE = 0.4
# Reading weights and KV cache while decoding, of the data sheet's bandwidth: what a large copy reaches on these cards.
MEMORY_SHARE = 0.8
LINK_SHARE = (
    0.7  # of all-gathers and reduce-scatters on NVLink, large messages (nccl-tests' bus bandwidth)
)
BETWEEN_NODES_GB_S = 50.0  # 400 Gb/s a GPU, as in those runs
OF_A_NODE = 8  # ranks
# What the host takes for one step of vLLM beside the device, with CUDA graphs: a guess.
ENGINE_STEP_S = 0.003


@dataclass(frozen=True)
class StepTime:
    """Seconds; of rewards, evaluation and checkpoints nothing is known."""

    phases: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class Work:
    """What passes over some rollouts have to do, of one rank that holds all of the model."""

    sizes: Dimensions
    num_parameters: int  # N, a tied one counted once
    head_parameters: int  # of the lm_head: V * D
    lengths: Sequence[tuple[int, int]]  # of each rollout: prompt and completion tokens
    itemsize: int  # bytes of a weight in the compute dtype

    @property
    def layer_parameters(self) -> int:
        """Weights that every token is multiplied by; of a model whose lm_head is its embedding."""
        return self.num_parameters - self.head_parameters

    @property
    def tokens(self) -> int:
        return sum(prompt + completion for prompt, completion in self.lengths)

    @property
    def completion_tokens(self) -> int:
        return sum(completion for _, completion in self.lengths)


def forward_flops(work: Work) -> float:
    """Every token through the layers, completions through the lm_head, causal attention within each rollout."""
    attention = (
        2
        * work.sizes.layers
        * work.sizes.heads
        * work.sizes.head_dim
        * sum((p + c) ** 2 for p, c in work.lengths)
    )
    return (
        2 * work.layer_parameters * work.tokens
        + 2 * work.head_parameters * work.completion_tokens
        + attention
    )


def decode_bytes(work: Work) -> float:
    """All weights once for each token of the longest completion, and for each sampled token the keys and values of what
    precedes it."""
    longest = max(completion for _, completion in work.lengths)
    token = memory.kv_bytes_per_token(work.sizes, work.itemsize, 1)
    preceding = sum(
        completion * prompt + completion * (completion - 1) // 2
        for prompt, completion in work.lengths
    )
    return longest * work.num_parameters * work.itemsize + preceding * token


def decode_flops(work: Work) -> float:
    return 2 * work.num_parameters * work.completion_tokens


def step_time(
    config: Config, model: ModelFacts, sizes: Dimensions, card: Card, num_ranks: int, places: int
) -> StepTime:
    """With every rollout at full length: an upper bound of the arithmetic. `places`: sequences of full length that an
    engine runs at one time (KvCache.full_length)."""
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)]
    rollouts = config.rollout.num_prompts_per_step * config.rollout.group_size
    itemsize, head = memory.ITEMSIZE[config.model.dtype], sizes.vocabulary * sizes.hidden
    tied = 0 if any(name == "lm_head.weight" for name in model.shapes) else head
    # The embedding is looked up, not multiplied: only the head counts of the two.
    work = Work(
        sizes,
        model.num_parameters - head + tied,
        head,
        lengths * -(-rollouts // num_ranks),
        itemsize,
    )
    speed = Speed(card, num_ranks // config.model.num_replicas)
    passes = sum(memory.extra_passes(config))
    rows = memory.micro_batches_per_step(config, num_ranks)[1] // config.training.num_epochs
    seconds = {
        "weight_sync": _sync_s(config, model, speed, num_ranks),
        "rollout": _rollout_s(
            config, work, Speed(card, config.rollout.tensor_parallel_size), places
        ),
        "logprobs": passes
        * max(forward_flops(work) / speed.flops, rows * speed.gather_s(model, itemsize)),
        "update": _update_s(config, model, work, speed, num_ranks),
    }
    return StepTime(seconds)


@dataclass(frozen=True)
class Speed:
    """What the card is taken to reach, per second."""

    card: Card
    ranks: int  # of a replica, or of an engine

    @property
    def flops(self) -> float:
        return MATMUL_SHARE * self.card.tflops * 1e12

    @property
    def memory(self) -> float:
        return MEMORY_SHARE * self.card.memory_gb_s * 1e9

    @property
    def link(self) -> float:
        gb_s = (
            self.card.link_gb_s
            if self.ranks <= OF_A_NODE
            else min(self.card.link_gb_s, BETWEEN_NODES_GB_S)
        )
        return LINK_SHARE * gb_s * 1e9

    def gather_s(self, model: ModelFacts, itemsize: int) -> float:
        """One all-gather, or reduce-scatter, of all parameters."""
        return model.num_parameters * itemsize * (self.ranks - 1) / self.ranks / self.link


def _sync_s(config: Config, model: ModelFacts, speed: Speed, num_ranks: int) -> float:
    itemsize = memory.ITEMSIZE[config.model.dtype]
    written = 2 * itemsize * model.num_parameters  # gathered, and copied into the engine's layers
    moved = (
        speed.gather_s(model, itemsize)
        + (4 * model.num_parameters / speed.ranks + written) / speed.memory
    )
    return moved + _offloaded(config, model, num_ranks) / (speed.card.host_gb_s * 1e9)


def _offloaded(config: Config, model: ModelFacts, num_ranks: int) -> float:
    return state_of(config, model, num_ranks).offloaded(config.model.offload)


def _rollout_s(config: Config, work: Work, speed: Speed, places: int) -> float:
    """Decoding in as many rounds as the engine's places ask for, the last of them a part; prompts once a group.
    `speed`: of an engine, whose ranks are on one node."""
    rollout, tp = config.rollout, config.rollout.tensor_parallel_size
    prompt, completion = work.lengths[0]
    sequences = len(work.lengths) * tp
    at_once = max(1, min(sequences, places))
    rounds = sequences / at_once
    of_engine = replace(work, lengths=[(prompt, completion)] * at_once)
    decode = max(decode_bytes(of_engine) / speed.memory, decode_flops(of_engine) / speed.flops) / tp
    # two all-reduces a layer and step of the sequences' hidden states
    reduced = (
        4 * work.sizes.layers * at_once * work.sizes.hidden * work.itemsize * completion * (tp > 1)
    )
    groups = -(-sequences // rollout.group_size)
    prefill = 2 * work.layer_parameters * groups * prompt / speed.flops / tp
    return rounds * (decode + reduced / speed.link + completion * ENGINE_STEP_S) + prefill


def _update_s(config: Config, model: ModelFacts, work: Work, speed: Speed, num_ranks: int) -> float:
    """Forward, backward (twice that, or with frozen weights once), what is made again; gathers and reductions beside
    it; AdamW over the shard, 28 bytes a parameter read and written."""
    training, itemsize, state = config.training, work.itemsize, state_of(config, model, num_ranks)
    again = {False: 0.0, "selective": 0.1, True: 1.0}[config.model.activation_checkpointing]
    factor = (2 if config.model.lora.rank else 3) + again
    products = training.num_epochs * factor * forward_flops(work) / speed.flops
    _, micro_batches = memory.micro_batches_per_step(config, num_ranks)
    moved = 2 * speed.gather_s(model, itemsize) + (
        0 if config.model.lora.rank else speed.gather_s(model, 4)
    )
    steps = training.num_optimizer_steps * 28 * state.trained / speed.memory
    back = _offloaded(config, model, num_ranks) / (speed.card.host_gb_s * 1e9)
    return max(products, micro_batches * moved) + steps + back
