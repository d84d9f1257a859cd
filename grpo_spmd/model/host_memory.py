"""Host memory beside a GPU: for what is away while the engine is awake, and for a checkpoint's copies."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

_GIB = 2**30


def host_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Bytes of host memory for a copy from `device`: beside a GPU pinned, in pages of its own, since a page is pinned
    once, and no more than asked for, where torch's own pinned memory comes in powers of two."""
    if device.type != "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        pages = _PinnedPages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"can't allocate memory: {num_bytes / _GIB:.2f} GiB of the host ({error})") from None
    with suppress(OSError):  # a kernel without huge pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    host = torch.frombuffer(pages, dtype=torch.uint8)
    if failure := int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), num_bytes, 1)):  # 1: portable
        raise RuntimeError(f"cannot pin {num_bytes / _GIB:.2f} GiB of host memory (CUDA error {failure})")
    pages.address = host.data_ptr()
    return host


class _PinnedPages(mmap.mmap):
    """Unpinned while they are still there: whatever is mapped at their address afterwards could not be pinned. (By a
    weakref's callback they are gone already.)"""

    address = 0

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.address)
