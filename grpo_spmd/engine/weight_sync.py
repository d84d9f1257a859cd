"""Policy -> engine: shards are cast, gathered in buckets of bounded size, and loaded as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.schema import SYNC_BUCKET_MIB
from grpo_spmd.distributed.collectives import start_all_gather, wait_for
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_proof import fits, prove_weights, sum_of_bits, weights_id
from grpo_spmd.model.families.tensors import refuse_holes
from grpo_spmd.model.lora import Shard, adapter_shards, gather_adapters
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, hf_named_shards
from grpo_spmd.model.sharding import num_shards, rows_per_rank, shard_group
from grpo_spmd.records import SyncStats

# (HF name, this rank's rows) -> what the engine is to get of them; rounded to its dtype on the way into the bucket.
Cast = Callable[[str, Tensor], Tensor]


class WeightSync:
    """Brings the policy's weights into the engine, and now and then proves that they arrived."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        bucket_mib: int | None,
        prove_every_steps: int = 0,
        offload: HostOffload | None = None,
        cast: Cast = lambda _, shard: shard,
    ) -> None:
        """`bucket_mib`: `rollout.weight_sync_bucket_mib`. `prove_every_steps` 0: only the first sync is proved. Raises
        ConfigError as `refuse_holes` does."""
        refuse_holes(policy.model, engine.tensors, fits)
        self._policy, self._engine, self._offload, self._cast = policy, engine, offload, cast
        mib = bucket_mib or SYNC_BUCKET_MIB[next(policy.model.parameters()).device.type]
        self._bucket_bytes, self._prove_every_steps = mib << 20, prove_every_steps
        self._has_proved = False
        self._frozen_sum: int | None = None  # of the bits that never change, those of a base under adapters

    def sync(self, step: int) -> SyncStats:
        """Collective. Wake the engine with exactly the policy's weights, as version `step`, its caches emptied.

        An engine that takes adapters by themselves gets the base once: it sleeps at level 1, which keeps it. The proof
        comes at the first sync of a process and where `step` is a multiple of `prove_every_steps`, before the KV cache
        takes the room that it needs. `offload` moves out what the sync does not read before it, the policy after.
        Raises EngineStateError: an engine parameter was not covered; Rank0Error, on every rank: an engine holds
        something other than the policy.
        """
        policy, engine, stats = self._policy, self._engine, SyncStats()
        if self._offload is not None:
            self._offload.before_sync()
        engine.wake_weights()
        if engine.needs_weights:
            # Of a base that stays nothing is counted: a step is then counted alike, whether the process is new or not.
            counted = SyncStats() if engine.takes_adapters else stats
            with closing(gather_full_tensors(policy, engine.dtype, self._bucket_bytes, counted, self._cast)) as weights:
                engine.load_weights(weights, step)
        if engine.takes_adapters:
            adapters = gather_adapters(list(adapter_shards(policy.model, policy.lora)), engine.dtype)
            stats.bytes += sum(tensor.nbytes for tensor in adapters.values())
            stats.num_collectives += 1
            engine.load_adapters(adapters, step)
            del adapters
        if not self._has_proved or (self._prove_every_steps and step % self._prove_every_steps == 0):
            stats.proof_s = prove_weights(policy, engine, step, is_first=not self._has_proved)
            self._has_proved = True
        if self._frozen_sum is None:
            self._frozen_sum = sum_of_bits(policy, trained=False)
        stats.weights_id = weights_id(policy, self._frozen_sum)
        if self._offload is not None:
            self._offload.after_sync()
        engine.wake_kv_cache()
        return stats


def gather_full_tensors(
    policy: Policy, dtype: torch.dtype, bucket_bytes: int, stats: SyncStats, cast: Cast = lambda _, shard: shard
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. Every rank must draw all of it, in step. Yields (HF checkpoint name, full tensor in `dtype`).

    The shards of all parameters, cast, form one long row. It is gathered over the ranks of a replica in pieces of at
    most `bucket_bytes`, which may end inside a tensor; the next is on its way while one is in use. Extra memory: two
    buckets and the tensor that is being put together. vLLM keeps the tensors until a layer is complete, so they are
    never views of the reused buckets, nor of the parameters where one rank holds the whole policy. (torch.no_grad as a
    decorator would keep the tensor before alive while the next is made.)
    """
    entries = list(hf_named_shards(policy))
    parameter = entries[0][1]
    ranks = num_shards(parameter)
    if ranks == 1:
        for name, parameter, shard in entries:
            stats.bytes += parameter.numel() * dtype.itemsize
            yield name, cast(name, shard().detach()).to(dtype, copy=True)
        return
    widths = [rows_per_rank(parameter) * parameter.shape[1:].numel() for _, parameter, _ in entries]
    total = sum(widths)
    room = min(max(1, bucket_bytes // (ranks * dtype.itemsize)), total)
    buckets = [torch.empty(ranks, room, dtype=dtype, device=parameter.device) for _ in range(min(2, -(-total // room)))]
    row = _ShardRow(entries, widths, cast)
    with closing(_gathered_pieces(row, buckets, total, shard_group(parameter), stats)) as pieces:
        piece = buckets[0][:, :0]  # what is left of the current one
        for (name, parameter, _), width in zip(entries, widths, strict=True):
            full = torch.empty(ranks, width, dtype=dtype, device=parameter.device)
            filled = 0
            while filled < width:
                if not piece.shape[1]:
                    piece = next(pieces)
                count = min(width - filled, piece.shape[1])
                full[:, filled : filled + count] = piece[:, :count]
                piece = piece[:, count:]
                filled += count
            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
            del full  # before the next one is made


def _gathered_pieces(
    row: _ShardRow, buckets: list[Tensor], total: int, group: dist.ProcessGroup, stats: SyncStats
) -> Generator[Tensor, None, None]:
    """The rows of all ranks, `total` elements each, in pieces [ranks, columns] that are valid until the next one."""
    ranks, room = buckets[0].shape
    num_pieces = -(-total // room)
    on_its_way: list[dist.Work] = []

    def start(number: int) -> Tensor:
        columns = min(room, total - number * room)
        piece = buckets[number % 2].view(-1)[: ranks * columns].view(ranks, columns)
        row.fill(piece[dist.get_rank(group)])
        on_its_way.extend(start_all_gather(piece, group))
        stats.num_collectives += 1
        stats.bytes += piece.nbytes
        return piece

    try:
        following = start(0)
        for number in range(1, num_pieces + 1):
            wait_for(on_its_way)
            piece = following
            if number < num_pieces:
                following = start(number)
            yield piece
    finally:  # where the receiver failed: leave no message behind that the next gather would take for its own
        with suppress(RuntimeError):  # from a peer that is gone; the receiver has an error of its own to tell
            wait_for(on_its_way)


class _ShardRow:
    """This rank's shards end to end, each padded to full size; one is asked for, and cast, when its turn comes."""

    def __init__(self, entries: Iterable[Shard], widths: list[int], cast: Cast) -> None:
        self._coming, self._cast = zip(entries, widths, strict=True), cast
        self._shard, self._left = torch.empty(0), 0  # what is still to be read of one; that with its padding

    def fill(self, out: Tensor) -> None:
        """The next `len(out)` elements, rounded to its dtype; those of padding are left as they are."""
        while len(out):
            if not self._left:
                self._shard = torch.empty(0)  # freed before the next one is made
                (name, _, shard), self._left = next(self._coming)
                self._shard = self._cast(name, shard().detach()).reshape(-1)
            count = min(len(out), self._left)
            # no name for either: it would keep the shard alive
            out[: min(count, len(self._shard))].copy_(self._shard[:count])
            out, self._shard, self._left = out[count:], self._shard[count:], self._left - count
