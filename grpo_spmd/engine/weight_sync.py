"""Policy -> engine: what is sent at a sync and how, and when it is proved that it arrived."""

from __future__ import annotations

import hashlib
from contextlib import closing

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.engine.direct_load import DirectLoad
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.gather import (
    Cast,
    WeightDigest,
    full_tensors,
    gather_pieces,
    leading_pieces,
    no_cast,
    weights_id,
)
from grpo_spmd.engine.weight_proof import fits, prove_weights
from grpo_spmd.model.families.refusals import refuse_unsynced_tensors
from grpo_spmd.model.lora import adapter_shards, gather_adapters, hf_name
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, hf_named_parameters, hf_named_shards
from grpo_spmd.records import SyncStats


class WeightSync:
    """Brings the policy's weights into the engine, and now and then proves that they arrived."""

    def __init__(
        self,
        policy: Policy,
        engine: RolloutEngine,
        bucket_bytes: int,
        prove_every_steps: int = 0,
        offload: HostOffload | None = None,
        cast: Cast = no_cast,
        is_named: bool = False,
    ) -> None:
        """`prove_every_steps` 0: only the first syncs are proved. `is_named`: the stats name the weights, which a
        rollout buffer needs. Raises ConfigError as `refuse_unsynced_tensors` does."""
        refuse_unsynced_tensors(policy.model, engine.tensors, fits)
        self._policy, self._engine, self._offload, self._cast = policy, engine, offload, cast
        self._device = next(policy.model.parameters()).device
        self._bucket_bytes, self._prove_every_steps, self._is_named = (
            bucket_bytes,
            prove_every_steps,
            is_named,
        )
        self._has_proved = False
        self._direct: DirectLoad | None = None
        self._direct_is_proved = True
        self._loader_is_due = True  # of the due steps, every other one is the loader's
        self._base_totals = list[
            int
        ]()  # what a base that stays in the engine adds to the name of its weights

    def sync(self, step: int) -> SyncStats:
        """Collective. Wake the engine with exactly the policy's weights, as version `step`, its caches emptied.

        An engine that takes adapters by themselves gets the base once: it sleeps at level 1, which keeps it. The proof
        comes at the first sync of a process and where `step` is a multiple of `prove_every_steps`, before the KV cache
        takes the room that it needs. What the first one proves came through vLLM's loader, which knows nothing of our
        map. The sync after it copies directly, by the map that was proved right, and is proved too; so do those that
        follow, without. Of the steps at which a proof is due, one finds the weights as the direct copies of all steps
        before have left them, the next as vLLM's loader brings them, and so on in turn. `offload` moves out what the
        sync does not read before it, the policy after.
        Raises EngineStateError: an engine parameter was not covered; Rank0Error, on every rank: an engine holds
        something other than the policy.
        """
        policy, engine, stats, digest = self._policy, self._engine, SyncStats(), self._new_digest()
        if self._offload is not None:
            self._offload.before_sync()
        engine.wake_weights()
        is_due = not self._has_proved or (
            self._prove_every_steps > 0 and step % self._prove_every_steps == 0
        )
        direct = None if is_due and self._loader_is_due else self._direct
        if engine.needs_weights:
            # Of a base that stays nothing is counted: a step is then counted alike, whether the process is new or not.
            self._send(step, SyncStats() if engine.takes_adapters else stats, digest, direct)
            self._base_totals = (
                digest.totals() if digest is not None and engine.takes_adapters else []
            )
        if engine.takes_adapters:
            digest = self._new_digest()
            shards = list(adapter_shards(policy.model, policy.lora))
            if digest is not None:
                for name, parameter, shard in shards:
                    digest.add_shard(name, parameter, shard().to(engine.dtype))
            adapters = gather_adapters(shards, engine.dtype)
            stats.bytes += sum(tensor.nbytes for tensor in adapters.values())
            stats.num_collectives += 1
            engine.load_adapters(adapters, step)
            del adapters
        if is_due or not self._direct_is_proved:
            stats.proof_s = prove_weights(policy, engine, step, is_first=not self._has_proved)
            self._has_proved = self._direct_is_proved = True
            self._loader_is_due = direct is not None if is_due else self._loader_is_due
            if direct is None and not engine.takes_adapters:
                self._direct = self._proved_direct_load()
                self._direct_is_proved = self._direct is None
        if digest is not None:
            stats.weights_id = on_rank0(weights_id, self._base_totals + digest.totals())
        if self._offload is not None:
            self._offload.after_sync()
        engine.wake_kv_cache()
        return stats

    def _new_digest(self) -> WeightDigest | None:
        return WeightDigest(self._device) if self._is_named else None

    def _send(
        self, step: int, stats: SyncStats, digest: WeightDigest | None, direct: DirectLoad | None
    ) -> None:
        """Collective. The whole policy, directly as far as `direct` goes; in one row, so that it takes as many
        collectives either way."""
        engine, names = self._engine, direct.names if direct is not None else frozenset()
        entries = sorted(hf_named_shards(self._policy), key=lambda entry: entry[0] not in names)
        copied = [entry for entry in entries if entry[0] in names]
        how = engine.dtype, self._bucket_bytes, stats, self._cast, digest
        with closing(gather_pieces(entries, *how)) as pieces:
            engine.load_weights(
                full_tensors(pieces, engine.dtype), step, direct, leading_pieces(pieces, copied)
            )

    def _proved_direct_load(self) -> DirectLoad | None:
        """Collective. None where nothing can be copied, or where ranks would copy different tensors."""
        by_parameter = {
            id(parameter): name for name, parameter in hf_named_parameters(self._policy)
        }
        named = self._policy.model.named_parameters(remove_duplicate=False)
        parameters = {
            hf_name(name): parameter for name, parameter in named if id(parameter) in by_parameter
        }
        names = {name: by_parameter[id(parameter)] for name, parameter in parameters.items()}
        all_fit = all(fits(tensor, parameters) for tensor in self._engine.tensors(names))
        direct = self._engine.direct_load(names) if all_fit else None
        copied = "\n".join(sorted(direct.names)) if direct is not None else ""
        which = hashlib.sha256(copied.encode()).hexdigest()
        are_alike = on_rank0(lambda of_ranks: all(of == of_ranks[0] for of in of_ranks), which)
        return direct if copied and are_alike else None
