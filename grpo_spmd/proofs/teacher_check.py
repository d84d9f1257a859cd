"""The running check of the teachers: what the update is given of each token beside a plain forward pass of the teacher
over that rollout alone, with the prompt and the teacher that the rank which sampled it says are its own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.teacher import Ask, Teacher, TeacherModel
from grpo_spmd.model.divergence import TaughtBy
from grpo_spmd.model.policy import DTYPES
from grpo_spmd.proofs.gradient_check import Found, plain_layers
from grpo_spmd.proofs.update_check import adapters_at_zero
from grpo_spmd.records import Decision, Lesson, MicroBatch, RolloutBatch

_NUM_ROLLOUTS, _NUM_TOKENS = 3, 12  # of each teacher on a rank, at most, and of the tokens of one
# Tokens of a plain pass, whose attention takes memory by their square: of prompts that are all longer only the shortest
# is looked at, of longer ones still none.
_LONG, _TOO_LONG = 2048, 8192
_BOUNDS = {
    "float32": 1e-4,
    "bfloat16": 0.05,
}  # nats a token on average, as of the policy's own logprobs


class TeacherCheck:
    def __init__(self, teacher: Teacher, temperature: float, dtype: str) -> None:
        """`temperature`: what the engine samples at."""
        self._teacher, self._temperature = teacher, temperature
        self._bound, self._rounding = _BOUNDS[dtype], torch.finfo(DTYPES[dtype]).eps / 2

    @torch.no_grad()
    def __call__(
        self, sampled: SampledStep, batch: RolloutBatch, decision: Decision, *_: object
    ) -> Found:
        """Collective. Looks at this rank's first row."""
        found, asked = Found(), self._teacher.asked(decision)
        if asked is not None:
            self._check_asked(found, sampled, decision, asked)
        is_sampled, coef = self._teacher.config.loss == "sampled", self._teacher.config.coef
        for lesson in (row.lesson for row in batch.micro_batches):
            if lesson is None or lesson.coef != coef or (lesson.logprobs is None) == is_sampled:
                found.wrong.append(
                    "a micro-batch lacks what its teacher says of it, or has it in another form"
                )
                break
        row, differences = batch.micro_batches[0], [torch.zeros(0, dtype=torch.float64)]
        lengths = _pass_lengths(row, asked)
        for name, one in self._sources().items():
            own = [
                p for p, i in enumerate(row.rollout_ids) if asked is None or asked[i].name == name
            ]
            own = [
                p for p in own if lengths[p] <= _TOO_LONG and self._was_taught(row.rollout_ids[p])
            ]
            own = sorted(own, key=lengths.__getitem__)
            own = [p for p in own if lengths[p] <= _LONG] or own[:1]
            for number in range(_NUM_ROLLOUTS):  # as many passes on each rank
                place = (
                    own[number * max(len(own) // _NUM_ROLLOUTS, 1)] if number < len(own) else None
                )
                most = 0 if place is None else max(_LONG - lengths[place], 0)
                differences.append(self._compare(one, row, place, asked, most))
        if len(all_of := torch.cat(differences)):
            what = "a teacher's logprob of a token that the update is given, in nats on average,"
            found.within(what, "teacher", float(all_of.mean()), self._bound)
        cast(FSDPModule, self._teacher.policy).reshard()
        return found

    def _sources(self) -> Mapping[str, Any]:
        """What is asked again, by the names of the teachers."""
        return self._teacher.models

    def _was_taught(self, rollout_id: int) -> bool:
        return True

    def _logits(self, source: Any, ids: Tensor, where: Tensor) -> Tensor | None:
        """Collective. [n, V] at the places [n] of the ids [T], or what has their softmax; None: nothing was said."""
        one: TeacherModel = source
        with (
            plain_layers(one.model.model),
            adapters_at_zero(one.model) if one.is_base else nullcontext(),
        ):
            logits: Tensor = one.model.plain_logits(ids[None], where)[0].float() / self._temperature
        return logits

    def _check_asked(
        self, found: Found, sampled: SampledStep, decision: Decision, asked: Mapping[int, Ask]
    ) -> None:
        """Collective. Who sampled a group has its row."""
        own = [(g, decision.slots.get(g.prompt.position)) for g in sampled.groups]
        told = [
            [slot, _name(self._teacher.ask_of(g.prompt))] for g, slot in own if slot is not None
        ]
        of_slots = dict(on_rank0(lambda parts: [pair for part in parts for pair in part], told))
        size = sampled.rules.rollout.group_size
        if wrong := [i for i, ask in asked.items() if of_slots.get(i // size) != _name(ask)]:
            found.wrong.append(
                f"rollouts {wrong[:5]} go to another teacher, or with another prompt, than their rows say"
            )

    def _compare(
        self,
        source: Any,
        row: MicroBatch,
        place: int | None,
        asked: Mapping[int, Ask] | None,
        most: int,
    ) -> Tensor:
        """Collective. |difference| at some tokens of the first context of a rollout, nats, `most` behind the first;
        none of no rollout."""
        ids, where, tokens = (
            row.input_ids[:2],
            torch.zeros(1, dtype=torch.int64, device=row.input_ids.device),
            None,
        )
        if place is not None:
            starts = torch.nonzero(row.position_ids == 0)[:, 0]
            own = torch.nonzero(row.sequence_index == place)[:, 0]
            start = int(starts[starts <= row.predict_index[own[0]]].max())
            behind = starts[starts > start]
            end = int(behind.min()) if len(behind) else len(row.input_ids)
            tokens = own[
                row.predict_index[own] < min(end, int(row.predict_index[own[0]]) + most + 1)
            ][:_NUM_TOKENS]
            where = row.predict_index[tokens] - start
            ids = row.input_ids[start : start + int(where[-1]) + 2]
            prompt = None if asked is None else asked[row.rollout_ids[place]].prompt_ids
            if prompt is not None:
                ids = torch.cat([ids.new_tensor(prompt), ids[int(where[0]) + 1 :]])
                where = where - where[0] + len(prompt) - 1
        logits = self._logits(source, ids, where)
        if tokens is None or row.lesson is None or logits is None:
            return torch.zeros(0, dtype=torch.float64)
        self._bound = max(self._bound, float(logits.abs().amax(-1).mean()) * self._rounding)
        return _differences(row.lesson, logits, tokens, row.target_ids[tokens]).double().cpu()


def _pass_lengths(row: MicroBatch, asked: Mapping[int, Ask] | None) -> list[int]:
    """Tokens of a pass to each rollout's first token, with the prompt that its teacher is shown."""
    first = dict[int, int]()
    for place, position in zip(
        row.sequence_index.tolist(), row.position_ids[row.predict_index].tolist(), strict=True
    ):
        first.setdefault(place, position + 2)
    shown = [None if asked is None else asked[i].prompt_ids for i in row.rollout_ids]
    return [first.get(p, 2) if ids is None else len(ids) + 1 for p, ids in enumerate(shown)]


def _differences(lesson: Lesson, logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """[n] Of the logprobs of `targets`, or of all outcomes by their probability; `logits` [n, V] are plain."""
    if lesson.logprobs is not None:
        return (
            lesson.logprobs[tokens] - logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ).abs()
    (taught,) = lesson.terms
    assert isinstance(taught, TaughtBy)
    found = []
    for number, token in enumerate(tokens.tolist()):
        for places, teacher in taught.parts:
            own = [token] if places is None else torch.nonzero(places == token)[:, 0].tolist()
            for place in own:
                part, num_tokens = slice(place, place + 1), taught.num_tokens
                plain = teacher.outcomes(
                    logits[number : number + 1, :num_tokens].log_softmax(-1), part
                )
                found.append((plain.exp() * (plain - teacher.logprobs_of(part)).abs()).sum())
    return torch.stack(found) if found else torch.full((1,), torch.inf)


def _name(ask: Ask) -> int:
    return zlib.crc32(repr((ask.name, ask.prompt_ids)).encode())
