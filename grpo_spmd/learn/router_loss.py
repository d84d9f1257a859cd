"""Computes the load-balance loss of a mixture of experts, and compares the policy's own routes with
the engine's.

In a layer of E experts the loss is E * sum_e f_e P_e: f_e is the share of tokens that took expert
e, and P_e the router's mean probability of e (Fedus et al. 2021, "Switch Transformers"). With k
experts per token the loss is k if the experts are in balance, as in transformers. transformers
takes both f and P from one forward pass, so that the loss depends on how rollouts are split into
micro-batches. Here f is taken from the engine's routes of the whole mini-batch on all ranks, which
are known before the update, so that the loss is a sum over tokens like every other term.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_spmd.distributed.collectives import sum_in_place
from grpo_spmd.distributed.reductions import Max, Mean, Reductions
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.policy import Policy
from grpo_spmd.records import MicroBatch


def attach_loads(policy: Policy, mini_batches: Sequence[Sequence[MicroBatch]], coef: float) -> None:
    """Collective. Sets `routes.loads` of each row: the derivative of the loss term by a token's
    probability of each expert, [layers, E].

    The term is coef * (the mean, over layers with a router, of the load-balance loss of the row's
    mini-batch). It counts the tokens that the engine has read: all but the last of a sequence."""
    num_layers = policy.model.config.num_hidden_layers
    num_experts = policy.num_experts
    device = next(policy.parameters()).device
    # For each mini-batch: the tokens of each layer's experts, and in the last column all tokens.
    size = num_layers * num_experts
    counts = torch.zeros(len(mini_batches), size + 1, dtype=torch.float64, device=device)
    for row_counts, mini_batch in zip(counts, mini_batches, strict=True):
        for routes in filter(None, (row.routes for row in mini_batch)):
            first = num_experts * torch.arange(num_layers, device=device)[:, None]
            experts = routes.experts.long() + first
            weights = routes.is_recorded.double()
            row_counts.index_add_(
                0, experts.flatten(), weights[:, None, None].expand_as(experts).flatten()
            )
            row_counts[size] += weights.sum()
    sum_in_place(counts)
    scale = coef * num_experts / max(policy.num_routers, 1)
    for row_counts, mini_batch in zip(counts, mini_batches, strict=True):
        num_tokens = row_counts[size].clamp(min=1)
        # The derivative of f_e P_e by the probability of one token is f_e / num_tokens.
        loads = scale * row_counts[:size].view(num_layers, num_experts) / num_tokens**2
        for routes in filter(None, (row.routes for row in mini_batch)):
            routes.loads = loads.float()


@torch.no_grad()
def compare_routes(policy: Policy, sample: MicroBatch | None) -> Reductions:
    """Collective. Runs the policy with its own routes on a few rollouts, and returns metrics of how
    it differs from the engine: the share of expert sets, one for each token and layer, that are not
    the engine's, and the mean and largest |difference| of logprobs, in nats.

    `sample` None: this rank has no rollouts with routes."""
    if sample is None:
        sample = pack_rollouts([], next(policy.parameters()).device)
    routes = sample.routes
    if routes is not None:
        routes.is_replayed = False
    logprobs, _ = policy(sample)
    # A rank without rollouts only takes part in the forward pass.
    mask = sample.loss_mask if routes is not None else torch.zeros_like(sample.loss_mask)
    difference = torch.where(mask, logprobs - sample.rollout_logprobs, 0.0).double().abs()
    num_different = sum(routes.differences.values(), torch.zeros(())) if routes is not None else 0.0
    num_sets = 0.0 if routes is None else routes.is_recorded.sum() * len(routes.differences)
    metrics: Reductions = {
        "engine/router_disagreement_frac": Mean(num_different, num_sets),
        "engine/own_routes_mismatch_abs_mean": Mean(difference.sum(), mask.sum()),
        "engine/own_routes_mismatch_abs_max": Max(difference.max()),
    }
    return {name: reduction.on_host() for name, reduction in metrics.items()}
