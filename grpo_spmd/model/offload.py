"""Moves the trainer's tensors to host memory while the engine is awake, and back.

A tensor whose values are in host memory is called away. Its storage on the device is then empty.
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
    """Keeps tensors of the trainer in host memory while the engine is awake.

    By `mode` (`model.offload`) these are: True: policy, reference model and optimizer state;
    "optimizer": the optimizer state; False: nothing. Further models (a teacher, a critic) are moved
    in every mode. While tensors are away, forward passes, optimizer steps and
    policy.hf_named_parameters raise RuntimeError."""

    def __init__(
        self,
        mode: bool | Literal["optimizer"],
        policy: nn.Module,
        reference: object,
        optimizer: torch.optim.Optimizer,
        rest: Sequence[OffloadableModel] = (),
    ) -> None:
        """`mode` is the config's `model.offload`. `reference` is moved only if it is a module of
        its own; it may also be None, or the policy with its adapters switched off. `rest` has the
        further models."""
        self._storages = HostStorages("model.offload; HostOffload.to_device comes first")
        self._mode = mode
        self._policy = policy
        self._optimizer = optimizer
        references: list[OffloadableModel] = []
        if isinstance(reference, nn.Module):
            references = [(reference, None)]
        self._models = [(policy, optimizer), *references, *rest]
        self._leaving = [*rest, *(references if mode is True else ())]
        """Models that `before_sync` moves out as a whole, with their optimizers."""
        for model, model_optimizer in self._leaving if mode is False else self._models:
            self._storages.guard(model, model_optimizer)

    def before_sync(self) -> None:
        """Moves out the tensors that the sync does not read, to make room for the engine's weights.
        Called before each sync."""
        if self._mode is not False:
            self._storages.move_out("optimizer", optimizer_state(self._optimizer))
        for number, (model, optimizer) in enumerate(self._leaving):
            self._storages.move_out(f"model.{number}", _tensors(model, optimizer))

    def after_sync(self) -> None:
        """Moves out the policy if the mode says so, to make room for the KV cache. Called after
        each sync, which reads the policy."""
        if self._mode is True:
            self._storages.move_out("policy", _tensors(self._policy))

    def to_device(self) -> dict[str, float]:
        """Moves all tensors back. Called once the engine sleeps.

        Returns the metric `memory/host/offloaded_gib`, the size of the tensors that were away."""
        return {"memory/host/offloaded_gib": self._storages.bring_back() / _GIB}

    @property
    def held_bytes(self) -> int:
        """Bytes that the trainer's tensors take on the device now; on a CPU the offloaded copies
        count too."""
        tensors = [tensor for model in self._models for tensor in _tensors(*model)]
        return self._storages.held_bytes(tensors)


class HostStorages:
    """Moves the storages of tensors to host memory (pinned for a GPU) and back.

    A tensor's storage is copied out and resized to 0 in place, so that FSDP's flat views of it and
    the optimizer's references stay valid. On a CPU, reading a tensor whose storage is empty ends
    the process with SIGSEGV: `guard` makes models and optimizers raise an error instead.
    """

    def __init__(self, hint: str) -> None:
        """`hint` is appended to errors: it says why tensors are away and what brings them back."""
        self._hint = hint
        # Buffers in host memory, by owner and number of the tensor. They are allocated once and
        # kept, since pinning is slow.
        self._host: dict[str, Tensor] = {}
        # The emptied storages of tensors that are away, by the same names.
        self._away: dict[str, torch.UntypedStorage] = {}

    def guard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Makes the model's forward pass and the optimizer's step raise RuntimeError while tensors
        are away."""
        # prepend: run before FSDP's own hook, which would gather from the empty storage.
        model.register_forward_pre_hook(lambda *_: self.refuse_if_away(), prepend=True)
        if optimizer is not None:
            optimizer.register_step_pre_hook(lambda *_: self.refuse_if_away())

    def refuse_if_away(self) -> None:
        """Raises RuntimeError if any tensor is away."""
        if self._away:
            raise RuntimeError(f"{len(self._away)} tensors are in host memory ({self._hint})")

    def move_out(self, owner: str, tensors: list[Tensor]) -> None:
        """Moves `tensors` to host memory. Tensors that are away already stay as they are.

        `owner` is a name for this list of tensors. At each call with this name the tensors must
        come in the same order, since each has a host buffer by its number in the list."""
        leaving: dict[str, torch.UntypedStorage] = {}
        for number, tensor in enumerate(tensors):
            name = f"{owner}.{number}"
            storage = storage_of(tensor)
            # A storage is empty if this rank has no row of a small tensor.
            if name in self._away or not storage.nbytes():
                continue
            if name not in self._host:
                self._host[name] = host_buffer(storage.nbytes(), storage.device)
            self._host[name].copy_(_bytes_of(storage), non_blocking=True)
            leaving[name] = storage
        if any(storage.device.type == "cuda" for storage in leaving.values()):
            # Wait until the copies are done before the storages are freed.
            torch.cuda.synchronize()
        for storage in leaving.values():
            storage.resize_(0)
        self._away |= leaving

    def bring_back(self) -> int:
        """Moves all tensors back. Returns their size in bytes."""
        num_bytes = 0
        for name, storage in self._away.items():
            copy = self._host[name]
            num_bytes += copy.nbytes
            storage.resize_(copy.nbytes)
            # No wait is needed: the copy is on the current stream, and so are the kernels that read
            # it later.
            _bytes_of(storage).copy_(copy, non_blocking=True)
        self._away.clear()
        return num_bytes

    def held_bytes(self, tensors: list[Tensor]) -> int:
        """Returns the bytes that `tensors` take on the device now, counting each storage once.

        On a CPU the host buffers are in the same memory, and are added."""
        unique = {storage._cdata: storage for storage in map(storage_of, tensors)}
        num_bytes = sum(storage.nbytes() for storage in unique.values())
        if tensors and tensors[0].device.type == "cpu":
            num_bytes += sum(copy.nbytes for copy in self._host.values())
        return num_bytes


class ParkedModel(HostStorages):
    """Keeps a model, such as a reward model, in host memory while it is not used.

    Call `fetch` before each use of the model, and `park` afterwards."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__("ParkedModel.fetch comes first")
        self._model = model
        self.guard(model)

    def fetch(self) -> None:
        """Moves the model's parameters to the device."""
        self.bring_back()

    def park(self) -> None:
        """Moves the model's parameters to host memory."""
        self.move_out("model", _tensors(self._model))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    """Returns the model's parameters, then the optimizer's state, in the same order at each
    call."""
    return [*model.parameters(), *(optimizer_state(optimizer) if optimizer is not None else ())]


def optimizer_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Returns the optimizer's moments in the same order at each call, [] before the first step.

    The step counts are scalars, which are not moved."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return [value for value in values if isinstance(value, Tensor) and value.ndim]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Returns the storage of a tensor or of a DTensor's shard."""
    # Not to_local(), which would create a view in autograd's graph.
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """Returns the storage as a uint8 tensor that shares its memory."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns a copy of the small host tensor `values` on `device`, without waiting for the device.

    The copy runs after the work that is queued on the device. Torch keeps the pinned intermediate
    copy until it has been read."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns a uint8 buffer in host memory for a copy from `device`, pinned if that is a GPU.

    Torch's own pinned memory comes in sizes of powers of two; this buffer has just the needed size.
    It has its own pages, since no page can be pinned twice. Raises RuntimeError if the host lacks
    the memory or the pages cannot be pinned."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    size_gib = num_bytes / _GIB
    try:
        pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(
            f"can't allocate memory: {size_gib:.2f} GiB of the host ({error})"
        ) from None
    # Linux kernels without huge pages refuse this advice.
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
    """Memory pages that are unpinned before they are unmapped.

    CUDA would otherwise take their address for pinned, and refuse to pin memory that is mapped
    there later. A weakref's callback would run too late, after the unmapping."""

    address = 0
    """The address of the pinned pages. 0 before they are pinned."""

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)
