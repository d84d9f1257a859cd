"""One rank of the weight-sync benchmark: time gathers, or whole syncs into vLLM; rank 0 tells the
figures.

python -m benchmarks.speed.weight_sync_worker gather|engine FOLDER DTYPE BUCKET_MIB,...
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.support import ranks
from benchmarks.support.models import make_model
from grpo_spmd.config.schema import Config, DataConfig, ModelConfig, RewardConfig, RolloutConfig
from grpo_spmd.demo.making import model_config
from grpo_spmd.distributed.collectives import on_rank0, start_all_gather, wait_for
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.engine.weight_proof import local_weights_hash
from grpo_spmd.engine.weight_sync import WeightSync, gather_tensors
from grpo_spmd.model.policy import (
    DTYPES,
    Policy,
    build_policy,
    hf_named_parameters,
    hf_named_shards,
)
from grpo_spmd.model.sharding import shard_group
from grpo_spmd.records import SyncStats
from tests.support.full_tensors import gather_full_tensors

ROUNDS = 7
SHAPES = {  # hidden, intermediate, layers, vocabulary
    "0.3M": (64, 192, 4, 1000),
    "20M": (384, 1152, 10, 8000),
    "98M": (768, 2304, 10, 35500),
}
_HEAD_DIM = 64


def main() -> None:
    label, folder = sys.argv[1], Path(sys.argv[2])
    transformers.utils.logging.disable_progress_bar()
    dtype_name: Any = sys.argv[3]
    dtype, buckets = DTYPES[dtype_name], [int(mib) for mib in sys.argv[4].split(",")]
    config = Config(
        run_dir=str(folder / "run"),
        model=ModelConfig(path=str(folder), dtype=dtype_name),
        data=DataConfig(train="none", max_prompt_tokens=32),
        rollout=RolloutConfig(max_completion_tokens=32),
        rewards=(RewardConfig(name="gsm8k"),),
    )
    session = start_session()
    # vLLM comes first, as in a run; it is in the way of nothing that is measured.
    engine = (
        RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
        if label == "engine"
        else None
    )
    policy = build_policy(config.model, 1.0, session)
    parameters = [parameter for _, parameter in hf_named_parameters(policy)]
    sizes = [parameter.numel() * dtype.itemsize for parameter in parameters]
    source, target = (
        torch.ones(sum(sizes), dtype=torch.uint8, device=session.device) for _ in range(2)
    )
    timed: dict[str, Callable[[], SyncStats]] = {"memcpy": lambda: _no_stats(target.copy_(source))}
    bounds: dict[str, int] = {}
    if engine is None:
        if session.world_size > 1:
            timed["all-gather alone"] = lambda: _all_gather_alone(
                target, shard_group(parameters[0])
            )
        timed["full_tensor() of each"] = lambda: _full_tensors(policy, dtype)
        timed |= {f"gather, {mib} MiB": _gather(policy, dtype, mib << 20) for mib in buckets}
        bounds = {
            f"gather, {mib} MiB": min(2, session.world_size) * (mib << 20) + max(sizes)
            for mib in buckets
        }
    else:
        bucket_bytes = config.rollout.sync_bucket_bytes(session.device.type)
        full = torch.empty(
            sum(sizes) // dtype.itemsize + (1 << 20), dtype=dtype, device=session.device
        ).zero_()
        timed["gather alone"] = _tensors(policy, dtype, bucket_bytes)
        timed["gather and copy"] = _tensors(policy, dtype, bucket_bytes, full)
        timed["gather and copy, named"] = _tensors(policy, dtype, bucket_bytes, full, is_named=True)
        # what vLLM takes when nothing is gathered
        ready = list(gather_full_tensors(policy, dtype, 1 << 20, SyncStats()))
        timed["vLLM's load alone"] = lambda: _load(engine, ready)
        weight_sync = WeightSync(policy, engine, bucket_bytes, is_named=True)
        weight_sync.sync(1)  # through vLLM's loader, and proved
        weight_sync.sync(1)  # directly, and proved
        timed["whole sync through vLLM's loader"] = lambda: _sync(weight_sync, is_direct=False)
        timed["whole sync, direct"] = lambda: _sync(weight_sync, is_direct=True)
        timed["whole sync, direct, not named"] = lambda: _sync(
            weight_sync, is_direct=True, is_named=False
        )
    times, stats = ranks.time_in_turn(timed, ROUNDS)
    peaks = {name: peak_bytes(run) for name, run in timed.items()} if engine is None else {}
    for name, rounds_values in times.items():
        if session.is_rank0:
            ranks.tell(
                {
                    "what": name,
                    "seconds": rounds_values,
                    "collectives": stats[name].num_collectives,
                    "moved_bytes": stats[name].bytes,
                    "needed_bytes": sum(sizes),
                    "peak_bytes": peaks.get(name, 0),
                    "bound_bytes": bounds.get(name, 0),
                }
            )
    if engine is not None:
        engine.shutdown()
    end_session()


def peak_bytes(run: Callable[[], SyncStats]) -> int:
    """Collective. `ranks.peak_bytes` of the rank with most, of a run that is not the first."""
    run()
    if not torch.cuda.is_available():
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD: what torch frees is gone at once, and no slack of the heap is taken for
        # ours
        libc.mallopt(-3, 1 << 16)
        libc.malloc_trim(0)  # what was freed before would be used again, and not be seen
    return int(on_rank0(max, ranks.peak_bytes(run)))


def _gather(policy: Policy, dtype: torch.dtype, bucket_bytes: int) -> Callable[[], SyncStats]:
    def run() -> SyncStats:
        stats = SyncStats()
        for _ in gather_full_tensors(
            policy, dtype, bucket_bytes, stats
        ):  # a receiver that throws everything away
            pass
        return stats

    return run


def _tensors(
    policy: Policy,
    dtype: torch.dtype,
    bucket_bytes: int,
    into: torch.Tensor | None = None,
    is_named: bool = False,
) -> Callable[[], SyncStats]:
    """As a direct load draws them; copied out where there is a place for them."""

    def run() -> SyncStats:
        stats, shards = SyncStats(), list(hf_named_shards(policy))
        position = 0
        for _, tensor in gather_tensors(shards, dtype, bucket_bytes, stats):
            if into is not None:
                into[position : position + tensor.numel()].view(tensor.shape).copy_(tensor)
            position += tensor.numel()
        if is_named:
            local_weights_hash(shards, dtype)
        return stats

    return run


def _sync(weight_sync: WeightSync, is_direct: bool, is_named: bool = True) -> SyncStats:
    direct = weight_sync._direct
    weight_sync._direct, weight_sync._is_named = direct if is_direct else None, is_named
    stats = weight_sync.sync(1)
    weight_sync._direct = direct
    return stats


@torch.no_grad()
def _full_tensors(policy: Policy, dtype: torch.dtype) -> SyncStats:
    """What one writes first: each tensor gathered as it is, then cast."""
    stats = SyncStats()
    for _, parameter in hf_named_parameters(policy):
        full = parameter.full_tensor()
        stats.num_collectives += 1
        stats.bytes += full.nbytes
        full.to(dtype)
    return stats


def _all_gather_alone(buffer: torch.Tensor, group: torch.distributed.ProcessGroup) -> SyncStats:
    ranks = torch.distributed.get_world_size(group)
    full = buffer[: len(buffer) // ranks * ranks]
    wait_for(start_all_gather(full.view(ranks, -1), group))
    return SyncStats(full.nbytes, 1)


def _load(engine: RolloutEngine, ready: list[tuple[str, torch.Tensor]]) -> SyncStats:
    engine.wake_weights()
    engine.load_weights(iter(ready), 0)
    engine.wake_kv_cache()
    return SyncStats()


def _no_stats(_: object) -> SyncStats:
    return SyncStats()


def make(folder: Path) -> None:
    """Random Qwen3 models of SHAPES."""
    for name, (hidden, intermediate, layers, vocabulary) in SHAPES.items():
        heads = max(2, hidden // _HEAD_DIM)
        config = model_config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            head_dim=_HEAD_DIM,
            max_position_embeddings=256,
        )
        make_model(folder / name, config)


if __name__ == "__main__":
    with exit_with_outcome():
        main()
