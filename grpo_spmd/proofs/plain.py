"""The plain recomputation: transformers' own forward pass with attention written out, and the loss
as its papers write it.

Attention is in float32 whatever the compute dtype (`use_plain_attention`). All other arithmetic is
in the compute dtype, or in float32 too (`use_float32`): that shows how much bfloat16 itself rounds.

transformers' eager attention rounds the product of queries and keys to the compute dtype. In
bfloat16 that is too inexact to compare with: the key biases of Qwen2 and Qwen2.5 are of the order
of hundreds (a norm of 605 in the first layer of the 7B), so that scores lose all of their digits
(transformers#33317: perplexity 8.00 with eager attention, 7.13 with SDPA). Flash attention and SDPA
accumulate scores in float32 and keep them in float32; `attend` does the same with plain operations.

The loss is computed one sequence at a time and in float64. learn/losses.py, which names the papers,
must give the same numbers. Nothing here is imported from there, so that both cannot share a fault,
and nothing attempts to be fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from grpo_spmd.config.schema import LossConfig
from grpo_spmd.learn.contexts import RowContext
from grpo_spmd.model.routing import RouterKind, layer_routers, router_kind
from grpo_spmd.records import Rollout, Segment

_NAME = "grpo_spmd_plain"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns (attention output [S, L, heads, head_dim], None), as transformers expects of an
    attention function. None stands for the attention weights.

    `query` is [S, heads, L, head_dim]; `key` and `value` may have fewer heads. `attention_mask` is
    added to the scores: it expresses causality and sliding windows. `softcap` is used by Gemma 2.
    """
    num_shared = query.shape[1] // key.shape[1]
    keys = key.repeat_interleave(num_shared, dim=1).float()
    values = value.repeat_interleave(num_shared, dim=1).float()
    scores = (query.float() @ keys.transpose(2, 3)) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : keys.shape[2]].float()
    attended = scores.softmax(-1) @ values
    return attended.to(query.dtype).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, attend)
# The mask of transformers' eager attention, [S, 1, L, L]: 0 where a token is read, else the lowest
# number.
AttentionMaskInterface.register(_NAME, eager_mask)


@contextmanager
def use_plain_attention(model: Any) -> Iterator[None]:
    """Returns a context manager. Within it the model uses `attend`, and nothing is compiled.

    A backward pass must be within it too: activation checkpointing runs layers again."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    implementations = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = _NAME
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for config, name in zip(configs, implementations, strict=True):
            config._attn_implementation = name


def padded_routes(
    contexts: Sequence[Segment | RowContext], num_tokens: int, device: torch.device
) -> Tensor | None:
    """Returns the routes [S, L, layers, k] of a batch with one context per row; None if not all
    contexts have routes.

    Routes are the k experts that the engine's routers chose for each token. They are padded with
    zeros to L = `num_tokens`."""
    routes = [context.routes for context in contexts if context.routes is not None]
    if not routes or len(routes) < len(contexts):
        return None
    padded = torch.zeros(len(routes), num_tokens, *routes[0].shape[1:], dtype=torch.int64)
    for row, experts in zip(padded, routes, strict=True):
        num_rows = min(len(experts), num_tokens)
        row[:num_rows] = torch.from_numpy(experts[:num_rows].astype(np.int64))
    return padded.to(device)


@contextmanager
def use_plain_routes(model: Any, experts: Tensor | None) -> Iterator[dict[int, Tensor]]:
    """Returns a context manager. Within it the routers of a mixture of experts select the given
    `experts` [S, L, layers, k], and all passes must be over these S rows of L tokens.

    The experts' weights are computed plainly: the softmax of the router's logits at the given
    experts, divided by their sum if the model does so. Yields a dict in which each pass stores its
    router logits [S * L, E] by layer. Without `experts` the model selects experts itself, and the
    dict stays empty. A backward pass must be within it too."""
    logits: dict[int, Tensor] = {}
    kind = router_kind(model)
    if experts is None or kind is None:
        yield logits
        return
    routers = layer_routers(model)
    forwards = [router.forward for router in routers.values()]
    try:
        for number, router in routers.items():
            given = experts[:, :, number].flatten(0, 1)
            router.forward = partial(_route_plainly, router, kind, number, given, logits)
        yield logits
    finally:
        for router, forward in zip(routers.values(), forwards, strict=True):
            router.forward = forward


def _route_plainly(
    router: Any,
    kind: RouterKind,
    layer: int,
    experts: Tensor,
    logits: dict[int, Tensor],
    hidden: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what a router's forward pass returns if it chooses the given `experts` [tokens, k].

    These are the logits [tokens, E] over E experts, and the weights and indices [tokens, k] of the
    chosen experts, in the order of the router's class. The logits are also stored in `logits`."""
    hidden = hidden.reshape(-1, hidden.shape[-1])
    # GLM4-MoE routes in float32, by sigmoids; its correction bias only chooses the experts.
    has_sigmoids = hasattr(router, "e_score_correction_bias")
    states = hidden.float() if has_sigmoids else hidden
    logits[layer] = torch.nn.functional.linear(states, router.weight.to(states.dtype)).float()
    scores = logits[layer].sigmoid() if has_sigmoids else logits[layer].softmax(-1)
    weights = scores.gather(-1, experts)
    # Classes without the setting always divide.
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    weights = (weights * getattr(router, "routed_scaling_factor", 1.0)).to(states.dtype)
    if kind.logits_index == 0:
        return logits[layer], weights, experts
    return experts, weights, logits[layer]


class _Float32Arguments(TorchFunctionMode):
    """Casts every bfloat16 tensor that a function of torch is called with to float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls `func` with float32 copies. torch calls this method in place of each function."""
        args, kwargs = tree_map(_as_float32, (args, kwargs or {}))
        return func(*args, **kwargs)


def _as_float32(value: Any) -> Any:
    """Returns a bfloat16 tensor as float32, and any other value unchanged."""
    is_rounded = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_rounded else value


def _call_in_float32(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what a module's `forward` returns if its bfloat16 inputs and weights are float32."""
    with _Float32Arguments():
        return forward(*args, **kwargs)


@contextmanager
def use_float32(policy: nn.Module) -> Iterator[None]:
    """Returns a context manager. Within it a model under FSDP computes in float32, with its
    bfloat16 weights, so that a comparison shows how much bfloat16 arithmetic rounds. A backward
    pass must be within it too."""
    # Modules with parameters of their own: the experts of a layer are one, with an activation in
    # it. Operations between them follow the dtype of their results. FSDP's hooks run on modules
    # above these and must not be in the mode: they write into bfloat16 buffers, which the mode
    # would replace by float32 copies.
    leaves = [
        module
        for module in policy.modules()
        if next(module.parameters(recurse=False), None) is not None
    ]
    forwards = [vars(leaf).get("forward") for leaf in leaves]
    states = [m._get_fsdp_state() for m in policy.modules() if isinstance(m, FSDPModule)]
    precisions = [state._mp_policy for state in states]
    try:
        for leaf in leaves:
            leaf.forward = partial(_call_in_float32, leaf.forward)
        for state in states:
            # FSDP casts the hidden states between two layers (torch 2.11 to 2.14).
            state._mp_policy = dataclasses.replace(state._mp_policy, cast_forward_inputs=False)
        yield
    finally:
        for leaf, forward in zip(leaves, forwards, strict=True):
            del leaf.forward
            if forward is not None:
                leaf.forward = forward
        for state, precision in zip(states, precisions, strict=True):
            state._mp_policy = precision


# The loss


class LossTerm(NamedTuple):
    """One term of the loss: a weighted sum over the tokens that count."""

    value: Tensor
    """[] The sum, with its autograd graph."""
    size: float
    """The sum of the summands' absolute values. Differences are relative to it."""


def plain_terms(
    rollouts: Sequence[Rollout],
    columns: Mapping[str, Tensor],
    loss: LossConfig,
    *,
    num_tokens: int,
    num_sequences: int,
    max_completion_tokens: int,
    teacher_coef: float = 0.0,
) -> dict[str, LossTerm]:
    """Returns the terms of the loss by name: "policy", "kl", "entropy", "teacher", and their
    weighted sum "loss".

    Each rollout must have one advantage for all its tokens. `columns` are float64 [tokens] over the
    completion tokens of all rollouts: "logprobs" and "entropy" (the policy's, with autograd graph),
    "old" (its logprobs before the update), "engine" (the engine's logprobs), and "ref" (the
    reference's logprobs) if the loss has a KL term. With a teacher there is also "teacher_penalty",
    which is subtracted from each token's advantage, or "divergence" with its graph, which is
    weighted by `teacher_coef`.

    `num_tokens` and `num_sequences` count over the mini-batch on all ranks; they are the
    denominators of `loss.aggregation`, together with `max_completion_tokens` for "constant"."""
    coefs = {
        "policy": 1.0,
        "kl": loss.kl_coef if loss.kl_in == "loss" else 0.0,
        "entropy": -loss.entropy_coef,
        "teacher": 1.0,
    }
    values = {name: torch.zeros((), dtype=torch.float64) for name in coefs}
    sizes = dict.fromkeys(coefs, 0.0)
    begin = 0
    for rollout in rollouts:
        # Masked tokens are left out instead of multiplied by 0: their logprobs may be NaN.
        counted = begin + np.flatnonzero(rollout.loss_mask)
        begin += len(rollout.completion_ids)
        if not len(counted):
            continue
        weight = {
            "token": 1 / num_tokens,
            "sequence": 1 / (num_sequences * len(counted)),
            "constant": 1 / (num_sequences * max_completion_tokens),
        }[loss.aggregation]
        token = {name: column[counted] for name, column in columns.items()}
        penalty = token.get("teacher_penalty", torch.zeros_like(token["old"]))
        advantages = cast(float, rollout.advantages) - penalty
        objective = _objective(token["logprobs"], token["old"], advantages, loss)
        terms = {
            "policy": -objective * _correction(token["old"] - token["engine"], loss),
            "entropy": token["entropy"],
        }
        if "ref" in token:
            terms["kl"] = plain_kl(token["logprobs"], token["ref"], loss.kl_estimator)
        if "divergence" in token:
            terms["teacher"] = teacher_coef * token["divergence"]
        for name, term in terms.items():
            values[name] = values[name].to(term.device) + weight * term.sum()
            sizes[name] += weight * float(term.detach().abs().sum())
    total = sum((coef * values[name] for name, coef in coefs.items()), values["policy"] * 0.0)
    size = sum(abs(coef) * sizes[name] for name, coef in coefs.items())
    terms_by_name = {name: LossTerm(value, sizes[name]) for name, value in values.items()}
    return {"loss": LossTerm(total, size), **terms_by_name}


def _objective(p: Tensor, old: Tensor, advantages: Tensor, loss: LossConfig) -> Tensor:
    """Returns the objective [n] at each token of one sequence, which training maximises.

    `p` [n] are the policy's logprobs now, `old` [n] those before the update."""
    low = 1 - loss.clip_ratio_low
    high = 1 + loss.clip_ratio_high
    ratio = (p - old).exp()
    # cispo: the clipped ratio is a constant factor of the logprob.
    if loss.policy == "cispo":
        return advantages * ratio.detach().clamp(low, high) * p
    # gspo: all tokens have the value of the sequence's ratio (the mean log ratio), and each has the
    # gradient of its own logprob.
    if loss.policy == "gspo":
        ratio = (p - p.detach() + (p - old).mean().detach()).exp()
    value = ratio.detach()
    objective = advantages * ratio
    # A clipped objective is a constant and has no gradient.
    objective = torch.where((advantages > 0) & (value > high), advantages * high, objective)
    objective = torch.where((advantages < 0) & (value < low), advantages * low, objective)
    # Dual clip bounds the objective where a token with a negative advantage has a large ratio
    # (Ye et al. 2020).
    if loss.dual_clip is not None:
        is_bounded = (advantages < 0) & (value > loss.dual_clip)
        objective = torch.where(is_bounded, advantages * loss.dual_clip, objective)
    return objective


def _correction(log_ratio: Tensor, loss: LossConfig) -> Tensor:
    """Returns the importance weights [n] of the tokens of one completion, or with sequence_tis one
    weight [] for all of them. They correct for the mismatch between policy and engine.

    `log_ratio` [n] is the policy's old logprobs minus the engine's."""
    cap = loss.rollout_correction_cap
    ratios = log_ratio.exp()
    return {
        "none": torch.ones_like(ratios),
        "token_tis": ratios.clamp(max=cap),
        "sequence_tis": ratios.prod().clamp(max=cap),
        "icepop": torch.where((1 / cap <= ratios) & (ratios <= cap), ratios, 0.0),
    }[loss.rollout_correction]


def plain_kl(p: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Returns the estimate [n] of KL(policy || reference) at each token, from logprobs [n]."""
    return {"k1": p - ref, "k2": (p - ref) ** 2 / 2, "k3": torch.expm1(ref - p) - (ref - p)}[
        estimator
    ]
