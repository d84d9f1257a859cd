"""What a GPU refuses, or gets wrong in silence, and fake tensors accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from torch.utils.weak import WeakIdKeyDictionary

_PAGE = 4096
_HALF = (torch.bfloat16, torch.float16)
_ATTENTION = ("torch_attn._varlen_attn", "flash_attn._flash_attn_varlen_forward")
# Fakes of these take any devices; that of index_copy up to torch 2.11.
_ONE_DEVICE = ("c10d.", "_c10d_functional.", "fsdp.", "aten._fused_adamw_", "aten.index_copy")

_VALUES_TO_HOST = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::bincount",
)  # repeat_interleave too, unless it is told the size


class RefusedError(RuntimeError):
    """A GPU would have refused this, or done it wrong."""


def refuse(name: str, args: Any, kwargs: Any) -> None:
    """Raises RefusedError for an operator `namespace.name` of the device."""
    tensors = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
    if name in _ATTENTION:
        _refuse_attention(name, *args[:7])
    if name.startswith(_ONE_DEVICE):
        devices = {tensor.device.type for tensor in tensors}
        if len(devices) > 1:
            raise RefusedError(f"{name} is given tensors of {sorted(devices)}")
        if name.startswith("c10d.") and not all(tensor.is_contiguous() for tensor in tensors):
            raise RefusedError(
                f"{name} is given a tensor that is not contiguous, which NCCL takes for one that is"
            )


def _refuse_attention(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts_q: Tensor,
    starts_k: Tensor,
    longest_q: int,
    longest_k: int,
) -> None:
    """As flash-attn's kernels check their inputs."""
    if q.dtype not in _HALF or {k.dtype, v.dtype} != {q.dtype}:
        raise RefusedError(
            f"{name} takes float16 and bfloat16 alone, all three alike, not {q.dtype}, "
            f"{k.dtype}, {v.dtype}"
        )
    if {starts_q.dtype, starts_k.dtype} != {torch.int32}:
        raise RefusedError(f"{name} takes int32 bounds, not {starts_q.dtype}, {starts_k.dtype}")
    if len({item.device for item in (q, k, v, starts_q, starts_k)}) > 1:
        raise RefusedError(f"{name} is given tensors of several devices")
    if q.shape[-1] > 256 or q.shape[-1] % 8 or q.shape[1] % k.shape[1] or k.shape != v.shape:
        raise RefusedError(
            f"{name} does not take heads of shape {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if any(item.stride(-1) != 1 for item in (q, k, v)):
        raise RefusedError(f"{name} wants the last dimension contiguous")
    if longest_q <= 0 or longest_k <= 0:
        raise RefusedError(f"{name} is given lengths {longest_q}, {longest_k}")


def _has_mask(args: Any) -> bool:
    """Whether an operator of indices is given a mask, whose number of True decides its shape."""
    indices = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class HostMemory:
    """What is pinned, and copies that are still under way: a GPU reads and writes host memory
    later."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}  # bytes by address
        self._pages: set[int] = set()  # of them; a page is pinned once
        self._pinned_by_torch = WeakIdKeyDictionary()  # storages
        self.unpinned, self.unpinned_too_late = 0, 0
        self._reading: set[int] = set()  # device storages that copies to the host read
        self._writing: set[int] = set()  # host storages that they write

    def register(self, address: int, num_bytes: int, flags: int) -> int:
        """cudaHostRegister; not 0 is an error."""
        pages = range(address // _PAGE, (address + num_bytes - 1) // _PAGE + 1)
        if not num_bytes or self._pages & set(pages):
            return 712  # cudaErrorHostMemoryAlreadyRegistered
        self._pages |= set(pages)
        self.pinned[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        """cudaHostUnregister; not 0 is an error."""
        num_bytes = self.pinned.pop(address)
        bounds = (
            line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
        )
        if not any(int(start, 16) <= address < int(end, 16) for start, end in bounds):
            self.unpinned_too_late += 1  # whoever lets memory go cannot be told by an exception
        self.unpinned += 1
        self._pages -= set(range(address // _PAGE, (address + num_bytes - 1) // _PAGE + 1))
        return 0

    def synchronize(self, *_: Any) -> None:
        self._reading.clear()
        self._writing.clear()

    def note_copy(self, func: Any, args: Any, kwargs: Any) -> None:
        """Of a copy to the host that does not wait. The memory must be pinned, and that all of it
        and no more: torch's
        own comes in powers of two."""
        if func._schema.name != "aten::copy_" or not (
            args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        ):
            return
        to, of = args[:2]
        if to.device.type != "cpu" or of.device.type != "cuda":
            return
        storage = to.untyped_storage()
        if self.pinned.get(storage.data_ptr()) != storage.nbytes():
            raise RefusedError(
                f"an asynchronous copy into host memory of {storage.nbytes()} bytes that is not "
                "pinned"
            )
        if storage.nbytes() != of.nbytes:
            raise RefusedError(f"a staging buffer of {storage.nbytes()} bytes for {of.nbytes}")
        self._reading.add(of.untyped_storage()._cdata)
        self._writing.add(storage.data_ptr())

    def pin(self, tensor: Tensor) -> Tensor:
        """Tensor.pin_memory: a copy in memory that torch pins, and keeps while a copy reads it."""
        copy = tensor.clone()
        self._pinned_by_torch[copy.untyped_storage()] = True
        return copy

    def waits_for_device(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether the host waits until the device has done all that it was given before this.

        It does where a value or a shape comes back, and in each copy from or to the host but one
        that is told not to, of pinned memory."""
        name = func._schema.name
        if name in _VALUES_TO_HOST or (name.startswith("aten::index") and _has_mask(args)):
            return True
        if name not in ("aten::copy_", "aten::_to_copy"):
            return False
        if name == "aten::copy_":
            to, of = args[0].device.type, args[1]
            is_async = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        else:
            to = torch.device(kwargs.get("device") or args[0].device).type
            of, is_async = args[0], kwargs.get("non_blocking", False)
        if to == of.device.type:
            return False
        # Into the host note_copy has refused memory that is not pinned.
        is_pinned = to == "cpu" or of.untyped_storage() in self._pinned_by_torch
        if to == "cuda" and self.pinned.get(of.untyped_storage().data_ptr()):
            is_pinned = True
        return not (is_async and is_pinned)

    def check_reads(self, func: Any, inputs: list[Any]) -> None:
        if not self._writing or func._schema.name == "aten::copy_":
            return
        host_values = [
            item for item in inputs if isinstance(item, Tensor) and item.device.type == "cpu"
        ]
        if any(item.untyped_storage().data_ptr() in self._writing for item in host_values):
            raise RefusedError(
                "host memory is read while the device still writes it; synchronize first"
            )

    def check_idle(self) -> None:
        if self._writing:
            raise RefusedError(
                "the host goes on while the device still writes its memory; synchronize first"
            )

    def check_free(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._reading:
            raise RefusedError(
                "device memory is given back while a copy still reads it; synchronize first"
            )
