"""What the gradient check gives the value loss of its made-up rows, and what that comes to when it is written out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import CriticConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.contexts import contexts_of
from grpo_spmd.learn.policy_critic import PolicyCritic
from grpo_spmd.model.sharding import is_first_replica
from grpo_spmd.model.values import plain_states
from grpo_spmd.proofs.gradient_check import Found
from grpo_spmd.records import MicroBatch, Rollout

_BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}  # mean |difference| of a value, of the values' size
# Old values and returns lie at these distances from the values, in bounds of the clip: on both sides of it, each where
# the clipped error is the larger one, and where it is not.
_FROM_OLD, _TO_RETURN = (0.0, 0.5, -0.5, 1.5, -1.5, 2.0, -2.0), (0.7, -0.7, 0.9)
_NUM_SKETCHES = 8
_LARGEST = 5.0  # of a bound, beyond which nothing is clipped here


class MadeUpValues:
    def __init__(self, critic: PolicyCritic, config: CriticConfig, dtype: str) -> None:
        self._critic, self._clip, self._coef, self.bound = (
            critic,
            config.clip_value,
            config.coef,
            _BOUNDS[dtype],
        )
        self._states: list[Tensor] = []
        self._head: tuple[Tensor, ...] = ()
        self._values: list[
            Tensor
        ] = []  # of rows with a rollout, as old values and returns, float64
        self._old: list[Tensor] = []
        self._returns: list[Tensor] = []

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._critic.model.named_parameters()

    def give(self, row: MicroBatch, values: Tensor) -> None:
        """Old values and returns of a row, from the values [C] that the trainer has just found."""
        step, n = min(self._clip or 1.0, _LARGEST), range(len(values))
        v = values.detach().double()
        old = v - v.new_tensor([step * _FROM_OLD[k % len(_FROM_OLD)] for k in n])
        row.old_values = old.float()
        row.returns = (
            v + v.new_tensor([step * _TO_RETURN[k // len(_FROM_OLD) % len(_TO_RETURN)] for k in n])
        ).float()
        if row.rollout_ids:
            for kept, column in (
                (self._values, v),
                (self._old, row.old_values),
                (self._returns, row.returns),
            ):
                kept.append(column.double())

    def plainly(
        self, rollouts: Sequence[Rollout], counts: Tensor, num_tokens: int
    ) -> tuple[Tensor, float, float]:
        """Collective. The value loss [] by the last pass within `lively`, a plain one over the rollouts' contexts, with
        its graph; the sum of its terms' sizes; and how far the trainer's values are off, of their size. `counts` [n]
        of all tokens. Empties what `give` has kept."""
        states, places = self._states[-1], list[Tensor]()  # [S, L, D]
        for number, context in enumerate(
            c for r in rollouts for c in contexts_of(r.prompt_ids, r.completion_ids, r.segments)
        ):
            where = torch.from_numpy(np.flatnonzero(context.sampled)).to(states.device)
            places.append(states[number, where - 1])
        head = (
            cast(DTensor, parameter).full_tensor()
            for parameter in self._critic.model.head.parameters()
        )
        self._head = weight, bias = tuple(tensor.detach().requires_grad_() for tensor in head)
        hidden = torch.cat(places) if places else states[0, :1]
        plain = (hidden.float() @ weight[0] + bias + _product(hidden.float())).double()
        if not places:
            return (plain * 0.0).sum(), 0.0, 0.0
        by_trainer, old, target = (
            torch.cat(each) for each in (self._values, self._old, self._returns)
        )
        self._values, self._old, self._returns = [], [], []
        off = float(
            (by_trainer - plain.detach()).abs().mean() / (plain.detach().abs().mean() + 1e-6)
        )
        v, total, size = plain + (by_trainer - plain).detach(), (plain * 0.0).sum(), 0.0
        for k in torch.nonzero(counts)[:, 0].tolist():
            error = (v[k] - target[k]) ** 2
            if self._clip is not None:
                moved = float(v[k].detach() - old[k])
                bounded = old[k] + max(-self._clip, min(self._clip, moved))
                other = (bounded - target[k]) ** 2  # which has no gradient where it is bounded
                if abs(moved) > self._clip and other > error:
                    error = other
            term = self._coef * 0.5 * error / num_tokens
            total, size = total + term, size + abs(float(term.detach()))
        return total, size, off

    def judge_head(self, found: Found, bound: float) -> None:
        """Collective. The head's gradient by the trainer, summed over ranks by FSDP, beside what the plain pass of each
        rank has left, summed by us: eight products of each with random vectors. Leaves none."""
        draw, reduced, plain = (
            torch.Generator().manual_seed(0),
            [0.0] * _NUM_SKETCHES,
            [0.0] * _NUM_SKETCHES,
        )
        for parameter, whole in zip(self._critic.model.head.parameters(), self._head, strict=True):
            vectors = torch.randn(
                _NUM_SKETCHES, whole.numel(), generator=draw, dtype=torch.float64
            ).to(whole.device)
            sharded, of_tokens = cast(DTensor, parameter.grad), whole.grad
            assert of_tokens is not None
            plain = [
                a - b
                for a, b in zip(
                    plain, (vectors @ of_tokens.flatten().double()).tolist(), strict=True
                )
            ]
            if is_first_replica(cast(DTensor, parameter)) and len(
                own := sharded._local_tensor
            ):  # one row: one rank's
                reduced = [
                    a + b
                    for a, b in zip(
                        reduced, (vectors @ own.flatten().double()).tolist(), strict=True
                    )
                ]

        def judge(parts: list[list[list[float]]]) -> float:
            by_fsdp, by_us = (
                [sum(each) for each in zip(*of, strict=True)] for of in zip(*parts, strict=True)
            )
            off = math.sqrt(sum((a - b) ** 2 for a, b in zip(by_fsdp, by_us, strict=True)))
            return off / (math.sqrt(sum(b * b for b in by_us)) + 1e-30)

        off = on_rank0(judge, [reduced, plain])
        found.within("the gradient of the value head, of its norm,", "gradient", off, bound)
        self._critic.forget()

    @contextmanager
    def lively(self) -> Iterator[None]:
        model = self._critic.model
        with lively(model.head), plain_states(model.policy) as self._states:
            yield
        self._states = []


@contextmanager
def lively(head: nn.Linear) -> Iterator[None]:
    """Within it the head, which may be zero, adds a product with a fixed vector."""

    def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + _product(inputs[0])[..., None]

    handle = head.register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


def _product(states: Tensor) -> Tensor:
    """[...] Of states [..., D]."""
    width = states.shape[-1]
    vector = torch.randn(width, generator=torch.Generator().manual_seed(0)) / math.sqrt(width)
    return states @ vector.to(states)
