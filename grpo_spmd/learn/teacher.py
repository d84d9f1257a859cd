"""Teachers of the policy, models that score its own rollouts token by token before the update (on-policy distillation,
Agarwal et al. 2024). They see the rows that the policy sees, or with a prompt of their own the same completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.config.schema import TeacherConfig
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.learn.assemble import pack_rollouts, rollout_of
from grpo_spmd.learn.signals import Check
from grpo_spmd.model.divergence import Places, TaughtBy, TopTeacher, WholeTeacher, top_outcomes
from grpo_spmd.model.lora import adapters_off
from grpo_spmd.model.offload import Beside
from grpo_spmd.model.policy import Policy, Term
from grpo_spmd.model.sharding import gather_rows
from grpo_spmd.records import Decision, Lesson, MicroBatch, Prompt, RolloutBatch, Segment


@dataclass(frozen=True)
class TeacherModel:
    model: Policy
    is_base: bool = False  # the policy itself, with its adapters off
    is_own: bool = True  # a model that nobody else has

    def score(self, row: MicroBatch, term: Term | None = None) -> Any:
        """Collective. Logprobs [C] of the row's targets, or what `term` makes of hidden states and head."""
        with adapters_off(self.model.model) if self.is_base else nullcontext():
            return (self.model(row) if term is None else self.model(row, term, only_term=True))[0]


@dataclass(frozen=True)
class Ask:
    """Who teaches a prompt's rollouts, and what is shown to that teacher in place of the prompt, if anything."""

    name: str
    prompt_ids: list[int] | None = None


class Teacher:
    """The teachers of a run, as one Signal."""

    def __init__(
        self,
        config: TeacherConfig,
        models: Mapping[str, TeacherModel],
        policy: Policy,
        prompt_at: Callable[[int], Prompt] | None = None,
        ask_of: Callable[[Prompt], Ask] | None = None,
    ) -> None:
        """`prompt_at`: of a place in the prompt stream. Without `ask_of` one teacher sees what the policy sees."""
        self.config, self.models, self.policy = config, dict(models), policy
        self._prompt_at, self._ask_of = prompt_at, ask_of
        self._num_tokens: int = policy.model.get_output_embeddings().weight.shape[0]

    @property
    def beside(self) -> Sequence[Beside]:
        return [(one.model, None) for one in self.models.values() if one.is_own]

    @torch.no_grad()
    def attach(self, batch: RolloutBatch, decision: Decision, check: Check) -> Decision:
        """Collective. A lesson into every micro-batch; a forward pass of each teacher over its own rollouts."""
        asked, heads = self.asked(decision), dict[str, Tensor]()
        if self.config.loss == "full":
            heads = {
                name: _whole_head(one.model)[: self._num_tokens]
                for name, one in self.models.items()
            }
        for row in batch.micro_batches:
            parts, names = (
                list[tuple[Places | None, Tensor | WholeTeacher | TopTeacher]](),
                dict[str, Tensor](),
            )
            for name, one in self.models.items():
                check(False)
                own, places = (row, None) if asked is None else taught_row(row, asked, name)
                said = self._said(one, own, heads.get(name))
                if places is None or len(places):
                    parts.append((places, said))
                if places is not None and len(self.models) > 1:
                    names[name] = torch.zeros_like(row.loss_mask).index_fill(0, places, True)
            row.lesson = self._lesson(row, parts, names)
        cast(FSDPModule, self.policy).reshard()  # where it teaches itself
        return decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Nothing of it trains."""
        return {}

    def asked(self, decision: Decision) -> dict[int, Ask] | None:
        """Collective. By rollout id, of all ranks; None where one teacher sees what the policy sees."""
        if self._ask_of is None or self._prompt_at is None:
            return None
        of_all = decision.of_all
        positions = on_rank0(lambda _: [] if of_all is None else of_all.positions.tolist(), None)
        size = decision.num_rollouts // max(len(positions), 1)
        asks = [self.ask_of(self._prompt_at(position)) for position in positions]
        return {
            slot * size + sample: ask for slot, ask in enumerate(asks) for sample in range(size)
        }

    def ask_of(self, prompt: Prompt) -> Ask:
        return Ask("") if self._ask_of is None else self._ask_of(prompt)

    def _said(
        self, one: TeacherModel, row: MicroBatch, head: Tensor | None
    ) -> Tensor | WholeTeacher | TopTeacher:
        if self.config.loss == "sampled":
            logprobs: Tensor = one.score(row)
            return logprobs
        if head is not None:
            temperature, _, softcap = _scaling(one.model)
            return WholeTeacher(
                one.score(row, lambda hidden, _: hidden), head, temperature, softcap
            )
        temperature, chunk, softcap = _scaling(one.model)
        top = partial(
            top_outcomes, k=self.config.top_k, temperature=temperature, chunk=chunk, softcap=softcap
        )
        return TopTeacher(
            *one.score(row, lambda hidden, head: top(hidden, head[: self._num_tokens]))
        )

    def _lesson(
        self,
        row: MicroBatch,
        parts: Sequence[tuple[Places | None, Tensor | WholeTeacher | TopTeacher]],
        names: dict[str, Tensor],
    ) -> Lesson:
        coef, whole = self.config.coef, [(p, t) for p, t in parts if not isinstance(t, Tensor)]
        if self.config.loss != "sampled":
            taught_by = TaughtBy(whole, self.config.beta, _scaling(self.policy), self._num_tokens)
            return Lesson(coef, terms=(taught_by,), by_name=names)
        logprobs = torch.zeros_like(row.rollout_logprobs)
        for places, said in parts:
            assert isinstance(said, Tensor)
            logprobs = said if places is None else logprobs.index_copy(0, places, said)
        return Lesson(coef, logprobs, by_name=names)


def taught_row(row: MicroBatch, asked: Mapping[int, Ask], name: str) -> tuple[MicroBatch, Places]:
    """The rollouts of a row that the teacher `name` has, as it sees them, in their order; and the places [n] of their
    tokens among all of the row. Waits for the device. Without any a row of two tokens, and no place."""
    ids, predict, index = (
        x.cpu().numpy() for x in (row.input_ids, row.predict_index, row.sequence_index)
    )
    bounds, is_sampled = np.cumsum([0, *row.sequence_lengths]), np.zeros(len(ids), np.bool_)
    is_sampled[predict + 1] = True
    sequences = (np.searchsorted(bounds, predict, side="right") - 1).tolist()
    own = {place: asked[i] for place, i in enumerate(row.rollout_ids) if asked[i].name == name}
    segments: dict[int, list[Segment]] = {place: [] for place in own}
    for place, number in dict.fromkeys(zip(index.tolist(), sequences, strict=True)):
        if place in own:
            span = slice(bounds[number], bounds[number + 1])
            segment = Segment(ids[span].astype(np.int32), is_sampled[span])
            segments[place].append(_shown(segment, own[place].prompt_ids))
    rollouts = []
    for place, parts in segments.items():
        zeros = [0.0] * int(sum(part.sampled.sum() for part in parts))
        rollouts.append(rollout_of(row.rollout_ids[place], 0.0, True, tuple(parts), zeros))
    places = np.flatnonzero(np.isin(index, [*own]))
    device = row.input_ids.device
    return pack_rollouts(rollouts, device), torch.from_numpy(places).to(device)


def _shown(segment: Segment, prompt_ids: list[int] | None) -> Segment:
    if prompt_ids is None:
        return segment
    said = segment.token_ids[segment.sampled]
    token_ids = np.concatenate([np.array(prompt_ids, np.int32), said])
    return Segment(token_ids, np.arange(len(token_ids)) >= len(prompt_ids))


def _scaling(policy: Policy) -> tuple[float, int, float | None]:
    """How its logits become distributions: temperature, tokens of a chunk, cap."""
    return policy.temperature, policy.logprob_chunk_tokens, policy.softcap


def _whole_head(policy: Policy) -> Tensor:
    """Collective. The lm_head [V, D] of a model that is sharded, in its compute dtype."""
    weight = policy.model.get_output_embeddings().weight
    return gather_rows([(weight, weight.to_local())])[0]
