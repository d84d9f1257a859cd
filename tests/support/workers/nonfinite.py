"""Worker: updates of the fixed rollouts of tests.support.workers.update, poisoned in several ways.

    python -m tests.support.workers.nonfinite CONFIG OUT.pt
Rank 0 saves {case: what each rank's update returned, and whether anything moved}; and what an
update leaves that is given up after the first micro-batch, as at a signal.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import Session, end_session, start_session
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, load_weights
from grpo_spmd.records import Completion, RolloutBatch, RolloutGroup
from tests.support.learn import sampled_step_of, updater_of
from tests.support.workers.update import UNSCORED, fixed_groups, score

POISONED = (0, 2)  # (slot, sample) of a rollout that counts: rollout 2


def main() -> None:
    config, out = load_config(sys.argv[1]), sys.argv[2]
    session = start_session()
    policy = build_policy(config.model, config.rollout.temperature, session)

    def two_steps(config: Config) -> Config:
        return dataclasses.replace(
            config, training=dataclasses.replace(config.training, num_mini_batches=2)
        )

    clean, poisoned, masked, huge = (
        make_batch(config, session, kind) for kind in ("clean", "nan", "masked nan", "huge reward")
    )
    half = make_batch(two_steps(config), session, "nan")
    half_clean = make_batch(two_steps(config), session, "clean")
    for batch in (half, half_clean):
        attach_logprobs(policy, None, batch, config.loss, num_optimizer_steps=2)
    results = {
        "clean": run(config, policy, [clean]),
        "nan of the engine": run(config, policy, [poisoned]),
        "nan in a masked place": run(config, policy, [masked]),
        "gradient alone": run(config, policy, [huge]),
        "in a row": run(config, policy, [poisoned, huge, clean, poisoned, clean]),
        "clean twice": run(config, policy, [clean, clean]),
        "one mini-batch of two": run(two_steps(config), policy, [half]),
        "given up": give_up(two_steps(config), policy, half_clean),
        "inf in a parameter of rank 1": run(config, policy, [clean], spoil=session.rank == 1),
    }
    if session.is_rank0:
        torch.save(results, out)
    end_session()


def give_up(config: Config, policy: Policy, batch: RolloutBatch) -> dict[str, Any]:
    load_weights(hf_named_parameters(policy), Path(config.model.path))
    updater = updater_of(policy, config)
    updater.update(batch)  # moments to lose
    old, counts = _state(policy, updater), updater.state()

    num_asked = 0

    def stop(_: bool) -> None:
        """At the second micro-batch: by the first the root is gathered."""
        nonlocal num_asked
        num_asked += 1
        if num_asked % 2 == 0:
            raise InterruptedError

    num_stopped = 0
    for begin in (
        lambda: attach_logprobs(policy, None, batch, config.loss, 2, stop),
        lambda: updater.update(batch, stop_check=stop),
    ):
        try:
            begin()
        except InterruptedError:
            num_stopped += 1
    new, same_counts = _state(policy, updater), updater.state() == counts
    moved = [name for name in new if not torch.equal(new[name], old[name])]
    requests: list[bool] = []
    updater.update(batch, stop_check=requests.append)
    sizes = [len(mini_batch) for mini_batch in batch.mini_batches]
    return {
        "moved": moved,
        "num_stopped": num_stopped,
        "same_counts": same_counts,
        "asked": requests,
        "sizes": sizes,
    }


def make_batch(config: Config, session: Session, kind: str) -> RolloutBatch:
    groups = [_poison(group, kind) for group in fixed_groups()][session.rank :: session.world_size]
    scored = score(groups)
    if (
        kind == "huge reward"
    ):  # the loss stays below float32's largest number, the gradient's sums do not
        scored.rewards = [None if reward is None else reward * 3e38 for reward in scored.rewards]
    sampled = sampled_step_of(config, session)
    sampled.add(groups, scored)
    batch, _ = assemble_batch(sampled, session)
    return batch


def _poison(group: RolloutGroup, kind: str) -> RolloutGroup:
    slot, sample = {"nan": POISONED, "masked nan": UNSCORED}.get(kind, (-1, -1))
    if group.slot != slot:
        return group
    completions = list(group.completions)
    good = completions[sample]
    completions[sample] = Completion(
        good.token_ids, [math.nan] * len(good.token_ids), good.finish_reason
    )
    return dataclasses.replace(group, completions=completions)


def run(
    config: Config, policy: Policy, batches: list[RolloutBatch], spoil: bool = False
) -> dict[str, Any]:
    """Several updates by one updater: what each returned on each rank, and what each moved."""
    load_weights(hf_named_parameters(policy), Path(config.model.path))
    if spoil:  # the shard of one rank
        dict(hf_named_parameters(policy))["model.norm.weight"].to_local().detach()[0] = math.inf
    updater = updater_of(policy, config)
    returned, moved, learning_rates, loss_is_finite = [], [], [], []
    for batch in batches:
        fraction, _ = updater.backward(
            batch.mini_batches[0][0], batch.num_loss_tokens[0], batch.num_loss_sequences[0], False
        )
        loss_is_finite.append(
            on_rank0(lambda pieces: pieces, math.isfinite(fraction["loss"].value))
        )
        updater.optimizer.zero_grad(set_to_none=True)
        old = _state(policy, updater)
        sums = updater.update(batch)
        returned.append(on_rank0(list, {name: reduction.value for name, reduction in sums.items()}))
        state = _state(policy, updater)
        moved.append(
            sorted(
                name for name in state if name not in old or not torch.equal(state[name], old[name])
            )
        )
        learning_rates.append(updater._schedule.get_last_lr()[0])
        assert all(parameter.grad is None for parameter in policy.parameters())
    return {
        "returned": returned,
        "loss_is_finite": loss_is_finite,
        "moved": moved,
        "learning_rates": learning_rates,
        "state": _state(policy, updater),
    }


def _state(policy: Policy, updater: PolicyUpdater) -> dict[str, torch.Tensor]:
    """Parameters and the optimizer's state, whole."""
    result = {}
    for name, parameter in hf_named_parameters(policy):
        result[name] = parameter.full_tensor().detach().clone()
        for key, value in updater.optimizer.state.get(parameter, {}).items():
            result[f"{name}/{key}"] = (
                value.full_tensor() if hasattr(value, "full_tensor") else value
            ).clone()
    return result


if __name__ == "__main__":
    with exit_with_outcome():
        main()
