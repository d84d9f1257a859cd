"""Tensors that wait in (pinned) host memory while something else needs the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.model.host_memory import host_buffer


class HostStorages:
    """Moves the storage of tensors to host memory and back.

    A shard's storage is copied out and resized to 0 in place, so that FSDP's flat views of it and the optimizer's
    references stay what they are. Reading a tensor whose storage is empty ends the process with SIGSEGV on a CPU: what
    computes with one has to ask `is_away` first.
    """

    def __init__(self) -> None:
        self._host: dict[str, Tensor] = {}  # allocated once, since pinning is slow
        self._away: dict[str, torch.UntypedStorage] = {}

    @property
    def num_away(self) -> int:
        return len(self._away)

    @property
    def copies_bytes(self) -> int:
        """Of host memory."""
        return sum(copy.nbytes for copy in self._host.values())

    def move_out(self, owner: str, tensors: list[Tensor]) -> None:
        """`tensors` are in one order each time that `owner` is moved."""
        leaving: dict[str, torch.UntypedStorage] = {}
        for number, tensor in enumerate(tensors):
            name, storage = f"{owner}.{number}", storage_of(tensor)
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

    def bring_back(self) -> int:
        """Everything that is away. Returns its bytes."""
        moved = sum(self._host[name].nbytes for name in self._away)
        for name, storage in self._away.items():
            storage.resize_(self._host[name].nbytes)
            _bytes_of(storage).copy_(self._host[name], non_blocking=True)  # on the stream: what reads it comes later
        self._away.clear()
        return moved


class ParkedModel:
    """A model beside the policy (a reward model, say) that waits in host memory: `fetch` before it is
    used, `park` behind."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._storages = model, HostStorages()
        model.register_forward_pre_hook(lambda *_: self._refuse_if_away(), prepend=True)  # before FSDP's own

    def fetch(self) -> None:
        self._storages.bring_back()

    def park(self) -> None:
        self._storages.move_out("model", list(self._model.parameters()))

    @property
    def held_bytes(self) -> int:
        """What it takes on the device now; with the copies on a CPU, its own host."""
        return held_bytes(list(self._model.parameters()), self._storages)

    def _refuse_if_away(self) -> None:
        if self._storages.num_away:
            raise RuntimeError("the model's parameters are in host memory; ParkedModel.fetch comes first")


def held_bytes(tensors: list[Tensor], storages: HostStorages) -> int:
    """What `tensors` take on the device now, each storage once; on a CPU with the copies, whose host it is."""
    of_tensors = {storage._cdata: storage for storage in map(storage_of, tensors)}
    copies = storages.copies_bytes if tensors and tensors[0].device.type == "cpu" else 0
    return sum(storage.nbytes() for storage in of_tensors.values()) + copies


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Moments, in one order; none before the first step. Step counts, which are scalars, stay where they are."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    # to_local() would make a view for autograd
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
