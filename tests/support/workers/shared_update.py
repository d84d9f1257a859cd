"""Worker: updates of a fixed set of rollouts with and without shared prefixes.

    python -m tests.support.workers.shared_update CONFIG REFERENCE_MODEL OUT.pt
Rank 0 saves {(setting, shares): the result of update.one_update}.
"""

from __future__ import annotations

import dataclasses
import random
import sys

import numpy as np
import torch

from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.records import Completion, Episode, Prompt, RolloutGroup, Segment, Turn
from tests.support.workers.update import deal, fixed_groups, one_update, with_setting

SHARED_SETTINGS = (
    "as configured",
    "gspo, sequence",
    "mask_truncated",
    "two epochs, two mini-batches",
)
_FORKED_SLOT = 4
_MAX_TOKENS = 150


def shared_groups() -> list[RolloutGroup]:
    """Those of `fixed_groups` with longer prompts: slot 1 has the prompt of slot 0, and in slot 4
    each completion is an episode that forks half way."""
    rng = random.Random(11)
    groups = []
    prompts = [_ids(rng, rng.randint(18, 30)) for _ in range(6)]
    prompts[1] = prompts[0]
    for group, ids in zip(fixed_groups(), prompts, strict=True):
        prompt = Prompt(group.slot, group.slot, ids, "", {})
        completions = group.completions
        if group.slot == _FORKED_SLOT:
            completions = [_fork(ids, completion, rng) for completion in completions]
        groups.append(RolloutGroup(group.slot, prompt, completions))
    return groups


def _ids(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(1, 90) for _ in range(size)]


def _fork(prompt: list[int], completion: Completion, rng: random.Random) -> Completion:
    """The completion in two contexts, which have the prompt and nine tokens more in common."""
    half = len(completion.token_ids) // 2
    halves = [ids for ids in (completion.token_ids[:half], completion.token_ids[half:]) if ids]
    given = prompt + _ids(rng, 9)
    segments = []
    for number, ids in enumerate(halves):
        context = [*given, 1 + number, *ids]
        is_sampled = np.arange(len(context)) > len(given)
        segments.append(Segment(np.array(context, np.int32), is_sampled))
    turns = tuple(Turn(len(ids), "stop") for ids in halves)
    episode = Episode("ok", tuple(segments), turns, [], {}, [0.5])
    return dataclasses.replace(completion, episode=episode)


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference_values = dataclasses.replace(config.model, path=sys.argv[2])
    reference = build_reference(
        policy, reference_values, config.rollout.temperature, config.loss.kl_coef, session
    )
    assert isinstance(reference, Policy)
    results = {}
    for setting in SHARED_SETTINGS:
        changed = with_setting(config, setting)
        for shares in (False, True):
            training = dataclasses.replace(
                changed.training, max_tokens_per_micro_batch=_MAX_TOKENS, share_prefixes=shares
            )
            results[setting, shares] = one_update(
                dataclasses.replace(changed, training=training),
                policy,
                reference,
                deal(shared_groups(), "in turn", session),
                True,
                session,
            )
    if session.is_rank0:
        torch.save(results, sys.argv[3])
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
