"""What models do to logits and rotary factors beyond the usual, found without their names.

Gemma 2 caps its logits, Granite and Cohere scale them. config.json has different names for that, so
transformers' own forward pass is run on a few numbers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import follows_the_row
from grpo_spmd.model.families.build import as_config_error

_TINY = 1e-6
_HUGE = 1e30
_PROBES = (-_HUGE, -50.0, -3.0, -_TINY, 0.0, _TINY, 0.5, 3.0, 50.0, _HUGE)
_CONFIG_KEYS = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)
_MAX_SCORES = 1 << 24  # attention logits that exist at a time: 64 MiB in float32


class LogitsMap(NamedTuple):
    """Says how logits follow from the lm_head's products x.

    They are x / divisor, or softcap * tanh(x / softcap)."""

    divisor: float = 1.0
    softcap: float | None = None


def logits_map(model: Any) -> LogitsMap:
    """Returns what a model on the meta device does to its logits, found by running its code after
    the lm_head on a few numbers.

    Raises ConfigError for a map of another form, and if the lm_head does not read the decoder's
    last hidden states as they are."""
    name = type(model).__name__

    unknown = "changes its logits in a way that chunked logprobs do not know"
    products = torch.tensor(_PROBES, dtype=torch.float64, device="cpu")
    with as_config_error(name, unknown):
        logits = _logits_of(model, products)
    by_product = dict(zip(_PROBES, logits.tolist(), strict=True))
    slope = by_product[_TINY] / _TINY
    softcap = by_product[_HUGE]
    # Twelve digits give the number in config.json back, which 1 / (1 / number) need not be.
    divisor = float(f"{1 / slope:.12g}") if slope else 0.0
    if abs(softcap) > 1e20:
        result = LogitsMap(divisor)
        expected = products / (divisor or 1.0)
    else:
        result = LogitsMap(1.0, softcap)
        expected = torch.tanh(products / softcap) * softcap
    if not (divisor > 0 and torch.allclose(logits, expected, rtol=1e-6, atol=0)):
        raise ConfigError(f"model.path: {name} {unknown}")
    for key in _CONFIG_KEYS if result == LogitsMap() else ():
        if getattr(model.config, key, None) not in (None, 0, 1):  # the engine may follow that key
            raise ConfigError(
                f"model.path: config.json changes its logits by {key}, of which transformers' "
                f"{name} knows nothing"
            )
    return result


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output with hidden states alone: every other attribute that a model may ask for
    is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _logits_of(model: Any, products: Tensor) -> Tensor:
    """Returns the logits that transformers' forward pass computes if the lm_head's products are
    `products` [n]. Decoder and lm_head are replaced for this pass."""
    decoder = model.get_decoder()
    head = model.get_output_embeddings()
    hidden = _Hidden(last_hidden_state=products.view(1, -1, 1))
    ids = torch.zeros(1, len(products), dtype=torch.long, device="cpu")
    # Attributes of the instances hide the methods of their classes.
    decoder.forward = lambda *args, **options: hidden
    head.forward = lambda states: states
    try:
        with torch.no_grad(), torch.device("cpu"):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        del decoder.forward, head.forward
    return logits.double().flatten()


def times_slope(
    p: Tensor, log_p: Tensor, log_normalizer: Tensor, factor: float, target: Tensor
) -> Tensor:
    """Multiplies `p` [C, V] in place by a soft cap's derivative 1 - tanh^2. Returns the derivative
    at the `target` ids, [C, 1].

    tanh is (log_p + log_normalizer) * factor. To save memory it is computed in place of `log_p`
    [C, V], which is restored within rounding."""
    tanh = log_p.add_(log_normalizer).mul_(factor)
    p.addcmul_(p, tanh, value=-1).addcmul_(p, tanh)
    at_target = tanh.gather(-1, target)
    tanh.div_(factor).sub_(log_normalizer)
    return 1 - at_target.square()


def capped_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float
) -> Tensor:
    """Returns causal attention with soft-capped logits, [n, heads, Q, head_dim] as `q`.

    The softmax is written out in float32, since no kernel on the CPU has soft caps. `k` and `v` are
    [n, kv heads, length, head_dim]; the queries are those of the last Q tokens. `window` is the
    number of tokens that a query sees, None: all. Only a part of the logits exists at a time, and
    the backward pass computes them again."""
    number, heads, num_queries, _ = q.shape
    length = k.shape[2]
    start = length - num_queries
    rows = max(1, _MAX_SCORES // (number * heads * length))
    attend = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
    blocks = [
        attend(block, k, v, start + i * rows, scale, window, softcap)
        for i, block in enumerate(q.split(rows, dim=2))
    ]
    return torch.cat(blocks, dim=2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, start: int, scale: float, window: int | None, softcap: float
) -> Tensor:
    """Returns the attention [n, heads, R, head_dim] of R queries in n sequences of length L.

    `q` [n, heads, R, head_dim] are the queries from position `start` on; `k` and `v` are
    [n, kv heads, L, head_dim]."""
    number, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    length = k.shape[2]
    # Heads that share keys are further rows of queries:
    # [n * kv heads, heads / kv heads * R, head_dim]
    query, key, value = (x.float().reshape(number * kv_heads, -1, x.shape[-1]) for x in (q, k, v))
    # Not bmm, whose results selective checkpointing keeps.
    logits = torch.baddbmm(
        query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=scale / softcap
    )
    positions = torch.arange(start, start + rows, device=q.device)
    distance = positions[:, None] - torch.arange(length, device=q.device)
    unseen = (distance < 0) | (distance >= (window or length))
    logits = (logits.tanh() * softcap).unflatten(1, (-1, rows)).masked_fill(unseen, -torch.inf)
    out = torch.bmm(logits.softmax(-1).flatten(1, 2), value)
    return out.view(number, heads, rows, -1).to(q.dtype)


@torch.no_grad()
def fix_rotary_factors(model: Any, max_rollout_tokens: int) -> None:
    """Fixes rotary factors that transformers would choose by the longest sequence of a packed row.

    They become those that the engine uses for rollouts of at most `max_rollout_tokens` tokens,
    whatever else is in the row. Call it after `initialise_buffers`.

    longrope has short and long factors. transformers takes the long ones for a row with one
    position beyond the original ones; vLLM (0.32) takes one kind for all, by its max_model_len,
    which is `max_rollout_tokens`. dynamic grows with rows beyond max_position_embeddings in
    transformers, and never in vLLM.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):  # by the type of a layer
            changing = [layer_kind for layer_kind in kind.values() if follows_the_row(layer_kind)]
            if changing:
                raise ConfigError(
                    f"model.path: {type(model).__name__} has {changing[0]} rotary factors for some "
                    "of its layers alone"
                )
        elif follows_the_row(kind):
            if kind == "longrope":
                frequencies, scaling = _engine_factors(module.config, max_rollout_tokens)
                module.inv_freq.copy_(frequencies)
                module.attention_scaling = scaling
            module.rope_type = "default"  # the forward pass then leaves the factors as they are


def _engine_factors(config: Any, max_rollout_tokens: int) -> tuple[Tensor, float]:
    """Returns longrope's inverse frequencies, and the factor of cosine and sine.

    They are those of vLLM's Phi3LongRoPEScaledRotaryEmbedding, which does not know transformers'
    `factor` and `attention_factor`."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        config, torch.device("cpu"), seq_len=max_rollout_tokens
    )
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    mscale = rope.get("long_mscale" if max_rollout_tokens > original else "short_mscale")
    if mscale is not None:
        return frequencies, mscale
    ratio = config.max_position_embeddings / original
    scaling = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return frequencies, scaling
