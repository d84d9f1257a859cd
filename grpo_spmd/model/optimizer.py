"""The policy's optimizer, AdamW with float32 or 8-bit moments, and its learning rate schedule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from grpo_spmd.config.schema import MOMENT_BLOCK, OptimizerConfig
from grpo_spmd.model.schedule import lr_fraction
from grpo_spmd.model.sharding import as_matrix

MOMENTS = ("exp_avg", "exp_avg_sq")
# The code that stands for a block's largest value, for the first (signed) and the second moment.
_LEVELS = (127, 255)
# The fractional parts of 1, 2, ..., n times this number lie evenly between 0 and 1 for any n.
_GOLDEN_RATIO = 0.6180339887498949
# Number of elements that a step updates at a time, so that no whole moment exists in float32. On a
# CPU the elements also stay in its cache.
_STEP_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
_EPS = 1e-8


class AdamW8bit(Optimizer):
    """AdamW that stores the moments of matrices as 8-bit codes with a float32 scale for each block.

    A block is 128 columns of one row, fewer at the row's end. Its scale is its largest |value|, and
    a code c stands for (c / n)^2 times the scale, with the sign of c, where n is the largest code.
    FSDP2 gives whole rows to ranks, so that the result does not depend on the number of ranks.
    It may split a vector anywhere, so the moments of vectors, which are small, stay float32.

    One step often changes a moment by less than half the distance between two codes; rounding to
    the nearest code would then often leave it unchanged. Instead a code is rounded up if its
    fraction is above a threshold that changes from step to step, so that rounding errors cancel out
    over the steps.
    """

    def __init__(self, params: Any, lr: float, betas: tuple[float, float]) -> None:
        """`params` are parameters or groups of parameters, as for torch's AdamW."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": _EPS, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Makes one step of every parameter that has a gradient. `closure` must be None."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group)

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Makes one step of this rank's rows of a parameter, some rows at a time."""
        state = self.state[parameter]
        if not state:
            state.update(initial_state(self, parameter))
        state["step"] += 1
        num_steps = int(state["step"])
        moments = [value for name, value in state.items() if name != "step"]
        rows = [as_matrix(_local(tensor)) for tensor in (parameter, parameter.grad, *moments)]
        num_rows = max(1, _STEP_CHUNK[rows[0].device.type] // rows[0].shape[1])
        for weights, gradient, *stored in zip(*(t.split(num_rows) for t in rows), strict=True):
            _step_rows(weights, gradient, stored, num_steps=num_steps, group=group)


def _step_rows(
    weights: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    *,
    num_steps: int,
    group: dict[str, Any],
) -> None:
    """Makes AdamW's step on some rows [rows, columns] of a parameter, in place.

    `moments` are the two moments in float32, or four tensors: codes and scales of the first moment,
    then those of the second. Only operations that round once are used, so that no result depends on
    how a kernel splits the rows: with `alpha`, `lerp` or `addcdiv` the compiler would choose how
    often to round."""
    half = len(moments) // 2
    means = [
        _move_mean(stored, values, beta=beta, levels=levels, num_steps=num_steps)
        for stored, values, beta, levels in zip(
            (moments[:half], moments[half:]),
            (gradient, gradient.square()),
            group["betas"],
            _LEVELS,
            strict=True,
        )
    ]
    size = means[1].sqrt_().add_(group["eps"])
    weights.mul_(1 - group["lr"] * group["weight_decay"])
    weights.sub_(means[0].div_(size).mul_(group["lr"]))


def _move_mean(
    stored: list[Tensor], values: Tensor, *, beta: float, levels: int, num_steps: int
) -> Tensor:
    """Updates a moment, the running mean of `values`, and stores it. Returns it with Adam's
    correction of the bias towards 0.

    `stored` is [the moment], or its [codes, scales]; `levels` is the largest code. The correction
    depends on `num_steps`, which counts the steps with this one."""
    mean = stored[0] if len(stored) == 1 else _decode(stored[0], stored[1], levels)
    mean.mul_(beta).add_(values * (1 - beta))
    if len(stored) > 1:
        _encode(mean, *stored, levels=levels, threshold=num_steps * _GOLDEN_RATIO % 1)
    return mean / (1 - beta**num_steps)


def _decode(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
    """Returns the values [rows, columns] for which `codes` and `scales` stand."""
    fractions = codes.float().div_(levels)
    return (fractions * fractions.abs()).mul_(_by_column(scales, codes))


def _encode(
    values: Tensor, codes: Tensor, scales: Tensor, *, levels: int, threshold: float
) -> None:
    """Writes `values` [rows, columns] into `codes` and `scales`.

    A code is rounded up if its fraction is at least 1 - `threshold`."""
    sizes = values.abs()
    padded = nn.functional.pad(sizes, (0, -values.shape[1] % MOMENT_BLOCK))
    scales.copy_(padded.unflatten(1, (-1, MOMENT_BLOCK)).amax(2))
    # The scale of a block of zeros is 0: do not divide by it.
    divisors = scales.clamp_min(torch.finfo(torch.float32).tiny)
    steps = sizes.div_(_by_column(divisors, codes)).sqrt_().mul_(levels)
    # Codes of the second moment are at least 1: if it were rounded to 0 and the first moment were
    # not, the step would be huge.
    lowest = 0 if codes.dtype.is_signed else 1
    steps.add_(threshold).floor_().clamp_(lowest, levels)
    codes.copy_(steps.copysign_(values))


def _by_column(scales: Tensor, codes: Tensor) -> Tensor:
    """Returns the scale of each code [rows, columns], from the scales of the blocks [rows,
    blocks]."""
    return scales.repeat_interleave(MOMENT_BLOCK, dim=1)[:, : codes.shape[1]]


def _local(tensor: Tensor) -> Tensor:
    """Returns this rank's shard of a DTensor, and a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def initial_state(optimizer: Optimizer, parameter: Tensor, num_steps: int = 0) -> dict[str, Tensor]:
    """Returns a parameter's state for the optimizer: a count of `num_steps` steps, and moments of
    0."""
    # AdamW's fused kernel needs the step count on the device. AdamW8bit reads it in Python: on the
    # host that does not wait for the device.
    is_coded = isinstance(optimizer, AdamW8bit)
    state = {"step": torch.tensor(float(num_steps), device="cpu" if is_coded else parameter.device)}
    for name, dtype in zip(MOMENTS, (torch.int8, torch.uint8), strict=True):
        if is_coded and parameter.ndim > 1:
            state[name] = torch.zeros_like(parameter, dtype=dtype)
            # One scale for each block of columns.
            state[f"{name}_scale"] = torch.zeros_like(parameter[..., ::MOMENT_BLOCK])
        else:
            state[name] = torch.zeros_like(parameter)
    return state


def build_optimizer(
    policy: nn.Module, config: OptimizerConfig, num_steps: int = 1
) -> tuple[Optimizer, LambdaLR]:
    """Returns the optimizer of the trainable parameters, and its learning rate schedule.

    Weight decay applies to matrices only, not to norms and biases. `num_steps` is the number of
    optimizer steps in the whole run, which a constant schedule does not need."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: Optimizer
    if config.name == "adamw_8bit":
        optimizer = AdamW8bit(groups, lr=config.lr, betas=config.betas)
    else:
        # On CUDA torch's default implementation allocates a further float32 copy of the shards in
        # each step; the fused kernel does not.
        fused = True if parameters[0].is_cuda else None
        optimizer = AdamW(groups, lr=config.lr, betas=config.betas, fused=fused)
    return optimizer, LambdaLR(optimizer, lambda step: lr_fraction(config, step, num_steps))


def resume_schedule(optimizer: Optimizer, schedule: LambdaLR, num_updates: int) -> None:
    """Sets schedule and optimizer to the learning rate of the step after `num_updates` optimizer
    steps. Called when a run resumes."""
    rates = [base * schedule.lr_lambdas[0](num_updates) for base in schedule.base_lrs]
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": num_updates, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
