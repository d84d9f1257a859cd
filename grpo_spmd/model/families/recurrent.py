"""Layers that run along the row, by a convolution or a recurrent state, over packed rows.

Gated delta nets, Mamba and short convolutions carry values from one token of a row to the next, and
so from one sequence into the next. Here their forward pass gets each sequence by itself."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Functions in transformers' modeling files that kernels of other packages may replace.
_KERNEL_FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


def compute_by_sequence(model: nn.Module) -> None:
    """Makes what runs along the row in a model's layers begin anew with each sequence.

    That is each of a layer's own modules with a convolution in it, since all kinds of recurrent
    layers have one. What the module computes does not matter: its own forward pass is called for
    each run of equally long sequences, as if they were a batch."""
    for layers in model.modules():
        for layer in layers if isinstance(layers, nn.ModuleList) else ():
            for child in layer.children():
                if any(isinstance(module, nn.Conv1d) for module in child.children()):
                    SequenceWise(layer, child)


def can_import(module: str, name: str) -> bool:
    """Returns True if `module` can be imported and has `name`."""
    try:
        return hasattr(importlib.import_module(module), name)
    # A package that was built for another torch raises ImportError too.
    except ImportError:
        return False


@functools.cache
def _has_kernels() -> bool:
    """Returns True if transformers takes kernels for packed rows of gated delta nets.

    Without either package it takes code of its own, which ignores where sequences begin."""
    return can_import("causal_conv1d", "causal_conv1d_fn") and can_import(
        "fla.ops.gated_delta_rule", "chunk_gated_delta_rule"
    )


@contextmanager
def torch_functions(code: dict[str, Any]) -> Iterator[None]:
    """Returns a context manager. Within it the functions of transformers' modeling file `code`
    compute in PyTorch, even if a kernel has taken their place.

    transformers 5.19 chooses at import time; the kernels of flash-linear-attention refuse float32.
    """
    kernels = {
        name: function
        for name, function in code.items()
        if name in _KERNEL_FUNCTIONS and hasattr(function, "__wrapped__")
    }
    try:
        code.update({name: function.__wrapped__ for name, function in kernels.items()})
        yield
    finally:
        code.update(kernels)


class SequenceWise:
    """Replaces the forward passes of a decoder layer and of a module in it that runs along the row.

    Without a packed row both are as before."""

    def __init__(self, layer: nn.Module, module: nn.Module) -> None:
        self.layer = layer
        # The module's own forward pass, [number, length, D] to the same.
        self._module_forward: Callable[..., Tensor] = module.forward
        self._code = vars(sys.modules[type(module).__module__])
        self._layer_forward = layer.forward
        self._layout: Any = None  # of the packed row that is computed; None without one
        # Attributes of the instances hide the methods of their classes.
        layer.forward = self._note_layout
        module.forward = self._compute

    def observe(self, observer: Callable[..., Tensor]) -> None:
        """Has `observer` called in the place of the module's own forward pass, which it gets before
        the pass's arguments."""
        self._module_forward = functools.partial(observer, self._module_forward)

    def _note_layout(self, *args: Any, **options: Any) -> Any:
        """The layer's forward pass. Not every layer hands its options on (LFM2 does not).

        It is called again where activations are recomputed, with the same options."""
        self._layout = options.get("packed_layout")
        return self._layer_forward(*args, **options)

    # torch.compile would compile again for each set of lengths.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """The module's forward pass over a packed row [1, T, D]."""
        layout = self._layout
        if layout is not None and layout.backend != "sdpa" and _has_kernels():
            # The kernels begin anew at each sequence by themselves.
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            numbers = torch.searchsorted(layout.starts, positions, right=True) - 1
            options |= {"cu_seq_lens_q": layout.starts.long(), "seq_idx": numbers[None].int()}
            return self._module_forward(hidden_states, *args, **options)
        with torch_functions(self._code):
            # A plain pass of proofs/, which must not be computed by what it proves.
            if layout is None:
                return self._module_forward(hidden_states, *args, **options)
            rows = hidden_states[0].split([number * length for number, length in layout.runs])
            outputs = [
                self._module_forward(row.unflatten(0, run), *args, **options).flatten(0, 1)
                for row, run in zip(rows, layout.runs, strict=True)
            ]
        return torch.cat(outputs)[None]
