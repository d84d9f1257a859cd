"""The policy: an HF causal LM built on the meta device, sharded by FSDP2, filled shard by shard, and its logprobs.

Packed rows go through HF's own layers; only attention and the lm_head are ours: attention so that sequences of a row do
not see each other and nothing is padded, the lm_head so that the [T, V] logits never exist as a whole.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoraConfig, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, PackedLayout, choose_backend
from grpo_spmd.model.dimensions import head_dim
from grpo_spmd.model.hf_files import checkpoint_folder, tensor_files
from grpo_spmd.model.layers import set_up_layer
from grpo_spmd.model.logprobs import TokenLogprobs
from grpo_spmd.model.lora import adapters_off, add_adapters, hf_name, initialise_adapters, is_adapter, merged_shards
from grpo_spmd.model.sharding import first_row
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Scores = tuple[Float[Tensor, " C"], Float[Tensor, " C"]]


class Policy(nn.Module):
    """A causal LM that scores completions. What trains is float32 shards; arithmetic, and what is frozen, is in the
    compute dtype.

    `forward` is the only door: FSDP gathers the embedding and the lm_head when it is entered, once a micro-batch.
    """

    def __init__(
        self, config: Any, temperature: float, logprob_chunk_tokens: int, attention: Backend, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED_ATTENTION, dtype=dtype
        )
        # Granite divides its logits by a constant
        self.temperature = temperature * getattr(config, "logits_scaling", 1.0)
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.attention = attention
        self.lora = LoraConfig()  # no adapters

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied one counted once, adapters among them."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, batch: MicroBatch) -> Scores:
        """Collective. Logprobs of `batch.target_ids` and the entropy of the distributions they were drawn from,
        float32."""
        layout = PackedLayout(batch.sequence_lengths, batch.input_ids.device, self.attention)
        hidden = self.model.get_decoder()(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            packed_layout=layout,
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings().weight
        scores: Scores = TokenLogprobs.apply(
            hidden[batch.predict_index], head, batch.target_ids, self.temperature, self.logprob_chunk_tokens
        )
        return scores


def build_policy(
    config: ModelConfig, temperature: float, session: Session, *, trainable: bool = True, seed: int = 0
) -> Policy:
    """Collective. The model of `config.path` as a sharded policy: meta device -> FSDP2 -> each rank reads its own rows.

    With `config.lora.rank` only adapters train, and the base is frozen in the compute dtype.

    Args:
        trainable: False builds the reference: frozen, its shards in the compute dtype.
        seed: what new adapters are made from.
    """
    hf_config = transformers.AutoConfig.from_pretrained(config.path)
    _refuse_unsupported(hf_config, config.path)
    for name, value in vars(hf_config).items():  # dropout would make the policy differ from the engine that sampled
        if isinstance(value, int | float) and re.search("dropout|pdrop|layerdrop", name):
            setattr(hf_config, name, 0.0)
    compute = DTYPES[config.dtype]
    # Parameters alone are made in this dtype: Module.to would round the rotary frequencies as well.
    adapted = trainable and config.lora.rank > 0
    stored = torch.float32 if trainable and not adapted else compute
    attention = choose_backend(config.attention, session.device, compute, head_dim(hf_config))
    with torch.device("meta"):
        policy = Policy(hf_config, temperature, config.logprob_chunk_tokens, attention, stored)
    head = policy.model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(
            f"model.path: {config.path} has a bias in its lm_head, which the chunked logprobs do not support"
        )
    policy.train(trainable)  # there is no dropout left for it to switch on
    policy.requires_grad_(trainable)
    if adapted:
        with torch.device("meta"):
            add_adapters(policy.model, config.lora)
        policy.lora = config.lora

    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in policy.model.get_decoder().layers:
        set_up_layer(layer, trainable and config.activation_checkpointing, config.compile)
        fully_shard(layer, mesh=session.mesh, mp_policy=precision)
    # After a forward pass without a backward pass the root would keep its embedding and lm_head gathered; the reference
    # never has one.
    fully_shard(policy, mesh=session.mesh, mp_policy=precision, reshard_after_forward=not trainable)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            # The loss is divided by the global token count already: sum gradients over ranks, do not average them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    policy.to_empty(device=session.device)
    policy.model.tie_weights()  # to_empty made two parameters out of a tied one
    _initialise_buffers(policy)
    load_weights(policy, checkpoint_folder(config.path))
    initialise_adapters(policy.model, seed)
    role, name = "policy" if trainable else "reference", type(policy.model).__name__
    num_trained = sum(parameter.numel() for parameter in policy.parameters() if parameter.requires_grad)
    of_them = f", {num_trained / 1e6:.3g} M of them in adapters that train," if adapted else ""
    size = f"{policy.num_parameters / 1e6:.1f} M parameters{of_them}"
    over = " x ".join(map(str, session.mesh.shape))  # replicas x ranks of each
    _log.info("%s: %s, %s over %s ranks, %s attention", role, name, size, over, attention)
    return policy


def build_reference(
    policy: Policy, config: ModelConfig, temperature: float, kl_coef: float, session: Session
) -> Callable[[MicroBatch], Scores] | None:
    """Collective. What scores with the frozen model that the run starts from, or None where no KL term needs it.

    Where adapters train, that model is the policy without them, and no second one is built.
    """
    if not kl_coef:
        return None
    if policy.lora.rank:
        return partial(_base_scores, policy)
    return build_policy(config, temperature, session, trainable=False)


def _base_scores(policy: Policy, batch: MicroBatch) -> Scores:
    with adapters_off(policy.model):
        scores: Scores = policy(batch)
    return scores


def _refuse_unsupported(hf_config: Any, path: str) -> None:
    """What would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at step 0
    (metrics.py)."""
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")
    for name in ("final_logit_softcapping", "logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling"):
        if getattr(hf_config, name, None) and not (
            name == "logits_scaling" and hf_config.model_type.startswith("granite")
        ):
            raise ConfigError(
                f"model.path: {path} changes its logits by {name}, which the chunked logprobs do not support"
            )
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    others = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    others |= {name for name in vars(hf_config) if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)}
    if others:
        raise ConfigError(
            f"model.path: {path} has layers other than attention ({sorted(others)[0]}), which packed rows do not "
            "support"
        )


def _initialise_buffers(policy: Policy) -> None:
    """Fill what no checkpoint holds (rotary frequencies) as HF does, and refuse a model with any other such buffer."""
    buffers = {name: buffer for name, buffer in policy.model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    owners = {name.rpartition(".")[0] for name in buffers}
    for name, module in policy.model.named_modules():
        if name in owners:
            policy.model._init_weights(module)
    empty = [
        name for name, buffer in policy.model.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()
    ]
    if empty:
        raise ConfigError(f"model.path: do not know how to fill buffer {empty[0]} of {type(policy.model).__name__}")


def hf_named_parameters(policy: Policy) -> Iterator[tuple[str, DTensor]]:
    """Sharded parameters under their names in an HF checkpoint, each once (a tied lm_head is left out), in one order on
    all ranks.

    Adapters are none of them (lora.named_adapters).
    """
    for name, parameter in policy.model.named_parameters():
        if not is_adapter(name):
            assert isinstance(parameter, DTensor), name
            if parameter._local_tensor.numel() and not parameter._local_tensor.untyped_storage().size():
                raise RuntimeError(f"{name} is in host memory (model.offload); HostOffload.to_device comes first")
            yield hf_name(name), parameter


def hf_named_shards(policy: Policy) -> Iterator[tuple[str, DTensor, Callable[[], Tensor]]]:
    """What the engine must hold: HF checkpoint name, the sharded parameter, and a call that gives this rank's shard of
    its values.

    Collective where adapters are merged. Where they travel by themselves, this is the base without them.
    """
    if policy.lora.rank and policy.lora.sync == "merged":
        yield from merged_shards(policy.model, policy.lora, hf_named_parameters(policy))
        return
    for name, parameter in hf_named_parameters(policy):
        yield name, parameter, partial(DTensor.to_local, parameter)


@torch.no_grad()
def load_weights(policy: Policy, folder: Path) -> None:
    """Fill every shard from safetensors; each rank reads its own rows of each tensor and nothing else.

    A file is opened anew for each tensor: pages of a mapping count as resident memory until it is closed.

    Raises:
        ConfigError: naming the tensor that is missing or has another shape.
    """
    where = tensor_files(folder)
    for name, parameter in hf_named_parameters(policy):
        if name not in where:
            raise ConfigError(f"model.path: {folder} has no tensor {name}")
        with safe_open(where[name], framework="pt") as file:
            stored = file.get_slice(name)
            if list(stored.get_shape()) != list(parameter.shape):
                raise ConfigError(
                    f"model.path: {name} has shape {list(stored.get_shape())} in {folder}, but config.json asks for "
                    f"{list(parameter.shape)}"
                )
            local = parameter.to_local()
            first = first_row(parameter)
            if len(local):
                local.copy_(stored[first : first + len(local)])
