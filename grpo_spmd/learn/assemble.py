"""Scored groups -> this rank's share of the step's batch: rank 0 decides from a few numbers, then rollouts move."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from grpo_spmd.config.schema import AdvantageConfig, LossConfig
from grpo_spmd.distributed.collectives import exchange_bytes, on_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.exchange import decode_rollouts, encode_rollouts
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.packing import pack_rollouts
from grpo_spmd.learn.sampled_step import SampledStep, advantages_of
from grpo_spmd.records import Decision, Rollout, RolloutBatch


def assemble_batch(sampled: SampledStep, session: Session) -> tuple[RolloutBatch, Decision]:
    """Collective. This rank's batch, and what rank 0 decided for all: every rollout goes to the rank that trains on it.
    Raises Rank0Error where no completion of the step has a usable reward."""
    decision = sampled.decide()
    slots = {position: slot for slot, position in enumerate(decision.positions)}
    ranks_rows = [(rank, row) for ranks in decision.plan for rank, rows in enumerate(ranks) for row in rows]
    owner = {i: rank for rank, row in ranks_rows for i in row}
    outgoing: list[list[Rollout]] = [[] for _ in range(session.world_size)]
    for group in sampled.groups:
        if group.prompt.position not in slots:
            continue
        first = slots[group.prompt.position] * len(group.completions)
        for i, completion in enumerate(group.completions, start=first):
            ids = group.prompt.token_ids, completion.token_ids
            rollout = Rollout(i, decision.advantages[i], decision.in_loss[i], *ids, completion.logprobs)
            outgoing[owner[i]].append(rollout)
    incoming = exchange_bytes([encode_rollouts(rollouts) for rollouts in outgoing])
    mine = {rollout.rollout_id: rollout for payload in incoming for rollout in decode_rollouts(payload)}
    rows_of = [ranks[session.rank] for ranks in decision.plan]
    mini_batches = [[pack_rollouts([mine[i] for i in row], session.device) for row in rows] for rows in rows_of]
    return RolloutBatch(mini_batches, decision.num_loss_tokens, decision.num_loss_sequences), decision


def penalise_rewards_by_kl(
    batch: RolloutBatch, decision: Decision, loss: LossConfig, advantage: AdvantageConfig
) -> Decision:
    """Collective. With `loss.kl_in: reward`, take kl_coef * (KL to the reference, summed over the completion) off each
    reward, and compute the advantages again, also those in `batch`, from the old and reference logprobs there."""
    if loss.kl_in != "reward":
        return decision
    local_kl: dict[str, float] = {}
    for micro_batch in batch.micro_batches:
        assert micro_batch.old_logprobs is not None
        assert micro_batch.ref_logprobs is not None
        per_token = kl_estimate(micro_batch.old_logprobs, micro_batch.ref_logprobs, loss.kl_estimator).double()
        sums = torch.zeros_like(per_token).index_add_(0, micro_batch.sequence_index, per_token).tolist()
        local_kl |= {str(rollout_id): sums[place] for place, rollout_id in enumerate(micro_batch.rollout_ids)}

    def decide(parts: list[dict[str, float]]) -> dict[str, Any]:
        kl = {int(rollout_id): value for part in parts for rollout_id, value in part.items()}
        penalties = [loss.kl_coef * kl.get(i, 0.0) for i in range(len(decision.rewards))]
        penalised = torch.tensor(decision.rewards, dtype=torch.float64) - torch.tensor(penalties, dtype=torch.float64)
        by_group = penalised.view(max(len(decision.positions), 1), -1)  # a step may have no group at all
        metrics = decision.metrics | {"reward/kl_penalty_mean": sum(penalties) / max(len(penalties), 1)}
        return {"advantages": advantages_of(by_group, advantage), "metrics": metrics}

    decision = dataclasses.replace(decision, **on_rank0(decide, local_kl))
    for micro_batch in batch.micro_batches:
        if micro_batch.rollout_ids:
            values = torch.tensor([decision.advantages[i] for i in micro_batch.rollout_ids], dtype=torch.float32)
            micro_batch.advantages = values.to(micro_batch.advantages.device)[micro_batch.sequence_index]
    return decision
