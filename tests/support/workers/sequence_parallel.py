"""Worker: updates of the rollouts of `fixed_groups` by ranks that share their rows, from scoring's
result to new parameters.

    python -m tests.support.workers.sequence_parallel CONFIG REFERENCE OUT.pt SIZES SETTING ...
SIZES: numbers of ranks that share a row, with commas. Rank 0 saves {(size, setting, way): result}
as workers/update.py does; the ways are rows ("one row", "a few rows") and, of the first setting,
changes of the model's config.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import torch

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import (
    Session,
    end_session,
    policy_mesh,
    sequence_group,
    start_session,
)
from grpo_spmd.model.policy import build_policy, build_reference
from tests.support.workers.update import deal, fixed_groups, one_update, with_setting

ROWS = {"one row": 100_000, "a few rows": 90}
WAYS: dict[str, dict[str, Any]] = {
    "recomputed, small logit chunks": {"activation_checkpointing": True, "logprob_chunk_tokens": 5},
    "recomputed but for products": {"activation_checkpointing": "selective"},
    "compiled": {"compile": True},
    "two replicas": {"num_replicas": 2},
}


def main() -> None:
    config, reference_model, out = load_config(sys.argv[1]), sys.argv[2], sys.argv[3]
    sizes, settings = [int(size) for size in sys.argv[4].split(",")], sys.argv[5:]
    session = start_session()
    results = {}
    for size in sizes:
        sharing = dataclasses.replace(session, sequence_group=sequence_group(session.device, size))
        assert sharing.sequence_ranks == size
        for setting in settings:
            for way, tokens in ROWS.items():
                training = {"max_tokens_per_micro_batch": tokens}
                changed = with_setting(config, setting)
                changed = dataclasses.replace(
                    changed, training=dataclasses.replace(changed.training, **training)
                )
                results[size, setting, way] = update(changed, reference_model, sharing)
        for way, changes in WAYS.items() if len(settings) > 1 else ():
            changed = dataclasses.replace(
                config, model=dataclasses.replace(config.model, **changes)
            )
            results[size, settings[0], way] = update(changed, reference_model, sharing)
    if session.is_rank0:
        torch.save(results, out)
    end_session()


def update(config: Config, reference_model: str, session: Session) -> dict[str, Any]:
    replicated = dataclasses.replace(
        session, mesh=policy_mesh(session.device, config.model.num_replicas)
    )
    temperature = config.rollout.temperature
    policy = build_policy(config.model, temperature, replicated)
    reference = build_reference(
        policy,
        dataclasses.replace(config.model, path=reference_model, lora=LoraConfig()),
        temperature,
        config.loss.kl_coef,
        session,
    )
    groups = deal(fixed_groups(), "in turn", session)
    return one_update(config, policy, reference, groups, True, session)  # type: ignore[arg-type]


if __name__ == "__main__":
    with exit_with_outcome():
        main()
