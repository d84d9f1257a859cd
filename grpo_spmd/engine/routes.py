"""Gets the routes of a mixture of experts from the engine: which experts each layer took for each
token.

On a GPU vLLM returns them with a completion (`enable_return_routed_experts`), but only with its V2
model runner (0.32), which does not exist for CPUs. On a CPU `RouteRecorder` therefore stores, for
each slot of the KV cache, the routes of the forward pass that wrote the slot's keys and values. If
several requests share a block, they get the routes of the request that filled it. A request that
was preempted and computed again gets the routes of the pass whose keys and values it used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
from torch import Tensor

from grpo_spmd.model.config_json import first_line
from grpo_spmd.model.routing import num_experts
from grpo_spmd.records import Routes

_log = logging.getLogger("grpo_spmd")
_OPTION = "enable_return_routed_experts"
# Texts in vLLM's errors about a config with which it cannot return routes.
_REFUSALS = ("AuxOutput", "enable-return-routed-experts")


def recording_options(hf_config: Any, engine_ranks: int) -> dict[str, Any]:
    """Returns the options that make vLLM return routes on a GPU.

    Returns {} for a model without experts, for an engine of several ranks, and for a version of
    vLLM that cannot return routes in the form that we read."""
    # vLLM 0.32 hands the routes to the scheduler of an engine's first rank alone, while ours has a
    # scheduler on every rank.
    if not num_experts(hf_config) or engine_ranks > 1:
        return {}
    # Earlier versions (such as 0.26) return routes in other forms, or not for cached prefixes.
    is_known = find_spec("vllm.config.aux_output") is not None
    return {_OPTION: True} if is_known else {}


def with_routes_if_possible(make: Callable[..., Any], options: dict[str, Any]) -> Any:
    """Returns `make(**options)`, an engine that returns routes if the options ask for it.

    If vLLM refuses to return routes with this config, which it does before it loads anything, a
    warning is logged and the engine is made without them."""
    try:
        return make(**options)
    except ValueError as error:
        if _OPTION not in options or not any(text in str(error) for text in _REFUSALS):
            raise
        _log.warning("model.router_replay: off, since vLLM says: %s", first_line(error))
    return make(**{name: value for name, value in options.items() if name != _OPTION})


class RouteRecorder:
    """Records an engine's routes (the experts chosen for each token) on a CPU, by wrapping methods
    of vLLM's model runner and scheduler."""

    def __init__(self, llm: Any, hf_config: Any) -> None:
        """`llm` is a vllm.LLM without running requests."""
        self._num_layers: int = hf_config.num_hidden_layers
        self._dtype = np.uint8 if num_experts(hf_config) <= 256 else np.uint16
        cache = llm.llm_engine.vllm_config.cache_config
        self._block_size: int = cache.block_size
        self._num_slots: int = cache.num_gpu_blocks * cache.block_size
        # The routes [slots, layers, k] of each slot of the KV cache. Made once k is known, in the
        # first forward pass.
        self._slots: Routes | None = None
        # The experts [tokens, k] that each layer took in the current forward pass.
        self._captured: dict[int, Tensor] = {}
        # The routes of finished requests by request id, until `take` is called.
        self._finished: dict[str, Routes] = {}
        for module in _routed_layers(llm):
            module.router.set_capture_fn(partial(self._captured.__setitem__, module.layer_id))
        self._runner = llm.collective_rpc(lambda worker: worker.model_runner)[0]
        self._scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self._execute_model = self._runner.execute_model
        self._runner.execute_model = self._run_and_record
        self._free_request = self._scheduler._free_request
        self._scheduler._free_request = self._read_and_free

    def clear(self) -> None:
        """Forgets the routes of aborted requests, which nobody takes. Called before a
        generation."""
        self._finished.clear()

    def take(self, request_id: str, num_tokens: int) -> Routes:
        """Returns the routes of the first `num_tokens` tokens of a finished request."""
        return self._finished.pop(request_id)[:num_tokens]

    def _run_and_record(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model runner's `execute_model`: runs it, then stores the routes of the
        tokens of this forward pass by their slots in the KV cache."""
        self._captured.clear()
        result = self._execute_model(scheduler_output, *args, **kwargs)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        if num_tokens:
            if self._slots is None:
                width = next(iter(self._captured.values())).shape[1]
                self._slots = np.zeros((self._num_slots, self._num_layers, width), self._dtype)
            # The slot of each token. The tensor called `gpu` is on the engine's device, a CPU here.
            mapping = self._runner.input_batch.block_table[0].slot_mapping.gpu[:num_tokens].numpy()
            for layer, experts in self._captured.items():
                self._slots[mapping, layer] = experts[:num_tokens].numpy()
        return result

    def _read_and_free(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the scheduler's `_free_request`: copies the routes of the finished request
        before its blocks are freed, then runs the original."""
        # From the next step on, other requests may write into these blocks.
        blocks = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        if self._slots is not None and blocks:
            slots = self._slots.reshape(-1, self._block_size, *self._slots.shape[1:])[blocks]
            # vLLM's internal request id is the id that we gave; later versions add a random suffix.
            id_ = request.request_id.partition("-")[0]
            self._finished[id_] = slots.reshape(-1, *self._slots.shape[1:])[: request.num_tokens]
        return self._free_request(request, *args, **kwargs)


def _routed_layers(llm: Any) -> list[Any]:
    """Returns vLLM's expert layers whose routers can report the experts that they take."""
    modules = llm.apply_model(lambda model: [*model.modules()])[0]
    return [m for m in modules if hasattr(getattr(m, "router", None), "set_capture_fn")]


def why_not_recorded(llm: Any) -> str | None:
    """Returns the reason why a RouteRecorder cannot record this engine's routes, None if it can."""
    if not _routed_layers(llm):
        return "routers have no set_capture_fn"
    core = llm.llm_engine.engine_core.engine_core
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    # With a sliding window vLLM frees the blocks of early tokens, and so their routes, while the
    # request still runs.
    return None if kinds == ["FullAttentionSpec"] else f"the KV cache is {kinds}"
