"""What a model does to its logits after the lm_head (Gemma 2 caps them, Granite and Cohere scale them): not read from
config.json, whose names for it differ, but seen by running transformers' own forward pass on a few numbers."""

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

_TINY, _HUGE = 1e-6, 1e30
_NAMES = (
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "output_multiplier",
)


class LogitsMap(NamedTuple):
    """Logits as the lm_head's products `x` give them: x / divisor, or softcap * tanh(x / softcap)."""

    divisor: float = 1.0
    softcap: float | None = None


def logits_map(model: Any) -> LogitsMap:
    """Of a model on the meta device. Raises ConfigError for a map of another form, and where the lm_head does not read
    the decoder's last hidden states as they are."""
    given = torch.tensor(
        [-_HUGE, -50, -3, -_TINY, 0, _TINY, 0.5, 3, 50, _HUGE], dtype=torch.float64, device="cpu"
    )
    try:
        found = _logits_of(model, given)
    except (
        RuntimeError,
        TypeError,
        AttributeError,
        ValueError,
        IndexError,
        NotImplementedError,
    ) as error:
        raise _unknown(
            model, f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        ) from None
    # Twelve digits: the number in config.json again, which 1 / (1 / number) need not be.
    slope, softcap = found[5].item() / _TINY, found[-1].item()
    divisor = float(f"{1 / slope:.12g}") if slope else 0.0
    if abs(softcap) > 1e20:
        told, expected = LogitsMap(divisor), given / (divisor or 1.0)
    else:
        told, expected = LogitsMap(1.0, softcap), torch.tanh(given / softcap) * softcap
    if not (divisor > 0 and torch.allclose(found, expected, rtol=1e-6, atol=0)):
        raise _unknown(model, f"3 becomes {found[7].item():g}, and 50 becomes {found[8].item():g}")
    names = [name for name in _NAMES if getattr(model.config, name, None) not in (None, 0, 1)]
    if names and told == LogitsMap():  # the engine may know it
        what = f"changes its logits by {names[0]}, of which transformers' {type(model).__name__} knows nothing"
        raise ConfigError(f"model.path: config.json {what}")
    return told


def _unknown(model: Any, what: str) -> ConfigError:
    name = type(model).__name__
    return ConfigError(
        f"model.path: {name} changes its logits in a way that chunked logprobs do not know ({what})"
    )


class _Hidden(BaseModelOutputWithPast):  # type: ignore[misc]
    """Has nothing else that a decoder may return."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _logits_of(model: Any, given: Tensor) -> Tensor:
    """What transformers' forward pass makes of the lm_head's products `given`."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    hidden = _Hidden(last_hidden_state=given.view(1, -1, 1))
    ids = torch.zeros(1, len(given), dtype=torch.long, device="cpu")
    decoder.forward, head.forward = lambda *args, **kwargs: hidden, lambda products: products
    try:
        with torch.no_grad(), torch.device("cpu"):
            logits: Tensor = model(input_ids=ids, use_cache=False).logits
    finally:
        del decoder.forward, head.forward  # the instance's own, which hid those of its class
    return logits.double().flatten()


# Soft caps, cap * tanh(x / cap), where no kernel has them: of attention logits on the CPU, in float32 and without
# flash-attn; and the slope of the cap of the lm_head's logits.


_MAX_SCORES = 1 << 24  # attention logits that exist at a time: 64 MiB in float32


def times_slope(
    p: Tensor, log_p: Tensor, log_normalizer: Tensor, factor: float, target: Tensor
) -> Tensor:
    """Multiply `p` [C, V] in place by the slope 1 - tanh^2, where tanh is (log_p + log_normalizer) * factor; returns it
    at `target` [C, 1]. `log_p` is the only other [C, V], and comes back within rounding."""
    tanh = log_p.add_(log_normalizer).mul_(factor)
    p.addcmul_(p, tanh, value=-1).addcmul_(p, tanh)
    at_target = tanh.gather(-1, target)
    tanh.div_(factor).sub_(log_normalizer)
    return 1 - at_target.square()


def capped_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: list[tuple[int, int]],
    scale: float,
    window: int | None,
    softcap: float,
) -> Tensor:
    """Causal attention within sequences, [T, heads, head_dim], with softmax written out in float32. `runs`: (number,
    length) of neighbours of equal length. Few logits exist at a time, and the backward pass makes them again."""
    tokens, heads, parts = [number * length for number, length in runs], q.shape[1], []
    # Split once and join once: slicing in the loop would make the backward pass write a whole row for each sequence.
    for (number, length), *qkv in zip(runs, *(x.split(tokens) for x in (q, k, v)), strict=True):
        # [number, heads, length, head_dim]
        query, key, value = (x.unflatten(0, (number, length)).transpose(1, 2) for x in qkv)
        rows = max(1, _MAX_SCORES // (number * heads * length))
        attend = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
        blocks = enumerate(query.split(rows, dim=2))
        out = torch.cat(
            [attend(x, key, value, i * rows, scale, window, softcap) for i, x in blocks], dim=2
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, window: int | None, softcap: float
) -> Tensor:
    """`q` [n, heads, R, head_dim]: queries from place `first` on; `k` and `v` [n, kv heads, L, head_dim]."""
    (number, heads, rows, _), kv_heads, length = q.shape, k.shape[1], k.shape[2]
    # Heads that share keys are further rows of queries: [n * kv heads, heads / kv heads * R, head_dim]
    query, key, value = (x.float().reshape(number * kv_heads, -1, x.shape[-1]) for x in (q, k, v))
    # Not bmm, whose results selective checkpointing keeps.
    logits = torch.baddbmm(
        query.new_empty(1, 1, 1), query, key.transpose(1, 2), beta=0, alpha=scale / softcap
    )
    distance = torch.arange(first, first + rows, device=q.device)[:, None] - torch.arange(
        length, device=q.device
    )
    unseen = (distance < 0) | (distance >= (window or length))
    logits = (logits.tanh() * softcap).unflatten(1, (-1, rows)).masked_fill(unseen, -torch.inf)
    out = torch.bmm(logits.softmax(-1).flatten(1, 2), value)
    return out.view(number, heads, rows, -1).to(q.dtype)


# Rotary factors that transformers picks by the longest sequence of a row, fixed to what the engine computes.


@torch.no_grad()
def fix_rotary_factors(model: Any, max_rollout_tokens: int) -> None:
    """Give `model`, whose buffers are filled, the rotary factors that the engine has for rollouts of at most so many
    tokens, whatever is beside them in a row.

    longrope has short and long factors. transformers takes the long ones for a row with one position beyond the
    original ones; vLLM (0.32) takes one kind for all, by its max_model_len, which is `max_rollout_tokens`.
    dynamic grows with rows beyond max_position_embeddings in transformers, and never in vLLM.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):  # by the type of a layer
            changing = {kind for kind in kinds.values() if _follows_the_row(kind)}
            if changing:
                name = type(model).__name__
                raise ConfigError(
                    f"model.path: {name} has {changing.pop()} rotary factors for some of its layers alone"
                )
        elif _follows_the_row(kinds):
            if kinds == "longrope":
                frequencies, module.attention_scaling = _as_the_engine(
                    module.config, max_rollout_tokens
                )
                module.inv_freq.copy_(frequencies)
            module.rope_type = "default"  # for the forward pass: factors that stay as they are


def _follows_the_row(kind: object) -> bool:
    return isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind)


def _as_the_engine(config: Any, max_rollout_tokens: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies, and what cosine and sine are multiplied by: as vLLM's Phi3LongRoPEScaledRotaryEmbedding,
    which does not know transformers' `factor` and `attention_factor`."""
    frequencies, _ = ROPE_INIT_FUNCTIONS["longrope"](
        config, torch.device("cpu"), seq_len=max_rollout_tokens
    )
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    ratio = config.max_position_embeddings / original
    scaling = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    given = rope.get("long_mscale" if max_rollout_tokens > original else "short_mscale")
    return frequencies, scaling if given is None else given
