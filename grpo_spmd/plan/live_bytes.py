"""Live bytes of fake tensors, by what they are for, with the peak of each moment."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

Parts = Counter[str]  # bytes by what they are for


class LiveBytes(TorchDispatchMode):
    """Follows every storage from the operator that makes it to its end, also through FSDP's `resize_`.

    What a storage is for is told by its shape and by when it was made: [..., V] is logits; what FSDP resizes, and a
    flat row made in the forward pass, holds gathered parameters; a parameter's shape, or a flat row, of the backward
    pass is a gradient; the rest are activations. `on_gpu`: two things that a CPU's run has or lacks are counted as on
    a GPU.
    """

    def __init__(self, parameter_shapes: set[tuple[int, ...]], vocabulary: int, *, on_gpu: bool) -> None:
        super().__init__()
        self._shapes, self._vocabulary, self._on_gpu = parameter_shapes, vocabulary, on_gpu
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._parts: Parts = Counter()
        self._now, self._peak, self._moment, self._is_backward = 0, 0, "built", False
        self.peaks: dict[str, Parts] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> LiveBytes:
        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            done = self._resize(storage, size)
            self._see(storage, "gathered parameters")
            return done

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010  FSDP frees and takes gathered parameters by it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*error)

    def begin(self, moment: str, *, is_backward: bool = False) -> None:
        """What is live from here on counts towards the peak of `moment`."""
        self._moment, self._peak, self._is_backward = moment, -1, is_backward
        self._note(0)

    def live(self) -> Parts:
        return Counter({what: size for what, size in self._parts.items() if size})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; its local operators come here then
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not self._is_cpu_alone(func, tensor):
                if self._is_sum_of_gradients(func, tensor):
                    self._hand_over(args, tensor.untyped_storage())
                self._see(tensor.untyped_storage(), self._kind(tensor))
        if not self._on_gpu and func is torch.ops.aten.add_.Tensor and args[0].dtype != args[1].dtype:
            self._note(args[0].nbytes)  # a CPU adds what it has cast before
        if self._on_gpu and "_varlen_attn_backward" in func.name():
            self._note(_workspace(args))
        return out

    def _is_cpu_alone(self, func: Any, tensor: torch.Tensor) -> bool:
        """The product that is added to the lm_head's float32 gradient: a GPU adds it in place
        (logprobs.add_product)."""
        is_product = func is torch.ops.aten.mm.default and tensor.dtype != torch.float32
        return self._on_gpu and is_product and tensor.ndim == 2 and tensor.shape[0] == self._vocabulary

    def _is_sum_of_gradients(self, func: Any, tensor: torch.Tensor) -> bool:
        """Of a tied parameter: autograd adds the second in place to the first, but fake ones to a new tensor."""
        return self._is_backward and func is torch.ops.aten.add.Tensor and tuple(tensor.shape) in self._shapes

    def _hand_over(self, args: Any, storage: torch.UntypedStorage) -> None:
        """What is counted for one of the arguments, where one is counted, is counted for `storage` from now on."""
        boxes = (self._known.get(each.untyped_storage()) for each in args[:2])
        if (box := next((box for box in boxes if box is not None and box[0] == storage.nbytes()), None)) is not None:
            moved = self._known[storage] = list(box)
            weakref.finalize(storage, self._gone, moved)
            box[0] = 0

    def _kind(self, tensor: torch.Tensor) -> str:
        shape = tuple(tensor.shape)
        is_whole = len(shape) > 1 and shape in self._shapes
        if self._is_backward and (is_whole or (len(shape) == 1 and tensor.is_floating_point())):
            return "gradients"
        # In "scores" nothing is gathered, and the lm_head's gradient is made.
        if self._moment == "gradients" or (is_whole and self._moment == "scores"):
            return "gradients"
        if len(shape) > 1 and shape[-1] == self._vocabulary:
            return "logits"
        if len(shape) == 1 and tensor.is_floating_point() and tensor.numel() > 1 << 16:
            return "gathered parameters"
        return "activations"

    def _see(self, storage: torch.UntypedStorage, kind: str) -> None:
        size, box = storage.nbytes(), self._known.get(storage)
        if box is None:
            box = self._known[storage] = [0, kind]
            weakref.finalize(storage, self._gone, box)
        if kind == "gathered parameters" and box[1] != kind and size != box[0]:  # made as something else, then resized
            self._parts[box[1]] -= box[0]
            self._parts[kind] += box[0]
            box[1] = kind
        self._now += size - box[0]
        self._parts[box[1]] += size - box[0]
        box[0] = size
        self._note(0)

    def _gone(self, box: list[Any]) -> None:
        self._now -= box[0]
        self._parts[box[1]] -= box[0]
        box[0] = 0

    def _note(self, workspace: int) -> None:
        if self._now + workspace > self._peak:
            self._peak = self._now + workspace
            self.peaks[self._moment] = self.live() + Counter({"activations": workspace})


def _workspace(args: Any) -> int:
    """Bytes that flash attention's backward kernel takes for itself (flash_api.cpp, `mha_varlen_bwd`): the query's
    gradient in float32, and with fewer kv heads than heads the gradients of key and value for each head."""
    _, query, key = args[:3]
    expanded = 0 if key.shape[1] == query.shape[1] else 2 * query.numel() * query.element_size()
    return int(4 * query.numel() + expanded)
