"""Syncs the engine with the policy: sends the weights, and in some steps proves that they arrived.

There are two ways into the engine. vLLM's loader takes full tensors. Direct copies write rows into
the engine's tensors (reload.py); they are used once a proof has shown that the map from HF
rows to engine rows is right.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from itertools import chain

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.gather import gather_tensors, saved_tensors
from grpo_spmd.engine.reload import DirectLoad
from grpo_spmd.engine.weight_proof import fits, local_weights_hash, prove_weights, weights_id
from grpo_spmd.model.families.refusals import refuse_unmatched_names
from grpo_spmd.model.families.stored import constants
from grpo_spmd.model.lora import adapter_shards, base_parameters, gather_adapters, is_adapter
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, hf_named_parameters, hf_named_shards
from grpo_spmd.model.sharding import num_rows
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
        with closing(gather_tensors(shards, dtype, self._bucket_bytes, stats)) as gathered:
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
