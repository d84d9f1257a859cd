"""Brings new weights into vLLM: by its own loader, by direct copies, or LoRA adapters alone.

A reload sends weights through vLLM's loader. An adapter is a pair of LoRA matrices, A and B, for
one layer."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, TensorPart, adapter_tensors
from grpo_spmd.model.families.build import as_config_error
from grpo_spmd.model.lora import hf_name
from grpo_spmd.model.sharding import as_matrix, num_rows


class WeightReload:
    """Reloads weights with vLLM's loader, and raises an error if a parameter got no new values.

    On a CPU it also works around vLLM's mistakes with packed weights."""

    def __init__(self, llm: Any, model: Any, on_cpu: bool) -> None:
        """`llm` is a vllm.LLM, `model` its model on this rank, whose `load_weights` is replaced by
        one that also notes which parameters it loaded."""
        self._llm = llm
        self._model = model
        self._on_cpu = on_cpu
        # Names of the parameters that the last reload loaded. None if the model does not say.
        self._loaded: set[str] | None = None
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> Any:
            """Replaces the model's `load_weights`: calls it and notes the names that it returns."""
            loaded = load_weights(weights)
            self._loaded = None if loaded is None else set(loaded)
            return loaded

        # If a reload lacks a parameter, vLLM only logs a warning. Record the loaded names instead,
        # and check them after each reload. Suppress the warning: it would also come at each sync
        # for modules without weights of their own, such as a tied lm_head.
        model.load_weights = recording
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
            lambda record: "Failed to load weights" not in record.getMessage()
        )

    def __call__(
        self, weights: Iterable[tuple[str, Tensor]], covered: Collection[str] = ()
    ) -> None:
        """Collective over the engine's ranks. Replaces every weight whose name is not in `covered`.

        `weights` yields (name in the checkpoint, full tensor) pairs. Raises EngineStateError if a
        weight was not replaced, ConfigError if vLLM's loader cannot take the tensors."""
        names = {hf_name(name) for name, _ in self._model.named_parameters()}.difference(covered)
        if not names:
            return
        self._loaded = None
        if self._on_cpu:
            self._llm.apply_model(before_reload_on_cpu)
        errors = as_config_error(
            self._llm.model_config.model,
            "cannot be loaded by vLLM",
            AssertionError,
            AttributeError,
            KeyError,
            ValueError,
        )
        # The engine's worker runs in this process, so `self._model` is the model that it reloads.
        with errors, _base_layers_alone(self._model):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._on_cpu:
            self._llm.apply_model(after_reload_on_cpu)
        if self._loaded is None:
            raise EngineStateError(
                "load_weights: this model class does not say which weights it loaded, so the sync "
                "cannot be proved"
            )
        missing = sorted(names - self._loaded)
        if missing:
            raise EngineStateError(
                f"load_weights: {len(missing)} engine parameters were not covered by the policy, "
                f"first {missing[0]}"
            )


def before_reload_on_cpu(model: nn.Module) -> None:
    """Removes the kernels of experts, so that vLLM makes them again after the reload.

    On a CPU vLLM packs experts only when it makes their kernel (0.32:
    UnquantizedFusedMoEMethod._setup_kernel). An old kernel would read the new weights, which are
    plain, as packed ones."""
    module: Any
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.quant_method.moe_kernel = None


@contextmanager
def _base_layers_alone(model: Any) -> Iterator[None]:
    """Replaces vLLM's LoRA wrappers by the layers that they wrap, until the block ends.

    In vLLM 0.26 the loader looks for weights in the wrapper itself and finds none. Later versions
    look in the wrapped layer."""
    manager = getattr(model, "lora_manager", None)
    wrappers = dict(manager.modules) if manager is not None else {}
    for name, wrapper in wrappers.items():
        model.set_submodule(name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            model.set_submodule(name, wrapper)


def after_reload_on_cpu(model: nn.Module) -> None:
    """Packs the weight of a tied lm_head again.

    A reload brings no tensor for a tied lm_head, so vLLM keeps its old packed copy (0.28 to 0.32:
    logprobs are wrong by 1 nat, without a message)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class DirectLoad:
    """Copies HF tensors straight into the direct layers of one engine, without vLLM's loader.

    vLLM's reload takes each layer apart, lets its loader slice and copy each tensor, and rebuilds
    the layer. If a layer's weights are unchanged rows of HF tensors, or are packed from such rows
    by one call, copying the rows gives the same result. A direct layer is a layer that such copies
    fill completely. weight_map.py says which HF rows lie where in the engine's tensors. The proof
    (weight_proof.py) uses the same map, so it could not detect copies to wrong places. WeightSync
    therefore copies directly only after a proof has passed on weights that came through vLLM's
    loader, which does not use the map.

    `names` are the HF tensors that it copies, by the names under which they are gathered. `covered`
    are the names of the engine parameters that it fills."""

    def __init__(
        self,
        model: nn.Module,
        tensors: Sequence[EngineTensor],
        names: Mapping[str, str],
        dtype: torch.dtype,
    ):
        """`tensors` describes all tensors of the engine, by a map that a proof has confirmed.
        `names` maps each HF name to the name under which the tensor is gathered: a tied lm_head is
        gathered under the embedding's name. `dtype` is the dtype of the gathered values."""
        self._tensors = _tensors_of_direct_layers(model, tensors, names, dtype)
        self._model = model
        self._dtype = dtype
        # Where the values of each gathered tensor go, by its name.
        self._targets: dict[str, list[tuple[EngineTensor, TensorPart]]] = {}
        for tensor in self._tensors:
            for tensor_part in () if _is_packed_copy(tensor) else tensor.parts:
                self._targets.setdefault(names[tensor_part.name], []).append((tensor, tensor_part))
        self.names = frozenset(self._targets)
        # Modules are compared by identity: two layers of one class are different layers.
        layers = {id(tensor.layer) for tensor in self._tensors}
        self.covered = {
            hf_name(name)
            for path, layer in model.named_modules()
            if id(layer) in layers
            for name, _ in layer.named_parameters(path, recurse=False)
        }

    @torch.no_grad()
    def __call__(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces the weights of all direct layers with the values in `weights`, gathered HF
        tensors by name.

        The tensors in `names` must come first. Later tensors are not drawn from the iterator: they
        are left to the caller. Raises EngineStateError if a tensor in `names` did not come."""
        incomplete = set(self.names)
        num_missing = Counter(id(tensor) for pairs in self._targets.values() for tensor, _ in pairs)
        # For each engine tensor that has got some but not all of its parts: the tensor into which
        # the parts are copied (`_destination`), by the id of the EngineTensor.
        rows_of: dict[int, Tensor] = {}
        for name, values in weights:
            matrix = as_matrix(values)
            for tensor, tensor_part in self._targets[name]:
                key = id(tensor)
                if key not in rows_of:
                    width = matrix.shape[1] // tensor.num_column_slices
                    rows_of[key] = _destination(tensor, width, self._dtype)
                _copy_part(tensor, tensor_part, rows_of[key], matrix, dtype=self._dtype)
                num_missing[key] -= 1
                if not num_missing[key]:
                    rows = rows_of.pop(key)
                    if tensor.values is None:
                        _pack_rows(tensor.layer, rows)
                    del rows
            incomplete.remove(name)
            # Drop the tensor before the next one is made.
            del values, matrix
            if not incomplete:
                break
        if incomplete:
            raise EngineStateError(f"load_weights: {min(incomplete)} was not covered by the policy")
        packed = {id(tensor.layer) for tensor in self._tensors if tensor.product is not None}
        for tensor in self._tensors:
            layer: Any = tensor.layer
            if _is_packed_copy(tensor):
                _pack(layer)
            # On a CPU vLLM also makes a packed copy of an embedding's weight. Unless the layer is
            # used as lm_head, that copy was not renewed and is stale: go back to the plain product.
            if hasattr(layer, "cpu_linear") and id(layer) not in packed:
                layer.cpu_linear = nn.functional.linear
        # vLLM's own reload also ends with this call. An attention layer has no weights of its own.
        for layer in self._model.modules():
            if _is_attention(layer):
                layer.process_weights_after_loading(self._dtype)


def _copy_part(
    tensor: EngineTensor,
    tensor_part: TensorPart,
    rows: Tensor,
    matrix: Tensor,
    *,
    dtype: torch.dtype,
) -> None:
    """Copies one part of an engine tensor into its `rows`, from the whole HF tensor. The values are
    rounded to `dtype`.

    Raises EngineStateError if the HF tensor does not fill the part."""
    first_column = tensor.column_slice * rows.shape[1]
    source = matrix[tensor_part.hf_start : tensor_part.hf_start + tensor_part.num_rows]
    source = source[:, first_column : first_column + rows.shape[1]]
    target = rows[tensor_part.start : tensor_part.start + tensor_part.num_rows]
    # A copy would spread a single row over all rows of the target.
    if not source.shape == target.shape == (tensor_part.num_rows, rows.shape[1]):
        raise EngineStateError(f"load_weights: {tensor.engine_name} was not covered by the policy")
    # A float32 bias of a bfloat16 engine gets values rounded to bfloat16, as from the loader.
    target.copy_(source if target.dtype == dtype else source.to(dtype))


def _destination(tensor: EngineTensor, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns the tensor [rows, columns] into which HF rows are copied for this engine tensor.

    It is the engine's own weight. If vLLM emptied that weight when it packed the layer (on a CPU),
    it is a new buffer, which is packed once it is full."""
    weight = tensor.layer.weight if tensor.values is None else tensor.values
    # True if packing has emptied the plain weight.
    if not weight.numel():
        return torch.empty(tensor.num_rows, columns, dtype=dtype, device=weight.device)
    rows: Tensor = weight.data.view(-1, columns)
    # vLLM pads a vocabulary with rows of zeros, which a sleep may have lost.
    rows[tensor.num_rows :].zero_()
    return rows


def _pack_rows(layer: Any, rows: Tensor) -> None:
    """Packs `rows`, the layer's complete weight, and frees them if they are a buffer."""
    parameter = layer.weight
    # vLLM packs `layer.weight`: put the buffer there.
    if not parameter.numel():
        layer.weight = nn.Parameter(rows, requires_grad=False)
    _pack(layer)
    # Packing emptied the weight. Put the old parameter back: others may refer to that object.
    if not layer.weight.numel():
        layer.weight = parameter


def _pack(layer: Any) -> None:
    """Has vLLM pack the layer's plain weight: store its values in the order in which the CPU's
    matrix product reads them."""
    # Free the old packed copy first, so that the new one reuses its memory, whose pages are mapped.
    layer.cpu_linear = None
    layer.quant_method.process_weights_after_loading(layer)


def _tensors_of_direct_layers(
    model: nn.Module, tensors: Sequence[EngineTensor], names: Mapping[str, str], dtype: torch.dtype
) -> list[EngineTensor]:
    """Returns the engine tensors of the layers that can be filled by copies alone.

    Each tensor of such a layer is plain, or packed by one call on the layer. No HF tensor in it is
    also needed by a layer that vLLM's loader must fill. Returns [] if the model has a layer that
    derives more matrices from the weights of other layers after loading (MLA)."""
    # vLLM's method of a layer of experts is a module too, which finishes that layer alone: copies
    # need it no more than the methods of other layers.
    methods = {id(getattr(layer, "quant_method", None)) for layer in model.modules()}
    if any(
        hasattr(layer, "process_weights_after_loading")
        and id(layer) not in methods
        and not _is_attention(layer)
        for layer in model.modules()
    ):
        return []
    copyable = [tensor for tensor in tensors if _is_copyable(tensor, dtype)]
    filled = {id(tensor.values) for tensor in copyable}
    filled |= {
        id(tensor.layer.weight)
        for tensor in copyable
        if tensor.values is None and not _is_packed_copy(tensor)
    }
    loader_layers = {
        id(layer)
        for layer in model.modules()
        if any(id(parameter) not in filled for parameter in layer.parameters(recurse=False))
    }
    loader_layers |= {id(tensor.layer) for tensor in tensors if not _is_copyable(tensor, dtype)}
    # A layer that shares an HF tensor with a layer of the loader must be filled by the loader too.
    # That can affect a third layer in turn: repeat until nothing changes.
    while True:
        shared = {
            names[tensor_part.name]
            for tensor in tensors
            if id(tensor.layer) in loader_layers
            for tensor_part in tensor.all_parts
        }
        sharing_layers = {
            id(tensor.layer)
            for tensor in tensors
            if any(names[tensor_part.name] in shared for tensor_part in tensor.all_parts)
        }
        if sharing_layers <= loader_layers:
            return [tensor for tensor in tensors if id(tensor.layer) not in loader_layers]
        loader_layers |= sharing_layers


def _is_copyable(tensor: EngineTensor, dtype: torch.dtype) -> bool:
    """Returns True if copies alone can fill the tensor with values of `dtype`."""
    layer = tensor.layer
    values = tensor.values
    if layer is None:
        return False
    if values is None:
        # A packed weight of another format, as of GLM4-MoE's routers, is left to vLLM's loader.
        return hasattr(layer, "cpu_linear") and bool(layer.weight.dtype == dtype)
    # The values must arrive bit by bit: no integer codes, no narrower float.
    is_exact = (
        values.is_floating_point() and values.itemsize >= dtype.itemsize and values.is_contiguous()
    )
    return is_exact and (tensor.num_rows == num_rows(values.shape) or _is_vocabulary(layer))


def _is_packed_copy(tensor: EngineTensor) -> bool:
    """Returns True if the EngineTensor is the packed copy of an lm_head's weight on a CPU.

    No rows are copied into such a copy. vLLM makes it from the layer's plain weight, which is
    another EngineTensor (the lm_head's own, or the embedding's if they are tied)."""
    return tensor.values is None and _is_vocabulary(tensor.layer)


def _is_vocabulary(layer: object) -> bool:
    """Returns True for an embedding or an lm_head, whose rows may be padded."""
    return hasattr(layer, "org_vocab_size")


def _is_attention(layer: nn.Module) -> bool:
    """Returns True for vLLM's plain attention layer, which has no parameters."""
    return type(layer).__name__ == "Attention" and not list(layer.parameters(recurse=False))


_ADAPTER_ID = 1


class EngineAdapters:
    """Replaces the LoRA adapters of an engine that keeps its base weights. No file is written.

    To vLLM all of them are a single adapter, which has A and B for many layers."""

    def __init__(self, model: Any, rank: int) -> None:
        """`model` is vLLM's model on this rank. `rank` is the rank of the matrices A and B."""
        from vllm.lora.request import LoRARequest

        self._model = model
        self._rank = rank
        # HF names of the layers that have an adapter now.
        self._layers: set[str] = set()
        # The path does not exist. vLLM would look for it only if a request came before the adapter
        # is loaded, and would then fail.
        self.request = LoRARequest("policy", _ADAPTER_ID, "/handed-over-in-memory")

    def load(self, adapters: Mapping[str, Tensor]) -> None:
        """Replaces all adapters with `adapters`: the matrices LAYER.lora_A.weight and
        LAYER.lora_B.weight by name.

        The caller checks the engine's state. Raises EngineStateError if the engine has no layer for
        a matrix."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.drop()
        suffix = ".lora_A.weight"
        layers = {name.removesuffix(suffix) for name in adapters if name.endswith(suffix)}
        # B already includes the factor alpha / rank. vLLM would multiply B by that factor in place:
        # pass the rank as alpha, so that vLLM's factor is 1.
        weights = {
            layer: LoRALayerWeights(
                layer,
                self._rank,
                self._rank,
                adapters[f"{layer}.lora_A.weight"],
                adapters[f"{layer}.lora_B.weight"],
            )
            for layer in layers
        }
        self._model.lora_manager.add_adapter(LoRAModel(_ADAPTER_ID, self._rank, weights))
        self._model.lora_manager.activate_adapter(_ADAPTER_ID)
        # vLLM silently ignores an adapter of an unknown layer: check which ones its layers hold.
        self._layers = layers
        missing = sorted(adapters.keys() - {tensor.engine_name for tensor in self.tensors()})
        if missing:
            raise EngineStateError(
                f"load_adapters: {len(missing)} adapters have no place in the engine, first "
                f"{missing[0]}; set model.lora.sync: merged"
            )

    def drop(self) -> None:
        """Removes the adapters, including the copy that vLLM keeps besides those in its layers."""
        self._layers = set()
        self._model.lora_manager.remove_adapter(_ADAPTER_ID)

    def tensors(self) -> list[EngineTensor]:
        """Returns descriptions of this rank's adapter tensors, under the policy's names.

        Layers that have no adapter are left out."""
        return adapter_tensors(self._model, self._rank, self._layers)
