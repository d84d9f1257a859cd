"""Scored groups -> this rank's share of the step's training batch: rank 0 decides from a few numbers a rollout, then rollouts move."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from grpo_spmd.advantages import batch_std, compute_advantages
from grpo_spmd.batching import Plan, pack_rollouts, plan_batch, plan_metrics
from grpo_spmd.config import Config
from grpo_spmd.data_types import Rollout, RolloutBatch, RolloutGroup, ScoredRollouts
from grpo_spmd.distributed import Session, exchange_bytes, on_rank0
from grpo_spmd.rewards import RewardError


@dataclass(frozen=True)
class Decision:
    """What rank 0 decided about a step, equal on all ranks. Lists are in the order of rollout ids."""

    advantages: list[float]  # [B]
    counts: list[bool]  # [B]; False: no usable reward, the rollout stays out of the loss
    plan: Plan
    num_loss_tokens: list[int]  # one for each mini-batch
    num_tokens: int  # prompts and completions of the step
    num_completion_tokens: int
    metrics: dict[str, float | None]


def assemble_batch(
    groups: Sequence[RolloutGroup], scored: ScoredRollouts, config: Config, session: Session
) -> tuple[RolloutBatch, Decision]:
    """Collective. Advantages and the plan on rank 0, then every rollout goes to the rank that trains on it.

    Returns:
        This rank's batch, and what rank 0 decided for all.

    Raises:
        Rank0Error: no completion of the step has a usable reward.
    """
    facts = {
        "rollout_ids": scored.rollout_ids,
        "rewards": scored.rewards,
        "by_name": scored.by_name,
        "prompt_tokens": [len(g.prompt.token_ids) for g in groups for _ in g.completions],
        "completion_tokens": [len(c.token_ids) for g in groups for c in g.completions],
        "truncated": [c.finish_reason == "length" for g in groups for c in g.completions],
    }
    decision = Decision(**on_rank0(lambda parts: asdict(_decide(parts, config, session.world_size)), facts))

    owner = {i: rank for mini_batch in decision.plan for rank, rows in enumerate(mini_batch) for row in rows for i in row}
    outgoing: list[list[Rollout]] = [[] for _ in range(session.world_size)]
    sampled = [(group, completion) for group in groups for completion in group.completions]
    for rollout_id, (group, completion) in zip(scored.rollout_ids, sampled, strict=True):
        rollout = Rollout(
            rollout_id,
            decision.advantages[rollout_id],
            decision.counts[rollout_id],
            group.prompt.token_ids,
            completion.token_ids,
            completion.logprobs,
        )
        outgoing[owner[rollout_id]].append(rollout)
    incoming = exchange_bytes([encode_rollouts(rollouts) for rollouts in outgoing])
    mine = {rollout.rollout_id: rollout for payload in incoming for rollout in decode_rollouts(payload)}

    mini_batches = [
        [pack_rollouts([mine[i] for i in row], session.device) for row in mini_batch[session.rank]] for mini_batch in decision.plan
    ]
    return RolloutBatch(mini_batches, decision.num_loss_tokens), decision


def _decide(parts: list[dict[str, Any]], config: Config, num_ranks: int) -> Decision:
    """Rank 0: everything about the step that needs to know all rollouts."""
    rollout, num_mini_batches = config.rollout, config.training.num_mini_batches
    size = rollout.num_prompts_per_step * rollout.group_size
    facts = {name: _in_order(parts, name, size) for name in ("rewards", "prompt_tokens", "completion_tokens", "truncated")}
    rewards = torch.tensor([math.nan if r is None else r for r in facts["rewards"]], dtype=torch.float64)
    known = ~rewards.isnan()
    if not known.any():
        raise RewardError(
            f"none of the {size} completions of this step has a usable reward: every value was None, NaN or not a number; "
            "see the module docstring of grpo_spmd.rewards for what these mean"
        )
    grid = rewards.view(rollout.num_prompts_per_step, rollout.group_size)
    advantages, zero_std = compute_advantages(grid, config.advantage.estimator, config.advantage.normalize_std)

    num_tokens = [p + c for p, c in zip(facts["prompt_tokens"], facts["completion_tokens"], strict=True)]
    plan = plan_batch(
        num_tokens,
        num_ranks=num_ranks,
        num_mini_batches=num_mini_batches,
        max_tokens=config.training.max_tokens_per_micro_batch,
    )
    counted = [tokens if counts else 0 for tokens, counts in zip(facts["completion_tokens"], known.tolist(), strict=True)]
    per_mini_batch = size // num_mini_batches
    metrics: dict[str, float | None] = {
        "reward/mean": float(rewards[known].mean()),
        "reward/std": float(batch_std(grid)),
        "reward/zero_std_groups_frac": float(zero_std.float().mean()),
        "reward/unscored_frac": float((~known).float().mean()),
        "completion/tokens_mean": sum(facts["completion_tokens"]) / size,
        "completion/truncated_frac": sum(facts["truncated"]) / size,
        **{f"batching/{name}": value for name, value in plan_metrics(plan, num_tokens).items()},
    }
    for name in next(part["by_name"] for part in parts if part["by_name"]):
        values = [value for part in parts for value in part["by_name"].get(name, [])]
        applying = [value for value in values if value is not None]
        usable = [value for value in applying if not math.isnan(value)]
        metrics[f"reward/{name}/mean"] = sum(usable) / len(usable) if usable else None
        metrics[f"reward/{name}/not_applicable_frac"] = 1 - len(applying) / size
        metrics[f"reward/{name}/invalid_frac"] = (len(applying) - len(usable)) / size
    return Decision(
        advantages=advantages.flatten().tolist(),
        counts=known.tolist(),
        plan=plan,
        num_loss_tokens=[sum(counted[start : start + per_mini_batch]) for start in range(0, size, per_mini_batch)],
        num_tokens=sum(num_tokens),
        num_completion_tokens=sum(facts["completion_tokens"]),
        metrics=metrics,
    )


def _in_order(parts: list[dict[str, Any]], name: str, size: int) -> list[Any]:
    """Merge what ranks reported into the order of rollout ids; each id must have come exactly once."""
    merged = {i: value for part in parts for i, value in zip(part["rollout_ids"], part[name], strict=True)}
    reported = sum(len(part["rollout_ids"]) for part in parts)
    assert reported == size, (reported, size)
    assert sorted(merged) == list(range(size)), merged.keys()
    return [merged[i] for i in range(size)]


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """Rollouts as bytes: a JSON header, then all token ids (int32), then all logprobs (float64, so that they arrive unchanged)."""
    header = [[r.rollout_id, r.advantage, r.counts, len(r.prompt_ids), len(r.completion_ids)] for r in rollouts]
    text = json.dumps(header).encode()
    ids = np.array([i for r in rollouts for i in (*r.prompt_ids, *r.completion_ids)], dtype=np.int32)
    logprobs = np.array([x for r in rollouts for x in r.rollout_logprobs], dtype=np.float64)
    return len(text).to_bytes(8, "little") + text + ids.tobytes() + logprobs.tobytes()


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """What `encode_rollouts` made."""
    end = 8 + int.from_bytes(payload[:8], "little")
    header = json.loads(payload[8:end])
    num_ids = sum(prompt + completion for *_, prompt, completion in header)
    ids = np.frombuffer(payload, np.int32, num_ids, end).tolist()
    logprobs = np.frombuffer(payload, np.float64, offset=end + 4 * num_ids).tolist()
    rollouts, at, scored = [], 0, 0
    for rollout_id, advantage, counts, prompt, completion in header:
        prompt_ids, completion_ids = ids[at : at + prompt], ids[at + prompt : at + prompt + completion]
        rollouts.append(Rollout(rollout_id, advantage, counts, prompt_ids, completion_ids, logprobs[scored : scored + completion]))
        at, scored = at + prompt + completion, scored + completion
    return rollouts
