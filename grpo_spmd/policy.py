"""The policy: an HF causal LM built on the meta device, sharded by FSDP2, filled shard by shard, and its logprobs.

Packed rows go through HF's own layers; only attention and the lm_head are ours: attention so that sequences of a row do not see each
other and nothing is padded, the lm_head so that the [T, V] logits never exist as a whole.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface

from grpo_spmd.config import Config, ConfigError, ModelConfig, OptimizerConfig
from grpo_spmd.data_types import MicroBatch
from grpo_spmd.distributed import Session

_log = logging.getLogger("grpo_spmd")
_PACKED_ATTENTION = "grpo_spmd_packed_sdpa"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Policy(nn.Module):
    """A causal LM that scores completions. Parameters are float32 shards; arithmetic is in the compute dtype.

    `forward` is the only door: FSDP gathers the embedding and the lm_head when it is entered, once a micro-batch.
    """

    def __init__(self, config: Any, temperature: float, logprob_chunk_tokens: int, attention: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        self.temperature = temperature * getattr(config, "logits_scaling", 1.0)  # Granite divides its logits by a constant
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.attention = attention

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied one counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, batch: MicroBatch) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
        """Collective. Logprobs of `batch.target_ids` and the entropy of the distributions they were drawn from, float32."""
        if self.attention == _PACKED_ATTENTION:
            layout: dict[str, Any] = {"packed_layout": PackedLayout(batch.sequence_lengths, batch.input_ids.device)}
        else:  # HF's flash attention reads its variable-length layout from these
            lengths = torch.tensor([0, *batch.sequence_lengths], dtype=torch.int32, device=batch.input_ids.device)
            bounds, longest = lengths.cumsum(0, dtype=torch.int32), max(batch.sequence_lengths)
            layout = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}
        hidden = self.model.get_decoder()(
            input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, **layout
        ).last_hidden_state[0]
        head = self.model.get_output_embeddings().weight
        scores: tuple[Tensor, Tensor] = TokenLogprobs.apply(
            hidden[batch.predict_index], head, batch.target_ids, self.temperature, self.logprob_chunk_tokens
        )
        return scores


class TokenLogprobs(torch.autograd.Function):
    """Logprob of each target and entropy of its distribution, in float32, `chunk` tokens of logits at a time.

    The backward pass computes the logits of each chunk again, so that peak memory is one chunk's [chunk, V], forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "C D"],
        head: Float[Tensor, "V D"],
        target_ids: Int[Tensor, " C"],
        temperature: float,
        chunk: int,
    ) -> tuple[Float[Tensor, " C"], Float[Tensor, " C"]]:
        log_normalizer = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        logprobs, entropy = torch.empty_like(log_normalizer), torch.empty_like(log_normalizer)
        for part in _chunks(len(hidden), chunk):
            logits = _logits(hidden[part], head, temperature)
            log_normalizer[part] = logits.logsumexp(-1)
            logprobs[part] = logits.gather(-1, target_ids[part, None]).squeeze(-1) - log_normalizer[part]
            logits -= log_normalizer[part, None]
            entropy[part] = -(logits.exp() * logits).sum(-1)
        ctx.save_for_backward(hidden, head, target_ids, log_normalizer, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_logprobs, grad_entropy = grads
        hidden, head, target_ids, log_normalizer, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for part in _chunks(len(hidden), ctx.chunk):
            log_p = _logits(hidden[part], head, ctx.temperature) - log_normalizer[part, None]
            p = log_p.exp()
            # d logprob / d logits = onehot - p;  d entropy / d logits = -p * (log p + entropy)
            grad_logits = -p * (grad_logprobs[part, None] + grad_entropy[part, None] * (log_p + entropy[part, None]))
            grad_logits.scatter_add_(-1, target_ids[part, None], grad_logprobs[part, None])
            grad_logits = (grad_logits / ctx.temperature).to(hidden.dtype)
            grad_hidden[part] = grad_logits @ head
            grad_head += grad_logits.T @ hidden[part]
        return grad_hidden, grad_head.to(head.dtype), None, None, None


def _logits(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    # The product is rounded to the compute dtype as the engine's is; what follows it is float32 on both sides.
    return (hidden @ head.T).float() / temperature


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


class PackedLayout:
    """Where the sequences of a packed row lie, as a few right-padded rectangles of sequences of like length.

    Under a causal mask a real token never sees the padding to its right, so each rectangle is one call of SDPA without a mask, and
    the padding costs only inside attention. Sequences share a rectangle while the shortest is at least 3/4 of the longest.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        groups: list[list[int]] = []
        for i in order:
            if groups and 4 * lengths[i] >= 3 * lengths[groups[-1][0]]:
                groups[-1].append(i)
            else:
                groups.append([i])
        self.rectangles: list[tuple[Tensor, Tensor]] = []  # (place in the row [n, L], is it a real token [n, L])
        for group in groups:
            column = torch.arange(lengths[group[0]], device=device)
            first = torch.tensor([starts[i] for i in group], device=device)[:, None]
            valid = column < torch.tensor([lengths[i] for i in group], device=device)[:, None]
            self.rectangles.append((torch.where(valid, first + column, 0), valid))


def _packed_sdpa(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv heads, T, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_layout: PackedLayout,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a packed row, in the signature of HF's attention functions: out [1, T, heads, D]."""
    if softcap is not None:
        raise ConfigError("model.attention: sdpa cannot cap attention logits as this model does; set model.attention: flash")
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, head_dim]
    out = torch.zeros(query.shape[:2] + value.shape[2:], dtype=query.dtype, device=query.device)
    for index, valid in packed_layout.rectangles:
        mask = None
        if sliding_window is not None and index.shape[1] > sliding_window:
            place = torch.arange(index.shape[1], device=index.device)
            distance = place[:, None] - place
            mask = (distance >= 0) & (distance < sliding_window)
        q, k, v = (x[index].transpose(1, 2) for x in (query, key, value))  # [n, heads, L, head_dim]
        part = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        out = out.index_put((index[valid],), part.transpose(1, 2)[valid])
    return out[None], None


AttentionInterface.register(_PACKED_ATTENTION, _packed_sdpa)


def build_policy(config: ModelConfig, temperature: float, session: Session, *, trainable: bool = True) -> Policy:
    """Collective. The model of `config.path` as a sharded policy: meta device -> FSDP2 -> each rank reads its own rows.

    Args:
        trainable: False builds the reference: frozen, its shards in the compute dtype.
    """
    hf_config = transformers.AutoConfig.from_pretrained(config.path)
    _refuse_unsupported(hf_config, config.path)
    for name, value in vars(hf_config).items():  # dropout would make the policy differ from the engine that sampled
        if isinstance(value, int | float) and re.search("dropout|pdrop|layerdrop", name):
            setattr(hf_config, name, 0.0)
    compute = DTYPES[config.dtype]
    # Parameters alone are made in this dtype: Module.to would round the rotary frequencies as well.
    stored = torch.float32 if trainable else compute
    with torch.device("meta"):
        policy = Policy(hf_config, temperature, config.logprob_chunk_tokens, _attention(config, hf_config, session.device), stored)
    head = policy.model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        raise ConfigError(f"model.path: {config.path} has a bias in its lm_head, which the chunked logprobs do not support")
    if trainable and config.activation_checkpointing:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    policy.train(trainable)  # HF checkpoints activations in training mode only; there is no dropout left for it to switch on
    policy.requires_grad_(trainable)

    precision = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mesh=session.mesh, mp_policy=precision)
    # After a forward pass without a backward pass the root would keep its embedding and lm_head gathered; the reference never has one.
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
    role, name = "policy" if trainable else "reference", type(policy.model).__name__
    _log.info("%s: %s, %.1f M parameters over %d ranks", role, name, policy.num_parameters / 1e6, session.world_size)
    return policy


def build_reference(config: Config, session: Session) -> Policy | None:
    """Collective. The frozen model that the run starts from, or None where no KL term needs it."""
    if not config.loss.kl_coef:
        return None
    return build_policy(config.model, config.rollout.temperature, session, trainable=False)


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer.

    Raises:
        ConfigError: naming model.path, where it cannot be loaded.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a tokenizer from {path}: {str(error).splitlines()[0]}") from None


def stop_token_ids(path: str, tokenizer: Any) -> set[int]:
    """Token ids that end a completion: those of the model's generation_config.json, else of its config.json, and the tokenizer's eos."""
    found: set[int] = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        file = checkpoint_folder(path) / name
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id") if file.is_file() else None
        if eos is not None:
            return found | set(eos if isinstance(eos, list) else [eos])
    return found


def _attention(config: ModelConfig, hf_config: Any, device: torch.device) -> str:
    from transformers.utils import is_flash_attn_2_available

    supported = getattr(transformers.AutoModelForCausalLM._model_mapping[type(hf_config)], "_supports_flash_attn", False)
    flash = device.type == "cuda" and config.dtype == "bfloat16" and is_flash_attn_2_available() and supported
    if config.attention == "flash" and not flash:
        raise ConfigError(
            "model.attention: flash needs a GPU, model.dtype: bfloat16, the flash-attn package and a model that supports it; "
            "set auto or sdpa"
        )
    return "flash_attention_2" if flash and config.attention != "sdpa" else _PACKED_ATTENTION


def _refuse_unsupported(hf_config: Any, path: str) -> None:
    """What would train on wrong logprobs without a word. Whatever else does, the engine's logprobs show at step 0 (metrics.py)."""
    if type(hf_config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"model.path: {path} ({hf_config.model_type}) is not a causal LM")
    for name in ("final_logit_softcapping", "logit_scale", "lm_head_multiplier", "output_multiplier", "logits_scaling"):
        if getattr(hf_config, name, None) and not (name == "logits_scaling" and hf_config.model_type.startswith("granite")):
            raise ConfigError(f"model.path: {path} changes its logits by {name}, which the chunked logprobs do not support")
    # Convolutions and recurrent states run on from one sequence of a packed row into the next.
    others = set(getattr(hf_config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
    others |= {name for name in vars(hf_config) if re.match("mamba_|ssm_|conv_kernel|state_size|linear_conv", name)}
    if others:
        raise ConfigError(f"model.path: {path} has layers other than attention ({sorted(others)[0]}), which packed rows do not support")


def _initialise_buffers(policy: Policy) -> None:
    """Fill what no checkpoint holds (rotary frequencies) as HF does, and refuse a model with any other such buffer."""
    buffers = {name: buffer for name, buffer in policy.model.named_buffers() if buffer.is_floating_point()}
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    owners = {name.rpartition(".")[0] for name in buffers}
    for name, module in policy.model.named_modules():
        if name in owners:
            policy.model._init_weights(module)
    empty = [name for name, buffer in policy.model.named_buffers() if buffer.is_floating_point() and buffer.isnan().any()]
    if empty:
        raise ConfigError(f"model.path: do not know how to fill buffer {empty[0]} of {type(policy.model).__name__}")


def checkpoint_folder(path: str) -> Path:
    """A local folder with the model's safetensors; downloads them where `path` is a hub id."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]))


def hf_named_parameters(policy: Policy) -> Iterator[tuple[str, DTensor]]:
    """Sharded parameters under their names in an HF checkpoint, each once (a tied lm_head is left out), in one order on all ranks."""
    for name, parameter in policy.model.named_parameters():
        assert isinstance(parameter, DTensor), name
        yield name, parameter


@torch.no_grad()
def load_weights(policy: Policy, folder: Path) -> None:
    """Fill every shard from safetensors; each rank reads its own rows of each tensor and nothing else.

    A file is opened anew for each tensor: pages of a mapping count as resident memory until it is closed.

    Raises:
        ConfigError: naming the tensor that is missing or has another shape.
    """
    where = _tensor_files(folder)
    for name, parameter in hf_named_parameters(policy):
        if name not in where:
            raise ConfigError(f"model.path: {folder} has no tensor {name}")
        with safe_open(where[name], framework="pt") as file:
            stored = file.get_slice(name)
            if list(stored.get_shape()) != list(parameter.shape):
                raise ConfigError(
                    f"model.path: {name} has shape {list(stored.get_shape())} in {folder}, but config.json asks for {list(parameter.shape)}"
                )
            local = parameter.to_local()
            first = _first_row(parameter)
            if len(local):
                local.copy_(stored[first : first + len(local)])


def _tensor_files(folder: Path) -> dict[str, Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"model.path: {folder} holds no .safetensors file")
    where = {}
    for path in files:
        with safe_open(path, framework="pt") as file:
            where.update(dict.fromkeys(file.keys(), path))
    return where


def _first_row(parameter: DTensor) -> int:
    """First row of this rank's shard: FSDP2 deals rows in equal blocks, the last ranks may get fewer or none."""
    mesh = parameter.device_mesh
    return min(mesh.get_local_rank() * rows_per_rank(parameter), parameter.shape[0])


def rows_per_rank(parameter: DTensor) -> int:
    """Rows of a full shard, ceil(rows / ranks)."""
    return -(-parameter.shape[0] // parameter.device_mesh.size())


def build_optimizer(policy: Policy, config: OptimizerConfig) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW over the shards, weight decay on matrices only (not on norms and biases), and a linear warm-up to a constant lr."""
    parameters = list(policy.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=config.lr, betas=config.betas)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: min(1.0, (done + 1) / max(1, config.warmup_steps)))
    return optimizer, schedule
