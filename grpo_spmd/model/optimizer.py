"""The policy's optimizer and its learning rate schedule."""

from __future__ import annotations

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from grpo_spmd.config.schema import OptimizerConfig
from grpo_spmd.model.schedule import lr_fraction


def build_optimizer(
    policy: nn.Module, config: OptimizerConfig, num_steps: int = 1
) -> tuple[AdamW, LambdaLR]:
    """Returns AdamW over the trainable parameters, and its schedule.

    Weight decay applies to matrices only, not to norms and biases. `num_steps` are the optimizer
    steps of the whole run; a constant schedule does not need them."""
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        # On CUDA torch's default holds one more float32 shard in a step; the fused kernel does not.
        fused=True if parameters[0].is_cuda else None,
    )
    return optimizer, LambdaLR(optimizer, lambda step: lr_fraction(config, step, num_steps))


def resume_schedule(optimizer: AdamW, schedule: LambdaLR, num_updates: int) -> None:
    """Sets the learning rate of the step that follows `num_updates` optimizer steps."""
    rates = [base * schedule.lr_lambdas[0](num_updates) for base in schedule.base_lrs]
    schedule.load_state_dict(schedule.state_dict() | {"last_epoch": num_updates, "_last_lr": rates})
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
