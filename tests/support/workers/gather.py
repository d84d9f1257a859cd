"""Worker: the bucketed gather against torch's own full_tensor(), for many bucket sizes; and the
control collectives.

python -m tests.support.workers.gather CONFIG
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable
from contextlib import closing
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.collectives import (
    exchange_bytes,
    find_differing_ranks,
    gather_bytes,
    on_rank0,
    on_rank0_bytes,
    scatter_from_rank0,
)
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, engine_group, start_session
from grpo_spmd.model.lora import Shard
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, hf_named_shards
from grpo_spmd.model.sharding import shard_group
from grpo_spmd.records import SyncStats
from tests.support.full_tensors import gather_full_tensors


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session(config.model.num_replicas)
    policy = build_policy(config.model, 1.0, session)
    expected = {name: parameter.full_tensor() for name, parameter in hf_named_parameters(policy)}
    numel = sum(t.numel() for t in expected.values())
    ranks = session.world_size // config.model.num_replicas
    assert {
        torch.distributed.get_world_size(shard_group(p)) for _, p in hf_named_parameters(policy)
    } == {ranks}
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (6000, 100_000, 1 << 30):
            stats = SyncStats()
            # kept, as vLLM keeps them: none may be overwritten
            retained = list(gather_full_tensors(policy, dtype, bucket_bytes, stats))
            assert [name for name, _ in retained] == list(expected)
            for name, tensor in retained:
                assert torch.equal(tensor, expected[name].to(dtype)), (name, bucket_bytes)
            piece = bucket_bytes // (ranks * dtype.itemsize) * ranks * dtype.itemsize
            assert stats.num_collectives == (math.ceil(stats.bytes / piece) if ranks > 1 else 0), (
                stats
            )
            padding = ranks * sum(t[:1].numel() for t in expected.values())
            assert numel <= stats.bytes / dtype.itemsize <= numel + (padding if ranks > 1 else 0), (
                stats
            )
            for (
                _,
                tensor,
            ) in (
                retained
            ):  # the receiver's own, not the policy's, and not a bucket of the next gather
                tensor.zero_()
    a_receiver_that_fails_leaves_the_group_usable(policy, expected)
    one_shard_is_made_at_a_time(policy, expected)
    ranks_of_an_engine_compare(session, config.rollout.engine_ranks)

    # of uneven length, some empty
    payloads = [f"{session.rank}->{to}".encode() * (to * 3) for to in range(session.world_size)]
    assert exchange_bytes(payloads) == [
        f"{frm}->{session.rank}".encode() * (session.rank * 3) for frm in range(session.world_size)
    ]
    gathered = gather_bytes(b"x" * session.rank)
    assert gathered == ([b"x" * r for r in range(session.world_size)] if session.is_rank0 else None)
    assert on_rank0(sum, session.rank + 1) == session.world_size * (session.world_size + 1) // 2
    assert math.isnan(on_rank0(lambda values: values[-1], math.nan))
    try:
        on_rank0(lambda values: 1 / 0, None)
    except Rank0Error as error:
        assert "ZeroDivisionError" in str(error)  # noqa: PT017
    else:
        raise AssertionError("rank 0's exception did not reach this rank")
    each_rank_gets_its_own_share(session)
    end_session()


def each_rank_gets_its_own_share(session: Session) -> None:
    """Of uneven length, some empty; rank 0's errors reach all, with the whole text on rank 0
    alone."""
    world_size = session.world_size
    fraction = scatter_from_rank0(
        lambda payloads: [payloads[r] * r for r in range(world_size)], b"%d|" % session.rank
    )
    assert fraction == b"%d|" % session.rank * session.rank
    report = on_rank0_bytes(
        lambda payloads: [len(payload) for payload in payloads], b"\0" * (session.rank % 2) * 70_000
    )
    assert report == [rank % 2 * 70_000 for rank in range(world_size)]

    def refuses(error: Exception) -> Callable[[list[bytes]], list[bytes]]:
        def decide(payloads: list[bytes]) -> list[bytes]:
            raise error

        return decide

    for error, kind in (
        (RuntimeError("why\ntrace"), Rank0Error),
        (ConfigError("key: what"), ConfigError),
    ):
        try:
            scatter_from_rank0(refuses(error), b"")
        except kind as caught:
            expected = (
                "key: what"
                if kind is ConfigError
                else "RuntimeError: why" + "\ntrace" * session.is_rank0
            )
            assert str(caught) == expected, caught  # noqa: PT017
        else:
            raise AssertionError("rank 0's exception did not reach this rank")


def a_receiver_that_fails_leaves_the_group_usable(
    policy: Policy, expected: dict[str, Tensor]
) -> None:
    """On all ranks alike, with the next bucket on its way: what comes next must not get that bucket
    for its own."""
    for number_taken in (1, 4):
        with closing(gather_full_tensors(policy, torch.float32, 6000, SyncStats())) as tensors:
            for _ in range(number_taken):
                next(tensors)
    for name, tensor in gather_full_tensors(policy, torch.float32, 10_000, SyncStats()):
        assert torch.equal(tensor, expected[name]), name


def one_shard_is_made_at_a_time(policy: Policy, expected: dict[str, Tensor]) -> None:
    """Shards that are made when they are asked for (merged adapters): each once, and none while the
    one before is
    alive."""
    created: list[weakref.ref[Tensor]] = []

    def doubled(parameter: DTensor) -> Tensor:
        assert not [number for number, ref in enumerate(created) if ref() is not None]
        shard = parameter.to_local().detach() * 2
        created.append(weakref.ref(shard))
        return shard

    shards = [
        Shard(name, parameter, partial(doubled, parameter))
        for name, parameter, _ in hf_named_shards(policy)
    ]
    for name, tensor in gather_full_tensors(shards, torch.float32, 6000, SyncStats()):
        assert torch.equal(tensor, expected[name] * 2), name
    assert len(created) == len(expected)


def ranks_of_an_engine_compare(session: Session, num_ranks: int) -> None:
    """Each engine's ranks hear of each other's payloads, and of no other engine's."""
    group = engine_group(num_ranks)
    if group is None:
        return
    engine, rank = divmod(session.rank, num_ranks)
    assert find_differing_ranks(b"%d" % engine, group) == []
    assert find_differing_ranks(b"same" if engine else b"%d" % rank, group) == (
        [] if engine else [1]
    )


if __name__ == "__main__":
    with exit_with_outcome():
        main()
