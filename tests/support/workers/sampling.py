"""Worker: dynamic sampling of steps whose rewards are laid down, on this many ranks, with what is
trained on them.

    python -m tests.support.workers.sampling CONFIG OUT.pt
Rank 0 saves {scenario: {drawn, missing, decision, batch counts, gradients, ...}}.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.data.prompts import PromptStream
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, load_weights
from grpo_spmd.records import (
    Completion,
    Prompt,
    RolloutBatch,
    RolloutGroup,
    ScoredRollouts,
    StepDecision,
)
from tests.support.learn import merged_on_all, sampled_step_of, updater_of

GROUP_SIZE, NUM_ROWS = 2, 11


@dataclass(frozen=True)
class Scenario:
    """One step: P prompts wanted, rounds at most, and the places of the stream whose groups have
    rewards that
    differ."""

    wanted: int
    differ: tuple[int, ...]
    max_rounds: int = 10
    dynamic: bool = True
    num_mini_batches: int = 1
    only: tuple[int, ...] = ()  # the places that are drawn, where not the first


SCENARIOS = {
    "filled in two rounds": Scenario(wanted=4, differ=(2, 4, 6, 7)),
    "surplus": Scenario(wanted=8, differ=(0, 1, 3, 4, 5, 7, 8, 9, 10)),
    "nothing kept at first": Scenario(wanted=4, differ=(4, 5, 6, 7)),
    "unlucky": Scenario(wanted=8, differ=(0, 1, 2, 24, 25, 26, 27, 33, 35)),
    "three rounds": Scenario(wanted=4, differ=(0, 4, 9), max_rounds=3),
    "no dynamic sampling": Scenario(wanted=4, differ=(2,), dynamic=False),
    "partly filled": Scenario(wanted=4, differ=(1, 3, 6), max_rounds=2),
    "partly filled, four mini-batches": Scenario(
        wanted=4, differ=(1, 6), max_rounds=2, num_mini_batches=4
    ),
    "empty": Scenario(wanted=4, differ=(), max_rounds=2),
    "empty, two mini-batches": Scenario(wanted=4, differ=(), max_rounds=1, num_mini_batches=2),
    "as many as stayed": Scenario(wanted=3, differ=(1, 3, 6), dynamic=False, only=(1, 3, 6)),
}


def made_up_group(prompt: Prompt, slot: int) -> RolloutGroup:
    """A group that is a function of the place in the stream alone; the later the place, the shorter
    its completions."""
    rng = random.Random(prompt.position)
    completions = []
    for _ in range(GROUP_SIZE):
        token_ids = [rng.randrange(1, 90) for _ in range(12 - prompt.position % 12)]
        completions.append(Completion(token_ids, [-3.0 * rng.random() for _ in token_ids], "stop"))
    return RolloutGroup(slot, prompt, completions)


def main() -> None:
    config, out = load_config(sys.argv[1]), sys.argv[2]
    session = start_session()
    policy = build_policy(config.model, config.rollout.temperature, session)
    results = {name: run(scenario, config, policy, session) for name, scenario in SCENARIOS.items()}
    if session.is_rank0:
        torch.save(results, out)
    end_session()


def run(scenario: Scenario, config: Config, policy: Policy, session: Session) -> dict[str, Any]:
    config = dataclasses.replace(
        config,
        rollout=dataclasses.replace(
            config.rollout,
            num_prompts_per_step=scenario.wanted,
            dynamic_sampling=scenario.dynamic,
            dynamic_sampling_max_rounds=scenario.max_rounds,
        ),
        training=dataclasses.replace(config.training, num_mini_batches=scenario.num_mini_batches),
    )
    load_weights(hf_named_parameters(policy), Path(config.model.path))
    parameters = _parameters(policy)
    updater = updater_of(policy, config)
    stream = PromptStream(
        [Prompt(row, row, [row + 1, 5], "", {}) for row in range(NUM_ROWS)], seed=0, shuffle=False
    )
    sampled = sampled_step_of(config, session)
    announced: list[int] = []
    drawn, missing = [], [sampled.num_missing]
    while sampled.num_missing:
        prompts = (
            [p for p in stream.take(max(scenario.only) + 1) if p.position in scenario.only]
            if scenario.only
            else None
        )
        prompts = prompts or stream.take(sampled.num_missing)
        announced.append(sampled.num_completions)
        drawn.append([prompt.position for prompt in prompts])
        # the last prompts first, and more of them on the last rank: neither order nor rank may
        # decide what stays
        local = [
            p
            for p in reversed(prompts)
            if min(p.position % 3, session.world_size - 1) == session.rank
        ]
        groups = [made_up_group(prompt, prompts.index(prompt)) for prompt in local]
        scored = ScoredRollouts()
        for group in groups:
            scored.rewards += [1.0, 0.0 if group.prompt.position in scenario.differ else 1.0]
        scored.texts = [""] * len(scored.rewards)
        scored.by_name = {"made_up": list(scored.rewards)}
        sampled.add(groups, scored)
        missing.append(sampled.num_missing)
    batch, decision = assemble_batch(sampled, session)
    attach_logprobs(policy, None, batch, config.loss, config.training.num_optimizer_steps)
    sums = merged_on_all(updater.update(batch))
    return {
        "drawn": drawn,
        "announced": announced,
        "missing": missing,
        "stream_position": stream.position,
        "decision": _whole(decision.rank0_decision) if session.is_rank0 else None,
        "advantages_trained": _trained(batch),
        "sums": {
            name: sums[name].value
            for name in ("loss_tokens", "optim/updates", "optim/skipped_updates")
        },
        "optimizer_state": len(updater.optimizer.state),
        "lr_steps": updater._schedule.last_epoch,
        "moved": [
            name
            for name, value in _parameters(policy).items()
            if not torch.equal(value, parameters[name])
        ],
        "parameters": _parameters(policy),
    }


def _whole(step: StepDecision | None) -> dict[str, Any]:
    assert step is not None
    values = {
        name: getattr(step, name)
        for name in vars(step)
        if name not in ("plan", "num_groups", "slots")
    }
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }


def _trained(batch: RolloutBatch) -> list[list[Any]]:
    """[mini-batch, rollout, its token ids, its advantage] of all ranks, by rollout."""
    local = []
    for number, mini_batch in enumerate(batch.mini_batches):
        for row in mini_batch:
            for position, rollout_id in enumerate(row.rollout_ids):
                at = (row.sequence_index == position) & row.loss_mask
                local.append(
                    [
                        number,
                        rollout_id,
                        row.target_ids[at].tolist(),
                        row.advantages[at].unique().tolist(),
                    ]
                )
    return on_rank0(lambda pieces: sorted(item for piece in pieces for item in piece), local)


def _parameters(policy: Policy) -> dict[str, torch.Tensor]:
    return {
        name: parameter.full_tensor().clone() for name, parameter in hf_named_parameters(policy)
    }


if __name__ == "__main__":
    with exit_with_outcome():
        main()
