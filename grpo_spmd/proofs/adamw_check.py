"""Compares some optimizer steps of two small tensors with AdamW written out.

It covers clipping, moments, weight decay and the learning rate."""

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
from grpo_spmd.proofs.batch_check import count_loss
from grpo_spmd.proofs.gradient_check import CheckResult
from grpo_spmd.records import MicroBatch

_EPS = 1e-8  # AdamW's
# Relative differences of a moment and of a step; 1e-7 and 1e-4 were measured.
_MOMENTS_BOUND = 1e-4
_STEP_BOUND = 1e-2
_ROUNDING = 2e-7  # of a float32 weight, relative


@dataclass
class _Shadow:
    """This rank's rows of one tensor as AdamW should have them, float64 on the host."""

    name: str
    parameter: DTensor
    weights: Tensor
    mean: Tensor
    square: Tensor
    gradient: Tensor


class AdamwCheck:
    """Follows a number of optimizer steps, with the weights and moments that they should leave."""

    def __init__(
        self, policy: Policy, updater: PolicyUpdater, config: OptimizerConfig, num_steps: int
    ) -> None:
        """`num_steps`: optimizer steps of the run."""
        self._policy = policy
        self._updater = updater
        self._config = config
        self._num_steps = num_steps
        trained = [
            (name, cast(DTensor, parameter))
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        ]
        # The smallest tensor with weight decay and the smallest without: the moments of all others
        # are computed by the same lines.
        self._followed: list[tuple[str, DTensor]] = []
        for decays in (True, False):
            same_kind = [pair for pair in trained if (pair[1].ndim > 1) == decays]
            if same_kind:
                self._followed.append(min(same_kind, key=lambda pair: (pair[1].numel(), pair[0])))
        self._shadows: list[_Shadow] = []
        self._num_updates = 0
        self._clip_factor = 1.0

    def open(self, result: CheckResult) -> None:
        """Starts before an optimizer step. The moments are the optimizer's, or 0 for a fresh one."""
        self._shadows = []
        self._num_updates = self._updater.state()["num_updates"]
        self._check_groups(result)
        for name, parameter in self._followed:
            weights = _to_host(parameter)
            shadow = _Shadow(
                name,
                parameter,
                weights,
                mean=torch.zeros_like(weights),
                square=torch.zeros_like(weights),
                gradient=torch.zeros_like(weights),
            )
            self._shadows.append(shadow)
            state = self._updater.optimizer.state.get(parameter, {})
            if not self._num_updates:
                continue
            if "exp_avg" not in state:
                result.errors.append(
                    f"the optimizer has no moments of {name} after {self._num_updates} updates"
                )
                continue
            shadow.mean = _to_host(state["exp_avg"])
            shadow.square = _to_host(state["exp_avg_sq"])
            if int(state["step"]) != self._num_updates:
                result.errors.append(
                    f"the optimizer counts {int(state['step'])} steps of {name}, and "
                    f"{self._num_updates} updates were made"
                )

    def begin(
        self, mini_batch: list[MicroBatch], num_tokens: int, num_sequences: int, result: CheckResult
    ) -> None:
        """Collective. Checks the denominators, and that no gradient is left from before."""
        stray = [name for name, p in self._policy.named_parameters() if p.grad is not None]
        if stray:
            result.errors.append(f"a gradient was left from the last update: that of {stray[0]}")
        tokens, sequences = on_rank0(
            lambda by_rank: [sum(column) for column in zip(*by_rank, strict=True)],
            list(count_loss(mini_batch)),
        )
        if (tokens, sequences) != (num_tokens, num_sequences):
            result.errors.append(
                f"the loss divides by {num_tokens} tokens and {num_sequences} sequences, and "
                f"{tokens} and {sequences} count over all ranks"
            )

    def read_gradients(self) -> None:
        """Collective. Computes the gradient's norm over all shards, without FSDP's help."""
        norms = [
            torch.linalg.vector_norm(cast(DTensor, parameter.grad)._local_tensor)
            for parameter in self._policy.parameters()
            if parameter.grad is not None and is_first_replica(cast(DTensor, parameter))
        ]
        norm = math.sqrt(on_rank0(sum, sum(float(norm) ** 2 for norm in norms)))
        self._clip_factor = min(1.0, self._config.max_grad_norm / (norm + 1e-6))
        for shadow in self._shadows:
            grad = shadow.parameter.grad
            shadow.gradient = torch.zeros_like(shadow.weights) if grad is None else _to_host(grad)

    def end(self, is_made: bool, result: CheckResult) -> None:
        """Compares what the step left with what it should have left."""
        self._num_updates += is_made
        for shadow in self._shadows:
            previous = shadow.weights
            if is_made:
                self._step(shadow)
            self._compare(shadow, previous, result)

    def _step(self, shadow: _Shadow) -> None:
        beta1, beta2 = self._config.betas
        step = self._num_updates
        rate = _learning_rate(self._config, step, self._num_steps)
        decay = self._config.weight_decay if shadow.parameter.ndim > 1 else 0.0
        gradient = shadow.gradient * self._clip_factor
        shadow.mean = beta1 * shadow.mean + (1 - beta1) * gradient
        shadow.square = beta2 * shadow.square + (1 - beta2) * gradient**2
        size = (shadow.square / (1 - beta2**step)).sqrt() + _EPS
        shadow.weights = (
            shadow.weights * (1 - rate * decay) - rate * (shadow.mean / (1 - beta1**step)) / size
        )

    def _compare(self, shadow: _Shadow, previous: Tensor, result: CheckResult) -> None:
        state = self._updater.optimizer.state.get(shadow.parameter, {})
        weights = _to_host(shadow.parameter)
        step_size = float((shadow.weights - previous).norm())
        difference = (weights - shadow.weights).norm()
        beyond_rounding = max(0.0, float(difference - _ROUNDING * previous.norm()))
        result.check_difference(
            f"the step of AdamW on {shadow.name}, of its size,",
            "AdamW",
            beyond_rounding / step_size if step_size else float(beyond_rounding > 0),
            _STEP_BOUND,
        )
        for key, expected in (("exp_avg", shadow.mean), ("exp_avg_sq", shadow.square)):
            moment = _to_host(state[key]) if key in state else torch.zeros_like(expected)
            size = float(expected.norm())
            off = float((moment - expected).norm())
            result.check_difference(
                f"AdamW's {key} of {shadow.name}, of its norm,",
                "AdamW",
                off / size if size else float(off > 0),
                _MOMENTS_BOUND,
            )
        # Rounding of several steps shall not add up.
        shadow.weights = weights

    def _check_groups(self, result: CheckResult) -> None:
        """Checks the settings themselves: a decay of 1e-8 of a weight is below its rounding."""
        ids: list[int] = []
        for group in self._updater.optimizer.param_groups:
            ids += map(id, group["params"])
            expected = {"betas": tuple(self._config.betas), "eps": _EPS}
            settings = {"betas": tuple(group["betas"]), "eps": group["eps"]}
            decays = {self._config.weight_decay if p.ndim > 1 else 0.0 for p in group["params"]}
            if settings != expected or decays != {group["weight_decay"]}:
                result.errors.append(
                    f"the optimizer has {settings} and weight_decay {group['weight_decay']} where "
                    f"{expected} and {sorted(decays)} are asked for"
                )
        if sorted(ids) != sorted(id(p) for p in self._policy.parameters() if p.requires_grad):
            result.errors.append(
                f"the optimizer has {len(ids)} tensors, which are not those that train, each once"
            )


def _learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Returns the learning rate of an optimizer step, counted from 1."""
    warmup = config.warmup_steps
    if step <= warmup:
        return config.lr * step / warmup
    angle = math.pi / 2 * (step - 1 - warmup) / max(1, num_steps - warmup)
    fraction = {
        "constant": 1.0,
        "linear": 1 - angle / (math.pi / 2),
        "cosine": math.cos(angle) ** 2,
    }[config.schedule]
    return fraction * config.lr + (1 - fraction) * config.min_lr


def _to_host(tensor: Tensor) -> Tensor:
    """Returns a copy of this rank's rows, float64."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach().to("cpu", torch.float64, copy=True)
