"""A CUDA device that is not there: every tensor on it is a fake one, with a shadow on the CPU that
has its values.

Operators run twice: by torch's FakeTensorMode, which knows the shapes, dtypes and devices that
CUDA's kernels would give and refuses devices that are mixed, and on the shadows, so that what is
read from the device is what a run would read. The shadow belongs to the storage: views, in-place
operators and storages that are resized share it as they do on a device. On top stand the checks of
`refusals.py`, for what fake tensors accept and a GPU does not, and a count of live bytes and
collectives. CPU tensors are left alone, real as they are.

What it cannot show: kernels' own values, streams that race, deadlocks, fragmentation, NCCL's and
cuBLAS's workspace.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from tests.support.dry_run.kernels import FAKES, KERNELS
from tests.support.dry_run.refusals import HostMemory, refuse

_NO_MESSAGES = (
    torch.ops._c10d_functional.wait_tensor,
    torch.ops._c10d_functional._wrap_tensor_autograd,
)
_EMPTY = (
    "aten.empty",
    "aten.empty_like",
    "aten.empty_strided",
    "aten.new_empty",
    "aten.new_empty_strided",
)
_SETTLED_S = 0.1  # so long nothing was freed
_PLAIN = (
    Tensor,
    torch.nn.Parameter,
    FakeTensor,
)  # any other, such as DTensor, makes other operators of its own first


class Ledger:
    """Bytes in storages that live now, and at most since `reset`."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def add(self, num_bytes: int) -> None:
        self.live += num_bytes
        self.peak = max(self.peak, self.live)

    def reset(self) -> None:
        self.peak = self.live


class _Block:
    """One storage of the device."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.num_bytes = ledger, 0
        self.shadow: torch.UntypedStorage | None = None

    def resize(self, num_bytes: int) -> None:
        self.ledger.add(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes

    def free(self) -> None:
        self.resize(0)
        self.shadow = None


class Blocks:
    """The storages that are known, by identity."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._known = WeakIdKeyDictionary()

    def get(self, storage: torch.UntypedStorage) -> _Block | None:
        block: _Block | None = self._known.get(storage)
        return block

    def add(self, storage: torch.UntypedStorage) -> _Block:
        block = self._known[storage] = _Block(self.ledger)
        block.resize(storage.nbytes())
        weakref.finalize(storage, block.free)
        return block


class Meter(TorchDispatchMode):
    """Counts, while it is entered: bytes that live, and collectives as [name, bytes of each
    tensor]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.collectives = Blocks(), list[tuple[str, list[int]]]()
        self.ledger = self.blocks.ledger

    @contextlib.contextmanager
    def measure(self) -> Iterator[dict[str, Any]]:
        """Live and most bytes of the block, beyond those before it, and its collectives."""
        self.ledger.reset()
        old, num_collectives = self.ledger.live, len(self.collectives)
        result: dict[str, Any] = {}
        yield result
        self.settle()
        result |= {"live": self.ledger.live - old, "peak": self.ledger.peak - old}
        result["collectives"] = self.collectives[num_collectives:]

    def settle(self) -> None:
        """Nothing is freed by another thread here."""

    def note_collective(self, func: Any, args: Any) -> None:
        if (
            func.namespace not in ("c10d", "_c10d_functional")
            or func.overloadpacket in _NO_MESSAGES
        ):
            return
        tensors = [tensor for tensor in tree_flatten(args)[0] if isinstance(tensor, Tensor)]
        if not all(
            tensor.dtype in (torch.uint8, torch.int64) and not tensor.is_cuda for tensor in tensors
        ):  # plans
            self.collectives.append(
                (str(func.overloadpacket), [tensor.nbytes for tensor in tensors])
            )


class Recorder(Meter):
    """Of real tensors on a CPU what `FakeCuda` counts of fake ones."""

    def __init__(self) -> None:
        super().__init__()
        blocks, plain = self.blocks, torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            out = plain(storage, size)
            if (block := blocks.get(storage)) is not None:
                block.resize(size)
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]

    def settle(self) -> None:
        """A thread of gloo's holds the tensors of a collective for a moment after whoever waited
        for it goes on."""
        live, start = self.ledger.live, time.monotonic()
        while time.monotonic() - start < _SETTLED_S:
            time.sleep(_SETTLED_S / 10)
            if self.ledger.live != live:
                live, start = self.ledger.live, time.monotonic()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(item in _PLAIN for item in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        self.note_collective(func, args)
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if self.blocks.get(storage) is None:
                    self.blocks.add(storage)
        return out


class _Fake(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        """What says no asks `torch.cuda.is_available`, and would then run CUDA's kernels on
        constants."""
        return True


class FakeCuda(Meter):
    """The device, while it is entered; one in a process."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cuda", 0)
        self.host = HostMemory()
        self.operators = list[str]()  # that ran on the device, in their order
        self.waits = Counter[str]()  # times that the host waited for the device, by operator
        # It would make a tensor of the device for each fake one.
        fake_tensor.init_gpu_context = lambda device: None  # type: ignore[assignment]
        self._fake = _Fake(allow_non_fake_inputs=True)
        self._resize = torch.UntypedStorage.resize_
        self._watch_storages()

    def values(self, tensor: Tensor) -> Tensor:
        """A copy of the values of a tensor of the device."""
        return (
            self._shadow(tensor).clone()
            if isinstance(tensor, FakeTensor)
            else tensor.detach().clone()
        )

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if not all(item in _PLAIN for item in types):
            return NotImplemented
        kwargs = kwargs or {}
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for shapes, in a fake mode of its own
        if func is torch.ops.prim.device.default:
            return args[0].device
        inputs, spec = tree_flatten((args, kwargs))
        self.host.check_reads(func, inputs)
        if not any(self._is_ours(item) for item in inputs):
            self.note_collective(func, args)
            return func(*args, **kwargs)
        name = f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"
        self.operators.append(name)
        refuse(name, args, kwargs)
        if func.namespace == "c10d":
            return self._collective(func, inputs, spec)
        freed = [item for item in inputs if isinstance(item, FakeTensor) and self._is_freed(item)]
        if (
            freed
            and not func.is_view
            and func._schema.name not in ("aten::detach", "aten::set_", "aten::alias")
        ):
            raise RuntimeError(
                f"{name} reads a tensor {list(freed[0].shape)} whose memory was given back"
            )
        self.note_collective(func, args)
        out = self._by_fake(func, args, kwargs)
        if freed:
            self._free_again(freed)
            return out
        real = self._by_shadows(name, func, inputs, spec)
        self.host.note_copy(func, args, kwargs)
        self.waits[name] += self.host.waits_for_device(func, args, kwargs)
        return self._joined(out, real)

    # One operator

    def _is_ours(self, item: Any) -> bool:
        if isinstance(item, torch.UntypedStorage):
            return self.blocks.get(item) is not None
        if isinstance(item, torch.device):
            return item.type == "cuda"
        return isinstance(item, FakeTensor)

    def _is_freed(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0

    def _free_again(self, tensors: Sequence[Tensor]) -> None:
        """Torch makes a view by setting a storage, and that makes room for it."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            block = self.blocks.get(storage)
            assert block is not None
            self._resize(storage, block.num_bytes)

    def _by_fake(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            with self._fake:
                return FAKES.get(func, func)(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return None  # the values say it
        except Exception as error:
            inputs = [item for item in tree_flatten((args, kwargs))[0] if isinstance(item, Tensor)]
            of = ", ".join(f"{item.dtype} {list(item.shape)} on {item.device}" for item in inputs)
            error.add_note(f"{func} of {of}")
            raise

    def _by_shadows(self, name: str, func: Any, inputs: list[Any], spec: Any) -> Any:
        args, kwargs = tree_unflatten([self._on_host(item) for item in inputs], spec)
        out = KERNELS.get(name, func)(*args, **kwargs)
        if (
            func.namespace == "_c10d_functional"
        ):  # by the shadow's own storage, which is not the one that is kept
            out = tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, out)
        if name in _EMPTY:  # whatever was there before: not a number in any format
            out.untyped_storage().fill_(0xFF)
        return out

    def _on_host(self, item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device("cpu") if item.type == "cuda" else item
        if isinstance(item, torch.UntypedStorage):
            block = self.blocks.get(item)
            return item if block is None else block.shadow
        return self._shadow(item) if isinstance(item, FakeTensor) else item

    def _shadow(self, tensor: Tensor) -> Tensor:
        block = self.blocks.get(tensor.untyped_storage())
        assert block is not None, f"a tensor {list(tensor.shape)} that no operator made"
        assert block.shadow is not None
        location = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(block.shadow, *location)

    def _joined(self, out: Any, real: Any) -> Any:
        """What the caller gets: fake tensors where they are the device's, the real ones where they
        are the host's."""
        values, spec = tree_flatten(real)
        fakes = [None] * len(values) if out is None else tree_flatten(out)[0]
        return tree_unflatten(
            [self._placed(f, v) for f, v in zip(fakes, values, strict=True)], spec
        )

    def _placed(self, fake: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if fake is None:
            with self._fake:
                fake = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=self.device
                )
        if fake.device.type != "cuda":
            return value
        assert (fake.shape, fake.dtype) == (value.shape, value.dtype), (
            fake,
            value.shape,
            value.dtype,
        )
        storage = fake.untyped_storage()
        if (block := self.blocks.get(storage)) is None:
            block = self.blocks.add(storage)
            block.shadow = torch.UntypedStorage(storage.nbytes())
            self._shadow(fake).copy_(value)
        elif storage.nbytes() != block.num_bytes:  # an operator has resized it
            assert block.shadow is not None
            block.shadow.resize_(storage.nbytes())
            block.resize(storage.nbytes())
            self._shadow(fake).copy_(value)
        elif block.shadow is not None and value.untyped_storage()._cdata != block.shadow._cdata:
            self._shadow(fake).copy_(value)
        return fake

    def _collective(self, func: Any, inputs: list[Any], spec: Any) -> Any:
        """By the process group's CPU side, on the shadows: in a fake group the other ranks say what
        this one says."""
        args, _ = tree_unflatten(inputs, spec)
        self.note_collective(func, args)
        real_args, real_kwargs = tree_unflatten([self._on_host(item) for item in inputs], spec)
        out = func(*real_args, **real_kwargs)
        if func._schema.name == "c10d::_reduce_scatter_base_":
            # Rank 0's chunk. Torch 2.11's fake group writes nothing: old memory would be read.
            received, sent = real_args[:2]
            received.copy_(sent.flatten()[: received.numel()].view_as(received))
        return (args[0], out[1]) if isinstance(out, tuple) else out

    # The rest of a device

    def _watch_storages(self) -> None:
        blocks, host, plain = self.blocks, self.host, self._resize
        plain_device = torch.UntypedStorage.device

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            block = blocks.get(storage)
            if block is None:
                return plain(storage, size)
            host.check_free(storage)
            out = plain(storage, size)
            if size == 0:
                block.shadow = torch.UntypedStorage(0)
            else:  # what was in it is gone, as on a device: not a number in any format
                block.shadow = torch.UntypedStorage(size).fill_(0xFF)  # type: ignore[attr-defined]
            block.resize(size)
            return out

        def device(storage: torch.UntypedStorage) -> torch.device:
            return (
                plain_device.__get__(storage)
                if blocks.get(storage) is None
                else torch.device("cuda", 0)
            )

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        torch.UntypedStorage.device = property(device)  # type: ignore[assignment]
