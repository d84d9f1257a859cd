"""The policy: an HF causal LM built on the meta device, sharded by FSDP2, filled shard by shard, and its logprobs.

Packed rows go through HF's own layers. Ours are attention, so that sequences of a row do not see each other and nothing
is padded, and the lm_head, so that the [T, V] logits never exist as a whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoraConfig, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model import lora
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout, choose_backend
from grpo_spmd.model.config_json import head_dim
from grpo_spmd.model.families.build import build_hf_model, decoder_layers, initialise_buffers
from grpo_spmd.model.families.logits import fix_rotary_factors, logits_map
from grpo_spmd.model.families.refusals import refuse_structure, refuse_tensors, trainable_config
from grpo_spmd.model.hf_files import checkpoint_folder, tensor_files
from grpo_spmd.model.logprobs import Scores, TokenLogprobs
from grpo_spmd.model.sharding import first_row, shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")
Term = Callable[[Tensor, Tensor], Any]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM that scores completions. What trains is float32; the rest, and arithmetic, in the compute dtype.
    `forward` is the only door: FSDP gathers the embedding and the lm_head when it is entered, once a micro-batch."""

    def __init__(
        self, config: Any, temperature: float, chunk: int, attention: Backend, dtype: torch.dtype
    ) -> None:
        """`chunk`: tokens whose logits exist at a time."""
        super().__init__()
        how: dict[str, Any] = {"attn_implementation": PACKED_ATTENTION, "dtype": dtype}
        self.model = build_hf_model(config, config.name_or_path, **how)
        divisor, self.softcap = logits_map(self.model)
        self.temperature = temperature * divisor
        self.attention, self.logprob_chunk_tokens = attention, chunk
        self.lora, self.longest = LoraConfig(), 0  # no adapters

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied one counted once, adapters among them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(
        self, batch: MicroBatch, *terms: Term, only_term: bool = False
    ) -> Scores | tuple[Any, ...]:
        """Collective. Logprobs of `batch.target_ids` and entropy of the distributions they were drawn from, float32.
        Behind them what each of `terms` makes of hidden states [C, D] and head [V, D]; with `only_term` that alone.
        """
        layout = PackedLayout(batch.sequence_lengths, batch.input_ids.device, self.attention)
        row = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        out = self.model.get_decoder()(**row, use_cache=False, packed_layout=layout)
        hidden, head = (
            out.last_hidden_state[0][batch.predict_index],
            self.model.get_output_embeddings().weight,
        )
        if only_term:
            return tuple(term(hidden, head) for term in terms)
        settings = self.temperature, self.logprob_chunk_tokens, self.softcap
        scores: Scores = TokenLogprobs.apply(hidden, head, batch.target_ids, *settings)
        return (*scores, *(term(hidden, head) for term in terms))

    def plain_logits(self, token_ids: Tensor, places: Tensor | None = None) -> Tensor:
        """Collective. Logits [S, L, V] of rows of one sequence each, or [S, n, V] at `places`, by HF's own forward pass
        and nothing of ours: what proofs/ compares `forward` with. FSDP knows it as a second door."""
        kept: Any = {} if places is None else {"logits_to_keep": places}
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False, **kept).logits
        return logits


def build_policy(
    config: ModelConfig,
    temperature: float,
    session: Session,
    *,
    trainable: bool = True,
    seed: int = 0,
    longest: int = 0,
    role: str = "reference",
) -> Policy:
    """Collective. The model of `config.path` as a sharded policy: meta device -> FSDP2 -> each rank reads its own rows.
    With `config.lora.rank` only adapters train, made from `seed`, and the base is frozen in the compute dtype. Without
    `trainable` it is the reference: all of it is frozen so. `longest`: tokens of a rollout at most, as the engine is
    told; some models have other rotary factors for long ones. `role`: how a frozen one is called."""
    hf_config = trainable_config(config.path, longest)
    compute, has_adapters = DTYPES[config.dtype], trainable and config.lora.rank > 0
    # Parameters alone are made in this dtype: Module.to would round the rotary frequencies as well.
    stored = torch.float32 if trainable and not has_adapters else compute
    capped = getattr(hf_config, "attn_logit_softcapping", None) is not None
    attention = choose_backend(
        config.attention, session.device, compute, head_dim(hf_config), capped=capped
    )
    with torch.device("meta"):
        policy = Policy(hf_config, temperature, config.logprob_chunk_tokens, attention, stored)
    refuse_structure(policy.model, config.path)
    folder = checkpoint_folder(config.path)
    stored_as = refuse_tensors(policy.model, folder)
    policy.longest = longest
    policy.train(trainable)  # there is no dropout left for it to switch on
    policy.requires_grad_(trainable)
    if has_adapters:
        with torch.device("meta"):
            lora.add_adapters(policy.model, config.lora)
        policy.lora = config.lora
    layers = decoder_layers(policy.model)
    for layer in layers:
        set_up_layer(layer, trainable and config.activation_checkpointing, config.compile)
    # The root keeps embedding and lm_head gathered from forward to backward pass, which the reference never has.
    shard_over_ranks(policy, layers, session.mesh, compute, reshard_root=not trainable)
    register_fsdp_forward_method(policy, "plain_logits")
    policy.to_empty(device=session.device)
    policy.model.tie_weights()  # to_empty made two parameters out of a tied one
    initialise_buffers(policy.model)
    fix_rotary_factors(policy.model, longest)
    load_weights(
        ((stored_as.get(name, name), shard) for name, shard in hf_named_parameters(policy)), folder
    )
    lora.initialise_adapters(policy.model, seed)
    role, name = "policy" if trainable else role, type(policy.model).__name__
    num_trained = sum(
        parameter.numel() for parameter in policy.parameters() if parameter.requires_grad
    )
    of_them = f", {num_trained / 1e6:.3g} M of them in adapters that train," if has_adapters else ""
    size = f"{policy.num_parameters / 1e6:.1f} M parameters{of_them}"
    over = " x ".join(map(str, session.mesh.shape))  # replicas x ranks of each
    _log.info("%s: %s, %s over %s ranks, %s attention", role, name, size, over, attention)
    return policy


def build_reference(
    policy: Policy, config: ModelConfig, temperature: float, kl_coef: float, session: Session
) -> Callable[[MicroBatch], Scores] | None:
    """Collective. What scores with the frozen model that the run starts from, None where no KL term needs it. Where
    adapters train, that is the policy without them, and no second model is built."""
    if not kl_coef:
        return None
    if policy.lora.rank:
        return partial(_base_scores, policy)
    return build_policy(config, temperature, session, trainable=False, longest=policy.longest)


def _base_scores(policy: Policy, batch: MicroBatch) -> Scores:
    with lora.adapters_off(policy.model):
        scores: Scores = policy(batch)
    return scores


def hf_named_parameters(policy: Policy) -> Iterator[tuple[str, DTensor]]:
    """Sharded parameters but for adapters, under their names in an HF checkpoint, each once (a tied lm_head is left
    out), in one order on all ranks."""
    for name, parameter in policy.model.named_parameters():
        if not lora.is_adapter(name):
            assert isinstance(parameter, DTensor), name
            if (
                parameter._local_tensor.numel()
                and not parameter._local_tensor.untyped_storage().size()
            ):
                raise RuntimeError(
                    f"{name} is in host memory (model.offload); HostOffload.to_device comes first"
                )
            yield lora.hf_name(name), parameter


def hf_named_shards(policy: Policy) -> Iterator[lora.Shard]:
    """What the engine must hold, under HF's names: the base, with adapters merged into it (then this is collective)
    unless they travel by themselves."""
    if policy.lora.rank and policy.lora.sync == "merged":
        yield from lora.merged_shards(policy.model, policy.lora, hf_named_parameters(policy))
        return
    for name, parameter in hf_named_parameters(policy):
        yield name, parameter, partial(DTensor.to_local, parameter)


# What a layer keeps for its backward pass, and whether it is compiled. Both change `layer.forward` alone.


# Products and attention are nearly all of a layer's arithmetic; what lies between them is cheap to make again. By name:
# not every build of torch has every one, and flash-attn and varlen register theirs when they are imported.
_SDPA = ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
_KEPT = [
    ("aten", name)
    for name in ("mm", "addmm", "bmm", *(f"_scaled_dot_product_{kernel}" for kernel in _SDPA))
]
_KEPT += [("torch_attn", "_varlen_attn"), ("flash_attn", "_flash_attn_varlen_forward")]


def set_up_layer(
    layer: nn.Module, activation_checkpointing: bool | Literal["selective"], compile: bool
) -> None:
    """Make `layer` recompute its activations (all, or all but products and attention) and compile it, before FSDP wraps
    it: FSDP's hooks, which gather the parameters before the layer is run again, stay outside."""
    forward = layer.forward
    if compile:
        forward = torch.compile(forward, dynamic=True)  # one kernel for all lengths from the start
    # There is no dropout, so no random state to restore. Without gradients checkpoint() just calls the layer.
    # A compiled layer keeps about what `selective` keeps by itself, since the compiler makes again what is cheap; to
    # torch's selective checkpointing it would be one opaque operation, all of which is run again.
    if activation_checkpointing == "selective" and not compile:
        forward = partial(
            checkpoint,
            forward,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_keep_products,
        )
    elif activation_checkpointing is True:
        forward = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    layer.forward = forward


def _keep_products() -> Any:
    packets = (getattr(getattr(torch.ops, library), name, None) for library, name in _KEPT)
    found = [getattr(packet, "default", None) for packet in packets]
    return create_selective_checkpoint_contexts(
        [operator for operator in found if operator is not None]
    )


# Fills the shards of a policy that was built on the meta device from safetensors.


@torch.no_grad()
def load_weights(parameters: Iterable[tuple[str, DTensor]], folder: Path) -> None:
    """Fill every shard, given with its HF name: each rank reads its own rows of each tensor and nothing else. Raises
    ConfigError that names a tensor which is missing or has another shape."""
    where = tensor_files(folder)
    for name, parameter in parameters:
        if name not in where:
            raise ConfigError(f"model.path: {folder} has no tensor {name}")
        # opened anew for each tensor: pages of a mapping count as resident memory until it is closed
        with safe_open(where[name], framework="pt") as file:
            stored = file.get_slice(name)
            found, asked = list(stored.get_shape()), list(parameter.shape)
            if found != asked:
                shapes = f"has shape {found} in {folder}, but config.json asks for {asked}"
                raise ConfigError(f"model.path: {name} {shapes}")
            local, first = parameter.to_local(), first_row(parameter)
            if len(local):
                local.copy_(stored[first : first + len(local)])
