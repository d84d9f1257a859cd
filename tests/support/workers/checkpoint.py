"""python -m tests.support.workers.checkpoint save|load FOLDER CONFIG NUM_REPLICAS: two updates and
a save, or a load.

Prints the digest of every full tensor of policy and optimizer, so that the test can compare what
different numbers of ranks hold.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from grpo_spmd.checkpoint.manifest import read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.state import load_state, state_tensors
from grpo_spmd.config.load import load_config
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, start_session
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.policy import Policy, build_policy
from tests.support.checkpoints import checkpoints_of
from tests.support.learn import updater_of
from tests.support.weights import name_of_weights


def main() -> None:
    label, folder, config_file, num_replicas = (
        sys.argv[1],
        Path(sys.argv[2]),
        sys.argv[3],
        sys.argv[4],
    )
    config = load_config(
        config_file, [f"model.num_replicas={num_replicas}", "optimizer.warmup_steps=5"]
    )
    session = start_session(config.model.num_replicas)
    # Other random numbers than the saved ones came from: what is not loaded differs.
    policy = build_policy(config.model, 1.0, session, seed=0 if label == "save" else 1)
    updater = updater_of(policy, config)
    if label == "save":
        for step in range(2):
            for number, parameter in enumerate(p for p in policy.parameters() if p.requires_grad):
                assert isinstance(parameter, DTensor)
                rows = (
                    torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape).sin()
                    + number
                    + step
                )
                # the same on all ranks: replicated
                full = DTensor.from_local(rows, parameter.device_mesh, run_check=False)
                parameter.grad = full.redistribute(parameter.device_mesh, parameter.placements)
            updater.optimizer.step()
            updater._schedule.step()
            updater._num_updates += 1
        checkpoints = checkpoints_of(config, session, policy, updater)
        checkpoints.stage(2, position=17, log_state={"mismatch_scale": None})
        old = digests(policy, updater) | {"policy.*": name_of_weights(policy)}
        with torch.no_grad():  # training goes on while the copy is written
            for parameter in policy.parameters():
                parameter.add_(1.0)
        checkpoints.write_staged()
        checkpoints.wait()
        if session.is_rank0:
            verify_checkpoint(folder)
    else:
        load_state(policy, updater, folder, read_trainer(folder))
        old = digests(policy, updater) | {"policy.*": name_of_weights(policy)}
    if session.is_rank0:
        print(
            "lr",
            updater._schedule.get_last_lr(),
            [group["lr"] for group in updater.optimizer.param_groups],
        )
        for name, digest in old.items():
            print(name, digest)
    end_session()


def digests(policy: Policy, updater: PolicyUpdater) -> dict[str, str]:
    tensors = {
        name: tensor.full_tensor().detach()
        for name, tensor in state_tensors(policy, updater).items()
    }
    steps = {float(state["step"]) for state in updater.optimizer.state.values()}
    return {
        name: hashlib.sha256(t.numpy().tobytes()).hexdigest()[:16] for name, t in tensors.items()
    } | {"steps": str(steps)}


if __name__ == "__main__":
    with exit_with_outcome():
        main()
