"""Worker: updates with a teacher for several kinds and splits of the work, and what the running
check says of clean ones and of planted faults.

    python -m tests.support.workers.teacher CONFIG TEACHER OUT.pt [faults]
Rank 0 saves {(kind, split): {loss, kl, gradients, parameters}}; the rollouts are those of
workers/update.py.
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
from torch.distributed.tensor import DTensor

import grpo_spmd.learn.balance
from grpo_spmd.config.load import load_config
from grpo_spmd.config.schema import LoraConfig, LossConfig, TeacherConfig
from grpo_spmd.distributed.collectives import any_rank
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session, policy_mesh, start_session
from grpo_spmd.learn import update
from grpo_spmd.learn.assemble import assemble_batch
from grpo_spmd.learn.balance import plan_batch
from grpo_spmd.learn.losses import LossInputs, policy_loss, taught_loss
from grpo_spmd.learn.update import attach_logprobs
from grpo_spmd.model.logprobs import TeacherDivergence, TopTeacher, WholeTeacher
from grpo_spmd.model.policy import Policy, build_policy, hf_named_parameters, load_weights
from grpo_spmd.proofs.gradient_check import GradientCheck, SignalProofs
from grpo_spmd.records import Fields, MicroBatch, Prompt, RolloutBatch, TeacherSignal
from grpo_spmd.signals import teacher as teacher_check
from grpo_spmd.signals.teacher import (
    Teacher,
    TeacherCheck,
    TeacherModel,
    TeacherRequest,
)
from tests.support.learn import check_settings_of, merged_on_all, sampled_step_of, updater_of
from tests.support.workers.update import SPLITS, deal, fixed_groups, plan_unpacked, score

KINDS: dict[str, TeacherConfig] = {
    "sampled": TeacherConfig(path="x", coef=0.7),
    "topk": TeacherConfig(path="x", loss="topk", beta=0.3, top_k=7),
    "full": TeacherConfig(path="x", loss="full", beta=0.5, coef=0.3),
    "two teachers, prompts of their own": TeacherConfig(path={"a": "x", "b": "y"}, loss="full"),
    "the policy, prompts of its own": TeacherConfig(path="policy", prompt_key="x", loss="full"),
}
LIVE = "the policy, prompts of its own"
SEVERAL = "two teachers, prompts of their own"
VARIANTS: dict[str, dict[str, Any]] = {
    "recomputed, small chunks": {"activation_checkpointing": True, "logprob_chunk_tokens": 5},
    "two replicas": {},
}


def request_for(prompt: Prompt, _: Fields) -> TeacherRequest:
    return TeacherRequest(
        "ab"[prompt.position % 2], [1 + prompt.position, 2, 3] if prompt.position < 4 else None
    )


def shown_to_one(prompt: Prompt, written: Fields) -> TeacherRequest:
    return dataclasses.replace(request_for(prompt, written), teacher="")


class Trials:
    look: Callable[[bool], None] = staticmethod(
        lambda _: None
    )  # what is called while teachers are asked

    def __init__(self, path: str, teacher: str) -> None:
        self.config, self.session = load_config(path), start_session()
        self.policy = self.build(self.config.model.path)
        self.models = {
            "a": self.build(teacher, trainable=False),
            "b": self.build(self.config.model.path, trainable=False),
        }

    def build(self, path: str, **changes: Any) -> Policy:
        session = dataclasses.replace(self.session, mesh=changes.pop("mesh", self.session.mesh))
        trainable, config = (
            changes.pop("trainable", True),
            dataclasses.replace(self.config.model, path=path, **changes),
        )
        return build_policy(config, self.config.rollout.temperature, session, trainable=trainable)

    def teacher(self, kind: str, policy: Policy) -> Teacher:
        models = {name: TeacherModel(model) for name, model in self.models.items()}
        if kind == SEVERAL:
            prompts = [group.prompt for group in fixed_groups()]
            return Teacher(KINDS[kind], models, policy, prompts.__getitem__, request_for)
        if kind == LIVE:
            prompts = [group.prompt for group in fixed_groups()]
            live = {"": TeacherModel(policy, is_own=False)}
            return Teacher(KINDS[kind], live, policy, prompts.__getitem__, shown_to_one)
        single = (
            TeacherModel(policy, is_base=True, is_own=False) if policy.lora.rank else models["a"]
        )
        return Teacher(KINDS[kind], {"": single}, policy)

    def check(self, teacher: Teacher) -> TeacherCheck:
        return TeacherCheck(teacher, check_settings_of(self.config, frozenset()))

    def of_gradients(self, updater: Any, teacher: Teacher, policy: Policy) -> GradientCheck:
        settings = check_settings_of(self.config, frozenset())
        return GradientCheck(policy, updater, settings, SignalProofs(teacher=teacher.config))

    def update(
        self,
        kind: str,
        split: str,
        policy: Policy | None = None,
        spoil: Callable[[Teacher, RolloutBatch], None] = lambda teacher, batch: None,
    ) -> tuple[dict[str, Any], list[str]]:
        """What came of it, and what the running check found before."""
        policy = policy or self.policy
        tokens, method, packed = SPLITS[split]
        training = dataclasses.replace(self.config.training, max_tokens_per_micro_batch=tokens)
        config = dataclasses.replace(self.config, training=training)
        if not policy.lora.rank:
            load_weights(hf_named_parameters(policy), Path(config.model.path))
        updater, teacher = updater_of(policy, config), self.teacher(kind, policy)
        gradients: list[dict[str, Tensor]] = []
        updater.optimizer.register_step_pre_hook(
            lambda *_: gradients.append(whole_gradients(policy))
        )
        groups, sampled = (
            deal(fixed_groups(), method, self.session),
            sampled_step_of(config, self.session),
        )
        sampled.add(groups, score(groups))
        grpo_spmd.learn.balance.plan_batch = plan_batch if packed else plan_unpacked
        batch, decision = assemble_batch(sampled, self.session)
        attach_logprobs(policy, None, batch, config.loss, config.training.num_optimizer_steps)
        teacher.attach(batch, decision, self.look)
        spoil(teacher, batch)
        faulty = self.check(teacher)(sampled, batch, decision).errors
        faulty += (
            self.of_gradients(updater, teacher, policy)
            .run(groups, self.session.device, accumulates=True)
            .errors
        )
        if any_rank(bool(faulty)):
            return {}, faulty
        sums = merged_on_all(updater.update(batch))
        result = {
            name: sums[name].value for name in ("loss", "policy", "teacher/kl", "optim/grad_norm")
        }
        result |= {
            name: reduction.value for name, reduction in sums.items() if name.startswith("teacher")
        }
        result |= {"gradients": gradients, "rows": len(batch.micro_batches)}
        return result | {
            "parameters": {n: p.full_tensor().clone() for n, p in hf_named_parameters(policy)}
        }, faulty


def whole_gradients(policy: Policy) -> dict[str, Tensor]:
    named = [(name, p.grad) for name, p in policy.model.named_parameters() if p.grad is not None]
    return {name: cast(DTensor, grad).full_tensor().clone() for name, grad in named}


def clean_updates(trials: Trials) -> dict[tuple[str, str], Any]:
    actual = {}
    for kind in KINDS:
        for split in SPLITS:
            actual[kind, split], faulty = trials.update(kind, split)
            assert not faulty, (kind, split, faulty)
    for variant, changes in VARIANTS.items():
        if variant == "two replicas" and trials.session.world_size == 1:
            continue
        more = (
            {"mesh": policy_mesh(trials.session.device, 2)}
            if variant == "two replicas"
            else changes
        )
        policy = trials.build(trials.config.model.path, **more)
        for kind in ("sampled", "full"):
            actual[kind, variant], faulty = trials.update(kind, next(iter(SPLITS)), policy)
            assert not faulty, (kind, variant, faulty)
    adapted = trials.build(trials.config.model.path, lora=LoraConfig(rank=4))
    for kind in (
        "sampled",
        "full",
        LIVE,
    ):  # its own base, from which it starts, and which the first update leaves; itself
        result, faulty = trials.update(kind, next(iter(SPLITS)), adapted)
        assert not faulty, faulty
        assert (result["teacher/kl"] == 0.0) == (kind == "sampled")
        if kind == LIVE:
            actual["adapters", kind] = result
    return actual


def changed(signal: TeacherSignal, change: Callable[[Tensor], Tensor]) -> TeacherSignal:
    """With every tensor [C, ...] of what the teacher says put through `change`."""
    if signal.logprobs is not None:
        return dataclasses.replace(signal, logprobs=change(signal.logprobs))
    taught = signal.divergence
    assert isinstance(taught, TeacherDivergence)
    pieces: list[Any] = []
    for positions, message in taught.parts:
        if isinstance(message, WholeTeacher):
            pieces.append((positions, dataclasses.replace(message, hidden=change(message.hidden))))
        else:
            pieces.append((positions, TopTeacher(change(message.ids), change(message.logprobs))))
    return dataclasses.replace(signal, divergence=dataclasses.replace(taught, parts=pieces))


def faults(trials: Trials) -> int:
    """Each must be seen by the running check, on some rank at least."""
    seen, split = 0, list(SPLITS)[1]

    def sees(
        kind: str,
        message: str,
        spoil: Callable[[Teacher, RolloutBatch], None] = lambda *_: None,
        within: Any = None,
    ) -> None:
        nonlocal seen
        with within or nullcontext():
            faulty = trials.update(kind, split, spoil=spoil)[1]
        assert any_rank(any(message in text for text in faulty)), (kind, message, faulty)
        seen += 1

    def dropped(_: Teacher, batch: RolloutBatch) -> None:
        batch.micro_batches[-1].teacher_signal = None

    def of_rows(
        change: Callable[[MicroBatch, TeacherSignal], TeacherSignal],
    ) -> Callable[[Teacher, RolloutBatch], None]:
        def spoil(_: Teacher, batch: RolloutBatch) -> None:
            for row in batch.micro_batches:
                assert row.teacher_signal is not None
                row.teacher_signal = change(row, row.teacher_signal)

        return spoil

    shifted = of_rows(lambda _, signal: changed(signal, lambda x: x.roll(1, 0)))
    another = of_rows(lambda row, signal: changed(signal, lambda x: x[other_samples(row)]))
    for kind in ("sampled", "topk", "full"):
        sees(kind, "has no teacher signal", dropped)
        for spoil in (shifted, another):
            sees(kind, "a teacher's logprob of a token that the update is given", spoil)

    def of_later_rows(_: Teacher, batch: RolloutBatch) -> None:
        assert len(batch.micro_batches) > 1
        for row in batch.micro_batches[1:]:
            assert row.teacher_signal is not None
            row.teacher_signal = changed(row.teacher_signal, lambda x: x.roll(1, 0))

    for kind in ("sampled", "full"):
        sees(kind, "a teacher's logprob of a token that the update is given", of_later_rows)
    sees(
        "sampled",
        "of another kind than the config",
        of_rows(lambda _, signal: dataclasses.replace(signal, coef=0.1)),
    )

    def mixed(
        teacher: Teacher, batch: RolloutBatch
    ) -> None:  # the places of the stream of another step
        teacher._prompt_at = lambda position: fixed_groups()[(position + 1) % 6].prompt

    sees(SEVERAL, "go to another teacher, or with another prompt, than their rows say", mixed)

    def swapped(teacher: Teacher, batch: RolloutBatch) -> None:
        teacher.models = dict(zip(teacher.models, [*teacher.models.values()][::-1], strict=True))

    sees(SEVERAL, "a teacher's logprob of a token that the update is given", swapped)

    def unheard(inputs: LossInputs, options: LossConfig, *_: Any) -> Any:
        return policy_loss(inputs, options)

    twice = patch.object(
        update,
        "taught_loss",
        lambda inputs, options, signal, divergence: taught_loss(
            inputs, options, signal, 2 * divergence
        ),
    )
    sees(
        "sampled",
        "the term 'policy' of the loss",
        within=patch.object(update, "taught_loss", unheard),
    )
    sees("full", "the term 'loss' of the loss", within=patch.object(update, "taught_loss", unheard))
    sees("topk", "the term 'teacher' of the loss", within=twice)
    return seen


def other_samples(row: MicroBatch) -> Tensor:
    """TokenIndices of the row's tokens with its rollouts in the opposite order."""
    index = row.sequence_index.tolist()
    return torch.tensor(sorted(range(len(index)), key=lambda c: (-index[c], c)), dtype=torch.int64)


def long_prompts(trials: Trials) -> None:
    """Of the rollouts those with short prompts are looked at, else the shortest, else none, each
    time with as many
    passes on all ranks; a fault is seen in those that are."""
    compare, split, passes = TeacherCheck._compare, list(SPLITS)[1], list[int]()

    def counted(self: TeacherCheck, single: TeacherModel, *of: Any, **named: Any) -> Tensor:
        def note(_: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            passes.append((inputs[0] if inputs else named["input_ids"]).shape[1])

        handle = single.model.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
        try:
            return compare(self, single, *of, **named)
        finally:
            handle.remove()

    def shifted(_: Teacher, batch: RolloutBatch) -> None:
        for row in batch.micro_batches:
            assert row.teacher_signal is not None
            row.teacher_signal = changed(row.teacher_signal, lambda x: x.roll(1, 0))

    kind, num_models = SEVERAL, len(KINDS[SEVERAL].paths)  # with prompts of their own, too
    for long, too_long in ((6, 100), (0, 100), (0, 0)):
        passes.clear()
        with patch.multiple(teacher_check, _LONG=long, _TOO_LONG=too_long):
            with patch.object(TeacherCheck, "_compare", counted):
                result, faulty = trials.update(kind, split)
                assert not faulty
            num_more = min(result["rows"] - 1, 2)
            longer = [length for length in passes if length > max(long, 2)]
            assert len(passes) == (3 + num_more) * num_models, (kind, long, passes)
            assert max(passes) <= (11 if too_long else 2), (kind, long, passes)
            assert len(longer) <= (1 + num_more) * num_models, (kind, long, passes)
            # Of a later row one rollout is compared, which may be a long one.
            of_first_row = max(passes[: 3 * num_models])
            assert not long or any_rank(2 < of_first_row <= long), (kind, long, passes)
            faulty = trials.update(kind, split, spoil=shifted)[1]
            seen = any_rank(any("a teacher's logprob of a token" in text for text in faulty))
            assert seen == (too_long > 0), (kind, long, too_long, faulty)


def main() -> None:
    trials = Trials(sys.argv[1], sys.argv[2])
    result = clean_updates(trials)
    long_prompts(trials)
    if "faults" in sys.argv[4:]:
        print(f"rank {trials.session.rank}: {faults(trials)} faults seen", flush=True)
    if trials.session.is_rank0:
        torch.save(result, sys.argv[3])
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
