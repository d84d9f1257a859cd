"""Makes the policy's routers of a mixture of experts (MoE) replay the engine's routes, the experts
that the engine's routers chose for each token, and adds the load-balance loss.

A router computes a probability of each of E experts for each token, and takes the k experts with
the largest. In a replay the k experts that the engine took are given. Their outputs are still
weighted with the router's own probabilities, so that the router gets a gradient (R3, Ma et al.
2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers").
transformers' own router code runs: only its call of `topk` gets the given experts as result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grpo_spmd.config.errors import ConfigError
from grpo_spmd.model.config_json import has_recurrent_layers, load_config
from grpo_spmd.model.families.build import decoder_layers
from grpo_spmd.records import RowRoutes


class RouterKind(NamedTuple):
    """Describes the routers of a model class of transformers."""

    module_class: type[nn.Module]
    logits_index: int
    """Index of the logits [T, E] in the tuple that a router returns."""


def router_kind(model: Any) -> RouterKind | None:
    """Returns the kind of the model's routers. Returns None for a dense model, and if transformers
    does not say which of the model's modules are routers."""
    recorded = getattr(model, "_can_record_outputs", None) or {}
    recorder = recorded.get("router_logits")
    if recorder is None or not hasattr(recorder, "target_class"):
        return None
    kind = RouterKind(recorder.target_class, recorder.index)
    routers = [module for module in model.modules() if isinstance(module, kind.module_class)]
    return kind if routers and all(map(_can_replay, routers)) else None


def layer_routers(model: Any) -> dict[int, nn.Module]:
    """Returns the routers that can replay, by the number of their decoder layer."""
    kind = router_kind(model)
    if kind is None:
        return {}
    return {
        number: module
        for number, layer in enumerate(decoder_layers(model))
        for module in layer.modules()
        if isinstance(module, kind.module_class)
    }


def _can_replay(router: nn.Module) -> bool:
    """Returns True if `_GivenExperts` can replay routes in this router: it has a weight matrix, its
    forward pass takes only the hidden states, and it chooses the experts with topk."""
    weight, forward = getattr(router, "weight", None), inspect.unwrap(type(router).forward)
    is_simple = len(inspect.signature(forward).parameters) == 2  # self and the hidden states
    return isinstance(weight, Tensor) and is_simple and "topk" in forward.__code__.co_names


def refuse_balance_loss(path: str) -> None:
    """Raises ConfigError if the model at `path` has no routers that a load-balance loss trains."""
    config = load_config(path)
    key = "loss.router_aux_coef"
    if not num_experts(config):
        raise ConfigError(f"{key}: {path} has no experts; leave it out")
    if has_recurrent_layers(config.to_dict()):
        raise ConfigError(f"{key}: vLLM returns no routes of recurrent models; leave it out")
    # GLM4-MoE's sigmoids are balanced by its correction bias, and P_e is no softmax of them.
    if getattr(config, "n_group", None) is not None:
        raise ConfigError(
            f"{key}: {path} balances its experts by a correction bias, and its routers give no "
            "probabilities that sum to 1; leave it out"
        )


def num_experts(hf_config: Any) -> int:
    """Returns the number of experts in a layer, 0 for a dense model."""
    names = ("num_experts", "num_local_experts")
    return max((getattr(hf_config, name, None) or 0 for name in names), default=0)


class LayerRouter:
    """Replaces the forward method of one decoder layer's router.

    While `run_layer` runs the layer, the router replays the routes of the packed row: it takes the
    experts that the engine took. If the row is not to be replayed, it chooses experts by itself and
    counts the tokens for which they differ from the engine's."""

    def __init__(self, router: nn.Module, layer: int, kind: RouterKind, num_experts: int) -> None:
        """`layer` is the number of the decoder layer."""
        self._num_experts = num_experts
        # The forward method of transformers' router.
        self._route: Callable[[Tensor], tuple[Tensor, ...]] = router.forward
        self._layer = layer
        self._logits_index = kind.logits_index
        # The routes of the row that the layer is running on, None if it has none.
        self._row: RowRoutes | None = None
        router.forward = self.forward

    def run_layer(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the layer's `forward` with the routes of the row in its argument `packed_layout`.

        Activation checkpointing calls this again with the same arguments, and thus with the same
        routes, even if the layer has seen other rows since."""
        layout = kwargs.get("packed_layout")
        # Passes without our packed rows (transformers' plain forward pass) have no layout.
        self._row = None if layout is None else layout.routes
        try:
            return forward(*args, **kwargs)
        finally:
            self._row = None

    # Not compiled: torch.compile would have to trace through _GivenExperts, and a router's
    # computation is so small that little could be gained.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Returns what transformers' router returns: logits, and the weights and indices of the
        experts, in the order of the router's class.

        Depending on the row, replays its routes, and adds the layer's part of the load-balance loss
        (`RowRoutes.loads`); or only counts the tokens whose routes differ."""
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
        # Attach the loss term to the experts' weights. Its gradient is then computed within this
        # layer's own backward pass, where FSDP and activation checkpointing have the layer's
        # parameters and activations ready.
        return tuple(
            _AddLoss.apply(output, term)
            if output.is_floating_point() and output is not logits
            else output
            for output in outputs
        )


class _GivenExperts(TorchFunctionMode):
    """While active, makes `topk` over the scores [T, E] of all experts return the given experts.

    GLM4-MoE's router first picks the best groups of experts. Those calls of topk are over scores of
    other shapes and stay as they are; they have no effect on the given experts."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """`experts` [T, k] are the given experts of each token, int64; E is `num_experts`."""
        super().__init__()
        self._experts = experts
        self._shape = (len(experts), num_experts)
        # True once such a topk was called.
        self.is_asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch calls this in place of each function: returns the given experts and their scores
        for such a topk, and runs any other function."""
        if func in (torch.topk, Tensor.topk) and args[0].shape == self._shape:
            self.is_asked = True
            return args[0].gather(-1, self._experts), self._experts
        return func(*args, **(kwargs or {}))


class _AddLoss(torch.autograd.Function):
    """Returns `values` unchanged, and in the backward pass gives `term` the gradient 1, as if it
    had been added to the loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, term: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_ones((), dtype=torch.float64)


def replay_in_layers(model: Any) -> dict[int, Callable[..., Any]]:
    """Installs a LayerRouter in each decoder layer that has a router. Returns their `run_layer`, by
    the number of the layer."""
    kind, size = router_kind(model), num_experts(model.config)
    return {
        layer: LayerRouter(router, layer, kind, num_experts=size).run_layer
        for layer, router in layer_routers(model).items()
        if kind is not None
    }
