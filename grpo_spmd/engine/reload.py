"""vLLM's reload of all weights, and what it leaves undone on the CPU or does not report."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, adapter_tensors
from grpo_spmd.model.families.build import as_config_error
from grpo_spmd.model.lora import hf_name


class WeightReload:
    def __init__(self, llm: Any, model: Any, on_cpu: bool) -> None:
        self._llm, self._model, self._on_cpu = llm, model, on_cpu
        self._loaded: set[str] | None = None  # names, of the last reload
        load_weights = model.load_weights

        def recording(weights: Iterable[tuple[str, Tensor]]) -> Any:
            loaded = load_weights(weights)
            self._loaded = None if loaded is None else set(loaded)
            return loaded

        # For a parameter that an update does not cover vLLM only logs a warning; what it covers is returned here. The
        # same warning would come at each sync for modules without weights of their own, such as a tied lm_head.
        model.load_weights = recording
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
            lambda record: "Failed to load weights" not in record.getMessage()
        )

    def __call__(
        self, weights: Iterable[tuple[str, Tensor]], covered: Collection[str] = ()
    ) -> None:
        """Collective over the engine's ranks. Replace every weight but those in `covered`, which the engine has got, or
        raise EngineStateError."""
        if names := {hf_name(name) for name, _ in self._model.named_parameters()}.difference(
            covered
        ):
            self._reload(weights, names)

    def _reload(self, weights: Iterable[tuple[str, Tensor]], names: set[str]) -> None:
        self._loaded = None
        if self._on_cpu:
            self._llm.apply_model(before_reload_on_cpu)
        path, kinds = (
            self._llm.model_config.model,
            (AssertionError, AttributeError, KeyError, ValueError),
        )
        with as_config_error(path, "cannot be loaded by vLLM", *kinds):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        if self._on_cpu:
            self._llm.apply_model(after_reload_on_cpu)
        if self._loaded is None:
            text = "load_weights: this model class does not say which weights it loaded, so the sync cannot be proved"
            raise EngineStateError(text)
        if missing := sorted(names - self._loaded):
            which = f"{len(missing)} engine parameters"
            raise EngineStateError(
                f"load_weights: {which} were not covered by the policy, first {missing[0]}"
            )


def before_reload_on_cpu(model: nn.Module) -> None:
    """Take the kernel from unquantised MoE layers: it packs their weights when it is built, and an update that finds
    one does not pack anew (0.28 to 0.32: wrong logprobs, no message)."""
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None and type(method).__name__.startswith(
            "Unquantized"
        ):
            method._kernel_before_reload, method.moe_kernel = method.moe_kernel, None


def after_reload_on_cpu(model: nn.Module) -> None:
    """Pack a tied lm_head anew: it gets no weights of its own, so that its packed copy is the old one (0.28 to 0.32:
    wrong by 1 nat, no message)."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):
            method.process_weights_after_loading(module)
        if getattr(method, "_kernel_before_reload", None) is not None:
            if method.moe_kernel is None:  # the layer got no weights: keep what it had
                method.moe_kernel = method._kernel_before_reload
            method._kernel_before_reload = None


# Adapters that come to an engine without the base: one vLLM adapter, handed over in memory, not through files.


_ID = 1


class EngineAdapters:
    def __init__(self, model: Any, rank: int) -> None:
        from vllm.lora.request import LoRARequest

        self._model, self._rank = model, rank
        self._layers: set[str] = set()  # HF names of those that were given an adapter
        # If the adapter were not there before the first request, vLLM would look for this folder, and fail.
        self.request = LoRARequest("policy", _ID, "/handed-over-in-memory")

    def load(self, adapters: Mapping[str, Tensor]) -> None:
        """As `RolloutEngine.load_adapters`, but the engine's state is not checked."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.drop()
        layers = {
            name.removesuffix(".lora_A.weight")
            for name in adapters
            if name.endswith(".lora_A.weight")
        }
        # Equal rank and alpha: the factor is in B. vLLM would otherwise multiply these tensors in place.
        weights = {}
        for name in layers:
            a, b = adapters[f"{name}.lora_A.weight"], adapters[f"{name}.lora_B.weight"]
            weights[name] = LoRALayerWeights(name, self._rank, self._rank, a, b)
        self._model.lora_manager.add_adapter(LoRAModel(_ID, self._rank, weights))
        self._model.lora_manager.activate_adapter(_ID)
        # vLLM ignores an adapter whose name it does not know: look at what its layers were given.
        self._layers = layers
        if homeless := sorted(adapters.keys() - {tensor.engine_name for tensor in self.tensors()}):
            which = f"{len(homeless)} adapters have no place in the engine, first {homeless[0]}"
            raise EngineStateError(f"load_adapters: {which}; set model.lora.sync: merged")

    def drop(self) -> None:
        """Free the copy of the adapters that vLLM keeps beside the one in its layers, for the update to use."""
        self._layers = set()
        self._model.lora_manager.remove_adapter(_ID)

    def tensors(self) -> list[EngineTensor]:
        """The adapters in this rank's engine, named as the policy names them, for the layers that were given one."""
        held = adapter_tensors(self._model, self._rank) if self._layers else []
        return [
            tensor for tensor in held if tensor.engine_name.rpartition(".lora_")[0] in self._layers
        ]
