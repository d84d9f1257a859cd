"""The floors of benchmarks/speed/gpu.py, worked by hand and against torch's own count."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.speed.gpu import SIZES, Ceilings, Work, floors, model_config
from grpo_spmd.model.config_json import Dimensions, dimensions
from grpo_spmd.tools.plan.step_time import decode_bytes, decode_flops, forward_flops

# Two rollouts, of 3 + 2 and 1 + 4 tokens; 1,000 parameters, 80 of them the lm_head's.
SMALL = Dimensions(
    hidden=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate=16, vocabulary=10
)
WORK = Work(
    SMALL,
    num_parameters=1000,
    active_parameters=1000,
    head_parameters=80,
    lengths=[(3, 2), (1, 4)],
    itemsize=2,
    optimizer_steps=1,
    offloaded_bytes=1000.0,
)
CEILINGS = Ceilings(matmul_flops=1e3, memory_bytes=1e3, to_device_bytes=500.0, to_host_bytes=250.0)


def test_floors_worked_by_hand() -> None:
    assert forward_flops(WORK) == 2 * 920 * 10 + 2 * 80 * 6 + 2 * 2 * 2 * 4 * (25 + 25) == 20960
    # 4 decode steps; 3 + 4 and 1 + 2 + 3 + 4 tokens precede the sampled ones, each with 2 (keys,
    # values) * 2 layers * 4
    # * 2 bytes.
    assert decode_bytes(WORK) == 4 * 1000 * 2 + (7 + 10) * 32 == 8544
    assert decode_flops(WORK) == 2 * 1000 * 6
    seconds = {phase: floor for phase, (_, floor) in floors(WORK, CEILINGS).items()}
    assert seconds == pytest.approx(
        {"weight_sync": 6 + 4, "rollout": 12 + 2, "logprobs": 20.96, "update": 62.88 + 28}
    )


def test_forward_flops_are_what_torch_counts() -> None:
    config = model_config(SIZES["tiny"])
    sizes = dimensions(config)
    assert sizes is not None
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen2Config(**config), attn_implementation="eager"
    )
    prompt, completion = 70, 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(
            input_ids=torch.ones(1, prompt + completion, dtype=torch.int64),
            logits_to_keep=completion,
        )
    head = config["vocab_size"] * config["hidden_size"]
    work = Work(
        sizes,
        num_parameters=model.num_parameters(),
        active_parameters=model.num_parameters(),
        head_parameters=head,
        lengths=[(prompt, completion)],
        itemsize=4,
        optimizer_steps=1,
        offloaded_bytes=0.0,
    )
    # eager: the masked half too
    attention = 2 * sizes.layers * sizes.heads * sizes.head_dim * (prompt + completion) ** 2
    # biases and norms are no products
    assert forward_flops(work) + attention == pytest.approx(counter.get_total_flops(), rel=0.01)
