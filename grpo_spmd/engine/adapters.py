"""The one adapter of an engine to which adapters come by themselves: handed over in memory, past vLLM's files."""

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
        # The adapter is there before the first request. Were it not, vLLM would look for this folder, and fail.
        self.request = LoRARequest("policy", _ID, "/handed-over-in-memory")

    def load(self, adapters: Mapping[str, Tensor]) -> None:
        """Replace all adapters by LAYER.lora_A.weight and LAYER.lora_B.weight. Raises EngineStateError."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights

        self.drop()
        layers = {name.removesuffix(".lora_A.weight") for name in adapters if name.endswith(".lora_A.weight")}
        # Equal rank and alpha: the factor is in B. vLLM would otherwise multiply these tensors in place.
        weights = {
            n: LoRALayerWeights(n, self._rank, self._rank, *(adapters[f"{n}.lora_{which}.weight"] for which in "AB"))
            for n in layers
        }
        self._model.lora_manager.add_adapter(LoRAModel(_ID, self._rank, weights))
        self._model.lora_manager.activate_adapter(_ID)
        # vLLM ignores an adapter whose name it does not know. What it took in is what its layers were given.
        self._layers = layers
        if homeless := sorted(adapters.keys() - {tensor.engine_name for tensor in self.tensors()}):
            raise EngineStateError(
                f"load_adapters: {len(homeless)} adapters have no place in the engine, first {homeless[0]}; set "
                "model.lora.sync: merged"
            )

    def drop(self) -> None:
        """vLLM keeps a copy of the adapters beside the one in its layers: memory that the update can use."""
        self._layers = set()
        self._model.lora_manager.remove_adapter(_ID)

    def tensors(self) -> list[EngineTensor]:
        """The adapters in this rank's engine, named as the policy names them, for the layers that were given one."""
        held = adapter_tensors(self._model, self._rank) if self._layers else []
        return [tensor for tensor in held if tensor.engine_name.rpartition(".lora_")[0] in self._layers]
