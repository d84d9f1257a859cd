"""Worker: the bucketed gather against torch's own full_tensor(), for many bucket sizes; and the exchange and rank-0 collectives.

python -m tests.workers.gather CONFIG
"""

from __future__ import annotations

import math
import sys

import torch

from grpo_spmd.config import load_config
from grpo_spmd.distributed import Rank0Error, end_session, exchange_bytes, exit_with_outcome, gather_bytes, on_rank0, start_session
from grpo_spmd.policy import build_policy, hf_named_parameters
from grpo_spmd.weight_sync import SyncStats, gather_full_tensors


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    policy = build_policy(config.model, 1.0, session)
    expected = {name: parameter.full_tensor() for name, parameter in hf_named_parameters(policy)}
    numel = sum(t.numel() for t in expected.values())
    for dtype in (torch.float32, torch.bfloat16):
        for bucket_bytes in (6000, 100_000, 1 << 30):
            stats = SyncStats()
            kept = list(gather_full_tensors(policy, dtype, bucket_bytes, stats))  # kept, as vLLM keeps them: none may be overwritten
            assert [name for name, _ in kept] == list(expected)
            for name, tensor in kept:
                assert torch.equal(tensor, expected[name].to(dtype)), (name, bucket_bytes)
            piece = bucket_bytes // (session.world_size * dtype.itemsize) * session.world_size * dtype.itemsize
            assert stats.num_collectives <= math.ceil(stats.bytes / piece), stats
            padding = session.world_size * sum(t[:1].numel() for t in expected.values())
            assert numel <= stats.bytes / dtype.itemsize <= numel + padding, stats

    payloads = [f"{session.rank}->{to}".encode() * (to * 3) for to in range(session.world_size)]  # of uneven length, some empty
    assert exchange_bytes(payloads) == [f"{frm}->{session.rank}".encode() * (session.rank * 3) for frm in range(session.world_size)]
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
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
