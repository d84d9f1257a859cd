"""Worker: what `--explain` works out against what real ranks hold and move: shards, gradients,
moments, reference, the sync.

python -m tests.support.workers.explain CONFIG
"""

from __future__ import annotations

import sys

import torch
from torch.distributed.tensor import DTensor

from grpo_spmd.checks import memory
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model import config_json
from grpo_spmd.model.optimizer import build_optimizer
from grpo_spmd.model.policy import Policy, build_policy, build_reference
from grpo_spmd.records import Rollout, SyncStats
from tests.support.full_tensors import gather_full_tensors


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    facts = config_json.read_model(config.model.path)
    assert facts is not None
    policy = build_policy(config.model, 1.0, session)
    reference = build_reference(
        policy, config.model, config.rollout.temperature, config.loss.kl_coef, session
    )
    assert isinstance(reference, Policy)
    assert policy.num_parameters == facts.num_parameters

    optimizer, _ = build_optimizer(policy, config.optimizer)
    logprobs, _ = policy(
        pack_rollouts([Rollout(0, 1.0, True, [1] * 9, [2] * 9, [0.0] * 9)], session.device)
    )
    logprobs.sum().backward()
    optimizer.step()
    moments = [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]
    retained = {
        "master": shard_bytes(list(policy.parameters())),
        "gradients": shard_bytes([p.grad for p in policy.parameters()]),
        "moments": shard_bytes(moments),
        "reference": shard_bytes(list(reference.parameters())),
    }
    full = memory.shard_numel(facts.shapes, session.world_size)
    if session.is_rank0:  # the first rank always has full shards; the last may have fewer rows
        assert retained == {
            "master": 4 * full,
            "gradients": 4 * full,
            "moments": 8 * full,
            "reference": 2 * full,
        }, (
            retained,
            full,
        )
    assert retained["master"] <= 4 * full
    assert on_rank0(sum, retained["master"]) == 4 * facts.num_parameters

    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (6000, 100_000, 1 << 30):
            stats = SyncStats()
            for _ in gather_full_tensors(policy, dtype, bucket_bytes, stats):
                pass
            expected = memory.sync_size(
                facts.shapes, session.world_size, dtype.itemsize, bucket_bytes
            )
            assert (stats.bytes, stats.num_collectives) == expected, (stats, expected)

    print(f"rank {session.rank} agrees", flush=True)
    end_session()


def shard_bytes(tensors: list[torch.Tensor | None]) -> int:
    total = 0
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        total += tensor.to_local().numel() * tensor.dtype.itemsize
    return total


if __name__ == "__main__":
    with exit_with_outcome():
        main()
