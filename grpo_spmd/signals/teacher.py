"""Teachers of the policy, models that score its own rollouts token by token before the update (on-policy distillation,
Agarwal et al. 2024). They see the rows that the policy sees, or with a prompt of their own the same completions."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from grpo_spmd.checks.signals import check_vocabulary, teacher_data
from grpo_spmd.config.schema import Config, TeacherConfig
from grpo_spmd.data.rows import read_rows
from grpo_spmd.data.tokens import build_prompts
from grpo_spmd.distributed.collectives import on_rank0
from grpo_spmd.distributed.reductions import Reductions
from grpo_spmd.distributed.session import Session
from grpo_spmd.learn.assemble import episode_rollout, pack_rollouts
from grpo_spmd.learn.sampled_step import SampledStep
from grpo_spmd.learn.update import StopCheck
from grpo_spmd.model.divergence import (
    TeacherDivergence,
    TokenIndices,
    TopTeacher,
    WholeTeacher,
    top_outcomes,
)
from grpo_spmd.model.lora import adapters_off
from grpo_spmd.model.offload import OffloadableModel
from grpo_spmd.model.policy import DTYPES, Policy, Term, build_policy
from grpo_spmd.model.sharding import gather_rows
from grpo_spmd.proofs.gradient_check import CheckResult, eager_attention
from grpo_spmd.proofs.update_check import SignalProofs, UpdateCheckSettings, adapters_at_zero
from grpo_spmd.records import Decision, MicroBatch, Prompt, RolloutBatch, Segment, TeacherSignal


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
    def offloadable_models(self) -> Sequence[OffloadableModel]:
        return [(one.model, None) for one in self.models.values() if one.is_own]

    @torch.no_grad()
    def attach(self, batch: RolloutBatch, decision: Decision, stop_check: StopCheck) -> Decision:
        """Collective. A teacher_signal into every micro-batch; a forward pass of each teacher over its own rollouts."""
        asked, heads = self.asked(decision), dict[str, Tensor]()
        if self.config.loss == "full":
            heads = {
                name: _whole_head(one.model)[: self._num_tokens]
                for name, one in self.models.items()
            }
        for row in batch.micro_batches:
            parts, names = (
                list[tuple[TokenIndices | None, Tensor | WholeTeacher | TopTeacher]](),
                dict[str, Tensor](),
            )
            for name, one in self.models.items():
                stop_check(False)
                own, places = (row, None) if asked is None else taught_row(row, asked, name)
                said = self._said(one, own, heads.get(name))
                if places is None or len(places):
                    parts.append((places, said))
                if places is not None and len(self.models) > 1:
                    names[name] = torch.zeros_like(row.loss_mask).index_fill(0, places, True)
            row.teacher_signal = self._teacher_signal(row, parts, names)
        cast(FSDPModule, self.policy).reshard()  # where it teaches itself
        return decision

    def update(self, batch: RolloutBatch) -> Reductions:
        """Nothing of it trains."""
        return {}

    def proofs(self, settings: UpdateCheckSettings) -> SignalProofs:
        check = TeacherCheck(self, settings.rollout.temperature, settings.dtype)
        return SignalProofs([check], self._synthetic(settings))

    def _synthetic(self, settings: UpdateCheckSettings) -> Callable[[], RandomTeacher]:
        return partial(
            RandomTeacher, self.config, self.policy, settings.rollout.temperature, settings.dtype
        )

    def asked(self, decision: Decision) -> dict[int, Ask] | None:
        """Collective. By rollout id, of all ranks; None where one teacher sees what the policy sees."""
        if self._ask_of is None or self._prompt_at is None:
            return None
        of_all = decision.rank0_decision
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

    def _teacher_signal(
        self,
        row: MicroBatch,
        parts: Sequence[tuple[TokenIndices | None, Tensor | WholeTeacher | TopTeacher]],
        names: dict[str, Tensor],
    ) -> TeacherSignal:
        coef, whole = self.config.coef, [(p, t) for p, t in parts if not isinstance(t, Tensor)]
        if self.config.loss != "sampled":
            taught_by = TeacherDivergence(
                whole, self.config.beta, _scaling(self.policy), self._num_tokens
            )
            return TeacherSignal(coef, divergence=taught_by, masks_by_teacher=names)
        logprobs = torch.zeros_like(row.rollout_logprobs)
        for places, said in parts:
            assert isinstance(said, Tensor)
            logprobs = said if places is None else logprobs.index_copy(0, places, said)
        return TeacherSignal(coef, logprobs, masks_by_teacher=names)


def taught_row(
    row: MicroBatch, asked: Mapping[int, Ask], name: str
) -> tuple[MicroBatch, TokenIndices]:
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
        rollouts.append(episode_rollout(row.rollout_ids[place], 0.0, True, tuple(parts), zeros))
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
    ) -> CheckResult:
        """Collective. Looks at this rank's first row."""
        found, asked = CheckResult(), self._teacher.asked(decision)
        if asked is not None:
            self._check_asked(found, sampled, decision, asked)
        is_sampled, coef = self._teacher.config.loss == "sampled", self._teacher.config.coef
        for signal in (row.teacher_signal for row in batch.micro_batches):
            if signal is None or signal.coef != coef or (signal.logprobs is None) == is_sampled:
                found.errors.append(
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
            found.check_difference(what, "teacher", float(all_of.mean()), self._bound)
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
            eager_attention(one.model.model),
            adapters_at_zero(one.model) if one.is_base else nullcontext(),
        ):
            logits: Tensor = one.model.plain_logits(ids[None], where)[0].float() / self._temperature
        return logits

    def _check_asked(
        self, found: CheckResult, sampled: SampledStep, decision: Decision, asked: Mapping[int, Ask]
    ) -> None:
        """Collective. Who sampled a group has its row."""
        own = [(g, decision.slots.get(g.prompt.position)) for g in sampled.groups]
        told = [
            [slot, _name(self._teacher.ask_of(g.prompt))] for g, slot in own if slot is not None
        ]
        of_slots = dict(on_rank0(lambda parts: [pair for part in parts for pair in part], told))
        size = sampled.rules.rollout.group_size
        if wrong := [i for i, ask in asked.items() if of_slots.get(i // size) != _name(ask)]:
            found.errors.append(
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
        if tokens is None or row.teacher_signal is None or logits is None:
            return torch.zeros(0, dtype=torch.float64)
        self._bound = max(self._bound, float(logits.abs().amax(-1).mean()) * self._rounding)
        return (
            _differences(row.teacher_signal, logits, tokens, row.target_ids[tokens]).double().cpu()
        )


def _pass_lengths(row: MicroBatch, asked: Mapping[int, Ask] | None) -> list[int]:
    """Tokens of a pass to each rollout's first token, with the prompt that its teacher is shown."""
    first = dict[int, int]()
    for place, position in zip(
        row.sequence_index.tolist(), row.position_ids[row.predict_index].tolist(), strict=True
    ):
        first.setdefault(place, position + 2)
    shown = [None if asked is None else asked[i].prompt_ids for i in row.rollout_ids]
    return [first.get(p, 2) if ids is None else len(ids) + 1 for p, ids in enumerate(shown)]


def _differences(signal: TeacherSignal, logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    """[n] Of the logprobs of `targets`, or of all outcomes by their probability; `logits` [n, V] are plain."""
    if signal.logprobs is not None:
        return (
            signal.logprobs[tokens] - logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        ).abs()
    taught = signal.divergence
    assert isinstance(taught, TeacherDivergence)
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


_WIDTH = 8  # of its hidden states


class RandomTeacher:
    """Says of each sampled token what it is told to, or has a distribution of its own, drawn from a fixed seed."""

    def __init__(
        self, config: TeacherConfig, policy: Policy, temperature: float, dtype: str
    ) -> None:
        self._config, self._temperature, self._dtype = config, temperature, DTYPES[dtype]
        self.coef, self._draw = config.coef, torch.Generator().manual_seed(0)
        self._scaling = policy.temperature, policy.logprob_chunk_tokens, policy.softcap
        self._head = self._drawn(policy.model.get_output_embeddings().weight.shape[0])
        self._log_p: list[Tensor] = []  # of rows with a rollout
        self._ids: list[Tensor] = []

    @property
    def is_sampled(self) -> bool:
        return self._config.loss == "sampled"

    def teach(self, row: MicroBatch) -> None:
        if self.is_sampled:
            row.teacher_signal = TeacherSignal(self.coef, torch.zeros_like(row.rollout_logprobs))
            return
        hidden, head = (
            self._drawn(len(row.target_ids)).to(row.input_ids.device),
            self._head.to(row.input_ids.device),
        )
        said: WholeTeacher | TopTeacher = WholeTeacher(hidden, head, self._temperature, None)
        if self._config.loss == "topk":
            said = TopTeacher(
                *top_outcomes(hidden, head, self._config.top_k, *self._scaling_of_own())
            )
        row.teacher_signal = TeacherSignal(
            self.coef,
            divergence=TeacherDivergence(
                [(None, said)], self._config.beta, self._scaling, len(head)
            ),
        )
        if row.rollout_ids:
            self._log_p.append((hidden @ head.T).double().div(self._temperature).log_softmax(-1))
            self._ids += [said.ids] if isinstance(said, TopTeacher) else []

    def divergence(self, log_p: Tensor) -> Tensor:
        """[n] float64, of the policy's logprobs [n, V] of all rows' tokens, by the formula and autograd alone."""
        s, t, beta = (
            log_p.double(),
            torch.cat([log_p[:0].double(), *self._log_p]),
            self._config.beta,
        )
        if self._ids:
            ids = torch.cat(self._ids)
            s, t = (torch.cat([x.gather(-1, ids), _of_others(x, ids)], -1) for x in (s, t))
        if beta == 0.0:
            return (t.exp() * (t - s)).sum(-1)
        if beta == 1.0:
            return (s.exp() * (s - t)).sum(-1)
        m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
        return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)

    def _scaling_of_own(self) -> tuple[float, int, None]:
        return self._temperature, self._scaling[1], None

    def _drawn(self, rows: int) -> Tensor:
        return torch.randn(rows, _WIDTH, generator=self._draw).to(self._dtype)


def _of_others(log_p: Tensor, ids: Tensor) -> Tensor:
    return log_p.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)


def open_model_teacher(
    config: Config,
    policy: Policy,
    session: Session,
    reference: object,
    prompt_at: Callable[[int], Prompt] | None,
    tokenizer: Any,
) -> Teacher:
    """Collective. Builds the teachers of teacher.path. A teacher that is the model the run starts from shares it with
    the reference, or with the policy's base under LoRA."""
    models: dict[str, TeacherModel] = {}
    for name, path in config.teacher.paths.items():
        is_start = path == config.model.path
        if is_start and policy.lora.rank:
            models[name] = TeacherModel(policy, is_base=True, is_own=False)
        elif is_start and isinstance(reference, Policy):
            models[name] = TeacherModel(reference, is_own=False)
        else:
            model = build_policy(
                dataclasses.replace(config.model, path=path),
                config.rollout.temperature,
                session,
                trainable=False,
                longest=policy.longest,
                role=f"teacher {name}".strip(),
            )
            models[name] = TeacherModel(model)
            key = f"teacher.path.{name}" if name else "teacher.path"
            check_vocabulary(config.model.path, path, key)
    return Teacher(config.teacher, models, policy, prompt_at, teacher_requests(config, tokenizer))


def teacher_requests(config: Config, tokenizer: Any) -> Callable[[Prompt], Ask] | None:
    """Returns the function that tells which teacher scores a prompt's rollouts, and which prompt that teacher sees.
    None if one teacher sees what the policy sees."""
    has_one = "" in config.teacher.names
    if has_one and config.teacher.prompt_key is None:
        return None
    data = teacher_data(config)
    teacher_prompts = None if data is None else build_prompts(read_rows(data), tokenizer, data, 1)

    def ask_of(prompt: Prompt) -> Ask:
        name = "" if has_one else str(prompt.columns["teacher"])
        return Ask(name, None if teacher_prompts is None else teacher_prompts[prompt.row].token_ids)

    return ask_of
