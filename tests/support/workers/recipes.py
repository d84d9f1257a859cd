"""Worker: one step's updates of a fixed set of rollouts under each recipe that has no model beside
the policy.

    python -m tests.support.workers.recipes CONFIG REFERENCE_MODEL OUT.pt
Rank 0 saves {recipe: what `one_update` of tests/support/workers/update.py finds}.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from grpo_spmd.config.describe import read_recipes
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from tests.support.workers.update import deal, fixed_groups, one_update


def main() -> None:
    config_file, reference_model, out = sys.argv[1:]
    config, session, results = load_config(config_file), start_session(), {}
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference_values = dataclasses.replace(config.model, path=reference_model)
    reference = build_reference(policy, reference_values, config.rollout.temperature, 1.0, session)
    assert isinstance(reference, Policy)
    for name in (name for name, recipe in read_recipes().items() if not recipe.needs):
        groups = deal(fixed_groups(), "in turn", session)
        changed = load_config(config_file, [f"algorithm={name}"])
        results[name] = one_update(changed, policy, reference, groups, True, session)
    if session.is_rank0:
        torch.save(results, out)
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
