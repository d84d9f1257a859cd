"""Worker: updates of the rollouts of `fixed_groups` by ranks that share their rows, from scoring's
result to new parameters.

    python -m tests.support.workers.sequence_parallel CONFIG REFERENCE OUT.pt SIZES SETTING ...
    python -m tests.support.workers.sequence_parallel CONFIG proofs
SIZES: numbers of ranks that share a row, with commas. Rank 0 saves {(size, setting, way): result}
as workers/update.py does; the ways are rows ("one row", "a few rows") and, of the first setting,
changes of the model's config. "proofs": the running check of the update on clean updates, episodes
with forks too, and on faults planted in what is shared; all ranks share every row.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

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
from grpo_spmd.model import policy as policy_module
from grpo_spmd.model import sequence_parallel
from grpo_spmd.model.policy import build_policy, build_reference
from grpo_spmd.records import MicroBatch
from tests.support.workers.update import deal, fixed_groups, one_update, with_setting
from tests.support.workers.update_check import Trials

ROWS = {"one row": 100_000, "a few rows": 90}
WAYS: dict[str, dict[str, Any]] = {
    "recomputed, small logit chunks": {"activation_checkpointing": True, "logprob_chunk_tokens": 5},
    "recomputed but for products": {"activation_checkpointing": "selective"},
    "compiled": {"compile": True},
    "two replicas": {"num_replicas": 2},
}


def main() -> None:
    if sys.argv[2] == "proofs":
        proofs(sys.argv[1])
        return
    config, reference_model, out = load_config(sys.argv[1]), sys.argv[2], sys.argv[3]
    sizes, settings = [int(size) for size in sys.argv[4].split(",")], sys.argv[5:]
    session = start_session()
    results = {}
    for size in sizes:
        sharing = dataclasses.replace(session, sequence_group=sequence_group(session.device, size))
        assert sharing.sequence_ranks == size
        for setting in settings:
            for way, tokens in ROWS.items():
                changed = with_setting(config, setting)
                changed = dataclasses.replace(
                    changed,
                    training=dataclasses.replace(
                        changed.training, max_tokens_per_micro_batch=tokens
                    ),
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


class SharedTrials(Trials):
    """The trials of workers/update_check.py by ranks that share every row."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        group = sequence_group(self.session.device, self.session.world_size)
        self.session = dataclasses.replace(self.session, sequence_group=group)
        self.policy = self.build(self.config)
        self.reference = build_reference(
            self.policy, self.config.model, self.config.rollout.temperature, 1.0, self.session
        )


def proofs(config_file: str) -> None:
    trials = SharedTrials(config_file)
    config = trials.config
    for episodes in (False, True):
        trials.are_episodes = episodes
        checked, plain = (trials.run(config, is_checked=checked) for checked in (True, False))
        assert all(torch.equal(value, plain[name]) for name, value in checked.items()), episodes
    trials.run(config, trials.build(config, lora=LoraConfig(rank=4)))
    trials.are_episodes = False
    slice_row, exchange = sequence_parallel.slice_row, sequence_parallel.exchange_blocks

    def shifted(row: MicroBatch, group: Any) -> MicroBatch:
        moved = dataclasses.replace(row, input_ids=row.input_ids.roll(1))
        return dataclasses.replace(
            slice_row(row, group), input_ids=slice_row(moved, group).input_ids
        )

    def other_order(blocks: Tensor, group: Any) -> Tensor:
        received = exchange(blocks, group)
        num_heads = 4 // trials.session.world_size
        # Queries, keys and values come together: only the last have another order of ranks.
        if received.shape[1] > num_heads:
            received[:, -1] = received[:, -1].flip(0)
        return received

    def counted_twice(ctx: Any, *grads: Tensor) -> Any:
        return (*(2 * grad[ctx.predictions] for grad in grads), None, None)

    def lost(row: MicroBatch, group: Any) -> MicroBatch:
        if trials.session.rank == 1:
            row = dataclasses.replace(row, position_ids=row.position_ids * 0)
        return slice_row(row, group)

    gather = sequence_parallel._GatherScores
    planted = (
        ("the logprob of a token", patch.object(policy_module, "slice_row", shifted)),
        ("the logprob of a token", patch.object(policy_module, "slice_row", lost)),
        (
            "the logprob of a token",
            patch.object(sequence_parallel, "exchange_blocks", other_order),
        ),
        ("the gradient of", patch.object(gather, "backward", staticmethod(counted_twice))),
    )
    for expected, within in planted:
        trials.sees(expected, within=within)
    print(f"{len(planted)} faults seen")
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
