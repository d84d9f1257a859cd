"""Estimates of GPU memory that no tensor of the trainer shows, each with its source.

None of them has been compared with a run of this project on a GPU.
"""

from __future__ import annotations

from collections import Counter

from grpo_spmd.checks.memory import ITEMSIZE
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import Dimensions
from grpo_spmd.observe.cards import Card

GIB = 2**30
# Driver and kernels of one process, loaded when they are used: 0.3 to 0.4 GiB in
# pytorch/pytorch#107667 and #109888; with vLLM's kernels beside torch's a little more.
CONTEXT = int(0.5 * GIB)
# For each communicator of a node: 8 H100 with one had 1.06 GB outside of torch, with the context
# (NVIDIA/nccl#1685, before any all-to-all, which this project sends over gloo).
NCCL = int(0.5 * GIB)
# For an engine on several ranks, its NCCL and its own all-reduce: asleep 2,440 MiB against 774 on
# one rank (NVIDIA-NeMo/RL#223); outside of torch 3.58 GiB against 1.79 (vllm-project/vllm#10511).
TENSOR_PARALLEL = int(1.7 * GIB)
# For each layer, over vLLM's default capture sizes: 0.21 GiB for 16 layers
# (vllm-project/vllm#11349), 1.4 GiB for 61 (#47654). They stay while the engine sleeps (#45623).
GRAPHS_PER_LAYER = 20 << 20
# cuBLAS's and attention's workspaces, which vLLM allocates and its sleep keeps: FlashInfer's alone
# is 394 MiB (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE in vllm/envs.py, 0.32).
WORKSPACES = int(0.4 * GIB)
# Fraction of the trainer's live bytes that its allocator loses as holes when memory is short. It
# keeps more (torchtitan#165: 52 % of a card live, 63 % reserved), but gives that back then.
FRAGMENTATION = 0.05
# Bytes of each logit at the peak of vLLM's sampler over all its sequences: the product, float32
# logits and logprobs, sorted values with their int64 indices, probabilities
# (v1/sample/ops/topk_topp_sampler.py, 0.32; its profiling run samples with top-p and top-k).
_SAMPLER_BYTES = 2 + 4 + 4 + 4 + 8 + 4


def nccl_bytes(config: Config, num_ranks: int) -> int:
    """Buffers of the trainer's and the engine's communicators."""
    # With replicas there are two more groups: within a replica and between replicas.
    num_groups = (num_ranks > 1) + 2 * (config.model.num_replicas > 1)
    return NCCL * num_groups + TENSOR_PARALLEL * (config.rollout.tensor_parallel_size > 1)


def graph_bytes(config: Config, sizes: Dimensions) -> int:
    """CUDA graphs and workspaces of the engine. They stay while it sleeps."""
    captures = not config.rollout.engine.get("enforce_eager")
    return GRAPHS_PER_LAYER * sizes.layers * captures + WORKSPACES


def engine_activations(config: Config, sizes: Dimensions, card: Card) -> int:
    """What vLLM reserves for its forward pass: the larger of an MLP over all tokens of a batch and
    of the sampler over all sequences, with its defaults for the card
    (EngineArgs.get_batch_defaults, 0.32)."""
    engine, itemsize = config.rollout.engine, ITEMSIZE[config.model.dtype]
    is_large = card.gib >= 70 and "A100" not in card.name
    tokens = engine.get("max_num_batched_tokens") or (16384 if is_large else 8192)
    sequences = engine.get("max_num_seqs") or (1024 if is_large else 256)
    intermediate = 3 * sizes.intermediate // config.rollout.tensor_parallel_size
    mlp = tokens * itemsize * (intermediate + 3 * sizes.hidden)
    return max(mlp, sequences * sizes.vocabulary * _SAMPLER_BYTES)


def layer_in_reload(sizes: Dimensions, itemsize: int) -> int:
    """What vLLM holds of the layer that it is loading (model_executor/model_loader/reload, 0.32):
    its tensors until all have come, and the layer built from them. The largest is the lm_head, or
    gate and up together."""
    return 2 * itemsize * sizes.hidden * max(sizes.vocabulary, 2 * sizes.intermediate)


def with_fragmentation(usage: Counter[str]) -> Counter[str]:
    return usage + Counter({"fragmentation": int(FRAGMENTATION * usage.total())})
