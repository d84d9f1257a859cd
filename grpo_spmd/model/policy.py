"""The policy: an HF causal LM, sharded by FSDP2, filled shard by shard, and its logprobs.

Packed rows go through HF's own layers. Ours are attention, so that the sequences of a row do not
see each other and nothing is padded, and the lm_head, so that the [T, V] logits never exist as a
whole.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.schema import LoraConfig, ModelConfig
from grpo_spmd.distributed.session import Session
from grpo_spmd.files import read_model_config
from grpo_spmd.model import lora
from grpo_spmd.model.attention import PACKED_ATTENTION, Backend, choose_backend, row_inputs
from grpo_spmd.model.config_json import (
    checkpoint_folder,
    has_experts,
    has_text_part,
    head_dim,
    num_active_parameters,
    tensor_files,
)
from grpo_spmd.model.families.build import (
    SavedLayout,
    SavedTensor,
    build_hf_model,
    constants,
    decoder_layers,
    initialise_buffers,
    read_rows,
    saved_layout,
)
from grpo_spmd.model.families.logits import fix_rotary_factors, logits_map
from grpo_spmd.model.families.refusals import refuse_structure, refuse_tensors, trainable_config
from grpo_spmd.model.logprobs import LogitSettings, Scores
from grpo_spmd.model.routing import layer_routers, num_experts, replay_in_layers
from grpo_spmd.model.sequence_parallel import SEQUENCE_ATTENTION, gather_scores, slice_row
from grpo_spmd.model.sharding import as_matrix, first_matrix_row, shard_over_ranks
from grpo_spmd.records import MicroBatch

_log = logging.getLogger("grpo_spmd")
Term = Callable[[Tensor, Tensor], Any]  # (hidden states [C, D], head [V, D]) -> a term of the loss
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM that scores completions.

    Trained parameters are float32; frozen parameters, and arithmetic, are in the compute dtype.
    Call only the module itself (`policy(...)`), or `plain_logits`, which returns whole logits for a
    check. FSDP gathers the embedding and the lm_head around calls of these two, and not around
    calls of an inner module."""

    def __init__(
        self,
        config: Any,
        logits: LogitSettings,
        attention: Backend,
        dtype: torch.dtype,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`logits` has the sampling temperature. Divisor and soft cap of the model's own logits are
        added to it. The ranks of `sequence_group` share every row that they pass in; None: each
        rank has rows of its own."""
        super().__init__()
        self.model = build_hf_model(
            config,
            config.name_or_path,
            attn_implementation=SEQUENCE_ATTENTION if sequence_group else PACKED_ATTENTION,
            dtype=dtype,
        )
        self.sequence_group = sequence_group
        divisor, softcap = logits_map(self.model)
        self.logits = dataclasses.replace(
            logits, temperature=logits.temperature * divisor, softcap=softcap
        )
        self.attention = attention
        self.saved = saved_layout(self.model)
        """For each parameter that checkpoints and the engine have under other names (such as an
        MoE's experts): these names, and which rows of the parameter they hold."""
        self.compute_dtype = dtype
        self.lora = LoraConfig()  # no adapters
        self.max_rollout_tokens = 0
        """Upper bound of a rollout's tokens, as the engine was told."""
        self.num_routers = len(layer_routers(self.model))
        """Layers with a router that can replay; 0 for a dense model."""
        self.num_experts = num_experts(self.model.config)
        """Experts of a layer; 0 for a dense model."""
        self.replays_routes = False
        """True if the engine records routes for this policy's rollouts."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the whole model, adapters included, a tied one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share each row (sequence parallelism); 1 without a sequence
        group."""
        return 1 if self.sequence_group is None else dist.get_world_size(self.sequence_group)

    @property
    def counts_rows(self) -> bool:
        """True on one rank of each group that shares its rows (sequence_group): the rank that
        counts these rows in metrics and proofs, so that they are counted once."""
        return self.sequence_group is None or dist.get_rank(self.sequence_group) == 0

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that a token is multiplied with: of an MoE layer's experts only
        those that the router chooses."""
        shapes = {name: tuple(p.shape) for name, p in self.named_parameters()}
        return num_active_parameters(shapes, self.model.config.to_dict())

    def forward(
        self, batch: MicroBatch, *terms: Term, only_term: bool = False
    ) -> Scores | tuple[Any, ...]:
        """Collective. Returns (logprobs of `batch.target_ids`, entropies, *results of `terms`).

        Logprobs and entropies are float32 [C], for the C completion tokens; an entropy is that of
        the distribution over all tokens at the target's position. `terms` are further functions of
        the hidden states and the head (a critic's values, a divergence from a teacher). With
        `only_term` only their results are returned."""
        group = self.sequence_group
        part = batch if group is None else slice_row(batch, group)
        row = row_inputs(part, self.attention, batch.routes, group)
        states = self.model.get_decoder()(
            input_ids=row.input_ids,
            position_ids=row.position_ids,
            use_cache=False,
            packed_layout=row.layout,
        )
        hidden = states.last_hidden_state[0][row.predict_index]
        head = self.model.get_output_embeddings().weight
        # config/rules.py refuses what needs terms: they would see the hidden states of a slice.
        assert group is None or not terms
        if only_term:
            return tuple(term(hidden, head) for term in terms)
        scores = self.logits.score(hidden, head, part.target_ids)
        if group is not None:
            return gather_scores(scores, batch.slice_predictions, group)
        return (*scores, *(term(hidden, head) for term in terms))

    def plain_logits(self, token_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Collective. Returns the logits [S, L, V] of S unpacked sequences `token_ids` [S, L], or
        [S, n, V] at the n `positions` only.

        It is HF's own forward pass with nothing of ours: proofs/ compares `forward` with it."""
        options: Any = {} if positions is None else {"logits_to_keep": positions}
        logits: Tensor = self.model(input_ids=token_ids, use_cache=False, **options).logits
        return logits


def choose_fused_kernel(kernel: str, device: torch.device) -> bool:
    """Returns True if `model.logprob_kernel` and the device choose Triton's kernels.

    Raises ConfigError if "fused" cannot run here."""
    problem = None
    if find_spec("triton") is None:
        problem = "triton is not installed"
    # Triton's interpreter runs the kernels on a CPU, slowly: for tests.
    elif device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        problem = f"this run is on the {device.type.upper()}"
    # bfloat16 in Triton begins with the A100.
    elif device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        problem = "this GPU's compute capability is below 8.0"
    if kernel == "fused" and problem is not None:
        raise ConfigError(
            f"model.logprob_kernel: fused needs a GPU of compute capability 8.0 and triton, and "
            f"{problem}; use auto or plain"
        )
    return kernel == "fused" or (kernel == "auto" and device.type == "cuda" and problem is None)


def logit_settings(temperature: float, chunk: int, *, is_fused: bool) -> LogitSettings:
    """Returns the settings of a policy's logits, with Triton's kernels or the plain code."""
    if not is_fused:
        return LogitSettings(temperature, chunk)
    # Only where a GPU uses it: it imports triton.
    from grpo_spmd.model.fused_logprobs import FusedDivergence, FusedTokenLogprobs

    return LogitSettings(
        temperature,
        chunk,
        token_logprobs=FusedTokenLogprobs,
        whole_divergence=FusedDivergence,
    )


def attention_backend(hf_config: Any, config: ModelConfig, session: Session) -> Backend:
    """Returns the attention back end of a model. Raises ConfigError if it cannot be used."""
    return choose_backend(
        config.attention,
        session.device,
        DTYPES[config.dtype],
        head_dim(hf_config),
        capped=getattr(hf_config, "attn_logit_softcapping", None) is not None,
    )


def build_policy(
    config: ModelConfig,
    temperature: float,
    session: Session,
    *,
    trainable: bool = True,
    seed: int = 0,
    max_rollout_tokens: int = 0,
    role: str = "reference",
    replays_routes: bool = False,
) -> Policy:
    """Collective. Returns the model of `config.path`, sharded.

    It is built on the meta device, sharded by FSDP2, and each rank reads its own rows. With
    `config.lora.rank` only adapters train, initialised from `seed`, and the base is frozen in the
    compute dtype. Without `trainable` all of it is frozen so, and `role` is its name in the log.
    `max_rollout_tokens` is the largest number of tokens of a rollout, the same as in the engine:
    some models choose their rotary factors by it. `replays_routes` is True if the engine records
    the experts that an MoE's routers choose, which this policy then replays."""
    hf_config = trainable_config(config.path, max_rollout_tokens)
    compute = DTYPES[config.dtype]
    has_adapters = trainable and config.lora.rank > 0
    attention = attention_backend(hf_config, config, session)
    # Parameters are created in their dtype: Module.to would round the rotary frequencies as well.
    stored_dtype = torch.float32 if trainable and not has_adapters else compute
    is_fused = choose_fused_kernel(config.logprob_kernel, session.device)
    logits = logit_settings(temperature, config.logprob_chunk_tokens, is_fused=is_fused)
    with torch.device("meta"):
        policy = Policy(hf_config, logits, attention, stored_dtype, session.sequence_group)
    refuse_structure(policy.model, config.path)
    _refuse_padded_experts(policy, session.mesh.size(-1), config.path)
    folder = checkpoint_folder(config.path)
    stored = refuse_tensors(policy.model, folder, policy.saved)
    if has_text_part(read_model_config(folder)):
        policy.saved = stored  # the engine has the whole model's names
    policy.max_rollout_tokens = max_rollout_tokens
    policy.replays_routes = replays_routes and policy.num_routers > 0
    if replays_routes and not policy.num_routers:
        _log.warning(
            "model.router_replay: off, since transformers does not say where %s has its routers",
            type(policy.model).__name__,
        )
    policy.compute_dtype = compute
    policy.train(trainable)  # there is no dropout left for it to switch on
    policy.requires_grad_(trainable)
    if has_adapters:
        with torch.device("meta"):
            lora.add_adapters(policy.model, config.lora)
        policy.lora = config.lora
    layers = decoder_layers(policy.model)
    runs = replay_in_layers(policy.model)
    for number, layer in enumerate(layers):
        set_up_layer(layer, trainable and config.recompute, config.compile, runs.get(number))
    # The root keeps embedding and lm_head gathered from forward to backward pass. A frozen model
    # has no backward pass, and would keep them for good.
    shard_over_ranks(policy, layers, session.mesh, compute, reshard_root=not trainable)
    register_fsdp_forward_method(policy, "plain_logits")
    policy.to_empty(device=session.device)
    policy.model.tie_weights()  # to_empty made two parameters out of a tied one
    initialise_buffers(policy.model)
    fix_rotary_factors(policy.model, max_rollout_tokens)
    load_weights(hf_named_parameters(policy), folder, stored)
    load_weights(constants(policy.model).items(), folder)
    lora.initialise_adapters(policy.model, seed)
    num_trained = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    _log.info(
        "%s: %s, %.1f M parameters, %.3g M of them trained, over %s ranks, %s attention",
        "policy" if trainable else role,
        type(policy.model).__name__,
        policy.num_parameters / 1e6,
        num_trained / 1e6,
        " x ".join(map(str, session.mesh.shape)),  # replicas x ranks of each
        attention,
    )
    return policy


def _refuse_padded_experts(policy: Policy, num_ranks: int, path: str) -> None:
    """Raises ConfigError if FSDP would pad the experts of an MoE layer by more than a quarter.

    FSDP shards them by the first dimension, the experts: each rank holds equally many whole
    experts, with padding where there are too few."""
    for parameter in policy.model.parameters():
        num_rows = len(parameter)
        padded = -(-num_rows // num_ranks) * num_ranks
        if has_experts(parameter.shape) and padded > 1.25 * num_rows:
            raise ConfigError(
                f"model.path: {path} has {num_rows} experts a layer, which {num_ranks} ranks "
                f"would hold as {padded}; set model.num_replicas so that fewer ranks share a model"
            )


def build_reference(
    policy: Policy, config: ModelConfig, temperature: float, kl_coef: float, session: Session
) -> Callable[[MicroBatch], Scores] | None:
    """Collective. Returns the reference model, the frozen model that the run starts from, as a
    function from a micro-batch to its logprobs and entropies. Returns None without a KL term.

    If only adapters train, the reference is the policy with its adapters switched off, and no
    second model is built."""
    if not kl_coef:
        return None
    if policy.lora.rank:
        return partial(_base_scores, policy)
    return build_policy(
        config, temperature, session, trainable=False, max_rollout_tokens=policy.max_rollout_tokens
    )


def _base_scores(policy: Policy, batch: MicroBatch) -> Scores:
    """Collective. Returns logprobs and entropies by the policy's base model, without adapters."""
    with lora.adapters_off(policy.model):
        scores: Scores = policy(batch)
    return scores


def hf_named_parameters(policy: Policy) -> Iterator[tuple[str, DTensor]]:
    """Yields (HF name, sharded parameter) of the base model, in the same order on all ranks.

    The parameters of adapters and a tied lm_head are left out. Raises RuntimeError if a parameter
    is in host memory (model.offload)."""
    for name, parameter in policy.model.named_parameters():
        if lora.is_adapter(name):
            continue
        assert isinstance(parameter, DTensor), name
        local = parameter._local_tensor
        if local.numel() and not local.untyped_storage().size():
            raise RuntimeError(
                f"{name} is in host memory (model.offload); HostOffload.to_device comes first"
            )
        yield lora.hf_name(name), parameter


def hf_named_shards(policy: Policy) -> Iterator[lora.Shard]:
    """Yields the weights that the engine must hold, as shards with HF names. They are those of the
    base or, with `model.lora.sync: merged`, those of the base with the adapters merged into them.

    Collective if adapters are merged."""
    if policy.lora.rank and policy.lora.sync == "merged":
        yield from lora.merged_shards(policy.model, policy.lora, hf_named_parameters(policy))
        return
    for name, parameter in hf_named_parameters(policy):
        yield lora.Shard(name, parameter, parameter.to_local)


# `selective` keeps the results of matrix products and attention, which are nearly all of a layer's
# arithmetic; the rest is cheap to recompute. By name: not every build of torch has every one, and
# flash-attn and varlen register theirs when they are imported.
_KEPT_OPERATORS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "torch_attn._varlen_attn.default",
    "flash_attn._flash_attn_varlen_forward.default",
)


def set_up_layer(
    layer: nn.Module,
    activation_checkpointing: bool | Literal["selective"],
    compile: bool,
    run: Callable[..., Any] | None = None,
) -> None:
    """Sets up activation checkpointing (of all activations, or `selective`) and torch.compile for
    one decoder layer. Only `layer.forward` changes.

    If `run` is given, each pass calls it with the layer's forward method and arguments, and so do
    recomputations (LayerRouter.run_layer replays an MoE's routes in this way). Call it before FSDP
    wraps the layer: FSDP's hooks, which gather the parameters before the layer runs again, then
    stay outside of the checkpoint."""
    forward = layer.forward
    if compile:
        forward = torch.compile(forward, dynamic=True)  # one kernel for all lengths from the start
    if run is not None:
        forward = partial(run, forward)
    # There is no dropout, so no random state to restore. Without gradients checkpoint() just calls
    # the layer. A compiled layer keeps by itself about what `selective` keeps, since the compiler
    # recomputes what is cheap; for torch's selective checkpointing it would be one opaque operator,
    # all of which runs again.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if activation_checkpointing == "selective" and not compile:
        forward = partial(checkpoint, forward, context_fn=_keep_products, **options)
    elif activation_checkpointing is True:
        forward = partial(checkpoint, forward, **options)
    layer.forward = forward


def _keep_products() -> Any:
    """Returns the contexts for torch's selective checkpointing, which keep the results of
    _KEPT_OPERATORS. Called once for each forward pass of a layer."""
    operators = []
    for name in _KEPT_OPERATORS:
        with suppress(AttributeError):
            operators.append(attrgetter(name)(torch.ops))
    return create_selective_checkpoint_contexts(operators)


@torch.no_grad()
def load_weights(
    parameters: Iterable[tuple[str, Tensor]],
    folder: Path,
    stored: SavedLayout | None = None,
) -> None:
    """Fills parameters from the safetensors in `folder`. Each rank reads only its own rows.

    `parameters` are pairs (HF name, DTensor), or (HF name, plain tensor), which is read whole.
    `stored` says which tensors of the files hold those parameters that the files do not have under
    these names. Raises ConfigError for a tensor that is missing, has another shape, or has a value
    that is not finite."""
    files = tensor_files(folder)
    for hf_name, parameter in parameters:
        local, start = parameter, 0
        if isinstance(parameter, DTensor):
            local, start = parameter.to_local(), first_matrix_row(parameter)
        whole = SavedTensor(hf_name, 0, tuple(parameter.shape))
        for saved in (stored or {}).get(hf_name, [whole]):
            read_rows(saved, files, folder, rows=as_matrix(local), start=start)
        # Refuse NaN here. Else the first proof of the weight sync would fail and blame the sync,
        # since NaN is not equal to itself.
        if not local.isfinite().all():
            raise ConfigError(
                f"model.path: {hf_name} in {folder} has values that are NaN or infinite; "
                "export or download the model again"
            )
