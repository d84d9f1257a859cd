"""A stand-in for vLLM on the fake device: our engine's calls in their order, on memory that comes
and goes as its does.

vLLM itself is what the other tests run. Here its part is to hold weights and a KV cache on the
device, to give both back when it sleeps, and to touch them when it samples, so that our GPU
branches meet what they would meet there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.model.config_json import load_config
from grpo_spmd.model.families.build import build_hf_model
from grpo_spmd.model.policy import DTYPES

CACHE_BYTES = 1 << 12


class _SleepingError(RuntimeError):
    """Of a CUDA graph that is run on unmapped memory there is no message: the process is gone."""


class _LLMEngine(SimpleNamespace):
    """One that a weak set takes, as it takes vLLM's."""

    __hash__ = object.__hash__  # type: ignore[assignment]


class StandInLLM:
    """`vllm.LLM` as `engine/` uses it; the last one made is `StandInLLM.last`."""

    last: StandInLLM
    unmapped_bytes = 0  # of its pool, while it sleeps

    def __init__(self, **options: Any) -> None:
        assert options["enable_sleep_mode"], "on a GPU the engine must be able to sleep"
        assert not {"enforce_eager", "kv_cache_memory_bytes"} & options.keys(), "options for a CPU"
        StandInLLM.last = self
        self.calls = list[str]()
        self.device, path = torch.device("cuda", 0), options["model"]
        self.model_config = SimpleNamespace(model=path, dtype=DTYPES[options["dtype"]])
        with torch.device("meta"):
            self.model = build_hf_model(load_config(path), path, dtype=self.model_config.dtype)
        self.model.to_empty(device=self.device)
        self.model.tie_weights()
        self.model.load_weights = self._load
        self.cache = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device=self.device)
        self._asleep = dict[str, list[tuple[torch.UntypedStorage, int]]]()
        self._kept = list[Tensor]()  # weights in host memory, where it sleeps at level 1
        self._requests = dict[str, Any]()
        scheduler = SimpleNamespace(
            get_request_counts=lambda: (0, 0), has_requests=lambda: bool(self._requests)
        )
        config = SimpleNamespace(
            model_config=self.model_config,
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            cache_config=SimpleNamespace(num_gpu_blocks=64, block_size=16),
            use_v2_model_runner=True,
        )
        core = SimpleNamespace(
            engine_core=SimpleNamespace(scheduler=scheduler), shutdown=lambda: None
        )
        self.llm_engine = _LLMEngine(
            vllm_config=config,
            engine_core=core,
            add_request=self._add,
            step=self._step,
            abort_request=self._abort,
        )

    @property
    def pool_bytes(self) -> int:
        return CACHE_BYTES + sum(int(p.nbytes) for p in self.model.parameters())

    def apply_model(self, fn: Callable[[Any], Any]) -> list[Any]:
        return [fn(self.model)]

    def collective_rpc(self, method: str, kwargs: dict[str, Any]) -> None:
        assert method == "reload_weights", method
        self.model.load_weights(kwargs["weights_iterator"])

    def reset_prefix_cache(self) -> bool:
        return not self._requests

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")
        if not self._asleep:
            weights = {
                storage._cdata: storage
                for storage in (p.untyped_storage() for p in self.model.parameters())
            }
            storages = {
                "weights": list(weights.values()),
                "kv_cache": [self.cache.untyped_storage()],
            }
            self._asleep = {
                tag: [(storage, storage.nbytes()) for storage in of] for tag, of in storages.items()
            }
            self._kept = (
                [_bytes_of(storage).cpu() for storage in storages["weights"]] if level == 1 else []
            )
            for storage, _ in (pair for of in self._asleep.values() for pair in of):
                storage.resize_(0)
            StandInLLM.unmapped_bytes = self.pool_bytes

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append("wake " + " ".join(tags))
        for tag in tags:
            for storage, size in (waking := self._asleep.pop(tag)):
                storage.resize_(size)
                StandInLLM.unmapped_bytes -= size
            if tag == "weights":
                for (storage, _), retained in zip(waking, self._kept, strict=False):
                    _bytes_of(storage).copy_(retained)

    @torch.no_grad()
    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        named, loaded = dict(self.model.named_parameters()), set()
        for name, tensor in weights:
            assert tensor.device == self.device, f"{name} is on {tensor.device}"
            named[name].copy_(tensor)
            loaded.add(name)
        return loaded

    def _add(self, name: str, prompt: dict[str, Any], params: Any, lora_request: Any) -> None:
        self._requests[name] = prompt["prompt_token_ids"], params

    def _abort(self, names: Iterable[str]) -> None:
        for name in list(names):
            self._requests.pop(name, None)

    def _step(self) -> list[Any]:
        """All at once. A completion is a function of prompt and seed; it costs a look at weights
        and cache."""
        if self._asleep:
            raise _SleepingError(f"sampled while {sorted(self._asleep)} are not mapped")
        self.cache.add_(1)
        assert all(p.isfinite().all() for p in self.model.parameters()), (
            "sampled from weights that were never loaded"
        )
        outputs = []
        for name, (prompt, params) in self._requests.items():
            number = (params.seed or 0) % 997
            length = 1 + number % params.max_tokens
            ids = [(number + sum(prompt) + position) % 90 + 1 for position in range(length)]
            logprobs = SimpleNamespace(
                logprobs=[-4.5 - 0.01 * position for position in range(length)]
            )
            reason = "length" if length == params.max_tokens else "stop"
            ids = ids if reason == "length" else [*ids[:-1], params.stop_token_ids[0]]
            single = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
            outputs.append(SimpleNamespace(request_id=name, finished=True, outputs=[single]))
        self._requests.clear()
        return outputs


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def install_vllm() -> None:
    """Modules of these names, with what `engine/` imports from them."""
    executor = type(
        "ExecutorWithExternalLauncher", (), {"_distributed_args": lambda self: ("env://", 0, 0)}
    )
    layers = (
        "LinearBase",
        "QKVParallelLinear",
        "MergedColumnParallelLinear",
        "ColumnParallelLinear",
    )
    allocator = SimpleNamespace(
        get_instance=lambda: SimpleNamespace(get_current_usage=lambda: StandInLLM.last.pool_bytes)
    )
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": StandInLLM, "SamplingParams": SimpleNamespace},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=1)},
        "vllm.v1.executor.uniproc_executor": {"ExecutorWithExternalLauncher": executor},
        "vllm.device_allocator.cumem": {"CuMemAllocator": allocator},
        "vllm.model_executor.layers.linear": {name: type(name, (), {}) for name in layers},
        "vllm.model_executor.layers.vocab_parallel_embedding": {
            "VocabParallelEmbedding": type("VocabParallelEmbedding", (), {})
        },
    }
    for name, members in contents.items():
        pieces = name.split(".")
        for depth in range(1, len(pieces) + 1):
            path = ".".join(pieces[:depth])
            if path not in sys.modules:
                sys.modules[path] = ModuleType(path)
                sys.modules[path].__spec__ = ModuleSpec(
                    path, None
                )  # what asks where vLLM lies learns: nowhere
                if depth > 1:
                    setattr(
                        sys.modules[".".join(pieces[: depth - 1])],
                        pieces[depth - 1],
                        sys.modules[path],
                    )
        vars(sys.modules[name]).update(members)
