"""Moves the trainer's tensors to host memory while the engine is awake, and back.

A tensor is away while it is in host memory. Its storage on the device is then empty.
"""

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
"""A model that is needed only while the engine sleeps (a teacher, a critic), and its optimizer."""


class HostOffload:
    """Moves nothing, the optimizer's state, or all of the trainer to host memory.

    These tensors are away while the engine is awake. Those of the further models (a teacher, a
    critic) are so in every mode. Forward passes, optimizer steps and policy.hf_named_parameters
    raise RuntimeError while tensors that they need are away."""

    def __init__(
        self,
        mode: bool | Literal["optimizer"],
        policy: nn.Module,
        reference: object,
        optimizer: torch.optim.Optimizer,
        rest: Sequence[OffloadableModel] = (),
    ) -> None:
        """`mode` is `model.offload`. A `reference` is moved only if it is a model of its own. It
        may also be None, or the policy with its adapters off. `rest` has further models."""
        self._storages = HostStorages("model.offload; HostOffload.to_device comes first")
        self._mode = mode
        self._policy = policy
        self._optimizer = optimizer
        references: list[OffloadableModel] = []
        if isinstance(reference, nn.Module):
            references = [(reference, None)]
        self._models = [(policy, optimizer), *references, *rest]
        self._leaving = [*rest, *(references if mode is True else ())]
        """Models that leave as a whole before the sync."""
        for model, model_optimizer in self._leaving if mode is False else self._models:
            self._storages.guard(model, model_optimizer)

    def before_sync(self) -> None:
        """Moves out what the sync does not read, to make room for the engine's weights."""
        if self._mode is not False:
            self._storages.move_out("optimizer", optimizer_state(self._optimizer))
        for number, (model, optimizer) in enumerate(self._leaving):
            self._storages.move_out(f"model.{number}", _tensors(model, optimizer))

    def after_sync(self) -> None:
        """Moves out the policy, which has been gathered, to make room for the KV cache."""
        if self._mode is True:
            self._storages.move_out("policy", _tensors(self._policy))

    def to_device(self) -> dict[str, float]:
        """Moves everything back while the engine sleeps.

        Returns `memory/host/offloaded_gib`, the size of what was away."""
        return {"memory/host/offloaded_gib": self._storages.bring_back() / _GIB}

    @property
    def held_bytes(self) -> int:
        """Memory of the trainer on the device now; on a CPU with the copies in host memory."""
        tensors = [tensor for model in self._models for tensor in _tensors(*model)]
        return self._storages.held_bytes(tensors)


class HostStorages:
    """Moves the storages of tensors to (pinned) host memory and back.

    A shard's storage is copied out and resized to 0 in place, so that FSDP's flat views of it and
    the optimizer's references stay valid. To read a tensor whose storage is empty ends the process
    with SIGSEGV on a CPU: `guard` has models and optimizers refuse that.
    """

    def __init__(self, hint: str) -> None:
        """`hint` says in errors why tensors are away, and what brings them back."""
        self._hint = hint
        # Buffers in host memory, allocated once, since pinning is slow.
        self._host: dict[str, Tensor] = {}
        # The emptied storages, by the same names.
        self._away: dict[str, torch.UntypedStorage] = {}

    def guard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes the model's forward pass and the optimizer's step raise RuntimeError while tensors
        are away."""
        # Before FSDP's own hook, which would gather from the empty storage.
        model.register_forward_pre_hook(lambda *_: self.refuse_if_away(), prepend=True)
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self.refuse_if_away())

    def refuse_if_away(self) -> None:
        """Raises RuntimeError if a tensor is away."""
        if self._away:
            raise RuntimeError(f"{len(self._away)} tensors are in host memory ({self._hint})")

    def move_out(self, owner: str, tensors: list[Tensor]) -> None:
        """Moves `tensors` out. The tensors of one `owner` must always come in the same order."""
        leaving: dict[str, torch.UntypedStorage] = {}
        for number, tensor in enumerate(tensors):
            name = f"{owner}.{number}"
            storage = storage_of(tensor)
            # A rank may have no row of a small tensor.
            if name in self._away or not storage.nbytes():
                continue
            if name not in self._host:
                self._host[name] = host_buffer(storage.nbytes(), storage.device)
            self._host[name].copy_(_bytes_of(storage), non_blocking=True)
            leaving[name] = storage
        if any(storage.device.type == "cuda" for storage in leaving.values()):
            # The copies must have read the storages before they are freed.
            torch.cuda.synchronize()
        for storage in leaving.values():
            storage.resize_(0)
        self._away |= leaving

    def bring_back(self) -> int:
        """Moves everything back. Returns its bytes."""
        num_bytes = 0
        for name, storage in self._away.items():
            copy = self._host[name]
            num_bytes += copy.nbytes
            storage.resize_(copy.nbytes)
            # The copy is on the current stream, so that later kernels read it in full.
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._away.clear()
        return num_bytes

    def held_bytes(self, tensors: list[Tensor]) -> int:
        """Returns the memory of `tensors` on the device now, each storage once.

        On a CPU the copies are in the same memory, and count too."""
        unique = {storage._cdata: storage for storage in map(storage_of, tensors)}
        num_bytes = sum(storage.nbytes() for storage in unique.values())
        if tensors and tensors[0].device.type == "cpu":
            num_bytes += sum(copy.nbytes for copy in self._host.values())
        return num_bytes


class ParkedModel(HostStorages):
    """A model that waits in host memory when unused, such as a reward model.

    Call `fetch` before its use and `park` after it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("ParkedModel.fetch comes first")
        self._model = model
        self.guard(model)

    def fetch(self) -> None:
        """Moves its parameters to the device."""
        self.bring_back()

    def park(self) -> None:
        """Moves its parameters to host memory."""
        self.move_out("model", _tensors(self._model))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Returns the parameters, then the optimizer's state, in one order."""
    return [*model.parameters(), *(optimizer_state(optimizer) if optimizer is not None else ())]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the moments in one order, none before the first step.

    Step counts are scalars, and stay where they are."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor or of a DTensor's shard."""
    # Not to_local(), which would make a view for autograd.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns a small tensor of the host on `device`, after the work that the device has by now.

    The host does not wait for the device. Torch keeps the pinned copy until it has been read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns bytes of host memory for a copy from `device`, pinned for a GPU.

    Pinned memory is in pages of its own, since a page is pinned once, and has just this size:
    torch's own pinned memory comes in powers of two."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    size_gib = num_bytes / _GIB
    try:
        pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"can't allocate memory: {size_gib:.2f} GiB of the host ({error})"
        ) from None
    # Some kernels have no huge pages.
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(pages, dtype=torch.uint8)
    portable = 1  # the flag cudaHostRegisterPortable
    code = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, portable))
    if code:
        raise RuntimeError(f"cannot pin {size_gib:.2f} GiB of host memory (CUDA error {code})")
    pages.address = host.data_ptr()
    return host


class _PinnedPages(mmap.mmap):
    """Pages that unpin themselves before they go.

    Whatever is mapped at their address afterwards could not be pinned otherwise. A weakref's
    callback would run too late."""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)
