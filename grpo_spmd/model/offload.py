"""What of the trainer waits in host memory while the engine is awake."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.model.host_memory import host_buffer

_GIB = 2**30


class HostOffload:
    """Moves to (pinned) host memory while the engine is awake: nothing, the optimizer's state, or all of the trainer.

    A shard's storage is copied out and resized to 0 in place, so that FSDP's flat views of it and the optimizer's
    references stay what they are. Reading a tensor whose storage is empty ends the process with SIGSEGV on a CPU:
    forward passes and optimizer steps raise before that, and so does policy.hf_named_parameters.
    """

    def __init__(
        self, what: bool | Literal["optimizer"], policy: nn.Module, reference: object, optimizer: torch.optim.Optimizer
    ) -> None:
        """`reference`: a model of its own; anything else is the policy with its adapters off, or none."""
        self._what, self._policy, self._optimizer = what, policy, optimizer
        self._reference = reference if isinstance(reference, nn.Module) else None
        self._host: dict[str, Tensor] = {}  # allocated once, since pinning is slow
        self._away: dict[str, torch.UntypedStorage] = {}
        if what is not False:
            for model in [policy] if self._reference is None else [policy, self._reference]:
                # before FSDP's own hook, which would gather from the empty storage
                model.register_forward_pre_hook(lambda *_: self._refuse_if_away(), prepend=True)
            optimizer.register_step_pre_hook(lambda *_: self._refuse_if_away())

    def before_sync(self) -> None:
        """What the sync does not read makes room for the engine's weights: the optimizer's state, the reference."""
        if self._what is not False:
            self._move_out("optimizer", self._optimizer_state())
        if self._what is True and self._reference is not None:
            self._move_out("reference", list(self._reference.parameters()))

    def after_sync(self) -> None:
        """The policy has been gathered, and makes room for the KV cache."""
        if self._what is True:
            self._move_out("policy", list(self._policy.parameters()))

    def to_device(self) -> dict[str, float]:
        """The engine sleeps: everything comes back. Returns `memory/host/offloaded_gib`, what had been away."""
        moved = sum(self._host[name].nbytes for name in self._away)
        for name, storage in self._away.items():
            storage.resize_(self._host[name].nbytes)
            _bytes_of(storage).copy_(self._host[name], non_blocking=True)  # on the stream: what reads it comes later
        self._away.clear()
        return {"memory/host/offloaded_gib": moved / _GIB}

    @property
    def held_bytes(self) -> int:
        """What policy, reference and optimizer take on the device now; with the copies on a CPU, its own host."""
        tensors = [*self._policy.parameters(), *self._optimizer_state()]
        if self._reference is not None:
            tensors += self._reference.parameters()
        storages = {storage._cdata: storage for storage in map(_storage, tensors)}
        copies = self._host.values() if tensors[0].device.type == "cpu" else ()
        return sum(storage.nbytes() for storage in storages.values()) + sum(copy.nbytes for copy in copies)

    def _optimizer_state(self) -> list[Tensor]:
        """Moments, in one order; none before the first step. Step counts, which are scalars, stay where they are."""
        values = (value for state in self._optimizer.state.values() for value in state.values())
        return [value for value in values if isinstance(value, Tensor) and value.ndim]

    def _move_out(self, owner: str, tensors: list[Tensor]) -> None:
        leaving: dict[str, torch.UntypedStorage] = {}
        for number, tensor in enumerate(tensors):
            name, storage = f"{owner}.{number}", _storage(tensor)
            if name in self._away or not storage.nbytes():  # a rank may have no row of a small tensor
                continue
            if name not in self._host:
                self._host[name] = host_buffer(storage.nbytes(), storage.device)
            self._host[name].copy_(_bytes_of(storage), non_blocking=True)
            leaving[name] = storage
        if any(storage.device.type == "cuda" for storage in leaving.values()):
            torch.cuda.synchronize()  # the copies read what is freed next
        for storage in leaving.values():
            storage.resize_(0)
        self._away |= leaving

    def _refuse_if_away(self) -> None:
        if self._away:
            where = f"are in host memory (model.offload: {self._what}); HostOffload.to_device comes first"
            raise RuntimeError(f"{len(self._away)} tensors of policy, reference or optimizer {where}")


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    # to_local() would make a view for autograd
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
