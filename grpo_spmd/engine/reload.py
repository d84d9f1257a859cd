"""Brings new weights into vLLM with vLLM's own functions: all weights, or LoRA adapters alone.

A reload sends weights through vLLM's loader. An adapter is a pair of LoRA matrices, A and B, for
one layer."""

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
    """Reloads weights with vLLM's loader, and raises an error if a parameter got no new values.

    On a CPU it also works around vLLM's mistakes with packed weights."""

    def __init__(self, llm: Any, model: Any, on_cpu: bool) -> None:
        self._llm = llm
        self._model = model
        self._on_cpu = on_cpu
        # Names of the parameters that the last reload loaded. None if the model does not say.
        self._loaded: set[str] | None = None
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> Any:
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


_ADAPTER_ID = 1


class EngineAdapters:
    """Replaces the LoRA adapters of an engine that keeps its base weights. No file is written.

    To vLLM they are one adapter, which has A and B for many layers."""

    def __init__(self, model: Any, rank: int) -> None:
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
