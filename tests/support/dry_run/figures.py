"""What one rank of an update takes, step by step: the same function on fake CUDA tensors and on
real ranks of a CPU."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.records import MicroBatch, Rollout, Segment, SyncStats
from tests.support.dry_run.device import Meter
from tests.support.full_tensors import gather_full_tensors
from tests.support.learn import updater_of

BUCKET_BYTES = 1 << 14
LENGTHS = ((3, 9), (5, 4), (5, 4), (2, 7))  # tokens of prompt and completion
# What differs from the config, "replicas" aside, of each set of figures that both sides take.
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16, recomputed": {"dtype": "bfloat16", "activation_checkpointing": True},
    "adapters, recomputed but for products": {
        "lora": {"rank": 4},
        "activation_checkpointing": "selective",
    },
    "replicas": {"num_replicas": 2},
    "shared rows": {"sequence_parallel_size": 2},
}


def micro_batch(
    device: torch.device,
    max_length: int = 99,
    *,
    is_routed: bool = False,
    num_slices: int = 1,
    prefix_tokens: int = 0,
    shares_prefixes: bool = False,
) -> MicroBatch:
    """`is_routed`: with routes of two layers with six experts, two of them for a token.
    `prefix_tokens`: all prompts begin with so many equal tokens."""
    prefix = [(5 * position) % 90 + 1 for position in range(prefix_tokens)]
    rollouts = []
    for number, (suffix, completion) in enumerate(LENGTHS):
        prompt = prefix_tokens + suffix
        ids = prefix + [
            (7 * number + position) % 90 + 1
            for position in range(suffix + min(completion, max_length))
        ]
        advantage, logprobs = (
            (-1.0) ** number,
            [-1.0 - 0.1 * position for position in range(len(ids) - prompt)],
        )
        segments: tuple[Segment, ...] = ()
        if is_routed:
            positions = np.arange(len(ids))
            routes = positions[:-1, None, None] + np.array([[0, 1], [2, 5]])
            segments = (
                Segment(
                    np.array(ids, np.int32), positions >= prompt, (routes % 6).astype(np.uint8)
                ),
            )
        rollouts.append(
            Rollout(number, advantage, True, ids[:prompt], ids[prompt:], logprobs, segments)
        )
    return pack_rollouts(rollouts, device, num_slices, shares_prefixes=shares_prefixes)


def with_model(config: Config, **changes: Any) -> Config:
    """`lora` as a tree."""
    if "lora" in changes:
        changes["lora"] = dataclasses.replace(config.model.lora, **changes["lora"])
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def update_figures(config: Config, session: Session, meter: Meter) -> dict[str, Any]:
    """Collective. Of the phases of an update, whose step is made twice, and of a sync; run within
    `meter`."""
    result: dict[str, Any] = {}
    # a policy of before is a ring of references, and would be counted out at any moment
    gc.collect()
    with meter.measure() as result["build"]:
        policy = build_policy(config.model, config.rollout.temperature, session)
    batch = micro_batch(session.device, num_slices=session.sequence_ranks)
    updater = updater_of(policy, config)
    for tensor in vars(batch).values():
        if isinstance(tensor, Tensor):
            tensor.view(tensor.shape)  # known to the meter from here on, wherever it was made
    with meter.measure() as result["backward"]:
        updater.backward(batch, 24 * session.world_size, 4 * session.world_size, True)
    with meter.measure() as result["clip"]:
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        float(norm.full_tensor())
        del norm
    result |= step_figures(updater.optimizer, meter)
    result["sync"] = sync_figures(policy, session.device, meter)
    return result


def step_figures(optimizer: torch.optim.Optimizer, meter: Meter) -> dict[str, Any]:
    """The first step makes the moments."""
    result: dict[str, Any] = {}
    for phase in ("first step", "later step"):
        with meter.measure() as result[phase]:
            optimizer.step()
    with meter.measure() as result["zero"]:
        optimizer.zero_grad(set_to_none=True)
    return result


def sync_figures(policy: Policy, device: torch.device, meter: Meter) -> dict[str, Any]:
    """Collective."""
    stats = SyncStats()
    with meter.measure() as result:
        for name, tensor in gather_full_tensors(policy, torch.bfloat16, BUCKET_BYTES, stats):
            assert tensor.device.type == device.type, name
        del tensor
    return result | {"bytes": stats.bytes, "num_collectives": stats.num_collectives}


def check_step(found: dict[str, Any]) -> None:
    """Raises AssertionError where the optimizer's step is not the fused one of a GPU."""
    extra = found["later step"]["peak"] - found["later step"]["live"]
    assert extra == 0, f"the optimizer's step takes {extra} bytes beside what it keeps"


def check_sync(found: dict[str, Any]) -> None:
    """Raises AssertionError where the sync does not go over NCCL."""
    ways = sorted({name for name, _ in found["collectives"]})
    assert ways in (["c10d._allgather_base_"], []), f"the sync went over {ways}"


def received(collectives: list[tuple[str, list[int]]]) -> int:
    """Bytes that came from other ranks, of all-gathers and of single messages."""
    total = 0
    for name, sizes in collectives:
        if name == "c10d._allgather_base_":
            total += sizes[0] - sizes[1]
        elif name == "c10d.recv_":
            total += sizes[0]
        else:
            assert name == "c10d.send", name
    return total
