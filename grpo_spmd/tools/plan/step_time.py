"""Estimates the time of a step, and the GPU memory that is not in tensors of the trainer.

This memory is that of the CUDA context, NCCL, CUDA graphs and the engine's own buffers. The time is
computed from numbers of operations and bytes, and from the speed that a card is assumed to reach: a
fraction of its data sheet that others have measured. Each estimate names its source. None has been
compared with a run of this project on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_spmd.checks.memory import (
    ITEMSIZE,
    State,
    exchanged_bytes,
    extra_passes,
    micro_batches_per_step,
    most_sequences,
    replica_ranks,
    state_of,
)
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import Dimensions, ModelFacts, kv_bytes_per_token
from grpo_spmd.observe.cards import Card, is_large_for_vllm, max_num_seqs

GIB = 2**30
# Bytes of the CUDA context of one process, with the loaded kernels: 0.3 to 0.4 GiB in
# pytorch/pytorch#107667 and #109888; a little more with vLLM's kernels besides torch's.
CONTEXT = int(0.5 * GIB)
# Bytes of each NCCL communicator within a node: 8 H100 with one communicator had 1.06 GB outside of
# torch, including the context (NVIDIA/nccl#1685, before any all-to-all, which this project sends
# over gloo).
NCCL = int(0.5 * GIB)
# Bytes of the NCCL communicator and the custom all-reduce of an engine on several ranks: 2,440 MiB
# while it sleeps, against 774 on one rank (NVIDIA-NeMo/RL#223); 3.58 GiB outside of torch, against
# 1.79 (vllm-project/vllm#10511).
TENSOR_PARALLEL = int(1.7 * GIB)
# Bytes of the CUDA graphs of each layer with vLLM's default capture sizes: 0.21 GiB for 16 layers
# (vllm-project/vllm#11349), 1.4 GiB for 61 (#47654). They stay while the engine sleeps (#45623).
GRAPHS_PER_LAYER = 20 << 20
# Bytes of the workspaces of cuBLAS and attention in vLLM, which stay while it sleeps: FlashInfer's
# alone is 394 MiB (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE in vllm/envs.py, 0.32).
WORKSPACES = int(0.4 * GIB)
# Bytes of memory traffic for one bfloat16 logit, (forward, backward). plain: the operations of
# model/logprobs.py over float32 copies, counted one by one. fused: the product of the lm_head is
# written and read once forward; backward it is written, read, overwritten by its gradient, and read
# by two products (model/fused_logprobs.py).
LOGIT_BYTES = {"plain": (64, 50), "fused": (4, 10)}
# Bytes lost as holes in torch's allocator when memory is short, as a fraction of the trainer's live
# bytes. It reserves more (torchtitan#165: 52 % of a card live, 63 % reserved), but then it gives
# the rest back.
FRAGMENTATION = 0.05
# Fraction of a card's peak that matrix products reach. torchtitan's Llama 3 8B under FSDP2 had 33
# to 39 % of an H100's dense peak, 57 % of an A100's (benchmarks/llama3_h100_202412_torchtitan.md,
# docs/performance.md there).
MATMUL_FRACTION = 0.4
# Fraction of the data sheet's memory bandwidth that large copies reach. Decoding is assumed to read
# weights and KV cache at this rate.
MEMORY_FRACTION = 0.8
# Fraction of NVLink that all-gathers and reduce-scatters of large messages reach (nccl-tests' bus
# bandwidth).
LINK_FRACTION = 0.7
# The bandwidth of each GPU to other nodes: 400 Gb/s, as in torchtitan's runs.
BETWEEN_NODES_GB_S = 50.0
RANKS_PER_NODE = 8
# The host's time for one step of vLLM, and in addition for each running sequence. The Python code
# of scheduler and output processing takes 24.8 to 38 microseconds a sequence on a Xeon with 2
# shared cores (benchmarks/run.sh engine_host), and 12 to 21 on an EPYC, which is more like the
# hosts of GPUs: its slow end is taken. Preparing and launching a step is assumed to take the V2
# runner 1.5 to 3 ms; this has not been measured.
ENGINE_STEP_S = 0.002
ENGINE_SEQUENCE_S = 20e-6
# Bytes that AdamW reads and writes for each parameter: in one fused kernel, or with 8-bit moments
# in the single operations of model/optimizer.py.
ADAMW_BYTES = {"adamw": 28, "adamw_8bit": 430}
# Temporary bytes of an optimizer step with 8-bit moments, which goes through the parameters in
# chunks (model/optimizer.py): six float32 tensors and a few scales.
STEP_BYTES = 25 * 2**22
# Fraction of the forward pass that the backward pass repeats, by model.activation_checkpointing.
RECOMPUTED = {False: 0.0, "selective": 0.1, True: 1.0}


@dataclass(frozen=True)
class Case:
    """What a plan is made for: a config and its model, on a number of cards of one kind."""

    config: Config
    model: ModelFacts
    card: Card
    num_ranks: int

    @property
    def sizes(self) -> Dimensions:
        """The model's dimensions. Raises ConfigError if its config.json does not name them."""
        sizes = self.model.dimensions
        if sizes is None:
            raise ConfigError(
                f"model.path: the config.json of {self.config.model.path} does not name the sizes "
                "of a decoder as Llama's does"
            )
        return sizes

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element of the compute dtype."""
        return ITEMSIZE[self.config.model.dtype]

    @property
    def state(self) -> State:
        """The policy's state on one rank."""
        return state_of(self.config, self.model, self.num_ranks)

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts that one rank has in a step."""
        rollout = self.config.rollout
        return -(-rollout.num_prompts_per_step * rollout.group_size // self.num_ranks)

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches that one rank has in a step if every rollout has its full
        length."""
        return micro_batches_per_step(self.config, self.num_ranks)[1]

    @property
    def speed(self) -> Speed:
        """The speed of a rank in a replica of the policy."""
        return Speed(self.card, replica_ranks(self.config, self.num_ranks))


# Memory


def nccl_bytes(case: Case) -> int:
    """Returns the bytes of the trainer's and the engine's communicators on one rank."""
    # The trainer has a process group of all ranks. With replicas it has two more: the ranks of a
    # replica, and the ranks with the same shard. Ranks that share their rows (sequence parallelism)
    # have one more.
    model = case.config.model
    num_groups = (case.num_ranks > 1) + 2 * (model.num_replicas > 1)
    num_groups += model.sequence_parallel_size > 1
    return NCCL * num_groups + TENSOR_PARALLEL * (case.config.rollout.engine_ranks > 1)


def graph_bytes(case: Case) -> int:
    """Returns the bytes of the engine's CUDA graphs and workspaces, which stay while it sleeps."""
    captures = not case.config.rollout.engine.get("enforce_eager")
    return GRAPHS_PER_LAYER * case.sizes.layers * captures + WORKSPACES


def engine_activations(case: Case) -> int:
    """Returns the bytes that vLLM reserves for its forward pass.

    This is the larger of two numbers: the bytes of an MLP's tensors over all tokens of a batch, and
    the bytes of the logits of all sequences. The logits count once, because vLLM's profiling run
    samples at temperature 1, for which the V2 runner makes no second copy.
    """
    engine, sizes = case.config.rollout.engine, case.sizes
    is_large = is_large_for_vllm(case.card.name, case.card.gib)
    tokens = engine.get("max_num_batched_tokens") or (16384 if is_large else 8192)
    # For each token: gate, up and their product, which are divided over the engine's ranks, and
    # three tensors of the hidden size: the residual, the MLP's input and its output.
    shared_width = 3 * sizes.intermediate // case.config.rollout.engine_ranks
    mlp = tokens * case.itemsize * (shared_width + 3 * sizes.hidden)
    return max(mlp, engine_places(case) * sizes.vocabulary * case.itemsize)


def sampler_tables(case: Case) -> int:
    """Returns the bytes of the V2 runner's tables for sampling penalties, which are in the same
    memory pool as the weights.

    For each sequence that can run there is an int32 count of each token of the vocabulary, and one
    bit to mark the prompt's tokens (v1/worker/gpu/sample/penalties.py, 0.26 to 0.33). The project
    does not use penalties.
    """
    vocabulary = case.sizes.vocabulary
    return engine_places(case) * 4 * (vocabulary + -(-vocabulary // 32))


def engine_places(case: Case) -> int:
    """Returns the number of sequences that an engine can run at the same time (max_num_seqs)."""
    most = most_sequences(case.config, case.num_ranks)
    return max_num_seqs(case.card.name, case.card.gib, case.config.rollout.engine, most)


def layer_in_reload(case: Case) -> int:
    """Returns the most bytes that vLLM holds for one layer while it loads new weights.

    vLLM collects the tensors of a layer until it has all of them, and then builds the layer from
    them (model_executor/model_loader/reload, 0.32). The largest layer is the lm_head, or the merged
    gate and up projections of an MLP.
    """
    sizes = case.sizes
    return 2 * case.itemsize * sizes.hidden * max(sizes.vocabulary, 2 * sizes.intermediate)


def with_fragmentation(usage: Counter[str]) -> Counter[str]:
    """Returns the usage with the bytes that the allocator loses as holes added."""
    return usage + Counter({"fragmentation": int(FRAGMENTATION * usage.total())})


# Time


@dataclass(frozen=True)
class Work:
    """The rollouts of one rank and the sizes of the model, on which the time of its passes depends.

    The sizes are those of the whole model, not of one rank's shards."""

    sizes: Dimensions
    # Number of parameters in matrix products. An lm_head that is tied to the embedding counts once.
    num_parameters: int
    # Number of these that are used for one token: of a mixture of experts only the chosen experts.
    active_parameters: int
    # Parameters of the lm_head: vocabulary size x hidden size.
    head_parameters: int
    # Prompt and completion tokens of each rollout.
    lengths: Sequence[tuple[int, int]]
    # Bytes of a weight in the compute dtype.
    itemsize: int

    @property
    def layer_parameters(self) -> int:
        """The number of parameters outside the lm_head that are used for one token."""
        return self.active_parameters - self.head_parameters

    @property
    def tokens(self) -> int:
        """The number of tokens of all rollouts."""
        return sum(prompt + completion for prompt, completion in self.lengths)

    @property
    def completion_tokens(self) -> int:
        """The number of completion tokens of all rollouts."""
        return sum(completion for _, completion in self.lengths)


def forward_flops(work: Work) -> float:
    """Returns the floating-point operations of one forward pass.

    All tokens pass through the layers, only completions through the lm_head. Attention is causal.
    """
    sizes = work.sizes
    squares = sum((prompt + completion) ** 2 for prompt, completion in work.lengths)
    attention = 2 * sizes.attention_layers * sizes.heads * sizes.head_dim * squares
    layers = 2 * work.layer_parameters * work.tokens
    return layers + 2 * work.head_parameters * work.completion_tokens + attention


def decode_bytes(work: Work) -> float:
    """Returns the bytes that the engine reads to decode all rollouts in one batch.

    All weights are read once for each token of the longest completion, and for each sampled token
    the keys and values of the tokens before it."""
    steps = max(completion for _, completion in work.lengths)
    token_bytes = kv_bytes_per_token(work.sizes, work.itemsize, 1)
    cached_tokens = sum(
        completion * prompt + completion * (completion - 1) // 2
        for prompt, completion in work.lengths
    )
    return steps * work.num_parameters * work.itemsize + cached_tokens * token_bytes


def decode_flops(work: Work) -> float:
    """Returns the floating-point operations of decoding, without attention."""
    return 2 * work.active_parameters * work.completion_tokens


@dataclass(frozen=True)
class Speed:
    """The speed that a card is assumed to reach, per second: floating-point operations, bytes of
    memory traffic, and bytes sent to other ranks."""

    card: Card
    # Number of ranks that communicate: those of a replica or of an engine.
    ranks: int

    @property
    def flops(self) -> float:
        """Floating-point operations per second."""
        return MATMUL_FRACTION * self.card.tflops * 1e12

    @property
    def memory(self) -> float:
        """Bytes of memory traffic per second."""
        return MEMORY_FRACTION * self.card.memory_gb_s * 1e9

    @property
    def link(self) -> float:
        """Bytes per second from a rank to others, over the network if not all fit into one node."""
        gb_s = self.card.link_gb_s
        if self.ranks > RANKS_PER_NODE:
            gb_s = min(gb_s, BETWEEN_NODES_GB_S)
        return LINK_FRACTION * gb_s * 1e9

    def gather_s(self, model: ModelFacts, itemsize: int) -> float:
        """Returns the seconds of one all-gather or reduce-scatter of all parameters, whose elements
        have `itemsize` bytes."""
        return model.num_parameters * itemsize * (self.ranks - 1) / self.ranks / self.link


def work_of(case: Case, *, has_lm_head: bool) -> Work:
    """Returns the work of all rollouts of one rank, each at full length."""
    config, sizes = case.config, case.sizes
    embedding = sizes.vocabulary * sizes.hidden
    head = embedding if has_lm_head else 0
    is_tied = "lm_head.weight" not in case.model.shapes
    length = (config.data.max_prompt_tokens, config.rollout.max_completion_tokens)
    # Parameters of the embedding that take part in no matrix product, as they are only looked up: 0
    # if the embedding is tied to an lm_head that is used.
    lookup = embedding - (head if is_tied else 0)
    return Work(
        sizes=sizes,
        num_parameters=case.model.num_parameters - lookup,
        active_parameters=case.model.num_active_parameters - lookup,
        head_parameters=head,
        lengths=[length] * case.num_rollouts,
        itemsize=case.itemsize,
    )


def forward_s(case: Case, *, has_lm_head: bool) -> float:
    """Returns the seconds of a forward pass over all rollouts of a rank.

    FSDP's gathers of the parameters overlap with the arithmetic, so the longer of the two counts.
    """
    flops = forward_flops(work_of(case, has_lm_head=has_lm_head))
    # A forward pass gathers all parameters once in each micro-batch.
    gathers = case.num_micro_batches // case.config.training.num_epochs
    gather_s = case.speed.gather_s(case.model, case.itemsize)
    return max(flops / case.speed.flops + exchange_s(case), gathers * gather_s)


def exchange_s(case: Case) -> float:
    """Returns the seconds of sequence parallelism's communication in a forward pass; 0 without it.

    The pass is over all rollouts. Several ranks share a row of packed rollouts, and send queries,
    keys, values and outputs of attention to each other. Arithmetic waits for it."""
    sharing = case.config.model.sequence_parallel_size
    tokens = sharing * work_of(case, has_lm_head=False).tokens
    sent = exchanged_bytes(case.sizes, tokens, sharing, case.itemsize)
    return sent / Speed(case.card, sharing).link


def _logits_s(case: Case, *, is_update: bool) -> float:
    """Returns the seconds for the logprobs of all completions in one pass, without the matrix
    products of the lm_head; with `is_update` also for their gradients. It is all memory traffic."""
    fused = case.config.model.logprob_kernel != "plain"
    forward, backward = LOGIT_BYTES["fused" if fused else "plain"]
    num_logits = work_of(case, has_lm_head=True).completion_tokens * case.sizes.vocabulary
    return num_logits * (forward + backward * is_update) / case.speed.memory


def step_time(case: Case, num_running: int) -> dict[str, float]:
    """Returns the seconds of each phase, as an upper bound, since every rollout is assumed to have
    its full length.

    `num_running` is the number of sequences that an engine runs at the same time
    (KvCache.full_length). Rewards, evaluation and checkpoints are not estimated.
    """
    config, state, speed = case.config, case.state, case.speed
    offload = state.offloaded(config.model.offload) / (case.card.host_gb_s * 1e9)
    adamw = ADAMW_BYTES[config.optimizer.name] * state.trained / speed.memory
    adamw *= config.training.num_optimizer_steps
    return {
        "weight_sync": _sync_s(case) + offload,
        "rollout": _rollout_s(case, num_running),
        "logprobs": sum(extra_passes(config))
        * (forward_s(case, has_lm_head=True) + _logits_s(case, is_update=False)),
        "update": _update_s(case) + adamw + offload,
    }


def _sync_s(case: Case) -> float:
    """Returns the seconds of one weight sync, which copies the policy's weights to the engine."""
    speed, numel = case.speed, case.model.num_parameters
    # Each rank reads its float32 shard, writes the gathered weights, and copies them to the engine.
    copied = 4 * numel / speed.ranks + 2 * case.itemsize * numel
    return speed.gather_s(case.model, case.itemsize) + copied / speed.memory


def _rollout_s(case: Case, num_running: int) -> float:
    """Returns the seconds that one engine takes to generate a step's sequences.

    `num_running` sequences run in one round, and the others wait for a later round. A last round
    that is not full counts as a fraction of a round. The prompt of each group is computed once.
    """
    tp = case.config.rollout.engine_ranks
    # Only the ranks of the engine communicate, and they are on one node.
    work, speed = work_of(case, has_lm_head=True), Speed(case.card, tp)
    prompt, completion = work.lengths[0]
    sequences = len(work.lengths) * tp
    num_running = max(1, min(sequences, num_running))
    batch = replace(work, lengths=[(prompt, completion)] * num_running)
    decode = max(decode_bytes(batch) / speed.memory, decode_flops(batch) / speed.flops) / tp
    # In each decoding step and layer there are two all-reduces of the sequences' hidden states.
    hidden_bytes = num_running * work.sizes.hidden * work.itemsize
    reduced = 4 * work.sizes.layers * hidden_bytes * completion if tp > 1 else 0
    # Scheduling is asynchronous: the host prepares a step while the device runs the one before. So
    # the slower of the two determines the time.
    host = completion * (ENGINE_STEP_S + ENGINE_SEQUENCE_S * num_running)
    round_s = max(decode + reduced / speed.link, host)
    # A group shares its prompt, unless layers have recurrent states.
    shared = 1 if work.sizes.recurrent_layers else case.config.rollout.group_size
    prefill = 2 * work.layer_parameters * -(-sequences // shared) * prompt / speed.flops / tp
    return sequences / num_running * round_s + prefill


def _update_s(case: Case) -> float:
    """Returns the seconds of the forward and backward passes in one step's update.

    Communication (parameter gathers, gradient reductions) overlaps with the arithmetic, so the
    longer of the two counts.
    """
    model, speed, has_lora = case.config.model, case.speed, bool(case.config.model.lora.rank)
    # A backward pass costs as much as two forward passes, or as one if the weights are frozen.
    passes = (2 if has_lora else 3) + RECOMPUTED[model.recompute]
    flops = passes * forward_flops(work_of(case, has_lm_head=True))
    # In each micro-batch weights are gathered in the forward and in the backward pass, and float32
    # gradients are reduced.
    moved = 2 * speed.gather_s(case.model, case.itemsize)
    moved += 0 if has_lora else speed.gather_s(case.model, 4)
    seconds = flops / speed.flops + _logits_s(case, is_update=True)
    # Layers that are recomputed exchange once more; so does selective recomputation.
    seconds += (2 + bool(model.recompute)) * exchange_s(case)
    return max(case.config.training.num_epochs * seconds, case.num_micro_batches * moved)
