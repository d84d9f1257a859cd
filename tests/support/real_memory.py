"""What a real policy holds, by torch's own account of what its allocator gave and got back: what
plan/ is held
against."""

from __future__ import annotations

import dataclasses
import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_spmd.checks import memory
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.session import Session, policy_mesh, sequence_group
from grpo_spmd.learn.assemble import pack_rollouts
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.config_json import read_model
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import DTYPES, build_policy, build_reference
from grpo_spmd.records import MicroBatch, Rollout, SyncStats
from grpo_spmd.tools.plan.dry_run import peaks_of
from grpo_spmd.tools.plan.phases import trainer_pass
from tests.support.full_tensors import gather_full_tensors

Figures = dict[str, int]  # bytes


@contextmanager
def lone_rank(num_ranks: int, num_replicas: int, sequence_ranks: int = 1) -> Iterator[Session]:
    """The first rank of so many, of which no other is there: its tensors are real, collectives do
    nothing. (With real
    ones gloo's threads free buffers that this thread allocated, and torch's account of it does not
    see that.)"""
    rank = sequence_ranks - 1  # the one whose slice has the most completion tokens
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        device = torch.device("cpu")
        group = sequence_group(device, sequence_ranks)
        mesh = policy_mesh(device, num_replicas)
        yield Session(rank, num_ranks, 0, device, mesh, sequence_group=group)
    finally:
        dist.destroy_process_group()


def measured(config: Config, session: Session) -> Figures:
    """Collective. Bytes of this rank: its state with moments, what waits in host memory during a
    rollout, and the most
    that is live while it scores, makes an update of two micro-batches, and gathers its weights."""
    result: Figures = {}
    gc.collect()  # what is freed later would be taken off
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        temperature, max_length = config.rollout.temperature, config.max_rollout_tokens
        policy = build_policy(config.model, temperature, session, max_rollout_tokens=max_length)
        reference = build_reference(policy, config.model, temperature, config.loss.kl_coef, session)
        updater = PolicyUpdater(
            policy,
            config.optimizer,
            config.loss,
            config.training,
            config.rollout.max_completion_tokens,
        )
        _update(updater, [_batch([(2, 2)], session.sequence_ranks)])  # AdamW makes its moments
        batch = _full_batch(config, session.sequence_ranks)
        with record_function("mark:scoring"), torch.no_grad():
            policy(batch)
            cast(FSDPModule, policy).reshard()
        with record_function("mark:update"):
            _update(updater, [batch, batch])
        with record_function("mark:sync"):
            bucket_bytes = config.rollout.sync_bucket_bytes("cpu")
            # no name for a tensor: it would be alive while the next is made
            deque(
                gather_full_tensors(policy, DTYPES[config.model.dtype], bucket_bytes, SyncStats()),
                maxlen=0,
            )
        with record_function("mark:end"):
            pass
        offload = HostOffload(config.model.offload, policy, reference, updater.optimizer)
        offload.before_sync()
        offload.after_sync()
        result["offloaded"] = round(offload.to_device()["memory/host/offloaded_gib"] * 2**30)
    return result | _live(recorded)


def predicted(config: Config, num_ranks: int) -> Figures:
    """The same by arithmetic and dry run, of a rank with full shards."""
    facts = read_model(config.model.path)
    assert facts is not None
    state = memory.state_of(config, facts, num_ranks)
    # The sync here has the buckets of a CPU.
    bucket_mib = config.rollout.sync_bucket_bytes("cpu") >> 20
    rollout = dataclasses.replace(config.rollout, weight_sync_bucket_mib=bucket_mib)
    in_sync = dataclasses.replace(config, rollout=rollout)
    work = trainer_pass(config, Path(config.model.path), num_ranks, on_gpu=False)
    peaks = peaks_of(work)
    return {
        "state": state.num_bytes,
        "scoring": state.num_bytes + peaks.scoring.total(),
        "update": state.num_bytes + peaks.update.total(),
        "sync": state.num_bytes + sum(memory.sync_buffers(in_sync, facts, num_ranks).values()),
        "offloaded": state.offloaded(config.model.offload),
    }


def _full_batch(config: Config, num_slices: int) -> MicroBatch:
    number = config.micro_batch_tokens // config.max_rollout_tokens
    lengths = [(config.data.max_prompt_tokens, config.rollout.max_completion_tokens)] * number
    return _batch(lengths, num_slices)


def _batch(lengths: list[tuple[int, int]], num_slices: int) -> MicroBatch:
    rollouts = [
        Rollout(i, 1.0, True, [1] * p, [2] * c, [-1.0] * c) for i, (p, c) in enumerate(lengths)
    ]
    batch = pack_rollouts(rollouts, torch.device("cpu"), num_slices)
    batch.ref_logprobs = batch.rollout_logprobs
    return batch


def _update(updater: PolicyUpdater, batches: list[MicroBatch]) -> None:
    for batch in batches:
        updater.backward(batch, len(batch.target_ids), len(batch.rollout_ids), is_synced=True)
    updater.optimizer.step()
    updater.optimizer.zero_grad(set_to_none=True)


def _live(recorded: profile) -> Figures:
    assert recorded.profiler is not None
    results: Any = recorded.profiler.kineto_results
    events = sorted(results.events(), key=lambda event: event.start_ns())
    current, location, peaks = 0, "", dict[str, int]()
    state = 0
    for event in events:
        if event.name().startswith("mark:"):
            location = event.name().removeprefix("mark:")
            state = state or current
            peaks[location] = current
        elif event.name() == "[memory]":
            current += int(event.nbytes())
            peaks[location] = max(peaks.get(location, 0), current)
    return {"state": state, **{name: peaks[name] for name in ("scoring", "update", "sync")}}
