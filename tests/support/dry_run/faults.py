"""Mistakes that only a GPU would show, planted one by one: the fake device must refuse each.

A fault is a function that plants it and runs ours; what it raises is what was seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import AdamW

from grpo_spmd.checkpoint import save
from grpo_spmd.config.schema import RewardConfig
from grpo_spmd.engine import weight_proof, weight_sync
from grpo_spmd.engine.engine import RolloutEngine
from grpo_spmd.model import attention
from grpo_spmd.model.attention import PackedLayout
from grpo_spmd.model.offload import HostOffload, HostStorages, ParkedModel, host_buffer
from grpo_spmd.model.policy import Policy, build_policy
from grpo_spmd.model.reward_model_files import read_reward_model
from grpo_spmd.model.values import RewardModel, build_reward_model, build_value_model
from grpo_spmd.records import RolloutBatch, SyncStats
from grpo_spmd.signals import teacher
from grpo_spmd.signals.critic import Critic
from tests.support import weights
from tests.support.dry_run.cases import Trials
from tests.support.dry_run.engine import StandInLLM
from tests.support.dry_run.figures import (
    BUCKET_BYTES,
    check_step,
    check_sync,
    micro_batch,
    step_figures,
    sync_figures,
)
from tests.support.full_tensors import gather_full_tensors
from tests.support.learn import updater_of


def _scores(trials: Trials, **changes: Any) -> None:
    with trials.attention("varlen") as config:
        session = trials.session()
        policy = build_policy(config.model, 1.0, session)
        batch = dataclasses.replace(micro_batch(session.device), **changes)
        updater_of(policy, config).backward(batch, 24, 4, True)


def tensor_on_the_cpu(trials: Trials) -> None:
    batch = micro_batch(trials.cuda.device)
    _scores(trials, advantages=trials.cuda.values(batch.advantages))


def wrong_dtype_into_varlen(trials: Trials) -> None:
    plain = attention._varlen
    with patch.object(
        attention, "_varlen", lambda q, k, v, *more: plain(q.float(), k.float(), v.float(), *more)
    ):
        _scores(trials)


def wide_bounds_into_varlen(trials: Trials) -> None:
    class Wide(PackedLayout):
        def __init__(self, *inputs: Any, **options: Any) -> None:
            super().__init__(*inputs, **options)
            starts = self.bounds[0].long()
            self.bounds = (starts, starts, *self.bounds[2:])

    with patch.object(attention, "PackedLayout", Wide):
        _scores(trials)


def weights_named_on_the_cpu(trials: Trials) -> None:
    policy = build_policy(trials.config.model, 1.0, trials.session(2))
    plain = torch.arange
    with patch.object(weight_proof.torch, "arange", lambda *bounds, device: plain(*bounds)):
        weights.name_of_weights(policy)


def buckets_on_the_cpu(trials: Trials) -> None:
    """It works: over gloo, through the host."""
    plain = torch.empty

    def empty(*size: int, device: Any = None, **options: Any) -> Tensor:
        # A whole tensor has two dimensions, a bucket one.
        return plain(*size, device=None if len(size) == 1 else device, **options)

    policy = build_policy(trials.config.model, 1.0, trials.session(2))
    with patch.object(weight_sync.torch, "empty", empty):
        check_sync(sync_figures(policy, trials.cuda.device, trials.cuda))


def tensors_for_the_engine_on_the_cpu(trials: Trials) -> None:
    engine, policy = _engine(trials)
    engine.wake_weights()
    sent = gather_full_tensors(policy, engine.dtype, BUCKET_BYTES, SyncStats())
    engine.load_weights(((name, trials.cuda.values(tensor)) for name, tensor in sent), 0)


def optimizer_without_fused(trials: Trials) -> None:
    def plain(groups: Any, **options: Any) -> AdamW:
        return AdamW(groups, **{**options, "fused": None})

    policy, _, session = trials.trained()
    with patch("grpo_spmd.model.optimizer.AdamW", plain):
        updater = updater_of(policy, trials.config)
    updater.backward(micro_batch(session.device), 24, 4, True)
    try:
        check_step(step_figures(updater.optimizer, trials.cuda))
    finally:
        updater.optimizer.zero_grad(set_to_none=True)


def step_count_restored_on_the_cpu(trials: Trials) -> None:
    policy, updater, session = trials.trained()
    trials.restore(policy, updater)
    for state in updater.optimizer.state.values():
        state["step"] = state["step"].cpu()
    updater.backward(micro_batch(session.device), 24, 4, True)
    try:
        updater.optimizer.step()
    finally:
        updater.optimizer.zero_grad(set_to_none=True)
        trials.restore(policy, updater)


def _staged_into(trials: Trials, buffer: Callable[[int, torch.device], Tensor]) -> None:
    with patch.object(save, "host_buffer", buffer):
        trials.staged()


def staging_buffer_of_a_power_of_two(trials: Trials) -> None:
    _staged_into(
        trials, lambda size, device: host_buffer(1 << (size - 1).bit_length(), device)[:size]
    )


def staging_buffer_that_is_too_small(trials: Trials) -> None:
    _staged_into(trials, lambda size, device: host_buffer(max(4, size // 2), device))


def staging_buffer_that_is_not_pinned(trials: Trials) -> None:
    _staged_into(trials, lambda size, device: torch.empty(size, dtype=torch.uint8))


def staged_without_waiting(trials: Trials) -> None:
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        trials.staged()


def offloaded_without_waiting(trials: Trials) -> None:
    policy = build_policy(trials.config.model, 1.0, trials.session())
    offload = HostOffload(True, policy, None, updater_of(policy, trials.config).optimizer)
    offload.before_sync()
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        offload.after_sync()


def policy_read_while_it_is_away(trials: Trials) -> None:
    policy = build_policy(trials.config.model, 1.0, trials.session())
    offload = HostOffload(True, policy, None, updater_of(policy, trials.config).optimizer)
    offload.before_sync()
    offload.after_sync()
    weights.name_of_weights(policy)


def _engine(trials: Trials) -> tuple[RolloutEngine, Policy]:
    session = trials.session()
    config, policy = trials.config, build_policy(trials.config.model, 1.0, session)
    engine = RolloutEngine(config.model, config.rollout, config.max_rollout_tokens, session, [0])
    return engine, policy


def _asleep_again(trials: Trials) -> tuple[RolloutEngine, Policy]:
    engine, policy = _engine(trials)
    engine.wake_weights()
    engine.load_weights(gather_full_tensors(policy, engine.dtype, BUCKET_BYTES, SyncStats()), 0)
    engine.wake_kv_cache()
    engine.sleep()
    assert StandInLLM.last.calls == ["sleep 2", "wake weights", "wake kv_cache", "sleep 2"], (
        StandInLLM.last.calls
    )
    return engine, policy


def sampled_after_sleep(trials: Trials) -> None:
    from grpo_spmd.engine.requests import Request

    engine, _ = _asleep_again(trials)
    with patch.object(engine, "_refuse_unless_ready", lambda version: None):
        engine.generate([Request([1, 2, 3], 0)], 0)


def loaded_after_sleep(trials: Trials) -> None:
    engine, policy = _asleep_again(trials)
    with patch.object(engine, "_weights_awake", True):
        engine.load_weights(gather_full_tensors(policy, engine.dtype, BUCKET_BYTES, SyncStats()), 1)


def told_to_sample_after_sleep(trials: Trials) -> None:
    """Ours refuses it first."""
    from grpo_spmd.engine.requests import Request

    _asleep_again(trials)[0].generate([Request([1, 2, 3], 0)], 0)


def memory_taken_while_the_engine_falls_asleep(trials: Trials) -> None:
    """By another process, as vLLM's worker says it."""
    engine, _ = _engine(trials)

    def sleep(level: int) -> None:
        raise AssertionError("Memory usage increased after sleeping.")

    with patch.object(StandInLLM.last, "sleep", sleep):
        engine.sleep()


def _reward_model(trials: Trials) -> RewardModel:
    reward = RewardConfig(model=str(trials.folder / "scores"), name="scores")
    files = read_reward_model(0, reward, trials.folder / "scores", 64)
    return build_reward_model(files, trials.config.model, trials.session())


def reward_model_parked_without_waiting(trials: Trials) -> None:
    parked = ParkedModel(_reward_model(trials))
    with patch.object(torch.cuda, "synchronize", lambda *_: None):
        parked.park()


def reward_model_read_while_it_is_away(trials: Trials) -> None:
    """Ours refuses it first."""
    model = _reward_model(trials)
    ParkedModel(model).park()
    with patch.object(HostStorages, "refuse_if_away", lambda _: None):
        model(model.row_of([[1, 2, 3]]))


def texts_on_the_cpu(trials: Trials) -> None:
    model = _reward_model(trials)
    row = model.row_of([[1, 2, 3]])
    model(dataclasses.replace(row, input_ids=trials.cuda.values(row.input_ids)))


def teachers_places_on_the_cpu(trials: Trials) -> None:
    policy, plain = (
        build_policy(trials.config.model, 1.0, trials.session()),
        teacher.select_teacher_row,
    )
    single = teacher.Teacher(trials.config.teacher, {"": teacher.TeacherModel(policy)}, policy)
    row = micro_batch(trials.cuda.device)

    def on_the_cpu(*inputs: Any) -> Any:
        local, positions = plain(*inputs)
        return local, trials.cuda.values(positions)

    asks = {i: teacher.TeacherRequest("") for i in row.rollout_ids}
    with (
        patch.object(teacher, "select_teacher_row", on_the_cpu),
        patch.object(single, "requests", lambda *_: asks),
    ):
        single.attach(RolloutBatch([[row]], [24], [4]), cast(Any, None), lambda _: None)


def returns_on_the_cpu(trials: Trials) -> None:
    config, row = trials.config, micro_batch(trials.cuda.device)
    model = build_value_model(str(trials.folder / "critic"), config.model, trials.session(), 24, 97)
    critic = Critic(model, config)
    row.old_values = model(row).detach()
    row.returns = torch.zeros(24)
    critic.update(RolloutBatch([[row]], [24], [4]))


def memory_that_nobody_wrote(trials: Trials) -> None:
    """As FSDP takes it for what a collective shall write: by chance there are numbers in it."""
    values = trials.cuda.values(torch.empty(4, device=trials.cuda.device))
    assert values.isfinite().all(), "memory is read that nobody wrote"


# torch 2.11 says the second.
_TWO_DEVICES = (
    r"FakeTensorDeviceMismatchError: .* at least two devices|"
    r"Unhandled FakeTensor Device Propagation for .* two different devices"
)
# What is planted, and how it is refused.
FAULTS: dict[Callable[[Trials], None], str] = {
    tensor_on_the_cpu: _TWO_DEVICES,
    wrong_dtype_into_varlen: r"_varlen_attn takes float16 and bfloat16 alone, .* not "
    r"torch\.float32",
    wide_bounds_into_varlen: r"_varlen_attn takes int32 bounds, not torch\.int64",
    weights_named_on_the_cpu: _TWO_DEVICES,
    buckets_on_the_cpu: r"the sync went over \['c10d\.recv_', 'c10d\.send'\]",
    tensors_for_the_engine_on_the_cpu: r"AssertionError: model\.embed_tokens\.weight is on cpu",
    optimizer_without_fused: r"the optimizer's step takes \d+ bytes beside what it keeps",
    step_count_restored_on_the_cpu: r"_fused_adamw_ is given tensors of \['cpu', 'cuda'\]",
    staging_buffer_of_a_power_of_two: r"a staging buffer of \d+ bytes for \d+",
    staging_buffer_that_is_too_small: r"RuntimeError: shape '\[.*\]' is invalid for input of size",
    staging_buffer_that_is_not_pinned: r"asynchronous copy .* that is not pinned",
    staged_without_waiting: r"the host goes on while the device still writes its memory",
    offloaded_without_waiting: r"device memory is given back while a copy still reads it",
    policy_read_while_it_is_away: r"reads a tensor .* whose memory was given back",
    reward_model_parked_without_waiting: r"device memory is given back while a copy still reads it",
    reward_model_read_while_it_is_away: r"reads a tensor .* whose memory was given back",
    texts_on_the_cpu: _TWO_DEVICES,
    teachers_places_on_the_cpu: r"aten\.index_copy is given tensors of \['cpu', 'cuda'\]",
    returns_on_the_cpu: _TWO_DEVICES,
    sampled_after_sleep: r"sampled while \['kv_cache', 'weights'\] are not mapped",
    loaded_after_sleep: r"aten\.copy_ reads a tensor .* whose memory was given back",
    memory_taken_while_the_engine_falls_asleep: r"RuntimeError: rollout: the engine's sleep gave "
    r"back its pool .*another process took more",
    memory_that_nobody_wrote: r"AssertionError: memory is read that nobody wrote",
    told_to_sample_after_sleep: r"EngineStateError: generate: the engine is asleep",
}
