"""The routers of a mixture of experts: they replay the engine's routes and add the load-balance
loss.

A router gives each token probabilities of E experts and takes the k largest. In a replay the k
experts are given, and the router's own probabilities of them weigh their outputs, so that it keeps
its gradient (R3, Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and
Inference Routers"). transformers' own code computes the weights: only its `topk` is answered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_spmd.records import RowRoutes


class RouterKind(NamedTuple):
    """Describes the routers of a model class of transformers."""

    module_class: type[nn.Module]
    logits_index: int
    """Where the logits [T, E] are in the tuple that a router returns."""


def router_kind(model: Any) -> RouterKind | None:
    """Returns the kind of a model's routers, None for a dense model or where transformers does not
    say which modules are routers."""
    recorded = getattr(model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    if recorder is None or not hasattr(recorder, "target_class"):
        return None
    kind = RouterKind(recorder.target_class, recorder.index)
    return (
        kind if any(isinstance(module, kind.module_class) for module in model.modules()) else None
    )


def num_experts(hf_config: Any) -> int:
    """Returns the number of experts of a layer, 0 for a dense model."""
    names = ("num_experts", "num_local_experts")
    return max((getattr(hf_config, name, None) or 0 for name in names), default=0)


class LayerRouter:
    """The router of one decoder layer. While the layer runs it follows the routes of the row."""

    def __init__(self, router: nn.Module, layer: int, kind: RouterKind, num_experts: int) -> None:
        self._num_experts = num_experts
        self._route: Callable[[Tensor], tuple[Tensor, ...]] = router.forward
        self._layer = layer
        self._logits_index = kind.logits_index
        self._row: RowRoutes | None = None
        router.forward = self.forward

    def run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the layer's `forward`. Activation checkpointing calls this again with the same
        arguments, and so with the same routes, whatever row came after."""
        layout = kwargs.get("packed_layout")
        # None in transformers' own passes over rows of one sequence.
        self._row = None if layout is None else layout.routes
        try:
            return forward(*args, **kwargs)
        finally:
            self._row = None

    # The compiler would have to look into the mode below, and gains little in so small a product.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Returns what transformers' router returns: logits, weights and numbers of the experts, in
        the order of its class."""
        row = self._row
        if row is None:
            return self._route(hidden_states)
        experts = row.experts[:, self._layer].long()
        if not row.is_replayed:
            outputs = self._route(hidden_states)
            chosen = next(output for output in outputs if not output.is_floating_point())
            is_other = (chosen.sort(-1)[0] != experts.sort(-1)[0]).any(-1)
            row.differences[self._layer] = (is_other & row.is_recorded).sum()
            return outputs
        with _GivenExperts(experts, self._num_experts) as given:
            outputs = self._route(hidden_states)
        if not given.is_asked:
            raise RuntimeError("a router without topk cannot replay (model.router_replay: false)")
        if row.loads is None or not torch.is_grad_enabled():
            return outputs
        logits = outputs[self._logits_index]
        probabilities = logits.float().softmax(-1) * row.is_recorded[:, None]
        term = (probabilities.sum(0, dtype=torch.float64) * row.loads[self._layer]).sum()
        row.balance_losses[self._layer] = term.detach()
        # At the weights of the experts, so that the term's gradient is part of this layer's own
        # backward pass, in which FSDP and activation checkpointing have its parameters ready.
        return tuple(
            _AddLoss.apply(output, term)
            if output.is_floating_point() and output is not logits
            else output
            for output in outputs
        )


class _GivenExperts(TorchFunctionMode):
    """Answers topk over the experts with given experts.

    GLM4-MoE's router first takes the best groups of experts: those calls of topk are over scores
    of other shapes, and do not matter to experts that are given."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        super().__init__()
        self._experts = experts
        self._shape = (len(experts), num_experts)
        self.is_asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and args[0].shape == self._shape:
            self.is_asked = True
            return args[0].gather(-1, self._experts), self._experts
        return func(*args, **(kwargs or {}))


class _AddLoss(torch.autograd.Function):
    """Returns its input, and adds a term to the loss from which the backward pass starts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, term: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=torch.float64)


def replay_in_layers(model: Any, layers: Iterable[nn.Module]) -> list[Callable[..., Any] | None]:
    """Returns for each layer the function that runs it with the row's routes, None for a layer
    without a router. It takes the layer's forward, and then what that takes."""
    kind = router_kind(model)
    wrappers: list[Callable[..., Any] | None] = []
    for number, layer in enumerate(layers):
        router = None
        if kind is not None:
            modules = (m for m in layer.modules() if isinstance(m, kind.module_class))
            router = next(modules, None)
        if router is None or kind is None:
            wrappers.append(None)
        else:
            replay = LayerRouter(router, number, kind, num_experts=num_experts(model.config))
            wrappers.append(replay.run_layer)
    return wrappers
