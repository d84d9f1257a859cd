"""Worker: the running check of the update on clean updates of every kind, and on planted faults, in
one process.

python -m tests.support.workers.update_check CONFIG (clean|faults)
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
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import Config, LoraConfig
from grpo_spmd.data.rows import read_rows
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.exit import Rank0Error
from grpo_spmd.distributed.session import end_session, policy_mesh, start_session
from grpo_spmd.learn import assemble, losses, sampled_step
from grpo_spmd.learn import update as learn_update
from grpo_spmd.learn.assemble import episode_rollout
from grpo_spmd.learn.update import UpdateObserver, attach_logprobs
from grpo_spmd.model import attention as model_attention
from grpo_spmd.model import optimizer as model_optimizer
from grpo_spmd.model import policy as model_policy
from grpo_spmd.model.attention import PackedLayout
from grpo_spmd.model.config_json import load_tokenizer
from grpo_spmd.model.policy import (
    Policy,
    build_policy,
    build_reference,
    hf_named_parameters,
    load_weights,
)
from grpo_spmd.proofs.gradient_check import GradientCheck, SignalProofs
from grpo_spmd.proofs.update_check import UpdateCheck
from grpo_spmd.records import (
    Completion,
    Episode,
    Rollout,
    RolloutGroup,
    ScoredRollouts,
    Segment,
    Turn,
)
from tests.support.learn import check_settings_of, sampled_step_of, updater_of
from tests.support.workers.update import (
    GROUP_SIZE,
    SETTINGS,
    fixed_groups,
    fixed_reward,
    with_setting,
)

STOP_ID = 0
NUM_STEPS = 2


class Trials:
    def __init__(self, path: str) -> None:
        self.config, self.session = load_config(path), start_session()
        self.tokenizer = load_tokenizer(self.config.model.path)
        self.prompts = build_prompts(
            read_rows(self.config.data), self.tokenizer, self.config.data, 1
        )
        self.policy = self.build(self.config)
        self.are_episodes = False
        self.reference = build_reference(
            self.policy, self.config.model, self.config.rollout.temperature, 1.0, self.session
        )

    def build(self, config: Config, **changes: Any) -> Policy:
        """A policy whose model section has these changes; "mesh" is the session's."""
        session = dataclasses.replace(self.session, mesh=changes.pop("mesh", self.session.mesh))
        return build_policy(
            dataclasses.replace(config.model, **changes), config.rollout.temperature, session
        )

    def groups(self) -> list[RolloutGroup]:
        """This rank's. Of made-up tokens after prompts of the data set; who stopped ends with the
        stop token."""
        groups = []
        for group in fixed_groups()[self.session.rank :: self.session.world_size]:
            prompt = dataclasses.replace(self.prompts[group.slot], position=group.slot)
            completions = []
            for c in group.completions:
                ids = (
                    c.token_ids
                    if c.finish_reason == "length"
                    else [*c.token_ids[: 27 - 1], STOP_ID]
                )
                logprobs = [-0.3 * t for t in range(len(ids))]
                completions.append(Completion(ids, logprobs, c.finish_reason))
            if self.are_episodes:
                completions = [
                    as_episode(prompt.token_ids, c, kind) for kind, c in enumerate(completions)
                ]
            groups.append(RolloutGroup(group.slot, prompt, completions))
        return groups

    def score(self, groups: list[RolloutGroup]) -> ScoredRollouts:
        scored = ScoredRollouts()
        for group in groups:
            for sample, completion in enumerate(group.completions):
                episode = completion.episode
                has_failed = episode is not None and not episode.segments
                scored.rewards.append(None if has_failed else fixed_reward(group.slot, sample))
                text: Any = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                message = text if episode is None else episode.messages
                inputs = {
                    "prompts": group.prompt.text,
                    "completions": message,
                    "completion_ids": completion.token_ids,
                }
                if has_failed:
                    inputs = {}
                scored.reward_inputs.append({**group.prompt.columns, **inputs})
        scored.by_name = {"fixed": list(scored.rewards)}
        statuses = ["not_applicable" if reward is None else "ok" for reward in scored.rewards]
        scored.statuses = {"fixed": statuses}
        return scored

    def run(
        self,
        config: Config,
        policy: Policy | None = None,
        *,
        reference: Any = None,
        change_groups: Callable[[list[RolloutGroup]], list[RolloutGroup]] = lambda groups: groups,
        change_scored: Callable[[ScoredRollouts], None] = lambda scored: None,
        change_updater: Callable[[Any], object] = lambda updater: None,
        change_batch: Callable[[Any], Any] = lambda batch: batch,
        stop_ids: frozenset[int] = frozenset({STOP_ID}),
        trained: Config | None = None,
        is_checked: bool = True,
    ) -> dict[str, Tensor]:
        """The parameters after two steps on the same rollouts; `trained`: a config that differs
        from what is asked."""
        policy = self.policy if policy is None else policy
        if not policy.lora.rank:
            load_weights(hf_named_parameters(policy), Path(config.model.path))
        if reference is None and config.loss.kl_coef:
            reference = (
                self.reference
                if not policy.lora.rank
                else build_reference(
                    policy, config.model, config.rollout.temperature, 1.0, self.session
                )
            )
        updater = updater_of(policy, trained or config)
        change_updater(updater)
        check = UpdateCheck(
            check_settings_of(config, stop_ids),
            session=self.session,
            policy=policy,
            reference=reference,
            updater=updater,
            tokenizer=self.tokenizer,
            signals=SignalProofs(),
        )
        for step in range(NUM_STEPS):
            groups, sampled = self.groups(), sampled_step_of(config, self.session)
            scored = self.score(groups)
            change_scored(scored)
            sampled.add(change_groups(groups), scored, num_groups=6)
            batch, decision = assemble.assemble_batch(sampled, self.session)
            batch = change_batch(batch)
            attach_logprobs(
                policy, reference, batch, config.loss, config.training.num_optimizer_steps
            )
            decision = assemble.penalise_rewards_by_kl(
                batch, decision, config.loss, config.advantage
            )
            if is_checked:
                check.run_if_due(step, sampled, batch, decision)
            updater.update(batch, check if is_checked else UpdateObserver())
        if is_checked:
            assert check.metrics()["proofs/update_check_s"] > 0
        return {name: p.detach().to_local().clone() for name, p in policy.named_parameters()}  # type: ignore[attr-defined]

    def sees(
        self,
        expected: str,
        config: Config | None = None,
        within: Any = None,
        step: str = "",
        **changes: Any,
    ) -> None:
        try:
            with within or nullcontext():
                self.run(config or self.config, **changes)
        except Rank0Error as error:
            assert expected in str(error), (expected, str(error))  # noqa: PT017
            claim = "the update is not what a plain recomputation of it gives: rank"
            assert f"{step}{claim}" in str(error), str(error)  # noqa: PT017
        else:
            raise AssertionError(f"was not seen: {expected}")


def as_episode(prompt_ids: list[int], completion: Completion, kind: int) -> Completion:
    """The completion in two turns, between which something is given to it: one behind the other;
    the second in a
    segment of its own; or in one turn alone. One of a group failed."""
    token_ids = completion.token_ids
    if kind == 3:
        return Completion(
            [], [], "stop", Episode("env_error", (), (), [], {}, [0.5], "environment: it raised")
        )
    initial, inputs = [*token_ids[: len(token_ids) // 2], STOP_ID], [7, 8, 9]
    second = token_ids[len(initial) :] if len(token_ids) > len(initial) else []
    if kind % 3 == 2 or not second:
        pieces, message = [[(prompt_ids, False), (token_ids, True)]], [token_ids]
    elif kind % 3 == 0:
        pieces, message = (
            [[(prompt_ids, False), (initial, True), (inputs, False), (second, True)]],
            [initial, second],
        )
    else:
        again = [*prompt_ids, *initial[:2], *inputs]
        pieces, message = (
            [[(prompt_ids, False), (initial, True)], [(again, False), (second, True)]],
            [initial, second],
        )
    segments = tuple(
        Segment(
            np.array([token for ids, _ in segment for token in ids], np.int32),
            np.repeat([local for _, local in segment], [len(ids) for ids, _ in segment]),
        )
        for segment in pieces
    )
    *stopped, final = message
    turns = (
        *(Turn(len(ids), "stop") for ids in stopped),
        Turn(len(final), completion.finish_reason),
    )
    messages = [{"role": "assistant", "content": str(kind)} for _ in turns]
    all_said = [token for ids in message for token in ids]
    logprobs = [-0.3 * t for t in range(len(all_said))]
    return Completion(
        all_said,
        logprobs,
        completion.finish_reason,
        Episode("ok", segments, turns, messages, {}, [0.5]),
    )


def clean_updates(trials: Trials) -> int:
    """Every kind of loss and estimator, both dtypes, recomputation, replicas, adapters: none is
    refused,
    and no bit of a parameter is another than without the check."""
    config, done = trials.config, 0
    for setting in SETTINGS:
        changed = with_setting(config, setting)
        checked, plain = (
            trials.run(changed, is_checked=is_checked) for is_checked in (True, False)
        )
        assert all(torch.equal(value, plain[name]) for name, value in checked.items()), setting
        done += 1
    for estimator in ("k1", "k3"):
        trials.run(
            _with(config, "loss", kl_estimator=estimator, policy="gspo", clip_ratio_low=3e-4)
        )
    half = _with(config, "model", dtype="bfloat16")
    for half_values in (
        half,
        _with(half, "loss", kl_coef=0.0, policy="gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
    ):
        temperature, kl_coef = half.rollout.temperature, half_values.loss.kl_coef
        reference = build_reference(trials.policy, half.model, temperature, kl_coef, trials.session)
        trials.run(half_values, trials.build(half), reference=reference)
    for changes in ({"activation_checkpointing": True}, {"lora": LoraConfig(rank=4)}):
        trials.run(_with(config, "model", **changes), trials.build(config, **changes))
    trials.run(config, trials.build(config, mesh=policy_mesh(trials.session.device, 2)))
    coded = _with(_with(config, "optimizer", name="adamw_8bit", lr=1e-2), "loss", kl_coef=0.0)
    checked, plain = (trials.run(coded, is_checked=is_checked) for is_checked in (True, False))
    assert all(torch.equal(value, plain[name]) for name, value in checked.items())
    endless = _with(config, "loss", clip_ratio_high=1e9, dual_clip=None, rollout_correction_cap=1e9)
    for number, few_values in enumerate((config, config, endless)):
        few_rollouts(trials, few_values, number)
    trials.are_episodes = True
    for episodes_values in (config, _with(config, "loss", policy="gspo", aggregation="sequence")):
        checked, plain = (
            trials.run(episodes_values, is_checked=is_checked) for is_checked in (True, False)
        )
        assert all(torch.equal(value, plain[name]) for name, value in checked.items())
    for number in range(2):
        few_rollouts(trials, config, number)
    trials.are_episodes = False
    return done + 15


def few_rollouts(trials: Trials, config: Config, number: int) -> None:
    """A rank has one rollout more than `number`, maybe none in its second row."""
    groups = [
        dataclasses.replace(g, completions=g.completions[: number + 1]) for g in trials.groups()[:1]
    ]
    settings = check_settings_of(config, frozenset())
    check = GradientCheck(
        trials.policy, updater_of(trials.policy, config), settings, SignalProofs()
    )
    result = check.run(groups, trials.session.device, accumulates=number % 2 == 0)
    assert result.metrics, number
    assert not result.errors, result.errors


def _with(config: Config, section: str, **values: Any) -> Config:
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **values)}
    )


def _replaced(name: str, function: Any) -> Any:
    return patch.object(model_optimizer, name, function)


def faults(trials: Trials) -> int:
    """Each must stop all ranks, and the message must name what is off."""
    config, done = trials.config, 0

    def sees(*arguments: Any, **changes: Any) -> None:
        nonlocal done
        trials.sees(*arguments, **changes)
        done += 1

    terms, kl, tokens = losses._policy_terms, losses.kl_estimate, losses.aggregation_weights

    def swapped(p: Tensor, ratio: Tensor, advantages: Tensor, options: Any) -> Any:
        sides = {
            "clip_ratio_low": options.clip_ratio_high,
            "clip_ratio_high": options.clip_ratio_low,
        }
        return terms(p, ratio, advantages, dataclasses.replace(options, **sides))

    sees("the term 'policy' of the loss", within=patch.object(losses, "_policy_terms", swapped))
    flipped = patch.object(losses, "kl_estimate", lambda p, ref, name: kl(ref, p, name) + 0.1 * p)
    sees("the term 'kl' of the loss", within=flipped)
    unweighted = patch.object(
        learn_update, "aggregation_weights", lambda *args, **options: 2 * tokens(*args, **options)
    )
    sees("the term 'loss' of the loss", within=unweighted)
    neighbours = patch.object(
        model_attention,
        "PackedLayout",
        lambda lengths, *rest, tree=None, **group: PackedLayout([sum(lengths)], *rest, **group),
    )
    sees("the logprob of a token", within=neighbours)
    averaged = trials.build(config)
    for module in averaged.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
            module.set_force_sum_reduction_for_comms(True)
    sees("the sum over ranks of a gradient", policy=averaged)

    def clears(updater: Any) -> None:
        updater.optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.state.clear())

    # The first step's optimizer has no moments to lose. The check of the second one's began before.
    sees("AdamW's exp_avg of", change_updater=clears, step="step 1: ")
    sees("the step of AdamW on", trained=_with(config, "optimizer", warmup_steps=10))
    scheduled = _with(config, "optimizer", schedule="cosine", min_lr=1e-6)
    trials.run(scheduled)
    sees("the step of AdamW on", scheduled, trained=config)
    sees("where {'betas'", trained=_with(config, "optimizer", weight_decay=0.02))
    sees("AdamW's exp_avg of", trained=_with(config, "optimizer", max_grad_norm=1e9))

    coded = _with(config, "optimizer", name="adamw_8bit")
    values_of, encode = model_optimizer._decode, model_optimizer._encode

    def of_row_before(codes: Tensor, scales: Tensor, levels: int) -> Tensor:
        return values_of(codes, scales.roll(1, 0), levels)

    def rounded(*args: Tensor, levels: int, threshold: float) -> None:
        encode(*args, levels=levels, threshold=0.5 + 0 * threshold)

    sees("8-bit codes of AdamW's exp_avg of", coded, within=_replaced("_decode", of_row_before))
    sees("8-bit codes of AdamW's exp_avg of", coded, within=_replaced("_encode", rounded))
    sees("8-bit codes of AdamW's exp_avg of", coded, change_updater=clears)

    def keeps(updater: Any) -> None:
        updater.optimizer.zero_grad = lambda **_: None

    sees("a gradient was left from the last update", change_updater=keeps)
    trials.policy.zero_grad(set_to_none=True)
    halved = patch.object(
        sampled_step,
        "rollout_advantages",
        lambda rewards, _: np.nan_to_num(rewards - 0.5).ravel().astype(np.float32),
    )
    sees("has the advantage", within=halved)
    sees(
        "is to divide by",
        change_batch=lambda b: dataclasses.replace(b, num_loss_tokens=[b.num_loss_tokens[0] + 1]),
        step="step 0: ",
    )
    # The update passes such a mini-batch over: nothing would be trained.
    sees(
        "is to divide by",
        change_batch=lambda b: dataclasses.replace(b, num_loss_tokens=[0], num_loss_sequences=[0]),
        step="step 0: ",
    )
    decode = assemble.decode_rollouts

    def mixed(payload: bytes) -> list[Rollout]:
        rollouts = decode(payload)
        return [
            dataclasses.replace(r, advantages=s.advantages)
            for r, s in zip(rollouts, rollouts[::-1], strict=True)
        ]

    sees(
        "with other tokens, logprobs or advantages",
        within=patch.object(assemble, "decode_rollouts", mixed),
    )

    def shifted(batch: Any) -> Any:
        for row in batch.micro_batches:
            row.predict_index = row.predict_index.roll(1)
        return batch

    sees("with other tokens, logprobs or advantages", change_batch=shifted)
    sees("the reference is not a model of its own", reference=trials.policy)
    moved = build_reference(
        trials.policy, config.model, config.rollout.temperature, 1.0, trials.session
    )
    assert isinstance(moved, Policy)
    with torch.no_grad():
        next(moved.parameters()).mul_(1.01)
    sees("the reference's model.embed_tokens.weight is not that of", reference=moved)

    attach = attach_logprobs
    by_policy = patch.object(
        sys.modules[__name__],
        "attach_logprobs",
        lambda policy, _, *rest: attach(policy, policy, *rest),
    )
    sees(
        "the reference logprob that the loss is given",
        _with(config, "optimizer", lr=1e-2),
        within=by_policy,
    )

    def of_later_rows(policy: Any, reference: Any, batch: Any, *rest: Any) -> None:
        attach(policy, reference, batch, *rest)
        assert len(batch.micro_batches) > 1
        for row in batch.micro_batches[1:]:
            row.ref_logprobs = row.ref_logprobs.roll(1)

    later = patch.object(sys.modules[__name__], "attach_logprobs", of_later_rows)
    sees("the reference logprob that the loss is given", within=later)
    adapted = trials.build(config, lora=LoraConfig(rank=4))
    kept_on = patch.object(model_policy.lora, "adapters_off", lambda model: nullcontext())
    moves = _with(_with(config, "model", lora=LoraConfig(rank=4)), "optimizer", lr=1e-2)
    sees(
        "the reference's logprob of a token", moves, policy=adapted, within=kept_on
    )  # at the second check

    def with_columns(scored: ScoredRollouts) -> None:
        scored.reward_inputs = scored.reward_inputs[GROUP_SIZE:] + scored.reward_inputs[:GROUP_SIZE]

    def with_prompt(scored: ScoredRollouts) -> None:
        scored.reward_inputs = [
            {**g, "completions": g["prompts"] + g["completions"]} for g in scored.reward_inputs
        ]

    sees("the reward functions were given another", change_scored=with_columns)
    sees("the reward functions were given another 'completions'", change_scored=with_prompt)

    def other_row(groups: list[RolloutGroup]) -> list[RolloutGroup]:
        return [
            dataclasses.replace(g, prompt=dataclasses.replace(g.prompt, row=g.prompt.row + 1))
            for g in groups
        ]

    sees("is not the one in that row", change_groups=other_row)
    sees("but the engine ends them at [0, 5]", stop_ids=frozenset({STOP_ID, 5}))

    def runs_on(groups: list[RolloutGroup]) -> list[RolloutGroup]:
        initial, *rest = groups[0].completions
        longer = Completion(
            [STOP_ID, *initial.token_ids], [0.0, *initial.logprobs], initial.finish_reason
        )
        return [dataclasses.replace(groups[0], completions=[longer, *rest]), *groups[1:]]

    sees("a completion goes on after a token that ends it", change_groups=runs_on)

    def alike(groups: list[RolloutGroup]) -> list[RolloutGroup]:
        max_length = max(groups[0].completions, key=lambda c: len(c.token_ids))
        return [dataclasses.replace(groups[0], completions=[max_length] * GROUP_SIZE), *groups[1:]]

    sees("completions of a group are equal: a chance of e-", change_groups=alike)
    return done


def faults_of_episodes(trials: Trials) -> int:
    """As `faults`, where rollouts have turns."""
    trials.are_episodes, done = True, 0
    decode, alternative = assemble.decode_rollouts, "with other tokens, logprobs or advantages"

    def sees(expected: str, **changes: Any) -> None:
        nonlocal done
        trials.sees(expected, **changes)
        done += 1

    def arrives(change: Callable[[Rollout], tuple[Segment, ...]]) -> Any:
        def changed(payload: bytes) -> list[Rollout]:
            rollouts = [(r, change(r)) for r in decode(payload)]
            return [
                episode_rollout(
                    r.rollout_id, r.advantages, r.loss_mask, segments, r.rollout_logprobs
                )
                if segments
                else r
                for r, segments in rollouts
            ]

        return patch.object(assemble, "decode_rollouts", changed)

    def late(rollout: Rollout) -> tuple[Segment, ...]:
        """A turn without its first token, with one that was given behind it."""
        result = []
        for segment in rollout.segments:
            sampled, ends = (
                segment.sampled.copy(),
                np.flatnonzero(segment.sampled[:-1] & ~segment.sampled[1:]),
            )
            for end in ends[:1]:
                sampled[[int(sampled.argmax()), end + 1]] = [False, True]
            result.append(Segment(segment.token_ids, sampled))
        return tuple(result)

    def other_answer(rollout: Rollout) -> tuple[Segment, ...]:
        """What was given between the turns is another's."""
        result = []
        for segment in rollout.segments:
            ids = segment.token_ids.copy()
            ids[~segment.sampled & (np.cumsum(segment.sampled) > 0)] = 11
            result.append(Segment(ids, segment.sampled))
        return tuple(result)

    sees(alternative, within=arrives(late))
    sees(alternative, within=arrives(other_answer))
    sees(alternative, within=arrives(lambda rollout: rollout.segments[::-1]))

    def swapped(payload: bytes) -> list[Rollout]:
        rollouts = decode(payload)
        return [
            dataclasses.replace(r, segments=s.segments, completion_ids=s.completion_ids,
                                rollout_logprobs=s.rollout_logprobs, prompt_ids=s.prompt_ids)
            for r, s in zip(rollouts, [*rollouts[1:], *rollouts[:1]], strict=True)
        ]  # fmt: skip

    sees(alternative, within=patch.object(assemble, "decode_rollouts", swapped))
    neighbours = patch.object(
        model_attention,
        "PackedLayout",
        lambda lengths, *rest, tree=None, **group: PackedLayout([sum(lengths)], *rest, **group),
    )
    sees("the logprob of a token", within=neighbours)

    def turned(
        change: Callable[[Episode], Episode],
    ) -> Callable[[list[RolloutGroup]], list[RolloutGroup]]:
        def of_groups(groups: list[RolloutGroup]) -> list[RolloutGroup]:
            return [
                dataclasses.replace(g, completions=[
                    dataclasses.replace(c, episode=change(c.episode)) if c.episode and len(c.episode.turns) == 2 else c  # noqa: E501
                    for c in g.completions
                ]) for g in groups
            ]  # fmt: skip

        return of_groups

    def cut(episode: Episode) -> Episode:
        initial, second = episode.turns
        return dataclasses.replace(episode, turns=(Turn(initial.num_tokens, "length"), second))

    def longer(episode: Episode) -> Episode:
        initial, second = episode.turns
        turns = (
            Turn(initial.num_tokens + 1, "stop"),
            Turn(second.num_tokens - 1, second.finish_reason),
        )
        return dataclasses.replace(episode, turns=turns)

    sees("an episode goes on after a turn that was cut off", change_groups=turned(cut))
    sees(
        "an episode is not valid: a turn's sampled tokens are interrupted by a token",
        change_groups=turned(longer),
    )

    def as_text(scored: ScoredRollouts) -> None:
        scored.reward_inputs = [
            inputs | {"completions": "4"} if inputs else inputs for inputs in scored.reward_inputs
        ]

    sees("the reward functions were given another 'completions'", change_scored=as_text)
    return done


def main() -> None:
    trials = Trials(sys.argv[1])
    if sys.argv[2] == "clean":
        message = f"{clean_updates(trials)} clean updates pass"
    else:
        message = f"{faults(trials) + faults_of_episodes(trials)} faults seen"
    print(f"rank {trials.session.rank}: {message}", flush=True)
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
