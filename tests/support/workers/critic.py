"""Worker: a critic beside a policy over the rollouts of `fixed_groups`, for several settings and
splits of the work; its checkpoint, its wait in host memory, and faults that the running check of it
has to see.

    python -m tests.support.workers.critic CONFIG REFERENCE OUT.pt [faults]
Rank 0 saves {(setting, split): {values, advantages, losses, parameters, ...}}.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from grpo_spmd.checkpoint.manifest import read_trainer, verify_checkpoint
from grpo_spmd.checkpoint.run_dir import checkpoint_path
from grpo_spmd.checkpoint.save import Checkpoints
from grpo_spmd.checkpoint.state import load_state, run_facts, state_tensors
from grpo_spmd.config.describe import flatten_config
from grpo_spmd.config.errors import ConfigError
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config
from grpo_spmd.distributed.collectives import barrier, on_rank0
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import Session, end_session, policy_mesh, start_session
from grpo_spmd.learn import advantages, assemble, balance
from grpo_spmd.learn.advantages import gae_advantages
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.sampled_step import SampledStep, StepRules
from grpo_spmd.learn.update import PolicyUpdater, attach_logprobs
from grpo_spmd.model import attention as model_attention
from grpo_spmd.model.attention import PackedLayout
from grpo_spmd.model.offload import HostOffload
from grpo_spmd.model.policy import build_policy, build_reference
from grpo_spmd.model.values import ValueModel
from grpo_spmd.proofs import gradient_check
from grpo_spmd.proofs.batch_check import BatchCheck
from grpo_spmd.records import Decision, MicroBatch, Rollout, RolloutBatch, RolloutGroup
from grpo_spmd.signals import critic as learn_critic
from grpo_spmd.signals import value_proofs
from grpo_spmd.signals.critic import Critic, CriticCheck, open_critic
from grpo_spmd.signals.value_proofs import CriticUpdateCheck
from tests.support.learn import check_settings_of, merged_on_all, updater_of
from tests.support.workers.update import SETTINGS as OF_POLICY
from tests.support.workers.update import deal, fixed_groups, plan_unpacked, score, with_setting
from tests.support.workers.update_check import as_episode

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "as configured": {},
    "several steps": {
        "critic": {"clip_value": 0.02, "lr": 1e-3},
        "training": {"num_epochs": 2, "num_mini_batches": 2},
    },
    "kl, length, not whitened": {
        "critic": {"lam_policy": "length", "length_alpha": 0.3, "gamma": 0.97, "clip_value": None},
        "advantage": {"normalize_std": "none"},
        "loss": {"kl_in": "reward", "kl_coef": 0.05, "mask_truncated": True},
    },
    "episodes": {"environment": {"discount": 1.0}},
}
SPLITS = {"one row": (100_000, "in turn", True), "rows dealt at random": (90, "at random", False)}
REPLICATED, WAITED = "two replicas", "waited in host memory"
Step = tuple[SampledStep, RolloutBatch, Decision]


class Trials:
    def __init__(self, path: str, reference: str) -> None:
        self.config, self.session = load_config(path), start_session()
        self.policy = build_policy(self.config.model, self.config.rollout.temperature, self.session)
        second = dataclasses.replace(self.config.model, path=reference)
        self.reference = build_reference(
            self.policy, second, self.config.rollout.temperature, 1.0, self.session
        )

    def critic(self, config: Config, session: Session | None = None) -> Critic:
        critic = open_critic(config, self.policy, session or self.session)
        assert critic is not None
        return critic

    def step(
        self, config: Config, critic: Critic, method: str = "in turn", *, packed: bool = True
    ) -> Step:
        """A step's rollouts with what the critic says of them."""
        sections = config.rollout, config.advantage, config.loss, config.training
        turns_values = config.environment.discount
        sampled = SampledStep(
            StepRules(*sections, 0.9, self.session.world_size, discount=turns_values)
        )
        groups = deal(fixed_groups(), method, self.session)
        scored = score(groups)
        sampled.add(
            groups if turns_values is None else [as_episodes(group) for group in groups], scored
        )
        with patch.object(balance, "plan_batch", plan_batch if packed else plan_unpacked):
            batch, decision = assemble.assemble_batch(sampled, self.session)
        attach_logprobs(
            self.policy, self.reference, batch, config.loss, config.training.num_optimizer_steps
        )
        decision = assemble.penalise_rewards_by_kl(batch, decision, config.loss, config.advantage)
        return sampled, batch, critic.attach(batch, decision, lambda _: None)

    def check(self, config: Config, critic: Critic, step: Step) -> list[str]:
        sampled, batch, decision = step
        settings = dataclasses.replace(
            check_settings_of(config, frozenset({0})), reward_weights=[1.0]
        )
        batch_values = BatchCheck(settings)
        # As `critic.check`, with the settings that are asked for in place of the critic's own.
        updates = CriticUpdateCheck(critic, config.critic, settings)
        critic._observer = updates
        result = CriticCheck(critic.model, config.critic, settings, updates)(
            sampled, batch, decision, batch_values.rewards_of(sampled, decision)
        )
        faulty: list[str] = on_rank0(
            lambda rank_values: [text for texts in rank_values for text in texts], result.errors
        )
        return faulty


def as_episodes(group: RolloutGroup) -> RolloutGroup:
    """Its completions in turns, the first of two with a reward of its own."""
    result = []
    for kind, completion in enumerate(group.completions):
        created = as_episode(group.prompt.token_ids, completion, kind)
        assert created.episode is not None
        turns = [
            dataclasses.replace(turn, reward=0.25 * (n == 0))
            for n, turn in enumerate(created.episode.turns)
        ]
        result.append(
            dataclasses.replace(
                created, episode=dataclasses.replace(created.episode, turns=tuple(turns))
            )
        )
    return dataclasses.replace(group, completions=result)


def changed(config: Config, setting: str, tokens: int = 100_000) -> Config:
    with patch.dict(OF_POLICY, SETTINGS):
        config = with_setting(config, setting)
    training = dataclasses.replace(config.training, max_tokens_per_micro_batch=tokens)
    return dataclasses.replace(config, training=training)


def result_of(critic: Critic, step: Step) -> dict[str, Any]:
    """After the critic's update, with what went into it."""
    _, batch, decision = step
    old = by_rollout(batch)
    sums = merged_on_all(critic.update(batch))
    return {
        **{name: gathered(values) for name, values in old.items()},
        "decision": dict(
            on_rank0(
                lambda pieces: [p for piece in pieces for p in piece],
                [*decision.advantages.items()],
            )
        ),
        "metrics": on_rank0(
            lambda pieces: pieces[0], {k: v for k, v in decision.metrics.items() if "critic/" in k}
        ),
        "sums": {name: reduction.value for name, reduction in sums.items()},
        "parameters": full(critic),
        "rows": len(batch.micro_batches),
    }


def by_rollout(batch: RolloutBatch) -> dict[str, dict[int, list[float]]]:
    result: dict[str, dict[int, list[float]]] = {"old_values": {}, "returns": {}, "advantages": {}}
    for row in batch.micro_batches:
        for name, rollouts_values in result.items():
            column = getattr(row, name)
            rollouts_values |= {
                i: column[row.sequence_index == position].tolist()
                for position, i in enumerate(row.rollout_ids)
            }
    return result


def gathered(values: dict[int, list[float]]) -> dict[int, list[float]]:
    return dict(
        sorted(
            on_rank0(lambda pieces: [pair for piece in pieces for pair in piece], [*values.items()])
        )
    )


def full(critic: Critic) -> dict[str, Tensor]:
    return {
        name: parameter.full_tensor().detach().clone()
        for name, parameter in critic.trained_parameters().items()
    }


def main() -> None:
    trials, results = Trials(*sys.argv[1:3]), {}
    session = trials.session
    for setting in SETTINGS:
        for split, (tokens, method, packed) in SPLITS.items():
            config = changed(trials.config, setting, tokens)
            critic = trials.critic(config)
            step = trials.step(config, critic, method, packed=packed)
            assert not (faulty := trials.check(config, critic, step)), (setting, split, faulty[:3])
            results[setting, split] = result_of(critic, step)
    by_noise_alone(trials)
    if session.world_size == 2:
        config = changed(trials.config, "several steps")
        critic = trials.critic(
            config, dataclasses.replace(session, mesh=policy_mesh(session.device, 2))
        )
        results["several steps", REPLICATED] = result_of(critic, trials.step(config, critic))
        results["several steps", WAITED] = waits(trials, config)
    goes_on(trials)
    if "faults" in sys.argv[4:]:
        print(f"{faults(trials)} faults seen", flush=True)
    if session.is_rank0:
        torch.save(results, sys.argv[3])
    end_session()


def by_noise_alone(trials: Trials) -> None:
    """In bfloat16, where bounds of nothing leave only what is measured of the rounding."""
    model = dataclasses.replace(trials.config.model, dtype="bfloat16")
    config = changed(dataclasses.replace(trials.config, model=model), "several steps")
    critic = trials.critic(config)
    step = trials.step(config, critic)
    nothing = {"bfloat16": 1e-9}
    with (
        patch.dict(value_proofs._GRADIENT_BOUNDS, nothing),
        patch.dict(gradient_check.SCORE_BOUNDS, nothing),
    ):
        assert not (faulty := trials.check(config, critic, step)), faulty[:3]
        moved = step[1].micro_batches[0]
        assert moved.old_values is not None
        moved.old_values = moved.old_values * 1.01
        assert trials.check(config, critic, step)
    critic.drop_gradient()


def waits(trials: Trials, config: Config) -> dict[str, Any]:
    """In host memory before and between two steps, the second of which is that of `results`."""
    result: list[dict[str, Any]] = []
    for is_moved in (True, False):
        critic = trials.critic(config)
        offload = HostOffload(
            False,
            trials.policy,
            None,
            updater_of(trials.policy, config).optimizer,
            critic.offloadable_models,
        )
        for _ in range(2):
            if is_moved:
                offload.before_sync()
                refuses(lambda critic=critic: trials.step(config, critic))  # type: ignore[misc]
                assert offload.to_device()["memory/host/offloaded_gib"] > 0
            result.append(result_of(critic, trials.step(config, critic)))
    moved, plain = result[1]["parameters"], result[3]["parameters"]
    assert all(torch.equal(value, plain[name]) for name, value in moved.items())
    return result[0]


def refuses(call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        assert "to_device comes first" in str(error), error  # noqa: PT017
    else:
        raise AssertionError("a critic that is away has said something")


def saved(
    trials: Trials, config: Config, folder: Path, updater: PolicyUpdater, critic: Critic | None
) -> Path:
    """Collective. A checkpoint of the first step in this run folder."""
    facts = run_facts(flatten_config(config), [], trials.session, {})
    run_values = (
        folder,
        config.checkpoint,
        config.training.num_steps,
        trials.session,
        trials.policy,
        updater,
        facts,
    )
    checkpoints = Checkpoints(*run_values, critic)
    checkpoints.stage(1, position=0, log_state={})
    checkpoints.write_staged()
    checkpoints.wait()
    return checkpoint_path(folder, 1)


def goes_on(trials: Trials) -> None:
    """From a checkpoint of a run with this number of ranks, to the bit; one without a critic is
    refused. Of a run with
    two ranks, rank 0 alone leaves digests that one of another number compares."""
    config, session = changed(trials.config, "several steps"), trials.session
    folder = Path(config.run_dir, f"of_{session.world_size}")
    critic, updater = trials.critic(config), updater_of(trials.policy, config)
    step = trials.step(config, critic)
    critic.update(step[1])
    path = saved(trials, config, folder, updater, critic)
    if session.is_rank0:
        verify_checkpoint(path)
    again = trials.critic(config)
    load_state(trials.policy, updater, path, read_trainer(path), again)
    assert again.state() == critic.state() == {"num_updates": 4, "skipped_in_a_row": 0}
    retained, loaded = (state_tensors(trials.policy, updater, item) for item in (critic, again))
    assert retained.keys() == loaded.keys()
    assert len([name for name in retained if name.startswith("critic_exp_avg.")]) == len(
        critic.trained_parameters()
    )
    assert all(
        torch.equal(tensor.to_local(), loaded[name].to_local()) for name, tensor in retained.items()
    )
    for item in (critic, again):
        item.update(step[1])
    assert all(
        torch.equal(a, b) for a, b in zip(full(critic).values(), full(again).values(), strict=True)
    )
    second = checkpoint_path(Path(config.run_dir, "of_2"), 1)
    if session.world_size == 1 and second.is_dir():  # loaded into another number of ranks
        load_state(trials.policy, updater, second, read_trainer(second), again)
        critic = trials.critic(config)
        load_state(trials.policy, updater, path, read_trainer(path), critic)
        for a, b in zip(full(critic).values(), full(again).values(), strict=True):
            assert float((a - b).norm()) <= 1e-5 * float(a.norm())
    path = saved(
        trials, config, Path(config.run_dir, f"without_{session.world_size}"), updater, None
    )
    try:
        load_state(trials.policy, updater, path, read_trainer(path), critic)
    except ConfigError as error:
        assert "holds no critic; leave critic.path out" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a checkpoint without a critic was taken")
    barrier()


def faults(trials: Trials) -> int:
    """Each must be named by the running check."""
    plain, episodes = changed(trials.config, "as configured"), changed(trials.config, "episodes")
    forward, decode, done = ValueModel.forward, assemble.decode_rollouts, 0
    assert plain.critic.lam_policy != "length"
    swapped = dataclasses.replace(
        plain.critic, lam=plain.critic.lam_policy, lam_policy=plain.critic.lam
    )

    def sees(
        expected: str, config: Config = plain, within: Any = None, trained: Config | None = None
    ) -> None:
        nonlocal done
        with within or nullcontext():
            critic = trials.critic(trained or config)
            faulty = trials.check(config, critic, trials.step(trained or config, critic))
        assert any(expected in text for text in faulty), (expected, faulty[:4])
        done += 1

    def bootstraps(rewards: Any, values: Any, lengths: Any, gamma: float, lam: Any) -> Any:
        ends = lengths.cumsum() - 1
        beyond = np.zeros_like(rewards)
        beyond[ends] = gamma * values[ends]
        return gae_advantages(rewards + beyond, values, lengths, gamma, lam)

    def shifted(model: ValueModel, batch: MicroBatch) -> Tensor:
        return forward(model, dataclasses.replace(batch, predict_index=batch.predict_index + 1))

    def stale(critic: Critic) -> Any:
        def attached(batch: RolloutBatch, decision: Decision, check: Any) -> Decision:
            result = attach(critic, batch, decision, check)
            with torch.no_grad():
                for parameter in critic.model.parameters():
                    parameter.mul_(1.1)
            return result

        attach = Critic.attach
        return attached

    def mixed(payload: bytes) -> list[Rollout]:
        """Each with the reward of the next."""
        rollouts = decode(payload)
        result = []
        for rollout, second in zip(rollouts, [*rollouts[1:], *rollouts[:1]], strict=True):
            rewards = np.zeros(len(rollout.completion_ids))
            rewards[-1:] = np.sum(second.advantages)
            result.append(dataclasses.replace(rollout, advantages=rewards))
        return result

    sees(
        "the returns of rollout",
        within=patch.object(learn_critic, "gae_advantages", bootstraps),
    )
    sees(
        "a value compared with that of a plain forward pass",
        within=patch.object(ValueModel, "forward", shifted),
    )
    neighbours = patch.object(
        model_attention,
        "PackedLayout",
        lambda lengths, *rest, tree=None, **group: PackedLayout([sum(lengths)], *rest, **group),
    )
    sees("a value compared with that of a plain forward pass", within=neighbours)
    sees("the returns of rollout", within=patch.object(assemble, "decode_rollouts", mixed))
    sees("and gae gives", trained=dataclasses.replace(plain, critic=swapped))
    sees("and gae gives", within=patch.object(learn_critic, "whitening", lambda *_: (0.0, 1.0)))
    local = patch.object(
        learn_critic,
        "length_lambda",
        lambda lengths, alpha: 1.0 - 1.0 / (alpha * lengths.max() + lengths),
    )
    sees("and gae gives", changed(trials.config, "kl, length, not whitened"), within=local)
    no_kl = patch.object(learn_critic, "kl_estimate", lambda p, ref, name: torch.zeros_like(p))
    sees("the returns of rollout", changed(trials.config, "kl, length, not whitened"), within=no_kl)
    tokens = advantages.token_rewards
    at_end = patch.object(
        advantages,
        "token_rewards",
        lambda reward, completion, by_turn: tokens(reward, completion, False),
    )
    sees("the returns of rollout", episodes, within=at_end)
    critic = trials.critic(plain)
    with patch.object(critic, "attach", stale(critic)):
        step = trials.step(plain, critic)
    assert any(
        "a value that the advantages are computed from" in text
        for text in trials.check(plain, critic, step)
    )
    return done + 1 + faults_of_learning(trials)


def faults_of_learning(trials: Trials) -> int:
    """Faults of the critic's own update: each is named before it, or at its first step."""
    config, done = changed(trials.config, "several steps"), 0
    loss, term = learn_critic.value_loss, Critic.loss_term

    def sees(expected: str, within: Any = None, trained: Config = config) -> None:
        nonlocal done
        critic = trials.critic(trained)
        step = trials.step(trained, critic)
        with within or nullcontext():
            faulty = trials.check(config, critic, step)
            try:
                critic.update(step[1])
            except Rank0Error as error:
                faulty.append(str(error))
        assert any(expected in text for text in faulty), (expected, faulty[:4])
        done += 1

    def unmasked(values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: Any) -> Any:
        return loss(values, old, returns, torch.ones_like(mask), clip)

    def around_the_new(values: Tensor, old: Tensor, *rest: Any) -> Any:
        return loss(values, values.detach(), *rest)

    def by_row(critic: Critic, values: Tensor, row: MicroBatch, _: int) -> Tensor:
        return term(critic, values, row, int(row.loss_mask.sum()))

    def frozen(critic: Critic, is_made: bool) -> float:
        critic.optimizer.zero_grad(set_to_none=True)
        return 0.0

    sees("the value loss, relative to the size", patch.object(learn_critic, "value_loss", unmasked))
    sees(
        "the value loss, relative to the size",
        patch.object(learn_critic, "value_loss", around_the_new),
    )
    sees("the value loss, relative to the size", patch.object(Critic, "loss_term", by_row))
    sees("the critic's update is not what", patch.object(Critic, "finish_step", frozen))
    other = dataclasses.replace(config.critic, lr=1.5 * config.critic.lr)
    sees("the step of AdamW on", trained=dataclasses.replace(config, critic=other))
    unclipped = dataclasses.replace(config.optimizer, max_grad_norm=1e9)
    sees("AdamW's exp_avg of", trained=dataclasses.replace(config, optimizer=unclipped))
    # A critic that is never updated, and values of the second row on that are those of others.
    few = changed(trials.config, "as configured", 90)
    critic = trials.critic(few)
    step = trials.step(few, critic, packed=False)
    check = critic.check(check_settings_of(few, frozenset({0})))
    rewards = BatchCheck(check_settings_of(few, frozenset({0}))).rewards_of(step[0], step[2])
    assert not check(*step, rewards).errors
    assert any("has made no update" in text for text in check(*step, rewards).errors)
    for row in step[1].micro_batches[1:]:
        assert row.old_values is not None
        row.old_values = row.old_values.roll(1)
    faulty = check(*step, rewards).errors
    assert any("a value that the advantages are computed from" in text for text in faulty)
    return done + 2


if __name__ == "__main__":
    with exit_with_outcome():
        main()
