"""The running check of teachers behind servers: some rollouts are asked of once more, each alone and cut where the
check ends, and what the update was given of them is held against that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.served_teacher import ServedTeacher, rest_of
from grpo_spmd.model.divergence import TaughtBy
from grpo_spmd.proofs.gradient_check import Found
from grpo_spmd.proofs.teacher_check import TeacherCheck
from grpo_spmd.records import Decision, MicroBatch, RolloutBatch
from grpo_spmd.rewards.remote.client import PromptLogprobs
from grpo_spmd.rewards.trl import FailedCallError

_BOUND = 0.1  # nats on average: nobody here knows the server's number format, or with whom it batches a request
_MOST_S = 30.0


class ServerCheck(TeacherCheck):
    def __init__(self, teacher: ServedTeacher) -> None:
        super().__init__(teacher, 1.0, "float32")
        self._served, self._bound, self._rounding = teacher, _BOUND, 0.0

    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> Found:
        """Collective. As TeacherCheck's, and who is taught."""
        found = super().__call__(sampled, batch, decision)
        if not all(
            _says_who_is_taught(row, self._served.unanswered) for row in batch.micro_batches
        ):
            found.wrong.append(
                "a rollout without an answer of its teacher's server is taught, or one that has it is not"
            )
        return found

    def _sources(self) -> Mapping[str, Any]:
        return self._served.servers

    def _was_taught(self, rollout_id: int) -> bool:
        return rollout_id not in self._served.unanswered

    def _logits(self, source: Any, ids: Tensor, where: Tensor) -> Tensor | None:
        """As TeacherCheck's. Not collective."""
        server: PromptLogprobs = source
        if not where.any():  # no rollout
            return None
        asked, num_tokens = (
            ids.tolist(),
            self._served.policy.model.get_output_embeddings().weight.shape[0],
        )
        try:
            said = server.ask(
                asked, self._served.top_k, min(self._served.config.timeout_s, _MOST_S)
            )
        except FailedCallError:
            return None
        logits = torch.empty(len(where), num_tokens)
        for number, place in enumerate(where.tolist()):
            known = {**dict(said[place].likeliest), asked[place + 1]: said[place].logprob}
            # What is not known of the others is as good as any: only what they have together is compared.
            others = max(num_tokens - len(known), 1)
            rest = rest_of([*known.values()], num_tokens)
            logits[number] = rest - torch.tensor(float(others)).log()
            logits[number, list(known)] = torch.tensor(list(known.values()))
        return logits.to(ids.device)


def _says_who_is_taught(row: MicroBatch, unanswered: set[int]) -> bool:
    """Whether what is attached to the tokens says that those of these rollouts, and no others, are taught nothing."""
    lesson, silent = (
        row.lesson,
        [place for place, i in enumerate(row.rollout_ids) if i in unanswered],
    )
    if lesson is None or not row.rollout_ids:
        return True
    taught = ~torch.isin(row.sequence_index, row.sequence_index.new_tensor(silent))
    said = [torch.ones_like(taught) if lesson.answered is None else lesson.answered]
    for term in lesson.terms:
        assert isinstance(term, TaughtBy)
        of_term = torch.zeros_like(taught)
        for places, _ in term.parts:
            of_term[slice(None) if places is None else places] = True
        said.append(of_term)
    return all(bool((each == taught).all()) for each in said)
