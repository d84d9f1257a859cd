"""Some optimizer steps of two small tensors beside AdamW written out: clipping, moments, decay, learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import OptimizerConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy
from grpo_spmd.model.sharding import is_first_replica
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.records import MicroBatch

_EPS = 1e-8  # AdamW's
_MOMENTS_BOUND, _STEP_BOUND = (
    1e-4,
    1e-2,
)  # shares of a moment, of a step; 1e-7 and 1e-4 were measured
_ROUNDING = 2e-7  # of a float32 weight


@dataclass
class _Shadow:
    """This rank's rows of one tensor, float64 on the host, as AdamW should have them."""

    name: str
    parameter: DTensor
    weights: Tensor
    mean: Tensor
    square: Tensor
    gradient: Tensor


class AdamwCheck:
    """Looks on at a number of optimizer steps (as an UpdateObserver) and keeps the weights and moments that they should leave."""

    def __init__(
        self, policy: Policy, updater: PolicyUpdater, config: OptimizerConfig, num_all: int
    ) -> None:
        """`num_all`: optimizer steps of the run."""
        self._policy, self._updater, self._config, self._num_all = policy, updater, config, num_all
        trained = [
            (name, cast(DTensor, p)) for name, p in policy.named_parameters() if p.requires_grad
        ]
        # One with weight decay and one without, where there are both: moments of others are made by the same lines.
        kinds = ([(n, p) for n, p in trained if (p.ndim > 1) == decays] for decays in (True, False))
        self._chosen = [
            min(kind, key=lambda pair: (pair[1].numel(), pair[0])) for kind in kinds if kind
        ]
        self._shadows: list[_Shadow] = []
        self._num_updates = 0
        self._factor = 1.0

    def open(self, found: CheckResult) -> None:
        """Before the first of the steps to look at: the moments are taken from the optimizer, but for a fresh one."""
        self._shadows, self._num_updates = [], self._updater.state()["num_updates"]
        self._check_groups(found)
        for name, parameter in self._chosen:
            weights = _host(parameter)
            mean, square = torch.zeros_like(weights), torch.zeros_like(weights)
            state = self._updater.optimizer.state.get(parameter, {})
            if self._num_updates and "exp_avg" not in state:
                found.errors.append(
                    f"the optimizer has no moments of {name} after {self._num_updates} updates"
                )
            elif self._num_updates:
                mean, square = _host(state["exp_avg"]), _host(state["exp_avg_sq"])
                if int(state["step"]) != self._num_updates:
                    counts = f"{int(state['step'])} steps of {name}, and {self._num_updates} updates were made"
                    found.errors.append(f"the optimizer counts {counts}")
            self._shadows.append(
                _Shadow(name, parameter, weights, mean, square, torch.zeros_like(weights))
            )

    def begin(
        self, mini_batch: list[MicroBatch], num_tokens: int, num_sequences: int, found: CheckResult
    ) -> None:
        """Collective. The denominators are those of all ranks' tokens, and no gradient is left from before."""
        if stray := [name for name, p in self._policy.named_parameters() if p.grad is not None]:
            found.errors.append(f"a gradient was left from the last update: that of {stray[0]}")
        own = [sum(int(m.loss_mask.sum()) for m in mini_batch)]
        own.append(sum(len(m.sequence_index[m.loss_mask].unique()) for m in mini_batch))
        counted = on_rank0(
            lambda of_ranks: [sum(column) for column in zip(*of_ranks, strict=True)], own
        )
        if counted != [num_tokens, num_sequences]:
            given = f"{num_tokens} tokens and {num_sequences} sequences"
            found.errors.append(
                f"the loss divides by {given}, and {counted[0]} and {counted[1]} count over all ranks"
            )

    def gradients(self) -> None:
        """Collective. The norm over all shards, added up without FSDP's help, and the gradients of what is shadowed."""
        grads = (p.grad for p in self._policy.parameters() if is_first_replica(cast(DTensor, p)))
        own = [
            torch.linalg.vector_norm(cast(DTensor, grad)._local_tensor)
            for grad in grads
            if grad is not None
        ]
        norm = math.sqrt(on_rank0(sum, sum(float(norm) ** 2 for norm in own)))
        self._factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        for shadow in self._shadows:
            grad = shadow.parameter.grad
            shadow.gradient = (
                torch.zeros_like(shadow.weights) if grad is None else _host(cast(DTensor, grad))
            )

    def end(self, is_made: bool, found: CheckResult) -> None:
        """Compare what the step left; go on from what it should have left."""
        self._num_updates += is_made
        for shadow in self._shadows:
            before = shadow.weights
            if is_made:
                self._step(shadow)
            self._compare(shadow, before, found)

    def _step(self, shadow: _Shadow) -> None:
        config, (first, second), t = self._config, self._config.betas, self._num_updates
        gradient = shadow.gradient * self._factor
        rate = _rate(config, t, self._num_all)
        decay = config.weight_decay if shadow.parameter.ndim > 1 else 0.0
        shadow.mean = first * shadow.mean + (1 - first) * gradient
        shadow.square = second * shadow.square + (1 - second) * gradient**2
        size = (shadow.square / (1 - second**t)).sqrt() + _EPS
        shadow.weights = (
            shadow.weights * (1 - rate * decay) - rate * (shadow.mean / (1 - first**t)) / size
        )

    def _compare(self, shadow: _Shadow, before: Tensor, found: CheckResult) -> None:
        state, now = (
            self._updater.optimizer.state.get(shadow.parameter, {}),
            _host(shadow.parameter),
        )
        step, off = (shadow.weights - before).norm(), (now - shadow.weights).norm()
        beyond = max(0.0, float(off - _ROUNDING * before.norm()))
        what = f"the step of AdamW on {shadow.name}, of its size,"
        found.check_difference(
            what, "AdamW", beyond / float(step) if step else float(beyond > 0), _STEP_BOUND
        )
        for key, expected in (("exp_avg", shadow.mean), ("exp_avg_sq", shadow.square)):
            held = _host(state[key]) if key in state else torch.zeros_like(expected)
            size, off = float(expected.norm()), float((held - expected).norm())
            what = f"AdamW's {key} of {shadow.name}, of its norm,"
            found.check_difference(
                what, "AdamW", off / size if size else float(off > 0), _MOMENTS_BOUND
            )
        # What is within rounding now shall not add up.
        shadow.weights = now

    def _check_groups(self, found: CheckResult) -> None:
        """A decay of 1e-8 of a weight is below its rounding: the settings themselves are looked at."""
        seen: list[int] = []
        for group in self._updater.optimizer.param_groups:
            seen += map(id, group["params"])
            expected = {"betas": tuple(self._config.betas), "eps": _EPS}
            settings = {"betas": tuple(group["betas"]), "eps": group["eps"]}
            decays = {self._config.weight_decay if p.ndim > 1 else 0.0 for p in group["params"]}
            if settings != expected or decays != {group["weight_decay"]}:
                held = f"{settings} and weight_decay {group['weight_decay']}"
                found.errors.append(
                    f"the optimizer has {held} where {expected} and {sorted(decays)} are asked for"
                )
        if sorted(seen) != sorted(id(p) for p in self._policy.parameters() if p.requires_grad):
            found.errors.append(
                f"the optimizer has {len(seen)} tensors, which are not those that train, each once"
            )


def _rate(config: OptimizerConfig, t: int, num_all: int) -> float:
    """The learning rate of the `t`-th optimizer step, counted from 1."""
    if t <= config.warmup_steps:
        return config.lr * t / config.warmup_steps
    turn = math.pi / 2 * (t - 1 - config.warmup_steps) / max(1, num_all - config.warmup_steps)
    left = {"constant": 1.0, "linear": 1 - turn / (math.pi / 2), "cosine": math.cos(turn) ** 2}[
        config.schedule
    ]
    return left * config.lr + (1 - left) * config.min_lr


def _host(tensor: Tensor) -> Tensor:
    """A copy of this rank's rows."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", torch.float64, copy=True)
