"""Brings new weights into vLLM by its own means: all weights by its reload, or adapters alone.

A reload sends every weight through vLLM's loader. An adapter is a pair of LoRA tensors, A and B,
for one layer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, adapter_tensors
from grpo_spmd.model.families.build import as_config_error
from grpo_spmd.model.lora import hf_name


class WeightReload:
    """Reloads all weights by vLLM, mends the packed weights on a CPU, and reports missing ones."""

    def __init__(self, llm: Any, model: Any, on_cpu: bool) -> None:
        self._llm = llm
        self._model = model
        self._on_cpu = on_cpu
        # Names of the parameters that the last reload covered. None if the model does not say.
        self._loaded: set[str] | None = None
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = load_weights(weights)
            self._loaded = None if loaded is None else set(loaded)
            return loaded

        # vLLM only logs a warning for a parameter that an update does not cover, so the names that
        # it covers are recorded here. The same warning would come at each sync for modules without
        # weights of their own, such as a tied lm_head.
        model.load_weights = recording
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
            lambda record: "Failed to load weights" not in record.getMessage()
        )

    def __call__(
        self, weights: Iterable[tuple[str, Tensor]], covered: Collection[str] = ()
    ) -> None:
        """Collective over the engine's ranks. Replaces every weight that is not in `covered`.

        Raises EngineStateError if one was not replaced."""
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
        # The engine's workers are in this process, so that this model is theirs.
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
    """Takes the kernels off the experts.

    vLLM packs experts for a CPU only while their kernel is being made (0.32:
    UnquantizedFusedMoEMethod._setup_kernel), and would read the new weights as packed ones."""
    module: Any
    for module in model.modules():
        if hasattr(module, "w13_weight"):
            module.quant_method.moe_kernel = None


@contextmanager
def _base_layers_alone(model: Any) -> Iterator[None]:
    """Puts each layer that vLLM wrapped for LoRA in the place of its wrapper.

    0.26 looks for the wrapper's own weights and finds none; later versions ask the layer inside."""
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
    """Packs a tied lm_head again.

    It gets no weights of its own, so that its packed copy is the old one (0.28 to 0.32: wrong by
    1 nat, no message)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


_ADAPTER_ID = 1


class EngineAdapters:
    """Replaces the one LoRA adapter of an engine whose base weights stay. No file is written."""

    def __init__(self, model: Any, rank: int) -> None:
        from vllm.lora.request import LoRARequest

        self._model = model
        self._rank = rank
        # HF names of the layers that were given an adapter.
        self._layers: set[str] = set()
        # The folder does not exist. vLLM would only look for it if a request came before the
        # adapter was loaded, and would fail.
        self.request = LoRARequest("policy", _ADAPTER_ID, "/handed-over-in-memory")

    def load(self, adapters: Mapping[str, Tensor]) -> None:
        """Replaces the LoRA adapter by the A and B matrices of all its layers, by tensor name.

        The caller checks the engine's state. Raises EngineStateError if the engine has no layer for
        a matrix."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.drop()
        suffix = ".lora_A.weight"
        layers = {name.removesuffix(suffix) for name in adapters if name.endswith(suffix)}
        # B includes the factor alpha / rank. vLLM would multiply by alpha / rank in place: give it
        # equal numbers.
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
        # vLLM silently ignores an adapter with an unknown name: look at what its layers now hold.
        self._layers = layers
        missing = sorted(adapters.keys() - {tensor.engine_name for tensor in self.tensors()})
        if missing:
            raise EngineStateError(
                f"load_adapters: {len(missing)} adapters have no place in the engine, first "
                f"{missing[0]}; set model.lora.sync: merged"
            )

    def drop(self) -> None:
        """Frees the copy of the adapters that vLLM keeps in addition to the one in its layers."""
        self._layers = set()
        self._model.lora_manager.remove_adapter(_ADAPTER_ID)

    def tensors(self) -> list[EngineTensor]:
        """Returns this rank's adapter tensors, by the policy's names.

        It leaves out layers that were given no adapter."""
        return adapter_tensors(self._model, self._rank, self._layers)
