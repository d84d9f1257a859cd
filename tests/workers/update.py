"""Worker: one step's update of a fixed set of rollouts, from scoring's result to new parameters, for several splits of the work.

    python -m tests.workers.update CONFIG OUT.pt
Rank 0 saves {name of the split: {loss, grad_norm, mismatch, parameters}}; the rollouts are those of tests.workers.update.fixed_groups.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from typing import Any

import torch

from grpo_spmd.assemble import assemble_batch
from grpo_spmd.config import Config, load_config
from grpo_spmd.data_types import Completion, Prompt, RolloutGroup, ScoredRollouts
from grpo_spmd.distributed import end_session, exit_with_outcome, merge_sums, on_rank0, start_session
from grpo_spmd.policy import build_optimizer, build_policy, build_reference, hf_named_parameters
from grpo_spmd.update import attach_logprobs, update_policy

NUM_GROUPS, GROUP_SIZE, LONGEST = 6, 4, 28
UNSCORED = (3, 1)  # (slot, sample) of a completion whose reward is unknown


def fixed_groups() -> list[RolloutGroup]:
    """Ragged lengths from 1 to LONGEST, and in slot 2 a group in which every completion was cut off."""
    rng = random.Random(7)
    groups = []
    for slot in range(NUM_GROUPS):
        prompt = Prompt(slot, slot, [rng.randrange(1, 90) for _ in range(rng.randint(1, 9))], "", {})
        completions = []
        for _ in range(GROUP_SIZE):
            length = LONGEST if slot == 2 else rng.choice([1, 2, 3, 5, 8, 13, 21, LONGEST])
            token_ids = [rng.randrange(1, 90) for _ in range(length)]
            completions.append(Completion(token_ids, [-rng.random() * 4 for _ in token_ids], "length" if slot == 2 else "stop"))
        groups.append(RolloutGroup(slot, prompt, completions))
    return groups


def fixed_reward(slot: int, sample: int) -> float | None:
    return None if (slot, sample) == UNSCORED else random.Random(f"{slot}/{sample}").random()


def main() -> None:
    config, out = load_config(sys.argv[1]), sys.argv[2]
    session = start_session()
    groups = [group for group in fixed_groups() if group.slot % session.world_size == session.rank]
    scored = ScoredRollouts()
    for group in groups:
        for sample in range(GROUP_SIZE):
            scored.rollout_ids.append(group.slot * GROUP_SIZE + sample)
            scored.rewards.append(fixed_reward(group.slot, sample))
    scored.by_name = {"fixed": list(scored.rewards)}

    results = {}
    for name, changes in splits(config).items():
        results[name] = one_update(dataclasses.replace(config, **changes), groups, scored, session)
    if session.is_rank0:
        torch.save(results, out)
    end_session()


def splits(config: Config) -> dict[str, dict[str, Any]]:
    """Micro-batch budgets from "all in one row" to "one rollout a row", and activation checkpointing."""

    def budget(tokens: int) -> dict[str, Any]:
        return {"training": dataclasses.replace(config.training, max_tokens_per_micro_batch=tokens)}

    checkpointed = dataclasses.replace(config.model, activation_checkpointing=True, logprob_chunk_tokens=5)
    return {
        "one row": budget(100_000),
        "a few rows": budget(90),
        "one by one": budget(config.max_rollout_tokens),
        "activations recomputed, small logit chunks": {**budget(200), "model": checkpointed},
        "two mini-batches": {"training": dataclasses.replace(config.training, num_mini_batches=2)},
    }


def one_update(config: Config, groups: list[RolloutGroup], scored: ScoredRollouts, session: Any) -> dict[str, Any]:
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference = build_reference(config, session)
    optimizer, schedule = build_optimizer(policy, config.optimizer)
    batch, decided = assemble_batch(groups, scored, config, session)
    attach_logprobs(policy, reference, batch)
    sums = on_rank0(merge_sums, update_policy(policy, optimizer, schedule, batch, config.loss, config.optimizer.max_grad_norm))
    tokens = sums["loss_tokens"]
    return {
        "loss": (sums["policy"] + config.loss.kl_coef * sums["kl"] - config.loss.entropy_coef * sums["entropy"]) / tokens,
        "loss_tokens": tokens,
        "grad_norm": sums["max:grad_norm"],
        "mismatch_kl": sums["mismatch_kl"] / tokens,
        "reward_mean": decided.metrics["reward/mean"],
        "rows": len(batch.mini_batches[0]),
        "parameters": {name: parameter.full_tensor().clone() for name, parameter in hf_named_parameters(policy)},
    }


if __name__ == "__main__":
    with exit_with_outcome():
        main()
