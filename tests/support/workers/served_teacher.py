"""Worker: updates with teachers behind servers beside those with the same teachers here, and what
the running check says of clean ones and of planted faults.

    python -m tests.support.workers.served_teacher CONFIG TEACHER URL URL URL OUT.pt [plain]
The servers are of the teacher, of the policy, and one that says nothing of some rollouts.
Rank 0 saves {(kind, split): ...}, and {("path", kind): ...} with models in the servers' place;
plain: no more than one split of "sampled" and "topk", and no faults.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from contextlib import suppress
from typing import Any, cast
from unittest.mock import patch

import torch

from grpo_spmd.config.schema import TeacherConfig
from grpo_spmd.distributed.collectives import any_rank
from grpo_spmd.distributed.doctor import exit_with_outcome
from grpo_spmd.distributed.session import end_session
from grpo_spmd.model.policy import Policy
from grpo_spmd.records import RolloutBatch
from grpo_spmd.rewards.client import PromptLogprobs
from grpo_spmd.signals import served_teacher
from grpo_spmd.signals.served_teacher import ServedTeacher, ServerCheck
from grpo_spmd.signals.teacher import Teacher, TeacherCheck, TeacherModel
from tests.support.learn import check_settings_of
from tests.support.workers.teacher import Trials, changed, other_samples, request_for
from tests.support.workers.update import GROUP_SIZE, SPLITS, fixed_groups

LIMITS: dict[str, Any] = {"timeout_s": 30.0, "max_concurrent": 5, "retries": 1}
KINDS: dict[str, TeacherConfig] = {
    "sampled": TeacherConfig(url="x", coef=0.7, **LIMITS),
    "topk": TeacherConfig(url="x", loss="topk", beta=0.3, top_k=7, **LIMITS),
    "two, prompts of their own": TeacherConfig(
        url={"a": "x", "b": "y"}, loss="topk", top_k=7, **LIMITS
    ),
}
SEVERAL = "two, prompts of their own"
UNANSWERED = (1, 6, 13)  # rollouts that the server of "some unanswered" never says anything of
SOME = "some unanswered"


def tokens_of(rollout_id: int) -> list[int]:
    group = fixed_groups()[rollout_id // GROUP_SIZE]
    return group.prompt.token_ids + group.completions[rollout_id % GROUP_SIZE].token_ids


class ServedTrials(Trials):
    is_here = False  # whether the models themselves teach

    def __init__(self, path: str, teacher: str, urls: list[str]) -> None:
        super().__init__(path, teacher)
        self.urls = dict(zip(("a", "b", "silent"), urls, strict=True))

    def teacher(self, kind: str, policy: Policy) -> Teacher:
        config = KINDS[kind.removesuffix(SOME).removesuffix(", ")]
        names = {"a": "a", "b": "b"} if kind == SEVERAL else {"": "a"}
        asks: tuple[Any, ...] = (
            [group.prompt for group in fixed_groups()].__getitem__,
            request_for,
        )
        asks = asks if kind == SEVERAL else (None, None)
        if self.is_here:
            local = {name: TeacherModel(self.models[model]) for name, model in names.items()}
            return Teacher(config, local, policy, *asks)
        names = {"": "silent"} if kind.endswith(SOME) else names
        servers = {
            name: PromptLogprobs(self.urls[model], {}, "tiny") for name, model in names.items()
        }
        ranks = self.session.rank, self.session.world_size
        return ServedTeacher(config, servers, policy, *asks, ranks=ranks, max_error_frac=0.5)

    def check(self, teacher: Teacher) -> TeacherCheck:
        if self.is_here:
            return super().check(teacher)
        settings = check_settings_of(self.config, frozenset())
        return ServerCheck(cast(ServedTeacher, teacher), settings)


def clean_updates(trials: ServedTrials, *, plain: bool) -> dict[tuple[str, str], Any]:
    result, kinds = (
        {},
        ["sampled", "topk"] if plain else [*KINDS, f"sampled, {SOME}", f"topk, {SOME}"],
    )
    for kind in kinds:
        splits = [*SPLITS][:1] if plain else [*SPLITS][1:2] if kind.endswith(SOME) else [*SPLITS]
        for split in splits:
            result[kind, split], faulty = trials.update(kind, split)
            assert not faulty, (kind, split, faulty)
    trials.is_here = True
    for kind in kinds:
        if not kind.endswith(SOME):
            result["path", kind], faulty = trials.update(kind, next(iter(SPLITS)))
            assert not faulty, (kind, faulty)
    trials.is_here = False
    return result


def faults(trials: ServedTrials) -> int:
    """Each must be seen by the running check, on some rank at least."""
    seen, split = 0, list(SPLITS)[1]

    def sees(kind: str, message: str, change: Any) -> None:
        """`change`: of (row, signal), or of the teacher and its batch."""
        nonlocal seen

        def spoil(teacher: Teacher, batch: RolloutBatch) -> None:
            if change is swapped:
                swapped(cast(ServedTeacher, teacher))
                return
            for row in batch.micro_batches:
                row.teacher_signal = change(row, row.teacher_signal)

        faulty = trials.update(kind, split, spoil=spoil)[1]
        assert any_rank(any(message in text for text in faulty)), (kind, message, faulty)
        seen += 1

    def swapped(teacher: ServedTeacher) -> None:
        teacher.servers = dict(zip(teacher.servers, [*teacher.servers.values()][::-1], strict=True))

    def zero(_: Any, signal: Any) -> Any:  # no answer is taken for a logprob of 0
        return dataclasses.replace(signal, answered_mask=None)

    def unheard(row: Any, signal: Any) -> Any:
        return dataclasses.replace(signal, answered_mask=torch.zeros_like(row.loss_mask))

    off, who = (
        "a teacher's logprob of a token that the update is given",
        "a rollout without an answer of its teacher",
    )
    for kind in ("sampled", "topk"):
        sees(kind, "has no teacher signal", lambda *_: None)
        sees(kind, off, lambda _, signal: changed(signal, lambda x: x.roll(1, 0)))
        sees(kind, off, lambda row, signal: changed(signal, lambda x: x[other_samples(row)]))
        sees(f"{kind}, {SOME}", who, zero)
        sees(kind, who, unheard)
    sees(SEVERAL, off, swapped)
    contexts = served_teacher.teacher_contexts

    def earlier(*args: Any) -> Any:  # what is said of the token before
        return [
            dataclasses.replace(question, sampled_at=question.sampled_at.clip(2) - 1)
            for question in contexts(*args)
        ]

    with patch.object(served_teacher, "teacher_contexts", earlier):
        sees("sampled", off, lambda _, signal: signal)
    return seen


class _StopError(Exception):
    pass


def stops(trials: ServedTrials) -> None:
    """While a server hangs the ranks look whether they have to stop, all alike, and wait for nobody
    who was asked."""
    looks: list[bool] = []

    def look(changes_policy: bool) -> None:
        looks.append(changes_policy)
        if len(looks) == 3:
            raise _StopError

    trials.look = look
    with (
        patch.object(PromptLogprobs, "ask", lambda *_: threading.Event().wait(20.0)),
        suppress(_StopError),
    ):
        trials.update("sampled", next(iter(SPLITS)))
    assert looks == [False] * 3, looks


def main() -> None:
    config, teacher, *urls, out = [item for item in sys.argv[1:] if item != "plain"]
    trials, is_plain = ServedTrials(config, teacher, urls), "plain" in sys.argv
    result = clean_updates(trials, plain=is_plain)
    if not is_plain:
        print(f"rank {trials.session.rank}: {faults(trials)} faults seen", flush=True)
        stops(trials)
    if trials.session.is_rank0:
        torch.save(result, out)
    end_session()


if __name__ == "__main__":
    with exit_with_outcome():
        main()
