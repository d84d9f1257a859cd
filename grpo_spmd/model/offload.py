"""What of the trainer waits in host memory while the engine is awake."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_GIB = 2**30
OffloadableModel = tuple[nn.Module, torch.optim.Optimizer | None]


class HostOffload:
    """Moves to host memory while the engine is awake: nothing, the optimizer's state, or all of the trainer; and always
    the models that teach beside the rewards. Forward passes and optimizer steps raise while what they need is away, and
    so does policy.hf_named_parameters."""

    def __init__(
        self,
        what: bool | Literal["optimizer"],
        policy: nn.Module,
        reference: object,
        optimizer: torch.optim.Optimizer,
        beside: Sequence[OffloadableModel] = (),
    ) -> None:
        """`reference`: a model of its own; anything else is the policy with its adapters off, or none. `beside`: models
        of their own that are needed only while the engine sleeps (teachers, a critic), each with its optimizer."""
        self._what, self._policy, self._optimizer = what, policy, optimizer
        self._reference = reference if isinstance(reference, nn.Module) else None
        self._beside, self._storages = list(beside), HostStorages()
        models = (
            []
            if what is False
            else [policy]
            if self._reference is None
            else [policy, self._reference]
        )
        for model in [*models, *(model for model, _ in self._beside)]:
            # before FSDP's own hook, which would gather from the empty storage
            model.register_forward_pre_hook(lambda *_: self._refuse_if_away(), prepend=True)
        for stepped in [
            *([optimizer] if what is not False else ()),
            *(own for _, own in self._beside if own),
        ]:
            stepped.register_step_pre_hook(lambda *_: self._refuse_if_away())

    def before_sync(self) -> None:
        """What the sync does not read makes room for the engine's weights: the optimizer's state, the reference, models
        beside the policy."""
        if self._what is not False:
            self._storages.move_out("optimizer", optimizer_state(self._optimizer))
        if self._what is True and self._reference is not None:
            self._storages.move_out("reference", list(self._reference.parameters()))
        for number, (model, optimizer) in enumerate(self._beside):
            self._storages.move_out(f"beside.{number}", list(model.parameters()))
            if optimizer is not None:
                self._storages.move_out(f"beside.{number}.optimizer", optimizer_state(optimizer))

    def after_sync(self) -> None:
        """The policy has been gathered, and makes room for the KV cache."""
        if self._what is True:
            self._storages.move_out("policy", list(self._policy.parameters()))

    def to_device(self) -> dict[str, float]:
        """The engine sleeps: everything comes back. Returns `memory/host/offloaded_gib`, what had been away."""
        return {"memory/host/offloaded_gib": self._storages.bring_back() / _GIB}

    @property
    def held_bytes(self) -> int:
        """What policy, reference and optimizer take on the device now, and models beside them; with the copies on a
        CPU, its own host."""
        tensors: list[Tensor] = [*self._policy.parameters(), *optimizer_state(self._optimizer)]
        if self._reference is not None:
            tensors += self._reference.parameters()
        for model, optimizer in self._beside:
            tensors += [
                *model.parameters(),
                *(optimizer_state(optimizer) if optimizer is not None else ()),
            ]
        return held_bytes(tensors, self._storages)

    def _refuse_if_away(self) -> None:
        if away := self._storages.num_away:
            where = f"are in host memory (model.offload: {self._what}); HostOffload.to_device comes first"
            raise RuntimeError(f"{away} tensors of policy, reference or optimizer {where}")


# Tensors that wait in (pinned) host memory while something else needs the device.


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
            if (
                name in self._away or not storage.nbytes()
            ):  # a rank may have no row of a small tensor
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
            _bytes_of(storage).copy_(
                self._host[name], non_blocking=True
            )  # on the stream: what reads it comes later
        self._away.clear()
        return moved


class ParkedModel:
    """A model beside the policy (a reward model, say) that waits in host memory: `fetch` before it is
    used, `park` behind."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._storages = model, HostStorages()
        model.register_forward_pre_hook(
            lambda *_: self._refuse_if_away(), prepend=True
        )  # before FSDP's own

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
            raise RuntimeError(
                "the model's parameters are in host memory; ParkedModel.fetch comes first"
            )


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


# Host memory beside a GPU: for what is away while the engine is awake, and for a checkpoint's copies.


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes of host memory for a copy from `device`: beside a GPU pinned, in pages of its own, since a page is pinned
    once, and no more than asked for, where torch's own pinned memory comes in powers of two."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"can't allocate memory: {num_bytes / _GIB:.2f} GiB of the host ({error})"
        ) from None
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(pages, dtype=torch.uint8)
    if failure := int(
        torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 1)
    ):  # 1: portable
        raise RuntimeError(
            f"cannot pin {num_bytes / _GIB:.2f} GiB of host memory (CUDA error {failure})"
        )
    pages.address = host.data_ptr()
    return host


class _PinnedPages(mmap.mmap):
    """Unpinned while they are still there: whatever is mapped at their address afterwards could not be pinned. (By a
    weakref's callback they are gone already.)"""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)
