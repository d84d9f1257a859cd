"""What a GPU holds beside tensors of the trainer: estimates, each with where it is from. None of them has been compared
with a run of this project on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_spmd.checks.memory import ITEMSIZE
from grpo_spmd.config.schema import Config
from grpo_spmd.model.config_json import ModelFacts
from grpo_spmd.observe.cards import Card

GIB = 2**30
# Driver and kernels of one process, loaded as they are used: 0.3 to 0.4 GiB in pytorch/pytorch#107667 and #109888;
# with vLLM's kernels beside torch's a little more.
CONTEXT = int(0.5 * GIB)
# Of each communicator of a node: 8 H100 with one had 1.06 GB outside of torch, the context among it
# (NVIDIA/nccl#1685, before any all-to-all, which this project sends over gloo).
NCCL = int(0.5 * GIB)
# Of an engine on several ranks, its NCCL and its own all-reduce: asleep 2,440 MiB against 774 on one rank
# (NVIDIA-NeMo/RL#223); outside of torch 3.58 GiB against 1.79 (vllm-project/vllm#10511).
TENSOR_PARALLEL = int(1.7 * GIB)
# Of each layer, over vLLM's default capture sizes: 0.21 GiB for 16 layers (vllm-project/vllm#11349), 1.4 GiB for 61
# (#47654). They stay while the engine sleeps (#45623).
GRAPHS_PER_LAYER = 20 << 20
# cuBLAS's and attention's workspaces, in the allocator's pool of vLLM but not in what sleeps: FlashInfer's alone is
# 394 MiB (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE in vllm/envs.py, 0.32).
WORKSPACES = int(0.4 * GIB)
# Share of the trainer's live bytes that its allocator cannot use, as holes, when memory is short. What it merely keeps
# is more (torchtitan#165: 52 % of a card live, 63 % reserved), but is given back then.
FRAGMENTATION = 0.05
# Bytes of each logit at the peak of vLLM's sampler over all its sequences: the product, float32 logits and logprobs,
# sorted values with their int64 places, probabilities (v1/sample/ops/topk_topp_sampler.py, 0.32; its profiling run
# samples with top-p and top-k).
_SAMPLER_BYTES = 2 + 4 + 4 + 4 + 8 + 4


@dataclass(frozen=True)
class Outside:
    """Bytes on the device that no tensor of the trainer shows."""

    context: int
    nccl: int
    graphs: int  # CUDA graphs and workspaces of the engine, which its sleep does not give back

    @property
    def total(self) -> int:
        return self.context + self.nccl + self.graphs


def outside(config: Config, model: ModelFacts, num_ranks: int) -> Outside:
    sizes, rollout = model.dimensions, config.rollout
    groups = [num_ranks > 1, config.model.num_replicas > 1, config.model.num_replicas > 1]
    nccl = NCCL * sum(groups) + (TENSOR_PARALLEL if rollout.tensor_parallel_size > 1 else 0)
    captures = not rollout.engine.get("enforce_eager") and sizes is not None
    graphs = GRAPHS_PER_LAYER * sizes.layers if captures and sizes is not None else 0
    return Outside(CONTEXT, nccl, graphs + WORKSPACES)


def engine_activations(config: Config, model: ModelFacts, card: Card) -> int:
    """What vLLM sets aside for its own forward pass: the larger of an MLP over all tokens of a batch and of the sampler
    over all sequences, by its defaults for the card (EngineArgs.get_batch_defaults, 0.32)."""
    sizes, itemsize, tp = (
        model.dimensions,
        ITEMSIZE[config.model.dtype],
        config.rollout.tensor_parallel_size,
    )
    if sizes is None:
        return 0
    is_large = card.gib >= 70 and "A100" not in card.name
    tokens = config.rollout.engine.get("max_num_batched_tokens") or (16384 if is_large else 8192)
    sequences = config.rollout.engine.get("max_num_seqs") or (1024 if is_large else 256)
    mlp = tokens * itemsize * (3 * sizes.intermediate // tp + 3 * sizes.hidden)
    return max(mlp, sequences * sizes.vocabulary * _SAMPLER_BYTES)


def layer_in_reload(model: ModelFacts, itemsize: int) -> int:
    """What vLLM holds of the layer that it is loading (model_executor/model_loader/reload, 0.32): the tensors that have
    come for it, until it is whole, and the layer made of them. Its largest is the lm_head, or gate and up together."""
    sizes = model.dimensions
    if sizes is None:
        return 0
    return 2 * itemsize * sizes.hidden * max(sizes.vocabulary, 2 * sizes.intermediate)
