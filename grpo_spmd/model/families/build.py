"""Builds transformers' models, and says where the rows of their parameters lie in a checkpoint.

An error of transformers becomes a ConfigError of one line. Layers with a convolution or a recurrent
state (gated delta nets, Mamba, short convolutions) carry values from one token of a packed row to
the next, and so from one sequence into the next. SequenceWise therefore calls their forward pass
for each sequence by itself.

transformers renames some parameters when it loads a checkpoint, and keeps all experts of a layer in
one parameter: `gate_up_proj` [experts, 2 * intermediate, hidden] has two matrices of each expert,
which are tensors of their own in the checkpoint. Which tensors go where is read from transformers'
own conversion, so that no name of a model is needed here."""

from __future__ import annotations

import functools
import importlib
import logging
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, revert_weight_conversion

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import (
    TEXT_PREFIX,
    first_line,
    has_experts,
    is_constant,
    load_config,
)
from grpo_spmd.model.sharding import as_matrix, num_rows

_log = logging.getLogger("grpo_spmd")
# What code raises for a model that it was not written for. Not OSError: that is the machine's.
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
_MACHINE_FAULT = re.compile(
    "out of memory|not enough memory|CUDA|NCCL|[Gg]loo|[Ss]ocket|shm|timed out|driver"
)
# Functions in transformers' modeling files that kernels of other packages may replace.
_KERNEL_FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule")


@contextmanager
def as_config_error(path: str, problem: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns an error inside its block into a ConfigError that reads "`path` `problem`: reason".

    It turns errors of the `kinds`; without any, those that code raises for a model that it was not
    written for. Other errors, and those of the machine (such as out of memory), are raised as they
    are. The traceback is logged at DEBUG."""
    caught = kinds or _MODEL_ERRORS
    try:
        yield
    except ConfigError:
        raise
    except caught as error:
        if isinstance(error, torch.OutOfMemoryError) or _MACHINE_FAULT.search(str(error)):
            raise
        _log.debug("model.path: %s %s", path, problem, exc_info=True)
        raise ConfigError(
            f"model.path: {path} {problem}: {type(error).__name__}: {first_line(error)}"
        ) from error


def build_hf_model(
    hf_config: Any,
    path: str,
    auto_class: Any = transformers.AutoModelForCausalLM,
    /,
    **options: Any,
) -> Any:
    """Returns transformers' model of a config, by default its causal LM, on the current device.

    Raises ConfigError if transformers cannot build it."""
    # On a CPU the loop over the experts is the fastest. On a GPU transformers takes grouped
    # products by default; asked for them by name, it would refuse a model without experts.
    if not torch.cuda.is_available():
        options.setdefault("experts_implementation", "eager")
    with as_config_error(path, "cannot be built by transformers"):
        try:
            model = auto_class.from_config(hf_config, trust_remote_code=False, **options)
        except KeyError as error:
            # Some models look the attention up among classes of their own, one for each kind.
            if error.args != (options.get("attn_implementation"),):
                raise
            raise ConfigError(
                f"model.path: {path} has its attention in code of its own, not through "
                "transformers' attention interface, which packed rows need"
            ) from None
    compute_by_sequence(model)
    return model


def decoder_layers(model: Any) -> nn.ModuleList:
    """Returns the decoder's list of layers. Raises ConfigError unless there is exactly one."""
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = [
        child
        for child in model.get_decoder().children()
        if isinstance(child, nn.ModuleList) and len(child) == depth
    ]
    if len(lists) != 1:
        raise ConfigError(
            f"model.path: {type(model).__name__}'s decoder has {len(lists)} lists of {depth} "
            "layers; only a causal decoder with one list of layers trains"
        )
    return lists[0]


def initialise_buffers(model: Any) -> None:
    """Fills the buffers that no checkpoint holds (such as rotary frequencies) as HF does.

    Raises ConfigError if a buffer stays unfilled."""
    buffers = {
        name: buffer
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and not is_constant(name)
    }
    for buffer in buffers.values():
        buffer.fill_(torch.nan)
    owners = {name.rpartition(".")[0] for name in buffers}
    for name, module in model.named_modules():
        if name in owners:
            model._init_weights(module)
    # Looked up again: HF may have replaced a buffer.
    for name, buffer in model.named_buffers():
        if name in buffers and buffer.isnan().any():
            raise ConfigError(
                f"model.path: do not know how to fill buffer {name} of {type(model).__name__}"
            )


def keep_hf_classes(path: str) -> Callable[[nn.Module], None]:
    """Saves transformers' classes, and returns a function that restores them.

    Call it before vLLM builds its model, and the result afterwards with that model. If vLLM has no
    class of its own for a model (its Transformers backend) it puts its compiler into HF's class,
    and nobody else can build or call such a model from then on (0.26 to 0.33: "Current vLLM config
    is not set"). The class is restored, and the engine's modules get a subclass with what vLLM had
    added."""
    AutoModelForCausalLM._model_mapping.get(type(load_config(path)), None)  # imports the classes
    saved: dict[type[Any], tuple[Any, dict[str, Any]]] = {
        hf_class: (hf_class.__bases__, dict(vars(hf_class)))
        for hf_class in _subclasses(PreTrainedModel)
    }

    def restore(model: nn.Module) -> None:
        """Restores HF's classes, and gives the modules of vLLM's `model` a subclass with vLLM's
        additions."""
        for hf_class, (bases, members) in saved.items():
            if hf_class.__bases__ == bases:
                continue
            added = {
                name: member
                for name, member in vars(hf_class).items()
                if members.get(name) is not member
            }
            added_bases = [base for base in hf_class.__bases__ if base not in bases]
            for name in added:
                if name in members:
                    setattr(hf_class, name, members[name])
                else:
                    delattr(hf_class, name)
            hf_class.__bases__ = bases
            engine_class = type(hf_class.__name__, (hf_class, *added_bases), added)
            for module in model.modules():
                if type(module) is hf_class:
                    module.__class__ = engine_class

    return restore


def _subclasses(base: type[Any]) -> Iterator[type[Any]]:
    """Yields all direct and indirect subclasses of a class."""
    for subclass in base.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def compute_by_sequence(model: nn.Module) -> None:
    """Makes convolutions and recurrent states in a model's layers start anew in each sequence of a
    packed row.

    It wraps each direct child of a decoder layer that has a convolution (SequenceWise), since all
    kinds of recurrent layers have one. What the child computes does not matter: its own forward
    pass is called for each run of equally long sequences, as if they were a batch."""
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
    """Returns True if transformers uses the kernels for gated delta nets that can run packed rows,
    of causal-conv1d and flash-linear-attention.

    If one of these packages is missing, it uses PyTorch code of its own, which ignores where
    sequences begin."""
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
    """Makes a recurrent module of a decoder layer compute each sequence of a packed row by itself.

    It replaces the forward methods of the layer, to get the row's layout, and of the module. In a
    pass without a packed row both compute what they did before."""

    def __init__(self, layer: nn.Module, module: nn.Module) -> None:
        """`module` is a child of `layer` with a convolution or a recurrent state."""
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
        """Makes each pass call observer(forward, *arguments) in place of the module's own `forward`
        method."""
        self._module_forward = functools.partial(observer, self._module_forward)

    def _note_layout(self, *args: Any, **options: Any) -> Any:
        """Replaces the layer's forward method: notes the layout of the packed row for `_compute`,
        and runs the original. Not every layer hands its options on to the module (LFM2 does not).

        Activation checkpointing calls this again with the same options."""
        self._layout = options.get("packed_layout")
        return self._layer_forward(*args, **options)

    # torch.compile would compile again for each set of lengths.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _compute(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Replaces the module's forward method: computes a packed row [1, T, D] so that each of its
        sequences starts anew, by the kernels if they are there, else as batches of equally long
        sequences."""
        layout = self._layout
        if layout is not None and layout.backend != "sdpa" and _has_kernels():
            # The kernels begin anew at each sequence by themselves.
            positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            numbers = torch.searchsorted(layout.starts, positions, right=True) - 1
            options |= {"cu_seq_lens_q": layout.starts.long(), "seq_idx": numbers[None].int()}
            return self._module_forward(hidden_states, *args, **options)
        with torch_functions(self._code):
            # A plain forward pass of proofs/, with which packed rows are compared: it must not use
            # the code that it checks.
            if layout is None:
                return self._module_forward(hidden_states, *args, **options)
            rows = hidden_states[0].split([number * length for number, length in layout.runs])
            outputs = [
                self._module_forward(row.unflatten(0, run), *args, **options).flatten(0, 1)
                for row, run in zip(rows, layout.runs, strict=True)
            ]
        return torch.cat(outputs)[None]


class SavedTensor(NamedTuple):
    """Describes a tensor of a checkpoint that holds consecutive rows of one of the model's
    parameters, such as one expert's matrix.

    All dimensions of a parameter but the last count as rows."""

    name: str
    """Name in the checkpoint."""
    start: int
    """Index, in the parameter, of the first row that this tensor holds."""
    shape: tuple[int, ...]
    """Shape in the checkpoint."""

    @property
    def num_rows(self) -> int:
        """Number of the parameter's rows that this tensor holds."""
        return num_rows(self.shape)


# By the name of a parameter: the tensors of a checkpoint that hold its rows.
SavedLayout = dict[str, list[SavedTensor]]


def build_on_meta(path: str) -> Any:
    """Returns transformers' causal LM of a folder or hub id without memory for its weights."""
    with torch.device("meta"):
        return build_hf_model(load_config(path), path)


def is_mixture(model: Any) -> bool:
    """Returns True if a parameter has the matrices of several experts."""
    return any(has_experts(parameter.shape) for parameter in model.parameters())


def constants(model: Any, prefix: str = "") -> dict[str, Tensor]:
    """Returns the model's constants by name: buffers that a checkpoint holds and nothing trains
    (`is_constant`). They are whole and equal on all ranks."""
    buffers = model.named_buffers(prefix)
    return {name: buffer for name, buffer in buffers if is_constant(name)}


def saved_layout(model: Any) -> SavedLayout:
    """Returns, for each parameter that transformers would not save as one tensor of its own name,
    the tensors that it would save.

    Returns {} for a model without experts, whose engine takes the parameters' own names. Raises
    ConfigError if a saved tensor would not have consecutive rows of one parameter."""
    if not is_mixture(model):
        return {}
    with torch.device("cpu"):  # the model may be under construction on the meta device
        return _layout_of(model)


def _layout_of(model: Any) -> SavedLayout:
    """Returns the SavedLayout of a model with experts, by converting a model whose rows are numbers
    as transformers does when it saves a model."""
    parameters = dict(model.named_parameters())
    names = list(parameters)
    # Each row of the whole model gets a number, and the conversion shows where the numbers go.
    sizes = [num_rows(parameter.shape) for parameter in parameters.values()]
    starts = list(accumulate(sizes, initial=0))
    numbers = {}
    for (name, parameter), (start, end) in zip(parameters.items(), pairwise(starts), strict=True):
        dimensions = parameter.shape[:-1] or parameter.shape
        # Two columns, which take no memory: transformers drops a dimension of size 1.
        rows = torch.arange(start, end).view(*dimensions, 1)
        numbers[name] = rows.expand(*dimensions, 2)
    layout: SavedLayout = {}
    for name, converted in revert_weight_conversion(model, numbers).items():
        rows = converted[..., 0].flatten()
        row = int(rows[0])
        position = bisect_right(starts, row) - 1
        parameter_name = names[position]
        is_ordered = torch.equal(rows, torch.arange(row, row + len(rows)))
        if not is_ordered or rows[-1] >= starts[position + 1]:
            raise ConfigError(
                f"model.path: {type(model).__name__} has {name} in another order than it is stored;"
                " only rows that stay together can be synced"
            )
        if name != parameter_name:
            parameter = parameters[parameter_name]
            columns = parameter.shape[-1:] if parameter.dim() > 1 else ()
            saved = SavedTensor(name, row - starts[position], (*converted.shape[:-1], *columns))
            layout.setdefault(parameter_name, []).append(saved)
    return layout


def stored_layout(model: Any, stored: Iterable[str], saved: SavedLayout) -> SavedLayout:
    """Returns which tensors of a checkpoint hold those parameters of the model that it does not
    have under their own names. `stored` are the names of all its tensors.

    transformers renames some parameters when it loads them (GPT-NeoX's lm_head). A decoder may have
    been stored without the rest of its model. `saved` is the model's `saved_layout`."""
    parameters = dict(model.named_parameters())
    stored = set(stored)
    missing = parameters.keys() - stored
    if not missing:
        return {}
    # A decoder that was stored by itself lacks the prefix of the whole model, and one that is a
    # part of a larger model has a longer one.
    prefix = f"{model.base_model_prefix}."
    layout: SavedLayout = {}
    for name, tensors in saved.items():
        for other_prefix in (prefix, "", TEXT_PREFIX):
            candidates = [
                tensor._replace(name=tensor.name.replace(prefix, other_prefix, 1))
                for tensor in tensors
            ]
            if name in missing and all(tensor.name in stored for tensor in candidates):
                layout.setdefault(name, candidates)
    renamings = [
        renaming
        for renaming in get_model_conversion_mapping(model)
        if isinstance(renaming, WeightRenaming)
    ]
    for name in stored - parameters.keys():
        renamed = name
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        for candidate in (renamed, f"{prefix}{renamed}"):
            if candidate in missing:
                whole = SavedTensor(name, 0, tuple(parameters[candidate].shape))
                layout.setdefault(candidate, [whole])
    return layout


def read_rows(
    saved: SavedTensor, files: Mapping[str, Path], folder: Path, *, rows: Tensor, start: int
) -> None:
    """Copies values from a tensor on disk into those of a parameter's `rows` that it holds.

    `rows` are consecutive rows of the parameter, such as this rank's shard; `start` is the index of
    the first one in the parameter. `files` has the file of each tensor by name. Raises ConfigError
    if the tensor is missing or has another shape."""
    if saved.name not in files:
        raise ConfigError(f"model.path: {folder} has no tensor {saved.name}")
    begin = max(start, saved.start)
    end = min(start + len(rows), saved.start + saved.num_rows)
    # Open the file again for each tensor: the pages that were read from a memory-mapped file count
    # as this process's memory until the file is closed.
    with safe_open(files[saved.name], framework="pt") as file:
        tensor = file.get_slice(saved.name)
        shape = list(tensor.get_shape())
        if shape != list(saved.shape):
            raise ConfigError(
                f"model.path: {saved.name} has shape {shape} in {folder}, but the model asks for "
                f"{list(saved.shape)}"
            )
        if begin < end:
            # All dimensions but the last are rows: an index of the first may have several.
            height = saved.num_rows // shape[0]
            first, last = (begin - saved.start) // height, -(-(end - saved.start) // height)
            values = as_matrix(tensor[first:last])[begin - saved.start - first * height :]
            rows[begin - start : end - start] = values[: end - begin]
