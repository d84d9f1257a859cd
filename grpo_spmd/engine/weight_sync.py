"""Syncs the engine with the policy: sends the weights, and in some steps proves that they arrived.

There are two ways into the engine. vLLM's loader takes full tensors. Direct copies write rows into
the engine's tensors (reload.py); they are used once a proof has shown that the map from HF
rows to engine rows is right.

A shard is one rank's rows of a tensor. A replica is a group of ranks that together hold the whole
policy once. A bucket is a buffer of bounded size for one all-gather.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.collectives import on_rank0, start_all_gather, wait_for
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.reload import DirectLoad
from grpo_spmd.engine.weight_proof import fits, local_weights_hash, prove_weights, weights_id
from grpo_spmd.model.families.build import SavedLayout, SavedTensor, constants
from grpo_spmd.model.families.refusals import refuse_unmatched_names
from grpo_spmd.model.lora import (
    Shard,
    adapter_shards,
    base_parameters,
    gather_adapters,
    is_adapter,
)
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, hf_named_parameters, hf_named_shards
from grpo_spmd.model.sharding import (
    as_matrix,
    num_rows,
    num_shards,
    rows_per_rank,
    shard_group,
)
from grpo_spmd.proofs.schedule import ProofSchedule
from grpo_spmd.records import SyncStats


class WeightSync:
    """Brings the policy's weights into the engine, and in some steps proves that they arrived."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        bucket_bytes: int,
        prove_every_steps: int | None = 0,
        offload: HostOffload | None = None,
        is_named: bool = False,
    ) -> None:
        """Raises ConfigError as `refuse_unsynced_tensors` does.

        If `prove_every_steps` is 0, only the first three syncs are proved (where tensors are never
        copied directly, only the first and the third). If it is None, no sync is proved, and
        therefore no tensor is copied directly. If `is_named`, the statistics of each sync have a
        hash of the weights (`weights_id`), which a rollout buffer needs."""
        refuse_unsynced_tensors(policy, engine)
        self._policy = policy
        self._engine = engine
        self._offload = offload
        self._bucket_bytes = bucket_bytes
        self._schedule = ProofSchedule(prove_every_steps) if prove_every_steps is not None else None
        self._is_named = is_named
        self._has_proved = False
        # None until a proof has shown that the map is right, and where nothing can be copied.
        self._direct: DirectLoad | None = None
        # False: `_direct` is new, and the next sync, its first, must be proved.
        self._direct_is_proved = True
        # True: the next due proof uses weights that all came through vLLM's loader. Due proofs
        # alternate between the loader and direct copies, so that both ways are proved regularly.
        self._loader_is_due = True
        # This rank's part of the hash of the weights that were last sent without adapters. If the
        # base stays in the engine it is sent once, and each sync adds the adapters' part.
        self._base_hash = 0

    def sync(self, step: int) -> SyncStats:
        """Collective. Wakes the engine with exactly the policy's weights, as version `step`.

        The engine's caches are empty afterwards. An engine that takes adapters alone gets the base
        weights only once, since its sleep (level 1) keeps them. With `offload` the optimizer and
        the other models are moved to host memory before the sync, and the policy after it. Returns
        the statistics of what was sent.

        A proof is due in the first and the third step of a process and in each step that is a
        multiple of `prove_every_steps`. It runs before the KV cache is allocated, which would take
        the memory that the proof needs. The weights of the first proof came through vLLM's loader,
        which does not use our map from HF rows to engine rows; if they match by the map, the map is
        right. The next sync copies directly and is proved too, due or not. Later syncs copy
        directly, without a proof unless one is due. Due proofs alternate: one proves the weights
        that direct copies left in the engine, the next sends all weights through vLLM's loader and
        proves these.

        Raises EngineStateError if an engine parameter got no new values. Raises Rank0Error on every
        rank if an engine holds other weights than the policy.
        """
        policy = self._policy
        engine = self._engine
        stats = SyncStats()
        if self._offload is not None:
            self._offload.before_sync()
        engine.wake_weights()
        is_due = self._schedule is not None and self._schedule.is_due(step)
        direct = None if is_due and self._loader_is_due else self._direct
        if engine.needs_weights:
            # Do not count a base that is sent only once: a resumed run sends it again, and would
            # otherwise report other numbers than a run without interruption.
            base_stats = SyncStats() if engine.takes_adapters else stats
            self._base_hash = self._send(step, base_stats, direct)
        local_hash = self._base_hash
        if engine.takes_adapters:
            local_hash += self._send_adapters(step, stats)
        if is_due or not self._direct_is_proved:
            stats.proof_s = prove_weights(policy, engine, step, is_first=not self._has_proved)
            self._has_proved = True
            self._direct_is_proved = True
            if is_due:
                self._loader_is_due = direct is not None
            if direct is None and not engine.takes_adapters:
                self._direct = self._proved_direct_load()
                self._direct_is_proved = self._direct is None
        if self._is_named:
            stats.weights_id = on_rank0(weights_id, local_hash)
        if self._offload is not None:
            self._offload.after_sync()
        engine.wake_kv_cache()
        return stats

    def _send(self, step: int, stats: SyncStats, direct: DirectLoad | None) -> int:
        """Collective. Sends the whole policy: the tensors of `direct` by direct copies, all others
        through vLLM's loader. Returns this rank's part of the hash of the weights, 0 if unused.

        All tensors come from one `gather_tensors`, so that every sync has the same number of
        collectives."""
        direct_names = direct.names if direct is not None else frozenset()
        # Gather the directly copied tensors first, since DirectLoad draws them first.
        shards = sorted(
            hf_named_shards(self._policy), key=lambda shard: shard.name not in direct_names
        )
        dtype = self._engine.dtype
        gathering = gather_tensors(
            shards, dtype, self._bucket_bytes, stats, copied_at_once=direct_names
        )
        with closing(gathering) as gathered:
            weights = chain(
                saved_tensors(gathered, self._policy.saved),
                # Every rank holds the constants whole. They are not cast: they are float32 in vLLM
                # too.
                constants(self._policy.model).items(),
            )
            self._engine.load_weights(weights, step, direct, gathered=gathered)
        return local_weights_hash(shards, self._engine.dtype) if self._is_named else 0

    def _send_adapters(self, step: int, stats: SyncStats) -> int:
        """Collective. Sends only the adapters. Returns this rank's part of their hash, 0 if
        unused."""
        shards = list(adapter_shards(self._policy.model, self._policy.lora))
        adapters = gather_adapters(shards, self._engine.dtype)
        stats.bytes += sum(tensor.nbytes for tensor in adapters.values())
        stats.num_collectives += 1
        self._engine.load_adapters(adapters, step)
        return local_weights_hash(shards, self._engine.dtype) if self._is_named else 0

    def _proved_direct_load(self) -> DirectLoad | None:
        """Collective. Returns a DirectLoad by the map that a proof has just confirmed.

        Returns None if no tensor can be copied directly, if the layout of some engine tensor is not
        known, or if the ranks would copy different tensors."""
        name_of = {id(parameter): name for name, parameter in hf_named_parameters(self._policy)}
        parameters = base_parameters(self._policy.model)
        names = {name: name_of[id(parameter)] for name, parameter in parameters.items()}
        saved = self._policy.saved
        all_fit = all(fits(tensor, parameters) for tensor in self._engine.tensors(names, saved))
        direct = self._engine.direct_load(names, saved) if all_fit else None
        copied = "\n".join(sorted(direct.names)) if direct is not None else ""
        hash_of_names = hashlib.sha256(copied.encode()).hexdigest()
        # The order in which tensors are gathered depends on these names: all ranks must have the
        # same.
        is_same = on_rank0(lambda hashes: len(set(hashes)) == 1, hash_of_names)
        return direct if copied and is_same else None


def refuse_unsynced_tensors(policy: Policy, engine: RolloutEngine) -> None:
    """Raises ConfigError, the same on all ranks, if policy and engine have different tensors.

    Otherwise the policy might train a tensor that the engine lacks, or a tensor of the engine might
    never be filled. An engine tensor of unknown layout may hold tensors of the policy that are
    found nowhere else, if it has enough rows for them (`refuse_unmatched_names`)."""
    parameters = base_parameters(policy.model)
    synced: set[int] = set()
    unknown: dict[str, int] = {}
    for tensor in engine.tensors(parameters, policy.saved):
        if is_adapter(tensor.parts[0].name):
            continue
        if fits(tensor, parameters):
            synced |= {id(parameters[row_part.name]) for row_part in tensor.all_parts}
        else:
            unknown[tensor.engine_name] = sum(row_part.num_hf_rows for row_part in tensor.all_parts)
    model_class = type(policy.model).__name__
    for name in sorted(constants(policy.model).keys() ^ engine.constants().keys()):
        raise ConfigError(
            f"model.path: {name}, a constant of {model_class}, is not in both the policy and "
            "vLLM's model: no sync would bring it"
        )
    # Keyed by parameter, so that a tied one counts once.
    missing = {
        id(p): (name, num_rows(p.shape)) for name, p in parameters.items() if id(p) not in synced
    }
    refuse_unmatched_names(model_class, dict(missing.values()), unknown)


def gather_tensors(
    shards: Sequence[Shard],
    dtype: torch.dtype,
    bucket_bytes: int,
    stats: SyncStats,
    *,
    copied_at_once: Collection[str] = (),
) -> Generator[tuple[str, Tensor], None, None]:
    """Collective. Yields (HF name, full tensor in `dtype`) of `shards`, one after the other.

    Every rank must draw all tensors, in step with the other ranks. vLLM keeps a tensor until its
    layer is complete. So each is a new tensor, never a view of a bucket, which is overwritten, or
    of a parameter (except for the names in `copied_at_once`). The caller should drop a tensor
    before it draws the next one. The sent bytes and the collectives are added to `stats`.

    Each rank's shards of all parameters, cast to `dtype` and laid end to end, form one long row.
    The rows are all-gathered over the ranks of a replica in buckets of at most `bucket_bytes`,
    which may end in the middle of a tensor. While the tensors of one bucket are used, the next one
    is being gathered, so the extra memory is two buckets and a tensor. There are no buckets if one
    rank holds the whole policy. Then the tensors named in `copied_at_once` are the parameters
    themselves, in the policy's dtype, which are rounded when the caller copies them.
    """
    # Do not decorate this with torch.no_grad: its wrapper would keep the yielded tensor alive while
    # the next one is made.
    if not shards:
        return
    num_ranks = num_shards(shards[0].parameter)
    if num_ranks == 1:
        for shard in shards:
            full = _local_values(shard)
            stats.bytes += len(full) * dtype.itemsize
            if shard.name not in copied_at_once:
                full = full.to(dtype, copy=True)
            yield shard.name, full.view(shard.parameter.shape)
            # Merged adapters make a new tensor: free this one before the next one is made.
            del full
        return
    widths = [rows_per_rank(s.parameter, num_ranks) * s.parameter.shape[1:].numel() for s in shards]
    # Elements of its row that each rank puts into one bucket. All ranks compute the same number.
    room = min(max(1, bucket_bytes // (num_ranks * dtype.itemsize)), sum(widths))
    with closing(_gather_buckets(shards, widths, dtype, room, stats)) as buckets:
        # The columns of the current bucket that were not copied yet. None are left at the start.
        bucket = torch.empty(0, 0)
        for (name, parameter, _), width in zip(shards, widths, strict=True):
            full = torch.empty(num_ranks, width, dtype=dtype, device=parameter.device)
            start = 0
            while start < width:
                if not bucket.shape[1]:
                    bucket = next(buckets)
                count = min(width - start, bucket.shape[1])
                full[:, start : start + count] = bucket[:, :count]
                bucket = bucket[:, count:]
                start += count
            # The last ranks' rows end in padding, which the slice leaves out.
            yield name, full.view(-1)[: parameter.numel()].view(parameter.shape)
            # Free this tensor before the next one is made.
            del full


def saved_tensors(
    tensors: Iterable[tuple[str, Tensor]], layout: SavedLayout
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) pairs as checkpoints store them: one tensor for each expert's matrix,
    where the policy has all experts of a layer in one parameter."""
    for name, tensor in tensors:
        matrix = as_matrix(tensor)
        for target in layout.get(name, [SavedTensor(name, 0, tuple(tensor.shape))]):
            rows = matrix[target.start : target.start + target.num_rows]
            yield target.name, rows.view(target.shape)
        # Free this tensor before the next one is made.
        del tensor, matrix, rows


def _local_values(shard: Shard) -> Tensor:
    """Returns this rank's values of a tensor, flattened to one dimension."""
    with torch.no_grad():
        return shard.local_rows().detach().reshape(-1)


def _gather_buckets(
    shards: Sequence[Shard], widths: list[int], dtype: torch.dtype, room: int, stats: SyncStats
) -> Generator[Tensor, None, None]:
    """Collective. Yields the long rows of all ranks in buckets [ranks, at most `room`].

    `widths` has the number of elements that each shard takes in the row, with its padding. A bucket
    is valid until the next one is drawn."""
    parameter = shards[0].parameter
    group = shard_group(parameter)
    rank = dist.get_rank(group)
    num_ranks = num_shards(parameter)
    total = sum(widths)
    num_buckets = -(-total // room)
    buffers = [
        torch.empty(num_ranks * room, dtype=dtype, device=parameter.device)
        for _ in range(min(2, num_buckets))
    ]
    row = _ShardRow(shards, widths)
    works: list[dist.Work] = []

    def start_bucket(number: int) -> Tensor:
        """Fills this rank's row of bucket `number`, starts the all-gather, and returns the
        bucket."""
        columns = min(room, total - number * room)
        bucket = buffers[number % 2][: num_ranks * columns].view(num_ranks, columns)
        row.fill(bucket[rank])
        works.extend(start_all_gather(bucket, group))
        stats.bytes += bucket.nbytes
        stats.num_collectives += 1
        return bucket

    try:
        next_bucket = start_bucket(0)
        for number in range(num_buckets):
            wait_for(works)
            bucket = next_bucket
            # Start the next all-gather first, so that it overlaps with the copies out of `bucket`.
            if number + 1 < num_buckets:
                next_bucket = start_bucket(number + 1)
            yield bucket
    finally:
        # If the caller failed, an all-gather is still in flight. Wait for it, or the next gather
        # would receive its messages. If another rank is gone, the wait raises RuntimeError, which
        # must not hide the caller's error.
        with suppress(RuntimeError):
            wait_for(works)


class _ShardRow:
    """This rank's long row: its shards end to end, each padded to full size.

    Shards are computed one at a time, as `fill` reads the row from start to end."""

    def __init__(self, shards: Iterable[Shard], widths: list[int]) -> None:
        """`widths` has the number of elements of each shard in the row, with its padding."""
        self._shards = zip(shards, widths, strict=True)
        # The values of the current shard that were not written yet.
        self._unread = torch.empty(0)
        # Number of elements of the current shard, padding included, that were not written yet.
        self._num_unread = 0

    def fill(self, out: Tensor) -> None:
        """Writes the row's next `len(out)` elements into `out`, rounded to its dtype.

        Places of padding are skipped."""
        while len(out):
            if not self._num_unread:
                # Free this shard's values before the next shard's are computed.
                self._unread = torch.empty(0)
                shard, self._num_unread = next(self._shards)
                self._unread = _local_values(shard)
            count = min(len(out), self._num_unread)
            num_values = min(len(self._unread), count)
            # A local name for `self._unread` would keep the shard's memory alive.
            out[:num_values].copy_(self._unread[:num_values])
            out = out[count:]
            self._unread = self._unread[count:]
            self._num_unread -= count
