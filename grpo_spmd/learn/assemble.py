"""Scored groups -> this rank's share of the step's batch: rank 0 decides from a few numbers, then rollouts move."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from grpo_spmd.config.schema import AdvantageConfig, LossConfig
from grpo_spmd.distributed.collectives import exchange_bytes, shares_of_rank0
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.exchange import decode_rollouts, encode_rollouts, rollout_of
from grpo_spmd.learn.losses import kl_estimate
from grpo_spmd.learn.packing import pack_rollouts
from grpo_spmd.learn.sampled_step import SampledStep, advantages_of
from grpo_spmd.learn.shares import cut, of_sampled, of_trained
from grpo_spmd.learn.turn_credit import Credit, credited_tokens
from grpo_spmd.records import Completion, Decision, Prompt, Rollout, RolloutBatch, StepDecision


def assemble_batch(sampled: SampledStep, session: Session) -> tuple[RolloutBatch, Decision]:
    """Collective. This rank's batch, and what rank 0 decided for all: every rollout goes to the rank that trains on it.
    Raises Rank0Error where no completion of the step has a usable reward."""
    decision = sampled.decide()
    estimator, discount = sampled.rules.advantage.estimator, sampled.rules.discount
    outgoing: list[list[Rollout]] = [[] for _ in range(session.world_size)]
    for number, group in enumerate(sampled.groups):
        slot, size = decision.slots.get(group.prompt.position), len(group.completions)
        if slot is None:
            continue
        rewards = sampled.scored.rewards[number * size : (number + 1) * size]
        advantages = [decision.advantages[i] for i in range(slot * size, (slot + 1) * size)]
        credited = credited_tokens(advantages, rewards, group.completions, discount, estimator)
        for i, (completion, credit) in enumerate(zip(group.completions, credited, strict=True), start=slot * size):
            rollout = _rollout(i, credit, decision.in_loss[i], group.prompt, completion)
            outgoing[decision.trained_by[i]].append(rollout)
    incoming = exchange_bytes([encode_rollouts(rollouts) for rollouts in outgoing])
    mine = {rollout.rollout_id: rollout for payload in incoming for rollout in decode_rollouts(payload)}
    mini_batches = [[pack_rollouts([mine[i] for i in row], session.device) for row in rows] for rows in decision.rows]
    return RolloutBatch(mini_batches, decision.num_loss_tokens, decision.num_loss_sequences), decision


def _rollout(i: int, advantage: Credit, in_loss: bool, prompt: Prompt, completion: Completion) -> Rollout:
    episode = completion.episode
    if episode is None or not episode.segments:  # one turn, or nothing: its environment failed
        return Rollout(i, advantage, in_loss, prompt.token_ids, completion.token_ids, completion.logprobs)
    rollout = rollout_of(i, advantage, in_loss, episode.segments, completion.logprobs)
    assert np.array_equal(rollout.completion_ids, completion.token_ids), "what is trained on is not what was sampled"
    return rollout


def penalise_rewards_by_kl(
    batch: RolloutBatch, decision: Decision, loss: LossConfig, advantage: AdvantageConfig
) -> Decision:
    """Collective. With `loss.kl_in: reward`, take kl_coef * (KL to the reference, summed over the completion) off each
    reward, and compute the advantages again, also those in `batch`, from logprobs there; with gae the critic does."""
    if loss.kl_in != "reward" or advantage.estimator == "gae":
        return decision
    kl_of: dict[int, float] = {}
    for micro_batch in batch.micro_batches:
        assert micro_batch.old_logprobs is not None
        assert micro_batch.ref_logprobs is not None
        per_token = kl_estimate(micro_batch.old_logprobs, micro_batch.ref_logprobs, loss.kl_estimator).double()
        sums = torch.zeros_like(per_token).index_add_(0, micro_batch.sequence_index, per_token).tolist()
        kl_of |= {rollout_id: sums[place] for place, rollout_id in enumerate(micro_batch.rollout_ids)}
    trained = [i for rows in decision.rows for row in rows for i in row]
    # Those without a completion token are in no micro-batch.
    local_kl, of_all = np.array([kl_of.get(i, 0.0) for i in trained], np.float64), decision.of_all
    decided: list[StepDecision] = []  # on rank 0

    def decide(parts: list[bytes]) -> list[bytes]:
        assert of_all is not None
        (ids, num_trained), kl = of_trained(of_all), np.zeros_like(of_all.rewards)
        kl[ids] = np.frombuffer(b"".join(parts), np.float64)
        penalties = loss.kl_coef * kl
        penalised = (of_all.rewards - penalties).reshape(max(len(of_all.positions), 1), -1)  # there may be no group
        advantages = advantages_of(penalised, advantage)
        metrics = of_all.metrics | {"reward/kl_penalty_mean": sum(penalties.data) / max(len(penalties), 1)}
        decided.append(dataclasses.replace(of_all, advantages=advantages, metrics=metrics))
        of_ranks = cut(*of_sampled(of_all, advantages)), cut(advantages[ids], num_trained)
        return [sampled + trained for sampled, trained in zip(*of_ranks, strict=True)]

    values = np.frombuffer(shares_of_rank0(decide, local_kl.tobytes()), np.float32).tolist()
    own = dict(zip(decision.advantages, values, strict=False))
    of_rows = dict(zip(trained, values[len(own) :], strict=True))
    for micro_batch in batch.micro_batches:
        if micro_batch.rollout_ids:
            advantages = torch.tensor([of_rows[i] for i in micro_batch.rollout_ids], dtype=torch.float32)
            micro_batch.advantages = advantages.to(micro_batch.advantages.device)[micro_batch.sequence_index]
    return dataclasses.replace(decision, advantages=own, of_all=next(iter(decided), None))
