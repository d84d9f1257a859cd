"""Worker: three steps of sync and update with nothing, the optimizer's state, or all of the trainer
in host memory in between.

    python -m tests.support.workers.offload CONFIG
Every bit of weights, moments and sums must be equal, and whoever reads what is away must be
refused.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
from grpo_spmd.model.offload import HostOffload, storage_of
from grpo_spmd.model.policy import Policy, build_policy, build_reference, hf_named_parameters
from grpo_spmd.records import SyncStats
from tests.support.full_tensors import gather_full_tensors
from tests.support.learn import sampled_step_of, updater_of
from tests.support.workers.update import fixed_groups, score


def main() -> None:
    config = load_config(sys.argv[1])
    session = start_session()
    seen = {label: three_steps(config, session, label) for label in (False, "optimizer", True)}
    assert len(seen[False]) > 60
    for label in ("optimizer", True):
        assert seen[label].keys() == seen[False].keys()
        for name, expected in seen[False].items():
            assert torch.equal(seen[label][name], expected), (label, name)
    print(f"rank {session.rank}: equal", flush=True)
    end_session()


def three_steps(config: Config, session: Session, label: Any) -> dict[str, Tensor]:
    policy = build_policy(config.model, config.rollout.temperature, session)
    reference = build_reference(
        policy, config.model, config.rollout.temperature, config.loss.kl_coef, session
    )
    assert isinstance(reference, Policy)
    updater = updater_of(policy, config)
    offload = HostOffload(label, policy, reference, updater.optimizer)
    seen: dict[str, Tensor] = {}
    for step in range(3):
        sampled = sampled_step_of(config, session)
        groups = fixed_groups()[session.rank :: session.world_size]
        sampled.add(groups, score(groups))
        batch, _ = assemble_batch(sampled, session)

        retained = on_device(policy, reference, updater)
        offload.before_sync()
        offload.before_sync()  # again: nothing more happens
        seen |= {
            f"{step} {name}": tensor
            for name, tensor in gather_full_tensors(policy, torch.float32, 4096, SyncStats())
        }
        offload.after_sync()
        gone = {
            owner
            for owner, size in on_device(policy, reference, updater).items()
            if not size and retained[owner]
        }
        expected = {"policy", "reference"} if label is True else set()
        if label and step:  # AdamW makes its moments in the first step
            expected.add("optimizer")
        assert gone == expected, (label, step, gone)
        if label is True or (label == "optimizer" and step):
            refuses(functools.partial(attach_logprobs, policy, reference, batch, config.loss, 1))
            refuses(updater.optimizer.step)
        if label is True:
            refuses(lambda: list(hf_named_parameters(policy)))
        returned = offload.to_device()["memory/host/offloaded_gib"] * 2**30
        assert returned == sum(retained[owner] for owner in gone), (label, step)
        assert offload.to_device() == {"memory/host/offloaded_gib": 0.0}
        assert on_device(policy, reference, updater) == retained

        attach_logprobs(policy, reference, batch, config.loss, config.training.num_optimizer_steps)
        sums = updater.update(batch)
        seen |= {
            f"{step} {n}": torch.tensor(s.value)
            for n, s in sums.items()
            if isinstance(s.value, float)
        }
        for number, tensor in enumerate(moments_of(updater)):
            seen[f"{step} moment {number}"] = tensor.to_local().clone()  # type: ignore[attr-defined]
    seen |= {
        f"3 {name}": tensor
        for name, tensor in gather_full_tensors(policy, torch.float32, 4096, SyncStats())
    }
    initial, final = (
        next(tensor for name, tensor in seen.items() if name.startswith(f"{step} model"))
        for step in (0, 3)
    )
    assert not torch.equal(initial, final)
    return seen


def moments_of(updater: PolicyUpdater) -> list[Tensor]:
    return [
        value
        for state in updater.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]


def on_device(policy: Policy, reference: Policy, updater: PolicyUpdater) -> dict[str, int]:
    tensors: dict[str, list[Tensor]] = {
        "policy": list(policy.parameters()),
        "reference": list(reference.parameters()),
        "optimizer": moments_of(updater),
    }
    return {
        owner: sum(storage_of(tensor).nbytes() for tensor in group)
        for owner, group in tensors.items()
    }


def refuses(call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        assert "model.offload" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("read what is in host memory")


if __name__ == "__main__":
    with exit_with_outcome():
        main()
