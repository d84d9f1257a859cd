"""Worker: a training of a mixture of experts with a fault in its routes.

python -m tests.support.workers.planted_routes FAULT --config CONFIG [section.key=value ...]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import grpo_spmd.learn.assemble
import grpo_spmd.learn.update
from grpo_spmd.engine.routes import RouteRecorder
from grpo_spmd.model import routing
from grpo_spmd.records import Rollout
from grpo_spmd.train import main


def clean() -> None:
    """Nothing is changed."""


def neighbours_route() -> None:
    """The engine's routes are those of the token before."""
    take = RouteRecorder.take

    def shifted(self: RouteRecorder, request_id: str, num_tokens: int) -> Any:
        return np.roll(take(self, request_id, num_tokens), 1, axis=0)

    RouteRecorder.take = shifted  # type: ignore[method-assign]


def one_wrong_route() -> None:
    """One expert of one token of each completion is another one."""
    take = RouteRecorder.take

    def changed(self: RouteRecorder, request_id: str, num_tokens: int) -> Any:
        routes = take(self, request_id, num_tokens).copy()
        given = {*routes[-1, 0].tolist()}
        routes[-1, 0, 0] = next(expert for expert in range(6) if expert not in given)
        return routes

    RouteRecorder.take = changed  # type: ignore[method-assign]


def other_rollouts_routes() -> None:
    """On the way to the rank that trains, two rollouts of one length exchange their routes."""
    decode = grpo_spmd.learn.assemble.decode_rollouts

    def exchanged(payload: bytes) -> list[Rollout]:
        rollouts = decode(payload)
        for number, rollout in enumerate(rollouts):
            for later in range(number + 1, len(rollouts)):
                [one], [two] = rollout.segments, rollouts[later].segments
                if len(one.token_ids) == len(two.token_ids) and one.routes is not None:
                    segments = (
                        dataclasses.replace(one, routes=two.routes),
                        dataclasses.replace(two, routes=one.routes),
                    )
                    for place, segment in zip((number, later), segments, strict=True):
                        rollouts[place] = dataclasses.replace(rollouts[place], segments=(segment,))
                    return rollouts
        return rollouts

    grpo_spmd.learn.assemble.decode_rollouts = exchanged


def cut_gradient() -> None:
    """The weights of the experts have no gradient: the router does not learn."""

    def answer(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk):
            self.is_asked = True
            return args[0].detach().gather(-1, self._experts), self._experts
        return func(*args, **(kwargs or {}))

    routing._GivenExperts.__torch_function__ = answer  # type: ignore[method-assign]


def own_weights() -> None:
    """The given experts have the weights of the policy's own."""

    def answer(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            self.is_asked = True
            return result[0], self._experts.flip(-1)
        return result

    routing._GivenExperts.__torch_function__ = answer  # type: ignore[method-assign]


def loads_of_one_rank() -> None:
    """The load-balance loss has the routes of the rank's own rollouts only."""
    grpo_spmd.learn.update.sum_in_place = lambda values, group=None: None


def no_balance_gradient() -> None:
    """The load-balance loss is reported and not learned from."""
    routing._AddLoss.backward = staticmethod(  # type: ignore[method-assign]
        lambda ctx, grad: (grad, grad.new_zeros((), dtype=torch.float64))
    )


def recomputed_otherwise() -> None:
    """A layer that runs again in the backward pass takes the policy's own routes."""
    run_layer = routing.LayerRouter.run_layer
    seen: dict[int, int] = {}

    def run(self: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        layout = kwargs.get("packed_layout")
        if layout is not None and layout.routes is not None and torch.is_grad_enabled():
            key = hash((id(layout), id(self)))
            seen[key] = seen.get(key, 0) + 1
            if seen[key] > 1:
                routes = layout.routes
                layout.routes = dataclasses.replace(
                    routes, experts=routes.experts.roll(1, 0), balance_losses={}
                )
                try:
                    return run_layer(self, forward, *args, **kwargs)
                finally:
                    layout.routes = routes
        return run_layer(self, forward, *args, **kwargs)

    routing.LayerRouter.run_layer = run  # type: ignore[method-assign]


FAULTS = {
    function.__name__: function
    for function in (
        clean,
        neighbours_route,
        one_wrong_route,
        other_rollouts_routes,
        cut_gradient,
        own_weights,
        loads_of_one_rank,
        no_balance_gradient,
        recomputed_otherwise,
    )
}


if __name__ == "__main__":
    FAULTS[sys.argv.pop(1)]()
    main()
