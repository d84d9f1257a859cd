"""Policy -> engine: shards are cast, gathered in buckets of bounded size, and loaded as they arrive; then, now and then, the proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_spmd.distributed import all_gather_flat
from grpo_spmd.policy import Policy, hf_named_parameters, rows_per_rank
from grpo_spmd.proofs import prove_weights
from grpo_spmd.rollout import RolloutEngine


@dataclass
class SyncStats:
    """What one sync moved: bytes of the gathered buckets over all ranks, how many collectives that took; seconds of the proof, if any."""

    bytes: int = 0
    num_collectives: int = 0
    proof_s: float = 0.0


def sync_weights(policy: Policy, engine: RolloutEngine, policy_version: int, bucket_mib: int, prove_every_steps: int) -> SyncStats:
    """Collective. Wake the engine with exactly the policy's weights, as version `policy_version`, its caches emptied.

    That they arrived is proved tensor by tensor at the first sync of a process (of a new run, or of one that goes on), and where
    `policy_version` is a multiple of `prove_every_steps`; before the KV cache is back, so that the proof finds room on a GPU.

    Raises:
        EngineStateError: if an engine parameter was not covered.
        Rank0Error: on every rank, if an engine holds something other than the policy.
    """
    stats = SyncStats()
    engine.wake_weights()
    engine.load_weights(gather_full_tensors(policy, engine.dtype, bucket_mib << 20, stats), policy_version)
    if engine.proved_version is None or (prove_every_steps and policy_version % prove_every_steps == 0):
        stats.proof_s = prove_weights(policy, engine, policy_version)
    engine.wake_kv_cache()
    return stats


@torch.no_grad()
def gather_full_tensors(policy: Policy, dtype: torch.dtype, bucket_bytes: int, stats: SyncStats) -> Iterator[tuple[str, Tensor]]:
    """Collective: every rank must draw all of it, in step. Yields (HF checkpoint name, full tensor in `dtype`).

    What `DTensor.full_tensor()` does for one tensor, for a stream of them: the shards of all parameters, cast on the shard, form one
    long row, which is gathered in pieces of at most `bucket_bytes` over all ranks. A piece may end inside a tensor. Extra memory: two
    buckets (a piece here, the pieces of all ranks) and the tensor that is being put together. The yielded tensors are the receiver's:
    vLLM keeps them until a layer is complete, so they are never views of the reused buckets.
    """
    parameters = list(hf_named_parameters(policy))
    mesh = parameters[0][1].device_mesh
    ranks, device = mesh.size(), parameters[0][1].device
    total = sum(_padded_shard_numel(p, rows_per_rank(p)) for _, p in parameters)  # elements of one rank's row
    room = min(max(1, bucket_bytes // (ranks * dtype.itemsize)), total)
    piece = torch.empty(room, dtype=dtype, device=device)
    pieces = torch.empty(ranks * room, dtype=dtype, device=device)
    unsent = total

    # Two cursors over the same row: `send` fills the next piece, `full` takes tensors out of the pieces that have arrived.
    send = _ShardRow([p.to_local() for _, p in parameters], [_padded_shard_numel(p, rows_per_rank(p)) for _, p in parameters])
    arrived, taken = 0, 0  # elements of the current piece
    for name, parameter in parameters:
        width = _padded_shard_numel(parameter, rows_per_rank(parameter))
        full = torch.empty(ranks, width, dtype=dtype, device=device)
        filled = 0
        while filled < width:
            if taken == arrived:
                arrived, taken = min(room, unsent), 0
                send.fill(piece[:arrived])
                all_gather_flat(pieces[: ranks * arrived], piece[:arrived])
                unsent -= arrived
                stats.num_collectives += 1
                stats.bytes += ranks * arrived * dtype.itemsize
            count = min(width - filled, arrived - taken)
            full[:, filled : filled + count] = pieces[: ranks * arrived].view(ranks, arrived)[:, taken : taken + count]
            filled += count
            taken += count
        yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)


def _padded_shard_numel(parameter: Tensor, rows: int) -> int:
    return rows * (parameter.numel() // max(1, parameter.shape[0]))


class _ShardRow:
    """This rank's shards end to end, each padded with zeros to the size of a full one, read in order."""

    def __init__(self, shards: list[Tensor], padded: list[int]) -> None:
        self._shards, self._padded = [shard.reshape(-1) for shard in shards], padded
        self._index, self._offset = 0, 0

    def fill(self, out: Tensor) -> None:
        """The next `len(out)` elements of the row, cast to the dtype of `out`."""
        done = 0
        while done < len(out):
            shard, padded = self._shards[self._index], self._padded[self._index]
            count = min(len(out) - done, padded - self._offset)
            real = max(0, min(count, len(shard) - self._offset))
            out[done : done + real].copy_(shard[self._offset : self._offset + real])
            out[done + real : done + count].zero_()
            done += count
            self._offset += count
            if self._offset == padded:
                self._index, self._offset = self._index + 1, 0
