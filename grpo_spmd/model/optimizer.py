"""The optimizer and its schedule."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from grpo_spmd.config.schema import OptimizerConfig
from grpo_spmd.model.schedule import lr_fraction


def build_optimizer(
    policy: nn.Module, config: OptimizerConfig, num_all: int = 1
) -> tuple[AdamW, LambdaLR]:
    """AdamW over what trains, weight decay on matrices only (not norms, biases), and the schedule of its learning rate
    over the run's `num_all` optimizer steps, which a constant one need not know."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # On CUDA torch's default holds one more float32 shard while it steps, which the one fused kernel does not.
    fused = True if parameters[0].is_cuda else None
    optimizer = AdamW(
        [g for g in groups if g["params"]], lr=config.lr, betas=config.betas, fused=fused
    )
    return optimizer, LambdaLR(optimizer, lambda num_made: lr_fraction(config, num_made, num_all))


def resume_schedule(optimizer: AdamW, schedule: LambdaLR, num_made: int) -> None:
    """Set the learning rate of the step that follows `num_made` optimizer steps."""
    rates = [base * schedule.lr_lambdas[0](num_made) for base in schedule.base_lrs]
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": num_made, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
