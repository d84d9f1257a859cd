"""Worker: a critic on the policy's own layers, over the rollouts of `fixed_groups`, for several
settings and splits of the work; its checkpoint, its wait in host memory, the warm-up, and faults
that the running checks have to see.

    python -m tests.support.workers.policy_critic CONFIG REFERENCE OUT.pt
Rank 0 saves {(setting, split): {values, advantages, losses, gradients, parameters, ...}}.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grpo_spmd.checkpoint.manifest import read_trainer
from grpo_spmd.checkpoint.state import load_state, state_tensors, trained_parameters
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, policy_mesh
from grpo_spmd.learn.update import PolicyUpdater
from grpo_spmd.model.lora import initialise_adapters
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, load_weights
from grpo_spmd.model.sharding import first_row
from grpo_spmd.model.values import PolicyValues
from grpo_spmd.proofs.gradient_check import GradientCheck, SignalProofs
from grpo_spmd.records import MicroBatch, TeacherSignal
from grpo_spmd.signals.critic import Critic, PolicyCritic, open_critic
from grpo_spmd.signals.value_proofs import ValueTargets
from tests.support.learn import check_settings_of, merged_on_all
from tests.support.workers.critic import Step, Trials, by_rollout, gathered, refuses, saved
from tests.support.workers.critic import changed as of_critic
from tests.support.workers.update import deal, fixed_groups

SETTINGS = ("as configured", "several steps", "episodes")
SPLITS = {"one row": (100_000, "in turn", True), "rows dealt at random": (90, "at random", False)}
REPLICATED, ADAPTERS, WARMED_UP = "two replicas", "adapters", "warmed up"


def changed(config: Config, setting: str, tokens: int = 100_000) -> Config:
    """The critic's settings, without the learning rate of a critic of its own."""
    result = of_critic(config, setting, tokens)
    return dataclasses.replace(
        result, critic=dataclasses.replace(result.critic, lr=config.critic.lr)
    )


def full_head() -> dict[str, Tensor]:
    """That of all trials: one of zeros would give the policy no gradient."""
    draw = torch.Generator().manual_seed(3)
    return {
        "weight": torch.randn(1, 64, generator=draw) / 8,
        "bias": torch.randn(1, generator=draw),
    }


class PolicyTrials(Trials):
    def parts(
        self, config: Config, policy: Policy | None = None, mesh: Any = None
    ) -> tuple[PolicyCritic, PolicyUpdater]:
        """With the weights that all trials begin with."""
        policy = policy or self.policy
        self.policy = policy
        load_weights(hf_named_parameters(policy), Path(config.model.path))
        initialise_adapters(policy.model, 0)
        session = self.session if mesh is None else dataclasses.replace(self.session, mesh=mesh)
        critic = open_critic(config, policy, session)
        assert isinstance(critic, PolicyCritic)
        with torch.no_grad():
            for name, parameter in critic.model.head.named_parameters():
                local, initial = (
                    cast(DTensor, parameter).to_local(),
                    first_row(cast(DTensor, parameter)),
                )
                local.copy_(full_head()[name][initial : initial + len(local)])
        max_length = config.rollout.max_completion_tokens
        return critic, PolicyUpdater(
            policy, config.optimizer, config.loss, config.training, max_length, critic
        )

    def checked(
        self, config: Config, critic: PolicyCritic, updater: PolicyUpdater, step: Step
    ) -> list[str]:
        """What the running checks find wrong, on all ranks."""
        settings = check_settings_of(config, frozenset())
        values = ValueTargets(critic, config.critic)
        check = GradientCheck(self.policy, updater, settings, SignalProofs(values=values))
        groups = deal(fixed_groups(), "in turn", self.session)
        faulty = check.run(groups, self.session.device, accumulates=True).errors
        result: list[str] = on_rank0(
            lambda rank_values: [text for texts in rank_values for text in texts], faulty
        )
        assert all(p.grad is None for p in (*self.policy.parameters(), *critic.model.parameters()))
        return result + self.check(config, critic, step)

    def result(
        self, critic: PolicyCritic, updater: PolicyUpdater, step: Step, *, is_held: bool = False
    ) -> dict[str, Any]:
        """After the update, with what went into it."""
        _, batch, decision = step
        gradients: list[dict[str, Tensor]] = []
        with_head = {f"head.{name}": p for name, p in critic.model.head.named_parameters()}
        named = {**trained_parameters(self.policy), **cast(dict[str, DTensor], with_head)}
        hook = updater.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(
                {name: _full(p.grad) for name, p in named.items() if not name.startswith("head.")}
            )
        )
        head_values = critic.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(
                {name: _full(p.grad) for name, p in named.items() if name.startswith("head.")}
            )
        )
        old = by_rollout(batch)
        update = updater.measure if is_held else updater.update
        sums = merged_on_all(update(batch) | critic.update(batch))
        hook.remove()
        head_values.remove()
        return {
            **{name: gathered(values) for name, values in old.items()},
            "metrics": on_rank0(
                lambda pieces: pieces[0],
                {k: v for k, v in decision.metrics.items() if "critic/" in k},
            ),
            "sums": {
                name: sums[name].value
                for name in sorted(sums)
                if name.startswith(("critic/", "optim/"))
            },
            "value": sums["value"].value if "value" in sums else 0.0,
            "loss": sums["loss"].value,
            "teacher": sums["teacher"].value if "teacher" in sums else 0.0,
            "policy": sums["policy"].value,
            "gradients": gradients,
            "parameters": {name: _full(p) for name, p in named.items()},
            "rows": len(batch.micro_batches),
        }


def _full(tensor: Any) -> Tensor:
    result: Tensor = tensor.full_tensor().detach().clone()
    return result


def main() -> None:
    trials, results = PolicyTrials(*sys.argv[1:3]), {}
    session, plain = trials.session, trials.policy
    for setting in SETTINGS:
        for split, (tokens, method, packed) in SPLITS.items():
            config = changed(trials.config, setting, tokens)
            critic, updater = trials.parts(config)
            step = trials.step(config, critic, method, packed=packed)
            assert not (faulty := trials.checked(config, critic, updater, step)), (
                setting,
                split,
                faulty[:3],
            )
            results[setting, split] = trials.result(critic, updater, step)
    config = changed(trials.config, "several steps")
    critic, updater = trials.parts(config)
    retained = trials.result(critic, updater, trials.step(config, critic), is_held=True)
    assert all(
        name.startswith("head.") for step_values in retained["gradients"] for name in step_values
    )
    results["several steps", WARMED_UP] = retained
    if session.world_size == 2:
        mesh = policy_mesh(session.device, 2)
        temperature = config.rollout.temperature
        replicated = build_policy(
            config.model, temperature, dataclasses.replace(session, mesh=mesh)
        )
        critic, updater = trials.parts(config, replicated, mesh)
        step = trials.step(config, critic)
        assert not (faulty := trials.checked(config, critic, updater, step)), faulty[:3]
        results["several steps", REPLICATED] = trials.result(critic, updater, step)
    adapted = dataclasses.replace(config.model, lora=LoraConfig(rank=4))
    policy = build_policy(adapted, config.rollout.temperature, session, seed=0)
    critic, updater = trials.parts(config, policy)
    step = trials.step(config, critic)
    assert not (faulty := trials.checked(config, critic, updater, step)), faulty[:3]
    results["several steps", ADAPTERS] = trials.result(critic, updater, step)
    trials.policy = plain
    if session.world_size == 2:
        waits(trials, config)
        skips(trials, config)
        beside_a_teacher(trials)
        goes_on(trials, config)
        print(f"{faults(trials)} faults seen", flush=True)
    if session.is_rank0:
        torch.save(results, sys.argv[3])
    end_session()


def waits(trials: PolicyTrials, config: Config) -> None:
    """Head and moments in host memory between two steps change no bit of them."""
    actual: list[dict[str, Any]] = []
    for is_moved in (True, False):
        critic, updater = trials.parts(config)
        offload = HostOffload(
            False, trials.policy, None, updater.optimizer, critic.offloadable_models
        )
        for _ in range(2):
            if is_moved:
                offload.before_sync()
                refuses(lambda critic=critic: trials.step(config, critic))  # type: ignore[misc]
                assert offload.to_device()["memory/host/offloaded_gib"] > 0
            actual.append(trials.result(critic, updater, trials.step(config, critic)))
    same(actual[1]["parameters"], actual[3]["parameters"])


def skips(trials: PolicyTrials, config: Config) -> None:
    """A return that is not finite on one rank: neither policy nor head moves in that mini-batch, on
    any."""
    critic, updater = trials.parts(config)
    step = trials.step(config, critic)
    plain = trials.result(critic, updater, step)
    critic, updater = trials.parts(config)
    step = trials.step(config, critic)
    if not trials.session.is_rank0:
        row = step[1].mini_batches[0][0]
        assert row.returns is not None
        row.returns[int(row.loss_mask.nonzero()[0])] = torch.nan
    actual = trials.result(critic, updater, step)
    assert (
        actual["sums"]["critic/skipped_updates"] == actual["sums"]["optim/skipped_updates"] == 2.0
    )  # of 2 epochs
    assert plain["sums"]["critic/skipped_updates"] == 0.0
    assert critic.state() == {"num_updates": 2, "skipped_in_a_row": 0} == updater.state()
    assert len(actual["gradients"]) == 4
    assert all(p.grad is None for p in (*trials.policy.parameters(), *critic.model.parameters()))
    assert all(bool(value.isfinite().all()) for value in actual["parameters"].values())


def beside_a_teacher(trials: PolicyTrials) -> None:
    """Each term of the loss is its own; one optimizer step, so that sums are of one policy."""
    config = changed(trials.config, "as configured")
    critic, updater = trials.parts(config)
    step = trials.step(config, critic)
    for row in step[1].micro_batches:
        row.teacher_signal = TeacherSignal(
            0.5, divergence=lambda hidden, _: hidden.float().square().mean(-1)
        )
    actual = trials.result(critic, updater, step)
    critic, updater = trials.parts(config)
    without = trials.result(critic, updater, trials.step(config, critic))
    assert abs(actual["teacher"]) > 0.01
    assert abs(actual["value"] - without["value"]) < 1e-9
    assert abs(actual["loss"] - actual["teacher"] - without["loss"]) < 1e-6


def same(single: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert single.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in single.items())


def goes_on(trials: PolicyTrials, config: Config) -> None:
    """From a checkpoint, to the bit."""
    folder = Path(config.run_dir, f"of_{trials.session.world_size}")
    critic, updater = trials.parts(config)
    trials.result(critic, updater, trials.step(config, critic))
    path = saved(trials, config, folder, updater, critic)
    new = trials.result(critic, updater, trials.step(config, critic))
    again, again_values = trials.parts(config)
    load_state(trials.policy, again_values, path, read_trainer(path), again)
    assert again.state() == {"num_updates": 4, "skipped_in_a_row": 0}
    names = [
        name
        for name in state_tensors(trials.policy, again_values, again)
        if name.startswith(("critic", "policy.head"))
    ]
    assert sorted(names) == sorted(
        f"{kind}head.{name}"
        for kind in ("critic.", "critic_exp_avg.", "critic_exp_avg_sq.")
        for name in ("bias", "weight")
    )
    same(
        new["parameters"],
        trials.result(again, again_values, trials.step(config, again))["parameters"],
    )


def faults(trials: PolicyTrials) -> int:
    """Each must be named by the running checks."""
    config, done = changed(trials.config, "as configured"), 0
    term, fraction = PolicyValues.term, Critic.loss_term

    def sees(
        expected: str, within: Any = None, spoil: Callable[[PolicyCritic], None] = lambda _: None
    ) -> None:
        nonlocal done
        critic, updater = trials.parts(config)
        with within or nullcontext():
            step = trials.step(config, critic)
            spoil(critic)
            faulty = trials.checked(config, critic, updater, step)
        assert any(expected in text for text in faulty), (expected, faulty[:4])
        done += 1

    def detached(model: PolicyValues, hidden: Tensor, head: Tensor) -> Tensor:
        return term(model, hidden.detach(), head)

    def shifted(model: PolicyValues, hidden: Tensor, head: Tensor) -> Tensor:
        return term(model, hidden.roll(1, 0), head)

    def dropped(critic: Critic, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        return fraction(critic, values, row, num_tokens) * 0.0

    def unscaled(critic: Critic, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        return fraction(critic, values, row, num_tokens) / trials.config.critic.coef

    def over_row(critic: Critic, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        return fraction(critic, values, row, int(row.loss_mask.sum()) or 1)

    def of_masked(critic: Critic, values: Tensor, row: MicroBatch, num_tokens: int) -> Tensor:
        return fraction(
            critic,
            values,
            dataclasses.replace(row, loss_mask=torch.ones_like(row.loss_mask)),
            num_tokens,
        )

    def averaged(critic: PolicyCritic) -> None:
        cast(FSDPModule, critic.model.head).set_gradient_divide_factor(2.0)

    def stale(critic: PolicyCritic) -> None:
        with torch.no_grad():
            for parameter in critic.model.parameters():
                parameter.add_(0.5)

    def kept(critic: PolicyCritic) -> None:
        row = trials.step(config, critic)[1].micro_batches[0]
        critic.loss_term(critic.model(row), row, 1).backward()
        critic.model.reshard()

    sees("the gradient of", patch.object(PolicyValues, "term", detached))
    sees("the value of a token", patch.object(PolicyValues, "term", shifted))
    sees("a gradient was left from the last update: that of head.weight", spoil=kept)
    sees("the term 'value' of the loss", patch.object(Critic, "loss_term", dropped))
    sees("the term 'value' of the loss", patch.object(Critic, "loss_term", unscaled))
    sees("the term 'value' of the loss", patch.object(Critic, "loss_term", over_row))
    sees("the term 'value' of the loss", patch.object(Critic, "loss_term", of_masked))
    sees("the gradient of the value head", spoil=averaged)
    sees("a value that the advantages are computed from", spoil=stale)
    return done


if __name__ == "__main__":
    with exit_with_outcome():
        main()
