"""Adapters that come to an engine without the base: one vLLM adapter, handed over in memory, not through files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from grpo_spmd.engine.requests import EngineStateError
from grpo_spmd.engine.weight_map import EngineTensor, adapter_tensors

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
        layers = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")}
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
        return [tensor for tensor in held if tensor.engine_name.rpartition(".lora_")[0] in self._layers]
